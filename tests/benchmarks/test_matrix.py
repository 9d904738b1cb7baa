import subprocess
import sys
from pathlib import Path

import pytest
from matrix import defining_settings, differing, inline, read_plan
from train import Places, planned

from whet.errors import WhetError
from whet.recipe import load_config

RECIPE = """
steps = 7
[[data]]
task = "chain"
[[eval]]
task = "chain"
[[warm_start]]
steps = 3
[learn]
lr = 1e-4
"""
ARMS = """
[[arm]]
name = "uniform"
[[arm]]
name = "speed"
seeds = [0]
seconds = 9
note = "screened"
set = { "curriculum.name" = "speed", "learn.lr" = 3e-4 }
"""


def write(folder: Path, text: str, recipe: str = RECIPE) -> Path:
    (folder / "recipe.toml").write_text(recipe)
    path = folder / "small.toml"
    path.write_text(text)
    return path


def test_a_matrix_is_its_cells_seed_by_seed(tmp_path: Path) -> None:
    head = 'recipe = "recipe.toml"\nseeds = [0, 5]\nseconds = 60\nset = { "learn.lr" = 2e-4, steps = 9 }\n'
    plan = read_plan(write(tmp_path, head + ARMS))
    assert [cell.name for cell in plan.cells] == ["uniform-seed0", "speed-seed0", "uniform-seed5"]
    assert [cell.seconds for cell in plan.cells] == [60, 9, 60]
    assert (plan.name, plan.baseline, plan.evaluation) == ("small", "uniform", "held_out")
    uniform, speed, other = (cell.settings for cell in plan.cells)
    assert (uniform.learn.lr, uniform.steps, uniform.seed, other.seed) == (2e-4, 9, 0, 5)
    assert (speed.curriculum.name, speed.learn.lr) == ("speed", 3e-4), (
        "an arm has the last word over the matrix"
    )


def test_the_command_line_chooses_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, 'recipe = "recipe.toml"\nseeds = [0, 5]\n' + ARMS)
    plan = read_plan(path, ["learn.lr=0.5", "steps=2"], arms=["speed", "uniform"], seeds=[5])
    assert [(cell.name, cell.settings.learn.lr) for cell in plan.cells] == [("uniform-seed5", 0.5)]
    assert load_config(base=plan.base).steps == 0, "the run that makes the start trains nothing"


def test_settings_may_be_nested_as_toml_nests_them(tmp_path: Path) -> None:
    arms = '[[arm]]\nname = "a"\nset = { curriculum.name = "dapo", curriculum.groups = 3 }\n'
    plan = read_plan(
        write(tmp_path, 'recipe = "recipe.toml"\nset = { "curriculum.rollouts" = 4 }\n' + arms)
    )
    found = plan.cells[0].settings.curriculum
    assert (found.name, found.groups, found.rollouts) == ("dapo", 3, 4)


def test_values_are_written_as_set_reads_them() -> None:
    stages = [{"subset": "short", "max_tokens": 128}, {"subset": "all"}]
    config = load_config(
        sets=[f"curriculum.stages={inline(stages)}", f"text.prompt_suffix={inline('– “so”')}"]
    )
    assert [stage.max_tokens for stage in config.curriculum.stages] == [128, 0]
    assert config.text.prompt_suffix == "– “so”"


