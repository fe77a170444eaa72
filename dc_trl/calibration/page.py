"""A calibration for its readers: tables in the terminal, one HTML page, figures as PNGs."""

import os
from collections.abc import Callable
from pathlib import Path

from ..records.estimators import Estimate
from ..records.tables import TableRows, print_table, verdict
from ..report.figures import save_figure
from ..report.html import Page
from .causes import REMOVALS
from .figures import MEASURES, UNEXPLAINED, label, probability_figure, split_figure
from .mismatch import RESAMPLES
from .result import CALIBRATION_FILE, Calibration, Diagnosis, EngineMismatch, Tolerance


PAGE_FILE = "report.html"
_SHOWN = ("50", "90", "99", "99.9")
_SPLIT_CAPTION = (
    "δ̄ by its causes. The policy scored the same tokens with each set of causes removed. δ is an absolute difference "
    "and does not add up: what a cause takes away depends on what was removed before it. So a share is the mean over "
    "all orders of removing the causes (Shapley value). The shares and the unexplained rest add up to δ̄."
)


def summary_table(calibration: Calibration) -> TableRows:
    """Return the engines side by side, a column for each; brackets hold 95 % intervals over prompts."""
    rows: list[tuple[str, Callable[[EngineMismatch], str]]] = [
        ("proposed ε", lambda e: _interval(e.tolerance)),
        ("δ̄ of a batch", lambda e: _interval(e.estimates["discrepancy"])),
        ("mean δ of a token", lambda e: _interval(e.estimates["delta"])),
        ("δ: 50 / 90 / 99 / 99.9 %", lambda e: " / ".join(f"{e.percentiles[p]:.2g}" for p in _SHOWN)),
        ("largest δ", lambda e: f"{e.maximum:.3g}"),
        ("KL(π_inf ‖ π_train), k3, nats", lambda e: _interval(e.estimates["k3_kl"])),
        ("|log ppl difference|", lambda e: _interval(e.estimates["log_ppl_abs_diff"])),
        ("Pearson of probabilities", lambda e: f"{e.metrics['probs_pearson']:.6f}"),
        ("effective sample size of token weights", lambda e: f"{e.metrics['ess']:.1%}"),
        ("tokens (without log-prob)", lambda e: f"{e.tokens:,} ({e.unscored:,})"),
        (
            "completions cut off / empty",
            lambda e: f"{e.truncated / e.completions:.1%} / {e.empty / e.completions:.1%}",
        ),
    ]
    head = ["", *(label(engine.engine) for engine in calibration.engines)]
    return head, [[name, *(cell(engine) for engine in calibration.engines)] for name, cell in rows]


def difference_table(calibration: Calibration) -> TableRows:
    """Return δ̄ of each further engine minus that of the first, and whether that is more than noise."""
    head = [f"δ̄ minus that of {label(calibration.engines[0].engine)}", "difference", "95 %", "p", "verdict"]
    smallest = 1 / (RESAMPLES + 1)  # p-value that the bootstrap can distinguish from 0
    rows = []
    for name, difference in calibration.differences.items():
        interval, p_value = "–", "–"
        if difference.p_value is not None:
            interval = f"[{difference.low:+.3g}, {difference.high:+.3g}]"
            p_value = f"≤ {smallest:.3f}" if difference.p_value <= smallest else f"{difference.p_value:.3f}"
        words = [f"{difference.value:+.3g}", interval, p_value, verdict(difference, "higher", "lower")]
        rows.append([label(name), *words])
    return head, rows


def split_table(diagnosis: Diagnosis) -> TableRows:
    """Return the shares of δ̄ with their 95 % intervals."""
    split = diagnosis.split

    def row(name: str, share: Estimate) -> list[str]:
        part = f"{share.value / split.whole.value:.0%}" if split.whole.value else "–"
        return [name, f"{share.value:.2e}", f"[{share.low:.2e}, {share.high:.2e}]", part]

    rows = [row(cause, share) for cause, share in split.shares.items()]
    rows += [row(UNEXPLAINED, split.unexplained), row("δ̄", split.whole)]
    return ["cause", "share", "95 %", "of δ̄"], rows


def rule(calibration: Calibration) -> str:
    """Explain how ε was found."""
    settings = calibration.settings
    prompts, batch = settings["prompts"], settings["batch_prompts"]
    return (
        f"ε is the mean of δ̄ plus t·√(1 + {batch}/{prompts}) standard deviations over generation batches of {batch} "
        f"prompts × {settings['samples']} completions, drawn with replacement from the {prompts} prompts measured; t "
        f"is the 97.5 % point of Student's t with {prompts - 1} degrees of freedom. If δ̄ is normally distributed, one "
        "batch of a healthy run in forty is above ε. The 95 % interval comes from drawing the prompts anew and "
        "applying the whole rule to each draw."
    )


