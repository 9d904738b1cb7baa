"""The loop, for every curriculum and every engine.

`api` calls `warm_start_parts` at the beginning of a run and then `train`, which repeats plan, generate, judge and
observe until the curriculum emits a batch, and then makes one update. Under barrier `collect` drains the engine; under
stream it returns as soon as a rollout finished, and `plan` is called again with the capacity that became free. `Log`
holds what is no part of the algorithm: metrics, evaluation, advice and checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

import numpy as np

from whet import config
from whet.build import Parts
from whet.curriculum.base import Evidence, sentences_of
from whet.errors import Collapsed, Diverged, Mastered, Starved
from whet.eval import EvalSet, evaluate
from whet.pictures import Pictures
from whet.run import Run
from whet.run_state import save_parts
from whet.tasks.judge import Unfinished
from whet.types import Batch, Prompt, Report, Request, Rollout
from whet.watch import (
    CollapseGuard,
    Stopwatch,
    gpu_metrics,
    group_metrics,
    mismatch_jump,
    rollout_metrics,
)

# a benchmark, under another name, must not choose the weights
BEST_BY = f"eval/{config.HELD_OUT}/accuracy"
DRAFTER_SHARE = 0.03  # share of the steps' time on a GPU that trains the drafter


class Watcher(Protocol):
    """Shows a run while it goes on: a terminal display, or one that shows nothing."""

    def update(self, metrics: dict[str, float], progress: float) -> None: ...

    def message(self, text: str) -> None: ...

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None: ...


def train(parts: Parts, log: Log) -> None:
    """Train from where `parts` stands to the end of the recipe, or to the step in which an interrupt asked to stop."""
    curriculum = parts.curriculum
    engine = parts.engine
    judge = parts.judge
    learner = parts.learner
    store = parts.store
    log.begin()
    while not parts.done and not log.stopping:
        with log.step() as watch:
            while (batch := curriculum.emit(parts.clock())) is None:  # not enough groups yet
                asked = curriculum.plan(parts.clock())  # which prompts, how many rollouts, how long
                with watch.timing("generate"):
                    engine.submit(asked)
                    # the judges work while the engine decodes
                    finished = engine.collect(judge.send)
                parts.tally.generated(asked, finished)
                with watch.timing("judge"):
                    # wait only if nothing is left to decode
                    judged = judge.receive(wait=engine.idle)
                # the store keeps the tokens; dropped groups teach, too
                curriculum.observe(store.put(judged))
                # raises Starved if nothing was asked, runs or was judged
                log.observe(asked, judged)
            log.emitted(batch)
            with watch.timing("sync"):
                engine.release()  # a GPU's memory goes to the learner
            with watch.timing("train"), parts.meter.span():
                report = learner.step(store.attach(batch), parts.progress, curriculum.needs)
            with watch.timing("sync"):
                engine.take_back()
                # one that shares the weights learns their version, others get them
                engine.update(learner.version)
            parts.tally.updated(report)
            curriculum.updated(parts.clock(), report)
            store.keep(curriculum.holds())  # frees the traces that no group needs
            log.updated(batch, report)  # metrics, evaluation, advice, checkpoint


class Log:
    """The records of a run: rows of metrics, rollouts that were written, evaluations, advice and checkpoints."""

    def __init__(self, run: Run, parts: Parts, watcher: Watcher) -> None:
        self.run, self.parts, self.watcher, self.settings = run, parts, watcher, parts.plan.settings
        self.guards = parts.guards
        self.watch = Stopwatch()  # since the last row of metrics
        self.seen: list[Rollout] = []  # judged in this step
        self.evidence = Evidence()
        self.still = 0  # rounds in a row in which nothing moved
        self.pictures = Pictures(parts.curriculum.metrics())
        parts.judge.on_message = watcher.message
        timeout_s = self.settings.judge.timeout_s
        parts.judge.until = lambda: run.signal_at + timeout_s

    @property
    def stopping(self) -> bool:
        return self.run.stopping

    def begin(self) -> None:
        """Evaluate and save what the training starts from, unless it was restored from a checkpoint."""
        if not self.parts.fresh:
            return
        metrics = self.evaluate_due()
        self.guards.collapse.check(0, metrics)
        if self.settings.warm_start:
            metrics["time/warm_start"] = self.parts.warm_start_s
        self.record(metrics)
        self.save(metrics)

    @contextmanager
    def step(self) -> Iterator[Stopwatch]:
        """One step. If it starves, its rollouts are kept for `whet view`, and a judge that failed is quoted first. If
        the run is to stop while judges still work, the checkpoint has what they were given, and the step goes on later.
        """
        self.seen = []
        self.still = 0
        self.pictures.begin()
        try:
            yield self.watch
        except Unfinished:
            self.parts.tally.time_s += self.watch.without("save", "eval")
            self.save({})
        except Mastered as error:
            self.finish(error)
        except Starved as error:
            self._write_rollouts(self.parts.tally.step + 1, self.seen)
            failed = sum(bool(rollout.note) for rollout in self.seen)
            if 2 * failed <= len(self.seen):
                raise
            complaint = f"T{self.parts.judge.complaint[1:]}"
            quoted = f"{complaint}, and {failed:,} of {len(self.seen):,} responses were not judged"
            raise Starved(f"{quoted}; whet view shows them. {error}") from None

    def finish(self, error: Mastered) -> None:
        """End a run that has learned all there is. The step that found nothing to train on is its last."""
        parts = self.parts
        # An evaluation after the update before has seen the same weights.
        due = [eval_set for eval_set in parts.evals if parts.tally.step % eval_set.every]
        parts.tally.step = parts.tally.step + 1
        parts.ended = True
        parts.tally.time_s += self.watch.without("save", "eval")
        self._write_rollouts(parts.tally.step, self.seen)
        metrics = self.evaluate(due) | {"mastered": 1.0}
        self.record(metrics)
        self.save(metrics)
        self.watcher.message(f"Nothing is left to learn, so the run ends as finished. {error}")

    def observe(self, asked: Sequence[Request], judged: Sequence[Rollout]) -> None:
        """Raise where nothing was asked, running or judged twice in a row: waiting longer would change nothing."""
        parts = self.parts
        self.seen += judged
        self.pictures.observe(asked)
        moved = asked or judged or not parts.engine.idle or not parts.judge.idle
        self.still = 0 if moved else self.still + 1
        # `plan` may lead a curriculum to apply its starvation policy at the next `emit`
        if self.still == 2:
            state = f"the curriculum {self.settings.curriculum.name} asks for nothing, nothing runs, no batch is full"
            remedy = 'set curriculum.starvation = "relax" or "partial", or lower curriculum.groups'
            raise Starved(f"Step {parts.tally.step}: {state}; {remedy}.")

    def emitted(self, batch: Batch) -> None:
        """A batch is full; `seen` is all that was judged on the way to it."""
        # Rollouts of groups that an update drops must not count in the metrics: the short ones finish first.
        self.evidence = Evidence(self.seen)
        self.evidence.emitted(self.parts.clock())

    def updated(self, batch: Batch, report: Report) -> None:
        """After an update: metrics, evaluation if due, advice, and a checkpoint if due or the best so far."""
        parts = self.parts
        run = self.run
        counted = self.evidence.updated(parts.clock(), parts.curriculum.holds())
        drafted = self.train_drafter()
        metrics = rollout_metrics(counted) | self.step_metrics(batch, report) | drafted
        with self.watch.timing("save"):
            self._write_rollouts(parts.tally.step, self.seen)
            lookup = parts.plan.problems.lookup
            run.draw(
                parts.tally.step, self.pictures.drawn(self.seen, batch.groups, metrics, lookup)
            )
        metrics |= self.evaluate_due()
        collapsed = self.guards.collapse.check(parts.tally.step, metrics)
        self.record(metrics | ({"collapsed": 1.0} if collapsed else {}))
        self.refuse_other_weights(batch, metrics.get("learn/mismatch"))
        advice = self.guards.advice.check(metrics, parts.judge.complaint)
        for sentence in [*sentences_of(parts.curriculum), *advice]:
            self.watcher.message(sentence)
        if collapsed:
            # who resumes it all the same compares it with itself from there on
            self.guards.collapse = CollapseGuard()
        step = parts.tally.step
        due = parts.done or run.stopping or collapsed or step % self.settings.save.every == 0
        if due or run.beats(step, metrics.get(BEST_BY)):
            self.save(metrics)
        if collapsed:
            remedy = "Begin again with a lower learn.lr or a larger batch; --resume would go on from here."
            raise Collapsed(
                f"{collapsed}: the run is stopped at step {parts.tally.step}, and saved. {remedy}"
            )

    def refuse_other_weights(self, batch: Batch, mismatch: float | None) -> None:
        """End the run, before it saves, where the engine has drawn with other weights than the learner's."""
        current = all(g.oldest_version >= self.parts.learner.version - 1 for g in batch.groups)
        if mismatch is None or not current:
            return
        if mismatch_jump(self.guards.sound, mismatch):
            before = f"{self.guards.sound:.2g} before, {mismatch:.2g} now"
            why = f"log-probs of the engine and the learner drift apart ({before}): the engine missed an update"
            raise Diverged(
                f"Step {self.parts.tally.step}: {why}; --resume goes on from the last checkpoint."
            )
        self.guards.sound = mismatch

    def train_drafter(self) -> dict[str, float]:
        """Train the drafter while nothing is decoded. No token depends on it, so a failure only stops its training."""
        parts = self.parts
        if parts.drafter is None:
            return {}
        # On a GPU, where steps are short and the drafter's updates wait for the host, it may not train in every step.
        granted = DRAFTER_SHARE * self.watch.without("save") if parts.meter.on else math.inf
        with self.watch.timing("draft"), parts.meter.span():
            try:
                return parts.drafter.train(sum(r.length for r in self.seen), granted)
            except Exception as error:
                self.watcher.message(parts.drafter.give_up(error))
                return {}

    def step_metrics(self, batch: Batch, report: Report) -> dict[str, float]:
        parts = self.parts
        watch = self.watch
        watch.move("train", "log_probs", parts.learner.scored_s)
        step_s = watch.without("save")
        parts.tally.time_s += step_s
        self.pictures.note(parts.engine, parts.curriculum)
        engine = parts.engine.stats()
        learning = parts.meter.seconds()
        if parts.drafter is not None:  # the engine counts failed drafts
            engine["draft/failures"] = engine.get("draft/failures", 0.0) + parts.drafter.failures
        generate_s = watch.seconds.get("generate", 0.0)
        tokens = sum(r.length for r in self.seen)
        return {
            **group_metrics(batch.groups),
            **parts.curriculum.metrics(),
            **engine,
            **parts.judge.stats(),
            **report.metrics,
            "batch/groups": float(len(batch.groups)),
            "batch/tokens": float(sum(g.tokens for g in batch.groups)),
            "rollout/tokens_per_s": tokens / generate_s if generate_s > 0 else 0.0,
            **gpu_metrics(engine.get("rollout/gpu_seconds"), learning, step_s),
        }

    def evaluate_due(self) -> dict[str, float]:
        """Evaluate before the first step, every so many steps, and after the last."""
        parts = self.parts
        return self.evaluate(
            [due for due in parts.evals if parts.tally.step % due.every == 0 or parts.done]
        )

    def evaluate(self, sets: Sequence[EvalSet]) -> dict[str, float]:
        parts = self.parts
        watch = self.watch
        metrics = dict[str, float]()
        kept = list[Rollout]()
        unfinished = True
        # a run that is to stop leaves the rest out
        with watch.timing("eval"), suppress(Unfinished):
            for eval_set in sets:
                metrics |= evaluate(eval_set, parts.engine, parts.judge, kept.extend)
            unfinished = False
        if kept:
            with watch.timing("save"):
                self._write_rollouts(parts.tally.step, kept, kind="eval")
        decoded = parts.engine.stats().get("rollout/tokens", 0.0)
        parts.judge.stats()  # evaluation is no part of the next step's counters
        others = max(0.0, decoded - sum(r.length for r in kept))
        if (
            others and not unfinished
        ):  # under stream, training rollouts decode in the same batches, so the time is divided by tokens
            beside = watch.seconds["eval"] * others / decoded
            watch.move("eval", "generate", beside)
            parts.tally.time_s += beside
        return metrics

    def record(self, metrics: dict[str, float]) -> None:
        """Write a row; the time from here on belongs to the next one."""
        parts = self.parts
        row = {
            **parts.tally.metrics(),
            "version": float(parts.learner.version),
            **metrics,
            **self.watch.metrics(),
        }
        self.run.record(parts.tally.step, row)
        self.watcher.update({"step": float(parts.tally.step), **row}, parts.progress)
        self.watch = Stopwatch()

    def save(self, metrics: dict[str, float]) -> None:
        parts = self.parts
        with self.watch.timing("save"):
            score = metrics.get(BEST_BY)
            keep = self.settings.save.keep
            self.run.save(parts.tally.step, partial(save_parts, parts), score, keep=keep)

    def _write_rollouts(self, step: int, rollouts: Sequence[Rollout], kind: str = "step") -> None:
        rollouts = rollouts[: self.settings.save.rollouts]
        entropies = self.parts.learner.entropies(
            [r.key for r in rollouts] if kind == "step" else ()
        )
        self.run.write_rollouts(step, self.parts.rollout_rows(rollouts, entropies), kind=kind)


