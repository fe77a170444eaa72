"""A real lag: TRL's asynchronous GRPO against a vLLM server in FP8 on a CPU. Sampler and trainer work side by side.

    python scripts/study/asynchronous.py --output runs/asynchronous      a run takes four minutes on two cores
    python scripts/study/asynchronous.py --show scripts/study/asynchronous.jsonl       the table, without a run

Written down before the first run of these seeds. The task, model, batch and evaluation are the study's (base.yaml),
with lr 1e-4. `max_staleness` is the largest number of weight versions by which a sample may be behind when it leaves
the queue. The loss of AsyncGRPO weighs by the ratio to the sampler and clips it. Questions: which ages do samples
have? Does a higher bound hurt? Does the clip protect, and does the log ratio help beside it? Expected: samples are
about as old as the bound allows, because this sampler is faster than the trainer; with the clip no harm, as with an
imposed lag of 16; without it harm.

The same command goes on where a stopped one was. A CPU has no FlashAttention 3, whose definition takes its place.
"""

import argparse
import json
import shutil
import socket
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from comparisons import mean_over_seeds
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import async_grpo_trainer, packing

from dc_trl.async_grpo import AsyncDCGRPOConfig, AsyncDCGRPOTrainer
from dc_trl.data.arithmetic import arithmetic_problems
from dc_trl.files import locked_folder
from dc_trl.grading.rewards import arithmetic_reward
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.records.tables import markdown_table, with_error
from dc_trl.sampling.replica import Replica
from dc_trl.serving.client import ServerClient, Weights
from dc_trl.serving.fit import require_shared_directory
from dc_trl.serving.server import serve


MODEL = "dc_trl/assets/tiny_qwen3"
CELLS: dict[str, dict[str, Any]] = {
    "GRPO, max_staleness 4": {"max_staleness": 4},  # TRL's default
    "GRPO, max_staleness 16": {"max_staleness": 16},
    "GRPO without clip, max_staleness 16": {"max_staleness": 16, "epsilon": 1e6},
    "log ratio, max_staleness 16": {"max_staleness": 16, "constraint": "static", "lambda_init": 0.5},
    "GRPO, max_staleness 0": {"max_staleness": 0},
}
SEEDS = (20, 21, 22)
STEPS, EVALUATED = 120, (80, 100, 120)
HELD_OUT = 1024
# The tiny model's chat marks, which TRL's worker has to know.
RESPONSE = {"close_pattern": r"<\|end\|>|$", "content": "text"}
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": RESPONSE},
}


class CheckpointTransfer:
    """Gives a server of `dc-trl serve` the weights in its number format (TRL's `WeightTransferProtocol`).

    TRL streams BF16 weights by NCCL, which takes a second GPU and a server that quantizes by itself. Here the trainer
    writes a checkpoint in the server's format, and the server reloads it in place, on the trainer's own GPU or on a
    CPU too. Requests that are being answered wait, and continue with the new weights, with which the engine computes
    their keys and values again.

    Args:
        model: Hub id or directory of the model that is trained, all of whose weights are trained.
        scheme: number format of the server, one of `dc_trl.quantization.schemes.SERVED_SCHEMES`.
        url: address of the server.
        weight_sync_dir: directory that trainer and server both see, by default in shared memory.

    Raises:
        ValueError: the scheme is unknown or does not fit the model.
        ServerError: `url` is on another machine, which does not see the default folder.
    """

    def __init__(
        self, model: str, scheme: str, url: str = "http://localhost:8000", weight_sync_dir: str | None = None
    ):
        require_shared_directory(weight_sync_dir, [url])
        self._config = AutoConfig.from_pretrained(model)
        with init_empty_weights():
            policy = AutoModelForCausalLM.from_config(self._config)
        policy.tie_weights()
        self._writer = CheckpointWriter(policy, scheme, AutoTokenizer.from_pretrained(model))
        self._url, self._syncs = url, 0
        self._run = uuid.uuid4().hex[:12]
        self._folder = Path(weight_sync_dir or "/dev/shm", f"dc_trl-sync-{socket.gethostname()}_{self._run}")
        self._stack = ExitStack()

    def init_weight_transfer(self) -> None:
        """Connect to the server; a `ServerError` says why it does not fit."""
        self._client = ServerClient(self._url)
        # TRL asks the server for its maximum length.
        self._client.require_fit(self._config, scheme=self._writer.scheme, max_length=1, weight_sync="checkpoint")
        self._stack.enter_context(locked_folder(self._folder, others=f"dc_trl-sync-{socket.gethostname()}_*"))

    def pause(self) -> None:
        """Make the server hold its requests, and forget the keys and values of the old weights."""
        self._client.connection.request("POST", "/pause", params={"mode": "keep"})

    def send_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Write the checkpoint and have the server load it.

        Args:
            tensors: names and weights of the whole model, as TRL gathers them.
        """
        self._syncs += 1
        version = f"{self._run}-{self._syncs}"
        try:
            self._writer.write(tensors, self._folder / version)
        finally:
            for _ in tensors:
                pass  # the other processes take part in gathering the rest
        self._client.load(Weights(version, self._folder / version))
        shutil.rmtree(self._folder / version)

    def resume(self) -> None:
        """Make the server go on with its requests."""
        self._client.connection.request("POST", "/resume")

    def destroy(self) -> None:
        """Remove the folder of the checkpoints."""
        self._stack.close()


class Attention:
    """What FlashAttention's kernel for variable lengths computes, by PyTorch's attention of each sequence."""

    @staticmethod
    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest_q, longest_k, softmax_scale, causal, window_size):
        if not causal or window_size != (-1, -1):
            raise NotImplementedError(f"causal={causal}, window_size={window_size}")
        outputs = []
        for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            parts = (part.transpose(0, 1)[None] for part in (q[a:b], k[c:d], v[c:d]))
            output = torch.nn.functional.scaled_dot_product_attention(
                *parts, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)


def train_on_a_cpu() -> None:
    """Let TRL's trainer run without FlashAttention, and without the peak speed of a GPU that it knows."""
    packing._flash_attn = lambda: Attention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


