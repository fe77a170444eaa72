"""Length-aware batches against TRL's own trainer, on the same rollouts: loss and gradient of each optimizer step."""

import json
import random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    TrainerCallback,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from trl import GRPOTrainer

from dc_trl import DCGRPOTrainer
from dc_trl.parts.length_aware_batches import LengthAwareBatches

from .helpers import (
    TWO_PROCESSES,
    Rollouts,
    logged,
    make_experts,
    make_model,
    make_tokenizer,
    make_trainer,
    succeed,
)


KINDS = (DCGRPOTrainer, GRPOTrainer)


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


class Gradients(TrainerCallback):
    """Of each optimizer step."""

    def __init__(self):
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = model.named_parameters()
        self.steps.append({name: value.grad.clone() for name, value in named if value.grad is not None})


class Run(NamedTuple):
    trainer: GRPOTrainer
    gradients: list[dict[str, torch.Tensor]]  # of each optimizer step
    widths: list[tuple[int, int]]  # rows and columns of each forward


FIELDS = {
    "constraint": "none",
    "learning_rate": 1e-3,
    "max_completion_length": 32,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 1e9,  # gradients are compared as they are
}


def train(kind, output_dir, rollouts=None, **options) -> Run:
    scheme = options.get("deployment_scheme")
    rollouts = None if scheme else rollouts or Spread()
    options = FIELDS | {"train_dataset": make_prompts()} | options
    trainer = make_trainer(output_dir, kind=kind, rollout_func=rollouts, **options)
    if scheme:
        Shortened(trainer)
    trainer.add_callback(gradients := Gradients())
    widths = []
    for policy in filter(None, (trainer.model, trainer.ref_model)):
        policy.get_input_embeddings().register_forward_hook(lambda _, ids, __: widths.append(tuple(ids[0].shape)))
    trainer.train()
    return Run(trainer, gradients.steps, widths)


def gaps(found: Run, expected: Run) -> list[float]:
    """Of each optimizer step the norm of the gradients' difference, as a share of their norm."""
    assert len(found.gradients) == len(expected.gradients) > 0
    shares = []
    for mine, other in zip(found.gradients, expected.gradients, strict=True):
        assert mine.keys() == other.keys()
        size = torch.stack([gradient.norm() for gradient in other.values()]).norm()
        gap = torch.stack([(mine[name] - other[name]).norm() for name in other]).norm()
        assert size > 0
        shares.append((gap / size).item())
    return shares


def assert_same_steps(found: Run, expected: Run, tolerance: float = 2e-5) -> None:
    assert max(gaps(found, expected)) < tolerance
    assert logged(found.trainer, "loss") == pytest.approx(logged(expected.trainer, "loss"), rel=1e-3, abs=1e-6)


def tokens(run: Run) -> int:
    """That the forwards of training read, padding included."""
    return sum(rows * width for rows, width in run.widths)


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
    **{name: {"loss_type": name} for name in ("grpo", "dapo", "cispo", "luspo", "vespo")},
    "sequence": {"importance_sampling_level": "sequence"},
    "masked truncated": {"mask_truncated_completions": True},
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
}
# What a mean over the micro-batch makes of a loss: completions stay where they are.
MEANS = {
    "bnpo": {"loss_type": "bnpo"},
    "high entropy": {"top_entropy_quantile": 0.5},
    "adaptive bonus": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 1.0},
}
LOSSES |= MEANS


CASES = [*((steps, "grpo") for steps in STEPS), *(("two steps", loss) for loss in LOSSES if loss != "grpo")]


@pytest.mark.parametrize(("steps", "loss"), CASES)
def test_gradients_are_trls(tmp_path, steps, loss):
    options = STEPS[steps] | LOSSES[loss]
    never_ended = "mask_truncated_completions" in options
    found, expected = (train(kind, tmp_path, Spread(never_ended), **options) for kind in KINDS)
    assert_same_steps(found, expected)
    share = 1 if loss in MEANS else 0.9 if steps == "across batches" else 0.8
    assert tokens(found) < share * tokens(expected)


