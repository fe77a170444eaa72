"""A plan as tables for the terminal, and as numbers for a program."""

from typing import Any

from ..records.tables import TableRows
from .commands import serve_command, shell_lines, vllm_command
from .devices import USABLE, Assumptions
from .flops import forward_flops, generation_flops, training_flops
from .memory import TrainerMemory
from .plan import NoPlan, Plan, memory_table
from .step import computed_lengths, micro_batches, sync_bytes


PART_NAMES = {
    "generation": "generation",
    "old_logps": "old log-probabilities",
    "loss": "loss and backward",
    "optimizer": "optimizer",
    "sync": "weight sync",
}
_MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "moments of AdamW",
    "gathered": "gathered layers, buckets",
    "activations": "activations",
    "head": "output head",
    "optimizer": "update, after the activations",
    "total": "peak",
}


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f}" if value < 9.95e9 else f"{value / 1e9:,.0f}"


def span(slow: float, fast: float, unit: str = "") -> str:
    """A range with two significant digits, from the better to the worse."""
    low, high = sorted((fast, slow))
    return f"{_two(low)} – {_two(high)}{unit}" if _two(low) != _two(high) else f"{_two(low)}{unit}"


def _two(value: float) -> str:
    text = f"{value:.2g}"
    return f"{float(text):,.0f}" if value >= 10 else text


def title(plan: Plan | NoPlan) -> str:
    cluster = plan.cluster
    return f"{plan.model.name} on {cluster.devices} × {cluster.device.name}"


def tables(plan: Plan) -> list[tuple[str, TableRows]]:
    """Tables of a plan, each with its title."""
    return [
        (f"{title(plan)}: the layout", (["", "value"], _layout_rows(plan))),
        ("Memory of a training device, GB, with the longest sequences", _memory_table(plan)),
        ("One iteration, seconds", (["part", "seconds", "share, slow", "share, fast"], _time_rows(plan))),
        ("What features gain on this layout", (["with", "seconds", "faster"], _gain_rows(plan))),
    ]


def _layout_rows(plan: Plan) -> list[list[str]]:
    layout, work, model, engine = plan.layout, plan.work, plan.model, plan.engine
    sequence, _ = computed_lengths(work, layout)
    mean = work.lengths.moments
    real = work.prompt + mean.first
    kept = "reduced after each micro-batch" if layout.reduce_each else "accumulated"
    sync = gigabytes(sync_bytes(model, work, layout))
    flops = _flops(plan)
    return [
        ["train", f"{layout.train_devices} devices, {layout.strategy}, micro-batch {layout.micro_batch}"],
        ["optimizer step", f"{micro_batches(work, layout)} micro-batches, gradients {kept}"],
        ["sample", f"{layout.replicas} × {layout.tensor_parallel} devices, {work.scheme}"],
        ["engine, GB of weights on a device", gigabytes(engine.weights)],
        ["engine's cache", f"{engine.tokens:,} tokens, {engine.concurrency(work.prompt, work.lengths):,} sequences"],
        ["tokens of an iteration", f"{work.completions * real:,.0f}"],
        ["tokens computed for a real one", f"{sequence.first / real:.2f} ({work.batching})"],
        ["FLOPs: generation", f"{flops['generation']:.2g}"],
        ["FLOPs: a forward", f"{flops['forward']:.2g}"],
        ["FLOPs: forward and backward", f"{flops['training']:.2g}"],
        ["weight sync", f"{sync} GB through {layout.transport}, once an iteration"],
    ]


def _flops(plan: Plan) -> dict[str, float]:
    """Of one iteration, over all completions and devices."""
    work, model = plan.work, plan.model
    sequence, scored = computed_lengths(work, plan.layout)
    training = training_flops(model, sequence, scored, checkpointing=work.checkpointing)
    return {
        "generation": work.completions
        * generation_flops(model, work.prompt, work.lengths.moments, work.generations).total,
        "forward": work.completions * forward_flops(model, sequence, scored).total,
        "training": work.completions * work.iterations * training.total,
    }


def _memory_table(plan: Plan) -> TableRows:
    layout = plan.layout
    columns: dict[str, TrainerMemory] = dict(memory_table(plan).items())
    if layout.reduce_each:
        columns["fsdp2, sync_each_batch"] = plan.memory
    rows = [[words, *(gigabytes(getattr(each, part)) for each in columns.values())] for part, words in _MEMORY.items()]
    usable = plan.cluster.usable
    fits = ["yes" if each.total <= usable else "no" for each in columns.values()]
    return ["", *columns], [*rows, [f"fits {gigabytes(usable)} GB", *fits]]


