from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet import config
from whet.errors import WhetError
from whet.problems import load_problems
from whet.recipe import parse_config
from whet.tasks.answer_check import answer_score
from whet.tasks.base import PromptTable, problem_key
from whet.tasks.text import TextTask
from whet.tools.prepare import prepare, prepare_file, read_pass_rates, stratified
from whet.types import Prompt

Write = Callable[..., str]


@pytest.fixture
def file(tmp_path: Path) -> Write:
    def write(rows: list[dict[str, Any]], name: str = "p.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(path: str, out: Path, **knobs: Any) -> dict[str, str]:
    return dict(prepare_file(config.Data(path=path), out, **knobs))


def test_every_rule_leaves_out_what_it_should(file: Write, tmp_path: Path) -> None:
    data = file(
        [
            {"id": "good", "prompt": "What is 1+1?", "answer": "2"},
            {"id": "again", "prompt": "what is $1+1$", "answer": "2.0"},
            {"id": "says 4", "prompt": "What is two and two?", "answer": "4"},
            {"id": "says 5", "prompt": "What is two and two?", "answer": "5"},
            {"id": "seen", "prompt": "What is 3+4?", "answer": "7"},
            {"id": "broken", "prompt": "What is one half?", "answer": "\\frac{1}{2"},
            {"id": "broken too", "prompt": "What is 5+6?", "answer": "11}"},
            {"id": "easy", "prompt": "What is 5+5?", "answer": "10"},
            {"id": "hard", "prompt": "What is 99*99?", "answer": "9801"},
            {"id": "not probed", "prompt": "What is 5+6?", "answer": "11"},
        ]
    )
    against = file([{"problem": "What is  3 + 4 ?", "answer": "7"}], "test_set.jsonl")
    rates = {"good": 0.5, "easy": 1, "hard": 0.0}
    probed = file([{"id": i, "pass_rate": rate} for i, rate in rates.items()], "rates.jsonl")
    out = tmp_path / "new" / "kept.jsonl"
    report = run(data, out, against=[against], pass_rates=Path(probed))
    assert [row["id"] for row in rows_of(out)] == ["good", "not probed"]
    assert rows_of(out)[0]["pass_rate"] == 0.5
    left_out = {
        what.removeprefix("left out: "): n
        for what, n in report.items()
        if what.startswith("left out")
    }
    assert left_out == {
        "same problem with another answer": "2",
        "repeat": "1",
        f"in {against}": "1",
        "answer that no response could match": "2",
        "always solved": "1",
        "never solved": "1",
    }
    assert (
        report["problems"] == "10"
        and report["kept"] == "2"
        and report["kept without a pass rate"] == "1"
    )


def test_what_is_written_reads_back_as_the_same_prompts(file: Write, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "How many?"}]
    data = file(
        [
            {
                "question": "A?",
                "answer": "We add.\n#### 3",
                "level": "Level 2",
                "source": {"name": "x"},
            },
            {"question": "B?", "answer": ["1/2", "0.5"], "level": "Level 5"},
            {"question": chat, "answer": "4", "id": "mine"},
        ]
    )
    out = tmp_path / "out.jsonl"
    run(data, out)

    def prompts(path: str) -> list[Prompt]:
        return list(
            load_problems(parse_config({"data": {"path": path}, "held_out": {"size": 0}})).train
        )

    assert prompts(str(out)) == prompts(data)
    assert ["id" in row for row in rows_of(out)] == [False, False, True]
    assert rows_of(out)[0]["solution"].startswith("We add.")


def test_a_sample_keeps_the_shares_of_the_levels(file: Write, tmp_path: Path) -> None:
    data = file(
        [
            {"prompt": f"What is {i} squared?", "answer": f"{i * i}", "level": 1 + (i % 10 == 0)}
            for i in range(500)
        ]
    )
    report = run(data, tmp_path / "a.jsonl", size=50, seed=1)
    assert Counter(row["level"] for row in rows_of(tmp_path / "a.jsonl")) == {1: 45, 2: 5}
    assert (
        report["kept"] == "50"
        and report["kept: level 2"] == "5"
        and report["left out: not in the sample"] == "450"
    )
    for name, seed in (("b", 1), ("c", 2)):
        run(data, tmp_path / f"{name}.jsonl", size=50, seed=seed)
    a, b, c = ((tmp_path / f"{name}.jsonl").read_text() for name in "abc")
    assert a == b != c
    assert run(data, tmp_path / "d.jsonl", size=9999)["kept"] == "500"


