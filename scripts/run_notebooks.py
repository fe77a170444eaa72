"""Runs notebooks from top to bottom and keeps their outputs, without what went to stderr: progress bars and warnings.

python scripts/run_notebooks.py notebooks/*.ipynb
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run, in its own directory; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=480, coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # When a cell ran says nothing to a reader, and changes with every run.
            cell.metadata.pop("execution", None)
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for path in map(Path, sys.argv[1:]):
        start = time.perf_counter()
        notebook = run(path)
        nbformat.write(notebook, path)
        print(f"{path}: {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
