"""Where an engine's discrepancy comes from: the policy scores the same tokens as it is deployed, one cause at a time.

A cause is removed by having the policy compute as the engine does in that respect alone. Copies of its modules on the
same tensors do so, and the policy stays as it is. With v(S) the discrepancy δ̄ that is left when the causes S are
removed, the share of cause i among n is its Shapley value ("A Value for n-Person Games", 1953),

    φ_i = Σ_{S ∌ i} |S|! (n − |S| − 1)! / n! · (v(S) − v(S ∪ {i}))

which is the mean, over all orders of removing the causes one after another, of what removing i takes away. δ is an
absolute difference and does not add up, so what a cause takes away depends on what was removed before it. The mean
over all orders prefers none. The shares and the unexplained rest v(N) add up to v(∅) = δ̄ by construction.

The floor is what another order of summation gives, with the same weights in the same formats (docs/calibration.md). No
alignment of formats goes below it, only equal kernels do.
"""

import copy
import gc
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ..constraint.thresholds import NO_REMEDY_IN_STEP, PULLS_HARM_IN_STEP
from ..quantization.deployed_forward import DeployedForward
from ..quantization.policy import Policy, base_model, empty_copy
from ..quantization.schemes import quantized_linears, quantizes_cache, resolve_scheme
from ..records.estimators import Estimate
from ..version import DOCS
from .comparison import Array, Ratio, ScoredTokens, ratio_estimate
from .result import CalibrationSettings, Diagnosis, EngineMismatch, Split
from .rollouts import EngineSample, sampled_logps, train_logps


Causes: TypeAlias = frozenset[str]

# Standard deviation of the relative difference between two orders of a float32 sum.
_DISORDER = 1e-7
_BITS = 8  # of a bfloat16 number's significand
_LARGE = 0.25  # share of δ̄ above which a cause is worth a setting
# That of each weight in `lag_floor`: a step of Adam at the paper's learning rate.
_SMALL_STEP = 1e-6
# Up to this multiple of the floor, what no cause explains is put down to it: sums whose terms cancel differ by more
# than the floor assumes.
_OF_THE_FLOOR = 1.5


class Case(NamedTuple):
    """What a diagnosis needs: the sampled tokens, and the model that is trained."""

    sample: EngineSample
    policy: Policy
    prompts: Sequence[list[int]]  # token ids
    settings: CalibrationSettings

    def score(self, scheme: str, removed: Causes, disturbed: bool = False) -> list[Tensor]:
        """Return log π_train of each rollout's tokens where causes are removed, each of shape (tokens,).

        With ``disturbed``, the layers add up in another order.
        """
        gc.collect()  # the view of the last pass and its hooks refer to each other, and hold the deployed weights
        view = view_of(self.policy)
        deployed = DeployedForward(
            view,
            scheme,
            weights="weights" in removed,
            activations="activations" in removed,
            cache="KV cache" in removed,
            compute="precision" in removed,
            adapters="adapter" in removed,
        )
        if disturbed:
            disturb(view, self.settings.seed)
        with deployed.active():
            return train_logps(view, self.prompts, self.sample.rollouts, self.settings)

    def causes(self, scheme: str) -> list[str]:
        """Return the causes that are there: weights, activations, cache, arithmetic of another precision, adapters."""
        quantization = resolve_scheme(scheme, empty_copy(self.policy))
        present = {
            "weights": quantization.weights is not None or base_model(self.policy).dtype != torch.bfloat16,
            "activations": quantization.input_activations is not None,
            "KV cache": quantizes_cache(scheme),
            "precision": True,
            "adapter": isinstance(self.policy, PeftModel),
        }
        return [cause for cause, there in present.items() if there]

    def scheme(self) -> str:
        """Return the engine's scheme; of several possible ones that in which the deployed policy is nearest to it."""
        if len(self.sample.schemes) == 1:
            return self.sample.schemes[0]
        distances = {}
        for scheme in self.sample.schemes:
            try:
                resolve_scheme(scheme, empty_copy(self.policy))
            except ValueError:  # groups that do not divide the model's widths: the engine cannot run this one
                continue
            scored = self.score(scheme, frozenset(self.causes(scheme)))
            numerator, denominator = self.discrepancy(scored, sampled_logps(self.sample.rollouts))
            distances[scheme] = numerator.sum() / denominator.sum()
        if not distances:
            raise ValueError(f"engine={self.sample.engine!r}: no known scheme fits; set split=False (--no_split).")
        return min(distances, key=lambda scheme: distances[scheme])

    def tokens(self, train: Sequence[Tensor], infer: Sequence[Tensor]) -> ScoredTokens:
        """Return the rollouts' tokens with two log-probabilities of each."""
        return ScoredTokens(self.sample.rollouts, train, infer, len(self.prompts), self.settings.measure)

    def discrepancy(self, train: Sequence[Tensor], infer: Sequence[Tensor]) -> Ratio:
        """Return δ̄ between log-probabilities of the rollouts' tokens, by prompt."""
        return self.tokens(train, infer).batch_discrepancy(self.settings.reduction)


