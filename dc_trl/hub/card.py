"""The model card: what the Hub shows of a run. The texts are the Jinja templates in this folder."""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, parse_local_safetensors_file_metadata
from huggingface_hub.errors import SafetensorsParsingError
from jinja2 import Environment, PackageLoader, StrictUndefined
from transformers import Trainer
from transformers.utils import logging
from trl.trainer.utils import get_comet_experiment_url, get_config_model_id, get_trackio_space_url

from ..config import DCGRPOConfig
from ..files import read_text, set_aside, write_text
from ..records import runs
from ..records.tables import with_error
from .local_paths import hub_id_of, is_directory


CARD_FILE = "README.md"
# What a card says where it does not know its repository yet.
UNKNOWN_REPOSITORY = "OWNER/MODEL"

# Metadata of the earlier card that no run knows: the new card takes it over.
_KEPT_METADATA = ("language", "license", "license_link", "license_name")
# By the digest, an edited card is told from one that may be written anew.
_SIGNATURE = re.compile(r"\n*<!-- dc_trl wrote the text above, sha256 [0-9a-f]{64} -->\n*$")

# How fields begin that have no effect where nothing is constrained.
_OF_A_CONSTRAINT = ("constraint_form", "discrepancy_tolerance", "discrepancy_margin", "dual_", "lambda_")
# What to ask a model that was trained on problems of our own making. Of other data a prompt may be private, and no
# question fits all models.
_QUESTIONS = {"arithmetic": "40*5=?"}
_ANY_QUESTION = "A question like those that it was trained on"

logger = logging.get_logger(__name__)


def load_card(path: Path) -> ModelCard:
    """Reads a model card.

    Raises:
        ValueError: it is no text, or its metadata cannot be read; the message names it.
        OSError: it cannot be read.
    """
    read_text(path)
    try:
        return ModelCard.load(path)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        # The Hub's client raises the last three on metadata of another shape.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} has metadata that cannot be read ({reason}): repair the card.") from error


def write_run_card(
    trainer: Trainer, deployment_id: str | None, model_name: str | None, dataset_name: str | None, tags: Iterable[str]
) -> None:
    """Writes the card of a run into its output directory, by what the run's files say.

    A card that a user wrote or edited is kept as README.1.md, and so on. Evaluation results, license and language of
    the earlier card stay.

    Args:
        trainer: of the run; [`address_card`] writes its repository where it is not known yet.
        deployment_id: repository of the deployment checkpoint, if it has one of its own.
        model_name: by default that of the output directory.
        dataset_name: what the model was trained on: a Hub id, a path or a name.
        tags: besides those of the trainer.

    Raises:
        ValueError: the summary or the history of the run cannot be read; the message names the file.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    repo_id = trainer.hub_model_id or UNKNOWN_REPOSITORY
    loaded = get_config_model_id(trainer.model.config) or ""
    given = args.hub_base_model_id if isinstance(args, DCGRPOConfig) else None
    base_model = given or hub_id_of(loaded) or loaded
    if dataset_name is not None and hub_dataset(dataset_name) is None:
        dataset_name = Path(dataset_name).name  # the card is no place for somebody's directories
    wandb = sys.modules.get("wandb")  # a run that it tracks has imported it; the import takes seconds
    dashboard = get_trackio_space_url()
    trackers = {
        "Weights & Biases": wandb.run.url if wandb is not None and wandb.run is not None else None,
        "Trackio": dashboard,
        "Comet": get_comet_experiment_url(),
    }
    shown = [] if dashboard is None else [f"trackio:{dashboard}"]  # by this tag, the Hub shows it
    summary = runs.read_summary(folder)
    measured = _measured(folder, args, summary)
    results = _held_out_results(summary.get("after", {}), dataset_name, args.deployment_scheme)
    earlier = _set_card_aside(folder / CARD_FILE)
    data = ModelCardData(
        base_model=base_model if base_model and not is_directory(base_model) else None,
        datasets=hub_dataset(dataset_name),
        library_name="transformers",
        model_name=model_name or folder.absolute().name,
        pipeline_tag="text-generation",
        tags=sorted({"generated_from_trainer", *trainer.tag_names, *tags, *shown}),
        eval_results=with_results(earlier.eval_results, results) or None,
        **{name: earlier.get(name) for name in _KEPT_METADATA},
    )
    rendered = _render(
        "model_card.md.jinja",
        data=data,
        repo_id=repo_id,
        base_model=Path(base_model).name,
        dataset_name=dataset_name,
        question=_QUESTIONS.get(dataset_name or "", _ANY_QUESTION),
        conversational=trainer.processing_class.chat_template is not None,
        constraint=args.constraint,
        settings=constraint_settings(args),
        weights=_parameter_counts(folder),
        summary=summary,
        measured=measured,
        serving=_serving(folder, repo_id, deployment_id),
        names=runs,
        files={path.name for path in folder.iterdir()},
        trackers=trackers,
    )
    card = ModelCard(rendered)
    card.text = _signed(card.text)
    write_text(folder / CARD_FILE, str(card))


def address_card(path: Path, repo_id: str, deployment_id: str | None, base_model: str | None = None) -> None:
    """Writes the repositories of model, deployment checkpoint and base into a run's card that did not know them."""
    card = load_card(path)
    if base_model is not None:
        card.data["base_model"] = base_model
    ours = card.text == _signed(card.text)
    for name in (UNKNOWN_REPOSITORY, repo_id):
        if serving := _serving(path.parent, name, None):
            card.text = card.text.replace(serving, _serving(path.parent, repo_id, deployment_id))
    card.text = card.text.replace(UNKNOWN_REPOSITORY, repo_id)
    if ours:
        card.text = _signed(card.text)
    write_text(path, str(card))


