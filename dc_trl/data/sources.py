"""The math benchmarks and DAPO-Math-17K, each from the Hub or from a local file, in one schema."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from datasets import Dataset, Features, Value

from ..grading import GRADING_COLUMNS, extract_answer, gold_answer
from ..grading.text import split
from ..settings.fields import require_choice
from ..settings.paths import require_data_file
from .arithmetic import arithmetic_problems
from .prompts import BOXED_INSTRUCTION, load_rows, nested, text_of_prompt


Row = Mapping[str, Any]

FEATURES = Features(
    {
        "id": Value("string"),  # unique: the source, a slash, and the row's number
        "problem": Value("string"),
        "answer": Value("string"),
        "multiple_answers": Value("bool"),  # the answer holds several, separated by commas
        "unit": Value("string"),  # of the answer; null where it has none
        "relative_tolerance": Value("float64"),  # 0.0: exact
        "absolute_tolerance": Value("float64"),  # 0.0: exact
    }
)


class MathProblem(NamedTuple):
    """A row before it has a place in a data set; fields as in `FEATURES`."""

    problem: str
    answer: str
    multiple_answers: bool = False
    unit: str | None = None
    relative_tolerance: float = 0.0
    absolute_tolerance: float = 0.0


def to_dataset(source: str, problems: Iterable[MathProblem]) -> Dataset:
    """Make a data set with the columns of `FEATURES`; the rows are numbered."""
    rows = [{"id": f"{source}/{number}", **problem._asdict()} for number, problem in enumerate(problems)]
    return Dataset.from_list(rows, features=FEATURES)


class Source(NamedTuple):
    """A data set on the Hub."""

    hub_id: str  # "" for problems that are made on the spot
    split: str
    revision: str  # commit, in full, so that the rows never change under a result
    convert: Callable[[Row], MathProblem]  # knows the field names of the Hub and of the usual local files
    config: str | None = None  # None for the only one
    samples: int = 1  # k of avg@k, the answers drawn per problem, at least 1
    instruction: str | None = BOXED_INSTRUCTION  # what a prompt says after the problem; None: nothing

    def __str__(self) -> str:
        return f"{self.hub_id}@{self.revision}" if self.hub_id else "made on the spot"

    def problems(self, file: str | None = None) -> list[MathProblem]:
        """Load the problems from the Hub, or from a local file with the Hub's fields, in their order.

        Raises:
            ValueError: the rows cannot be loaded, or a field is missing.
        """
        hub = (self.hub_id, self.config, self.split, self.revision)
        return [self.convert(row) for row in (load_rows(file, field="file") if file else load_rows(*hub))]


def field_of(row: Row, *names: str) -> Any:
    """Return the value of the first of these fields that the row has and that is not null.

    Raises:
        ValueError: it has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"a row holds none of the fields {', '.join(map(repr, names))}: it has {', '.join(row)}.")


# --- benchmarks


# Qwen2.5-Math's grader (evaluation/grader.py: isclose(…, rel_tol=1e-4)), with which most published figures were made.
# Minerva's own (arXiv 2206.14858, as in llemma's harness) compares with numpy.isclose, that is 1e-5, and uses its
# threshold of 1 % only beside zero.
MINERVA_RELATIVE_TOLERANCE = 1e-4

# A gold answer without variables: "1.6", "8.7e8", r"\frac{\pi}{2}".
_NUMBER = re.compile(
    r"(?=.*\d)(?:[-+*/^(){}.,\d\s]|e(?=[-+^\d])|\\(?:frac|sqrt|pi|times|cdot|arcsin|ln)(?![a-z]))+", re.DOTALL
)


def _problem(row: Row) -> str:
    return field_of(row, "problem", "question")


def _answer_or_box(row: Row) -> str:
    """Return the field `answer`, or what the last box of the solution holds; "" where there is none."""
    return gold_answer(row.get("answer")) or extract_answer(field_of(row, "solution")) or ""


