"""Where an engine's discrepancy comes from: the policy scores the same tokens as it is deployed, one cause at a time.

A cause is removed by having the policy compute as the engine does in that respect alone. Copies of its modules on the
same tensors do so, and the policy stays as it is. With v(S) the discrepancy δ̄ that is left when the causes S are
removed, the share of cause i among n is its Shapley value ("A Value for n-Person Games", 1953),

    φ_i = Σ_{S ∌ i} |S|! (n − |S| − 1)! / n! · (v(S) − v(S ∪ {i}))

which is the mean, over all orders of removing the causes one after another, of what removing i takes away. δ is an
absolute difference and does not add up, so what a cause takes away depends on what was removed before it. The mean
over all orders prefers none. The shares and the unexplained rest v(N) add up to v(∅) = δ̄ by construction.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ..quantization.deployed_forward import DeployedForward
from ..quantization.policy import base_model, empty_copy
from ..quantization.schemes import resolve_scheme
from .advice import recommend
from .floor import disturb
from .mismatch import Array, Ratio, ScoredTokens, ratio_estimate
from .result import Diagnosis, EngineMismatch, Split
from .rollouts import EngineSample, Policy, sampled_logps
from .scoring import train_logps
from .settings import CalibrationSettings


Causes: TypeAlias = frozenset[str]


class Case(NamedTuple):
    """What a diagnosis needs: the sampled tokens, and the model that is trained."""

    sample: EngineSample
    policy: Policy
    prompts: Sequence[list[int]]  # token ids
    settings: CalibrationSettings

    def score(self, scheme: str, removed: Causes, disturbed: bool = False) -> list[Tensor]:
        """Return log π_train of each rollout's tokens where causes are removed, each of shape (tokens,).

        With ``disturbed``, the layers add up in another order; see `dc_trl.calibration.floor`.
        """
        view = view_of(self.policy)
        arguments = {"weights": "weights", "activations": "activations", "compute": "precision", "adapters": "adapter"}
        switches = {name: cause in removed for name, cause in arguments.items()}
        deployed = DeployedForward(view, scheme, **switches)
        if disturbed:
            disturb(view, self.settings.seed)
        with deployed.active():
            return train_logps(view, self.prompts, self.sample.rollouts, self.settings)

    def causes(self, scheme: str) -> list[str]:
        """Return the causes that are there: weights, activations, arithmetic of another precision, adapters."""
        quantization = resolve_scheme(scheme, empty_copy(self.policy))
        present = {
            "weights": quantization.weights is not None or base_model(self.policy).dtype != torch.bfloat16,
            "activations": quantization.input_activations is not None,
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
            raise ValueError(f"engine={self.sample.engine!r} is in no scheme that is known here.")
        return min(distances, key=lambda scheme: distances[scheme])

    def discrepancy(self, train: Sequence[Tensor], infer: Sequence[Tensor]) -> Ratio:
        """Return δ̄ between log-probabilities of the rollouts' tokens, by prompt."""
        tokens = ScoredTokens(self.sample.rollouts, train, infer, len(self.prompts), self.settings.measure)
        return tokens.batch_discrepancy(self.settings.reduction)


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


def subsets(causes: Sequence[str]) -> Iterator[Causes]:
    """Iterate over all sets of causes, the empty one first."""
    for size in range(len(causes) + 1):
        yield from map(frozenset, combinations(causes, size))


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
