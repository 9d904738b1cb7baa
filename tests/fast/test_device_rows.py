"""The device's rows, and steps launched before the host has read the one before."""

import numpy as np
import pytest
import torch
from slow_engine import ask, make_engine, sharp_model

from whet.fast.fused import share_storage
from whet.fast.graphs import MOST, GraphRunner
from whet.fast.lanes import (
    COUNT,
    LENGTH,
    LIMIT,
    STOPS,
    TOKEN,
    DeviceRows,
    fed,
    fed_with_drafts,
)
from whet.rollout.engine import LocalEngine
from whet.types import Request, Rollout


def state(*rows: tuple[int, int, int, int]) -> torch.Tensor:
    """Token, length, count and limit of each; all stop at 9."""
    out = torch.zeros(STOPS + 2, len(rows), dtype=torch.int32)
    out[[TOKEN, LENGTH, COUNT, LIMIT]] = torch.tensor(rows, dtype=torch.int32).T
    out[STOPS:] = torch.tensor([[9], [-1]])
    return out


def test_what_a_row_feeds() -> None:
    row, position, keys = fed(
        state((4, 7, 2, 5), (0, -1, 0, 0)), torch.arange(2, dtype=torch.int32)
    )
    assert (row.tolist(), position.tolist(), keys.tolist()) == ([0, -1], [7, 0], [8, 0])


def test_drafts_are_fed_after_the_newest_token() -> None:
    before = state((4, 7, 2, 5), (6, 3, 1, 9), (0, -1, 0, 0))
    drafts = torch.tensor([[5, 8], [2, -1], [-1, -1]], dtype=torch.int32)
    ids, row, position, keys = fed_with_drafts(before, drafts, torch.arange(3, dtype=torch.int32))
    assert ids.view(3, 3)[:2].tolist() == [[4, 5, 8], [6, 2, 0]]
    assert row.view(3, 3).tolist() == [[0, 0, 0], [1, 1, -1], [-1, -1, -1]]
    assert position.view(3, 3).tolist() == [[7, 8, 9], [3, 4, 0], [0, 0, 0]]
    assert keys.tolist() == [10, 6, 0]


def test_rows_move_with_what_only_the_device_knows() -> None:
    rows = DeviceRows(4, 2, torch.device("cpu"))
    rows.state[TOKEN] = torch.tensor([5, 6, 7, 8])
    rows.state[LENGTH] = torch.tensor([1, 2, 3, 4])
    rows.arrange(np.array([3, 1]))
    rows.upload_table(np.array([[9, 9], [8, 8], [7, 7]]), 2)
    assert rows.state[TOKEN, :2].tolist() == [8, 6]
    assert rows.state[LENGTH].tolist() == [4, 2, -1, -1], "no row beyond"
    assert rows.table[:2].tolist() == [[9, 9], [8, 8]], "pages are the host's to tell"


def engines() -> tuple[LocalEngine, LocalEngine]:
    out = []
    for graphs in (False, True):
        model = sharp_model(heads=6, kv_heads=2)
        share_storage(model)
        out.append(make_engine(model, graphs=graphs, slots=5, page=16, pages=30))
    return out[0], out[1]


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [
        r.trace.ids.tolist() for r in sorted(rollouts, key=lambda r: r.key) if r.trace is not None
    ]


@pytest.mark.parametrize(
    "stops", [(), (3,), (3, 5, 7, 11, 13, 17)], ids=["no stop", "a stop", "more than it knows"]
)
def test_steps_ahead_give_the_same_tokens(stops: tuple[int, ...]) -> None:
    """Rows of many lengths, more of them than slots, pages that do not suffice for all."""
    requests: list[Request] = [
        ask(i, n=2, max_tokens=3 + 7 * (i % 5), stop_ids=stops) for i in range(9)
    ]
    plain, graph = engines()
    ahead = set()
    for engine in (plain, graph):
        engine.submit(requests)
        while engine.busy:
            engine.step()
            if isinstance(engine.runner, GraphRunner) and engine.runner._next is not None:
                ahead.add(len(engine.runner._next.drawn))
    assert tokens(plain.collect()) == tokens(graph.collect())
    assert MOST in ahead, "steps were launched ahead, several at once"


def test_a_step_ahead_is_forgotten_when_the_weights_change() -> None:
    plain, graph = engines()
    out = []
    for engine in (graph, plain):
        engine.on_update = "keep"
        engine.submit([ask(i, max_tokens=20) for i in range(4)])
        # one from the prompt, the others from a burst
        while engine.rows.size == 0 or engine.rows.count[0] < 1 + MOST:
            engine.step()
        assert engine.rows.count[:4].tolist() == [1 + MOST] * 4
        assert engine.runner.ahead == (engine is graph)
        with torch.no_grad():
            for weight in engine.twin.parameters():
                weight.mul_(0.9)
        engine.update(1)
        out.append(tokens(engine.collect()))
    assert out[0] == out[1]
