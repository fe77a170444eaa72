"""The run on the Hub: what a push sends, to which repositories, and what it says when it fails.

transformers pushes whatever lies in the output directory but its checkpoints: logs, pickles, and files that are none
of the run's. [`HubClient`] takes the place of its client and sends what [`run_files`] lists by name. No pickle is
among it but the optimizer's state, where `hub_strategy` asks for checkpoints.
"""

import glob
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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
from ..records.runs import DEPLOYMENT_FOLDER, FIGURE_FILE, HISTORY_FILE, SETTINGS_FILE, SUMMARY_FILE
from ..version import __version__
from .card import CARD_FILE, address_card, deployment_card, load_card


# A model as `save_pretrained` writes it. Of several forms of weights only safetensors.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
)
# A tokenizer or processor, with the names that vocabularies have.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*processor_config.json",
)
RUN_FILES = (CARD_FILE, HISTORY_FILE, FIGURE_FILE, SUMMARY_FILE, SETTINGS_FILE)

# Weights of an earlier push, whose shards may have had other names: a loader would take them for the model's. In these
# patterns, the client's, a * would reach into folders.
_STALE_WEIGHTS = [
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
]

logger = logging.get_logger(__name__)


class HubError(OSError):
    """The Hub refused a push or could not be reached. The message names the field and says what to do."""


