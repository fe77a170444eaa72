"""All settings of a training run."""

from collections.abc import Sequence
from typing import NamedTuple

from trl import ModelConfig

from ..config import DCGRPOConfig
from ..settings.configuration import ConfigurationParser
from ..settings.paths import shipped
from .adapter import AdapterArguments
from .own_server import ServerArguments
from .problems import DataArguments
from .watch import WatchArguments


class RunArguments(NamedTuple):
    """The dataclasses whose fields a configuration file and a command line may set."""

    data: DataArguments
    server: ServerArguments
    watch: WatchArguments
    adapter: AdapterArguments
    trainer: DCGRPOConfig
    model: ModelConfig

    @classmethod
    def parse(cls, words: Sequence[str] | None = None) -> "RunArguments":
        """Read a command line, by default that of the process, and the file that its `--config` names.

        Raises:
            ValueError: a setting or the file is refused; the message names the file, or the field with its value.
            OSError: the file cannot be read.
        """
        arguments = cls(*ConfigurationParser(ARGUMENTS).parse(words))
        if arguments.model.model_name_or_path is not None:
            arguments.model.model_name_or_path = shipped(arguments.model.model_name_or_path)
        return arguments


ARGUMENTS: tuple[type, ...] = tuple(RunArguments.__annotations__.values())
