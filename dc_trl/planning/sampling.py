"""The engine that samples: what it holds on its devices, and how long a generation batch takes."""

from dataclasses import dataclass

import numpy as np

from .architecture import Architecture
from .deployed import cache_bytes, cached_tokens, checkpoint_bytes
from .devices import SERVER_RUNTIME, SERVER_SHARE, Assumptions, Device
from .flops import forward_flops
from .lengths import Lengths, Moments


# Schemes whose products are computed in 8 bits; the others dequantize weights and compute in BF16.
_EIGHT_BITS = {"fp8", "fp8_block", "int8"}


@dataclass(frozen=True)
class Engine:
    """One replica of the model in vLLM, on devices of one node.

    Args:
        model, scheme, device: what is served, in which format, on what.
        tensor_parallel: devices that share it.
    """

    model: Architecture
    scheme: str
    device: Device
    tensor_parallel: int

    @property
    def weights(self) -> float:
        """Bytes on each device."""
        return checkpoint_bytes(self.model, self.scheme) / self.tensor_parallel

    @property
    def cache(self) -> float:
        """Bytes that are left for the KV cache on each device; negative where the weights do not fit."""
        return self.device.memory * SERVER_SHARE - SERVER_RUNTIME - self.weights

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds, of all sequences together."""
        return max(int(self.cache / cache_bytes(self.model, self.tensor_parallel)), 0)

    @property
    def flops(self) -> float:
        """Peak FLOP/s of all its devices in the scheme's arithmetic."""
        eight = self.scheme in _EIGHT_BITS and self.device.fp8 is not None
        return self.tensor_parallel * (self.device.fp8 if eight and self.device.fp8 else self.device.bf16)

    def why_not(self, longest: int) -> str:
        """Why this does not run; empty where it does.

        Args:
            longest: tokens of prompt and completion together, which the cache has to hold once.
        """
        if self.model.heads % self.tensor_parallel or self.model.expert_width % self.tensor_parallel:
            return f"--tensor-parallel-size {self.tensor_parallel} does not divide {self.model.heads} heads"
        if self.tokens < longest:
            return (
                f"{self.weights / 1e9:.0f} GB of {self.scheme} weights on a device leave a cache of {self.tokens:,} "
                f"tokens, below one sequence of {longest:,}"
            )
        return ""

    def concurrency(self, prompt: float, lengths: Lengths) -> int:
        """Sequences that run together on average: as many as the cache holds half-way through their life."""
        moments = lengths.moments
        held = prompt + moments.second / (2 * moments.first)
        return max(int(self.tokens / cached_tokens(self.model, held)), 1)

    def seconds(
        self, sequences: float, prompt: float, lengths: Lengths, generations: int, assumptions: Assumptions
    ) -> float:
        """Seconds of sampling so many completions on this replica, prompts read once for each group.

        All start together, in waves where the cache does not hold them. After t tokens a share P(X > t) still runs.
        """
        t = np.arange(lengths.cap)
        alive = sequences * lengths.survival
        any_alive = 1 - (1 - lengths.survival) ** max(sequences, 1)
        running = np.divide(alive, any_alive, out=np.zeros_like(alive), where=any_alive > 1e-12)
        limit = self.concurrency(prompt, lengths)
        waves = np.maximum(running / limit, 1)
        together = np.minimum(running, limit)
        decode = float((any_alive * waves * self._step_seconds(together, prompt + t, assumptions)).sum())
        read = forward_flops(self.model, Moments(prompt, prompt**2), 1).total
        return decode + sequences / generations * read / (self.flops * assumptions.prefill_utilization)

    def _step_seconds(self, batch: np.ndarray, context: np.ndarray, assumptions: Assumptions) -> np.ndarray:
        """Seconds of decoding one token for each of `batch` sequences of `context` tokens: memory or arithmetic."""
        model, devices = self.model, self.tensor_parallel
        held = np.zeros(len(context))
        for window in set(model.windows):
            held += model.windows.count(window) / model.layers * np.minimum(context, window or np.inf)
        read = self._weights_read(batch) + batch * held * cache_bytes(model, devices)
        memory = read / (self.device.bandwidth * assumptions.bandwidth_share)
        products = 2 * (model.active_linear + model.head_parameters) + 4 * model.layers * model.query_width * held
        arithmetic = batch * products / (self.flops * assumptions.prefill_utilization)
        reduces = 2 * model.layers * assumptions.reduce_latency if devices > 1 else 0.0
        return np.maximum(memory, arithmetic) + assumptions.step_overhead + reduces

    def _weights_read(self, batch: np.ndarray) -> np.ndarray:
        """Bytes of weights that a step reads on each device: of experts those that some token visits."""
        model = self.model
        looked_up = 0 if model.tied else 2 * model.vocabulary * model.hidden
        everything = checkpoint_bytes(model, self.scheme) - looked_up
        if not model.has_experts:
            return np.full_like(batch, everything / self.tensor_parallel)
        per_weight = checkpoint_bytes(model, self.scheme) / model.parameters
        experts = model.expert_parameters * per_weight
        visited = 1 - (1 - model.active_experts / model.experts) ** batch
        return (everything - experts + experts * visited) / self.tensor_parallel
