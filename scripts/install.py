"""Makes the virtual environment that the Makefile uses, from the pinned constraints. Standard library only.

PyTorch is the one package whose default build is wrong for most machines without a GPU: gigabytes of CUDA. A CPU build
that is there already, in the environment or in the Python that makes it, is kept unless it is too old.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
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
    without_gpu = platform.system() == "Linux" and shutil.which("nvidia-smi") is None
    if without_gpu:
        # Where pip looks anyway, then PyTorch's own index of CPU builds.
        for source in ([f"{requirement}+cpu"], [requirement, "--index-url", CPU_INDEX]):
            if pip(python, *source, check=False):
                return
    pip(python, requirement)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="dev", help="extras of dc_trl, separated by commas")
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (this is where a user learns of it)
        sys.exit(f"error: Python {platform.python_version()} is too old, 3.11 is needed: make PYTHON=python3.11 …")

    python = args.venv / "bin" / "python"
    if not python.exists():
        version, gpu_runtime = installed_torch(sys.executable)
        shared = ["--system-site-packages"] if version and not gpu_runtime else []
        subprocess.run([sys.executable, "-m", "venv", *shared, str(args.venv)], check=True)
    pins = CONSTRAINTS.read_text().splitlines()
    pinned = next(pin for pin in pins if pin.startswith("torch=="))
    version, gpu_runtime = installed_torch(python)
    if version is None or major_minor(version) < major_minor(pinned):
        install_torch(python, pinned)
        version, gpu_runtime = installed_torch(python)
    if version and not gpu_runtime:
        pins[pins.index(pinned)] = f"torch=={version}"
    constraints = args.venv / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    pip(python, "--constraint", str(constraints), "--editable", f"{ROOT}[{args.extras}]")


if __name__ == "__main__":
    main()
