"""In-process replica of the policy in its deployment scheme: samples, and says with which log-probabilities."""

from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from compressed_tensors.quantization.utils import calculate_range
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..quantization.policy import base_model, empty_copy, policy_tensors
from ..quantization.schemes import (
    fake_quantize_weight,
    fused_experts,
    quantized_linears,
    quantized_weights,
    require_scheme,
    resolve_scheme,
)
from . import attention


# Tokens of each prompt that are read at a time on a CPU: the activations of long prompts would fill its memory.
_PREFILL_CHUNK = 128


class _ActivationQuantizer:
    """Forward pre-hook that fake-quantizes the input of a layer, dynamically, as the engine would.

    Bit for bit the result of compressed-tensors' `compute_dynamic_scales_and_zp` and `fake_quantize`, which take three
    times as long: decoding one token calls this for every layer, and it decides what a rollout costs.
    """

    def __init__(self, args: QuantizationArgs):
        self._group_size = args.group_size
        low, high = calculate_range(args, "cpu")
        self._low, self._high = low.item(), high.item()
        self._is_float8 = args.type == QuantizationType.FLOAT
        # Layers that read the same activations (q, k and v; gate and up) follow one another: quantize once for all.
        self._input: Tensor | None = None
        self._output: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if inputs[0] is not self._input or self._output is None:
            self._input = inputs[0]
            self._output = self.fake_quantize(inputs[0])
        return (self._output, *inputs[1:])

    def fake_quantize(self, activations: Tensor) -> Tensor:
        """Activations of shape (..., channels) after their round trip, each token by itself; same shape and dtype."""
        value = activations.float()  # scales in float32, as in the engines' kernels
        if self._group_size is not None:
            value = value.unflatten(-1, (-1, self._group_size))
        scale = value.abs().amax(-1, keepdim=True) / ((self._high - self._low) / 2)
        scaled = value / scale.clamp_(min=torch.finfo(torch.float32).tiny)  # zeros stay zeros
        rounded = _round_to_float8(scaled) if self._is_float8 else scaled.clamp_(self._low, self._high).round_()
        return rounded.mul_(scale).to(activations.dtype).view_as(activations)

    def reset(self) -> None:
        """Lets go of the activations."""
        self._input = self._output = None


def _quantize_gated(experts: Any, quantizer: _ActivationQuantizer) -> None:
    """Has fused experts quantize what their down_proj reads, which is made within their forward pass."""
    gate = experts._apply_gate
    experts._apply_gate = lambda gate_and_up: quantizer.fake_quantize(gate(gate_and_up))


def _round_to_float8(values: Tensor) -> Tensor:
    """Rounds float32 values within ±448 to E4M3 numbers, ties to even, in place: much faster than PyTorch's casts.

    E4M3 keeps three bits after the leading one, so next to ``v`` its numbers are 2^(e-3) apart, where 2^e is the power
    of two below |v| and e ≥ -6. Adding 1.5 × 2^23 times that distance leaves float32 no bit below it; subtracting it
    again is exact.
    """
    power = values.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32).clamp_(min=2.0**-6)
    return values.add_(power, alpha=1.5 * 2.0**20).sub_(power, alpha=1.5 * 2.0**20)


class _SampledLogProbs(LogitsProcessor):
    """Records the log-probability of each sampled token, after temperature, without keeping the vocabulary."""

    def __init__(self, temperature: float):
        self._temperature = temperature
        self._scores: Tensor | None = None
        self._columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # The token that the previous scores led to is known only now.
        if self._scores is not None:
            self._record(self._scores, input_ids[:, -1])
        self._scores = scores
        return scores

    def _record(self, scores: Tensor, tokens: Tensor) -> None:
        scores = scores / self._temperature
        self._columns.append(scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - scores.logsumexp(1))

    def finish(self, sequences: Tensor) -> Tensor:
        """Log-probabilities of the generated tokens, shape (batch, new tokens), float32."""
        assert self._scores is not None, "generate produced no token"
        self._record(self._scores, sequences[:, -1])
        return torch.stack(self._columns, dim=1)


