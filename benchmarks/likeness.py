"""Real runs beside the toy that is fitted to one of them, a run that sampled uniformly.

One skill moves all prompts, each by its own amount: p_i = sigmoid(b_i + skill (e_i - b_i) + ...), where b_i comes
from the pass rates of the run's first groups and e_i from its last, so that skill 0 is its start and skill 1 its
end. How fast skill grows, and whether it stops, is fitted to the share of right answers in each update; then follow
the held-out accuracy and the lengths of right and wrong responses, as functions of skill. The learner is Adam, as in
real runs.

Then every run is played by its own recipe, for its own tokens, by toys that know the fitted run alone: what they say
of the others is foretold. Both sides are read by the same function; where they differ by more than a fifth, a sentence
says so.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import comb, exp, inf, log, nan
from pathlib import Path
from typing import Any

import numpy as np
from curves import smooth
from toy import Toy, play

from whet import config, files
from whet.errors import WhetError
from whet.recipe import load_config
from whet.report.arms import Point, Row, RunLog, common_evaluation, read_arms, series
from whet.report.compare import settings_that_differ
from whet.report.formats import final_accuracy, pick_levels, reach
from whet.tools.experiment import circumstances
from whet.types import Sampling
from whet.watch import PASS_RATES, pass_rate_class

GRID = np.arange(-6.0, 6.5, 0.5)
"""Logits a prompt may start at."""
CEILINGS = (1.05, 1.25, 1.5, 2.0, 4.0, inf)
"""Scale of the skill, which is 1 where the fitted run ends."""
EARLY, LATE = 64, 128
"""Groups that tell the difficulties at the start, where the policy moves fast, and at the end."""
SEEDS = 5
"""Toys whose mean (in the fit) or median (in the likeness) is taken."""

ENOUGH = 2000
"""Prompts that stand for any number, where none of them has a history."""


def class_chances(n: int, logits: np.ndarray) -> np.ndarray:
    """P(class | logit), a row for each of `PASS_RATES`: the sum over its k of C(n, k) p^k (1 - p)^(n - k)."""
    p = 1 / (1 + np.exp(-logits))
    chances = np.zeros((len(PASS_RATES), len(logits)))
    for k in range(n + 1):
        chances[PASS_RATES.index(pass_rate_class(k / n))] += comb(n, k) * p**k * (1 - p) ** (n - k)
    return chances


def mixture(seen: np.ndarray, chances: np.ndarray, rounds: int = 200) -> np.ndarray:
    """The share of prompts at each logit, by expectation maximisation from even shares: groups of class c are divided
    by w_j P(c | j) / sum_i w_i P(c | i), and w_j is what logit j got. No shape is assumed."""
    possible = chances.any(axis=1) & (seen > 0)  # groups of two are never up to 25% right
    seen, chances = seen[possible], chances[possible]
    shares = np.full(chances.shape[1], 1 / chances.shape[1])
    for _ in range(rounds):
        joint = shares * chances
        shares = (seen / seen.sum()) @ (joint / joint.sum(axis=1, keepdims=True))
    return shares


def least(loss: Callable[[float], float], low: float, high: float, points: int = 25) -> float:
    """Where a loss is least between two positive numbers: a geometric grid, then a finer one around its best."""
    for _ in range(3):
        tried = np.geomspace(low, high, points)
        best = int(np.argmin([loss(float(x)) for x in tried]))
        low, high = float(tried[max(0, best - 1)]), float(tried[min(points - 1, best + 1)])
    return float(tried[best])


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A real run in numbers."""

    prompts: int = 0
    lr: float = 1.0
    start: np.ndarray
    """Share of prompts at each logit of `GRID` before the first update."""
    end: np.ndarray
    """The same after the last update."""
    rate: float = 0.0
    """Skill an update at the run's learning rate, far from the ceiling."""
    ceiling: float = inf
    """Highest skill that training reaches."""
    exam: tuple[float, float, float] = (0.0, 1.0, 1.0)
    """Held-out accuracy = exam[2] sigmoid(exam[0] + exam[1] skill)."""
    lengths: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """For "right" and "wrong" responses: skills, rising, and mean tokens."""


