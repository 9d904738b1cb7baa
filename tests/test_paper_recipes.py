"""The recipes of the papers: all of them read, and those of SPEED hold the published numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import model_folder, problem_file

from whet import cli
from whet.recipe import dump_config, load_config, parse_config, read_toml

FOLDER = Path(__file__).parents[1] / "recipes" / "papers"
RECIPES = sorted(FOLDER.glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads_and_says_what_it_is(path: Path) -> None:
    config = load_config(path)
    assert config == parse_config(read_toml(path)) and dump_config(config)
    assert path.read_text().startswith("# ") and config.data[0].path
    assert "/" in config.model.name  # a model somebody else can have


@pytest.mark.wide
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_dry_runs_with_another_model_and_data(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own model and problems are elsewhere: small ones in their places, everything else as published."""
    settings = load_config(path)
    model, data = (
        model_folder(tmp_path / "model", chat=True),
        problem_file(tmp_path / "sums.jsonl", 400),
    )
    sets = [
        f"model.name='{model}'",
        *(f"data.{i}.path='{data}'" for i in range(len(settings.data))),
    ]
    sets += [f"eval.{i}.path='{data}'" for i in range(len(settings.eval))]
    sets += [f"eval.{i}.name='{entry.name}'" for i, entry in enumerate(settings.eval)]
    monkeypatch.setattr(
        "sys.argv", ["whet", "train", str(path), "--dry-run", *(f"--set={item}" for item in sets)]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code in (0, 2)  # this machine may be too small for it
    shown = capsys.readouterr().out
    assert f"{settings.steps:,} steps of {settings.curriculum.groups:,} groups" in shown
    assert f"({settings.curriculum.name})" in shown and "a response ends at:" in shown
    assert shown.count("\nstage ") == len(settings.curriculum.stages)


@pytest.mark.parametrize(
    ("name", "estimator", "clip_high", "minibatches"),
    [("speed-rloo", "rloo", 0.2, 1), ("speed-dapo", "dapo", 0.28, 4)],
)
def test_the_numbers_of_speed(
    name: str, estimator: str, clip_high: float, minibatches: int
) -> None:
    """DAPO's clip binds only where a batch has more than one optimiser step."""
    config = load_config(FOLDER / f"{name}.toml")
    c, learn = config.curriculum, config.learn
    assert (c.name, c.groups, c.rollouts, c.speed.n_init, c.speed.low, c.speed.high) == (
        "speed",
        16,
        24,
        4,
        0.0,
        1.0,
    )
    assert (learn.lr, learn.warmup, learn.weight_decay, learn.grad_clip) == (1e-6, 10, 0.1, 1.0)
    assert (learn.clip_low, learn.clip_high, learn.kl_coef, learn.entropy_coef) == (
        0.2,
        clip_high,
        0.0,
        0.0,
    )
    assert (learn.estimator, learn.aggregate, learn.updates, learn.overlong) == (
        estimator,
        "batch_tokens",
        1,
        0,
    )
    assert learn.minibatches == minibatches
    assert (config.text.max_prompt, config.rollout.max_tokens, config.rollout.temperature) == (
        1024,
        3072,
        1.0,
    )
    assert [(e.path, e.n, e.temperature, e.every) for e in config.eval] == [
        ("math500", 1, 1.0, 25),
        ("amc23", 4, 1.0, 25),
        ("aime24", 16, 1.0, 25),
        ("aime25", 16, 1.0, 25),
    ]


@pytest.mark.parametrize(
    ("name", "estimator"), [("cures-grpo", "grpo"), ("cures-rpp", "reinforce_pp")]
)
def test_the_numbers_of_cures(name: str, estimator: str) -> None:
    config = load_config(FOLDER / f"{name}.toml")
    c, learn = config.curriculum, config.learn
    assert (c.groups, c.rollouts, c.cures.probe, c.cures.subsets, c.cures.subset_steps) == (
        1024,
        8,
        4,
        15,
        10,
    )
    assert (learn.estimator, learn.lr, learn.kl_coef, learn.clip_high) == (
        estimator,
        1e-6,
        0.001,
        0.2,
    )
    assert c.groups // learn.minibatches == 256
