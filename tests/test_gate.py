"""Mistakes with which nothing would be trained: refused before the first step, by Python and the command alike."""

import asyncio
import copy
import functools
import json
import logging
import math
import pickle
import re
import shutil
from fractions import Fraction

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from dc_trl import DCGRPOTrainer
from dc_trl.command.train import main
from dc_trl.gate.policy import _is_finite, warn_of_rounding
from dc_trl.gate.rows import Rows, some_rows
from dc_trl.settings.distribution import Sharding
from dc_trl.settings.reward_functions import checked_reward, is_async, require_rewards

from .helpers import TINY_MODEL, distinct_characters, make_config, make_model, make_prompts, make_tokenizer


LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])


# --- what the command and Python both meet --------------------------------------------------------------------------


def plain_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def saved(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    (tokenizer or plain_tokenizer()).save_pretrained(folder)
    return folder


def edited(folder, **changes):
    """A saved model, with another config.json."""
    saved(folder, make_model())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_weights(folder, edit):
    saved(folder, make_model())
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def set_to(value, name="model.layers.1.mlp.down_proj.weight", dtype=torch.float32):
    def edit(weights):
        weights[name].view(-1)[7] = value
        for each in weights:
            weights[each] = weights[each].to(dtype)

    return edit


def adapter(folder):
    get_peft_model(make_model(), LORA).save_pretrained(folder)
    return folder


def gpt2(folder, **settings):
    sizes = {"vocab_size": 262, "n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return saved(folder, GPT2LMHeadModel(GPT2Config(**sizes | {"eos_token_id": 1, "bos_token_id": 1} | settings)))


def tokenizer_with(**changes):
    tokenizer = plain_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def with_more_tokens():
    tokenizer = plain_tokenizer()
    tokenizer.add_tokens(["<new>"])
    return tokenizer


def bert(folder):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return saved(folder, BertForMaskedLM(BertConfig(vocab_size=262, **sizes)))


def t5(folder):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return saved(folder, T5ForConditionalGeneration(T5Config(vocab_size=262, **sizes)))


def classifier(folder):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=262, num_key_value_heads=1, head_dim=8, pad_token_id=0, **sizes)
    return saved(folder, Qwen3ForSequenceClassification(config))


def needs_solution(completions, solution, **kwargs):
    return [0.0 for _ in completions]


def takes_too_little(completions):
    return [0.0 for _ in completions]


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACKED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}

