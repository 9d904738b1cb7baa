"""The recipes of the papers: all of them read, and those of SPEED hold the published numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.recipe import dump_config, load_config, parse_config, read_toml

FOLDER = Path(__file__).parents[1] / "recipes" / "papers"
RECIPES = sorted(FOLDER.glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads_and_says_what_it_is(path: Path) -> None:
    config = load_config(path)
    assert config == parse_config(read_toml(path)) and dump_config(config)
    assert path.read_text().startswith("# ") and config.data[0].path
    assert "/" in config.model.name  # a model somebody else can have


@pytest.mark.parametrize(("name", "clip_high"), [("speed-rloo", 0.2), ("speed-dapo", 0.28)])
def test_the_numbers_of_speed(name: str, clip_high: float) -> None:
    config = load_config(FOLDER / f"{name}.toml")
    c, learn = config.curriculum, config.learn
    assert (c.name, c.groups, c.rollouts, c.speed.n_init, c.speed.low, c.speed.high) == ("speed", 16, 24, 4, 0.0, 1.0)
    assert (learn.lr, learn.warmup, learn.weight_decay, learn.grad_clip) == (1e-6, 10, 0.1, 1.0)
    assert (learn.clip_low, learn.clip_high, learn.kl_coef, learn.entropy_coef) == (0.2, clip_high, 0.0, 0.0)
    assert (learn.estimator, learn.aggregate, learn.updates, learn.overlong) == ("rloo", "batch_tokens", 1, 0)
    assert (config.text.max_prompt, config.rollout.max_tokens, config.rollout.temperature) == (1024, 3072, 1.0)
    assert [(e.path, e.n, e.temperature, e.every) for e in config.eval] == [
        ("math500", 1, 1.0, 25),
        ("amc23", 4, 1.0, 25),
        ("aime24", 16, 1.0, 25),
        ("aime25", 16, 1.0, 25),
    ]
