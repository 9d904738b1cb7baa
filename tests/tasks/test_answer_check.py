"""The data's answers, judged against themselves, and the summary of a data entry."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from whet.config import Data, Eval
from whet.tasks.answer_check import FEW, AnswerCheck, check, describe_problems
from whet.tasks.judge import Judge
from whet.tasks.text import TextTask


def task_of(tmp_path: Path, answers: list, **fields) -> TextTask:
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"Problem {i}?", "answer": a}) + "\n"
            for i, a in enumerate(answers)
        )
    )
    return TextTask(Data(path=str(path), **fields))


def golds_of(task: TextTask, **knobs) -> AnswerCheck:
    table = task.prompts("train", 0)
    return check(task, range(len(table)), table.at, **knobs)


def test_answers_that_can_be_given(tmp_path) -> None:
    zebra = json.dumps({"rows": [{"house": i, "owner": "x" * 40} for i in range(9)]})
    answers = [
        "72",
        "\\frac{1}{2}",
        ["1/2", "0.5"],
        "Evelyn",
        "We add.\n#### 3",
        zebra,
        "{1, 2}",
        True,
    ]
    found = golds_of(task_of(tmp_path, answers))
    assert (found.answers, found.checked, found.unmatched, found.long) == (
        8,
        8,
        0,
        0,
    ) and found.sentences() == []


def test_answers_that_no_response_can_give(tmp_path) -> None:
    found = golds_of(task_of(tmp_path, ["72", "11}", "\\frac{1}{2"]))
    assert (found.checked, found.unmatched, found.mostly_wrong) == (3, 2, True)
    (said,) = found.sentences()
    assert said.startswith(
        "2 of 3 answers cannot be matched by this judge, such as '11}' of the problem 'Problem 1?';"
    )
    assert 'columns = { answer = "..." }' in said and 'reward = "module:function"' in said


def test_it_is_this_tasks_judge_that_is_asked(tmp_path) -> None:
    assert (
        golds_of(task_of(tmp_path, ["yes", "no"], options={"answer": "last_number"})).unmatched == 2
    )
    assert golds_of(task_of(tmp_path, ["yes", "no"], options={"answer": "tagged"})).unmatched == 0


def test_long_texts_are_reported(tmp_path) -> None:
    found = golds_of(task_of(tmp_path, ["First we try 3 * 4. " * 30, "72"]))
    assert (found.unmatched, found.long) == (0, 1)
    assert found.sentences()[0].startswith(
        "1 of 2 answers are texts of more than 300 characters, which a response"
    )


def test_a_sample_is_drawn_by_the_seed(tmp_path) -> None:
    task = task_of(tmp_path, [f"{i}}}" if i % 2 else str(i) for i in range(200)])
    found = [golds_of(task, sample=50, seed=seed).unmatched for seed in (0, 0, 1, 2, 3)]
    assert found[0] == found[1] and len(set(found)) > 1 and all(10 < count < 40 for count in found)
    assert golds_of(task, sample=50).answers == 50


def test_a_few_bad_rows_are_for_prepare() -> None:
    few = AnswerCheck(answers=100, checked=100, unmatched=int(100 * FEW), example="'x'").sentences()
    assert few == [
        "5 of 100 answers cannot be matched by this judge, such as 'x'; whet data prepare leaves such problems out."
    ]


def test_the_check_ends_when_its_time_is_up(tmp_path, monkeypatch) -> None:
    task = task_of(tmp_path, [str(i) for i in range(200)])
    now, begun, receive = [0.0], [], Judge.receive

    # in a process of its own: its first answer comes at once, the second never
    def judge(self, prompt, response):
        begun.append(prompt)
        if len(begun) > 1:
            time.sleep(600)
        return 1.0

    def receive_and_tick(self, **options):
        got = receive(self, **options)
        now[0] += 1.0 if got else 0.0
        return got

    monkeypatch.setattr(TextTask, "judge", judge)
    monkeypatch.setattr("whet.tasks.answer_check._TIMEOUT_S", 600.0)
    monkeypatch.setattr("whet.tasks.answer_check.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Judge, "receive", receive_and_tick)
    found = golds_of(task, seconds=1.0)
    assert (found.checked, found.answers) == (1, 200)
    assert found.sentences() == ["The time was up when 1 of 200 answers were checked."]
    assert golds_of(task, seconds=0.0).checked == 0


def test_a_judge_that_dies_or_hangs_ends_nothing(tmp_path, monkeypatch) -> None:
    task = task_of(tmp_path, [str(i) for i in range(6)])
    monkeypatch.setattr("whet.tasks.answer_check._TIMEOUT_S", 3.0)

    def judge(self, prompt, response):
        if prompt.answer == "3":
            time.sleep(60)
        return 1 / int(prompt.answer) * int(prompt.answer)

    monkeypatch.setattr(TextTask, "judge", judge)
    found = golds_of(task)
    assert (found.checked, found.unmatched) == (6, 2), "0 raises, 3 hangs"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (["1", "2"], ["all 2 answers can be matched by this judge"]),
        (["1}", "2"], ["1 of 2 answers cannot be matched by this judge"]),
        (["1}", "2}"], ["2 of 2 answers cannot be matched by this judge", "a run refuses"]),
    ],
)
def test_data_look_checks_all(tmp_path, answers, said) -> None:
    path = str(task_of(tmp_path, answers).origin)
    lines = [found for what, found in describe_problems(Data(path=path)) if what == "judged"]
    assert len(lines) == len(said) and all(map(str.startswith, lines, said))


def test_a_file_in_a_few_lines(tmp_path) -> None:
    rows = [
        {
            "problem": "What is\n$1+1$?\x1b",
            "answer": "2",
            "level": "Level 3",
            "year": 2001,
            "solution": "1+1 is 2",
        },
        {
            "problem": "what is 1 + 1\x1b",
            "answer": "2",
            "level": "Level 1",
            "year": 2002,
            "solution": None,
        },
        {
            "problem": "x" * 400,
            "answer": r"\frac{1}{2}",
            "level": None,
            "year": 2002,
            "solution": None,
        },
        {"problem": "blank", "answer": None, "level": None, "year": 2002, "solution": None},
    ]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(rows))
    said = dict(describe_problems(Data(path=str(path))))
    assert (
        said["rows"] == "4"
        and said["problems"] == "3, 1 of them repeats"
        and said["worked solutions"] == "1"
    )
    assert (
        said["columns"] == "prompt = problem, answer = answer, solution = solution, level = level"
    )
    assert said["levels"] == "1: 1, 3: 1, none: 1" and said["kept as meta"] == "year"
    assert said["answers"] == "whole number 67%, number 33%" and said["note"].startswith(
        "1 of the 4 rows"
    )
    assert (
        "not kept" not in said
        and said["first problem"] == "What is $1+1$? "
        and said["its answer"] == "2"
    )


def test_a_long_problem_is_cut(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 400, "answer": "1"}))
    assert dict(describe_problems(Eval(path=str(path))))["first problem"] == "x" * 300 + " ..."


def test_a_task_that_makes_its_problems() -> None:
    said = dict(describe_problems(Data(options={"train_count": 50, "mix": {"2": 1.0}})))
    assert said["task"] == "chain" and said["levels"] == "2: 50" and "rows" not in said


def test_what_is_not_kept_is_named(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "?", "answer": "1", "essay": "x" * 101, "nums": [1, 2]}))
    said = dict(describe_problems(Data(path=str(path))))
    assert said["kept as meta"] == "nums" and said["not kept"].startswith("essay (long texts")
