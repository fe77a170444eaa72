"""All settings of a training run, and the groups in which its help shows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from trl import ModelConfig

from ..config import DCGRPOConfig
from ..settings.configuration import ConfigurationParser
from ..settings.contradictions import CheckedSettings
from ..settings.distribution import sharding_of
from ..settings.fields import setting
from ..settings.paths import shipped
from ..settings.ranges import COUNT
from .problems import DataArguments


@dataclass
class ServerArguments(CheckedSettings):
    """The vLLM server, where the run starts its own."""

    serve: Literal["auto"] | None = setting(
        None,
        "'auto' starts a vLLM server for the model in its deployment_scheme, and ends it with the run (use_vllm: "
        "true, vllm_mode: server). For a server that runs elsewhere set vllm_server_base_url.",
    )
    serve_devices: str | None = setting(None, "GPUs of the server that 'auto' starts: '3' or '2,3'.")
    serve_options: list[str] = setting([], "Further options of vllm serve for the server that 'auto' starts.")


@dataclass
class WatchArguments(CheckedSettings):
    """Decay of the learning rate, and alarm of a collapse, which react to the metrics of the run."""

    length_decay: bool = setting(
        False,
        "Once the responses have become much longer, halve the learning rate again and again, down to a tenth (arXiv "
        "2602.01826), in place of lr_scheduler_type. See docs/corrections.md.",
    )
    length_decay_period: Annotated[int | None, COUNT] = setting(
        None, "Optimizer steps between two halvings. If it is not set, 1.8 times the step of the longer responses."
    )
    collapse_alarm: Literal["off", "warn", "stop"] = setting(
        "warn",
        "What happens when reward, entropy, gradient norm, mismatch or λ show a collapse: "
        '"off" does nothing, "warn" warns once, and "stop" warns, ends the run and names the last good checkpoint '
        "to resume from. See docs/metrics.md.",
    )


class RunArguments(NamedTuple):
    """The dataclasses whose fields a configuration file and a command line may set."""

    data: DataArguments
    server: ServerArguments
    watch: WatchArguments
    trainer: DCGRPOConfig
    model: ModelConfig

    @classmethod
    def parse(cls, words: Sequence[str] | None = None) -> "RunArguments":
        """Read a command line, by default that of the process, and the file that its `--config` names.

        Raises:
            ValueError: a setting or the file is refused; the message names the file, or the field with its value.
            OSError: the file cannot be read.
        """
        arguments = cls(*make_parser().parse(words))
        if arguments.model.model_name_or_path is not None:
            arguments.model.model_name_or_path = shipped(arguments.model.model_name_or_path)
        return arguments


ARGUMENTS: tuple[type, ...] = tuple(RunArguments.__annotations__.values())


def make_parser() -> ConfigurationParser:
    """Return the parser of all arguments."""
    return ConfigurationParser(ARGUMENTS)


def require_servable(server: ServerArguments, args: DCGRPOConfig) -> None:
    """Refuse a server that the settings would not use."""
    named = args.vllm_server_base_url or args.vllm_server_base_urls
    if server.serve is not None and (named is not None or not args.use_vllm or args.vllm_mode != "server"):
        raise ValueError(
            f"serve={server.serve!r} starts a server that nothing uses with use_vllm={args.use_vllm}, vllm_mode="
            f"{args.vllm_mode!r} and the address {named!r}: leave serve out, or set use_vllm=true, vllm_mode=server "
            "and no address."
        )
    quantizes = args.deployment_scheme not in (None, "bf16")
    if server.serve is not None and quantizes and sharding_of(args) == ("DEEPSPEED", 3):
        raise ValueError(
            f"serve={server.serve!r} loads the model in one process, which ZeRO-3 cannot: start it by dc-trl serve "
            f"--scheme {args.deployment_scheme}, and give its address in vllm_server_base_url."
        )
