"""The rungs of `whet bench draft`: plain decoding, ever more speculation, every arm alone, plain decoding once more.

What a rung drafts with, who chooses, and the graphs that all of them want; `whet.bench.draft` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from whet import config
from whet.bench.watch import Fixed
from whet.draft.bandit import Bandit
from whet.draft.base import Arm, Chooser
from whet.draft.build import DEPTHS, build_speculation, serves
from whet.rollout.captures import Key as GraphKey
from whet.rollout.graphs import buckets

ELASTIC = {"ngram": 8, "suffix": 8, "eagle": 4}
"""Depth of the fixed arm that a drafter is tried with behind the switch."""


@dataclass(frozen=True, slots=True)
class Rung:
    name: str
    drafters: tuple[str, ...] = ()
    chooser: Callable[[], Chooser] | None = None
    """None: plain decoding, by an engine that knows of no drafts."""
    arms: tuple[Arm, ...] = ()
    """What it may choose, beside OFF."""
    sharing: bool = False
    """Rows have budgets."""
    learning: bool = False
    """EAGLE is one of its own, which takes a lesson before each run."""

    @property
    def engine(self) -> str:
        """Which of the engines runs it: keeping hidden states for EAGLE costs time, which others need not pay."""
        return "training" if self.learning else "eagle" if "eagle" in self.drafters else "model_free"


def ladder(
    model: PreTrainedModel, slots: int, *, eagle: bool, seed: int, fixed: bool = True, learning: bool = False
) -> list[Rung]:
    """All rungs, plain decoding first and last. fixed: with each arm on its own; learning: also with an EAGLE that goes
    on learning, whether or not there is one that does not."""
    vocab = model.config.get_text_config().vocab_size
    sizes = buckets(slots) if model.device.type == "cuda" else list(range(1, slots + 1))

    def chosen(name: str, by: str, *names: Any) -> Rung:
        settings = config.Draft.model_validate({"drafters": names, "chooser": by})
        arms = tuple(Arm(name, depth) for name in names for depth in DEPTHS)

        def chooser() -> Chooser:
            made = build_speculation(settings, vocab=vocab, sizes=sizes, seed=seed)
            assert made is not None
            return made.chooser

        return Rung(name, names, chooser, arms)

    def elastic(name: str) -> Rung:
        arm = Arm(name, ELASTIC[name])
        return Rung(f"elastic_{name}", (name,), lambda: Bandit([arm], serves=serves, seed=seed), (arm,))

    def alone(arm: Arm) -> Rung:
        return Rung(arm.name, (arm.drafter,), lambda: Fixed(arm, serves), (arm,))

    names = ("ngram", "suffix", *(("eagle",) if eagle else ()))
    rungs = [Rung("off"), elastic("ngram"), elastic("suffix"), chosen("controller", "controller", "ngram", "suffix")]
    rungs.append(replace(chosen("budgets", "controller", "ngram", "suffix"), sharing=True))
    if eagle:
        rungs += [elastic("eagle"), chosen("controller_eagle", "controller", *names)]
    if learning:
        rungs.append(replace(chosen("training", "controller", "ngram", "suffix", "eagle"), learning=True))
    rungs.append(chosen("bandit", "bandit", *names))
    if fixed:
        rungs += [alone(Arm(name, depth)) for name in names for depth in DEPTHS]
    return [*rungs, Rung("off_again")]


def plans(rungs: Sequence[Rung], slots: int) -> tuple[list[GraphKey], list[GraphKey]]:
    """Verification graphs: shared by drafters and for the batches that an arm serves; and the naive plan, one for each
    arm and batch size, with the name of its drafter."""
    arms = dict.fromkeys(arm for rung in rungs for arm in rung.arms)
    naive = [(size, arm.tokens, arm.drafter) for arm in arms for size in buckets(slots)]
    shared = dict.fromkeys((size, new, "") for size, new, _ in naive if serves(Arm("", new - 1), size))
    return list(shared), naive


def graph_plan(rungs: Sequence[Rung], slots: int) -> dict[str, int]:
    """Graphs of `plans`, and tokens that they feed, which is what their memory grows with."""
    shared, naive = plans(rungs, slots)
    return {
        "graphs": len(shared),
        "graphs_naive": len(naive),
        "tokens": sum(size * new for size, new, _ in shared),
        "tokens_naive": sum(size * new for size, new, _ in naive),
    }
