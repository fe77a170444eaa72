"""The deployable checkpoint: the policy in its deployment scheme, as `vllm serve` and transformers load it."""

import ctypes
import os
import time
import uuid
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.core_model_loading import revert_weight_conversion

from ..files import locked_folder, replace_folder_link
from .checkpoint_files import KeptFiles, ShardWriter, name_files
from .fake_quantize import compressed_weight
from .policy import base_model, empty_copy
from .schemes import quantized_weights, require_served_scheme, resolve_scheme
from .tensors import policy_tensors


T = TypeVar("T")


class WriteCost(NamedTuple):
    """Bytes and seconds of writing a checkpoint."""

    bytes_written: int  # size of all new files
    bytes_reused: int  # size of the files of frozen weights that were kept
    gather_seconds: float  # time to gather shards and merge adapters
    quantize_seconds: float  # time to quantize or round tensors and to copy them to the CPU
    write_seconds: float  # time to write them


class CheckpointWriter:
    """Writes a policy in a deployment scheme as a checkpoint directory, again each time its weights have changed.

    The directory holds a compressed-tensors checkpoint (`bf16`: a plain one) under the tensor names of the model's own
    published checkpoints, with configuration and tokenizer: `vllm serve DIR` and `from_pretrained(DIR)` load it
    unchanged. Tensors are quantized one by one, and held until they fill a file.

    Args:
        policy: transformers causal language model, or a PEFT model around one; only its architecture is read.
        scheme: one of `dc_trl.quantization.schemes.SCHEMES`.
        processing_class: tokenizer or processor that goes with the model, or None.
        max_shard_bytes: size at which a new file is begun; a single tensor may exceed it.

    Attributes:
        cost: cost of the last checkpoint.

    Raises:
        ValueError: the scheme is unknown, no engine serves it, or it does not fit the model's layers.
    """

    cost: WriteCost

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        scheme: str,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        max_shard_bytes: int = 4 * 2**30,
    ):
        require_served_scheme(scheme)
        self.scheme = scheme
        self._processing_class = processing_class
        self._max_shard_bytes = max_shard_bytes
        base = base_model(policy)
        self._model = empty_copy(policy)
        self._model.tie_weights()
        self._model.config.dtype = torch.bfloat16
        self._model.config.use_cache = base.config.use_cache
        self._generation_config = base.generation_config or GenerationConfig()
        self._quantization = resolve_scheme(scheme, self._model)
        self._quantized = set(quantized_weights(self._model)) if self._quantization.weights is not None else set()
        self._check_published_layout()
        # A tensor that several modules share has one name here, as in published checkpoints.
        persistent = self._model.state_dict().keys()
        names: dict[str, Tensor] = dict(self._model.named_parameters())
        names |= {name: buffer for name, buffer in self._model.named_buffers() if name in persistent}
        self._names = names.keys()
        self._kept: KeptFiles | None = None

    @property
    def size(self) -> float:
        """Size of a checkpoint's tensors in bytes, nearly: the scales of blocks are left out."""
        size = 2.0 * self._model.num_parameters()
        args = self._quantization.weights
        for name in self._quantized:
            weight = self._model.get_parameter(name)
            size += weight.numel() * (args.num_bits / 8 - 2 + 4 / (args.group_size or weight.shape[-1]))
        return size

    def _check_published_layout(self) -> None:
        """Refuse to quantize experts that the model's published checkpoints hold in one tensor."""
        for name in sorted(self._quantized):
            weight = self._model.get_parameter(name)
            if weight.ndim == 3 and any(value.ndim != 2 for _, value in self._published(name, weight)):
                raise ValueError(
                    f"deployment_scheme={self.scheme!r} cannot be written: {type(self._model).__name__}'s checkpoints "
                    f"keep {name!r} in one tensor, and vLLM loads quantized experts one by one. Use "
                    "deployment_scheme='bf16'."
                )

    @torch.no_grad()
    def write(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        directory: str | os.PathLike[str],
        frozen: Mapping[str, Hashable] = MappingProxyType({}),
        store: Path | None = None,
    ) -> int:
        """Write the checkpoint; an existing directory is replaced in one step when all files are written.

        Args:
            tensors: see `policy_tensors`; any floating dtype. Names that are not part of a checkpoint (tied copies,
                computed buffers) are ignored.
            directory: directory of the checkpoint, whose parent must exist.
            frozen: tensors that training does not change, each with a stamp that changes with its values; see
                `frozen_tensors`. They get files of their own. If all stamps are the same at the next checkpoint, it
                has these files as hard links, where the file system supports them.
            store: directory on the same file system where these files stay; without it, they are written each time.

        Returns:
            Size of all files, in bytes.

        Raises:
            KeyError: a weight of the model is missing.
            OSError: the file system refused to write (no space, no permission). An earlier checkpoint is unharmed.
        """
        directory = Path(directory)
        # Beside the target, so that a rename moves it there; hidden, so that no reader mistakes it for a checkpoint.
        partial = directory.parent / f".{directory.name}-{uuid.uuid4().hex}.partial"
        with locked_folder(partial, others=f".{directory.name}-*.partial", mode=0o700):
            self._write_configuration(partial)
            named = {name: stamp for name, stamp in frozen.items() if name in self._names}
            cost = self._write_tensors(tensors, partial, named, store)
            partial.chmod(0o755)
            size = sum(file.stat().st_size for file in partial.iterdir())
            _move_into_place(partial, directory)
        self.cost = cost._replace(bytes_written=size - cost.bytes_reused)
        return size

    def _write_configuration(self, directory: Path) -> None:
        if self._quantization.weights is not None:
            self._model.config.quantization_config = self._quantization_config()
        self._model.config.architectures = [type(self._model).__name__]
        self._model.config.save_pretrained(directory)
        self._generation_config.save_pretrained(directory)
        if self._processing_class is not None:
            self._processing_class.save_pretrained(directory)

    def _write_tensors(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        directory: Path,
        frozen: dict[str, Hashable],
        store: Path | None,
    ) -> WriteCost:
        seconds = dict.fromkeys(("gather_seconds", "quantize_seconds", "write_seconds"), 0.0)
        reused = self._kept if self._kept is not None and self._kept.hold(store, frozen) else None
        trained, untrained = (ShardWriter(directory / kind, self._max_shard_bytes) for kind in ("trained", "frozen"))
        missing = set(self._names)
        for name, tensor in _timed(tensors, seconds, "gather_seconds"):
            if name not in missing:
                continue
            missing.remove(name)
            if reused is not None and name in frozen:
                continue
            start = time.perf_counter()
            stored = self._stored(name, tensor)
            quantized = time.perf_counter()
            for part, value in stored.items():
                (untrained if name in frozen else trained).add(part, value)
            seconds["quantize_seconds"] += quantized - start
            seconds["write_seconds"] += time.perf_counter() - quantized
        if missing:
            listed = ", ".join(sorted(missing)[:3])
            raise KeyError(f"{len(missing)} weights of the policy are missing, {listed} among them")
        start = time.perf_counter()
        changing = trained.close()
        staying = untrained.close() if reused is None else reused.bring(directory)
        named = name_files(directory, [*changing, *staying])
        if reused is None and store is not None:
            self._kept = None  # in case keeping fails
            self._kept = KeptFiles.keep(store, frozen, named[len(changing) :])
        seconds["write_seconds"] += time.perf_counter() - start
        bytes_reused = 0 if reused is None else sum(file.path.stat().st_size for file in named[len(changing) :])
        return WriteCost(0, bytes_reused, **seconds)

    def _stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint's tensors of a weight by name, on the CPU, none of which shares memory with it."""
        stored: dict[str, Tensor] = {}
        for key, value in self._published(name, tensor):
            if name in self._quantized:
                layer = key.removesuffix("weight")
                parts = compressed_weight(value, self._quantization)
                stored |= {layer + part: each for part, each in parts.items()}
            else:
                stored[key] = value.to(torch.bfloat16 if value.is_floating_point() else value.dtype, copy=True)
        return {key: value.contiguous().cpu() for key, value in stored.items()}

    def _published(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return a weight by the names of the model's published checkpoints, with fused experts one by one.

        `save_pretrained` calls `revert_weight_conversion`; transformers has no public name for it.
        """
        return revert_weight_conversion(self._model, {name: tensor.detach()}).items()

    def _quantization_config(self) -> QuantizationConfig:
        # Layers that an engine could mistake for a Linear layer to quantize: output head, routers, convolutions.
        embedding = self._model.get_input_embeddings()
        ignore = [
            name
            for name, module in self._model.named_modules()
            if module is not embedding
            and f"{name}.weight" not in self._quantized
            and any(key == "weight" and tensor.ndim >= 2 for key, tensor in module.named_parameters(recurse=False))
        ]
        return QuantizationConfig(
            config_groups={"group_0": self._quantization},
            format=self._quantization.format.value,
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=ignore,
        )


def write_deployable(model: str, scheme: str, directory: str | os.PathLike[str], *, revision: str = "main") -> int:
    """Write a model, given by Hub id and revision or by directory, as a deployable checkpoint.

    See `CheckpointWriter`. Return the size of all files, in bytes.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
    return CheckpointWriter(policy, scheme, tokenizer).write(policy_tensors(policy), directory)


def _timed(items: Iterable[T], seconds: dict[str, float], name: str) -> Iterator[T]:
    """Yield the items, and add the seconds that computing them takes to `seconds[name]`."""
    iterator = iter(items)
    while True:
        start = time.perf_counter()
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            seconds[name] += time.perf_counter() - start
        yield item


def _move_into_place(source: Path, target: Path) -> None:
    """Rename a directory over another one in one step; the old content ends up at `source`."""
    replace_folder_link(target)
    try:
        source.rename(target)
        return
    except OSError:
        if not target.is_dir():
            raise
    # POSIX cannot rename a directory over one that is not empty; Linux can exchange the two.
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    at_fdcwd, rename_exchange = -100, 2  # linux/fcntl.h and linux/fs.h
    if renameat2(at_fdcwd, os.fsencode(source), at_fdcwd, os.fsencode(target), rename_exchange) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot replace the checkpoint: {os.strerror(code)}; give another directory", str(target))
