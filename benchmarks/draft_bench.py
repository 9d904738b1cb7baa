"""A long-tailed batch without speculation and with ever more of it, rung by rung, the same tokens.

    python benchmarks/draft_bench.py --model DIR/model --train 4

The ladder: plain decoding; n-gram and suffix drafts of one fixed shape behind TLT's switch (off above 32 rows); the
controller over suffix drafts, which stand in for n-gram's; the same with EAGLE where a drafter is given or trained
here; with one that goes on learning from round to round (`draft_lessons.py`); TLT's bandit over all drafters; and every
single arm wherever it serves, so that the controller can be held against the best of them. Plain decoding is run twice
in each round: how far the two are apart is what no other difference may be mistaken for. Noise is keyed, so all rungs
write the same tokens: on a CPU that is demanded, in half precision on a GPU a draw may fall to the other side of
rounding and its rollout then goes its own way; how many did is written down, beside how many do in plain decoding by
batches of half the size, and with the longest rollout, which sets the makespan.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from command_line import RESULTS, Out, run_script, tell
from draft_lessons import CandidateAsked, Lessons, lessons_for, prepared
from draft_split import APART, HOST, Wanted, drafting_seconds, split, timed_share, untimed
from draft_watch import (
    Fixed,
    Step,
    Watch,
    WatchedCaptures,
    WatchedSpeculation,
    accept_length,
    arm_shares,
    by_batch,
    chances,
)
from rich.table import Table
from tail_work import TailWork
from transformers import PreTrainedModel

from whet import config, files
from whet.draft.base import OFF, Chooser, DraftArm
from whet.draft.controller import Bandit
from whet.draft.eagle import EagleHead
from whet.draft.speculation import DEPTHS, DRAFTERS, DraftGuard, build_speculation, serves
from whet.errors import WhetError
from whet.fast.graphs import Captures, GraphRunner, GraphRunners, buckets
from whet.fast.graphs import Key as GraphKey
from whet.rollout.engine import LocalEngine
from whet.terminal import out_console
from whet.tools.experiment import circumstances
from whet.types import Key, Rollout

app = typer.Typer()
GRAPHS = ("graphs", "graph_bytes", "graph_driver_bytes")
TRIES = 3
"""Runs at most to time drafts in: one may pass a batch size before all that is wanted there had its turn."""
POINTS = 60
"""Points of the curve of running requests."""


@dataclass(slots=True)
class DraftTaken:
    """One run of a rung."""

    seconds: float
    drafting: float | None
    """Seconds of drafts on the host; None where the device makes them, within the steps that verify."""
    steps: list[Step]
    """The steps that a chooser received: those that fed prompts are not among them."""
    running: list[tuple[float, int]]
    """Seconds, and rollouts that were under way."""
    stats: dict[str, float]
    lengths: dict[Key, int]
    same: float
    """Share of rollouts whose tokens are those of plain decoding."""
    uses: dict[GraphKey, int] = field(default_factory=dict)
    """Replays of drafters' graphs, where the device makes the drafts."""


