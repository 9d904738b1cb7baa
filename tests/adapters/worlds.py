"""What the tests of the adapters share: curricula by name, a simulator whose deliveries do not depend on the order of
submission, and the plain loop of a trainer, with which a desk must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet import config
from whet.curriculum.base import Curriculum
from whet.curriculum.build import Facts, build_curriculum
from whet.testing.simulator import Simulator, World
from whet.types import Batch, Clock, Report, Request, Rollout, Sampling

SAMPLING = Sampling(max_tokens=32)
SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "dapo": {},
    "speed": {"speed": {"n_init": 2}},
    "cures": {},
    "scalingrl": {},
    "stages": {},
    "all": {"speed": {"n_init": 2}},
}


def build(name: str, ids: Sequence[str], seed: int, **given: Any) -> Curriculum:
    table = {"name": name, "rollouts": 5, "max_age": 1, "patience": 50, **SETTINGS[name], **given}
    count = len(ids)
    facts = Facts(
        ids=ids,
        characters=range(count),
        tasks=["t"] * count,
        levels=[float(i % 3) for i in range(count)],
    )
    settings = config.CurriculumSettings.model_validate(table)
    return build_curriculum(settings, facts=facts, sampling=SAMPLING, seed=seed)


class OrderlySimulator(Simulator):
    """Delivers by group and index, whatever was submitted first."""

    def __init__(self, world: World):
        super().__init__(world, sealed=False)

    def collect(self) -> list[Rollout]:
        self._running.sort(key=lambda job: (job.request.group_id, job.index))
        return super().collect()

    def update(self, version: int) -> None:
        self._running.sort(key=lambda job: (job.request.group_id, job.index))
        super().update(version)


def batch_keys(batch: Batch) -> list[tuple[str, list[tuple[int, int]]]]:
    return [
        (group.prompt_id, [rollout.key for rollout in group.rollouts]) for group in batch.groups
    ]


def play_plain(curriculum: Curriculum, world: World) -> list[Any]:
    """Requests and batches of the plain loop; what is cut counts as running until it is observed."""
    simulator, log, running, tokens = OrderlySimulator(world), list[Any](), 0, 0

    def clock(step: int) -> Clock:
        free = None if world.slots is None else max(0, world.slots - running)
        progress = step / world.updates
        return Clock(
            step=step,
            version=step,
            groups=world.groups,
            free=free,
            tokens=tokens,
            progress=progress,
            cut=world.cut == 1,
        )

    for step in range(world.updates):
        while (batch := curriculum.emit(clock(step))) is None:
            requests: list[Request] = curriculum.plan(clock(step))
            log.append(
                sorted(
                    (r.group_id, r.prompt_id, r.first_index, r.n, r.sampling.max_tokens)
                    for r in requests
                )
            )
            running += sum(request.n for request in requests)
            simulator.submit(requests)
            rollouts = simulator.collect()
            running, tokens = running - len(rollouts), tokens + sum(r.length for r in rollouts)
            curriculum.observe(rollouts)
        log.append(batch_keys(batch))
        simulator.update(step + 1)
        curriculum.updated(clock(step + 1), Report(metrics={}))
    return log
