"""The figures of docs/, as SVG, from stored results: `pip install "whet[plot]"`, then

    python benchmarks/plots.py --results benchmarks/results --out docs/evidence/figures --level 0.70

Reads curricula_few.json, curricula_many.json, calibration.json, snr.json, rollout_gpu.json and draft.json where they
are there, and draws what they hold: arms that were not run are left out, and a figure without data is not written. The
same results give the same bytes. A level is reached by the rule of `whet compare`: the first of two consecutive
evaluations at or above it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from curves import at, median_curve
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from whet.report import formats
from whet.report.arms import Curve, Point, arm_name
from whet.report.formats import Reach, median_reach, reach

MIXES = ("few", "many")
MAIN = ("uniform_16", "uniform_48", "dapo_16", "speed_16", "cures_16")
LIMITS = {
    "fixed_short_16": "short limit, fixed",
    "uniform_16": "long limit, fixed",
    "staged_16": "short, then long",
}
UPDATES = {"entropy": 2, "length": 3, "truncated": 4, "signal": 5}
"""Where they stand in a row of `updates`, behind step and tokens."""
COLOURS = ("#666666", "#000000", "#e69f00", "#0072b2", "#009e73", "#d55e00", "#cc79a7")
"""Okabe and Ito's, which the colour-blind can tell apart; dashes and marks tell the lines apart without colour."""
DASHES: tuple[Any, ...] = ("--", ":", (0, (5, 1, 1, 1)), "-", (0, (7, 2)), "-.", "-")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "whet",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Arm -> its runs, one a seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/figures"))
    parser.add_argument("--level", type=float, help="Of the ablations; else the highest that half of the arms reach.")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    mixes = {mix: read_runs(options.results / f"curricula_{mix}.json") for mix in MIXES}
    mixes = {mix: runs for mix, runs in mixes.items() if runs}
    with plt.rc_context(STYLE):
        figures = {"curricula": accuracy_figure(mixes) if mixes else None}
        for mix, runs in mixes.items():
            figures[f"ablations_{mix}"] = ablation_figure(runs, mix, options.level)
            figures[f"limits_{mix}"] = limits_figure(runs)
        figures["calibration"] = calibration_figure(read_json(options.results / "calibration.json"))
        figures["snr"] = snr_figure(read_json(options.results / "snr.json"))
        figures["rollout"] = rollout_figure(read_json(options.results / "rollout_gpu.json"))
        figures["speculation"] = speculation_figure(read_json(options.results / "draft.json"))
        for name, figure in figures.items():
            if figure is not None:
                figure.savefig(options.out / f"{name}.svg", metadata={"Date": None, "Creator": None})
                print(options.out / f"{name}.svg")


# What the files hold


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def read_runs(path: Path) -> dict[str, list[Mapping[str, Any]]]:
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for name, run in read_json(path).get("runs", {}).items():
        arms.setdefault(arm_name(name), []).append(run)
    return arms


def points(run: Mapping[str, Any]) -> list[Point]:
    return [Point(step=step, tokens=tokens, seconds=s, accuracy=a) for step, tokens, s, a in run["curve"]]


def accuracy_curves(runs: Sequence[Mapping[str, Any]]) -> list[Curve]:
    return [[(point.tokens, point.accuracy) for point in points(run)] for run in runs]


def update_curves(runs: Sequence[Mapping[str, Any]], what: str) -> list[Curve]:
    """Steps that did not measure it are left out."""
    place = UPDATES[what]
    curves = [[(row[1], row[place]) for row in run.get("updates", ()) if row[place] is not None] for run in runs]
    return [curve for curve in curves if curve]


def costs(runs: Sequence[Mapping[str, Any]], level: float) -> list[Reach]:
    return [reach(points(run), level, "tokens") for run in runs]


def common_level(arms: Runs) -> float | None:
    """The highest, in steps of 0.05, that the median run of half of the arms reaches."""
    levels = [k / 20 for k in range(20, 0, -1)]
    start = max(points(run)[0].accuracy for runs in arms.values() for run in runs)
    for level in (level for level in levels if level > start):
        reached = sum(median_reach(costs(runs, level)).known for runs in arms.values())
        if 2 * reached >= len(arms):
            return level
    return None


# The figures


def accuracy_figure(mixes: Mapping[str, Runs]) -> Figure:
    figure, panels = plt.subplots(1, len(mixes), figsize=(4.6 * len(mixes), 3.4), sharey=True, squeeze=False)
    for panel, (mix, arms) in zip(panels[0], mixes.items(), strict=True):
        for i, name in enumerate(MAIN):
            if name in arms:
                draw(panel, accuracy_curves(arms[name]), name, i)
        panel.set_title(f"{mix} informative prompts")
        tokens_axis(panel)
    panels[0][0].set_ylabel("greedy accuracy, held out")
    panels[0][-1].legend(loc="lower right")
    return tight(figure)


