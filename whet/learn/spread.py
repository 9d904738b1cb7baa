"""How things of different cost are divided among a few places: groups among learners or engines, parameters among
processes that own them."""

from __future__ import annotations

from collections.abc import Mapping


def spread(costs: Mapping[int, int], count: int) -> dict[int, int]:
    """The place of each: the next goes where the least lies so far, to the first of equals.

    >>> spread({7: 5, 8: 2, 9: 2, 4: 9}, 2)
    {7: 0, 8: 1, 9: 1, 4: 1}
    """
    load, places = [0] * count, dict[int, int]()
    for one, cost in costs.items():
        places[one] = load.index(min(load))
        load[places[one]] += cost
    return places
