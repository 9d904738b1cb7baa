"""Workers of a Ray cluster that train the drafter while they wait: no token changes, not even where they are killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fleet_run import assert_like, run
from ray_run import MARKS, SPLIT, TEN, cluster, on_question, strike_down, whole  # noqa: F401 (fixtures)
from test_spot import EAGLE, newest, updates

from whet.draft.eagle import FOLDER

pytestmark = [*MARKS, pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def test_two_workers_of_a_cluster_train_a_drafter(tmp_path: Path, whole: Path) -> None:  # noqa: F811
    said = run(tmp_path / "ray", *TEN, *SPLIT, *EAGLE)
    assert_like(whole, tmp_path / "ray", counters=False)
    assert all(0 < row["draft/used_seconds"] <= row["draft/idle_seconds"] for row in said.rows[1:])
    assert (
        all(row["draft/tokens_trained"] > 0 for row in said.rows[1:])
        and updates(tmp_path / "ray") > 10
    )
    assert (newest(tmp_path / "ray") / FOLDER / "model.safetensors").exists()


def test_workers_killed_while_they_wait_and_train_change_no_token(
    tmp_path: Path,
    whole: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learner trains, so workers have nothing to write."""
    known: list[Any] = []
    struck: list[int] = []

    def seen(asked: Any, name: str) -> None:
        from whet.cluster.workers import Workers

        known.extend([asked] if isinstance(asked, Workers) and not known else [])
        if name == "step" and known and len(struck) < 2:
            struck.append(known[0].hands[len(struck)].dialled.pid)
            strike_down(struck[-1], signal.SIGKILL)

    on_question(monkeypatch, seen)
    said = run(tmp_path / "ray", *TEN, *SPLIT, *EAGLE)
    assert_like(whole, tmp_path / "ray", counters=False)
    assert sum("started again" in text for text in said.messages) == len(struck) == 2
    assert os.getpid() not in struck and said.rows[-1]["draft/tokens_trained"] > 0
