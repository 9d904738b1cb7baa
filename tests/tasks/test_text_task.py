import datetime
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whet.config import Data, Eval
from whet.errors import WhetError
from whet.tasks.reading import NAMES, open_data
from whet.tasks.text import TextTask

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
GOOD = {"prompt": "a", "answer": "b"}


@pytest.fixture
def write(tmp_path):
    def write(*rows, name: str = "p.jsonl") -> str:
        path = tmp_path / name
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(list(rows)), path, compression="zstd")
        else:
            path.write_text(
                "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
            )
        return str(path)

    return write


def text_task(path: str, **fields) -> TextTask:
    return TextTask(Data(path=path, **fields))


def refused(path: str, **fields) -> str:
    with pytest.raises(WhetError) as error:
        text_task(path, **fields)
    return str(error.value).replace(path, "FILE")


def prompts(task: TextTask) -> list:
    return list(task.prompts("train", 0))


def test_reads_problems(write) -> None:
    path = write(
        {"prompt": "1+1?", "answer": "2", "id": "a", "level": 1, "source": "s", "other": [1]},
        "",
        {"prompt": CHAT, "answer": 2, "id": 7},
        {"prompt": "Größe?", "answer": 2.5, "level": None},
        "  ",
    )
    task = text_task(path)
    first, second, third = prompts(task)
    assert (first.id, first.text, first.answer, first.meta) == (
        "a",
        "1+1?",
        "2",
        {"level": 1, "source": "s", "other": [1]},
    )
    assert (second.id, second.messages, second.answer, second.text) == ("7", tuple(CHAT), "2", "")
    assert (third.text, third.answer, third.meta, len(third.id)) == ("Größe?", "2.5", {}, 16)
    assert (
        list(task.prompts("eval", 1)) == [first, second, third]
        and task.alphabet == ""
        and first.task == "text"
    )
    assert task.notes == ()


def test_verl_rows(write) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 4, "split": "train", "answer": "x" * 101},
    }
    kept = {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model.style": "rule",
        "extra_info.index": 4,
        "extra_info.split": "train",
    }
    for name in ("v.parquet", "v.jsonl"):
        (prompt,) = prompts(text_task(write(row, name=name)))
        assert prompt.messages == ({"role": "user", "content": "1+1?"},) and prompt.answer == "2"
        assert prompt.meta == kept


def test_trl_rows(write) -> None:
    rows = [
        {"prompt": "a?", "solution": r"So $\boxed{\frac{1}{2}}$, not \boxed."},
        {"prompt": "b?", "solution": r"First \boxed{3}, then \boxed{4}."},
        {"prompt": "c?", "solution": "2+3\n#### 5"},
        {"prompt": "d?", "solution": "6"},
    ]
    for name in ("t.parquet", "t.jsonl"):
        task = text_task(write(*rows, name=name))
        assert [p.answer for p in prompts(task)][1:] == ["4", "5", "6"]
        assert {text for _, text in task.solutions(np.random.default_rng(0), 4)} == {
            row["solution"] for row in rows
        }
    both = text_task(write({"prompt": "a?", "solution": "long", "answer": "7"}))
    assert prompts(both)[0].answer == "7", "an answer column goes before the solution"


def test_gsm8k_rows(write) -> None:
    worked = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72 altogether.\n#### 72"
    task = text_task(write({"question": "How many?", "answer": worked}))
    (prompt,) = prompts(task)
    assert (prompt.text, prompt.answer) == ("How many?", "72")
    ((_, solution),) = task.solutions(np.random.default_rng(0), 1, end="\n#### {answer}")
    assert solution == "Natalia sold 48/2 = 24 clips in May.\n48+24 = 72 altogether.\n#### 72", (
        "the end is there already"
    )


def test_answers_of_every_kind(write) -> None:
    cases = [
        (72, "72"),
        (True, "True"),
        (0.5, "0.5"),
        (["9"], "9"),
        (["1/2", "0.5", "1/2"], '["1/2", "0.5"]'),
        ('["9.6"]', "9.6"),
        ('["$x$", "$y$"]', '["$x$", "$y$"]'),
        ("[0, 1)", "[0, 1)"),
        ("[1, 4]", "[1, 4]"),
        ('["a, b', '["a, b'),
        ([3], "3"),
    ]
    task = text_task(
        write(*({"prompt": f"{i}?", "answer": given} for i, (given, _) in enumerate(cases)))
    )
    assert [p.answer for p in prompts(task)] == [answer for _, answer in cases]


