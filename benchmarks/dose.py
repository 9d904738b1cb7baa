"""Dose and response: what a curriculum saves as the share of informative prompts changes, and whether a probe knew it.

    python benchmarks/dose.py base      # makes the start once, and stores it with its hash
    python benchmarks/dose.py probe     # forecasts for each share, stored before any counted run
    python benchmarks/dose.py run --seconds 1200    # cells in the order of `cells_in_order`; call it again to go on
    python benchmarks/dose.py table     # dose.md and dose.svg

Rules, fixed before the first counted run:

- Task chain on a tiny model, one start for all runs, drawn at temperature 0.6 with at most 24 tokens. The start
  solves levels 1 and 2 nearly always, level 4 about one time in three, and level 12 almost never within the limit.
- Training set of a share s: 300 prompts, s of level 4, (1 - s) / 2 of levels 1 and 2, (1 - s) / 2 of level 12. Shares
  are 5, 12, 25, 50 and 80%. Evaluation: 200 held-out problems of level 4, drawn as in training.
- Arms uniform, dapo, speed, cures and all; seeds 0, 1 and 2. Uniform and cures take 3 / s groups an update, the others
  3 groups that hold right and wrong answers, so that uniform, dapo and speed learn from equally many such groups an
  update. All share one learning rate. A run ends with the update that passes the share's token budget; at 5 and 12%
  speed and all have two fifths of it, far beyond the target if they save what is forecast, and "never" if not.
- Saving: uniform's tokens over the arm's (2 is half the price), in tokens per informative trained group over the first
  8 updates, which is what a probe forecasts, and in tokens to the target, which is what users want.
- The target of a share lies halfway between start and end of uniform, both the mean of the tuning seeds 100 and 101,
  stored before its first counted cell. A run reaches it where the nearest rising curve through its evaluations does.
- Forecast for dapo and speed: `whet probe` (300 prompts, 16 rollouts, seed 300). For cures `whet probe` plays its rule
  (eq. 14, eq. 20) on the pass rates over two passes; here the same play has the groups and the updates that are
  measured (`play_cures`). all has no forecast.
- A share counts if the forecasts for speed and cures are both within 25% of the measured saving per informative group,
  whichever of the two is divided by the other. The same for tokens to the target is shown beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import tomli_w
from base import make_base
from matrix import defining_settings, hash_weights, inline, make_start, read_plan
from matrix_cells import column, points
from matrix_figures import FigureLine, figure
from rich.console import Console
from train import CellWork, Places, read_outcome

from whet import files
from whet.errors import WhetError
from whet.report.draws import rising
from whet.tools.experiment import circumstances
from whet.tools.forecast import play_cures
from whet.tools.measure import probe_model

SHARES = (5, 12, 25, 50, 80)  # per cent
ARMS = ("uniform", "speed", "cures", "dapo", "all")
TUNING, COUNTED, PROBED, PILOT = (100, 101), (0, 1, 2), 300, 200  # seeds
SOLVED, MIDDLING, HOPELESS = "1-2", "4", "12"  # levels
POOL, ROLLOUTS, INFORMATIVE, FIRST = 300, 16, 3, 8
BUDGET = {5: 190_000, 12: 90_000, 25: 48_000, 50: 26_000, 80: 17_000}  # tokens of a run
# n_init of speed, tau of cures, what counts, bootstrap
SCREEN, TAU, NEAR, DRAWS = 4, 0.05, 1.25, 2000
CAP = 3600.0  # seconds of a cell; tokens end a run, and a cell that this would end is no result
START, RESULTS, RUNS = Path("whet/tools/base"), Path("benchmarks/results/dose"), Path("runs/dose")
SAMPLED = {"temperature": 0.6, "max_tokens": 24}
BASE = {
    "steps": 0,
    "data": [{"task": "chain"}],
    "warm_start": [
        {"steps": 900, "batch": 32, "lr": 2e-3, "options": {"decay": 0.35, "max_level": 8}},
        {
            "steps": 200,
            "batch": 32,
            "lr": 7e-4,
            "options": {"decay": 0.35, "max_level": 8, "direct": 0.8},
        },
        {
            "steps": 500,
            "batch": 32,
            "lr": 7e-4,
            "options": {"decay": 1.8, "max_level": 8, "direct": 0.7},
        },
    ],
    "held_out": {"size": 0},
    "rollout": {"slots": 128, "context": 96, "max_tokens": 40},
}
RECIPE = {
    "steps": 1000,
    "data": [{"task": "chain"}],
    "eval": [
        {
            "task": "chain",
            "options": {"eval_count": 200, "eval_range": MIDDLING},
            "every": 2,
            **SAMPLED,
        }
    ],
    "held_out": {"size": 0},
    "rollout": {"slots": 512, "context": 64, **SAMPLED},
    "learn": {"estimator": "rloo", "lr": 1.5e-4, "warmup": 2},
    "curriculum": {"rollouts": ROLLOUTS, "starvation": "partial", "patience": 200},
    "judge": {"workers": 1},
    "save": {"every": 1000, "keep": 1, "rollouts": 0},
}

# ---- rules as functions


def mix_of(share: int) -> dict[str, float]:
    """Shares of the levels in the training set."""
    return {SOLVED: (100 - share) / 200, MIDDLING: share / 100, HOPELESS: (100 - share) / 200}


def groups_of(arm: str, share: int) -> int:
    """Groups of an update: those of uniform hold about INFORMATIVE informative ones."""
    return round(100 * INFORMATIVE / share) if arm in ("uniform", "cures") else INFORMATIVE


def target_of(curves: Sequence[Sequence[float]]) -> float:
    """Halfway between the mean first accuracy and the mean of the last three, over the tuning runs."""
    start, end = fmean(curve[0] for curve in curves), fmean(fmean(curve[-3:]) for curve in curves)
    return round((start + end) / 2, 4)


def tokens_to(tokens: Sequence[float], accuracy: Sequence[float], target: float) -> float:
    """Tokens at which the nearest rising curve, with straight lines between evaluations, reaches the target."""
    fit = rising(accuracy)
    above = np.flatnonzero(fit >= target - 1e-9)
    if not above.size:
        return math.inf
    ends = slice(max(0, int(above[0]) - 1), int(above[0]) + 1)
    return float(np.interp(target, fit[ends], tokens[ends]))


def tokens_per_group(
    tokens: Sequence[float], informative: Sequence[float], first: int = FIRST
) -> float:
    """Tokens of the first updates for each informative group they trained; `tokens` are totals, from step 0 on."""
    found = sum(informative[1 : first + 1])
    return tokens[: first + 1][-1] / found if found else math.inf


def saving(uniform: Sequence[float], arm: Sequence[float]) -> float:
    """Mean tokens of uniform over the arm's; 0 if a run of the arm never gets there, NaN if one of uniform does not."""
    return fmean(uniform) / fmean(arm) if math.isfinite(fmean(uniform)) else math.nan


