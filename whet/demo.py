"""`whet demo`: one base, then several curricula from the same start, side by side, on a CPU.

The base is warm-started on worked solutions and kept, so a second demo starts at once; the arms are ordinary
`whet train` processes, one thread each, followed through their run folders. Ends with a table and a page.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from whet import api, config, files
from whet.errors import WhetError
from whet.recipe import dump_config, parse_config
from whet.report.compare import compare_table
from whet.report.live import RunProgress, follow
from whet.report.page import write_page
from whet.run import best_checkpoint, read_metrics, read_rollouts

ACCURACY = "eval/held_out/accuracy"

ELICITED = (
    "What the steep part of the curves is: the base was taught to think step by step and then to blurt out answers, "
    "and the first updates mostly switch thinking back on. In {arm} the share of greedy answers that show their "
    "work went from {before:.0%} to {after:.0%} by step {step}, where accuracy was {accuracy:.2f}. That elicits a "
    "skill the base already had; only the slower climb from there on is new."
)


def run_demo(out: Path, seed: int, console: Console) -> None:
    tree = tomllib.loads(resources.files("whet").joinpath("demo.toml").read_text())
    tree["arm"]["seed"] = seed
    shared = {key: tree["arm"][key] for key in ("seed", "data", "rollout", "eval")}
    base = make_base(out / "base", merge(shared, tree["base"]), console)
    arms = {name: merge(merge(tree["arm"], arm), {"model": {"name": str(base)}}) for name, arm in tree["arms"].items()}
    folders = {name: out / name.replace(" ", "_") for name in arms}
    begin = time.monotonic()
    train_arms({folders[name]: parse_config(arm) for name, arm in arms.items()}, console)
    page = out / "report.html"
    note = honest_line(list(folders.values()))
    write_page(page, list(folders.values()), title="whet demo: chained arithmetic", note=note)
    console.print(compare_table(list(folders.values())))
    console.print(note, highlight=False)
    console.print(f"{time.monotonic() - begin:.0f} s. Curves and rollouts: {page}", highlight=False)


def honest_line(folders: Sequence[Path]) -> str:
    """What the best arm's curve shows, in numbers: an answer shows its work if it holds a running value, "=8"."""
    curves = {f: [(r["step"], r[ACCURACY]) for r in read_metrics(f) if r.get(ACCURACY) is not None] for f in folders}
    best = max(folders, key=lambda f: statistics.mean(accuracy for _, accuracy in curves[f][-3:]))
    shares: dict[int, list[bool]] = {}
    for row in read_rollouts(best):
        if row["phase"] == "eval":
            shares.setdefault(row["step"], []).append("=" in row["response"])
    thinks = {step: statistics.mean(shown) for step, shown in sorted(shares.items())}
    top = max(thinks.values())
    step = next(step for step, share in thinks.items() if share >= 0.95 * top)
    return ELICITED.format(
        arm=best.name, before=thinks[0], after=thinks[step], step=step, accuracy=dict(curves[best])[step]
    )


def make_base(folder: Path, tree: Mapping[str, Any], console: Console) -> Path:
    """The checkpoint all arms start from; an earlier one of the same recipe is taken as it is."""
    settings = parse_config(tree)
    done = best_checkpoint(folder) if folder.exists() else None
    if done is not None and (folder / "config.toml").read_text() == dump_config(settings):
        console.print(f"Starting from the base in {folder} (delete it to train it again).", highlight=False)
        return done
    replace_run(folder)
    console.print("Warm start on worked solutions: the base all arms share.")
    watcher = RunProgress()
    try:
        api.run_recipe(settings, folder, watcher=watcher)
    finally:
        watcher.close()
    made = best_checkpoint(folder)
    assert made is not None
    return made


def train_arms(arms: Mapping[Path, config.Config], console: Console) -> None:
    """As many at a time as there are cores; a failed arm ends the demo with its own words."""
    recipes = {}
    for folder, settings in arms.items():
        replace_run(folder)
        recipes[folder] = folder.with_suffix(".toml")
        files.write_text(recipes[folder], dump_config(settings))
    queue, running = list(arms), dict[Path, subprocess.Popen[bytes]]()

    def alive() -> bool:
        """Called by the live view a few times a second: starts what can start, notices what ended."""
        for folder, process in list(running.items()):
            if process.poll() is not None:
                del running[folder]
                if process.returncode != 0:
                    words = folder.with_suffix(".log").read_text(errors="replace").strip().splitlines()[-1:]
                    raise WhetError(f"The arm {folder.name} failed: {' '.join(words) or process.returncode}")
        while queue and len(running) < (os.cpu_count() or 1):
            folder = queue.pop(0)
            running[folder] = start_arm(recipes[folder], folder)
        return bool(running)

    try:
        follow(list(arms), alive, console=console)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def start_arm(recipe: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "whet", "train", str(recipe), "--out", str(folder)]
    log = folder.with_suffix(".log").open("wb")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def replace_run(folder: Path) -> None:
    """Removes an earlier run of the demo; anything else in its place is left alone and refused."""
    if not folder.exists():
        return
    if not (folder / "config.toml").is_file():
        raise WhetError(f"{folder} is in the way and holds no run; move it, or choose another --out.")
    shutil.rmtree(folder)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; a table laid over a list of one table merges with that; all else replaces."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, list) and len(old) == 1:
            merged[key] = [merge(old[0], value)]
        elif isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged
