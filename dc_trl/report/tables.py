"""Tables of a report of runs: what came out, seeds of one setting together, and what was set."""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..records.runs import NAME_SETTINGS, Run, is_number, setting
from ..records.started import start_facts
from ..records.sync import sync_facts
from ..records.tables import reward_text, weighted_sum
from ..records.time_parts import PARTS, time_cells


HtmlTable = tuple[list[str], list[list[str]], str]  # header, rows, caption: what `Page.table` takes
_NOTHING = "–"
_LONG = 10  # rows


def origin_table(runs: Sequence[Run]) -> HtmlTable:
    """What was trained, when and on what: a row for each fact that some run has recorded, a column for each run."""
    return _facts_table(runs, _origin, "What was trained, when and on what.")


def summary_table(runs: Sequence[Run]) -> HtmlTable:
    """What came out: a row for each quantity that some run has, a column for each run."""
    caption = (
        "What came out. Greedy reward: of the deployed policy, ± standard error over held-out problems. δ̄: on "
        "held-out problems where the run measured it there, else of its first and last generation batch."
    )
    return _facts_table(runs, _outcome, caption)


def _facts_table(runs: Sequence[Run], facts: Callable[[Run], dict[str, Any]], caption: str) -> HtmlTable:
    columns = [{name: _text(value) for name, value in facts(run).items() if value is not None} for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, _NOTHING) for column in columns)] for name in names]
    # A single run's name is the page's title.
    return ["", *(run.name for run in runs)] if len(runs) > 1 else ["", ""], rows, caption


def seeds_table(groups: Sequence[Sequence[Run]]) -> HtmlTable:
    """A row for each setting with several seeds: means ± standard errors over seeds."""
    rows = []
    for group in groups:
        after = [_ends(run)[1] for run in group if run.finished]
        greedy = _over_seeds([found["greedy"] for found in after if is_number(found.get("greedy"))], "{:.3f}")
        gap = _over_seeds([found["discrepancy"] for found in after if is_number(found.get("discrepancy"))], "{:.2g}")
        rows.append([", ".join(run.name for run in group), str(len(after)), greedy, gap])
    header = ["seeds of one setting", "finished runs", "greedy reward after", "δ̄ after"]
    return header, rows, "Mean ± standard error over the runs that are finished."


def time_table(runs: Sequence[Run]) -> HtmlTable:
    """A row for each part of the work, a column for each run."""
    columns = [time_cells(run.seconds_of_parts(), _tokens(run)) for run in runs]
    labels = [label for label in (*PARTS.values(), "all") if any(label in column for column in columns)]
    if len(runs) == 1:
        caption = (
            "Where the time of the training went. Tokens: all of the run, per second of this part alone. The parts "
            "are disjoint."
        )
        return ["part", "seconds", "share", "tokens/s"], [[label, *columns[0][label]] for label in labels], caption
    rows = [
        [label, *("{} s, {}, {}".format(*column[label]) if label in column else _NOTHING for column in columns)]
        for label in labels
    ]
    caption = (
        "Where the time of the training went: seconds, share, and all tokens of the run per second of this part "
        "alone. The parts are disjoint."
    )
    return ["", *(run.name for run in runs)], rows, caption


