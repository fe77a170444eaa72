"""Measures before a run how far engines are from the model that is trained, and proposes the tolerance ε.

    dc-trl calibrate --model Qwen/Qwen3-8B --engine bf16 fp8 --dataset_name data/dapo/train.parquet \\
      --prompt_column problem --prompts 128
    dc-trl calibrate --model Qwen/Qwen3-8B --engine http://127.0.0.1:8000 --dataset_name dapo

An engine is a scheme (fp8: a vLLM server of the model in that scheme is started and ended), replica:SCHEME (a replica
in this process, without vLLM), or the URL of a vLLM server that runs the model already. Several engines are compared
on the same prompts. They sample from the whole distribution, so there is no top-p, top-k or min-p. The terminal shows
tables; the output directory gets calibration.json.

Where an engine's scheme is known, its δ̄ is split into causes.
"""

import argparse
from pathlib import Path

from ..calibration.result import CALIBRATION_FILE, CalibrationSettings, print_calibration
from ..sampling.engine_names import ENGINE_HELP, EngineSpec
from ..settings.command_line import (
    OptionParser,
    add_fields,
    add_model,
    add_serve_options,
    add_template,
    say,
)
from ..settings.fields import Range, require_numbers
from ..settings.paths import require_folder
from . import subcommand
from .own_arguments import TRAIN_DTYPES, add_prompts, prompt_source


# Options that are settings of the calibration, which describes and checks them.
SETTINGS = {
    "the sampling": ("samples", "max_tokens", "temperature", "seed"),
    "the tolerance": ("measure", "reduction", "batch_prompts"),
    "the machine": ("device", "batch_tokens", "replica_batch"),
}
RANGES = {"prompts": Range(least=2, whole=True)}


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "calibrate")
    add_model(parser, "of the model that is trained")
    parser.add_argument(
        "--train_dtype",
        default="bfloat16",
        choices=TRAIN_DTYPES,
        help="training precision: bfloat16 (dtype: bfloat16, bf16: true), mixed (dtype: float32, bf16: true) or "
        "float32 (dtype: float32, bf16: false)",
    )
    parser.add_argument("--engine", nargs="+", required=True, help=ENGINE_HELP)
    add_serve_options(parser)

    add_template(add_prompts(parser, default=128))

    for title, names in SETTINGS.items():
        add_fields(parser.add_argument_group(title), CalibrationSettings, *names)
    parser.set_defaults(replica_batch=256)

    output = parser.add_argument_group("the results")
    output.add_argument(
        "--no_split",
        dest="split",
        action="store_false",
        help="do not split δ̄ into its causes (up to 9 scoring passes, 17 with +fp8_kv)",
    )
    output.add_argument("--output", type=Path, default=Path("runs", "calibration"), help="directory of the results")
    output.add_argument("--overwrite", action="store_true", help="replace the calibration that is there")
    return parser


def device_of(args: argparse.Namespace) -> str:
    """Return the device that is asked for, by default a GPU where there is one; refuse one that cannot be used."""
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where PyTorch is built without it
        raise ValueError(f"device={device!r} cannot be used ({str(error).splitlines()[0]}): leave it out.") from error
    return device


@subcommand(make_parser)
def main(args: argparse.Namespace) -> None:
    # They take seconds, which --help does not need.
    from transformers import AutoModelForCausalLM

    from ..calibration import calibrate
    from ..calibration.rollouts import require_engines
    from ..settings.pretrained import load_config_and_tokenizer
    from .problems import draw_prompts

    # Wrong options are refused before the model is loaded.
    require_numbers(args, RANGES)
    source = prompt_source(args)
    args.device = device_of(args)
    require_folder("output", args.output)
    dtype, bf16 = TRAIN_DTYPES[args.train_dtype]
    settings = CalibrationSettings(
        **{name: getattr(args, name) for names in SETTINGS.values() for name in names},
        split=args.split,
        serve_options=args.serve_options,
        bf16=bf16,
        chat_template_kwargs=args.chat_template_kwargs,
        settings={
            "revision": args.revision,
            "train_dtype": args.train_dtype,
            "prompts_from": args.dataset_name or "arithmetic",
        },
        report=say,
    )
    engines = [EngineSpec.parse(word) for word in args.engine]
    config, tokenizer = load_config_and_tokenizer(args.model, "model", revision=args.revision)
    if hasattr(config, "quantization_config"):
        raise ValueError(f"model={args.model!r} is quantized: give the trained model, and its scheme as --engine.")
    if (args.output / CALIBRATION_FILE).exists() and not args.overwrite:
        raise ValueError(f"output='{args.output}' holds a calibration: choose another --output, or --overwrite.")
    args.output.mkdir(parents=True, exist_ok=True)
    require_engines(engines, config)
    prompts = draw_prompts(source, tokenizer, args.prompts, args.seed, args.chat_template_kwargs)
    model = AutoModelForCausalLM.from_pretrained(args.model, revision=args.revision, dtype=dtype)
    calibration = calibrate(model, tokenizer, args.engine, prompts, **vars(settings))
    calibration.save(args.output / CALIBRATION_FILE)
    print_calibration(calibration)
    print(f"{CALIBRATION_FILE} is in {args.output}")
