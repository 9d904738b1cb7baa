"""A step with new flights: a wave gets its rows and is fed, or is as if it had never been where memory is short.

Called by `LocalEngine.step`; the scheduler says who is in a wave, a runner computes it. A forward over thousands of
prompt tokens is the most that an engine asks of a card at once. When the card is full the wave's flights wait again,
waves are smaller from then on, and the next step goes on: tokens depend on a flight's key alone, so they are the same.
Where a wave is as small as can be, it waits for a row to end; only where none runs there is no way on.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from whet.errors import WhetError
from whet.rollout.runner import Drawn
from whet.rollout.scheduler import Wave

if TYPE_CHECKING:
    from whet.rollout.engine import LocalEngine


def feed(engine: LocalEngine, running: int, wave: Wave) -> Drawn | None:
    """What the rows that run and those of the wave draw. None where that did not fit in memory: nobody drew a token."""
    first, fed = engine.rows.size, engine.rows.fed
    try:
        return engine.runner.advance(running, wave.chunks, admit(engine, running, wave))
    except torch.OutOfMemoryError:
        pass
    # Here, after the handler, the traceback no longer keeps the failed forward alive.
    take_out(engine, running, wave, first, fed)
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    _shrink(engine, running, wave)
    return None


def admit(engine: LocalEngine, running: int, wave: Wave) -> list[int]:
    """Rows for a wave: first those to feed, then their forks; and for each fork the row it copies."""
    rows = engine.rows
    first = rows.size
    for chunk in wave.chunks:
        if chunk.start == 0:
            engine.cache.open(rows.add(chunk.flight), chunk.flight.known)
    source = [running + leader for _, leader in wave.forks]
    for leader, (flight, _) in zip(source, wave.forks, strict=True):
        rows.shared[[leader, rows.add(flight)]] = flight.known
    if engine.lanes is not None and first < rows.size:
        rows.lane[first : rows.size] = engine.lanes.enter(rows.flights[first:])
    rows.feed(0 if wave.chunks[-1].last else wave.chunks[-1].stop)
    return source


def take_out(engine: LocalEngine, running: int, wave: Wave, first: int, fed: int) -> None:
    """Undoes `admit`, where rows from `first` on were new and the one before them had `fed` tokens."""
    rows = engine.rows
    for row in reversed(range(first, rows.size)):
        engine.evict(row)
    rows.feed(fed)
    rows.shared[running:first] = 0  # of a row that is half fed: nobody forks from it yet
    engine.scheduler.put_back(wave)
    # The rows that run may have been a step further on the device, and a drafter have read that: they take it again.
    engine.runner.forget()
    rows.paired[:running] = np.minimum(rows.paired[:running], rows.length[:running])


def _shrink(engine: LocalEngine, running: int, wave: Wave) -> None:
    scheduler, rows = engine.scheduler, engine.rows
    if not scheduler.shrink(wave):
        if not running:
            raise WhetError(
                f"Not even a prompt of {wave.tokens} tokens can be fed in the memory that is left beside the model and "
                "its KV cache; lower rollout.pages or rollout.slots, or free memory that others hold."
            )
        if rows.fed:  # it would be fed again at once, and nobody get any further
            scheduler.give_back([engine.evict(rows.size - 1)])
        scheduler.full = True
    if scheduler.ooms == 1:
        warnings.warn(
            f"There was no memory to feed prompts of {wave.tokens} tokens at once: fewer are fed from now on, fewer "
            "still each time rollout/oom goes up. Rollouts are the same, but begin later.",
            stacklevel=2,
        )
