"""What a run will cost: hand-computed numbers, and the measured ones it must come back to."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from measured_dims import QWEN25_15B, SMOLLM2_135M

from whet import estimate as budget
from whet.config import RolloutSettings
from whet.estimate import (
    MEASURED,
    Imitation,
    Machine,
    Workload,
    cost,
    decode_steps,
    estimate_lines,
    forward_seconds,
    gpu_of,
    stage_steps,
    step_seconds,
)

H200 = Machine(name="NVIDIA H200", gpu=MEASURED)
CPU = Machine(name="a CPU, 2 threads", threads=2)
WORK = Workload(
    steps=100,
    prompts=64,
    generated=512,
    trained=512,
    prompt=100,
    response=128,
    limit=256,
    rollout=RolloutSettings(slots=512),
    passes=3,
)


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SHAPES = {"1.5b": QWEN25_15B, "135m": SMOLLM2_135M}


def test_measured_decode_steps_come_out() -> None:
    """One factor for all batches, contexts and both shapes: in the median it is right, and nowhere off by a third."""
    stored = json.loads((RESULTS / "rollout_gpu.json").read_text())["shapes"]
    off = [
        cell["peers"]["whet"]["ms_a_step"]["median"]
        / (1000 * step_seconds(dims, cell["batch"], cell["context"], H200, graphs=True))
        for shape, dims in SHAPES.items()
        for cell in stored[shape]["cells"].values()
        if "ms_a_step" in cell["peers"]["whet"]
    ]
    assert len(off) >= 20 and min(off) > 0.75 and max(off) < 1.33
    assert statistics.median(off) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(("shape", "way"), [("1.5b", "whole"), ("135m", "graphed")])
def test_measured_updates_come_out(shape: str, way: str) -> None:
    stored = json.loads((RESULTS / f"learner_{shape}_16384.json").read_text())
    update = 3 * forward_seconds(SHAPES[shape], stored["tokens"], H200)
    assert update == pytest.approx(stored["summary"][way]["step_ms"] / 1000, rel=0.03)


def test_plain_calls_are_bound_by_the_host() -> None:
    assert step_seconds(SMOLLM2_135M, 512, 192, H200, graphs=False) == 30 * budget.PLAIN_LAYER


def test_cost_of_a_step_by_hand_on_a_cpu() -> None:
    """Barrier with all rollouts in their slots: the limit in steps, half of the slots busy on average."""
    n, rate = SMOLLM2_135M.weights, 2 * budget.CPU_RATE
    generate, train = cost(WORK, SMOLLM2_135M, CPU)
    assert generate == pytest.approx(
        256 * (30 * budget.CPU_LAYER + 2 * n * 256 / rate) + 2 * n * 6400 / rate
    )
    assert train == pytest.approx(6 * n * 512 * 228 / rate)


def test_longer_responses_and_a_slower_gpu_take_longer() -> None:
    generate, train = cost(WORK, QWEN25_15B, H200)
    assert (
        cost(replace(WORK, rollout=RolloutSettings(slots=512, mode="stream")), QWEN25_15B, H200)[0]
        < generate
    )
    assert cost(replace(WORK, limit=1024), QWEN25_15B, H200)[0] > generate
    assert cost(replace(WORK, passes=4), QWEN25_15B, H200)[1] == pytest.approx(train * 4 / 3)
    a100 = gpu_of("NVIDIA A100-SXM4-80GB")
    assert a100 is not None
    assert cost(WORK, QWEN25_15B, Machine(name="A100", gpu=a100))[1] == pytest.approx(
        train * 989 / 312
    )


def test_gpus_by_their_names() -> None:
    assert gpu_of("NVIDIA H200") == MEASURED
    pcie, sxm = gpu_of("NVIDIA H100 PCIe"), gpu_of("NVIDIA H100 80GB HBM3")
    assert pcie is not None and sxm is not None and pcie.bandwidth < sxm.bandwidth
    assert gpu_of("NVIDIA GeForce GTX 1080") is None
    l40s, l4 = gpu_of("NVIDIA L40S"), gpu_of("NVIDIA L4")
    assert l40s is not None and l4 is not None and l40s.bandwidth > l4.bandwidth


def test_more_rollouts_than_slots_take_turns() -> None:
    assert decode_steps(1024, 100, 100, 64, stream=False) == 1600
    assert decode_steps(10, 50, 200, 64, stream=False) == 200, "the longest decides"


def test_stage_steps_add_up() -> None:
    for total, limits in ((100, [0]), (100, [30, 0, 0]), (7, [10, 10, 0]), (0, [0, 5])):
        assert sum(stage_steps(total, limits)) == total


def test_lines() -> None:
    lines = estimate_lines([WORK], SMOLLM2_135M, H200, known=False)
    assert lines[0].startswith(
        "512 rollouts of 128 tokens (half of the limit) are 65,536 tokens per step; "
    )
    assert "generate" in lines[0] and "train" in lines[0]
    assert lines[1].startswith("100 steps on NVIDIA H200: ")
    staged = estimate_lines(
        [WORK, replace(WORK, steps=50, limit=512, response=256)], SMOLLM2_135M, H200, known=True
    )
    assert (
        len(staged) == 3
        and staged[1].startswith("stage 2, 50 steps: ")
        and "150 steps" in staged[2]
    )
    assert estimate_lines([WORK], SMOLLM2_135M, Machine(name="a new GPU"), known=True) == [
        "512 rollouts of 128 tokens (as in that run) are 65,536 tokens per step",
        "no estimate of the time, since whet does not know how fast a new GPU is",
    ]


def test_the_warm_start_is_part_of_the_plan() -> None:
    """Forward and backward of its solutions, with their prompts, by hand on a CPU."""
    entries = [
        Imitation(updates=200, batch=32, tokens=50),
        Imitation(updates=1, batch=8, tokens=20),
    ]
    operations = 3 * 2 * SMOLLM2_135M.weights * (200 * 32 * 50 + 8 * 20)
    seconds = sum(entry.seconds(SMOLLM2_135M, CPU) for entry in entries)
    assert seconds == pytest.approx(operations / (2 * budget.CPU_RATE))
    lines = estimate_lines([WORK], SMOLLM2_135M, CPU, known=False, imitations=entries)
    alone = estimate_lines([WORK], SMOLLM2_135M, CPU, known=False)
    assert lines[0].startswith("warm start: 200 updates of 32 worked solutions of 50 tokens: ")
    assert lines[1].startswith("warm start: 1 update of 8 worked solutions of 20 tokens: ")
    assert lines[2] == alone[0]
    generate, train = cost(WORK, SMOLLM2_135M, CPU)
    in_all = f", with the warm start {budget._time(seconds + 100 * (generate + train))}, without evaluation"
    assert lines[3] == alone[1].replace(", without evaluation", in_all)
    unknown = estimate_lines(
        [WORK], SMOLLM2_135M, Machine(name="a new GPU"), known=True, imitations=entries
    )
    assert unknown[0] == "warm start: 200 updates of 32 worked solutions of 50 tokens"


def test_a_surplus_of_rollouts_is_explained() -> None:
    wasteful = replace(WORK, generated=1024)
    line, _ = estimate_lines([wasteful], SMOLLM2_135M, H200, known=False)
    assert "1,024 rollouts of 128 tokens" in line
    assert ", of which 512 train: 50% of the prompts are taken to have no signal; " in line
    assert "no signal" not in estimate_lines([WORK], SMOLLM2_135M, H200, known=False)[0]


def test_one_is_not_plural() -> None:
    one = estimate_lines([replace(WORK, steps=1), WORK], SMOLLM2_135M, H200, known=False)
    assert one[0].startswith("stage 1, 1 step: ") and one[2].startswith("101 steps on ")