def test_without_levels_the_strata_are_pass_rates() -> None:
    table = PromptTable(
        [f"Find {i}." for i in range(100)], ["1"] * 100, "text", ids=[f"{i}" for i in range(100)]
    )
    rates = {f"{i}": 0.1 if i < 80 else 0.9 for i in range(100)}
    kept, report = prepare(table, usable=lambda prompt: True, against={}, rates=rates, size=10)
    assert sum(row < 80 for row in kept) == 8
    assert dict(report)["kept: pass rate 0.8-1.0"] == "2"


@pytest.mark.parametrize("size", [1, 7, 50, 99])
def test_a_stratified_sample_is_exact_and_never_more_than_there_is(size: int) -> None:
    strata = ["a"] * 90 + ["b"] * 9 + ["c"]
    rows = stratified(range(100), strata, size, seed=0)
    assert len(rows) == len(set(rows)) == size
    for stratum, count in Counter(strata).items():
        assert abs(sum(strata[row] == stratum for row in rows) - count * size / 100) < 1


def test_answers_are_looked_for_where_the_task_looks(file: Write) -> None:
    path = file([{"prompt": "?", "answer": "1"}])

    def usable(text: str, **options: str) -> bool:
        task = TextTask(config.Data(path=path, options={"matcher": "exact", **options}))
        return answer_score(task, Prompt(id="a", text="?", answer=text, task="text")) == 1.0

    assert usable("\\frac{1}{2}") and usable("Evelyn") and usable('["1", "2"]')
    assert not usable("}{") and usable("7" * 400), "a long answer is compared whole"
    assert (
        usable("yes", answer="tagged")
        and usable("72", answer="marked")
        and usable("72", answer="last_number")
    )
    assert not usable("yes", answer="last_number")


def test_pass_rates_are_counted_from_a_probe(file: Write, tmp_path: Path) -> None:
    verdicts = [
        ("a", "right"),
        ("a", "wrong"),
        ("a", "unjudged"),
        ("b", "unjudged"),
        ("eval:my:set:c", "right"),
    ]
    file(
        [{"prompt_id": i, "verdict": verdict, "response": "x"} for i, verdict in verdicts],
        "responses.jsonl",
    )
    assert read_pass_rates(tmp_path) == {"a": 0.5, "set:c": 1.0}
    with pytest.raises(WhetError, match="holds no pass rates"):
        read_pass_rates(Path(file([{"id": "a", "rate": 1}], "r.jsonl")))
    with pytest.raises(WhetError, match=r"line 2: pass_rate should be a number from 0 to 1, got 8"):
        read_pass_rates(
            Path(file([{"id": "a", "pass_rate": 1}, {"id": "b", "pass_rate": 8}], "s.jsonl"))
        )


def test_what_cannot_be_meant_is_refused_and_nothing_is_lost(file: Write, tmp_path: Path) -> None:
    data = file([{"prompt": "1+1=", "answer": "2", "id": "a"}])
    there = tmp_path / "there.jsonl"
    there.write_text("mine")
    for path, out, match, knobs in (
        (data, there, "is there already", {}),
        (data, tmp_path / "x.parquet", r"must end in \.jsonl", {}),
        (data, tmp_path / "x.jsonl", "Nothing is left of 1 problems: 1 in", {"against": [data]}),
        (
            data,
            tmp_path / "x.jsonl",
            "None of the 1 prompts",
            {"pass_rates": Path(file([{"id": "z", "pass_rate": 1}], "z.jsonl"))},
        ),
    ):
        with pytest.raises(WhetError, match=match):
            run(path, out, **knobs)
    with pytest.raises(WhetError, match="makes its own problems"):
        prepare_file(config.Data(task="chain"), tmp_path / "x.jsonl")
    assert there.read_text() == "mine" and not (tmp_path / "x.jsonl").exists()


def test_a_problem_without_an_answer_column_is_for_a_judge_of_your_own(
    file: Write, tmp_path: Path
) -> None:
    data = file(
        [{"prompt": "Write a poem.", "topic": "sea"}, {"prompt": "Write a poem.", "topic": "sea"}]
    )
    entry = config.Data(path=data, columns={"answer": ""})
    assert dict(prepare_file(entry, tmp_path / "o.jsonl"))["kept"] == "1"


def test_repeats_are_found_by_the_key_that_finds_overlaps() -> None:
    assert problem_key("What is 1+1?") == problem_key("what is $1+1$")
