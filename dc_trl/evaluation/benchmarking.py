"""Measure how good a policy is as it is deployed: avg@k, pass@k and maj@k on benchmarks, with errors."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.prompts import BOXED_INSTRUCTION, make_prompt, tokenize
from ..data.sources import BENCHMARKS, load_benchmark, parse_benchmark
from ..files import set_aside
from ..grading import Gold, Grader
from ..records.estimators import macro_estimate
from ..sampling.engine_names import Sampling
from ..sampling.seeded import Completion, Engine, Request, sample_seed
from ..settings.fields import COUNT, require_number
from .results import Evaluation, benchmark_result
from .samples import Sample, SampleStore


RESULTS_FILE = "results.json"
_TOGETHER = 32  # completions that are graded, and then stored, at once

logger = logging.get_logger(__name__)


class Benchmark(NamedTuple):
    """Problems that are answered `samples` times each, with `instruction` in the prompt (None: the bare problem)."""

    name: str
    rows: Dataset  # columns of dc_trl.data.sources.FEATURES
    samples: int
    instruction: str | None = BOXED_INSTRUCTION

    @classmethod
    def load(cls, word: str, *, samples: int | None = None, limit: int | None = None) -> "Benchmark":
        """Load a benchmark.

        Args:
            word: NAME, a key of `dc_trl.data.sources.BENCHMARKS`, or NAME=FILE to read a local file.
            samples: k; by default that of the papers (32 or 4).
            limit: keeps only so many of the first problems.

        Raises:
            ValueError: no such benchmark or file, or samples or limit below 1.
        """
        name, file = parse_benchmark(word)
        for field, value in (("samples", samples), ("limit", limit)):
            if value is not None:
                require_number(field, value, COUNT)
        rows = load_benchmark(name, file)
        if limit is not None:
            rows = rows.select(range(min(limit, len(rows))))
        return cls(name, rows, samples or BENCHMARKS[name].samples, BENCHMARKS[name].instruction)

    def golds(self) -> dict[str, Gold]:
        """Return the gold answers by the problems' ids."""
        return {row["id"]: Gold(**{field.name: row[field.name] for field in fields(Gold)}) for row in self.rows}


def evaluate(
    model: str,
    scheme: str,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    benchmarks: Sequence[Benchmark],
    output_dir: str | os.PathLike[str],
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    grading_processes: int | None = None,
    progress: bool = True,
) -> Evaluation:
    """Sample k answers to each problem, grade them, and compute avg@k, pass@k and maj@k with their errors.

    Every sample is stored once it is graded (`output_dir/BENCHMARK/samples.jsonl`). A further call with the same
    arguments samples only what is missing. A sample's own seed is made of `seed`, the problem's id and its number.

    Args:
        model, scheme: names, for the record.
        engine: samples the completions.
        tokenizer: of the model; with a chat template problems become user messages.
        benchmarks: the problems, and how often each is answered.
        output_dir: directory for the samples and `results.json`.
        sampling: length, temperature and top-p; the defaults are DC-GRPO's evaluation (arXiv 2606.08779).
        seed: of the samples.
        settings: further things that the samples depend on; an `output_dir` that was begun with others is refused.
        chat_template_kwargs: `{"enable_thinking": False}` for example.
        grading_processes: workers that grade; None: one for each core.
        progress: whether to show a bar.

    Raises:
        ValueError: a prompt leaves no room for an answer, or `output_dir` holds samples with other settings.
        ServerError: the engine failed repeatedly. The samples so far are kept.
    """
    output_dir = Path(output_dir)
    record = {"model": model, "scheme": scheme, **sampling._asdict(), "seed": seed, **(settings or {})}
    stores: dict[str, SampleStore] = {}
    missing: list[_Missing] = []
    for benchmark in benchmarks:
        name = benchmark.name
        prompts = tokenize_prompts(benchmark, tokenizer, chat_template_kwargs or {})
        if long := [problem for problem, ids in prompts.items() if len(ids) >= engine.max_length]:
            raise ValueError(
                f"benchmark {name!r}: {len(long)} prompts, {long[0]!r} the first, have as many tokens as the engine "
                f"takes for prompt and answer, {engine.max_length}: raise max_model_len if the model allows it, or "
                "leave the benchmark out."
            )
        golds = benchmark.golds()
        limits = [min(sampling.max_tokens, engine.max_length - len(ids)) for ids in prompts.values()]
        asked = json.dumps([prompts, limits, [astuple(gold) for gold in golds.values()]])
        digest = hashlib.sha256(asked.encode()).hexdigest()[:16]
        stores[name] = store = SampleStore(output_dir / name, record | {"problems": digest})
        missing += [
            _Missing(store, problem, number, golds[problem], Request(ids, sample_seed(seed, problem, number)))
            for problem, ids in prompts.items()
            for number in range(benchmark.samples)
            if (problem, number) not in store.samples
        ]
    bar = tqdm(total=len(missing), unit="sample", desc=f"{model} {scheme}", disable=not progress)
    with Grader(grading_processes) as grader, bar:
        _answer(missing, engine, sampling, grader, bar)
    results = {
        each.name: benchmark_result(each.name, each.rows["id"], each.samples, stores[each.name].samples)
        for each in benchmarks
    }
    average = macro_estimate([list(result.per_problem.values()) for result in results.values()])
    failures = Counter(
        sample.failure
        for benchmark in benchmarks
        for sample in stores[benchmark.name].samples.values()
        if sample.failure is not None and sample.sample < benchmark.samples
    )
    rows = {
        each.name: hashlib.sha256(json.dumps(each.rows.to_list()).encode()).hexdigest()[:16] for each in benchmarks
    }
    evaluation = Evaluation(model, scheme, record | {"problems": rows}, results, average, dict(failures))
    file = output_dir / RESULTS_FILE
    if file.is_file() and Evaluation.load(file).results.keys() - results.keys():
        logger.warning(f"{file} has other benchmarks and is kept as {set_aside([file])[file].name}.")
    evaluation.save(file)
    return evaluation


class _Missing(NamedTuple):
    """A sample that is still to be drawn, and where it goes."""

    store: SampleStore
    problem: str
    number: int
    gold: Gold
    request: Request


def _answer(missing: Sequence[_Missing], engine: Engine, sampling: Sampling, grader: Grader, bar: tqdm) -> None:
    """Sample, grade and store what is missing; also what an engine sampled before it failed."""
    finished: list[tuple[_Missing, Completion]] = []
    try:
        for position, completion in engine.sample([each.request for each in missing], sampling):
            finished.append((missing[position], completion))
            if len(finished) >= _TOGETHER:
                _store(finished, grader)
            bar.update()
    finally:
        _store(finished, grader)


def _store(finished: list[tuple[_Missing, Completion]], grader: Grader) -> None:
    """Grade and store what has finished, and empty the list."""
    verdicts = grader.grade([completion.text for _, completion in finished], [each.gold for each, _ in finished])
    for (each, completion), verdict in zip(finished, verdicts, strict=True):
        of_answer = verdict.answer, verdict.correct, verdict.failure
        each.store.add(Sample(each.problem, each.number, each.request.seed, *completion, *of_answer))
    finished.clear()


def tokenize_prompts(
    benchmark: Benchmark, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]
) -> dict[str, list[int]]:
    """Return the token ids of the prompts, by the problems' ids."""
    prompts = [make_prompt(problem, tokenizer, benchmark.instruction) for problem in benchmark.rows["problem"]]
    return dict(zip(benchmark.rows["id"], tokenize(prompts, tokenizer, **chat_template_kwargs), strict=True))
