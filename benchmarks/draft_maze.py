"""Does speculation pay on mazes? One training run whose updates take turns: rollouts without drafts, then with them.

    python benchmarks/draft_maze.py
    python benchmarks/draft_maze.py --device cpu --groups 4 --rollouts 4 --limit 128 --warm 1 --updates 3

It trains by maze.toml, grids and weights included, but under a limit that lets most searches end (384 tokens instead of
16), with the curriculum uniform and without evaluation. The base writes depth-first searches, back-tracks too, so the
responses differ much in length, and a search that turns back names cells that stand in its text already. Nothing is
made to be guessed: the text is what the policy writes by itself.

Two engines decode the same weights, update by update in turn. One is built as for `draft.drafters = []`, so that it
carries no cost of speculation; the other with the drafters and the chooser of a run. Drafts change no token but for
rounding (docs/lossless.md, tests/test_draft_run.py), so the policy is that of a plain run. Seconds are those of the
rollouts (time/generate) per token that they generate; their ratio has a 95% bootstrap interval over updates. The first
updates of either kind warm it up and do not count. `copied` is the share of tokens that were drafted: apart for
responses that ended and for those that the limit cut, since a walk that never ends may go in circles, which are easy to
guess. `by_batch` divides the updates with drafts by the rows that were under way. It writes draft_maze.json after every
update.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from command_line import RESULTS, Out, run_script, tell
from draft_steps import OnLine, train_followed
from draft_watch import Step, Watch, by_batch, chances
from rich.table import Table

from whet import config, files
from whet.assembly import Parts, build_engine
from whet.draft.base import Chooser
from whet.recipe import dump_config, load_config, read_toml
from whet.rollout.engine import LocalEngine
from whet.terminal import Sets, out_console
from whet.tools.experiment import circumstances
from whet.types import Rollout

app = typer.Typer(add_completion=False)
HERE = Path(__file__).resolve().parent
FILE = "draft_maze.json"
KINDS = ("plain", "drafted")
DRAWS = 2000
"""Resamples of the bootstrap."""
MEANS = {
    "seconds": "time/generate",
    "tokens": "rollout/tokens",
    "steps": "rollout/steps",
    "tail_share": "rollout/tail_share",
    "accept_length": "draft/accept_length",
    "reward": "reward/mean",
    "length": "length/mean",
    "p50": "length/p50",
    "p90": "length/p90",
    "p99": "length/p99",
    "max": "length/max",
    "truncated": "length/truncated",
}
"""Metrics of an update whose means over the updates of a kind are told. tail_share: of the time, with a quarter of the
slots in use or less."""

Row = Mapping[str, Any]


class Turns:
    """Two engines that hold the same weights. The loop takes them for one: the engine whose turn it is."""

    def __init__(self, engines: Mapping[str, LocalEngine]) -> None:
        self.engines, self.kind = engines, KINDS[0]
        self.written: Counter[str] = Counter()
        """Tokens, and those that were drafted, by how a response ended; since it was last cleared."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engines[self.kind], name)

    def collect(self, early: Callable[[list[Rollout]], None] | None = None) -> list[Rollout]:
        done = self.engines[self.kind].collect(early)
        for rollout in done:
            self.written[rollout.finish] += rollout.length
            self.written[f"{rollout.finish}_drafted"] += rollout.accepted
        return done

    def update(self, version: int) -> None:
        for engine in self.engines.values():
            engine.update(version)

    def release(self) -> None:
        for engine in self.engines.values():
            engine.release()

    def take_back(self) -> None:
        for engine in self.engines.values():
            engine.take_back()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


