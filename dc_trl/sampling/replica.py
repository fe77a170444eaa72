"""In-process replica of the policy in its deployment scheme, which samples and returns its log-probabilities."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from peft import PeftModel
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.core_model_loading import revert_weight_conversion

from ..quantization import attention
from ..quantization.adapter import beside_base, lora_terms, require_adapter_beside
from ..quantization.contract import read_tensors
from ..quantization.fake_quantize import (
    ActivationQuantizer,
    fake_quantize_weight,
    multiply_numbers,
    quantize_gated,
    weight_numbers,
)
from ..quantization.policy import base_model, empty_copy, with_positions
from ..quantization.rounding import round_as_vllm
from ..quantization.schemes import fused_experts, quantized_linears, quantized_weights, quantizes_cache, resolve_scheme
from ..quantization.tensors import policy_tensors
from ..serving.completions import ended
from ..settings.neutral_sampling import TRUNCATIONS, truncations
from ..version import __version__
from .named_tokens import KeptLogProb


_WEIGHTS_FILE = "model.safetensors"


def declared_end_tokens(policy: PreTrainedModel | PeftModel) -> list[int]:
    """Return the ids of the end tokens in a model's generation_config, which may have none, one or several."""
    config = base_model(policy).generation_config
    declared = None if config is None else config.eos_token_id
    return [] if declared is None else [declared] if isinstance(declared, int) else list(declared)


