"""The engines of an evaluation: chosen on a command line, started, and identified by their weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from ..quantization.policy import require_finite
from ..sampling.engine_names import EngineSpec
from ..sampling.replica import Replica
from ..sampling.seeded import Disclosed, Engine, ReplicaEngine, ServerEngine
from ..serving.server import serve
from ..settings.command_line import say


# Stands for the scheme of a checkpoint that is quantized already, and evaluated as it is.
AS_IT_IS = "as-is"


class EvaluatedModel(NamedTuple):
    """What is evaluated, with what `load_config_and_tokenizer` returns."""

    name: str  # Hub id or directory
    revision: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase


def choose_engines(model: EvaluatedModel, words: Sequence[str] | None, scheme: str | None) -> list[EngineSpec]:
    """Return the engines that a command line names, each with its scheme.

    Args:
        model: what is evaluated. One that is quantized already has one engine, which runs it as it is.
        words: names of engines as `EngineSpec.parse` takes them; `["bf16"]` by default.
        scheme: of the running server that `words` names; `"bf16"` by default.

    Raises:
        ValueError: an engine is unknown, or options contradict each other; the message names them.
    """
    engines = [EngineSpec.parse(word) for word in dict.fromkeys(words or ())]
    running = [engine.name for engine in engines if engine.kind == "url"]
    if hasattr(model.config, "quantization_config"):
        if scheme or len(engines) > 1 or len(running) < len(engines):
            raise ValueError(
                f"engine={words} and scheme={scheme!r}: {model.name} is quantized already, and vLLM evaluates it as "
                "it is: leave both out, or give the URL of one server."
            )
        return [engine._replace(scheme=AS_IT_IS) for engine in engines or [EngineSpec("vllm", "vllm", AS_IT_IS)]]
    found = [engine._replace(scheme=engine.scheme or scheme or "bf16") for engine in engines]
    if len({engine.scheme for engine in found}) < len(found) or (scheme and not running):
        raise ValueError(
            f"engine={words} and scheme={scheme!r}: two engines in one scheme would share a folder, and --scheme is "
            "for a running server alone. Evaluate each scheme once, or with its own --output."
        )
    return found or [EngineSpec.parse("bf16")]


@contextmanager
def start_engine(
    engine: EngineSpec,
    model: EvaluatedModel,
    *,
    max_length: int,
    concurrency: int,
    serve_options: Sequence[str],
    log_path: Path,
) -> Iterator[tuple[Engine, object]]:
    """Start an engine for the time of the block; yield it with what identifies its weights, for the record.

    Args:
        engine, model: one of `choose_engines`, and what it runs.
        max_length: tokens of the longest prompt and completion together. The model's own limit applies too.
        concurrency: requests in flight, or the replica's batch.
        serve_options: further options of `vllm serve` for a server that is started.
        log_path: file for that server's output.

    Raises:
        ValueError: a running server holds another model, or runs it in another scheme.
        ServerError: a server is not there, or does not start.
    """
    assert engine.scheme is not None
    vocabulary = model.config.get_text_config().vocab_size
    if engine.kind == "url":
        running = ServerEngine(engine.name, concurrency=concurrency, vocabulary=vocabulary)
        require_served(engine.name, running.disclosed, model.name, engine.scheme)
        say(f"{engine.name} holds {running.disclosed}, taken for {model.name} in {engine.scheme}")
        weights = ("name", "root", "weight_version", "revision", "quantization")
        told = {each: getattr(running.disclosed, each) for each in weights}
        yield running, {"url": engine.name, "files": fingerprint(model), **told}
    elif engine.kind == "replica":
        policy = AutoModelForCausalLM.from_pretrained(model.name, revision=model.revision, dtype="auto")
        require_finite(policy)
        policy.to("cuda" if torch.cuda.is_available() else "cpu")
        yield ReplicaEngine(Replica(policy, engine.scheme), model.tokenizer, concurrency), fingerprint(model)
    else:
        with serve(
            model.name,
            "bf16" if engine.scheme == AS_IT_IS else engine.scheme,
            revision=model.revision,
            max_model_len=min(max_length, model.config.get_text_config().max_position_embeddings),
            log_path=log_path,
            options=serve_options,
            report=say,
        ) as server:
            yield ServerEngine(server.url, concurrency=concurrency, vocabulary=vocabulary), fingerprint(model)


def require_served(url: str, disclosed: Disclosed, model: str, scheme: str | None) -> None:
    """Refuse a running server that says it serves another model, or another format."""
    names = {name for each in (disclosed.name, disclosed.root) for name in (each, str(Path(each).absolute()))}
    if names.isdisjoint((model, str(Path(model).absolute()))):
        raise ValueError(
            f"model={model!r}: the server at {url} serves {disclosed.name!r}, from {disclosed.root!r}. Give the one "
            "that it serves, or start it under this name (dc-trl serve --model, vllm serve --served-model-name)."
        )
    told = disclosed.weight_version is not None  # else the quantization is not known either
    if told and scheme != AS_IT_IS and (scheme == "bf16") != (disclosed.quantization is None):
        raise ValueError(
            f"scheme={scheme!r}: the server at {url} runs with quantization={disclosed.quantization!r}. Name the "
            "scheme that it runs in, or start it with dc-trl serve --scheme."
        )


def fingerprint(model: EvaluatedModel) -> str:
    """Return what identifies the weights of a model: size and time of its files, or its commit on the Hub."""
    if Path(model.name).is_dir():
        files = sorted(path for kind in ("safetensors", "bin") for path in Path(model.name).glob(f"*.{kind}"))
        return ", ".join(f"{file.name}: {file.stat().st_size} bytes, {file.stat().st_mtime_ns}" for file in files)
    cached = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    return Path(cached).parent.name if isinstance(cached, str) else model.revision
