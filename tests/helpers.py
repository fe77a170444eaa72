"""What several tests need: a random model of a few thousand parameters, and rollouts that are known in advance."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.calibration.causes import disturb, view_of
from dc_trl.constraint.constraint import Constrained
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.deployed_forward import DeployedForward
from dc_trl.quantization.tensors import policy_tensors
from dc_trl.sampled_tokens import SampledTokens


ROOT = Path(__file__).resolve().parent.parent
TINY_MODEL = ROOT / "dc_trl" / "assets" / "tiny_qwen3"
# Begin of a command that is to hear Ctrl-C: a shell has what it runs in the background, as make runs tests, ignore it.
DEFAULT_SIGINT = ["env", "--default-signal=INT"]
# Begin of a command that runs a module in two processes.
TWO_PROCESSES = [
    os.path.join(os.path.dirname(sys.executable), "accelerate"),
    "launch",
    "--config_file",
    "configs/accelerate/two_cpu_processes.yaml",
]
# The same, with parameters that FSDP2 divides.
TWO_SHARDED = [*TWO_PROCESSES[:-1], "configs/accelerate/two_cpu_processes_fsdp2.yaml"]
# Two processes without accelerate's configuration.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]


def takes_minutes(test: Any) -> Any:
    """Marks a test that `make test` leaves out, and that may take a quarter of an hour."""
    return pytest.mark.long(pytest.mark.timeout(900)(test))


def succeed(command: list, **options: Any) -> subprocess.CompletedProcess:
    """Runs a command in the project's root; where it fails, so does the test, with the command's last words."""
    usual = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, **usual | options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@contextmanager
def refuses(
    kind: type[BaseException] | tuple[type[BaseException], ...], *words: object
) -> Iterator[pytest.ExceptionInfo]:
    """What ends in this error, whose message has all these words: a setting with its value, and what to change."""
    with pytest.raises(kind) as refused:
        yield refused
    missing = [word for word in map(str, words) if word not in str(refused.value)]
    assert not missing, refused.value


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_rows(path: Path) -> list[Any]:
    """Objects of a file that has one in each line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """Writes one object a line; returns the path as a text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


def tiny_model(dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """The model that ships."""
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=dtype, **options)


def make_model(hidden_size: int = 32, seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": 262,
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": hidden_size // 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "initializer_range": 0.2,  # wide, so that probabilities differ
        }
        | overrides
    )
    return Qwen3ForCausalLM(config)


def make_tall_model() -> Qwen3ForCausalLM:
    """A random model with the depth and the vocabulary of a small real one, and little else."""
    return make_model(128, vocab_size=50_000, num_hidden_layers=12)


@torch.no_grad()
def floor_and_format(model: PreTrainedModel, ids: torch.Tensor, scheme: str, seeds: int = 1) -> tuple[float, float]:
    """Mean distances of the next token's distributions: to another order of sums in the scheme, and to the model."""

    def distributions(seed: int | None = None) -> torch.Tensor:
        view = view_of(model)
        deployed = DeployedForward(view, scheme)
        if seed is not None:
            disturb(view, seed)
        with deployed.active():
            return view(ids).logits.float().softmax(-1)

    def distance(other: torch.Tensor) -> float:
        return (own - other).abs().sum(-1).mean().item() / 2

    own = distributions()
    floor = sum(distance(distributions(seed)) for seed in range(seeds)) / seeds
    return floor, distance(model(ids).logits.float().softmax(-1))


def code_blocks(text: str, *languages: str) -> list[str]:
    """The blocks of a page that are code in one of these languages."""
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def look_like_root(folder: Path) -> None:
    """Links what commands of the pages read into a folder, as it lies at the project's root."""
    for name in ("configs", "dc_trl", "scripts"):
        (folder / name).symlink_to(ROOT / name)


