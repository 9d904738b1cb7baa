"""Plain groups: every prompt of the source is asked once and trained on, whatever its pass rate.

The baseline every other curriculum is measured against. Prompts that are always or never solved take part,
cost their rollouts and, under a group baseline, move nothing.
"""

from __future__ import annotations

from whet.curriculum.gate import Admission, Gate
from whet.types import Group


class Uniform(Gate):
    def admit(self, group: Group) -> Admission:
        return "keep"
