"""Mistakes with which nothing would be trained: refused before the first step, by Python and the command alike."""

import asyncio
import functools
import logging
import math
import pickle
import re
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    RecurrentGemmaConfig,
    Trainer,
)

from dc_trl import DCGRPOTrainer
from dc_trl.async_grpo import AsyncDCGRPOConfig
from dc_trl.command import call
from dc_trl.gate.before_loading import _look_at
from dc_trl.gate.loaded_policy import warn_of_rounding
from dc_trl.grading.checked_reward import checked_reward, is_async, require_rewards

from .helpers import (
    SMALL_RUN,
    at_server,
    distinct_characters,
    make_config,
    make_model,
    make_prompts,
    make_tokenizer,
    random_model,
    refuses,
    reward_model,
    save,
    write_rows,
)
from .stub_server import stub_server
from .test_refusals import by_command as refusal_of_the_command
from .vllm_server import requires_vllm


LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])


# --- what the command and Python both meet --------------------------------------------------------------------------


def plain_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def saved(folder, model, tokenizer=None):
    return save(model, folder, tokenizer or plain_tokenizer())


def adapter(folder):
    get_peft_model(make_model(), LORA).save_pretrained(folder)
    return folder


def gpt2_model():
    sizes = {"vocab_size": 262, "n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=1, bos_token_id=1))


def conversational(folder):
    return saved(folder, make_model(), make_tokenizer())


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


def needs_solution(completions, solution, **kwargs):
    return [0.0 for _ in completions]


def diverged():
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[5] = math.inf
    return model


# A name; what makes the model's folder; other settings; and what the refusal has to name.
MISTAKES = [
    ("adapter", adapter, {}, ["holds an adapter", "lora.md"]),
    ("no model", lambda folder: folder.mkdir() or folder, {}, ["has no config.json"]),
    ("diverged", lambda f: saved(f, diverged()), {}, ["model.norm.weight is not finite", "checkpoint of before"]),
    ("a run's deployment", deployment, {}, ["is quantized (compressed-tensors)", "like a run's deployment/"]),
    ("no end token", lambda f: saved(f, make_model(), tokenizer_with(eos_token=None)), {}, ["has no eos_token"]),
    (
        "id beyond the embedding",
        lambda f: saved(f, make_model(), with_more_tokens()),
        {"rows": ["1+1=", "<new>+2="] * 4},
        ["the prompt '<new>+2=' has the token id 262", "has 262 rows"],
    ),
    (
        "more than the table of positions",
        lambda f: saved(f, gpt2_model()),
        {"rows": ["1+1="] * 7 + ["1" * 20]},
        ["has 20 tokens", "max_completion_length=8", "24", "lower max_completion_length"],
    ),
    (
        "a prompt that fills the context",
        lambda f: saved(f, make_model(max_position_embeddings=32)),
        {"rows": ["1+1="] * 7 + ["1" * 32]},
        ["has 32 tokens", "the model reads 32 in all"],
    ),
    *(
        (f"a {name} that the template does not read", conversational, {"rows": [prompt] * 8}, [words, "chat template"])
        for name, prompt, words in (
            ("list", [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}], "'text': '1+1='"),
            (
                "tool call",
                [
                    {"role": "user", "content": "1+1="},
                    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "sum_of"}}]},
                    {"role": "tool", "content": "2"},
                ],
                "sum_of",
            ),
        )
    ),
    ("a message without a role", conversational, {"rows": [[{"content": "1+1="}]] * 8}, ["'1+1='", "role"]),
    ("a revision", None, {"model_init_kwargs": {"revision": "v2"}}, ["revision='v2'", "directory"]),
    ("too few rows", None, {"rows": ["1+1="], "per_device_train_batch_size": 8}, ["has 1 rows", "takes 2", "=8"]),
    (
        "column of a reward",
        None,
        {"reward": "needs_solution"},
        ["missing a required argument: 'solution'", "no column 'solution'"],
    ),
]


def by_python(tmp_path, folder, rows, reward, settings):
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").is_file() else None
    config = make_config(tmp_path / "python", deployment_scheme="bf16", **settings)
    with pytest.raises((ValueError, TypeError)) as refused:
        DCGRPOTrainer(str(folder), globals()[reward], config, Dataset.from_list(rows), processing_class=tokenizer)
    return str(refused.value)