def settings_tables(runs: Sequence[Run]) -> list[HtmlTable]:
    """What differs between runs, and what they have in common; of a single run all that is not the default."""
    known = [run for run in runs if run.settings]
    names = sorted({name for run in known for name in run.settings})
    header = ["", *(run.name for run in known)]
    unknown = [run.name for run in runs if not run.settings]
    missing = f" Not recorded: {', '.join(unknown)}." if unknown else ""
    if len(known) == 1:
        rows = [[name, _text(known[0].settings[name])] for name in names]
        if len(runs) == 1:
            # Two tables side by side read better than a long one.
            half = -(-len(rows) // 2) if len(rows) > _LONG else len(rows)
            tables = [(["setting", "value"], part, "") for part in (rows[:half], rows[half:]) if part]
            return [(*tables[0][:2], "Settings that are not the default."), *tables[1:]]
        return [(header, rows, f"What is not the default.{missing}")]
    differing, common = [], []
    for name in (name for name in names if name not in NAME_SETTINGS):
        values = [setting(run, name) for run in known]
        if any(value != values[0] for value in values):
            differing.append([name, *(_setting_text(run, name) for run in known)])
        else:
            common.append([name, _text(values[0])])
    tables = [(header, differing, f"What differs.{missing}")]
    return [*tables, (["", "all runs"], common, "What is the same in all runs, and not the default.")]


def _setting_text(run: Run, name: str) -> str:
    if name in run.settings:
        return _text(run.settings[name])
    default = setting(run, name)  # of settings that are no fields of DCGRPOConfig it is not known
    return _NOTHING if default is None else f"{_text(default)} (default)"


def _known(run: Run, field: str, recorded_as: str) -> Any:
    """From the summary; of a run that has none from its settings, if it recorded them."""
    return run.summary[field] if field in run.summary else setting(run, recorded_as) if run.settings else None


def _origin(run: Run) -> dict[str, Any]:
    """What is known of how a run came to be."""
    data = run.settings.get("dataset_name")
    return {
        "model": run.settings.get("model_name_or_path"),
        "data": data,
        **start_facts(run.starts),
        "sampling engine": _known(run, "engine", "deployment_scheme"),
        "constraint": _known(run, "constraint", "constraint"),
        "seed": _known(run, "seed", "seed"),
    }


def _outcome(run: Run) -> dict[str, Any]:
    """What is known of the outcome of a run. Rewards, and shares of benchmarks, are as the figures show them."""
    before, after = _ends(run)
    multiplier = run.last("lagrangian/lambda")
    if multiplier is not None:
        multiplier = run.summary.get("lambda", multiplier)
    alarms = [
        f"{name.removeprefix('collapse/')} at step {row['step']}"
        for row in run.history
        for name in row
        if name.startswith("collapse/")
    ]
    weights = run.summary.get("rewards", {})
    facts: dict[str, Any] = {
        "state": "finished" if run.finished else "going on, or stopped",
        "optimizer steps": f"{run.steps:,}",
        "collapse alarms": ", ".join(alarms) or None,
        "held-out problems": before.get("problems"),
        "reward functions": weighted_sum(weights) if len(weights) > 1 else None,
        "greedy reward before": _with_error(before.get("greedy"), before.get("greedy_se")),
        "greedy reward after": _with_error(after.get("greedy"), after.get("greedy_se")),
        "sampled reward before": _number(before.get("reward"), "{:.3f}"),
        "sampled reward after": _number(after.get("reward"), "{:.3f}"),
    }
    for metric in sorted({name for row in run.history for name in row if re.fullmatch(r"eval_.+/avg@\d+", name)}):
        label = metric.removeprefix("eval_").replace("/", " ")
        for when, find in (("before", run.first), ("after", run.last)):
            facts[f"{label} {when}"] = _with_error(find(metric), find(f"{metric}_se"))
    facts |= {
        "discrepancy δ̄ before": _number(before.get("discrepancy"), "{:.3g}"),
        "discrepancy δ̄ after": _number(after.get("discrepancy"), "{:.3g}"),
        "tolerance ε": "".join(f"{value:.4g}" for value in run.tolerance().values[-1:]) or None,
        "multiplier λ before": _number(run.first("lagrangian/lambda"), "{:.4g}"),
        "multiplier λ after": _number(multiplier, "{:.4g}"),
        "tokens sampled and read": _number(_tokens(run), "{:,.0f}"),
        "training seconds": _number(run.summary.get("seconds", run.last("train_runtime")), "{:,.0f}"),
    }
    return facts | sync_facts(run.summary.get("weight_sync", {}))


def _ends(run: Run) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Measurements before and after; δ̄ and sampled reward from the history where no summary has them."""
    before, after = dict(run.before), dict(run.summary.get("after", {}))
    for key, names in (("discrepancy", ("eval_discrepancy/mean", "discrepancy/mean")), ("reward", ("eval_reward",))):
        series = next((found for found in map(run.series, names) if found.steps), None)
        if series is not None:
            before.setdefault(key, series.values[0])
            after.setdefault(key, series.values[-1])
    return before, after


def _tokens(run: Run) -> float | None:
    return run.summary.get("tokens", run.last("num_tokens"))


def _over_seeds(values: Sequence[float], form: str) -> str:
    if not values:
        return _NOTHING
    mean = form.format(statistics.fmean(values))
    if len(values) == 1:
        return f"{mean} (one run)"
    return f"{mean} ± {form.format(statistics.stdev(values) / len(values) ** 0.5)}"


def _with_error(value: Any, standard_error: float | None) -> str | None:
    return reward_text(value, standard_error, share=False) if is_number(value) else None


def _number(value: Any, form: str) -> str | None:
    return form.format(value) if is_number(value) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
