"""Judges a run by its numbers, in a sentence or two: whether it learns, what was wasted, what would be cheaper.

    Learning: +12.0 points in 3m20s, from 0.310 to 0.430. 61% of the rollouts carried no signal; by the forecast of whet
    probe, CurES would save about 40% of the tokens.

`data` puts it at the head of a page. A change counts if it lies beyond chance: 1.96 standard errors of the difference
of two evaluations, as if they had separate prompts. A sentence whose numbers were not recorded is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from whet.report import formats
from whet.report.arms import Row, RunLog, evaluation_names, evaluations, number, series
from whet.watch import PASS_RATES, pass_rate_class

SHARPER = 0.7  # an entropy below this share of the first one has fallen
GROUPS = 50  # judged groups from which on savings are forecast
WORTH = 0.1  # share of the tokens from which on a saving is mentioned
PLAYED = 200  # prompts with which cures is played
NAMES = {"speed": "SPEED", "cures": "CurES"}


def judge(log: RunLog, rows: Sequence[Row], evaluation: str | None) -> str:
    parts = [judge_learning(log, evaluation), judge_sharpening(log, rows), judge_signal(log, rows)]
    return " ".join(part for part in parts if part)


# ---- learning


def _entry(settings: Mapping[str, Any], evaluation: str | None) -> str:
    """The prefix of the settings of an evaluation, such as "eval.0."; "" if it has none."""
    found = (
        key for key, value in settings.items() if value == evaluation and key.startswith("eval.")
    )
    return next((key.removesuffix("name") for key in found if key.endswith(".name")), "")


def is_greedy(settings: Mapping[str, Any], evaluation: str | None) -> bool:
    """Whether responses are not drawn: the temperature is 0, which is the default."""
    return evaluation is not None and not settings.get(
        f"{_entry(settings, evaluation)}temperature", 0.0
    )


def interval(log: RunLog, evaluation: str | None, *, last: bool) -> tuple[float, float] | None:
    """The 95% range of the first or last accuracy: as recorded, else Wilson's by the prompts that the recipe allows."""
    from whet.eval import wilson

    key = f"eval/{evaluation}/accuracy"
    rows = [row for row in log.rows if number(row, key) is not None]
    if not rows:
        return None
    row = rows[-1 if last else 0]
    low = number(row, f"{key}_low")
    high = number(row, f"{key}_high")
    share = number(row, key)
    if low is not None and high is not None:
        return low, high
    own = "held_out.size" if evaluation == "held_out" else ""
    prompts = number(log.settings, f"{_entry(log.settings, evaluation)}limit") or number(
        log.settings, own
    )
    return tuple(wilson(min(1.0, max(0.0, share or 0.0)), prompts)) if prompts else None  # type: ignore[return-value]


def _noise(log: RunLog, evaluation: str) -> float | None:
    """By how much the last evaluation differs from the first at most by chance; None where that is unknown."""
    ends = [interval(log, evaluation, last=last) for last in (False, True)]
    halves = [(end[1] - end[0]) / 2 for end in ends if end is not None]
    return math.hypot(*halves) if len(halves) == 2 else None


def judge_learning(log: RunLog, evaluation: str | None) -> str:
    points = log.points(evaluation)
    if evaluation is None or not points:
        return "It was not evaluated yet."
    if len(points) == 1:
        return f"Evaluated once so far: {formats.accuracy(points[0].accuracy)}."
    first = points[0]
    last = points[-1]
    noise = _noise(log, evaluation)
    gain = last.accuracy - first.accuracy
    best = max(points, key=lambda point: point.accuracy)
    points_gained = f"{100 * gain:+.1f} points".replace("-", "−")
    change = f"{points_gained} in {formats.duration(last.seconds)}, "
    change += f"from {formats.accuracy(first.accuracy)} to {formats.accuracy(last.accuracy)}"
    if noise is not None and best is not first and best.accuracy - last.accuracy > noise:
        change += f", after {formats.accuracy(best.accuracy)} at step {best.step}"
    if log.rows[-1].get("collapsed"):
        return f"Collapsed: {change}."
    if noise is None:
        return f"Accuracy: {change}."
    if abs(gain) <= noise:
        return f"Not clearly learning: {change}, which may be chance."
    return f"{'Learning' if gain > 0 else 'Getting worse'}: {change}."


