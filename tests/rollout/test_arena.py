"""Memory lent to the learner: addresses stay, contents go, graphs over it replay. The driver's part needs a GPU."""

import ctypes
from itertools import pairwise
from typing import Any

import pytest
import torch
from slow_engine import ask, by_key, make_engine, sharp_model

from whet.errors import WhetError
from whet.fast.fused import share_storage
from whet.model.twin import KVShape
from whet.rollout.pages import (
    ALIGN,
    Access,
    Arena,
    Location,
    PagedCache,
    Piece,
    Properties,
    allocate,
    layout,
    make_cache,
)

CPU = torch.device("cpu")
PIECES = [((5, 2, 16, 8), torch.bfloat16), ((3, 7), torch.float32), ((1,), torch.float64)]


def test_pieces_lie_apart_and_aligned() -> None:
    places, size = layout(PIECES)
    assert [p.start % ALIGN for p in places] == [0, 0, 0]
    assert [p.stop - p.start for p in places] == [5 * 2 * 16 * 8 * 2, 3 * 7 * 4, 8]
    assert all(a.stop <= b.start for a, b in pairwise(places)) and size == places[-1].stop


def test_structs_are_those_of_cuda_h() -> None:
    """Sizes and offsets as a C compiler lays them out."""
    assert (ctypes.sizeof(Location), ctypes.sizeof(Properties), ctypes.sizeof(Access)) == (
        8,
        32,
        12,
    )
    offsets = {name: getattr(Properties, name).offset for name, _ in Properties._fields_}
    assert offsets == {"type": 0, "handle_types": 4, "location": 8, "metadata": 16, "flags": 24}
    assert (Access.location.offset, Access.flags.offset) == (0, 8)


def test_off_cuda_it_is_plain_memory() -> None:
    tensors, arena = allocate(PIECES, CPU, releasable=True)
    assert arena is None and [(tuple(t.shape), t.dtype) for t in tensors] == PIECES
    assert not any(t.any() for t in tensors)


