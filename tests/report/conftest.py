"""Run folders as fixtures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import chain_rollouts, learning_rows, write_run

MakeRun = Callable[..., Path]


@pytest.fixture
def save_run(tmp_path: Path) -> MakeRun:
    """save_run(name, rows, rollouts, **settings): a folder with exactly these."""
    return lambda name, rows, rollouts=(), **settings: write_run(
        tmp_path / name, rows, rollouts, **settings
    )


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run(name, pace=..., seed=...): a run that learns."""

    def make(
        name: str,
        pace: float = 2.0,
        steps: int = 60,
        tokens: int = 16_000,
        signal: float = 0.3,
        seed: int = 0,
    ) -> Path:
        return write_run(
            tmp_path / name,
            learning_rows(pace, steps, tokens, signal, seed),
            chain_rollouts((0, 1, 2, steps - 1, steps), seed),
            seed=seed,
            steps=steps,
            curriculum={"groups": 16, "name": "uniform"}
            if "speed" not in name
            else {"groups": 8, "name": "speed"},
        )

    return make
