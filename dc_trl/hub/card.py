"""The model card: what the Hub shows of a run. The texts are the Jinja templates in this folder."""

import re
from collections.abc import Iterable
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined
from transformers import Trainer
from trl.trainer.utils import get_config_model_id

from ..config import DCGRPOConfig
from ..constraint.settings import ConstraintSettings
from ..files import write_text
from ..records import runs
from ..settings.paths import is_path


CARD_FILE = "README.md"
UNKNOWN_REPOSITORY = "OWNER/MODEL"  # in a card whose repository is not known yet

# Prefixes of fields that have no effect without a constraint.
_OF_A_CONSTRAINT = ("constraint_form", "discrepancy_tolerance", "discrepancy_margin", "dual_", "lambda_")


def write_run_card(trainer: Trainer, model_name: str | None, dataset_name: str | None, tags: Iterable[str]) -> None:
    """Write the card of a run into its output directory, from the files of the run.

    Args:
        trainer: trainer of the run.
        model_name: name in the title; by default that of the output directory.
        dataset_name: training data: a Hub id, a path or a name.
        tags: tags of the model.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    repo_id = trainer.hub_model_id or UNKNOWN_REPOSITORY
    loaded = get_config_model_id(trainer.model.config) or ""
    given = args.hub_base_model_id if isinstance(args, DCGRPOConfig) else None
    base_model = given or loaded
    if dataset_name is not None and hub_dataset(dataset_name) is None:
        dataset_name = Path(dataset_name).name  # a card must not show directories
    summary = runs.read_summary(folder)
    history = folder / runs.HISTORY_FILE
    rows = runs.outcome(runs.Run("", runs.read_history(history))) if history.is_file() else []
    data = ModelCardData(
        base_model=base_model if base_model and not is_path(base_model) else None,
        datasets=hub_dataset(dataset_name),
        library_name="transformers",
        model_name=model_name or folder.absolute().name,
        pipeline_tag="text-generation",
        tags=sorted({"generated_from_trainer", *tags}),
    )
    rendered = _render(
        "model_card.md.jinja",
        data=data,
        repo_id=repo_id,
        base_model=Path(base_model).name,
        dataset_name=dataset_name,
        # A prompt of other data may be private.
        question="40*5=?" if dataset_name == "arithmetic" else "A question like those that it was trained on",
        conversational=trainer.processing_class.chat_template is not None,
        constraint=args.constraint,
        settings=constraint_settings(args),
        summary=summary,
        rows=rows,
        deployed=(folder / runs.DEPLOYMENT_FOLDER / "config.json").is_file(),
        names=runs,
        files={path.name for path in folder.iterdir()},
    )
    write_text(folder / CARD_FILE, rendered)


def hub_dataset(name: str | None) -> str | None:
    """Return the name if it can be that of a data set on the Hub (OWNER/NAME and no existing path), or None."""
    return name if name and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not Path(name).exists() else None


def constraint_settings(args: Any) -> dict[str, Any]:
    """Return the settings of the constraint that are set and have an effect on the training.

    Args:
        args: a `DCGRPOConfig` or an `AsyncDCGRPOConfig`.
    """
    names = (field.name for field in fields(ConstraintSettings))
    not_shown = _OF_A_CONSTRAINT if args.constraint == "none" else ()
    values = {name: getattr(args, name) for name in names if not name.startswith(not_shown)}
    return {name: value for name, value in values.items() if value is not None}


def _render(template: str, **facts: Any) -> str:
    # Markdown is not escaped as HTML is, so the templates quote a user's names as code.
    environment = Environment(loader=PackageLoader("dc_trl", "hub"), undefined=StrictUndefined, trim_blocks=True)
    environment.globals["version"] = version
    environment.filters |= {
        "code": lambda text: f"`{' '.join(text.replace('`', ' ').split())}`",
        "cell": lambda text: text.replace("|", r"\|"),
    }
    return environment.get_template(template).render(facts)
