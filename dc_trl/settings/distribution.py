"""How a run is divided among processes: what its launch and its fields ask for, and whether accelerate gives it.

accelerate silently gives something else where it cannot: DDP for FSDP on a CPU, and processes that each train by
themselves where they find no device.
"""

import os
from typing import Any, Literal, NamedTuple

from transformers.utils import logging

from .paths import shipped


logger = logging.get_logger(__name__)


class Sharding(NamedTuple):
    """The method that divides parameters, gradients or optimizer states among processes."""

    kind: Literal["FSDP", "DEEPSPEED"] | None  # as accelerate names it; None: each process has everything
    level: int  # version of FSDP, 1 or 2, or stage of DeepSpeed's ZeRO, 0 to 3; 0 for no sharding

    def __str__(self) -> str:
        return {"FSDP": f"FSDP{self.level}", "DEEPSPEED": f"DeepSpeed ZeRO-{self.level}", None: "none"}[self.kind]

    @property
    def divides_parameters(self) -> bool:
        """Whether no process has all parameters."""
        return self.kind == "FSDP" or self.level == 3

    @property
    def is_fsdp2(self) -> bool:
        return self.kind == "FSDP" and self.level == 2


def sharding_of(args: Any) -> Sharding:
    """Return what `accelerate launch` (through the environment) or the fields `fsdp` and `deepspeed` ask for."""
    if args.fsdp:
        return Sharding("FSDP", args.fsdp_plugin_args["fsdp_version"])
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return Sharding("FSDP", int(os.environ.get("FSDP_VERSION", "1")))
    if args.deepspeed_plugin is not None:
        return Sharding("DEEPSPEED", args.deepspeed_plugin.zero_stage)
    return Sharding(None, 0)


def require_division(args: Any) -> None:
    """Refuse processes that would not train together or sharded as asked; turn FSDP2 on where it can run.

    Raises:
        ValueError: names what was asked for, what accelerate would make of it, and the remedy.
    """
    from accelerate import DistributedType

    state, sharding = args.distributed_state, sharding_of(args)
    started, made = int(os.environ.get("WORLD_SIZE", "1")), state.distributed_type
    if started > state.num_processes:
        raise ValueError(
            f"num_processes={started} were started, and accelerate found no device that joins them "
            f"(distributed_type: {made.value}): each would train by itself. Without a GPU set use_cpu=true."
        )
    if sharding.kind == "FSDP" and made in (DistributedType.NO, DistributedType.MULTI_CPU):
        if made == DistributedType.NO or sharding.level != 2:
            raise ValueError(
                f"distributed_type: FSDP with fsdp_version: {sharding.level}: accelerate would train without sharding "
                f"(distributed_type: {made.value}). Launch several processes, with fsdp_version: 2 without a GPU (see "
                f"{shipped('configs/accelerate/two_cpu_processes_fsdp2.yaml')})."
            )
        # PyTorch's FSDP2 runs with gloo as with NCCL, and nothing that accelerate does with this type needs a GPU.
        state.distributed_type = DistributedType.MULTI_GPU


def recompute_once(args: Any) -> None:
    """Turn `gradient_checkpointing` off where FSDP recomputes activations, so that it fits all launch files.

    transformers refuses both at once, after it has loaded the model. Warns where nothing of a sharded run recomputes.
    """
    sharding = sharding_of(args)
    by_launch = os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true"
    if args.fsdp:
        by_launch = args.fsdp_plugin_args.get("activation_checkpointing", by_launch)
    if sharding.kind == "FSDP" and by_launch:
        args.gradient_checkpointing = False
    elif sharding.kind is not None and not args.gradient_checkpointing:
        logger.warning(
            f"gradient_checkpointing=False, and the launch ({sharding}) recomputes nothing either: all activations of "
            "a micro-batch stay in memory until its backward pass. If they do not fit, leave the setting out."
        )


def require_whole_models(args: Any, rewards: bool, reference: bool) -> None:
    """Refuse reward models, or a reference model, that would be zeros on all processes of a host but one."""
    sharding, loads = sharding_of(args), os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower()
    if sharding.kind == "FSDP" and loads in ("true", "1") and (rewards or (reference and sharding.is_fsdp2)):
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading: true loads weights in one process of a host. The others get those of the "
            f"policy, but not of {'a reward model' if rewards else 'the reference model (beta)'}: set it to false."
        )
