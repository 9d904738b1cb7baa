"""From the recipe's [draft] to speculation: which drafters, which arms, who chooses. Called where an engine is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whet import config
from whet.draft.bandit import Bandit
from whet.draft.base import Arm, Chooser, Drafter
from whet.draft.controller import Controller
from whet.draft.ngram import NGram
from whet.draft.speculation import Speculation
from whet.draft.suffix import Suffix

DEPTHS = (2, 4, 8, 16, 32)
"""Tokens a draft may have. All drafters share the graphs that verify so many."""
MOST_VERIFIED = 512
"""Tokens that a step verifies at most, all rows together: beyond about 200 a forward takes longer with each of them."""
DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NGram, "suffix": Suffix}


def build_speculation(settings: config.Draft, *, vocab: int, sizes: Sequence[int], seed: int) -> Speculation | None:
    """None where the recipe wants none. `sizes`: rows that a step may be padded to, the largest last.

    suffix looks in a row's own text first, as ngram does, and then in others': where both are named the controller does
    without ngram, which it would try in vain. TLT's bandit has all that are named.
    """
    if not settings.drafters:
        return None
    spared = {"ngram"} if settings.chooser == "controller" and "suffix" in settings.drafters else set()
    names = [name for name in settings.drafters if name not in spared]
    arms = [Arm(name, depth) for name in names for depth in DEPTHS]
    drafters = [DRAFTERS[name]() for name in names if name in DRAFTERS]  # eagle joins in the engine
    served = [(size, arm) for arm in arms for size in sizes if serves(arm, size)]
    made = Speculation(drafters, _chooser(settings, arms, sizes, seed), vocab=vocab, served=served)
    made.sharing = settings.budgets
    return made


def serves(arm: Arm, batch: int) -> bool:
    """Whether an arm is for so many rows."""
    return batch * arm.tokens <= MOST_VERIFIED


def _chooser(settings: config.Draft, arms: Sequence[Arm], sizes: Sequence[int], seed: int) -> Chooser:
    if settings.chooser == "bandit":
        return Bandit(arms, serves=serves, seed=seed)

    def padded(batch: int) -> int:
        return next((size for size in sizes if size >= batch), batch)

    return Controller(arms, serves=serves, bucket=padded, seed=seed)
