"""Pushes a run to the Hub: which files, and what an error of the Hub means.

transformers pushes whatever lies in the output directory except checkpoints: logs, pickles, and files of the user.
[`HubClient`] takes the place of its client and sends the files that [`run_files`] lists by name. None of them is a
pickle, except the optimizer's state if `hub_strategy` asks for checkpoints.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, RepoUrl
from huggingface_hub.utils import filter_repo_objects
from transformers import TrainingArguments
from transformers import trainer as transformers_trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import logging

from ..config import DCGRPOConfig, HubDeployment
from ..files import read_text
from ..records.runs import DEPLOYMENT_FOLDER, FIGURE_FILE, HISTORY_FILE, SETTINGS_FILE, SUMMARY_FILE
from ..version import __version__
from .card import CARD_FILE


# Patterns of the files that `save_pretrained` writes; of several forms of weights only safetensors. Each ? is a digit
# of a shard's number: files are also deleted by these patterns, and a * would reach into folders.
_WEIGHTS = (
    *("model.safetensors", "adapter_model.safetensors"),
    *("model-?????-of-?????.safetensors", "model.safetensors.index.json"),
)
_CONFIGURATIONS = ("config.json", "generation_config.json", "adapter_config.json", "*processor_config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_VOCABULARIES = ("vocab.*", "merges.txt", "*.model", "*.tiktoken")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
MODEL_FILES = (*_WEIGHTS, *_CONFIGURATIONS, *_TOKENIZERS, *_VOCABULARIES, *_TEMPLATES)
RUN_FILES = (CARD_FILE, HISTORY_FILE, FIGURE_FILE, SUMMARY_FILE, SETTINGS_FILE)

# Files of a checkpoint that resuming does not need: pickled arguments, unfinished files, and the card that PEFT writes
# beside each adapter, whose base the Hub refuses if it is a directory.
_NOT_TO_RESUME = [f"*{TRAINING_ARGS_NAME}", f"*{CARD_FILE}", ".*", "*/.*"]
# Files that may name directories of this machine, and an absolute path of two parts or more in JSON.
_WITH_PATHS = ("config.json", "adapter_config.json", "trainer_state.json", SETTINGS_FILE, HISTORY_FILE)
_ABSOLUTE = re.compile(r'"(?:file://)?/(?:[^"/\n]+/)+([^"/\n]+)/?"')

logger = logging.get_logger(__name__)


class HubError(OSError):
    """The Hub refused a push or could not be reached. The message names the field and says what to do."""


def run_files(folder: str | Path, deployment: bool = True) -> list[str]:
    """Return the files of a run that a push sends, relative to its output directory.

    Args:
        folder: output directory of the run.
        deployment: whether to list the files of the deployment checkpoint too.
    """
    patterns = [*MODEL_FILES, *RUN_FILES]
    if deployment:
        patterns += [f"{DEPLOYMENT_FOLDER}/{pattern}" for pattern in MODEL_FILES]
    files = {path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(folder)) for path in files)


@dataclass(frozen=True)
class HubClient:
    """The client with which a run pushes; it takes the place of transformers' own.

    Args:
        api: client of the Hub, with a token that may write. Its jobs in the background run one after the other.
        deployment: where the deployment checkpoint goes: `"subfolder"` `deployment/`, or `"none"`.
        revision: branch to push to, which is created if it is missing; by default the main one.
        base_model: Hub id of the model that an adapter adapts, if it was loaded from a directory.
    """

    api: HfApi
    deployment: HubDeployment
    revision: str | None
    base_model: str | None = None

    @classmethod
    def of(cls, args: DCGRPOConfig) -> "HubClient":
        """Return the client that the settings of a run describe; without a token the environment's is used."""
        api = HfApi(token=args.hub_token or None, library_name="dc_trl", library_version=__version__)
        return cls(api, args.hub_deployment, args.hub_revision, args.hub_base_model_id)

    @contextmanager
    def pushing(self, args: TrainingArguments, deployment: bool = True) -> Iterator[None]:
        """Make transformers push with this client, with the deployment checkpoint or without.

        transformers has no public place for a client, or for a choice of files: its `push_to_hub` and
        `_push_from_checkpoint` take the client from this function of their module. Overriding both whole would copy
        them, and lean on more private names (`_finish_current_push`, `PushInProgress`).
        """
        client = self if deployment else replace(self, deployment="none")
        original = transformers_trainer.hf_api
        transformers_trainer.hf_api = lambda: client
        try:
            with without_token(args):
                yield
        finally:
            transformers_trainer.hf_api = original

    def create_repo(
        self, repo_id: str, *, token: str | None = None, private: bool | None = None, exist_ok: bool = True
    ) -> RepoUrl:
        """Create the missing repository and branch of a run, and check that it accepts a push.

        Raises:
            HubError: there is no token, or it may not write there, or the Hub cannot be reached.
        """
        with _explained(repo_id):
            url = self.api.create_repo(repo_id, token=token, private=private, exist_ok=exist_ok)
            # An existing repository may belong to someone else.
            self.api.auth_check(url.repo_id, token=token, write=True)
            if self.revision is not None:
                self.api.create_branch(url.repo_id, branch=self.revision, token=token, exist_ok=True)
        return url

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: str | Path,
        commit_message: str,
        path_in_repo: str | None = None,
        revision: str | None = None,
        token: str | None = None,
        run_as_future: bool = False,
        **options: Any,
    ) -> CommitInfo | Future:
        """Push a run, or with `path_in_repo` one of its checkpoints, in one commit.

        The Hub's client does not send again what the Hub has, so a repeated push sends only what is missing. Settings
        and configurations are sent without directories of this machine.

        Args:
            repo_id: repository of the model.
            folder_path: output directory of the run, or directory of the checkpoint.
            commit_message: title of the commit.
            path_in_repo: folder for a checkpoint; the checkpoint replaces what is in it.
            revision: branch; by default that of this client.
            token: token of this push; by default that of `api`.
            run_as_future: whether to push in the background.
            **options: transformers' choice of files, which has no effect.

        Returns:
            The commit to `repo_id`, or with `run_as_future` its future.

        Raises:
            HubError: the Hub refused, or the connection was lost more often than the client tries again.
        """
        folder, revision = Path(folder_path), revision or self.revision
        # The files are listed now, since a push in the background may begin later.
        if path_in_repo is None:
            files = run_files(folder, self.deployment == "subfolder")
            # Shards of an earlier push, which may have had other names, would be loaded as the model's weights.
            replaced = [*_WEIGHTS, *([f"{DEPLOYMENT_FOLDER}/*"] if self.deployment == "subfolder" else [])]
        else:
            found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            files = sorted(filter_repo_objects(found, ignore_patterns=_NOT_TO_RESUME))
            replaced = [f"{path_in_repo}/*"]

        def send() -> CommitInfo:
            with _explained(repo_id):
                prefix = "" if path_in_repo is None else f"{path_in_repo}/"
                added = {prefix + name: self._content(folder / name) for name in files}
                there = self.api.list_repo_files(repo_id, revision=revision, token=token)
                old = [name for name in filter_repo_objects(there, allow_patterns=replaced) if name not in added]
                return self.api.create_commit(
                    repo_id,
                    [*map(CommitOperationDelete, old), *(CommitOperationAdd(*each) for each in added.items())],
                    commit_message=commit_message,
                    revision=revision,
                    token=token,
                )

        if not run_as_future:
            return send()
        future = self.api.run_as_future(send)
        future.add_done_callback(_warn_of_failure)
        return future

    def _content(self, path: Path) -> Path | bytes:
        """Return what is sent of a file: the last part alone of each path of this machine."""
        if path.name not in _WITH_PATHS:
            return path
        text = read_text(path)
        if path.name == "adapter_config.json" and self.base_model is not None:
            text = json.dumps(json.loads(text) | {"base_model_name_or_path": self.base_model}, indent=2)
        return _ABSOLUTE.sub(r'"\1"', text).encode()


@contextmanager
def without_token(args: TrainingArguments) -> Iterator[None]:
    """Remove the token from the arguments while transformers may pickle them into a file."""
    token, args.hub_token = args.hub_token, None
    try:
        yield
    finally:
        args.hub_token = token


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Turn an error of the Hub's client into one that names the setting and the remedy."""
    try:
        yield
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise HubError(
            f"hub_model_id={repo_id!r} cannot be pushed to ({reason}): log in with `hf auth login`, or set HF_TOKEN "
            "to a token with write access to this repository; check HF_ENDPOINT, HF_HUB_OFFLINE and the network."
        ) from error


def _warn_of_failure(future: Future) -> None:
    if (error := future.exception()) is not None:
        logger.warning(f"A push during training failed, the next one brings what is missing. {error}")
