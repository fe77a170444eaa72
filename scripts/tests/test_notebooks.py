"""The notebooks run from top to bottom."""

import json
import shutil

import nbformat
import pytest

from tests.helpers import ROOT, load_script
from tests.vllm_server import requires_vllm


NEEDS_VLLM = {"calibrate_and_deploy_fp8"}


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


# What makes a notebook's runs small; each stands there once.
SMALLER = {
    "calibrate_and_deploy_fp8": [
        ("16 * 40", "16 * 2"),
        ("arithmetic_dataset(512", "arithmetic_dataset(32"),
        ('["prompt"][:64]', '["prompt"][:16]'),
        ("samples=8", "samples=2"),
        ("max_steps=40", "max_steps=2"),
        ("logging_steps=10", "logging_steps=1"),
    ],
    "geometry": [],
    "own_data": [("HELD_OUT = 256", "HELD_OUT = 16"), ("max_steps=48", "max_steps=2")],
    "quickstart": [
        ("16 * 60", "16 * 2"),
        ("arithmetic_dataset(512", "arithmetic_dataset(32"),
        ("max_steps=60", "max_steps=2"),
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=requires_vllm if n in NEEDS_VLLM else ()) for n in SMALLER])
@pytest.mark.timeout(900)
def test_it_runs(tmp_path, name):
    kept = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    text = nbformat.writes(kept)
    for large, small in SMALLER[name]:
        large, small = (json.dumps(words)[1:-1] for words in (large, small))
        assert text.count(large) == 1
        text = text.replace(large, small)
    (tmp_path / "dc_trl").symlink_to(ROOT / "dc_trl")
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    path = tmp_path / "notebooks" / f"{name}.ipynb"
    path.write_text(text)
    notebook = load_script("run_notebooks").run(path)
    # As many pictures as are kept: a figure that no longer shows would go unnoticed otherwise.
    made, shown = (sum("image/png" in output.get("data", {}) for output in outputs(one)) for one in (notebook, kept))
    assert made == shown