@dataclass
class Twin(Toy):
    """A toy with the difficulties, the learning rate, the exam and the lengths of a real run."""

    fit: Fit = field(kw_only=True)
    lr: float = field(kw_only=True, default=1.0)
    """In learning rates of the run it was fitted to."""
    warmup: int = field(kw_only=True, default=0)
    longest: int = field(kw_only=True, default=400)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.updates, self.mean, self.square = 0, np.zeros(self.features), 0.0

    def _draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """A prompt keeps its rank: at the same quantile of the start (skill 0) and of the end (skill 1)."""
        facing = rng.normal(size=(count, self.features)) * 0.3
        ranks = rng.uniform(size=count)
        logits = quantiles(self.fit.start, ranks)
        facing[:, 0] = np.maximum(0.0, quantiles(self.fit.end, ranks) - logits)
        return logits, facing

    def lengths(self, right: np.ndarray) -> np.ndarray:
        means = {verdict: np.interp(self.theta[0], *curve) for verdict, curve in self.fit.lengths.items()}
        spread = self._rng.lognormal(-0.02, 0.2, len(right))  # its mean is 1
        return np.minimum(self.longest, np.where(right, means["right"], means["wrong"]) * spread + 0.5)

    def move(self, gradient: np.ndarray) -> np.ndarray:
        """Adam (0.9, 0.999), the second moment of the whole gradient at once: rate m / (1 - 0.9^t) / root of
        v / (1 - 0.999^t), with v of the mean of |g|^2, times 1 - skill / ceiling. So a batch of nothing but signal
        takes no larger a step for that."""
        self.updates += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * float(gradient @ gradient)
        scale = (self.square / (1 - 0.999**self.updates)) ** 0.5
        if scale == 0:
            return np.zeros_like(gradient)
        warm = min(1.0, self.updates / self.warmup) if self.warmup else 1.0
        step = self.fit.rate * self.lr * warm * self.mean / (1 - 0.9**self.updates) / scale
        return step * max(0.0, 1 - float(self.theta[0]) / self.fit.ceiling)

    @property
    def accuracy(self) -> float:
        start, slope, top = self.fit.exam
        return top / (1 + exp(-(start + slope * float(self.theta[0]))))


def uniform_path(fit: Fit, settings: config.Config, prompts: int, updates: int) -> tuple[np.ndarray, np.ndarray]:
    """(skill, mean pass rate) before each update of a uniform run and after the last, the mean of `SEEDS` toys.

    What `play` does, without rollouts: with k of n right a group's policy gradient under RLOO is
    n / (n - 1) (k / n) (1 - k / n) x, whatever p is, since the advantages sum to 0.
    """
    groups, n = settings.curriculum.groups, settings.curriculum.rollouts
    prompts = min(prompts, ENOUGH)
    paths = np.zeros((2, updates + 1))
    for seed in range(SEEDS):
        toy = Twin("", seed, prompts, fit=fit, warmup=settings.learn.warmup)
        rng = np.random.default_rng((seed, 3))
        everyone = np.arange(prompts)
        for t in range(updates + 1):
            chances = toy.chance(everyone)
            paths[:, t] += np.array([toy.theta[0], chances.mean()]) / SEEDS
            rows = rng.choice(prompts, size=groups, replace=groups > prompts)
            rates = rng.binomial(n, chances[rows]) / n
            toy.theta += toy.move((n / (n - 1) * rates * (1 - rates)) @ toy.facing[rows] / groups)
    return paths[0], paths[1]


