"""A run's control: GRPO in step in the same setting, the run without the mismatch."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from .lines import Line
from .plan import Cell, cell_name


PRIMARY = "greedy"  # evaluation of the deployed policy that all comparisons are of

_SETTING = {
    "model_name_or_path",
    "dataset_name",
    "max_completion_length",
    "learning_rate",
    "temperature",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "use_cpu",
    "bf16",
    "use_vllm",
    "vllm_mode",
    "vllm_max_model_length",
    "serve",
}

Controls = Mapping[str, Mapping[int, float]]  # accuracy, 0 to 1, by the name of the setting and the seed


def setting_of(line: Line) -> Cell:
    """What a run has in common with its control: model, task, rate, batches, temperature, engine, device and its
    arithmetic. The rest makes mismatch or acts on it."""
    return {name: value for name, value in line.cell.items() if name in _SETTING}


def is_control(line: Line) -> bool:
    """Whether a run is GRPO in step, sampled in the base's number format."""
    return line.cell == setting_of(line)


def controls_of(lines: Sequence[Line]) -> Controls:
    """Accuracy of GRPO in step in each setting.

    A setting where its mean over seeds is below the untrained model's has no control: GRPO fails there by itself.
    """
    before: dict[str, list[float]] = {}
    after: dict[str, dict[int, float]] = {}
    for line in filter(is_control, lines):
        reached = line.last(PRIMARY)
        if reached is not None:
            before.setdefault(cell_name(line.cell), []).append(line.evaluations[PRIMARY][0])
            after.setdefault(cell_name(line.cell), {})[line.seed] = reached
    return {name: found for name, found in after.items() if fmean(found.values()) >= fmean(before[name])}


def control_of(line: Line, controls: Controls) -> Mapping[int, float]:
    """The accuracy of a run's control by seed; {} where it has none."""
    return controls.get(cell_name(setting_of(line)), {})
