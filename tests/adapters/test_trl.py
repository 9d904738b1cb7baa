"""TRL's trainers with a curriculum: real runs of a tiny model on a CPU."""

import asyncio
import math
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")
trl = pytest.importorskip("trl")

from trl_parts import first_letter, logged, model, prompts, trainer  # noqa: E402

from whet.adapters.trl import GRPOTrainer, RLOOTrainer, StockGRPO, StockRLOO  # noqa: E402

SPEED = {"name": "speed", "speed": {"n_init": 2}}
KINDS = pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])


class Watched:
    """Keeps what TRL's loss receives, and the batches that it was made of."""

    def __init__(self, trained: Any) -> None:
        self.out: list[dict[str, Any]] = []
        self.batches: list[Any] = []
        inner = trained._weigh

        def weigh(out: dict[str, Any], batch: Any, rows: Any, own: slice) -> None:
            inner(out, batch, rows, own)
            self.out.append({**out, "rows": rows})
            self.batches.append(batch)

        trained._weigh = weigh


@KINDS
@pytest.mark.parametrize("engine", ["trl", "whet"])
def test_speed_trains_only_groups_with_signal(kind: type, engine: str, tmp_path: Path) -> None:
    trained = trainer(kind, tmp_path, curriculum=SPEED, engine=engine)
    before = [parameter.clone() for parameter in trained.model.parameters()]
    watched = Watched(trained)
    trained.train()
    assert logged(trained, "frac_reward_zero_std") == [0.0] * 3
    for batch, out in zip(watched.batches, watched.out, strict=True):
        assert [len(group.rollouts) for group in batch.groups] == [8] * 4
        assert all(0 < group.pass_rate < 1 for group in batch.groups)
        assert out["advantages"].abs().min() > 0
    assert any(
        (a - b).abs().max() > 1e-5 for a, b in zip(before, trained.model.parameters(), strict=True)
    )
    rollouts = logged(trained, "rollouts")
    assert (
        rollouts[0] > 32
        and rollouts == sorted(rollouts)
        and rollouts[-1] == trained.course.rollouts
    )
    assert logged(trained, "curriculum/screened")[-1] > 12


@pytest.mark.parametrize(
    ("kind", "stock", "own"),
    [
        (GRPOTrainer, StockGRPO, {}),
        (GRPOTrainer, StockGRPO, {"scale_rewards": "none"}),
        (GRPOTrainer, StockGRPO, {"scale_rewards": "batch"}),
        (RLOOTrainer, StockRLOO, {}),
        (RLOOTrainer, StockRLOO, {"normalize_advantages": True, "reward_clip_range": (0.1, 0.7)}),
    ],
)
def test_groups_of_one_size_are_scored_as_by_stock_trl(
    kind: Any, stock: Any, own: Any, tmp_path: Path
) -> None:
    """The same rows, completions and rewards go through TRL's own method, which reshapes them to groups of eight."""
    trained = trainer(kind, tmp_path, curriculum="uniform", args={"max_steps": 1, **own})
    watched = Watched(trained)
    trained.train()
    (out,) = watched.out
    trained.serving = out["rows"], slice(0, 32)
    trained.model.train()
    rows = [trained.course.row(row.rollout.prompt_id) for row in out["rows"]]
    theirs = stock._generate_and_score_completions(trained, rows)
    torch.testing.assert_close(out["advantages"], theirs["advantages"], atol=1e-5, rtol=1e-5)
    assert torch.equal(out["completion_ids"], theirs["completion_ids"])
    assert out["advantages"].abs().max() > 0
    if kind is GRPOTrainer:
        assert out["num_items_in_batch"] == theirs["num_items_in_batch"]


def test_whets_engine_gives_the_log_probs_of_the_trainers_model(tmp_path: Path) -> None:
    trained = trainer(
        GRPOTrainer, tmp_path, curriculum="uniform", args={"max_steps": 2, "temperature": 0.7}
    )
    shared = {id(parameter) for parameter in trained.model.parameters()}
    assert {id(parameter) for parameter in trained.engine.twin.parameters()} == shared
    found: list[float] = []
    inner = trained._weigh

    def weigh(out: dict[str, Any], *rest: Any) -> None:
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
        mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
        with torch.no_grad():
            size = out["completion_ids"].shape[1]
            theirs, _, _ = trained._get_per_token_logps_and_entropies(
                trained.model, ids, mask, size
            )
        found.append(
            ((theirs - out["sampling_per_token_logps"]) * out["completion_mask"]).abs().max().item()
        )
        inner(out, *rest)

    trained._weigh = weigh
    trained.train()
    assert len(found) == 2 and max(found) < 1e-5


