"""The desk of the verl adapter, without verl and Ray: names of rows, settings, what trains and what is refused."""

from __future__ import annotations

import importlib
import json
from importlib import metadata
from typing import Any

import pytest

from whet.adapters.desk import Answer, Finished, VerlDesk, facts_of
from whet.curriculum.gate import Dapo
from whet.errors import Starved, WhetError


def rows(*numbers: int) -> Any:
    return facts_of(
        [{"index": number, "level": float(number)} for number in numbers],
        ["rule"] * len(numbers),
        [[{"role": "user", "content": f"p{number}"}] for number in numbers],
    )


def configuration(groups: int = 2, kl: bool = False, **sampler_kwargs: Any) -> dict[str, Any]:
    """The part of verl's configuration that the desk reads."""
    sampler = {"max_off_policy_threshold": 8, "sampler_kwargs": sampler_kwargs}
    return {
        "actor_rollout_ref": {
            "rollout": {"n": 4, "response_length": 32, "temperature": 1.0},
            "actor": {"use_kl_loss": kl},
        },
        "algorithm": {"use_kl_in_reward": False},
        "data": {"train_batch_size": groups, "seed": None},
        "trainer": {"total_training_steps": None, "total_epochs": 2, "v1": {"sampler": sampler}},
    }


def opened(
    *, count: int = 30, state: Any = None, groups: int = 2, **sampler_kwargs: Any
) -> VerlDesk:
    desk = VerlDesk(rows(*range(count)))
    desk.open(configuration(groups, **sampler_kwargs), state)
    return desk


def finish(desk: VerlDesk, ticket: str, answer: Answer, verdicts: str = "rw") -> None:
    """Generate what is ordered until the group is over; session i has the i-th verdict, in turn."""
    while answer.what == "more" and answer.order is not None:
        words = {"r": "right", "w": "wrong", "u": "unjudged"}
        answer = desk.report(
            [
                Finished(uid=ticket, index=i, length=3, verdict=words[verdicts[i % len(verdicts)]])  # type: ignore[arg-type]
                for i in answer.order.indices
            ]
        )


def play(
    desk: VerlDesk, steps: range, verdicts: str = "rw", handed: dict[str, str] | None = None
) -> list[Any]:
    """The trainer's loop over some steps; the worker of a prompt finishes at once."""
    log = []
    for step in steps:
        while (taken := desk.take(step)) is None:
            assert desk.wanted() > 0
            ticket, prompt_id = desk.hand_out()
            if handed is not None:
                handed[ticket] = prompt_id
            finish(desk, ticket, desk.start(ticket, f"uid-{ticket}"), verdicts)
        log.append(taken)
    return log


def test_rows_are_named_by_source_and_index() -> None:
    facts = facts_of(
        [{"index": 7}, {"index": 7, "level": "hard"}], ["a", "b"], [[{"content": "xy"}], []]
    )
    assert (
        list(facts.ids) == ["a/7", "b/7"]
        and list(facts.characters) == [2, 0]
        and list(facts.levels) == [None, None]
    )
    for extra, sources, sentence in (
        (
            [{"index": 1}, {}],
            ["a", "a"],
            "Row 1 of the training data has no data_source or no extra_info.index",
        ),
        ([{"index": 1}], [None], "Row 0 of the training data"),
        ([{"index": 1}, {"index": 1}], ["a", "a"], 'Two rows of the training data are "a/1"'),
    ):
        with pytest.raises(WhetError, match=sentence):
            facts_of(extra, sources, [[] for _ in extra])


def test_groups_train_and_the_rest_is_kept() -> None:
    desk = opened()
    (first, metrics), (second, _) = play(desk, range(1, 3))
    assert [sorted(sessions) for sessions in first.values()] == [
        [0, 1, 2, 3]
    ] * 2 and second.keys() <= desk.known()
    assert not first.keys() & desk.known() and metrics["curriculum/trained"] == 2
    assert desk.desk.step == 1 and desk.wanted() > 0 and desk.desk.step == 2, (
        "the next question ends the update"
    )


@pytest.mark.parametrize(
    "name", ["uniform", "dapo", "speed", "cures", "scalingrl", "stages", "all"]
)
def test_every_curriculum_trains(name: str) -> None:
    log = play(opened(curriculum={"name": name, "speed": {"n_init": 2}}), range(1, 9))
    assert all(len(trained) == 2 for trained, _ in log)


def test_a_stage_sets_the_limit_of_responses() -> None:
    desk = opened(curriculum={"stages": [{"max_tokens": 8, "steps": 1}, {}], "max_age": 0})
    limits = []
    for step in (1, 2):
        ticket, _ = desk.hand_out()
        order = desk.start(ticket, ticket).order
        assert order is not None
        limits.append(order.limit)
        finish(desk, ticket, desk.start(ticket, ticket))
        play(desk, range(step, step + 1))
    assert limits == [8, 32]


