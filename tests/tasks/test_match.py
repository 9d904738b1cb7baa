r"""What counts as the same answer, and what a hostile response cannot do."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.tasks.match import LONGEST, boxed, extract, match, number, same_answer
from whet.types import Prompt


def score(response: str, answer: str) -> float:
    return match(Prompt(id="a", text="?", answer=answer, task="text"), response)


@pytest.mark.parametrize(
    ("response", "found"),
    [
        (r"So \boxed{42}.", "42"),
        (r"First \boxed{1}, then \boxed{2} and 3.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("5 + 5\n#### 10", "10"),
        ("+5=8*2=6-7=9#869", "869"),
        ("The answer is 12.", "12."),
        ("The final answer is: 12. I checked it twice on 3 sheets.", "12"),
        ("Answer: **12**", "12**"),
        ("**Answer:** 12", "12"),
        ("Answer:\n12", "12"),
        ("The answer is:\n\\[\n\\frac{3}{10}\n\\]", "\\frac{3}{10}"),
        ("The answer is\n$$\n7\n$$", "7"),
        ("answer is 3, no, the answer is 4", "4"),
        ("#### Step 3\nwe add\nThe answer is 5", "5"),
        ("### Answer\nIt costs 42 dollars", "42"),
        ("we get 3 and 1,234.5 in the end", "1,234.5"),
        ("10-7", "7"),
        ("it is -7", "-7"),
        ("about 3/4 of it", "3/4"),
        ("I took 3, 4, 5, and left", "5"),
        (r"not closed: \boxed{5", "5"),
        (r"\boxed{}", ""),
        ("no idea", ""),
        ("", ""),
        ("the answer is", ""),
    ],
)
def test_extract(response: str, found: str) -> None:
    assert extract(response) == found


@pytest.mark.parametrize(
    ("found", "gold"),
    [
        ("42", "42"),
        (" 42 ", "42"),
        ("42.", "42"),
        ("42.0", "42"),
        ("1,234", "1234"),
        ("1,234,567.50", "1234567.5"),
        ("$18", "18"),
        (r"\$18.00", "18"),
        ("50%", "50"),
        (r"50\%", "50%"),
        ("+3", "3"),
        ("\u22123", "-3"),
        (".5", "1/2"),
        ("1/2", "0.5"),
        ("2/4", "1/2"),
        (r"\frac{1}{2}", "1/2"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"-\frac{3}{4}", "-0.75"),
        ("0.333333", "1/3"),
        ("3.1415927", "3.1415926"),
        ("1e3", "1000"),
        ("yes", "Yes"),
        ("**Paris**", "Paris"),
        (r"\text{Paris}", "Paris"),
        (r"\(x + 1\)", "x+1"),
        (r"$\left( 1, 2 \right)$", "(1,2)"),
        ("x = 5", "5"),
        ("x=5", "x = 5"),
        ("42 apples", "42"),
        ("about 42 apples", "42"),
        (r"5\text{ cm}", "5"),
        (r"90^\circ", "90"),
        ("18 dollars per day", "18"),
    ],
)
def test_same(found: str, gold: str) -> None:
    assert same_answer(found, gold)


@pytest.mark.parametrize(
    ("found", "gold"),
    [
        ("", ""),
        ("", "42"),
        ("42", ""),
        ("41", "42"),
        ("4 2 x", "42"),
        ("1000001", "1000000"),
        ("1000000", "1000000.0000001e9"),
        ("0.333", "1/3"),
        ("0.000001", "0"),
        ("3 or 4", "3"),
        ("2 x", "2"),
        ("2x", "2"),
        (r"3 \pi", "3"),
        (r"3\pi", "3"),
        ("12,34", "1234"),
        ("1/0", "0"),
        (r"\frac{1}{0}", "1"),
        ("50", "0.5"),
        ("--3", "3"),
        ("Paris, or London", "Paris"),
        ("nan", "1"),
        ("inf", "1"),
        ("1_000", "1000"),
        ("\u0661", "1"),
        ("$", "$"),
    ],
)
def test_different(found: str, gold: str) -> None:
    assert not same_answer(found, gold)


def test_the_data_may_hold_a_whole_solution() -> None:
    assert score("The answer is 72", "She sold 48+24=72 clips.\n#### 72") == 1.0
    assert score("The answer is 72", r"so we get \boxed{72}") == 1.0


def test_numbers() -> None:
    assert number("1,234.5") == Fraction(2469, 2) and number("-1/4") == Fraction(-1, 4)
    assert number("") is None and number("1/") is None and number("/2") is None and number("-") is None
    assert number("1e9999") is None, "an exponent that would fill the memory is no number"
    assert number(r"-\frac{-1}{2}") is None and number(r"\frac{-1}{2}") == Fraction(-1, 2)


@given(st.integers(-(10**12), 10**12))
def test_a_number_in_any_dress(n: int) -> None:
    for dressed in (f"{n}", f"{n:,}", f"{n}.", f"${n:,}$", f"**{n}**", f"{n}.00"):
        for response in (f"It is \\boxed{{{dressed}}}.", f"The answer is {dressed}", f"2+2\n#### {dressed}"):
            assert score(response, str(n)) == 1.0
            assert score(response, str(n + 1)) == 0.0


@given(st.text(max_size=400), st.text(min_size=1, max_size=400))
def test_never_raises(response: str, answer: str) -> None:
    assert score(response, answer) in (0.0, 1.0)
    assert score(f"\\boxed{{{response}}}", answer) in (0.0, 1.0)


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 200_000,
        "{" * 1_000_000 + "\\boxed{" + "{" * 1_000_000,
        "\\boxed{" + "9" * 1_000_000 + "}",
        "\\boxed{9**9**9}",
        "\\boxed{10^{10^{10}}}",
        "\\boxed{1e999999999}",
        "\\boxed{" + "\\frac{1}{1+" * 30 + "}" * 31,
        "\\boxed{__import__('os').system('true')}",
        "9" * 1_000_000,
        "1," * 1_000_000,
        "#" * 1_000_000,
        "# " * 1_000_000,
        "answer is " * 200_000,
        "answer" + " " * 1_000_000 + "is 41",
        "answer:" + " " * 1_000_000 + "x",
        "-" * 1_000_000,
        "1/" * 1_000_000,
        "." * 1_000_000 + "1",
    ],
    ids=lambda text: text[:16],
)
def test_hostile_responses_are_wrong_and_cheap(response: str) -> None:
    """Each takes milliseconds; quadratic patterns would take hours, which no one would miss in this suite."""
    assert score(response, "42") == 0.0


def test_long_answers_are_none() -> None:
    assert boxed("\\boxed{" + "x" * LONGEST + "}") == "x" * LONGEST
    assert boxed("\\boxed{" + "x" * (LONGEST + 1) + "}") == ""
    assert not same_answer("x" * (LONGEST + 1), "x" * (LONGEST + 1))
