"""Tests for a curriculum of your own: the contract that every curriculum keeps, played against a simulated engine.

    from whet.curriculum.source import UniformSource
    from whet.testing import check_contract
    from whet.types import Sampling

    def make(ids, seed):
        return MyGate(UniformSource(ids, seed), sampling=Sampling(max_tokens=32), rollouts=4)

    check_contract(make, rollouts=4, max_age=0)  # an AssertionError names the line that does not hold

`World` describes a simulated run, `play` plays one and returns its log, and `measure_update` times an update.
"""

from whet.testing.contract import WORLDS, check_contract, check_world, measure_update, play
from whet.testing.simulator import Simulator, World

__all__ = [
    "WORLDS",
    "Simulator",
    "World",
    "check_contract",
    "check_world",
    "measure_update",
    "play",
]