def test_the_settings_come_from_verl_unless_they_are_given() -> None:
    desk = opened(groups=3)
    assert desk.desk.groups == 3 and desk.desk.slots == 24 and desk.desk.steps == 20
    assert opened(slots=5, curriculum={"groups": 1}).desk.slots == 5
    assert isinstance(opened(curriculum="dapo").desk.curriculum, Dapo), "a name is enough"
    for wrong, sentence in (
        ({"speed": 1}, "curriculum and slots, but speed was given"),
        ({"curriculum": {"nam": "speed"}}, 'no setting "curriculum.nam"'),
        ({"curriculum": {"name": "speeed"}}, "speeed"),
        ({"curriculum": {"name": "cures", "cures": {"sigma": "gradient"}}}, 'signal "score"'),
    ):
        with pytest.raises(WhetError, match=sentence):
            opened(**wrong)


def test_a_state_goes_on_with_the_same_prompts() -> None:
    whole: dict[str, str] = {}
    play(opened(curriculum={"name": "dapo"}), range(1, 7), handed=whole)
    desk, parts = opened(curriculum={"name": "dapo"}), dict[str, str]()
    play(desk, range(1, 4), handed=parts)
    # in work when the checkpoint is written
    ticket, prompt_id = (desk.wanted(), desk.hand_out())[1]
    again = opened(curriculum={"name": "dapo"}, state=json.loads(json.dumps(desk.state())))
    assert again.unfinished() == ({ticket: {0, 1, 2, 3}}, set()) and len(again.desk.errands) == 1
    finish(again, ticket, again.start(ticket, "uid-again"))
    play(again, range(4, 7), handed=parts | {ticket: prompt_id})
    assert parts.items() <= whole.items() and len(parts) > 5
    with pytest.raises(WhetError, match="written with other prompts"):
        opened(count=29, curriculum={"name": "dapo"}, state=desk.state())


def test_a_rollout_without_a_reward_does_not_train_and_a_group_of_one_never_does() -> None:
    desk = opened(curriculum={"name": "uniform"})
    # verl's GRPO would take a single reward for its advantage
    for verdicts in ("ruuu", "rwwu", "rwwr"):
        ticket, _ = desk.hand_out()
        finish(desk, ticket, desk.start(ticket, verdicts), verdicts)
    taken = desk.take(1)
    assert taken is not None and taken[0] == {"rwwu": [0, 1, 2], "rwwr": [0, 1, 2, 3]}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        WhetError, match=r"add \+actor_rollout_ref.rollout.agent.agent_loop_manager_class="
    ):
        VerlDesk(rows(1, 2)).hand_out()
    desk = opened()
    with pytest.raises(WhetError, match="verl is at step 5, but the curriculum has seen 0 updates"):
        desk.take(5)
    ticket, _ = desk.hand_out()
    desk.start(ticket, "x")
    with pytest.raises(WhetError, match="has the reward nan"):
        desk.report([Finished(uid=ticket, index=0, length=1, verdict="right", reward=float("nan"))])
    desk.fail("first")
    desk.fail("second")
    with pytest.raises(WhetError, match=r"^first$"):
        desk.take(1)
    first = {"steps": 9}
    for late in ({"kl_coef": 0.0}, {"minibatches": 2}, {"temperature": 0.7}):
        with pytest.raises(WhetError, match="verl cannot change coefficients"):
            opened(curriculum={"stages": [first, late]})
    with pytest.raises(Starved):
        play(opened(curriculum={"name": "dapo", "patience": 1}), range(1, 2), "w")


def test_what_resets_later_is_refused_before_the_first_step() -> None:
    for table in (
        {"stages": [{"steps": 9}, {"reset_optimizer": True}]},
        {"name": "cures", "cures": {"subsets": 2}},
        {"source": "cures", "cures": {"subsets": 2}},
    ):
        with pytest.raises(WhetError, match="verl cannot reset"):
            opened(curriculum=table)
    opened(curriculum={"name": "dapo", "cures": {"subsets": 2}})  # it draws nothing by cures
    named = {"stages": [{"steps": 9}, {}]}
    opened(curriculum=named)  # without a KL term no one reads the reference
    with pytest.raises(WhetError, match="verl cannot reset"):
        VerlDesk(rows(*range(30))).open(configuration(kl=True, curriculum=named), None)
    for measured in ({"name": "stages"}, {"name": "all", "speed": {"n_init": 2}}):
        # the measured first stage resets nothing
        VerlDesk(rows(*range(30))).open(configuration(kl=True, curriculum=measured), None)
    # the first stage resets nothing, whatever it says
    kept = {"stages": [{"steps": 9}, {"reset_reference": False}]}
    VerlDesk(rows(*range(30))).open(configuration(kl=True, curriculum=kept), None)


@pytest.mark.parametrize(
    ("version", "sentence"), [("0.9.0", "verl 0.9.0 is installed"), ("0.10.0", "0.9.1 alone")]
)
def test_another_verl_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, sentence: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(WhetError, match=sentence):
        importlib.import_module("whet.adapters.verl")
