"""Padding-free forwards: a row of sequences gives what each alone gives, and training what TRL does with padding."""

import json
import subprocess

import pytest
import torch
import transformers
from accelerate import Accelerator
from peft import PromptTuningConfig, TaskType, get_peft_model
from transformers import Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.rollouts.padding_free import Packing, prepared

from .helpers import (
    ROOT,
    TWO_PROCESSES,
    Rollouts,
    distinct_characters,
    logged,
    make_experts,
    make_model,
    make_prompts,
    make_tokenizer,
)


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def padded_batch(rows=4, prompt=5, completion=7, seed=0):
    """Token ids with prompts padded on the left and completions on the right, mask, and TRL's labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 100, (rows, prompt + completion), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % prompt] = 0
        mask[row, prompt + completion - (2 * row) % completion :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    return ids, mask, labels


def alone(model, ids, mask, labels):
    """Log-probabilities of labelled tokens, one sequence after the other and without padding: (B, L − 1)."""
    scores = torch.zeros(ids.shape[0], ids.shape[1] - 1)
    for row in range(len(ids)):
        real = mask[row].nonzero().squeeze(1)
        logits = model(input_ids=ids[row, real][None]).logits[0, :-1].log_softmax(-1)
        found = logits.gather(1, ids[row, real[1:]].unsqueeze(1)).squeeze(1)
        scores[row, real[1:] - 1] = torch.where(labels[row, real[1:]] >= 0, found, 0.0)
    return scores


# --- one forward


def test_flash_attention_gets_the_bounds_of_the_sequences():
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0]])
    for name in ("flash_attention_2", "flash_attention_3", "kernels-community/vllm-flash-attn3"):
        options = Packing(mask).options(name)
        for side in "qk":
            assert options[f"cu_seq_lens_{side}"].tolist() == [0, 2, 6, 7]
            assert options[f"cu_seq_lens_{side}"].dtype == torch.int32
            assert options[f"max_length_{side}"] == 4
    assert Packing(mask).options("eager") == Packing(mask).options("flex_attention") == {}


TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Families by what their attention has: windows, a bound on scores, learned positions, no rotation, experts.
ARCHITECTURES = {
    "Llama": {},
    "Mistral": {"sliding_window": 3},
    "Gemma2": WINDOWS | {"query_pre_attn_scalar": 16},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Mixtral": EXPERTS,
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
}


def tiny(name, **overrides):
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or transformers.GPT2LMHeadModel
    torch.manual_seed(0)
    return model_class(config_class(**TINY | ARCHITECTURES.get(name, {}) | overrides)).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_row_of_sequences_gives_what_each_gives_alone(accelerator, name):
    model = tiny(name)
    model.set_attn_implementation("sdpa")
    ids, mask, labels = padded_batch()
    with torch.no_grad():
        expected = alone(model, ids, mask, labels)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    computed = []
    model.base_model.register_forward_hook(lambda *call: computed.append(call[2].last_hidden_state.shape[:2]))
    forward = prepared([model], accelerator).around(model)
    computed.clear()
    with torch.no_grad():
        output = forward(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    assert output.log_probs.shape == output.entropy.shape == (4, 11)
    torch.testing.assert_close(output.log_probs, expected, rtol=1e-4, atol=2e-5)
    assert computed == [(1, mask.sum())]  # no token of padding


# --- training


class Gradients(TrainerCallback):
    """Gradients of each optimizer step, by parameter."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        parameters = model.named_parameters()
        self.steps.append({name: each.grad.clone() for name, each in parameters if each.grad is not None})


# Of both trainers; the paper's objective has other defaults than TRL.
BASE = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "loss_type": "grpo",
    "epsilon": 0.24,
    "beta": 0.0,
    "vllm_importance_sampling_correction": False,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 13,
    "max_steps": 2,
    "optim": "sgd",
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
}


def train(tmp_path, ours=None, model=None, rollouts=True, peft_config=None, **fields):
    """TRL's trainer, or ours with these settings."""
    fields = {"output_dir": str(tmp_path)} | BASE | fields
    trainer = (GRPOTrainer if ours is None else DCGRPOTrainer)(
        model if model is not None else make_model(),
        distinct_characters,
        GRPOConfig(**fields) if ours is None else DCGRPOConfig(**fields | ours),
        train_dataset=make_prompts(),
        processing_class=make_tokenizer(),
        rollout_func=Rollouts(longest=12) if rollouts else None,
        peft_config=peft_config,
        callbacks=[gradients := Gradients()],
    )
    trainer.train()
    return trainer, gradients.steps


def assert_same(ours, theirs, logs=("loss", "entropy")):
    """Losses and gradients of two runs are equal to float32 rounding of the largest gradient."""
    for name in logs:
        assert logged(ours[0], name) == pytest.approx(logged(theirs[0], name), rel=1e-4, abs=1e-6), name
    assert len(ours[1]) == len(theirs[1]) > 0
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine.keys() == other.keys()
        largest = max(gradient.abs().max() for gradient in other.values()).item()
        assert largest > 1e-4
        for name, gradient in other.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=2e-5 * largest, msg=name)


