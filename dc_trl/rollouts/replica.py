"""In-process replica of the policy in its deployment scheme, which samples and reports its log-probabilities."""

from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..quantization.fake_quantize import QuantizedLinear, fake_quantize_weight, quantize_activations
from ..quantization.policy import base_model, empty_copy
from ..quantization.schemes import quantized_weights, resolve_scheme
from ..quantization.tensors import policy_tensors
from . import attention
from .end_tokens import declared_end_tokens
from .rounding import round_as_vllm


# Tokens of each prompt that are read at a time on a CPU: the activations of long prompts would fill its memory.
_PREFILL_CHUNK = 128


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

    Weights and, where the scheme quantizes them, activations are numbers of the quantized format, and everything else
    is bfloat16. Both are rounded where vLLM rounds them, which docs/engines_gap.md shows layer by layer. Sampling is
    transformers' `generate`, in batches with a KV cache.

    Args:
        policy: transformers causal language model, or a PEFT model around one, whole on one device.
        scheme: name of the deployment scheme, one of `dc_trl.quantization.schemes.SCHEMES`.

    Raises:
        ValueError: unknown scheme, or a model that the scheme cannot represent.
    """

    def __init__(self, policy: PreTrainedModel | PeftModel, scheme: str):
        base = base_model(policy)
        self.scheme = scheme
        self.model: PreTrainedModel = empty_copy(policy)
        quantization = resolve_scheme(scheme, self.model)
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty_like(parameter, dtype=torch.bfloat16, device=base.device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        self.model.tie_weights()
        self.model.to(base.device).eval()
        if base.device.type == "cpu":
            self.model.set_attn_implementation(attention.NAME)
        # The caller of `generate` says how to sample; the policy says what ends a completion.
        self.model.generation_config = GenerationConfig(eos_token_id=declared_end_tokens(base) or None)
        self._weight_args = quantization.weights
        self._quantized = set() if self._weight_args is None else set(quantized_weights(self.model))
        args = quantization.input_activations
        self._activations = None if args is None else quantize_activations(self.model, args)
        self._layers = {f"{n}.weight": m for n, m in self.model.named_modules() if isinstance(m, QuantizedLinear)}
        self._tensors = dict(self.model.named_parameters(remove_duplicate=False))
        self._tensors |= dict(self.model.named_buffers(remove_duplicate=False))
        self.sync(policy)
        round_as_vllm(self.model)

    @torch.no_grad()
    def sync(self, policy: PreTrainedModel | PeftModel) -> None:
        """Takes over the present weights of the policy, adapters merged, quantized into the scheme."""
        for name, tensor in policy_tensors(policy):
            if name in self._layers:
                self._layers[name].quantize_weight(tensor, self._weight_args)
                continue
            quantized = name in self._quantized
            self._tensors[name].copy_(fake_quantize_weight(tensor, self._weight_args) if quantized else tensor)

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
        ends = declared_end_tokens(self.model) if ends is None else ends
        ended = torch.isin(completions, torch.tensor(ends, device=device))
        # A completion ends with its first end token: it has the tokens before which no end token stands.
        lengths = (ended.cumsum(1) - ended.int() == 0).sum(1).tolist()
        return _cut(completions, lengths), _cut(logps, lengths)


def _cut(rows: Tensor, lengths: list[int]) -> list[list]:
    return [row[:length] for row, length in zip(rows.tolist(), lengths, strict=True)]
