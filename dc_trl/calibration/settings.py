"""The settings of a calibration, each described and checked here alone."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..constraint.settings import Measure, Reduction, require_choice
from ..settings.ranges import ABOVE_0, COUNT, SEED, require_numbers


_RANGES = {
    **dict.fromkeys(("samples", "max_tokens", "batch_prompts", "batch_tokens", "replica_batch"), COUNT),
    "temperature": ABOVE_0,
    "seed": SEED,
}


@dataclass(frozen=True)
class CalibrationSettings:
    """How engines are measured: the keywords of `calibrate`.

    Args:
        samples: completions of each prompt, at least 1; the run's `num_generations`.
        max_tokens: of a completion, at least 1; the run's `max_completion_length`.
        temperature: of both engines, above 0. The whole distribution is sampled: no top-p, top-k or min-p.
        measure: of the discrepancy δ, `discrepancy_measure` of the run.
        reduction: of δ to δ̄, `batch_reduction` of the run.
        batch_prompts: prompts of one generation batch of the run, at least 1.
        bf16: whether the model is scored under bfloat16 autocast, `bf16` of the run.
        seed: of completions and intervals.
        device: where the model goes after the servers have ended, which may need the same GPU; where it is by default.
        batch_tokens: tokens of one forward, padding included; a longer completion has a forward of its own.
        replica_batch: completions that a replica samples at a time.
        chat_template_kwargs: for the chat template, `{"enable_thinking": False}` for example.
        serve_options: further options of `vllm serve`, for servers that are started.
        log_dir: directory for the logs of those servers; that for temporary files by default.
        settings: further entries for the record.
        report: takes a line about what is happening.
        progress: whether to show bars.

    Raises:
        ValueError: a setting is out of its range; the message names it.
    """

    samples: int = 8
    max_tokens: int = 8192
    temperature: float = 1.0
    measure: Measure = "prob_diff"
    reduction: Reduction = "sequence"
    batch_prompts: int = 64
    bf16: bool = True
    seed: int = 0
    device: str | torch.device | None = None
    batch_tokens: int = 16384
    replica_batch: int = 64
    chat_template_kwargs: Mapping[str, Any] | None = None
    serve_options: Sequence[str] = ()
    log_dir: str | os.PathLike[str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    report: Callable[[str], None] = print
    progress: bool = True

    def __post_init__(self) -> None:
        require_numbers(self, _RANGES)
        require_choice("measure", self.measure, Measure)
        require_choice("reduction", self.reduction, Reduction)