@dataclass(slots=True)
class Bench:
    """An engine for each kind of rung."""

    model: PreTrainedModel
    work: TailWork
    head: EagleHead | None
    seed: int
    lessons: Lessons | None = None
    """Lessons of the rung whose drafter is trained."""
    engines: dict[str, LocalEngine] = field(default_factory=dict)
    speculations: dict[str, WatchedSpeculation] = field(default_factory=dict)
    drafters: dict[str, dict[str, DraftGuard]] = field(default_factory=dict)
    """All that an engine has; its speculation holds those of the rung."""
    watches: dict[str, Watch] = field(default_factory=dict)
    """One chooser per rung: choosers know from round to round what they have learnt, as in a training run."""
    plain: dict[Key, np.ndarray] = field(default_factory=dict)
    """What plain decoding wrote."""

    def engine(self, kind: str) -> LocalEngine:
        if kind not in self.engines:
            vocab = self.model.config.get_text_config().vocab_size
            speculation = WatchedSpeculation([make() for make in DRAFTERS.values()], Fixed(OFF), vocab=vocab)
            more: dict[str, Any] = {"eagle": self.head} if kind == "eagle" else {}
            if kind == "training":
                assert self.lessons is not None
                context = max(self.work.context, self.lessons.work.context)
                more = {"eagle": self.lessons.adaptive.live, "context": context}
            engine = self.engines[kind] = self._engine(self.work.rollouts, speculation=speculation, **more)
            self.speculations[kind], self.drafters[kind] = speculation, speculation.drafters
            if isinstance(engine.runner, GraphRunner):
                engine.runner.captures = WatchedCaptures(engine.runner.captures)
        return self.engines[kind]

    def _engine(self, slots: int, **more: Any) -> LocalEngine:
        prompts = {**self.work.prompts, **(self.lessons.work.prompts if self.lessons is not None else {})}
        how: dict[str, Any] = {"slots": slots, "context": self.work.context, "seed": self.seed, **more}
        runners = GraphRunners() if self.model.device.type == "cuda" else None
        return LocalEngine(self.model, encode=prompts.__getitem__, decode=lambda ids: "", runners=runners, **how)

    def control(self) -> float:
        """Share of rollouts that are the same in plain decoding by half as many at once: what rounding does alone."""
        engine = self._engine(max(1, self.work.rollouts // 2))
        engine.submit(self.work.requests)
        return self._same({r.key: r.trace.ids for r in engine.collect() if r.trace is not None})

    def _same(self, tokens: Mapping[Key, np.ndarray]) -> float:
        return sum(np.array_equal(tokens[key], ids) for key, ids in self.plain.items()) / len(self.plain)

    def run(self, rung: Rung) -> DraftTaken:
        """With the lesson before it, if the rung has lessons; and after it one more run, by EAGLE alone with drafts of
        one depth: the chooser may have preferred others, which says nothing of what was learnt."""
        if not rung.learning:
            return self._run(rung, rung.engine)
        assert self.lessons is not None
        lesson = self.lessons.take(self.engine(rung.engine))
        taken = self._run(rung, rung.engine)
        arm = DraftArm("eagle", ELASTIC["eagle"])
        alone = self._run(Rung(f"learning_{arm.name}", ("eagle",), lambda: Fixed(arm, serves)), rung.engine)
        lengths = {"accept_length": accept_length(taken.steps), "eagle_accept_length": accept_length(alone.steps)}
        self.lessons.ended(lesson, taken.seconds, **lengths)
        return taken

    def _run(self, rung: Rung, kind: str) -> DraftTaken:
        engine = self.engine(kind)
        watch = self._equip(rung, kind)
        captures = self._captures(kind)
        engine.stats()
        running: list[tuple[float, int]] = []
        begin = self._now()

        def look(new: list[Rollout]) -> None:
            running.append((time.perf_counter() - begin, engine.rows.size))

        engine.submit(self.work.requests)
        done = engine.collect(early=look)
        seconds = self._now() - begin
        steps = watch.take() if watch is not None else []
        tokens = {r.key: r.trace.ids for r in done if r.trace is not None}
        self.plain = self.plain or tokens
        same = self._same(tokens)
        if same < 1 and self.model.device.type == "cpu":
            raise WhetError(
                f"{rung.name} wrote other tokens than plain decoding ({same:.1%} of rollouts are the same)."
            )
        lengths = {key: ids.size for key, ids in tokens.items()}
        apart = not engine.runner.own.intersection(rung.drafters)
        drafting = self.speculations[kind].drafting if apart else None
        uses = dict(captures.uses) if captures is not None else {}
        return DraftTaken(seconds, drafting, steps, running, engine.stats(), lengths, same, uses)

    def time_drafts(self, kind: str, uses: Mapping[GraphKey, int]) -> dict[GraphKey, float]:
        """Seconds of one replay of drafters' graphs that were used, in runs that are made for it."""
        captures, runner = self._captures(kind), self.engine(kind).runner
        assert captures is not None and isinstance(runner, GraphRunner), "the host times what it drafts"
        captures.wanted = list(uses)
        rung = Rung(f"timed_{kind}", tuple(self.drafters[kind]), lambda: Wanted(captures, runner.sizes, uses))
        for _ in range(TRIES):
            if captures.wanted:
                self._run(rung, kind)
        return captures.costs()

    def prepare(self, rungs: Sequence[Rung]) -> dict[str, dict[str, float]]:
        """Captures the graphs that any rung may want, before anything is timed; how many and how large, per engine."""
        for rung in rungs:
            runner = self.engine(rung.engine).runner
            if isinstance(runner, GraphRunner):
                for size in runner.sizes:
                    for arm in rung.arms:
                        if serves(arm, size):
                            runner.prepare(size, arm)
        stats = {kind: engine.stats() for kind, engine in self.engines.items()}
        return {name: {k: found.get(f"rollout/{k}", 0.0) for k in GRAPHS} for name, found in stats.items()}

    def plan_bytes(self, rungs: Sequence[Rung]) -> dict[str, int]:
        """Memory of `plans`, captured once more, each in a pool of its own, largest first, then freed: bytes of the
        pool and the driver."""
        runner = self.engine("model_free" if self.head is None else "eagle").runner
        assert isinstance(runner, GraphRunner), "there are no graphs without a GPU"
        made, found = runner.captures, dict[str, int]()
        for kind, plan in zip(("", "_naive"), plans(rungs, self.work.rollouts), strict=True):
            captures = Captures(made.device, lambda size, tokens, _: made.step(size, tokens, ""), made.at_rest)
            captures.capture(sorted(plan, key=lambda key: key[0] * key[1], reverse=True))
            found[f"bytes{kind}"] = sum(captures.bytes.values())
            found[f"driver_bytes{kind}"] = captures.driver_bytes
            del captures
            torch.cuda.empty_cache()
        return found

    def _captures(self, kind: str) -> WatchedCaptures | None:
        runner = self.engine(kind).runner
        captures = runner.captures if isinstance(runner, GraphRunner) else None
        return captures if isinstance(captures, WatchedCaptures) else None

    def _equip(self, rung: Rung, kind: str) -> Watch | None:
        """Drafters have seen nothing of the work: that of the last round was the same."""
        engine, speculation, captures = self.engines[kind], self.speculations[kind], self._captures(kind)
        speculation.drafting = 0.0
        if captures is not None:
            captures.uses.clear()
        if rung.chooser is None:
            engine.speculation = None
            return None
        watch = self.watches.setdefault(rung.name, Watch(rung.chooser()))
        watch.updated()
        watch.take()
        for drafter in self.drafters[kind].values():
            drafter.forget()
        if isinstance(engine.runner, GraphRunner) and engine.runner.lanes is not None:
            engine.runner.lanes.forget()
        speculation.drafters = {name: self.drafters[kind][name] for name in rung.drafters}
        speculation.chooser, engine.speculation = watch, speculation
        return watch

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def draft_bench(
    out: Path,
    model: PreTrainedModel,
    work: TailWork,
    *,
    head: EagleHead | None = None,
    lessons: Lessons | None = None,
    repeats: int = 3,
    fixed: bool = True,
    naive: bool = False,
    seed: int = 0,
    notes: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures, writes draft.json into `out` after every round, and returns it. lessons: of a drafter that goes on
    learning, a rung of its own; naive: at the end also the memory of `plans`, on a GPU."""
    kinds = {"eagle": head is not None, "learning": lessons is not None}
    rungs = ladder(model, work.rollouts, **kinds, seed=seed, fixed=fixed)
    bench = Bench(model, work, head, seed, lessons)
    bench.run(rungs[0])  # its tokens are what all others must write
    began = time.perf_counter()
    graphs = bench.prepare(rungs)
    result: dict[str, Any] = {
        "what": "a long-tailed batch with and without speculation; speed_up is over plain decoding in the same round",
        **(notes or {}),
        "work": work.described(bench.plain),
        "same_in_half_batches": bench.control(),
        "repeats": repeats,
        "prepare_seconds": time.perf_counter() - began,
        "graphs": {**graphs, "plan": graph_plan(rungs, work.rollouts)},
        "circumstances": circumstances(),
    }
    for rung in rungs[1:]:
        bench.run(rung)
    taken: dict[str, list[DraftTaken]] = {rung.name: [] for rung in rungs}
    for round_ in range(repeats):
        for rung in rungs:
            taken[rung.name].append(bench.run(rung))
        result |= figures(rungs, taken)
        if lessons is not None:
            result["rungs"]["training"]["lessons"] = lessons.rows
        write(out, result)
        on_progress(
            f"round {round_ + 1} of {repeats}: " + ", ".join(f"{n} {t[-1].seconds:.2f} s" for n, t in taken.items())
        )
    split_apart(bench, rungs, taken, result)
    write(out, result)
    if naive:
        result["graphs"]["plan"] |= bench.plan_bytes(rungs)
        write(out, result)
    return result


def write(out: Path, result: Mapping[str, Any]) -> None:
    files.make_folder(out)
    files.write_text(out / "draft.json", json.dumps(result, indent=1) + "\n")


def split_apart(
    bench: Bench, rungs: Sequence[Rung], taken: Mapping[str, Sequence[DraftTaken]], result: dict[str, Any]
) -> None:
    """Into `result`: how long drafts took in rungs where the device made them, or why that is not known. All else is
    measured by then, so nothing that fails here may lose it."""
    last = {rung.name: taken[rung.name][-1] for rung in rungs}
    for kind in dict.fromkeys(rung.engine for rung in rungs if last[rung.name].drafting is None):
        mine = {r.name: last[r.name] for r in rungs if r.engine == kind and last[r.name].drafting is None}
        why = ""
        try:
            costs = bench.time_drafts(kind, sum((Counter(run.uses) for run in mine.values()), Counter()))
        except Exception as error:
            costs, why = {}, f"{type(error).__name__}: {error}"
        for name, run in mine.items():
            draft = drafting_seconds(run.uses, costs)
            found = split(run.seconds, run.steps, draft, None if draft is None else APART)
            result["rungs"][name]["split"] = found | {"timed_share": timed_share(run.uses, costs)}
            if draft is None:
                result.setdefault("split_missing", {})[name] = why or untimed(run.uses, costs)


def figures(rungs: Sequence[Rung], taken: Mapping[str, Sequence[DraftTaken]]) -> dict[str, Any]:
    off = [(a.seconds + b.seconds) / 2 for a, b in zip(taken["off"], taken["off_again"], strict=True)]
    return {
        "rungs": {rung.name: _figures(rung, taken[rung.name], off) for rung in rungs},
        "verdict": verdict(rungs, {name: [t.seconds for t in runs] for name, runs in taken.items()}),
    }


def _figures(rung: Rung, runs: Sequence[DraftTaken], off: Sequence[float]) -> dict[str, Any]:
    last = runs[-1]
    steps = [step for run in runs for step in run.steps]
    tokens = sum(last.lengths.values())
    return {
        "drafters": list(rung.drafters),
        "makespan": spread([run.seconds for run in runs]),
        "speed_up": spread([base / run.seconds for base, run in zip(off, runs, strict=True)]),
        "tokens": tokens,
        "longest": max(last.lengths.values()),
        "same_rollouts": min(run.same for run in runs),
        "tokens_per_second": tokens / statistics.median(run.seconds for run in runs),
        "steps": last.stats["rollout/steps"],
        "accept_length": accept_length(steps),
        "accepted_by_position": chances(steps),
        "by_batch": by_batch(last.steps),
        "share_of_time": arm_shares(last.steps),
        "split": split(last.seconds, last.steps, last.drafting, None if last.drafting is None else HOST),
        "gpu_seconds": last.stats.get("rollout/gpu_seconds"),
        "failures": last.stats.get("draft/failures", 0.0),
        "running": thinned(last.running),
    }


def verdict(rungs: Sequence[Rung], seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The last controller of the ladder against the best single arm of its drafters, and against OFF; 1 is as fast."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    controller = [rung for rung in rungs if rung.name.startswith("controller")][-1]
    alone = [r.name for r in rungs if len(r.arms) == 1 and r.name == r.arms[0].name]
    off = [(a + b) / 2 for a, b in zip(seconds["off"], seconds["off_again"], strict=True)]
    apart = [abs(a / b - 1) for a, b in zip(seconds["off"], seconds["off_again"], strict=True)]
    out: dict[str, Any] = {
        "controller": controller.name,
        "off_against_off": max(apart),
        "controller_of_off": statistics.median(off) / medians[controller.name],
    }
    if alone:
        best = min(alone, key=lambda name: medians[name])
        out |= {"best_fixed": best, "controller_of_best_fixed": medians[best] / medians[controller.name]}
    return out


def thinned(running: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """A curve of at most `POINTS` points, evenly in time.

    >>> thinned([(i / 1000, 1000 - i) for i in range(1000)])[:2]
    [(0.0, 1000), (0.017, 983)]
    """
    if not running:
        return []
    at = np.array([moment for moment, _ in running])
    wanted = np.linspace(at[0], at[-1], POINTS)
    kept = dict.fromkeys(np.searchsorted(at, wanted).clip(max=len(at) - 1).tolist())
    return [(round(running[i][0], 6), running[i][1]) for i in kept]


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": list(values)}


# ---- draft ladder
#
# The rungs: plain decoding, ever more speculation, every arm alone, plain decoding once more.
#
# What a rung drafts with, the chooser, and the graphs that all of them need; `draft_bench` runs them.


ELASTIC = {"ngram": 8, "suffix": 8, "eagle": 4}
"""Depth of the fixed arm that a drafter is tried with behind the switch."""


@dataclass(frozen=True, slots=True)
class Rung:
    name: str
    drafters: tuple[str, ...] = ()
    chooser: Callable[[], Chooser] | None = None
    """None: plain decoding, by an engine that knows of no drafts."""
    arms: tuple[DraftArm, ...] = ()
    """What it may choose, beside OFF."""
    learning: bool = False
    """EAGLE is one of its own, which takes a lesson before each run."""

    @property
    def engine(self) -> str:
        """Which of the engines runs it: keeping hidden states for EAGLE costs time, which others need not pay."""
        return "training" if self.learning else "eagle" if "eagle" in self.drafters else "model_free"


def ladder(
    model: PreTrainedModel, slots: int, *, eagle: bool, seed: int, fixed: bool = True, learning: bool = False
) -> list[Rung]:
    """All rungs, plain decoding first and last. fixed: with each arm on its own; learning: also with an EAGLE that goes
    on learning, whether or not there is one that does not."""
    vocab = model.config.get_text_config().vocab_size
    sizes = buckets(slots) if model.device.type == "cuda" else list(range(1, slots + 1))

    def chosen(name: str, by: str, *names: Any) -> Rung:
        settings = config.Draft.model_validate({"drafters": names, "chooser": by})
        arms = tuple(DraftArm(name, depth) for name in names for depth in DEPTHS)

        def chooser() -> Chooser:
            made = build_speculation(settings, vocab=vocab, sizes=sizes, seed=seed)
            assert made is not None
            return made.chooser

        return Rung(name, names, chooser, arms)

    def elastic(name: str) -> Rung:
        arm = DraftArm(name, ELASTIC[name])
        return Rung(f"elastic_{name}", (name,), lambda: Bandit([arm], serves=serves, seed=seed), (arm,))

    def alone(arm: DraftArm) -> Rung:
        return Rung(arm.name, (arm.drafter,), lambda: Fixed(arm, serves), (arm,))

    names = ("ngram", "suffix", *(("eagle",) if eagle else ()))
    rungs = [Rung("off"), elastic("ngram"), elastic("suffix"), chosen("controller", "controller", "ngram", "suffix")]
    if eagle:
        rungs += [elastic("eagle"), chosen("controller_eagle", "controller", *names)]
    if learning:
        rungs.append(replace(chosen("training", "controller", "ngram", "suffix", "eagle"), learning=True))
    rungs.append(chosen("bandit", "bandit", *names))
    if fixed:
        rungs += [alone(DraftArm(name, depth)) for name in names for depth in DEPTHS]
    return [*rungs, Rung("off_again")]


def plans(rungs: Sequence[Rung], slots: int) -> tuple[list[GraphKey], list[GraphKey]]:
    """Verification graphs: shared by drafters and for the batches that an arm serves; and the naive plan, one for each
    arm and batch size, with the name of its drafter."""
    arms = dict.fromkeys(arm for rung in rungs for arm in rung.arms)
    naive = [(size, arm.tokens, arm.drafter) for arm in arms for size in buckets(slots)]
    shared = dict.fromkeys((size, new, "") for size, new, _ in naive if serves(DraftArm("", new - 1), size))
    return list(shared), naive


def graph_plan(rungs: Sequence[Rung], slots: int) -> dict[str, int]:
    """Graphs of `plans`, and tokens that they feed, which is what their memory grows with."""
    shared, naive = plans(rungs, slots)
    return {
        "graphs": len(shared),
        "graphs_naive": len(naive),
        "tokens": sum(size * new for size, new, _ in shared),
        "tokens_naive": sum(size * new for size, new, _ in naive),
    }


# ---- the command line


@app.command()
def main(
    model: Annotated[Path | None, typer.Option(help="A model folder, with prompts.jsonl or --prompts.")] = None,
    shape: Annotated[str, typer.Option(help="Instead: random weights of 135m, 1.5b or tiny, lengths given.")] = "",
    prompts: Annotated[Path | None, typer.Option(help='One {"text": ...} or {"question": ...} a line.')] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16: the default on a GPU.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Rollouts, all begun at once.")] = 128,
    siblings: Annotated[int, typer.Option(min=1, help="Rollouts of a prompt.")] = 8,
    cap: Annotated[int, typer.Option(min=2, help="Tokens of a response at most.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = 3,
    drafter: Annotated[Path | None, typer.Option(help="A folder with a trained EAGLE drafter.")] = None,
    train: Annotated[int, typer.Option(min=0, help="Or: rounds to train one here, on the other prompts.")] = 0,
    lessons: Annotated[bool, typer.Option(help="Also a copy of the drafter that goes on learning.")] = True,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="That one from random weights.")] = False,
    fixed: Annotated[bool, typer.Option(help="Also every arm on its own, to find the best.")] = True,
    naive: Annotated[bool, typer.Option("--naive", help="Also graph memory, against a graph for each arm.")] = False,
    out: Out = RESULTS,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """A long-tailed batch with ever more speculation, rung by rung, the same tokens in all of them."""
    asked = CandidateAsked(
        model=model,
        shape=shape,
        prompts=prompts,
        device=device,
        dtype=dtype,
        rollouts=requests,
        siblings=siblings,
        cap=cap,
        drafter=drafter,
        train=train,
        lessons=lessons,
        from_scratch=from_scratch,
        naive=naive,
        seed=seed,
    )
    loaded, work, head, notes = prepared(asked, out, tell)
    how: dict[str, Any] = {"repeats": repeats, "fixed": fixed, "naive": naive, "seed": seed}
    how["lessons"] = lessons_for(asked, loaded, work, head, tell)
    result = draft_bench(out, loaded, work, head=head, **how, notes=notes, on_progress=tell)
    show_ladder(result)


def show_ladder(result: Mapping[str, Any]) -> None:
    """Makespan and speed-up of each rung, what its drafts were worth, and the controller against the best arm."""
    table = Table(title=f"{result['work']['requests']} requests, {result['work']['tokens']:,} tokens")
    for name in ("rung", "seconds", "range", "speed", "tokens/s", "accept", "draft", "same"):
        table.add_column(name, no_wrap=True)
    for name, rung in result["rungs"].items():
        span, times, length = rung["makespan"], rung["speed_up"], rung["accept_length"]
        drafting = rung["split"]["draft"]
        table.add_row(
            name,
            f"{span['median']:.3f}",
            f"{span['min']:.3f}-{span['max']:.3f}",
            f"{times['median']:.2f}x",
            f"{rung['tokens_per_second']:,.0f}",
            "" if length is None else f"{length:.2f}",
            "-" if drafting is None else f"{drafting / span['median']:.0%}",
            f"{rung['same_rollouts']:.0%}",
        )
    out_console.print(table)
    found = result["verdict"]
    sentence = f"{found['controller']}: {found['controller_of_off']:.3f} of OFF's speed"
    if "best_fixed" in found:
        sentence += f", {found['controller_of_best_fixed']:.3f} of the best arm's ({found['best_fixed']})"
    sentence += f"; OFF against OFF differs by up to {found['off_against_off']:.1%}."
    sentence += f" By half as many at once, OFF writes {result['same_in_half_batches']:.0%} of the rollouts alike."
    if plan := naive_plan(result["graphs"]["plan"]):
        sentence += " " + plan
    tell(sentence)
    for lesson in result["rungs"].get("training", {}).get("lessons", ()):
        tell(lesson_line(lesson))
    for name, why in result.get("split_missing", {}).items():
        tell(f"{name}: how long its drafts took is not known. {why}")


def lesson_line(lesson: Mapping[str, Any]) -> str:
    """
    >>> lesson_line({"round": 2, "seconds": 0.03, "share": 0.05, "loss": 0.8, "eagle_accept_length": 2.25})
    "Round 2: a lesson of 0.030 s, 5.0% of the round, loss 0.80; EAGLE's accept length after it 2.25."
    """
    loss, length = ("-" if lesson[k] is None else f"{lesson[k]:.2f}" for k in ("loss", "eagle_accept_length"))
    spent = f"{lesson['seconds']:.3f} s, {lesson['share']:.1%} of the round"
    return f"Round {lesson['round']}: a lesson of {spent}, loss {loss}; EAGLE's accept length after it {length}."


def naive_plan(plan: Mapping[str, int]) -> str:
    """What shared graphs take of what one for each arm would; "" where it was not measured."""
    if not plan.get("bytes_naive"):
        return ""
    ours, naive = (plan[f"bytes{kind}"] + plan[f"driver_bytes{kind}"] for kind in ("", "_naive"))
    of_pool = plan["bytes"] / plan["bytes_naive"]
    return (
        f"Graphs that verify take {plan['bytes'] / 2**20:,.0f} MiB, {of_pool:.2f} of those of the naive plan "
        f"({ours / naive:.2f} with what the driver takes)."
    )


if __name__ == "__main__":
    run_script(app)