def fit_run(run: RunLog, settings: config.Config, evaluation: str) -> Fit:
    """Difficulties, rate, exam and lengths of a uniform run, one after the other."""
    rows = [row for row in run.rows if row["step"] > 0]
    prompts, updates = prompts_of(run), len(rows)
    chances = class_chances(settings.curriculum.rollouts, GRID)
    start = mixture(groups_seen(rows, EARLY), chances)
    end = mixture(groups_seen(rows[::-1], LATE), chances)
    ceiling, rate = fit_pace(start, end, [row.get("verdict/right", nan) for row in rows], settings, prompts)
    skill, _ = uniform_path(Fit(start=start, end=end, ceiling=ceiling, rate=rate), settings, prompts, updates)
    points = run.points(evaluation)
    return Fit(
        prompts=prompts,
        lr=settings.learn.lr,
        start=start,
        end=end,
        ceiling=ceiling,
        rate=rate,
        exam=fit_exam([float(skill[p.step]) for p in points], [p.accuracy for p in points]),
        lengths={verdict: length_curve(rows, verdict, skill) for verdict in ("right", "wrong")},
    )


def fit_pace(
    start: np.ndarray, end: np.ndarray, passed: Sequence[float], settings: config.Config, prompts: int
) -> tuple[float, float]:
    """(ceiling, rate) of the skill, by least squares over the shares of right answers in each update: the rate is seen
    in how it climbs, the ceiling in whether it still does at the end."""

    def miss(ceiling: float, rate: float) -> float:
        fit = Fit(start=start, end=end, ceiling=ceiling, rate=rate)
        _, rates = uniform_path(fit, settings, prompts, len(passed))
        return float(np.nanmean((rates[:-1] - np.array(passed)) ** 2))

    found = [(top, least(lambda rate, top=top: miss(top, rate), 1e-3, 1.0, 7)) for top in CEILINGS]  # type: ignore[misc]
    return min(found, key=lambda pair: miss(*pair))


def groups_seen(rows: Sequence[Row], most: int) -> np.ndarray:
    """How many groups fell into each class of `PASS_RATES`, of rows that hold at least `most` in all."""
    seen = np.zeros(len(PASS_RATES))
    for row in rows:
        if f"pass_rate/{PASS_RATES[0]}" in row and seen.sum() < most:
            seen += row["batch/groups"] * np.array([row[f"pass_rate/{name}"] for name in PASS_RATES])
    if not seen.any():
        raise WhetError("The uniform run holds no pass_rate/ metrics to read difficulties from; train it anew.")
    return seen


