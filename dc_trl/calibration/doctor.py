"""Where an engine's discrepancy comes from: the policy scores the same tokens as it is deployed, one cause at a time.

A cause is removed by having the policy compute as the engine does in that respect alone. Copies of its modules on the
same tensors do so; the policy stays as it is.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ..quantization.deployed_forward import DeployedForward
from ..quantization.policy import base_model, empty_copy
from ..quantization.schemes import resolve_scheme
from ..rollouts.replica import Replica
from ..rollouts.routing import RoutingReplay
from .advice import recommend
from .forwards import compare_forwards
from .mismatch import batch_discrepancy
from .result import Diagnosis, EngineMismatch
from .rollouts import EngineSample, Policy, sampled_logps
from .scoring import train_logps
from .settings import CalibrationSettings
from .split import Causes, split_discrepancy, subsets
from .tokens import Array, ScoredTokens


# What is done to remove each cause.
REMOVALS = {
    "weights": "the scheme's weights, rounded to bfloat16 numbers",
    "activations": "the scheme's activations",
    "precision": "bfloat16 without autocast, with the engine's attention arithmetic and positions",
    "adapter": "LoRA adapters merged into the weights",
    "routing": "the experts that the engine chose",
    "staleness": "the weights that the engine runs",
    "decoding": "the engine's log-probabilities from one pass, not from its KV cache token by token",
}


class Case(NamedTuple):
    """What a diagnosis is made of: the sampled tokens, the model that is trained, and the one that the engine runs."""

    sample: EngineSample
    policy: Policy
    sampler: Policy  # the policy itself, or an older one
    prompts: Sequence[list[int]]  # token ids
    settings: CalibrationSettings

    def score(self, scheme: str, removed: Causes) -> list[Tensor]:
        """log π_train of each rollout's tokens where causes are removed, each of shape (tokens,)."""
        view = view_of(self.sampler if "staleness" in removed else self.policy)
        replay = RoutingReplay(view) if "routing" in removed else None
        with deployed(view, scheme, removed).active():
            return train_logps(view, self.prompts, self.sample.rollouts, self.settings, replay=replay)

    def causes(self, scheme: str) -> list[str]:
        """Causes that scoring passes can remove."""
        quantization, rollouts = resolve_scheme(scheme, empty_copy(self.policy)), self.sample.rollouts
        rounded = quantization.weights is not None or base_model(self.policy).dtype != torch.bfloat16
        present = {
            "weights": rounded,
            "activations": quantization.input_activations is not None,
            "precision": True,
            "adapter": isinstance(self.policy, PeftModel),
            "routing": all(rollout.routes is not None for rollout in rollouts if rollout.ids),
            "staleness": self.sampler is not self.policy,
        }
        return [cause for cause, there in present.items() if there]

    def scheme(self) -> str:
        """The engine's; where it may be in several, the one that the policy, deployed in it, is nearest in."""
        if len(self.sample.schemes) == 1:
            return self.sample.schemes[0]
        fitting = list(self._fitting())
        if not fitting:
            raise ValueError(f"engine={self.sample.engine!r} is in no scheme that is known here.")
        return fitting[0] if len(fitting) == 1 else min(fitting, key=self._distance)

    def _fitting(self) -> Iterator[str]:
        for scheme in self.sample.schemes:
            try:
                resolve_scheme(scheme, empty_copy(self.policy))
            except ValueError:  # groups that do not divide the model's widths: the engine cannot run this one
                continue
            yield scheme

    def _distance(self, scheme: str) -> float:
        scored = self.score(scheme, frozenset(self.causes(scheme)))
        numerator, denominator = self.discrepancy(scored, sampled_logps(self.sample.rollouts))
        return float(numerator.sum() / denominator.sum())

    def discrepancy(self, train: Sequence[Tensor], infer: Sequence[Tensor]) -> tuple[Array, Array]:
        """δ̄ between log-probabilities of the rollouts' tokens, by prompt."""
        pairs = zip(self.sample.rollouts, infer, strict=True)
        rollouts = [rollout._replace(logps=logps.tolist()) for rollout, logps in pairs]
        tokens = ScoredTokens.of(rollouts, train, len(self.prompts), self.settings.measure)
        return batch_discrepancy(tokens, self.settings.reduction)


def diagnose(case: Case, train: Sequence[Tensor], found: EngineMismatch) -> Diagnosis:
    """Splits an engine's δ̄ into its causes, and compares the policy with its deployed form.

    Args:
        case: what was sampled, by what.
        train: log π_train of each rollout's tokens, shape (tokens,).
        found: what was measured of the engine.

    Raises:
        ValueError: the engine's scheme does not fit the model, or the policy has adapters other than LoRA.
    """
    settings = case.settings
    scheme = case.scheme()
    causes = case.causes(scheme)
    every = frozenset(causes)
    settings.report(f"{case.sample.engine}: {2 ** len(causes)} scoring passes split δ̄ into its causes")
    passes = {removed: case.score(scheme, removed) if removed else list(train) for removed in subsets(causes)}
    targets: dict[Causes, list[Tensor]] = {frozenset(): sampled_logps(case.sample.rollouts)}
    if case.sample.engine.startswith("replica:"):
        targets[frozenset({"decoding"})] = _in_one_pass(case, scheme)
        causes.append("decoding")
    # A token counts where every pass gave it a finite log-probability, so that all means are over the same tokens.
    gaps = [torch.stack(values).sum(0) * 0 for values in zip(*passes.values(), *targets.values(), strict=True)]
    left = {
        removed | target: case.discrepancy([a + gap for a, gap in zip(scored, gaps, strict=True)], infer)
        for removed, scored in passes.items()
        for target, infer in targets.items()
    }
    split = split_discrepancy(left, causes, settings.seed)
    of_engine = view_of(case.sampler)
    vocabulary, layers = compare_forwards(
        view_of(case.policy),
        of_engine,
        deployed(of_engine, scheme, every),
        case.prompts,
        case.sample.rollouts,
        settings,
    )
    return Diagnosis(scheme, split, vocabulary, layers, recommend(split, found.estimates["k3_kl"]))


def _in_one_pass(case: Case, scheme: str) -> list[Tensor]:
    """log π_inf of the replica's weights, each of shape (tokens,), from whole sequences at a time."""
    replica = Replica(case.sampler, scheme)
    with_routes = "routing" in case.causes(scheme)
    replay = RoutingReplay(replica.model) if with_routes else None
    rollouts = case.sample.rollouts
    scored = train_logps(replica.model, case.prompts, rollouts, case.settings, as_engine=True, replay=replay)
    return [logps.double() for logps in scored]


def view_of(policy: Policy) -> Policy:
    """A copy of a policy's modules on the same tensors: hooks and switches of the copy are not the policy's."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*policy.parameters(), *policy.buffers())}
    for module in policy.modules():
        if isinstance(module, LoraLayer):  # what PEFT built it from may hold views, which cannot be copied
            shared[id(module.kwargs)] = module.kwargs
    view = copy.deepcopy(policy, shared)
    for module in view.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # nothing drops while a policy is scored
    return view


def deployed(view: Policy, scheme: str, removed: Causes) -> DeployedForward:
    """The deployed forward of a view, in what the causes are about."""
    return DeployedForward(
        view,
        scheme,
        weights="weights" in removed,
        activations="activations" in removed,
        compute="precision" in removed,
        adapters="adapter" in removed,
    )