def diagnose(case: Case, train: Sequence[Tensor], found: EngineMismatch) -> Diagnosis:
    """Split an engine's δ̄ into its causes, and say what to do; `train` is log π_train of each rollout's tokens.

    Raises:
        ValueError: the engine's scheme does not fit the model, or the policy has adapters other than LoRA.
    """
    scheme = case.scheme()
    causes = case.causes(scheme)
    case.settings.report(f"{case.sample.engine}: {2 ** len(causes) + 1} scoring passes split δ̄ into its causes")
    passes = {removed: case.score(scheme, removed) if removed else list(train) for removed in subsets(causes)}
    disturbed = case.score(scheme, frozenset(causes), disturbed=True)
    infer = sampled_logps(case.sample.rollouts)
    left = {removed: case.discrepancy(scored, infer) for removed, scored in passes.items()}
    floor = case.discrepancy(disturbed, passes[frozenset(causes)])
    split = split_discrepancy(left, floor, causes, case.settings.seed)
    return Diagnosis(scheme, split, recommend(split, found.estimates["k3_kl"]))


def lag_floor(case: Case, train: Sequence[Tensor]) -> Estimate:
    """Return the k3 that the trainer's own forward has between any two weights, however near: the floor of the lag.

    Each trained weight moves by `_SMALL_STEP` up or down at random, which changes the policy by nothing but rounding.

    Args:
        case: an engine's samples, and the policy, which has its own weights again afterwards.
        train: log π_train of each rollout's tokens.
    """
    weights = [parameter for parameter in case.policy.parameters() if parameter.requires_grad]
    own = [weight.detach().to("cpu", copy=True) for weight in weights]
    generator = torch.Generator(case.policy.device).manual_seed(case.settings.seed)
    try:
        with torch.no_grad():
            for weight in weights:
                signs = torch.randint(2, weight.shape, generator=generator, device=weight.device) * 2 - 1
                weight.add_(signs, alpha=_SMALL_STEP)
        moved = train_logps(case.policy, case.prompts, case.sample.rollouts, case.settings)
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, own, strict=True):
                weight.copy_(before)
    return ratio_estimate(*case.tokens(train, moved).k3(), case.settings.seed)


