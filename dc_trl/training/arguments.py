"""All settings of a training run, and the checks that need no files."""

from collections.abc import Sequence
from typing import NamedTuple

from trl import ModelConfig

from ..config import DCGRPOConfig
from ..grading.rewards import get_reward
from ..settings.configuration import ConfigurationParser
from ..settings.paths import shipped
from ..settings.pretrained import require_model
from .adapter import AdapterArguments
from .own_server import ServerArguments, require_servable
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
        arguments = cls(*ConfigurationParser(ARGUMENTS).parse_args_and_config(words))
        if arguments.model.model_name_or_path is not None:
            arguments.model.model_name_or_path = shipped(arguments.model.model_name_or_path)
        return arguments

    def check(self) -> None:
        """Refuse settings that are certain to fail, as far as that is known without a download or a model.

        Raises:
            ValueError: a setting is refused; the message names the field, its value and the remedy.
        """
        require_servable(self.server, self.trainer)
        if self.model.model_name_or_path is not None or self.adapter.adapter_name_or_path is None:
            require_model(self.model.model_name_or_path)
        for reward in self.data.rewards:
            get_reward(reward)


ARGUMENTS: tuple[type, ...] = tuple(RunArguments.__annotations__.values())
