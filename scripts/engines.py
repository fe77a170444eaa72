"""Sampling engines side by side, vLLM server and replica: do they agree, how fast are they, what do new weights cost?

python scripts/engines.py layers        replica against vLLM by layer, vLLM's runs against one another (CPU)
python scripts/engines.py agreement     |Δp| to the policy, KL and accuracy of servers and replicas, on the same tokens
python scripts/engines.py throughput    tokens/s on the same prompts: vLLM server, replica, model.generate
python scripts/engines.py sync          seconds and bytes to bring new weights to a server, whole and of an adapter
python scripts/engines.py evaluation    tokens/s of an evaluation, grading and storing, over a bare client's loop
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
)

from dc_trl import mismatch_metrics
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.evaluation import Benchmark, evaluate, tokenize_prompts
from dc_trl.grading.rewards import arithmetic_reward
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.tensors import policy_tensors
from dc_trl.records.tables import print_table
from dc_trl.sampling.engine_names import Sampling
from dc_trl.sampling.replica import Replica
from dc_trl.sampling.seeded import ServerEngine, sample_seed
from dc_trl.serving.client import ServerClient, Weights
from dc_trl.serving.fit import CPU_EXTENSION
from dc_trl.serving.server import VLLMServer, serve
from dc_trl.settings.command_line import OptionParser


# Random models of these sizes; the largest has the shape of Qwen3-0.6B.
SHAPE = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
SIZES = {
    "0.3M": (64, 256, 4, 2, 1, 32, 262),
    "2.4M": (256, 512, 4, 4, 2, 64, 262),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936),
}
SHARED_MEMORY = Path("/dev/shm")


def started(args: argparse.Namespace, scheme: str, model: str | None = None) -> AbstractContextManager[VLLMServer]:
    """A server of the model in a scheme, which says nothing."""
    return serve(model or args.model, scheme, max_model_len=args.max_model_len, report=lambda line: None)


def load_problems(
    args: argparse.Namespace,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Dataset, list[list[int]]]:
    """The policy in float32, its tokenizer, held-out problems, and their prompts as token ids."""
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    problems = arithmetic_dataset(args.problems, args.seed, "held_out")
    prompts = tokenizer.apply_chat_template(problems["prompt"][:], add_generation_prompt=True)["input_ids"]
    return policy, tokenizer, problems, prompts


def logps_of(model: PreTrainedModel, prompts: list[list[int]], completions: list[list[int]]) -> list[Tensor]:
    """Log-probabilities of completions, one forward for each, in float32."""
    logps = []
    for prompt, ids in zip(prompts, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids], device=model.device)).logits[0, len(prompt) - 1 : -1]
        logps.append(logits.float().log_softmax(-1)[torch.arange(len(ids)), ids].cpu())
    return logps


def compare(train: list[Tensor], infer: list[Tensor]) -> dict[str, float]:
    """Mismatch metrics of two engines on the same tokens, and the 99th percentile of |Δp|."""
    padded = [torch.nn.utils.rnn.pad_sequence(logps, batch_first=True) for logps in (train, infer)]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(logps)) for logps in train], batch_first=True)
    gaps = (torch.cat(train).exp() - torch.cat(infer).exp()).abs()
    return mismatch_metrics(*padded, mask) | {"p99": gaps.quantile(0.99).item()}


def accuracy(tokenizer: PreTrainedTokenizerBase, completions: list[list[int]], answers: list[str]) -> str:
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = arithmetic_reward(completions=texts, answer=answers)
    mean = statistics.mean(rewards)
    return f"{100 * mean:.1f} ± {100 * (mean * (1 - mean) / len(rewards)) ** 0.5:.1f} %"


def agreement(args: argparse.Namespace) -> None:
    policy, tokenizer, problems, prompts = load_problems(args)
    greedy = GenerationConfig(max_new_tokens=args.completion_length, do_sample=False, pad_token_id=0, eos_token_id=[1])
    rows = []
    for scheme in args.schemes:
        with started(args, scheme) as server:
            client = ServerClient(server.url)
            length = {"max_tokens": args.completion_length}
            sampled = client.generate(prompts, temperature=1.0, generation_kwargs={"seed": args.seed}, **length)
            best = client.generate(prompts, temperature=0.0, **length)["completion_ids"]
        completions = sampled["completion_ids"]
        by_server = [torch.tensor([logp for (logp,) in logps]) for logps in sampled["logprobs"]]
        by_policy = logps_of(policy, prompts, completions)
        replica = Replica(policy, scheme)
        by_replica = logps_of(replica.model, prompts, completions)
        replica_best = replica.generate(prompts, greedy, 1.0)[0]
        answers = problems["answer"][:]
        to_server = f"{compare(by_replica, by_server)['probs_diff_mean']:.2e}"
        for name, infer, ids, gap in (
            (f"vLLM, {scheme}", by_server, best, ""),
            (f"replica, {scheme}", by_replica, replica_best, to_server),
        ):
            metrics = compare(by_policy, infer)
            values = (metrics[key] for key in ("probs_diff_mean", "p99", "probs_diff_max", "k3_kl"))
            rows.append([name, accuracy(tokenizer, ids, answers), *(f"{value:.2e}" for value in values), gap])
    tokens = sum(map(len, completions))
    head = ["engine", "greedy accuracy", "mean |Δp|", "p99", "max", "KL (k3)", "mean |Δp| to vLLM"]
    title = f"Against the policy in float32, {args.problems} held-out problems, about {tokens:,} tokens each"
    print_table(head, rows, title)


def layers(args: argparse.Namespace) -> None:
    policy, tokenizer, _, prompts = load_problems(args)
    columns: dict[str, dict[str, str]] = {}
    for scheme in args.schemes:
        with tempfile.TemporaryDirectory(prefix="dc_trl-engines-") as folder:
            CheckpointWriter(policy, scheme, tokenizer).write(policy_tensors(policy), folder)
            # An engine of its own process for each scheme: vLLM has one in a process.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                engine = pool.apply(run_vllm, (folder, prompts, args.completion_length, args.max_model_len, args.seed))
        columns[scheme] = gap_by_layer(Replica(policy, scheme).model, prompts, engine)
    names = next(iter(columns.values()))
    rows = [[name, *(column[name] for column in columns.values())] for name in names]
    title = (
        f"Replica against vLLM, {args.problems} held-out problems: relative differences by module, then of the tokens"
    )
    print_table(["", *columns], rows, title)


def record_states(model: nn.Module, states: dict[str, list[Tensor]]) -> None:
    """Hooks that add to ``states`` what each part of a model put out, shape (tokens, channels), by its name.

    The names are the same in transformers and vLLM: embedding, attention and MLP of each layer, last norm.
    """
    for name, module in model.named_modules():
        if name.endswith((".embed_tokens", ".self_attn", ".mlp", "model.norm")):

            def record(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                first = output[0] if isinstance(output, tuple) else output
                states.setdefault(name, []).append(first.detach().float().flatten(0, -2).clone())

            module.register_forward_hook(record)


def run_vllm(
    checkpoint: str, prompts: list[list[int]], length: int, max_model_len: int, seed: int
) -> tuple[list[list[int]], dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Samples with vLLM in this process, and scores what it sampled in several ways.

    Returns:
        Prompts with their completions. States by the name of a module, one tensor for each prompt; see
        `record_states`. Log-probabilities of the completions' tokens, by how they were computed: "prefill" (each
        sequence alone, in one go; of which the states are), "again", "batch" (all at once) and "decode" (as sampled).
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams  # reads the environment

    engine = LLM(
        checkpoint,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=CPU_EXTENSION,
    )

    def run(sequences: list[list[int]], **options: Any) -> list[Any]:
        requests: Any = [{"prompt_token_ids": ids} for ids in sequences]
        return engine.generate(requests, SamplingParams(**options), use_tqdm=False)

    def score(batches: list[list[list[int]]]) -> list[Tensor]:
        outputs = [output for batch in batches for output in run(batch, max_tokens=1, prompt_logprobs=0)]
        logps = []
        for output, prompt, ids in zip(outputs, prompts, sequences, strict=True):
            scored = [
                position[token].logprob for position, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
            ]
            logps.append(torch.tensor(scored[len(prompt) - 1 :]))
        return logps

    sampled = [output.outputs[0] for output in run(prompts, max_tokens=length, logprobs=0, seed=seed)]
    sequences = [prompt + list(output.token_ids) for prompt, output in zip(prompts, sampled, strict=True)]
    one_by_one = [[ids] for ids in sequences]
    logps = {"again": score(one_by_one), "batch": score([sequences])}
    logps["decode"] = [
        torch.tensor(
            [position[token].logprob for position, token in zip(output.logprobs, output.token_ids, strict=True)]
        )
        for output in sampled
    ]
    states: dict[str, list[Tensor]] = {}
    engine.apply_model(lambda model: record_states(model, states))
    logps["prefill"] = score(one_by_one)
    return sequences, states, logps


def gap_by_layer(
    model: PreTrainedModel,
    prompts: list[list[int]],
    engine: tuple[list[list[int]], dict[str, list[Tensor]], dict[str, list[Tensor]]],
) -> dict[str, str]:
    """Relative differences ‖replica − vLLM‖ / ‖vLLM‖ by module, and mismatch of the log-probabilities."""
    sequences, theirs, logps = engine
    mine: dict[str, list[Tensor]] = {}
    record_states(model, mine)
    completions = [ids[len(prompt) :] for ids, prompt in zip(sequences, prompts, strict=True)]
    by_replica = logps_of(model, prompts, completions)
    column = {}
    for name, states in theirs.items():
        expected = torch.cat(states)
        column[name] = f"{((torch.cat(mine[name]) - expected).norm() / expected.norm()).item():.1e}"
    metrics = compare(by_replica, logps["prefill"])
    column["mean |Δp|"] = f"{metrics['probs_diff_mean']:.1e}"
    column["KL (k3)"] = f"{metrics['k3_kl']:.1e}"
    for name in ("again", "batch", "decode"):
        gap = compare(logps["prefill"], logps[name])["probs_diff_mean"]
        column[f"mean |Δp| of vLLM, {name}"] = f"{gap:.1e}"
    return column


def medians(actions: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Median seconds of each action, in turns, after one turn to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for repetition in range(repetitions + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            if repetition > 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def throughput(args: argparse.Namespace) -> None:
    policy, _, _, prompts = load_problems(args)
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    size = {"min_new_tokens": args.completion_length, "max_new_tokens": args.completion_length}
    config = GenerationConfig(**size, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=[1], disable_compile=True)
    actions: dict[str, Callable[[], Any]] = {}

    @torch.no_grad()
    def generate() -> None:
        policy.generate(input_ids=padded, attention_mask=(padded != 0).long(), generation_config=config)

    with ExitStack() as stack:
        for scheme in args.schemes:
            server = stack.enter_context(started(args, scheme))
            client = ServerClient(server.url)
            options = {"max_tokens": args.completion_length, "generation_kwargs": {"ignore_eos": True}}
            actions[f"vLLM, {scheme}"] = lambda client=client, options=options: client.generate(prompts, **options)
            replica = Replica(policy, scheme)
            actions[f"replica, {scheme}"] = lambda replica=replica: replica.generate(prompts, config, 1.0)
        actions["model.generate, float32"] = generate
        seconds = medians(actions, args.repetitions)
    tokens, base = args.problems * args.completion_length, seconds["model.generate, float32"]
    rows = [[name, f"{s:.2f}", f"{tokens / s:,.0f}", f"{base / s:.2f}"] for name, s in seconds.items()]
    title = f"{args.problems} prompts, {args.completion_length} tokens each, {args.repetitions} repetitions"
    print_table(["engine", "seconds", "tokens/s", "× model.generate"], rows, title)


def sync(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    rows = []
    for size in args.sizes:
        torch.manual_seed(args.seed)
        shape = dict(zip(SHAPE.split(), SIZES[size], strict=True))
        config = Qwen3Config(tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None, **shape)
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="dc_trl-engines-") as folder:
            model = Path(folder, "model")
            CheckpointWriter(policy, "bf16", tokenizer).write(policy_tensors(policy), model)
            for scheme in args.schemes:
                with ExitStack() as stack:
                    client = None
                    if not args.without_server:
                        client = ServerClient(stack.enter_context(started(args, scheme, str(model))).url)
                    rows.append([size, scheme, "full", *sync_costs(args, policy, scheme, tokenizer, client)])
                    # Leaves the policy as it was: PEFT puts its layers into it, and takes them out again.
                    adapter = get_peft_model(policy, LoraConfig(r=16, target_modules=args.target_modules))
                    rows.append([size, scheme, "adapter", *sync_costs(args, adapter, scheme, tokenizer, client)])
                    policy = adapter.unload().requires_grad_(True)
    adapted = ", ".join(args.target_modules)
    title = f"Bringing new weights to a vLLM server, medians of {args.repetitions} turns; LoRA of rank 16 on {adapted}"
    columns = [
        "MB written",
        "write, s",
        "reload, s",
        "copy, s",
        "write / copy",
        "sync / copy",
    ]
    print_table(["model", "scheme", "run", *columns], rows, title)


def sync_costs(
    args: argparse.Namespace,
    policy: PreTrainedModel | PeftModel,
    scheme: str,
    tokenizer: PreTrainedTokenizerBase,
    client: ServerClient | None,
) -> list[str]:
    """Bytes and median seconds of writing a policy, of a server's reload, and of a copy of the files that it reads.

    They take turns, so that what else the machine does falls on all of them. The ratios to the copy are medians of the
    turns' own ratios.
    """
    writer = CheckpointWriter(policy, scheme, tokenizer)
    turns: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="dc_trl-engines-") as folder:
        checkpoint, copy = (Path(folder, name) for name in ("checkpoint", "copy"))
        for _ in range(args.repetitions + 1):
            for stale in (checkpoint, copy):
                shutil.rmtree(stale, ignore_errors=True)
            if client is not None:
                time.sleep(1.5)  # vLLM's processes spin for a second after a request; a run has its steps in between
            start = time.perf_counter()
            size = writer.write(policy_tensors(policy), checkpoint)
            wrote = time.perf_counter()
            shutil.copytree(checkpoint, copy)
            copied = time.perf_counter()
            if client is not None:
                client.hold(Weights("benchmark", checkpoint), reload=True)
            seconds = {"write": wrote - start, "copy": copied - wrote, "reload": time.perf_counter() - copied}
            turns.append({"bytes": size} | seconds)
    # In the first turn memory is taken and the server warms up.
    middle = {name: statistics.median(turn[name] for turn in turns[1:]) for name in turns[0]}
    to_write = statistics.median(turn["write"] / turn["copy"] for turn in turns[1:])
    in_all = statistics.median((turn["write"] + turn["reload"]) / turn["copy"] for turn in turns[1:])
    written, stages = f"{middle['bytes'] / 1e6:,.1f}", f"{middle['write']:.3f}"
    reload, whole = ("–", "–") if client is None else (f"{middle['reload']:.3f}", f"{in_all:.1f}")
    return [written, stages, reload, f"{middle['copy']:.3f}", f"{to_write:.1f}", whole]


def evaluation(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    benchmark = Benchmark.load("arithmetic", samples=args.samples, limit=args.problems)
    prompts = tokenize_prompts(benchmark, tokenizer, {})
    usual = {"model": args.model, "max_tokens": args.completion_length, "temperature": 0.7}
    bodies = [
        usual | {"prompt": ids, "seed": sample_seed(0, problem, number)}
        for problem, ids in prompts.items()
        for number in range(args.samples)
    ]
    rows = []
    for scheme in args.schemes:
        rates: dict[str, list[float]] = {"bare": [], "evaluation": []}
        with started(args, scheme) as server:
            engine = ServerEngine(server.url)
            for repetition in range(args.repetitions + 1):
                ServerClient(server.url).reset_prefix_cache()
                start = time.perf_counter()
                tokens = asyncio.run(bare_loop(server.url, bodies))
                bare = tokens / (time.perf_counter() - start)
                ServerClient(server.url).reset_prefix_cache()
                with tempfile.TemporaryDirectory() as folder:
                    start = time.perf_counter()
                    sampling = Sampling(args.completion_length)
                    result = evaluate(
                        args.model, scheme, engine, tokenizer, [benchmark], folder, sampling=sampling, progress=False
                    ).results["arithmetic"]
                    seconds = time.perf_counter() - start
                if repetition > 0:
                    rates["bare"].append(bare)
                    rates["evaluation"].append(result.mean_tokens * len(bodies) / seconds)
        ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        shown = [f"{statistics.median(values):,.0f}" for values in rates.values()]
        rows.append([scheme, *shown, f"{middle:.3f} ({low:.3f} – {high:.3f})"])
    title = f"{args.problems} problems, {args.samples} samples each, {args.repetitions} alternating repetitions"
    print_table(["scheme", "bare loop, tokens/s", "evaluation, tokens/s", "ratio (quartiles)"], rows, title)


async def bare_loop(url: str, bodies: list[dict[str, Any]]) -> int:
    """The least that a client can do: sends the requests and counts the tokens."""
    pending, tokens = iter(bodies), 0

    async def work(http: httpx.AsyncClient) -> None:
        nonlocal tokens
        for body in pending:
            response = await http.post(f"{url}/v1/completions", json=body)
            tokens += response.json()["usage"]["completion_tokens"]

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=None) as http:
        await asyncio.gather(*(work(http) for _ in range(512)))  # requests in flight, as in evaluate
    return tokens


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("what", choices=["layers", "agreement", "throughput", "sync", "evaluation"])
    parser.add_argument("--model", default="dc_trl/assets/tiny_qwen3")
    parser.add_argument("--schemes", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="models of sync")
    parser.add_argument("--target_modules", nargs="+", default=["q_proj", "v_proj"], help="adapted layers of sync")
    parser.add_argument("--without_server", action="store_true", help="sync: write only")
    parser.add_argument("--samples", type=int, default=4, help="samples a problem of evaluation")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--completion_length", type=int, default=48)
    parser.add_argument("--max_model_len", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    actions = {
        "layers": layers,
        "agreement": agreement,
        "throughput": throughput,
        "sync": sync,
        "evaluation": evaluation,
    }
    actions[args.what](args)


if __name__ == "__main__":
    main()
