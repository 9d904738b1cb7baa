import io

import numpy as np
import pytest
from rich.console import Console

from whet.tools.probe import ProbeReport, probe_report, probe_view
from whet.types import Prompt, Rollout, Sampling


def report_of(rates: np.ndarray, n: int, group: int) -> ProbeReport:
    rng = np.random.default_rng(0)
    prompts = [Prompt(id=str(i), text="x", answer="1", task="t") for i in range(rates.size)]
    rollouts = [
        Rollout(
            prompt_id=str(i), group_id=i, index=k, phase="probe", sampling=Sampling(max_tokens=1024),
            length=int(rng.integers(20, 1000)), finish="stop", first_version=0, last_version=0,
            verdict="right" if rng.random() < rate else "wrong",
        )
        for i, rate in enumerate(rates)
        for k in range(n)
    ]  # fmt: skip
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


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize(("n", "group"), [(8, 16), (16, 16), (4, 32)])
def test_fits_80_columns_and_nothing_is_cut_off(name: str, n: int, group: int) -> None:
    text = shown(report_of(RATES[name], n, group))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text


def test_says_what_the_report_says() -> None:
    report = report_of(RATES["hard"], 8, 16)
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
    text = shown(report_of(RATES["hopeless"], 8, 16))
    assert "∞" not in text and "uniform" not in text and "For the recipe" not in text
    assert "Not one of 800 responses was right" in " ".join(text.split())


def test_longest_bar_is_the_largest_count() -> None:
    lines = shown(report_of(RATES["hard"], 8, 16)).splitlines()
    bars = {line.split()[0]: line.count("█") for line in lines if "█" in line}
    assert bars["never"] == 40 == max(bars.values())
