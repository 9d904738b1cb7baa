"""The learner of a fleet: every member makes all samples of a batch, runs its share of them, and takes the same step.

The loop uses it as any other learner. The batch goes to all members with its tokens; gradients are added up among them,
so weights are never sent. A step in which a member dies is taken again by all who did not end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any

from whet.cluster.crew import Crew
from whet.learn.base import Lesson
from whet.learn.checkpoint import Checkpoint
from whet.types import Batch, Report

AHEAD = 4  # lessons that are sent before the first is answered


class Chorus:
    can_signal = frozenset({"score"})

    def __init__(self, crew: Crew, encode: Callable[[str], Sequence[int]]) -> None:
        self.crew, self.encode = crew, encode
        self.version, self.scored_s = 0, 0.0
        self._lessons: list[tuple[int, float, list[Lesson]]] = []  # of the warm start so far: a death repeats it

    def step(self, batch: Batch, progress: float = 0.0, needs: Set[str] = frozenset()) -> Report:
        self._lessons = []
        prompts = {group.prompt_id: self.encode(group.prompt_id) for group in batch.groups}
        while True:
            done = self.crew.together("step", batch, progress, needs, prompts)
            # After a death all members are where the furthest one is: the step counts if that one has ended it.
            if done and self.crew.first("position") > self.version:
                self.version += 1
                report, self.scored_s = done[min(done)]
                return report

    def warm_start(
        self, batches: Iterable[Lesson], *, steps: int, lr: float, on_step: Callable[[int, float], None]
    ) -> None:
        given: list[Lesson] = []
        lessons, waiting = (steps, lr, given), iter(batches)
        self._lessons.append(lessons)

        def lesson(number: int) -> Lesson | None:
            if number == len(given) and (more := next(waiting, None)) is not None:
                given.append(more)
            return given[number] if number < len(given) else None

        while not self._teach(steps, lr, lesson, on_step):
            self.crew.renew()
            for earlier, rate, known in self._lessons[:-1]:
                self._teach(earlier, rate, dict(enumerate(known)).get, lambda step, loss: None)

    def _teach(
        self, steps: int, lr: float, lesson: Callable[[int], Lesson | None], on_step: Callable[[int, float], None]
    ) -> bool:
        """Whether all members made all steps."""
        sent = 0

        def send() -> None:
            nonlocal sent
            if sent < steps and (pairs := lesson(sent)) is not None:
                self.crew.send_all(pairs)
                sent += 1

        def taught(number: int, step: int, loss: float) -> None:
            if number == 0:
                on_step(step, loss)
                send()

        def begin() -> None:
            for _ in range(AHEAD):
                send()

        self.crew.taught = taught
        return self.crew.lead("teach", (steps, lr), begin)

    def rehearse(self) -> None:
        """Members have done it when they began."""

    def write(self, folder: Path) -> None:
        self.crew.first("write", str(folder))

    def restore(self, checkpoint: Checkpoint) -> None:
        self.version = self.crew.call("restore", str(checkpoint.folder))[0]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.crew.first("learner_state")
        return state
