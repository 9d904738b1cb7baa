"""Does speculation pay on mazes? One training run that decodes each update's rollouts without drafts and with them.

    python benchmarks/draft_maze.py
    python benchmarks/draft_maze.py --device cpu --groups 4 --rollouts 4 --limit 128 --warm 1 --updates 4

It trains by maze.toml, grids and weights included, but under a limit that lets most searches end (384 tokens instead of
16), with the curriculum uniform, without evaluation, and with one update per batch at a learning rate of 1e-5. The
recipe's 1e-4 and four updates per batch are meant for its short responses: under the long limit they make the policy
collapse, and responses that run to the limit are no searches any more. The base searches depth first and writes
back-tracks too, so the responses differ much in length, and a search that turns back names cells that stand in its text
already. Nothing is made to be guessed: the text is what the policy writes by itself.

Two engines hold the same weights. One is built as for `draft.drafters = []`, so that it carries no cost of speculation;
the other with the drafters and the chooser of a run. Each update asks one of them, whose rollouts are trained on, and
then the other for the same rollouts; the next update asks them in the other order. So both decode the same tokens,
which drafts do not change but for rounding: `same` is the share of rollouts that are equal. Updates of one kind alone
could not be compared as well: nearly every one lasts until a response reaches the limit, however many tokens it has.
Rollouts go to the judge when both engines are done, so that neither pays for it.

`faster` is the seconds of the rollouts without drafts over those with them, and `update_faster` the same for updates as
they would be with one engine alone, judging behind the rollouts and an EAGLE drafter's lessons included; 95% intervals
are a bootstrap over updates. `_median` is the median of the updates' own ratios, which one slow update does not move.
The first updates warm up and do not count. `copied` is the share of tokens that were drafted, for responses that ended
and for those that the limit cut: a walk that never ends may go in circles, which are easy to guess. `by_batch` divides
the steps of the engine with drafts by the rows that were under way. It writes draft_maze.json after every update.
"""

from __future__ import annotations

import dataclasses
import json
import time
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
from whet.build import Parts, build_engine
from whet.recipe import dump_config, load_config, read_toml
from whet.rollout.engine import LocalEngine
from whet.terminal import Sets, out_console
from whet.tools.experiment import circumstances
from whet.types import Request, Rollout

app = typer.Typer(add_completion=False)
HERE = Path(__file__).resolve().parent
FILE = "draft_maze.json"
KINDS = ("plain", "drafted")
ENDS = {"stop": "responses that ended", "length": "those that the limit cut"}
DRAWS = 2000
"""Resamples of the bootstrap."""
ENGINE = {
    "tokens": "rollout/tokens",
    "steps": "rollout/steps",
    "tail_share": "rollout/tail_share",
    "accept_length": "draft/accept_length",
}
"""What each engine counts. tail_share: of the time, with a quarter of the slots in use or less."""
LENGTHS = (
    "length/mean",
    "length/p50",
    "length/p90",
    "length/p99",
    "length/max",
    "length/truncated",
    "reward/mean",
)

Row = Mapping[str, Any]


class Turns:
    """Two engines that hold the same weights and both decode what is asked. The loop takes them for one engine: that
    whose turn it is, and whose rollouts it gets."""

    def __init__(self, engines: Mapping[str, LocalEngine]) -> None:
        self.engines, self.kind, self.other = engines, *KINDS
        self.asked: Sequence[Request] = ()
        # Of an update:
        self.seconds: Counter[str] = Counter()
        self.equal: list[bool] = []
        # tokens, and those that were drafted, by how a response ended
        self.written: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engines[self.kind], name)

    def submit(self, requests: Sequence[Request]) -> None:
        """To the engine that comes first: from now on it is not idle."""
        self.asked, begun = requests, time.perf_counter()
        self.engines[self.kind].submit(requests)
        self.seconds[self.kind] += time.perf_counter() - begun

    def collect(self, early: Callable[[list[Rollout]], None] | None = None) -> list[Rollout]:
        """Under barrier: all that was asked is finished. What the caller does with it early is not timed."""
        begun = time.perf_counter()
        done = self.engines[self.kind].collect()
        ended = time.perf_counter()
        self.engines[self.other].submit(self.asked)
        again = self.engines[self.other].collect()
        self.seconds += Counter({self.kind: ended - begun, self.other: time.perf_counter() - ended})
        if early is not None:
            early(done)
        ids = {rollout.key: rollout.trace.ids for rollout in again if rollout.trace is not None}
        self.equal += [
            r.trace is not None and np.array_equal(r.trace.ids, ids[r.key]) for r in done
        ]
        for rollout in done if self.kind == "drafted" else again:
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

    def swap(self) -> None:
        """The next update begins, with the other engine first."""
        self.kind, self.other = self.other, self.kind
        for own in (self.seconds, self.equal, self.written):
            own.clear()


