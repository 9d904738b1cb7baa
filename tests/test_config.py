import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.config import Config, Learn
from whet.errors import WhetError
from whet.recipe import OTHER_NAMES, describe, dump_config, load_config, parse_config

ESTIMATORS = get_args(Learn.model_fields["estimator"].annotation)


def test_defaults_survive_toml() -> None:
    config = load_config()
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_sets_reach_lists_sections_and_words() -> None:
    config = load_config(
        sets=[
            "learn.lr=1e-5",
            "eval.0.every=5",
            "curriculum.name=dapo",
            'rollout.stop_strings=["\\n"]',
        ]
    )
    assert config.learn.lr == 1e-5
    assert config.eval[0].every == 5
    assert config.curriculum.name == "dapo"
    assert config.rollout.stop_strings == ("\n",)


def test_one_table_is_a_list_of_one() -> None:
    assert len(parse_config({"warm_start": {"steps": 3}}).warm_start) == 1


@given(
    lr=st.floats(1e-9, 1.0),
    seed=st.integers(0, 2**31 - 1),
    words=st.lists(st.text(min_size=1, max_size=5), max_size=3),
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
        ("learn.lr=-1", "learn.lr = -1 is wrong: it must be at least 0."),
        ("steps=1.5", "steps = 1.5 is wrong: it must be a whole number."),
        ("steps=many", 'steps = "many" is wrong: it must be a whole number.'),
        ("steps=true", "steps = true is wrong: it must be a number, not true or false."),
        (
            "curriculum.stages=[{kl_coef=true}]",
            "curriculum.stages.0.kl_coef = true is wrong: it must be a number, not",
        ),
        ("steps=100000000", "steps = 100000000 is wrong: it must be at most 10,000,000."),
        (
            "token_budget=99999999999999999999",
            "is wrong: no run needs a number beyond 1,000,000,000,000.",
        ),
        ("seed=4294967296", "seed = 4294967296 is wrong: it must be less than 2,147,483,648."),
        ("model=[{name='tiny'}]", "There is only one model: write [model], not [[model]]."),
        ("model=tiny", 'model = "tiny" is wrong: write [model], and its settings below it.'),
        (
            "data=mine.jsonl",
            'data = "mine.jsonl" is wrong: write [[data]], and path = ... below it.',
        ),
        (
            'data=["mine.jsonl"]',
            'data.0 = "mine.jsonl" is wrong: write [[data]], and its settings below it.',
        ),
        ("reward=[{weight=1}]", "reward.0.name is missing."),
        (
            "rollout.context=256",
            "rollout.max_tokens = 1024 leaves no room for a prompt in rollout.context = 256.",
        ),
        ("learn.estimator=ppo", "'rloo'"),
        (
            'rollout.stop_strings=[".",""]',
            'rollout.stop_strings.1 = "" is wrong: it must be a text that is',
        ),
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


@pytest.mark.parametrize(
    ("item", "known_here"),
    [
        ("learn.learning_rate=1e-4", "learn.lr"),
        ("batch_size=64", "curriculum.groups"),
        ("max_steps=10", "steps"),
        ("epochs=3", "steps"),
        ("num_generations=8", "curriculum.rollouts"),
        ("rollout.max_completion_length=512", "rollout.max_tokens"),
        ("beta=0.1", "learn.kl_coef"),
        ("model_name_or_path=x", "model.name"),
        ("output_dir=x", "--out"),
        ("gradient_accumulation_steps=4", "learn.pack_tokens"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "learn.lr"),  # verl
        ("actor_rollout_ref.rollout.n=8", "curriculum.rollouts"),
        ("data.train_batch_size=64", "curriculum.groups"),
        ("n_samples_per_prompt=8", "curriculum.rollouts"),  # OpenRLHF
        ("actor_learning_rate=1e-6", "learn.lr"),
    ],
)
def test_the_names_that_other_trainers_have_are_known(item: str, known_here: str) -> None:
    with pytest.raises(WhetError) as error:
        load_config(sets=[item])
    assert str(error.value).endswith(f'; did you mean "{known_here}"?')


def test_every_synonym_stands_for_one_setting() -> None:
    names = " ".join(OTHER_NAMES.values()).split()
    keys = {name for name, _, _ in describe()}
    assert len(names) == len(set(names))
    assert {name for name in OTHER_NAMES if not name.startswith("--")} <= keys
    assert not set(names) & {key for key in keys if "." not in key}


def test_true_is_a_value_where_it_has_a_meaning() -> None:
    assert load_config(sets=["learn.compile=false"]).learn.compile is False
    assert load_config(sets=["data.0.where={in_eval=true}"]).data[0].where == {"in_eval": True}


def test_tokens_may_not_outlive_an_update_on_policy() -> None:
    with pytest.raises(WhetError, match=r"curriculum\.max_age"):
        load_config(sets=["rollout.mode=stream", "rollout.on_update=keep"])


@pytest.mark.parametrize(
    ("max_age", "given", "becomes"), [(0, "", "cut"), (1, "", "keep"), (2, "cut", "cut")]
)
def test_rollouts_outlive_an_update_where_they_may_train(
    max_age: int, given: str, becomes: str
) -> None:
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


def test_a_setting_that_takes_words_names_them_all() -> None:
    meanings = {name: meaning for name, _, meaning in describe()}
    assert meanings["learn.schedule"].endswith("Values: constant, linear, cosine.")
    assert "Values:" not in meanings["rollout.mode"], "its meaning names both"
    for name, words in (
        ("learn.estimator", ESTIMATORS),
        ("model.dtype", ("float32", "bfloat16", "float64")),
    ):
        assert all(word in meanings[name] for word in words)


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ('data.0.curriculum={name="speed"}', "data.0.curriculum"),
        ("curriculum.solved=0.9", "curriculum.solved"),
        ("curriculum.reset_every=5", "curriculum.reset_every"),
    ],
)
def test_a_setting_that_is_gone_says_what_to_do_instead(item: str, name: str) -> None:
    with pytest.raises(WhetError, match=rf'^The setting "{name}" is gone: .*\.$'):
        load_config(sets=[item])
