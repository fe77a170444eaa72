"""The run on the Hub: what a push sends, to which repositories, and what it says when it fails.

transformers pushes whatever lies in the output directory except checkpoints: logs, pickles, and files of the user.
[`HubClient`] takes the place of its client and sends the files that [`run_files`] lists by name. None of them is a
pickle, except the optimizer's state where `hub_strategy` asks for checkpoints.
"""

import glob
import shlex
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import CommitInfo, HfApi, RepoUrl
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import TrainingArguments
from transformers import trainer as transformers_trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import logging

from ..config import DCGRPOConfig, HubDeployment
from ..files import write_text
from ..records.runs import DEPLOYMENT_FOLDER, FIGURE_FILE, HISTORY_FILE, SETTINGS_FILE, SUMMARY_FILE
from ..version import __version__
from .card import CARD_FILE, address_card, deployment_card, load_card
from .local_paths import local_base, without_local_paths


# Patterns of the files that `save_pretrained` writes. Of several forms of weights only safetensors; each ? is a digit
# of a shard's number. The client deletes by the same patterns, and its * would reach into folders.
_SHARDS = ("model-?????-of-?????.safetensors", "model.safetensors.index.json")
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", *_SHARDS)
_CONFIGURATIONS = ("config.json", "generation_config.json", "adapter_config.json", "*processor_config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_VOCABULARIES = ("vocab.*", "merges.txt", "*.model", "*.tiktoken")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
MODEL_FILES = (*_WEIGHTS, *_CONFIGURATIONS, *_TOKENIZERS, *_VOCABULARIES, *_TEMPLATES)
RUN_FILES = (CARD_FILE, HISTORY_FILE, FIGURE_FILE, SUMMARY_FILE, SETTINGS_FILE)

# Files of a checkpoint that it does not take to resume: pickled arguments, what is still being written, and the card
# that PEFT writes beside each adapter, whose base the Hub refuses where it is a directory.
_NOT_TO_RESUME = [f"*{TRAINING_ARGS_NAME}", f"*{CARD_FILE}", ".*", "*/.*"]

logger = logging.get_logger(__name__)


class HubError(OSError):
    """The Hub refused a push or could not be reached. The message names the field and says what to do."""


def run_files(folder: str | Path, deployment: bool = True) -> list[str]:
    """The files of a run that a push sends, relative to its output directory, with those of the deployment or not."""
    patterns = [*MODEL_FILES, *RUN_FILES]
    if deployment:
        patterns += [f"{DEPLOYMENT_FOLDER}/{pattern}" for pattern in MODEL_FILES]
    files = {path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(folder)) for path in files)


@dataclass(frozen=True)
class HubClient:
    """The Hub as a run pushes to it; stands where transformers has its own client.

    Args:
        api: with a token that may write. What it sends in the background it sends one after the other.
        deployment: where the deployment checkpoint goes: `"subfolder"` `deployment/`, a second `"repository"` (named
            by the scheme), or `"none"`.
        scheme: deployment scheme; needed for a second repository.
        revision: branch that is pushed to, and begun where it is missing; by default the main one.
        base_model: Hub id of the model that an adapter adapts, where it was loaded from a directory.
    """

    api: HfApi
    deployment: HubDeployment
    scheme: str | None
    revision: str | None
    base_model: str | None = None

    @classmethod
    def of(cls, args: DCGRPOConfig) -> "HubClient":
        """The client that the settings of a run describe."""
        api, base_model = hub_api(args.hub_token), args.hub_base_model_id
        return cls(api, args.hub_deployment, args.deployment_scheme, args.hub_revision, base_model)

    def second_repository(self, repo_id: str | None) -> str | None:
        """The repository of the deployment checkpoint; None if it has none of its own, or the model has none yet."""
        return f"{repo_id}-{self.scheme}" if repo_id is not None and self.deployment == "repository" else None

    @contextmanager
    def pushing(self, args: TrainingArguments, deployment: bool = True) -> Iterator[None]:
        """Has transformers push by this client, with the deployment checkpoint or without.

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
        """Makes the repositories and the branch of a run where they are missing, and checks that they take a push.

        Raises:
            HubError: there is no token, or it may not write there, or the Hub cannot be reached.
        """
        with _explained(repo_id, self.api.endpoint):
            url = self.api.create_repo(repo_id, token=token, private=private, exist_ok=exist_ok)
            # A repository that is there already may be another's.
            self.api.auth_check(url.repo_id, token=token, write=True)
            if self.revision is not None:
                self.api.create_branch(url.repo_id, branch=self.revision, token=token, exist_ok=True)
        if (second := self.second_repository(url.repo_id)) is not None:
            replace(self, deployment="none").create_repo(second, token=token, private=private)
        return url

    def upload_folder(
        self, *, repo_id: str, folder_path: str | Path, run_as_future: bool = False, **options: Any
    ) -> CommitInfo | Future:
        """Sends a run, or with `path_in_repo` one of its checkpoints. The parameters are those of transformers' calls.

        What the Hub has already is not sent again, so a push that failed goes on where it was. Texts go without the
        directories of this machine that they name.

        Returns:
            The commit to `repo_id`, or with `run_as_future` its future.

        Raises:
            HubError: the Hub refused, or the connection was lost more often than the client tries again.
        """
        folder, subfolder = Path(folder_path), self.deployment == "subfolder"
        options["revision"] = options.get("revision") or self.revision
        choice: dict[str, Any] = {"ignore_patterns": [*_NOT_TO_RESUME], "delete_patterns": ["*"]}
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        if options.get("path_in_repo") is None:
            # Listed now: a push in the background may begin later. Weights of an earlier push, whose shards may have
            # had other names, would be loaded as the model's.
            files = run_files(folder, subfolder)
            choice = {
                "allow_patterns": [glob.escape(file) for file in files],
                "ignore_patterns": None,  # transformers' choice
                "delete_patterns": [*_WEIGHTS, f"{DEPLOYMENT_FOLDER}/*"] if subfolder else [*_WEIGHTS],
            }

            self._warn_of_base(folder)

        def send() -> CommitInfo:
            shared = without_local_paths(folder, files, self.base_model)
            with _explained(repo_id, self.api.endpoint), shared as source:
                commit = self.api.upload_folder(repo_id=repo_id, folder_path=source, **options | choice)
            if (second := self.second_repository(repo_id)) is not None:
                served = folder / DEPLOYMENT_FOLDER
                write_text(served / CARD_FILE, str(deployment_card(second, repo_id, str(self.scheme))))
                replace(self, deployment="none").upload_folder(repo_id=second, folder_path=served, **options)
            return commit

        if not run_as_future:
            return send()
        future = self.api.run_as_future(send)
        future.add_done_callback(_warn_of_failure)
        return future

    def _warn_of_base(self, folder: Path) -> None:
        """Says of an adapter whose base is a directory that nobody else can load it."""
        base = local_base(folder) if self.base_model is None else None
        if base is not None:
            logger.warning(
                f"The adapter in {str(folder)!r} adapts {base!r}, a directory of this machine: nobody else can load "
                f"it. Give the Hub id of its base as hub_base_model_id (dc-trl push --base_model), or have "
                f"others use {DEPLOYMENT_FOLDER}/, which is whole."
            )


def hub_api(token: str | None = None) -> HfApi:
    """The Hub's client; the token by default that of the environment or of `hf auth login`."""
    return HfApi(token=token or None, library_name="dc_trl", library_version=__version__)