def largest_allocation(call: Callable[[], Any]) -> int:
    """Bytes of the largest tensor that PyTorch allocates on the CPU in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    return max(event.self_cpu_memory_usage for event in profiled.events())


def reward_model() -> Qwen3ForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=262, num_key_value_heads=1, head_dim=8, pad_token_id=0, num_labels=1, **sizes)
    return Qwen3ForSequenceClassification(config).eval()


def make_experts(width: int = 64, seed: int = 0) -> Qwen3MoeForCausalLM:
    """A random mixture of experts."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=262,
            hidden_size=width,
            intermediate_size=width,
            moe_intermediate_size=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=width // 2,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            initializer_range=0.1,  # wide, so that probabilities differ
        )
    )


def random_model(config: type, **fields: Any) -> PreTrainedModel:
    """A random model of any architecture, with one layer."""
    sizes = {"vocab_size": 262, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return AutoModelForCausalLM.from_config(config(**sizes | heads | fields))


# Fields of a small DeepSeek-V3.
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
DEEPSEEK |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
# Where log π_train comes from. aligned: the generation batch is used up at standing weights, TRL computes no old
# log-probs; misaligned: the weights move within it, TRL does.
ALIGNED = {"steps_per_generation": 2, "gradient_accumulation_steps": 2}
MISALIGNED = {"steps_per_generation": 2, "gradient_accumulation_steps": 1}
# Fields of a mixture in a layout that no engine reads quantized, or that no checkpoint names one by one.
TWO_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def shard(model: Any) -> Any:
    """Shards a policy over two processes as accelerate's FSDP2 does, with layers that recompute their activations."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    layers = (model.get_base_model() if isinstance(model, PeftModel) else model).model.layers
    for number, layer in enumerate(layers):
        layers[number] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(parameter.to_local().numel() < parameter.numel() for parameter in model.parameters())
    return model


def make_prompts(count: int = 16) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{number}+{number}=" for number in range(count)]})


# Fields of a small run, of TRL's GRPOConfig too.
SMALL_RUN = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def make_config(output_dir: Any, **overrides: Any) -> DCGRPOConfig:
    return DCGRPOConfig(
        **{
            "output_dir": str(output_dir),
            "recipe": "paper",
            "max_steps": 3,
            "export_run": False,  # takes a second or two of each training; tests/test_exporting.py has it on
        }
        | SMALL_RUN
        | {f"{name}_strategy": "steps" for name in ("save", "eval") if f"{name}_steps" in overrides}
        # λ moves from the first batch on.
        | ({} if "discrepancy_measure" in overrides else {"discrepancy_tolerance": 0.0037})
        | overrides
    )


def plain_config(config: DCGRPOConfig, **changes: Any) -> GRPOConfig:
    """The same settings for TRL's trainer."""
    known = {name for name, field in GRPOConfig.__dataclass_fields__.items() if field.init}
    known -= {"generation_batch_size"}  # made of others
    return GRPOConfig(**{name: value for name, value in vars(config).items() if name in known} | changes)


def save(model: Any, folder: Path, tokenizer: Any = None) -> Path:
    """Saves a model with a tokenizer, ours if none is given; returns the folder."""
    model.save_pretrained(folder)
    (make_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    return folder


def write_checkpoint(model: Any, scheme: str, folder: Path) -> None:
    """Writes a policy as it is deployed, with our tokenizer."""
    CheckpointWriter(model, scheme, make_tokenizer()).write(policy_tensors(model), folder)


def make_trainer(output_dir: Any, model: Any = None, reward: Any = None, kind: Any = DCGRPOTrainer, **options: Any):
    """A trainer of a random model. Options are arguments of the trainer, and fields of its configuration."""
    names = inspect.signature(GRPOTrainer).parameters.keys()
    arguments = {name: options.pop(name) for name in names & options.keys()}
    config = make_config(output_dir, **options)
    return kind(
        make_model() if model is None else model,
        reward or distinct_characters,
        config if issubclass(kind, DCGRPOTrainer) else plain_config(config),
        **{"train_dataset": make_prompts(), "processing_class": make_tokenizer()} | arguments,
    )


def at_server(url: str | None) -> dict[str, Any]:
    """Fields of a run that samples in BF16 from a server at this address."""
    fields = {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 10.0, "deployment_scheme": "bf16"}
    return fields | {"vllm_server_base_url": url}


def distinct_characters(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that differs between completions, which are texts or conversations."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [len(set(text)) / 10 for text in texts]


# Penalties of the forms of the constraint, of log π_train and log π_inf of a token.
PENALTIES = {
    "injected": lambda a, b: (a.exp() - b.exp()).abs(),
    "quadratic": lambda a, b: a.exp() - b.exp(),
    "log_ratio": lambda a, b: a - b,
}


def best_at_the_first_step() -> dict[str, Any]:
    """Options of a run of three steps, with a checkpoint and an evaluation of each, whose reward falls from the first
    on, and which loads its best weights at the end."""
    calls = []

    def falling(completions: list[Any], **kwargs: Any) -> list[float]:
        calls.append(completions)
        return [index % 2 - float(len(calls)) for index in range(len(completions))]

    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    steps = {"max_steps": 3, "save_steps": 1, "eval_steps": 1}
    return best | steps | {"reward": falling, "eval_dataset": make_prompts(4)}


def draw_completion(rng: random.Random, longest: int) -> tuple[list[int], list[float]]:
    """Tokens with an end token behind them, and a log-probability of each."""
    length = rng.randint(1, longest)
    ids = [rng.randrange(10, 200) for _ in range(length)] + [1]
    return ids, [-rng.uniform(0.01, 6.0) for _ in ids]


class Rollouts:
    """Rollout function whose completions and log-probabilities follow from the call and the position alone.

    `edit(call, completions, logprobs)` may change them in place, to play an engine that misbehaves.
    """

    __name__ = "rollouts"

    def __init__(self, longest: int = 7, edit: Any = None):
        self.calls = 0
        self._longest = longest
        self._edit = edit

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list]:
        offset = trainer.accelerator.process_index * len(prompts)
        seeds = (1000 * self.calls + index for index in range(offset, offset + len(prompts)))
        drawn = [draw_completion(random.Random(seed), self._longest) for seed in seeds]
        completions, logprobs = map(list, zip(*drawn, strict=True))
        if self._edit is not None:
            self._edit(self.calls, completions, logprobs)
        self.calls += 1
        tokenizer = trainer.processing_class
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": logprobs,
        }


class ByStep(Rollouts):
    """Rollouts that follow from the step and the position, whatever has been called before."""

    steps: list[int]

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list]:
        self.steps = [*getattr(self, "steps", []), trainer.state.global_step]
        self.calls = trainer.state.global_step
        return super().__call__(prompts, trainer)


