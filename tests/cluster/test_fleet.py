"""Several processes train as one does: the same tokens, the same metrics, the same weights."""

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from fleet_run import assert_like, pool, pooled, run, weights_of, written  # noqa: F401 (fixtures)
from safetensors.numpy import load_file
from small_run import Silent, Stop, model_folder

from whet.api import run_recipe
from whet.learn.losses import ESTIMATORS
from whet.recipe import load_config
from whet.run import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore:larger groups weigh more")
WARM = ("warm_start.steps=3", "warm_start.batch=5")
CASES = {
    "uniform, warm start": WARM,
    "speed": ("curriculum.name=speed", "curriculum.speed.n_init=2"),
    "minibatches, gradient scores": (
        "learn.minibatches=2",
        "curriculum.name=cures",
        "curriculum.cures.sigma=gradient",
    ),
    "lookup drafts": ("draft.drafters=['ngram']",),
    "small pool of pages": ("rollout.slots=3", "rollout.page=8", "rollout.pages=12"),
}


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(tmp_path: Path, case: str) -> None:
    run(tmp_path / "one", *CASES[case])
    run(tmp_path / "two", *CASES[case], gpus=2)
    assert_like(tmp_path / "one", tmp_path / "two")


TEN = ("steps=10", "save.every=10", "save.rollouts=1000", "eval.0.every=5")
GRID = {
    "all at once": ("learn.kl_coef=0.1", "learn.updates=2", *WARM),
    **{name: (f"learn.estimator={name}",) for name in ESTIMATORS},
    "kl": ("learn.kl_coef=0.1",),
    "two updates": ("learn.updates=2",),
    "adapters": ("model.lora.rank=2", "learn.kl_coef=0.1"),
}
QUICK = ("all at once", "adapters")


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in GRID]
)
def test_ten_updates_are_those_of_one_process(tmp_path: Path, case: str) -> None:
    """Under barrier, with whole and with divided masters and moments: tokens exactly, all numbers to 1e-8."""
    sets = (*TEN, *GRID[case])
    if case == "adapters":
        sets += (f"model.name={model_folder(tmp_path / 'base')}",)
    run(tmp_path / "one", *sets)
    assert len(read_metrics(tmp_path / "one")) == 11
    for shard in ("none", "optimizer"):
        run(tmp_path / shard, *sets, f"learn.shard={shard}", gpus=2)
        assert_like(tmp_path / "one", tmp_path / shard)


@pytest.mark.usefixtures("pooled")
def test_in_single_precision_they_differ_by_rounding(tmp_path: Path) -> None:
    run(tmp_path / "one", *TEN, "model.dtype=float32")
    run(tmp_path / "two", *TEN, "model.dtype=float32", gpus=2)
    assert_like(tmp_path / "one", tmp_path / "two", close=1e-5)


@pytest.mark.usefixtures("pooled")
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    sets = ("steps=6", "save.every=1", *WARM)
    run(tmp_path / "whole", *sets)
    folder = tmp_path / "parts"
    run(folder, *sets, gpus=2, silent=Stop(2))
    run(folder, *sets, resume=True, silent=Stop(4))
    run(folder, *sets, gpus=2, resume=True)
    assert_like(tmp_path / "whole", folder)


@pytest.mark.usefixtures("pooled")
def test_divided_masters_are_whole_in_every_checkpoint(tmp_path: Path) -> None:
    """In half precision, bit for bit: two processes with all masters and moments, and two that divide them and stop."""
    sets = ("model.dtype=bfloat16", "steps=4", "save.every=1", *WARM)
    run(tmp_path / "whole", *sets, gpus=2)
    folder, divided = tmp_path / "parts", "learn.shard=optimizer"
    run(folder, *sets, divided, gpus=2, silent=Stop(1))
    run(folder, *sets, gpus=2, resume=True, silent=Stop(2))
    run(folder, *sets, divided, gpus=2, resume=True, silent=Stop(3))
    run(folder, *sets, gpus=2, resume=True)
    assert_like(tmp_path / "whole", folder, close=0.0)
    states = [
        sorted((run / "checkpoints").glob("step_*"))[-1] / "state"
        for run in (tmp_path / "whole", folder)
    ]
    for kind in ("masters", "optimizer"):
        mine, theirs = (load_file(state / f"{kind}.safetensors") for state in states)
        assert mine.keys() == theirs.keys() and mine
        for name, tensor in mine.items():
            np.testing.assert_array_equal(theirs[name], tensor)


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_three_processes_train_as_one(tmp_path: Path) -> None:
    run(tmp_path / "one", *WARM)
    run(tmp_path / "three", *WARM, gpus=3)
    assert_like(tmp_path / "one", tmp_path / "three")


