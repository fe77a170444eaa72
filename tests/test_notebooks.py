"""The notebooks run from top to bottom, and what is kept of them is small."""

import json

import nbformat
import pytest

from .helpers import ROOT, load_script
from .vllm_server import requires_vllm


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS_VLLM = {"calibrate_and_deploy_fp8"}


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["calibrate_and_deploy_fp8", "geometry", "quickstart"]


@pytest.mark.long
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=requires_vllm if p.stem in NEEDS_VLLM else ()) for p in NOTEBOOKS],
)
@pytest.mark.timeout(600)
def test_it_runs(path):
    notebook = load_script("run_notebooks").run(path)
    kept = nbformat.read(path, as_version=4)
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in kept.cells]
    # As many pictures as are kept: a figure that no longer shows would go unnoticed otherwise.
    made, shown = (sum("image/png" in output.get("data", {}) for output in outputs(one)) for one in (notebook, kept))
    assert made == shown > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_outputs_are_small_and_of_one_run(path):
    assert path.stat().st_size < 700_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert str(ROOT) not in json.dumps(notebook)