def view_of(policy: Policy) -> Policy:
    """Copy a policy's modules on the same tensors, so that hooks and switches of the copy do not affect the policy."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*policy.parameters(), *policy.buffers())}
    for module in policy.modules():
        if isinstance(module, LoraLayer):  # PEFT's own arguments may hold views, which cannot be copied
            shared[id(module.kwargs)] = module.kwargs
    view = copy.deepcopy(policy, shared)
    for module in view.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # nothing is dropped while a policy is scored
    return view


def subsets(causes: Sequence[str]) -> list[Causes]:
    """Return all sets of causes, the empty one first."""
    return [frozenset(each) for size in range(len(causes) + 1) for each in combinations(causes, size)]


def split_discrepancy(left: Mapping[Causes, Ratio], floor: Ratio, causes: Sequence[str], seed: int) -> Split:
    """Return δ̄ by its causes, with errors.

    A share is linear in v, and so it is a ratio of sums over prompts as δ̄ is. All estimates draw the same prompts, and
    the shares add up in every draw.

    Args:
        left: v(S) for each set of causes, by prompt; all with the same denominators.
        floor: δ̄ of the policy without the causes to itself with another order of sums, by prompt.
        causes: at least one.
        seed: of the bootstrap.
    """
    denominators = left[frozenset()][1]
    shares = {}
    for cause in causes:
        terms: list[Array] = []
        for others in subsets([name for name in causes if name != cause]):
            weight = 1 / (len(causes) * comb(len(causes) - 1, len(others)))
            terms += [weight * left[others][0], -weight * left[others | {cause}][0]]
        shares[cause] = ratio_estimate(np.sum(terms, axis=0), denominators, seed)
    return Split(
        whole=ratio_estimate(*left[frozenset()], seed),
        shares=shares,
        unexplained=ratio_estimate(*left[frozenset(causes)], seed),
        floor=ratio_estimate(*floor, seed),
    )


def disturb(policy: Policy, seed: int) -> None:
    """Make the linear layers of a policy, without its output head, add up in another order from now on.

    Layers whose output is not bfloat16 keep it, and so do the experts of a mixture.
    """
    generator = torch.Generator(policy.device).manual_seed(seed)
    for linear in quantized_linears(base_model(policy)).values():
        linear.register_forward_hook(
            lambda layer, _, output: in_another_order(output, generator) if output.dtype == torch.bfloat16 else None
        )


def in_another_order(output: Tensor, generator: torch.Generator) -> Tensor:
    """Return rounded sums, bfloat16 of any shape, as another order of summation might have given them.

    The sums themselves are gone. So where each lay between the bounds of its rounding is drawn uniformly, it is moved
    by a relative 1e-7·N(0, 1), and it is rounded again.
    """
    significand, exponent = torch.frexp(output.float())  # the former within [0.5, 1)
    place = torch.rand(output.shape, generator=generator, device=output.device) - 0.5  # in units of the last bit
    noise = torch.randn(output.shape, generator=generator, device=output.device)
    steps = (place + _DISORDER * noise * significand * 2**_BITS).round()
    return output + torch.ldexp(steps, exponent - _BITS).to(output.dtype)


def recommend(split: Split, kl: Estimate) -> list[str]:
    """Return settings for the large parts of δ̄, the largest first, with reasons; `kl` is KL(π_inf ‖ π_train), nats."""
    if kl.high < NO_REMEDY_IN_STEP:
        return [
            f"Nothing is needed: KL(π_inf ‖ π_train) is {kl.value:.1e} nats, at most {kl.high:.1e}, and below "
            f"{NO_REMEDY_IN_STEP:g}, up to which no remedy was shown to help our tiny models; see {DOCS}/which_one.md."
        ]
    whole, rest, floor = split.whole.value, split.unexplained.value, split.floor.value
    if not np.isfinite(kl.value + whole + rest + floor):
        return ["The mismatch is not known: log-probabilities are not finite. Check the weights before you train."]
    causes = sum(share.value for share in split.shares.values())
    found = []
    of_format = f"{causes / whole:.0%} of δ̄ is the number format and the arithmetic"
    through = "train_through_quantization: true (recipe: format)"
    kept = f"An engine that adds up in another order than training keeps {floor:.2g}, whatever is set."
    if causes >= _LARGE * whole and floor >= whole / 2:
        order = f"another order of the float32 sums alone gives {floor / whole:.0%}"
        found.append(f"{of_format}, but {order}: train as usual. {through} helps little. {kept}")
    elif causes >= _LARGE * whole:
        advice = f"{of_format}: set {through}. The training forward is then the deployed one; {rest:.2g} is left."
        if rest < floor / 2 and floor >= _LARGE * whole:  # the engine has the kernels of training
            advice += f" {kept}"
        found.append(advice)
    if rest >= _LARGE * whole:
        advice = (
            f"{rest / whole:.0%} of δ̄ is not explained: only measure it, with constraint: none. Any other order of "
            f"the float32 sums gives {floor:.2g}, which no setting takes away, only equal kernels do. "
        )
        if rest > _OF_THE_FLOOR * floor:
            advice += (
                "If the engine is a server, check first that its checkpoint has these weights, in this dtype, and "
                f"that it runs without tensor parallelism ({DOCS}/aligned.md). For a mixture of experts, set "
                "routing_replay: true, which takes the engine's experts. "
            )
        found.append(
            f"{advice}In our runs with a sampler that does not lag, no constraint and no correction was seen to help, "
            f"and above a KL of {PULLS_HARM_IN_STEP:g} nats a pull to it lost most of the reward; see {DOCS}/study.md."
        )
    return found[::-1] if rest > causes else found