def ablation_figure(arms: Runs, mix: str, level: float | None) -> Figure | None:
    """A row for each arm: where it ended, and what the level took; dot the median, line the range over the seeds."""
    level = level if level is not None else common_level(arms)
    if level is None or len(arms) < 2:
        return None
    height = 0.9 + 0.24 * len(arms)
    figure, (ends, tokens) = plt.subplots(1, 2, figsize=(8.2, height), sharey=True)
    most = max(points(run)[-1].tokens for runs in arms.values() for run in runs)
    for row, (name, runs) in enumerate(arms.items()):
        i = MAIN.index(name) if name in MAIN else 5
        final = [run["accuracy"] for run in runs]
        dot_and_range(ends, row, median(final), min(final), max(final), i)
        draw_cost(tokens, row, costs(runs, level), most, i)
    ends.set_yticks(range(len(arms)), [f"{name} ({len(runs)})" for name, runs in arms.items()])
    ends.invert_yaxis()
    ends.set_title(f"final accuracy ({mix})")
    tokens.set_title(f"tokens to {formats.level(level)}")
    tokens_axis(tokens, label="arrow: a seed never got there;\nhollow: half of them or more")
    tokens.set_xlim(0, 1.05 * most)
    for panel in (ends, tokens):
        panel.grid(axis="y", visible=False)
    return tight(figure)


def draw_cost(panel: Axes, row: int, found: Sequence[Reach], most: float, i: int) -> None:
    """Where a run never got there, an arrow stands at the end; an unknown median is hollow, and there too."""
    middle = median_reach(found)
    ends = [cost.high if cost.known else most for cost in found]
    if not all(cost.known for cost in found):
        panel.plot(1.02 * most, row, ">", color=COLOURS[i], markersize=4)
    dot_and_range(panel, row, middle.low if middle.known else most, min(ends), max(ends), i, hollow=not middle.known)


def dot_and_range(
    panel: Axes, row: int, middle: float, low: float, high: float, i: int, *, hollow: bool = False
) -> None:
    panel.hlines(row, low, high, color=COLOURS[i], linewidth=2, alpha=0.5)
    panel.plot(
        middle, row, MARKS[i], color=COLOURS[i], markersize=5.5, markerfacecolor="white" if hollow else COLOURS[i]
    )


def limits_figure(arms: Runs) -> Figure | None:
    """Response limits: accuracy, entropy and the length of right answers at equal tokens."""
    present = [name for name in LIMITS if name in arms]
    if len(present) < 2:
        return None
    figure, panels = plt.subplots(1, 3, figsize=(10.2, 3.1))
    for i, name in enumerate(LIMITS):
        if name not in arms:
            continue
        measured = (accuracy_curves(arms[name]), *(update_curves(arms[name], what) for what in ("entropy", "length")))
        for panel, curves in zip(panels, measured, strict=True):
            draw(panel, curves, LIMITS[name], (5, 0, 3)[i])
    titles = ("greedy accuracy, held out", "entropy, nats a token", "mean length of right answers, tokens")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title)
        tokens_axis(panel)
    panels[0].legend(loc="lower right")
    return tight(figure)


def calibration_figure(result: Mapping[str, Any]) -> Figure | None:
    """Predicted against measured pass rate of prompts met again; the area of a mark is its share of the rollouts."""
    arms = {name: found["again"] for name, found in result.get("arms", {}).items() if found["again"]}
    mixes = [mix for mix in MIXES if any(name.endswith(f" {mix}") for name in arms)]
    if not mixes:
        return None
    figure, panels = plt.subplots(1, len(mixes), figsize=(4.1 * len(mixes), 4.4), sharey=True, squeeze=False)
    for panel, mix in zip(panels[0], mixes, strict=True):
        panel.plot((0, 1), (0, 1), color="#bbbbbb", linewidth=1)
        mine = {name: rows for name, rows in arms.items() if name.endswith(f" {mix}")}
        for i, (name, rows) in enumerate(mine.items(), start=3):
            draw_bins(panel, rows, name.removesuffix(f" {mix}"), i % len(COLOURS))
        panel.set_title(f"{mix} informative prompts")
        panel.set_xlabel("predicted pass rate (mean of the posterior)")
        panel.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
        panel.legend(loc="lower right")
    panels[0][0].set_ylabel("share of right answers")
    return tight(figure)


