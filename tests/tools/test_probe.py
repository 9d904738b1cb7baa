import io
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from probed import probed, report_of
from rich.console import Console

from whet.curriculum.build import CURRICULA
from whet.errors import WhetError
from whet.eval import judged_slices
from whet.recipe import parse_config
from whet.tools.forecast import cheapest
from whet.tools.probe import ProbeReport, histogram, probe_report, probe_requests, probe_view
from whet.types import Prompt, Request, Rollout, Sampling


def test_shares_by_hand() -> None:
    report = report_of([0, 0, 1, 4], 4, group=4)
    assert (
        report.pass_rate.value == 5 / 16
        and report.never.value == 0.5
        and report.always.value == 0.25
    )
    assert report.signal(4).share.value == 0.25 and report.signal(2).share.value == pytest.approx(
        0.5 / 4
    )
    bars = [(bar.label, bar.prompts) for bar in report.histogram]
    assert bars == [("never", 2), ("1 of 4", 1), ("2 of 4", 0), ("3 of 4", 0), ("always", 1)]
    assert (report.prompts, report.left_out, report.rollouts, report.n) == (4, 0, 16, 4)


def test_every_prompt_has_one_bar() -> None:
    rng = np.random.default_rng(0)
    for n in (2, 3, 8, 10, 11, 64):
        judged = rng.integers(2, n + 1, size=300)
        right = rng.binomial(judged, rng.beta(0.4, 0.4, size=300))
        bars = histogram(right, judged, n)
        assert sum(bar.prompts for bar in bars) == 300
        assert bars[0].prompts == (right == 0).sum() and bars[-1].prompts == (right == judged).sum()


def test_many_rollouts_fall_into_eighths() -> None:
    bars = histogram(np.array([0, 2, 3, 15, 16]), np.full(5, 16), 16)
    assert [(bar.label, bar.prompts) for bar in bars if bar.prompts] == [
        ("never", 1),
        ("up to 0.125", 1),
        ("up to 0.25", 1),
        ("below 1", 1),
        ("always", 1),
    ]


def test_unjudged_rollouts_count_for_nothing() -> None:
    """Three right of three judged is always, not three of four."""
    prompts, rollouts = probed([3, 2, 0, 0], 4, unjudged=[0])
    report = probe_report(prompts, rollouts, n=4, limit=512, group=4)
    assert report.always.value == 0.25 and report.unjudged == 1 / 16
    assert report.signal(4).share.value == pytest.approx(1 / 3)  # of those with four judged


def test_a_prompt_with_one_judged_rollout_is_left_out() -> None:
    prompts, rollouts = probed([1, 1], 2, unjudged=[0])
    report = probe_report(prompts, rollouts, n=2, limit=512, group=4)
    assert (report.prompts, report.left_out) == (1, 1)
    none = [replace(r, verdict="unjudged") for r in rollouts]
    with pytest.raises(WhetError, match="hardly one was judged"):
        probe_report(prompts, none, n=2, limit=512, group=4)


@pytest.mark.parametrize("right", [[0] * 6, [4] * 6, [0, 1, 2, 3, 4, 4]])
def test_json_holds_no_infinities(right: list[int]) -> None:
    tree = json.loads(json.dumps(report_of(right, 4, group=8).to_json(), allow_nan=False))
    assert tree["prompts"] == 6 and tree["suggestions"]
    assert (tree["spendings"][0]["tokens"]["value"] is None) == (len(set(right)) == 1)


def test_the_same_probe_says_the_same() -> None:
    assert report_of([0, 1, 2, 3, 4, 0, 0], 4, group=8) == report_of(
        [0, 1, 2, 3, 4, 0, 0], 4, group=8
    )