def by_command(tmp_path, folder, rows, reward, settings):
    given = {"model_name_or_path": str(folder), "dataset_name": write_rows(tmp_path / "rows.jsonl", rows)}
    given |= {"rewards": [f"{__name__}.{reward}"], "deployment_scheme": "bf16"}
    return refusal_of_the_command(tmp_path, SMALL_RUN | settings | given)


@pytest.mark.parametrize(
    ("folder", "settings", "words"), [mistake[1:] for mistake in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_the_command_and_python_refuse_in_the_same_words(tmp_path, folder, settings, words):
    settings = dict(settings)
    rows = [{"prompt": prompt, "answer": "2"} for prompt in settings.pop("rows", ["1+1="] * 8)]
    reward = settings.pop("reward", "distinct_characters")
    made = (folder or (lambda path: saved(path, make_model())))(tmp_path / "model")
    python, command = (refusal(tmp_path, made, rows, reward, settings) for refusal in (by_python, by_command))
    assert not [word for word in words if word not in python]
    assert command.replace("model_name_or_path=", "model=") == python


def one_for_all(completions, **kwargs):
    return [1.0]


def test_the_command_ends_in_one_line_where_a_function_returns_no_rewards(tmp_path):
    words = ["--config", "quickstart", "--output_dir", str(tmp_path), "--rewards", f"{__name__}.one_for_all"]
    with pytest.raises(SystemExit, match=r"^error: reward function 'one_for_all' returned 1 rewards for 8 .*None\.$"):
        call("train", [*words, "--eval_size", "0", "--per_device_train_batch_size", "8"])


@pytest.mark.parametrize("command", ["calibrate", "evaluate"])
def test_what_samples_from_a_diverged_model_refuses_it(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--model", str(saved(tmp_path / "model", diverged())), "--engine", "replica:bf16", "--max_tokens", "4"]
    words += ["--prompts", "2"] if command == "calibrate" else ["--benchmarks", "arithmetic", "--limit", "2"]
    with pytest.raises(SystemExit, match=r"norm\.weight is not finite"):
        call(command, words)


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


def with_adapter(tmp_path):
    return PeftModel.from_pretrained(make_model(), adapter(tmp_path / "adapter"))


def capped_otherwise():
    """By a field that TRL's fused head does not read."""
    return random_model(RecurrentGemmaConfig, block_types=["attention"], logits_soft_cap=2.0)


def of_rows(*prompts):
    """Rows enough for a generation batch, these first."""
    return [{"prompt": prompt} for prompt in [*prompts, *["1+1="] * 4]]


def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


USER = {"role": "user", "content": "1+1="}
ANSWER = {"role": "assistant", "content": "2"}
TABLE = {"question": ["1+1="] * 4, "solution": ["2"] * 4}

# Each by what is passed in place of what `build` passes (a function is called with a folder), and what is said of it.
REFUSED = {
    "not trainable": (lambda t: {"model": with_adapter(t)}, ["no trainable parameter", "is_trainable=True"]),
    "logits unknown to TRL": (lambda t: {"model": capped_otherwise()}, ["RecurrentGemmaForCausalLM", "another"]),
    "no rows": ({"rows": Dataset.from_dict({"prompt": []})}, ["train_dataset has 0 rows"]),
    "a split too many": ({"rows": DatasetDict({"train": make_prompts()})}, ["train_dataset is a DatasetDict"]),
    "another column": ({"rows": Dataset.from_dict(TABLE)}, ["'question', 'solution'", "rename_column(..., 'prompt')"]),
    "no prompt in a row": ({"rows": Dataset.from_list(of_rows("1", None))}, ["row 1 has prompt=None", "filter"]),
    "two kinds": (
        {"rows": stream([{"prompt": "1"}, {"prompt": [USER]}]), "settings": {"per_device_train_batch_size": 8}},
        ["row 1 has prompt=[{", "all text"],
    ),
    "one of two evaluation sets": (
        {"eval_dataset": {"easy": make_prompts(), "hard": Dataset.from_dict(TABLE)}},
        ["eval_dataset['hard'] has the columns 'question'"],
    ),
    "an answer in the prompt": (
        {"rows": Dataset.from_list(of_rows([USER, ANSWER])[:1] * 4)},
        ["row 0", "assistant's '2'"],
    ),
    "an answer in the messages": (
        {"rows": Dataset.from_dict({"messages": [[USER, ANSWER]] * 4})},
        ["row['messages'][:-1]"],
    ),
    "a column without images": (
        {"rows": make_prompts().add_column("image", [None] * 16)},
        ["column 'image' has no image", "remove_columns('image')"],
    ),
    "no reward": ({"rewards": None}, ["reward_funcs is not given"]),
    "a reward by its name": ({"rewards": "arithmetic"}, ["reward_funcs='arithmetic'", "rewards.arithmetic_reward"]),
    "no function": ({"rewards": 5}, ["reward_funcs", "5", "int", "function"]),
    "one of two functions": ({"rewards": [distinct_characters, None]}, ["reward_funcs", "None", "function"]),
    "functions in a tuple": ({"rewards": (distinct_characters,)}, ["reward_funcs", "tuple", "list"]),
    "no **kwargs": ({"rewards": lambda completions: [0.0]}, ["unexpected keyword argument", "**kwargs"]),
    "a column that rewards are given anyway": (
        {"rows": make_prompts().add_column("prompts", ["x"] * 16)},
        ["'prompts'", "rename that column"],
    ),
    "an optimizer of another model": (
        lambda t: {"optimizers": (torch.optim.SGD(make_model().parameters(), 0.1), None)},
        ["optimizers", "model.parameters()"],
    ),
    "a module as the model": (lambda t: {"model": torch.nn.Linear(2, 2)}, ["model=Linear", "text"]),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_refused_in_python(tmp_path, mistake):
    arguments, words = REFUSED[mistake]
    arguments = made(arguments, tmp_path)
    with refuses((ValueError, TypeError), *words):
        build(tmp_path, **arguments)


async def awaited(prompts, completions, **kwargs):
    return tuple(range(len(completions)))


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


def some_frozen():
    model = make_model()
    model.model.embed_tokens.requires_grad_(False)
    return model


# What may be passed, and how many steps it trains (None: the trainer is only built).
LEGAL = {
    "a part is frozen": ({"model": some_frozen}, 1),
    "a new adapter": ({"peft_config": LORA}, 1),
    "texts to train on and conversations to evaluate": (
        {
            "eval_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1=?"}]}] * 4),
            "processing_class": make_tokenizer(),
        },
        None,
    ),
    "a stream of one batch": ({"rows": stream(of_rows()[:1])}, 1),
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