BAD = {
    'seeds = [0]\n[[arm]]\nname = "a"\n': 'a matrix needs "recipe"',
    'recipe = "recipe.toml"\n': 'a matrix needs "arm"',
    'recipe = "recipe.toml"\nseed = [0]\n'
    + ARMS: 'there is no "seed" in a matrix; did you mean "seeds"',
    'recipe = "recipe.toml"\n[[arm]]\nname = "a"\nsets = {}\n': 'did you mean "set"',
    'recipe = "recipe.toml"\n[[arm]]\nname = "../a"\n': "arm.0.name: string should match",
    'recipe = "recipe.toml"\n[[arm]]\nname = "a"\n[[arm]]\nname = "a"\n': 'two arms are called "a"',
    'recipe = "recipe.toml"\nbaseline = "b"\n' + ARMS: 'baseline = "b" is no arm',
    'recipe = "recipe.toml"\nseeds = [1, 1]\n' + ARMS: r"seeds = \[1, 1\] should be different",
    'recipe = "nowhere.toml"\n' + ARMS: "There is no recipe at .*nowhere.toml",
    'recipe = "recipe.toml"\nset = { "learn.rate" = 1 }\n'
    + ARMS: 'arm "uniform": There is no setting "learn.rate"',
    'recipe = "recipe.toml"\nset = { "learn.lr" = -1 }\n' + ARMS: "learn.lr = -1 is wrong",
    'recipe = "recipe.toml"\nstart = { model = "m", adapter = "a" }\n'
    + ARMS: "a start is a model, or an adapter",
    'recipe = "recipe.toml"\nstart = { adapter = "a" }\n'
    + ARMS: 'no adapter in .*give it "model.lora.rank"',
    'recipe = "recipe.toml"\nstart = { set = { warm_start = [] } }\n'
    + ARMS: "a tiny model of their own seed",
    'recipe = "recipe.toml"\npool = { size = 5 }\n' + ARMS: "a pool is drawn from data with a path",
    "recipe = \n": "is not TOML",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_said_before_anything_runs(tmp_path: Path, text: str) -> None:
    with pytest.raises(WhetError, match=BAD[text]) as error:
        read_plan(write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_wrong_words_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, 'recipe = "recipe.toml"\n' + ARMS)
    with pytest.raises(WhetError, match='has no arm "sped"; did you mean "speed"'):
        read_plan(path, arms=["sped"])
    with pytest.raises(WhetError, match="has a seed among 7"):
        read_plan(path, seeds=[7])
    with pytest.raises(WhetError, match="There is no matrix at"):
        read_plan(tmp_path / "none.toml")


def test_a_stored_cell_is_known_by_its_settings_not_by_its_places(tmp_path: Path) -> None:
    (cell,) = read_plan(write(tmp_path, 'recipe = "recipe.toml"\n[[arm]]\nname = "a"\n')).cells
    stored = defining_settings(cell.settings)
    assert "model.name" not in stored and stored["learn.lr"] == 1e-4
    assert differing(cell, stored | {"model.name": "/elsewhere"}) == ""
    assert (
        differing(cell, stored | {"learn.lr": 1e-5})
        == "learn.lr = 1e-05 there and 0.0001 in the matrix"
    )


@pytest.mark.parametrize("name", ["maze_matrix", "operations_matrix"])
def test_shipped_matrices_can_be_read(name: str) -> None:
    plan = read_plan(Path(__file__).parents[2] / "benchmarks" / f"{name}.toml")
    assert plan.cells[0].arm == plan.baseline and plan.evaluation == "drawn"
    assert all(cell.settings.held_out.size == 0 for cell in plan.cells)
    assert len({cell.settings.token_budget for cell in plan.cells}) == 1, "all alike"
    draws = [cell.settings.rollout.mode for cell in plan.cells if cell.arm == plan.baseline]
    assert set(draws) == {"barrier"}, "the baseline neither streams nor speculates"


@pytest.mark.parametrize("name", ["maze_matrix", "operations_matrix"])
def test_the_stored_cells_are_those_of_the_shipped_matrices(name: str, tmp_path: Path) -> None:
    """Also where a setting was stored by its value then and is unset now: rollout.on_update."""
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    places = Places(
        plan=read_plan(benchmarks / f"{name}.toml"), runs=tmp_path, out=benchmarks / "results"
    )
    states = [line.state for line in planned(places)]
    stored = list((benchmarks / "results" / "train" / name).glob("*.json"))
    assert set(states) <= {"done", "to do"} and states.count("done") == len(stored)


def test_the_script_shows_its_plan_and_says_what_is_wrong_in_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path, 'recipe = "recipe.toml"\nseconds = 60\n' + ARMS)
    script = Path(__file__).parents[2] / "benchmarks" / "train.py"

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(path), "--runs", "runs", "--out", "out", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    shown = call("--plan", "--set", "learn.lr=0.5", "--beside", "2")
    assert shown.returncode == 0, shown.stderr
    # 60 s and 9 s
    assert all(
        word in shown.stdout for word in ("uniform-seed0", "speed-seed0", "1.1, 2 at a time")
    )
    wrong = call("--seeds", "one")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.strip() == 'Seeds are whole numbers with commas between, got "one".'
    assert not (tmp_path / "runs").exists() and not (tmp_path / "out").exists()