def run_files(folder: str | Path, deployment: bool = True) -> list[str]:
    """The files of a run that a push sends, relative to its output directory, sorted.

    Args:
        folder: output directory.
        deployment: with those of the deployment checkpoint.
    """
    folder = Path(folder)
    patterns = [*MODEL_FILES, *TOKENIZER_FILES, *RUN_FILES]
    if deployment:
        patterns += [f"{DEPLOYMENT_FOLDER}/{pattern}" for pattern in (*MODEL_FILES, *TOKENIZER_FILES)]
    return sorted(
        {str(path.relative_to(folder)) for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    )


def deployment_repository(repo_id: str, scheme: str) -> str:
    """The second repository, with `hub_deployment="repository"`."""
    return f"{repo_id}-{scheme}"


def hub_dataset(name: str | None) -> str | None:
    """The name if it can be a data set's on the Hub, OWNER/NAME and no path that is there; else None."""
    is_id = name is not None and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None
    return name if is_id and not Path(str(name)).exists() else None


class HubClient:
    """The Hub as a run pushes to it; stands where transformers has its own client.

    Args:
        deployment: where the deployment checkpoint goes: `"subfolder"` `deployment/`, a second `"repository"` (named
            by the scheme), or `"none"`.
        scheme: deployment scheme; needed for a second repository.
        token: with write access; by default that of the environment or of `hf auth login`.
        revision: branch that is pushed to, and begun where it is missing; by default the main one.
    """

    def __init__(
        self,
        deployment: HubDeployment = "subfolder",
        scheme: str | None = None,
        token: str | None = None,
        revision: str | None = None,
    ):
        if deployment == "repository" and scheme is None:
            raise ValueError(
                "hub_deployment='repository' names the second repository by the deployment scheme, which is unset: "
                "set deployment_scheme, or hub_deployment='subfolder'."
            )
        self._deployment = deployment
        self._scheme = scheme
        self._token = token
        self._revision = revision
        # One for all pushes: what it sends in the background it sends one after the other.
        self._api = HfApi(library_name="dc_trl", library_version=__version__)
        # Pushes while training send the model of a checkpoint, and the deployment checkpoint would be another's.
        self._whole_run = True

    @contextmanager
    def pushing(self, args: TrainingArguments, whole_run: bool = True) -> Iterator[None]:
        """Has transformers push by this client, and holds the token meanwhile: transformers pickles the arguments.

        Args:
            args: arguments of the trainer.
            whole_run: with the deployment checkpoint.
        """
        original, outer = transformers_trainer.hf_api, self._whole_run
        transformers_trainer.hf_api = lambda: self
        self._whole_run = whole_run
        try:
            with without_token(args):
                yield
        finally:
            transformers_trainer.hf_api, self._whole_run = original, outer

    def create_repo(
        self, repo_id: str, *, token: str | None = None, private: bool | None = None, exist_ok: bool = True
    ) -> RepoUrl:
        """Makes the repositories and the branch of a run where they are missing, and checks that they take a push.

        Raises:
            HubError: there is no token, or it may not write there, or the Hub cannot be reached.
        """
        token = token or self._token
        with _explained(repo_id, self._api.endpoint):
            url = self._create(repo_id, token, private, exist_ok)
        if self._deployment == "repository":
            second = deployment_repository(url.repo_id, str(self._scheme))
            with _explained(second, self._api.endpoint):
                self._create(second, token, private, exist_ok)
        return url

    def _create(self, repo_id: str, token: str | None, private: bool | None, exist_ok: bool) -> RepoUrl:
        url = self._api.create_repo(repo_id, token=token, private=private, exist_ok=exist_ok)
        # A repository that is there already may be another's.
        self._api.auth_check(url.repo_id, token=token, write=True)
        if self._revision is not None:
            self._api.create_branch(url.repo_id, branch=self._revision, token=token, exist_ok=True)
        return url

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: str | Path,
        commit_message: str | None = None,
        path_in_repo: str | None = None,
        token: str | None = None,
        revision: str | None = None,
        run_as_future: bool = False,
        ignore_patterns: list[str] | None = None,
    ) -> CommitInfo | Future:
        """Sends a run, or with `path_in_repo` one of its checkpoints. The parameters are those of transformers' calls.

        What the Hub has already is not sent again, so a push that failed goes on where it was.

        Returns:
            The commit to `repo_id`, or with `run_as_future` its future.

        Raises:
            HubError: the Hub refused, or the connection was lost more often than the client tries again.
        """
        folder = Path(folder_path)
        target: dict[str, Any] = {"token": token or self._token, "revision": revision or self._revision}
        target["commit_message"] = commit_message
        subfolder = self._whole_run and self._deployment == "subfolder"
        second = self._whole_run and self._deployment == "repository" and path_in_repo is None
        if path_in_repo is None:
            files = run_files(folder, deployment=subfolder)
            stale = [*_STALE_WEIGHTS, *([f"{DEPLOYMENT_FOLDER}/*"] if subfolder else [])]
        else:
            files, stale = _checkpoint_files(folder), ["*"]

        def upload() -> CommitInfo:
            with _explained(repo_id, self._api.endpoint):
                commit = self._api.upload_folder(
                    repo_id=repo_id,
                    folder_path=folder,
                    path_in_repo=path_in_repo,
                    allow_patterns=[glob.escape(file) for file in files],
                    delete_patterns=stale,
                    **target,
                )
            if second:
                self._upload_deployment(repo_id, folder / DEPLOYMENT_FOLDER, target)
            return commit

        if not run_as_future:
            return upload()
        future = self._api.run_as_future(upload)
        future.add_done_callback(_warn_of_failure)
        return future

    def _upload_deployment(self, model_id: str, folder: Path, target: dict[str, Any]) -> None:
        scheme = str(self._scheme)
        repo_id = deployment_repository(model_id, scheme)
        with _explained(repo_id, self._api.endpoint):
            self._api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                allow_patterns=[*MODEL_FILES, *TOKENIZER_FILES],
                delete_patterns=_STALE_WEIGHTS,
                **target,
            )
            card = str(deployment_card(repo_id, model_id, scheme)).encode()
            self._api.upload_file(repo_id=repo_id, path_or_fileobj=card, path_in_repo=CARD_FILE, **target)


