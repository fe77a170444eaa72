"""The model card: TRL's, with what a run says of its constraint and of its policy as it is deployed."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import Trainer

from ..config import DCGRPOConfig
from ..constraint.settings import ConstraintSettings
from ..files import write_text
from ..records import runs
from ..records.tables import markdown_table
from ..settings.paths import serve_line


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
    history = folder / runs.HISTORY_FILE
    if rows := runs.outcome(runs.Run("", runs.read_history(history))) if history.is_file() else []:
        parts.append(markdown_table(("", "first", "last"), rows))
        parts.append("Greedy reward: of the deployed policy, ± one standard error over held-out problems.")
    if (folder / runs.FIGURE_FILE).is_file():
        alt = "Mean reward, batch discrepancy with its tolerance, and the multiplier over the steps"
        parts.append(f"![{alt}]({runs.FIGURE_FILE})")
    settings = constraint_settings(args)
    parts.append(markdown_table(("setting", "value"), [(f"`{name}`", str(value)) for name, value in settings.items()]))
    deployment = folder / runs.DEPLOYMENT_FOLDER
    if isinstance(args, DCGRPOConfig) and (deployment / "config.json").is_file():
        line = serve_line(deployment).replace(str(deployment), f"model/{deployment.name}")
        parts.append(_SERVE.format(repository=repository, serve=line))
    card.text = "\n\n".join(parts)
    write_text(folder / CARD_FILE, str(card))


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
