"""TRL's own tests of its GRPO trainer, with ours in its place; they come from a checkout that `TRL_TESTS` names.

    TRL_TESTS=../trl make test-all ARGS=tests/test_trl_suite.py

What passes with TRL's trainer has to pass with ours. Tests that do not pass with TRL's own are no measure: the
checkout may be of another version, and some need what lies on the Hub (`tests/trl_plugin.py` says what stands in).
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from .helpers import ROOT


TESTS = Path("tests", "test_grpo_trainer.py")
# Tests that pass with TRL's trainer and cannot with ours, with the reason.
NOT_OURS = {"TestGRPORolloutDispatch": "makes a trainer by object.__new__, without its constructor"}
# Names of tests that nothing here can run, left out to save their time: they fail with both trainers.
NOT_HERE = {
    "VLM": "images and the processors of vision models are on the Hub",
    "Nemotron": "the model's own kernels need a GPU",
    "trust_remote_code": "the model's code is on the Hub",
    **dict.fromkeys(
        ["with_tools", "with_environment", "multiple_environments", "malformed_tool_calls"],
        "they write token ids of Qwen's vocabulary, which is on the Hub",
    ),
}


def results(folder: Path, trainer: str) -> dict[str, str]:
    """Whether each of TRL's tests passed, failed or was skipped."""
    checkout = Path(os.environ["TRL_TESTS"]).resolve()
    report = folder / f"{trainer}.xml"
    command = [sys.executable, "-m", "pytest", "-p", "trl_plugin", "-p", "no:cacheprovider", "-q", "-c", os.devnull]
    command += ["--rootdir", str(checkout), "--junitxml", str(report), "-k", f"not ({' or '.join(NOT_HERE)})"]
    environment = {"TRL_TESTS": str(checkout), "TRL_TESTS_TRAINER": trainer, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [*command, str(TESTS)], cwd=checkout, env=os.environ | environment, capture_output=True, text=True
    )
    assert report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname').rpartition('.')[2]}::{case.get('name')}"] = kind
    return found


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.skipif("TRL_TESTS" not in os.environ, reason="TRL_TESTS=PATH names no checkout of TRL to take them from")
def test_what_passes_with_trls_trainer_passes_with_ours(tmp_path):
    theirs, ours = results(tmp_path, "trl"), results(tmp_path, "dc_trl")
    assert theirs.keys() == ours.keys()
    passed = [name for name, kind in theirs.items() if kind == "passed"]
    lost = [name for name in passed if ours[name] != "passed" and name.partition("::")[0] not in NOT_OURS]
    print(f"{len(passed)} pass with TRL's trainer, {sum(kind == 'passed' for kind in ours.values())} with ours")
    assert len(passed) > 50, theirs
    assert not lost, lost
