"""Measures before a run how far engines are from the model that is trained, and proposes the tolerance ε.

    python scripts/calibrate.py --model Qwen/Qwen3-8B --engine bf16 fp8 --dataset_name data/dapo/train.parquet \\
      --prompt_column problem --prompts 128
    python scripts/calibrate.py --model Qwen/Qwen3-8B --engine http://127.0.0.1:8000 --benchmark math500

An engine is a scheme (fp8: a vLLM server with the model in it is started and ended), replica:SCHEME (a replica in this
process, no vLLM), or the URL of a vLLM server that runs the model already; several are compared on the same prompts.
Sampling is from the whole distribution, so there is no top-p, top-k or min-p. The terminal shows a table; the output
directory gets calibration.json, report.html and the figures.
"""

import argparse
import random
import signal
import sys
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from dc_trl.calibration import calibrate
from dc_trl.calibration.report import REPORT_FILE, print_calibration, write_report
from dc_trl.calibration.result import CALIBRATION_FILE
from dc_trl.calibration.rollouts import EngineSpec
from dc_trl.constraint.settings import Measure, Reduction
from dc_trl.data.benchmarks import BENCHMARKS
from dc_trl.data.prompts import Prompt, load_prompts, load_rows, make_prompt, parse_template_kwargs, prompt_length
from dc_trl.evaluation import Benchmark
from dc_trl.files import make_folder
from dc_trl.quantization.schemes import SCHEMES
from dc_trl.serving.errors import ServerError
from dc_trl.settings.command_line import OptionParser
from dc_trl.settings.pretrained import load_config_and_tokenizer
from dc_trl.settings.ranges import ABOVE_0, COUNT, SEED, Range, require_numbers
from dc_trl.training.problems import DataArguments, load_data


# Weights, and whether the forward runs under bfloat16 autocast: `dtype` and `bf16` of a training configuration.
TRAIN_DTYPES = {
    "bfloat16": (torch.bfloat16, True),
    "mixed": (torch.float32, True),
    "float32": (torch.float32, False),
}
RANGES = {
    **dict.fromkeys(
        ("samples", "max_tokens", "max_prompt_length", "batch_prompts", "batch_tokens", "replica_batch"), COUNT
    ),
    "prompts": Range(least=2, whole=True),
    "temperature": ABOVE_0,
    "seed": SEED,
}


def parse_arguments() -> argparse.Namespace:
    parser = OptionParser(__doc__)
    parser.add_argument("--model", required=True, help="Hub id or directory of the model that is trained")
    parser.add_argument("--revision", default="main", help="revision of a Hub model")
    parser.add_argument(
        "--train_dtype",
        default="bfloat16",
        choices=TRAIN_DTYPES,
        help="training precision: bfloat16 (dtype: bfloat16, bf16: true), mixed (dtype: float32, bf16: true) or "
        "float32 (dtype: float32, bf16: false)",
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        required=True,
        help=f"one or more of: {', '.join(SCHEMES)} (starts vLLM), replica:SCHEME, http://… (a running vLLM server)",
    )
    parser.add_argument("--serve_options", nargs=argparse.REMAINDER, default=[], help="last: options of `vllm serve`")

    prompts = parser.add_argument_group("the prompts")
    source = prompts.add_mutually_exclusive_group()
    source.add_argument(
        "--dataset_name",
        help="Hub id, .json/.jsonl/.parquet/.csv file, 'dapo' or 'arithmetic' (default), as in train.py",
    )
    source.add_argument(
        "--benchmark", metavar="NAME[=FILE]", help=f"one of {', '.join(BENCHMARKS)}, as in evaluate.py"
    )
    data = DataArguments()
    prompts.add_argument("--dataset_config", help="configuration of a Hub data set")
    prompts.add_argument("--dataset_split", default=data.dataset_split)
    prompts.add_argument("--prompt_column", default=data.prompt_column)
    prompts.add_argument("--answer_column", default=data.answer_column, help="where it is there, rows need an answer")
    prompts.add_argument("--instruction", help="what each prompt of a data set says after the problem")
    prompts.add_argument("--max_prompt_length", type=int, help="longer prompts (tokens) are left out")
    prompts.add_argument("--chat_template_kwargs", default="{}", help="'{\"enable_thinking\": false}'")
    prompts.add_argument("--prompts", type=int, default=128, help="how many, drawn at random (default: 128)")

    sampling = parser.add_argument_group("the sampling")
    sampling.add_argument("--samples", type=int, default=8, help="completions a prompt: num_generations of the run")
    sampling.add_argument("--max_tokens", type=int, default=8192, help="max_completion_length of the run")
    sampling.add_argument("--temperature", type=float, default=1.0, help="of the run, above 0")
    sampling.add_argument("--seed", type=int, default=0)

    tolerance = parser.add_argument_group("the tolerance")
    tolerance.add_argument("--measure", default="prob_diff", choices=get_args(Measure), help="discrepancy_measure")
    tolerance.add_argument("--reduction", default="sequence", choices=get_args(Reduction), help="batch_reduction")
    tolerance.add_argument("--batch_prompts", type=int, default=64, help="prompts of one generation batch of the run")

    machine = parser.add_argument_group("the machine")
    machine.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of scoring")
    machine.add_argument("--batch_tokens", type=int, default=16384, help="tokens of one forward")
    machine.add_argument("--replica_batch", type=int, default=256, help="completions that a replica samples at a time")

    output = parser.add_argument_group("the results")
    output.add_argument("--output", type=Path, default=Path("runs", "calibration"), help="directory of the results")
    output.add_argument("--overwrite", action="store_true", help="replace the calibration that is there")
    return parser.parse_args()


