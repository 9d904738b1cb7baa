import json

from whet.config import Data, Eval
from whet.tasks.golds import describe_problems


def test_a_file_in_a_few_lines(tmp_path) -> None:
    rows = [
        {"problem": "What is\n$1+1$?\x1b", "answer": "2", "level": "Level 3", "year": 2001, "solution": "1+1 is 2"},
        {"problem": "what is 1 + 1\x1b", "answer": "2", "level": "Level 1", "year": 2002, "solution": None},
        {"problem": "x" * 400, "answer": r"\frac{1}{2}", "level": None, "year": 2002, "solution": None},
        {"problem": "blank", "answer": None, "level": None, "year": 2002, "solution": None},
    ]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(rows))
    said = dict(describe_problems(Data(path=str(path))))
    assert said["rows"] == "4" and said["problems"] == "3, 1 of them repeats" and said["worked solutions"] == "1"
    assert said["columns"] == "prompt = problem, answer = answer, solution = solution, level = level"
    assert said["levels"] == "1: 1, 3: 1, none: 1" and said["kept as meta"] == "year"
    assert said["answers"] == "whole number 67%, number 33%" and said["note"].startswith("1 of the 4 rows")
    assert "not kept" not in said and said["first problem"] == "What is $1+1$? " and said["its answer"] == "2"


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