PADDING_FREE = {"constraint": "none", "padding_free": True, "length_aware_batches": False}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"loss_type": "dapo"},
        {"loss_type": "cispo"},
        {"num_iterations": 2, "steps_per_generation": 4},
        {"mask_truncated_completions": True, "max_completion_length": 6},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"pad_to_multiple_of": 8, "top_entropy_quantile": 0.5, "importance_sampling_level": "sequence"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_training_is_trls(tmp_path, fields):
    assert_same(train(tmp_path, PADDING_FREE, **fields), train(tmp_path, **fields))


@pytest.mark.parametrize("fields", [{}, {"num_iterations": 2, "steps_per_generation": 4}])
def test_training_in_batches_by_length_is_trls(tmp_path, fields):
    """The mean entropy of a micro-batch is that of other completions."""
    ours = PADDING_FREE | {"length_aware_batches": True}
    run = train(tmp_path, ours, **fields)
    assert_same(run, train(tmp_path, **fields), logs=["loss"])
    budget = ours | {"max_tokens_per_micro_batch": 40}
    assert_same(train(tmp_path, budget, **fields), train(tmp_path, **fields), logs=["loss"])


def test_training_with_a_reference_is_trls(tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    name = str(tmp_path / "model")
    runs = [train(tmp_path, ours, model=name, beta=0.1) for ours in (PADDING_FREE, None)]
    assert_same(*runs)
    assert logged(runs[0][0], "kl") == pytest.approx(logged(runs[1][0], "kl"), rel=1e-3, abs=1e-6)
    assert logged(runs[0][0], "kl")[1] > 1e-6


def test_training_experts_is_trls(tmp_path):
    """The auxiliary loss too: TRL counts real tokens alone, as a row without padding does."""
    runs = []
    for ours in (PADDING_FREE, None):
        model = make_experts()
        model.config.output_router_logits = True
        model.config.router_aux_loss_coef = 0.5
        runs.append(train(tmp_path, ours, model=model))
    assert_same(*runs)
    assert logged(runs[0][0], "aux_loss") == pytest.approx(logged(runs[1][0], "aux_loss"), rel=1e-4)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (make_model, {"constraint": "lagrangian"}),
        (make_model, {"constraint": "lagrangian", "top_k": 20, "top_p": 0.9}),
        (make_model, {"train_through_quantization": True, "gradient_checkpointing": True}),
        (make_experts, {"routing_replay": True, "gradient_checkpointing": True}),
    ],
    ids=["constraint", "truncated sampling", "through quantization", "routes"],
)
def test_it_goes_with_what_else_reads_the_forward(tmp_path, make, fields):
    """No learning rate, so that both runs sample the same."""
    fields = {"learning_rate": 0.0, "deployment_scheme": "fp8"} | fields
    runs = [train(tmp_path, fields | {"padding_free": on}, make(), rollouts=False) for on in (True, False)]
    assert_same(*runs)
    for name in ("discrepancy/mean", "routing/replayed_fraction"):
        assert logged(runs[0][0], name) == pytest.approx(logged(runs[1][0], name), rel=1e-3, abs=1e-6), name


@pytest.mark.long
def test_two_processes(tmp_path):
    """Through DDP's own forward, with micro-batches of unequal length in the two."""
    logs = []
    for padding_free in (True, False):
        output_dir = tmp_path / str(padding_free)
        options = {"output_dir": str(output_dir), "rollouts": True, "padding_free": padding_free, "max_steps": 3}
        options |= {"optim": "sgd", "gradient_accumulation_steps": 2, "constraint": "static", "lambda_init": 0.5}
        command = [*TWO_PROCESSES, "-m", "tests.worker", json.dumps(options)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        logs.append(json.loads((output_dir / "logs.json").read_text()))
    ours, theirs = logs
    assert ours["kind"] == theirs["kind"] == "DistributedType.MULTI_CPU"
    for name in ("loss", "grad_norm", "entropy", "discrepancy/mean"):
        values = [[row[name] for row in each["rows"] if name in row] for each in logs]
        assert len(values[0]) == 3
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-6), name


# --- what is refused


class MixesByItself(Qwen3ForCausalLM):
    """A model whose code reads the token before, whatever sequence it is of."""

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(lambda *call: call[2] + call[2].roll(1, dims=1))


def with_prompt_tuning():
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    return get_peft_model(make_model(), config)


def with_attention(name):
    model = make_model()
    model.config._attn_implementation = name
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tiny("Qwen3Next", num_experts=4, layer_types=["linear_attention", "full_attention"]), "linear_atten"),
        (lambda: tiny("Mamba", state_size=4), "recurrent state"),
        (lambda: MixesByItself(make_model().config), "attn_implementation='sdpa' does not keep"),
        # Its mask in transformers 5.17 knows no positions; its FlashAttention does not need them.
        (lambda: tiny("GptOss", **WINDOWS, **EXPERTS), "does not keep"),
        (with_prompt_tuning, "PROMPT_TUNING, which puts tokens before each row"),
        (lambda: with_attention("dc_trl_unknown"), "attn_implementation='dc_trl_unknown'"),
    ],
)
def test_models_that_mix_the_sequences_of_a_row_are_refused(accelerator, make, words):
    with pytest.raises(ValueError, match=rf"padding_free=True.*{words}.*padding_free=False"):
        prepared([make().eval()], accelerator)


def test_the_trainer_refuses_before_anything_is_sampled(tmp_path):
    model = tiny("Mamba", vocab_size=262, state_size=4)
    with pytest.raises(ValueError, match="padding_free=True: MambaForCausalLM"):
        train(tmp_path, PADDING_FREE, model=model)