class AgesTrainer(AsyncDCGRPOTrainer):
    """Keeps the age of every sample, in optimizer steps."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.ages: list[Counter[int]] = []  # by micro-batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        count = len(inputs["segment_id"][inputs["token_index"] >= 0].unique())
        ages = self.state.global_step - inputs["weights_of_step"][0][:count]
        self.ages.append(Counter(ages.tolist()))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Copies(TrainerCallback):
    """Copies the policy's weights after some steps. They are evaluated when the sampler no longer waits."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step in EVALUATED:
            self.weights[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}


def tokenizer_of(model: str) -> Any:
    """Return the tiny model's tokenizer, which tells TRL's worker how an answer is read."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def training_problems(seed: int, count: int = 32768) -> Dataset:
    """Return arithmetic problems as TRL's trainer takes them."""
    problems = arithmetic_problems(count, seed, "train")
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": each.question}], "answer": each.answer} for each in problems]
    )


def greedy_accuracy(weights: dict[str, torch.Tensor], tokenizer: Any, seed: int) -> float:
    """Return the share of held-out problems that the policy answers rightly as it is deployed, in FP8."""
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    policy.load_state_dict(weights)
    model = Replica(policy, "fp8").model
    right = 0.0
    problems = arithmetic_problems(HELD_OUT, seed, "held_out")
    for begin in range(0, HELD_OUT, 128):
        some = problems[begin : begin + 128]
        chats = [[{"role": "user", "content": problem.question}] for problem in some]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
        batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(**batch, do_sample=False, max_new_tokens=48, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(arithmetic_reward(texts, [problem.answer for problem in some]))
    return right / HELD_OUT


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train one cell with one seed, and return its line."""
    begin = time.monotonic()
    tokenizer, copies = tokenizer_of(MODEL), Copies()
    with serve(MODEL, "fp8", max_model_len=256, environment={"OMP_NUM_THREADS": "1"}) as server:
        args = AsyncDCGRPOConfig(
            str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
            per_device_train_batch_size=128,
            token_budget=0,
            max_completion_length=48,
            max_steps=STEPS,
            learning_rate=1e-4,
            adam_beta2=0.95,
            **{"epsilon": 0.24} | CELLS[name],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            vllm_server_base_url=server.url,
        )
        trainer = AgesTrainer(
            MODEL,
            arithmetic_reward,
            args,
            train_dataset=training_problems(seed),
            processing_class=tokenizer,
            callbacks=[copies],
            weight_transfer=CheckpointTransfer(MODEL, "fp8", server.url),
        )
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "discrepancy/k3_kl" in entry]
    curves = {key: [round(entry[key], 6) for entry in history] for key in ("reward", "discrepancy/k3_kl")}
    return {
        "cell": name,
        "seed": seed,
        "greedy": {step: greedy_accuracy(weights, tokenizer, seed) for step, weights in copies.weights.items()},
        "ages": dict(sorted(sum(trainer.ages, Counter()).items())),
        "mean_age": [round(sum(age * n for age, n in ages.items()) / ages.total(), 3) for ages in trainer.ages],
        **curves,
        "seconds": round(time.monotonic() - begin, 1),
    }


HEAD = ["variant", "seeds", "greedy, %", "mean age", "oldest", "k3, 10⁻³"]


def table(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return a row for each cell: accuracy (the mean of three evaluations), ages in optimizer steps.

    Mean age and k3 (of the last twenty steps) are means over seeds; the oldest is that of all.
    """
    rows = []
    for name in CELLS:
        runs = [line for line in lines if line["cell"] == name]
        if runs:
            greedy = mean_over_seeds([statistics.fmean(run["greedy"].values()) for run in runs])
            age = statistics.fmean(statistics.fmean(run["mean_age"]) for run in runs)
            k3 = mean_over_seeds([statistics.fmean(run["discrepancy/k3_kl"][-20:]) for run in runs])
            oldest = max(int(age) for run in runs for age in run["ages"])
            cells = [with_error(*greedy, 100, 1), f"{age:.1f}", str(oldest), with_error(*k3, 1e3, 2)]
            rows.append([name, str(len(runs)), *cells])
    return HEAD, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/asynchronous"))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--show", type=Path, metavar="LINES", help="print the table of these lines, and make no run")
    args = parser.parse_args()
    if args.show is not None:
        print(markdown_table(*table([json.loads(line) for line in args.show.read_text().splitlines()])))
        return
    torch.set_num_threads(1)
    train_on_a_cpu()
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "lines.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for seed in args.seeds:
        for name in CELLS:
            if not any((line["cell"], line["seed"]) == (name, seed) for line in done):
                line = run(name, seed, args.output / "run")
                with file.open("a") as lines:
                    lines.write(json.dumps(line) + "\n")
                print(f"{name}, seed {seed}: {line['greedy']} after {line['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
