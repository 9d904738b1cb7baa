"""Members that wait for requests train the drafter: it gets better, nobody waits for it, and no token changes."""

import contextlib
import json
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fleet_run import CPU, assert_like, pool, pooled, run  # noqa: F401 (fixtures)
from ray_run import TEN, strike_down, whole  # noqa: F401 (fixtures)
from small_run import Stop, even_digits, small_config

from whet.build import build_actor
from whet.cluster import crew
from whet.cluster.channel import Channel, pack
from whet.cluster.member import FleetMember, Gone
from whet.draft import training
from whet.draft.base import DraftArm
from whet.draft.eagle import FOLDER, read_drafter
from whet.draft.training import merge
from whet.processes import build_member
from whet.resolve import RunPlan, check_run, training_sampling
from whet.rollout.engine import LocalEngine
from whet.types import Request

pytestmark = pytest.mark.filterwarnings("ignore:larger groups weigh more")
EAGLE = ("draft.drafters=['eagle']", "draft.train=1.0", "draft.chooser=bandit")
# the bandit drafts from the eleventh step of a batch on
LONG = ("rollout.max_tokens=24", "rollout.context=64")


def plan_of(*sets: str) -> RunPlan:
    return check_run(small_config(*CPU, *sets), even_digits)


def requests(plan: RunPlan, first: int, count: int = 3, temperature: float = 1.0) -> list[Request]:
    sampling = replace(training_sampling(plan.settings, plan.codec), temperature=temperature)
    prompts = [plan.problems.train.at(i) for i in range(first, first + count)]
    return [
        Request(
            prompt_id=p.id, group_id=first + i, first_index=0, n=2, sampling=sampling, phase="train"
        )
        for i, p in enumerate(prompts)
    ]


Join = Callable[[RunPlan], tuple[Channel, FleetMember]]


@pytest.fixture
def join() -> Iterator[Join]:
    """Makes a member in this process, and the driver's end of its channel."""
    with contextlib.ExitStack() as stack:

        def joined(plan: RunPlan) -> tuple[Channel, FleetMember]:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            member = FleetMember(Channel(theirs), build_member)
            settings = plan.settings.model_dump_json()
            order = {
                "settings": settings,
                "weights": "",
                "alphabet": plan.problems.alphabet,
                "later": False,
            }
            member.begin({**order, "role": "worker", "rank": 0, "size": 1})
            return Channel(ours), member

        yield joined


