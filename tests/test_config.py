import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.config import Config
from whet.errors import WhetError
from whet.recipe import describe, dump_config, load_config, parse_config


def test_defaults_survive_toml() -> None:
    config = load_config()
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_sets_reach_lists_sections_and_words() -> None:
    config = load_config(
        sets=["learn.lr=1e-5", "eval.0.every=5", "curriculum.name=dapo", 'rollout.stop_strings=["\\n"]']
    )
    assert config.learn.lr == 1e-5
    assert config.eval[0].every == 5
    assert config.curriculum.name == "dapo"
    assert config.rollout.stop_strings == ("\n",)


def test_one_table_is_a_list_of_one() -> None:
    assert len(parse_config({"warm_start": {"steps": 3}}).warm_start) == 1


@given(
    lr=st.floats(1e-9, 1.0), seed=st.integers(0, 2**31 - 1), words=st.lists(st.text(min_size=1, max_size=5), max_size=3)
)
def test_any_value_survives_toml(lr: float, seed: int, words: list[str]) -> None:
    config = parse_config({"seed": seed, "learn": {"lr": lr}, "rollout": {"stop_strings": words}})
    assert parse_config(tomllib.loads(dump_config(config))) == config


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("lern.lr=1", 'There is no setting "lern"; did you mean "learn"?'),
        ("learn.lrr=1", 'There is no setting "learn.lrr"; did you mean "learn.lr"?'),
        ("eval.0.evry=3", 'There is no setting "eval.0.evry"; did you mean "eval.every"?'),
        ("learn.lr=-1", "learn.lr = -1 is wrong: input should be greater than or equal to 0."),
        ("steps=1.5", "steps = 1.5 is wrong: input should be a valid integer, got a number with a fractional part."),
        ("rollout.context=256", "rollout.max_tokens = 1024 leaves no room for a prompt in rollout.context = 256."),
        ("learn.estimator=ppo", "'rloo'"),
        ('rollout.stop_strings=[".",""]', "rollout.stop_strings.1 = '' is wrong: string should have"),
        ("learn.lr", '--set takes key=value, got "learn.lr"'),
        ("learn.lr.x=1", "learn.lr"),
        ("data.5.path=x", "names no entry"),
    ],
)
def test_wrong_settings_get_one_sentence(item: str, sentence: str) -> None:
    with pytest.raises(WhetError) as error:
        load_config(sets=[item])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_tokens_may_not_outlive_an_update_on_policy() -> None:
    with pytest.raises(WhetError, match=r"curriculum\.max_age"):
        load_config(sets=["rollout.mode=stream", "rollout.on_update=keep"])


@pytest.mark.parametrize(("max_age", "given", "becomes"), [(0, "", "cut"), (1, "", "keep"), (2, "cut", "cut")])
def test_rollouts_outlive_an_update_where_they_may_train(max_age: int, given: str, becomes: str) -> None:
    sets = [f'rollout.on_update="{given}"'] if given else []
    settings = load_config(sets=["rollout.mode=stream", f"curriculum.max_age={max_age}", *sets])
    assert (settings.rollout.on_update, settings.on_update) == (given, becomes)


def test_bad_recipe_files(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="There is no recipe"):
        load_config(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("a = [")
    with pytest.raises(WhetError, match="is not TOML"):
        load_config(tmp_path / "bad.toml")


def test_every_key_is_listed_once() -> None:
    keys = [name for name, _, _ in describe()]
    assert len(keys) == len(set(keys)) == len(describe())
    assert {"seed", "learn.lr", "eval.every", "data.options"} <= set(keys)
    assert Config.model_fields["seed"].default == 0
