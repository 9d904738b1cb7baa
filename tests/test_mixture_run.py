"""Data entries with curricula of their own in whole runs: barrier and stream, resumed, dry, refused."""

import tomllib
from pathlib import Path

import pytest
from small_run import Silent, Stop, assert_same_run, even_digits, small_config

from whet import api
from whet.assembly import check_run
from whet.config import Config
from whet.errors import WhetError
from whet.recipe import dump_config, load_config
from whet.run import read_metrics

SECOND = "data.1.options={train_count=30, mix={'1'=1.0}}"
MIXED = (
    SECOND,
    "data.1.weight=2",
    "data.1.curriculum={name='speed', speed={n_init=2}}",
    "curriculum.rollouts=6",
    "curriculum.starvation=partial",
    "curriculum.max_age=1",
    "held_out.size=0",
    "steps=4",
)


def run(folder: Path, *sets: str, watcher: Silent | None = None, resume: bool = False) -> list[dict[str, float]]:
    settings = small_config(*MIXED, *sets)
    api.run_recipe(settings, folder, watcher=watcher or Silent(), reward=even_digits, resume=resume)
    return read_metrics(folder)


@pytest.mark.parametrize("mode", ["barrier", "stream"])
def test_two_entries_train_by_their_shares(tmp_path: Path, mode: str) -> None:
    rows = run(tmp_path / "run", f"rollout.mode={mode}")
    last = rows[-1]
    assert last["curriculum/uniform/prompts"] == 60 and last["curriculum/speed/prompts"] == 30
    assert last["curriculum/uniform/given"] == last["curriculum/speed/given"] == 6  # 60 x 1 and 30 x 2 of 12
    assert last["curriculum/trained"] == last["curriculum/uniform/trained"] + last["curriculum/speed/trained"]
    assert last["curriculum/speed/screened"] > 0 and last["curriculum/uniform/rollouts"] >= 36
    assert all(row["curriculum/age_max"] <= 1 for row in rows[1:])
    assert sum(row.get("learn/grad_norm", 0.0) for row in rows) > 0


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["barrier", "stream"])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, mode: str) -> None:
    sets = (f"rollout.mode={mode}", "save.every=1", "data.0.curriculum={stages=[{max_tokens=8, steps=2}, {}]}")
    sets += ("rollout.on_update=recompute",)  # a run that keeps what is cached is not resumed to the digit
    run(tmp_path / "whole", *sets)
    run(tmp_path / "parts", *sets, watcher=Stop(1))
    run(tmp_path / "parts", *sets, watcher=Stop(3), resume=True)
    run(tmp_path / "parts", *sets, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert "curriculum/uniform/stage" in read_metrics(tmp_path / "whole")[-1]


def test_a_dry_run_says_what_each_portion_is() -> None:
    stages = "data.0.curriculum={stages=[{max_tokens=60, steps=2}, {}]}"
    checked = check_run(small_config(*MIXED, stages, "data.1.weight=0.2", "rollout.context=0"), even_digits)
    lines = checked.describe()
    assert "4 steps of 3 groups x 6 rollouts (uniform + speed), at most 216 tokens trained per step" in lines
    assert "portion uniform: 60 prompts of data.0, 90.9% of the groups (2.7 per step), 6 rollouts each" in lines
    assert "  stage 1: all prompts, 6 rollouts of at most 60 tokens" in lines
    assert "portion speed: 30 prompts of data.1, 9.1% of the groups (one every 3.7 steps), 6 rollouts each" in lines
    assert checked.settings.rollout.context > 60, "the longest stage of any portion has room"


def test_the_recipe_reads_back_the_same() -> None:
    settings = small_config(*MIXED)
    assert settings.data[1].curriculum == {"name": "speed", "speed": {"n_init": 2}}
    assert load_config(base=tomllib.loads(dump_config(settings))) == settings


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ("{nmae='speed'}", r'^In data\.1: There is no setting "curriculum\.nmae"; did you mean "curriculum\.name"\?$'),
        ("{speed={n_int=4}}", r'^In data\.1: There is no setting "curriculum\.speed\.n_int"; did you mean'),
        ("{name='speed', speed={low=0.8, high=0.2}}", r"^In data\.1: curriculum: speed\.low = 0\.8 must be below"),
        ("{name='speed', speed={n_init=6}}", r"^In data\.1: curriculum: speed\.n_init = 6 leaves none to continue"),
        ("{rollouts='many'}", r"^In data\.1: curriculum\.rollouts = 'many' is wrong"),
        ("{stages=[{max_tokens=400}]}", r"^In data\.1: curriculum\.stages\.0\.max_tokens = 400 leaves no room"),
        ("{stages=[{subset='shrt'}]}", r"^In data\.1: curriculum\.stages\.0\.subset = 'shrt' is wrong"),
    ],
)
def test_bad_settings_are_one_sentence_that_names_the_entry(own: str, sentence: str) -> None:
    with pytest.raises(WhetError, match=sentence):
        small_config("curriculum.rollouts=6", SECOND, f"data.1.curriculum={own}")


def test_names_and_subsets_are_checked_before_anything_runs() -> None:
    def checked(own: str) -> Config:
        return check_run(
            small_config("curriculum.rollouts=6", SECOND, f"data.1.curriculum={own}"), even_digits
        ).settings

    with pytest.raises(WhetError, match='There is no curriculum "sped"; did you mean "speed"'):
        checked("{name='sped'}")
    with pytest.raises(WhetError, match="would never end"):
        checked("{stages=[{}, {}]}")
    with pytest.raises(WhetError, match=r"data\.1\.curriculum\.groups is of the whole run"):
        checked("{groups=7}")


def test_other_data_at_resume_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", watcher=Stop(2))
    with pytest.raises(WhetError, match="other portions of data"):
        run(tmp_path / "run", "data.1.options={train_count=31, mix={'1'=1.0}}", resume=True)