def draw_bins(panel: Axes, rows: Sequence[Sequence[float]], label: str, i: int) -> None:
    predicted, right, counts = zip(*rows, strict=True)
    sizes = [8 + 500 * count / sum(counts) for count in counts]
    panel.plot(predicted, right, color=COLOURS[i], marker=MARKS[i], markersize=3, linewidth=1, label=label)
    panel.scatter(predicted, right, sizes, color=COLOURS[i], marker=MARKS[i], alpha=0.6, linewidth=0)


def snr_figure(result: Mapping[str, Any]) -> Figure | None:
    """Signal-to-noise ratio of the gradient of one prompt by its pass rate, a panel for each group size."""
    measured = [row for row in result.get("prompts", ()) if any(found["value"] for found in row["snr"].values())]
    if not measured:
        return None
    sizes = [str(n) for n in result["sizes"]]
    figure, panels = plt.subplots(1, len(sizes), figsize=(3.5 * len(sizes), 3.3), sharey=True, squeeze=False)
    values = [row["snr"][n]["value"] or 0.0 for row in measured for n in sizes]
    floor = min(value for value in values if value > 0) / 3
    for panel, n in zip(panels[0], sizes, strict=True):
        rates, curves = result["curves"]["pass_rate"], result["curves"]
        bound = [math.nan if height is None else height for height in curves["bound"][n]]
        panel.plot(rates, bound, color=COLOURS[5], label="bound 4Np(1 - p), where it holds")
        panel.plot(rates, curves["bernoulli"][n], color=COLOURS[0], linestyle="--", label="one parameter, exact")
        draw_snr(panel, [(row["pass_rate"], row["snr"][n]) for row in measured], floor)
        panel.set(yscale="log", xlim=(-0.02, 1.02), xlabel="pass rate of the prompt")
        panel.set_title(f"N = {n}")
    panels[0][0].set_ylim(bottom=floor / 1.3)  # for all panels: they share the axis
    panels[0][0].set_ylabel("signal-to-noise ratio of the gradient")
    panels[0][-1].legend(loc="lower center", fontsize=7.5)
    return tight(figure)


def draw_snr(panel: Axes, rows: Sequence[tuple[float, Mapping[str, float | None]]], floor: float) -> None:
    """95% ranges; a ratio that came out at zero or below stands hollow at the bottom."""
    for rate, found in rows:
        value, low, high = found["value"], found["low"], found["high"]
        if value is not None and low is not None and high is not None:
            panel.vlines(rate, max(low, floor), max(high, floor), color=COLOURS[3], alpha=0.35, linewidth=1.2)
            inside = COLOURS[3] if value > 0 else "white"
            panel.plot(rate, max(value, floor), "o", color=COLOURS[3], markerfacecolor=inside, markersize=3.5)


def rollout_figure(result: Mapping[str, Any]) -> Figure | None:
    """Tokens a second of each peer in each cell, a panel for each shape; the line on a bar spans its repeats."""
    shapes = {name: found["cells"] for name, found in result.get("shapes", {}).items() if found["cells"]}
    if not shapes:
        return None
    wanted = ("whet", "vllm", "static", "generate_batch", "generate")
    figure, panels = plt.subplots(len(shapes), 1, figsize=(9.2, 2.9 * len(shapes)), squeeze=False)
    for panel, (shape, cells) in zip(panels[:, 0], shapes.items(), strict=True):
        for i, peer in enumerate(wanted):
            draw_rates(panel, cells, peer, (i - 2) * 0.17, (3, 5, 2, 6, 0)[i])
        panel.set_xticks(range(len(cells)), [cell_label(name) for name in cells])
        panel.set(yscale="log", ylabel="tokens/s", title=f"{shape} shape (*: a run of its own beside generate)")
        panel.set_ylim(top=3 * panel.get_ylim()[1])  # room for the legend
        panel.grid(axis="x", visible=False)
    panels[0][0].legend(loc="upper left", ncols=len(wanted), fontsize=7.5)
    return tight(figure)


def cell_label(name: str) -> str:
    """
    >>> cell_label("b64_c512_generate")
    'b64\\nc512*'
    """
    alone = name.endswith("_generate")
    return name.removesuffix("_generate").replace("_", "\n") + "*" * alone


