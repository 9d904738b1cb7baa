"""Two processes over gloo play the curriculum that one process plays, and take the same steps."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("trl")

from trl_ranks import run  # noqa: E402

SCRIPT = Path(__file__).parent / "trl_ranks.py"
SPEED = {"name": "speed", "speed": {"n_init": 2}}
CURES = {"name": "cures", "cures": {"probe": 2}}


def started(folder: Path, plan: dict[str, Any], *launch: str) -> subprocess.CompletedProcess[str]:
    """The program to its end, in a process of its own or by a launcher."""
    paths = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parents[2])])
    own = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        *launch,
        str(SCRIPT),
        str(folder),
        json.dumps(plan),
        str(folder) + ".json",
    ]
    return subprocess.run(command, env=own, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "curriculum", "loss"),
    [
        ("grpo", SPEED, {"loss_type": "dapo"}),
        ("grpo", CURES, {"loss_type": "grpo"}),
        ("rloo", CURES, {}),
    ],
)
def test_two_processes_equal_one(kind: str, curriculum: Any, loss: Any, tmp_path: Path) -> None:
    plan = {"kind": kind, "curriculum": curriculum, "args": loss}
    _, one = run(tmp_path / "one", plan)
    plan["args"] = {**loss, "per_device_train_batch_size": 4}
    done = started(
        tmp_path / "two", plan, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "two.json").read_text())
    assert (one["world"], two["world"]) == (1, 2)
    assert [[list(group) for group in batch] for batch in one["batches"]] == two["batches"]
    assert one["rollouts"] == two["rollouts"] and len(one["loss"]) == 3
    np.testing.assert_allclose(one["loss"], two["loss"], atol=1e-6)
    np.testing.assert_allclose(one["reward"], two["reward"], atol=1e-6)
    assert abs(one["weights"] - two["weights"]) < 1e-9 * one["weights"]
    sizes = {size for batch in one["batches"] for _, size in batch}
    # groups of different sizes are divided among ranks too
    assert (len(sizes) > 1) == (curriculum is CURES)
