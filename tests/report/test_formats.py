from __future__ import annotations

import math

from whet.report import formats
from whet.report.formats import Reach


def test_what_was_not_measured_is_a_dash() -> None:
    shown = [formats.count(None), formats.duration(None), formats.accuracy(None), formats.share(None)]
    assert shown == ["–"] * 4
    assert formats.duration(math.inf) == "–"


def test_a_ratio_known_from_one_side_says_which() -> None:
    assert formats.times(Reach(2.14, 2.14)) == "2.1×"
    assert formats.times(Reach(2.14, math.inf)) == ">2.1×"
    assert formats.times(Reach(0.0, 0.333)) == "<0.33×"
    assert formats.times(Reach(0.0, math.inf)) == "–"
    assert formats.times(Reach(250.0, 250.0)) == "250×"
    assert formats.times(Reach(0.96, 0.96)) == "1.0×"
