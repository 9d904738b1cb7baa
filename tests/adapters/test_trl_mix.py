"""Rollouts that an informative group costs: SPEED inside TRL against stock GRPOTrainer, on a mix of prompts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from trl_parts import LETTERS, logged, trainer  # noqa: E402

from whet.adapters.trl import GRPOTrainer, StockGRPO  # noqa: E402


def mix(seed: int) -> Dataset:
    """400 prompts: 48 are right for half of the letters, half of the others never, half always."""
    kinds = ["middling"] * 48 + ["never"] * 176 + ["always"] * 176
    order = np.random.default_rng(seed).permutation(len(kinds))
    return Dataset.from_list(
        [{"id": f"p{i}", "prompt": f"{i:03d}=", "kind": kinds[j]} for i, j in enumerate(order)]
    )


def score(completions: list[str], kind: list[str], **columns: Any) -> list[float]:
    fixed = {"never": 0.0, "always": 1.0}
    half = [float(text != "" and text[0] in LETTERS[:8]) for text in completions]
    return [fixed.get(name, drawn) for name, drawn in zip(kind, half, strict=True)]


def test_an_informative_group_costs_at_most_half_of_stocks_rollouts(tmp_path: Path) -> None:
    """Theory: stock spends 16 / 0.12 = 133. SPEED screens in 0.87 of the middling ones: 4 / (0.12 * 0.87) + 12 = 50."""
    spent = {"stock": 0.0, "speed": 0.0}
    informative = {"stock": 0.0, "speed": 0.0}
    for seed in range(5):
        sizes = {
            "per_device_train_batch_size": 64,
            "gradient_accumulation_steps": 4,
            "num_generations": 16,
        }
        args = {**sizes, "max_completion_length": 2, "learning_rate": 0.0, "seed": seed}
        own = {"data": mix(seed), "reward_funcs": score}
        plain = trainer(StockGRPO, tmp_path / f"a{seed}", args={**args, "max_steps": 6}, **own)
        plain.train()
        shares = logged(plain, "frac_reward_zero_std")
        spent["stock"] += 256 * len(shares)
        informative["stock"] += sum(16 * (1 - share) for share in shares)
        plan = {"name": "speed", "speed": {"n_init": 4}}
        ours = trainer(
            GRPOTrainer,
            tmp_path / f"b{seed}",
            args={**args, "max_steps": 2},
            curriculum=plan,
            **own,
        )
        ours.train()
        spent["speed"] += ours.course.rollouts
        informative["speed"] += sum(
            16 * (1 - share) for share in logged(ours, "frac_reward_zero_std")
        )
    cost = {name: spent[name] / informative[name] for name in spent}
    assert informative["speed"] == 5 * 2 * 16  # every group has signal
    assert cost["speed"] <= 0.5 * cost["stock"], cost
    assert 110 < cost["stock"] < 160 and 40 < cost["speed"] < 60, cost
