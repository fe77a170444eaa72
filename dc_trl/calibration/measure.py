"""Calibration before a run: how far each engine is from the model that is trained, and the tolerance ε to set."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..constraint.discrepancy import token_discrepancy
from ..constraint.settings import Measure, Reduction
from ..constraint.statistics import discrepancy_sums
from ..data.prompts import Prompt
from ..rollouts.engines import EngineSpec
from .mismatch import compare_engines, measure_engine
from .result import Calibration
from .rollouts import Policy, Rollout, RolloutSettings, require_engines, sample_rollouts
from .scoring import train_logps


def calibrate(
    model: Policy,
    tokenizer: PreTrainedTokenizerBase,
    engines: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    samples: int = 8,
    max_tokens: int = 8192,
    temperature: float = 1.0,
    measure: Measure = "prob_diff",
    reduction: Reduction = "sequence",
    batch_prompts: int = 64,
    bf16: bool = True,
    seed: int = 0,
    device: str | torch.device | None = None,
    batch_tokens: int = 16384,
    replica_batch: int = 64,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    serve_options: Sequence[str] = (),
    log_dir: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = print,
    progress: bool = True,
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
        samples: completions of each prompt, at least 1; the run's `num_generations`.
        max_tokens: of a completion, at least 1; the run's `max_completion_length`.
        temperature: of both engines, above 0.
        measure: of the discrepancy δ, `discrepancy_measure` of the run.
        reduction: of δ to δ̄, `batch_reduction` of the run.
        batch_prompts: prompts of one generation batch of the run, at least 1.
        bf16: whether the model is scored under bfloat16 autocast, `bf16` of the run.
        seed: of completions and intervals.
        device: where the model goes after the servers have ended, which may need the same GPU; where it is by default.
        batch_tokens: tokens of one forward, see `dc_trl.calibration.scoring.train_logps`.
        replica_batch: completions that a replica samples at a time.
        chat_template_kwargs: for the chat template, `{"enable_thinking": False}` for example.
        serve_options: further options of `vllm serve`, for servers that are started.
        log_dir: directory for the logs of those servers; that for temporary files by default.
        settings: further entries for the record.
        report: takes a line about what is happening.
        progress: whether to show bars.

    Returns:
        What was measured; `dc_trl.calibration.report` has its tables, figures and page.

    Raises:
        ValueError: an argument is out of its range; the message names it.
        ServerError: a server is not there, runs another model, or failed.
        ImportError: a server is to be started, and vLLM is not installed.
    """
    for name, value, least in (
        ("samples", samples, 1),
        ("max_tokens", max_tokens, 1),
        ("batch_prompts", batch_prompts, 1),
        ("batch_tokens", batch_tokens, 1),
        ("replica_batch", replica_batch, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} is invalid: use a whole number, at least {least}.")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature={temperature} is invalid: use a number above 0, as in training.")
    if len(prompts) < 2:
        raise ValueError(f"prompts: there are {len(prompts)}, and a spread needs at least two; use 64 or more.")
    specs = list(dict.fromkeys(EngineSpec.parse(word) for word in engines))
    if not specs:
        raise ValueError("engines is empty: give at least one, 'fp8' for example.")
    # They refuse what is unknown, before anything starts.
    discrepancy_sums(token_discrepancy(torch.zeros(1), torch.zeros(1), measure), torch.ones(1).bool(), reduction)
    require_engines(specs, model)
    ids = _tokenize(prompts, tokenizer, chat_template_kwargs or {})
    how = RolloutSettings(samples, max_tokens, temperature, seed, replica_batch)
    sampled: dict[str, tuple[list[Rollout], str]] = {}
    # Servers first: where there is one GPU, they need it for themselves.
    for spec in sorted(specs, key=lambda spec: spec.kind == "replica"):
        if spec.kind == "replica" and device is not None:
            model.to(device)
        log_path = Path(log_dir, f"vllm_server_{spec.scheme}.log") if log_dir is not None else None
        sampled[spec.name] = sample_rollouts(
            spec,
            model,
            tokenizer,
            ids,
            how,
            serve_options=serve_options,
            log_path=log_path,
            report=report,
            progress=progress,
        )
    if device is not None:
        model.to(device)
    longest = max(len(rollout.ids) for rollouts, _ in sampled.values() for rollout in rollouts)
    measured = []
    for spec in specs:
        rollouts, precision = sampled[spec.name]
        train = train_logps(
            model, ids, rollouts, temperature=temperature, bf16=bf16, batch_tokens=batch_tokens, progress=progress
        )
        measured.append(
            measure_engine(
                spec.name,
                precision,
                ids,
                rollouts,
                train,
                tokenizer,
                measure=measure,
                reduction=reduction,
                batch_prompts=batch_prompts,
                longest=longest,
                seed=seed,
            )
        )
    record = {
        "model": model.name_or_path,
        "weights_dtype": str(model.dtype).removeprefix("torch."),
        "bf16_autocast": bf16,
        "device": str(model.device),
        "prompts": len(prompts),
        "samples": samples,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "measure": measure,
        "reduction": reduction,
        "batch_prompts": batch_prompts,
        "seed": seed,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        **(settings or {}),
    }
    differences = {other.engine: compare_engines(measured[0], other, seed) for other in measured[1:]}
    return Calibration(record, measured, differences)


def _tokenize(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]
) -> list[list[int]]:
    """Token ids of the prompts, as TRL's trainer makes them."""
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts))["input_ids"]
    encoded = tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, return_dict=True, **chat_template_kwargs
    )
    return encoded["input_ids"]