def test_any_of_several_answers_is_right(write) -> None:
    task = text_task(write({"prompt": "?", "answer": ["6630.65", "6630"]}))
    (prompt,) = prompts(task)
    assert [task.judge(prompt, f"\\boxed{{{x}}}") for x in ("6630", "6630.65", "66")] == [
        1.0,
        1.0,
        0.0,
    ]


def test_columns_of_ones_own(write) -> None:
    path = write({"q": "1?", "a": {"b": "2"}, "key": 3, "hard": "Level 4"}, name="c.parquet")
    columns = {"prompt": "q", "answer": "a.b", "id": "key", "level": "hard"}
    (prompt,) = prompts(text_task(path, columns=columns))
    assert (prompt.id, prompt.text, prompt.answer, prompt.meta) == ("3", "1?", "2", {"level": 4})
    assert (
        refused(path, columns={"prompt": "qq"})
        == 'FILE has no column "qq"; it has q, a.b, key, hard.'
    )
    assert refused(path, columns={"promt": "q"}) == 'columns has no "promt"; did you mean "prompt"?'
    assert refused(path).startswith("FILE has no column for the prompt (prompt, problem, question")
    assert refused(path, columns={"prompt": "q"}).endswith(
        'it has q, a.b, key, hard: name yours by columns = { answer = "..." }; "" means that there is none.'
    )


def test_a_column_that_is_not_wanted(write) -> None:
    path = write({**GOOD, "id": 1}, {**GOOD, "id": 1})
    assert refused(path).startswith(
        'FILE has the id "1" twice, in line 1 and line 2; ids must differ'
    )
    assert len(prompts(text_task(path, columns={"id": ""}))) == 2
    assert prompts(text_task(write({"prompt": "a"}), columns={"answer": ""}))[0].answer == ""


def test_levels(write) -> None:
    rows = [
        {**GOOD, "prompt": f"{i}?", "level": level}
        for i, level in enumerate(["Level 5", "Level ?", "Level 1"])
    ]
    task = text_task(write(*rows))
    assert task.prompts("train", 0).meta["level"] == [5, None, 1]
    assert [p.text for p in prompts(text_task(write(*rows), where={"level": [1, 5]}))] == [
        "0?",
        "2?",
    ]
    hard = text_task(write({**GOOD, "difficulty": 0.25}))
    assert prompts(hard)[0].meta == {"level": 0.25}


def test_where_and_limit(write) -> None:
    rows = [
        {"problem": f"{i}?", "answer": i, "year": 2000 + i % 3, "in_eval": i < 3, "n": str(i)}
        for i in range(9)
    ]
    for name in ("w.parquet", "w.jsonl"):
        path = write(*rows, name=name)

        def numbers(**fields) -> list[int]:
            return [int(p.answer) for p in prompts(text_task(path, **fields))]  # noqa: B023

        assert numbers(where={"in_eval": False}) == [3, 4, 5, 6, 7, 8]
        assert numbers(where={"year": [2000, 2002], "in_eval": False}) == [3, 5, 6, 8]
        assert numbers(where={"n": 4}) == numbers(where={"n": "4"}) == [4]
        assert numbers(where={"year": 2001}, limit=2) == [1, 4] and numbers(limit=3) == [0, 1, 2]
        assert (
            refused(path, where={"yaer": 1})
            == 'where: FILE has no column "yaer"; did you mean "year"?'
        )
        assert (
            refused(path, where={"year": [1999]})
            == "where: none of the 9 rows of FILE has year = [1999]."
        )
        assert refused(path, where={"in_eval": 0}).startswith("where: none"), "false is not 0"


def test_blank_rows_are_left_out_and_counted(write) -> None:
    blanks = [
        {**GOOD, "answer": None},
        {**GOOD, "answer": " "},
        {**GOOD, "prompt": None},
        {**GOOD, "answer": []},
    ]
    task = text_task(
        write(GOOD, *blanks, '{"prompt": "a", "answer": NaN}', {**GOOD, "prompt": "z"})
    )
    assert [p.text for p in prompts(task)] == ["a", "z"]
    assert len(task.notes) == 1 and task.notes[0].startswith("5 of the 7 rows of ")
    assert refused(write(*blanks)) == "FILE holds no problem with an answer: 4 rows are blank."


