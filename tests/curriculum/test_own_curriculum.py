"""A curriculum of the user's own, named "module:Class": built, refused with one sentence, mixed and trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted import SAMPLING, at

from whet import config
from whet.curriculum.build import Facts, build_curriculum, find_plan
from whet.curriculum.gate import Gate
from whet.curriculum.stages import Stages
from whet.errors import WhetError
from whet.testing import check_contract

SOURCE = """
from whet.curriculum.gate import Gate, Uniform
from whet.curriculum.source import UniformSource

class Band(Gate):
    def admit(self, group):
        return "keep" if 0.2 <= group.pass_rate <= 0.8 else "drop"

class Own:
    needs = frozenset()
    def __init__(self, *, facts, settings, sampling, seed):
        source = UniformSource(facts.ids, seed)
        self.inner = Uniform(source, sampling=sampling, rollouts=settings.rollouts, max_age=settings.max_age)
        for name in "plan observe emit updated holds waits metrics state_dict load_state_dict".split():
            setattr(self, name, getattr(self.inner, name))
    plan = observe = emit = updated = holds = waits = metrics = state_dict = load_state_dict = lambda self: None

class Half:
    def plan(self, clock): ...
    def observe(self, rollouts): ...

class NoAdmit(Gate): ...

class Other(Band):
    def __init__(self, source, size): ...

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_curricula.py").write_text(SOURCE)
    (tmp_path / "broken_curricula.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_curricula", raising=False)


def build(name: str, facts: Facts | None = None, **settings: Any) -> Any:
    table = config.CurriculumSettings.model_validate(
        {"name": name, "rollouts": 4, "max_age": 1, **settings}
    )
    facts = facts or Facts(ids=[f"p{i}" for i in range(20)], characters=range(20))
    return build_curriculum(table, facts=facts, sampling=SAMPLING, seed=3)


def test_a_gate_gets_the_settings_of_the_table_and_every_wrapper() -> None:
    gate = build("my_curricula:Band", patience=7)
    assert isinstance(gate, Gate) and (gate.rollouts, gate.max_age, gate.patience) == (4, 1, 7)
    assert gate.source.seed == 3 and len(gate.plan(at(groups=2))) == 2  # type: ignore[attr-defined]
    staged = build(
        "my_curricula:Band", source="scalingrl", stages=[{"subset": "short", "steps": 2}, {}]
    )
    assert isinstance(staged, Stages) and type(staged.inner).__name__ == "Band"  # type: ignore[attr-defined]


@pytest.mark.wide
@pytest.mark.parametrize("name", ["my_curricula:Band", "my_curricula:Own"])
def test_it_keeps_the_contract(name: str) -> None:
    check_contract(lambda ids, seed: build(name, Facts(ids=ids)), rollouts=4, max_age=1)


def test_a_whole_curriculum_is_built_from_facts_and_refuses_what_only_a_gate_can_do() -> None:
    assert len(build("my_curricula:Own").plan(at(groups=3))) == 3
    with pytest.raises(WhetError, match=r"curriculum\.stages needs a gate"):
        build("my_curricula:Own", stages=[{"steps": 2}, {}])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("my_curricula:", 'is written "module:Class"'),
        ("no_such:Band", 'there is no module "no_such" in .* or among the installed packages'),
        (
            "broken_curricula:Band",
            "importing broken_curricula failed with ZeroDivisionError: division by zero",
        ),
        ("my_curricula:Bund", 'my_curricula has no class "Bund"'),
        ("my_curricula:number", 'my_curricula has no class "number"'),
        (
            "my_curricula:Half",
            "Half lacks emit, updated, holds, waits, metrics, state_dict, load_state_dict",
        ),
        ("my_curricula:NoAdmit", "NoAdmit lacks admit"),
        (
            "my_curricula:Other",
            r"is built with \(source, sampling, rollouts, .*\), which does not fit",
        ),
    ],
)
def test_what_cannot_be_a_curriculum_is_refused_with_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(WhetError, match=sentence):
        find_plan(name)
