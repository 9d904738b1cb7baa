import json

import numpy as np
import pytest

from whet.errors import WhetError
from whet.tasks.file import TextTask

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


@pytest.fixture
def write(tmp_path):
    def write(*rows, name: str = "p.jsonl") -> str:
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return write


def refused(path: str, **options) -> str:
    with pytest.raises(WhetError) as error:
        TextTask(path, **options)
    return str(error.value).replace(path, "FILE") if path else str(error.value)


def test_reads_problems(write) -> None:
    path = write(
        {"prompt": "1+1?", "answer": "2", "id": "a", "level": 1, "source": "s", "other": [1]},
        "",
        {"prompt": CHAT, "answer": 2, "id": 7},
        {"prompt": "Größe?", "answer": 2.5, "level": None},
        "  ",
    )
    task = TextTask(path)
    first, second, third = task.prompts("train", 0)
    assert (first.id, first.text, first.answer, first.meta) == ("a", "1+1?", "2", {"level": 1, "source": "s"})
    assert (second.id, second.messages, second.answer, second.text) == ("7", tuple(CHAT), "2", "")
    assert (third.text, third.answer, third.meta, len(third.id)) == ("Größe?", "2.5", {}, 16)
    assert list(task.prompts("eval", 1)) == [first, second, third] and task.alphabet == "" and first.task == "text"


def test_judges_by_matching(write) -> None:
    task = TextTask(write({"prompt": "1+1?", "answer": "2"}))
    prompt = task.prompts("train", 0).at(0)
    assert task.judge(prompt, "It is \\boxed{2}.") == 1.0 and task.judge(prompt, "It is 3.") == 0.0


def test_a_byte_order_mark_is_no_problem(tmp_path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a", "answer": "b"}\r\n')
    assert len(TextTask(str(path)).prompts("train", 0)) == 1


def test_solutions_all_once_before_again(write) -> None:
    rows = [{"prompt": f"{i}?", "answer": str(i), "solution": f"is {i}"} for i in range(5)]
    task = TextTask(write(*rows, {"prompt": "6?", "answer": "6"}))
    pairs = task.solutions(np.random.default_rng(0), 10)
    assert all(solution == f"is {prompt.answer}" for prompt, solution in pairs)
    assert {p.answer for p, _ in pairs[:5]} == {p.answer for p, _ in pairs[5:]} == set("01234")
    assert pairs == task.solutions(np.random.default_rng(0), 10) != task.solutions(np.random.default_rng(1), 10)
    assert task.solutions(np.random.default_rng(0), 0) == [] and len(task.solutions(np.random.default_rng(0), 3)) == 3


def test_no_solutions(write) -> None:
    task = TextTask(write({"prompt": "a", "answer": "b"}))
    with pytest.raises(WhetError, match="has no `solution` column, which a warm start imitates"):
        task.solutions(np.random.default_rng(0), 3)
    with pytest.raises(WhetError, match='The worked solutions of task text has no option "direct"; it takes none'):
        task.solutions(np.random.default_rng(0), 3, direct=0.5)


def test_given_rows() -> None:
    task = TextTask(rows=enumerate([{"prompt": "a", "answer": "b"}], 1))
    assert task.prompts("train", 0).at(0).answer == "b"
    with pytest.raises(WhetError, match='The given data, line 2 has no "answer"; it has prompt'):
        TextTask(rows=enumerate([{"prompt": "a", "answer": "b"}, {"prompt": "a"}], 1))


GOOD = {"prompt": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            '{"prompt": "a", ',
            "FILE, line 2 is not JSON: Expecting property name enclosed in double quotes at column 17.",
        ),
        ("[1, 2]", 'FILE, line 2 is no JSON object; it should read {"prompt": ..., "answer": ...}.'),
        ({"problem": "a", "answer": "b"}, 'FILE, line 2 has no "prompt"; it has problem, answer.'),
        ({"prompt": "a"}, 'FILE, line 2 has no "answer"; it has prompt.'),
        ({}, 'FILE, line 2 has no "prompt"; it has nothing.'),
        ({"prompt": "a", "answer": None}, "FILE, line 2: answer should be text, got None."),
        ({"prompt": "a", "answer": True}, "FILE, line 2: answer should be text, got True."),
        ({"prompt": "a", "answer": [2]}, "FILE, line 2: answer should be text, got [2]."),
        ({"prompt": "a", "answer": " "}, "FILE, line 2: answer should be text, got ' '."),
        ('{"prompt": "a", "answer": NaN}', "FILE, line 2: answer should be text, got nan."),
        ({"prompt": "", "answer": "b"}, "FILE, line 2: prompt should be text, got ''."),
        ({"prompt": 7, "answer": "b"}, "FILE, line 2: prompt should be a string or a list of chat messages, got 7."),
        ({"prompt": [], "answer": "b"}, "FILE, line 2: prompt should be a string or a list of chat messages, got []."),
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
        ({"prompt": "a", "answer": "b", "solution": 3}, "FILE, line 2: solution should be text, got 3."),
        ('{"prompt": "\\ud800", "answer": "b"}', "FILE, line 2: prompt is not valid Unicode (a lone surrogate)."),
    ],
)
def test_bad_rows(write, row, sentence: str) -> None:
    assert refused(write(GOOD, row)) == sentence


def test_absurd_json(write) -> None:
    assert refused(write(GOOD, "[" * 200_000)).startswith("FILE, line 2 cannot be read: ")
    assert refused(write(GOOD, '{"answer": ' + "9" * 5000 + "}")).startswith("FILE, line 2 cannot be read: ")


def test_bad_files(write, tmp_path) -> None:
    assert refused(str(tmp_path / "none.jsonl")) == "There is no data file at FILE."
    assert refused(str(tmp_path)) == "The data file FILE cannot be read: Is a directory."
    assert refused("") == 'Task text needs data.path, a JSONL file with "prompt" and "answer".'
    assert refused(write("")) == refused(write("\n \n")) == "FILE holds no problems."
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "a", "answer": "b"}\n\xff\xfe\n')
    assert refused(str(tmp_path / "bytes.jsonl")).startswith("FILE is not UTF-8 text")


def test_duplicate_ids(write) -> None:
    path = write({**GOOD, "id": 1}, "", {**GOOD, "id": 2}, {**GOOD, "id": "1"})
    assert refused(path) == 'FILE has the id "1" twice, in lines 1 and 4; ids must differ.'


def test_bad_options(write) -> None:
    path = write(GOOD)
    assert refused(path, matchr="match") == 'Task text has no option "matchr"; did you mean "matcher"?'
    assert refused(path, matcher="mtach") == 'Task text knows no matcher "mtach"; did you mean "match"?'
    assert refused(path, matcher=3) == "Task text: matcher = 3 is wrong: it should be a string."
