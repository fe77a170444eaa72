"""What to do about a discrepancy, by where it comes from."""

from ..constraint.thresholds import NO_REMEDY_IN_STEP, PULLS_HARM_IN_STEP
from ..records.estimators import Estimate
from .result import Split


_LARGE = 0.25  # share of δ̄ above which a cause is worth a setting
_ALIGNED = ("weights", "activations", "precision", "adapter")
# Up to this multiple of the floor, what no cause explains is put down to it: sums whose terms cancel differ by more
# than the floor assumes.
_OF_THE_FLOOR = 1.5


def recommend(split: Split, kl: Estimate) -> list[str]:
    """Return settings for the large parts of δ̄, the largest part first, each with its reason.

    Args:
        split: δ̄ by its causes.
        kl: KL(π_inf ‖ π_train) of the engine, in nats.
    """
    if kl.high < NO_REMEDY_IN_STEP:
        return [
            f"Nothing is needed: KL(π_inf ‖ π_train) is {kl.value:.1e} nats, at most {kl.high:.1e}, and below "
            f"{NO_REMEDY_IN_STEP:g}, up to which no remedy was shown to help our tiny models; see docs/which_one.md."
        ]
    whole, rest, floor = split.whole.value, split.unexplained.value, split.floor.value
    shares = {cause: share.value for cause, share in split.shares.items()}
    aligned = (
        "train_through_quantization: true (recipe: format, or recipe: both where weights lag too). The training "
        f"forward is then the deployed one; {rest:.2g} is left."
    )
    if rest < floor / 2 and floor >= _LARGE * whole:  # the engine has the kernels of training
        aligned += f" An engine that adds up in another order than this one keeps {floor:.2g}, whatever is set."
    if rest <= _OF_THE_FLOOR * floor:
        unexplained = (
            f"any other order of the float32 sums gives {floor:.2g}, so no setting takes it away, only equal kernels "
            "do. Measure it, with constraint: none. "
        )
    else:
        unexplained = (
            "if the engine is a server, check first that its checkpoint has these weights, in this dtype. "
            "For a mixture of experts, set routing_replay: true, which takes the engine's experts. Then only measure "
            f"it, with constraint: none. Another order of the float32 sums gives {floor:.2g} of it. "
        )
    parts = {
        "the number format and the arithmetic": (sum(shares.get(cause, 0.0) for cause in _ALIGNED), aligned),
        "not explained (kernels, a KV cache, the routing of experts)": (
            rest,
            f"{unexplained}In our runs with a sampler that does not lag, no constraint and no correction was seen to "
            f"help, and above a KL of {PULLS_HARM_IN_STEP:g} nats pulls to it lost most of the reward; see "
            "docs/study.md.",
        ),
    }
    ordered = sorted(parts.items(), key=lambda part: -part[1][0])
    return [f"{size / whole:.0%} of δ̄ is {name}: {what}" for name, (size, what) in ordered if size >= _LARGE * whole]
