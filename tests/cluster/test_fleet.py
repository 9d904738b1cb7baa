"""Several processes train as one does: the same tokens, the same metrics, the same weights."""

from pathlib import Path

import pytest
from fleet_run import assert_like, pool, pooled, run  # noqa: F401 (fixtures)
from small_run import Stop, model_folder

from whet.learn.losses import ESTIMATORS

pytestmark = pytest.mark.filterwarnings("ignore:larger groups weigh more")
WARM = ("warm_start.steps=3", "warm_start.batch=5")
CASES = {
    "uniform, warm start": WARM,
    "speed": ("curriculum.name=speed", "curriculum.speed.n_init=2"),
    "kl, two updates": ("learn.kl_coef=0.1", "learn.updates=2"),
    "minibatches, gradient scores": ("learn.minibatches=2", "curriculum.name=cures", "curriculum.cures.sigma=gradient"),
    "lookup drafts": ("draft.drafters=['ngram']",),
    "small pool of pages": ("rollout.slots=3", "rollout.page=8", "rollout.pages=12"),
}


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(tmp_path: Path, case: str) -> None:
    run(tmp_path / "one", *CASES[case])
    run(tmp_path / "two", *CASES[case], gpus=2)
    assert_like(tmp_path / "one", tmp_path / "two")


@pytest.mark.wide
@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_by_every_estimator(tmp_path: Path, estimator: str) -> None:
    sets = (f"learn.estimator={estimator}", "steps=3")
    run(tmp_path / "one", *sets)
    run(tmp_path / "two", *sets, gpus=2)
    assert_like(tmp_path / "one", tmp_path / "two")


@pytest.mark.usefixtures("pooled")
def test_adapters_are_trained_together(tmp_path: Path) -> None:
    sets = (f"model.name={model_folder(tmp_path / 'base')}", "model.lora.rank=2", "learn.kl_coef=0.1", "steps=3")
    run(tmp_path / "one", *sets)
    run(tmp_path / "two", *sets, gpus=2)
    assert_like(tmp_path / "one", tmp_path / "two")


@pytest.mark.usefixtures("pooled")
def test_in_single_precision_they_differ_by_rounding(tmp_path: Path) -> None:
    run(tmp_path / "one", "model.dtype=float32")
    run(tmp_path / "two", "model.dtype=float32", gpus=2)
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


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_three_processes_train_as_one(tmp_path: Path) -> None:
    run(tmp_path / "one", *WARM)
    run(tmp_path / "three", *WARM, gpus=3)
    assert_like(tmp_path / "one", tmp_path / "three")
