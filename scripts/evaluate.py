"""Evaluates a model as it is deployed: avg@k, pass@k and maj@k on math benchmarks, by vLLM or the in-process replica.

    python scripts/evaluate.py --model Qwen/Qwen3-8B --benchmarks all --scheme bf16 fp8 --output runs/evaluation
    python scripts/evaluate.py --compare runs/evaluation/bf16 runs/evaluation/fp8

Without --url it starts a vLLM server for each scheme, and stops it. Every sample is kept as it comes: the same command
again goes on where the last one stopped. Defaults are those of DC-GRPO's paper: 32,768 tokens, temperature 0.7, top-p
1, 32 samples a problem for AIME and AMC, 4 for the others.
"""

import argparse
import hashlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from dc_trl.data.benchmarks import BENCHMARKS
from dc_trl.data.prompts import parse_template_kwargs
from dc_trl.evaluation import RESULTS_FILE, Benchmark, evaluate, tokenize_prompts
from dc_trl.evaluation.card import require_card, write_eval_results
from dc_trl.evaluation.results import Evaluation, compare
from dc_trl.evaluation.tables import comparison_table, evaluation_details, evaluation_table, failures_line
from dc_trl.files import make_folder
from dc_trl.quantization.schemes import SCHEMES
from dc_trl.records.tables import markdown_table, print_table
from dc_trl.rollouts.replica import Replica
from dc_trl.rollouts.sampling import Engine, ReplicaEngine, Sampling
from dc_trl.rollouts.server_engine import Disclosed, ServerEngine
from dc_trl.serving.connection import is_local
from dc_trl.serving.errors import ServerError
from dc_trl.serving.server import serve
from dc_trl.settings.command_line import OptionParser
from dc_trl.settings.pretrained import load_config_and_tokenizer
from dc_trl.settings.ranges import AT_LEAST_0, COUNT, SHARE, require_numbers


# The paper's six. GSM8K and the built-in arithmetic are there by name.
ALL = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")
# A checkpoint that is quantized already is evaluated as it is.
AS_IT_IS = "as-is"
RANGES = {
    **dict.fromkeys(("samples", "limit", "max_tokens", "concurrency"), COUNT),
    "temperature": AT_LEAST_0,
    "top_p": SHARE,
}
# Files that vLLM takes weights from.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def parse_arguments() -> argparse.Namespace:
    parser = OptionParser(__doc__)
    model = parser.add_argument_group("the model")
    model.add_argument("--model", help="Hub id or directory; also of a checkpoint that is quantized already")
    model.add_argument("--revision", default="main", help="revision of a Hub model")
    model.add_argument(
        "--scheme", nargs="+", choices=SCHEMES, help="formats to evaluate it in (default: bf16, or the checkpoint's)"
    )
    model.add_argument("--chat_template_kwargs", default="{}", help="'{\"enable_thinking\": false}'")

    problems = parser.add_argument_group("the problems")
    problems.add_argument(
        "--benchmarks", nargs="+", default=["all"], help=f"all ({', '.join(ALL)}), or of: {', '.join(BENCHMARKS)}"
    )
    problems.add_argument(
        "--benchmark_files", nargs="+", default=[], metavar="NAME=FILE", help="local files in place of the Hub"
    )
    problems.add_argument("--samples", type=int, help="k, samples a problem (default: the paper's, by benchmark)")
    problems.add_argument("--limit", type=int, help="only the first problems of each benchmark")

    sampling = parser.add_argument_group("the sampling")
    sampling.add_argument("--max_tokens", type=int, default=Sampling().max_tokens)
    sampling.add_argument("--temperature", type=float, default=Sampling().temperature, help="0: greedy")
    sampling.add_argument("--top_p", type=float, default=Sampling().top_p)
    sampling.add_argument("--seed", type=int, default=0)

    engine = parser.add_argument_group("the engine")
    engine.add_argument("--engine", choices=["vllm", "replica"], default="vllm")
    engine.add_argument("--url", help="vLLM server that runs already, in the one --scheme given")
    engine.add_argument("--concurrency", type=int, default=512, help="requests in flight, or the replica's batch")
    engine.add_argument("--serve_options", nargs=argparse.REMAINDER, default=[], help="last: options of `vllm serve`")

    output = parser.add_argument_group("the results")
    output.add_argument("--output", type=Path, help="directory for samples and results (default: runs/evaluation)")
    output.add_argument("--card", type=Path, help="model card (README.md) to write the eval_results into")
    output.add_argument(
        "--compare", nargs=2, type=Path, metavar="DIR", help="two evaluated directories: is the second one better?"
    )
    return parser.parse_args()