def require_output(output: Path, overwrite: bool) -> None:
    """Refuses a directory that holds a calibration, or cannot be one."""
    if (output / CALIBRATION_FILE).exists() and not overwrite:
        raise ValueError(
            f"output='{output}' holds a calibration already: choose another --output, or replace it with --overwrite."
        )
    make_folder("output", output)


def require_device(name: str) -> None:
    """Refuses a device that torch does not know, or that is not here."""
    try:
        torch.ones(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"device={name!r} cannot be used ({reason}): use cpu, or cuda where there is a GPU."
        ) from error


def draw_prompts(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The prompts that are measured, drawn at random from what there is."""
    if args.benchmark is not None:
        name, _, file = args.benchmark.partition("=")
        benchmark = Benchmark.load(name, file=file or None)
        every = [make_prompt(problem, tokenizer, benchmark.instruction) for problem in benchmark.rows["problem"]]
        if args.max_prompt_length is not None:
            every = [prompt for prompt in every if prompt_length(prompt, tokenizer) <= args.max_prompt_length]
    elif args.dataset_name in (None, "arithmetic", "dapo"):
        data = DataArguments(
            dataset_name=args.dataset_name or "arithmetic",
            instruction=args.instruction,
            max_prompt_length=args.max_prompt_length,
        )
        every = load_data(data, tokenizer, args.seed, args.prompts)[0]["prompt"][:]
    else:
        rows = load_rows(args.dataset_name, args.dataset_config, args.dataset_split)
        if args.answer_column.split(".")[0] not in rows.column_names:
            # Nothing is graded here, so a file of prompts alone will do.
            rows = rows.add_column(args.answer_column, ["0"] * len(rows))
        columns = (args.prompt_column, args.answer_column)
        kept, _ = load_prompts(rows, tokenizer, *columns, args.instruction, args.max_prompt_length)
        every = kept["prompt"][:]
    if len(every) < args.prompts:
        print(f"prompts={args.prompts}: there are {len(every)}, and all of them are taken", flush=True)
    return random.Random(args.seed).sample(every, min(args.prompts, len(every)))


def run(args: argparse.Namespace) -> None:
    # What is wrong is said before the model is loaded.
    require_numbers(args, RANGES)
    template_kwargs = parse_template_kwargs(args.chat_template_kwargs)
    for word in args.engine:
        EngineSpec.parse(word)
    require_device(args.device)
    config, tokenizer = load_config_and_tokenizer(args.model, "model", revision=args.revision)
    if hasattr(config, "quantization_config"):
        raise ValueError(
            f"model={args.model!r} is quantized: give the model that is trained, and --engine its scheme."
        )
    require_output(args.output, args.overwrite)
    prompts = draw_prompts(args, tokenizer)
    dtype, bf16 = TRAIN_DTYPES[args.train_dtype]
    model = AutoModelForCausalLM.from_pretrained(args.model, revision=args.revision, dtype=dtype)
    calibration = calibrate(
        model,
        tokenizer,
        args.engine,
        prompts,
        samples=args.samples,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        measure=args.measure,
        reduction=args.reduction,
        batch_prompts=args.batch_prompts,
        bf16=bf16,
        seed=args.seed,
        device=args.device,
        batch_tokens=args.batch_tokens,
        replica_batch=args.replica_batch,
        chat_template_kwargs=template_kwargs,
        serve_options=args.serve_options,
        log_dir=args.output,
        settings={
            "revision": args.revision,
            "train_dtype": args.train_dtype,
            "prompts_from": args.benchmark or args.dataset_name or "arithmetic",
        },
        report=lambda line: print(line, flush=True),
    )
    write_report(calibration, args.output)
    print_calibration(calibration)
    print(f"{REPORT_FILE}, {CALIBRATION_FILE} and the figures are in {args.output}")


def main() -> None:
    args = parse_arguments()
    # Leaves as Ctrl-C does, through the blocks that end a server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run(args)
    except (ValueError, OSError, ImportError, ServerError) as error:
        # Wrong input or a lost server, not a wrong program: the message says what to do.
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
