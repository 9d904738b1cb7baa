"""A drafter that goes on learning while it is measured: the rung "training" of `whet bench draft`.

Before each of its runs it takes the lesson that an RL step of that size would give it (`whet.draft.adaptive`): a batch
of prompts that are not measured is generated, and a share of its tokens trained on and published in place. There is no
limit on its time, which `whet train` sets on a GPU, so what a lesson takes is seen. The target does not change.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from whet.bench.tail import Work
from whet.draft.adaptive import AdaptiveDrafter
from whet.draft.eagle import EagleHead
from whet.draft.training import SHARE
from whet.rollout.engine import LocalEngine


class Lessons:
    def __init__(self, model: PreTrainedModel, work: Work, head: EagleHead | None = None, *, seed: int = 0) -> None:
        """work: what it learns from; head: what it begins with and leaves as it is, random weights where None."""
        self.work = renamed(work)
        self.adaptive = AdaptiveDrafter(model, SHARE, seed, head)
        self.rows: list[dict[str, Any]] = []
        """What became of each lesson, and of the run after it."""

    def take(self, engine: LocalEngine) -> dict[str, Any]:
        """One lesson, from a batch that `engine` writes plainly: its choosers know of nothing but what is measured, and
        what is measured is never learnt from."""
        held, engine.speculation, engine.buffer = engine.speculation, None, self.adaptive.buffer
        engine.submit(self.work.again(len(self.rows) + 1))
        tokens = sum(rollout.length for rollout in engine.collect())
        engine.speculation, engine.buffer = held, None
        engine.update(engine.version + 1)
        begin = self._now()
        found = self.adaptive.train(tokens)
        return {
            "tokens": tokens,
            "tokens_trained": found.get("draft/tokens_trained", 0.0),
            "seconds": self._now() - begin,
            "loss": found.get("draft/loss"),
            "agreement": found.get("draft/agreement"),
        }

    def ended(self, lesson: dict[str, Any], makespan: float, **accepted: float | None) -> None:
        """The run after a lesson took so long. Its share is of both: an RL step of that size without the update."""
        share = lesson["seconds"] / (lesson["seconds"] + makespan)
        self.rows.append({"round": len(self.rows), **lesson, "share": share, "makespan": makespan, **accepted})

    def _now(self) -> float:
        if self.adaptive.live.fc.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def renamed(work: Work) -> Work:
    """Its prompts by other names, so that one engine can tell them from those that are measured."""
    requests = [dataclasses.replace(r, prompt_id=f"lesson {r.prompt_id}") for r in work.requests]
    return Work({f"lesson {name}": ids for name, ids in work.prompts.items()}, requests, work.context)