# --- what is known of a row only when it comes ----------------------------------------------------------------------


def test_later_rows_of_a_stream_are_looked_at_when_they_come(tmp_path):
    rows = stream([{"prompt": "1+1="}, {"prompt": ""}] * 4)
    settings = {"shuffle_dataset": False}
    trainer = build(tmp_path, rows=rows, processing_class=with_more_tokens(), settings=settings)
    with refuses(ValueError, "has no tokens"):
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


@requires_vllm
def test_a_prompt_that_leaves_no_room_in_the_servers_context(tmp_path):
    """Of 4096 tokens: vLLM would answer the first request with 400."""
    model = make_model(max_position_embeddings=8192)
    with stub_server() as server:
        settings = at_server(server.url) | {"max_completion_length": 4090}
        assert build(tmp_path, model, settings=settings).vllm_generation.context == 4096
        with refuses(ValueError, "6 tokens", "max_completion_length=4091", "4096", "--max-model-len"):
            build(tmp_path, model, settings=settings | {"max_completion_length": 4091})
        assert "/v1/completions" not in server.asked


# --- a configuration of ours in another trainer ---------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"deployment_scheme": "fp8"}, {"constraint": "lagrangian"}, {"recipe": "paper"}])
def test_a_trainer_that_heeds_nothing_of_a_configuration_is_told(tmp_path, settings):
    rest = {"train_dataset": make_prompts(), "processing_class": plain_tokenizer()}
    config = make_config(tmp_path, **{"recipe": "trl"} | settings)
    with refuses(TypeError, *(str(value) for value in settings.values() if value != "paper"), "use DCGRPOTrainer"):
        trl.GRPOTrainer(make_model(), distinct_characters, config, **rest)
    with refuses(TypeError, "constraint='static'", "use AsyncDCGRPOTrainer"):
        Trainer(make_model(), AsyncDCGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, constraint="static"))
    # Ours takes it, and what asks for nothing is anybody's.
    DCGRPOTrainer(make_model(), distinct_characters, make_config(tmp_path, deployment_scheme="bf16"), **rest)
    trl.GRPOTrainer(make_model(), distinct_characters, make_config(tmp_path, recipe="trl"), **rest)


