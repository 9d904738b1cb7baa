"""The loop, for every curriculum and every engine, and nothing that could live elsewhere.

plan -> generate -> judge -> observe, until the curriculum emits a batch; then one learner step. Under
barrier `collect` drains the engine; under stream it returns as soon as something finished and
`plan` is asked again with the capacity that fell free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from whet.assembly import Parts, save_parts
from whet.config import HELD_OUT
from whet.curriculum.base import Evidence
from whet.errors import Collapsed, Starved
from whet.eval import evaluate
from whet.run import Run
from whet.types import Batch, Report, Request, Rollout
from whet.watch import Advice, CollapseGuard, Stopwatch, gpu_idle, group_metrics, rollout_metrics

DRAFTER_SHARE = 0.03
"""Of the steps' time, for training the drafter."""


class Watcher(Protocol):
    """Whoever looks at a run while it goes: the terminal, or nobody."""

    def update(self, metrics: dict[str, float], progress: float) -> None: ...

    def message(self, text: str) -> None: ...

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None: ...


def train(run: Run, parts: Parts, watcher: Watcher) -> None:
    """From where `parts` stands to the end of the recipe, or to the step in which a signal asked to stop."""
    advice, guard = Advice(), CollapseGuard()
    parts.judge.on_message = watcher.message
    watch = Stopwatch()
    if parts.fresh:
        metrics = evaluate_due(run, parts, watch)
        guard.check(0, metrics)
        if parts.config.warm_start:
            metrics["time/warm_start"] = parts.warm_start_s
        record(run, parts, metrics | watch.metrics(), watcher)
        watch = Stopwatch()
        save(run, parts, metrics, watch)
    while not parts.done and not run.stopping:
        batch, seen = next_batch(run, parts, watch)
        evidence = Evidence(seen)
        evidence.emitted(parts.clock())
        report = learn(parts, batch, watch)
        counted = evidence.updated(parts.clock(), parts.curriculum.holds())
        drafted = train_drafter(parts, seen, watch, watcher.message)
        metrics = rollout_metrics(counted) | step_metrics(parts, batch, seen, report, watch) | drafted
        with watch.timing("save"):
            run.write_rollouts(parts.tally.step, parts.rollout_rows(seen[: parts.config.save.rollouts]))
        metrics |= evaluate_due(run, parts, watch)
        collapsed = guard.check(parts.tally.step, metrics)
        record(run, parts, metrics | watch.metrics() | ({"collapsed": 1.0} if collapsed else {}), watcher)
        watch = Stopwatch()
        for sentence in advice.check(metrics, parts.judge.complaint):
            watcher.message(sentence)
        if parts.done or run.stopping or collapsed or parts.tally.step % parts.config.save.every == 0:
            save(run, parts, metrics, watch)
        if collapsed:
            raise Collapsed(
                f"{collapsed}: the run is stopped at step {parts.tally.step}, and saved. Begin again with a lower "
                "learn.lr or a larger batch; --resume would go on from here."
            )


def next_batch(run: Run, parts: Parts, watch: Stopwatch) -> tuple[Batch, list[Rollout]]:
    """`gather`; where it starves, what was judged stays for `whet view`, and a judge that failed is quoted first."""
    seen: list[Rollout] = []
    try:
        return gather(parts, watch, seen), seen
    except Starved as error:
        run.write_rollouts(parts.tally.step + 1, parts.rollout_rows(seen[: parts.config.save.rollouts]))
        failed = sum(bool(rollout.note) for rollout in seen)
        if 2 * failed <= len(seen):
            raise
        quoted = f"T{parts.judge.complaint[1:]}, and {failed:,} of {len(seen):,} responses were not judged"
        raise Starved(f"{quoted}; whet view shows them. {error}") from None


def gather(parts: Parts, watch: Stopwatch, seen: list[Rollout]) -> Batch:
    """The next batch; `seen` gets all that was judged on the way to it."""
    curriculum, engine, judge = parts.curriculum, parts.engine, parts.judge
    stall = Stall()
    while (batch := curriculum.emit(parts.clock())) is None:
        asked = curriculum.plan(parts.clock())
        with watch.timing("generate"):
            engine.submit(asked)
            finished = engine.collect(judge.send)  # as they finish, so that the judges work while the engine decodes
        with watch.timing("judge"):
            judged = judge.receive(wait=engine.idle)
        parts.tally.count(asked, finished)
        seen += judged
        curriculum.observe(parts.store.put(judged))
        stall.check(parts, asked, judged)
    return batch


class Stall:
    """Nothing asked, running or judged, twice in a row: waiting longer would change nothing.

    Twice, because `plan` may be what tells a curriculum to apply its starvation policy at the next `emit`.
    """

    def __init__(self) -> None:
        self.still = 0

    def check(self, parts: Parts, asked: Sequence[Request], judged: Sequence[Rollout]) -> None:
        moved = asked or judged or not parts.engine.idle or not parts.judge.idle
        self.still = 0 if moved else self.still + 1
        if self.still == 2:
            raise Starved(
                f"Step {parts.tally.step}: the curriculum {parts.config.curriculum.name} asks for nothing, nothing "
                'runs, and no batch is full; set curriculum.starvation = "relax" or "partial", or lower '
                "curriculum.groups."
            )