# A name; what makes the model's folder; other settings; and what the refusal has to name.
MISTAKES = [
    ("adapter", adapter, {}, ["is the folder of an adapter", "--adapter_name_or_path", "is_trainable=True"]),
    ("no model", lambda folder: folder.mkdir() or folder, {}, ["has no config.json"]),
    ("compressed", lambda f: edited(f, quantization_config=PACKED), {}, ["quantized already (compressed-tensors)"]),
    ("fp8", lambda f: edited(f, quantization_config=FP8), {}, ["quantized already (fp8)"]),
    (
        "gptq with an adapter",
        lambda f: edited(f, quantization_config={"quant_method": "gptq", "bits": 4}),
        {"use_peft": True},
        ["quantized already (gptq)"],
    ),
    (
        "bitsandbytes alone",
        lambda f: edited(f, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        {},
        ["bitsandbytes", "peft_config, use_peft=true"],
    ),
    ("encoder", bert, {}, ["no causal language model", "BertForMaskedLM"]),
    ("encoder and decoder", t5, {}, ["no causal language model", "T5ForConditionalGeneration"]),
    ("classifier", classifier, {}, ["no causal language model", "Qwen3ForSequenceClassification"]),
    ("no architecture", lambda f: edited(f, architectures=None), {}, ["names no architecture"]),
    (
        "missing weight",
        lambda f: with_weights(f, lambda weights: weights.pop("model.layers.1.mlp.down_proj.weight")),
        {},
        ["lacks model.layers.1.mlp.down_proj.weight", "drawn it at random"],
    ),
    ("NaN", lambda f: with_weights(f, set_to(math.nan)), {}, ["not finite", "layers.1.mlp.down_proj.weight"]),
    ("-inf, bf16", lambda f: with_weights(f, set_to(-math.inf, dtype=torch.bfloat16)), {}, ["not finite"]),
    ("inf in a norm", lambda f: with_weights(f, set_to(math.inf, "model.norm.weight")), {}, ["in model.norm.weight"]),
    ("no end token", lambda f: saved(f, make_model(), tokenizer_with(eos_token=None)), {}, ["has no eos_token"]),
    (
        "end token beyond the embedding",
        lambda f: saved(f, make_model(vocab_size=256), tokenizer_with(eos_token="<|im_end|>")),
        {},
        ["eos_token", "has 256 rows"],
    ),
    (
        "id beyond the embedding",
        lambda f: saved(f, make_model(), with_more_tokens()),
        {"rows": ["1+1=", "<new>+2="] * 4},
        ["row 1 has the token id 262", "has 262 rows"],
    ),
    (
        "more than the table of positions",
        gpt2,
        {"rows": ["1+1="] * 7 + ["1" * 20]},
        ["row 7 has 20 tokens", "max_completion_length=8", "24", "lower max_completion_length to 4"],
    ),
    (
        "a prompt that fills the context",
        lambda f: saved(f, make_model(max_position_embeddings=32)),
        {"rows": ["1+1="] * 7 + ["1" * 40]},
        ["row 7 has 40 tokens", "reads 32 (max_position_embeddings)"],
    ),
    ("too few rows", None, {"rows": ["1+1="], "per_device_train_batch_size": 8}, ["has 1 rows", "takes 2", "=8"]),
    ("column of a reward", None, {"reward": "needs_solution"}, ["missing a required argument: 'solution'"]),
    ("reward without kwargs", None, {"reward": "takes_too_little"}, ["got an unexpected keyword argument"]),
    ("weights of rewards", None, {"reward_weights": [1.0, 2.0]}, ["reward_weights=[1.0, 2.0] are 2", "1 reward"]),
]


def by_python(tmp_path, folder, rows, reward, use_peft, settings):
    with pytest.raises((ValueError, TypeError)) as refused:
        DCGRPOTrainer(
            str(folder),
            globals()[reward],
            make_config(tmp_path / "python", deployment_scheme="bf16", **settings),
            Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left") if rows_of(folder) else None,
            peft_config=LORA if use_peft else None,
        )
    return str(refused.value)


def rows_of(folder):
    return (folder / "tokenizer.json").is_file()


def by_command(tmp_path, folder, rows, reward, use_peft, settings):
    config = {
        **{name: value for name, value in vars(make_config(tmp_path, **settings)).items() if name in KEPT | set(settings)},
        "output_dir": str(tmp_path / "command"),
        "model_name_or_path": str(folder),
        "dataset_name": str(tmp_path / "rows.jsonl"),
        "rewards": [f"{__name__}.{reward}"],
        "deployment_scheme": "bf16",
        "use_peft": use_peft,
        "lora_target_modules": ["q_proj"],
    }
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(json.dumps(config, default=str))
    with pytest.raises(SystemExit) as stop:
        main(["--config", str(tmp_path / "run.yaml")])
    assert stop.value.code.startswith("error: ")
    assert "\n" not in stop.value.code
    assert not list((tmp_path / "command").glob("*"))
    return stop.value.code.removeprefix("error: ")


KEPT = {
    *("use_cpu", "bf16", "gradient_checkpointing", "per_device_train_batch_size", "num_generations"),
    *("max_completion_length", "max_steps", "report_to", "disable_tqdm", "save_strategy"),
}


@pytest.mark.parametrize(("folder", "settings", "words"), [mistake[1:] for mistake in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_the_command_and_python_refuse_in_the_same_words(tmp_path, folder, settings, words):
    settings = dict(settings)
    rows = [{"prompt": prompt, "answer": "2"} for prompt in settings.pop("rows", ["1+1="] * 8)]
    reward, use_peft = settings.pop("reward", "distinct_characters"), settings.pop("use_peft", False)
    made = (folder or (lambda path: saved(path, make_model())))(tmp_path / "model")
    python, command = (
        refusal(tmp_path, made, rows, reward, use_peft, settings) for refusal in (by_python, by_command)
    )
    for word in words:
        assert word in python
    named = command.replace("model_name_or_path=", "model=").replace(f"rewards='{__name__}.", "reward_funcs: '")
    assert named == python
