"""What of a run goes to the Hub: its model card and its files; and what an error of the Hub means.

transformers pushes whatever lies in the output directory except checkpoints: logs, pickles, and files of the user.
[`HubClient`] takes the place of its client and sends the files that [`run_files`] lists by name. None of them is a
pickle, except the optimizer's state if `hub_strategy` asks for checkpoints.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, RepoUrl
from huggingface_hub.utils import filter_repo_objects
from transformers import Trainer, TrainingArguments
from transformers import trainer as transformers_trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import logging

from ..config import DCGRPOConfig
from ..constraint.settings import ConstraintSettings
from ..files import read_text, write_text
from ..quantization.contract import CONTRACT_FILE
from ..records.runs import (
    DEPLOYMENT_FOLDER,
    FIGURE_FILE,
    HISTORY_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    Run,
    outcome,
    read_history,
)
from ..records.tables import markdown_table
from ..settings.paths import ADAPTER_FOLDER, serve_line
from ..version import __version__


logger = logging.get_logger(__name__)

CARD_FILE = "README.md"
# Prefixes of fields that have no effect without a constraint.
_OF_A_CONSTRAINT = ("constraint_form", "discrepancy_tolerance", "discrepancy_margin", "dual_", "lambda_")
_METHODS = {
    "none": "GRPO with the discrepancy of DC-GRPO {} measured and not constrained.",
    "static": "Dual-GRPO {}: the discrepancy is penalised with a fixed multiplier λ.",
    "lagrangian": "DC-GRPO {}: the discrepancy is constrained with a Lagrange multiplier λ.",
}
_PAPER = "([arXiv 2606.08779](https://huggingface.co/papers/2606.08779))"
_SERVE = """### Serve it as it was trained

`deployment/` is the checkpoint that sampled:

