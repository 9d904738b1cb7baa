"""An engine whose rollouts end where a script says: schedules are counted in steps, without a model's time.

Queue, rows, pages and preemption are the engine's own; a runner that computes nothing stands for the network, and each
rollout stops at its length by a stop id, so that the scheduler cannot know it beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from slow_engine import PROMPTS, decode

from whet.draft.base import OFF, DraftArm
from whet.model.load import tiny_model
from whet.rollout.engine import LocalEngine
from whet.rollout.rows import Chunk, Flight
from whet.rollout.runner import Drawn, EagerRunner, fork_rows, single
from whet.types import Request, Sampling

STOP = 1
MODEL = tiny_model(23, hidden=8, heads=1, kv_heads=1, context=4096)


class ScriptedRunner(EagerRunner):
    def __init__(self, engine: LocalEngine, length: Callable[[Flight], int]) -> None:
        super().__init__(engine.twin, engine.cache, engine.rows)
        self.engine, self.length = engine, length
        self.widest = 0
        """Tokens fed in one step at most, those of running rows apart."""

    def advance(
        self,
        running: int,
        chunks: Sequence[Chunk],
        source: Sequence[int],
        arm: DraftArm = OFF,
        ahead: bool = True,
    ) -> Drawn:
        rows = self.engine.rows
        self.widest = max(self.widest, sum(chunk.size for chunk in chunks))
        if source:
            fork_rows(self.engine.cache, rows, running + len(chunks), source)
        ends = [rows.count[i] + 1 == self.length(rows.flights[i]) for i in range(rows.ready)]
        return single(np.where(ends, STOP, 2), np.zeros(rows.ready))


def scripted(length: Callable[[Flight], int], **settings: object) -> LocalEngine:
    engine = LocalEngine(
        MODEL,
        encode=lambda prompt_id: PROMPTS.get(prompt_id) or [2] * 20,
        decode=decode,
        **{"seed": 0, "slots": 16, "context": 512, **settings},  # type: ignore[arg-type]
    )
    engine.runner = ScriptedRunner(engine, length)
    return engine


def want(prompt_id: str, group: int, n: int = 1, limit: int = 480) -> Request:
    return Request(
        prompt_id=prompt_id,
        group_id=group,
        n=n,
        sampling=Sampling(max_tokens=limit, stop_ids=(STOP,)),
        phase="train",
    )