class Replica:
    """Copy of the policy in a deployment scheme, in this process, that samples completions.

    Weights and, where the scheme quantizes them, activations make a round trip through the quantized format
    (compressed-tensors fake quantization); everything else runs in bfloat16, as vLLM runs it. Sampling is
    transformers' `generate`, in batches with a KV cache.

    Args:
        policy: transformers causal language model, or a PEFT model around one, whole on one device.
        scheme: name of the deployment scheme, one of `dc_trl.quantization.schemes.SCHEMES`.

    Raises:
        ValueError: unknown scheme, or a model that the scheme cannot represent.
    """

    def __init__(self, policy: PreTrainedModel | PeftModel, scheme: str):
        base = base_model(policy)
        require_scheme(scheme)
        self.scheme = scheme
        self.model: PreTrainedModel = empty_copy(policy)
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty_like(parameter, dtype=torch.bfloat16, device=base.device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        self.model.tie_weights()
        self.model.to(base.device).eval()
        if base.device.type == "cpu":
            self.model.set_attn_implementation(attention.NAME)
        # How to sample is up to who calls `generate`; what ends a completion is the policy's.
        of_policy = base.generation_config or GenerationConfig()
        self.model.generation_config = GenerationConfig(eos_token_id=of_policy.eos_token_id)
        self._tensors = dict(self.model.named_parameters(remove_duplicate=False))
        self._tensors |= dict(self.model.named_buffers(remove_duplicate=False))
        quantization = resolve_scheme(scheme, self.model)
        self._weight_args: dict[str, QuantizationArgs] = {}
        self._activations: _ActivationQuantizer | None = None
        if quantization.weights is not None:
            self._weight_args = dict.fromkeys(quantized_weights(self.model), quantization.weights)
            if quantization.input_activations is not None:
                self._quantize_activations(quantization.input_activations)
        self.sync(policy)

    def _quantize_activations(self, args: QuantizationArgs) -> None:
        self._activations = _ActivationQuantizer(args)
        for linear in quantized_linears(self.model).values():
            linear.register_forward_pre_hook(self._activations)
        experts = fused_experts(self.model)
        if experts:
            self.model.set_experts_implementation("grouped_mm")  # which calls `_apply_gate`; "eager" does not
        for module in experts.values():
            module.register_forward_pre_hook(self._activations)
            _quantize_gated(module, self._activations)

    @torch.no_grad()
    def sync(self, policy: PreTrainedModel | PeftModel) -> None:
        """Takes over the present weights of the policy, adapters merged, quantized into the scheme."""
        for name, tensor in policy_tensors(policy):
            args = self._weight_args.get(name)
            self._tensors[name].copy_(tensor if args is None else fake_quantize_weight(tensor, args))

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: list[list[int]],
        generation_config: GenerationConfig,
        temperature: float,
        logits_processor: Sequence[LogitsProcessor] = (),
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Samples one completion for each prompt.

        Args:
            prompt_ids: token ids of each prompt, not padded.
            generation_config: with `pad_token_id` set; without `eos_token_id`, the policy's end tokens count.
            temperature: at which the log-probabilities are taken, above 0.
            logits_processor: applied to the scores after those of `generation_config`.

        Returns:
            Token ids of each completion, up to and with the first end-of-sequence token, and their log-probabilities
            under the replica, in nats.
        """
        device = self.model.device
        width = max(map(len, prompt_ids))
        input_ids = torch.full((len(prompt_ids), width), generation_config.pad_token_id, device=device)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(prompt_ids):
            input_ids[row, width - len(ids) :] = torch.tensor(ids, device=device)
            attention_mask[row, width - len(ids) :] = 1
        recorder = _SampledLogProbs(temperature)
        sequences = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            logits_processor=LogitsProcessorList([recorder, *logits_processor]),
            prefill_chunk_size=_PREFILL_CHUNK if device.type == "cpu" and width > _PREFILL_CHUNK else None,
        )
        logps = recorder.finish(sequences)
        if self._activations is not None:
            self._activations.reset()
        completions = sequences[:, width:]
        ends = generation_config.eos_token_id
        ends = self.model.generation_config.eos_token_id if ends is None else ends
        ended = torch.isin(completions, torch.tensor([] if ends is None else ends, device=device))
        # Up to and with the first end token: those before which no end token stands.
        lengths = (ended.cumsum(1) - ended.int() == 0).sum(1).tolist()
        ids_and_logps = zip(completions.tolist(), logps.tolist(), lengths, strict=True)
        completion_ids, completion_logps = [], []
        for ids, values, length in ids_and_logps:
            completion_ids.append(ids[:length])
            completion_logps.append(values[:length])
        return completion_ids, completion_logps