def load_benchmarks(args: argparse.Namespace) -> list[Benchmark]:
    names = list(dict.fromkeys(name for word in args.benchmarks for name in (ALL if word == "all" else [word])))
    files = {}
    for word in args.benchmark_files:
        name, equals, file = word.partition("=")
        if not equals or name not in names:
            raise ValueError(f"benchmark_files={word!r} is invalid: write NAME=FILE, NAME one of {', '.join(names)}.")
        files[name] = file
    return [Benchmark.load(name, file=files.get(name), samples=args.samples, limit=args.limit) for name in names]


def choose_schemes(args: argparse.Namespace, config: PretrainedConfig) -> list[str]:
    if hasattr(config, "quantization_config"):
        if args.scheme:
            raise ValueError(
                f"scheme={args.scheme}: {args.model} is quantized already and evaluated as it is; leave --scheme out."
            )
        if args.engine == "replica":
            raise ValueError(f"engine='replica': {args.model} is quantized already, which only vLLM runs.")
        return [AS_IT_IS]
    schemes = list(dict.fromkeys(args.scheme or ["bf16"]))
    if args.url and len(schemes) > 1:
        raise ValueError(f"scheme={schemes} with url={args.url!r}: a server runs in one scheme, name that one.")
    if args.url and args.engine == "replica":
        raise ValueError(f"url={args.url!r} with engine='replica' contradict each other: leave one out.")
    return schemes


@contextmanager
def start_engine(
    args: argparse.Namespace,
    scheme: str,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    longest_prompt: int,
    output: Path,
) -> Iterator[Engine]:
    if args.engine == "replica":
        policy = AutoModelForCausalLM.from_pretrained(args.model, revision=args.revision, dtype="auto")
        policy.to("cuda" if torch.cuda.is_available() else "cpu")
        yield ReplicaEngine(Replica(policy, scheme), tokenizer, args.concurrency)
    elif args.url:
        engine = ServerEngine(args.url, concurrency=args.concurrency)
        require_served(args.url, engine.disclosed, args.model, scheme)
        print(f"{args.url} holds {engine.disclosed}, taken for {args.model} in {scheme}", flush=True)
        yield engine
    else:
        own_limit = config.get_text_config().max_position_embeddings
        with serve(
            args.model,
            "bf16" if scheme == AS_IT_IS else scheme,
            revision=args.revision,
            max_model_len=min(longest_prompt + args.max_tokens, own_limit),
            log_path=output / "vllm_server.log",
            restarts=3,
            options=args.serve_options,
            report=lambda line: print(line, flush=True),
        ) as server:
            yield ServerEngine(server.url, concurrency=args.concurrency)


def require_served(url: str, disclosed: Disclosed, model: str, scheme: str) -> None:
    """Refuses a running server that by its own words serves another model, or another format."""
    names = (disclosed.name, disclosed.root)
    paths = [Path(name) for name in names if Path(name).is_dir()]
    if model not in names and not (Path(model).is_dir() and any(path.samefile(model) for path in paths)):
        raise ValueError(
            f"model={model!r}: the server at {url} serves {disclosed.name!r}, from {disclosed.root!r}. Give the one "
            "that it serves, or start it under this name (scripts/serve.py --model, vllm serve --served-model-name)."
        )
    told = disclosed.weight_version is not None  # else the quantization is not known either
    if told and scheme != AS_IT_IS and (scheme == "bf16") != (disclosed.quantization is None):
        raise ValueError(
            f"scheme={scheme!r}: the server at {url} runs with quantization={disclosed.quantization!r}. Name the "
            "scheme that it runs in, or start it with scripts/serve.py --scheme."
        )


