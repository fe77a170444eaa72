"""The engines of an evaluation: chosen by a command line, started, and known by the weights that they hold."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from ..rollouts.engines import EngineSpec
from ..rollouts.replica import Replica
from ..rollouts.sampling import Engine, ReplicaEngine
from ..rollouts.server_engine import Disclosed, ServerEngine
from ..serving.connection import is_local
from ..serving.server import serve
from ..settings.command_line import say


# In place of a scheme: a checkpoint that is quantized already is evaluated as it is.
AS_IT_IS = "as-is"
# Files that vLLM takes weights from.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class EvaluatedModel(NamedTuple):
    """What is evaluated, as `load_config_and_tokenizer` finds it."""

    name: str  # Hub id or directory
    revision: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase


def choose_engines(
    model: EvaluatedModel, words: Sequence[str] | None, schemes: Sequence[str] | None, url: str | None = None
) -> list[EngineSpec]:
    """The engines that a command line means, with the scheme of each; that of a running server may be `AS_IT_IS`.

    Args:
        model: may be quantized already; then the one engine runs it as it is.
        words: names of engines as `EngineSpec.parse` takes them, or `["vllm"]` or `["replica"]` for one in each of
            `schemes`. None is `["vllm"]`.
        schemes: of an engine that does not say it itself; `["bf16"]` by default.
        url: a running server, as in `words`.

    Raises:
        ValueError: names the options that contradict each other.
    """
    words = list(dict.fromkeys(words or ["vllm"]))
    if url and words == ["replica"]:
        raise ValueError(f"url={url!r} with engine='replica' contradict each other: leave one out.")
    if url:
        words = [url] if words == ["vllm"] else [*words, url]
    if hasattr(model.config, "quantization_config"):
        return [_as_it_is(model.name, words, schemes)]
    each = list(dict.fromkeys(schemes or ["bf16"]))
    if words in (["vllm"], ["replica"]):
        prefix = "replica:" if words == ["replica"] else ""
        return [EngineSpec.parse(f"{prefix}{scheme}") for scheme in each]
    engines = [EngineSpec.parse(word) for word in words]
    running = [engine.name for engine in engines if engine.kind == "url"]
    if running and len(each) > 1:
        raise ValueError(f"scheme={each} with url={running[0]!r}: a server runs in one scheme, name that one.")
    if schemes and not running:
        raise ValueError(f"scheme={each} with engine={words}: an engine's name says its scheme, leave --scheme out.")
    engines = [engine if engine.scheme else engine._replace(scheme=each[0]) for engine in engines]
    if len({engine.scheme for engine in engines}) < len(engines):
        raise ValueError(
            f"engine={words}: two in one scheme would share a folder; evaluate each with its own --output."
        )
    return engines


def _as_it_is(model: str, words: Sequence[str], schemes: Sequence[str] | None) -> EngineSpec:
    """The engine of a checkpoint that is quantized already: vLLM, in the checkpoint's own scheme."""
    if schemes:
        raise ValueError(f"scheme={schemes}: {model} is quantized already and evaluated as it is; leave --scheme out.")
    if replicas := [word for word in words if word.startswith("replica")]:
        raise ValueError(f"engine={replicas[0]!r}: {model} is quantized already, which only vLLM runs.")
    if list(words) == ["vllm"]:
        return EngineSpec("vllm", "vllm", AS_IT_IS)
    engines = [EngineSpec.parse(word) for word in words]
    if len(engines) > 1 or engines[0].kind != "url":
        raise ValueError(f"engine={list(words)}: {model} is quantized already and evaluated as it is; leave it out.")
    return engines[0]._replace(scheme=AS_IT_IS)


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
    """An engine for the time of the block, and what tells its weights from others, for the record.

    Args:
        engine, model: of `choose_engines`, and what it runs.
        max_length: longest prompt and completion together, in tokens; the model's own limit where that is lower.
        concurrency: requests in flight, or the replica's batch.
        serve_options: further options of `vllm serve`, for a server that is started.
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
        scheme = f"taken for {model.name} in {engine.scheme}"
        say(f"{engine.name} holds {running.disclosed}, {scheme}")
        yield running, served_weights(engine.name, running.disclosed)
    elif engine.kind == "replica":
        policy = AutoModelForCausalLM.from_pretrained(model.name, revision=model.revision, dtype="auto")
        policy.to("cuda" if torch.cuda.is_available() else "cpu")
        yield ReplicaEngine(Replica(policy, engine.scheme), model.tokenizer, concurrency), fingerprint(model)
    else:
        with serve(
            model.name,
            "bf16" if engine.scheme == AS_IT_IS else engine.scheme,
            revision=model.revision,
            max_model_len=min(max_length, model.config.get_text_config().max_position_embeddings),
            log_path=log_path,
            restarts=3,
            options=serve_options,
            report=say,
        ) as server:
            yield ServerEngine(server.url, concurrency=concurrency, vocabulary=vocabulary), fingerprint(model)


def require_served(url: str, disclosed: Disclosed, model: str, scheme: str | None) -> None:
    """Refuses a running server that by its own words serves another model, or another format."""
    names = (disclosed.name, disclosed.root)
    paths = [Path(name) for name in names if Path(name).is_dir()]
    if model not in names and not (Path(model).is_dir() and any(path.samefile(model) for path in paths)):
        raise ValueError(
            f"model={model!r}: the server at {url} serves {disclosed.name!r}, from {disclosed.root!r}. Give the one "
            "that it serves, or start it under this name "
            f"(dc-trl serve --model, vllm serve --served-model-name)."
        )
    told = disclosed.weight_version is not None  # else the quantization is not known either
    if told and scheme != AS_IT_IS and (scheme == "bf16") != (disclosed.quantization is None):
        raise ValueError(
            f"scheme={scheme!r}: the server at {url} runs with quantization={disclosed.quantization!r}. Name the "
            f"scheme that it runs in, or start it with dc-trl serve --scheme."
        )


def served_weights(url: str, disclosed: Disclosed) -> dict[str, str | None]:
    """What tells the weights of a running server from others, as far as it can be known.

    Where it holds the files that it was started with, and they are on this machine, that is a digest of them; else
    its address and what it discloses. The files of the model that it is asked about say nothing of its weights.
    """
    known = {"served": disclosed.name, "weight_version": disclosed.weight_version}
    root = Path(disclosed.root)
    files = sorted(file for pattern in _WEIGHTS for file in root.glob(pattern)) if is_local(url) else []
    if files and disclosed.weight_version in (None, "default"):
        digest = hashlib.sha256()
        for file in [root / "config.json", *files]:
            with open(file, "rb") as content:
                digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
        return known | {"sha256": digest.hexdigest()}
    return known | {
        "url": url,
        "root": disclosed.root,
        "revision": disclosed.revision,
        "quantization": disclosed.quantization,
    }


def fingerprint(model: EvaluatedModel) -> str:
    """What tells two sets of weights under one name apart: the revision, or size and time of the files."""
    if not Path(model.name).is_dir():
        return model.revision
    files = sorted(Path(model.name).glob("*.safetensors"))
    return ", ".join(f"{file.name}: {file.stat().st_size} bytes, {file.stat().st_mtime_ns}" for file in files)
