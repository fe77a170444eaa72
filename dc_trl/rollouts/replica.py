"""In-process replica of the policy in its deployment scheme, which samples and reports its log-probabilities."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..quantization import attention
from ..quantization.fake_quantize import QuantizedLinear, fake_quantize_weight, quantize_activations
from ..quantization.policy import base_model, empty_copy
from ..quantization.rounding import round_as_vllm
from ..quantization.schemes import quantized_weights, resolve_scheme
from ..quantization.tensors import policy_tensors
from .end_tokens import declared_end_tokens
from .neutral_sampling import TRUNCATIONS, truncates
from .truncation import KeptLogProb


# Tokens of each prompt that are read at a time on a CPU: the activations of long prompts would fill its memory.
_PREFILL_CHUNK = 128

_WEIGHTS_FILE = "model.safetensors"


class _SampledLogProbs(LogitsProcessor):
    """Records the log-probability of each sampled token, after temperature, without keeping the vocabulary.

    With `truncation`, tokens that these processors drop are dropped, and the log-probability is among those kept.
    """

    def __init__(self, temperature: float, truncation: LogitsProcessorList | None = None):
        self._temperature = temperature
        self._truncation = truncation
        self._scores: Tensor | None = None
        self._columns: list[Tensor] = []
        self._kept: list[tuple[Tensor, Tensor]] = []  # of each step: ids, and how many of them each completion has

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # The token that the previous scores led to is known only now.
        if self._scores is not None:
            self._record(self._scores, input_ids[:, -1])
        if self._truncation is not None:
            kept = self._truncation(input_ids, scores) > -torch.inf
            scores = scores.masked_fill(~kept, -torch.inf)
            self._kept.append((kept.nonzero()[:, 1].int(), kept.sum(1)))
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

    def kept(self) -> list[tuple[Tensor, ...]]:
        """Ids of the kept tokens, of each completion and position."""
        return list(zip(*(ids.cpu().split(counts.tolist()) for ids, counts in self._kept), strict=True))


class Replica:
    """Copy of the policy in a deployment scheme, in this process, that samples completions.

    Weights and, where the scheme quantizes them, activations are numbers of the quantized format, and everything else
    is bfloat16. Both are rounded where vLLM rounds them, which docs/engines_gap.md shows layer by layer. Sampling is
    transformers' `generate`, in batches with a KV cache.

    Args:
        policy: transformers causal language model, or a PEFT model around one; without adapters it may be sharded by
            FSDP2 later, and each process then has a whole replica. One on the meta device is copied by `sync` alone.
        scheme: name of the deployment scheme, one of `dc_trl.quantization.schemes.SCHEMES`.
        device: where the replica computes; by default where the policy is.

    Raises:
        ValueError: unknown scheme, or a model that the scheme cannot represent.
    """

    def __init__(self, policy: PreTrainedModel | PeftModel, scheme: str, device: torch.device | None = None):
        base = base_model(policy)
        device = base.device if device is None else device
        self.scheme = scheme
        self.model: PreTrainedModel = empty_copy(policy)
        quantization = resolve_scheme(scheme, self.model)
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty_like(parameter, dtype=torch.bfloat16, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        self.model.tie_weights()
        self.model.to(device).eval()
        if device.type == "cpu":
            self.model.set_attn_implementation(attention.NAME)
        # The caller of `generate` says how to sample; the policy says what ends a completion.
        self.model.generation_config = GenerationConfig(eos_token_id=declared_end_tokens(base) or None)
        self._weight_args = quantization.weights
        self._quantized = set() if self._weight_args is None else set(quantized_weights(self.model))
        args = quantization.input_activations
        self._activations = None if args is None else quantize_activations(self.model, args)
        self._kept: dict[str, Tensor] | None = None
        self._layers = {f"{n}.weight": m for n, m in self.model.named_modules() if isinstance(m, QuantizedLinear)}
        self._tensors = dict(self.model.named_parameters(remove_duplicate=False))
        self._tensors |= dict(self.model.named_buffers(remove_duplicate=False))
        if base.device.type != "meta":  # as accelerate loads a model in all processes but one, to shard it
            self.sync(policy)
        round_as_vllm(self.model)

    @torch.no_grad()
    def sync(self, policy: PreTrainedModel | PeftModel, keep: bool = False) -> None:
        """Takes over the present weights of the policy, adapters merged, quantized into the scheme.

        `keep` holds the weights from before, for `go_back`, until a sync that does not.
        """
        if not keep:
            self._kept = None
        elif self._kept is None:
            self._kept = {name: tensor.clone() for name, tensor in self._own_tensors().items()}
        for name, tensor in policy_tensors(policy):
            if name in self._layers:
                self._layers[name].quantize_weight(tensor, self._weight_args)
                continue
            quantized = name in self._quantized
            self._tensors[name].copy_(fake_quantize_weight(tensor, self._weight_args) if quantized else tensor)

    def go_back(self) -> None:
        """Samples with the weights again that `sync` has kept."""
        assert self._kept is not None
        self._take(self._kept)
        self._kept = None

    def save_weights(self, directory: Path) -> None:
        """Writes the weights that it holds, or that it is to go back to, into a new directory."""
        directory.mkdir()
        tensors = self._own_tensors() if self._kept is None else self._kept
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / _WEIGHTS_FILE)

    def load_weights(self, directory: Path) -> None:
        """Takes over what `save_weights` of such a replica wrote, bit for bit."""
        self._kept = None
        self._take(load_file(directory / _WEIGHTS_FILE))

    def _own_tensors(self) -> dict[str, Tensor]:
        """What `sync` sets, each tensor once."""
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())

    @torch.no_grad()
    def _take(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in self._own_tensors().items():
            tensor.copy_(tensors[name])

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: list[list[int]],
        generation_config: GenerationConfig,
        temperature: float,
        logits_processor: Sequence[LogitsProcessor] = (),
        among_kept: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Samples one completion for each prompt.

        Args:
            prompt_ids: token ids of each prompt, not padded.
            generation_config: with `pad_token_id` set; without `eos_token_id`, the policy's end tokens count.
            temperature: at which the log-probabilities are taken, above 0.
            logits_processor: applied to the scores after those of `generation_config`.
            among_kept: what top-p, top-k and min-p of `generation_config` keep is what log-probabilities are taken
                of, each a `KeptLogProb`; by default they are of the whole vocabulary.

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
        truncation = None
        if among_kept and truncates(vars(generation_config)):
            truncation, generation_config = _without_truncation(generation_config)
        if device.type == "cpu" and width > _PREFILL_CHUNK:
            # In a copy: beside a configuration, transformers warns of arguments that could stand in it.
            generation_config = copy.deepcopy(generation_config)
            generation_config.prefill_chunk_size = _PREFILL_CHUNK
        recorder = _SampledLogProbs(temperature, truncation)
        sequences = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            logits_processor=LogitsProcessorList([recorder, *logits_processor]),
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
        rows = _cut(logps, lengths)
        if truncation is not None:
            rows = [list(map(KeptLogProb, *row)) for row in zip(rows, recorder.kept(), strict=True)]
        return _cut(completions, lengths), rows


def _cut(rows: Tensor, lengths: list[int]) -> list[list]:
    return [row[:length] for row, length in zip(rows.tolist(), lengths, strict=True)]


def _without_truncation(config: GenerationConfig) -> tuple[LogitsProcessorList, GenerationConfig]:
    """What cuts off a configuration's sampling, in the order of `generate`, and the configuration without it."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(config.temperature or 1.0)]
    if config.top_k:
        warpers.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None:
        warpers.append(TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        warpers.append(MinPLogitsWarper(config.min_p))
    whole = copy.deepcopy(config)
    whole.update(**TRUNCATIONS)
    return LogitsProcessorList(warpers), whole