def push_run(
    folder: str | Path,
    repo_id: str,
    *,
    deployment: HubDeployment = "subfolder",
    scheme: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Pushes a run from its output directory: one that was not pushed, or whose push failed.

    What the Hub has already is not sent again.

    Args:
        folder: output directory of the run.
        repo_id: repository, made where it is missing.
        deployment: where the deployment checkpoint goes, see [`HubClient`].
        scheme: its scheme; needed for a second repository.
        private: of repositories that are made; by default as the account has it.
        revision: branch, made where it is missing; by default the main one.
        token: with write access; by default that of the environment or of `hf auth login`.

    Returns:
        Address of the commit.

    Raises:
        ValueError: `folder` holds no model, or no deployment checkpoint for a second repository.
        HubError: the Hub refused or could not be reached.
    """
    folder = Path(folder)
    if not (folder / CARD_FILE).is_file() or not any(file.endswith(".safetensors") for file in run_files(folder)):
        raise ValueError(f"{str(folder)!r} holds no model with its {CARD_FILE}: give the output directory of a run.")
    load_card(folder / CARD_FILE)  # before anything is made on the Hub
    if deployment == "repository" and not (folder / DEPLOYMENT_FOLDER).is_dir():
        raise ValueError(f"{str(folder)!r} holds no {DEPLOYMENT_FOLDER}/: leave the second repository out.")
    client = HubClient(deployment, scheme, token, revision)
    url = client.create_repo(repo_id, private=private)
    second = deployment_repository(url.repo_id, str(scheme)) if deployment == "repository" else None
    address_card(folder / CARD_FILE, url.repo_id, second)
    commit = client.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Push of a finished run")
    assert isinstance(commit, CommitInfo)
    return commit.commit_url


def require_pushable(args: DCGRPOConfig) -> None:
    """Makes the repositories that a run will be pushed to, before anything expensive starts.

    Raises:
        HubError: there is no token, or it may not write there, or the Hub cannot be reached.
    """
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    client = HubClient(args.hub_deployment, args.deployment_scheme, args.hub_token, args.hub_revision)
    client.create_repo(name, private=args.hub_private_repo)


def push_command(args: DCGRPOConfig, repo_id: str) -> str:
    """The command that pushes a run of these settings later, by [`push_run`]."""
    words = ["python", "scripts/push.py", args.output_dir, "--repo_id", repo_id]
    if args.hub_deployment != "subfolder":
        words += ["--deployment", args.hub_deployment]
    if args.hub_deployment == "repository":
        words += ["--scheme", str(args.deployment_scheme)]
    if args.hub_private_repo:
        words.append("--private")
    if args.hub_revision is not None:
        words += ["--revision", args.hub_revision]
    return shlex.join(words)


@contextmanager
def without_token(args: TrainingArguments) -> Iterator[None]:
    """Takes the token out of the arguments for as long as they may be written to a file."""
    token, args.hub_token = args.hub_token, None
    try:
        yield
    finally:
        args.hub_token = token


def _checkpoint_files(folder: Path) -> list[str]:
    """What it takes to resume: all but the pickled arguments, and what is being written under a hidden name."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    hidden = [file for file in files if any(part.startswith(".") for part in file.parts)]
    return sorted(str(file) for file in files if file.name != TRAINING_ARGS_NAME and file not in hidden)


@contextmanager
def _explained(repo_id: str, endpoint: str) -> Iterator[None]:
    """Says of an error of the Hub's client which setting is behind it and what to do."""
    try:
        yield
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        raise HubError(_explanation(cause, repo_id, endpoint)) from error


def _explanation(error: BaseException, repo_id: str, endpoint: str) -> str:
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status == 401:
            return (
                f"hub_model_id={repo_id!r}: the Hub knows no user by this token: log in with `hf auth login`, or set "
                "HF_TOKEN or hub_token to a token with write access."
            )
        if status in (403, 404):
            return (
                f"hub_model_id={repo_id!r}: the token may not write there ({status}): use a token with write access "
                "to this repository, or another hub_model_id."
            )
        reason = error.server_message or error.response.reason_phrase
        return f"hub_model_id={repo_id!r}: {endpoint} answered {status} ({reason}): try again later."
    if isinstance(error, httpx.TransportError | OfflineModeIsEnabled):
        return f"The Hub at {endpoint} cannot be reached ({error}): check HF_ENDPOINT, HF_HUB_OFFLINE and the network."
    return f"hub_model_id={repo_id!r} cannot be pushed to: {error}"


def _warn_of_failure(future: Future) -> None:
    if (error := future.exception()) is not None:
        logger.warning(f"A push during training failed, the next one brings what is missing. {error}")
