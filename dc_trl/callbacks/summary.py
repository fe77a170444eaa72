"""What a run changed: the deployed policy before the first step and after the last."""

import json
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
    greedy_is_share,
    read_baseline,
    read_history,
    run_ended,
)
from ..records.sync import sync_facts
from ..records.tables import print_table, reward_text, weighted_sum
from ..records.time_parts import time_cells
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

    Raises:
        ValueError: there are several evaluation sets, which `transformers` evaluates one by one.
    """

    def __init__(self, trainer: DCGRPOTrainer, between: bool = False):
        if isinstance(trainer.eval_dataset, dict):
            raise ValueError(
                f"eval_dataset has {len(trainer.eval_dataset)} sets, {', '.join(map(repr, trainer.eval_dataset))}: "
                "BeforeAndAfter compares one, give the trainer that one."
            )
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
                measured |= _greedy(trainer, rewards)
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


def _greedy(trainer: DCGRPOTrainer, rewards: list[float]) -> dict[str, float | bool | None]:
    """The mean of greedy rewards, and whether it is a share: of a single function, and each of them 0 or 1."""
    estimate = mean_estimate(rewards)
    single = sum(weight != 0 for weight in reward_weights(trainer).values()) == 1
    return {
        "greedy": estimate.value,
        "greedy_se": estimate.standard_error,
        "problems": estimate.problems,
        "greedy_is_share": single and set(rewards) <= {0.0, 1.0},
    }


def reward_weights(trainer: DCGRPOTrainer) -> dict[str, float]:
    """The weight of each reward function by its name; functions of one name get a number."""
    weights: dict[str, float] = {}
    for name, weight in zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True):
        number, key = 1, name
        while key in weights:
            number += 1
            key = f"{name} {number}"
        weights[key] = float(f"{weight:.6g}")  # they are float32 in the trainer
    return weights


def summarize(trainer: DCGRPOTrainer, run: BeforeAndAfter) -> None:
    """Prints what the run amounts to and the summary table, and saves the table beside the model."""
    before, after = run.before, run.after
    args, multiplier = trainer.args, trainer.lagrange_multiplier
    if args.use_vllm:
        engine = f"vLLM, {args.deployment_scheme}" if args.deployment_scheme else "vLLM"
    else:
        engine = args.deployment_scheme or "model.generate"
    rows: list[tuple[str, str, str]] = []
    weights = reward_weights(trainer)
    of = f" ({weighted_sum(weights)})" if len(weights) > 1 else ""
    if "greedy" in before and "greedy" in after:
        share = greedy_is_share(before) and greedy_is_share(after)
        start, end = (reward_text(m["greedy"], m["greedy_se"], share) for m in (before, after))
        rows.append((f"greedy reward{of}, {before['problems']} held-out problems", start, end))
    for label, key, form in (
        (f"sampled reward{of}, held out", "reward", "{:.3f}"),
        ("discrepancy δ̄", "discrepancy", "{:.3g}"),
    ):
        if before.get(key) is not None and after.get(key) is not None:
            rows.append((label, form.format(before[key]), form.format(after[key])))
    lag = {"weight_sync_steps": args.weight_sync_steps, "rollout_overlap": args.rollout_overlap}
    logged = Run("", trainer.state.log_history, lag)
    if (ends := rewards_of(logged)) is not None:
        label = f"training reward{of}, first and last {ends.steps} logged steps"
        rows.append((label, f"{ends.first:.3f}", f"{ends.last:.3f}"))
    if args.constraint != "none":
        rows.append(("multiplier λ", f"{args.lambda_init:.4g}", f"{multiplier.value:.4g}"))
    if args.discrepancy_tolerance == "auto" and multiplier.tolerance is not None:
        rows.append(("tolerance ε, found by the run", "", f"{multiplier.tolerance:.4g}"))
    syncs, saved = trainer.weight_syncs
    if args.weight_sync_steps > 1:
        rows.append(("weight syncs, and those that were saved", "", f"{syncs} + {saved}"))
    cost = dict(trainer.vllm_generation.syncs) if args.use_vllm else {}
    rows += ((label, "", text) for label, text in sync_facts(cost).items())
    if args.rollout_overlap and trainer.sampler.sampling_seconds > 0:
        hidden = 1 - trainer.sampler.waiting_seconds / trainer.sampler.sampling_seconds
        rows.append(("sampling that training hid", "", f"{hidden:.0%} of {trainer.sampler.sampling_seconds:.0f} s"))
    tokens = trainer.state.num_input_tokens_seen
    rows.append(("tokens sampled and read", "", f"{tokens:,}"))
    rows.append(("training seconds", "", f"{trainer.training_seconds:.0f}"))
    verdict = verdict_of(logged)
    print("\n".join(verdict.lines))
    title = f"Deployed policy ({engine}), {trainer.state.global_step} steps, {args.constraint}"
    print_table(("", "before", "after"), rows, title)
    seconds = trainer.parts_clock.seconds()
    parts = [(label, *cells) for label, cells in time_cells(seconds, tokens).items()]
    print_table(("part", "seconds", "share", "tokens/s"), parts, "Where the time went")
    summary = {
        "engine": engine,
        "constraint": args.constraint,
        "seed": args.seed,
        "rewards": weights,
        "steps": trainer.state.global_step,
        "before": before,
        "after": after,
        "lambda": multiplier.value,
        "tolerance": multiplier.tolerance,
        "weight_syncs": syncs,
        "weight_syncs_saved": saved,
        "weight_sync": cost,
        "sampling_seconds": trainer.sampler.sampling_seconds if args.rollout_overlap else None,
        "waiting_seconds": trainer.sampler.waiting_seconds if args.rollout_overlap else None,
        "tokens": tokens,
        "seconds": trainer.training_seconds,
        "seconds_of_parts": seconds,
    }
    write_text(Path(args.output_dir, SUMMARY_FILE), json.dumps(summary, indent=2) + "\n")
    print(f"Model, {HISTORY_FILE} and {FIGURE_FILE} are in {args.output_dir}")
    if args.exports_deployment:
        deployment = Path(args.output_dir, DEPLOYMENT_FOLDER)
        print(f"Serve it: {serve_line(deployment)}" if verdict.worth_serving else f"The policy is in {deployment}")