def warm_start_parts(parts: Parts, on_progress: Callable[[str, int, int, float], None]) -> None:
    """Train on worked solutions, entry by entry; on_progress(name, step, steps, loss) is called after each update."""
    begun = time.perf_counter()
    parts.engine.release()
    for number, entry in enumerate(parts.plan.settings.warm_start):
        rng = np.random.default_rng((parts.plan.settings.seed, 7919, number))

        def on_step(
            step: int, loss: float, name: str = f"warm start {number + 1}", steps: int = entry.steps
        ) -> None:
            on_progress(name, step + 1, steps, loss)

        batches = solution_batches(parts, entry, rng)
        parts.learner.warm_start(batches, steps=entry.steps, lr=entry.lr, on_step=on_step)
    parts.engine.take_back()
    parts.engine.update(parts.learner.version)
    parts.warm_start_s = time.perf_counter() - begun


def solution_batches(
    parts: Parts, entry: config.WarmStart, rng: np.random.Generator
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Worked solutions as token ids. Those of a file come in epochs: all of them once before any comes again."""
    waiting: list[tuple[Prompt, str]] = []
    for _ in range(entry.steps):
        while len(waiting) < entry.batch:
            waiting += parts.plan.problems.solutions(
                rng, max(entry.batch, parts.plan.problems.worked), entry.options
            )
        pairs = waiting[: entry.batch]
        waiting = waiting[entry.batch :]
        prompts = parts.plan.codec.encode_all([prompt for prompt, _ in pairs])
        yield list(
            zip(prompts, (parts.plan.codec.encode_response(text) for _, text in pairs), strict=True)
        )
