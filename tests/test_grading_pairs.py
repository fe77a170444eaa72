"""Pairs from the tests of other graders, and what rules that keep or change a value make of answers, both orders."""

import json
import logging
import re
from fractions import Fraction
from math import gcd

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dc_trl.grading import Gold, Grader, extract_answer, grade, is_gradable
from dc_trl.grading.rewards import math_reward

from .test_grading import BENCHMARKS, ROOT, boxed


# Facts from the tests that `source` names: gold, answer, and whether they are equal. Where we grade otherwise, as gold
# and answer and the other way round (`graded`), docs/grading.md has the reason (`why`).
PAIRS = [json.loads(line) for line in (ROOT / "tests" / "grading_pairs.jsonl").read_text("utf-8").splitlines()]


def verdicts(one, other, **fields):
    """Of the second for the first as gold, and of the first for the second."""
    return [bool(grade(boxed(other), Gold(one, **fields))), bool(grade(boxed(one), Gold(other, **fields)))]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['gold']} {pair['answer']}")
def test_pairs_of_other_graders(pair):
    assert verdicts(pair["gold"], pair["answer"]) == pair.get("graded", [pair["equal"]] * 2)


# --- Rules over the golds of the real data


def respelled(answer):
    """The answer in spellings that leave its value alone."""
    yield f" ${answer}$ "
    yield f"\\displaystyle {answer}."
    yield f"{{{answer}}}"
    yield answer.replace("\\frac", "\\dfrac")
    yield re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2", answer)
    yield re.sub(r"\\sqrt\{(\w)\}", r"\\sqrt\1", answer)
    yield answer.replace("\\left", "").replace("\\right", "")
    yield answer.replace("(", "\\left(").replace(")", "\\right)") if "\\left" not in answer else answer
    yield re.sub(r"\\le(q?)(?![a-z])", r"\\leqslant", answer)
    yield answer.replace("\\infty", "∞").replace("\\pi", "π").replace("\\cup", "∪")
    if not re.search(r"[=<>,;:]|\\(?:in|le|ge|cup|pm|text|begin)(?![a-z])|[^\\]or |and ", answer):
        yield f"Q = {answer}"
        yield f"{answer} = Q" if re.match(r"-?\d|\\frac|\\sqrt", answer) else answer
        yield f"Q_{{0}} \\approx {answer}"


def spoiled(answer):
    """The answer with its value changed, or with words that make it no answer."""
    yield f"{answer}+1"
    yield f"{answer}\\text{{ is wrong}}"
    yield f"{answer}\\text{{ and a half}}"
    yield f"{answer} and more"
    yield f"{answer}, 7919"
    if re.search(r"^-?\d", answer):
        yield f"7{answer}" if answer[0] != "-" else answer[1:]
    if re.fullmatch(r"\\left\(.*\\right\)|\([^()]*,[^()]*\)", answer):
        yield answer.replace("(", "[", 1)


@pytest.mark.long
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_golds_in_other_spellings(benchmark):
    wrong = []
    for number, (identity, gold, solution) in enumerate(BENCHMARKS[benchmark]()):
        answer = extract_answer(solution).strip()
        is_integer = re.fullmatch(r"-?\d+", answer)
        if not re.search(r"[\d\\]", answer) or (number % 4 and (is_integer or benchmark == "minerva_math")):
            continue  # words; a quarter does of integers, and of what takes long
        for expected, others in ((True, respelled(answer)), (False, spoiled(answer))):
            wrong += [(identity, expected, other) for other in others if bool(grade(boxed(other), gold)) != expected]
    assert wrong == []


# --- Rules over generated answers