def test_solutions_all_once_before_again(write) -> None:
    rows = [{"prompt": f"{i}?", "answer": str(i), "solution": f"is {i}"} for i in range(5)]
    task = text_task(write(*rows, {"prompt": "6?", "answer": "6", "solution": ""}))
    pairs = task.solutions(np.random.default_rng(0), 10)
    assert all(solution == f"is {prompt.answer}" for prompt, solution in pairs) and task.worked == 5
    assert {p.answer for p, _ in pairs[:5]} == {p.answer for p, _ in pairs[5:]} == set("01234")
    assert (
        pairs
        == task.solutions(np.random.default_rng(0), 10)
        != task.solutions(np.random.default_rng(1), 10)
    )
    assert (
        task.solutions(np.random.default_rng(0), 0) == []
        and len(task.solutions(np.random.default_rng(0), 3)) == 3
    )
    ended = task.solutions(np.random.default_rng(0), 5, end="\n#### {answer}")
    assert all(text == f"is {prompt.answer}\n#### {prompt.answer}" for prompt, text in ended)


def test_several_solutions_are_one_text(write) -> None:
    task = text_task(
        write({"question": "?", "final_answer": ["$2$"], "solution": ["First.", "Then."]})
    )
    ((prompt, solution),) = task.solutions(np.random.default_rng(0), 1)
    assert (prompt.answer, solution) == ("$2$", "First.\nThen.")


def test_no_solutions(write) -> None:
    task = text_task(write(GOOD))
    with pytest.raises(WhetError, match="has no `solution` column, which a warm start imitates"):
        task.solutions(np.random.default_rng(0), 3)
    with pytest.raises(
        WhetError,
        match='The worked solutions of task text has no option "ending"; did you mean "end"',
    ):
        task.solutions(np.random.default_rng(0), 3, ending="x")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"problem": "a", "answer": "b"}, 'FILE, line 2 has no "prompt"; it has answer, problem.'),
        ({"prompt": "a"}, 'FILE, line 2 has no "answer"; it has prompt.'),
        ({}, 'FILE, line 2 has no "answer"; it has nothing.'),
        (
            {"prompt": "a", "answer": {"x": 1}},
            'FILE, line 2 has no "answer"; it has prompt, answer.x.',
        ),
        (
            '{"prompt": "a", "answer": [["\\ud800"]]}',
            "FILE, line 2: answer is not valid Unicode (a lone surrogate).",
        ),
        ('{"prompt": "a", "answer": Infinity}', "FILE, line 2: answer should be text, got inf."),
        (
            {"prompt": 7, "answer": "b"},
            "FILE, line 2: prompt should be a string or a list of chat messages, got 7.",
        ),
        (
            {"prompt": ["hi"], "answer": "b"},
            'FILE, line 2: a chat message is {"role": ..., "content": ...}, got \'hi\'.',
        ),
        (
            {"prompt": [{"role": "user"}], "answer": "b"},
            "FILE, line 2: a chat message is {\"role\": ..., \"content\": ...}, got {'role': 'user'}.",
        ),
        (
            {"prompt": [{"role": "user", "content": 3}], "answer": "b"},
            "FILE, line 2: content should be text, got 3.",
        ),
        ({"prompt": "a", "answer": "b", "id": [1]}, "FILE, line 2: id should be text, got [1]."),
        (
            {"prompt": "a", "answer": "b", "solution": 3},
            "FILE, line 2: solution should be text, got 3.",
        ),
        (
            '{"prompt": "\\ud800", "answer": "b"}',
            "FILE, line 2: prompt is not valid Unicode (a lone surrogate).",
        ),
    ],
)
def test_malformed_rows_are_refused(write, row, sentence: str) -> None:
    assert refused(write(GOOD, row)) == sentence


def test_empty_files(write) -> None:
    assert refused(write("")) == refused(write("\n \n")) == "FILE holds no problems."
    assert refused(write("[]", name="e.json")) == "FILE holds no problems."


def test_judges_by_the_matcher_and_the_options(write) -> None:
    path = write({"prompt": "1+1?", "answer": "2"})
    boxed, last = text_task(path, options={"answer": "boxed"}), text_task(path)
    (prompt,) = prompts(last)
    assert (
        last.judge(prompt, "It is \\boxed{2}.") == boxed.judge(prompt, "It is \\boxed{2}.") == 1.0
    )
    assert last.judge(prompt, "It is 2.") == 1.0 and boxed.judge(prompt, "It is 2.") == 0.0
    assert last.final("so \\boxed{2.0}") == last.final("#### 2") != ""


