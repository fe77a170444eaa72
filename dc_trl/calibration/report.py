"""A calibration as a reader sees it: a table in the terminal, one HTML page, figures as files."""

import os
from collections.abc import Callable
from pathlib import Path

from ..records.estimators import Estimate
from ..records.tables import TableRows, print_table, verdict
from ..report.figures import save_figure
from ..report.html import Page
from .doctor import REMOVALS
from .figures import (
    FEW_TOKENS,
    MEASURES,
    UNEXPLAINED,
    comparison_figure,
    confidence_figure,
    histogram_figure,
    label,
    position_figure,
    probability_figure,
    split_figure,
    weight_figure,
)
from .mismatch import RESAMPLES
from .result import CALIBRATION_FILE, Calibration, Diagnosis, EngineMismatch, Tolerance


REPORT_FILE = "report.html"
_SHOWN = ("50", "90", "99", "99.9")
_SPLIT = (split_figure, "δ̄ by its causes: the mean over all orders of removing them.")
# How each figure is drawn, and what stands below it; by the name of its PNG.
_COMPARISON = (comparison_figure, "δ̄ of each engine and the ε that follows, on the same prompts.")
_FIGURES = {
    "histogram": (
        histogram_figure,
        "δ of the tokens. The left end holds all below it. The tail on the right makes the mean.",
    ),
    "positions": (
        position_figure,
        f"Mean δ by position, with 95 % bands clustered by prompt; positions of {FEW_TOKENS} tokens or more.",
    ),
    "confidence": (
        confidence_figure,
        "Mean δ by the engine's probability of the token, with 95 % intervals. Dashed, for the probability "
        "difference: the curve c·p(1 − p) that fits best. What is nearly sure or nearly impossible hardly moves.",
    ),
    "weights": (
        weight_figure,
        "Importance weights Π π_train/π_inf of the first tokens of each completion (5th and 95th percentile), and "
        "the effective sample size that such weights leave. Both worsen with length.",
    ),
}


def summary_table(calibration: Calibration) -> TableRows:
    """The engines side by side, a column for each; brackets hold 95 % intervals over prompts."""
    rows: list[tuple[str, Callable[[EngineMismatch], str]]] = [
        ("proposed ε", lambda e: _interval(e.tolerance)),
        ("δ̄ of a batch", lambda e: _interval(e.estimates["discrepancy"])),
        ("mean δ of a token", lambda e: _interval(e.estimates["delta"])),
        ("δ: 50 / 90 / 99 / 99.9 %", lambda e: " / ".join(f"{e.percentiles[p]:.2g}" for p in _SHOWN)),
        ("largest δ", lambda e: f"{e.maximum:.3g}"),
        ("KL(π_inf ‖ π_train), k3, nats", lambda e: _interval(e.estimates["k3_kl"])),
        ("|log ppl difference|", lambda e: _interval(e.estimates["log_ppl_abs_diff"])),
        ("perplexity train / engine", lambda e: f"{e.train_perplexity:.4f} / {e.infer_perplexity:.4f}"),
        ("Pearson of probabilities", lambda e: f"{e.metrics['probs_pearson']:.6f}"),
        ("sequence weight: mean, ESS", lambda e: f"{e.sequence_weights.mean:.3f}, {e.sequence_weights.ess:.1%}"),
        ("tokens (without log-prob)", lambda e: f"{e.tokens:,} ({e.unscored:,})"),
        (
            "completions cut off / empty",
            lambda e: f"{e.truncated / e.completions:.1%} / {e.empty / e.completions:.1%}",
        ),
    ]
    head = ["", *(label(engine.engine) for engine in calibration.engines)]
    return head, [[name, *(cell(engine) for engine in calibration.engines)] for name, cell in rows]


def difference_table(calibration: Calibration) -> TableRows:
    """δ̄ of each further engine minus that of the first, on the same prompts, and whether that is more than noise."""
    head = [f"δ̄ minus that of {label(calibration.engines[0].engine)}", "difference", "95 %", "p", "verdict"]
    smallest = 1 / (RESAMPLES + 1)  # p-value that the bootstrap can tell
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
    """Shares of δ̄ with their 95 % intervals, and δ̄ where nothing but the cause is removed."""
    split = diagnosis.split

    def row(cause: str, share: Estimate, alone: str) -> list[str]:
        interval = f"[{share.low:.2e}, {share.high:.2e}]"
        part = f"{share.value / split.whole.value:.0%}" if split.whole.value else "–"
        return [cause, f"{share.value:.2e}", interval, part, alone]

    rows = [row(name, share, f"{split.left[name].value:.2e}") for name, share in split.shares.items()]
    rows.append(row(UNEXPLAINED, split.unexplained, "–"))
    rows.append(row("δ̄", split.whole, "–"))
    return ["cause", "share", "95 %", "of δ̄", "δ̄ without it alone"], rows


