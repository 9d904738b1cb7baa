"""A run that stopped goes on from TRL's checkpoint: the same prompts and the same losses."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("trl")

from test_trl_ranks import started  # noqa: E402
from trl_parts import prompts, trainer  # noqa: E402
from trl_ranks import run  # noqa: E402

from whet.adapters.trl import GRPOTrainer, StockGRPO  # noqa: E402
from whet.errors import WhetError  # noqa: E402

STAGES = [{"max_tokens": 3, "steps": 3}, {"max_tokens": 6}]
STAGED = {"name": "speed", "speed": {"n_init": 2}, "max_age": 1, "stages": STAGES}


def plan_of(kind: str = "grpo", **args: Any) -> dict[str, Any]:
    """Five updates, a checkpoint after each second one; the first stage ends after the third."""
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, **args}
    return {"kind": kind, "curriculum": STAGED, "args": settings}


def compare(whole: Any, again: Any) -> None:
    """The last three updates of a run that was not interrupted, and those of one that went on after the second."""
    (one, before), (other, after) = whole, again
    assert after["batches"] == before["batches"][2:]
    np.testing.assert_allclose(after["loss"][-3:], before["loss"][2:], atol=1e-6)
    assert after["rollouts"][-3:] == before["rollouts"][2:]
    for here, there in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(here, there, atol=1e-6, rtol=1e-6)
    longest = after["completions/max_length"][-3:]
    assert longest[0] == 3 and longest[1] > 3  # the stage went on, and ended after its third update


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """SIGKILL in the middle of the fourth round; another process goes on from the checkpoint, found by TRL itself."""
    done = started(tmp_path / "killed", {**plan_of(), "kill": 3})
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert [path.name for path in (tmp_path / "killed").glob("checkpoint-*")] == ["checkpoint-2"]
    compare(
        run(tmp_path / "whole", plan_of()), run(tmp_path / "killed", {**plan_of(), "resume": True})
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_resume_from_another_folder_trains_the_same(kind: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", plan_of(kind))
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "elsewhere" / "checkpoint-2")
    assert {"whet.json", "whet.npz"} <= {path.name for path in moved.iterdir()}
    compare(whole, run(tmp_path / "again", {**plan_of(kind), "resume": str(moved)}))


def test_a_save_within_a_round_waits_for_its_end(tmp_path: Path) -> None:
    """Two updates from every generation: saves due after updates 1, 3 and 5 are written after 2, 4 and 5, the last."""
    run(tmp_path, plan_of(save_steps=1, num_iterations=2))
    saved = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert saved == [2, 4, 5]


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    args = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer(StockGRPO, tmp_path / "stock", args=args).train()
    plain = str(tmp_path / "stock" / "checkpoint-1")
    with pytest.raises(
        WhetError, match=r"whet\.json is missing; a checkpoint of stock TRL has no curriculum"
    ):
        trainer(GRPOTrainer, tmp_path / "a", curriculum="uniform").train(
            resume_from_checkpoint=plain
        )
    trainer(GRPOTrainer, tmp_path / "ours", curriculum="uniform", args=args).train()
    ours = str(tmp_path / "ours" / "checkpoint-1")
    with pytest.raises(WhetError, match="for other prompts or another curriculum"):
        trainer(GRPOTrainer, tmp_path / "b", curriculum="uniform", data=prompts(40)).train(
            resume_from_checkpoint=ours
        )