def test_bad_options(write) -> None:
    path = write(GOOD)
    assert (
        refused(path, options={"matchr": "x"})
        == 'Task text has no option "matchr"; did you mean "matcher"?'
    )
    assert 'did you mean "math"?' in refused(path, options={"matcher": "maht"})
    assert (
        refused(path, options={"matcher": 3})
        == "Task text: matcher = 3 is wrong: it should be a string."
    )


def test_options_are_looked_at_before_the_data(tmp_path) -> None:
    assert "matchr" in refused(str(tmp_path / "none.jsonl"), options={"matchr": "x"})


def test_an_evaluation_takes_its_own_split(tmp_path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"prompt": split, "answer": "1"}))
    assert TextTask(Eval(path=str(tmp_path))).prompts("eval", 0).problems == ["test"]
    assert TextTask(Data(path=str(tmp_path))).prompts("train", 0).problems == ["train"]


def test_lists_and_structs_reach_the_judge(write) -> None:
    tests = [{"input": [1, 2], "output": "3"}, {"input": [], "output": ""}]
    row = {
        "prompt": "?",
        "reward_model": {"ground_truth": {"target": 24, "numbers": [4, 6, 1]}},
        "tests": tests,
    }
    other = {
        "prompt": "!",
        "reward_model": {"ground_truth": {"target": 5, "numbers": []}},
        "tests": None,
    }
    for name in ("s.parquet", "s.jsonl"):
        task = text_task(write(row, other, name=name), columns={"answer": ""})
        first, second = prompts(task)
        assert first.meta == {
            "reward_model.ground_truth.target": 24,
            "reward_model.ground_truth.numbers": [4, 6, 1],
            "tests": tests,
        }
        assert second.meta == {
            "reward_model.ground_truth.target": 5,
            "reward_model.ground_truth.numbers": [],
        }
        assert task.notes == () and task.not_kept == ()


def test_what_a_prompt_carries_is_bounded_and_noted(write) -> None:
    """40,004 bytes of JSON fit once into 65,536, not twice."""
    big = ["a" * 40_000]
    rows = [
        {**GOOD, "one": [1], "two": big, "three": big},
        {**GOOD, "one": ["x" * 70_000], "two": [2], "three": [3]},
    ]
    path = write(*rows)
    task = text_task(path)
    first, second = prompts(task)
    assert first.meta == {"one": [1], "two": big} and second.meta == {"two": [2], "three": [3]}
    assert task.notes == (
        f"{path}: these cells are left out of prompt.meta, since they are no JSON or take a prompt beyond 65,536 "
        "bytes: 1 of one, 1 of three.",
    )
    dated = write(
        {**GOOD, "when": [datetime.date(2026, 1, 2)], "long": "x" * 101}, name="d.parquet"
    )
    assert prompts(text_task(dated))[0].meta == {} and "1 of when" in text_task(dated).notes[0]
    assert text_task(dated).not_kept == ("long",)


def test_a_grid_is_one_answer(write) -> None:
    grid = [[0, 1], [1, 0]]
    for name in ("g.parquet", "g.jsonl"):
        task = text_task(write({"prompt": "?", "answer": grid}, name=name))
        (prompt,) = prompts(task)
        assert prompt.answer == "[[0, 1], [1, 0]]"
        assert [
            task.judge(prompt, f"\\boxed{{{said}}}") for said in ("[[0,1],[1,0]]", "[[1,0],[0,1]]")
        ] == [1.0, 0.0]


# ---- where the data is


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WHET_DATA", raising=False)


def put(folder, *names: str) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    for name in names:
        (folder / name).write_text(json.dumps({"prompt": name, "answer": "1"}) + "\n")


def found(entry, folder="data") -> str:
    return open_data(entry, str(folder))[0].column("prompt")[0]


def not_found(entry, folder="") -> str:
    with pytest.raises(WhetError) as error:
        open_data(entry, str(folder))
    return str(error.value)


