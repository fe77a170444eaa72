"""The README's commands and code, and those of the tour that goes on from it, as they stand there."""

import os
import re
import shlex
import sys

import psutil
import pytest

from .helpers import ROOT, code_blocks, look_like_root, read_json, succeed, takes_minutes
from .vllm_server import requires_vllm, wait_until_gone


README = (ROOT / "README.md").read_text()
BOTH = README + (ROOT / "docs" / "tour.md").read_text()
# Appended to each command, so that it ends soon.
SMALL = shlex.split("--eval_size 8 --per_device_eval_batch_size 8 --per_device_train_batch_size 8 --save_steps 1")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory that looks like the project's root, with what a reader would bring."""
    folder = tmp_path_factory.mktemp("readme")
    look_like_root(folder)
    rows = [f'{{"question": "What is {n} + {n}?", "answer": "It is twice {n}.\\n#### {2 * n}"}}' for n in range(40)]
    (folder / "problems.jsonl").write_text("\n".join(rows))
    (folder / "my_rewards.py").write_text(
        "def brevity(completions, **kwargs):\n    return [-len(c[-1]['content']) / 100 for c in completions]\n"
    )
    return folder


# Each in a block of its own.
COMMANDS = [
    shlex.split(block.replace("\\\n", " "))
    for block in code_blocks(BOTH, "bash")
    if re.search(r"accelerate launch|dc-trl train", block)
]
OUTPUTS = {"model.safetensors", "run.png", "history.jsonl", "summary.json", "deployment"}


def the_command(name):
    """The one command of both that is this sub-command, or its script."""
    blocks_of = (
        shlex.split(block.replace("\\\n", " ")) for block in code_blocks(BOTH, "bash") if f"dc-trl {name}" in block
    )
    (command,) = blocks_of
    return command


def needs_vllm(command):
    return any("vllm" in word for word in command)


def run(command, folder):
    if command[0] == "dc-trl":  # which an editable install of before it had does not have
        command = [sys.executable, "-m", "dc_trl", *command[1:]]
    binaries = os.path.dirname(sys.executable)
    environment = os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"}
    return succeed(command, cwd=folder, env=environment, timeout=1200).stdout


@takes_minutes
def test_commands(workplace):
    assert len(COMMANDS) == 6
    for number, command in enumerate(command for command in COMMANDS if not needs_vllm(command)):
        steps = ["--max_steps", str(number + 1)]  # the second continues the first
        assert "training seconds" in run([*command, *SMALL, *steps], workplace)
    for name in ("quickstart", "problems", "brevity", "two-processes"):
        assert {*os.listdir(workplace / "runs" / name)} >= OUTPUTS
    run(the_command("report"), workplace)
    page = (workplace / "runs" / "report.html").read_text()
    assert "quickstart" in page
    assert page.count("<figure") > 3


@takes_minutes
@requires_vllm
def test_the_command_that_starts_a_vllm_server(workplace):
    (command,) = filter(needs_vllm, COMMANDS)
    output = run([*command, *SMALL, "--max_steps", "2"], workplace)
    assert "vLLM is up at http://127.0.0.1:" in output
    assert "training seconds" in output
    folder = workplace / "runs" / "quickstart-vllm"
    assert {*os.listdir(folder)} >= OUTPUTS
    assert "quantization_config" in read_json(folder / "deployment" / "config.json")
    # Its processes begin in its directory, and others may serve beside this test.
    wait_until_gone([one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(workplace)], timeout=20)


@takes_minutes
@requires_vllm
def test_the_evaluation(workplace):
    output = run([*the_command("evaluate"), "--limit", "32"], workplace)
    assert "arithmetic avg@4" in output
    assert "second is" in output
    assert {*os.listdir(workplace / "runs" / "evaluation")} == {"bf16", "fp8"}


@takes_minutes
@requires_vllm
def test_the_calibration(workplace):
    output = run([*the_command("calibrate"), "--prompts", "16", "--samples", "2"], workplace)
    assert "proposed ε" in output
    assert (workplace / "runs" / "calibration" / "calibration.json").is_file()


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (ROOT / "runs" / "real_model").exists(), reason="make real-model makes the model")
def test_code(workplace):
    (example,) = code_blocks(BOTH, "python")
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in example
    example = example.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(ROOT / "runs" / "real_model"))
    assert "discrepancy/mean" in run([sys.executable, "-c", example], workplace)
    assert (workplace / "runs" / "example" / "deployment" / "model.safetensors").is_file()


def test_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make (?:[A-Z]+=\S* )*([a-z-]+)", BOTH, re.MULTILINE))
    assert {"quickstart", "quickstart-vllm", "test", "install"} <= targets
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
