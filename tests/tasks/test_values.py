r"""What counts as the same single value: text, numbers, quantities."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.tasks import values
from whet.tasks.values import clean, number, read_value, split_unit


def same_value(found: str, gold: str, question: str = "") -> bool | None:
    return values.same_value(clean(found), clean(gold), question)


@pytest.mark.parametrize(
    ("found", "gold"),
    [
        ("42", "42"),
        (" 42 ", "42"),
        ("42.", "42"),
        ("42.0", "42"),
        ("1,234", "1234"),
        ("1,234,567.50", "1234567.5"),
        ("1 234 567", "1234567"),
        ("10{,}080", r"10,\!080"),
        (r"11,\! 111,\! 100", "11111100"),
        ("$18", "18"),
        (r"\$18.00", "18"),
        (r"50\%", "50%"),
        (r"62.5\%", "0.625"),
        ("0.08", r"8 \%"),
        ("+3", "3"),
        ("\u22123", "-3"),
        (".5", "1/2"),
        ("1/2", "0.5"),
        ("2/4", "1/2"),
        (r"\frac{1}{2}", "1/2"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"-\frac{3}{4}", "-0.75"),
        (r"1\frac45", "1.8"),
        ("137 1/2", r"137 \frac{1}{2}"),
        (r"-1\frac{1}{2}", "-1.5"),
        ("0.333333", "1/3"),
        ("3.1415927", "3.1415926"),
        ("1e3", "1000"),
        (r"4.5 \times 10^{33}", "4.5e33"),
        (r"4.5 \cdot 10^33", "4.5e33"),
        ("4.5\u00d710^{33}", "4.5e33"),
        ("10^{-3}", r"1 \times 10^{-3}"),
        ("yes", "Yes"),
        ("**Paris**", "Paris"),
        (r"\text{Paris}", "Paris"),
        (r"\(x + 1\)", "x+1"),
        (r"\[ x + 1 \]", "x+1"),
        ("d^{2}", "d^2"),
        (r"$\left( 1, 2 \right)$", "(1,2)"),
        ("x=5", "x = 5"),
        ("42 students", "42"),
        ("about 42 dollars", "42"),
        ("42", "42 apples"),
        ("42 apples", "42 apples"),
        ("5 million", "5000000"),
        ("5000000", r"5 \text{ million}"),
        ("5 million dollars", r"\$5,000,000"),
        ("2 dozen", "24"),
        (r"18.9\,\text{s}", "18.9"),
        ("18.9 seconds", "18.9"),
        ("\u00bd", "1/2"),
        ("2\u00bd", "2.5"),
        ("\uff11\uff12", "12"),
        ("\u20135", "-5"),
        ("12\u202f345", "12345"),
        ("1.234.567", "1234567"),
        ("28 pct", r"28\%"),
        ("8 sq ft", r"8\text{ ft}^2"),
        ("30 miles per hour", "30 mph"),
        ("3 m s^{-1}", "3 m/s"),
        ("6 m", "6m"),
        ("7:05 p.m.", "7:05 PM"),
        ("2 to 3", "2:3"),
        ("seven", "7"),
        ("b", "B"),
        ("(b)", "B"),
        ("Option B", "(B)"),
        (r"5\text{ cm}", "5"),
        (r"5\,\mathrm{cm}", r"5 \text{ cm}"),
        ("5 centimeters", r"5\text{ cm}"),
        (r"$15\mbox{ cm}^2$", r"15\mbox{ cm}^2"),
        (r"90^\circ", "90"),
        ("90\u00b0", r"90^{\circ}"),
        ("90 degrees", r"90^\circ"),
        ("18 dollars per day", "18"),
        ("(A)", "A"),
        ("A.", r"\text{(A)}"),
        ("C) 12", "(C)"),
    ],
)
def test_same(found: str, gold: str) -> None:
    assert same_value(found, gold)


@pytest.mark.parametrize(
    ("found", "gold"),
    [
        ("", ""),
        ("", "42"),
        ("42", ""),
        ("41", "42"),
        ("4 2 x", "42"),
        ("4 2", "42"),
        ("1 4/5", "14/5"),
        ("1000001", "1000000"),
        ("1000000", "1000000.0000001e9"),
        ("-2010013/2010013", "-2010012/2010013"),
        ("0.333", "1/3"),
        ("0.3333", "1/3"),
        ("333333/1000000", "1/3"),
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
        ("5\u00b2", "52"),
        ("$", "$"),
        ("r/R", "R/r"),
        ("M", "m"),
        ("B", "(A)"),
        ("A) or B)", "B"),
        ("B) 12 or C) 13", "B"),
        ("(B) and (C)", "B"),
        ("b", "c"),
        ("10 million", "10"),
        ("10 squared", "10"),
        (r"10 \text{ or more}", "10"),
        ("10 dozen", "10"),
        ("10 apples", "10"),
        ("10 k", "10"),
        ("10 m", "10"),
        ("at least 10", "10"),
        ("not 5", "5"),
        ("5!", "5"),
        ("1, 0", "1,000"),
        ("32, 349", "32349"),
        ("2458 yen", r"\$2458"),
        ("\u20ac2458", r"\$2458"),
        ("minus seven", "7"),
        ("5 m", "5 km"),
        (r"15\text{ m}^2", r"15\mbox{ cm}^2"),
        (r"15\text{ cm}^3", r"15\mbox{ cm}^2"),
        (r"4.5 \times 10^{32}", "4.5e33"),
        (r"8.2 \times 11^{-19}", r"8.2 \times 10^{-19}"),
    ],
)
def test_different(found: str, gold: str) -> None:
    assert not same_value(found, gold)


def test_numbers() -> None:
    assert number("1,234.5") == Fraction(2469, 2) and number("-1/4") == Fraction(-1, 4)
    assert (
        number("") is None and number("1/") is None and number("/2") is None and number("-") is None
    )
    assert number("1e9999") is None and number("10^{9999}") is None, (
        "an exponent that would fill the memory is no number"
    )
    assert number(r"-\frac{-1}{2}") is None and number(r"\frac{-1}{2}") == Fraction(-1, 2)
    assert number(r"3\frac{5}{2}") is None, "a product or a mistake, but no mixed number"
    assert number(r"-2.5\times10^{2}") == -250 and number("(7)") == 7


def test_matrices_keep_their_rows() -> None:
    assert clean(r"1 \\ 2") == r"1 \\ 2"


def test_units_stand_apart() -> None:
    assert split_unit(clean(r"\frac{270}7\text{ degrees}")) == (r"\frac{270}{7}", "deg")
    assert split_unit(clean(r"15000 \text{ kcal m}^{-2} \text{yr}^{-1}")) == (
        "15000",
        "kcalm^-2year^-1",
    )
    assert split_unit(clean(r"x \text{ or } y")) == ('x " or " y', "")


def test_what_formulas_cannot_change() -> None:
    assert same_value("0.3333", "1/3") is False and same_value("5 cm", "5 km") is False
    assert same_value("2x", "3") is None and same_value("100,200", "200,100") is None, (
        "the latter may be lists"
    )


@given(st.integers(-(10**12), 10**12))
def test_a_number_in_any_dress(n: int) -> None:
    for dressed in (f"{n}", f"{n:,}", f"{n}.", f"${n:,}$", f"**{n}**", f"{n}.00", f"{n} dollars"):
        assert same_value(dressed, str(n))
        assert not same_value(dressed, str(n + 1))


@given(st.text(max_size=300), st.text(max_size=300))
def test_never_raises(found: str, gold: str) -> None:
    assert same_value(found, gold) in (True, False, None)
    assert bool(same_value(found, found)) == bool(read_value(clean(found)).text)


@pytest.mark.parametrize(
    "unit",
    [
        "1 ",
        "1,",
        "1/",
        ".",
        "-",
        "{",
        "\\text{",
        "\\frac{1}",
        "%",
        "a b ",
        "10^{",
        "\\$",
        "((",
        "^{1}",
    ],
)
def test_answers_as_long_as_allowed_are_cheap(unit: str) -> None:
    text = (unit * 300)[:300]
    assert not same_value(text, "42")