def test_short_names_in_a_folder(tmp_path) -> None:
    put(
        tmp_path / "data",
        "train_gsm8k.jsonl",
        "eval_gsm8k.jsonl",
        "train_math7500.jsonl",
        "math5000_test.jsonl",
    )
    put(
        tmp_path / "data",
        "eval_amc2023.jsonl",
        "eval_amc23_40.jsonl",
        "eval_aime2024.jsonl",
        "deepscaler.jsonl",
    )
    assert found(Data(path="gsm8k")) == "train_gsm8k.jsonl"
    assert (
        found(Eval(path="gsm8k")) == found(Data(path="gsm8k", split="test")) == "eval_gsm8k.jsonl"
    )
    assert found(Eval(path="gsm8k", split="train")) == "train_gsm8k.jsonl"
    assert (
        found(Data(path="math")) == "train_math7500.jsonl"
        and found(Eval(path="math")) == "math5000_test.jsonl"
    )
    assert found(Eval(path="amc23")) == "eval_amc23_40.jsonl", "the 40 problems before the 83"
    assert found(Data(path="aime24")) == "eval_aime2024.jsonl", "the only split there is"
    assert found(Eval(path="deepscaler")) == "deepscaler.jsonl"


def test_a_folder_of_a_short_name(tmp_path) -> None:
    put(tmp_path / "data" / "gsm8k", "train.jsonl", "test.jsonl")
    assert found(Data(path="gsm8k")) == "train.jsonl" and found(Eval(path="gsm8k")) == "test.jsonl"


def test_the_folder_may_come_from_the_environment(tmp_path, monkeypatch) -> None:
    put(tmp_path / "here", "eval_math500.jsonl")
    put(tmp_path / "there", "test_math500.jsonl")
    monkeypatch.setenv("WHET_DATA", str(tmp_path / "there"))
    assert found(Eval(path="math500"), "") == "test_math500.jsonl"
    assert found(Eval(path="math500"), tmp_path / "here") == "eval_math500.jsonl"


def test_neither_a_folder_nor_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    sentence = not_found(Data(path="gsm8k"))
    assert sentence == (
        "gsm8k: data_folder (or $WHET_DATA) names no folder with train_gsm8k.parquet (or .jsonl), and from the hub: "
        'Fetching openai/gsm8k from the hub needs the package datasets: pip install "whet[data]".'
    )
    (tmp_path / "data").mkdir()
    sentence = not_found(Eval(path="gsm8k"), tmp_path / "data")
    assert (
        f"{tmp_path / 'data'} holds no" in sentence
        and "test_gsm8k.parquet" in sentence
        and "whet[data]" in sentence
    )
    assert not_found(Data(path="gsm8k"), tmp_path / "no").startswith(
        f"There is no data folder at {tmp_path / 'no'}"
    )


def test_a_network_that_is_not_there(monkeypatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    sentence = not_found(Data(path="gsm8k"))
    assert (
        "openai/gsm8k could not be fetched" in sentence
        and "$WHET_DATA" in sentence
        and "\n" not in sentence
    )
    assert not_found(Data(path="some/where")).startswith("some/where could not be fetched")


def test_wrong_names(tmp_path) -> None:
    assert 'no file or short name "gsm8"' in not_found(
        Data(path="gsm8")
    ) and 'mean "gsm8k"?' in not_found(Data(path="gsm8"))
    assert not_found(Data(path="x/y.jsonl")) == "There is no data file at x/y.jsonl."
    assert not_found(Data(path="./x")) == "There is no data file at x."
    nowhere = str(tmp_path / "x" / "y")
    assert not_found(Data(path=nowhere)) == f"There is no data file at {nowhere}."
    assert (
        not_found(Data(path="math500", split="train")) == "math500 has no split train; it has test."
    )
    assert not_found(Data(path="")).startswith("Task text needs data.path")


def test_a_folder_beside_a_short_name(tmp_path) -> None:
    """Short names win; a folder of that name is written ./math."""
    put(tmp_path / "math", "mine.jsonl")
    put(tmp_path / "data", "train_math.jsonl")
    assert (
        found(Data(path="math")) == "train_math.jsonl"
        and found(Data(path="./math")) == "mine.jsonl"
    )


def test_the_table_of_names() -> None:
    assert set(NAMES) == {
        "gsm8k",
        "math",
        "math500",
        "aime24",
        "aime25",
        "amc23",
        "minerva",
        "olympiad",
        "dapo17k",
        "deepscaler",
    }
    for known in NAMES.values():
        assert known.hub.count("/") == 1 and known.stems and set(known.splits) <= {"train", "test"}