def test_the_completion_table_has_the_curriculums_own_prompts(tmp_path: Path) -> None:
    asked: list[int] = []

    def score(
        completions: list[str], log_extra: Any, log_metric: Any, **columns: Any
    ) -> list[float]:
        asked.append(len(completions))
        log_extra("seen", [f"{p}{c}" for p, c in zip(columns["prompts"], completions, strict=True)])
        log_metric("mine", 2.0)
        return first_letter(completions, columns["answer"])

    args = {"max_steps": 2, "log_completions": True}
    trained = trainer(GRPOTrainer, tmp_path, curriculum=SPEED, reward_funcs=score, args=args)
    trained.train()
    import pandas

    for step, path in enumerate(sorted((tmp_path / "completions").glob("*.parquet"))):
        table = pandas.read_parquet(path)
        assert len(table) == 32 and (table["seen"] == table["prompt"] + table["completion"]).all()
        right = {f"{i:03d}=": row["answer"] for i, row in enumerate(prompts())}
        wanted = first_letter(table["completion"].tolist(), [right[p] for p in table["prompt"]])
        assert table["score"].tolist() == wanted and step < 2
        for _, rows in table.groupby("prompt"):
            own = rows["score"].to_numpy()
            np.testing.assert_allclose(
                rows["advantage"], (own - own.mean()) / (own.std(ddof=1) + 1e-4), atol=1e-6
            )
    assert sum(asked) == trained.course.rollouts  # once for every rollout
    assert logged(trained, "mine") == [2.0, 2.0]


