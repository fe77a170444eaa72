"""What counts as correct is docs/grading.md, row by row."""

import ast
import json
import logging
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dc_trl.data.benchmarks import load_benchmark
from dc_trl.grading import GRADING_COLUMNS, Gold, Grader, extract_answer, grade, is_gradable
from dc_trl.grading.rewards import math_reward

from .helpers import ROOT
from .test_benchmarks import FILES
from .test_data import SHARED_DATA, requires_shared_data


def boxed(answer):
    return f"So the answer is $\\boxed{{{answer}}}$."


def documented_cases():
    for line in (ROOT / "docs" / "grading.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        gold, *fields, answer, correct = cells[: next(i for i, cell in enumerate(cells) if cell in ("yes", "no")) + 1]
        options = {
            name: ast.literal_eval(value.replace("\\", "\\\\"))
            for name, _, value in (field.strip("`").partition("=") for field in fields)
        }
        yield pytest.param(gold.strip("`"), options, answer.strip("`"), correct == "yes", id=f"{gold} {answer}")


@pytest.mark.parametrize(("gold", "options", "answer", "correct"), documented_cases())
def test_documented(gold, options, answer, correct):
    assert grade(boxed(answer), Gold(gold, **options)).correct is correct
    assert is_gradable(Gold(gold, **options))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed {46}", "46"),
        (r"\fbox{46}", "46"),
        (r"\boxed{\boxed{46}}", r"\boxed{46}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{40}, or \boxed{46", None),
        (r"\boxed{40}, or \boxe", None),
        (r"\boxed{\boxed{40} + 6", None),
        ("\\boxed{4, no.\n\nSo \\boxed{46}", "46"),
        ("\\boxed{\n\n46\n\n}", "46"),
        (r"} \boxed{46}", "46"),
        (r"\boxed{}", ""),
        ("46", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(text, answer):
    assert extract_answer(text) == answer


PIECES = r"\frac \sqrt \binom \log \cup \pm \text{a} \infty \boxed{ \\ \{ 1/0 < = + - * / ^ _ ! & { } ( ) [ % $ 1 x"


@settings(deadline=None, max_examples=50)
@given(st.one_of(st.text(max_size=20), st.lists(st.sampled_from(PIECES.split()), max_size=8).map("".join)))
def test_no_gold_raises(text):
    assert (grade(boxed("?"), Gold(text)).correct is None) is not is_gradable(text)


@pytest.mark.parametrize("gold", ["", "none", "the value of pi", r"\frac{1}{", "1" * 5000, "4\x006", "5}"])
def test_without_a_gradable_gold_there_is_no_verdict(gold):
    assert grade(boxed(1), Gold(gold)).correct is None
    assert not is_gradable(gold)


def test_equal_numbers_vote_together_and_so_do_correct_answers():
    for answers in (
        ["1/2", "0.5", r"\frac12", r"x = \frac{1}{2}", r"\frac{1}{2}\text{ cm}"],
        ["1000", "1,000", r"10^{3}"],
    ):
        assert len({grade(boxed(answer), Gold(r"\sqrt{7}")).answer for answer in answers}) == 1
    answers = [r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", r"\sqrt{2}/2", "0.5"]
    assert len({grade(boxed(answer), Gold(r"\frac{\sqrt{2}}{2}")).answer for answer in answers}) == 2


@given(
    st.decimals(1, 9, places=2),
    st.integers(-300, 300),
    st.floats(0.97, 1.03),
    st.sampled_from([0.0, 1e-4, 0.01]),
)
def test_scientific_notation_within_a_relative_tolerance(mantissa, exponent, factor, tolerance):
    gold = Fraction(mantissa) * Fraction(10) ** exponent
    written = f"{float(mantissa) * factor:.6f}"
    answer = Fraction(written) * Fraction(10) ** exponent
    expected = abs(answer - gold) <= Fraction(tolerance) * abs(gold)
    text = boxed(f"{written} \\times 10^{{{exponent}}}")
    assert grade(text, Gold(f"{mantissa}e{exponent}", relative_tolerance=tolerance)).correct is expected


# Facts from the tests that `source` names: gold, answer, and whether they are equal. Where we grade otherwise, as gold
# and answer and the other way round (`graded`), docs/grading.md has the reason (`why`).
PAIRS = [json.loads(line) for line in (ROOT / "tests" / "grading_pairs.jsonl").read_text("utf-8").splitlines()]


def test_pairs_of_other_graders():
    ones, others = ([pair[side] for pair in PAIRS] for side in ("gold", "answer"))
    with Grader(1, time_limit=60.0) as grader:
        verdicts = grader.grade(list(map(boxed, others + ones)), list(map(Gold, ones + others)))
    graded = zip(verdicts[: len(PAIRS)], verdicts[len(PAIRS) :], strict=True)
    wrong = [
        pair
        for pair, both in zip(PAIRS, graded, strict=True)
        if [*map(bool, both)] != pair.get("graded", [pair["equal"]] * 2)
    ]
    assert not wrong


# SymPy has no such limits, and says so with an exception once it computes.
RAISES = r"\int 3\frac{1}{2}"


def test_an_exception_in_grading_is_counted_and_shown(caplog):
    assert is_gradable(RAISES)
    with Grader(processes=1) as grader, caplog.at_level(logging.WARNING, "dc_trl.grading"):
        graded = grader.grade([boxed("3"), boxed("4"), boxed("4")], [Gold(RAISES), Gold(RAISES), Gold("4")])
    assert [verdict.correct for verdict in graded] == [False, False, True]
    assert grader.failures == {"error": 2}
    (record,) = caplog.records  # the first alone
    assert "ValueError: Invalid limits" in record.getMessage()


def test_the_trainer_hears_how_often_grading_failed():
    metrics = []
    math_reward([boxed("3"), boxed("4")], [RAISES, "4"], log_metric=lambda name, value: metrics.append((name, value)))
    math_reward([boxed("3"), boxed("4")], ["3", "4"], log_metric=lambda name, value: metrics.append((name, value)))
    assert metrics == [("grading/failures", 1.0), ("grading/failures", 0.0)]


def golds_and_solutions(benchmark):
    rows = load_benchmark(benchmark, str(SHARED_DATA / FILES[benchmark]))
    for row, line in zip(rows, (SHARED_DATA / FILES[benchmark]).read_text("utf-8").splitlines(), strict=True):
        gold = Gold(row["answer"], **{name: row[name] for name in GRADING_COLUMNS})
        yield (
            row["id"],
            gold,
            (benchmark in ("math500", "minerva") and json.loads(line)["solution"]) or boxed(gold.answer),
        )


def perturbed(answer):
    """The answer with its first digit from 1 to 9 changed, with more added, and with a sign changed."""
    if digit := re.search("[1-9]", answer):
        yield answer[: digit.start()] + str(int(digit[0]) % 9 + 1) + answer[digit.end() :]
    yield f"{answer}+1"
    yield f"2{answer}"


@pytest.mark.long
@requires_shared_data
@pytest.mark.parametrize("benchmark", FILES)
def test_golds_grade_their_own_solution_as_correct_and_a_perturbed_one_as_wrong(benchmark):
    failed = []
    for identity, gold, solution in golds_and_solutions(benchmark):
        verdicts = [grade(boxed(other), gold).correct for other in perturbed(gold.answer)]
        if grade(solution, gold).correct is not True or any(verdict is not False for verdict in verdicts):
            failed.append(identity)
    assert failed == []