def _aime(row: Row) -> MathProblem:
    # The Hub's 2024 rows hold the answer in the solution's box. The contest writes three digits, models both.
    answer = _answer_or_box(row)
    return MathProblem(_problem(row), answer.zfill(3) if answer.isdecimal() else answer)


def _amc(row: Row) -> MathProblem:
    answer = gold_answer(field_of(row, "answer")) or ""  # 27.0 there
    return MathProblem(field_of(row, "question", "problem"), answer)


def _math500(row: Row) -> MathProblem:
    answer = gold_answer(field_of(row, "answer")) or ""
    return MathProblem(_problem(row), answer, holds_several(answer))


def _minerva(row: Row) -> MathProblem:
    # Three golds are Python: np.arcsin(10/13), -1./3, -3./2.
    answer = re.sub(r"(?<=\d)\.(?=/)", "", _answer_or_box(row).replace("np.", "\\"))
    return MathProblem(
        problem=_problem(row),
        answer=answer,
        multiple_answers=holds_several(answer),
        relative_tolerance=MINERVA_RELATIVE_TOLERANCE if _NUMBER.fullmatch(answer) else 0.0,
    )


def _olympiadbench(row: Row) -> MathProblem:
    answers = field_of(row, "final_answer")
    if not isinstance(answers, list):  # one answer alone, as a file with columns has it
        answers = [gold_answer(answers) or ""]
    context, question = row.get("context"), field_of(row, "question")
    # One tolerance for each of several answers: the schema has one, and the widest refuses none of them.
    tolerances = [float(tolerance) for tolerance in str(row.get("error") or 0).split(",")]
    return MathProblem(
        problem=f"{context}\n\n{question}" if context else question,
        answer=", ".join(answers).replace("$", "").strip(),
        multiple_answers=bool(row.get("is_multiple_answer")) or len(answers) > 1,
        unit=row.get("unit") or None,
        absolute_tolerance=max(tolerances),
    )


def _gsm8k(row: Row) -> MathProblem:
    # The answer is what follows ####, where 1,234 is one number.
    return MathProblem(field_of(row, "question"), (gold_answer(field_of(row, "answer")) or "").replace(",", ""))


def holds_several(answer: str) -> bool:
    """Return whether an answer is a list: it has a comma outside all brackets, and between no thousands (`58,500`)."""
    return len(split(re.sub(r"(?<=\d),(?:\\!\s*)?(?=\d{3}(?!\d))", "", answer), ",")) > 1


# Every revision was read in several public repositories that pin the same commit; none was checked on the Hub itself.
BENCHMARKS: dict[str, Source] = {
    "aime24": Source("math-ai/aime24", "test", "83a7f387baaa524a8bda0022eac0541582297103", _aime, samples=32),
    "aime25": Source("math-ai/aime25", "test", "563bb8404243c5f09de6ec262f2db674fe5bce9b", _aime, samples=32),
    "amc23": Source("math-ai/amc23", "test", "80815d37005feb82cd7f8fbc6901d5d3eff43057", _amc, samples=32),
    "math500": Source(
        "HuggingFaceH4/MATH-500", "test", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", _math500, samples=4
    ),
    "minerva": Source("math-ai/minervamath", "test", "ee46ddc498933b1977577953250ca5c66be64f96", _minerva, samples=4),
    "olympiadbench": Source(
        "Hothan/OlympiadBench",
        "train",  # the only one there; it is the benchmark
        "91184b52131e7fc9455fef848035173aea8cc01a",
        _olympiadbench,
        config="OE_TO_maths_en_COMP",
        samples=4,
    ),
    "gsm8k": Source("openai/gsm8k", "test", "740312add88f781978c0658806c59bc2815b9866", _gsm8k, config="main"),
    # Held-out problems of dc_trl.data.arithmetic; the tiny model was taught on the bare question.
    "arithmetic": Source("", "held_out", "", lambda row: MathProblem(**row), instruction=None),
}

# Training problems are cleaned of these.
PUBLISHED = tuple(name for name, source in BENCHMARKS.items() if source.hub_id)