@st.composite
def scalars(draw):
    """Spellings of one value, and one of another value."""
    top, bottom = draw(st.integers(1, 40)), draw(st.integers(2, 20))
    assume(gcd(top, bottom) == 1)
    sign = draw(st.sampled_from(["", "-"]))
    kind = draw(st.sampled_from(["integer", "fraction", "root", "cube root", "pi", "variable", "complex"]))
    if kind == "integer":
        value = draw(st.integers(0, 10**6))
        return [f"{sign}{value}", f"{sign}{value}.0", f"{sign}{value:,}".replace(",", "{,}")], f"{sign}{value + 1}"
    if kind == "fraction":
        spellings = [
            f"{sign}\\frac{{{top}}}{{{bottom}}}",
            f"{sign}{top}/{bottom}",
            f"\\frac{{{sign}{top}}}{{{bottom}}}",
        ]
        if max(top, bottom) < 10:
            spellings.append(f"{sign}\\frac{top}{bottom}")
        return spellings, f"{sign}\\frac{{{top + bottom}}}{{{bottom}}}"
    factor = {
        "root": st.sampled_from([2, 3, 5, 6, 7]).map("\\sqrt{{{}}}".format),
        "cube root": st.sampled_from([2, 3, 5, 7]).map("\\sqrt[3]{{{}}}".format),
        "pi": st.just("\\pi"),
        "variable": st.sampled_from(["x", "t", "\\theta"]),
        "complex": st.just("i"),
    }[kind]
    symbol = draw(factor)
    spellings = [
        f"{sign}\\frac{{{top}{symbol}}}{{{bottom}}}",
        f"{sign}\\frac{{{top}}}{{{bottom}}}{symbol}",
        f"{sign}\\dfrac{{{top} {symbol}}}{{{bottom}}}",
        f"{sign}{top}{symbol}/{bottom}",
        f"{sign}\\frac{{{top}}}{{{bottom}}} \\cdot {symbol}",
    ]
    if kind == "root":
        spellings.append(re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1", spellings[0]))
    return spellings, f"{sign}\\frac{{{top + bottom}{symbol}}}{{{bottom}}}"


@st.composite
def numbers(draw, size):
    """Different integers in rising order; those of three digits are not thousands."""
    return sorted(draw(st.sets(st.integers(-999, 999), min_size=size, max_size=size)))


@settings(deadline=None, max_examples=80)
@given(scalars(), st.data())
def test_one_value_in_several_spellings(scalar, data):
    spellings, other = scalar
    one, another = data.draw(st.sampled_from(spellings)), data.draw(st.sampled_from(spellings))
    assert verdicts(one, another) == [True, True]
    assert verdicts(one, f"Q = {another}") == [True, True]
    assert verdicts(one, f"{another} \\approx 0.123") == [True, True]
    assert verdicts(one, other) == [False, False]
    assert verdicts(one, f"{another}\\text{{ is wrong}}") == [False, False]
    assert verdicts(f"{one}\\text{{ cm}}", f"{another}\\textnormal{{ cm}}") == [True, True]
    assert verdicts(f"{one}\\text{{ cm}}", f"{another}\\text{{ kg}}") == [False, False]


@settings(deadline=None, max_examples=40)
@given(st.lists(scalars(), min_size=2, max_size=3), st.sampled_from(["()", "[]", "(]", "[)"]), st.data())
def test_tuples_part_by_part(parts, brackets, data):
    def written(spellings, comma):
        return f"{brackets[0]}{comma.join(spellings)}{brackets[1]}"

    one = written([data.draw(st.sampled_from(spellings)) for spellings, _ in parts], ",")
    another = written([data.draw(st.sampled_from(spellings)) for spellings, _ in parts], ",\\,")
    assert verdicts(one, another) == [True, True]
    assert verdicts(one, f"(x_1, x_2)={another}") == [True, True]
    assert verdicts(one, written([spellings[0] for spellings, _ in parts[:-1]] + [parts[-1][1]], ", ")) == [False] * 2
    other = another.replace("(", "[", 1) if one[0] == "(" else another.replace("[", "(", 1)
    assert verdicts(one, other) == [False, False]


@settings(deadline=None, max_examples=40)
@given(numbers(2), st.sampled_from(["()", "[]", "(]", "[)"]), st.sampled_from(["x", "f(x)", "\\theta", "x_1"]))
def test_intervals_as_inequalities(ends, brackets, name):
    low, high = ends
    first, last = (" < " if bracket in "()" else " \\le " for bracket in brackets)
    back = {" < ": " > ", " \\le ": " \\geqslant "}
    interval = f"{brackets[0]}{low},{high}{brackets[1]}"
    same = [
        f"{low}{first}{name}{last}{high}",
        f"{high}{back[last]}{name}{back[first]}{low}",
        f"{name} \\in {interval}",
        f"{brackets[0]}{low}, {high}{brackets[1]}",
        f"{name}{back[first]}{low} \\text{{ and }} {name}{last}{high}",
        f"\\{{{name} \\mid {low}{first}{name}{last}{high}\\}}",
    ]
    for spelling in same:
        assert verdicts(interval, spelling) == [True, True], spelling
        assert verdicts(same[0], spelling) == [True, True], spelling
    changed = [f"{low}{first}{name}{last}{high + 1}", f"{low}{first}{name}", f"{low}{high}", f"\\{{{low},{high}\\}}"]
    swapped = {" < ": " \\le ", " \\le ": " < "}
    changed += [f"{low}{swapped[first]}{name}{last}{high}", f"{low}{first}{name}{last}{high}, 5000"]
    for spelling in changed:
        assert verdicts(interval, spelling) == [False, False], spelling


@settings(deadline=None, max_examples=40)
@given(numbers(4), st.randoms(use_true_random=False))
def test_lists_sets_unions_and_matrices(values, random):
    a, b, c, d = values
    shuffled = [str(value) for value in random.sample(values, 4)]
    comma, spaced = ",".join(shuffled), ", ".join(shuffled)
    texts = [f"\\{{{a},{b},{c},{d}\\}}", f"\\{{{spaced}\\}}", f"\\{{{comma}\\}}", spaced]
    texts += [f"x={a}, x={b}, x={c} \\text{{ or }} x={d}", f"\\{{{a},{b}\\}} \\cup \\{{{d},{c}\\}}"]
    for text in texts:
        assert verdicts(texts[0], text) == [True, True], text
    for text in (f"\\{{{a}, {b}, {c}\\}}", f"\\{{{a}, {b}, {c}, {d + 1}\\}}", f"({a},{b},{c},{d})", f"{a}{b}{c}{d}"):
        assert verdicts(texts[0], text) == [False, False], text
    union = f"({a},{b}] \\cup [{c},{d})"
    assert verdicts(union, f"[{c}, {d})\\cup({a}, {b}]") == [True, True]
    assert verdicts(union, f"{a}<x\\le{b} \\text{{ or }} {c}\\le x<{d}") == [True, True]
    assert verdicts(union, f"({a},{d})") == [False, False]
    matrix = f"\\begin{{pmatrix}}{a}&{b}\\\\{c}&{d}\\end{{pmatrix}}"
    assert verdicts(matrix, f"A = \\left[\\begin{{array}}{{cc}} {a} & {b} \\\\ {c} & {d} \\end{{array}}\\right]") == [
        True,
        True,
    ]
    assert verdicts(matrix, f"\\begin{{pmatrix}}{a}&{c}\\\\{b}&{d}\\end{{pmatrix}}") == [False, False]
    assert verdicts(matrix, f"\\begin{{pmatrix}}{a}\\\\{b}\\\\{c}\\\\{d}\\end{{pmatrix}}") == [False, False]


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 30), st.integers(2, 30), st.integers(1, 30), st.integers(2, 9))
def test_equations_up_to_a_factor(a, b, c, factor):
    equation = f"{a}x + {b}y = {c}"
    same = [f"{factor * a}x + {factor * b}y = {factor * c}", f"{a}x + {b}y - {c} = 0", f"{c} = {b}y + {a}x"]
    same += [f"-{a}x = {b}y - {c}", f"y = \\frac{{{c}-{a}x}}{{{b}}}", f"x = \\frac{{{c}-{b}y}}{{{a}}}"]
    for text in same:
        assert verdicts(equation, text)[0], text
    assert verdicts(equation, same[1]) == [True, True]
    for text in (f"{a}x + {b}y = {c + 1}", f"{a}x - {b}y = {c}", f"{a}x + {b}y < {c}", str(c), f"{a + b}x = {c}"):
        assert verdicts(equation, text) == [False, False], text


