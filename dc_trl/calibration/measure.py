"""Measure before a run how far each engine is from the model that is trained, and propose the tolerance ε."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.prompts import Prompt, tokenize
from ..quantization.policy import Policy, require_finite
from ..sampling.engine_names import EngineSpec
from .causes import Case, diagnose, lag_floor
from .comparison import measure_engine
from .result import Calibration, CalibrationSettings, EngineMismatch
from .rollouts import require_engines, sample_rollouts, train_logps


def calibrate(
    model: Policy,
    tokenizer: PreTrainedTokenizerBase,
    engines: Sequence[str],
    prompts: Sequence[Prompt],
    **settings: Any,
) -> Calibration:
    """Measure how far engines are from the model that is trained, and propose the tolerance ε.

    Each engine samples completions of the same prompts from the whole distribution, and the model scores their tokens
    as TRL's trainer would. ε follows by `dc_trl.constraint.lagrangian.proposed_tolerance` from δ̄ of generation batches
    of the given prompts. Where an engine's scheme is known, `dc_trl.calibration.causes` splits its δ̄ into causes.

    Args:
        model: the model that is trained, in its training precision.
        tokenizer: of the model.
        engines: `"fp8"` (any scheme) starts a vLLM server with the model's present weights and ends it,
            `"replica:fp8"` is the replica in this process, a URL a vLLM server that runs the model already.
        prompts: texts, or conversations that the chat template is applied to; at least two.
        **settings: fields of `dc_trl.calibration.CalibrationSettings`, which describes them.

    Returns:
        What was measured; `dc_trl.calibration.result` prints it.

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
    require_engines(specs, model.config)
    require_finite(model)
    ids = tokenize(prompts, tokenizer, **(how.chat_template_kwargs or {}))
    samples = {}
    # Servers come first: where there is one GPU, they need it for themselves, and the model goes there afterwards.
    for spec in sorted(specs, key=lambda spec: spec.kind == "replica"):
        if spec.kind == "replica" and how.device is not None:
            model.to(how.device)
        samples[spec] = sample_rollouts(spec, model, tokenizer, ids, how)
    if how.device is not None:
        model.to(how.device)
    names = ("samples", "max_tokens", "temperature", "measure", "reduction", "batch_prompts", "seed")
    record = {
        "model": model.name_or_path,
        "weights_dtype": str(model.dtype).removeprefix("torch."),
        "bf16_autocast": how.bf16,
        "device": str(model.device),
        "prompts": len(prompts),
        **{name: getattr(how, name) for name in names},
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        **(how.settings or {}),
    }
    return Calibration(record, [_measure(Case(samples[spec], model, ids, how)) for spec in specs])


def _measure(case: Case) -> EngineMismatch:
    train = train_logps(case.policy, case.prompts, case.sample.rollouts, case.settings)
    found = measure_engine(case.sample, train, len(case.prompts), case.settings)
    if not case.settings.split:
        return found
    found = replace(found, estimates=found.estimates | {"lag_floor": lag_floor(case, train)})
    try:
        return replace(found, diagnosis=diagnose(case, train, found))
    except ValueError as error:  # the policy cannot compute as this engine does
        return replace(found, notes=[*found.notes, f"δ̄ is not split into its causes: {error}"])
