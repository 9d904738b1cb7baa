"""Runs whose workers are Ray actors with a vLLM each: real Ray and real vLLM, on a CPU."""

import copy
import signal
from pathlib import Path

import pytest
from ray_run import MARKS, SPLIT, Reaper, cluster

from whet.rollout.vllm_fit import version_of_vllm

if version_of_vllm() is None:  # not importorskip: the import alone takes long
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from test_vllm_fleet import CLOSE, assert_all_decode, mismatch, run
from test_vllm_train import assert_learns_as_native
from vllm_parts import asked, change, drained, new_model, off, open_engine

from whet.run import read_metrics

pytestmark = [*MARKS, pytest.mark.usefixtures("cluster")]
__all__ = ["cluster"]


def test_both_workers_decode_what_the_learner_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = assert_all_decode(tmp_path / "run", monkeypatch, *SPLIT, gpus=1)
    assert any("2 actors that decode and 1 that learn" in line for line in said.messages)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_a_stream_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keyed noise the rollouts that it had begun are written anew, with other tokens; none is counted twice."""
    reaper = Reaper(monkeypatch, {30: (1, signal.SIGKILL)})
    said = run(
        tmp_path / "run", "rollout.mode=stream", "rollout.slots=6", "steps=6", *SPLIT, gpus=1
    )
    assert reaper.struck == 1 and any("it is started again" in line for line in said.messages)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(7)) and mismatch(tmp_path / "run") < CLOSE
    of = {
        name: int(rows[-1][f"curriculum/{name}"])
        for name in ("asked", "trained", "ready", "open", "cut", "expired")
    }
    assert of.pop("asked") == sum(of.values())


@pytest.mark.slow
def test_the_demo_task_is_learnt_as_by_the_native_engine(tmp_path: Path) -> None:
    assert_learns_as_native(tmp_path, *SPLIT, seeds=2, says="2 actors that decode and 1 that learn")


@pytest.mark.slow
def test_weights_that_are_divided_decode_what_the_learner_follows() -> None:
    """Tensor parallelism: vLLM's own processes, here two on a CPU, with half of the matrices each."""
    model = new_model()
    models = {0: copy.deepcopy(model)}
    with open_engine(model, cards=2, mode="barrier") as engine:
        assert len(engine.others) == 1
        engine.submit([asked(group) for group in range(4)])
        assert off(drained(engine), models) < CLOSE
        change(model)
        models[1] = copy.deepcopy(model)
        engine.update(1)
        engine.submit([asked(group) for group in range(4, 8)])
        rollouts = drained(engine)
        assert off(rollouts, models) < CLOSE and {
            rollout.first_version for rollout in rollouts
        } == {1}
