"""What the recipe's [draft] becomes: drafters, and the arms that are made ready."""

from whet import config
from whet.draft.base import DraftArm
from whet.draft.speculation import DEPTHS, MOST_VERIFIED, build_speculation, serves


def made(*names: str, sizes: tuple[int, ...] = (2, 16, 64)):
    settings = config.Draft.model_validate({"drafters": names})
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