@pytest.mark.parametrize("gold", ["46", r"\frac{1}{2}"])
def test_units_may_be_added_and_left_out_and_other_words_may_not(gold):
    for unit in (r"\textnormal{ miles}", r"\mbox{ square feet}", " apples", r"\,\mathrm{m/s^2}", r"\text{ ways}"):
        assert verdicts(gold, gold + unit) == [True, True]
    for words in (" or so", r"\text{ million}", r"\text{ halves}", r"\text{ (not sure)}", r"\text{ if } x > 0"):
        assert not grade(boxed(gold + words), Gold(gold))


# --- Numbers, powers and constants in other spellings


@given(st.decimals(0, 10**6, places=2), st.sampled_from(["", "-"]), st.sampled_from(["%", "\\%", "\\text{ percent}"]))
def test_a_percent_sign_may_be_left_out_of_a_decimal(value, minus, sign):
    number = f"{minus}{value}"
    assert verdicts(number, number + sign) == [True, True]
    assert verdicts(f"{number}{sign}", str(Fraction(number) / 100)) == [True, True]
    assert verdicts(f"{number}{sign}", f"{number}\\text{{ dollars}}") == [False, False]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x**(n+1)", "x^{n+1}"),
        ("2**x**2", "2^{x^2}"),
        ("x**\\frac12", "\\sqrt{x}"),
        ("2**sqrt(2)", "2^{\\sqrt2}"),
        ("x⁻¹⁰", "x^{-10}"),
        ("2*pi*r**2", "2\\pi r^2"),
        ("(-inf, pi]", "(-\\infty, \\pi]"),
        ("[0, +Infinity)", "x \\ge 0"),
        ("(-oo, 1) \\cup (2, oo)", "x < 1 \\text{ or } x > 2"),
    ],
)
def test_as_programs_write(one, other):
    assert verdicts(one, other) == [True, True]
    assert verdicts(one, f"{other}, 7919") == [False, False]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=2), min_size=2, max_size=3, unique_by=tuple),
    st.lists(
        st.sampled_from(["; ", ", ", r" \text{ and } ", " or ", r" \quad\text{or}\quad "]), min_size=2, max_size=2
    ),
    st.randoms(use_true_random=False),
)
def test_several_solutions_in_any_form(solutions, separators, random):
    def written(rows, separator, names="pq"):
        return separator.join(", ".join(f"{name}={row['pq'.index(name)]}" for name in names) for row in rows)

    one = written(solutions, separators[0])
    shuffled = random.sample(solutions, len(solutions))
    assert verdicts(one, written(shuffled, separators[1])) == [True, True]
    assert verdicts(one, written(shuffled, separators[1], "qp")) == [True, True]
    assert verdicts(one, ", ".join(f"({p}, {q})" for p, q in shuffled)) == [True, True]
    changed = [[solutions[0][0] + 100, solutions[0][1]], *solutions[1:]]
    assert verdicts(one, written(changed, separators[1])) == [False, False]
    crossed = [[p, q] for (p, _), (_, q) in zip(solutions, [*solutions[1:], solutions[0]], strict=True)]
    same = sorted(crossed) == sorted(solutions)
    assert verdicts(one, written(crossed, separators[1])) == [same, same]