class Follower:
    """Watches the run and writes down each update."""

    def __init__(self, found: dict[str, Any], out: Path, on_progress: OnLine) -> None:
        self.found, self.out, self.on_progress = found, out, on_progress
        # with drafts, in the updates that count; without those that fed prompts
        self.steps: list[Step] = []

    def attach(self, parts: Parts) -> None:
        """Adds the engine without drafts to that of the run."""
        assert parts.model is not None and isinstance(parts.engine, LocalEngine)
        assert parts.engine.speculation is not None, "the recipe names a drafter"
        self.watch = Watch(parts.engine.speculation.chooser)
        parts.engine.speculation.chooser = self.watch
        without = parts.plan.settings.model_copy(update={"draft": config.Draft()})
        plain = build_engine(
            dataclasses.replace(parts.plan, settings=without), parts.model, parts.plan.room
        )
        plain.update(parts.learner.version)
        self.turns = Turns({"plain": plain, "drafted": parts.engine})
        parts.engine = self.turns  # type: ignore[assignment]

    def update(self, metrics: dict[str, float], progress: float) -> None:
        if metrics["step"] == 0:
            return
        turns, found = self.turns, self.found
        counted = {turns.kind: metrics, turns.other: turns.engines[turns.other].stats()}
        row: dict[str, Any] = {
            "step": metrics["step"],
            "first": turns.kind,
            "same": float(np.mean(turns.equal)),
        }
        for kind, own in counted.items():
            row[kind] = {name: own[metric] for name, metric in ENGINE.items() if metric in own}
            row[kind]["seconds"] = turns.seconds[kind]
        row |= {name: metrics[name] for name in LENGTHS if name in metrics}
        row["lessons"] = metrics.get("time/draft", 0.0)
        apart = metrics.get("time/save", 0.0) + row["lessons"] + sum(turns.seconds.values())
        row["rest"] = metrics["time/total"] - apart
        found["rows"].append({**row, "written": dict(turns.written)})
        steps = self.watch.take()
        self.steps += steps if len(found["rows"]) > found["warm"] else []
        found["by_batch"], found["chances"] = by_batch(self.steps), chances(self.steps)
        found["summary"] = summary(found["rows"][found["warm"] :])
        files.write_text(self.out / FILE, json.dumps(found, indent=1) + "\n")
        told = ", ".join(
            f"{k} {row[k]['seconds']:.3f} s in {row[k]['steps']:.0f} steps" for k in KINDS
        )
        self.on_progress(f"update {row['step']:.0f}, {row['plain']['tokens']:,.0f} tokens: {told}")
        turns.swap()

    def message(self, text: str) -> None:
        self.on_progress(text)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None: ...


def settings_of(
    sizes: Mapping[str, int],
    *,
    device: str,
    drafters: Sequence[str] = ("suffix",),
    sets: Sequence[str] = (),
) -> config.Config:
    """maze.toml with long responses, small updates and no evaluation; as many grids are drawn as the run asks for."""
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
        "learn.lr": 1e-5,
        "learn.minibatches": 1,
        "draft.drafters": list(drafters),
    }
    return load_config(
        None, [*(f"{key}={json.dumps(value)}" for key, value in asked.items()), *sets], tree
    )


def take_turns(
    settings: config.Config, *, warm: int, out: Path, on_progress: OnLine = lambda line: None
) -> dict[str, Any]:
    """Train by the recipe with both engines; what was found. warm: updates that do not count."""
    found: dict[str, Any] = {
        **circumstances(),
        "warm": warm,
        "recipe": dump_config(settings),
        "rows": [],
    }
    files.make_folder(out)
    follower = Follower(found, out, on_progress)
    train_followed(settings, follower, follower.attach)
    return found