class Follower:
    """Watches the run: writes down each update, and gives the next one to the other engine."""

    def __init__(self, found: dict[str, Any], out: Path, on_progress: OnLine) -> None:
        self.found, self.out, self.on_progress = found, out, on_progress
        self.steps: list[Step] = []
        """Steps of the updates with drafts that count; those that fed prompts are not among them."""

    def attach(self, parts: Parts) -> None:
        """Adds the engine without drafts to that of the run."""
        assert parts.model is not None and isinstance(parts.engine, LocalEngine)
        self.watch = Watch(Chooser())
        if parts.engine.speculation is not None:
            self.watch.chooser = parts.engine.speculation.chooser
            parts.engine.speculation.chooser = self.watch
        without = parts.plan.settings.model_copy(update={"draft": config.Draft()})
        plain = build_engine(dataclasses.replace(parts.plan, settings=without), parts.model, parts.plan.room)
        plain.update(parts.learner.version)
        self.turns = Turns({"plain": plain, "drafted": parts.engine})
        parts.engine = self.turns  # type: ignore[assignment]

    def update(self, metrics: dict[str, float], progress: float) -> None:
        if metrics["step"] == 0:
            return
        turns, rows = self.turns, self.found["rows"]
        kept = {key: value for key, value in metrics.items() if key.startswith(("time/", "draft/"))}
        kept |= {name: metrics[name] for name in MEANS.values() if name in metrics}
        row = {"step": metrics["step"], "kind": turns.kind, **kept, "written": dict(turns.written)}
        rows.append(row)
        steps = self.watch.take()
        if len(rows) > 2 * self.found["warm"]:
            self.steps += steps
        self.found |= {"summary": summary(rows, self.found["warm"]), "chances": chances(self.steps)}
        self.found["by_batch"] = by_batch(self.steps)
        files.write_text(self.out / FILE, json.dumps(self.found, indent=1) + "\n")
        spent = f"{row['time/generate']:.3f} s, {row['rollout/tokens']:,.0f} tokens in {row['rollout/steps']:.0f} steps"
        self.on_progress(f"update {row['step']:.0f}, {turns.kind}: {spent}")
        turns.written.clear()
        turns.kind = KINDS[len(rows) % 2]

    def message(self, text: str) -> None:
        self.on_progress(text)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None: ...


def settings_of(
    sizes: Mapping[str, int], *, device: str, drafters: Sequence[str] = ("suffix",), sets: Sequence[str] = ()
) -> config.Config:
    """maze.toml with long responses and no evaluation; only as many grids are drawn as the run asks for."""
    tree = read_toml(HERE / "maze.toml")
    tree["data"][0]["options"]["train_count"] = sizes["steps"] * sizes["groups"]
    del tree["eval"]
    asked = {
        "steps": sizes["steps"],
        "token_budget": 0,
        "model.name": str(HERE / "starts" / "maze"),
        "model.device": device,
        "model.dtype": "float32" if device == "cpu" else tree["model"]["dtype"],
        "rollout.slots": sizes["groups"] * sizes["rollouts"],
        "rollout.max_tokens": sizes["limit"],
        "rollout.context": 0,
        "curriculum.name": "uniform",
        "curriculum.groups": sizes["groups"],
        "curriculum.rollouts": sizes["rollouts"],
        "draft.drafters": list(drafters),
    }
    return load_config(None, [*(f"{key}={json.dumps(value)}" for key, value in asked.items()), *sets], tree)


def take_turns(
    settings: config.Config, *, warm: int, out: Path, on_progress: OnLine = lambda line: None
) -> dict[str, Any]:
    """Train by the recipe, whose updates take turns; what was found. warm: updates of each kind that do not count."""
    found: dict[str, Any] = {**circumstances(), "warm": warm, "recipe": dump_config(settings), "rows": []}
    files.make_folder(out)
    follower = Follower(found, out, on_progress)
    train_followed(settings, follower, follower.attach)
    return found


# ---- figures


def summary(rows: Sequence[Row], warm: int) -> dict[str, Any]:
    """Means of each kind, and how many times as fast drafts are; {} before both kinds have an update that counts."""
    counted = {kind: [row for row in rows if row["kind"] == kind][warm:] for kind in KINDS}
    if not all(counted.values()):
        return {}
    found: dict[str, Any] = {kind: means(own) for kind, own in counted.items()}
    for name, seconds in (("faster", generating), ("update_faster", updating)):
        plain, drafted = (np.array([(seconds(row), row["rollout/tokens"]) for row in counted[kind]]) for kind in KINDS)
        found[name] = float(faster(plain, drafted))
        found[f"{name}_interval"] = interval(plain, drafted)
    return found


def generating(row: Row) -> float:
    return float(row["time/generate"])


def updating(row: Row) -> float:
    """Seconds of the whole update but for what is written to files."""
    return float(row["time/total"] - row.get("time/save", 0.0))