def test_none_is_unjudged_and_several_functions_are_weighed(tmp_path: Path) -> None:
    """Every third completion has no reward at all; the others get 1 * right + 0.5 * (its length is even)."""
    seen = {"rows": 0}

    def sometimes(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
        first = seen["rows"]
        seen["rows"] += len(completions)
        right = first_letter(completions, answer)
        return [None if (first + i) % 3 == 0 else r for i, r in enumerate(right)]

    async def even(completions: list[str], **columns: Any) -> list[float | None]:
        await asyncio.sleep(0)
        first = seen["rows"] - len(completions)
        return [
            None if (first + i) % 3 == 0 else float(len(c) % 2 == 0)
            for i, c in enumerate(completions)
        ]

    args = {
        "max_steps": 2,
        "reward_weights": [1.0, 0.5],
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
    }
    trained = trainer(
        GRPOTrainer, tmp_path, curriculum="uniform", reward_funcs=[sometimes, even], args=args
    )
    watched = Watched(trained)
    trained.train()
    for out, batch in zip(watched.out, watched.batches, strict=True):
        judged = [group.judged for group in batch.groups]
        real = sum(len(group) for group in judged)
        assert 16 < real < 32 and len(out["rows"]) == real + -real % 4
        at = 0
        for group in judged:
            rewards = np.array([r.terms["0 sometimes"] + 0.5 * r.terms["1 even"] for r in group])
            factor = len(out["rows"]) / (4 * len(group))
            ours = out["advantages"][at : at + len(group)].numpy()
            np.testing.assert_allclose(ours, (rewards - rewards.mean()) * factor, atol=1e-6)
            at += len(group)
        assert not out["advantages"][at:].any() and not out["completion_mask"][at:].any()
        assert out["num_items_in_batch"] == sum(r.length for group in judged for r in group)


@KINDS
def test_stale_tokens_bring_their_own_log_probs(kind: type, tmp_path: Path) -> None:
    trained = trainer(
        kind, tmp_path, curriculum={**SPEED, "max_age": 2, "look_ahead": 2.0}, args={"max_steps": 3}
    )
    name = "old_per_token_logps" if kind is GRPOTrainer else "old_logps"
    stale: list[bool] = []
    inner = trained._use_own_log_probs

    def watched(out: dict[str, Any], rows: Any) -> None:
        inner(out, rows)
        stale.append(any(row.rollout.first_version < trained.course.rounds for row in rows))
        if stale[-1]:
            drawn = [row.rollout.trace.log_probs.sum() for row in rows]
            old = out[name] if kind is RLOOTrainer else (out[name] * out["completion_mask"]).sum(1)
            np.testing.assert_allclose(old.numpy(), drawn, rtol=1e-5)
        elif kind is GRPOTrainer:
            assert name not in out

    trained._use_own_log_probs = watched
    trained.train()
    assert stale[0] is False and any(stale)


def test_cures_gives_prompts_different_numbers_of_rollouts(tmp_path: Path) -> None:
    trained = trainer(
        GRPOTrainer, tmp_path, data=prompts(24), curriculum="cures", args={"max_steps": 8}
    )
    watched = Watched(trained)
    trained.train()
    sizes = {len(group.rollouts) for batch in watched.batches for group in batch.groups}
    assert len(sizes) > 1
    for out, batch in zip(watched.out, watched.batches, strict=True):
        owner = np.array([row.group for row in out["rows"]])
        for number in range(len(batch.groups)):
            assert abs(out["advantages"][owner == number].sum().item()) < 1e-4


@pytest.mark.parametrize("engine", ["whet", "trl"])
def test_a_stage_limits_its_own_completions(engine: str, tmp_path: Path) -> None:
    stages = [{"max_tokens": 2, "steps": 2}, {"max_tokens": 5}]
    trained = trainer(
        GRPOTrainer, tmp_path, curriculum={"name": "uniform", "stages": stages}, engine=engine
    )
    trained.train()
    longest = logged(trained, "completions/max_length")
    assert longest[:2] == [2.0, 2.0] and 2 < longest[2] <= 5
    if engine == "trl":
        assert trained.generation_config.max_new_tokens == 6


def test_evaluation_stays_trls(tmp_path: Path) -> None:
    args = {
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
    }
    trained = trainer(
        GRPOTrainer, tmp_path, curriculum=SPEED, eval_dataset=prompts(2, seed=1), args=args
    )
    trained.train()
    assert len(logged(trained, "eval_reward")) == 2 and trained.played == 2


def test_adapters_train_through_whets_engine(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plan = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trained = trainer(
        GRPOTrainer, tmp_path, curriculum=SPEED, peft_config=plan, args={"learning_rate": 0.05}
    )
    ids = torch.tensor([[3, 4, 5]])
    trained.train()
    from whet.model.twin import Probe

    with torch.no_grad():
        theirs = trained.model.eval()(input_ids=ids).logits
        ours = trained.engine.twin(
            input_ids=ids, position_ids=torch.arange(3)[None], use_cache=False, ctx=Probe()
        ).logits
        with trained.model.disable_adapter():
            assert (trained.model(input_ids=ids).logits - theirs).abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@KINDS
def test_mixed_precision_trains_through_whets_engine(kind: type, tmp_path: Path) -> None:
    """Autocast hangs on the trainer's forward; the engine decodes the same weights in float32."""
    trained = trainer(kind, tmp_path, curriculum=SPEED, args={"bf16": True, "max_steps": 2})
    trained.train()
    assert next(trained.engine.twin.parameters()).dtype == torch.float32
    assert logged(trained, "frac_reward_zero_std") == [0.0] * 2 and all(
        map(math.isfinite, logged(trained, "loss"))
    )


@KINDS
def test_the_divergence_from_a_reference_is_trls(kind: type, tmp_path: Path) -> None:
    """GRPO has it in the loss, RLOO in the rewards that advantages are made of."""
    model().save_pretrained(tmp_path / "start")  # from which TRL loads its reference
    args = {"beta": 0.1, "learning_rate": 0.01}
    trained = trainer(kind, tmp_path, network=str(tmp_path / "start"), curriculum=SPEED, args=args)
    watched = Watched(trained)
    trained.train()
    divergence = logged(trained, "kl")
    assert abs(divergence[0]) < 1e-6 < abs(divergence[-1])
    of_right: dict[int, set[float]] = {}
    for advantage, row in zip(
        watched.out[-1]["advantages"].tolist(), watched.out[-1]["rows"], strict=True
    ):
        if row.rollout.reward == 1:
            of_right.setdefault(row.group, set()).add(round(advantage, 5))
    assert any(len(values) > 1 for values in of_right.values()) == (kind is RLOOTrainer)


def test_messages_are_prompts_too(tmp_path: Path) -> None:
    from datasets import Dataset

    talk = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"{i:02d}="}], "answer": "0123456789"}
            for i in range(30)
        ]
    )

    def score(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        assert all(turns[0]["role"] == "assistant" for turns in completions)
        return first_letter([turns[0]["content"] for turns in completions], answer)

    from trl_parts import config, tokenizer

    spoken = tokenizer()
    spoken.chat_template = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    args = config(tmp_path, max_steps=1)
    trained = GRPOTrainer(model(), score, args, talk, processing_class=spoken, curriculum=SPEED)
    trained.train()
    assert math.isfinite(logged(trained, "loss")[0]) and logged(
        trained, "frac_reward_zero_std"
    ) == [0.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "trl_speed",
            r"20 groups trained, .* from \d{3} rollouts: \d\d\.\d rollouts per group\. Stock GRPO needs about 96 ",
        ),
        ("trl_cures", r"Groups by their number of rollouts: \{\d+: \d+, \d+: \d+"),
    ],
)
def test_examples_run_as_they_stand(
    name: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / f"{name}.py"), run_name="__main__")
    assert re.search(said, capsys.readouterr().out)
