from __future__ import annotations

import json

from scripted import SAMPLING, rollout

from whet.curriculum.stages import LengthRecord
from whet.types import Request


def test_sums_and_counts_without_what_was_cut() -> None:
    lengths, again = LengthRecord(["A", "B", "C"]), LengthRecord(["A", "B", "C"])
    a, c = (Request(prompt_id=i, group_id=0, n=4, sampling=SAMPLING) for i in "AC")
    lengths.observe(
        [
            rollout(a, 0, "r", length=7),
            rollout(a, 1, "u", length=5),
            rollout(c, 0, "w", finish="length"),
        ]
    )
    lengths.observe([rollout(c, 1, "u", length=3, finish="cut")])
    assert lengths.tokens.tolist() == [12, 0, 10]
    assert lengths.seen.tolist() == [2, 0, 1]
    again.load_state_dict(json.loads(json.dumps(lengths.state_dict())))
    again.observe([rollout(a, 2, "r", length=1)])  # what was read can be written
    assert again.tokens.tolist() == [13, 0, 10]
