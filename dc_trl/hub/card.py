"""The model card: what the Hub shows of a run, and of a model's evaluations."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from transformers.utils import logging
from trl import GRPOConfig

from ..config import DCGRPOConfig
from ..data.benchmarks import BENCHMARKS
from ..evaluation.results import Evaluation
from ..files import read_text, set_aside
from ..records.runs import (
    DEPLOYMENT_FOLDER,
    FIGURE_FILE,
    HISTORY_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    read_history,
    read_summary,
)
from ..records.tables import markdown_table, with_error


CARD_FILE = "README.md"

# What a card says where it does not know its repository yet.
UNKNOWN_REPOSITORY = "OWNER/MODEL"
# Metadata of a card that no run knows and that a new one takes over.
_KEPT_METADATA = ("language", "license", "license_link", "license_name")
_SIGNATURE = re.compile(r"\n*<!-- dc_trl wrote the text above, sha256 ([0-9a-f]{64}) -->\n*$")

logger = logging.get_logger(__name__)


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
    begun = f"---\nlibrary_name: transformers\n---\n\n# {quoted(name)}\n"
    content = load_card(path) if path.is_file() else ModelCard(begun)
    assert isinstance(content.data, ModelCardData)
    content.data.model_name = content.data.model_name or name
    content.data.eval_results = _with_results(content.data.eval_results, eval_results(evaluations))
    content.save(path)


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
        # The last three are what the Hub's client trips over in metadata of another shape.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} has metadata that cannot be read ({reason}): repair the card.") from error


def require_card(path: Path) -> None:
    """Refuses a card that `write_eval_results` could not write, before what it is to say is measured.

    Raises:
        ValueError: names it and the reason.
    """
    try:
        if path.exists():
            load_card(path)
            with path.open("r+b"):
                pass
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"card={str(path)!r} cannot be written ({error.strerror}): name a file, README.md."
        ) from error


def quoted(name: str) -> str:
    """A name that somebody chose for a file or a data set, in Markdown: as code, so that nothing in it is markup."""
    text = " ".join(name.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"


@contextmanager
def unchanged_card(path: Path) -> Iterator[None]:
    """Leaves a card as it is, or away, where PEFT writes into it or begins one whenever it saves an adapter."""
    content = path.read_bytes() if path.is_file() else None
    try:
        yield
    finally:
        if content is not None:
            path.write_bytes(content)
        else:
            path.unlink(missing_ok=True)


def set_card_aside(path: Path) -> ModelCardData | None:
    """Makes room for a new card: one that a user wrote or edited is kept as README.1.md, and so on.

    Returns:
        Metadata of the earlier card, None if there is none.
    """
    if not path.is_file():
        return None
    try:
        card = ModelCard.load(path, ignore_metadata_errors=True)
    except (ValueError, yaml.YAMLError):
        card = ModelCard("---\n{}\n---\n")
    if not _is_ours(card.text):
        (kept,) = set_aside([path])
        logger.warning(f"{path} was not written by this trainer, or was edited, and is kept as {kept.name}.")
    assert isinstance(card.data, ModelCardData)
    return card.data


def complete_card(
    path: Path,
    earlier: ModelCardData | None,
    args: DCGRPOConfig,
    model_name: str,
    repo_id: str | None,
    base_model: str | None,
    dataset_name: str | None,
    deployment_id: str | None,
) -> None:
    """Completes the card that TRL drew up by what the run's files say.

    Args:
        path: the card, in the run's output directory.
        earlier: metadata of the card before it, whose evaluation results, license and language stay.
        args: settings of the run.
        model_name: name of the model.
        repo_id: repository that the card is for, None if it is not known yet: see [`address_card`].
        base_model: Hub id or directory of the model that was trained.
        dataset_name: what it was trained on: a Hub id, a path or a name.
        deployment_id: the second repository, if the deployment checkpoint has one.
    """
    card = ModelCard.load(path)
    data = card.data
    assert isinstance(data, ModelCardData)
    data.pop("licence")  # TRL's placeholder
    data.pipeline_tag = "text-generation"
    data.tags = sorted(set(data.tags or ()))
    known = None
    if earlier is not None:
        known = earlier.eval_results
        for name in _KEPT_METADATA:
            data[name] = data.get(name) or earlier.get(name)
    data.model_name = model_name
    if dataset_name is not None and not data.datasets:
        dataset_name = Path(dataset_name).name  # the card is no place for somebody's directories
    summary = read_summary(path.parent)
    data.eval_results = _with_results(known, _held_out_results(summary, dataset_name, args.deployment_scheme)) or None

    text = card.text
    if data.base_model is None:
        # TRL links the base model and the data set whether or not they are on the Hub.
        name = quoted(Path(base_model).name) if base_model else "a model that is not on the Hub"
        text = text.replace("[None](https://huggingface.co/None)", name)
    if dataset_name is not None and not data.datasets:
        text = text.replace(
            "\nIt has been trained", f"\nTrained on: {quoted(dataset_name)}.\n\nIt has been trained", 1
        )
    repo_id = repo_id or UNKNOWN_REPOSITORY
    text = text.replace('model="None"', f'model="{repo_id}"')
    section = run_section(path.parent, args, summary, data.eval_results or (), repo_id, deployment_id)
    before, heading, after = text.partition("## Training procedure")
    card.text = _signed(f"{before}{section}\n{heading}{after}")
    card.save(path)


def address_card(path: Path, repo_id: str, deployment_id: str | None) -> None:
    """Writes the repositories into a card that was written before they were known.

    Args:
        path: the card, in the run's output directory.
        repo_id: repository that the card goes to.
        deployment_id: the second repository, if the deployment checkpoint has one.
    """
    card = load_card(path)
    signed = _is_ours(card.text)
    text = _SIGNATURE.sub("", card.text) if signed else card.text
    for name in (UNKNOWN_REPOSITORY, repo_id):
        if unknown := _serving(path.parent, name, None):
            text = text.replace(unknown, _serving(path.parent, repo_id, deployment_id))
    text = text.replace(UNKNOWN_REPOSITORY, repo_id)
    card.text = _signed(text) if signed else text
    card.save(path)


def run_section(
    folder: Path,
    args: DCGRPOConfig,
    summary: dict[str, Any],
    results: Sequence[EvalResult],
    repo_id: str,
    deployment_id: str | None,
) -> str:
    """What a run did, from the files in its output directory; what they do not say is left out. Markdown."""
    parts = ["## The run", _introduction(folder, args)]
    if changes := _changes(folder, args, summary):
        parts += [markdown_table(*changes), _explanation(summary)]
    if (folder / FIGURE_FILE).is_file():
        parts += [
            f"![Mean reward, batch discrepancy with its tolerance, and the multiplier over the steps]({FIGURE_FILE})"
        ]
    if results:
        rows = [
            (
                result.dataset_name if result.dataset_name in BENCHMARKS else quoted(result.dataset_name),
                f"{result.metric_name or result.metric_type}",
                f"{result.metric_value:g}",
            )
            for result in results
        ]
        parts += ["### Evaluation", markdown_table(("data", "metric", "value"), rows)]
    settings = [(f"`{name}`", f"{value}") for name, value in constraint_settings(args).items()]
    parts += ["### Constraint", markdown_table(("setting", "value"), settings)]
    if serving := _serving(folder, repo_id, deployment_id):
        parts += ["### Serve it as it was trained", serving]
    files = {
        HISTORY_FILE: "every log of the run, λ (`lagrangian/lambda`) and discrepancy (`discrepancy/mean`) among it",
        SUMMARY_FILE: "before and after",
        SETTINGS_FILE: "settings of the run",
    }
    listed = [(f"`{file}`", what) for file, what in files.items() if (folder / file).is_file()]
    if listed:
        parts += ["### Files", markdown_table(("file", "what is in it"), listed)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def constraint_settings(args: DCGRPOConfig) -> dict[str, Any]:
    """The fields that DC-GRPO adds to GRPO, without those that say how to reach a server or the Hub."""
    inherited = {field.name for field in fields(GRPOConfig)}
    names = [field.name for field in fields(args) if field.name not in inherited]
    return {name: getattr(args, name) for name in names if not name.startswith(("weight_sync", "vllm_", "hub_"))}


def deployment_card(repo_id: str, model_id: str, scheme: str) -> ModelCard:
    """The card of a repository that holds a deployment checkpoint.

    Args:
        repo_id: the repository.
        model_id: the repository of the model that was trained.
        scheme: deployment scheme.
    """
    quantized = scheme != "bf16"
    data = ModelCardData(
        base_model=model_id,
        base_model_relation="quantized",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*(["compressed-tensors"] if quantized else []), "dc-grpo", scheme, "vllm"],
    )
    text = f"""
