"""Rollouts on demand: the index equals plain parsing, searches find what they should, selections keep groups whole."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import chain_rollouts

from whet.errors import WhetError
from whet.report import rollouts as module
from whet.report.rollouts import FIELDS, Bookmark, RolloutShelf, index_lines, to_json

Save = Callable[..., Path]
WORDS = st.text(st.characters(codec=None, exclude_categories=()), max_size=12) | st.sampled_from(
    ['"verdict": "right"', '\\", "phase": "x', '}\n{"prompt_id": ', "\\", '"', "\ud83d", "null"]
)
VALUES = WORDS | st.integers(0, 10**6) | st.none()


@given(
    st.lists(
        st.fixed_dictionaries({"response": WORDS}, optional=dict.fromkeys(FIELDS, VALUES)),
        max_size=4,
    )
)
def test_the_index_reads_what_parsing_reads(rows: list[dict[str, Any]]) -> None:
    for separators in ((", ", ": "), (",", ":")):
        data = (
            "".join(json.dumps(row, separators=separators) + "\n" for row in rows).encode()
            + b'{"torn": '
        )
        found = index_lines(data)
        assert [json.loads(data[line.start : line.end]) for line in found] == rows
        for line, row in zip(found, rows, strict=True):
            assert line[2:] == tuple(
                "" if row.get(name) is None else str(row[name]) for name in FIELDS
            )


@given(
    st.recursive(
        WORDS | st.floats() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner),
    )
)
def test_json_is_strict_ascii_and_cannot_end_an_element(value: Any) -> None:
    text = to_json(value)
    assert text.isascii() and not set(text) & set("<>&")
    json.loads(text, parse_constant=lambda name: pytest.fail(name))


def whole(folder: Path, **question: Any) -> list[dict[str, Any]]:
    """All rows of a search, page by page."""
    shelf, rows, after = RolloutShelf(folder), list[dict[str, Any]](), None
    while True:
        answer = shelf.find(**{"filters": {}, "limit": 7, **question}, after=after)
        rows += answer["rows"]
        assert len(answer["rows"]) <= 7
        if answer["next"] is None:
            return rows
        after = Bookmark.read(answer["next"])


def test_one_rollout_of_each_prompt_a_wrong_one_if_there_is_one(save_run: Save) -> None:
    rows = [{**row, "phase": "train"} for row in chain_rollouts((1, 2), 3)]
    found = whole(save_run("run", [{"step": 0}], rows), each=True, limit=2)
    assert [(row["step"], row["prompt_id"]) for row in found] == list(
        dict.fromkeys(
            (step, row["prompt_id"]) for step in (2, 1) for row in rows if row["step"] == step
        )
    )
    for row in found:
        verdicts = {
            r["verdict"]
            for r in rows
            if (r["step"], r["prompt_id"]) == (row["step"], row["prompt_id"])
        }
        assert row["verdict"] == ("wrong" if "wrong" in verdicts else "right")
    assert {row["verdict"] for row in found} != {"right"}


@pytest.fixture
def run(save_run: Save) -> Path:
    rows = chain_rollouts((1, 2, 5), 0)
    for row in rows:
        row["level"] = row["group_id"]
    rows[3]["response"] = 'It\'s "Straße" </script> \\ ÉCLAT'
    folder = save_run("run", [{"step": 5}], rows)
    evals = [{**row, "phase": "eval"} for row in rows if row["step"] == 5]
    (folder / "rollouts" / "eval_00000005.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in evals)
    )
    return folder


def test_filters_find_what_a_plain_reading_finds(run: Path) -> None:
    rows = whole(run)
    assert [row["step"] for row in rows] == [5] * 24 + [2] * 12 + [1] * 12
    assert [row["kind"] for row in rows[:24]] == ["step"] * 12 + ["eval"] * 12
    assert {
        "prompt",
        "response",
        "answer",
        "reward",
        "finish",
        "version",
        "note",
        "index",
        "level",
    } <= rows[0].keys()
    for field in ("verdict", "group_id", "level"):
        for value in {row[field] for row in rows}:
            assert whole(run, filters={field: value}) == [
                row for row in rows if row[field] == value
            ]
    assert (
        whole(run, filters={"prompt_id": "hain-1"})
        == [row for row in rows if "chain-1" in row["prompt_id"]]
        != []
    )
    assert whole(run, step=2) == rows[24:36] and whole(run, kind="eval") == rows[12:24]
    assert whole(run, filters={"verdict": "right", "phase": "eval"}, step=1) == []


@pytest.mark.parametrize(
    "text", ["straSSe", "Straße", '"', "</SCRIPT>", "\\", "ÉCLAT", "#12", "it's", "chain-"]
)
def test_a_search_ignores_the_case_of_ascii_letters_alone(run: Path, text: str) -> None:
    def lower(word: str) -> bytes:
        return word.encode().lower()

    texts = ("prompt", "response", "answer", "prompt_id")
    fitting = [row for row in whole(run) if any(lower(text) in lower(row[key]) for key in texts)]
    assert whole(run, text=text) == fitting and bool(fitting) == (text != "straSSe")


def test_a_long_search_stops_and_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ", 10)
    answer = RolloutShelf(run).find(filters={}, text="nowhere")
    assert answer["rows"] == [] and answer["next"] and answer["searched"] == 12
    assert whole(run, text="Straße") == [row for row in whole(run) if "Straße" in row["response"]]


def test_a_step_that_is_written_again_or_removed_is_read_again(run: Path) -> None:
    shelf = RolloutShelf(run)
    assert len(shelf.find(filters={}, step=2)["rows"]) == 12 and shelf.overview()["total"] == 48
    (run / "rollouts" / "step_00000002.jsonl").write_text('{"step": 2, "prompt_id": "new"}\n{"torn')
    (run / "rollouts" / "step_00000001.jsonl").unlink()
    assert [row["prompt_id"] for row in shelf.find(filters={}, step=2)["rows"]] == ["new"]
    assert shelf.overview() == {"total": 25, "steps": [2, 5], "rows": None}


def test_links_are_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"prompt_id": "secret"}\n')
    os.symlink(tmp_path / "secret", run / "rollouts" / "step_00000009.jsonl")
    assert RolloutShelf(run).overview()["steps"] == [1, 2, 5] and len(whole(run)) == 48
    (run / "rollouts").rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", run / "rollouts")
    assert RolloutShelf(run).overview()["steps"] == [] == whole(run)


@pytest.mark.parametrize(
    "text", ["", "x", "1.step", "1.step.-2", "1.STEP.3", "9" * 30 + ".step.1", "1.step.1\n"]
)
def test_an_odd_bookmark_is_refused(text: str) -> None:
    with pytest.raises(WhetError, match="no place to go on from"):
        Bookmark.read(text)


def test_a_selection_keeps_groups_whole_and_both_ends(save_run: Save) -> None:
    folder = save_run("run", [{"step": 50}], chain_rollouts(range(51), 1))
    shelf = RolloutShelf(folder)
    everything = shelf.select(10**7)
    assert len(everything) == 51 * 12 and [row["step"] for row in everything] == sorted(
        row["step"] for row in everything
    )
    some = shelf.select(30_000)
    assert len(to_json(some)) <= 31_000 and some == shelf.select(30_000)
    steps = sorted({row["step"] for row in some})
    assert steps[0] == 0 and steps[-1] == 50 and max(b - a for a, b in pairwise(steps)) < 10
    assert set(Counter((row["step"], row["group_id"]) for row in some).values()) == {4}
    assert {row["verdict"] for row in some} == {"right", "wrong"}
    assert shelf.select(10) == [] and RolloutShelf(save_run("none", [])).select(1000) == []
