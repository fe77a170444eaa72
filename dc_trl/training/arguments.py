"""All that a training configuration says, and what of it is refused before anything is opened."""

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
    """The dataclasses whose fields a configuration file and a command line may set, one of each."""

    data: DataArguments
    server: ServerArguments
    watch: WatchArguments
    adapter: AdapterArguments
    trainer: DCGRPOConfig
    model: ModelConfig

    @classmethod
    def parse(cls, words: Sequence[str] | None = None) -> "RunArguments":
        """Reads a command line, those of the process by default, and the file that its `--config` names.

        Raises:
            ValueError: names the file, or the field with its value.
            OSError: the file cannot be read.
        """
        arguments = cls(*ConfigurationParser(ARGUMENTS).parse_args_and_config(words))
        if arguments.model.model_name_or_path is not None:
            arguments.model.model_name_or_path = shipped(arguments.model.model_name_or_path)
        return arguments

    def check(self) -> None:
        """Refuses what can be known to fail without a download or a model.

        Raises:
            ValueError: names the field, its value and the remedy.
        """
        require_servable(self.server, self.trainer)
        if self.model.model_name_or_path is not None or self.adapter.adapter_name_or_path is None:
            require_model(self.model.model_name_or_path)
        for reward in self.data.rewards:
            get_reward(reward)


ARGUMENTS: tuple[type, ...] = tuple(RunArguments.__annotations__.values())
