"""Bad input to the TRL adapter: one sentence each, before the first step where that can be known."""

import importlib
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from transformers import GptOssConfig, GptOssForCausalLM  # noqa: E402
from trl_parts import config, first_letter, model, prompts, tokenizer, trainer  # noqa: E402

from whet.adapters.trl import (  # noqa: E402
    USED,
    GRPOTrainer,
    RLOOTrainer,
    StockGRPO,
    check_version,
    guarded,
    settings_of,
)
from whet.errors import Starved, WhetError  # noqa: E402


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"curriculum": "sped"}, 'There is no curriculum "sped"; did you mean "speed"?'),
        ({"curriculum": {"name": "speed", "nint": 2}}, 'There is no setting "curriculum.nint"'),
        (
            {"curriculum": {"name": "speed", "speed": {"n_init": 8}}},
            "leaves none to continue: num_generations = 8",
        ),
        (
            {"curriculum": "speed", "args": {"num_generations": 2}},
            "num_generations = 2 leaves none to screen with",
        ),
        ({"tools": [len]}, "tools are called while a completion is written"),
        (
            {"curriculum": {"name": "uniform", "rollouts": 4}},
            "curriculum.rollouts is num_generations of TRL's config",
        ),
        (
            {"curriculum": {"name": "uniform", "groups": 4}},
            "curriculum.groups is generation_batch_size",
        ),
        (
            {"curriculum": {"name": "cures", "cures": {"subsets": 2}}},
            "curriculum.cures.subsets resets reference and",
        ),
        ({"curriculum": {"stages": [{"kl_coef": 0.1}]}}, "A stage sets kl_coef"),
        ({"curriculum": {"stages": [{"kl_coef": 0.0}]}}, "A stage sets kl_coef"),
        ({"curriculum": {"stages": [{"rollouts": 4}]}}, "A stage sets rollouts"),
        (
            {"curriculum": {"name": "cures", "cures": {"sigma": "gradient"}}},
            "needs score, which TRL does not give",
        ),
        ({"curriculum": {"max_age": 1}, "engine": "trl"}, "curriculum.max_age needs log-probs"),
        ({"engine": "vllm"}, 'engine = "vllm" is unknown; it is "whet" or "trl".'),
        (
            {"args": {"use_vllm": True}},
            'use_vllm=True and engine="whet" are two engines; set engine="trl"',
        ),
        ({"args": {"min_p": 0.1}}, 'engine="whet" does not know min_p; set engine="trl"'),
        (
            {"args": {"generation_kwargs": {"num_beams": 2}}},
            'engine="whet" does not know generation_kwargs',
        ),
        (
            {"args": {"cast_lm_head_to_fp32": True}},
            'engine="whet" does not know cast_lm_head_to_fp32',
        ),
        (
            {"args": {"multi_objective_aggregation": "normalize_then_sum"}},
            "needs groups of one size",
        ),
        (
            {"rollout_func": lambda prompts, trainer: {}},
            "rollout_func writes completions by itself",
        ),
        (
            {"data": prompts(4).to_iterable_dataset()},
            "train_dataset is a datasets.Dataset, not IterableDataset",
        ),
        (
            {"data": prompts(4).rename_column("answer", "image")},
            "has a column image; curricula are for text alone",
        ),
        (
            {"data": Dataset.from_list([{"id": "a", "prompt": "1="}] * 2)},
            'The prompt id "a" occurs 2 times',
        ),
        (
            {
                "data": Dataset.from_list(
                    [{"id": "a", "prompt": "1="}, {"id": None, "prompt": "2="}]
                )
            },
            "Row 1 .* has no id",
        ),
    ],
)
def test_one_sentence_before_the_first_step(
    own: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    own = {"curriculum": "uniform", **own}
    with pytest.raises(WhetError, match=sentence) as caught:
        trainer(GRPOTrainer, tmp_path, **own)
    assert "\n" not in str(caught.value) and str(caught.value)[-1] in ".?"


def test_a_screening_follows_the_size_of_a_group() -> None:
    assert settings_of("speed", 8, 4).speed.n_init == 4
    assert settings_of("speed", 4, 4).speed.n_init == 2
    assert settings_of({"name": "all", "speed": {"low": 0.1}}, 3, 4).speed.n_init == 2
    assert settings_of({"name": "speed", "speed": {"n_init": 3}}, 4, 4).speed.n_init == 3
    assert settings_of(None, 8, 4).name == "speed"
    assert settings_of(None, 2, 4).name == "dapo", "two rollouts leave none to screen with"


def test_a_missing_data_set_is_refused_by_trl(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_dataset"):
        GRPOTrainer(
            model=model(),
            processing_class=tokenizer(),
            reward_funcs=first_letter,
            args=config(tmp_path, "grpo"),
        )


def test_what_the_user_gave_wrongly_is_a_value_error_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is unknown"):
        trainer(GRPOTrainer, tmp_path, engine="vllm")


def test_rewards_that_are_all_none_name_the_reward_functions(tmp_path: Path) -> None:
    def silent(completions: list[str], **columns: Any) -> list[None]:
        return [None] * len(completions)

    trained = trainer(GRPOTrainer, tmp_path, curriculum="dapo", reward_funcs=silent)
    with pytest.raises(WhetError, match="No reward function gave a number for any of the"):
        trained.train()


def test_a_model_that_the_twin_refuses(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    plan = GptOssConfig(
        vocab_size=len(tokenizer()),
        num_key_value_heads=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        **sizes,
    )
    with pytest.raises(
        WhetError, match=r'GptOssForCausalLM needs s_aux in its attention.*; set engine="trl"\.'
    ):
        trainer(GRPOTrainer, tmp_path, network=GptOssForCausalLM(plan), curriculum="uniform")


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_divided_weights(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP and DeepSpeed need GPUs; what accelerate says about them is set by hand."""
    trained = trainer(kind, tmp_path, curriculum="uniform")
    settings = settings_of("uniform", 8, 4)
    for stage, fine in ((2, True), (3, False)):
        with monkeypatch.context() as patch:
            plugin = property(lambda state, stage=stage: SimpleNamespace(zero_stage=stage))
            patch.setattr(type(trained.accelerator.state), "deepspeed_plugin", plugin)
            refused = (
                nullcontext()
                if fine
                else pytest.raises(WhetError, match=r'DeepSpeed 3 .*: set engine="trl"')
            )
            with refused:
                trained._refuse(settings, "whet")
            trained._refuse(settings, "trl")
    trained.is_fsdp_enabled = True
    with pytest.raises(
        WhetError, match=r'engine="whet" needs whole weights; FSDP .*: set engine="trl"'
    ):
        trained._refuse(settings, "whet")
    trained._refuse(settings, "trl")


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_groups_that_do_not_divide_the_batch_are_refused_by_trl(kind: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"generation_batch_size \(32\) must be divisible by num_generations \(5\)"
    ):
        config(tmp_path, kind, num_generations=5)


@pytest.mark.parametrize(
    ("score", "sentence"),
    [
        (
            lambda **columns: 1 / 0,
            "The reward function .* failed with ZeroDivisionError: division by zero.",
        ),
        (
            lambda completions, **columns: [math.nan] * len(completions),
            "gave nan; give None for what cannot be judged",
        ),
        (lambda completions, **columns: [math.inf] * len(completions), "gave inf"),
    ],
)
def test_a_reward_that_raises_or_is_no_number(score: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=sentence):
        trainer(GRPOTrainer, tmp_path, curriculum="uniform", reward_funcs=score).train()


def test_nothing_to_train_on_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(Starved):
        trainer(
            GRPOTrainer,
            tmp_path,
            data=prompts(40, sizes=(0,)),
            curriculum={"name": "speed", "patience": 2},
        ).train()


def test_a_bypassed_adapter_says_so(tmp_path: Path) -> None:
    class Bypassed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return StockGRPO._generate_and_score_completions(self, inputs)

    with pytest.raises(WhetError, match="Bypassed trained a step without its curriculum"):
        trainer(Bypassed, tmp_path, curriculum="uniform").train()


def test_another_version_is_refused_by_number_and_by_signature() -> None:
    check_version("1.15.3", [StockGRPO])
    for version in ("1.14.0", "1.17.0", "0.29.1", "2.0.0"):
        with pytest.raises(WhetError, match=f"needs TRL 1.15 or 1.16, and {version} is installed"):
            check_version(version, [StockGRPO])

    class Changed(StockGRPO):
        def _calculate_rewards(self, rows: Any) -> None: ...

    with pytest.raises(
        WhetError, match=r"Changed._calculate_rewards takes \(rows\) in place of \(inputs, prompts"
    ):
        check_version("1.16.0", [Changed])
    assert len(USED) == 6


def test_importing_without_trl_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "whet.adapters.trl")
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(
        WhetError,
        match=r'needs TRL 1.15 or 1.16, and importing it failed: .*; pip install "whet\[trl\]"',
    ):
        importlib.import_module("whet.adapters.trl")


def test_a_guarded_function_gives_what_it_gave() -> None:
    answered = guarded(first_letter, "first_letter")(completions=["1", ""], answer=["12", "1"])
    assert answered == [1.0, 0.0] and guarded(lambda **_: [None, 2], "f")() == [None, 2]
