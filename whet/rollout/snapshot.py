"""An engine's state in a checkpoint: what it was asked for and has not handed out, as JSON and a few flat arrays.

Called by `LocalEngine.state_dict` and `load_state_dict`. Running flights are saved as waiting ones: a resumed engine
prefills them again and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.rollout.flight import request_from_json
from whet.types import Trace, rollout_from_json, rollout_to_json

if TYPE_CHECKING:
    from whet.rollout.engine import LocalEngine


def snapshot(engine: LocalEngine) -> dict[str, Any]:
    rows = engine.rows
    running = sorted(range(rows.size), key=lambda row: rows.flights[row].arrival)
    flights = [(rows.flights[row], rows.trace(row)) for row in running]
    flights += [(f, f.trace) for f in engine.scheduler.waiting]
    assert all(f.ticket is None for f, _ in flights), "generate() leaves nothing behind"
    traces = [trace for _, trace in flights] + [r.trace for r in engine.done if r.trace is not None]
    return {
        "version": engine.version,
        "arrivals": engine.arrivals,
        "begun": np.array(sorted(engine.scheduler.begun), np.int64),
        "flights": [{**f.to_json(), "tokens": trace.ids.size} for f, trace in flights],
        "done": [{**rollout_to_json(r), "tokens": r.length} for r in engine.done],
        "ids": np.concatenate([np.zeros(0, np.int32), *(t.ids for t in traces)]),
        "log_probs": np.concatenate([np.zeros(0, engine.dtype), *(t.log_probs for t in traces)]),
        "versions": np.concatenate([np.zeros(0, np.int32), *(t.versions for t in traces)]),
        **engine.lengths.state_dict(),
        "draft": engine.speculation.state_dict() if engine.speculation is not None else None,
    }


def restore(engine: LocalEngine, state: Mapping[str, Any]) -> None:
    assert engine.idle, "state is loaded into an engine that has not begun"
    engine.version, engine.arrivals = int(state["version"]), int(state["arrivals"])
    engine.scheduler.begun = set(state["begun"].tolist())
    engine.lengths.load_state_dict(state)
    if engine.speculation is not None and state["draft"] is not None:
        engine.speculation.load_state_dict(state["draft"])
    at = 0

    def trace(n: int) -> Trace:
        nonlocal at
        part, at = slice(at, at + n), at + n
        return Trace(ids=state["ids"][part], log_probs=state["log_probs"][part], versions=state["versions"][part])

    for data in state["flights"]:
        flight = engine.flight(request_from_json(data), data["index"], data["arrival"])
        flight.trace = trace(data["tokens"])
        engine.scheduler.waiting.append(flight)
    for data in state["done"]:
        fields = {k: v for k, v in data.items() if k != "tokens"}
        engine.done.append(rollout_from_json({**fields, "trace": trace(data["tokens"])}))