# {repo_id.split("/")[-1]}

[{model_id}](https://huggingface.co/{model_id}) in the scheme `{scheme}`: the policy as it sampled while it was trained
with [DC-GRPO](https://huggingface.co/papers/2606.08779){", in the format of compressed-tensors" if quantized else ""}.
Settings, history and results are in that repository.

```bash
vllm serve {repo_id}
```
"""
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}")


def _introduction(folder: Path, args: DCGRPOConfig) -> str:
    paper = "[arXiv 2606.08779](https://huggingface.co/papers/2606.08779)"
    method = {
        "none": f"GRPO with the discrepancy of DC-GRPO ({paper}) measured and not constrained.",
        "static": f"Dual-GRPO ({paper}): the discrepancy is penalised with a fixed multiplier λ.",
        "lagrangian": f"DC-GRPO ({paper}): the discrepancy is constrained with a Lagrange multiplier λ.",
    }[args.constraint]
    meaning = (
        "The discrepancy δ of a token is the difference between the probabilities that the training engine and the "
        "sampling engine give it; δ̄ is its mean over a batch."
    )
    weights = _weights(folder.glob("model*.safetensors")) or _weights(folder.glob("adapter_model.safetensors"))
    return f"{method} {meaning}" + (f" The weights here are {weights}." if weights else "")


def _weights(files: Iterable[Path]) -> str:
    """Number and dtypes of the parameters in safetensors files, "" if there are none."""
    counts: dict[str, int] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                tensor = tensors.get_slice(name)
                size = 1
                for length in tensor.get_shape():
                    size *= length
                counts[tensor.get_dtype()] = counts.get(tensor.get_dtype(), 0) + size
    return ", ".join(f"{count:,} parameters in {dtype}" for dtype, count in sorted(counts.items()))


def _changes(
    folder: Path, args: DCGRPOConfig, summary: dict[str, Any]
) -> tuple[tuple[str, str, str], list[tuple[str, str, str]]] | None:
    """Header and rows of what the training changed."""
    rows: list[tuple[str, str, str]] = []
    if summary:
        before, after = summary.get("before", {}), summary["after"]
        if before.get("greedy") is not None and after.get("greedy") is not None:
            first, last = (with_error(m["greedy"], m.get("greedy_se"), 1, 3) for m in (before, after))
            problems = f"{after.get('problems', '')} held-out problems".strip()
            rows.append((f"mean reward of greedy completions, {problems}", first, last))
        for label, key in (("mean reward of sampled completions", "reward"), ("discrepancy δ̄", "discrepancy")):
            if before.get(key) is not None and after.get(key) is not None:
                rows.append((label, f"{before[key]:.3g}", f"{after[key]:.3g}"))
        if args.constraint != "none" and "lambda" in summary:
            rows.append(("multiplier λ", f"{args.lambda_init:.4g}", f"{summary['lambda']:.4g}"))
        return (("", "before", "after"), rows) if rows else None
    history = folder / HISTORY_FILE
    measured = [row for row in read_history(history) if "discrepancy/mean" in row] if history.is_file() else []
    if not measured:
        return None
    start, end = measured[0], measured[-1]
    labels = {"reward": "mean reward", "discrepancy/mean": "discrepancy δ̄", "lagrangian/lambda": "multiplier λ"}
    for key, label in labels.items():
        if start.get(key) is not None and end.get(key) is not None:
            rows.append((label, f"{start[key]:.4g}", f"{end[key]:.4g}"))
    return ("", f"step {start['step']}", f"step {end['step']}"), rows


def _explanation(summary: dict[str, Any]) -> str:
    if "greedy" in summary.get("after", {}):
        engine = f" ({summary['engine']})" if "engine" in summary else ""
        return f"Measured on the deployed policy{engine}; ± is one standard error."
    return "Means over the rollouts of these steps." if not summary else "Of the deployed policy."


def _serving(folder: Path, name: str, deployment_id: str | None) -> str:
    if deployment_id is not None:
        return f"```bash\nvllm serve {deployment_id}\n```"
    if not (folder / DEPLOYMENT_FOLDER / "config.json").is_file():
        return ""
    local = name.split("/")[-1]
    return (
        f"`{DEPLOYMENT_FOLDER}/` is the checkpoint that sampled:\n\n"
        f'```bash\nhf download {name} --include "{DEPLOYMENT_FOLDER}/*" --local-dir {local}\n'
        f"vllm serve {local}/{DEPLOYMENT_FOLDER}\n```"
    )


def _held_out_results(summary: dict[str, Any], dataset_name: str | None, scheme: str | None) -> list[EvalResult]:
    after = summary.get("after", {})
    if dataset_name is None or after.get("greedy") is None:
        return []
    metrics = {"reward": ("mean reward of greedy completions", after["greedy"])}
    if after.get("discrepancy") is not None:
        metrics["discrepancy"] = ("mean discrepancy", after["discrepancy"])
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset_name,
            dataset_name=f"{dataset_name}, held out",
            metric_type=kind,
            metric_name=f"{label}, {scheme}" if scheme else label,
            metric_value=float(f"{value:.4g}"),
        )
        for kind, (label, value) in metrics.items()
    ]


def _with_results(known: Sequence[EvalResult] | None, new: Sequence[EvalResult]) -> list[EvalResult]:
    """Results with new ones in place of those of the same metric, data set and scheme."""
    replaced = {(result.unique_identifier, result.metric_name) for result in new}
    kept = [result for result in known or () if (result.unique_identifier, result.metric_name) not in replaced]
    return [*kept, *new]


def _signed(text: str) -> str:
    """The text with a digest, by which an edited card is told from one that may be written anew."""
    return f"\n{text.strip()}\n\n<!-- dc_trl wrote the text above, sha256 {_digest(text)} -->\n"


def _is_ours(text: str) -> bool:
    signature = _SIGNATURE.search(text)
    return signature is not None and signature[1] == _digest(_SIGNATURE.sub("", text))


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()