def deployment_card(repo_id: str, model_id: str, scheme: str) -> ModelCard:
    """The card of a repository that holds the deployment checkpoint of the model in another one, `model_id`."""
    return ModelCard(_render("deployment_card.md.jinja", repo_id=repo_id, model_id=model_id, scheme=scheme))


def hub_dataset(name: str | None) -> str | None:
    """The name if it can be a data set's on the Hub, OWNER/NAME and no path that is there; else None."""
    return name if name and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not Path(name).exists() else None


def with_results(known: Sequence[EvalResult] | None, new: Sequence[EvalResult]) -> list[EvalResult]:
    """Results with new ones in place of those of the same metric, data set and scheme."""
    replaced = {(result.unique_identifier, result.metric_name) for result in new}
    kept = [result for result in known or () if (result.unique_identifier, result.metric_name) not in replaced]
    return [*kept, *new]


def constraint_settings(args: Any) -> dict[str, Any]:
    """The fields that DC-GRPO adds to TRL's, where they are set and have an effect; not how to reach a server or Hub.

    Args:
        args: a `DCGRPOConfig` or an `AsyncDCGRPOConfig`.
    """
    theirs = {
        field.name
        for base in type(args).__mro__
        if is_dataclass(base) and base.__module__.partition(".")[0] in ("transformers", "trl")
        for field in fields(base)
    }
    not_shown = ("vllm_", "hub_", *(_OF_A_CONSTRAINT if args.constraint == "none" else ()))
    names = [field.name for field in fields(args) if field.name not in theirs | {"weight_sync", "weight_sync_dir"}]
    values = {name: getattr(args, name) for name in names if not name.startswith(not_shown)}
    return {name: value for name, value in values.items() if value is not None}


def quoted(name: str) -> str:
    """A name that somebody chose for a file or a data set, in Markdown: as code, so that nothing in it is markup."""
    text = " ".join(name.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"


def _render(template: str, **facts: Any) -> str:
    # Markdown is not escaped as HTML is: the templates quote what somebody chose as code.
    environment = Environment(loader=PackageLoader("dc_trl", "hub"), undefined=StrictUndefined, trim_blocks=True)
    environment.globals |= {"version": version, "with_error": with_error}
    environment.filters |= {"code": quoted, "cell": lambda text: text.replace("|", r"\|")}
    return environment.get_template(template).render(facts)


def _serving(folder: Path, repo_id: str, deployment_id: str | None) -> str:
    """How to serve the deployment checkpoint, "" if there is none. Markdown."""
    if deployment_id is None and not (folder / runs.DEPLOYMENT_FOLDER / "config.json").is_file():
        return ""
    return _render("serving.md.jinja", repo_id=repo_id, deployment_id=deployment_id, folder=runs.DEPLOYMENT_FOLDER)


def _parameter_counts(folder: Path) -> Counter[str]:
    """How many parameters of each dtype the weights in a folder hold."""
    files = [*folder.glob("model*.safetensors")] or folder.glob("adapter_model.safetensors")
    try:
        return sum((Counter(parse_local_safetensors_file_metadata(file).parameter_count) for file in files), Counter())
    except SafetensorsParsingError:  # of a run that was killed; a card is no reason to end the one that goes on
        return Counter()


def _measured(folder: Path, args: Any, summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Reward, discrepancy and λ at two times, with the times' names: by the summary, or else by the history."""
    if summary:
        multiplier = {"before": args.lambda_init, "after": summary.get("lambda")} if args.constraint != "none" else {}
        return [(when, {**summary.get(when, {}), "lambda": multiplier.get(when)}) for when in ("before", "after")]
    path = folder / runs.HISTORY_FILE
    rows = [row for row in runs.read_history(path) if "discrepancy/mean" in row] if path.is_file() else []
    names = {"reward": "reward", "discrepancy": "discrepancy/mean", "lambda": "lagrangian/lambda"}
    ends = [rows[0], rows[-1]] if rows else []
    return [(f"step {row['step']}", {name: row.get(key) for name, key in names.items()}) for row in ends]


def _held_out_results(after: Mapping[str, Any], dataset_name: str | None, scheme: str | None) -> list[EvalResult]:
    if dataset_name is None or after.get("greedy") is None:
        return []
    metrics = [
        ("greedy", "reward", "mean reward of greedy completions"),
        ("discrepancy", "discrepancy", "mean discrepancy"),
    ]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset_name,
            dataset_name=f"{dataset_name}, held out",
            metric_type=kind,
            metric_name=f"{label}, {scheme}" if scheme else label,
            metric_value=float(f"{after[key]:.4g}"),
        )
        for key, kind, label in metrics
        if after.get(key) is not None
    ]


def _set_card_aside(path: Path) -> ModelCardData:
    """Makes room for a new card: one that a user wrote or edited is kept under another name.

    Returns the metadata of the earlier card, empty if there is none or it cannot be read.
    """
    card = ModelCard("---\n{}\n---\n")
    if path.is_file():
        with suppress(ValueError, yaml.YAMLError):
            card = ModelCard.load(path, ignore_metadata_errors=True)
        if card.text != _signed(card.text):
            kept = set_aside([path])[path]
            logger.warning(f"{path} was not written by this trainer, or was edited, and is kept as {kept.name}.")
    assert isinstance(card.data, ModelCardData)
    return card.data


def _signed(text: str) -> str:
    """The text with a digest in place of an earlier one."""
    text = _SIGNATURE.sub("", text).strip()
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"\n{text}\n\n<!-- dc_trl wrote the text above, sha256 {digest} -->\n"
