"""What a run changed: greedy rewards of the deployed policy before the first step and after the last."""

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback

from ..records.estimators import mean_estimate
from ..records.runs import GREEDY, run_ended
from ..run.progress import in_parts
from ..trainer import DCGRPOTrainer


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
        if self._trainer.run.resumed_at_end and run_ended(args.output_dir, state.global_step):
            return
        is_last = self._trainer.eval_dataset is not None and state.global_step >= state.max_steps
        if is_last and not _is_measured(state, state.global_step):
            self._trainer.evaluate()  # the run was resumed after its last step


def _is_measured(state, step: int) -> bool:
    return any("eval_reward" in row and row["step"] == step for row in state.log_history)


def greedy_rewards(trainer: DCGRPOTrainer, dataset: Dataset | IterableDataset, batch_size: int) -> list[float]:
    """Rewards of the deployed policy's greedy completions, the problems divided among the processes.

    Args:
        trainer: with a replica or vLLM (`deployment_scheme` or `use_vllm` set).
        dataset: with the column `prompt`, and others that the reward reads. Every process reads the whole of a stream.
        batch_size: prompts at a time in each process.

    Returns:
        The weighted sum of the rewards for each problem that got one; the same list in every process.
    """
    accelerator = trainer.accelerator
    problems = list(dataset) if isinstance(dataset, IterableDataset) else dataset
    size = len(problems)
    rewards: list[float | None] = []
    starts = range(0, size, accelerator.num_processes * batch_size)
    for start in in_parts(trainer, starts, "held-out problems, greedy"):
        first = start + accelerator.process_index * batch_size
        # Every process asks for as many completions; those of rows beyond the last one do not count.
        rows = [problems[min(row, size - 1)] for row in range(first, first + batch_size)]
        rewards += trainer.deployed_rewards(rows)[: max(0, size - first)]
    return [value for value in gather_object(rewards) if value is not None]
