"""What a run says at its end, on the terminal and in summary.json."""

import json
from pathlib import Path

from datasets import Dataset

from ..files import write_text
from ..records.runs import DEPLOYMENT_FOLDER, FIGURE_FILE, HISTORY_FILE, MEASURED, SUMMARY_FILE, Run, outcome
from ..records.tables import print_table
from ..records.verdict import verdict_of
from ..settings.paths import serve_line
from ..trainer import DCGRPOTrainer


def summarize(trainer: DCGRPOTrainer) -> None:
    """Print the run's verdict and what it changed, and save a summary beside the model."""
    args = trainer.args
    engine = args.deployment_scheme or ("vLLM" if args.use_vllm else "model.generate")
    if args.use_vllm and args.deployment_scheme:
        engine = f"vLLM, {engine}"
    lag = {"weight_sync_steps": args.weight_sync_steps, "rollout_overlap": args.rollout_overlap}
    logged = Run("", trainer.state.log_history, lag)
    tokens, seconds = trainer.state.num_input_tokens_seen, sum(trainer.clock.seconds().values())
    rows = [*outcome(logged), ["tokens sampled and read", "", f"{tokens:,}"]]
    rows.append(["training seconds", "", f"{seconds:.0f}"])
    verdict = verdict_of(logged)
    print("\n".join(verdict.lines))
    title = f"Deployed policy ({engine}), {trainer.state.global_step} steps, {args.constraint}"
    if isinstance(trainer.eval_dataset, Dataset):  # a stream has no size
        title += f", {len(trainer.eval_dataset)} held-out problems"
    print_table(("", "before", "after"), rows, title)
    measured = {name: logged.series(metric).values for name, metric in MEASURED.items()}
    summary = {
        "engine": engine,
        "constraint": args.constraint,
        "steps": trainer.state.global_step,
        "before": {name: values[0] for name, values in measured.items() if values},
        "after": {name: values[-1] for name, values in measured.items() if values},
        "lambda": trainer.lagrange_multiplier.value,
        "tokens": tokens,
        "seconds": seconds,
    }
    write_text(Path(args.output_dir, SUMMARY_FILE), json.dumps(summary, indent=2) + "\n")
    print(f"Model, {HISTORY_FILE} and {FIGURE_FILE} are in {args.output_dir}")
    if args.exports_deployment:
        deployment = Path(args.output_dir, DEPLOYMENT_FOLDER)
        print(f"Serve it: {serve_line(deployment)}" if verdict.worth_serving else f"The policy is in {deployment}")
