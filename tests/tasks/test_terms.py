r"""The built-in reward terms, by hand-computed numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.errors import WhetError
from whet.tasks.build import (
    REWARDS,
    BoxedOptions,
    FormatOptions,
    LengthOptions,
    RepetitionOptions,
    boxed_term,
    format_term,
    length_term,
    repetition_term,
)
from whet.types import Rollout, Sampling


def rollout(length: int, verdict: str = "right", limit: int = 100, finish: str = "stop") -> Rollout:
    return Rollout(
        prompt_id="a",
        group_id=0,
        index=0,
        phase="train",
        sampling=Sampling(max_tokens=limit),
        length=length,
        finish=finish,  # type: ignore[arg-type]
        first_version=0,
        last_version=0,
        verdict=verdict,  # type: ignore[arg-type]
    )


def test_length_of_right_and_wrong() -> None:
    """At 0, half and all of the limit; a third of the way cos(pi/3) = 1/2, so three quarters of the way up."""
    options = LengthOptions(right_short=2.0, right_long=1.0, wrong_short=-10.0, wrong_long=0.0, cut=-10.0)
    assert [length_term(rollout(n), options) for n in (0, 50, 100)] == pytest.approx([2.0, 1.5, 1.0])
    assert [length_term(rollout(n, "wrong"), options) for n in (0, 50, 100)] == pytest.approx([-10.0, -5.0, 0.0])
    assert length_term(rollout(30, limit=90), options) == pytest.approx(1.75)
    assert length_term(rollout(30, "wrong", limit=90), options) == pytest.approx(-7.5)
    assert length_term(rollout(100, "right", finish="length"), options) == -10.0


def test_length_by_default() -> None:
    assert length_term(rollout(50), LengthOptions()) == pytest.approx(0.75)
    assert length_term(rollout(50, "wrong"), LengthOptions()) == pytest.approx(-0.75)
    assert length_term(rollout(50), LengthOptions(limit=50)) == pytest.approx(0.5)
    assert length_term(rollout(80), LengthOptions(limit=50)) == pytest.approx(0.5), "longer than its own limit"


def test_repetition() -> None:
    two = RepetitionOptions(words=2)
    assert repetition_term("a b c d", two) == 0.0 and repetition_term("a", two) == repetition_term("", two) == 0.0
    assert repetition_term("a b a b", two) == pytest.approx(-1 / 3)  # ab ba ab
    assert repetition_term("a a a a a", two) == pytest.approx(-3 / 4)  # aa four times
    assert repetition_term("loop " * 1_000_000, RepetitionOptions()) == pytest.approx(-1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"<think>2+2</think>It is \boxed{4}.", 1.0),
        (r"2+2</think>It is \boxed{4}.", 1.0),
        ("<think>2+2</think><answer>4</answer>", 1.0),
        (r"It is \boxed{4}.", 0.0),
        (r"<think>\boxed{4}</think>", 0.0),
        (r"<think>\boxed{4}", 0.0),
        (r"<think>a</think><think>b</think>\boxed{4}", 0.0),
        (r"Well, <think>a</think>\boxed{4}", 0.0),
        ("", 0.0),
    ],
)
def test_format(response: str, value: float) -> None:
    assert format_term(response, FormatOptions()) == value


def test_format_by_tags_and_pattern() -> None:
    tags = FormatOptions(tags="think answer")
    assert format_term("<think>a</think>\n<answer>4</answer>\n", tags) == 1.0
    for bad in (
        "<answer>4</answer><think>a</think>",
        "<think>a</think>4<answer>4</answer>",
        "<think>a</think><answer>4</answer> Done.",
        "<think>a<think></think><answer>4</answer>",
        "<think>a</think>",
    ):
        assert format_term(bad, tags) == 0.0, bad
    pattern = FormatOptions(pattern=r"Answer: \d+\n.*")
    assert format_term("Answer: 4\nSo\nit is.", pattern) == 1.0 and format_term("x Answer: 4\n", pattern) == 0.0


def test_boxed() -> None:
    for response, value in {
        r"\boxed{4}": 1.0,
        r"<think>\boxed{3}</think>\boxed{4}": 1.0,
        r"\boxed{4}\boxed{4}": 0.0,
        r"\boxed{}": 0.0,
        r"\boxed{4": 0.0,
        "4": 0.0,
    }.items():
        assert boxed_term(response, BoxedOptions()) == value, response


def test_options_that_make_no_sense() -> None:
    with pytest.raises(WhetError, match="is no regular expression"):
        FormatOptions(pattern="(")
    with pytest.raises(WhetError, match="not both"):
        FormatOptions(pattern="a", tags="b")
    with pytest.raises(WhetError, match='got "<b>"'):
        FormatOptions(tags="<b>")
    with pytest.raises(WhetError, match="1 word or more"):
        RepetitionOptions(words=0)


@given(st.text(max_size=300))
def test_finite_for_any_text(text: str) -> None:
    for term in REWARDS.values():
        if term.reads is str:
            assert math.isfinite(term.value(text, term.options()))