def end_tokens(policy: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that end a completion: the tokenizer's and the model's.

    They are equal to `eos_token_ids` of TRL's trainer, which rollouts in training use, and to vLLM's stop tokens.

    Raises:
        ValueError: neither the tokenizer nor the model has one.
    """
    ids = declared_end_tokens(policy)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.insert(0, tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            "eos_token_id=None in the tokenizer and in the model's generation_config: set one, because no completion "
            "would ever end."
        )
    return ids


class _SampledLogProbs(LogitsProcessor):
    """Records the log-probability of each sampled token, after temperature, without storing the whole vocabulary.

    With `truncation`, its processors drop tokens, and log-probabilities among the kept ones are recorded too.
    """

    def __init__(self, temperature: float, truncation: LogitsProcessorList | None = None):
        self._temperature = temperature
        self._truncation = truncation
        self._scores: list[Tensor] = []  # of the whole vocabulary; with `truncation`, also of the kept tokens
        self._columns: list[Tensor] = []
        self._kept: list[tuple[Tensor, Tensor]] = []  # for each step, kept ids and their number in each completion

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # The token that was sampled from the previous scores is known only now.
        if self._scores:
            self._record(input_ids[:, -1])
        self._scores = [scores]
        if self._truncation is not None:
            kept = self._truncation(input_ids, scores) > -torch.inf
            self._scores.append(scores.masked_fill(~kept, -torch.inf))
            self._kept.append((kept.nonzero()[:, 1].int(), kept.sum(1)))
        return self._scores[-1]

    def _record(self, tokens: Tensor) -> None:
        scaled = [scores / self._temperature for scores in self._scores]
        logps = [scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - scores.logsumexp(1) for scores in scaled]
        self._columns.append(torch.stack(logps))

    def finish(self, sequences: Tensor) -> Tensor:
        """Return the log-probabilities of the generated tokens, shape (1 or 2, batch, new tokens), nats, float32.

        The first ones are of the whole vocabulary; with `truncation`, the second ones are among the kept tokens.
        """
        assert self._scores, "generate produced no token"
        self._record(sequences[:, -1])
        return torch.stack(self._columns, dim=2)

    def kept(self) -> list[tuple[Tensor, ...]]:
        """Return the ids of the kept tokens at each position of each completion."""
        return list(zip(*(ids.cpu().split(counts.tolist()) for ids, counts in self._kept), strict=True))


class Replica:
    """Copy of the policy in a deployment scheme, in this process, that samples completions.

    Weights and, where the scheme quantizes them, activations are numbers of the quantized format, and everything else
    is bfloat16. Both are rounded where vLLM rounds them; scripts/engines.md compares the two layer by layer. It
    samples with transformers' `generate`, in batches with a KV cache.

    Args:
        policy: transformers causal language model, or a PEFT model around one. Without adapters it may be sharded by
            FSDP2 later; each process then has a whole replica. Of one on the meta device `sync` copies the weights.
        scheme: name of the deployment scheme, see `dc_trl.quantization.schemes`.
        device: device of the replica; by default that of the policy.
        lora_deployment: "merged" or "adapter", with which the base is quantized once; see [`~dc_trl.DCGRPOConfig`].

    Raises:
        ValueError: the scheme is unknown or cannot represent the model, or vLLM does not serve the adapter.
    """

    identity = ("replica", __version__, "bfloat16")  # engine, version and KV-cache dtype, for a checkpoint's contract

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        scheme: str,
        device: torch.device | None = None,
        lora_deployment: str = "merged",
    ):
        base = base_model(policy)
        device = base.device if device is None else device
        self.scheme = scheme
        self.model: PreTrainedModel = empty_copy(policy)
        quantization = resolve_scheme(scheme, self.model)
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        self.model.tie_weights()
        self.model.to(device).eval()
        own = self.model.config._attn_implementation
        kind = attention.NAME if device.type == "cpu" else own
        if quantizes_cache(scheme):
            kind = attention.with_fp8_cache(kind)
        if kind != own:
            self.model.set_attn_implementation(kind)
        # The caller of `generate` gives the settings of sampling; the end tokens are the policy's.
        self.model.generation_config = GenerationConfig(eos_token_id=declared_end_tokens(base) or None)
        self._weight_args = quantization.weights
        self._quantized = set() if self._weight_args is None else set(quantized_weights(self.model))
        if quantization.input_activations is not None:
            self._quantize_activations(ActivationQuantizer(quantization.input_activations))
        self._beside, self._holds_base = lora_deployment == "adapter", False
        if self._beside:
            self._add_adapter(policy)
        self._tensors = dict(self.model.named_parameters(remove_duplicate=False))
        self._tensors |= dict(self.model.named_buffers(remove_duplicate=False))
        if base.device.type != "meta":  # accelerate loads a model to be sharded on meta in all processes but one
            self.sync(policy)
        round_as_vllm(self.model)
        # The last position alone is a view with gaps, for which PyTorch would copy the head's weight once per row.
        self.model.get_output_embeddings().register_forward_pre_hook(_without_gaps)

    def _quantize_activations(self, quantizer: ActivationQuantizer) -> None:
        """Make every layer that the scheme quantizes read quantized activations, from the next forward pass on."""
        for linear in quantized_linears(self.model).values():
            if quantizer.by_token:
                # bfloat16 holds the numbers exactly, but only GPUs multiply it with sums in float32.
                linear.weight.data = linear.weight.to(torch.bfloat16 if linear.weight.is_cuda else torch.float32)
                linear.register_buffer(
                    "weight_scale", linear.weight.new_empty(linear.out_features, dtype=torch.float32)
                )
                multiply_numbers(linear, quantizer)
            else:
                linear.register_forward_pre_hook(quantizer)
        experts = fused_experts(self.model)
        if experts:
            self.model.set_experts_implementation("grouped_mm")  # "eager" does not call `_apply_gate`
        for module in experts.values():
            module.register_forward_pre_hook(quantizer)
            quantize_gated(module, quantizer)

    def _add_adapter(self, policy: PreTrainedModel | PeftModel) -> None:
        """Make the adapted layers add the adapter's product, whose factors are buffers beside their weights."""
        require_adapter_beside(policy)
        for name, (a, b, scaling) in lora_terms(policy):
            linear, kind = self.model.get_submodule(name), {"dtype": torch.bfloat16, "device": self.model.device}
            linear.register_buffer("lora_a", torch.empty_like(a, **kind))
            linear.register_buffer("lora_b", torch.empty_like(b, **kind))
            _add_product(linear, scaling)

    @torch.no_grad()
    def sync(self, policy: PreTrainedModel | PeftModel) -> None:
        """Copy the present weights of the policy and quantize them; beside a base, copy the adapter alone."""
        for name, (a, b, _) in lora_terms(policy) if self._beside else ():
            self._tensors[f"{name}.lora_a"].copy_(a)
            self._tensors[f"{name}.lora_b"].copy_(b)
        if self._holds_base:
            return
        self._holds_base = self._beside
        for name, tensor in policy_tensors(policy, adapters=not self._beside):
            scale = self._tensors.get(f"{name}_scale")
            if scale is not None:
                tensor, scale_of_numbers = weight_numbers(tensor, self._weight_args)
                scale.copy_(scale_of_numbers)
            elif name in self._quantized:
                tensor = fake_quantize_weight(tensor, self._weight_args)
            self._tensors[name].copy_(tensor)

    @classmethod
    @torch.no_grad()
    def of_checkpoint(cls, directory: Path, scheme: str) -> "Replica":
        """Return a replica, on the CPU, with exactly the numbers of a checkpoint that `CheckpointWriter` wrote.

        Raises:
            ValueError: the checkpoint is of a mixture of experts, whose names differ from the model's, or is damaged.
        """
        config, stored = AutoConfig.from_pretrained(directory), read_tensors(directory)
        vars(config).pop("quantization_config", None)
        with init_empty_weights():
            policy = AutoModelForCausalLM.from_config(config)
        policy.tie_weights()
        # Some models' published checkpoints have other names than their modules, such as GPT-NeoX's output head.
        names = {
            next(iter(revert_weight_conversion(policy, {name: each}))): name
            for name, each in policy.state_dict().items()
        }
        stored = {names.get(name, name): tensor for name, tensor in stored.items()}
        replica = cls(policy, scheme, torch.device("cpu"))
        if fused_experts(policy) or not stored.keys() >= {f"{name}_scale" for name in replica._quantized}:
            raise ValueError(f"{directory} holds experts, or is not in scheme={scheme!r}: give one of a dense model.")
        for name in replica._quantized:
            scale = stored[f"{name}_scale"]
            if scale.dtype == torch.uint8:  # MXFP8's powers of two, as exponents
                scale = (scale.float() - 127).exp2()
            if f"{name}_global_scale" in stored:  # NVFP4
                packed = stored[f"{name}_packed"]
                codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
                stored[name] = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))
                scale = scale.float() / stored[f"{name}_global_scale"]
            elif f"{name}_packed" in stored:
                shape, bits = torch.Size(stored[f"{name}_shape"].tolist()), replica._weight_args.num_bits
                stored[name] = unpack_from_int32(stored[f"{name}_packed"], bits, shape)
            if f"{name}_scale" not in replica._tensors:  # which holds the numbers times their scales
                height, width = (all_ // of for all_, of in zip(stored[name].shape, scale.shape, strict=True))
                stored[name] = stored[name].float() * scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
        for name in replica._tensors.keys() & stored.keys():
            replica._tensors[name].copy_(stored[name].view_as(replica._tensors[name]))
        return replica

    def save_weights(self, directory: Path) -> None:
        """Write the weights that the replica holds into a new directory."""
        directory.mkdir()
        save_model(self.model, str(directory / _WEIGHTS_FILE))

    def load_weights(self, directory: Path) -> None:
        """Load the weights that `save_weights` of an equal replica wrote, bit for bit."""
        load_model(self.model, directory / _WEIGHTS_FILE)

    @torch.no_grad()
    def read(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Read whole rows at once, shape (batch, length), as `generate` would read them token by token.

        Returns:
            Hidden states from which `logits_of` computes logits, shape (batch, length, channels).
        """
        rows = with_positions({"input_ids": input_ids, "attention_mask": attention_mask})
        return self.model.base_model(**rows, use_cache=False).last_hidden_state

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: list[list[int]],
        generation_config: GenerationConfig,
        temperature: float,
        logits_processor: Sequence[LogitsProcessor] = (),
        among_kept: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Sample one completion for each prompt.

        Args:
            prompt_ids: token ids of each prompt, not padded.
            generation_config: settings of sampling, with `pad_token_id`; `eos_token_id` is the policy's by default.
            temperature: temperature of the log-probabilities, above 0.
            logits_processor: processors of the scores, applied after those of `generation_config`.
            among_kept: whether log-probabilities are taken among the tokens that top-p, top-k and min-p of
                `generation_config` keep, each as a `KeptLogProb` with that of the whole vocabulary as `reported`;
                otherwise they are of the whole vocabulary.

        Returns:
            Token ids of each completion, up to and including the first end-of-sequence token, and their
            log-probabilities under the replica, in nats.
        """
        device = self.model.device
        width = max(map(len, prompt_ids))
        input_ids = torch.full((len(prompt_ids), width), generation_config.pad_token_id, device=device)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(prompt_ids):
            input_ids[row, width - len(ids) :] = torch.tensor(ids, device=device)
            attention_mask[row, width - len(ids) :] = 1
        truncation = None
        if among_kept and truncations(vars(generation_config)):
            truncation, generation_config = _without_truncation(generation_config)
        recorder = _SampledLogProbs(temperature, truncation)
        own_cache = generation_config.cache_implementation is not None  # which `generate` does not take beside ours
        sequences = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            logits_processor=LogitsProcessorList([recorder, *logits_processor]),
            past_key_values=None if own_cache else self._read_prompts(input_ids, attention_mask),
        )
        logps = recorder.finish(sequences)
        completions = sequences[:, width:]
        ends = generation_config.eos_token_id
        ends = declared_end_tokens(self.model) if ends is None else ends
        is_end = torch.isin(completions, torch.tensor(ends, device=device))
        # A completion ends with its first end token: it consists of the tokens that no end token precedes.
        lengths = (is_end.cumsum(1) - is_end.int() == 0).sum(1).tolist()
        rows_ended = zip(_cut(completions, lengths), is_end.any(1).tolist(), strict=True)
        completion_ids = [ended(ids) if by_itself else ids for ids, by_itself in rows_ended]
        rows = _cut(logps[-1], lengths)
        if truncation is not None:
            whole = _cut(logps[0], lengths)
            rows = [list(map(KeptLogProb, *row)) for row in zip(rows, recorder.kept(), whole, strict=True)]
        return completion_ids, rows

    def _read_prompts(self, input_ids: Tensor, attention_mask: Tensor) -> Cache | None:
        """Read all but the last token of prompts, each different prompt once, and return the cache of all rows.

        GRPO samples several completions of a prompt. None where no prompt comes twice, for a model whose cache is not
        one of tokens, and for a mixture of experts, whose routes are recorded row by row.
        """
        rows, row_of = torch.cat([input_ids, attention_mask], dim=1).unique(dim=0, return_inverse=True)
        width = input_ids.shape[1]
        if len(rows) == len(input_ids) or width == 1 or fused_experts(self.model):
            return None
        read = with_positions({"input_ids": rows[:, : width - 1], "attention_mask": rows[:, width:-1]})
        cache = self.model.base_model(**read, use_cache=True).get("past_key_values")
        if cache is None or cache.get_seq_length() < width - 1:
            return None
        cache.reorder_cache(row_of)
        return cache


def _add_product(linear: nn.Module, scaling: float) -> None:
    held: list[Tensor] = []

    def before(module: Any, inputs: tuple[Tensor]) -> None:
        held[:] = inputs

    def after(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + beside_base(held.pop(), module.lora_a, module.lora_b, scaling)

    linear.register_forward_pre_hook(before, prepend=True)  # before another one quantizes them
    linear.register_forward_hook(after)


def _without_gaps(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].contiguous(),)


def _cut(rows: Tensor, lengths: list[int]) -> list[list]:
    return [row[:length] for row, length in zip(rows.tolist(), lengths, strict=True)]


def _without_truncation(config: GenerationConfig) -> tuple[LogitsProcessorList, GenerationConfig]:
    """Return the processors that truncate sampling, in the order of `generate`, and the configuration without them."""
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