# --- Verdicts and exceptions


# SymPy has no such limits, and says so with an exception once it computes.
RAISES = r"\int 3\frac{1}{2}"


def test_an_exception_in_grading_is_counted_and_shown(caplog):
    assert is_gradable(RAISES)
    with caplog.at_level(logging.WARNING, "dc_trl.grading"):
        assert grade(boxed("3"), Gold(RAISES)).correct is False  # without a pool too
    assert "ValueError: Invalid limits" in caplog.text
    caplog.clear()
    texts = [boxed("3"), boxed("4"), boxed("4")]
    with Grader(processes=1) as grader, caplog.at_level(logging.WARNING, "dc_trl.grading"):
        graded = grader.grade(texts, [Gold(RAISES), Gold(RAISES), Gold("4")])
        assert [verdict.correct for verdict in graded] == [False, False, True]
        assert grader.failures == {"error": 2}
        ((message, times),) = grader.errors.items()
    assert message.startswith("ValueError: Invalid limits")
    assert times == 2
    (record,) = caplog.records  # once for each message
    assert "'3'" in record.getMessage()
    assert message in record.getMessage()


def test_the_trainer_hears_how_often_grading_failed():
    metrics = []
    math_reward([boxed("3"), boxed("4")], [RAISES, "4"], log_metric=lambda name, value: metrics.append((name, value)))
    math_reward([boxed("3"), boxed("4")], ["3", "4"], log_metric=lambda name, value: metrics.append((name, value)))
    assert metrics == [("grading/failures", 1.0), ("grading/failures", 0.0)]