def saving_interval(uniform: Sequence[float], arm: Sequence[float]) -> tuple[float, ...]:
    """The middle 95% of savings with the seeds of both drawn again, each for itself."""
    rng = np.random.default_rng(0)
    draws = [
        saving(rng.choice(uniform, len(uniform)), rng.choice(arm, len(arm))) for _ in range(DRAWS)
    ]
    return tuple(np.quantile(draws, (0.025, 0.975)).tolist())


def within(forecast: float, measured: float) -> bool:
    """Whether neither is more than 1.25 times the other, so that it does not matter which way a saving is written."""
    return measured > 0 and max(forecast / measured, measured / forecast) <= NEAR + 1e-9


def counts(forecast: Mapping[str, float], measured: Mapping[str, float]) -> bool:
    return all(
        arm in measured and within(forecast[arm], measured[arm]) for arm in ("speed", "cures")
    )


def cells_in_order() -> list[tuple[int, str, int]]:
    """(share, arm, seed): the tuning runs, then seed by seed and arm by arm over all shares."""
    tuning = [(share, "uniform", seed) for share in SHARES for seed in TUNING]
    return tuning + [(share, arm, seed) for seed in COUNTED for arm in ARMS for share in SHARES]


# ---- base, probe, run


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_bytes()) if (RESULTS / name).is_file() else {}


