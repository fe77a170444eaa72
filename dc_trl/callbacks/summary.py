"""What a run changed: the deployed policy before the first step and after the last."""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerCallback

from ..files import write_text
from ..records.estimators import mean_estimate
from ..records.runs import (
    BASELINE_FILE,
    DEPLOYMENT_FOLDER,
    FIGURE_FILE,
    HISTORY_FILE,
    SUMMARY_FILE,
    Run,
    read_baseline,
    read_history,
    run_ended,
)
from ..records.tables import print_table, weighted_sum, with_error
from ..records.verdict import rewards_of, verdict_of
from ..settings.paths import serve_line
from ..trainer import DCGRPOTrainer
from .benchmarks import greedy_rewards


class BeforeAndAfter(TrainerCallback):
    """What the summary compares: the deployed policy before the first step and after the last, on held-out problems.

    It measures within `train`, because trackers take metrics only there, and logs the mean reward of greedy
    completions as `eval_greedy_reward`, with its standard error `eval_greedy_reward_se`: the weighted sum of all
    reward functions, as in training. Problems that no function scores are left out; where that is all of
    them, there is no greedy reward. Without held-out problems it compares the discrepancies of the first and of the
    last generation batch.

    Args:
        trainer: of the run.
        between: also measures and logs greedy completions at the trainer's evaluations between the two.
    """

    def __init__(self, trainer: DCGRPOTrainer, between: bool = False):
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self._trainer = trainer
        self._between = between
        self._baseline = Path(trainer.args.output_dir, BASELINE_FILE)
        trainer.args.eval_on_start = trainer.eval_dataset is not None and trainer.args.resume_from_checkpoint is None

    def on_train_begin(self, args, state, control, **kwargs):
        if args.resume_from_checkpoint is None or self._trainer.eval_dataset is None:
            return
        if self._baseline.is_file():
            self.before = read_baseline(self._baseline.parent)
        else:
            args.eval_on_start |= state.global_step == 0  # the run was stopped before it had measured

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps and self._trainer.eval_dataset is not None:
            control.should_evaluate = True

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        trainer = self._trainer
        between = 0 < state.global_step < state.max_steps
        if between and not self._between:
            return
        measured = {"reward": metrics.get("eval_reward"), "discrepancy": metrics.get("eval_discrepancy/mean")}
        if trainer.replica is not None or trainer.use_vllm:
            rewards = greedy_rewards(trainer, trainer.eval_dataset, None, args.per_device_eval_batch_size)
            if rewards:
                greedy = mean_estimate(rewards)
                measured |= {
                    "greedy": greedy.value,
                    "greedy_se": greedy.standard_error,
                    "problems": greedy.problems,
                }
            logged = {"eval_greedy_reward": measured.get("greedy"), "eval_greedy_reward_se": measured.get("greedy_se")}
            trainer.log({name: value for name, value in logged.items() if value is not None})
        if between:
            return
        if state.global_step > 0:
            self.after = measured
            return
        self.before = measured
        if state.is_world_process_zero:
            write_text(self._baseline, json.dumps(measured) + "\n")

    def on_train_end(self, args, state, control, **kwargs):
        if self._trainer.resumed_at_end and run_ended(args.output_dir, state.global_step):
            return
        if self._trainer.eval_dataset is not None and not self.after and state.global_step >= state.max_steps:
            self._trainer.evaluate()  # the run was resumed after its last step
        if self._trainer.eval_dataset is None and state.is_world_process_zero:
            batches = [row for row in read_history(Path(args.output_dir, HISTORY_FILE)) if "discrepancy/mean" in row]
            if batches:
                self.before, self.after = (
                    {"discrepancy": row["discrepancy/mean"]} for row in (batches[0], batches[-1])
                )


def reward_weights(trainer: DCGRPOTrainer) -> dict[str, float]:
    """Return the weight of each reward function by its name."""
    weights = (float(f"{weight:.6g}") for weight in trainer.reward_weights.tolist())  # float32 in the trainer
    return dict(zip(trainer.reward_func_names, weights, strict=True))


def summarize(trainer: DCGRPOTrainer, run: BeforeAndAfter) -> None:
    """Print the run's verdict and the summary table, and save the table beside the model."""
    before, after = run.before, run.after
    args, multiplier = trainer.args, trainer.lagrange_multiplier
    engine = args.deployment_scheme or ("vLLM" if args.use_vllm else "model.generate")
    if args.use_vllm and args.deployment_scheme:
        engine = f"vLLM, {engine}"
    weights, tokens = reward_weights(trainer), trainer.state.num_input_tokens_seen
    seconds = trainer.parts_clock.seconds()
    lag = {"weight_sync_steps": args.weight_sync_steps, "rollout_overlap": args.rollout_overlap}
    logged = Run("", trainer.state.log_history, lag)

    of = f" ({weighted_sum(weights)})" if len(weights) > 1 else ""
    rows: list[Sequence[str]] = []
    if "greedy" in before and "greedy" in after:
        both = (with_error(measured["greedy"], measured["greedy_se"], 1, 3) for measured in (before, after))
        rows.append((f"greedy reward{of}, {before['problems']} held-out problems", *both))
    for label, key, form in (
        (f"sampled reward{of}, held out", "reward", ".3f"),
        ("discrepancy δ̄", "discrepancy", ".3g"),
    ):
        if before.get(key) is not None and after.get(key) is not None:
            rows.append((label, format(before[key], form), format(after[key], form)))
    if (ends := rewards_of(logged)) is not None:
        label = f"training reward{of}, first and last {ends.steps} logged steps"
        rows.append((label, f"{ends.first:.3f}", f"{ends.last:.3f}"))
    if args.constraint != "none":
        rows.append(("multiplier λ", f"{args.lambda_init:.4g}", f"{multiplier.value:.4g}"))
    facts: dict[str, str] = {}
    if args.discrepancy_tolerance == "auto" and multiplier.tolerance is not None:
        facts["tolerance ε, found by the run"] = f"{multiplier.tolerance:.4g}"
    facts |= {"tokens sampled and read": f"{tokens:,}", "training seconds": f"{trainer.training_seconds:.0f}"}
    rows += ((label, "", text) for label, text in facts.items())

    verdict = verdict_of(logged)
    print("\n".join(verdict.lines))
    title = f"Deployed policy ({engine}), {trainer.state.global_step} steps, {args.constraint}"
    print_table(("", "before", "after"), rows, title)
    summary = {
        "engine": engine,
        "constraint": args.constraint,
        "rewards": weights,
        "steps": trainer.state.global_step,
        "before": before,
        "after": after,
        "lambda": multiplier.value,
        "tolerance": multiplier.tolerance,
        "tokens": tokens,
        "seconds": trainer.training_seconds,
        "seconds_of_parts": seconds,
    }
    write_text(Path(args.output_dir, SUMMARY_FILE), json.dumps(summary, indent=2) + "\n")
    print(f"Model, {HISTORY_FILE} and {FIGURE_FILE} are in {args.output_dir}")
    if args.exports_deployment:
        deployment = Path(args.output_dir, DEPLOYMENT_FOLDER)
        print(f"Serve it: {serve_line(deployment)}" if verdict.worth_serving else f"The policy is in {deployment}")
