"""What counts as correct is docs/grading.md, row by row."""

import ast
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dc_trl.data.benchmarks import MINERVA_RELATIVE_TOLERANCE
from dc_trl.grading import Gold, extract_answer, grade, is_gradable


ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"


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


# Mathematics that SymPy does not survive, or has no value for.
MONSTERS = [
    *r"""
    2024^{4046} | \frac{1}{2004!} | 2024^{4046}x | (2024^{4046}, 1) | x > 2024^{4046} | 2024.5^{4046}
    \mathbb{R} \setminus \{2024^{4046}\} | x > 2^{5000} \text{ and } x < 3^{5000} | (10^{100})^{100} | 9^{9^{9}}
    (10000!)! | 1.0000001^{10^{12}} | x^{9^{9}} | (x+y)^{10^{6}} | \binom{10^{10}}{5\cdot 10^{9}} | ((5!)!)!
    \frac{0}{0} | 1/0 | \frac{1}{0}y | \infty-\infty | \ln 0 | 1 \bmod 0 | (-1)! | nan | zoo | -\infty | None
    \frac{d}{dx}x | \int x | \int 3\frac{1}{2} | \sum_{k=1}^{\infty} k | \lim_{x\to 0} \frac{1}{x} | \sqrt[0]{2}
    \begin{pmatrix}1&2\\3\end{pmatrix} | \begin{pmatrix}\end{pmatrix} | \emptyset | [1,2)\cup\{3\} | x=y=z
    \mathbb{R}\setminus\{1/0\} | x \in x \in x | == | \pm\pm | 1e400 | 1e999999999 | 1/3/7 | x^x^x^x | x_x_x | 5} | {5
    5\ | \boxed{3 | 𝟒 | ٣ | x²³ | ½^½ | √√2 | x**y**z | **5** | 2**-x | 12:00 | %5
    """.replace("\n", " | ").split(" | "),
    *("1" * 401, "1" * 400 + "^{999999999}", "xy" * 50, "-" * 500 + "5", "5" + "!" * 500, r"\sqrt" * 150 + "2"),
    *("{" * 24 + "1" + "}" * 24, "(" * 400, r"\frac{1}{" * 11 + "1" + "}" * 11, "4\x006", "46\ud800"),
]


@pytest.mark.parametrize("text", MONSTERS, ids=range(len(MONSTERS)))
def test_no_text_raises_and_every_gold_accepts_its_own(text):
    gold = Gold(text)
    assert grade(boxed(text), gold).correct is (True if is_gradable(gold) else None)
    for answer in ("5", r"\sqrt{3}", "x+1", r"\frac{0}{0}", "2024^{4046}"):
        assert (grade(boxed(answer), gold).correct is None) is not is_gradable(gold)
        assert (grade(boxed(text), Gold(answer)).correct is None) is (answer == r"\frac{0}{0}")


PIECES = [
    *(r"\frac", r"\sqrt", r"\binom", r"\log", r"\cup", r"\pm", r"\text{a}", r"\infty", r"\boxed{", r"\\", r"\{", "**"),
    *("½", "nan", "inf", "pi", "and", "1/0", "n!", "1e5", *"<>=+-*/^_!,;&{}()[]|%$~. 12xi\x00"),
]


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.text(max_size=20), st.lists(st.sampled_from(PIECES), max_size=10).map("".join)))
def test_no_text_raises(text):
    gold = Gold(text)
    assert grade(boxed(text), gold).correct is (True if is_gradable(gold) else None)
    assert grade(text, Gold(r"\sqrt{3}")).correct in (True, False)


def test_a_number_of_thousands_of_digits_is_compared_by_its_value():
    assert grade(boxed("(2024)^{4046}"), Gold("2024^{4046}"))
    assert not grade(boxed("2024^{4045}"), Gold("2024^{4046}"))
    assert not grade(boxed(r"\frac{1}{2005!}"), Gold(r"\frac{1}{2004!}"))


def test_gamma_without_an_argument_is_a_symbol():
    """It is the function whose pole is at -1 to latex2sympy, and all golds with `\\gamma^2-1` were equal."""
    assert is_gradable(r"\gamma^{2}-1")
    assert grade(boxed(r"(\gamma-1)(\gamma+1)"), Gold(r"\gamma^{2}-1"))
    assert not grade(boxed(r"\gamma^{3}-1"), Gold(r"\gamma^{2}-1"))


@pytest.mark.parametrize(
    "gold",
    [
        *("", "???", "none", "n/a", "the value of pi", "to infinity and beyond", r"\frac{1}{", "1" * 5000, "4\x006"),
        *("1/0", r"\frac{0}{0}", "1 \\bmod 0", "(1, 0/0)", "x = 1/0", "5}"),  # have no value
    ],
)
def test_without_a_gradable_gold_there_is_no_verdict(gold):
    assert grade(boxed(1), Gold(gold)).correct is None
    assert not is_gradable(gold)


@pytest.mark.parametrize(
    "answers",
    [
        ["1/2", "0.5", r"\frac12", r"\dfrac{1}{2}", r"x = \frac{1}{2}", r"\frac{1}{2}\text{ cm}"],
        ["1000", "1,000", r"1{,}000", "1e3", r"10^{3}", r"\$1000"],
        [r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", r"\sqrt{2}/2", r"\frac{\sqrt2}2"],
        ["1, 2", "2,1", r"\{2,1\}", r"1 \text{ or } 2", "x=2, x=1"],
        [r"(\frac12, 3]", "(0.5,3]"],
        [r"\text{(C)}", "C", "(C)", r"\textbf{C}"],
    ],
)
@pytest.mark.parametrize("gold", [r"\sqrt{7}", r"(\sqrt{7}, 1)"])
def test_equal_answers_vote_together(answers, gold):
    votes = {grade(boxed(answer), Gold(gold)).answer for answer in answers}
    assert len(votes) == 1
    assert votes != {grade(boxed("99"), Gold(gold)).answer}


@given(st.fractions(max_denominator=999), st.fractions(max_denominator=999))
def test_fractions_are_compared_as_numbers(gold, answer):
    def latex(value):
        sign = "-" if value < 0 else ""
        parts = f"\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
        return str(value) if value.denominator == 1 else sign + parts

    assert grade(boxed(latex(answer)), Gold(str(gold))).correct is (gold == answer)
    assert grade(boxed(latex(answer)), Gold(latex(gold))) == (gold == answer, str(answer))


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
    with pytest.raises(ValueError, match=f"{field}={value} is no tolerance: use"):
        Gold("1", **{field: value})


def rows(name):
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"the real rows are not here: {name}.jsonl in {DATA.parent.name}/{DATA.name}")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


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
