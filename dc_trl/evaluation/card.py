"""Evaluation results in the metadata of a model card."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..data.benchmarks import BENCHMARKS
from ..files import append_text, write_text
from ..hub.card import load_card, quoted, with_results
from .results import Evaluation


def eval_results(evaluations: Sequence[Evaluation]) -> list[EvalResult]:
    """Return avg@k, pass@k and maj@k of each benchmark and scheme in the model card's format, in percent."""
    results = []
    for evaluation in evaluations:
        for name, result in evaluation.results.items():
            source = BENCHMARKS[name]
            metrics = {
                f"avg@{result.samples}": result.avg,
                f"pass@{result.samples}": result.pass_at[result.samples],
                f"maj@{result.samples}": result.maj,
            }
            results += [
                EvalResult(
                    task_type="text-generation",
                    dataset_type=source.hub_id or name,
                    dataset_name=name,
                    dataset_config=source.config,
                    dataset_split=source.split,
                    dataset_revision=source.revision or None,
                    dataset_args={"scheme": evaluation.scheme},
                    metric_type=metric.split("@")[0],
                    metric_name=f"{metric}, {evaluation.scheme}",
                    metric_value=round(100 * estimate.value, 2),
                )
                for metric, estimate in metrics.items()
            ]
    return results


def write_eval_results(card: str | Path, evaluations: Sequence[Evaluation]) -> None:
    """Write the results of one model into its card (README.md), and make a card if there is none.

    The card's text, its other metadata, and the results of other metrics, data sets and schemes stay.
    """
    path = Path(card)
    name = Path(evaluations[0].model).name
    begun = f"---\nlibrary_name: transformers\n---\n\n# {quoted(name)}\n"
    content = load_card(path) if path.is_file() else ModelCard(begun)
    assert isinstance(content.data, ModelCardData)
    content.data.model_name = content.data.model_name or name
    content.data.eval_results = with_results(content.data.eval_results, eval_results(evaluations))
    write_text(path, str(content))


def require_card(path: Path) -> None:
    """Refuse a card that `write_eval_results` could not write, before anything is measured.

    Raises:
        ValueError: the card cannot be written or read; the message names it and the reason.
    """
    begun = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_text(path, "")  # does not change a card that exists
    except OSError as error:
        raise ValueError(
            f"card={str(path)!r} cannot be written ({error.strerror}): name a file, README.md."
        ) from error
    if begun:
        path.unlink()
    else:
        load_card(path)
