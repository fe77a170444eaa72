"""The deployable checkpoint: the policy in its deployment scheme, as `vllm serve` and transformers load it."""

import ctypes
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
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
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..files import locked_folder
from .fake_quantize import weight_qparams
from .policy import base_model, empty_copy
from .schemes import quantized_weights, require_served_scheme, resolve_scheme
from .tensors import policy_tensors


class CheckpointWriter:
    """Writes a policy in a deployment scheme as a checkpoint directory, again and again as its weights move.

    The directory holds a compressed-tensors checkpoint (`bf16`: a plain one) under the tensor names of the model's own
    published checkpoints, with configuration and tokenizer: `vllm serve DIR` and `from_pretrained(DIR)` take it
    unchanged. Tensors are quantized and written as they come; no more than one shard is held at any time.

    Args:
        policy: transformers causal language model, or a PEFT model around one; only its architecture is read.
        scheme: one of `dc_trl.quantization.schemes.SCHEMES`.
        processing_class: tokenizer or processor that goes with the model, or None.
        max_shard_bytes: size at which a new file is begun; a single tensor may exceed it.

    Raises:
        ValueError: unknown scheme, one that no engine serves, or one that the model's layers do not fit.
    """

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
        # A tensor that modules share has one name here, as in published checkpoints.
        persistent = self._model.state_dict().keys()
        self._names = {name for name, _ in self._model.named_parameters()}
        self._names |= {name for name, _ in self._model.named_buffers() if name in persistent}
        self._quantization = resolve_scheme(scheme, self._model)
        self._quantized = set(quantized_weights(self._model)) if self._quantization.weights is not None else set()
        self._check_published_layout()

    def _check_published_layout(self) -> None:
        """Refuses to quantize experts that the model's published checkpoints hold in one tensor."""
        for name in sorted(self._quantized):
            weight = self._model.get_parameter(name)
            if weight.ndim == 3 and any(value.ndim != 2 for _, value in self._published(name, weight)):
                raise ValueError(
                    f"deployment_scheme={self.scheme!r} cannot be written: {type(self._model).__name__}'s checkpoints "
                    f"keep {name!r} in one tensor, and vLLM loads quantized experts one by one. Use "
                    "deployment_scheme='bf16'."
                )

    @torch.no_grad()
    def write(self, tensors: Iterable[tuple[str, Tensor]], directory: str | os.PathLike[str]) -> int:
        """Writes the checkpoint; a directory that is there already is replaced in one step once all is written.

        Args:
            tensors: see `policy_tensors`; any floating dtype. Names that are no part of a checkpoint (tied copies,
                buffers that are computed) are passed over.
            directory: where the checkpoint goes. Its parent must exist.

        Returns:
            Bytes of the files.

        Raises:
            KeyError: a weight of the model did not come.
            OSError: the file system refused (no space, no permission). What was there before is unharmed.
        """
        directory = Path(directory)
        # Beside the target, so that a rename moves it there; hidden, so that no reader takes it for a checkpoint.
        partial = directory.parent / f".{directory.name}-{uuid.uuid4().hex}.partial"
        with locked_folder(partial, others=f".{directory.name}-*.partial", mode=0o700):
            self._write_configuration(partial)
            self._write_shards(tensors, partial)
            partial.chmod(0o755)
            size = sum(file.stat().st_size for file in partial.iterdir())
            _move_into_place(partial, directory)
        return size

    def _write_configuration(self, directory: Path) -> None:
        if self._quantization.weights is not None:
            self._model.config.quantization_config = self._quantization_config()
        self._model.config.architectures = [type(self._model).__name__]
        self._model.config.save_pretrained(directory)
        self._generation_config.save_pretrained(directory)
        if self._processing_class is not None:
            self._processing_class.save_pretrained(directory)

    def _write_shards(self, tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
        # By hand because huggingface_hub's and transformers' helpers plan their shards from a whole state dict.
        contents: list[list[str]] = []
        total = 0
        for shard in _shards(self._deployed(tensors), self._max_shard_bytes):
            file = directory / f"{len(contents)}.safetensors"
            try:
                save_file(shard, file, metadata={"format": "pt"})
            except SafetensorError as error:  # how safetensors reports the file system's errors
                raise OSError(f"{file} cannot be written: {error}") from error
            contents.append(list(shard))
            total += sum(tensor.nbytes for tensor in shard.values())
        if len(contents) == 1:
            (directory / "0.safetensors").rename(directory / SAFE_WEIGHTS_NAME)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(contents):
            name = f"model-{number + 1:05d}-of-{len(contents):05d}.safetensors"
            (directory / f"{number}.safetensors").rename(directory / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _deployed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What the checkpoint holds, tensor by tensor, on the CPU."""
        missing = set(self._names)
        for name, tensor in tensors:
            if name not in missing:
                continue
            missing.remove(name)
            for key, value in self._published(name, tensor):
                parts = self._compressed(key, value) if name in self._quantized else [(key, _rounded(value))]
                for part, stored in parts:
                    yield part, stored.cpu().contiguous()
        if missing:
            listed = ", ".join(sorted(missing)[:3])
            raise KeyError(f"{len(missing)} weights of the policy did not come, {listed} among them")

    def _compressed(self, name: str, weight: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The tensors that stand for a quantized weight: its codes, perhaps packed, and its scales."""
        scale, zero_point = weight_qparams(weight, self._quantization.weights)
        of_layer = {"weight": weight.float(), "weight_scale": scale, "weight_zero_point": zero_point}
        compressor = BaseCompressor.get_value_from_registry(self._quantization.format.value)
        layer = name.removesuffix("weight")
        return ((layer + part, value) for part, value in compressor.compress(of_layer, self._quantization).items())

    def _published(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A weight under the names of the model's published checkpoints, fused experts one by one.

        `revert_weight_conversion` is what `save_pretrained` calls; transformers has no public name for it.
        """
        return revert_weight_conversion(self._model, {name: tensor.detach()}).items()

    def _quantization_config(self) -> QuantizationConfig:
        # What an engine could take for a Linear layer: the output head, routers of experts, convolutions.
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
    """Writes a model, by its Hub id and revision or its directory, as a deployable checkpoint; see `CheckpointWriter`.

    Returns the bytes of the files.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
    return CheckpointWriter(policy, scheme, tokenizer).write(policy_tensors(policy), directory)


def _shards(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in dicts of at most ``max_bytes``, or of one tensor; asking for the next dict empties the one before."""
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > max_bytes:
            yield shard
            shard.clear()
            shard_bytes = 0
        shard[name] = tensor
        shard_bytes += tensor.nbytes
    yield shard


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def _move_into_place(source: Path, target: Path) -> None:
    """Renames a directory over another, in one step; the old content ends up at `source`."""
    try:
        source.rename(target)
        return
    except OSError:
        if not target.is_dir():
            raise
    # POSIX renames no directory over a full one; Linux exchanges the two.
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    at_fdcwd, rename_exchange = -100, 2  # linux/fcntl.h and linux/fs.h
    if renameat2(at_fdcwd, os.fsencode(source), at_fdcwd, os.fsencode(target), rename_exchange) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot replace the checkpoint: {os.strerror(code)}; give another directory", str(target))
