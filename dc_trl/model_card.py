"""The model card: what the Hub shows of a model's evaluations."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .data.benchmarks import BENCHMARKS
from .results import Evaluation


def eval_results(evaluations: Sequence[Evaluation]) -> list[EvalResult]:
    """Evaluations in the model card's format: avg@k, pass@k and maj@k of each benchmark and scheme, in percent."""
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
    """Writes `eval_results` into a model card, which is begun when it is not there.

    The card's text, its other metadata and the results of other metrics, data sets and schemes stay.

    Args:
        card: the README.md of a model.
        evaluations: of one model, in one or several schemes.
    """
    path = Path(card)
    name = Path(evaluations[0].model).name
    begun = f"---\nlibrary_name: transformers\n---\n\n# {name}\n"
    content = ModelCard.load(path) if path.is_file() else ModelCard(begun)
    assert isinstance(content.data, ModelCardData)
    new = eval_results(evaluations)
    replaced = {(result.unique_identifier, result.metric_name) for result in new}
    known = content.data.eval_results or []
    kept = [result for result in known if (result.unique_identifier, result.metric_name) not in replaced]
    content.data.model_name = content.data.model_name or name
    content.data.eval_results = [*kept, *new]
    content.save(path)
