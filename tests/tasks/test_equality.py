"""Answers of several parts, with plain text equality of parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.tasks.equality import MOST_PARTS, Form, canonical, has_parts, read_form, same_form
from whet.tasks.values import clean


def same_parts(found: str, gold: str) -> bool:
    return same_form(clean(found), clean(gold), lambda a, b: canonical(a) == canonical(b))


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        ("1, 2", "list", ("1", "2")),
        (r"1 \text{ and } 2", "list", ("1", "2")),
        ("$69$,$84$", "list", ("69", "84")),
        (r"\{1, 2\}", "set", ("1", "2")),
        ("[0, 1)", "[)", ("0", "1")),
        (r"\left(-\infty, 3\right]", "(]", (r"-\infty", "3")),
        (r"x \in [0, 1]", "[]", ("0", "1")),
        ("(1,2),(3,4)", "list", ("(1,2)", "(3,4)")),
        (r"1 \pm \sqrt{2}", "list", (r"1 + \sqrt{2}", r"1 - \sqrt{2}")),
        ("1,234, 5", "list", ("1234", "5")),
    ],
)
def test_forms(text: str, kind: str, parts: tuple[str, ...]) -> None:
    assert read_form(clean(text)) == Form(kind, parts)


@pytest.mark.parametrize(
    "text", ["5", "1,234", "(5)", "x+1", "f(x, y)", "", "(1,2", "1,2)", "(" * 13 + "1,2" + ")" * 13]
)
def test_single_values(text: str) -> None:
    assert read_form(clean(text)) is None


def test_thousands_may_be_a_list() -> None:
    assert (
        has_parts("100,200")
        and same_parts("200,100", "100,200")
        and same_parts("1,234 and 5", "1234, 5")
    )


@pytest.mark.parametrize(
    ("found", "gold"),
    [
        ("2, 1", "1,2"),
        (r"\{2, 1\}", "1,2"),
        ("1,2", "(1,2)"),
        ("(1,2)", "1,2"),
        ("(3,4), (1,2)", "(1,2),(3,4)"),
        (r"\{5\}", "5"),
        ("[ 0 , 1 )", "[0,1)"),
    ],
)
def test_same_form(found: str, gold: str) -> None:
    assert same_parts(found, gold)


@pytest.mark.parametrize(
    ("found", "gold"),
    [
        ("2, 1", "(1,2)"),
        ("(2,1)", "(1,2)"),
        ("(2,1)", "1,2"),
        ("[0,1]", "[0,1)"),
        ("(0,1)", "[0,1)"),
        ("1", "1,1"),
        ("1,1", "1,2"),
        ("1,2,3", "1,2"),
        ("(1,2)", r"\{1,2\}"),
        ("(2,1),(3,4)", "(1,2),(3,4)"),
        ("5", "6"),
    ],
)
def test_different_form(found: str, gold: str) -> None:
    assert not same_parts(found, gold)


def test_what_a_vote_counts() -> None:
    for equal in (
        {"1,234.0", "1234", "$1,234$", "x = 1234", "1234 apples"},
        {r"\dfrac{1}{2}", r"\frac12", "1/2", "0.5", r"y = \frac{1}{2}"},
        {"2, 1", "1,2", r"\{1, 2\}", r"x = 1 \text{ or } x = 2"},
        {"[0, 1)", r"\left[0,1\right)"},
        {r"\text{East}", "east", "**east**"},
    ):
        assert len({canonical(text) for text in equal}) == 1, equal
    assert canonical("(1,2)") != canonical("(2,1)") and canonical("") == ""


def test_more_parts_than_anyone_means() -> None:
    many = ",".join(str(n) for n in range(MOST_PARTS + 1))
    assert has_parts(many) and same_parts(many, many) and not same_parts(many[2:] + ",0", many)


@given(
    st.text(alphabet="()[]{}\\,12 +-=pmx", max_size=300), st.text(alphabet="()[],12 ", max_size=60)
)
def test_forms_never_raise(found: str, gold: str) -> None:
    assert same_parts(found, gold) in (True, False) and isinstance(canonical(found), str)


@pytest.mark.parametrize(
    "unit", ["\\pm ", "1\\pm", "(1,234,", "((1,2),", "\\cup", "1,", "\\{", "x=", " or "]
)
def test_bombs_of_structure(unit: str) -> None:
    """Two readings a level would be 2^12 of them."""
    text = (unit * 300)[:300]
    assert not same_parts(text, "42") and not same_parts(text, "(1,2),(3,4)")