def test_the_auxiliary_loss_of_experts_keeps_the_micro_batch(tmp_path):
    (kept, plain), (grouped, expected) = (
        [train(kind, tmp_path, max_steps=2, model=make_experts(), **fields) for kind in KINDS]
        for fields in ({}, {"router_aux_loss_coef": 0.0})
    )
    assert_same_steps(kept, plain)
    assert_same_steps(grouped, expected)
    assert tokens(grouped) < tokens(kept) < tokens(expected)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_reference_model_reads_no_padding_either(tmp_path, adapter):
    """Old and reference log-probabilities of TRL, of a reference model of its own or of the policy without adapter."""
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    runs = []
    for kind in KINDS:
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if adapter else None
        torch.manual_seed(1)
        runs.append(train(kind, tmp_path, model=policy, peft_config=lora, beta=0.1, steps_per_generation=8))
    assert_same_steps(*runs)
    assert logged(runs[0].trainer, "kl") == pytest.approx(logged(runs[1].trainer, "kl"), rel=0.5)
    assert tokens(runs[0]) < 0.8 * tokens(runs[1])


# --- what TRL does not have: against the same trainer without length-aware batches


class Shortened:
    """The replica, whose completions are cut to known lengths."""

    def __init__(self, trainer):
        self._generate = trainer.replica.generate
        trainer.replica.generate = self

    def __call__(self, *args, **kwargs):
        completion_ids, logprobs = self._generate(*args, **kwargs)
        lengths = [1 + 7 * index % 30 for index in range(len(completion_ids))]
        return [
            [row[:length] for row, length in zip(rows, lengths, strict=True)] for rows in (completion_ids, logprobs)
        ]


