"""Length-aware batches against TRL's own trainer, on the same rollouts: loss and gradient of each optimizer step."""

import random
from dataclasses import fields

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from dc_trl import DCGRPOTrainer

from .helpers import Rollouts, distinct_characters, logged, make_config, make_experts, make_model, make_tokenizer
from .test_trainer import plain_config


PLAIN = ("output_dir", "use_cpu", "bf16", "gradient_checkpointing", "per_device_train_batch_size", "num_generations")
PLAIN += ("max_completion_length", "max_steps", "learning_rate", "lr_scheduler_type", "logging_steps", "save_strategy")
PLAIN += ("report_to", "disable_tqdm", "loss_type", "epsilon", "beta", "temperature")


class Spread(Rollouts):
    """Rollouts whose lengths differ by a factor of thirty, and some of which end without an end token."""

    def __init__(self, never_ended: bool = False):
        super().__init__(longest=30, edit=self._cut if never_ended else None)

    @staticmethod
    def _cut(call, completions, logprobs):
        for completion, values in list(zip(completions, logprobs, strict=True))[::3]:
            completion.pop()
            values.pop()
            if not completion:
                completion.append(20)
                values.append(-1.0)


def make_prompts() -> Dataset:
    rng = random.Random(0)
    return Dataset.from_dict({"prompt": ["1" * rng.randint(1, 25) + "=" for _ in range(16)]})


class Gradients:
    """Of each optimizer step, before it is clipped."""

    def __init__(self, trainer):
        self.steps: list[dict[str, torch.Tensor]] = []
        clip = trainer._clip_grad_norm

        def keep(model):
            named = trainer.accelerator.unwrap_model(model).named_parameters()
            self.steps.append({name: value.grad.clone() for name, value in named if value.grad is not None})
            return clip(model)

        trainer._clip_grad_norm = keep


def train(kind, config, rollouts=None, model=None, **kwargs):
    trainer = kind(
        make_model() if model is None else model,
        distinct_characters,
        config,
        train_dataset=make_prompts(),
        processing_class=make_tokenizer(),
        rollout_func=Spread() if rollouts is None else rollouts,
        **kwargs,
    )
    gradients = Gradients(trainer)
    widths = []
    trainer.model.base_model.register_forward_hook(
        lambda module, args, kwargs, output: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    trainer.train()
    return trainer, gradients.steps, widths


def assert_same_steps(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        size = torch.stack([gradient.norm() for gradient in other.values()]).norm()
        gap = torch.stack([(mine[name] - other[name]).norm() for name in other]).norm()
        assert gap < 2e-5 * size, f"{gap / size:.1e}"
        assert size > 0


def read(widths):
    return sum(rows * width for rows, width in widths)


def configs(tmp_path, **options):
    """For our trainer and for TRL's, with the same settings of TRL."""
    options = {
        "constraint": "none",
        "learning_rate": 1e-3,
        "max_completion_length": 32,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
    } | options
    ours = make_config(tmp_path, **options)
    of_trl = {name: options[name] for name in options.keys() & {field.name for field in fields(GRPOConfig)}}
    plain = plain_config(ours)
    return ours, GRPOConfig(**{name: getattr(plain, name) for name in PLAIN} | of_trl)


# Micro-batches of an optimizer step and of a generation batch, and passes over it. Where they do not fit, steps cut
# generation batches at places of their own, and an epoch ends with a shorter step.
STEPS = {
    "one step": {},
    "two steps": {"steps_per_generation": 8},
    "two passes": {"steps_per_generation": 4, "num_iterations": 2},
    "across passes": {"steps_per_generation": 6, "num_iterations": 2, "max_steps": 5},
    "across batches": {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
}
LOSSES = {
    **{name: {"loss_type": name} for name in ("grpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")},
    "kl": {"beta": 0.1},
    "sequence": {"importance_sampling_level": "sequence"},
    "masked truncated": {"mask_truncated_completions": True},
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("budget", [None, 120])
def test_gradients_are_trls(tmp_path, steps, loss, budget):
    ours, theirs = configs(tmp_path, **STEPS[steps] | LOSSES[loss])
    ours.max_tokens_per_micro_batch = budget
    rollouts = Spread(never_ended=loss == "masked truncated")
    a = train(DCGRPOTrainer, ours, rollouts)
    b = train(GRPOTrainer, theirs, Spread(never_ended=loss == "masked truncated"))
    assert_same_steps(a[1], b[1])
    assert logged(a[0], "loss") == pytest.approx(logged(b[0], "loss"), rel=1e-4, abs=1e-6)
    assert read(a[2]) < (0.9 if steps == "across batches" else 0.8) * read(b[2])
    print(read(a[2]) / read(b[2]), len(a[2]), len(b[2]), max(r * w for r, w in a[2]))