# ---- figures


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Means of each kind and of both, and how many times as fast drafts are; {} where there are no updates."""
    if not rows:
        return {}
    found: dict[str, Any] = {"updates": len(rows), "same": mean(rows, "same")}
    found |= {name: mean(rows, name) for name in LENGTHS}
    for kind in KINDS:
        found[kind] = {
            name: mean([row[kind] for row in rows], name) for name in ("seconds", *ENGINE)
        }
    written = sum((Counter(row["written"]) for row in rows), Counter[str]())
    found["copied"] = {
        end: written[f"{end}_drafted"] / written[end] for end in ("stop", "length") if written[end]
    }
    pairs = np.array([[row[kind]["seconds"] for kind in KINDS] for row in rows])
    whole = pairs + np.array([[row["rest"], row["rest"] + row["lessons"]] for row in rows])
    for name, of in (("faster", pairs), ("update_faster", whole)):
        found[name], found[f"{name}_interval"] = float(faster(of)), interval(of)
        found[f"{name}_median"] = float(np.median(of[:, 0] / of[:, 1]))
    return found


def mean(rows: Sequence[Row], name: str) -> float | None:
    """Of those that have it; None where none has."""
    values = [row[name] for row in rows if name in row]
    return float(np.mean(values)) if values else None


def faster(pairs: np.ndarray) -> np.ndarray:
    """All seconds without drafts over all with them, of [..., updates, 2].

    >>> float(faster(np.array([[3.0, 1.0], [5.0, 3.0]])))
    2.0
    """
    plain, drafted = np.moveaxis(pairs.sum(-2), -1, 0)
    ratio: np.ndarray = plain / drafted
    return ratio


def interval(pairs: np.ndarray) -> tuple[float, float]:
    """95% of the ratio when updates are drawn again.

    >>> interval(np.array([[4.0, 2.0]] * 4))
    (2.0, 2.0)
    """
    drawn = np.random.default_rng(0).integers(len(pairs), size=(DRAWS, len(pairs)))
    low, high = np.quantile(faster(pairs[drawn]), (0.025, 0.975)).tolist()
    return low, high


# ---- the command line


@app.command()
def main(
    device: Annotated[
        str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")
    ] = "auto",
    groups: Annotated[int, typer.Option(min=1, help="Grids of an update.")] = 64,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts of a grid.")] = 8,
    limit: Annotated[int, typer.Option(min=2, help="Tokens of a response at most.")] = 384,
    warm: Annotated[int, typer.Option(min=1, help="Updates that warm up.")] = 4,
    updates: Annotated[int, typer.Option(min=2, help="Updates that count.")] = 30,
    drafter: Annotated[
        list[str] | None, typer.Option(help="suffix, ngram or eagle; each --drafter adds one.")
    ] = None,
    sets: Sets = None,
    out: Out = RESULTS,
) -> None:
    """Decode the rollouts of a run on mazes without drafts and with them."""
    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"groups": groups, "rollouts": rollouts, "limit": limit, "steps": warm + updates}
    settings = settings_of(sizes, device=where, drafters=drafter or ["suffix"], sets=sets or [])
    result = take_turns(settings, warm=warm, out=out, on_progress=tell)
    show(result["summary"])
    show_batches(result)


def show(found: Mapping[str, Any]) -> None:
    """Both kinds side by side, then the verdict."""
    table = Table("means of an update", "seconds", "steps", "tail share", "accept length")
    for kind in KINDS:
        own = found[kind]
        length = "-" if own["accept_length"] is None else f"{own['accept_length']:.2f}"
        table.add_row(
            kind, f"{own['seconds']:.3f}", f"{own['steps']:.0f}", f"{own['tail_share']:.0%}", length
        )
    out_console.print(table)
    p50, p90, p99, longest = (found[f"length/{name}"] for name in ("p50", "p90", "p99", "max"))
    lengths = f"median {p50:.0f}, 90% {p90:.0f}, 99% {p99:.0f}, longest {longest:.0f}"
    copied = " and ".join(
        f"{share:.0%} of the tokens of {ENDS[end]}" for end, share in found["copied"].items()
    )
    tell(
        f"{found['plain']['tokens']:,.0f} tokens; {lengths}; {found['length/truncated']:.1%} are cut."
    )
    tell(f"Drafts brought {copied}. {found['same']:.1%} of the rollouts are the same.")
    for name, what in (("faster", "The rollouts"), ("update_faster", "Whole updates")):
        low, high = found[f"{name}_interval"]
        told = (
            f"{what} are {found[name]:.2f} times as fast with drafts (95%: {low:.2f} to {high:.2f})"
        )
        tell(f"{told}, by the median of updates {found[f'{name}_median']:.2f} times.")


def show_batches(result: Mapping[str, Any]) -> None:
    """Where it speculates, by the rows that are still under way, and how often each token of a draft is right."""
    table = Table("rows, at most", "steps", "with drafts", "accept length")
    for rows, own in reversed(result["by_batch"].items()):
        length = "-" if own["accept_length"] is None else f"{own['accept_length']:.2f}"
        table.add_row(rows, f"{own['steps']}", f"{own['speculating']:.0%}", length)
    out_console.print(table)
    for name, places in result["chances"].items():
        tell(
            f"{name}: of drafted tokens, right where those before were: {', '.join(f'{c:.2f}' for c in places[:8])}"
        )


if __name__ == "__main__":
    run_script(app)