def means(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {"updates": len(rows)}
    for name, metric in MEANS.items():
        if values := [row[metric] for row in rows if metric in row]:
            found[name] = float(np.mean(values))
    written = sum((Counter(row["written"]) for row in rows), Counter[str]())
    found["copied"] = {end: written[f"{end}_drafted"] / written[end] for end in ("stop", "length") if written[end]}
    return found


def faster(plain: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """Seconds per token without drafts, of those with them. Both are [..., updates, 2]: seconds, tokens.

    >>> float(faster(np.array([[3.0, 10], [5.0, 30]]), np.array([[1.0, 20], [3.0, 20]])))
    2.0
    """
    (spent, made), (ours, written) = (np.moveaxis(of.sum(-2), -1, 0) for of in (plain, drafted))
    ratio: np.ndarray = (spent / made) / (ours / written)
    return ratio


def interval(plain: np.ndarray, drafted: np.ndarray) -> tuple[float, float]:
    """95% of the ratio when updates of each kind are drawn again.

    >>> interval(np.array([[4.0, 8]] * 4), np.array([[2.0, 8]] * 4))
    (2.0, 2.0)
    """
    rng = np.random.default_rng(0)
    again = (of[rng.integers(len(of), size=(DRAWS, len(of)))] for of in (plain, drafted))
    low, high = np.quantile(faster(*again), (0.025, 0.975)).tolist()
    return low, high


# ---- the command line


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")] = "auto",
    groups: Annotated[int, typer.Option(min=1, help="Grids of an update.")] = 64,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts of a grid.")] = 8,
    limit: Annotated[int, typer.Option(min=2, help="Tokens of a response at most.")] = 384,
    warm: Annotated[int, typer.Option(min=1, help="Updates of each kind that warm up.")] = 3,
    updates: Annotated[int, typer.Option(min=2, help="Updates of each kind that count.")] = 30,
    drafter: Annotated[list[str] | None, typer.Option(help="suffix, ngram or eagle; each --drafter adds one.")] = None,
    sets: Sets = None,
    out: Out = RESULTS,
) -> None:
    """Compare updates without drafts and with them, in one run on mazes."""
    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"groups": groups, "rollouts": rollouts, "limit": limit, "steps": 2 * (warm + updates)}
    settings = settings_of(sizes, device=where, drafters=drafter or ["suffix"], sets=sets or [])
    result = take_turns(settings, warm=warm, out=out, on_progress=tell)
    show(result["summary"])
    show_batches(result)


def show(found: Mapping[str, Any]) -> None:
    """Both kinds side by side, then the verdict."""
    names = ("seconds", "tokens", "steps", "tail", "accept", "copied, ended", "cut", "p50", "p90", "p99", "longest")
    table = Table("", *names, "truncated")
    for kind in KINDS:
        own = found[kind]
        copied = [f"{own['copied'][end]:.0%}" if end in own["copied"] else "-" for end in ("stop", "length")]
        cells = [f"{own['seconds']:.3f}", f"{own['tokens']:,.0f}", f"{own['steps']:.0f}", f"{own['tail_share']:.0%}"]
        cells += [f"{own.get('accept_length', 1.0):.2f}", *copied, *(f"{own[p]:.0f}" for p in ("p50", "p90", "p99"))]
        table.add_row(kind, *cells, f"{own['max']:.0f}", f"{own['truncated']:.1%}")
    out_console.print(table)
    counts = " and ".join(f"{found[kind]['updates']} {kind}" for kind in KINDS)
    for name, what in (("faster", "the rollouts"), ("update_faster", "whole updates")):
        low, high = found[f"{name}_interval"]
        tell(f"Per token, drafts make {what} {found[name]:.2f} times as fast (95%: {low:.2f} to {high:.2f}; {counts}).")


def show_batches(result: Mapping[str, Any]) -> None:
    """Where it speculates, by the rows that are still under way, and how often each token of a draft is right."""
    table = Table("rows, at most", "steps", "with drafts", "accept length")
    for rows, own in reversed(result["by_batch"].items()):
        length = "-" if own["accept_length"] is None else f"{own['accept_length']:.2f}"
        table.add_row(rows, f"{own['steps']}", f"{own['speculating']:.0%}", length)
    out_console.print(table)
    for name, places in result["chances"].items():
        tell(f"{name}: of drafted tokens, right where those before were: {', '.join(f'{c:.2f}' for c in places[:8])}")


if __name__ == "__main__":
    run_script(app)
