"""`whet bench curriculum --like RUN ...`: real runs beside the toy that was fitted to one of them.

Every run is played by its own recipe, for its own tokens, by toys that know the fitted run alone: what they say of the
others is foretold. Both sides are read by the same function; where they part by more than a fifth, a sentence says so.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from whet import config, files
from whet.bench.calibration import GRID, SEEDS, Fit, Twin, fit_run
from whet.bench.circumstances import circumstances
from whet.bench.curriculum import play
from whet.errors import WhetError
from whet.recipe import load_config
from whet.report.arms import RunLog, common_evaluation, read_arms, settings_that_differ
from whet.report.curves import Point, Row
from whet.report.levels import final_accuracy, pick_levels, reach
from whet.types import Sampling

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


def _plain(curriculum: config.Curriculum) -> bool:
    """Every prompt alike, every group trained on, from the first update to the last."""
    return curriculum.name == "uniform" and not (curriculum.source or curriculum.stages or curriculum.solved)


def _check(runs: Sequence[RunLog], folders: Sequence[Path]) -> str:
    """The evaluation all have, if they share start and data."""
    evaluation = common_evaluation(read_arms(folders), None)
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