def write(name: str, tree: Mapping[str, Any]) -> None:
    rows = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in tree.items())
    files.write_text(RESULTS / name, "{\n" + rows + "\n}\n")


def make_dose_base() -> None:
    made = make_base(RUNS / "base", BASE, Console())
    for path in made.iterdir():
        if path.suffix in (".json", ".safetensors") and path.name != "manifest.json":
            files.write_bytes(START / path.name, path.read_bytes())
    write("start.json", {**circumstances(), "weights": hash_weights(START), "recipe": BASE})


def data_of(share: int) -> list[dict[str, Any]]:
    return [{"task": "chain", "options": {"train_count": POOL, "mix": mix_of(share)}}]


def probe_share(share: int) -> dict[str, Any]:
    """The forecasts of one share: savings as (value, low, high), and tokens per informative group of uniform."""
    out, sets = (
        RUNS / f"probe{share}",
        [f"seed={PROBED}", f"data={inline(data_of(share))}", "rollout.slots=512"],
    )
    about = {"n": ROLLOUTS, "group": ROLLOUTS, "prompts": POOL, **SAMPLED}
    report = probe_model(str(START), "chain", sets=sets, out=out, **about)
    seen: dict[str, list[tuple[bool, int]]] = {}
    for row in map(json.loads, (out / "responses.jsonl").read_text().splitlines()):
        seen.setdefault(row["prompt_id"], []).append((row["verdict"] == "right", row["length"]))
    rates = np.array([fmean(right for right, _ in rows) for rows in seen.values()])
    lengths = np.array([fmean(tokens for _, tokens in rows) for rows in seen.values()])
    base = report.spending("uniform").tokens.value
    played = [
        play_cures(rates, lengths, groups_of("cures", share), ROLLOUTS, FIRST, TAU, seed)
        for seed in range(100)
    ]
    plays = [base * play.useful / play.tokens for play in played]
    speed = next(
        s for s in report.spendings if s.curriculum == "speed" and s.screen == SCREEN
    ).saving
    return {
        "weights": hash_weights(START),
        "informative": report.signal(ROLLOUTS).share.value,
        "pass_rate": report.pass_rate.value,
        "uniform_tokens": base,
        "dapo": [report.spending("dapo").saving.value] * 3,
        "speed": [speed.value, speed.low, speed.high],
        "cures": [float(x) for x in (np.mean(plays), *np.quantile(plays, (0.025, 0.975)))],
    }


