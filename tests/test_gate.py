"""Mistakes with which nothing would be trained: refused before the first step, by Python and the command alike."""

import asyncio
import functools
import json
import logging
import math
import pickle
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Mxfp4Config,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from dc_trl import DCGRPOTrainer
from dc_trl.command.train import main
from dc_trl.gate.policy import require_policy, require_whole, warn_of_rounding
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


def adapter(folder):
    get_peft_model(make_model(), LORA).save_pretrained(folder)
    return folder


def gpt2_model():
    sizes = {"vocab_size": 262, "n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=1, bos_token_id=1))


def ending_with(model, eos_token_id):
    model.generation_config.eos_token_id = eos_token_id
    return model


def tokenizer_with(**changes):
    tokenizer = plain_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def with_more_tokens():
    tokenizer = plain_tokenizer()
    tokenizer.add_tokens(["<new>"])
    return tokenizer


def deployment(folder):
    """What a run leaves to be served."""
    arguments = {"train_dataset": make_prompts(), "processing_class": plain_tokenizer()}
    config = make_config(folder.parent / "earlier", deployment_scheme="fp8")
    DCGRPOTrainer(make_model(), distinct_characters, config, **arguments).save_deployment(folder)
    return folder


def bert(folder):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return saved(folder, BertForMaskedLM(BertConfig(vocab_size=262, **sizes)))


def needs_solution(completions, solution, **kwargs):
    return [0.0 for _ in completions]


DOWN = "model.layers.1.mlp.down_proj.weight"

# A name; what makes the model's folder; other settings; and what the refusal has to name.
MISTAKES = [
    ("adapter", adapter, {}, ["is the folder of an adapter", "--adapter_name_or_path", "is_trainable=True"]),
    ("no model", lambda folder: folder.mkdir() or folder, {}, ["has no config.json"]),
    ("a run's deployment", deployment, {}, ["quantized already (compressed-tensors)", "like a run's deployment/"]),
    (
        "bitsandbytes alone",
        lambda f: edited(f, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        {},
        ["bitsandbytes", "peft_config, use_peft=true"],
    ),
    ("encoder", bert, {}, ["no causal language model", "BertForMaskedLM"]),
    ("no architecture", lambda f: edited(f, architectures=None), {}, ["names no architecture"]),
    (
        "missing weight",
        lambda f: with_weights(f, lambda weights: weights.pop(DOWN)),
        {},
        ["lacks model.layers.1.mlp.down_proj.weight", "initialized it at random"],
    ),
    (
        "NaN",
        lambda f: with_weights(f, lambda weights: weights[DOWN].view(-1)[7].fill_(math.nan)),
        {},
        ["not finite", "layers.1.mlp.down_proj.weight"],
    ),
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
        lambda f: saved(f, gpt2_model()),
        {"rows": ["1+1="] * 7 + ["1" * 20]},
        ["row 7 has 20 tokens", "max_completion_length=8", "24", "lower max_completion_length to 4"],
    ),
    (
        "a prompt that fills the context",
        lambda f: saved(f, make_model(max_position_embeddings=32)),
        {"rows": ["1+1="] * 7 + ["1" * 32]},
        ["row 7 has 32 tokens", "reads 32 (max_position_embeddings)"],
    ),
    ("too few rows", None, {"rows": ["1+1="], "per_device_train_batch_size": 8}, ["has 1 rows", "takes 2", "=8"]),
    ("column of a reward", None, {"reward": "needs_solution"}, ["missing a required argument: 'solution'"]),
    (
        "weights of rewards",
        None,
        {"reward_weights": [1.0, 2.0]},
        ["reward_weights=[1.0, 2.0] has 2 numbers", "1 reward"],
    ),
]


# Fields of `make_config` that the command gets too.
KEPT = {
    *("use_cpu", "bf16", "gradient_checkpointing", "per_device_train_batch_size", "num_generations"),
    *("max_completion_length", "max_steps", "report_to", "disable_tqdm", "save_strategy"),
}


def by_python(tmp_path, folder, rows, reward, settings):
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").is_file() else None
    config = make_config(tmp_path / "python", deployment_scheme="bf16", **settings)
    with pytest.raises((ValueError, TypeError)) as refused:
        DCGRPOTrainer(str(folder), globals()[reward], config, Dataset.from_list(rows), processing_class=tokenizer)
    return str(refused.value)


def by_command(tmp_path, folder, rows, reward, settings):
    every = vars(make_config(tmp_path, **settings))
    config = {name: value for name, value in every.items() if name in KEPT | set(settings)} | {
        "output_dir": str(tmp_path / "command"),
        "model_name_or_path": str(folder),
        "dataset_name": str(tmp_path / "rows.jsonl"),
        "rewards": [f"{__name__}.{reward}"],
        "deployment_scheme": "bf16",
    }
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(json.dumps(config, default=str))
    with pytest.raises(SystemExit) as stop:
        main(["--config", str(tmp_path / "run.yaml")])
    assert stop.value.code.startswith("error: ")
    assert "\n" not in stop.value.code
    assert not list((tmp_path / "command").glob("*"))
    return stop.value.code.removeprefix("error: ")


@pytest.mark.parametrize(
    ("folder", "settings", "words"), [mistake[1:] for mistake in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_the_command_and_python_refuse_in_the_same_words(tmp_path, folder, settings, words):
    settings = dict(settings)
    rows = [{"prompt": prompt, "answer": "2"} for prompt in settings.pop("rows", ["1+1="] * 8)]
    reward = settings.pop("reward", "distinct_characters")
    made = (folder or (lambda path: saved(path, make_model())))(tmp_path / "model")
    python, command = (refusal(tmp_path, made, rows, reward, settings) for refusal in (by_python, by_command))
    for word in words:
        assert word in python
    named = command.replace("model_name_or_path=", "model=").replace(f"rewards='{__name__}.", "reward_funcs: '")
    assert named == python


# --- what only Python meets -----------------------------------------------------------------------------------------


def build(tmp_path, model=None, rewards=distinct_characters, rows=None, **others):
    """A trainer of a random model on plain prompts, with what is given in place of that."""
    settings = others.pop("settings", {})
    arguments = {
        "model": model or make_model(),
        "reward_funcs": rewards,
        "args": make_config(tmp_path, **{"deployment_scheme": "bf16"} | settings),
        "train_dataset": make_prompts() if rows is None else rows,
        "processing_class": plain_tokenizer(),
    }
    return DCGRPOTrainer(**arguments | others)


def made(arguments, tmp_path):
    """The arguments of a case, which may be a function of a folder and whose model may be a function."""
    arguments = dict(arguments(tmp_path) if callable(arguments) else arguments)
    if callable(arguments.get("model")) and not isinstance(arguments["model"], torch.nn.Module):
        arguments["model"] = arguments["model"]()
    return arguments


def frozen(model):
    return model.requires_grad_(False)


def with_adapter(tmp_path, **options):
    return PeftModel.from_pretrained(make_model(), adapter(tmp_path / "adapter"), **options)


def with_idle_adapter(tmp_path):
    model = with_adapter(tmp_path)
    model.add_adapter("other", LORA)
    for name, weight in model.named_parameters():
        weight.requires_grad_(".other." in name)
    return model


def of_rows(*prompts):
    """Rows enough for a generation batch, these first."""
    return [{"prompt": prompt} for prompt in [*prompts, *["1+1="] * 4]]


def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


def long_table(**changed):
    """More rows than are looked at one by one, some of them changed: by number."""
    prompts = [f"{number}+1=" for number in range(1000)]
    for number, prompt in changed.items():
        prompts[int(number[1:])] = prompt
    return Dataset.from_dict({"prompt": prompts})


def long_talk(**changed):
    rows = long_table(**changed)["prompt"]
    return Dataset.from_list([{"prompt": row if row is None else [{"role": "user", "content": row}]} for row in rows])


def wide_head():
    model = make_model(tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(32, 300, bias=False)
    return model


def stored_as(method):
    model = make_model()
    model.config.quantization_config = {"quant_method": method}
    return model


USER = {"role": "user", "content": "1+1="}
TABLE = {"question": ["1+1="] * 4, "solution": ["2"] * 4}

# Each by what is passed in place of what `build` passes (a function is called with a folder), and what is said of it.
REFUSED = {
    "not trainable": (lambda t: {"model": with_adapter(t)}, ["PeftModel", "is_trainable=True"]),
    "idle adapter in training": (lambda t: {"model": with_idle_adapter(t)}, ["active adapters: default"]),
    "frozen": ({"model": lambda: frozen(make_model())}, ["no trainable parameter", "requires_grad_(True)"]),
    "adapter for inference": (
        {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], inference_mode=True)},
        ["without a trainable parameter", "inference_mode"],
    ),
    "optimizer of another": (
        lambda t: {"optimizers": (torch.optim.AdamW(make_model().parameters()), None)},
        ["AdamW has no trainable parameter of the model"],
    ),
    "meta device": (
        {"model": lambda: make_model().to("meta")},
        ["no values in model.embed_tokens.weight and 24 more"],
    ),
    "a path": ({"model": TINY_MODEL}, ["PosixPath", "as text"]),
    "wide head": ({"model": wide_head}, ["300 rows", "262"]),
    "no rows": ({"rows": Dataset.from_dict({"prompt": []})}, ["train_dataset has no rows"]),
    "a split too many": ({"rows": DatasetDict({"train": make_prompts()})}, ["train_dataset['train']"]),
    "a list": ({"rows": of_rows()}, ["train_dataset is a list", "Dataset.from_list"]),
    "another column": ({"rows": Dataset.from_dict(TABLE)}, ["'question', 'solution'", "rename_column('question'"]),
    "no prompt in a row": ({"rows": Dataset.from_list(of_rows("1", None))}, ["row 1 has prompt=None", "filter"]),
    "no content": (
        {"rows": Dataset.from_list([{"prompt": [USER]}, {"prompt": [USER | {"content": None}]}] * 2)},
        ["row 1", "a role and a content"],
    ),
    "two kinds": (
        {"rows": stream([{"prompt": "1"}, {"prompt": [USER]}]), "settings": {"per_device_train_batch_size": 8}},
        ["row 0 is text", "of row 1 a list"],
    ),
    "one of a thousand": ({"rows": long_table(_777=None)}, ["row 777 has prompt=None"]),
    "a long one of a thousand": ({"rows": long_table(_777="1" * 300)}, ["row 777 has 300 tokens"]),
    "no template": ({"rows": long_talk()}, ["row 0 is a list of messages", "no chat template"]),
    "a template that refuses": (
        {
            "rows": Dataset.from_list([{"prompt": [USER | {"role": "system"}]}] * 4),
            "processing_class": tokenizer_with(chat_template="{{ raise_exception('no system') }}"),
        },
        ["row 0", "cannot be rendered", "no system"],
    ),
    "a stream without steps": ({"rows": stream(of_rows()), "settings": {"max_steps": -1}}, ["max_steps=-1", "stream"]),
    "completions": (
        {"rows": Dataset.from_dict({"prompt": ["1"] * 4, "completions": ["2"] * 4})},
        ["a column 'completions'", "rename_column('completions'"],
    ),
    "one of two evaluation sets": (
        {"eval_dataset": {"easy": make_prompts(), "hard": Dataset.from_dict(TABLE)}},
        ["eval_dataset['hard'] has the columns 'question'"],
    ),
    "no reward": ({"rewards": None}, ["reward_funcs is not given"]),
    "a number for a reward": ({"rewards": 3}, ["reward_funcs: 3 is a int"]),
    "a reward model's path": ({"rewards": "./nowhere"}, ["reward_funcs='./nowhere' does not exist"]),
    "no data": ({"train_dataset": None}, ["train_dataset is not given"]),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_refused_in_python(tmp_path, mistake):
    arguments, words = REFUSED[mistake]
    arguments = made(arguments, tmp_path)
    with pytest.raises((ValueError, TypeError)) as refused:
        build(tmp_path, **arguments)
    for word in words:
        assert word in str(refused.value)


WITH_TOOLS = Path(trl.__file__).with_name("chat_templates") / "qwen3.jinja"


class Environment:
    def reset(self, **kwargs):
        return "1+1="

    def step(self, number: int) -> str:
        """Takes a step.

        Args:
            number: any.
        """
        return str(number)

    def get_reward(self):
        return 1.0


class Judge:
    def __call__(self, prompts, completions, **kwargs):
        return np.arange(len(completions), dtype=np.float32)


async def awaited(prompts, completions, **kwargs):
    return tuple(range(len(completions)))


def tensor(prompts, completions, **kwargs):
    return torch.arange(len(completions))


def some_frozen():
    model = make_model()
    model.model.embed_tokens.requires_grad_(False)
    return model


def part_of(model):
    return {"model": model, "optimizers": (torch.optim.AdamW(model.model.layers[1].parameters(), lr=1e-2), None)}


def resized(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "saved", make_model(tie_word_embeddings=False)))
    model.resize_token_embeddings(280)
    return model


def called(name):
    calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


# What may be passed, and how many steps it trains (None: the trainer is only built).
LEGAL = {
    "a part is frozen": ({"model": some_frozen}, 1),
    "a new adapter": ({"peft_config": LORA}, 1),
    "an adapter goes on, with KL": (
        lambda t: {"model": with_adapter(t, is_trainable=True), "settings": {"beta": 0.1}},
        1,
    ),
    "an adapter and a copy": (
        {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])},
        None,
    ),
    "an optimizer of a part": (lambda t: part_of(make_model()), 1),
    "loaded and resized, untied": (lambda t: {"model": resized(t)}, None),
    "a stream of one batch": ({"rows": stream(of_rows()[:1])}, 1),
    "streams to evaluate on": ({"eval_dataset": {"a": stream(of_rows()), "b": make_prompts()}}, None),
    "a thousand conversations": ({"rows": long_talk(), "processing_class": make_tokenizer()}, None),
    "rows that are made when read": (
        {
            "rows": Dataset.from_dict({"n": range(300)}).with_transform(
                lambda r: {"prompt": [f"{n}+1=" for n in r["n"]]}
            )
        },
        1,
    ),
    "an assistant that called a tool": (
        {
            "rows": stream([{"prompt": [USER, called("f"), {"role": "tool", "content": "2"}]}] * 4),
            "processing_class": make_tokenizer(),
        },
        None,
    ),
    "an environment without rows": (
        {
            "train_dataset": None,
            "rewards": None,
            "environment_factory": Environment,
            "processing_class": tokenizer_with(chat_template=WITH_TOOLS.read_text()),
            "model": lambda: make_model(max_position_embeddings=4096),
        },
        None,
    ),
    "what a rollout_func passes": (
        {
            "rewards": needs_solution,
            "rollout_func": lambda prompts, trainer: {},
            "settings": {"deployment_scheme": None, "recipe": "trl"},
        },
        None,
    ),
    "an object": ({"rewards": Judge()}, 1),
    "an async function, a partial and a tensor": (
        {"rewards": [awaited, functools.partial(awaited, more=1), tensor]},
        1,
    ),
    "a table of positions that is just long enough": (
        {"model": gpt2_model, "rows": Dataset.from_list(of_rows("1" * 16)), "settings": {"save_steps": 9}},
        1,
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", LEGAL)
def test_let_through(tmp_path, case):
    arguments, steps = LEGAL[case]
    arguments = made(arguments, tmp_path)
    arguments["settings"] = {"max_steps": 1} | arguments.get("settings", {})
    trainer = build(tmp_path, **arguments)
    if steps is not None:
        trainer.train()
        assert trainer.state.global_step == steps


def test_a_packed_base_with_an_adapter_and_one_that_is_unpacked_when_loaded(tmp_path):
    packed = edited(tmp_path / "packed", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    require_policy(str(packed), adapter=True, quantization_config=None)
    require_policy(str(packed), adapter=True, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    require_policy(get_peft_model(stored_as("bitsandbytes"), LORA), adapter=False, quantization_config=None)
    four_bits = edited(tmp_path / "four_bits", quantization_config={"quant_method": "mxfp4"})
    require_policy(str(four_bits), adapter=False, quantization_config=Mxfp4Config(dequantize=True))
    with pytest.raises(ValueError, match="quantized already"):
        require_policy(str(four_bits), adapter=True, quantization_config=None)
    plain = saved(tmp_path / "plain", make_model())
    with pytest.raises(ValueError, match="train an adapter"):
        require_policy(str(plain), adapter=False, quantization_config=BitsAndBytesConfig(load_in_4bit=True))


# --- what is known of a row only when it comes ----------------------------------------------------------------------


@pytest.mark.parametrize(("late", "words"), [("", "has no tokens"), ("<new>", "has the token id 262")])
def test_later_rows_of_a_stream_are_looked_at_when_they_come(tmp_path, late, words):
    rows = stream([{"prompt": "1+1="}, {"prompt": late}] * 4)
    settings = {"shuffle_dataset": False}
    trainer = build(tmp_path, rows=rows, processing_class=with_more_tokens(), settings=settings)
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert trainer.state.global_step == 1


def test_what_is_looked_at_of_a_stream_comes_again(tmp_path):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(prompts[::4])
        return distinct_characters(completions)

    rows = stream([{"prompt": f"{number}+1="} for number in range(3)])
    build(tmp_path, rewards=reward, rows=rows, settings={"shuffle_dataset": False}).train()
    assert seen == ["0+1=", "1+1=", "2+1="]


# --- warnings -------------------------------------------------------------------------------------------------------


def warnings_of(caplog, tmp_path, **arguments):
    with caplog.at_level(logging.WARNING):
        build(tmp_path, **arguments)
    return " ".join(record.getMessage() for record in caplog.records if record.name.startswith("dc_trl"))


def checkpoint_without(name, tmp_path):
    return AutoModelForCausalLM.from_pretrained(with_weights(tmp_path / "a", lambda weights: weights.pop(name)))


WARNED = {
    "rate of 0 in an optimizer": (
        lambda t: (
            (model := make_model())
            and {"model": model, "optimizers": (torch.optim.AdamW(model.parameters(), lr=0.0), None)}
        ),
        "learning_rate=0: no weight will change",
    ),
    "bfloat16": (
        {"model": lambda: make_model().bfloat16(), "settings": {"learning_rate": 1e-6}},
        "learning_rate=1e-06 is below the resolution of bfloat16",
    ),
    "rotary positions beyond": (
        {"model": lambda: make_model(max_position_embeddings=8)},
        "with max_completion_length=8 more than the 8 of the model",
    ),
    "another tokenizer": ({"model": lambda: make_model(vocab_size=1000)}, "may belong to another model"),
    "an end beyond the embedding": (
        {"model": lambda: ending_with(make_model(), [1, 262])},
        "generation_config.eos_token_id=[1, 262] of the model names a token beyond the 262 rows",
    ),
    "a weight drawn at random, perhaps by the user": (
        lambda t: {"model": checkpoint_without("model.norm.weight", t)},
        "model lacks model.norm.weight",
    ),
}


@pytest.mark.parametrize("case", WARNED)
def test_warned_of(caplog, tmp_path, case):
    arguments, words = WARNED[case]
    arguments = made(arguments, tmp_path)
    assert words in warnings_of(caplog, tmp_path, **arguments)


def test_nothing_is_said_of_what_is_well(caplog, tmp_path):
    settings = {"learning_rate": 1e-6, "reward_weights": [0.5]}  # float32 resolves this rate
    assert warnings_of(caplog, tmp_path, settings=settings) == ""


@pytest.mark.parametrize(("dtype", "rate"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-5)])
def test_the_share_that_stands_still_is_the_one_that_adam_leaves(caplog, dtype, rate):
    """Against a step of PyTorch's AdamW with gradients of 1 and -1."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter((torch.randn(64, 64) * 0.5).to(dtype))
    with caplog.at_level(logging.WARNING):
        warn_of_rounding([("weight", weight)], "adamw_torch", rate, Sharding(None, 0), autocast=True)
    before = weight.detach().clone()
    weight.grad = torch.randn(64, 64).sign().to(dtype)
    torch.optim.AdamW([weight], lr=rate, weight_decay=0.0).step()
    still = (weight == before).float().mean().item()
    told = re.search(r"about ([\d.]+)% of the trainable weights", caplog.text)
    assert (told is not None) == (still > 0.5)
    if told is not None:
        assert float(told[1]) / 100 == pytest.approx(still, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found(dtype, value):
    layer = torch.nn.Linear(5, 3, dtype=dtype).requires_grad_(False)
    layer.bias.copy_(torch.tensor([0.0, torch.finfo(dtype).max, -torch.finfo(dtype).max]))
    require_whole(layer, "model", False, Sharding(None, 0))
    layer.weight[1, 2] = value
    with pytest.raises(ValueError, match=r"not finite .* in weight"):
        require_whole(layer, "model", False, Sharding(None, 0))


# --- rewards --------------------------------------------------------------------------------------------------------

NO_REWARDS = {
    "a number": (lambda **_: 1.0, TypeError, "returned 1.0, a float"),
    "a generator": (lambda completions, **_: (1.0 for _ in completions), TypeError, "a generator"),
    "too few": (lambda **_: [1.0], ValueError, "returned 1 rewards for 4 completions"),
    "texts": (lambda **_: [1, 2, "3", 4], TypeError, "returned '3' for completion 2"),
    "infinite": (lambda **_: [0.0, math.inf, 0.0, 0.0], ValueError, "returned inf for completion 1"),
    "beyond float32": (lambda **_: [0, 0, 1e308, 0], ValueError, "returned 1e+308 for completion 2"),
}


def named(function):
    function.__name__ = "judge"
    return function


@pytest.mark.parametrize(
    ("case", "where"),
    [*((case, "training") for case in NO_REWARDS), ("a number", "evaluation"), ("infinite", "held out")],
)
def test_what_is_no_reward_is_refused_wherever_it_comes(tmp_path, case, where):
    function, error, words = NO_REWARDS[case]
    judge = named(function)
    evaluated = {"eval_dataset": make_prompts(4), "settings": {"per_device_eval_batch_size": 4}}
    trainer = build(tmp_path, rewards=distinct_characters if where == "held out" else judge, **evaluated)
    call = {
        "training": trainer.train,
        "evaluation": trainer.evaluate,
        "held out": lambda: trainer.deployed_rewards(list(make_prompts(4)), judge),
    }[where]
    with pytest.raises(error, match=re.escape(words)) as refused:
        call()
    assert str(refused.value).startswith("reward function 'judge' returned ")
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((np.float32(0.5), np.int64(2), True, math.nan), [0.5, 2.0, 1.0, None]),
        (torch.tensor([1.0, math.nan, 2.0, -(2.0**56)]), [1.0, None, 2.0, -(2.0**56)]),
        ([torch.tensor(1.0), torch.tensor([2.0]), Fraction(1, 2), None], [1.0, 2.0, 0.5, None]),
    ],
)
def test_what_is_a_reward(rewards, expected):
    assert require_rewards("judge", rewards, 4) == expected


def test_a_checked_reward_is_what_it_wraps():
    plain, later = checked_reward(distinct_characters), checked_reward(functools.partial(awaited, more=1))
    assert (plain.__name__, later.__name__) == ("distinct_characters", "awaited")
    assert (is_async(plain), is_async(later)) == (False, True)
    arguments = {"prompts": ["1"] * 2, "completions": ["a", "ab"]}
    for again in (plain, pickle.loads(pickle.dumps(plain))):  # AsyncGRPO's process gets it so
        assert again(**arguments) == [0.1, 0.2]
    assert asyncio.run(pickle.loads(pickle.dumps(later))(**arguments)) == [0.0, 1.0]
    assert checked_reward(plain) is plain


def reward_model(folder, **settings):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(
        **{"vocab_size": 262, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "num_labels": 1}
        | sizes
        | settings
    )
    torch.manual_seed(0)
    return saved(folder, Qwen3ForSequenceClassification(config))


def test_a_reward_model_that_does_not_fit(tmp_path, caplog):
    with pytest.raises(ValueError, match=r"the reward model 'policy' lacks score.weight"):
        build(tmp_path, rewards=str(saved(tmp_path / "policy", make_model())))
    with pytest.raises(ValueError, match=r"the reward model 'small'.*its input embedding 100 rows"):
        build(tmp_path, rewards=str(reward_model(tmp_path / "small", vocab_size=100)))
    two = Qwen3ForSequenceClassification.from_pretrained(reward_model(tmp_path / "two", num_labels=2))
    assert "the logit of the first one" in warnings_of(caplog, tmp_path, rewards=two)


def test_a_reward_model_and_weights_that_give_no_finite_reward(tmp_path):
    trainer = build(tmp_path, rewards=str(reward_model(tmp_path / "rewards")))
    torch.nn.init.constant_(trainer.reward_funcs[0].score.weight, math.inf)
    with pytest.raises(ValueError, match=r"the reward model 'rewards' is .* for completion 0"):
        trainer.train()
    large = build(tmp_path, rewards=named(lambda **_: [1e10] * 4), settings={"reward_weights": [1e10]})
    with pytest.raises(ValueError, match=r"reward_weights=.*the weighted sum is 1e\+20 for completion 0"):
        large.train()


def test_a_reward_of_an_environment_is_named(tmp_path):
    class Wild(Environment):
        def get_reward(self):
            return math.inf

    arguments, _ = LEGAL["an environment without rows"]
    model = arguments["model"]()
    trainer = build(tmp_path, **arguments | {"environment_factory": Wild, "model": model})
    with pytest.raises(ValueError, match="reward function 'Wild' returned inf for completion 0"):
        trainer.train()
