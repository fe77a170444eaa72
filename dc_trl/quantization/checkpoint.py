"""The deployable checkpoint: the policy in its deployment scheme, as `vllm serve` and transformers load it."""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationStatus
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..files import locked_folder, replace_folder_link, write_text
from ..settings.paths import ADAPTER_FOLDER
from .adapter import write_adapter
from .contract import write_contract
from .fake_quantize import compressed_weight
from .policy import Policy, base_model, empty_copy
from .schemes import quantized_weights, quantizes_cache, require_served_scheme, resolve_scheme
from .tensors import policy_tensors


_SHARD_BYTES = 4 * 2**30  # size at which a new file is begun; a single tensor may exceed it


class CheckpointWriter:
    """Writes a policy in a deployment scheme as a checkpoint directory, again each time its weights have changed.

    The directory holds a compressed-tensors checkpoint (`bf16`: a plain one) under the tensor names of the model's own
    published checkpoints, with configuration and tokenizer: `vllm serve DIR` and `from_pretrained(DIR)` load it
    unchanged. Tensors are quantized one by one, and held until they fill a file.

    Args:
        policy: transformers causal language model, or a PEFT model around one; only its architecture is read.
        scheme: one of `dc_trl.quantization.schemes.SCHEMES`.
        processing_class: tokenizer or processor that goes with the model, or None.

    Raises:
        ValueError: the scheme is unknown, no engine serves it, or it does not fit the model's layers; or transformers
            does not write the model's generation_config.
    """

    def __init__(
        self,
        policy: Policy,
        scheme: str,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    ):
        require_served_scheme(scheme)
        self.scheme = scheme
        self._processing_class = processing_class
        self._model = empty_copy(policy)
        self._model.tie_weights()
        self._generation_config = base_model(policy).generation_config or GenerationConfig()
        try:
            self._generation_config.validate(strict=True)  # as transformers does when it writes one
        except ValueError as error:
            raise ValueError(f"model: its generation_config cannot be written: {error}") from error
        self._quantization = resolve_scheme(scheme, self._model)
        self._quantized = set(quantized_weights(self._model)) if self._quantization.weights is not None else set()
        for name in sorted(self._quantized):
            weight = self._model.get_parameter(name)
            if weight.ndim == 3 and any(value.ndim != 2 for _, value in self._published(name, weight)):
                raise ValueError(
                    f"deployment_scheme={scheme!r} cannot be written: {type(self._model).__name__}'s checkpoints keep "
                    f"{name!r} in one tensor, and vLLM loads quantized experts one by one: use 'bf16'."
                )
        # A tensor that several modules share has one name here, as in published checkpoints.
        persistent = self._model.state_dict().keys()
        tensors = chain(self._model.named_parameters(), self._model.named_buffers())
        self._dtypes = {name: tensor.dtype for name, tensor in tensors if name in persistent}

    @torch.no_grad()
    def write(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        directory: str | os.PathLike[str],
        facts: Mapping[str, Any] | None = None,
        adapter: PeftModel | None = None,
    ) -> int:
        """Write the checkpoint; an existing directory is replaced when all files are written.

        Args:
            tensors: see `policy_tensors`; any floating dtype. Names that are not part of a checkpoint (tied copies,
                computed buffers) are ignored.
            directory: directory of the checkpoint, whose parent must exist.
            facts: what its contract says beside scheme and tensors, JSON values; without it there is no contract.
            adapter: policy whose adapter goes beside its base, into `adapter/`.

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
            try:
                self._write_tensors(tensors, partial)
            except SafetensorError as error:
                raise OSError(f"{directory} cannot be written: {error}") from error
            if adapter is not None:
                write_adapter(adapter, partial / ADAPTER_FOLDER)
            if facts is not None:
                write_contract(partial, {"scheme": self.scheme, **facts})
            partial.chmod(0o755)
            size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
            replace_folder_link(directory)
            replaced = partial.with_suffix(".old.partial")
            if directory.is_dir():
                directory.rename(replaced)
            partial.rename(directory)
            shutil.rmtree(replaced, ignore_errors=True)
        return size

    def _write_configuration(self, directory: Path) -> None:
        if self._quantization.weights is not None or quantizes_cache(self.scheme):
            self._model.config.quantization_config = self._quantization_config()
        self._model.config.architectures = [type(self._model).__name__]
        self._model.config.save_pretrained(directory)
        self._generation_config.save_pretrained(directory)
        if self._processing_class is not None:
            self._processing_class.save_pretrained(directory)

    def _write_tensors(self, tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
        missing, held, size = set(self._dtypes), dict[str, Tensor](), 0
        files: dict[str, str] = {}
        for name, tensor in tensors:
            if name not in missing:
                continue
            missing.remove(name)
            for part, value in self._stored(name, tensor).items():
                if size + value.nbytes > _SHARD_BYTES:
                    _save(held, directory, files)
                    size = 0
                held[part] = value
                size += value.nbytes
        if missing:
            raise KeyError(f"{len(missing)} weights of the policy are missing, {min(missing)} among them")
        last = _save(held, directory, files)
        shards = sorted(set(files.values()))
        if len(shards) == 1:
            last.rename(directory / SAFE_WEIGHTS_NAME)
            return
        # The names of `save_pretrained`, which say how many there are.
        names = {name: f"{name.removesuffix('.safetensors')}-of-{len(shards):05d}.safetensors" for name in shards}
        for name, numbered in names.items():
            (directory / name).rename(directory / numbered)
        index = {"metadata": {}, "weight_map": {key: names[name] for key, name in files.items()}}
        write_text(directory / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index))

    def _stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint's tensors of a weight by name, on the CPU, none of which shares memory with it."""
        stored: dict[str, Tensor] = {}
        for key, value in self._published(name, tensor):
            if name in self._quantized:
                layer = key.removesuffix("weight")
                parts = compressed_weight(value, self._quantization)
                stored |= {layer + part: each for part, each in parts.items()}
            else:
                stored[key] = value.to(self._dtypes[name], copy=True)
        return {key: value.contiguous().cpu() for key, value in stored.items()}

    def _published(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        # By the names of the model's published checkpoints, with fused experts one by one.
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
        quantized = self._quantization.weights is not None
        cache = QuantizationArgs(type="float", strategy="tensor") if quantizes_cache(self.scheme) else None
        return QuantizationConfig(
            config_groups={"group_0": self._quantization} if quantized else {},
            format=self._quantization.format.value if quantized else "dense",
            quantization_status=QuantizationStatus.COMPRESSED,
            kv_cache_scheme=cache,
            ignore=ignore,
        )


def write_deployable(model: str, scheme: str, directory: str | os.PathLike[str], *, revision: str = "main") -> int:
    """Write a model, given by Hub id and revision or by directory, as a deployable checkpoint.

    See `CheckpointWriter`. Return the size of all files, in bytes.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
    return CheckpointWriter(policy, scheme, tokenizer).write(policy_tensors(policy), directory)


def _save(held: dict[str, Tensor], directory: Path, files: dict[str, str]) -> Path:
    """Write the tensors that are held as the next file, enter it into `files`, and hold them no longer."""
    path = directory / f"model-{len(set(files.values())) + 1:05d}.safetensors"
    save_file(held, path, metadata={"format": "pt"})
    files |= dict.fromkeys(held, path.name)
    held.clear()
    return path
