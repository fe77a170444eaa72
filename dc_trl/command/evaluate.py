"""Evaluates a model as it is deployed: avg@k, pass@k and maj@k on math benchmarks, by vLLM or the in-process replica.

    dc-trl evaluate --model Qwen/Qwen3-8B --benchmarks all --engine bf16 fp8 --output runs/evaluation
    dc-trl evaluate --compare runs/evaluation/bf16 runs/evaluation/fp8

An engine is a scheme (fp8: a vLLM server of the model in that scheme is started and ended), replica:SCHEME (a replica
in this process, without vLLM), or the URL of a vLLM server that runs the model already, in the scheme that --scheme
names. Every sample is stored as it comes, so the same command goes on where the last one stopped. Defaults are those
of DC-GRPO's paper: 32,768 tokens, temperature 0.7, top-p 1, 32 samples a problem for AIME and AMC, 4 for the others.
"""

import argparse
from pathlib import Path

from ..quantization.schemes import SERVED_SCHEMES
from ..sampling.engine_names import ENGINE_HELP, Sampling
from ..secrets import hide_in_options
from ..settings.command_line import (
    OptionParser,
    add_model,
    add_serve_options,
    add_template,
)
from ..settings.fields import AT_LEAST_0, COUNT, SHARE, require_numbers
from ..settings.paths import require_folder
from . import subcommand


# The paper's six.
ALL = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")
RANGES = {"max_tokens": COUNT, "concurrency": COUNT, "temperature": AT_LEAST_0, "top_p": SHARE}


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "evaluate")
    model = parser.add_argument_group("the model")
    add_model(model, "of the model; also of a checkpoint that is quantized already", required=False)
    add_template(model)

    problems = parser.add_argument_group("the problems")
    problems.add_argument(
        "--benchmarks",
        nargs="+",
        default=["all"],
        metavar="NAME[=FILE]",
        help=f"all ({', '.join(ALL)}), some of these, gsm8k or arithmetic; from the Hub or a local file",
    )
    problems.add_argument("--samples", type=int, help="k, samples for each problem (default: the paper's)")
    problems.add_argument("--limit", type=int, help="use only so many problems of each benchmark")

    sampling = parser.add_argument_group("the sampling")
    sampling.add_argument("--max_tokens", type=int, default=Sampling().max_tokens, help="most tokens of an answer")
    sampling.add_argument("--temperature", type=float, default=Sampling().temperature, help="0 is greedy")
    sampling.add_argument("--top_p", type=float, default=Sampling().top_p, help="1 truncates nothing")
    sampling.add_argument("--seed", type=int, default=0, help="from which each sample's seed is made (default: 0)")

    engine = parser.add_argument_group("the engine")
    engine.add_argument(
        "--engine", nargs="+", help=f"{ENGINE_HELP}; default: bf16, or the checkpoint's own scheme if it is quantized"
    )
    engine.add_argument("--scheme", choices=SERVED_SCHEMES, help="scheme of a server at a URL (default: bf16)")
    engine.add_argument("--concurrency", type=int, default=512, help="requests at a time, or the replica's batch")
    add_serve_options(engine)

    output = parser.add_argument_group("the results")
    output.add_argument("--output", type=Path, help="directory for samples and results (default: runs/evaluation)")
    output.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar="DIR",
        help="compare two evaluated directories: is the second one better?",
    )
    return parser


@subcommand(make_parser)
def main(args: argparse.Namespace) -> None:
    # They take seconds, which --help does not need.
    from ..data.sources import parse_benchmark
    from ..evaluation import RESULTS_FILE, Benchmark, evaluate, tokenize_prompts
    from ..evaluation.opened import EvaluatedModel, choose_engines, start_engine
    from ..evaluation.results import Evaluation, print_comparison, print_evaluations
    from ..settings.pretrained import load_config_and_tokenizer

    if args.compare:
        print_comparison(*(Evaluation.load(folder / RESULTS_FILE) for folder in args.compare))
        return
    # Wrong options are refused before an engine is started.
    if args.model is None:
        raise ValueError("model is not set: give --model with a Hub id or a directory, or --compare.")
    require_numbers(args, RANGES)
    sampling = Sampling(args.max_tokens, args.temperature, args.top_p)
    config, tokenizer = load_config_and_tokenizer(args.model, "model", revision=args.revision)
    model = EvaluatedModel(args.model, args.revision, config, tokenizer)
    engines = choose_engines(model, args.engine, args.scheme)
    words = [word for each in args.benchmarks for word in (ALL if each == "all" else [each])]
    named = {parse_benchmark(word)[0]: word for word in words}  # the last word about a benchmark counts
    benchmarks = [Benchmark.load(word, samples=args.samples, limit=args.limit) for word in named.values()]
    output: Path = args.output or Path("runs", "evaluation")
    require_folder("output", output)
    output.mkdir(parents=True, exist_ok=True)
    prompts = [ids for b in benchmarks for ids in tokenize_prompts(b, tokenizer, args.chat_template_kwargs).values()]
    evaluations = []
    for spec in engines:
        assert spec.scheme is not None  # choose_engines has found it
        folder = output / spec.scheme
        folder.mkdir(exist_ok=True)
        with start_engine(
            spec,
            model,
            max_length=max(map(len, prompts)) + args.max_tokens,
            concurrency=args.concurrency,
            serve_options=args.serve_options,
            log_path=folder / "vllm_server.log",
        ) as (engine, weights):
            evaluation = evaluate(
                args.model,
                spec.scheme,
                engine,
                tokenizer,
                benchmarks,
                folder,
                sampling=sampling,
                seed=args.seed,
                settings={
                    "weights": weights,
                    "engine": "replica" if spec.kind == "replica" else "vllm",
                    "serve_options": hide_in_options(args.serve_options),
                },
                chat_template_kwargs=args.chat_template_kwargs,
            )
        evaluations.append(evaluation)
    print_evaluations(evaluations)
    print(f"Samples and {RESULTS_FILE} are in {output}")