def load_benchmark(name: str, file: str | None = None) -> Dataset:
    """Load a benchmark with the columns of `dc_trl.data.sources.FEATURES`, in its own order.

    Args:
        name: key of `BENCHMARKS`.
        file: local JSON, JSONL, Parquet or CSV file in place of the Hub; the Hub's field names, or Qwen2.5-Math's.

    Raises:
        ValueError: no such benchmark or file, a field is missing, or a problem has no gold answer.
    """
    _require_benchmark(name, file)
    if not BENCHMARKS[name].hub_id:
        problems = [MathProblem(each.question, each.answer) for each in arithmetic_problems(1024, 0, "held_out")]
    else:
        try:
            problems = BENCHMARKS[name].problems(file)
        except ValueError as error:
            raise ValueError(f"benchmark {name!r}: {error}") from error
    benchmark = to_dataset(name, problems)
    for row in benchmark:
        if not row["problem"].strip() or not row["answer"]:
            raise ValueError(f"benchmark {name!r}: {row['id']} has no problem or no gold answer: check the fields.")
    return benchmark


def parse_benchmark(word: str) -> tuple[str, str | None]:
    """Return the name of a benchmark and its local file, None for the Hub, from `NAME` or `NAME=FILE`."""
    name, _, file = word.partition("=")
    _require_benchmark(name, file)
    if file:
        require_data_file(file, "benchmarks")
    return name, file or None


def _require_benchmark(name: str, file: str | None) -> None:
    require_choice("benchmark", name, BENCHMARKS)
    if file and not BENCHMARKS[name].hub_id:
        raise ValueError(f"benchmarks='{name}={file}': its problems are made on the spot; leave '={file}' out.")


# --- training problems


# What the Hub's rows put around a problem. It asks for another form of answer than our prompts do.
_TEMPLATE = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of the form "
    r"Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s+"
    r'(?P<problem>.*?)\s+Remember to put your answer on its own line after "Answer:"\.?\s*',
    re.DOTALL,
)


def remove_template(prompt: str) -> str:
    """Return the problem without the instructions that the Hub's rows put before and after it."""
    match = _TEMPLATE.fullmatch(prompt)
    return match["problem"] if match else prompt


def _dapo(row: Row) -> MathProblem:
    return MathProblem(
        problem=remove_template(text_of_prompt(field_of(row, "prompt", "problem"))),
        # A row without a gold answer is for cleaning to leave out, and to count.
        answer=gold_answer((row.get("reward_model") or row).get("ground_truth", row.get("answer"))) or "",
    )


# The revision was read in several public repositories that pin it; it was not checked on the Hub itself.
DAPO = Source("BytedTsinghua-SIA/DAPO-Math-17k", "train", "65877096c24ffa7abc4e4fa5edb95cf3413a5674", _dapo)


def load_dapo(file: str | None = None, prompt_column: str | None = None, answer_column: str | None = None) -> Dataset:
    """Load DAPO-Math-17K with the columns of `dc_trl.data.sources.FEATURES`, uncleaned, in its own order.

    The Hub's file holds each row about 100 times: of equal rows one is taken.

    Args:
        file: local JSON, JSONL, Parquet or CSV file in place of the Hub.
        prompt_column: text or chat messages, where the rows are not DAPO's. Those of `GRADING_COLUMNS` are read too. A
            dot reads nested fields. `prompt` if only the other column is given.
        answer_column: number, or text with the gold answer, of which only what follows `####` counts. `answer` if only
            the other column is given.

    Raises:
        ValueError: the file cannot be loaded, or a field is missing.
    """

    def of_columns(row: Row) -> MathProblem:
        return MathProblem(
            problem=remove_template(text_of_prompt(nested(row, prompt_column or "prompt", "prompt_column"))),
            answer=gold_answer(nested(row, answer_column or "answer", "answer_column")) or "",
            **{column: row[column] for column in GRADING_COLUMNS if row.get(column) is not None},
        )

    source = DAPO._replace(convert=of_columns) if prompt_column or answer_column else DAPO
    return to_dataset("dapo", dict.fromkeys(source.problems(file)))