STREAM = ("rollout.mode=stream", "rollout.slots=6", "save.rollouts=1000")


@pytest.mark.usefixtures("pooled")
def test_a_stream_without_look_ahead_trains_what_barrier_trains(tmp_path: Path) -> None:
    run(tmp_path / "barrier")
    run(tmp_path / "stream", *STREAM, "curriculum.look_ahead=0", gpus=2)
    mine, theirs = weights_of(tmp_path / "barrier"), weights_of(tmp_path / "stream")
    for name, tensor in mine.items():
        np.testing.assert_allclose(theirs[name], tensor, rtol=1e-8, atol=1e-10)


def accounted(row: dict[str, Any]) -> dict[str, int]:
    """Every group that was asked, by what became of it."""
    places = (
        "trained",
        "ready",
        "open",
        "cut",
        "expired",
        "rejected_easy",
        "rejected_hard",
        "unjudged_groups",
    )
    of = {name: int(row[f"curriculum/{name}"]) for name in places if f"curriculum/{name}" in row}
    assert row["curriculum/asked"] == sum(of.values()), row
    return of


def account(folder: Path, steps: int) -> None:
    """Every group that was asked is trained, ready, open or was asked again; every token was counted once."""
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert accounted(rows[-1])["trained"] == 3 * steps
    judged = [
        row for name, found in written(folder).items() if name.startswith("step") for row in found
    ]
    keys = [(row["group_id"], row["index"]) for row in judged]
    assert len(set(keys)) == len(keys), "no rollout comes twice"
    assert rows[-1]["tokens_generated"] == sum(row["length"] for row in judged)


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("on_update", ["cut", "recompute", "keep"])
def test_a_stream_accounts_for_every_prompt(tmp_path: Path, on_update: str) -> None:
    run(
        tmp_path / "run",
        *STREAM,
        f"rollout.on_update={on_update}",
        "curriculum.max_age=2",
        "steps=8",
        gpus=2,
    )
    account(tmp_path / "run", 8)


@pytest.mark.usefixtures("pooled")
def test_a_stream_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    sets = (*STREAM, "rollout.on_update=recompute", "curriculum.max_age=2", "steps=6")
    run(tmp_path / "run", *sets, gpus=2, silent=Stop(2))
    run(tmp_path / "run", *sets, resume=True, silent=Stop(4))
    run(tmp_path / "run", *sets, resume=True, gpus=2)
    account(tmp_path / "run", 6)


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_a_stream_of_two_processes_learns_as_that_of_one(tmp_path: Path) -> None:
    """Chains of operations, from one warm start: in the steep part of the curve the accuracy lies within the spread of
    the seeds, and every group is accounted for."""

    def train(name: str, *sets: str, gpus: int = 1) -> list[float]:
        small = [
            "model.device=cpu",
            "eval.0.limit=200",
            "save.every=100",
            "judge.timeout_s=120",
            "judge.workers=1",
        ]
        run_recipe(
            load_config(Path("recipes/chain.toml"), [*small, *sets]),
            tmp_path / name,
            watcher=Silent(),
            gpus=gpus,
        )
        return [
            row[key]
            for row in read_metrics(tmp_path / name)
            if (key := "eval/held_out/accuracy") in row
        ]

    (begin,) = train("base", "steps=0", "warm_start.0.steps=800")
    base = max((tmp_path / "base" / "checkpoints").glob("step_*"))
    learnt: dict[int, list[float]] = {}
    for gpus in (1, 2):
        sets = [f'model.name="{base}"', "warm_start=[]", "steps=4", f"rollout.slots={128 // gpus}"]
        sets += ["rollout.mode=stream", "rollout.on_update=recompute", "curriculum.max_age=1"]
        learnt[gpus] = [
            train(f"{gpus}-{seed}", *sets, f"seed={seed}", gpus=gpus)[-1] for seed in range(3)
        ]
        for seed in range(3):
            accounted(read_metrics(tmp_path / f"{gpus}-{seed}")[-1])
    one, two = learnt[1], learnt[2]
    # of seeds, of 200 prompts
    noise = max(stdev(one), (fmean(one) * (1 - fmean(one)) / 200) ** 0.5)
    assert begin < 0.3 and abs(fmean(two) - fmean(one)) <= 3 * noise, (one, two)
    assert min(two) > 2 * begin
