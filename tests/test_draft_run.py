"""Training with speculation is training without it: the same rewards and losses, step by step."""

from pathlib import Path
from typing import Any

import pytest
from small_run import Silent, even_digits, small_config

from whet.api import run_recipe

STEPS = 30
COMPARED = ("reward/mean", "learn/loss", "learn/grad_norm", "length/mean", "tokens_generated", "learn/entropy")


def rows(folder: Path, judge: Any, *sets: str) -> list[dict[str, float]]:
    watcher = Silent()
    run_recipe(small_config(f"steps={STEPS}", *sets), folder, watcher=watcher, reward=judge)
    return watcher.rows


@pytest.mark.parametrize("extra", [(), ('rollout.mode="stream"',)], ids=["barrier", "stream"])
def test_thirty_steps_are_the_same(tmp_path: Path, extra: tuple[str, ...]) -> None:
    plain = rows(tmp_path / "plain", even_digits, *extra)
    drafted = rows(tmp_path / "drafted", even_digits, 'draft.drafters=["ngram", "suffix"]', *extra)
    assert len(plain) == len(drafted) == STEPS + 1
    for a, b in zip(plain, drafted, strict=True):
        for name in COMPARED:
            assert a.get(name) == pytest.approx(b.get(name), rel=1e-4, abs=1e-6) if name in a else name not in b
    saved = [row.get("draft/saved", 0.0) for row in drafted]
    assert sum(saved) > 0, "some drafts were accepted"
