import tomllib

import numpy as np
import pytest
from probed import report_of

from whet.curriculum.build import CURRICULA
from whet.recipe import parse_config

HARD = [0] * 140 + [1] * 30 + [3] * 20 + [6] * 10
MIDDLING = [1] * 30 + [3] * 60 + [5] * 60 + [7] * 30 + [0] * 10 + [8] * 10


def test_few_prompts_with_signal_ask_for_screening() -> None:
    report = report_of(HARD, 8, group=8)
    text = " ".join(report.suggestions)
    assert "Use speed: 30% (24% to 37%)" in text and "Screen with N_init = " in text
    best = min((s for s in report.spendings if s.screen), key=lambda s: s.tokens.value)
    assert f"N_init = {best.screen} " in text and f"{best.saving.value:.1f} times" in text


def test_a_curriculum_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CURRICULA, "speed", raising=False)
    without = report_of(HARD, 8, group=8)
    assert "does not list" in without.suggestions[0] and 'name = "dapo"' in without.recipe
    monkeypatch.setitem(CURRICULA, "speed", CURRICULA["dapo"])
    listed = report_of(HARD, 8, group=8)
    assert "does not list" not in " ".join(listed.suggestions) and 'name = "speed"' in listed.recipe


def test_most_prompts_with_signal_ask_for_nothing_special() -> None:
    report = report_of(MIDDLING, 8, group=8)
    assert report.suggestions[0].startswith("Use uniform: 90%") and 'name = "uniform"' in report.recipe


def test_dapo_in_between() -> None:
    """Half of the prompts are always solved, the others clearly in the middle: screening saves little."""
    report = report_of([4] * 60 + [8] * 40, 8, group=4)
    assert report.suggestions[0].startswith("Use dapo: ") and "not surely be cheaper" in report.suggestions[0]


@pytest.mark.parametrize(
    ("right", "words"),
    [([0] * 120, "Not one of 960"), ([8] * 120, "harder prompts"), ([0, 8] * 60, "Take prompts in between")],
)
def test_where_nothing_helps_it_says_so(right: list[int], words: str) -> None:
    report = report_of(right, 8, group=16)
    assert len(report.suggestions) == 1 and words in report.suggestions[0] and report.recipe == ""


def test_scarce_signal_and_far_extrapolation_are_said() -> None:
    text = " ".join(report_of([0] * 194 + [1, 1, 2, 3, 5, 7], 8, group=32).suggestions)
    assert "makes every curriculum dear" in text and "--n 32" in text


def test_limits() -> None:
    roomy = report_of(MIDDLING, 8, group=8, limit=1024)
    assert "A limit of 208 tokens loses under 2%" in " ".join(roomy.suggestions) and "max_tokens = 208" in roomy.recipe
    tight = report_of(MIDDLING, 8, group=8, limit=200, wrong_length=200, right_length=180)
    assert "Raise --max-tokens: 50% of the responses were cut at 200" in " ".join(tight.suggestions)
    assert "max_tokens" not in tight.recipe
    rambling = report_of(MIDDLING, 8, group=8, limit=1024, wrong_length=1024)
    assert "(99% by 100): the others may only ramble" in " ".join(rambling.suggestions)
    fits = report_of(MIDDLING, 8, group=8, limit=220, right_length=190)
    assert "The limit of 220 fits" in " ".join(fits.suggestions)


def test_recipes_are_recipes() -> None:
    rng = np.random.default_rng(0)
    for a, b in ((0.1, 1.0), (1.0, 1.0), (3.0, 0.5), (0.02, 2.0)):
        report = report_of(rng.binomial(8, rng.beta(a, b, size=120)).tolist(), 8, group=16)
        settings = parse_config(tomllib.loads(report.recipe))
        assert settings.curriculum.rollouts == 16 and settings.curriculum.name in CURRICULA


def test_few_prompts_are_said_to_be_few() -> None:
    assert "20 prompts are few" in " ".join(report_of([1, 3] * 10, 8, group=8).suggestions)
