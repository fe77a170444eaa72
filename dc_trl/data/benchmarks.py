"""The math benchmarks, each from the Hub or from a local file, in one schema."""

import re

from datasets import Dataset

from ..grading import extract_answer, gold_answer
from ..grading.text import split
from ..settings.paths import require_data_file
from ..settings.ranges import require_choice
from .arithmetic import arithmetic_problems
from .sources import MathProblem, Row, Source, field_of, to_dataset


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
    "aime24": Source("math-ai/aime24", None, "test", "83a7f387baaa524a8bda0022eac0541582297103", _aime, samples=32),
    "aime25": Source("math-ai/aime25", None, "test", "563bb8404243c5f09de6ec262f2db674fe5bce9b", _aime, samples=32),
    "amc23": Source("math-ai/amc23", None, "test", "80815d37005feb82cd7f8fbc6901d5d3eff43057", _amc, samples=32),
    "math500": Source(
        "HuggingFaceH4/MATH-500", None, "test", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", _math500, samples=4
    ),
    "minerva": Source(
        "math-ai/minervamath", None, "test", "ee46ddc498933b1977577953250ca5c66be64f96", _minerva, samples=4
    ),
    "olympiadbench": Source(
        "Hothan/OlympiadBench",
        "OE_TO_maths_en_COMP",
        "train",  # the only one there; it is the benchmark
        "91184b52131e7fc9455fef848035173aea8cc01a",
        _olympiadbench,
        samples=4,
    ),
    "gsm8k": Source("openai/gsm8k", "main", "test", "740312add88f781978c0658806c59bc2815b9866", _gsm8k),
    # Held-out problems of dc_trl.data.arithmetic; the tiny model was taught on the bare question.
    "arithmetic": Source("", None, "held_out", "", lambda row: MathProblem(**row), instruction=None),
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
    require_choice("benchmark", name, BENCHMARKS)
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
    require_choice("benchmark", name, BENCHMARKS)
    if file:
        require_data_file(file, "benchmarks")
    return name, file or None
