"""The modules of a policy that have parameters, and the LoRA adapters around them."""

from collections.abc import Iterator, Mapping
from typing import Any

from peft.tuners.lora import Embedding, Linear, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn


class Layer:
    """A module that has parameters, the adapters around it, and the names of the parameters that are quantized."""

    def __init__(self, module: nn.Module, adapters: tuple[Any, ...], quantized: set[str]):
        self.module = module
        self.adapters = adapters
        self.quantized = quantized
        self.multiplies_numbers = False  # whether the placed weight holds numbers of the format
        self._masters: dict[str, nn.Parameter] = {}

    @property
    def placed(self) -> bool:
        """Whether the module holds the deployed parameters now."""
        return bool(self._masters)

    def place(self, deployed: dict[str, Tensor]) -> None:
        """Put the deployed parameters into the module."""
        self._masters = own_parameters(self.module)
        self._set(deployed)

    def take_back(self) -> None:
        """Put the module's own parameters back, where others are."""
        self._set(self._masters)
        self._masters = {}

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            delattr(self.module, key)  # a module refuses a plain tensor in the place of a parameter
            setattr(self.module, key, tensor)

    def adapters_of(self, key: str) -> Iterator[Any]:
        """Yield the active adapters of a parameter: those of a whole layer adapt its weight, others name theirs."""
        for adapter in self.adapters:
            adapted = adapter.parameter_name if isinstance(adapter, ParamWrapper) else "weight"
            if adapted == key and not adapter.disable_adapters and not adapter.merged:
                yield adapter


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module, without those of its children."""
    return dict(module.named_parameters(recurse=False))


def layers_of(module: nn.Module, name: str, adapters: tuple[Any, ...] = ()) -> Iterator[tuple[str, nn.Module, tuple]]:
    """Yield each module that has parameters: its name in the base architecture, the module, and adapters around it.

    A module that PEFT trains a copy of is yielded together with each copy, under one name.
    """
    if isinstance(module, BaseTunerLayer):
        _require_sum(module, name)
        yield from layers_of(module.base_layer, name, (*adapters, module))
    elif isinstance(module, ModulesToSaveWrapper):
        for copy in (module.original_module, *module.modules_to_save.values()):
            yield from layers_of(copy, name)
    else:
        if own_parameters(module):
            yield name, module, adapters
        for key, child in module.named_children():
            yield from layers_of(child, f"{name}.{key}" if name else key)


def _require_sum(adapter: BaseTunerLayer, name: str) -> None:
    """Raise ValueError unless the merged weight is W + ΔW, with a ΔW that PEFT computes with its gradient."""
    sum_of_two = isinstance(adapter, (Linear, Embedding, ParamWrapper))
    if not sum_of_two or adapter.lora_variant or any(adapter.lora_bias.values()):
        raise ValueError(
            f"peft_config adapts {name!r} by {type(adapter).__module__}.{type(adapter).__name__}, whose merged weight "
            "train_through_quantization=True cannot train through: use LoRA without variants (use_dora and the like) "
            "and without lora_bias, or train_through_quantization=False."
        )


def adapter_deltas(adapter: Any) -> Iterator[Tensor]:
    """Yield ΔW of each active adapter of a layer, in the order in which merging adds them to W."""
    for name in adapter.active_adapters:
        if name in adapter.lora_A or name in adapter.lora_embedding_A:
            yield adapter.get_delta_weight(name)
