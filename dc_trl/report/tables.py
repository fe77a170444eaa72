"""Tables of a report of runs: what came out, seeds of one setting together, and what was set."""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..records.runs import NAME_SETTINGS, Run, greedy_is_share, is_number, setting
from ..records.sync import sync_facts
from ..records.tables import reward_text, weighted_sum, with_error
from ..records.time_parts import PARTS, time_cells


HtmlTable = tuple[list[str], list[list[str]], str]  # header, rows, caption: what `Page.table` takes
_NOTHING = "–"


def summary_table(runs: Sequence[Run]) -> HtmlTable:
    """A row for each quantity that some run has, a column for each run."""
    caption = (
        "Greedy reward: of the deployed policy, ± standard error over held-out problems. δ̄: on held-out problems "
        "where the run measured it there, else of its first and last generation batch."
    )
    columns = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, _NOTHING) for column in columns)] for name in names]
    return ["", *(run.name for run in runs)], rows, caption


def seeds_table(groups: Sequence[Sequence[Run]]) -> HtmlTable:
    """A row for each setting with several seeds: means ± standard errors over seeds."""
    rows = []
    for group in groups:
        after = [_ends(run)[1] for run in group if run.finished]
        measured = [found for found in after if is_number(found.get("greedy"))]
        share = all(map(greedy_is_share, measured))
        greedy = _over_seeds(
            [(100 if share else 1) * found["greedy"] for found in measured], "{:.1f}" if share else "{:.3f}"
        )
        greedy += " %" if share and measured else ""
        gap = _over_seeds([found["discrepancy"] for found in after if is_number(found.get("discrepancy"))], "{:.2g}")
        rows.append([", ".join(run.name for run in group), str(len(after)), greedy, gap])
    header = ["seeds of one setting", "finished runs", "greedy reward after", "δ̄ after"]
    return header, rows, "Mean ± standard error over the runs that are finished."


def time_table(runs: Sequence[Run]) -> HtmlTable:
    """A row for each part of the work, a column for each run."""
    columns = [time_cells(run.seconds_of_parts(), _tokens(run)) for run in runs]
    labels = [label for label in (*PARTS.values(), "all") if any(label in column for column in columns)]
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


def _facts(run: Run) -> dict[str, str]:
    """What is known of the outcome of a run."""
    before, after = _ends(run)
    multiplier = run.last("lagrangian/lambda")
    if multiplier is not None:
        multiplier = run.summary.get("lambda", multiplier)

    def known(field: str, recorded_as: str) -> Any:
        """From the summary; of a run that has none from its settings, if it recorded them."""
        return run.summary[field] if field in run.summary else setting(run, recorded_as) if run.settings else None

    alarms = [
        f"{name.removeprefix('collapse/')} at step {row['step']}"
        for row in run.history
        for name in row
        if name.startswith("collapse/")
    ]
    share = all(greedy_is_share(found) for found in (before, after) if "greedy" in found)
    weights = run.summary.get("rewards", {})
    facts = {
        "state": "finished" if run.finished else "going on, or stopped",
        "optimizer steps": f"{run.steps:,}",
        "collapse alarms": ", ".join(alarms) or None,
        "constraint": known("constraint", "constraint"),
        "sampling engine": known("engine", "deployment_scheme"),
        "seed": known("seed", "seed"),
        "held-out problems": before.get("problems"),
        "reward functions": weighted_sum(weights) if len(weights) > 1 else None,
        "greedy reward before": _greedy(before, share),
        "greedy reward after": _greedy(after, share),
        "sampled reward before": _number(before.get("reward"), "{:.3f}"),
        "sampled reward after": _number(after.get("reward"), "{:.3f}"),
    }
    for metric in sorted({name for row in run.history for name in row if re.fullmatch(r"eval_.+/avg@\d+", name)}):
        label = metric.removeprefix("eval_").replace("/", " ")
        for when, find in (("before", run.first), ("after", run.last)):
            facts[f"{label} {when}"] = _percent(find(metric), find(f"{metric}_se"))
    facts |= {
        "discrepancy δ̄ before": _number(before.get("discrepancy"), "{:.3g}"),
        "discrepancy δ̄ after": _number(after.get("discrepancy"), "{:.3g}"),
        "tolerance ε": "".join(f"{value:.4g}" for value in run.tolerance().values[-1:]) or None,
        "multiplier λ before": _number(run.first("lagrangian/lambda"), "{:.4g}"),
        "multiplier λ after": _number(multiplier, "{:.4g}"),
        "tokens sampled and read": _number(_tokens(run), "{:,.0f}"),
        "training seconds": _number(run.summary.get("seconds", run.last("train_runtime")), "{:,.0f}"),
    }
    facts |= sync_facts(run.summary.get("weight_sync", {}))
    return {name: _text(value) for name, value in facts.items() if value is not None}


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


def _greedy(measured: Mapping[str, Any], share: bool) -> str | None:
    value = measured.get("greedy")
    return reward_text(value, measured.get("greedy_se"), share) if is_number(value) else None


def _percent(value: Any, standard_error: float | None) -> str | None:
    return f"{with_error(value, standard_error, 100, 1)} %" if is_number(value) else None


def _number(value: Any, form: str) -> str | None:
    return form.format(value) if is_number(value) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