class Echo:
    """Engine and judge in one; keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None]
    ) -> list[Rollout]:
        self.requests += requests
        on_progress(sum(r.n for r in requests))
        return [
            Rollout(
                prompt_id=r.prompt_id,
                group_id=r.group_id,
                index=i,
                phase=r.phase,
                sampling=r.sampling,
                length=3,
                finish="stop",
                first_version=0,
                last_version=0,
            )
            for r in requests
            for i in range(r.n)
        ]

    def judge(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [replace(r, verdict="right" if r.index == 0 else "wrong") for r in rollouts]


def test_a_probe_asks_n_of_every_prompt() -> None:
    prompts, _ = probed([0] * 100, 4)
    world, progress = Echo(), list[tuple[int, int]]()
    requests = probe_requests(prompts, 4, Sampling(max_tokens=512))
    slices = judged_slices(requests, world, world, lambda *news: progress.append(news))  # type: ignore[arg-type]
    rollouts = [rollout for judged in slices for rollout in judged]
    assert [(r.prompt_id, r.group_id, r.n, r.phase) for r in world.requests[:2]] == [
        ("p0", 0, 4, "probe"),
        ("p1", 1, 4, "probe"),
    ]
    assert progress == [(400, 400)]
    report = probe_report(prompts, rollouts, n=4, limit=512, group=4)
    assert report.pass_rate.value == 0.25 and report.signal(4).share.value == 1.0


HARD = [0] * 140 + [1] * 30 + [3] * 20 + [6] * 10
MIDDLING = [1] * 30 + [3] * 60 + [5] * 60 + [7] * 30 + [0] * 10 + [8] * 10


def test_few_prompts_with_signal_ask_for_screening() -> None:
    report = report_of(HARD, 8, group=8)
    text = " ".join(report.suggestions)
    assert "Use speed: 30% (24% to 37%)" in text and "Screen with N_init = " in text
    best = min((s for s in report.spendings if s.screen), key=lambda s: s.tokens.value)
    assert 'name = "speed"' in report.recipe and f"n_init = {best.screen}\n" in report.recipe
    assert f"N_init = {best.screen} " in text and f"{best.saving.value:.1f} times" in text


def test_most_prompts_with_signal_ask_for_nothing_special() -> None:
    report = report_of(MIDDLING, 8, group=8)
    assert (
        report.suggestions[0].startswith("Use uniform: 90%") and 'name = "uniform"' in report.recipe
    )


def test_dapo_in_between() -> None:
    """Half of the prompts are always solved, the others clearly in the middle: screening saves little."""
    report = report_of([4] * 60 + [8] * 40, 8, group=4)
    assert (
        report.suggestions[0].startswith("Use dapo: ")
        and "not surely be cheaper" in report.suggestions[0]
    )


@pytest.mark.parametrize(
    ("right", "words"),
    [
        ([0] * 120, "Not one of 960"),
        ([8] * 120, "harder prompts"),
        ([0, 8] * 60, "Take prompts in between"),
    ],
)
def test_where_nothing_helps_it_says_so(right: list[int], words: str) -> None:
    report = report_of(right, 8, group=16)
    assert len(report.suggestions) == 1 and words in report.suggestions[0] and report.recipe == ""


def test_scarce_signal_and_far_extrapolation_are_said() -> None:
    text = " ".join(report_of([0] * 194 + [1, 1, 2, 3, 5, 7], 8, group=32).suggestions)
    assert "makes every curriculum expensive" in text and "--n 32" in text


def test_limits() -> None:
    roomy = report_of(MIDDLING, 8, group=8, limit=1024)
    assert (
        "A limit of 208 tokens loses under 2%" in " ".join(roomy.suggestions)
        and "max_tokens = 208" in roomy.recipe
    )
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


def drawn_report(rates: np.ndarray, n: int, group: int) -> ProbeReport:
    rng = np.random.default_rng(0)
    prompts = [Prompt(id=str(i), text="x", answer="1", task="t") for i in range(rates.size)]
    rollouts = [
        Rollout(
            prompt_id=str(i),
            group_id=i,
            index=k,
            phase="probe",
            sampling=Sampling(max_tokens=1024),
            length=int(rng.integers(20, 1000)),
            finish="stop",
            first_version=0,
            last_version=0,
            verdict="right" if rng.random() < rate else "wrong",
        )
        for i, rate in enumerate(rates)
        for k in range(n)
    ]
    return probe_report(prompts, rollouts, n=n, limit=1024, group=group)


def shown(report: ProbeReport, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    probe_view(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


RATES = {
    "hard": np.random.default_rng(5).beta(0.15, 1.5, 200),
    "middling": np.random.default_rng(5).beta(2, 2, 200),
    "hopeless": np.zeros(100),
    "solved": np.ones(100),
    "dear": np.concatenate([np.zeros(297), np.full(3, 0.5)]),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize(("n", "group"), [(8, 16), (16, 16), (4, 32)])
def test_fits_80_columns_and_nothing_is_cut_off(name: str, n: int, group: int) -> None:
    text = shown(drawn_report(RATES[name], n, group))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text


def test_only_some_screens_and_the_cheapest_get_a_line() -> None:
    report = drawn_report(RATES["hard"], 16, 32)
    best = cheapest(report.spendings)
    assert best is not None and len(report.spendings) == 3 + 15, (
        "uniform, dapo, cures, and a screen of 2 to 16"
    )
    lines = [int(found) for found in re.findall(r"^\s*speed (\d+)\s", shown(report), re.M)]
    assert sorted(lines) == sorted({2, 3, 4, 6, 8, 12, 16, best.screen})


def test_a_price_is_a_share_of_that_of_uniform() -> None:
    """Below 1 is cheaper; "cheaper by 0.95" was read both ways."""
    report = drawn_report(RATES["hard"], 8, 16)
    (cures,) = (each for each in report.spendings if each.curriculum == "cures")
    line = next(line for line in shown(report).splitlines() if line.startswith("cures"))
    assert "of uniform's" in shown(report) and "cheaper by" not in shown(report)
    assert (
        f"{1 / cures.saving.value:.2f} ({1 / cures.saving.high:.2f}–{1 / cures.saving.low:.2f})"
        in line
    )


def test_says_what_the_report_says() -> None:
    report = drawn_report(RATES["hard"], 8, 16)
    text = shown(report)
    assert f"{report.prompts} prompts, 8 rollouts each, at most 1024 tokens." in text
    for bar in report.histogram:
        assert any(
            line.split()[: len(bar.label.split()) + 1] == [*bar.label.split(), str(bar.prompts)]
            for line in text.splitlines()
        )
    assert "extrapolated" in text and "speed 4" in text
    flat = " ".join(text.split())
    for sentence in report.suggestions:
        assert " ".join(sentence.split()) in flat
    assert report.recipe.strip() in text  # as it stands: no indent, nothing at the ends of lines


def test_hopeless_data_has_no_price() -> None:
    text = shown(drawn_report(RATES["hopeless"], 8, 16))
    assert "∞" not in text and "uniform" not in text and "For the recipe" not in text
    assert "Not one of 800 responses was right" in " ".join(text.split())


def test_longest_bar_is_the_largest_count() -> None:
    lines = shown(drawn_report(RATES["hard"], 8, 16)).splitlines()
    bars = {line.split()[0]: line.count("█") for line in lines if "█" in line}
    assert bars["never"] == 40 == max(bars.values())