def draw_rates(panel: Axes, cells: Mapping[str, Any], peer: str, offset: float, i: int) -> None:
    """Without the prefill in cells of a fixed context, with it in the others."""
    rows = []
    for place, cell in enumerate(cells.values()):
        found = cell["peers"].get(peer, {})
        rate = found.get("decode_tokens_per_second" if cell["decode_only"] else "tokens_per_second")
        if rate is not None:
            rounds = rate["all"][peer == "generate" and len(rate["all"]) > 1 :]  # whose first is cold
            rows.append((place + offset, median(rounds), min(rounds), max(rounds)))
    if rows:
        places, middles, lows, highs = zip(*rows, strict=True)
        panel.bar(places, middles, width=0.16, color=COLOURS[i], label=peer)
        panel.vlines(places, lows, highs, color="black", linewidth=1)


def speculation_figure(result: Mapping[str, Any]) -> Figure | None:
    """Who is still running when; what each drafter alone is worth by the length of its drafts; how often the tokens of
    a draft of eight are accepted."""
    rungs = result.get("rungs", {})
    if "off" not in rungs or "controller" not in rungs:
        return None
    figure, (running, worth, chance) = plt.subplots(1, 3, figsize=(10.2, 3.2))
    for name, i in {"off": 0, "bandit": 2, "controller": 3}.items():
        if name in rungs:
            draw_running(running, rungs[name]["running"], "plain" if name == "off" else name, i)
    running.set(title="requests running", xlabel="seconds", xlim=(0, None), ylim=(0, None))
    running.legend(loc="upper right")
    for name, i in {"suffix": 3, "ngram": 4, "eagle": 5}.items():
        draw_worth(worth, rungs, name, i)
        if accepted := rungs.get(f"{name}_8_1_9", {}).get("accepted_by_position", {}).get(name):
            style = {"color": COLOURS[i], "linestyle": DASHES[i], "marker": MARKS[i], "markersize": 4}
            chance.plot(range(1, len(accepted) + 1), accepted, label=name, **style)
    worth.axhline(rungs["controller"]["speed_up"]["median"], color="black", linewidth=1, linestyle=":")
    worth.text(1, rungs["controller"]["speed_up"]["median"], "controller", va="bottom", ha="right", fontsize=7.5)
    worth.texts[-1].set_transform(worth.get_yaxis_transform())
    worth.axhline(1, color="#888888", linewidth=1)
    worth.set(title="speed-up, one arm alone", xlabel="tokens drafted", xscale="log", ylim=(0, None))
    worth.set_xticks(depths := [2, 4, 8, 16, 32], [str(depth) for depth in depths])
    worth.minorticks_off()
    worth.legend(loc="lower left")
    chance.set(title="accepted, if those before it were", xlabel="place in a draft of 8", ylim=(0, 1))
    return tight(figure)


def draw_running(panel: Axes, curve: Sequence[Sequence[float]], label: str, i: int) -> None:
    """From the first moment at which anything ran."""
    begun = next((k for k, (_, rows) in enumerate(curve) if rows), len(curve))
    if begun < len(curve):
        seconds, rows = zip(*curve[begun:], strict=True)
        panel.step(seconds, rows, where="post", color=COLOURS[i], linestyle=DASHES[i], label=label)


def draw_worth(panel: Axes, rungs: Mapping[str, Any], name: str, i: int) -> None:
    """A line through the arms of one drafter; those across it span the rounds."""
    found = [(arm.split("_"), rung["speed_up"]) for arm, rung in rungs.items() if arm.startswith(f"{name}_")]
    rows = [(int(parts[1]), speed["median"], speed["min"], speed["max"]) for parts, speed in found]
    if rows:
        depths, middles, lows, highs = zip(*rows, strict=True)
        style = {"color": COLOURS[i], "linestyle": DASHES[i], "marker": MARKS[i], "markersize": 4}
        panel.plot(depths, middles, label=name, **style)
        panel.vlines(depths, lows, highs, color=COLOURS[i], linewidth=1)


# Drawing


def draw(panel: Axes, curves: Sequence[Curve], label: str, i: int) -> None:
    """The median of the seeds, in front of their range."""
    middle = median_curve(curves)
    if not middle:
        return
    xs = [x for x, _ in middle]
    if len(curves) > 1:
        heights = [[at(curve, x) for curve in curves] for x in xs]
        low, high = [min(ys) for ys in heights], [max(ys) for ys in heights]
        panel.fill_between(xs, low, high, color=COLOURS[i], alpha=0.15, linewidth=0)
    panel.plot(xs, [y for _, y in middle], color=COLOURS[i], linestyle=DASHES[i], label=f"{label} ({len(curves)})")


def tokens_axis(panel: Axes, label: str = "") -> None:
    panel.xaxis.set_major_formatter(lambda x, _: formats.count(x))
    panel.set_xlabel("tokens generated for training" + (f"\n({label})" if label else ""))
    panel.set_xlim(left=0)


def tight(figure: Figure) -> Figure:
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
