"""What counts as correct is in docs/rewards.md, with more examples in grading_rules.md, row by row."""

import ast
import logging
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dc_trl.data.sources import MINERVA_RELATIVE_TOLERANCE
from dc_trl.grading import Gold, Grader, extract_answer, grade, is_gradable
from dc_trl.grading.rewards import math_reward

from .helpers import ROOT, read_rows, refuses


DATA = ROOT.parent / "shared" / "data"


def boxed(answer):
    return f"So the answer is $\\boxed{{{answer}}}$."


def documented_cases():
    section = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8").partition("## What counts as correct\n")[2]
    rules = (ROOT / "tests" / "grading_rules.md").read_text(encoding="utf-8")
    for line in (section + rules).splitlines():
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
        (r"\boxed 7", "7"),
        (r"\boxed{3}, no: $\boxed-7.5$.", "-7.5"),
        (r"\boxed{3}, and \boxed 7/3", "3"),
        ("46", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(text, answer):
    assert extract_answer(text) == answer


PIECES = [r"\frac", r"\sqrt", r"\binom", r"\log", r"\cup", r"\pm", r"\text{a}", r"\infty", r"\boxed{", r"\\", r"\{"]
PIECES += ["1/0", *"<>=+-*/^_!,;&{}()[]|%$~. 12xi\x00"]


@settings(deadline=None, max_examples=50)
@given(st.one_of(st.text(max_size=20), st.lists(st.sampled_from(PIECES), max_size=8).map("".join)))
def test_no_text_raises(text):
    gold = Gold(text)
    assert (grade(boxed(text), gold).correct is None) is not is_gradable(gold)
    assert grade(text, Gold(r"\sqrt{3}")).correct in (True, False)


def test_gamma_without_an_argument_is_a_symbol():
    """It is the function whose pole is at -1 to latex2sympy, and all golds with `\\gamma^2-1` were equal."""
    assert is_gradable(r"\gamma^{2}-1")
    assert grade(boxed(r"(\gamma-1)(\gamma+1)"), Gold(r"\gamma^{2}-1"))
    assert not grade(boxed(r"\gamma^{3}-1"), Gold(r"\gamma^{2}-1"))


UNGRADABLE = ["", "???", "none", "n/a", "the value of pi", "to infinity and beyond"]
UNGRADABLE += [r"\frac{1}{", "1" * 5000, "4\x006", "5}"]


@pytest.mark.parametrize("gold", UNGRADABLE)
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


@pytest.mark.parametrize(("gold", "wrong"), [("100000000", "10^8"), (r"5.4\text{ cents}", r"5.4\text{ dollars}")])
def test_a_wrong_answer_of_the_golds_value_votes_for_itself(gold, wrong):
    verdicts = [grade(boxed(answer), Gold(gold)) for answer in (wrong, gold)]
    assert [verdict.correct for verdict in verdicts] == [False, True]
    assert verdicts[0].answer != verdicts[1].answer


def test_two_percentages_differ_by_points():
    assert grade(boxed(r"51\%"), Gold(r"50\%", absolute_tolerance=2))
    assert not grade(boxed(r"99\%"), Gold(r"50\%", absolute_tolerance=2))


@given(st.fractions(max_denominator=999), st.fractions(max_denominator=999))
def test_fractions_are_compared_as_numbers(gold, answer):
    def latex(value):
        sign = "-" if value < 0 else ""
        parts = f"\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
        return str(value) if value.denominator == 1 else sign + parts

    assert grade(boxed(latex(answer)), Gold(str(gold))).correct is (gold == answer)
    assert grade(boxed(latex(answer)), Gold(latex(gold)))[:2] == (gold == answer, str(answer))


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_operations_between_numbers_are_never_an_answer(left, right):
    for value, spelled in ((left + right, f"{left}+{right}"), (left * right, f"{left} \\cdot {right}")):
        assert not grade(boxed(spelled), Gold(str(value))).correct
        assert grade(boxed(f"{value:,}"), Gold(str(value))).correct


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


@pytest.mark.parametrize("field", ["relative_tolerance", "absolute_tolerance"])
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_a_tolerance_is_a_finite_number_of_at_least_0(field, value):
    with refuses(ValueError, f"{field}={value}", "at least 0"):
        Gold("1", **{field: value})


# Facts from the tests that `source` names: gold, answer, and whether they are equal. Where we grade otherwise, as gold
# and answer and the other way round (`graded`), docs/rewards.md or grading_rules.md has the reason (`why`).
PAIRS = read_rows(ROOT / "tests" / "grading_pairs.jsonl")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['gold']} {pair['answer']}")
def test_pairs_of_other_graders(pair):
    one, other = pair["gold"], pair["answer"]
    verdicts = [bool(grade(boxed(other), Gold(one))), bool(grade(boxed(one), Gold(other)))]
    assert verdicts == pair.get("graded", [pair["equal"]] * 2)


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


def rows(name):
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"the real rows are not here: {name}.jsonl in {DATA.parent.name}/{DATA.name}")
    return read_rows(path)


def minerva():
    for row in rows("minerva_math"):
        gold = Gold(extract_answer(row["solution"]), relative_tolerance=MINERVA_RELATIVE_TOLERANCE)
        yield str(row["idx"]), gold, row["solution"]


def math500():
    for row in rows("math500"):
        yield row["unique_id"], Gold(row["answer"]), row["solution"]


def olympiadbench():
    for row in rows("olympiadbench_sample40"):
        gold = Gold(
            row["final_answer"][0],
            multiple_answers=row["is_multiple_answer"],
            unit=row["unit"],
            absolute_tolerance=float(row["error"] or 0),
        )
        yield str(row["id"]), gold, boxed(gold.answer)


def plain(name):
    for index, row in enumerate(rows(name)):
        answer = str(row["answer"]).rsplit("####", 1)[-1].strip()
        yield str(row.get("id", index)), Gold(answer), boxed(answer)


def dapo():
    for row in rows("dapo_math_17k")[::20]:
        answer = row["reward_model"]["ground_truth"]
        yield str(row["extra_info"]["index"]), Gold(answer), boxed(answer)


BENCHMARKS = {
    "minerva_math": minerva,
    "math500": math500,
    "olympiadbench_sample40": olympiadbench,
    "aime24": lambda: plain("aime24"),
    "amc23": lambda: plain("amc23"),
    "gsm8k_test": lambda: plain("gsm8k_test"),
    "dapo_math_17k": dapo,
}


def perturbed(answer):
    """The answer with its first digit from 1 to 9 changed, with more added, and with a sign changed."""
    if digit := re.search("[1-9]", answer):
        yield answer[: digit.start()] + str(int(digit[0]) % 9 + 1) + answer[digit.end() :]
    yield f"{answer}+1"
    yield f"2{answer}"


@pytest.mark.long
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_golds_grade_their_own_solution_as_correct_and_a_perturbed_one_as_wrong(benchmark):
    failed = []
    for identity, gold, solution in BENCHMARKS[benchmark]():
        answer = extract_answer(solution)
        verdicts = [grade(boxed(other), gold).correct for other in perturbed(answer)]
        if grade(solution, gold).correct is not True or any(verdict is not False for verdict in verdicts):
            failed.append(identity)
    assert failed == []
