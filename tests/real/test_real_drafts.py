"""Speculation on real text: the same tokens with every drafter, and a drafter that learns."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
from real_parts import (
    ARMS,
    ask,
    engine_of,
    ids_of,
    margins,
    model_of,
    plain,
    plan_of,
    rounding_of,
    run,
)

from whet.build import build_drafter
from whet.draft.base import OFF, Chooser, DraftArm
from whet.draft.lookup import NGram, Suffix
from whet.draft.speculation import Speculation
from whet.draft.training import AdaptiveDrafter, DrafterTrainer
from whet.rollout.engine import LocalEngine
from whet.types import Request, Rollout

pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
EAGLE = 'draft.drafters=["eagle"]'


class Turns(Chooser):
    """The same arms in turn, whatever they bring."""

    def __init__(self, arms: Sequence[DraftArm]) -> None:
        super().__init__()
        self.arms, self.steps = arms, 0

    def choose(self, *given: object) -> DraftArm:
        self.steps += 1
        return self.arms[self.steps % len(self.arms)]


def drafting(
    folder: Path, device: str, arms: Sequence[DraftArm]
) -> tuple[LocalEngine, AdaptiveDrafter | None, Speculation]:
    plan, model = plan_of(folder, device, EAGLE), model_of(folder, device)
    wanted = {arm.drafter for arm in arms}
    drafter = build_drafter(plan.settings, model) if "eagle" in wanted else None
    known = [kind for kind in (NGram(), Suffix()) if kind.name in wanted]
    vocabulary = model.config.vocab_size
    speculation = Speculation(known, Turns(arms), vocab=vocabulary)
    live, buffer = (drafter.live, drafter.buffer) if drafter else (None, None)
    engine = engine_of(plan, model, speculation=speculation, eagle=live, buffer=buffer)
    return engine, drafter, speculation


@lru_cache(maxsize=1)
def undrafted(folder: Path, device: str) -> tuple[list[Request], list[Rollout]]:
    """Drawn and greedy."""
    plan = plan_of(folder, device, EAGLE)
    requests = [*ask(plan, 6), *ask(plan, 6, first=50, temperature=0.0)]
    return requests, run(engine_of(plan, model_of(folder, device)), requests)


@pytest.mark.parametrize("name", ARMS)
def test_drafts_change_no_token(
    folder: Path, device: str, name: str, figures: Callable[..., None]
) -> None:
    """With steps without drafts in between; except where two tokens are closer than rounding."""
    plan = plan_of(folder, device, EAGLE)
    requests, before = undrafted(folder, device)
    engine, _, speculation = drafting(folder, device, [ARMS[name], ARMS[name], OFF])
    after = {rollout.key: ids_of(rollout) for rollout in run(engine, requests)}
    apart = margins(plain(folder, device), plan, before, after)
    rounding = rounding_of(folder, device, plan, before)
    told = speculation.chooser.metrics()
    figures(
        accept_length=told["draft/accept_length"],
        saved=told["draft/saved"],
        tokens=sum(len(ids) for ids in after.values()),
        differ=len(apart),
        margin=max(apart, default=0.0),
    )
    assert speculation.drafters[name].failures == 0
    assert max(apart, default=0.0) <= 2 * rounding
    if device == "cpu":
        assert not apart, "in fp32 the very same tokens"
    if name != "eagle":  # which has learnt nothing yet
        assert told["draft/saved"] > 0


@pytest.mark.slow
def test_eagle_learns_on_real_text(folder: Path, device: str, figures: Callable[..., None]) -> None:
    """Trained on what the model wrote, it guesses more of other rollouts of the same prompts."""
    engine, drafter, speculation = drafting(folder, device, [ARMS["eagle"]])
    assert drafter is not None
    plan = plan_of(folder, device, EAGLE)
    fresh = ask(plan, n=2, first=900, temperature=0.7)

    def accept_length() -> tuple[float, list[Rollout]]:
        speculation.chooser.metrics()
        done = run(engine, fresh)
        return speculation.chooser.metrics()["draft/accept_length"], done

    before, wrote = accept_length()
    for turn in range(4):
        run(engine, ask(plan, n=4, first=100 * turn, temperature=0.7))
    trainer = DrafterTrainer(drafter.live, drafter.buffer, pack=512, lr=1e-3)
    lessons = [trainer.run(6_000) for _ in range(4)]
    drafter.live.take(trainer.head)
    after, again = accept_length()
    figures(
        accept_before=before,
        accept_after=after,
        updates=sum(lesson.updates for lesson in lessons),
        agreement_first=lessons[0].agreement,
        agreement_last=lessons[-1].agreement,
    )
    assert lessons[-1].token_loss < lessons[0].token_loss
    assert after > before + 0.1
    if device == "cpu":
        assert [ids_of(rollout) for rollout in wrote] == [ids_of(rollout) for rollout in again]