# --- warnings -------------------------------------------------------------------------------------------------------


def warnings_of(caplog, tmp_path, **arguments):
    with caplog.at_level(logging.WARNING):
        build(tmp_path, **arguments)
    return " ".join(record.getMessage() for record in caplog.records if record.name.startswith("dc_trl"))


WARNED = {
    "bfloat16": (
        {"model": lambda: make_model().bfloat16(), "settings": {"learning_rate": 1e-6}},
        "learning_rate=1e-06 is below the resolution of 16-bit weights",
    ),
    "rotary positions beyond": (
        {"model": lambda: make_model(max_position_embeddings=8)},
        "with max_completion_length=8 more than the 8 that the model reads",
    ),
    "weights of 0": ({"settings": {"reward_weights": [0.0]}}, "nothing is learned"),
}


@pytest.mark.parametrize("case", WARNED)
def test_warned_of(caplog, tmp_path, case):
    arguments, words = WARNED[case]
    arguments = made(arguments, tmp_path)
    assert words in warnings_of(caplog, tmp_path, **arguments)


@pytest.mark.parametrize(("dtype", "rate"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-5)])
def test_the_share_that_stands_still_is_the_one_that_adam_leaves(caplog, dtype, rate):
    """Against a step of PyTorch's AdamW with gradients of 1 and -1."""
    torch.manual_seed(0)
    policy = torch.nn.Linear(64, 64, bias=False).to(dtype)
    weight = policy.weight
    torch.nn.init.normal_(weight, std=0.5)
    with caplog.at_level(logging.WARNING):
        warn_of_rounding(policy, "adamw_torch", rate)
    before = weight.detach().clone()
    weight.grad = torch.randn(64, 64).sign().to(dtype)
    torch.optim.AdamW([weight], lr=rate, weight_decay=0.0).step()
    still = (weight == before).float().mean().item()
    told = re.search(r"about ([\d.]+)% of the trainable weights", caplog.text)
    assert (told is not None) == (still > 0.5)
    if told is not None:
        assert float(told[1]) / 100 == pytest.approx(still, abs=0.02)


# --- rewards --------------------------------------------------------------------------------------------------------

NO_REWARDS = {
    "a number": (lambda **_: 1.0, TypeError, "returned 1.0 ("),
    "too few": (lambda **_: [1.0], ValueError, "returned 1 rewards for 4 completions"),
    "texts": (lambda **_: ["1"] * 4, TypeError, "returned ['1', '1', '1', '1'] (there are texts"),
    "infinite": (lambda **_: [0.0, math.inf, 0.0, 0.0], ValueError, "returned inf for completion 1"),
    "beyond float32": (lambda **_: [0, 0, 1e308, 0], ValueError, "returned 1e+308 for completion 2"),
}


def named(function):
    function.__name__ = "judge"
    return function


@pytest.mark.parametrize(
    ("case", "where"),
    [*((case, "training") for case in NO_REWARDS), ("infinite", "held out")],
)
def test_what_is_no_reward_is_refused_wherever_it_comes(tmp_path, case, where):
    function, error, words = NO_REWARDS[case]
    judge = named(function)
    trainer = build(tmp_path, rewards=judge)
    with refuses(error, "reward function 'judge' ", words):
        trainer.train() if where == "training" else trainer.deployed_rewards(list(make_prompts(4)))
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


def test_a_reward_model_and_weights_that_give_no_finite_reward(tmp_path):
    trainer = build(tmp_path, rewards=str(saved(tmp_path / "rewards", reward_model())))
    torch.nn.init.constant_(trainer.reward_funcs[0].score.weight, math.inf)
    with pytest.raises(ValueError, match=r"The rewards of completion 0, \{'rewards': (nan|-?inf)\}"):
        trainer.train()
    large = build(tmp_path, rewards=named(lambda **_: [1e10] * 4), settings={"reward_weights": [1e10]})
    with refuses(ValueError, "completion 0,", "reward_weights="):
        large.train()


def test_thousands_of_columns_are_read_at_once():
    """Row by row, 256 rows of 2,000 columns take many seconds, before anything is said."""
    rows = Dataset.from_dict({"prompt": ["1+1="] * 256} | {f"column_{number}": [0] * 256 for number in range(2000)})
    begin = time.process_time()
    assert len(_look_at("train_dataset", rows, None, False)[0]) == 256
    assert time.process_time() - begin < 1
