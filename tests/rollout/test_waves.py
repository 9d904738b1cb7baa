"""Memory that runs out while prompts are fed: the wave is taken out again, smaller ones follow, tokens are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from slow_engine import PROMPTS, VOCAB, ask, by_key, make_engine, sharp_model
from test_bursts import assert_same, story
from test_engine_update import drain, step
from test_speculation import Whim

from whet.draft.base import OFF, DraftArm
from whet.draft.eagle import eagle_head
from whet.draft.lookup import Suffix
from whet.draft.speculation import Speculation
from whet.errors import WhetError
from whet.fast.fused import Feed, share_storage
from whet.fast.graphs import GraphRunner
from whet.rollout import scheduler
from whet.rollout.engine import LocalEngine
from whet.rollout.rows import Chunk
from whet.rollout.runner import Drawn
from whet.rollout.scheduler import Scheduler, Wave

FORMS: list[dict[str, Any]] = [
    {},
    {"page": 4},
    {"page": 3, "pages": 24},
    {"graphs": True, "page": 4},
]
SENTENCE = "There was no memory to feed prompts of"


def model() -> Any:
    made = sharp_model(heads=6, kv_heads=2)
    share_storage(made)
    return made


MODEL = model()


def refuse(tokens: int, most: int) -> None:
    if tokens > most:
        raise torch.OutOfMemoryError("full")


class Short:
    """A network on a GPU without room for the tensors of so many prompt tokens."""

    def __init__(self, network: Any, most: int) -> None:
        self.network, self.most, self.head = network, most, network.head

    def forward(self, fed: Feed) -> torch.Tensor:
        real = int((fed.row >= 0).sum())  # the others are padding
        refuse(real if fed.most > 1 else 0, self.most)
        out: torch.Tensor = self.network.forward(fed)
        return out


def full_before(engine: LocalEngine, most: int) -> None:
    """A forward over the prompts of more than `most` tokens finds the GPU full."""
    if isinstance(engine.runner, GraphRunner):
        engine.runner.network = engine.runner.prefill.network = Short(engine.runner.network, most)
    else:
        engine.twin.register_forward_pre_hook(
            lambda module, args, given: refuse(given["input_ids"].numel() - engine.rows.size, most),
            with_kwargs=True,
        )


def full_after(engine: LocalEngine, most: int) -> None:
    """It is full when all is computed, forks made and tokens drawn."""
    advance = engine.runner.advance

    def short(running: int, chunks: Sequence[Chunk], *args: Any, **kwargs: Any) -> Drawn:
        drawn = advance(running, chunks, *args, **kwargs)
        refuse(sum(chunk.size for chunk in chunks), most)
        return drawn

    engine.runner.advance = short  # type: ignore[method-assign]


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test's prompts have 1 to 13 tokens."""
    monkeypatch.setattr(scheduler, "FEW", 2)
    yield