def half_and_half(completions, **kwargs):
    """A reward that is the same for every second prompt's completions."""
    return [float(len(set(each)) > 8) if index // 4 % 2 else 0.0 for index, each in enumerate(completions)]


OURS = {
    "injected": {"constraint": "lagrangian"},
    "old log-probs": {"constraint": "lagrangian", "steps_per_generation": 8},
    "corrected": {"rollout_correction": "token_truncate", "loss_type": "sapo", "steps_per_generation": 8},
    "dropped groups": {
        "reward": half_and_half,
        "drop_zero_std_groups": True,
        "scale_rewards": "none",
        "steps_per_generation": 8,
    },
    "truncated": {"constraint": "static", "top_k": 20, "deployment_scheme": "bf16", "steps_per_generation": 8},
    "routes": {
        "routing_replay": True,
        "router_aux_loss_coef": 0.0,
        "deployment_scheme": "bf16",
        "steps_per_generation": 8,
    },
}


@pytest.mark.parametrize("case", OURS)
def test_gradients_are_those_without_it(tmp_path, case):
    options = {"max_steps": 2} | OURS[case]
    runs = []
    for length_aware in (True, False):
        model = make_experts() if case == "routes" else None
        runs.append(train(DCGRPOTrainer, tmp_path, model=model, length_aware_batches=length_aware, **options))
    assert_same_steps(*runs, tolerance=2e-4 if "deployment_scheme" in options else 2e-5)
    for name in ("lagrangian/lambda", "discrepancy/mean", "discrepancy/kl"):
        assert logged(runs[0].trainer, name) == pytest.approx(logged(runs[1].trainer, name), rel=1e-3, abs=1e-6)
    assert tokens(runs[0]) < tokens(runs[1])


# --- images


def make_llava():
    """A vision-language model of a few thousand parameters, and its processor."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 28, "width": 28}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=1,
        chat_template=(
            "{% for message in messages %}{% for part in message['content'] %}"
            "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
        ),
    )
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        initializer_range=0.3,
    )
    config = LlavaConfig(
        text_config=make_model(vocab_size=263).config,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config), processor


class Seeing(Spread):
    """Rollouts of prompts with images: the processor says which tokens stand for them."""

    def __call__(self, prompts, trainer):
        plain = ["".join(part.get("text", "") for part in prompt[0]["content"]) for prompt in prompts]
        output = super().__call__(plain, SimpleNamespace(**vars(trainer) | {"processing_class": trainer._tokenizer}))
        processor = trainer.processing_class
        for index, prompt in enumerate(prompts):
            images = [part["image"] for part in prompt[0]["content"] if part["type"] == "image"]
            text = processor.apply_chat_template(prompt)
            inputs = processor(images=images or None, text=text)
            (output["prompt_ids"][index],) = inputs["input_ids"]
        return output


def image_prompts() -> Dataset:
    """Of one or two images each."""
    rng = random.Random(0)
    rows = []
    for index in range(16):
        images = [
            Image.new("RGB", (28, 28), tuple(rng.randrange(256) for _ in range(3))) for _ in range(1 + index % 2)
        ]
        rows.append({"prompt": [{"role": "user", "content": "1" * rng.randint(1, 25)}], "images": images})
    return Dataset.from_list(rows)


def test_images_go_with_their_completions(tmp_path):
    runs = []
    for kind in KINDS:
        model, processor = make_llava()
        options = {"model": model, "processing_class": processor, "train_dataset": image_prompts()}
        options["reward"] = lambda completions, **kwargs: [len(set(text[0]["content"])) / 10 for text in completions]
        runs.append(train(kind, tmp_path, Seeing(), steps_per_generation=8, max_steps=2, **options))
    assert_same_steps(*runs)
    assert any("vision" in name for name in runs[0].gradients[0])


# --- several processes


@pytest.mark.long
def test_two_processes_take_the_same_steps(tmp_path):
    succeed([*TWO_PROCESSES, "-m", "tests.batching_worker", str(tmp_path)])
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 7
    ours, untrimmed = found["dropped there"]["means"]  # one micro-batch a step
    assert min(map(len, ours.values())) == 3
    assert max(ours["clip_ratio/region_mean"]) > 0.01
    for mean, values in ours.items():
        assert values == pytest.approx(untrimmed[mean], rel=1e-3, abs=1e-7), mean
    for name, case in found.items():
        assert case["kind"] == "DistributedType.MULTI_CPU"
        assert max(case["gaps"]) < 2e-5, (name, case)
        assert len(set(case["forwards"])) == 1
        ours, theirs = case["tokens"]
        assert sum(ours) < sum(theirs), (name, case)


# --- what is logged


def test_means_over_tokens_are_those_of_one_micro_batch(tmp_path):
    """What TRL averages over micro-batches, each by the tokens that it has."""
    found = train(DCGRPOTrainer, tmp_path, learning_rate=0.0)
    one = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    whole = train(GRPOTrainer, tmp_path, learning_rate=0.0, **one)
    assert logged(found.trainer, "entropy") == pytest.approx(logged(whole.trainer, "entropy"), rel=1e-5)


ALWAYS = {"routing/flipped_fraction", "discrepancy/drift_tv"}


@pytest.mark.parametrize(
    ("level", "logs_kl", "weighed"),
    [
        ("token", True, {"kl", "cispo_clip_ratio", "clip_ratio/low_mean", *ALWAYS}),
        ("token", False, {"cispo_clip_ratio", "clip_ratio/low_mean", *ALWAYS}),
        ("sequence", True, {"kl", *ALWAYS}),
    ],
)
def test_what_a_slice_has_logged_is_weighed(level, logs_kl, weighed):
    """Not its means over trajectories, and not the KL of an earlier slice where TRL has logged none."""
    names = ("kl", "cispo_clip_ratio", "clip_ratio/low_mean", "routing/flipped_fraction", "discrepancy/drift_tv")
    metrics = {name: [1.0] for name in names}
    batches = LengthAwareBatches.__new__(LengthAwareBatches)
    batches.trainer = SimpleNamespace(_metrics={"train": metrics}, importance_sampling_level=level)
    slices = {"token_weights": [3.0, 3.0], "advantages": torch.zeros(2)}

    def compute(inputs):
        for name, values in metrics.items():
            values += [1.0] * (name != "kl" or logs_kl)

    batches.loss(compute, slices)
    assert {name for name, values in metrics.items() if values == [1.0, 3.0]} == weighed
    assert all(set(values) == {1.0} for name, values in metrics.items() if name not in weighed)
