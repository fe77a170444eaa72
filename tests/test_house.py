"""The house stands as it is drawn: arrows of the import graph point down, and none of them in a circle.

A room is a folder or a file at the top of the package. An arrow is an import as it is written, at the top of a file,
within a function or for types only: whoever reads the file has to know the other one.
"""

import ast
import json
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from .helpers import ROOT, succeed


# From the top floor to the cellar. A room may import rooms of lower floors, and none of its own floor.
FLOORS = [
    ["__main__"],
    ["command"],
    ["callbacks", "calibration"],
    ["async_grpo", "trainer"],
    ["evaluation", "gate", "parts"],
    ["run", "sampling"],
    ["config", "data"],
    ["serving"],
    ["quantization"],
    ["records"],
    ["constraint", "grading"],
    ["sampled_tokens", "settings"],
    ["files", "processes", "secrets", "version"],
]
FLOOR_OF = {room: number for number, rooms in enumerate(reversed(FLOORS)) for room in rooms}
# Rooms that read numbers and files: they have to start in a moment, and on machines without an engine.
WITHOUT_ENGINES = ["constraint", "records"]
ENGINES = {"trl", "vllm", "transformers"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "dc_trl").rglob("*.py"))}


def imported_names(module: str) -> Iterator[str]:
    """Absolute dotted names that a module imports; `from a import b` is a.b, which may be a module or be in one."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str | None:
    """The module of dc_trl that a dotted name is or is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


ARROWS = {module: {found for name in imported_names(module) if (found := module_of(name))} for module in MODULES}


def room_of(module: str) -> str | None:
    """None is the front door, dc_trl/__init__.py, which stands above all floors."""
    return module.split(".")[1] if "." in module else None


BETWEEN_ROOMS = [
    (module, other)
    for module, others in ARROWS.items()
    for other in sorted(others)
    if room_of(module) is not None and room_of(module) != room_of(other)
]


def circle(graph: dict[str, set[str]]) -> str:
    """A circle of a graph as 'a -> b -> a'; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def test_the_plan_names_every_room_once():
    drawn = [room for floor in FLOORS for room in floor]
    assert sorted(drawn) == sorted({room for module in MODULES if (room := room_of(module))})


def test_no_arrow_points_up():
    up = [
        f"{module} -> {other}"
        for module, other in BETWEEN_ROOMS
        if room_of(other) is None or FLOOR_OF[room_of(module)] <= FLOOR_OF[room_of(other)]
    ]
    assert not up, "\n".join(up)


def test_no_circle_of_files():
    assert not circle(ARROWS)


def test_rooms_without_engines_load_none():
    """In a fresh interpreter."""
    modules = [module for module in MODULES if room_of(module) in WITHOUT_ENGINES]
    code = f"import json, sys, {', '.join(modules)}; print(json.dumps(list(sys.modules)))"
    loaded = set(json.loads(succeed([sys.executable, "-c", code]).stdout))
    assert set(modules) <= loaded
    assert not {name.partition(".")[0] for name in loaded} & ENGINES
