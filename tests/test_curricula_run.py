"""Every curriculum in whole runs of a tiny model: all estimators, barrier and stream, stopped and resumed."""

import sys
from pathlib import Path

import pytest
from small_run import Silent, Stop, assert_same_run, even_digits, small_config

from whet import api
from whet.curriculum.build import CURRICULA
from whet.errors import WhetError
from whet.resolve import check_run
from whet.run import read_metrics, read_rollouts

COMMON = (
    "curriculum.rollouts=6",
    "curriculum.speed.n_init=2",
    "curriculum.starvation=partial",
    "steps=4",
)
STAGES = "curriculum.stages=[{subset='short', max_tokens=8, steps=2, kl_coef=0.01}, {subset='all', rollouts=5}]"


def run(
    folder: Path, *sets: str, watcher: Silent | None = None, resume: bool = False
) -> list[dict[str, float]]:
    settings = small_config(*COMMON, *sets)
    api.run_recipe(settings, folder, watcher=watcher or Silent(), reward=even_digits, resume=resume)
    return read_metrics(folder)


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["barrier", "stream"])
@pytest.mark.parametrize("name", CURRICULA)
def test_runs_from_its_name_alone(tmp_path: Path, name: str, mode: str) -> None:
    rows = run(
        tmp_path / "run", f"curriculum.name={name}", f"rollout.mode={mode}", "curriculum.max_age=1"
    )
    assert rows[-1]["step"] == 4 and rows[-1]["learn/tokens"] >= 0
    assert sum(row.get("learn/grad_norm", 0.0) for row in rows) > 0, "something was learnt from"


@pytest.mark.wide
@pytest.mark.parametrize("estimator", ["rloo", "grpo", "dapo", "reinforce_pp"])
@pytest.mark.parametrize("name", ["uniform", "speed", "cures", "stages"])
def test_with_every_estimator(tmp_path: Path, name: str, estimator: str) -> None:
    rows = run(
        tmp_path / "run", f"curriculum.name={name}", f"learn.estimator={estimator}", "steps=2"
    )
    assert rows[-1]["step"] == 2


@pytest.mark.wide
@pytest.mark.parametrize("name", ["speed", "cures", "scalingrl", "all"])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, name: str) -> None:
    sets = (
        f"curriculum.name={name}",
        "curriculum.max_age=1",
        "rollout.mode=stream",
        STAGES,
        "save.every=1",
    )
    # a run that keeps what is cached is not resumed to the digit
    sets += ("rollout.on_update=recompute",)
    run(tmp_path / "whole", *sets)
    run(tmp_path / "parts", *sets, watcher=Stop(1))
    run(tmp_path / "parts", *sets, watcher=Stop(3), resume=True)
    run(tmp_path / "parts", *sets, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.wide
@pytest.mark.parametrize("name", ["cures", "all"])
def test_divided_by_gradients_and_resumed(tmp_path: Path, name: str) -> None:
    """The learner's scores reach the curriculum, change what it asks, and survive a stop."""
    sets = (f"curriculum.name={name}", "curriculum.cures.sigma=gradient", "save.every=1", "steps=6")
    sets += (
        "curriculum.rollouts=8",
        "data.0.options={train_count=12}",
        "curriculum.scalingrl.share=1.0",
    )
    whole = run(tmp_path / "whole", *sets)
    run(tmp_path / "parts", *sets, watcher=Stop(2))
    run(tmp_path / "parts", *sets, watcher=Stop(4), resume=True)
    run(tmp_path / "parts", *sets, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    last = whole[-1]
    assert last["curriculum/score_right"] > 0 and last["curriculum/score_wrong"] > 0
    assert max(row.get("curriculum/rollouts_moved", 0.0) for row in whole) > 0.01
    assert (
        "curriculum/score_right"
        not in run(tmp_path / "rate", f"curriculum.name={name}", "steps=1")[-1]
    )


def test_stages_set_limits_sizes_and_coefficients(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", STAGES, "save.rollouts=1000")
    assert [row["curriculum/stage"] for row in rows[1:]] == [0, 1, 1, 1]
    lengths = {step: [] for step in range(1, 5)}
    for rollout in read_rollouts(tmp_path / "run"):
        if rollout["phase"] == "train":
            lengths[rollout["step"]].append(rollout["length"])
    assert max(lengths[1] + lengths[2]) <= 8 < max(lengths[3] + lengths[4])
    assert [len(lengths[step]) for step in (1, 2, 3, 4)] == [18, 18, 15, 15]
    assert "learn/kl" in rows[1] and "learn/kl" not in rows[4]


OWN = """
from whet.curriculum.gate import Gate

class Band(Gate):
    def admit(self, group):
        return "keep" if 0.2 <= group.pass_rate <= 0.8 else "drop"
"""


def test_a_curriculum_of_ones_own_trains_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_band.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)  # found in the current directory, as a judge is
    monkeypatch.setattr(sys, "path", [*sys.path])
    sets = ('curriculum.name="own_band:Band"', "save.every=1", "steps=2")
    assert any(
        "(own_band:Band)" in line for line in check_run(small_config(*sets), even_digits).describe()
    )
    whole = run(tmp_path / "whole", *sets)
    assert whole[-1]["curriculum/trained"] > 0 and whole[-1]["curriculum/rejected_hard"] >= 0
    run(tmp_path / "parts", *sets, watcher=Stop(1))
    run(tmp_path / "parts", *sets, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    with pytest.raises(WhetError, match='own_band has no class "Bond"'):
        run(tmp_path / "none", 'curriculum.name="own_band:Bond"')