def load_script(name: str) -> ModuleType:
    """A script of the project, as a module; as Python does, it finds what lies beside it."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell script; it may go on in the next line, and end in a comment."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def as_words(options: dict[str, Any]) -> list[str]:
    """Options of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def completion_logits(model: Any, batch: dict[str, torch.Tensor], **inputs: torch.Tensor) -> torch.Tensor:
    """Logits of the completions of a batch, shape (B, T, V), by transformers' own forward."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    tokens = batch["completion_ids"].shape[1]
    return model(input_ids=ids, attention_mask=mask, **inputs).logits[:, -tokens - 1 : -1]


def completion_logps(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """log π of the sampled tokens of a batch, shape (B, T)."""
    with torch.no_grad():
        logps = completion_logits(model, batch).float().log_softmax(-1)
    return logps.gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)


@torch.no_grad()
def plain_logps(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log π of a completion by one forward of prompt and completion."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """All tensors of two models or checkpoints have the same names and are equal, bit for bit."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()  # PEFT adds adapters in no order
    for name, tensor in one.items():
        both = tensor, other[name]
        # PyTorch compares no numbers in FP8.
        assert torch.equal(*(each.view(torch.uint8) if each.dtype.itemsize == 1 else each for each in both)), name


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """All parameters of two models have the same names and are equal, bit for bit."""
    assert_same_tensors(dict(one.named_parameters()), dict(other.named_parameters()))


def corrected_tokens(trainer: Any, **options: Any) -> list[SampledTokens]:
    """Trains, and returns what the correction has seen of each micro-batch."""
    found, correction = [], trainer.constraint.correction
    trainer.constraint.correction = lambda tokens: (found.append(tokens), correction(tokens))[1]
    trainer.train(**options)
    return found


