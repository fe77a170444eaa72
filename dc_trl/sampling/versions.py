"""Which version of the weights samples, and the versions that the trainer's own forward can have in place.

What the weights did since they sampled is log p − log p_s, by one forward with two versions of the weights: see
`dc_trl.sampled_tokens`. A version is a copy of the trainable tensors as they are: those of an adapter alone where one
is trained, and the local shards under FSDP2. It lies in the host's memory, where the present weights go too while it
is in their place: there is never a second model on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


LAGGED_FILE = "lagged_rank{rank}.safetensors"  # of a checkpoint


@dataclass
class SyncSchedule:
    """Keeps which weights sample in training, as the number of optimizer steps that made them.

    Args:
        every: number of optimizer steps after which newer weights are due, at least 1.
        step: optimizer steps of the weights that sample; None before the first sync, and where newer ones are due.
        syncs: number of times that newer weights were sent.
    """

    every: int
    step: int | None = None
    syncs: int = 0

    def due(self, step: int) -> bool:
        """Return whether newer weights are due at an optimizer step; they stay due until the sync."""
        return self.step is None or step - self.step >= self.every

    def lags(self, step: int) -> bool:
        """Return whether a batch at an optimizer step is sampled with older weights than those of this step."""
        return step != self.step and not self.due(step)

    def synced(self, step: int) -> None:
        """Record that the weights of an optimizer step sample from now on."""
        self.syncs += step != self.step
        self.step = step

    def age(self, step: int) -> int:
        """Return the age of the weights that sample at an optimizer step, in optimizer steps."""
        assert self.step is not None
        return step - self.step


class SamplerWeights:
    """Keeps the trainable tensors of a policy as they were when they began to sample.

    Args:
        policy: the policy without accelerate's wrappers; it may be sharded by FSDP2, but its parameters must not be
            divided otherwise (FSDP1, DeepSpeed's ZeRO stage 3).
        versions: number of versions that are kept, the latest ones; at least 1.

    Raises:
        ValueError: the policy drops out at random, so that two forwards differ with the same weights.
    """

    def __init__(self, policy: nn.Module, versions: int):
        for name, module in policy.named_modules():
            if isinstance(module, nn.Dropout):
                rate, remedy = module.p, "disable_dropout=True, or lora_dropout=0 in peft_config"
            else:  # attention drops out by a function, which TRL's `disable_dropout` leaves on
                rate, remedy = vars(module).get("attention_dropout", 0.0), "attention_dropout=0 in model_init_kwargs"
            if rate > 0:
                raise ValueError(
                    f"model has dropout={rate:g} in {name!r}: two forwards with the same weights differ, which would "
                    f"count as the sampler's lag. Set {remedy}."
                )
        self._policy = policy
        self._count = versions
        self._versions: dict[int, dict[str, Tensor]] = {}

    @property
    def steps(self) -> list[int]:
        """The optimizer steps whose weights are kept."""
        return list(self._versions)

    @property
    def nbytes(self) -> int:
        """Bytes of all versions that may be kept, in this process."""
        return self._count * sum(tensor.nbytes for tensor in self._tensors().values())

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copy the present weights, those of an optimizer step, and drop the oldest version if there are too many."""
        if step in self._versions:
            return
        while len(self._versions) >= self._count:
            del self._versions[min(self._versions)]
        self._versions[step] = {name: tensor.to("cpu", copy=True) for name, tensor in self._tensors().items()}

    @contextmanager
    def in_place(self, step: int) -> Iterator[None]:
        """Compute with the weights of a step within the context. No gradient may be under way, nor be computed.

        However the context ends, also while weights change places, the present ones are back afterwards.
        """
        present: dict[str, Tensor] = {}
        try:
            with torch.no_grad():
                for name, tensor in self._tensors().items():
                    present[name] = tensor.to("cpu", copy=True)
                    tensor.copy_(self._versions[step][name])
            yield
        finally:
            tensors = self._tensors()
            with torch.no_grad():
                for name, value in present.items():
                    tensors[name].copy_(value)

    def clear(self) -> None:
        """Forget all versions."""
        self._versions.clear()

    def save(self, folder: str, writes: bool) -> None:
        """Write the versions into a checkpoint, as safetensors: shards from each process, else where it `writes`."""
        if self._sharded or writes:
            kept = {f"{step}.{name}": tensor for step in self.steps for name, tensor in self._versions[step].items()}
            save_file(kept, self._file_in(folder))

    def load(self, folder: str, same_processes: bool) -> None:
        """Keep the versions of a checkpoint, or none where it has none for this process, in place of those kept.

        The shards of another number of processes are of no use.
        """
        self.clear()
        file = self._file_in(folder)
        if file.is_file() and (same_processes or not self._sharded):
            for key, tensor in load_file(file).items():
                step, name = key.split(".", 1)
                self._versions.setdefault(int(step), {})[name] = tensor

    @property
    def _sharded(self) -> bool:
        return isinstance(self._policy, FSDPModule)

    def _file_in(self, folder: str) -> Path:
        return Path(folder, LAGGED_FILE.format(rank=PartialState().process_index if self._sharded else 0))

    def _tensors(self) -> dict[str, Tensor]:
        for module in self._policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward may have left gathered parameters in the place of the shards
        return {
            name: (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
            for name, parameter in self._policy.named_parameters()
            if parameter.requires_grad
        }