def matrix_of(share: int) -> Path:
    """Writes the matrix of a share and its recipe; `train.py` would read it too."""
    files.write_text(RUNS / "recipe.toml", tomli_w.dumps(RECIPE))
    # the first without hopeless prompts
    stages = [{"subset": "short", "steps": 4}, {"subset": "all"}]
    cures, less = (
        {"curriculum.cures.tau": TAU},
        {"token_budget": BUDGET[share] * 2 // 5} if share <= 12 else {},
    )
    staged = {**less, **cures, "curriculum.max_age": 1, "curriculum.stages": stages}
    own = {"speed": less, "cures": cures, "all": staged}
    # the defaults
    then = {"curriculum.max_age": 0, "curriculum.look_ahead": 1.0, "curriculum.cures.prior": "even"}
    sets = {
        arm: {**then, "curriculum.name": arm, "curriculum.groups": groups_of(arm, share)}
        for arm in ARMS
    }
    arms = [{"name": arm, "set": {**sets[arm], **own.get(arm, {})}} for arm in ARMS]
    tree = {
        "recipe": "recipe.toml",
        "seeds": [*TUNING, *COUNTED, PILOT],
        "start": str(START.resolve()),
        "seconds": CAP,
    }
    path, common = (
        RUNS / f"share{share}.toml",
        {"data": data_of(share), "token_budget": BUDGET[share]},
    )
    files.write_text(path, tomli_w.dumps({**tree, "set": common, "arm": arms}))
    return path


def run_cell(share: int, arm: str, seed: int, seconds: float) -> bool:
    """Trains a cell unless it is stored, and stores what the table needs; False if there was no time."""
    name, key = f"cells{share}.json", f"{arm}-seed{seed}"
    stored = read(name)
    plan = read_plan(matrix_of(share), arms=[arm], seeds=[seed])
    places = Places(plan=plan, runs=RUNS / f"share{share}", out=RUNS / "cells")
    (cell,) = plan.cells
    mark = hashlib.sha256(
        json.dumps(defining_settings(cell.settings), sort_keys=True).encode()
    ).hexdigest()[:12]
    if key in stored:
        if (stored[key]["settings"], stored[key]["start"]) != (mark, hash_weights(START)):
            raise WhetError(
                f"{key} in {RESULTS / name} was run with other settings or weights; move it away."
            )
        return True
    if not places.result(cell).is_file():
        start = make_start(plan, places.runs, print)
        if CellWork(
            places=places, start=start, beside=1, on_progress=print, about=circumstances()
        ).run(seconds):
            return False
    found = read_outcome(places.result(cell))
    if found["ended_by"] == "time":
        raise WhetError(
            f"{key} at {share}% was ended by the clock; remove {places.run(cell)} and its result."
        )
    useful = zip(column(found, "trained_signal"), column(found, "groups"), strict=True)
    stored[key] = {
        "tokens": [point.tokens for point in points(found, "tokens")],
        "accuracy": [point.accuracy for point in points(found, "tokens")],
        "spent": column(found, "tokens")[: FIRST + 1],
        "informative": [round((share or 0.0) * (groups or 0.0), 3) for share, groups in useful][
            : FIRST + 1
        ],
        "settings": mark,
        "start": found["start"]["weights"],
        "updates": found["rows"][-1][0],
        **{name: found[name] for name in ("wall_s", "commit", "date")},
    }
    write(name, stored)
    return True


def run_cells(seconds: float, shares: Sequence[int], pilot: bool) -> None:
    """The cells in their order; the target of a share is stored when its tuning runs are, before any counted one."""
    # one core a cell, the same rounding everywhere
    os.environ["OMP_NUM_THREADS"], begun = "1", time.monotonic()
    wanted = (
        [(share, arm, PILOT) for share in (12, 50) for arm in ("uniform", "cures")]
        if pilot
        else cells_in_order()
    )
    for share, arm, seed in [cell for cell in wanted if cell[0] in shares]:
        if seed in COUNTED:
            if not read(f"probe{share}.json"):
                raise WhetError(
                    f"Counted runs come after the forecast, and {share}% has none; call probe first."
                )
            if not read(f"target{share}.json"):
                tuned = [
                    read(f"cells{share}.json")[f"uniform-seed{tuning}"]["accuracy"]
                    for tuning in TUNING
                ]
                write(
                    f"target{share}.json",
                    {"target": target_of(tuned), "start": fmean(c[0] for c in tuned)},
                )
        if not run_cell(share, arm, seed, seconds - (time.monotonic() - begun)):
            print("The rest is left for another time; the same command goes on.")
            return


# ---- table


def measured(share: int) -> dict[str, dict[str, list[float]]]:
    """By measure and arm: the tokens of each counted seed that is stored."""
    cells, target = read(f"cells{share}.json"), read(f"target{share}.json").get("target", math.inf)
    mine = {
        arm: [cells[key] for seed in COUNTED if (key := f"{arm}-seed{seed}") in cells]
        for arm in ARMS
    }
    mine = {arm: found for arm, found in mine.items() if found and mine["uniform"]}
    return {
        "group": {
            arm: [tokens_per_group(c["spent"], c["informative"]) for c in found]
            for arm, found in mine.items()
        },
        "target": {
            arm: [tokens_to(c["tokens"], c["accuracy"], target) for c in found]
            for arm, found in mine.items()
        },
    }


def range_text(value: float, low: float, high: float) -> str:
    return (
        "never"
        if value == 0
        else "–"
        if math.isnan(value)
        else f"{value:.2f} ({low:.2f}–{high:.2f})"
    )


def tabulate() -> None:
    head = [
        "share",
        "arm",
        "seeds",
        "forecast",
        "per informative group",
        "near",
        "to the target",
        "near",
    ]
    lines, verdicts, curves = (
        [head, ["---"] * len(head)],
        [""],
        dict[str, list[tuple[float, float]]](),
    )
    for share in SHARES:
        forecast, found = read(f"probe{share}.json"), measured(share)
        values = {m: {arm: saving(by["uniform"], by[arm]) for arm in by} for m, by in found.items()}
        for arm in [arm for arm in ARMS[1:] if arm in values["group"]]:
            known = forecast.get(arm)
            line = [
                f"{share}%",
                arm,
                str(len(found["group"][arm])),
                range_text(*known) if known else "–",
            ]
            for m, by in found.items():
                near = ("yes" if within(known[0], values[m][arm]) else "no") if known else "–"
                line += [range_text(values[m][arm], *saving_interval(by["uniform"], by[arm])), near]
                curves.setdefault(f"{arm}, {m}", []).append((share, values[m][arm]))
            lines.append(line)
            if known:
                curves.setdefault(f"{arm}, forecast", []).append((share, known[0]))
        if {"speed", "cures"} <= values["group"].keys():
            told = {arm: forecast[arm][0] for arm in ("speed", "cures")}
            yes = ["counts" if counts(told, values[m]) else "does not count" for m in values]
            verdicts.append(
                f"- {share}%: {yes[0]} per informative group; {yes[1]} by tokens to the target."
            )
    note = "Savings: uniform's tokens over the arm's, with 95% ranges. "
    note += (
        "The forecast for cures is the play of `whet probe`, over the 8 updates that are measured."
    )
    text = [
        f"# Dose and response\n\n{note}\n",
        *(f"| {' | '.join(line)} |" for line in lines),
        *verdicts,
    ]
    files.write_text(RESULTS / "dose.md", "\n".join(text) + "\n")
    shown = {
        label: [p for p in c if p[1] > 0]
        for label, c in curves.items()
        if label.startswith(("speed", "cures"))
    }
    about = {
        "title": "saving against uniform",
        "x_label": "informative prompts, %",
        "x_show": "{:.0f}".format,
    }
    if drawn := figure([FigureLine(label, [c]) for label, c in shown.items()], **about):
        files.write_text(RESULTS / "dose.svg", drawn)
    print("\n".join(text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("base", "probe", "run", "table"))
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="Of run: begin no cell that would end later.",
    )
    parser.add_argument("--shares", type=int, nargs="+", default=SHARES, choices=SHARES)
    parser.add_argument(
        "--pilot",
        action="store_true",
        help="Of run: only the cells by which the sizes were chosen.",
    )
    options = parser.parse_args()
    try:
        if options.what == "probe":
            # never made again
            for share in [share for share in options.shares if not read(f"probe{share}.json")]:
                write(f"probe{share}.json", probe_share(share))
        elif options.what == "run":
            run_cells(options.seconds, options.shares, options.pilot)
        else:
            {"base": make_dose_base, "table": tabulate}[options.what]()
    except WhetError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