def push_run(
    folder: str | Path,
    repo_id: str,
    *,
    deployment: HubDeployment = "subfolder",
    scheme: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    base_model: str | None = None,
    token: str | None = None,
) -> str:
    """Pushes a run from its output directory: one that was not pushed, or whose push failed.

    Args:
        repo_id: repository, made where it is missing.
        private: of repositories that are made; by default as the account has it.
        deployment, scheme, revision, base_model: see [`HubClient`].
        token: see [`hub_api`]; it has to have write access.

    Returns:
        The address of the commit.

    Raises:
        ValueError: `folder` holds no model, or no deployment checkpoint for a second repository.
        HubError: the Hub refused or could not be reached.
    """
    folder = Path(folder)
    if not (folder / CARD_FILE).is_file() or not any(file.endswith(".safetensors") for file in run_files(folder)):
        raise ValueError(f"{str(folder)!r} holds no model with its {CARD_FILE}: give the output directory of a run.")
    load_card(folder / CARD_FILE)  # before anything is made on the Hub
    if deployment == "repository" and (scheme is None or not (folder / DEPLOYMENT_FOLDER).is_dir()):
        raise ValueError(
            f"hub_deployment='repository' pushes {str(folder / DEPLOYMENT_FOLDER)!r} to a second repository that is "
            f"named by deployment_scheme={scheme!r}: give both, or hub_deployment='subfolder'."
        )
    client = HubClient(hub_api(token), deployment, scheme, revision, base_model)
    repo_id = client.create_repo(repo_id, private=private).repo_id
    address_card(folder / CARD_FILE, repo_id, client.second_repository(repo_id), base_model)
    commit = client.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Push of a finished run")
    assert isinstance(commit, CommitInfo)
    return commit.commit_url


def push_command(args: DCGRPOConfig, repo_id: str) -> str:
    """The command that pushes a run of these settings later, by [`push_run`]."""
    values = {"--scheme": args.deployment_scheme, "--revision": args.hub_revision}
    values["--base_model"] = args.hub_base_model_id
    words = ["--deployment", args.hub_deployment, *(["--private"] if args.hub_private_repo else [])]
    words += [word for name, value in values.items() if value is not None for word in (name, value)]
    return shlex.join(["dc-trl", "push", args.output_dir, "--repo_id", repo_id, *words])


@contextmanager
def without_token(args: TrainingArguments) -> Iterator[None]:
    """Takes the token out of the arguments for as long as transformers may pickle them into a file."""
    token, args.hub_token = args.hub_token, None
    try:
        yield
    finally:
        args.hub_token = token


@contextmanager
def _explained(repo_id: str, endpoint: str) -> Iterator[None]:
    """Says of an error of the Hub's client which setting is behind it and what to do."""
    try:
        yield
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        match error.__cause__ or error if isinstance(error, RuntimeError) else error:
            case httpx.TransportError() | OfflineModeIsEnabled() as cause:
                reason = f"The Hub at {endpoint} cannot be reached ({cause}): check HF_ENDPOINT, HF_HUB_OFFLINE and "
                reason += "the network."
            case HfHubHTTPError(response=httpx.Response(status_code=401)):
                reason = "The Hub knows no user by this token: log in with `hf auth login`, or set HF_TOKEN or "
                reason += "hub_token to a token with write access."
            case HfHubHTTPError(response=httpx.Response(status_code=403 | 404 as status)):
                reason = f"The token may not write there ({status}): use a token with write access to this "
                reason += "repository, or another hub_model_id."
            case HfHubHTTPError(response=response, server_message=message):
                message = message or response.reason_phrase
                reason = f"{endpoint} answered {response.status_code} ({message}): try again later."
            case cause:
                reason = str(cause)
        raise HubError(f"hub_model_id={repo_id!r} cannot be pushed to. {reason}") from error


def _warn_of_failure(future: Future) -> None:
    if (error := future.exception()) is not None:
        logger.warning(f"A push during training failed, the next one brings what is missing. {error}")
