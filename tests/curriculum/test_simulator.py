from __future__ import annotations

import pytest
from scripted import SAMPLING

from whet.testing.simulator import SealedRollout, Simulator, World
from whet.types import Request, Rollout


def requests(count: int, n: int = 4) -> list[Request]:
    return [Request(prompt_id=f"p{i}", group_id=i, n=n, sampling=SAMPLING) for i in range(count)]


def drain(simulator: Simulator) -> list[Rollout]:
    done = []
    while simulator._running or simulator._cut:
        done += simulator.collect()
    return done


def test_every_rollout_comes_once_and_its_worth_does_not_depend_on_the_order() -> None:
    worth = {}
    for order in ("random", "shortest"):
        simulator = Simulator(World(order=order), sealed=False)  # type: ignore[arg-type]
        simulator.submit(requests(20))
        done = drain(simulator)
        assert len({r.key for r in done}) == len(done) == 80
        worth[order] = {r.key: (r.length, r.verdict) for r in done}
        assert simulator.tokens == sum(r.length for r in done)
    assert worth["random"] == worth["shortest"]


def test_pass_rates_are_what_the_world_says() -> None:
    simulator = Simulator(World(pass_rates=(0.0, 0.25, 1.0), unjudged=0.2), sealed=False)
    simulator.submit(requests(3, n=2000))
    done = drain(simulator)
    for prompt, rate in enumerate((0.0, 0.25, 1.0)):
        judged = [r for r in done if r.group_id == prompt and r.judged]
        assert len(judged) / 2000 == pytest.approx(0.8, abs=0.04)
        assert sum(r.verdict == "right" for r in judged) / len(judged) == pytest.approx(
            rate, abs=0.04
        )


def test_an_update_cuts_its_share_and_the_others_run_on() -> None:
    simulator = Simulator(World(slots=64, cut=0.5), sealed=False)
    simulator.submit(requests(20))
    assert simulator.free == 0
    simulator.update(1)
    done = drain(simulator)
    cut = [r for r in done if r.finish == "cut"]
    assert len(done) == 80 and 20 < len(cut) < 60
    assert all(not r.judged and (r.first_version, r.last_version) == (0, 0) for r in cut)
    assert all((r.first_version, r.last_version) == (0, 1) for r in done if r.finish == "stop")


def test_a_sealed_rollout_shows_all_but_its_trace() -> None:
    simulator = Simulator(World(), sealed=True)
    simulator.submit(requests(1))
    first = drain(simulator)[0]
    assert isinstance(first, SealedRollout) and first.length > 0
    with pytest.raises(AssertionError, match="Contract line 7"):
        _ = first.trace
