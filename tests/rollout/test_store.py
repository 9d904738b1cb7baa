import io

import numpy as np
import pytest

from whet.rollout.base import RolloutStore
from whet.types import Batch, Group, Rollout, Sampling, Trace

SAMPLING = Sampling(max_tokens=8)


def rollout(group_id: int, index: int, length: int) -> Rollout:
    rng = np.random.default_rng((group_id, index))
    trace = Trace(
        ids=rng.integers(0, 99, length).astype(np.int32),
        log_probs=-rng.random(length).astype(np.float32),
        versions=rng.integers(0, 5, length).astype(np.int32),
    )
    return Rollout(
        prompt_id=f"p{group_id}",
        group_id=group_id,
        index=index,
        phase="train",
        sampling=SAMPLING,
        length=length,
        finish="stop",
        first_version=0,
        last_version=4,
        trace=trace,
    )


def batch_of(rollouts: list[Rollout]) -> Batch:
    groups = sorted({r.group_id for r in rollouts})
    return Batch(
        stage=3,
        groups=tuple(
            Group(
                prompt_id=f"p{g}",
                group_id=g,
                rollouts=tuple(r for r in rollouts if r.group_id == g),
                weight=0.25,
            )
            for g in groups
        ),
    )


def same_trace(a: Trace | None, b: Trace | None) -> bool:
    assert a is not None and b is not None
    return all(
        np.array_equal(getattr(a, n), getattr(b, n)) and getattr(a, n).dtype == getattr(b, n).dtype
        for n in ("ids", "log_probs", "versions")
    )


ROLLOUTS = [rollout(2, 0, 3), rollout(1, 4, 1), rollout(2, 1, 0), rollout(7, 0, 5)]


def test_traces_are_taken_off_and_come_back():
    store = RolloutStore()
    bare = store.put(ROLLOUTS)
    assert [r.key for r in bare] == [r.key for r in ROLLOUTS] and all(r.trace is None for r in bare)
    assert store.arrays()["ids"].size == 9
    batch = store.attach(batch_of(bare))
    assert batch.stage == 3 and [g.weight for g in batch.groups] == [0.25] * 3
    attached = {r.key: r for g in batch.groups for r in g.rollouts}
    assert all(same_trace(attached[r.key].trace, r.trace) for r in ROLLOUTS)
    assert [r.key for r in store.attach_rollouts(bare)] == [r.key for r in bare]


def test_only_kept_groups_stay():
    store = RolloutStore()
    bare = store.put(ROLLOUTS)
    store.keep({2, 99})
    assert store.arrays()["ids"].size == 3
    store.attach(batch_of([r for r in bare if r.group_id == 2]))
    with pytest.raises(AssertionError, match=r"\(7, 0\) was freed"):
        store.attach(batch_of(bare[3:]))
    store.keep(set())
    assert store.arrays()["ids"].size == 0


def test_what_must_not_happen_is_noticed():
    store = RolloutStore()
    bare = store.put(ROLLOUTS)
    with pytest.raises(AssertionError, match="no trace"):
        store.put(bare)
    with pytest.raises(AssertionError, match="came twice"):
        store.put(ROLLOUTS[:1])
    odd = Trace(
        ids=np.zeros(2, np.int32), log_probs=np.zeros(1, np.float32), versions=np.zeros(2, np.int32)
    )
    with pytest.raises(AssertionError, match="ragged"):
        store.put([rollout_with(odd)])


def rollout_with(trace: Trace) -> Rollout:
    return Rollout(
        prompt_id="p",
        group_id=50,
        index=0,
        phase="train",
        sampling=SAMPLING,
        length=2,
        finish="stop",
        first_version=0,
        last_version=0,
        trace=trace,
    )


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_store_survives_its_arrays(count):
    store = RolloutStore()
    bare = store.put(ROLLOUTS[:count])
    arrays = store.arrays()
    assert {name: array.dtype for name, array in arrays.items()} == {
        "keys": np.int64,
        "offsets": np.int64,
        "ids": np.int32,
        "log_probs": np.float32,
        "versions": np.int32,
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    file.seek(0)
    other = RolloutStore()
    other.put([rollout(90, 0, 2)])
    other.load(np.load(file, allow_pickle=False))
    assert other.arrays()["ids"].size == arrays["ids"].size
    for before, after in zip(ROLLOUTS, other.attach_rollouts(bare), strict=False):
        assert same_trace(before.trace, after.trace)
    again = other.arrays()
    assert all(np.array_equal(arrays[name], again[name]) for name in arrays)


def test_a_freed_rollout_frees_its_memory_after_a_load():
    store = RolloutStore()
    store.put(ROLLOUTS)
    arrays = store.arrays()
    store.load(arrays)
    traces = [r.trace for r in store.attach_rollouts(ROLLOUTS)]
    assert not any(
        np.shares_memory(trace.ids, arrays["ids"]) for trace in traces if trace is not None
    )


def test_damaged_arrays_are_noticed():
    store = RolloutStore()
    store.put(ROLLOUTS)
    arrays = store.arrays()
    with pytest.raises(AssertionError, match="disagree"):
        RolloutStore().load({**arrays, "ids": arrays["ids"][:-1]})