```bash
hf download {repository} --include "deployment/*" --local-dir model
{serve}
```
"""


def complete_card(trainer: Trainer) -> None:
    """Add the run to the card that TRL has written into its output directory, from the files of the run."""
    args, folder = trainer.args, Path(trainer.args.output_dir)
    card = ModelCard.load(folder / CARD_FILE)
    card.data.pipeline_tag = "text-generation"
    base = args.hub_base_model_id if isinstance(args, DCGRPOConfig) else None
    card.data.base_model = base or card.data.base_model
    known = f"[{base}](https://huggingface.co/{base})" if base else "a model that is not on the Hub"
    repository = trainer.hub_model_id or "OWNER/MODEL"
    text = card.text.replace("[None](https://huggingface.co/None)", known)
    parts = [text.replace('model="None"', f'model="{repository}"'), "## The run"]
    parts.append(
        f"{_METHODS[args.constraint].format(_PAPER)} The discrepancy δ of a token is the difference between the "
        "probabilities that the training engine and the sampling engine give it; δ̄ is its mean over a batch."
    )
    history = folder / HISTORY_FILE
    if rows := outcome(Run("", read_history(history))) if history.is_file() else []:
        parts.append(markdown_table(("", "first", "last"), rows))
        parts.append("Greedy reward: of the deployed policy, ± one standard error over held-out problems.")
    if (folder / FIGURE_FILE).is_file():
        alt = "Mean reward, batch discrepancy with its tolerance, and the multiplier over the steps"
        parts.append(f"![{alt}]({FIGURE_FILE})")
    without_effect = _OF_A_CONSTRAINT if args.constraint == "none" else ()
    rows = [
        [f"`{field.name}`", str(value)]
        for field in fields(ConstraintSettings)
        if not field.name.startswith(without_effect) and (value := getattr(args, field.name)) is not None
    ]
    parts.append(markdown_table(("setting", "value"), rows))
    deployment = folder / DEPLOYMENT_FOLDER
    if isinstance(args, DCGRPOConfig) and (deployment / "config.json").is_file():
        line = serve_line(deployment).replace(str(deployment), f"model/{deployment.name}")
        parts.append(_SERVE.format(repository=repository, serve=line))
    card.text = "\n\n".join(parts)
    write_text(folder / CARD_FILE, str(card))


def hub_dataset(name: str | None) -> str | None:
    """Return the name if it can be that of a data set on the Hub (OWNER/NAME and no existing path), or None."""
    return name if name and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not Path(name).exists() else None


# --- its files


# Patterns of the files that `save_pretrained` writes; of several forms of weights only safetensors. Each ? is a digit
# of a shard's number: files are also deleted by these patterns, and a * would reach into folders.
WEIGHTS = (
    *("model.safetensors", "adapter_model.safetensors"),
    *("model-?????-of-?????.safetensors", "model.safetensors.index.json"),
)
_CONFIGURATIONS = ("config.json", "generation_config.json", "adapter_config.json", "*processor_config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_VOCABULARIES = ("vocab.*", "merges.txt", "*.model", "*.tiktoken")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
MODEL_FILES = (*WEIGHTS, *_CONFIGURATIONS, *_TOKENIZERS, *_VOCABULARIES, *_TEMPLATES)
RUN_FILES = (CARD_FILE, HISTORY_FILE, FIGURE_FILE, SUMMARY_FILE, SETTINGS_FILE)

# Files of a checkpoint that resuming does not need: pickled arguments, unfinished files, and the card that PEFT writes
# beside each adapter, whose base the Hub refuses if it is a directory.
_NOT_TO_RESUME = [f"*{TRAINING_ARGS_NAME}", f"*{CARD_FILE}", ".*", "*/.*"]
# Files that may name directories of this machine, and an absolute path in JSON: a text, or what follows an option's =.
_WITH_PATHS = ("config.json", "adapter_config.json", CONTRACT_FILE, "trainer_state.json", SETTINGS_FILE, HISTORY_FILE)
_ABSOLUTE = re.compile(r'(?<=["=])(?:file://)?/(?:[^"/\n]+/)+([^"/\n]+)/?(?=")')


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
        folders = (DEPLOYMENT_FOLDER, f"{DEPLOYMENT_FOLDER}/{ADAPTER_FOLDER}")
        patterns += [f"{each}/{pattern}" for each in folders for pattern in (*MODEL_FILES, CONTRACT_FILE)]
    files = {path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(folder)) for path in files)


class HubClient:
    """The client with which a run pushes; it takes the place of transformers' own.

    Args:
        args: of the run. Without a token the environment's is used.
    """

    def __init__(self, args: DCGRPOConfig):
        self._args = args
        self._api = HfApi(token=args.hub_token or None, library_name="dc_trl", library_version=__version__)
        self._with_deployment = True

    @contextmanager
    def pushing(self, deployment: bool = True) -> Iterator[None]:
        """Make transformers push with this client, with the deployment checkpoint or without.

        transformers has no public place for a client, or for a choice of files: its `push_to_hub` and
        `_push_from_checkpoint` take the client from this function of their module.
        """
        original = transformers_trainer.hf_api
        transformers_trainer.hf_api = lambda: self
        self._with_deployment = deployment
        try:
            with without_token(self._args):
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
            url = self._api.create_repo(repo_id, token=token, private=private, exist_ok=exist_ok)
            # An existing repository may belong to someone else.
            self._api.auth_check(url.repo_id, token=token, write=True)
            if self._args.hub_revision is not None:
                self._api.create_branch(url.repo_id, branch=self._args.hub_revision, token=token, exist_ok=True)
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
        """Push a run, or with `path_in_repo` one of its checkpoints, in one commit; as `HfApi.upload_folder`.

        Settings and configurations are sent without directories of this machine. transformers' choice of files, in
        `options`, has no effect.

        Raises:
            HubError: the Hub refused, or the connection was lost more often than the client tries again.
        """
        folder, revision = Path(folder_path), revision or self._args.hub_revision
        # The files are listed now, since a push in the background may begin later.
        if path_in_repo is None:
            files, prefix = run_files(folder, self._with_deployment), ""
            # Shards of an earlier push, which may have had other names, would be loaded as the model's weights.
            replaced = [
                *(WEIGHTS if any(filter_repo_objects(files, allow_patterns=[*WEIGHTS])) else ()),
                *([f"{DEPLOYMENT_FOLDER}/*"] if self._with_deployment else []),
            ]
        else:
            found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            files, prefix = sorted(filter_repo_objects(found, ignore_patterns=_NOT_TO_RESUME)), f"{path_in_repo}/"
            replaced = [f"{path_in_repo}/*"]

        def send() -> CommitInfo:
            with _explained(repo_id):
                added = {prefix + name: self._content(folder / name) for name in files}
                there = self._api.list_repo_files(repo_id, revision=revision, token=token)
                old = [name for name in filter_repo_objects(there, allow_patterns=replaced) if name not in added]
                operations: list[Any] = [CommitOperationDelete(name) for name in old]
                operations += [CommitOperationAdd(name, content) for name, content in added.items()]
                return self._api.create_commit(
                    repo_id, operations, commit_message=commit_message, revision=revision, token=token
                )

        if not run_as_future:
            return send()
        future = self._api.run_as_future(send)
        future.add_done_callback(_warn_of_failure)
        return future

    def _content(self, path: Path) -> Path | bytes:
        """Return what is sent of a file: the last part alone of each path of this machine."""
        if path.name not in _WITH_PATHS:
            return path
        text = read_text(path)
        if path.name == "adapter_config.json" and (base := self._args.hub_base_model_id) is not None:
            text = json.dumps(json.loads(text) | {"base_model_name_or_path": base}, indent=2)
        return _ABSOLUTE.sub(r"\1", text).encode()


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
        logger.warning(f"A push during training failed; the next push sends its files again. {error}")
