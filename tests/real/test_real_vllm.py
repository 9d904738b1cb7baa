"""vLLM as the engine of a real model, and the accuracy of whet's own engine beside vLLM's."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_parts import ask, gaps, model_of, own_gaps, plain, plan_of, run

pytest.importorskip("vllm", reason="needs vLLM: docs/vllm.md")

from whet.rollout.vllm import VllmEngine

pytestmark = pytest.mark.filterwarnings("ignore")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
GSM8K = "WHET_GSM8K"
LIMIT = 512
POINT = 0.01


@contextmanager
def vllm_of(plan: Any, model: Any) -> Iterator[VllmEngine]:
    rollout = plan.settings.rollout
    sizes = {"slots": rollout.slots, "context": rollout.context, "mode": "stream"}
    engine = VllmEngine(model, encode=plan.encoded, decode=plan.codec.decode, seed=7, **sizes)
    try:
        yield engine
    finally:
        engine.close()


@DEVICES
def test_vllm_draws_from_the_model(folder: Path, device: str, figures: Callable[..., None]) -> None:
    plan, model = plan_of(folder, device), model_of(folder, device)
    with vllm_of(plan, model) as engine:
        done = run(engine, [*ask(plan, 8, n=2), *ask(plan, 4, first=50, temperature=0.0)])
    found = gaps(plain(folder, device), plan, done)
    figures(tokens=found.size, gap_mean=found.mean(), gap_max=found.max())
    assert found.size > 300
    assert all(rollout.finish in ("stop", "length") for rollout in done)
    if plan.settings.model.dtype == "float32":
        assert found.max() < 1e-3
        return
    own = own_gaps(folder, device, plan, done)
    figures(own_gap_mean=own.mean(), own_gap_max=own.max())
    assert found.mean() <= 1.5 * own.mean() + 1e-3


def verdicts(folder: Path, out: Path, engine: str, dtype: str) -> dict[str, bool]:
    """What `whet eval` says of each problem of GSM8K, greedily."""
    sets = [f'model.dtype="{dtype}"', f'rollout.engine="{engine}"', "rollout.slots=256"]
    flags = [word for setting in sets for word in ("--set", setting)]
    command = [sys.executable, "-m", "whet", "eval", str(folder), "--data", os.environ[GSM8K]]
    command += ["--max-tokens", str(LIMIT), "--out", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (out / "responses.jsonl").read_text().splitlines()
    found = {row["prompt_id"]: row["verdict"] == "right" for row in map(json.loads, lines)}
    assert len(found) == len(lines) > 100
    return found


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(
    not os.environ.get(GSM8K), reason=f"${GSM8K} names no file with the problems of GSM8K"
)
def test_gsm8k_greedy_is_within_a_point_of_vllm(
    folder: Path, device: str, dtype: str, tmp_path: Path, figures: Callable[..., None]
) -> None:
    """On the same prompts. In float32 both engines write the same texts but for ties. In bfloat16 either rounds in its
    own way and many texts part somewhere, so that there the difference may also be what chance makes of so many."""
    ours = verdicts(folder, tmp_path / "native", "native", dtype)
    theirs = verdicts(folder, tmp_path / "vllm", "vllm", dtype)
    assert ours.keys() == theirs.keys()
    apart = np.array([float(ours[name]) - float(theirs[name]) for name in ours])
    error = float(apart.std(ddof=1) / len(apart) ** 0.5)
    figures(
        prompts=len(apart),
        accuracy=np.mean(list(ours.values())),
        accuracy_vllm=np.mean(list(theirs.values())),
        unlike=np.mean(apart != 0),
        error=error,
    )
    assert abs(apart.mean()) <= (POINT if dtype == "float32" else max(POINT, 2.6 * error))