def _time_rows(plan: Plan) -> list[list[str]]:
    rows = []
    totals = plan.slow.total(), plan.fast.total()
    for name, words in PART_NAMES.items():
        slow, fast = getattr(plan.slow, name), getattr(plan.fast, name)
        rows.append([words, span(slow, fast), f"{slow / totals[0]:.0%}", f"{fast / totals[1]:.0%}"])
    rows.append(["iteration", span(*totals), "100%", "100%"])
    beside = plan.slow.total(overlap=True), plan.fast.total(overlap=True)
    return [*rows, ["iteration, sampling beside training", span(*beside), "", ""]]


def _gain_rows(plan: Plan) -> list[list[str]]:
    first = next(iter(plan.gains.values()))
    return [
        [name, span(*seconds), span(first[0] / seconds[0], first[1] / seconds[1], " ×")]
        for name, seconds in plan.gains.items()
    ]


def refusal(plan: NoPlan) -> list[str]:
    """Lines that say why nothing fits, and what would."""
    lines = [f"{title(plan)}: nothing fits."]
    lines += [f"  because {reason}" for reason in plan.reasons]
    return lines + [f"  remedy: {remedy}" for remedy in plan.remedies]


def assumption_lines(plan: Plan | NoPlan, assumptions: tuple[Assumptions, Assumptions]) -> list[str]:
    """What the numbers assume, in words."""
    work, cluster = plan.work, plan.cluster
    device = cluster.device
    slow, fast = assumptions
    names = list(vars(fast))
    return [
        f"completions: log-normal, mean {work.lengths.mean:g} before the cut, σ {work.lengths.sigma:g}, at most "
        f"{work.lengths.cap}; prompts of {work.prompt}, at most {work.longest_prompt}; {work.completions} in an "
        f"iteration, {work.completions_per_step} in an optimizer step",
        f"{device.name}: {gigabytes(device.memory)} GB of which {USABLE:.0%} are usable, {device.bf16 / 1e12:g} "
        f"TFLOP/s in BF16, {device.bandwidth / 1e9:,.0f} GB/s",
        "slow – fast: " + ", ".join(f"{name} {getattr(slow, name):g} – {getattr(fast, name):g}" for name in names),
    ]


def as_json(plan: Plan | NoPlan, assumptions: tuple[Assumptions, Assumptions], config: str) -> dict[str, Any]:
    """All numbers of a plan: bytes, seconds, FLOPs, tokens."""
    common: dict[str, Any] = {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "active_parameters": plan.model.active_parameters,
        "device": plan.cluster.device.name,
        "devices": plan.cluster.devices,
        "assumptions": {"slow": vars(assumptions[0]), "fast": vars(assumptions[1])},
    }
    if isinstance(plan, NoPlan):
        return common | {"fits": False, "reasons": list(plan.reasons), "remedies": list(plan.remedies)}
    layout = plan.layout
    table = memory_table(plan)
    sequence, _ = computed_lengths(plan.work, layout)
    real = plan.work.prompt + plan.work.lengths.moments.first
    return common | {
        "fits": True,
        "layout": vars(layout),
        "memory": vars(plan.memory) | {"total": plan.memory.total},
        "memory_by_strategy": {name: vars(each) | {"total": each.total} for name, each in table.items()},
        "engine": {
            "weights": plan.engine.weights,
            "cache_tokens": plan.engine.tokens,
            "concurrency": plan.engine.concurrency(plan.work.prompt, plan.work.lengths),
        },
        "tokens": plan.work.completions * real,
        "computed_per_token": sequence.first / real,
        "flops": _flops(plan),
        "sync_bytes": sync_bytes(plan.model, plan.work, layout),
        "seconds": {"slow": plan.slow._asdict(), "fast": plan.fast._asdict()},
        "gains": plan.gains,
        "commands": shell_lines(plan, config),
        "serve": serve_command(plan),
        "vllm_serve": vllm_command(plan),
    }


def summary_table(plans: list[Plan | NoPlan]) -> TableRows:
    """One row for each plan."""
    rows = []
    for plan in plans:
        row = [str(plan.cluster.devices)]
        if isinstance(plan, NoPlan):
            rows.append([*row, "nothing fits", *[""] * 5])
            continue
        layout = plan.layout
        shares = sorted(each.generation / each.total() for each in (plan.slow, plan.fast))
        gain = list(plan.gains.values())
        rows.append(
            [
                *row,
                f"{layout.train_devices} {layout.strategy}",
                f"{layout.replicas} × {layout.tensor_parallel}",
                gigabytes(plan.memory.total),
                span(plan.slow.total(), plan.fast.total()),
                f"{shares[0]:.0%} – {shares[1]:.0%}",
                span(gain[0][0] / gain[-1][0], gain[0][1] / gain[-1][1], " ×"),
            ]
        )
    head = ["devices", "train", "sample", "GB", "seconds", "sampling", "gain"]
    return head, rows
