"""What a run changed: the deployed policy before the first step and after the last."""

import json
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback

from ..files import write_text
from ..records.estimators import mean_estimate
from ..records.runs import (
    DEPLOYMENT_FOLDER,
    FIGURE_FILE,
    GREEDY,
    HISTORY_FILE,
    MEASURED,
    SUMMARY_FILE,
    Run,
    outcome,
    run_ended,
)
from ..records.tables import print_table
from ..records.verdict import verdict_of
from ..settings.paths import serve_line
from ..trainer import DCGRPOTrainer
from .benchmarks import greedy_rewards


class BeforeAndAfter(TrainerCallback):
    """Measures the deployed policy before the first step and after the last, on held-out problems.

    It measures within `train`, because trackers take metrics only there, and logs the mean reward of greedy
    completions as `eval_greedy_reward`, with its standard error `eval_greedy_reward_se`: the weighted sum of all
    reward functions, as in training. Problems that no function scores are left out; where that is all of
    them, there is no greedy reward.

    Args:
        trainer: of the run.
        between: also measures and logs greedy completions at the trainer's evaluations between the two.
    """

    def __init__(self, trainer: DCGRPOTrainer, between: bool = False):
        self._trainer = trainer
        self._between = between
        trainer.args.eval_on_start = trainer.eval_dataset is not None and trainer.args.resume_from_checkpoint is None

    def on_train_begin(self, args, state, control, **kwargs):
        if self._trainer.eval_dataset is not None and state.global_step == 0:
            args.eval_on_start |= not _is_measured(state, 0)  # the run was stopped before it had measured

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps and self._trainer.eval_dataset is not None:
            control.should_evaluate = True

    def on_evaluate(self, args, state, control, **kwargs):
        trainer = self._trainer
        if 0 < state.global_step < state.max_steps and not self._between:
            return
        if trainer.replica is None and not trainer.use_vllm:
            return
        if rewards := greedy_rewards(trainer, trainer.eval_dataset, args.per_device_eval_batch_size):
            greedy = mean_estimate(rewards)
            logged = {GREEDY: greedy.value, f"{GREEDY}_se": greedy.standard_error}
            trainer.log({name: value for name, value in logged.items() if value is not None})

    def on_train_end(self, args, state, control, **kwargs):
        if self._trainer.resumed_at_end and run_ended(args.output_dir, state.global_step):
            return
        is_last = self._trainer.eval_dataset is not None and state.global_step >= state.max_steps
        if is_last and not _is_measured(state, state.global_step):
            self._trainer.evaluate()  # the run was resumed after its last step


def _is_measured(state, step: int) -> bool:
    return any("eval_reward" in row and row["step"] == step for row in state.log_history)


def summarize(trainer: DCGRPOTrainer) -> None:
    """Print the run's verdict and what it changed, and save a summary beside the model."""
    args = trainer.args
    engine = args.deployment_scheme or ("vLLM" if args.use_vllm else "model.generate")
    if args.use_vllm and args.deployment_scheme:
        engine = f"vLLM, {engine}"
    lag = {"weight_sync_steps": args.weight_sync_steps, "rollout_overlap": args.rollout_overlap}
    logged = Run("", trainer.state.log_history, lag)
    tokens, seconds = trainer.state.num_input_tokens_seen, trainer.training_seconds
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