def served_weights(url: str, disclosed: Disclosed) -> dict[str, str | None]:
    """What tells the weights of a running server from others, as far as it can be known.

    Where it holds the files that it was started with, and they are on this machine, they tell; else its address and
    what it discloses. Never the files of the model that it is asked about.
    """
    known = {"served": disclosed.name, "weight_version": disclosed.weight_version}
    root = Path(disclosed.root)
    files = sorted(file for pattern in WEIGHTS for file in root.glob(pattern)) if is_local(url) else []
    if files and disclosed.weight_version in (None, "default"):
        digest = hashlib.sha256()
        for file in [root / "config.json", *files]:
            with open(file, "rb") as content:
                digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
        return known | {"sha256": digest.hexdigest()}
    return known | {
        "url": url,
        "root": disclosed.root,
        "revision": disclosed.revision,
        "quantization": disclosed.quantization,
    }


def fingerprint(model: str, revision: str) -> str:
    """What tells two sets of weights under one name apart: the revision, or size and time of the files."""
    if not Path(model).is_dir():
        return revision
    files = sorted(Path(model).glob("*.safetensors"))
    return ", ".join(f"{file.name}: {file.stat().st_size} bytes, {file.stat().st_mtime_ns}" for file in files)


def run(args: argparse.Namespace) -> None:
    if args.model is None:
        raise ValueError("model is not set: give --model with a Hub id or a directory, or --compare.")
    require_numbers(args, RANGES)
    sampling = Sampling(args.max_tokens, args.temperature, args.top_p)
    template_kwargs = parse_template_kwargs(args.chat_template_kwargs)
    if args.card is not None:
        require_card(args.card)
    config, tokenizer = load_config_and_tokenizer(args.model, "model", revision=args.revision)
    schemes = choose_schemes(args, config)
    benchmarks = load_benchmarks(args)
    output: Path = args.output or Path("runs", "evaluation")
    make_folder("output", output)
    prompts = [ids for b in benchmarks for ids in tokenize_prompts(b, tokenizer, template_kwargs).values()]
    evaluations = []
    for scheme in schemes:
        folder = output / scheme
        folder.mkdir(exist_ok=True)
        with start_engine(args, scheme, config, tokenizer, max(map(len, prompts)), folder) as engine:
            if args.url:
                weights = served_weights(args.url, engine.disclosed)
            else:
                weights = fingerprint(args.model, args.revision)
            evaluation = evaluate(
                args.model,
                scheme,
                engine,
                tokenizer,
                benchmarks,
                folder,
                sampling=sampling,
                seed=args.seed,
                settings={"weights": weights, "engine": args.engine},
                chat_template_kwargs=template_kwargs,
            )
        evaluations.append(evaluation)
    report(evaluations, output)
    if args.card is not None:
        write_eval_results(args.card, evaluations)
        print(f"eval_results written into {args.card}")


def report(evaluations: list[Evaluation], output: Path) -> None:
    table, details = evaluation_table(evaluations), evaluation_details(evaluations)
    print_table(*table, title="avg@k, percent ± standard error over problems")
    print_table(*details)
    text = markdown_table(*table) + "\n" + markdown_table(*details)
    for line in filter(None, map(failures_line, evaluations)):
        print(line)
        text += f"\n{line}\n"
    if len(evaluations) == 2:
        text += "\n" + report_comparison(*evaluations)
    Path(output, "results.md").write_text(text)
    print(f"Samples, {RESULTS_FILE} and results.md are in {output}")


def report_comparison(first: Evaluation, second: Evaluation) -> str:
    table = comparison_table(first, second, compare(first, second))
    title = f"{second.model} {second.scheme} against {first.model} {first.scheme}, percentage points"
    print_table(*table, title=title)
    return f"{title}\n\n{markdown_table(*table)}"


def main() -> None:
    args = parse_arguments()
    # Leaves as Ctrl-C does, through the blocks that keep the samples and end the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if args.compare:
            first, second = (Evaluation.load(folder / RESULTS_FILE) for folder in args.compare)
            report_comparison(first, second)
        else:
            run(args)
    except (ValueError, OSError, ImportError, ServerError) as error:
        # Wrong input or a lost server, not a wrong program: the message says what to do.
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
