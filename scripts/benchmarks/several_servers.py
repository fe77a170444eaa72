"""Several vLLM servers that sample one batch: who answers what, and what becomes of it when one is killed.

python scripts/benchmarks/several_servers.py

Each row is the same batch with the same seeds: by one server alone, by all of them, while one is killed in its
middle, without it, and when it has been started again.
"""

import argparse
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.tensors import policy_tensors
from dc_trl.records.tables import print_table
from dc_trl.serving.client import Weights
from dc_trl.serving.connection import Patience
from dc_trl.serving.server import VLLMServer
from dc_trl.serving.several import ServerPool, meet_servers
from dc_trl.settings.command_line import OptionParser


Rollout = Callable[..., dict[str, Any]]


def start(servers: list[VLLMServer], stack: ExitStack) -> None:
    """Starts servers, all at the same time; they end with the stack."""
    threads = [threading.Thread(target=server.start) for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        stack.callback(server.stop)
        thread.start()
    for thread in threads:
        thread.join()


def kill_in(seconds: float, server: VLLMServer) -> threading.Thread:
    """Kills a server and its engine, in a thread, after so many seconds."""
    assert server.pid is not None
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]

    def kill() -> None:
        time.sleep(seconds)
        for process in processes:
            process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


class Table:
    """Samples the batch again and again, and keeps a row of each time."""

    def __init__(self, args: argparse.Namespace, prompts: list[list[int]], pool: ServerPool):
        self._options = {"n": args.samples, "max_tokens": args.completion_length, "logprobs": 0}
        self._seed, self._prompts, self._pool = args.seed, prompts, pool
        self._first: list[list[int]] | None = None
        self.rows: list[list[str]] = []

    def sample(self, name: str, by_one: bool = False) -> float:
        """Adds a row; returns the seconds that the batch took."""
        # One server alone gets the same requests: a pool of one.
        servers = self._pool.servers
        self._pool.servers = servers[:1] if by_one else servers
        before = [server.answered for server in servers]
        torch.manual_seed(self._seed)
        start = time.perf_counter()
        ids = self._pool.generate(self._prompts, **self._options)["completion_ids"]
        seconds = time.perf_counter() - start
        self._pool.servers = servers
        self._first = self._first or ids
        same = sum(one == other for one, other in zip(ids, self._first, strict=True))
        shares = [str(server.answered - count) for server, count in zip(servers, before, strict=True)]
        lost = [str(number) for number, server in enumerate(servers, 1) if server.lost is not None]
        self.rows.append([name, *shares, ", ".join(lost), str(len(ids)), f"{100 * same / len(ids):.1f} %"])
        return seconds


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("--model", default="dc_trl/assets/tiny_qwen3")
    parser.add_argument("--scheme", default="bf16")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="completions of each problem")
    parser.add_argument("--completion_length", type=int, default=64)
    parser.add_argument("--max_model_len", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.servers < 2:
        parser.error(f"--servers {args.servers}: at least 2.")
    warnings.filterwarnings("ignore")
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    problems = arithmetic_dataset(args.problems, args.seed, "held_out")["prompt"][:]
    prompts = tokenizer.apply_chat_template(problems, add_generation_prompt=True)["input_ids"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="dc_trl-servers-")))
        CheckpointWriter(policy, args.scheme, tokenizer).write(policy_tensors(policy), folder / "checkpoint")
        servers = [
            VLLMServer(
                folder / "checkpoint",
                max_model_len=args.max_model_len,
                log_path=folder / f"log-{number}",
                report=lambda line: None,
            )
            for number in range(args.servers)
        ]
        start(servers, stack)
        urls = [server.url for server in servers]
        pool = ServerPool(meet_servers(urls, patience=Patience(max_retries=3)))
        pool.load(Weights("several-servers-1", folder / "checkpoint"))
        table = Table(args, prompts, pool)
        table.sample("server 1 alone", by_one=True)  # the first requests warm an engine up
        table.rows.clear()
        table.sample("server 1 alone", by_one=True)
        seconds = table.sample("all servers")
        killing = kill_in(seconds / 2, servers[-1])
        table.sample(f"server {args.servers} killed in the middle")
        killing.join()
        table.sample("the batch after that")
        servers[-1].stop()
        start(servers[-1:], stack)
        table.sample("started again")
    head = ["batch", *(f"server {number}" for number in range(1, args.servers + 1))]
    title = (
        f"{args.problems} prompts, {args.samples} completions each: the prompts that each server answered, and how "
        "many completions are those of the first batch"
    )
    print_table([*head, "lost", "completions", "same tokens"], table.rows, title)


if __name__ == "__main__":
    main()