def rule(calibration: Calibration) -> str:
    """How ε was found, in words."""
    settings = calibration.settings
    prompts, batch = settings["prompts"], settings["batch_prompts"]
    return (
        f"ε is the mean of δ̄ plus t·√(1 + {batch}/{prompts}) standard deviations over generation batches of {batch} "
        f"prompts × {settings['samples']} completions, drawn with replacement from the {prompts} prompts measured; t "
        f"is the 97.5 % point of Student's t with {prompts - 1} degrees of freedom. If δ̄ is normally distributed, one "
        "batch of a healthy run in forty is then above ε, the chance of the prompts measured included; λ falls back "
        "after it, and a lasting rise of δ̄ moves λ at once. The interval comes from drawing the prompts anew "
        "and applying the whole rule to each draw."
    )


def print_calibration(calibration: Calibration) -> None:
    """Prints the summary to the terminal."""
    settings = calibration.settings
    head = ["engine", "δ̄", "proposed ε", "δ, p99", "KL (k3)", "Pearson", "ESS"]
    rows = [
        [
            label(engine.engine),
            "\n".join(_value_and_range(engine.estimates["discrepancy"])),
            "\n".join(_value_and_range(engine.tolerance)),
            f"{engine.percentiles['99']:.2g}",
            f"{engine.metrics['k3_kl']:.2g}",
            f"{engine.metrics['probs_pearson']:.4f}",
            f"{engine.sequence_weights.ess:.1%}",
        ]
        for engine in calibration.engines
    ]
    print_table(head, rows, f"{_trained(calibration)}, δ = {MEASURES[settings['measure']]}")
    if calibration.differences:
        print_table(*difference_table(calibration))
    for engine in calibration.engines:
        if engine.diagnosis is not None:
            print_table(*split_table(engine.diagnosis), f"{label(engine.engine)}: where δ̄ comes from")
            for advice in engine.diagnosis.advice:
                print(f"ADVICE, {label(engine.engine)}: {advice}")
    print(rule(calibration))
    for engine in calibration.engines:
        for note in engine.notes:
            print(f"NOTE, {label(engine.engine)}: {note}")
    for engine in calibration.engines:
        print(f"{engine.tolerance.config_line}  # {label(engine.engine)}, measured on {settings['prompts']} prompts")


def _value_and_range(estimate: Estimate | Tolerance) -> tuple[str, str]:
    return f"{estimate.value:#.3g}", f"{estimate.low:#.3g} – {estimate.high:#.3g}"


def _interval(estimate: Estimate | Tolerance) -> str:
    return f"{estimate.value:#.3g}\n[{estimate.low:#.3g}, {estimate.high:#.3g}]"


def _trained(calibration: Calibration) -> str:
    """The model and its training precision, in words."""
    settings = calibration.settings
    autocast = settings["bf16_autocast"] and settings["weights_dtype"] != "bfloat16"
    precision = settings["weights_dtype"] + (" under bfloat16 autocast" if autocast else "")
    return f"{settings['model']}, trained in {precision}"


def write_report(calibration: Calibration, directory: str | os.PathLike[str]) -> None:
    """Writes `calibration.json`, `report.html` and the figures as PNG into a directory, over what is there."""
    directory = Path(directory)
    calibration.save(directory / CALIBRATION_FILE)
    save_figure(probability_figure(calibration.engines), directory / "probabilities.png")
    split = {"split": _SPLIT} if any(engine.diagnosis for engine in calibration.engines) else {}
    for name, (draw, _) in {"comparison": _COMPARISON, **split, **_FIGURES}.items():
        save_figure(draw(calibration), directory / f"{name}.png")
    report_page(calibration).save(directory / REPORT_FILE)


def report_page(calibration: Calibration) -> Page:
    """The report as a page."""
    engines = ", ".join(label(engine.engine) for engine in calibration.engines)
    page = Page("Calibration", f"{_trained(calibration)}, against {engines}", generator="dc_trl calibration")
    page.heading("Proposed tolerance")
    page.table(
        ["engine", "δ̄", "95 %", "ε", "95 %", "into the configuration"],
        [
            [
                label(engine.engine),
                *_value_and_range(engine.estimates["discrepancy"]),
                *_value_and_range(engine.tolerance),
                engine.tolerance.config_line,
            ]
            for engine in calibration.engines
        ],
    )
    page.text(rule(calibration))
    for engine in calibration.engines:
        for note in engine.notes:
            page.text(f"Note on {label(engine.engine)}: {note}")
    draw, caption = _COMPARISON
    page.figure(draw(calibration), caption)
    page.heading("Side by side")
    page.table(*summary_table(calibration), "In brackets: 95 % intervals of a bootstrap over prompts.")
    if calibration.differences:
        page.table(*difference_table(calibration), "Paired by prompt; p is two-sided.")
    if any(engine.diagnosis for engine in calibration.engines):
        _add_diagnoses(page, calibration)
    _add_figures(page, calibration)
    _add_details(page, calibration)
    return page