def quantiles(shares: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Logits at ranks in 0..1 of a distribution over `GRID`, each share spread evenly over a step around."""
    edges = np.append(GRID - 0.25, GRID[-1] + 0.25)
    return np.interp(ranks, np.append(0.0, np.cumsum(shares)), edges)


def fit_exam(skills: Sequence[float], accuracies: Sequence[float]) -> tuple[float, float, float]:
    """(a, b, top) of accuracy = top sigmoid(a + b skill): a from the first evaluation, b and top by least squares.

    The held-out problems need not be like the training prompts, and are often answered greedily, so they have a scale
    and a top of their own; the top lies between the mean of the last three evaluations and 1.
    """
    seen, rise = np.array(accuracies), np.array(skills) - skills[0]
    found = []
    for top in np.linspace(min(1.0, max(seen[-3:].mean(), seen[0] + 0.01)), 1.0, 11).tolist():
        first = min(max(seen[0] / top, 0.005), 0.995)
        start = log(first / (1 - first))

        def miss(slope: float, start: float = start, top: float = top) -> float:
            return float(np.mean((top / (1 + np.exp(-(start + slope * rise))) - seen) ** 2))

        slope = least(miss, 0.05, 50.0)
        found.append((miss(slope), start, slope, top))
    return min(found)[1:]


def length_curve(rows: Sequence[Row], verdict: str, skill: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Skill before an update against the mean length of its right (or wrong) responses, smoothed over nine updates."""
    curve = smooth([(float(skill[int(t) - 1]), y) for t, y in series(rows, f"length/{verdict}")], 9)
    if not curve:
        raise WhetError(f"No response of the fitted run was {verdict}; calibration needs right and wrong ones.")
    return np.array([x for x, _ in curve]), np.array([y for _, y in curve])


def prompts_of(run: RunLog) -> int:
    known = [row["curriculum/prompts"] for row in run.rows if "curriculum/prompts" in row]
    if not known:
        raise WhetError(f"The run {run.name} has no update yet; calibration needs finished runs.")
    return int(known[0])


OFF = 1.2
"""A quantity is off when it is this many times too large or too small."""


def calibrate(folders: Sequence[Path]) -> dict[str, Any]:
    """The toy fitted to the first uniform run among these, and measured against simulated for all of them."""
    runs = [run for arm in read_arms(folders) for run in arm.runs]
    settings = {run.name: load_config(run.folder / "config.toml") for run in runs}
    evaluation = _check(runs, folders)
    fitted = next((run for run in runs if _plain(settings[run.name].curriculum)), None)
    if fitted is None:
        raise WhetError("None of these runs is uniform, and only such a run shows all prompts as they are; add one.")
    fit = fit_run(fitted, settings[fitted.name], evaluation)
    levels = pick_levels([run.points(evaluation) for run in runs])
    found: dict[str, Any] = {}
    for run in runs:
        own = settings[run.name]
        measured = quantities(run.rows, run.points(evaluation), levels)
        played = [simulate(fit, run, own, evaluation, seed) for seed in range(SEEDS)]
        simulated = _middle([quantities(rows, points, levels) for rows, points in played])
        found[run.name] = {
            name: {
                "measured": measured[name],
                "simulated": simulated[name],
                "off": off(measured[name], simulated[name]),
            }
            for name in measured
        }
    return {
        "fitted": fitted.name,
        "logits": GRID.tolist(),
        "start": fit.start.round(3).tolist(),
        "end": fit.end.round(3).tolist(),
        "ceiling": None if fit.ceiling == inf else fit.ceiling,
        "rate": fit.rate,
        "exam": fit.exam,
        "runs": found,
        "where_off": [
            sentence for run in runs for sentence in sentences(run.name, found[run.name], run.points(evaluation))
        ],
    }


def simulate(
    fit: Fit, run: RunLog, settings: config.Config, evaluation: str, seed: int
) -> tuple[list[dict[str, float]], list[Point]]:
    """The run's recipe played for the tokens it took: rows as of metrics.jsonl, and points where it was evaluated."""
    longest, budget = settings.rollout.max_tokens, run.rows[-1]["tokens_generated"]
    lr, warmup = settings.learn.lr / fit.lr, settings.learn.warmup
    toy = Twin("", seed, fit.prompts, fit=fit, lr=lr, warmup=warmup, longest=longest)
    rows, _ = play(settings.curriculum, toy, lambda: toy.tokens / budget, Sampling(max_tokens=longest))
    every = next((e.every for e in settings.eval if e.name == evaluation), settings.held_out.every)
    points = [
        Point(step=int(row["step"]), tokens=row["tokens_generated"], seconds=0.0, accuracy=row["accuracy"])
        for row in rows
        if row["step"] % every == 0 or row is rows[-1]
    ]
    return rows, points


def quantities(rows: Sequence[Row], points: Sequence[Point], levels: Sequence[float]) -> dict[str, float | None]:
    """What a run is judged by, of a real one and of a toy alike; None for a level never reached.

    kept: of groups that were decided (screenings, for speed), those that train. signal: of those, with right and wrong.
    """
    last, updates = rows[-1], int(rows[-1]["step"])
    decided = sum(last.get(f"curriculum/{name}", 0) for name in ("accepted", "rejected_easy", "rejected_hard"))
    signal = [row["learn/signal_share"] for row in rows if "learn/signal_share" in row]
    crossed = {f"tokens_to_{level:.2f}": reach(points, level, "tokens") for level in levels}
    return {
        "signal": statistics.mean(signal) if signal else None,
        "kept": last.get("curriculum/accepted", 0) / decided if decided else None,
        "rollouts_an_update": last["rollouts"] / updates,
        "tokens_an_update": last["tokens_generated"] / updates,
        "updates": float(updates),
        "accuracy": final_accuracy(points),
        **{name: found.low if found.known else None for name, found in crossed.items()},
    }


def evaluation_gap(points: Sequence[Point], tokens: float) -> float:
    """Tokens from the evaluation at or before these to the next; 0 where there is none."""
    around = [after.tokens - before.tokens for before, after in pairwise(points) if before.tokens <= tokens]
    return around[-1] if around else 0.0


def off(measured: float | None, simulated: float | None) -> float | None:
    """Simulated over measured; None where either is unknown.

    >>> off(200.0, 150.0), off(200.0, None)
    (0.75, None)
    """
    return simulated / measured if measured and simulated is not None else None


BETWEEN = "pass rates between start and end are a guess here: one skill moves all prompts, each logit along a line"
REASONS = {
    "signal": BETWEEN,
    "kept": BETWEEN,
    "rollouts_an_update": "it follows from how many groups are kept",
    "tokens_an_update": "lengths here are those of the fitted run at the same skill, whatever the prompt",
    "updates": "it follows from the tokens an update takes",
    "accuracy": "held-out accuracy hangs on one skill here, which never falls",
    "tokens_to": "an update moves the skill about equally far here, whatever its batch, and one skill decides the exam",
}
"""What the toy leaves out, by the quantity that shows it."""
TOP = "the top of the exam is read off the last evaluations of the fitted run"
FINER = "that is no more than one evaluation of the run, and its cost is known no finer"


def sentences(name: str, found: Mapping[str, Mapping[str, float | None]], points: Sequence[Point]) -> list[str]:
    """One for each quantity that is off by more than `OFF`, or that only one of toy and run reached.

    points: the run's evaluations; a level that is off by less than their distance says nothing against the toy.
    """
    said = []
    for quantity, values in found.items():
        measured, simulated, ratio = values["measured"], values["simulated"], values["off"]
        level = "_to_" in quantity
        reason = REASONS["tokens_to" if level else quantity]
        if measured is None and simulated is None:
            continue
        if measured is None:
            how = "is reached by the toy alone"
        elif simulated is None:
            how, reason = "is never reached by the toy", TOP
        elif ratio is None or 1 / OFF <= ratio <= OFF:
            continue
        else:
            how = f"is {ratio:.2f} times the measured"
            if level and abs(simulated - measured) <= evaluation_gap(points, measured):
                reason = FINER
        said.append(f"{name}: {quantity.replace('_', ' ')} {how}; {reason}.")
    return said


def likeness_bench(out: Path, folders: Sequence[Path], name: str = "") -> dict[str, Any]:
    """Written to curriculum_calibration_NAME.json, or without the name where there is none."""
    if not all(letter.isalnum() or letter in "-_" for letter in name):
        raise WhetError(f'The mix "{name}" names the file of the result; use letters, digits, - and _ alone.')
    result = {"mix": name, "toys": SEEDS, **calibrate(folders), **circumstances()}
    files.make_folder(out)
    path = out / ("_".join(filter(None, ("curriculum_calibration", name))) + ".json")
    files.write_text(path, json.dumps(result, indent=1) + "\n")
    return result


def _plain(curriculum: config.CurriculumSettings) -> bool:
    """Every prompt alike, every group trained on, from the first update to the last."""
    return curriculum.name == "uniform" and not (curriculum.source or curriculum.stages or curriculum.solved)


def _check(runs: Sequence[RunLog], folders: Sequence[Path]) -> str:
    """The evaluation all have, if they share start and data."""
    evaluation = common_evaluation(read_arms(folders))
    if evaluation is None or not all(run.points(evaluation) for run in runs):
        raise WhetError("These runs share no evaluation; calibration needs one that all of them hold.")
    differ = [key for key, _ in settings_that_differ(read_arms(folders)) if key.startswith(("model.", "data."))]
    if differ:
        raise WhetError(f"These runs differ in {differ[0]}; calibration needs the same start and the same prompts.")
    return evaluation


def _middle(found: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Medians; never counts as more than any number."""
    medians = {k: statistics.median(inf if f[k] is None else f[k] for f in found) for k in found[0]}  # type: ignore[type-var]
    return {k: None if v == inf else v for k, v in medians.items()}
