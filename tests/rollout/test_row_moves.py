"""Rows that come and go together: as if they had come and gone one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from slow_engine import ask

from whet.rollout.pages import make_cache
from whet.rollout.rows import Flight, Rows
from whet.types import Trace

SLOTS, CONTEXT, PAGE = 9, 12, 4


def flight(number: int, rng: np.random.Generator) -> Flight:
    """One that has written up to four tokens, some of them guessed, with settings of its own."""
    n = int(rng.integers(5))
    trace = Trace(
        ids=rng.integers(0, 20, n).astype(np.int32),
        log_probs=-rng.random(n).astype(np.float32),
        versions=np.full(n, number, np.int32),
        guessed=rng.random(n) < 0.5 if number % 2 else None,
    )
    own = {
        "stop_ids": tuple(range(number % 4)),
        "top_k": number % 3,
        "stop_strings": ("ab",) * (number % 2),
    }
    asked = ask(number, max_tokens=8, temperature=1 + number / 10, **own)
    return Flight(
        asked, 0, number, np.arange(1 + number % 3), 8, (number, -number), trace, drafted=number
    )


def state(rows: Rows) -> list[object]:
    """All that the rows hold, with tokens as far as they count."""
    numbers = range(rows.size)
    columns = [getattr(rows, name)[: rows.size].tolist() for name in rows._columns]
    texts = [
        [part[i, : rows.count[i]].tolist() for part in (rows.ids, rows.log_probs, rows.versions)]
        for i in numbers
    ]
    arrivals = [f.arrival for f in rows.flights]
    guessed = rows.guessed[: rows.size].tolist()
    return [
        rows.size,
        rows.fed,
        arrivals,
        columns,
        texts,
        guessed,
        rows.keys[:, : rows.size].tolist(),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_many_rows_at_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, SLOTS + 1))
    half = int(rng.integers(2))  # the last row may be half fed: it stays the last, unless it goes
    gone = np.flatnonzero(rng.random(size) < rng.random()).tolist()
    found = []
    for together in (True, False):
        rng = np.random.default_rng(seed)
        flights = [flight(i, rng) for i in range(size)]
        rows = Rows(SLOTS, CONTEXT, np.dtype(np.float32), torch.device("cpu"))
        cache = make_cache([], SLOTS, CONTEXT, PAGE, 30, torch.device("cpu"))
        for some in [flights] if together else [[f] for f in flights]:
            rows.add(some)
        for row, f in enumerate(flights):
            cache.open(row, f.known)
        rows.feed(half)
        for some in [gone] if together else [[row] for row in reversed(gone)]:
            cache.close(some[::-1])
            source, target = rows.remove(some)
            cache.move(source, target, rows.length[target])
        found.append([state(rows), cache.table.tolist(), cache.held.tolist(), cache._free])
        stay = [f.arrival for i, f in enumerate(flights) if i not in gone]
        assert sorted(f.arrival for f in rows.flights) == stay
        assert not (half and size - 1 in stay) or rows.flights[-1].arrival == size - 1
        assert [rows.flights[i].known for i in range(rows.size)] == rows.length[
            : rows.size
        ].tolist()
    assert found[0] == found[1]
