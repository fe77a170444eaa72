"""Calibration before a run: how far each engine is from the model that is trained, and the tolerance ε to set."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.prompts import Prompt, tokenize
from ..rollouts.engines import EngineSpec
from .mismatch import compare_engines, measure_engine
from .result import Calibration
from .rollouts import EngineSample, Policy, require_engines, sample_rollouts
from .scoring import train_logps
from .settings import CalibrationSettings


def calibrate(
    model: Policy,
    tokenizer: PreTrainedTokenizerBase,
    engines: Sequence[str],
    prompts: Sequence[Prompt],
    **settings: Any,
) -> Calibration:
    """Measures how far engines are from the model that is trained, and proposes the tolerance ε.

    Each engine samples completions of the same prompts, from the whole distribution; the model scores their tokens as
    TRL's trainer would. With one engine's δ̄ over generation batches of the run's size (prompts drawn again from those
    given, each with all its completions), ε follows by the rule of `dc_trl.constraint.lagrangian.proposed_tolerance`.

    Args:
        model: the model that is trained, in its training precision.
        tokenizer: of the model.
        engines: `"fp8"` (any scheme) starts a vLLM server with the model's present weights and ends it,
            `"replica:fp8"` is the replica in this process, a URL a vLLM server that runs the model already.
        prompts: texts, or conversations that the chat template is applied to; at least two.
        **settings: fields of `dc_trl.calibration.CalibrationSettings`, which describes them.

    Returns:
        What was measured; `dc_trl.calibration.report` has its tables, figures and page.

    Raises:
        TypeError: there is no such setting; the message names it.
        ValueError: an argument is out of its range; the message names it.
        ServerError: a server is not there, runs another model, or failed.
        ImportError: a server is to be started, and vLLM is not installed.
    """
    how = CalibrationSettings(**settings)
    if len(prompts) < 2:
        raise ValueError(f"prompts: there are {len(prompts)}, and a spread needs at least two; use 64 or more.")
    specs = list(dict.fromkeys(EngineSpec.parse(word) for word in engines))
    if not specs:
        raise ValueError("engines is empty: give at least one, 'fp8' for example.")
    require_engines(specs, model)
    ids = tokenize(prompts, tokenizer, **(how.chat_template_kwargs or {}))
    samples = _sample(specs, model, tokenizer, ids, how)
    longest = max(len(rollout.ids) for sample in samples for rollout in sample.rollouts)
    measured = [
        measure_engine(sample, train_logps(model, ids, sample.rollouts, how), ids, tokenizer, how, longest)
        for sample in samples
    ]
    differences = {other.engine: compare_engines(measured[0], other, how.seed) for other in measured[1:]}
    return Calibration(_record(model, len(prompts), how), measured, differences)


def _sample(
    specs: Sequence[EngineSpec],
    model: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    settings: CalibrationSettings,
) -> list[EngineSample]:
    """What each engine samples; then the model is on its device."""
    sampled = {}
    # Servers first: where there is one GPU, they need it for themselves.
    for spec in sorted(specs, key=lambda spec: spec.kind == "replica"):
        if spec.kind == "replica" and settings.device is not None:
            model.to(settings.device)
        sampled[spec] = sample_rollouts(spec, model, tokenizer, prompts, settings)
    if settings.device is not None:
        model.to(settings.device)
    return [sampled[spec] for spec in specs]


def _record(model: Policy, prompts: int, settings: CalibrationSettings) -> dict[str, Any]:
    """What the numbers depend on."""
    names = ("samples", "max_tokens", "temperature", "measure", "reduction", "batch_prompts", "seed")
    return {
        "model": model.name_or_path,
        "weights_dtype": str(model.dtype).removeprefix("torch."),
        "bf16_autocast": settings.bf16,
        "device": str(model.device),
        "prompts": prompts,
        **{name: getattr(settings, name) for name in names},
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        **(settings.settings or {}),
    }