def print_calibration(calibration: Calibration) -> None:
    """Print the tables, the advice, the notes and the lines for the configuration to the terminal."""
    print_table(*summary_table(calibration), f"{_trained(calibration)}, {_measure(calibration)}")
    if calibration.differences:
        print_table(*difference_table(calibration))
    for engine in calibration.engines:
        if engine.diagnosis is not None:
            print_table(*split_table(engine.diagnosis), f"{label(engine.engine)}: where δ̄ comes from")
    print(rule(calibration))
    for kind, name, text in _remarks(calibration):
        print(f"{kind.upper()}, {name}: {text}")
    prompts = calibration.settings["prompts"]
    for engine in calibration.engines:
        print(f"{engine.tolerance.config_line}  # {label(engine.engine)}, measured on {prompts} prompts")


def _remarks(calibration: Calibration) -> list[tuple[str, str, str]]:
    """Return the advice and the notes: what each is, the engine it is about, and the text."""
    named = [(label(engine.engine), engine) for engine in calibration.engines]
    advice = [("advice", name, text) for name, e in named if e.diagnosis is not None for text in e.diagnosis.advice]
    return [*advice, *(("note", name, note) for name, engine in named for note in engine.notes)]


def _interval(estimate: Estimate | Tolerance) -> str:
    return f"{estimate.value:#.3g}\n[{estimate.low:#.3g}, {estimate.high:#.3g}]"


def _measure(calibration: Calibration) -> str:
    return f"δ = {MEASURES[calibration.settings['measure']]}"


def _trained(calibration: Calibration) -> str:
    """Name the model and its training precision."""
    settings = calibration.settings
    autocast = settings["bf16_autocast"] and settings["weights_dtype"] != "bfloat16"
    precision = settings["weights_dtype"] + (" under bfloat16 autocast" if autocast else "")
    return f"{settings['model']}, trained in {precision}"


def write_report(calibration: Calibration, directory: str | os.PathLike[str]) -> None:
    """Write `calibration.json`, `report.html` and the figures as PNGs into a directory, replacing what is there."""
    directory = Path(directory)
    calibration.save(directory / CALIBRATION_FILE)
    figures = {"probabilities": probability_figure(calibration.engines)}
    if any(engine.diagnosis for engine in calibration.engines):
        figures["split"] = split_figure(calibration)
    for name, figure in figures.items():
        save_figure(figure, directory / f"{name}.png")
    report_page(calibration).save(directory / PAGE_FILE)


def report_page(calibration: Calibration) -> Page:
    """Return the calibration as a page."""
    engines = calibration.engines
    names = [label(engine.engine) for engine in engines]
    page = Page("Calibration", f"{_trained(calibration)}, against {', '.join(names)}", generator="dc_trl calibration")
    page.heading("Proposed tolerance")
    rows = [[name, engine.tolerance.config_line] for name, engine in zip(names, engines, strict=True)]
    page.table(["engine", "into the configuration"], rows)
    page.text(rule(calibration))
    for kind, name, text in _remarks(calibration):
        page.text(f"{kind.capitalize()} for {name}: {text}")
    page.heading("Side by side")
    caption = f"{_measure(calibration)}. Brackets hold 95 % intervals of a bootstrap over prompts."
    page.table(*summary_table(calibration), caption)
    if calibration.differences:
        page.table(*difference_table(calibration), "Paired by prompt; p is two-sided.")
    if any(engine.diagnosis for engine in engines):
        page.heading("Where it comes from")
        page.figure(split_figure(calibration), _SPLIT_CAPTION)
        page.table(["cause", "removed by"], [[cause, how] for cause, how in REMOVALS.items()])
        for name, engine in zip(names, engines, strict=True):
            if engine.diagnosis is not None:
                caption = f"{name}, taken for {engine.diagnosis.scheme}. Intervals draw whole prompts."
                page.table(*split_table(engine.diagnosis), caption)
    page.heading("Train against inference probability")
    for name, engine in zip(names, engines, strict=True):
        caption = f"All {engine.tokens:,} tokens of {name}; on the dashed line both sides agree."
        page.figure(probability_figure([engine]), caption)
    page.heading("All measures")
    metrics = [[metric, *(f"{engine.metrics[metric]:.4g}" for engine in engines)] for metric in engines[0].metrics]
    page.table(["metric", *names], metrics, "Names as in training logs (discrepancy/…).")
    page.heading("Settings")
    settings = [[name, _shown(value)] for name, value in calibration.settings.items()]
    page.table(["setting", "value"], [*settings, *([f"engine {e.engine}", e.precision] for e in engines)])
    return page


def _shown(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
