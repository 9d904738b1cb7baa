"""Whole runs by several processes. Starting one takes seconds, so that runs without a fault share their processes: each
run begins anew in them, with its own settings, model and group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import Silent, even_digits, small_config, timeless

from whet import api
from whet.cluster import crew
from whet.cluster.crew import Crew, Hand
from whet.run import read_metrics

CPU = ("model.device=cpu", "model.dtype=float64", "judge.workers=1")
COUNTED = ("steps", "batch_mean", "prefill_tokens", "preempted", "occupied")  # by how rollouts share a forward


class Pool:
    """Processes that go from run to run."""

    def __init__(self) -> None:
        self.hands: dict[int, Hand] = {}

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start, pool = Crew._start, self

        def start_or_take(self: Crew, number: int) -> Hand:
            if number not in pool.hands:
                pool.hands[number] = start(self, number)
            hand = pool.hands[number]
            hand.replies.clear()
            return hand

        def leave(self: Crew) -> None:
            for hand in self.hands:
                if hand.lost:
                    pool.hands.pop(hand.number, None)
            self._closing.detach()

        monkeypatch.setattr(Crew, "_start", start_or_take)
        monkeypatch.setattr(Crew, "close", leave)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    kept = Pool()
    yield kept
    for hand in kept.hands.values():
        hand.stop()


@pytest.fixture
def pooled(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.patch(monkeypatch)


def run(folder: Path, *sets: str, gpus: int = 1, resume: bool = False, silent: Silent | None = None) -> Silent:
    silent = silent or Silent()
    given: dict[str, Any] = {"watcher": silent, "reward": even_digits, "resume": resume, "gpus": gpus}
    api.run_recipe(small_config(*CPU, *sets), folder, **given)
    return silent


def comparable(folder: Path) -> list[dict[str, Any]]:
    def shared(name: str) -> bool:  # how drafts are chosen is a matter of the clock
        return not name.startswith("draft/") and name.removeprefix("rollout/") not in COUNTED

    return [{name: row[name] for name in row if shared(name)} for row in timeless(read_metrics(folder))]


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    newest = max((folder / "checkpoints").glob("step_*"))
    (path,) = newest.glob("*model.safetensors")
    return {name: tensor.double().numpy() for name, tensor in load_file(path).items()}


def written(folder: Path) -> dict[str, list[Any]]:
    files = sorted((folder / "rollouts").iterdir())
    rows = {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in files}
    for row in (row for found in rows.values() for row in found):
        del row["drafted"], row["accepted"]
    return rows


def assert_like(one: Path, other: Path, close: float = 1e-8, counters: bool = True) -> None:
    """The same tokens and verdicts, and numbers that differ by rounding alone. counters: those of the engine, too."""
    mine, theirs = comparable(one), comparable(other)
    assert [row["step"] for row in mine] == [row["step"] for row in theirs] and len(mine) > 1
    for row, same in zip(mine, theirs, strict=True):
        assert row.keys() == same.keys()
        for name in row:
            if counters or not name.startswith(("rollout/", "judge/")):
                np.testing.assert_allclose(same[name], row[name], rtol=close, atol=close, err_msg=name)
    assert written(one) == written(other), "tokens, exactly"
    weights = weights_of(other)
    for name, tensor in weights_of(one).items():
        np.testing.assert_allclose(weights[name], tensor, rtol=close, atol=close, err_msg=name)


__all__ = ["Pool", "assert_like", "crew", "pool", "pooled", "run"]
