"""Benchmarks during training: the deployed policy answers them through its own engine, at its present weights."""

from collections.abc import Iterator, Sequence
from functools import partial

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback

from ..evaluation.evaluate import Benchmark, tokenize_prompts
from ..evaluation.results import benchmark_result
from ..evaluation.samples import Sample
from ..grading import Grader
from ..resuming.checkpoints import on_main_process
from ..rollouts.sampling import Completion
from ..trainer import DCGRPOTrainer
from .progress import in_parts


def greedy_rewards(trainer: DCGRPOTrainer, dataset: Dataset | IterableDataset, batch_size: int) -> list[float]:
    """Rewards of the deployed policy's greedy completions, the problems divided among the processes.

    Args:
        trainer: with a replica or vLLM (`deployment_scheme` or `use_vllm` set).
        dataset: with the column `prompt`, and others that the reward reads. Every process reads the whole of a stream.
        batch_size: prompts at a time in each process.

    Returns:
        The weighted sum of the trainer's reward functions for each problem that got a reward; the same list in every
        process.
    """
    rewards: list[float | None] = []
    problems = list(dataset) if isinstance(dataset, IterableDataset) else dataset
    for rows, counted in _shares(trainer, len(problems), batch_size, "held-out problems, greedy"):
        rewards += trainer.deployed_rewards([problems[row] for row in rows])[:counted]
    return [value for value in gather_object(rewards) if value is not None]


def _shares(trainer: DCGRPOTrainer, size: int, batch_size: int, label: str) -> Iterator[tuple[list[int], int]]:
    """Yield the rows of this process batch by batch, with the number of rows that count."""
    accelerator = trainer.accelerator
    starts = range(0, size, accelerator.num_processes * batch_size)
    for start in in_parts(trainer, starts, label):
        first = start + accelerator.process_index * batch_size
        rows = [min(row, size - 1) for row in range(first, first + batch_size)]
        yield rows, len(range(first, min(first + batch_size, size)))


class BenchmarkCallback(TrainerCallback):
    """Evaluates the deployed policy on benchmarks whenever the trainer evaluates, by the engine of its rollouts.

    Logs `eval_NAME/avg@k`, its standard error `eval_NAME/avg@k_se`, `eval_NAME/maj@k`, `eval_NAME/truncated` and
    `eval_NAME/mean_tokens` for each benchmark (trackers show them under `eval/NAME/`), and, where grading an answer
    failed, how often: `eval_NAME/grading_failures`. Answers are at most
    `max_completion_length` long, and drawn anew at each evaluation: use `dc-trl evaluate` for figures to publish.

    Args:
        trainer: with a replica or vLLM (`deployment_scheme` or `use_vllm` set).
        temperature: of the samples.
        batch_size: prompts at a time in each process.
        grading_processes: workers that grade, in the main process.

    Raises:
        ValueError: there is no engine.

    Example:

    ```python
    trainer.add_callback(BenchmarkCallback(trainer, [Benchmark.load("aime24"), Benchmark.load("math500", limit=100)]))
    ```
    """

    def __init__(
        self,
        trainer: DCGRPOTrainer,
        benchmarks: Sequence[Benchmark],
        temperature: float = 0.7,
        batch_size: int = 64,
        grading_processes: int | None = None,
    ):
        if trainer.replica is None and not trainer.use_vllm:
            raise ValueError("deployment_scheme=None and use_vllm=False: set one of them, no engine is there to ask.")
        self._trainer = trainer
        self._benchmarks = benchmarks
        self._temperature = temperature
        self._batch_size = batch_size
        self._grading_processes = grading_processes
        self._prompts = [tokenize_prompts(benchmark, trainer.processing_class, {}) for benchmark in benchmarks]

    def on_evaluate(self, args, state, control, **kwargs):
        for benchmark, prompts in zip(self._benchmarks, self._prompts, strict=True):
            keys = [(problem, number) for problem in prompts for number in range(benchmark.samples)]
            completions = self._answers([prompts[problem] for problem, _ in keys], benchmark.name)
            metrics = on_main_process(partial(self._graded, benchmark, list(prompts), keys, completions))
            self._trainer.log({f"eval_{benchmark.name}/{name}": value for name, value in metrics.items()})

    def _graded(
        self, benchmark: Benchmark, problems: list[str], keys: list[tuple[str, int]], completions: list[Completion]
    ) -> dict[str, float]:
        """Return the metrics of the benchmark; the main process grades."""
        golds = benchmark.golds()
        with Grader(self._grading_processes) as grader:
            verdicts = grader.grade([c.text for c in completions], [golds[problem] for problem, _ in keys])
        samples = {
            key: Sample(*key, -1, c.text, c.tokens, c.truncated, verdict.answer, verdict.correct)
            for key, c, verdict in zip(keys, completions, verdicts, strict=True)
        }
        k = benchmark.samples
        result = benchmark_result(benchmark.name, problems, k, samples)
        metrics = {
            f"avg@{k}": result.avg.value,
            f"maj@{k}": result.maj.value,
            "truncated": result.truncated,
            "mean_tokens": result.mean_tokens,
            f"avg@{k}_se": result.avg.standard_error,
            "grading_failures": grader.failures.total() or None,
        }
        return {name: value for name, value in metrics.items() if value is not None}

    def _answers(self, prompt_ids: Sequence[list[int]], label: str) -> list[Completion]:
        trainer = self._trainer
        completions: list[tuple[int, Completion]] = []
        for rows, counted in _shares(trainer, len(prompt_ids), self._batch_size, label):
            sampled = trainer.deployed_completion_ids([prompt_ids[row] for row in rows], self._temperature)
            texts = trainer.processing_class.batch_decode(sampled, skip_special_tokens=True)
            for row, ids, text in list(zip(rows, sampled, texts, strict=True))[:counted]:
                truncated = len(ids) >= trainer.max_completion_length and ids[-1] not in trainer.eos_token_ids
                completions.append((row, Completion(text, len(ids), truncated)))
        return [completion for _, completion in sorted(gather_object(completions))]
