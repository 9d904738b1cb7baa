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
from whet.rollout.pages import ALIGN, Access, Arena, Location, PagedCache, Properties, layout, make_cache

CPU = torch.device("cpu")
PIECES = [((5, 2, 16, 8), torch.bfloat16), ((3, 7), torch.float32), ((1,), torch.float64)]


def test_pieces_lie_apart_and_aligned() -> None:
    places, size = layout(PIECES)
    assert [p.start % ALIGN for p in places] == [0, 0, 0]
    assert [p.stop - p.start for p in places] == [5 * 2 * 16 * 8 * 2, 3 * 7 * 4, 8]
    assert all(a.stop <= b.start for a, b in pairwise(places)) and size == places[-1].stop


def test_structs_are_those_of_cuda_h() -> None:
    """Sizes and offsets as a C compiler lays them out."""
    assert (ctypes.sizeof(Location), ctypes.sizeof(Properties), ctypes.sizeof(Access)) == (8, 32, 12)
    offsets = {name: getattr(Properties, name).offset for name, _ in Properties._fields_}
    assert offsets == {"type": 0, "handle_types": 4, "location": 8, "metadata": 16, "flags": 24}
    assert (Access.location.offset, Access.flags.offset) == (0, 8)


def test_off_cuda_it_is_plain_memory() -> None:
    arena = Arena(PIECES, CPU, releasable=True)
    assert not arena.releasable and arena.resident
    arena.tensors[1].fill_(3)
    arena.release()
    arena.take_back()
    assert (arena.tensors[1] == 3).all(), "nothing was released, so nothing is lost"


class Lent(Arena):
    """Releases on a CPU what a GPU would: whoever reads it meanwhile, or expects it back, meets nan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times = 0
        self.gone = False

    @property
    def releasable(self) -> bool:
        return True

    def release(self) -> None:
        self.times += 1
        self.gone = True
        for tensor in self.tensors:
            tensor.fill_(torch.nan)

    def take_back(self) -> None:
        for tensor in self.tensors if self.gone else ():
            tensor.zero_()
        self.gone = False


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("on_update", ["cut", "recompute", "keep"])
def test_an_engine_that_lends_its_memory_emits_the_same(
    on_update: Any, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates while rollouts run; under `keep` they still need what is cached, so nothing is lent."""
    plain = make_engine(sharp_model(), mode="stream", on_update=on_update, page=page)
    monkeypatch.setattr("whet.rollout.pages.Arena", Lent)
    lending = make_engine(sharp_model(), mode="stream", on_update=on_update, page=page)
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
    assert isinstance(lending.cache.arena, Lent) and lending.cache.arena.times == (on_update != "keep")


def small_card(most: int) -> type[Arena]:
    class Small(Arena):
        def __init__(self, pieces: Any, device: torch.device, *, releasable: bool = False) -> None:
            if layout(pieces)[1] > most:
                raise torch.OutOfMemoryError("full")
            super().__init__(pieces, device, releasable=releasable)

    return Small


def test_a_pool_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [KVShape(1, 64, 64, torch.float32)]
    page_bytes = 4 * 64 * 4

    def cache(most_pages: int, page: int = 4) -> Any:
        monkeypatch.setattr("whet.rollout.pages.Arena", small_card(2 * most_pages * page_bytes))
        return make_cache(shapes, 8, 20, page, 0, CPU)

    assert cache(41).notes() == [] and cache(41).pool.free == 40
    assert cache(40).pool.free == 20
    fewest = cache(6)
    assert fewest.pool.free == 5, "one context, 20 tokens of 4 a page"
    assert fewest.notes() == [
        "The GPU has no room for 40 KV pages: the pool has 5; when they are full, the youngest rollouts wait."
    ]
    with pytest.raises(WhetError, match=r"Not even one rollout of rollout\.context = 20"):
        cache(5)
    with pytest.raises(WhetError, match="lower one of them"):
        cache(5, page=0)


class Full:
    """Addresses whose memory somebody else has taken meanwhile, for so many tries."""

    size, mapped = 3 * 2**29, False

    def __init__(self, tries: int) -> None:
        self.tries = tries

    def map(self) -> None:
        self.tries -= 1
        if self.tries >= 0:
            raise torch.OutOfMemoryError("full")
        self.mapped = True


def test_memory_that_does_not_come_back_is_one_sentence() -> None:
    arena = Arena(PIECES, CPU)
    arena._bytes = arena.tensors[1]
    arena._range = Full(1)  # type: ignore[assignment]
    arena.take_back()
    assert arena.resident, "what the learner has freed is enough"
    arena._range = Full(2)  # type: ignore[assignment]
    with pytest.raises(WhetError, match=r"^The KV cache lent its 1\.5 GiB to the learner, and the GPU has no room"):
        arena.take_back()
    assert not arena.resident


@pytest.mark.gpu
def test_released_memory_goes_back_to_the_card_and_comes_back_as_zeros() -> None:
    arena = Arena([((2**28,), torch.bfloat16), ((1000, 3), torch.float32)], torch.device("cuda"), releasable=True)
    assert arena.releasable and arena.resident
    addresses = [t.data_ptr() for t in arena.tensors]
    assert all((t == 0).all() for t in arena.tensors)
    arena.tensors[0].fill_(torch.nan)
    arena.tensors[1].fill_(7)
    assert (arena.tensors[1] == 7).all()
    before = torch.cuda.mem_get_info()[0]
    arena.release()
    assert not arena.resident
    assert torch.cuda.mem_get_info()[0] - before >= 2**29
    borrowed = torch.ones(2**28, dtype=torch.bfloat16, device="cuda")
    assert borrowed.float().mean() == 1
    arena.release()  # twice is once
    arena.take_back()
    arena.take_back()
    assert arena.resident and [t.data_ptr() for t in arena.tensors] == addresses
    assert all((t == 0).all() for t in arena.tensors)
    assert (borrowed == 1).all(), "the memory behind the addresses is other memory now"


@pytest.mark.gpu
def test_a_full_card_is_told_as_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="KV cache"):
        Arena([((torch.cuda.mem_get_info()[1],), torch.bfloat16)], torch.device("cuda"), releasable=True)


@pytest.mark.gpu
def test_the_memory_is_freed_with_the_tensors() -> None:
    free = torch.cuda.mem_get_info()[0]
    arena = Arena([((2**30,), torch.uint8)], torch.device("cuda"), releasable=True)
    kept = arena.tensors[0][:4]
    del arena
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
    assert isinstance(lending.cache, PagedCache) and lending.cache.arena.releasable
    requests = [ask(i, n=2, max_tokens=45) for i in range(8)]
    for step in range(3):
        results = []
        for engine in (lending, plain):
            engine.submit([ask(i, n=2, max_tokens=45, group=1000 * step + i) for i in range(len(requests))])
            results.append(by_key(engine.collect()))
            graphs = engine.runner.stats()["rollout/graphs"]
            engine.release()
            torch.full((2**22,), torch.nan, device="cuda")  # somebody else writes where the cache may have been
            engine.take_back()
            engine.update(step + 1)
            assert engine.runner.stats()["rollout/graphs"] == graphs
        assert results[0] == results[1] and results[0]