def learn(parts: Parts, batch: Batch, watch: Stopwatch) -> Report:
    """One update; then the engine and the curriculum hear of it, and traces nobody needs are freed."""
    with watch.timing("sync"):
        parts.engine.release()
    with watch.timing("train"), parts.meter.span():
        report = parts.learner.step(parts.store.attach(batch), parts.progress, parts.curriculum.needs)
    watch.move("train", "log_probs", parts.learner.scored_s)
    with watch.timing("sync"):
        parts.engine.take_back()
        parts.engine.update(parts.learner.version)
    parts.tally.step += 1
    parts.tally.tokens_trained += int(report.metrics.get("learn/tokens", 0))
    parts.curriculum.updated(parts.clock(), report)
    parts.store.keep(parts.curriculum.holds())
    return report


def train_drafter(
    parts: Parts, seen: Sequence[Rollout], watch: Stopwatch, say: Callable[[str], None]
) -> dict[str, float]:
    """While nothing is decoded; no token depends on it, so a lesson that fails is the last and not the run's end. On a
    GPU, where steps are short and a drafter's updates wait for the host, a small share of the steps' time: seldom,
    where it would not suffice for an update in each."""
    if parts.drafter is None:
        return {}
    granted = DRAFTER_SHARE * watch.without("save") if parts.model.device.type == "cuda" else math.inf
    with watch.timing("draft"), parts.meter.span():
        try:
            return parts.drafter.train(sum(r.length for r in seen), granted)
        except Exception as error:
            say(parts.drafter.give_up(error))
            return {}


def step_metrics(
    parts: Parts, batch: Batch, seen: Sequence[Rollout], report: Report, watch: Stopwatch
) -> dict[str, float]:
    step_s = watch.without("save")
    parts.tally.time_s += step_s
    engine, learning = parts.engine.stats(), parts.meter.seconds()
    if parts.drafter is not None:  # the engine counts failed drafts
        engine["draft/failures"] = engine.get("draft/failures", 0.0) + parts.drafter.failures
    generate_s = watch.seconds.get("generate", 0.0)
    tokens = sum(r.length for r in seen)
    return {
        **group_metrics(batch.groups),
        **parts.curriculum.metrics(),
        **engine,
        **parts.judge.stats(),
        **report.metrics,
        "batch/groups": float(len(batch.groups)),
        "batch/tokens": float(sum(g.tokens for g in batch.groups)),
        "rollout/tokens_per_s": tokens / generate_s if generate_s > 0 else 0.0,
        **device_metrics(engine, learning, step_s),
    }


def device_metrics(engine: Mapping[str, float], learning: float | None, step_s: float) -> dict[str, float]:
    """On a GPU, where the engine too says how long it kept it busy: the idle share of the step."""
    generating = engine.get("rollout/gpu_seconds")
    if learning is None or generating is None:
        return {}
    return {"learn/gpu_seconds": learning, "time/gpu_idle": gpu_idle(generating + learning, step_s)}


def evaluate_due(run: Run, parts: Parts, watch: Stopwatch) -> dict[str, float]:
    """Before the first step, every so many steps, and after the last. Training rollouts decode on beside it (stream):
    their share of its tokens is their share of its time."""
    metrics: dict[str, float] = {}
    kept: list[Rollout] = []
    with watch.timing("eval"):
        for eval_set in parts.evals:
            if parts.tally.step % eval_set.every == 0 or parts.done:
                metrics |= evaluate(eval_set, parts.engine, parts.judge, kept.extend)
    if kept:
        with watch.timing("save"):
            run.write_rollouts(parts.tally.step, parts.rollout_rows(kept[: parts.config.save.rollouts]), kind="eval")
    decoded = parts.engine.stats().get("rollout/tokens", 0.0)
    parts.judge.stats()  # evaluation is no part of the next step's counters
    others = max(0.0, decoded - sum(r.length for r in kept))
    if others:
        beside = watch.seconds["eval"] * others / decoded
        watch.move("eval", "generate", beside)
        parts.tally.time_s += beside
    return metrics


def record(run: Run, parts: Parts, metrics: dict[str, float], watcher: Watcher) -> None:
    row = {**parts.tally.metrics(), "version": float(parts.learner.version), **metrics}
    run.record(parts.tally.step, row)
    watcher.update({"step": float(parts.tally.step), **row}, parts.progress)


def save(run: Run, parts: Parts, metrics: dict[str, float], watch: Stopwatch) -> None:
    """`best` is judged on the set named held_out alone: a reported benchmark must not choose the weights."""
    score = metrics.get(f"eval/{HELD_OUT}/accuracy")
    with watch.timing("save"):
        run.save(parts.tally.step, lambda folder: save_parts(parts, folder), score, keep=parts.config.save.keep)
