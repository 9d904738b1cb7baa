from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from whet.errors import WhetError
from whet.report.view import read_excerpt, shorten, view_run


def rollout(
    step: int, name: str, index: int, verdict: str, response: str, **more: Any
) -> dict[str, Any]:
    where = {
        "step": step,
        "prompt_id": name,
        "group_id": 7,
        "index": index,
        "phase": "train",
        "version": step,
    }
    what = {
        "prompt": f"text of {name}",
        "response": response,
        "answer": "42",
        "length": 12,
        "finish": "stop",
    }
    return {**where, **what, "verdict": verdict, "reward": float(verdict == "right"), **more}


def shown(folder: Path, **wishes: Any) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    view_run(folder, console=console, **wishes)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def run(save_run: Callable[..., Path]) -> Path:
    return save_run(
        "run",
        [{"step": 0}],
        [
            rollout(1, "old", 0, "wrong", "first try"),
            rollout(2, "a", 0, "right", "it is 42", length=23),
            rollout(2, "b", 0, "wrong", "no idea", finish="length"),
            rollout(2, "a", 1, "wrong", "it is 41", phase="screen"),
            rollout(2, "b", 1, "unjudged", "", reward=None),
        ],
    )


def test_rollouts_stand_under_their_prompt_newest_step_first(run: Path) -> None:
    text = shown(run)
    order = [
        "step 2  a  1 of 2 right",
        "text of a",
        "it is 41",
        "it is 42",
        "step 2  b  0 of 2 right",
        "no idea",
    ]
    order += ["(nothing)", "step 1  old"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "✓ right    reward 1.00  23 tokens  version 2  stop  train" in text
    assert "? unjudged reward –" in text and "length  train" in text


def test_one_rollout_of_each_prompt_comes_before_a_second_one(
    save_run: Callable[..., Path],
) -> None:
    rows = [rollout(1, name, i, "right", f"{name} is right") for name in "ab" for i in range(3)]
    rows += [rollout(1, "c", i, "wrong" if i == 2 else "right", f"c{i}") for i in range(3)]
    # the same prompt a second time
    rows += [rollout(1, "a", i, "wrong", "again", group_id=8) for i in range(3)]
    folder = save_run("run", [{"step": 0}], rows)
    text = shown(folder, limit=3)
    assert text.index("c2") < text.index("again") < text.index("b is right")
    assert text.count("reward") == 3 and "a is right" not in text
    assert shown(folder, limit=4).count("again") == 2, "then wrong ones again"
    assert shown(folder).count("reward") == 12


def test_training_is_shown_before_evaluation(save_run: Callable[..., Path]) -> None:
    rows = [
        rollout(4, "e", 0, "right", "evaluated", phase="eval"),
        rollout(4, "t", 0, "wrong", "trained on"),
    ]
    out = shown(save_run("run", [{"step": 0}], rows))
    assert out.index("trained on") < out.index("evaluated")


def test_wishes_narrow_what_is_shown_but_not_the_count_of_the_group(run: Path) -> None:
    assert "1 of 2 right, 1 shown" in shown(run, verdict="right")
    text = shown(run, verdict="right")
    assert "it is 42" in text and "it is 41" not in text and "no idea" not in text
    assert "it is 41" in shown(run, phase="screen") and "it is 42" not in shown(run, phase="screen")
    assert "first try" in shown(run, step=1) and "it is" not in shown(run, step=1)
    assert shown(run, limit=3).count("reward") == 3


def test_wishes_nothing_fits_are_answered_in_a_sentence(
    run: Path, save_run: Callable[..., Path]
) -> None:
    for wishes, words in (
        ({"step": 9}, "no rollouts of step 9; it has 2 steps from 1 to 2"),
        ({"verdict": "good"}, "no verdict"),
        ({"phase": "eval"}, "fits phase eval"),
    ):
        with pytest.raises(WhetError, match=words):
            shown(run, **wishes)
    with pytest.raises(WhetError, match="holds no rollouts"):
        shown(save_run("bare", [{"step": 0}]))


def test_hostile_text_does_nothing(save_run: Callable[..., Path]) -> None:
    text = "[red]markup[/red] [link=x] \x1b[2J\x1b]0;title\x07 \u202eabc \x9b31m \r over :smile: \ud800"
    hostile = {"prompt_id": text, "prompt": text, "answer": text, "finish": text, "phase": text}
    out = shown(save_run("run", [{"step": 0}], [rollout(1, "p", 0, "right", text, **hostile)]))
    assert not set(out) & set("\x1b\x07\u202e\x9b\r")
    assert (
        "[red]markup[/red] [link=x]" in out
        and ":smile:" in out
        and r"\x1b[2J" in out
        and r"\ud800" in out
    )
    out.encode()


def test_a_long_line_is_shortened(save_run: Callable[..., Path]) -> None:
    out = shown(
        save_run("run", [{"step": 0}], [rollout(1, "p", 0, "right", "y" * 100_000 + "end")])
    )
    assert len(out) < 5000 and "characters left out" in out and "yend" in out


def test_what_the_judge_failed_with_is_shown(save_run: Callable[..., Path]) -> None:
    rows = [
        rollout(
            1,
            "a",
            0,
            "unjudged",
            "it is 42",
            reward=None,
            note="failed with KeyError: \x1b[2J'nums'",
        )
    ]
    assert "the judge failed with KeyError: \\x1b[2J'nums'" in shown(
        save_run("run", [{"step": 0}], rows)
    )


def test_shorten_keeps_both_ends() -> None:
    text = "<begin>" + "x" * 100_000 + "<end>"
    short = shorten(text, 1000)
    assert short.startswith("<begin>") and short.endswith("<end>")
    assert "99,012 characters left out" in short and len(short) < 1100
    assert shorten(short, 2000) == short


def test_rows_of_any_shape_are_read() -> None:
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2?"}]
    excerpt = read_excerpt(
        {"prompt": chat, "first_version": 3, "last_version": 5, "verdict": "odd", "reward": None}
    )
    assert excerpt["prompt"] == "system: Think.\nuser: 2+2?"
    assert (excerpt["version"], excerpt["verdict"], excerpt["reward"]) == ("3–5", "unjudged", None)
    assert read_excerpt({"version": 4})["version"] == "4"


def test_a_short_run_and_a_run_without_rollouts(save_run: Callable[..., Path]) -> None:
    rollout = {"step": 0, "prompt_id": "a", "verdict": "right", "prompt": "1+1=", "response": "2"}
    one = save_run("one", [{"step": 0}], [rollout])
    assert "step 0  a  1 of 1 right" in shown(one)
    with pytest.raises(WhetError, match="none holds no rollouts"):
        shown(save_run("none", [{"step": 0}]))


def test_evaluation_files_count_and_unfinished_ones_do_not(save_run: Callable[..., Path]) -> None:
    folder = save_run("run", [{"step": 0}])
    for name in (
        "eval_00000004.jsonl",
        "step_00000012.jsonl",
        ".whet-tmp-step_00000013.jsonl",
        "notes.jsonl",
    ):
        (folder / "rollouts" / name).write_text("")
    with pytest.raises(WhetError, match="no rollouts of step 13; it has 2 steps from 4 to 12"):
        shown(folder, step=13)
