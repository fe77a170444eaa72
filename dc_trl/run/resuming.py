"""Resuming where transformers does it wrong: weights by their published names, learning rates, place in the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.constants import FSDP_MODEL_NAME
from datasets import IterableDataset
from peft import PeftModel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Sampler
from transformers import Trainer

from ..files import read_object
from ..records.runs import TRAINER_STATE_FILE


logger = get_logger(__name__)

# Several processes on a CPU: transformers loads the optimizer to accelerate's "cpu:0", unknown to torch.load.
torch.serialization.register_package(
    11, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


def load_saved_weights(trainer: Trainer, policy: Any, checkpoint: str) -> bool:
    """Load a checkpoint's weights into a policy that is neither sharded nor adapted; return whether it is such a one.

    transformers saves them under the names of published checkpoints, which for mixtures of experts and models with
    images differ from those in memory. It looks there for the latter, and without a match continues with the weights
    that it has (its issue 48805, open with 5.17). `from_pretrained` translates the names.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or isinstance(policy, PeftModel):
        return False
    policy.load_state_dict(type(policy).from_pretrained(checkpoint, dtype="auto").state_dict())
    return True


def require_loadable(trainer: Trainer, checkpoint: str) -> None:
    """Refuse a checkpoint of FSDP that is in shards where the launch loads whole ones, or whole where it loads shards.

    Raises:
        ValueError: it is; accelerate would only miss a file, when weights and optimizer are loaded.
    """
    if not trainer.is_fsdp_enabled:
        return
    in_shards = Path(checkpoint, f"{FSDP_MODEL_NAME}_0").is_dir()
    launched = trainer.accelerator.state.fsdp_plugin.state_dict_type.name
    if in_shards != (launched == "SHARDED_STATE_DICT"):  # FSDP1 has a third form, of which nothing is known here
        saved = "SHARDED_STATE_DICT" if in_shards else "FULL_STATE_DICT"
        raise ValueError(
            f"resume_from_checkpoint={checkpoint!r} was saved with fsdp_state_dict_type={saved}, and this launch has "
            f"{launched}: launch with --fsdp_state_dict_type {saved}."
        )


@contextmanager
def own_adapters(policy: Any, checkpoint: str) -> Iterator[None]:
    """Leave a policy its adapters after the block, in which transformers loads a checkpoint, with the trained one.

    transformers loads the adapters in folders of the checkpoint, if there are any, and those alone: not the trained
    one, where the policy has a reference adapter too, but an older one that a sampler has, as another of the policy's.
    """
    adapters = {*policy.peft_config} if isinstance(policy, PeftModel) else set()
    yield
    if isinstance(policy, PeftModel) and len(policy.peft_config) > 1:
        policy.load_adapter(checkpoint, policy.active_adapter, is_trainable=True)
        for name in policy.peft_config.keys() - adapters:
            policy.delete_adapter(name)


def position_in_data(
    trainer: Trainer, sampler: Sampler | None, epochs: int, batches: int, checkpoint: str | None
) -> tuple[int, int]:
    """Return the epochs and the batches of the next one that a resumed run has trained on.

    Args:
        trainer: trainer of the run.
        sampler: sampler of the training, which draws the order of each epoch; None for a stream.
        epochs, batches: those of transformers.
        checkpoint: from which the run resumes; None where it begins.
    """
    if checkpoint is None or trainer.state.global_step >= trainer.state.max_steps:
        return epochs, batches  # nothing more is trained
    if isinstance(trainer.train_dataset, IterableDataset):
        # transformers assumes that an epoch of a stream has max_steps steps, so a run that has read the whole stream
        # would resume from its beginning. The saved epoch is the number of passes plus the share of max_steps in the
        # last one.
        saved = read_object(Path(checkpoint, TRAINER_STATE_FILE))
        epochs = max(0, math.ceil(saved["epoch"]) - 1)
        if not trainer.args.ignore_data_skip:
            steps = round((saved["epoch"] - epochs) * saved["max_steps"])
            batches = steps * trainer.args.gradient_accumulation_steps
        return epochs, batches
    assert sampler is not None
    for _ in range(epochs):  # TRL's sampler draws each epoch's order after the last one's
        next(iter(sampler), None)
    return epochs, batches


@contextmanager
def given_rates(scheduler: LRScheduler | AcceleratedScheduler, checkpoint: str | None) -> Iterator[None]:
    """Schedule the learning rates of the arguments after the block, which loads a checkpoint if there is one.

    PyTorch's schedulers and optimizers restore the rates of the checkpoint, so that a lower `learning_rate`, the first
    remedy for a run that went wrong, would have no effect.
    """
    inner = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    # DeepSpeed's own schedulers have no base rates, nor has one that follows the loss.
    has_rates = isinstance(inner, LRScheduler) and not isinstance(inner, ReduceLROnPlateau)
    given = list(inner.base_lrs) if has_rates else []
    yield
    if checkpoint is None or not has_rates or inner.base_lrs == given:
        return
    saved, inner.base_lrs = inner.base_lrs, given
    for group, old, new in zip(inner.optimizer.param_groups, saved, given, strict=True):
        group["lr"] = group["lr"] / old * new if old else new
        group["initial_lr"] = new
    inner._last_lr = [group["lr"] for group in inner.optimizer.param_groups]  # what is logged
    logger.warning(f"learning_rate={given[0]:g} from here on: the checkpoint was trained at {saved[0]:g}.")
