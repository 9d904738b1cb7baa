"""How long a prompt's responses were so far: a sum and a count for each prompt, for stages that split by them.

Kept by `stages.py` over the whole run, since what an earlier stage saw is what the next border splits by.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.curriculum.ids import Ids
from whet.types import Rollout


class ResponseLengths:
    """Cut rollouts do not count, those at the limit count as long as the limit.

    >>> ResponseLengths(["a", "b"]).seen.tolist()
    [0, 0]
    """

    def __init__(self, ids: Sequence[str]):
        self.tokens = np.zeros(len(ids), "<i8")
        self.seen = np.zeros(len(ids), "<i8")
        self.ids = Ids.of(ids)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            if rollout.finish != "cut" and (row := self.ids.row(rollout.prompt_id)) is not None:
                self.tokens[row] += rollout.length
                self.seen[row] += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "tokens": base64.b64encode(self.tokens.tobytes()).decode(),
            "seen": base64.b64encode(self.seen.tobytes()).decode(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens = np.frombuffer(base64.b64decode(state["tokens"]), "<i8").copy()
        self.seen = np.frombuffer(base64.b64decode(state["seen"]), "<i8").copy()
