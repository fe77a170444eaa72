"""The settings of a calibration, with their descriptions and ranges."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from ..constraint.settings import Measure, Reduction
from ..settings.fields import require_fields, setting
from ..settings.ranges import ABOVE_0, COUNT, SEED


@dataclass(frozen=True)
class CalibrationSettings:
    """How engines are measured: the keywords of `calibrate`. A value out of its range raises a ValueError."""

    samples: Annotated[int, COUNT] = setting(
        8, "completions of each prompt, at least 1; use num_generations of the run"
    )
    max_tokens: Annotated[int, COUNT] = setting(
        8192, "tokens of the longest completion, at least 1; use max_completion_length of the run"
    )
    # The whole distribution is sampled: no top-p, top-k or min-p.
    temperature: Annotated[float, ABOVE_0] = setting(1.0, "temperature of both engines, above 0; use that of the run")
    measure: Measure = setting("prob_diff", "measure of the discrepancy δ; use discrepancy_measure of the run")
    reduction: Reduction = setting("sequence", "how δ is averaged to δ̄; use batch_reduction of the run")
    batch_prompts: Annotated[int, COUNT] = setting(64, "prompts of one generation batch of the run, at least 1")
    bf16: bool = setting(True, "whether the model is scored under bfloat16 autocast; use bf16 of the run")
    seed: Annotated[int, SEED] = setting(0, "seed of the completions and of the intervals")
    # The model goes there after the servers have ended, which may need the same GPU; None: it stays where it is.
    device: str | torch.device | None = setting(None, "device of scoring and of replicas")
    batch_tokens: Annotated[int, COUNT] = setting(
        16384, "tokens of one forward, padding included; a longer completion has a forward of its own"
    )
    # A scoring pass for each set of causes: 2, 4 or 8, and twice that for an FP8 KV cache, and for an adapter.
    split: bool = setting(True, "whether δ̄ is split into its causes where the engine's scheme is known")
    replica_batch: Annotated[int, COUNT] = setting(64, "completions that a replica samples at a time")
    chat_template_kwargs: Mapping[str, Any] | None = None  # `{"enable_thinking": False}` for example
    serve_options: Sequence[str] = ()  # further options of `vllm serve` for servers that are started
    settings: Mapping[str, Any] | None = None  # further entries for the record
    report: Callable[[str], None] = print  # takes a line about what is happening
    progress: bool = True  # whether to show bars

    def __post_init__(self) -> None:
        require_fields(self)
