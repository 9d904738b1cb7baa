"""DAPO's dynamic sampling (arXiv 2503.14476): groups whose rollouts all agree are left out of the batch.

Kept iff 0 < pass rate < 1 over the judged rollouts. Two things are OURS. The published loop asks for a fixed
number of prompts a call (three times the batch in its scripts) until the batch is full and throws the surplus
away; here the surplus waits for the next batch, as far as `max_age` allows, else its prompts are asked again.
And we ask for what the batch lacks divided by the acceptance seen of late, so the surplus is small to begin with.
"""

from __future__ import annotations

import math

from whet.curriculum.gate import Admission, Gate
from whet.types import Clock, Group

PRIOR, WEIGHT = 0.5, 2.0
"""Before anything is known every second group is expected to be kept, on the strength of two groups."""

LEAST = 1 / 8
"""A few bad groups must not set off a flood: never more than eight groups open for one that is lacking."""


class Dapo(Gate):
    def admit(self, group: Group) -> Admission:
        return "keep" if 0.0 < group.pass_rate < 1.0 else "drop"

    def groups_to_ask(self, clock: Clock) -> int:
        acceptance = max(LEAST, self.counts.acceptance.value(PRIOR, WEIGHT))
        return math.ceil((clock.groups - self.book.ready) / acceptance) - self.book.open
