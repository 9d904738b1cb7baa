"""Expected lengths, the pages they take, and what admission by them does to preemptions and to the makespan."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_lengths import scripted, want
from slow_engine import ask, make_engine, sharp_model

from whet.rollout import scheduler as module
from whet.rollout.engine import LocalEngine
from whet.rollout.rows import Flight
from whet.rollout.scheduler import Lengths, peak_pages

Script = dict[tuple[str, int], int]


def test_the_mean_counts_those_that_run() -> None:
    """Two ended after 10 and 30 tokens while others have written 60: 100 / 2, not 40 / 2."""
    lengths = Lengths()
    assert lengths.mean(running=60) == np.inf, "none has ended"
    lengths.end("a", 10)
    lengths.end("b", 30)
    assert lengths.mean(running=60) == pytest.approx(100 / 2, rel=0.01)  # fading of the first
    lengths.tokens += 50
    assert lengths.mean(running=60) == pytest.approx(150 / 2, rel=0.01)


def test_a_prompt_has_its_own_expectation() -> None:
    lengths = Lengths()
    for length in (100, 100, 20):
        lengths.end("a", length)
    lengths.end("b", 999, remember=False)
    assert lengths.expect("a", 0) == 100 + 0.25 * (20 - 100)
    assert lengths.expect("b", 0) == lengths.mean(0)


def test_only_so_many_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROMPTS", 2)
    lengths = Lengths()
    for prompt in ("a", "b", "a", "c"):
        lengths.end(prompt, 5)
    assert list(lengths.prompts) == ["a", "c"]  # b was not seen for longest


def test_what_is_left_by_hand() -> None:
    """Expected 40: 30 left after 10, half of what is written after 60, and the limit's 5 at most."""
    lengths = Lengths()
    lengths.end("p0", 40)
    engine = make_engine(sharp_model())
    [flight] = engine._flights([ask(0)])
    left = lengths.left([flight] * 3, np.array([10, 60, 60]), np.array([100, 100, 65]), 0)
    assert left.tolist() == [30, 30, 5]


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 90)), min_size=1, max_size=8),
    page=st.integers(1, 16),
)
def test_peak_is_that_of_a_step_by_step_count(rows: list[tuple[int, int]], page: int) -> None:
    """But for what the last pages hold: half a page a row on average, one at most."""
    own, left = (np.array(column) for column in zip(*rows, strict=True))
    exact = max(sum(-(-(o + t) // page) for o, n in rows if n >= t) for t in range(1, 91))
    assert abs(peak_pages(own, left, page) - exact) <= len(rows) / 2 + 1


def test_the_history_is_part_of_the_state() -> None:
    model = sharp_model()
    first, second = make_engine(model), make_engine(model)
    first.submit([ask(i, n=2, max_tokens=3 + i) for i in range(4)])
    first.collect()
    state = first.state_dict()
    arrays = {k: v for k, v in state.items() if isinstance(v, np.ndarray)}
    second.load_state_dict(
        {**json.loads(json.dumps({k: v for k, v in state.items() if k not in arrays})), **arrays}
    )
    assert second.lengths.prompts == first.lengths.prompts == {"p0": 3, "p1": 4, "p2": 5, "p3": 6}
    assert second.lengths.mean(7) == first.lengths.mean(7)


def tail(seed: int) -> Script:
    """Lengths by prompt and index: a long-tailed part that is the prompt's, times one that is the rollout's."""
    rng = np.random.default_rng(seed)
    return {
        (f"q{i}", k): int(np.clip(length * rng.lognormal(0, 0.3), 1, 400))
        for i, length in enumerate(rng.lognormal(3.5, 1.0, 48))
        for k in range(4)
    }


def run(engine: LocalEngine, lengths: Script, visits: int = 1) -> list[dict[str, float]]:
    """Stats of each visit of all prompts."""
    out = []
    for visit in range(visits):
        engine.submit([want(f"q{i}", 100 * visit + i, n=4) for i in range(48)])
        found = engine.collect()
        assert {(r.prompt_id, r.index): r.length for r in found} == lengths and len(found) == len(
            lengths
        )
        out.append(engine.stats())
    return out


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(1, 24),
    page=st.sampled_from([1, 4, 16, 64]),
    spare=st.integers(0, 60),
    on_update=st.sampled_from(["keep", "recompute"]),
)
def test_no_pool_deadlocks_and_everything_finishes(
    seed: int, slots: int, page: int, spare: int, on_update: str
) -> None:
    lengths = tail(seed)
    pages = -(-512 // page) + spare
    engine = scripted(
        lambda f: lengths[f.request.prompt_id, f.index],
        slots=slots,
        page=page,
        pages=pages,
        on_update=on_update,
    )
    stats = run(engine, lengths)[0]
    assert engine.cache.free == pages and engine.idle
    # A flight is preempted again only after another has ended.
    assert stats["rollout/preempted"] <= 2 * len(lengths)


def one_page_each(self: module.CacheRoom, flight: Flight, forked: bool) -> bool:
    """The rule before: one page stays free for each row that will run."""
    assert self.cache is not None
    page = self.cache.page
    now = self.now + (int(flight.known % page > 0) if forked else -(-flight.known // page))
    if 0 < self.rows.size + len(self.taken) >= self.cache.free - now:
        return False
    self.now = now
    self.taken.append((flight, 0))
    return True


def test_forecasts_save_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long-tailed workload, met for the first and a second time, in pools of a tenth of what the slots could take."""
    counts: dict[str, list[float]] = {"forecast": [], "before": []}
    for rule, found in counts.items():
        if rule == "before":
            monkeypatch.setattr(module.CacheRoom, "__call__", one_page_each)
        for seed in range(3):
            lengths = tail(seed)
            engine = scripted(
                lambda f, ls=lengths: ls[f.request.prompt_id, f.index], slots=32, page=8, pages=192
            )
            stats = run(engine, lengths, visits=2)
            found += [s["rollout/preempted"] for s in stats] + [s["rollout/steps"] for s in stats]
    preempted = {rule: sum(f[0::4]) + sum(f[1::4]) for rule, f in counts.items()}
    steps = {rule: sum(f[2::4]) + sum(f[3::4]) for rule, f in counts.items()}
    assert preempted["forecast"] < 0.67 * preempted["before"]
    assert steps["forecast"] < 1.08 * steps["before"]


def test_long_ones_first_shortens_the_makespan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are known from a first visit; the steps of the second, against order of arrival."""
    steps: dict[str, list[float]] = {"longest first": [], "arrival": []}
    for order, found in steps.items():
        if order == "arrival":
            monkeypatch.setattr(Lengths, "expect", lambda self, prompt_id, running: 0.0)
        for seed in range(4):
            lengths = tail(seed)
            engine = scripted(lambda f, ls=lengths: ls[f.request.prompt_id, f.index], slots=32)
            found.append(run(engine, lengths, visits=2)[1]["rollout/steps"])
    assert sum(steps["longest first"]) < 0.95 * sum(steps["arrival"])


def test_unknown_prompts_keep_their_order_and_siblings_stay_together() -> None:
    engine = scripted(lambda f: {"q1": 9, "q2": 30, "q3": 9}.get(f.request.prompt_id, 12), slots=2)
    engine.submit([want(f"q{i}", i) for i in (1, 2, 3)])
    engine.collect()
    engine.submit([want(f"q{i}", 10 + i, n=2) for i in (1, 7, 2, 8, 3)])
    assert [f.request.prompt_id for f in engine.scheduler.waiting] == [
        "q2",
        "q2",
        "q7",
        "q7",
        "q8",
        "q8",
        "q1",
        "q1",
        "q3",
        "q3",
    ]


def test_evaluations_keep_their_order_and_are_not_remembered() -> None:
    engine = scripted(lambda f: 30 if f.request.prompt_id == "q2" else 9, slots=1)
    engine.generate([want(f"q{i}", i) for i in (1, 2)])
    assert engine.lengths.prompts == {} and engine.lengths.ended > 1
    engine.submit([want(f"q{i}", 9 + i) for i in (1, 2)])
    engine.collect()
    order: list[str] = []
    engine.runner.length = lambda f: order.append(f.request.prompt_id) or 1  # type: ignore[attr-defined, func-returns-value]
    engine.generate([want(f"q{i}", 20 + i) for i in (1, 2)])
    assert order == ["q1", "q2"]
