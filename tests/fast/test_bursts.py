"""Steps launched several at once, under all that may come between: the tokens are those of one step at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from slow_engine import VOCAB, ask, make_engine, sharp_model
from test_speculation import Whim

from whet.draft.base import OFF, DraftArm
from whet.draft.lookup import Suffix
from whet.draft.speculation import Speculation
from whet.fast import graphs
from whet.fast.fused import share_storage
from whet.fast.graphs import PROMPTS, SIZES, Captures, burst
from whet.rollout.engine import LocalEngine
from whet.types import Request, Rollout


def engine_of(how: str, seed: int) -> LocalEngine:
    """By plain calls, in bursts, or in bursts with drafts; few pages, so that rows wait and are preempted."""
    model = sharp_model(heads=6, kv_heads=2)
    share_storage(model)
    rng = np.random.default_rng(seed)
    form: dict[str, Any] = {
        "slots": int(rng.integers(2, 8)),
        "page": 4,
        "pages": int(rng.integers(18, 60)),
    }
    if how == "drafts":
        form["speculation"] = Speculation(
            [Suffix()], Whim([OFF, DraftArm("suffix", 2), DraftArm("suffix", 6)]), vocab=VOCAB
        )
    on_update = str(rng.choice(["keep", "recompute"]))
    return make_engine(model, graphs=how != "plain", mode="stream", on_update=on_update, **form)


def requests(rng: np.random.Generator, first: int) -> list[Request]:
    stops: list[tuple[int, ...]] = [(), (3,), (3, 5, 7, 11, 13, 17)]
    return [
        ask(
            int(rng.integers(12)),
            n=int(rng.integers(1, 4)),
            group=first + i,
            max_tokens=int(rng.integers(1, 40)),
            stop_ids=stops[rng.integers(3)],
            stop_strings=("ab",) if rng.random() < 0.1 else (),
        )
        for i in range(int(rng.integers(1, 5)))
    ]


def story(how: str, seed: int) -> tuple[list[tuple[Any, ...]], LocalEngine]:
    """Requests that come in between, evaluations with top-p, updates that change nothing but the version."""
    engine, rng = engine_of(how, seed), np.random.default_rng(seed + 1)
    done: list[Rollout] = []
    for part in range(8):
        engine.submit(requests(rng, 1000 * part))
        if rng.random() < 0.3:
            evaluation = ask(20 + part, n=2, phase="eval", max_tokens=9, top_p=0.8)
            done += engine.generate([evaluation])
        done += engine.collect()
        if rng.random() < 0.4:
            engine.update(part + 1)
    while not engine.idle:
        done += engine.collect()
    done.sort(key=lambda r: (r.phase, r.key))
    return [
        (r.phase, r.key, r.finish, r.trace.ids.tolist(), r.trace.log_probs) for r in done if r.trace
    ], engine


def assert_same(on_progress: list[tuple[Any, ...]], plain: list[tuple[Any, ...]]) -> None:
    """Every token, and log-probs but for the rounding of sums that are taken in another order."""
    assert [rollout[:-1] for rollout in on_progress] == [rollout[:-1] for rollout in plain]
    for mine, other in zip(on_progress, plain, strict=True):
        np.testing.assert_allclose(mine[-1], other[-1], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_one_story_however_it_is_decoded(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    before = graphs.GraphRunner._launch

    def noting(self: Any, running: int, arm: DraftArm, steps: int = 1) -> Any:
        launched.append(steps)
        return before(self, running, arm, steps)

    monkeypatch.setattr(graphs.GraphRunner, "_launch", noting)
    plain, _ = story("plain", seed)
    assert_same(story("bursts", seed)[0], plain)
    assert graphs.MOST in launched
    drafted, engine = story("drafts", seed)
    assert_same(drafted, plain)
    assert engine.cache.free == engine_of("plain", seed).cache.free, "all pages are given back"


def test_a_burst_by_hand() -> None:
    """Two rows, three steps of up to two tokens: 1; 2 3; 4 and 5 6; 7; 8 9. The second ends after 7."""
    token = np.array([[[1, 0], [5, 6]], [[2, 3], [7, 0]], [[4, 0], [8, 9]]])
    counted = np.array([[1, 2], [2, 1], [1, 2]])
    drawn = burst(token, token / 10, counted, np.ones_like(counted), DraftArm("suffix", 1))
    assert drawn.token.tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 7, 8, 9, 0]]
    assert drawn.log_prob[0, :4].tolist() == [0.1, 0.2, 0.3, 0.4]
    before = drawn.counted.cumsum(0) - drawn.counted
    assert before.tolist() == [[0, 0], [1, 2], [3, 3]]
    assert np.clip(np.array([4, 3]) - before, 0, drawn.counted).tolist() == [[1, 2], [2, 1], [1, 0]]
    assert np.clip(np.array([2, 1]) - before, 0, drawn.counted).tolist() == [[1, 1], [1, 0], [0, 0]]
    assert drawn.counted.sum(0).tolist() == [4, 5]


def test_what_may_be_wanted_is_captured_at_the_start_the_largest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Captures, "capture", lambda self, keys: asked.extend(keys))
    model = sharp_model(heads=6, kv_heads=2)
    share_storage(model)
    served = [(2, DraftArm("suffix", 2)), (4, DraftArm("suffix", 2)), (2, DraftArm("suffix", 8))]
    speculation = Speculation([Suffix()], Whim([OFF]), vocab=VOCAB, served=served)
    make_engine(model, graphs=True, slots=4, page=4, speculation=speculation).begin()
    prompts, plain, drafting = (
        asked[: len(SIZES)],
        asked[len(SIZES) : len(SIZES) + 2],
        asked[len(SIZES) + 2 :],
    )
    assert prompts[0] == (2048, 512, PROMPTS) and sorted(prompts, reverse=True) == prompts
    assert plain == [(4, 1, ""), (2, 1, "")]
    assert drafting == [
        (2, 8, "suffix"),
        (2, 9, ""),
        (4, 2, "suffix"),
        (4, 3, ""),
        (2, 2, "suffix"),
        (2, 3, ""),
    ]


@pytest.mark.parametrize("how", ["bursts", "drafts"])
def test_after_prompts_the_device_is_given_something_to_do_at_once(how: str) -> None:
    """This comes before the caller gets a result; not while more prompts wait, which would wait for these steps."""
    engine = make_engine(sharp_model(), slots=4, page=4, graphs=True)
    if how == "drafts":
        engine = engine_of("drafts", 1)
    engine.submit([ask(0, n=2, max_tokens=12)])
    engine.step()
    assert engine.runner.ahead and len(engine.runner._next.drawn) == engine.runner.burst
    full = make_engine(sharp_model(), slots=1, page=4, graphs=True)
    full.submit([ask(0, n=2, max_tokens=12)])
    full.step()
    assert full.scheduler.waiting and full.runner.ahead
    waiting = make_engine(sharp_model(), slots=4, page=4, pages=16, graphs=True, context=64)
    waiting.submit([ask(i, n=1, max_tokens=50) for i in range(4)])
    waiting.step()
    assert waiting.scheduler.waiting and waiting.rows.size < 4 and not waiting.runner.ahead
