"""A batch comes out of a bundle as it went in."""

import pickle

import numpy as np

from whet.cluster.channel import Bundle, emptied, filled
from whet.types import Batch, Group, Rollout, Sampling, Trace


def rollout(group: int, index: int, length: int) -> Rollout:
    ids = np.arange(length, dtype=np.int32) + 10 * index
    guessed = ids % 2 == 0 if index else None
    trace = Trace(ids=ids, log_probs=-ids / 3.0, versions=ids // 2, guessed=guessed)
    given = {
        "prompt_id": f"p{group}",
        "phase": "train",
        "finish": "stop",
        "sampling": Sampling(max_tokens=9),
    }
    versions = {"first_version": 1, "last_version": 2, "score": index / 7, "terms": {"short": 0.5}}
    return Rollout(**given, **versions, group_id=group, index=index, length=length, trace=trace)  # type: ignore[arg-type]


def test_a_batch_travels_whole() -> None:
    groups = [
        Group(
            prompt_id="p4", group_id=4, rollouts=(rollout(4, 0, 3), rollout(4, 1, 0)), weight=0.25
        ),
        Group(prompt_id="p2", group_id=2, rollouts=(rollout(2, 1, 5),)),
    ]
    batch = Batch(groups=tuple(groups), kl_coef=0.1)
    found = filled(*pickle.loads(pickle.dumps(emptied(batch))))
    # As text, since arrays have no plain equality.
    assert repr(found) == repr(batch)
    kinds = [
        [getattr(r.trace, name).dtype for name in ("ids", "log_probs", "versions")]
        for r in batch.groups[0].rollouts
    ]
    assert kinds == [
        [getattr(r.trace, name).dtype for name in ("ids", "log_probs", "versions")]
        for r in found.groups[0].rollouts
    ]
    assert Bundle.of([]).rollouts() == []
