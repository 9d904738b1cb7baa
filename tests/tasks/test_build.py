import os
import sys

import pytest

from whet.config import Data, Eval
from whet.errors import WhetError
from whet.tasks.build import TaskNames, build_task, import_judge, load_judge
from whet.types import Prompt

PROMPT = Prompt(id="a", text="?", answer="869", task="chain")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory of the user's, with judges in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", os.getcwd())])
    (tmp_path / "my_judges.py").write_text(
        "answer = 42\n"
        "def exact(prompt, response): return response == prompt.answer\n"
        "def loose(prompt, response, *, margin=0.1): return 1.0\n"
        "def greedy(prompt, response, more): return 1.0\n"
        "def lonely(response): return 1.0\n"
        "class Judge:\n"
        "    def __call__(self, prompt, response): return 0.5\n"
        "judge = Judge()\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "needy.py").write_text("import no_such_package\n")
    yield tmp_path
    for name in ("my_judges", "broken", "needy"):
        sys.modules.pop(name, None)


def sentence(data: Data) -> str:
    with pytest.raises(WhetError) as error:
        load_judge(build_task(data), data)
    return str(error.value)


def test_chain() -> None:
    data = Data(task="chain", options={"train_count": 50})
    task = build_task(data)
    assert task.name == "chain" and len(task.prompts("train", 0)) == 50
    assert load_judge(task, data)(PROMPT, "#869") == 1.0


def test_text(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    data = Eval(task="text", path=str(path))
    task = build_task(data)
    (prompt,) = task.prompts("eval", 0)
    assert prompt.task == task.name == "text" and load_judge(task, data)(prompt, "\\boxed{b}") == 1.0


def test_a_judge_from_the_current_directory(here) -> None:
    data = Data(task="chain", options={"train_count": 5}, reward="my_judges:exact")
    task = build_task(data)
    assert task.name == "chain:my_judges:exact" == task.prompts("train", 0).at(0).task
    assert load_judge(task, data)(PROMPT, "869") == 1.0
    assert load_judge(task, Data(reward="my_judges:judge"))(PROMPT, "") == 0.5
    assert load_judge(task, Data(reward="my_judges:loose"))(PROMPT, "") == 1.0


def test_a_judge_changes_no_id(here) -> None:
    plain, judged = (build_task(Data(reward=reward)).prompts("eval", 0).ids for reward in ("", "my_judges:exact"))
    assert list(plain) == list(judged)


def test_a_name_for_each_judge(here) -> None:
    """Two entries that judge differently must not be found under one name; equal ones share it."""
    names = TaskNames()
    boxed = {"answer": "boxed"}
    entries = [
        Data(path="a.jsonl"),
        Eval(path="b.jsonl", options=boxed),
        Data(path="c.jsonl", options=boxed),
        Data(path="d.jsonl", options={"answer": "tagged"}),
        Data(path="e.jsonl", reward="my_judges:exact"),
        Data(path="f.jsonl", reward="my_judges:exact", options=boxed),
        Eval(path="a.jsonl"),
        Data(),
    ]
    exact = "text:my_judges:exact"
    assert [names.of(e) for e in entries] == [
        "text", "text:2", "text:2", "text:3", exact, f"{exact}:2", "text", "chain",
    ]  # fmt: skip


def test_a_second_name_changes_no_id(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    first, second = (build_task(Data(path=str(path)), name).prompts("train", 0) for name in ("text", "text:2"))
    assert first.ids == second.ids and second.at(0).task == "text:2"


def test_wrong_tasks(tmp_path) -> None:
    assert sentence(Data(task="chian")) == 'There is no task "chian"; did you mean "chain"?'
    assert sentence(Data(task="zzz")) == 'There is no task "zzz"; there are chain, gym, text.'
    assert sentence(Data(task="text")).startswith("Task text needs data.path")
    assert 'set task = "text"' in sentence(Data(task="chain", path="x.jsonl"))
    assert "has no use for where" in sentence(Data(task="chain", where={"level": 1}))
    assert 'has no option "train"; did you mean "train_count"?' in sentence(Data(options={"train": 3}))
    assert sentence(Data(options={"name": "x"})).startswith('"name" is no option of task chain')
    assert sentence(Data(task="text", options={"path": "x"})).startswith('"path" is no option of task text')


def test_wrong_judges(here) -> None:
    assert sentence(Data(reward="my_judges")) == 'A reward is written "module:function", got "my_judges".'
    assert sentence(Data(reward=":f")) == 'A reward is written "module:function", got ":f".'
    assert (
        sentence(Data(reward="nowhere:f"))
        == f'reward = "nowhere:f": there is no module "nowhere" in {here} or among the installed packages.'
    )
    assert 'there is no module "my_judges.deep"' in sentence(Data(reward="my_judges.deep:f"))
    assert sentence(Data(reward="my_judges:exat")).endswith('has no function "exat"; did you mean "exact"?')
    assert sentence(Data(reward="my_judges:answer")).endswith("is a int, not a function of (prompt, response).")
    assert sentence(Data(reward="my_judges:lonely")).endswith(
        "is called with (prompt, response), but takes (response)."
    )
    assert "but takes (prompt, response, more)" in sentence(Data(reward="my_judges:greedy"))
    assert sentence(Data(reward="broken:f")).endswith(
        "importing broken failed with ZeroDivisionError: division by zero."
    )
    assert sentence(Data(reward="needy:f")).endswith(
        'needy needs the module "no_such_package", which is not installed.'
    )


def test_functions_that_show_no_signature() -> None:
    assert import_judge("builtins:max") is max


def test_the_current_directory_shadows_nothing(here) -> None:
    """A judge there is found, but a file called like a module of Python or a package is not taken for it."""
    (here / "graphlib.py").write_text("raise SystemExit('the wrong one')\n")
    (here / "colorsys.py").write_text("def score(prompt, response): return 1.0\n")
    sys.modules.pop("graphlib", None)
    sys.modules.pop("colorsys", None)
    data = Data(task="chain", options={"train_count": 5}, reward="my_judges:exact")
    assert load_judge(build_task(data), data)(PROMPT, "869") == 1.0
    import graphlib

    assert not graphlib.__file__.startswith(str(here)) and sys.path[-1] == str(here)
    said = sentence(Data(reward="colorsys:score"))
    assert "colorsys.py; packages go before the current directory) has no function" in said and str(here) not in said
