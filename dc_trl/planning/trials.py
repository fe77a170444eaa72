"""Two tables of what the formulas say beside what this machine does: sizes and steps, and growth of a step's time.

    accelerate launch --config_file configs/accelerate/two_cpu_processes.yaml -m dc_trl.planning.trials FILE

is the second table's row of two processes; FILE takes its numbers.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from ..files import write_text
from ..records.tables import TableRows
from ..settings.paths import PACKAGE, shipped_configs
from .architecture import architecture_of
from .measured import (
    Measured,
    Row,
    Speed,
    activation_rows,
    flop_rows,
    measure_speed,
    missing_memory,
    predicted_seconds,
    random_model,
    run_rows,
    run_steps,
    size_rows,
    tiny_model,
)


_BASE = (16, 64)  # completions of a step, tokens of a completion
_STEPS = 5


def small_model() -> PreTrainedModel:
    """Random, of the shape of Qwen3-0.6B."""
    return random_model(shipped_configs() / "models" / "qwen3_0_6b.json")


def check_tables() -> Iterator[tuple[str, TableRows]]:
    """One table for each model: the shipped tiny one, and a random 0.6B."""
    models: dict[str, tuple[Callable[[], PreTrainedModel], int, int, int]] = {
        "tiny model": (tiny_model, 64, 128, 6),
        "random 0.6B": (small_model, 4, 48, 3),
    }
    for name, (make, batch, length, steps) in models.items():
        model = make()
        rows = size_rows(model) + flop_rows(model, 2, 64)
        for dtype in (torch.float32, torch.bfloat16):
            rows += activation_rows(model, 2, 64, dtype)
        sizes = architecture_of(model.config, name)
        del model
        lacking = missing_memory(sizes, batch, length + 32)
        if not lacking:
            rows += run_rows(make, batch, length, steps)
        what = lacking or f"steps of {batch} completions of {length} tokens, float32"
        title = f"{name}: predicted and measured; {what}"
        yield title, (["", "predicted", "measured", "error"], [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    exact = row.predicted == row.measured
    numbers = (f"{value:,.0f}" if value > 1e3 else f"{value:.3g}" for value in (row.predicted, row.measured))
    return [row.what, *numbers, "none" if exact else f"{100 * row.error:+.3g} %"]


def growth_table() -> tuple[str, TableRows]:
    """Seconds of a real step against its size, beside the formula.

    The formula is at the speed of this machine's matrix products in the first row's shape, and again scaled to agree
    in the first row: the factor stands for everything but matrix products.
    """
    shapes = [(16, 64), (32, 64), (64, 64), (16, 128), (16, 256)]
    runs = [("tiny", tiny_model, *shape) for shape in shapes]
    tiny = PACKAGE / "assets" / "tiny_qwen3" / "config.json"
    runs += [
        ("tiny, twice as wide", lambda: random_model(tiny, hidden_size=256, intermediate_size=512), *_BASE),
        ("tiny, 4 times as deep", lambda: _deeper(tiny, 16), *_BASE),
    ]
    rows: list[list[str]] = []
    speed, factor = Speed(1.0, 1.0), 1.0  # both of the first row
    for name, make, batch, length in runs:
        measured, model = run_steps(make, batch, length, _STEPS)
        if not rows:
            hidden, intermediate = model.config.hidden_size, model.config.intermediate_size
            speed = measure_speed(hidden, intermediate, batch * measured.tokens)
            factor = measured.seconds / predicted_seconds(model, batch, measured.tokens, speed)
        predicted = predicted_seconds(model, batch, measured.tokens, speed)
        rows.append(_growth_cells([name, str(batch), str(length), "1"], predicted, measured, factor))
    batch, length = _BASE
    measured = _two_processes(batch, length)
    predicted = predicted_seconds(tiny_model(), batch // 2, measured.tokens, speed)
    rows.append(_growth_cells(["tiny", str(batch), str(length), "2"], predicted, measured, factor))
    head = ["model", "completions", "tokens", "processes", "measured, s", "formula, s", "scaled, s", "error"]
    return "Seconds of an optimizer step on this machine", (head, rows)


def _growth_cells(what: list[str], predicted: float, measured: Measured, factor: float) -> list[str]:
    scaled = factor * predicted
    error = f"{100 * (scaled / measured.seconds - 1):+.0f} %"
    return [*what, f"{measured.seconds:.3g}", f"{predicted:.3g}", f"{scaled:.3g}", error]


def _deeper(path: Path, layers: int) -> PreTrainedModel:
    return random_model(path, num_hidden_layers=layers, layer_types=["full_attention"] * layers)


def _two_processes(batch: int, length: int) -> Measured:
    """The tiny model in two processes, half of the completions on each."""
    config = shipped_configs() / "accelerate" / "two_cpu_processes.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    with tempfile.TemporaryDirectory(prefix="dc_trl-plan-") as folder:
        file = Path(folder, "measured.json")
        words = ["-m", "dc_trl.planning.trials", str(file), str(batch // 2), str(length)]
        done = subprocess.run([*launch, *words], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"two processes could not be measured: {done.stderr[-2000:]}")
        return Measured(**json.loads(file.read_text()))


def main() -> None:
    """One process of several: measures the tiny model, and the first writes what it has seen."""
    file, batch, length = sys.argv[1:]
    measured, _ = run_steps(tiny_model, int(batch), int(length), _STEPS)
    state = PartialState()
    assert state.num_processes > 1
    if state.is_main_process:
        write_text(Path(file), json.dumps(asdict(measured)))
    state.destroy_process_group()


if __name__ == "__main__":
    main()