class Lent(Arena):
    """Releases on a CPU what a GPU would: reading it meanwhile, or expecting it back, gives nan."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors, self.times, self.mapped = tensors, 0, True

    def release(self) -> None:
        self.times += 1
        self.mapped = False
        for tensor in self.tensors:
            tensor.fill_(torch.nan)

    def take_back(self) -> None:
        for tensor in () if self.mapped else self.tensors:
            tensor.zero_()
        self.mapped = True

    def __del__(self) -> None: ...


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("on_update", ["cut", "recompute", "keep"])
def test_an_engine_that_lends_its_memory_emits_the_same(on_update: Any, page: int) -> None:
    """Updates while rollouts run; under `keep` they still need what is cached, so nothing is lent."""
    plain = make_engine(sharp_model(), mode="stream", on_update=on_update, page=page)
    lending = make_engine(sharp_model(), mode="stream", on_update=on_update, page=page)
    arena = lending.cache.arena = Lent([*lending.cache.keys, *lending.cache.values])
    results = []
    for engine in (plain, lending):
        engine.submit([ask(i, n=2, max_tokens=4 + 3 * i) for i in range(6)])
        found = engine.collect()
        assert engine.rows.size, "some rollouts still run"
        engine.release()
        engine.take_back()
        engine.update(1)
        while not engine.idle:
            found += engine.collect()
        results.append([(r.key, r.finish, r.last_version) for r in found])
        results.append(by_key(found))
    assert results[0] == results[2] and results[1] == results[3]
    assert arena.times == (on_update != "keep")


def test_a_pool_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [KVShape(1, 64, 64, torch.float32)]
    page_bytes = 4 * 64 * 4

    def cache(most_pages: int, page: int = 4) -> Any:
        def small_gpu(pieces: list[Piece], *rest: Any) -> Any:
            if layout(pieces)[1] > 2 * most_pages * page_bytes:
                raise torch.OutOfMemoryError("full")
            return allocate(pieces, *rest)

        monkeypatch.setattr("whet.rollout.pages.allocate", small_gpu)
        return make_cache(shapes, 8, 20, page, 0, CPU)

    assert cache(41).notes == [] and cache(41).free == 40
    assert cache(40).free == 20
    fewest = cache(6)
    assert fewest.free == 5, "one context, 20 tokens, 4 per page"
    assert fewest.notes == [
        "The GPU has no room for 40 KV pages: the pool has 5; when they are full, the youngest rollouts wait."
    ]
    with pytest.raises(WhetError, match=r"Not even one rollout of rollout\.context = 20"):
        cache(5)
    with pytest.raises(WhetError, match="lower one of them"):
        cache(5, page=0)


class Full(Arena):
    """Addresses whose memory another program has taken meanwhile, for so many tries."""

    def __init__(self, tries: int) -> None:
        self.size, self.mapped, self.tries = 3 * 2**29, False, tries

    def _map(self) -> None:
        self.tries -= 1
        if self.tries >= 0:
            raise torch.OutOfMemoryError("full")
        self.mapped = True

    def zeros(self) -> torch.Tensor:
        return torch.zeros(0)

    def __del__(self) -> None: ...


def test_memory_that_does_not_come_back_is_one_sentence() -> None:
    arena = Full(1)
    arena.take_back()
    assert arena.mapped, "what the learner has freed is enough"
    arena = Full(2)
    with pytest.raises(
        WhetError, match=r"^The KV cache lent its 1\.5 GiB to the learner, and the GPU has no room"
    ):
        arena.take_back()
    assert not arena.mapped


@pytest.mark.gpu
def test_released_memory_goes_back_to_the_gpu_and_comes_back_as_zeros() -> None:
    pieces: list[Piece] = [((2**28,), torch.bfloat16), ((1000, 3), torch.float32)]
    tensors, arena = allocate(pieces, torch.device("cuda"), releasable=True)
    assert arena is not None and arena.mapped
    addresses = [t.data_ptr() for t in tensors]
    assert all((t == 0).all() for t in tensors)
    tensors[0].fill_(torch.nan)
    tensors[1].fill_(7)
    assert (tensors[1] == 7).all()
    before = torch.cuda.mem_get_info()[0]
    arena.release()
    assert not arena.mapped
    assert torch.cuda.mem_get_info()[0] - before >= 2**29
    borrowed = torch.ones(2**28, dtype=torch.bfloat16, device="cuda")
    assert borrowed.float().mean() == 1
    arena.release()  # twice is once
    arena.take_back()
    arena.take_back()
    assert arena.mapped and [t.data_ptr() for t in tensors] == addresses
    assert all((t == 0).all() for t in tensors)
    assert (borrowed == 1).all(), "the memory behind the addresses is other memory now"


@pytest.mark.gpu
def test_a_full_gpu_is_reported_as_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="KV cache"):
        allocate(
            [((torch.cuda.mem_get_info()[1],), torch.bfloat16)],
            torch.device("cuda"),
            releasable=True,
        )


@pytest.mark.gpu
def test_the_memory_is_freed_with_the_tensors() -> None:
    free = torch.cuda.mem_get_info()[0]
    tensors, arena = allocate([((2**30,), torch.uint8)], torch.device("cuda"), releasable=True)
    assert arena is not None
    arena.release()
    arena.take_back()
    kept = tensors[0][:4]
    del tensors, arena
    kept.fill_(1)
    assert kept.sum() == 4
    del kept
    assert torch.cuda.mem_get_info()[0] > free - 2**29


@pytest.mark.gpu
def test_graphs_replay_over_memory_that_was_lent() -> None:
    """The same engine before and after, and one that never lent anything."""
    model = sharp_model(heads=6, kv_heads=2)
    share_storage(model)
    model = model.to("cuda", torch.float32)
    share_storage(model)
    lending = make_engine(model, graphs=True, slots=8, releasable=True)
    plain = make_engine(model, graphs=True, slots=8)
    assert isinstance(lending.cache, PagedCache) and lending.cache.arena is not None
    requests = [ask(i, n=2, max_tokens=45) for i in range(8)]
    for step in range(3):
        results = []
        for engine in (lending, plain):
            engine.submit(
                [ask(i, n=2, max_tokens=45, group=1000 * step + i) for i in range(len(requests))]
            )
            results.append(by_key(engine.collect()))
            graphs = engine.runner.stats()["rollout/graphs"]
            engine.release()
            # something else writes where the cache may have been
            torch.full((2**22,), torch.nan, device="cuda")
            engine.take_back()
            engine.update(step + 1)
            assert engine.runner.stats()["rollout/graphs"] == graphs
        assert results[0] == results[1] and results[0]