def sums_of_two(ranks: list[Any]) -> Any:
    """The sums of the first of two processes that reduce their statistics together."""
    of_others: list[torch.Tensor] = []
    assert ranks[1].reduce(lambda local: of_others.append(local) or local) is not None
    return ranks[0].reduce(lambda local: torch.cat([local, *of_others]))


class On(TrainerCallback):
    """Calls a function at an event, with the trainer's state and what transformers passes by name."""

    def __init__(self, event: str, function: Callable[..., Any]):
        def called(args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # what is returned would be a control
            function(state, **kwargs)

        setattr(self, event, called)


class Watch(TrainerCallback):
    """The policy's weights at each step, and each batch of the loss with the tokens that were counted of it."""

    def __init__(self, trainer: DCGRPOTrainer):
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.batches: list[dict[str, Any]] = []
        self.tokens: list[tuple[int, SampledTokens]] = []  # with their steps
        compute_loss, count = trainer._compute_loss, trainer.constraint.count

        def watched_loss(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            self.batches.append(inputs)
            return compute_loss(model, inputs)

        def watched_count(constrained: Constrained, mode: str) -> None:
            if mode == "train":
                self.tokens.append((trainer.state.global_step, constrained.tokens))
            count(constrained, mode)

        trainer._compute_loss, trainer.constraint.count = watched_loss, watched_count
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights[state.global_step] = copy.deepcopy(model.state_dict())

    def compared_lags(self, copy: Any, tolerance: float) -> list[torch.Tensor]:
        """The lag of the tokens of each batch whose weights lagged, compared with that of another model's forwards."""

        def logps(step: int, batch: dict[str, Any]) -> torch.Tensor:
            copy.load_state_dict(self.weights[step])
            return completion_logps(copy, batch)

        found = []
        for (step, tokens), batch in zip(self.tokens, self.batches, strict=True):
            lag = (tokens.train_logps - tokens.lagged_logps)[tokens.scored]
            engine = (tokens.lagged_logps - tokens.infer_logps)[tokens.scored]
            torch.testing.assert_close(lag + engine, (tokens.train_logps - tokens.infer_logps)[tokens.scored])
            if tokens.age == 0:
                assert torch.equal(lag, torch.zeros_like(lag))
                continue
            expected = logps(step, batch) - logps(step - tokens.age, batch)
            torch.testing.assert_close(lag, expected[tokens.scored], rtol=0, atol=tolerance)
            found.append(lag)
        return found


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def logged(trainer: Any, name: str) -> list[float]:
    """Values of one metric over the logs of a trainer."""
    return [row[name] for row in trainer.state.log_history if name in row]


# Names of what a log has by the clock, or counts since its trainer began.
TIMED = re.compile(r"step_time|time/|num_tokens|epoch|overlap/|sync/(?!age|count)")


def untimed(log: list[dict[str, Any]], after: int = 0) -> list[dict[str, Any]]:
    """Return what a log has of the steps after this one, but for what is `TIMED`."""
    return [
        {name: value for name, value in row.items() if not TIMED.match(name)}
        for row in log
        if "loss" in row and row["step"] > after
    ]


def untimed_rows(trainer: Any, after: int = 0) -> list[dict[str, Any]]:
    return untimed(trainer.state.log_history, after)


def assert_same_run(one: Any, other: Any, after: int = 0) -> None:
    """Two trainers have logged the same of the steps after this one, and have the same weights."""
    assert untimed_rows(one, after) == untimed_rows(other, after)
    assert_same_weights(one.model, other.model)


def restore(one: Any, other: Any) -> Any:
    """Gives one the state of the other, as it comes out of a file of JSON; returns it."""
    one.load_state_dict(json.loads(json.dumps(other.state_dict())))
    return one


def steps_of(rows: Iterable[dict[str, Any]], name: str = "loss") -> list[int]:
    """Steps of the rows of a history that have this metric."""
    return [row["step"] for row in rows if name in row]


def assert_finite(trainer: Any) -> None:
    for row in trainer.state.log_history:
        for name in ("loss", "grad_norm", "lagrangian/lambda"):
            assert math.isfinite(row.get(name, 0.0)), (name, row)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
