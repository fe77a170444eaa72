"""The tables of a run's page: what was trained, what came out, where the time went, what was set."""

import json
from collections.abc import Mapping
from typing import Any

from ..records.runs import Run, is_number
from ..records.started import start_facts
from ..records.tables import weighted_sum, with_error
from ..records.time_parts import sync_facts, time_cells
from .panels import benchmark_metrics


HtmlTable = tuple[list[str], list[list[str]], str]  # header, rows and caption, as `Page.table` takes them
_LONG = 10  # rows


def origin_table(run: Run) -> HtmlTable:
    """Return what was trained, when and on what, as far as the run has recorded it."""
    facts = {
        "model": run.settings.get("model_name_or_path"),
        "data": run.settings.get("dataset_name"),
        **start_facts(run.starts),
        "sampling engine": _known(run, "engine", "deployment_scheme"),
        "constraint": _known(run, "constraint", "constraint"),
        "seed": _known(run, "seed", "seed"),
    }
    return ["", ""], _rows(facts), "What was trained, when and on what."


def summary_table(run: Run) -> HtmlTable:
    """Return what came out, as far as it is known. Rewards and benchmarks have the units of the figures."""
    before, after = _ends(run)
    multiplier = run.last("lagrangian/lambda")
    if multiplier is not None:
        multiplier = run.summary.get("lambda", multiplier)
    alarms = [(name, row["step"]) for row in run.history for name in row if name.startswith("collapse/")]
    weights = run.summary.get("rewards", {})
    facts: dict[str, Any] = {
        "state": "finished" if run.finished else "going on, or stopped",
        "optimizer steps": f"{run.steps:,}",
        "collapse alarms": ", ".join(f"{name.removeprefix('collapse/')} at step {step}" for name, step in alarms),
        "held-out problems": before.get("problems"),
        "reward functions": weighted_sum(weights) if len(weights) > 1 else None,
        "greedy reward before": _with_error(before.get("greedy"), before.get("greedy_se")),
        "greedy reward after": _with_error(after.get("greedy"), after.get("greedy_se")),
        "sampled reward before": _number(before.get("reward"), "{:.3f}"),
        "sampled reward after": _number(after.get("reward"), "{:.3f}"),
    }
    for found in benchmark_metrics(run):
        label = " ".join(found.groups()).replace("/", " ")
        for when, find in (("before", run.first), ("after", run.last)):
            facts[f"{label} {when}"] = _with_error(find(found[0]), find(f"{found[0]}_se"))
    facts |= {
        "discrepancy δ̄ before": _number(before.get("discrepancy"), "{:.3g}"),
        "discrepancy δ̄ after": _number(after.get("discrepancy"), "{:.3g}"),
        "tolerance ε": _number(run.last("lagrangian/tolerance"), "{:.4g}"),
        "multiplier λ before": _number(run.first("lagrangian/lambda"), "{:.4g}"),
        "multiplier λ after": _number(multiplier, "{:.4g}"),
        "tokens sampled and read": _number(_tokens(run), "{:,.0f}"),
        "training seconds": _number(run.summary.get("seconds", run.last("train_runtime")), "{:,.0f}"),
        **sync_facts(run.summary.get("weight_sync", {})),
    }
    caption = (
        "What came out. Greedy reward: of the deployed policy, ± standard error over held-out problems. δ̄: on "
        "held-out problems where the run measured it there, else of its first and last generation batch."
    )
    return ["", ""], _rows(facts), caption


def time_table(run: Run) -> HtmlTable:
    """Return a row for each part of the work; none where the run did not measure its time."""
    rows = [[label, *cells] for label, cells in time_cells(run.seconds_of_parts(), _tokens(run)).items()]
    caption = (
        "Where the time of the training went. Tokens: all tokens of the run, per second of this part alone. The parts "
        "do not overlap."
    )
    return ["part", "seconds", "share", "tokens/s"], rows, caption


def settings_tables(run: Run) -> list[HtmlTable]:
    """Return the settings that are not the default; two tables where they are many, which stand side by side."""
    rows = [[name, _text(value)] for name, value in sorted(run.settings.items())]
    half = -(-len(rows) // 2) if len(rows) > _LONG else len(rows)
    parts = (rows[:half], "Settings that are not the default."), (rows[half:], "")
    return [(["setting", "value"], part, caption) for part, caption in parts if part]


def _rows(facts: Mapping[str, Any]) -> list[list[str]]:
    return [[name, _text(value)] for name, value in facts.items() if value not in (None, "")]


def _known(run: Run, field: str, recorded_as: str) -> Any:
    """Return a field of the summary; of a run without a summary the setting of that name, if it recorded settings."""
    return run.summary[field] if field in run.summary else run.setting(recorded_as) if run.settings else None


def _ends(run: Run) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what was measured before and after; δ̄ and sampled reward from the history where no summary has them."""
    before, after = dict(run.before), dict(run.summary.get("after", {}))
    for key, names in (("discrepancy", ("eval_discrepancy/mean", "discrepancy/mean")), ("reward", ("eval_reward",))):
        series = next((found for found in map(run.series, names) if found.steps), None)
        if series is not None:
            before.setdefault(key, series.values[0])
            after.setdefault(key, series.values[-1])
    return before, after


def _tokens(run: Run) -> float | None:
    return run.summary.get("tokens", run.last("num_tokens"))


def _with_error(value: Any, standard_error: float | None) -> str | None:
    return with_error(value, standard_error, 1, 3) if is_number(value) else None


def _number(value: Any, form: str) -> str | None:
    return form.format(value) if is_number(value) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