def test_a_request_waits_for_one_micro_batch_at_most(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come while the drafter is trained: at the first micro-batch of an idle time, the second, the third."""
    plan = plan_of(*EAGLE)
    driver, member = join(plan)
    drafter, engine = member._drafter, member._engine
    assert drafter is not None and isinstance(engine, LocalEngine)
    drafter.trainer.pack = 8  # many micro-batches
    happened: list[str] = []
    practise, step, waits = drafter.practise, engine.step, [1, 2, 3]

    def ask(first: int) -> None:
        asked = requests(plan, first)
        prompts = {request.prompt_id: plan.encoded(request.prompt_id) for request in asked}
        driver.send(pack((1, "ask", (None, asked, prompts))))

    def practised() -> None:
        in_a_row = len(happened) - max(
            (i for i, what in enumerate(happened) if what == "step"), default=-1
        )
        if waits and in_a_row == waits[0]:
            waits.pop(0)
            happened.append("request")  # it arrives while the micro-batch is under way
            ask(3 * (3 - len(waits)))
        elif not waits:
            driver.close()
        practise()
        happened.append("micro-batch")

    def stepped() -> None:
        step()
        happened.append("step")

    monkeypatch.setattr(drafter, "practise", practised)
    monkeypatch.setattr(engine, "step", stepped)
    ask(0)
    with pytest.raises(Gone):
        member.serve()
    arrived = [i for i, what in enumerate(happened) if what == "request"]
    assert len(arrived) == 3
    assert all(happened[i + 1 : i + 3] == ["micro-batch", "step"] for i in arrived), happened
    assert happened[arrived[2] - 2 : arrived[2]] == ["micro-batch"] * 2, (
        "without requests it trains on"
    )
    assert 0 < member._used <= member._idle


@pytest.mark.parametrize("words", [0, 4])
def test_what_members_learnt_is_merged_by_their_tokens(
    join: Join, monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    """words: of a draft vocabulary, which is chosen by what all have written."""
    if words:
        monkeypatch.setattr(training, "WORDS", words)
    plan = plan_of(*EAGLE)
    made = []
    for number in range(3):
        _, member = join(plan)
        member.ask(
            None,
            asked := requests(plan, number),
            {r.prompt_id: plan.encoded(r.prompt_id) for r in asked},
        )
        assert member._engine is not None and member._drafter is not None
        while member._engine.busy:
            member._engine.step()
        made.append(member._drafter)
    begun, _ = made[0].whole()
    for drafter in (made[0], made[1], made[1]):
        drafter.practise()
    tokens = [sum(lesson.tokens for lesson in drafter.practised) for drafter in made]
    assert tokens[0] > 0 and tokens[1] > tokens[0] and tokens[2] == 0
    heads = [drafter.tensors()["weight.fc"].numpy() for drafter in made]
    wanted = (tokens[0] * heads[0] + tokens[1] * heads[1]) / (tokens[0] + tokens[1])
    merged = merge(begun, [own for drafter in made if (own := drafter.learnt()) is not None])
    np.testing.assert_allclose(merged.tensors["weight.fc"], wanted, rtol=1e-12)
    assert not np.array_equal(wanted, begun.tensors["weight.fc"])
    assert np.array_equal(made[0].live.fc.detach().numpy(), begun.tensors["weight.fc"]), (
        "it is not published yet"
    )
    if words:
        counts = made[0].buffer.counts(made[0].vocabulary) + made[1].buffer.counts(
            made[1].vocabulary
        )
        chosen = merged.tensors["words"]
        assert len(chosen) == words and min(counts[chosen]) >= max(np.delete(counts, chosen))
    moments = made[1].tensors()["exp_avg.fc"]
    for drafter in made:
        drafter.draft_with(merged)
        np.testing.assert_allclose(drafter.live.fc.detach().numpy(), wanted, rtol=1e-12)
        assert drafter.learnt() is None and drafter.merged == merged.merged
        assert (
            drafter.live.draft_ids is None
            or drafter.live.draft_ids.tolist() == merged.tensors["words"].tolist()
        )
    assert moments.any() and torch.equal(made[1].tensors()["exp_avg.fc"], moments), (
        "each keeps its own"
    )


# ---- whole runs


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*"))


def accepted(plan: RunPlan, model: Path, drafter: Path) -> float:
    """Share of drafted tokens that come true, with drafts of two tokens by one drafter alone."""
    actor = build_actor(plan, model)
    try:
        assert actor.drafter is not None and isinstance(actor.engine, LocalEngine)
        assert actor.engine.speculation is not None
        read_drafter(drafter / FOLDER, actor.drafter.live)
        actor.engine.speculation.chooser.choose = lambda *given: DraftArm("eagle", 2)  # type: ignore[method-assign]
        rollouts = actor.engine.generate(requests(plan, 0, count=40, temperature=0.3))
        return sum(r.accepted for r in rollouts) / sum(r.drafted for r in rollouts)
    finally:
        actor.close()


def updates(folder: Path) -> int:
    return int(json.loads((newest(folder) / "state" / "drafter.json").read_text())["updates"])


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_acceptance_rises_and_no_token_changes(tmp_path: Path) -> None:
    """The policy stays what its warm start has made of it, so it does not become easier to guess."""
    sets = (
        *LONG,
        "steps=40",
        "save.every=100",
        "eval.0.every=20",
        "warm_start.steps=150",
        "warm_start.batch=16",
    )
    sets += (
        "curriculum.groups=4",
        "curriculum.rollouts=8",
        "rollout.slots=32",
        "model.hidden=32",
        "learn.lr=1e-9",
    )
    run(tmp_path / "one", *sets)
    said = run(tmp_path / "two", *sets, *EAGLE, gpus=2)
    assert_like(tmp_path / "one", tmp_path / "two", counters=False)
    rows = said.rows[1:]
    assert all(row["draft/tokens_trained"] > 0 and row["draft/failures"] == 0 for row in rows)
    assert all(0 < row["draft/used_seconds"] <= row["draft/idle_seconds"] for row in rows)
    assert any(name.startswith("draft/share_eagle") for name in rows[-1])
    agreed = [row["draft/agreement_after"] for row in rows]
    assert agreed[:-1] == [row["draft/agreement_before"] for row in rows[1:]]
    assert np.mean(agreed[-10:]) > 1.5 * np.mean(agreed[:5]), agreed
    plan = plan_of(*sets, *EAGLE)
    random = min((tmp_path / "two" / "checkpoints").glob("step_*"))
    model = newest(tmp_path / "two")
    before, after = accepted(plan, model, random), accepted(plan, model, model)
    assert after > 2 * before, (before, after)


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_a_run_goes_on_with_its_drafter_and_another_number_of_members(tmp_path: Path) -> None:
    sets = (*LONG, "steps=6", "save.every=1")
    run(tmp_path / "whole", *sets)
    folder, seen = tmp_path / "parts", [0]
    for after, gpus in ((2, 2), (4, 1), (6, 3)):
        run(folder, *sets, *EAGLE, gpus=gpus, resume=after > 2, silent=Stop(after))
        seen.append(updates(folder))
    assert seen == sorted(set(seen)), "each goes on from the one before"
    assert_like(tmp_path / "whole", folder, counters=False)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies while it trains", "cannot train"])
def test_a_drafter_that_is_trained_in_vain_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run(tmp_path / "one", *LONG)
    script = Path(__file__).parent / "astray.py"
    monkeypatch.setattr(
        crew, "COMMAND", (sys.executable, str(script), fault, str(tmp_path / "mark"))
    )
    said = run(tmp_path / "two", *LONG, *EAGLE, gpus=2)
    assert_like(tmp_path / "one", tmp_path / "two", counters=False)
    if fault == "cannot train":
        (sentence,) = [
            text
            for text in said.messages
            if "Training the drafter failed (ZeroDivisionError: " in text
        ]
        assert sentence.endswith("no token of the run depends on it.")
        assert said.rows[-1]["draft/failures"] == 2 and "draft/tokens_trained" not in said.rows[-1]
    else:
        assert sum("killed by signal 9; it is started again" in text for text in said.messages) == 1
        assert said.rows[-1]["draft/tokens_trained"] > 0
