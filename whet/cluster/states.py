"""What engines leave in a checkpoint, joined into one state and divided again among any number of engines.

A checkpoint holds the state of one engine, whatever the number of engines that wrote it. Rollouts that were under way
go on with the same tokens wherever they are put, since these depend on the key and the weights alone. The forms are
those of `LocalEngine.state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.learn.team import spread
from whet.rollout.base import join_traces, split_traces
from whet.types import Rollout, Trace, rollout_to_json

State = Mapping[str, Any]
Row = tuple[dict[str, Any], Trace]  # a flight or a finished rollout, and its tokens so far


def merge_states(states: Sequence[State], done: Sequence[Rollout] = ()) -> dict[str, Any]:
    """One state with all rollouts of these, and with `done`, which have finished and wait elsewhere. Flights are
    numbered anew, in the order in which they arrived."""
    assert len({state["version"] for state in states}) == 1, "engines have weights of different versions"
    rows = [_rows(state) for state in states]
    waiting = [({**rollout_to_json(r), "tokens": r.length}, r.trace) for r in done if r.trace is not None]
    flights = sorted((row for own, _ in rows for row in own), key=lambda row: row[0]["arrival"])
    prompts = {
        name: mean for s in states for name, mean in zip(s["length_prompts"], s["length_means"].tolist(), strict=True)
    }
    return _state(
        [({**data, "arrival": number}, trace) for number, (data, trace) in enumerate(flights)],
        [row for _, own in rows for row in own] + waiting,
        like=states[0],
        begun=np.unique(np.concatenate([state["begun"] for state in states])),
        length_sums=np.sum([state["length_sums"] for state in states], axis=0),
        length_prompts=list(prompts),
        length_means=np.array(list(prompts.values()), np.float64),
    )


def divide_state(state: State, count: int) -> list[dict[str, Any]]:
    """A state per engine. A group stays whole, so that its prompt is fed once, and goes to the engine with the fewest
    flights so far; what has finished goes to the first engine. Sums of lengths are divided, so that merging adds up."""
    flights, done = _rows(state)
    sizes: dict[int, int] = {}
    for data, _ in flights:
        sizes[data["group_id"]] = sizes.get(data["group_id"], 0) + 1
    where = spread(sizes, count)
    return [
        _state(
            [row for row in flights if where[row[0]["group_id"]] == number],
            done if number == 0 else [],
            like=state,
            begun=np.array([group for group in state["begun"] if where.get(int(group), 0) == number], np.int64),
            length_sums=state["length_sums"] / count,
        )
        for number in range(count)
    ]


def _rows(state: State) -> tuple[list[Row], list[Row]]:
    """(flights, finished rollouts), each with its tokens."""
    data = [*state["flights"], *state["done"]]
    rows = list(zip(data, split_traces(state, [row["tokens"] for row in data]), strict=True))
    return rows[: len(state["flights"])], rows[len(state["flights"]) :]


def _state(flights: Sequence[Row], done: Sequence[Row], like: State, **changed: Any) -> dict[str, Any]:
    arrivals = max((data["arrival"] + 1 for data, _ in flights), default=0)
    rows = {"flights": [data for data, _ in flights], "done": [data for data, _ in done]}
    tokens = join_traces([trace for _, trace in (*flights, *done)], like["log_probs"].dtype)
    return {**like, **rows, **tokens, "arrivals": max(arrivals, like["arrivals"]), **changed}