@pytest.mark.wide
@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("full", [full_before, full_after])
@pytest.mark.parametrize("most", [20, 9, 3])
def test_a_full_gpu_changes_no_token(
    form: dict[str, Any], full: Callable[..., None], most: int
) -> None:
    """Waves of several prompts, down to parts of one; forks; rows that run meanwhile; recomputed flights."""
    requests = [
        ask(i, n=1 + i % 3, temperature=(1.0, 0.0)[i % 2], max_tokens=4 + 2 * i) for i in range(9)
    ]
    results = []
    for short in (False, True):
        engine = make_engine(MODEL, slots=7, mode="stream", on_update="recompute", **form)
        if short:
            full(engine, most)
        engine.submit(requests)
        if short:
            with pytest.warns(UserWarning, match=SENTENCE) as warned:
                step(engine, 12)
            assert len(warned) == 1, "said once"
        else:
            step(engine, 12)
        engine.update(1)
        results.append(by_key(drain(engine)))
        stats = engine.stats()
        assert (stats["rollout/oom"] > 0) == short
        if "page" in form:
            assert engine.cache.free == len(engine.cache.owners), "every page comes back"  # type: ignore[union-attr]
    assert results[0] == results[1] and len(results[0]) == sum(r.n for r in requests)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_steps_launched_ahead_and_drafts_are_taken_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What running rows drew beside a wave that failed is drawn again, whatever the device had begun."""
    wanted, _ = story("plain", seed)
    failed: list[int] = []
    advance = GraphRunner.advance

    def short(
        self: GraphRunner, running: int, chunks: Sequence[Chunk], *args: Any, **kwargs: Any
    ) -> Drawn:
        drawn = advance(self, running, chunks, *args, **kwargs)
        tokens = sum(chunk.size for chunk in chunks)
        if tokens > 10 or (running and tokens and len(failed) % 3):  # now and then, however small
            failed.append(running)
            raise torch.OutOfMemoryError("full")
        return drawn

    monkeypatch.setattr(scheduler, "FEW", 2)
    monkeypatch.setattr(GraphRunner, "advance", short)
    for how in ("bursts", "drafts"):
        with pytest.warns(UserWarning, match=SENTENCE):
            found, engine = story(how, seed)
        assert_same(found, wanted)
        assert engine.cache.free == len(engine.cache.owners)  # type: ignore[union-attr]
    assert failed


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("form", [{"page": 4}, {"graphs": True, "page": 4}], ids=str)
def test_a_drafter_that_reads_hidden_states(form: dict[str, Any]) -> None:
    requests = [ask(i, n=2, max_tokens=6 + 3 * i) for i in range(8)]
    wanted = by_key(make_engine(MODEL, slots=5, **form).generate(requests))
    speculation = Speculation(
        [Suffix()], Whim([OFF, DraftArm("eagle", 3), DraftArm("suffix", 2)]), vocab=VOCAB
    )
    engine = make_engine(MODEL, slots=5, speculation=speculation, eagle=eagle_head(MODEL), **form)
    full_after(engine, 8)
    with pytest.warns(UserWarning, match=SENTENCE):
        assert by_key(engine.generate(requests)) == wanted
    assert engine.stats()["draft/failures"] == 0


def test_one_prompt_that_does_not_fit_is_one_sentence() -> None:
    engine = make_engine(MODEL, page=4)
    full_before(engine, 9)
    engine.submit([ask(2)])
    assert len(PROMPTS["p2"]) == 11
    with pytest.raises(
        WhetError, match=r"^Not even a prompt of 11 tokens can be fed .* rollout\.pages"
    ):
        engine.collect()
    assert engine.cache.free == len(engine.cache.owners) and not engine.rows.size  # type: ignore[union-attr]
    assert [f.request.prompt_id for f in engine.scheduler.waiting] == ["p2"], "nothing is lost"


@pytest.mark.parametrize("chunk", [64, 4], ids=["whole", "half fed"])
def test_what_does_not_fit_beside_others_waits_for_them(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "PREFILL", chunk)
    requests = [ask(0, max_tokens=6), ask(2, n=2, max_tokens=5)]  # 1 and 11 tokens
    wanted = by_key(make_engine(MODEL, page=4).generate(requests))
    engine = make_engine(MODEL, page=4)
    advance = engine.runner.advance

    def short(running: int, chunks: Sequence[Chunk], *args: Any, **kwargs: Any) -> Drawn:
        refuse(sum(c.stop for c in chunks) if running else 0, 4)
        return advance(running, chunks, *args, **kwargs)

    engine.runner.advance = short  # type: ignore[method-assign]
    engine.submit(requests[:1])
    step(engine, 1)
    engine.submit(requests[1:])
    with pytest.warns(UserWarning, match=SENTENCE):
        assert by_key(engine.collect()) == wanted
    assert engine.cache.free == len(engine.cache.owners)  # type: ignore[union-attr]


def test_forks_are_fewer_where_they_are_what_does_not_fit() -> None:
    requests = [ask(2, n=6, max_tokens=5), ask(0, n=3, max_tokens=3)]
    wanted = by_key(make_engine(MODEL, slots=8, page=4).generate(requests))
    engine = make_engine(MODEL, slots=8, page=4)
    advance = engine.runner.advance

    def short(
        running: int, chunks: Sequence[Chunk], source: Sequence[int], *args: Any, **kwargs: Any
    ) -> Drawn:
        refuse(len(source), 1)
        return advance(running, chunks, source, *args, **kwargs)

    engine.runner.advance = short  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=SENTENCE):
        assert by_key(engine.generate(requests)) == wanted
    assert engine.scheduler.forks == 1
    assert engine.cache.free == len(engine.cache.owners)  # type: ignore[union-attr]


def test_the_queue_is_as_it_was() -> None:
    """Order, groups that have begun, and whether anybody may be admitted; seen by an update that comes next."""
    engine = make_engine(MODEL, slots=4, mode="stream", page=4, pages=17)
    engine.submit([ask(i, n=2, max_tokens=40) for i in range(4)])
    waiting = list(engine.scheduler.waiting)
    full_after(engine, 1)
    with pytest.warns(UserWarning, match=SENTENCE):
        step(engine, 1)
    assert (
        list(engine.scheduler.waiting) == waiting
        and not engine.scheduler.begun
        and not engine.scheduler.full
    )
    assert not engine.rows.size and engine.stats()["rollout/tokens"] == 0
    engine.update(1)
    assert not engine.done, "no group has begun, so none is cut"


@pytest.mark.usefixtures("divided")
def test_a_row_that_is_half_fed_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PREFILL", 8)
    requests = [ask(2, n=2, max_tokens=5), ask(0, max_tokens=9)]  # 11 tokens
    wanted = by_key(make_engine(MODEL, slots=4, page=4).generate(requests))
    engine = make_engine(MODEL, slots=4, page=4)
    engine.submit(requests)
    step(engine, 1)
    assert engine.rows.fed == 8
    advance, times = engine.runner.advance, []

    def once(*args: Any, **kwargs: Any) -> Drawn:
        drawn = advance(*args, **kwargs)
        times.append(0)
        if len(times) == 1:
            raise torch.OutOfMemoryError("full")
        return drawn

    engine.runner.advance = once  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=SENTENCE):
        step(engine, 1)
    assert (engine.rows.size, engine.rows.ready, engine.rows.fed, int(engine.rows.shared[0])) == (
        1,
        0,
        8,
        0,
    )
    assert by_key(drain(engine)) == wanted
    assert engine.cache.free == len(engine.cache.owners)  # type: ignore[union-attr]


def test_budgets_by_hand() -> None:
    """Padded waves count twice their rectangle; a wave of one prompt counts what it feeds."""
    flight = make_engine(MODEL)._flights([ask(2)])[0]
    for packed, wanted in ((True, 5 * 600 // 2), (False, 2 * 5 * 900 // 2)):
        made = Scheduler(packed=packed)
        assert made.budget == scheduler.PREFILL
        assert made.shrink(Wave(chunks=[Chunk(flight, 0, 11)] * 5, tokens=5 * 600, longest=900))
        assert made.budget == wanted
        assert (
            made.shrink(Wave(chunks=[Chunk(flight, 0, 11)], tokens=600, longest=600))
            and made.budget == 300
        )
        assert not made.shrink(Wave(chunks=[Chunk(flight, 0, 11)], tokens=256, longest=256))
        assert made.budget == 300 and made.ooms == 3


def test_a_drafter_has_read_no_more_than_is_cached() -> None:
    """It reads on while steps are under way, which are then thrown away."""
    engine = make_engine(MODEL, slots=3, page=4)
    engine.submit([ask(0, max_tokens=9)])
    step(engine, 2)
    engine.submit([ask(2)])

    def ahead(*args: Any, **kwargs: Any) -> Drawn:
        engine.rows.paired[0] = engine.rows.length[0] + 3
        raise torch.OutOfMemoryError("full")

    engine.runner.advance = ahead  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=SENTENCE):
        step(engine, 1)
    assert engine.rows.paired[0] == engine.rows.length[0]
