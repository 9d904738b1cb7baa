import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.errors import WhetError
from whet.tasks.base import PromptTable, problem_hash, problem_key
from whet.types import Prompt

CHAT = ({"role": "user", "content": "1+1?"},)


def test_makes_prompts_on_demand() -> None:
    table = PromptTable(
        ["1+1=", CHAT], ["2", "3"], "text", ids=["a", "b"], meta={"level": [1, None]}
    )
    assert table["a"] == Prompt(id="a", text="1+1=", answer="2", task="text", meta={"level": 1})
    assert table["b"] == Prompt(id="b", messages=CHAT, answer="3", task="text", meta={})
    assert (
        list(table.ids) == ["a", "b"]
        and len(table) == 2
        and list(table) == [table["a"], table["b"]]
    )
    assert "a" in table and "c" not in table and 7 not in table
    with pytest.raises(KeyError):
        table["c"]


def test_a_task_per_row() -> None:
    table = PromptTable(["x", "x"], ["y", "y"], ["text", "chain"])
    assert [prompt.task for prompt in table] == ["text", "chain"]
    assert table.ids[0].partition("#")[0] != table.ids[1], "the task is part of the hash"


def test_the_hash_is_pinned() -> None:
    """printf "4:4:text1+1=2" | b2sum -l 64. Ids in checkpoints must mean the same in every later version."""
    assert problem_hash("text", "1+1=", "2") == "bafb3cac9aa23531"
    assert problem_hash("text:my:judge", "1+1=", "2") == "bafb3cac9aa23531"


def test_repeats_are_numbered() -> None:
    table = PromptTable(["a", "b", "a", "a", "b"], ["1"] * 5, "text")
    a, b = table.ids[:2]
    assert list(table.ids) == [a, b, f"{a}#1", f"{a}#2", f"{b}#1"]
    assert len(a) == 16 and int(a, 16) >= 0


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=20), st.randoms())
def test_ids_do_not_depend_on_the_row(problems: list[str], random) -> None:
    shuffled = random.sample(problems, len(problems))
    first, second = (
        PromptTable(texts, ["1"] * len(texts), "text") for texts in (problems, shuffled)
    )
    assert {i: first[i].text for i in first.ids} == {i: second[i].text for i in second.ids}


def test_rows_without_an_id_are_hashed() -> None:
    table = PromptTable(["a", "b"], ["1", "2"], "text", ids=["mine", None])
    assert list(table.ids) == ["mine", problem_hash("text", "b", "2")]


def test_ids_kept_from_an_earlier_hash() -> None:
    h = problem_hash("text", "a", "1")
    table = PromptTable(["a"] * 4, ["1"] * 4, "text", ids=[h, f"{h}#1", None, None])
    assert list(table.ids) == [h, f"{h}#1", f"{h}#2", f"{h}#3"]


def test_a_mark_tells_a_changed_problem_or_answer_whatever_the_id() -> None:
    def marks(*rows: tuple[object, str]) -> list[int]:
        problems, answers = zip(*rows, strict=True)
        return (
            PromptTable(problems, answers, "text", ids=[f"row {i}" for i in range(len(rows))])
            .marks()
            .tolist()
        )

    other = ({"role": "system", "content": "1+1?"},)
    told = marks(
        ("1+1=", "2"),
        ("1+1=", "3"),
        ("1+2=", "2"),
        (CHAT, "2"),
        (other, "2"),
        ("1+1", "=2"),
        ("\ud800", ""),
    )
    assert len(set(told)) == 7
    assert marks(("1+1=", "2"), ((*CHAT,), "2")) == [told[0], told[3]]
    assert PromptTable(["1+1="], ["2"], "text:my:judge").marks()[0] == told[0], (
        "another judge changes no problem"
    )


def test_duplicate_ids_name_both_places() -> None:
    with pytest.raises(
        WhetError,
        match=r'^p.jsonl has the id "x" twice, in line 3 and line 9; ids must differ: mend',
    ):
        lines = [3, 5, 9]
        PromptTable(
            "abc",
            "123",
            "text",
            ids=["x", "y", "x"],
            origin="p.jsonl",
            place=lambda i: f"line {lines[i]}",
        )
    with pytest.raises(WhetError, match="in row 1 and row 3"):
        PromptTable("abc", "123", "text", ids=["x", "y", "x"])


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("What is $1+1$?", "what is 1 + 1", True),
        (r"Find \(x_{1}\).", "Find $x_1$", True),
        ("Don't.", "don’t", True),
        ("1.5", "15", False),
        ("1, 23", "12, 3", False),
        ("3+5=", "3-5=", False),
        ("(1+2)*3", "1+2*3", False),
        ("x^2", "x2", False),
    ],
)
def test_what_is_the_same_problem(first: str, second: str, same: bool) -> None:
    assert (problem_key(first) == problem_key(second)) == same


def test_empty_data_is_refused() -> None:
    with pytest.raises(WhetError, match=r"^p.jsonl holds no problems\.$"):
        PromptTable([], [], "text", origin="p.jsonl")
    assert len(PromptTable.concat([])) == 0


def test_concat() -> None:
    first = PromptTable(["a", "a"], ["1", "1"], "text", meta={"level": [1, 2]})
    second = PromptTable(["a", "b"], ["1", "2"], "text", meta={"source": ["s", "t"]})
    third = PromptTable(["c"], ["3"], "chain", ids=["mine"])
    table = PromptTable.concat([first, second, third])
    a, b = problem_hash("text", "a", "1"), problem_hash("text", "b", "2")
    assert list(table.ids) == [a, f"{a}#1", f"{a}#2", b, "mine"]
    assert [p.meta for p in table] == [
        {"level": 1},
        {"level": 2},
        {"source": "s"},
        {"source": "t"},
        {},
    ]
    assert [p.task for p in table] == ["text"] * 4 + ["chain"]
    assert table["mine"] == third["mine"]
    assert PromptTable.concat([first]) is first


def test_concat_equals_one_table() -> None:
    """A problem has the same ids whether its repeats come from one file or from two."""
    problems = ["a", "b", "a", "a", "b"]
    whole = PromptTable(problems, ["1"] * 5, "text")
    parts = PromptTable.concat(
        [PromptTable(part, ["1"] * len(part), "text") for part in (problems[:2], problems[2:])]
    )
    assert list(whole.ids) == list(parts.ids)


def test_concat_refuses_an_id_of_two_entries() -> None:
    tables = [
        PromptTable(["a", "b"], ["1", "2"], "text", ids=ids) for ids in (["x", "y"], ["z", "x"])
    ]
    with pytest.raises(
        WhetError, match='The recipe has the id "x" twice, in data entry 0 and data entry 1'
    ):
        PromptTable.concat(tables)


def test_select_keeps_ids() -> None:
    table = PromptTable(["a", "b", "a"], ["1", "2", "1"], "text", meta={"level": [1, 2, 3]})
    part = table.select([2, 1])
    assert list(part) == [table.at(2), table.at(1)] and part[table.ids[2]] == table.at(2)
    assert table.ids[0] not in part


def test_a_hundred_thousand_rows() -> None:
    n = 100_000
    table = PromptTable([f"{i}=" for i in range(n)], ["0"] * n, "text", meta={"level": range(n)})
    assert (
        len(table) == n
        and table[table.ids[77_777]].text == "77777="
        and table.at(5).meta == {"level": 5}
    )