def judge_sharpening(log: RunLog, rows: Sequence[Row]) -> str:
    """Says so where entropy fell and greedy answers gained nothing: the policy only became surer of what it knew."""
    entropy = [y for _, y in series(rows, "learn/entropy")]
    greedy = next((name for name in evaluation_names(rows) if is_greedy(log.settings, name)), None)
    if greedy is None or len(entropy) < 4 or len(points := evaluations(rows, greedy)) < 2:
        return ""
    part = max(1, len(entropy) // 10)
    noise = _noise(log, greedy)
    before = fmean(entropy[:part])
    after = fmean(entropy[-part:])
    if (
        noise is None
        or after > SHARPER * before
        or points[-1].accuracy - points[0].accuracy > noise
    ):
        return ""
    return f"It sharpens only: entropy fell from {before:.2g} to {after:.2g}, and greedy answers did not get better."


# ---- signal


def judge_signal(log: RunLog, rows: Sequence[Row]) -> str:
    lost = lost_rollouts(log.settings, rows)
    cheaper = forecast_saving(log.settings, rows)
    words = [f"{formats.share(lost)} of the rollouts carried no signal"] if lost is not None else []
    if cheaper is not None and cheaper[1] >= WORTH:
        saved = f"{NAMES[cheaper[0]]} would save about {round(20 * cheaper[1]) * 5}% of the tokens"
        words.append(f"by the forecast of whet probe, {saved}")
    return f"{'; '.join(words)}." if words else ""


def lost_rollouts(settings: Mapping[str, Any], rows: Sequence[Row]) -> float | None:
    """The share of the rollouts with no part in a gradient. The learner leaves out those without an advantage, unless a
    KL or entropy term needs them; then the share of groups with signal is counted."""
    asked = number(rows[-1], "rollouts") if rows else None
    used = 0.0
    found = 0
    terms = number(settings, "learn.kl_coef") or number(settings, "learn.entropy_coef")
    for row in rows:
        trained = number(row, "learn/rollouts")
        signal = number(row, "learn/signal_share")
        if trained is not None and signal is not None:
            used = used + trained * (signal if terms else 1.0)
            found = found + 1
    # a log with gaps counts too few
    if not asked or not found or found < 0.9 * (number(rows[-1], "step") or 0.0):
        return None
    return min(1.0, max(0.0, 1.0 - used / asked))


def forecast_saving(settings: Mapping[str, Any], rows: Sequence[Row]) -> tuple[str, float] | None:
    """The cheapest curriculum for these prompts and the share of tokens it saves on a useful group, by the counts of
    `whet.tools.forecast` at equal lengths; for runs that ask for whole groups of any prompt, and None for others."""
    from whet.tools import forecast

    size = int(number(settings, "curriculum.rollouts") or 0)
    if (
        settings.get("curriculum.name") not in ("uniform", "dapo")
        or settings.get("curriculum.source")
        or size < 3
    ):
        return None
    weights = _pass_rates(rows, size)
    total = sum(weights.values())
    useful = (
        sum(count for rate, count in weights.items() if 0.0 < rate < 1.0) / total if total else 0.0
    )
    if total < GROUPS or useful == 0.0:
        return None
    rates = np.array(list(weights))
    shares = np.array(list(weights.values())) / total
    screens = [float(shares @ (1.0 - rates**s - (1.0 - rates) ** s)) for s in range(2, size)]
    costs = {"speed": min(s / share + size - s for s, share in enumerate(screens, 2))}
    prompts = np.repeat(rates, np.floor(PLAYED * shares + 0.5).astype(int))
    groups = max(1, prompts.size // forecast.PARTS)
    plays = [
        forecast.play_cures(
            prompts, np.ones(prompts.size), groups, size, 2 * forecast.PARTS, forecast.TAU, seed
        )
        for seed in range(5)
    ]
    found = sum(play.useful for play in plays)
    passes = number(rows[-1], "curriculum/epoch") or 0.0
    # what it is played for; it knows nothing of prompts that never come back
    if found and passes >= 2.0:
        costs["cures"] = sum(play.tokens for play in plays) / found
    name = min(costs, key=lambda curriculum: costs[curriculum])
    return name, 1.0 - costs[name] * useful / size


def _pass_rates(rows: Sequence[Row], size: int) -> dict[float, float]:
    """Judged groups by pass rate: those that were dropped, and the batches by the middle of their class."""
    middles: dict[str, float] = {}
    for name in PASS_RATES:
        rates = [k / size for k in range(size + 1) if pass_rate_class(k / size) == name]
        if rates:
            middles[name] = fmean(rates)
    weights = dict.fromkeys([0.0, *middles.values(), 1.0], 0.0)
    for row in rows:
        for name, rate in middles.items():
            weights[rate] += (number(row, f"pass_rate/{name}") or 0.0) * (
                number(row, "batch/groups") or 0.0
            )
    last = rows[-1] if rows else {}
    weights[0.0] += number(last, "curriculum/rejected_hard") or 0.0
    weights[1.0] += number(last, "curriculum/rejected_easy") or 0.0
    return weights
