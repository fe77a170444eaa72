"""All settings of a training run, those of TRL too."""

from collections.abc import Sequence
from typing import NamedTuple

from trl import ModelConfig

from ..config import DCGRPOConfig
from ..settings.configuration import ConfigurationParser
from ..settings.distribution import sharding_of
from ..settings.paths import shipped
from .own_arguments import DataArguments, ServerArguments, WatchArguments


class RunArguments(NamedTuple):
    """The dataclasses whose fields a configuration file and a command line may set."""

    data: DataArguments
    server: ServerArguments
    watch: WatchArguments
    trainer: DCGRPOConfig
    model: ModelConfig

    @classmethod
    def parse(cls, words: Sequence[str]) -> "RunArguments":
        """Read the words of a command line, and the file that its `--config` names.

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
