from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from whet.report.arms import read_arms
from whet.report.view import pick_excerpts, read_excerpt, rollout_steps, shorten


def test_shorten_keeps_both_ends() -> None:
    text = "<begin>" + "x" * 100_000 + "<end>"
    short = shorten(text, 1000)
    assert short.startswith("<begin>") and short.endswith("<end>")
    assert "99,012 characters left out" in short and len(short) < 1100
    assert shorten(short, 2000) == short


def test_rows_of_any_shape_are_read() -> None:
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2?"}]
    excerpt = read_excerpt({"prompt": chat, "first_version": 3, "last_version": 5, "verdict": "odd", "reward": None})
    assert excerpt.prompt == "system: Think.\nuser: 2+2?"
    assert (excerpt.version, excerpt.verdict, excerpt.reward) == ("3–5", "unjudged", None)
    assert read_excerpt({"version": 4}).version == "4"


def test_excerpts_are_spread_over_arms_time_and_verdicts(make_run: Callable[..., Path]) -> None:
    arms = read_arms([make_run("uniform"), make_run("speed", seed=1)])
    excerpts = pick_excerpts(arms, 20)
    assert len(excerpts) == 20 and excerpts == pick_excerpts(arms, 20)
    spread = Counter((s.arm, s.step > 2, s.verdict) for s in excerpts)
    assert len(spread) == 8 and set(spread.values()) == {2, 3}
    assert [s.step > 2 for s in excerpts] == sorted(s.step > 2 for s in excerpts)


def test_a_short_run_and_a_run_without_rollouts(save_run: Callable[..., Path]) -> None:
    rollout = {"step": 0, "prompt_id": "a", "verdict": "right", "prompt": "1+1=", "response": "2"}
    one = save_run("one", [{"step": 0}], [rollout])
    assert rollout_steps(one) == [0]
    assert [s.response for s in pick_excerpts(read_arms([one]))] == ["2"]
    none = save_run("none", [{"step": 0}])
    assert rollout_steps(none) == [] and pick_excerpts(read_arms([none])) == []


def test_evaluation_files_count_and_unfinished_ones_do_not(save_run: Callable[..., Path]) -> None:
    folder = save_run("run", [{"step": 0}])
    for name in ("eval_00000004.jsonl", "step_00000012.jsonl", ".whet-tmp-step_00000013.jsonl", "notes.jsonl"):
        (folder / "rollouts" / name).write_text("")
    assert rollout_steps(folder) == [4, 12]