def _add_diagnoses(page: Page, calibration: Calibration) -> None:
    page.heading("Where it comes from")
    draw, caption = _SPLIT
    page.figure(draw(calibration), caption)
    page.text(
        "The policy scored the same tokens with each set of causes removed. δ is an absolute difference and does not "
        "add up: what a cause takes away depends on what is gone before. So a share is the mean over all orders "
        "(Shapley). Shares and the unexplained rest add up to δ̄."
    )
    diagnosed = [engine.diagnosis for engine in calibration.engines if engine.diagnosis is not None]
    found = {cause for diagnosis in diagnosed for cause in diagnosis.split.shares}
    page.table(["cause", "removed by"], [[cause, how] for cause, how in REMOVALS.items() if cause in found])
    for engine in calibration.engines:
        diagnosis = engine.diagnosis
        if diagnosis is None:
            continue
        name = label(engine.engine)
        page.table(*split_table(diagnosis), f"{name}, taken for {diagnosis.scheme}. Intervals draw whole prompts.")
        for advice in diagnosis.advice:
            page.text(f"Advice for {name}: {advice}")
        words = {
            "kl": "KL(deployed ‖ policy), nats",
            "total_variation": "total variation",
            "top1_flips": "top-1 flips",
        }
        page.table(
            ["over the vocabulary", "mean of a token", "95 %"],
            [[words[key], *_value_and_range(estimate)] for key, estimate in diagnosis.vocabulary.items()],
            f"{name}: the policy against its own deployed form, each context in one pass.",
        )
        routed = any(layer.flipped is not None for layer in diagnosis.layers)
        page.table(
            [
                "layer",
                "difference of hidden states",
                "95 %",
                *(["tokens with other experts", "95 %"] if routed else []),
            ],
            [
                [
                    "embedding" if number == 0 else str(number),
                    *_value_and_range(layer.relative),
                    *(("–", "–") if layer.flipped is None else _value_and_range(layer.flipped))[: 2 * routed],
                ]
                for number, layer in enumerate(diagnosis.layers)
            ],
            f"{name}: ‖deployed − policy‖ / ‖policy‖ behind each layer, both with their own choice of experts.",
        )


def _add_figures(page: Page, calibration: Calibration) -> None:
    page.heading("Where the discrepancy is")
    for draw, caption in _FIGURES.values():
        page.figure(draw(calibration), caption)
    page.heading("Train against inference probability")
    for engine in calibration.engines:
        caption = f"All {engine.tokens:,} tokens of {label(engine.engine)}; on the dashed line both sides agree."
        page.figure(probability_figure([engine]), caption)


def _add_details(page: Page, calibration: Calibration) -> None:
    engines = calibration.engines
    names = [label(engine.engine) for engine in engines]
    page.heading("Worst tokens")
    for engine in engines:
        page.table(
            ["token", "δ", "π_train", "π_inf", "position", "before", "after"],
            [
                [t.token, f"{t.delta:.3g}", f"{t.train:.4f}", f"{t.infer:.4f}", str(t.position), t.before, t.after]
                for t in engine.worst
            ],
            f"{label(engine.engine)}: of each prompt the token with the largest δ. ↵ line end, ⇥ tab, ␣ space in it.",
        )
    page.heading("Importance weights")
    page.table(
        ["weights", "mean", "1 %", "5 %", "50 %", "95 %", "99 %", "largest", "ESS"],
        [
            [
                f"{label(engine.engine)}, {kind}",
                *(f"{value:.3f}" for value in (weights.mean, *weights.percentiles.values(), weights.maximum)),
                f"{weights.ess:.1%}",
            ]
            for engine in engines
            for kind, weights in (("sequence", engine.sequence_weights), ("geometric", engine.geometric_weights))
        ],
        "Sequence: exp(Σ log π_train − log π_inf), the sum within ±20; its expectation is 1. Geometric: of the mean.",
    )
    page.heading("All measures")
    page.table(
        ["metric", *names],
        [[metric, *(f"{engine.metrics[metric]:.4g}" for engine in engines)] for metric in engines[0].metrics],
        "Names as in training logs (discrepancy/…).",
    )
    page.table(
        ["δ", *names],
        [[f"{p} %", *(f"{engine.percentiles[p]:.3g}" for engine in engines)] for p in engines[0].percentiles]
        + [["largest", *(f"{engine.maximum:.3g}" for engine in engines)]],
        "Percentiles over tokens.",
    )
    page.heading("Settings")
    page.table(
        ["setting", "value"],
        [[name, _shown(value)] for name, value in calibration.settings.items()]
        + [[f"engine {engine.engine}", engine.precision] for engine in engines],
    )


def _shown(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
