"""The aligned, quantization-aware forward: in training, the policy computes as it does when it is deployed.

With W the master weights, Q the round trip through the scheme's number format and x the activations, each layer
computes with Q(W) and Q(x) in bfloat16, as the replica and the checkpoint do. Gradients pass Q unchanged to W and x,
as if ∂Q/∂W = 1: the straight-through estimator (arXiv 1308.3432). QaRL (arXiv 2604.07853) trains policies in this way.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from peft.tuners.lora import Embedding, Linear, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from . import attention
from .adapter import active_terms, beside_base, require_adapter_beside
from .fake_quantize import (
    ActivationQuantizer,
    fake_quantize_weight,
    multiply_numbers,
    quantize_gated,
    straight_through,
    weight_numbers,
)
from .policy import Policy, base_model, empty_copy, with_positions
from .rounding import round_as_vllm
from .schemes import fused_experts, quantized_linears, quantized_weights, quantizes_cache, resolve_scheme
from .tensors import policy_tensors, require_merged_form


class _Layer:
    """A module that has parameters, the adapters around it, and the names of the parameters that are quantized.

    `dtypes` are those of its deployed tensors: of its parameters, and of the buffers that have another one there.
    """

    def __init__(
        self, module: nn.Module, adapters: tuple[Any, ...], quantized: set[str], dtypes: dict[str, torch.dtype]
    ):
        self.module = module
        self.adapters = adapters
        self.quantized = quantized
        self.dtypes = dtypes
        self.multiplies_numbers = False  # whether the placed weight holds numbers of the format
        self._masters: dict[str, Tensor] = {}

    @property
    def placed(self) -> bool:
        return bool(self._masters)  # the module holds the deployed parameters

    def masters(self) -> dict[str, Tensor]:
        return {key: getattr(self.module, key) for key in self.dtypes}

    def place(self, deployed: dict[str, Tensor]) -> None:
        self._masters = self.masters()
        self._set(deployed)

    def take_back(self) -> None:
        self._set(self._masters)
        self._masters = {}

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        buffers = dict(self.module.named_buffers(recurse=False))
        for key, tensor in tensors.items():
            if key not in buffers:
                delattr(self.module, key)  # a module refuses a plain tensor in the place of a parameter
            setattr(self.module, key, tensor)


def _layers_of(module: nn.Module, name: str, adapters: tuple[Any, ...] = ()) -> Iterator[tuple[str, nn.Module, tuple]]:
    """Yield each module: its name in the base architecture, the module, and adapters around it.

    A module that PEFT trains a copy of is yielded together with each copy, under one name.
    """
    if isinstance(module, BaseTunerLayer):
        _require_sum(module, name)
        yield from _layers_of(module.base_layer, name, (*adapters, module))
    elif isinstance(module, ModulesToSaveWrapper):
        for copy in (module.original_module, *module.modules_to_save.values()):
            yield from _layers_of(copy, name)
    else:
        yield name, module, adapters
        for key, child in module.named_children():
            yield from _layers_of(child, f"{name}.{key}" if name else key)


def _require_sum(adapter: BaseTunerLayer, name: str) -> None:
    # The merged weight is W + ΔW, with a ΔW that PEFT computes with its gradient.
    sum_of_two = isinstance(adapter, (Linear, Embedding, ParamWrapper))
    if not sum_of_two or adapter.lora_variant or any(adapter.lora_bias.values()):
        raise ValueError(
            f"peft_config adapts {name!r} by {type(adapter).__module__}.{type(adapter).__name__}, whose merged weight "
            "train_through_quantization cannot train through: use LoRA without variants (use_dora and the like) "
            "and without lora_bias, or train_through_quantization=False."
        )


def _before_each_step(*actions: Callable[[], None]) -> RemovableHandle:
    def act(*_: Any) -> None:
        for action in actions:
            action()

    return register_optimizer_step_pre_hook(act)  # of all optimizers, as it is not known which one is the policy's


class DeployedForward:
    """Makes a policy's modules compute as the deployed policy does, with straight-through gradients to the weights.

    Modules, names and parameters stay as they are; hooks replace the parameters by the deployed weights while a module
    computes. Deployed weights are cached until the parameters change, or an optimizer steps: some, fused AdamW among
    them, change parameters without PyTorch's knowledge. Under FSDP2 the deployed weights are computed each time, from
    parameters that must be gathered unrounded (no `param_dtype`).

    LoRA adapters are merged, as they are when the policy is deployed: the layer computes with Q(W + s·B·A), and A and
    B get its gradient; with `lora_deployment="adapter"` Q(W)·x + s·B·(A·x). Dropout of an adapter is not applied.

    Args:
        policy: transformers causal language model, or a PEFT model around one.
        scheme: name of the deployment scheme, see `dc_trl.quantization.schemes`.
        weights: whether to compute with the deployed weights, which are quantized and rounded to bfloat16.
        activations: whether to compute with the deployed activations, where the scheme quantizes them.
        compute: whether to compute in bfloat16 without autocast, with positions counted as engines count them, and on
            a CPU with the arithmetic of the replica's attention, whose memory grows with the square of the length.
        cache: whether to attend to keys and values of a KV cache in FP8, where the scheme has one.
        adapters: whether to compute with LoRA adapters as they are deployed; otherwise they compute beside their
            layers, as usual in training.
        lora_deployment: "merged" or "adapter", see [`~dc_trl.DCGRPOConfig`].

    Raises:
        ValueError: the scheme is unknown or does not fit the model, or there are adapters other than LoRA.
    """

    def __init__(
        self,
        policy: Policy,
        scheme: str,
        *,
        weights: bool = True,
        activations: bool = True,
        compute: bool = True,
        cache: bool = True,
        adapters: bool = True,
        lora_deployment: str = "merged",
    ):
        base, architecture = base_model(policy), empty_copy(policy)
        quantization = resolve_scheme(scheme, architecture)
        self._enabled = False
        self._policy = policy
        self._weights = weights
        self._compute = compute
        self._weight_args = quantization.weights if weights else None
        args = quantization.input_activations if activations else None
        quantizer = None if args is None else ActivationQuantizer(args)
        self._cache: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}  # state of the parameters, weight and scale
        self._within_policy = False  # whether the whole policy runs forward, and not its backbone alone

        quantized = set() if quantization.weights is None else set(quantized_weights(architecture))
        deployed_dtypes = {name: tensor.dtype for name, tensor in policy_tensors(architecture)}
        quantized_layers = {*quantized_linears(architecture), *fused_experts(architecture)}
        beside = lora_deployment == "adapter"
        (require_adapter_beside if beside else require_merged_form)(policy)
        head = base.get_output_embeddings()
        in_head = set() if head is None else set(head.modules())
        self._head: list[_Layer] = []
        for name, module, merged in _layers_of(base, ""):
            prefix = f"{name}." if name else ""
            own = module.named_parameters(recurse=False)
            dtypes = {key: deployed_dtypes.get(prefix + key, torch.bfloat16) for key, _ in own}
            for key, buffer in module.named_buffers(recurse=False) if compute else ():
                if (dtype := deployed_dtypes.get(prefix + key, buffer.dtype)) != buffer.dtype:
                    dtypes[key] = dtype
            of_layer = {key for key in dtypes if f"{name}.{key}" in quantized}
            layer = _Layer(module, merged if adapters and not beside else (), of_layer, dtypes)
            if not dtypes:
                continue
            if module in in_head:
                self._head.append(layer)
            else:
                self._hook(layer, quantizer if name in quantized_layers else None)
            for adapter in merged if adapters else ():
                self._replace_forward(adapter, beside)
        self._hook_policy(base)
        self._ends = round_as_vllm(base, lambda: self.enabled) if compute else []
        weakref.finalize(self, _before_each_step(self._cache.clear, *self._ends).remove)
        self._base = base
        usual = base.config._attn_implementation
        deployed = attention.NAME if compute and base.device.type == "cpu" else usual
        if cache and quantizes_cache(scheme):
            deployed = attention.with_fp8_cache(deployed)
        self._attention = (usual, deployed) if deployed != usual else None
        # "eager" does not call `_apply_gate`
        expert_kinds = (base.config._experts_implementation, "grouped_mm")
        self._experts = expert_kinds if quantizer is not None and fused_experts(architecture) else None

    @property
    def enabled(self) -> bool:
        """Whether the policy computes as the deployed policy does now; initially False."""
        return self._enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        if on == self._enabled:
            return
        self._enabled = on
        if self._attention is not None:
            self._base.set_attn_implementation(self._attention[on])
        if self._experts is not None:
            self._base.set_experts_implementation(self._experts[on])

    @contextmanager
    def active(self, on: bool = True) -> Iterator[None]:
        """Compute as the deployed policy within the context, or as the policy itself.

        With gradient checkpointing the backward pass computes layers again, so it has to run within the context too.
        """
        before, self.enabled = self.enabled, on
        try:
            yield
        finally:
            self.enabled = before

    # Hooks are functions and not bound methods: merging an adapter copies its layer, which would copy this object and
    # with it the policy.

    def _hook(self, layer: _Layer, quantizer: ActivationQuantizer | None) -> None:
        forward, module = self, layer.module
        is_linear = isinstance(module, nn.Linear)

        def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not forward.enabled:
                return None
            forward._place(layer)
            return None if quantizer is None or layer.multiplies_numbers else quantizer(module, inputs)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(lambda *_: layer.take_back(), always_call=True)
        if quantizer is None:
            return
        if is_linear and quantizer.by_token and self._weights and self._compute:
            layer.multiplies_numbers = True
            multiply_numbers(module, quantizer, lambda: forward.enabled)
        elif not is_linear:
            quantize_gated(module, quantizer, lambda: forward.enabled)

    def _hook_policy(self, base: PreTrainedModel) -> None:
        # The output head is placed until the forward pass ends: TRL's fused head reads its weight from outside.
        forward = self
        autocasts: list[torch.autocast] = []
        backbone = base.get_decoder()
        # Multimodal models count the positions of images by themselves.
        counts_positions = base.config.get_text_config() is base.config and (
            "position_ids" in inspect.signature(backbone.forward).parameters
        )

        def before(module: nn.Module, inputs: Any) -> None:
            forward._within_policy = True

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            forward._within_policy = False
            for layer in forward._head:
                layer.take_back()

        def before_backbone(module: nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[Any, Any] | None:
            if not forward.enabled or not forward._compute:
                return None
            # Autocast is off around the backbone, and not around the policy, whose forward accelerate wraps in
            # autocast. The head computes in the dtype of its input, which autocast would choose too.
            autocasts.append(torch.autocast(base.device.type, enabled=False))
            autocasts[-1].__enter__()
            return inputs, with_positions(options) if counts_positions else options

        def after_backbone(module: nn.Module, inputs: Any, output: Any) -> None:
            while autocasts:
                autocasts.pop().__exit__(None, None, None)
            # With accelerate, FSDP2 gathers the head together with the embedding or the last norm. If the head were
            # placed before, while it is a shard, its gradient would bypass FSDP2, which would then replace it by the
            # embedding's.
            if forward._within_policy and forward.enabled:
                for layer in forward._head:
                    forward._place(layer)

        for model in dict.fromkeys((self._policy, base)):  # PEFT calls the base model without its hooks
            model.register_forward_pre_hook(before)
            # Before FSDP2's own hook, which puts the shards in the place of the gathered weights.
            model.register_forward_hook(after, prepend=True, always_call=True)
        backbone.register_forward_pre_hook(before_backbone, with_kwargs=True)
        backbone.register_forward_hook(after_backbone, always_call=True)

    def _replace_forward(self, adapter: Any, beside: bool) -> None:
        """Replace an adapter's own forward: the weight below contains it, or it is added `beside` as vLLM does."""
        forward, own = self, adapter.forward

        @functools.wraps(own)
        def deployed(inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not forward.enabled:
                return own(inputs, *args, **kwargs)
            output = adapter.base_layer(inputs, *args, **kwargs)
            terms = active_terms(adapter) if beside else ()
            return sum((beside_base(inputs, *term) for term in terms), output)

        adapter.forward = deployed

    def _place(self, layer: _Layer) -> None:
        if (self._weights or self._compute or layer.adapters) and not layer.placed:
            layer.place({key: self._deployed(layer, key, master) for key, master in layer.masters().items()})

    def _deployed(self, layer: _Layer, key: str, master: Tensor) -> Tensor:
        """Return the tensor that a module computes with in place of a parameter, of the same shape."""
        # Those of a whole layer adapt its weight, others name their parameter.
        adapters = [
            adapter
            for adapter in layer.adapters
            if key == (adapter.parameter_name if isinstance(adapter, ParamWrapper) else "weight")
            and not (adapter.disable_adapters or adapter.merged)
        ]
        tensors = [master, *(each for adapter in adapters for each in adapter.parameters())]
        needed = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        identity = (id(master), *((id(adapter), *adapter.active_adapters) for adapter in adapters))
        state = [(each.data_ptr(), each._version) for each in tensors]
        known, value, scale = self._cache.get(identity, (None, None, None))
        fresh, deltas = known != state, []
        if adapters and (fresh or needed):
            # As in merging, in the widest dtype of the layer: PEFT rounds what it adds to experts to their weight's.
            widest = reduce(torch.promote_types, (each.dtype for each in tensors))
            layer.place({key: master.detach().to(widest)})
            with torch.autocast(master.device.type, enabled=False):
                deltas = [  # in the order in which merging adds them to W
                    adapter.get_delta_weight(name)
                    for adapter in adapters
                    for name in adapter.active_adapters
                    if name in adapter.lora_A or name in adapter.lora_embedding_A
                ]
            layer.take_back()
        if fresh:
            # Outside of inference mode: the value is cached, and a later forward may need gradients.
            with torch.inference_mode(False), torch.no_grad():
                value, scale = self._value(layer, key, sum(deltas, master.detach()))
            # FSDP2 gathers into the same memory without changing the versions.
            if not isinstance(self._policy, FSDPModule):
                self._cache[identity] = state, value, scale
        if scale is not None:
            layer.module.weight_scale = scale
        return straight_through(value, master, *deltas) if needed else value

    def _value(self, layer: _Layer, key: str, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        args = self._weight_args if key in layer.quantized else None
        if args is not None and layer.multiplies_numbers:
            numbers, scale = weight_numbers(weight, args)
            return numbers.to(torch.bfloat16), scale  # exactly
        value = weight if args is None else fake_quantize_weight(weight, args)
        if self._weights or self._compute:
            value = value.to(layer.dtypes[key])
        return (value if self._compute else value.to(weight.dtype)), None
