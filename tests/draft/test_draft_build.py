"""What the recipe's [draft] becomes: drafters, and the arms that are made ready."""

from collections.abc import Sequence

import pytest

from whet import config
from whet.draft.base import DraftArm
from whet.draft.controller import Bandit, Controller
from whet.draft.speculation import DEPTHS, MOST_VERIFIED, build_speculation, serves
from whet.fast.graphs import buckets


def made(*names: str, sizes: Sequence[int] = (2, 16, 64), chooser: str = "controller"):
    settings = config.Draft.model_validate({"drafters": names, "chooser": chooser})
    return build_speculation(settings, vocab=50, sizes=sizes, seed=0)


def test_no_drafters_no_speculation() -> None:
    assert made() is None


def test_suffix_stands_in_for_ngram() -> None:
    """It looks in the row's own text first; alone, ngram serves."""
    both, alone = made("ngram", "suffix"), made("ngram")
    assert both is not None and alone is not None
    assert list(both.drafters) == ["suffix"] and list(alone.drafters) == ["ngram"]
    assert {arm.drafter for _, arm in both.served} == {"suffix"}


def test_arms_are_made_ready_for_the_batches_they_serve() -> None:
    found = made("suffix", "eagle")
    assert found is not None and list(found.drafters) == ["suffix"], "eagle joins in the engine"
    assert MOST_VERIFIED == 512 and DEPTHS == (2, 4, 8, 16, 32)
    suffix = [(size, arm.depth) for size, arm in found.served if arm.drafter == "suffix"]
    assert sorted(suffix) == [
        (2, 2),
        (2, 4),
        (2, 8),
        (2, 16),
        (2, 32),
        (16, 2),
        (16, 4),
        (16, 8),
        (16, 16),
        (64, 2),
        (64, 4),
    ]
    assert len(found.served) == 2 * len(suffix)
    assert serves(DraftArm("suffix", 31), 16) and not serves(DraftArm("suffix", 32), 16)


def test_a_small_model_verifies_short_drafts_of_many_rows() -> None:
    """How many rows each depth serves, and so how many graphs there are."""
    settings, sizes = config.Draft(drafters=["suffix"]), buckets(512)

    def most(weights: int) -> list[int]:
        found = build_speculation(settings, vocab=50, sizes=sizes, seed=0, weights=weights)
        assert found is not None
        return [max(size for size, arm in found.served if arm.depth == depth) for depth in DEPTHS]

    assert most(0) == most(25_000_000) == most(135_000_000) == most(10**12) == [160, 96, 48, 24, 8]
    assert most(4_700_000) == most(1) == [512, 512, 48, 24, 8] and most(17_000_000) == [
        224,
        128,
        48,
        24,
        8,
    ]
    assert serves(DraftArm("suffix", 4), 512, 5_000_000) and not serves(
        DraftArm("suffix", 4), 513, 1
    )


@pytest.mark.parametrize("chooser", ["controller", "bandit"])
def test_no_arm_is_open_to_a_batch_without_graphs(chooser: str) -> None:
    """A step is padded: 165 rows are verified as 192, which is too many for a draft of 2."""
    sizes = buckets(512)
    found = made("suffix", sizes=sizes, chooser=chooser)
    assert found is not None and isinstance(found.chooser, Controller | Bandit)
    for arm in (DraftArm("suffix", depth) for depth in DEPTHS):
        ready = max(size for size, served in found.served if served == arm)
        assert [found.chooser.serves(arm, n) for n in range(1, 513)] == [
            n <= ready for n in range(1, 513)
        ]
