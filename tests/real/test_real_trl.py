"""TRL's trainer with whet's curriculum and engine, on a real model with its chat template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_parts import plan_of
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("trl", reason="needs TRL: pip install 'whet[trl]'")

from datasets import Dataset
from trl import GRPOConfig

from whet.adapters.trl import GRPOTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]),
]


def rows(folder: Path) -> Dataset:
    table = plan_of(folder, "cpu").problems.train
    prompts = [table.at(i) for i in range(len(table))]
    return Dataset.from_list(
        [{"id": p.id, "prompt": [{"role": "user", "content": p.text}]} for p in prompts]
    )


def even_length(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(turns[0]["content"]) % 2 == 0) for turns in completions]


def test_two_steps(folder: Path, device: str, tmp_path: Path, figures: Callable[..., None]) -> None:
    """whet's engine decodes with the trainer's weights: its log-probs are those of TRL's own forward."""
    half = device == "cuda"
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=not half,
        bf16=half,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        max_steps=2,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        beta=0.0,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16 if half else torch.float32
    )
    trained = GRPOTrainer(
        model=model,
        args=args,
        train_dataset=rows(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=even_length,
        curriculum="uniform",
        engine="whet",
    )
    before = [weight.detach().clone() for weight in trained.model.parameters()]
    found: list[torch.Tensor] = []
    inner = trained._weigh

    def weigh(out: dict[str, Any], *rest: Any) -> None:
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
        mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
        size = out["completion_ids"].shape[1]
        with torch.no_grad():
            theirs, _, _ = trained._get_per_token_logps_and_entropies(
                trained.model, ids, mask, size
            )
        apart = (theirs - out["sampling_per_token_logps"]).abs()
        found.append(apart[out["completion_mask"].bool()])
        inner(out, *rest)

    trained._weigh = weigh
    trained.train()
    apart = torch.cat(found)
    figures(tokens=apart.numel(), gap_mean=apart.mean(), gap_max=apart.max())
    assert len(found) == 2 and apart.numel() > 100
    if half:
        assert float(apart.mean()) < 0.1
    else:
        assert float(apart.max()) < 1e-3
    assert any(
        not torch.equal(a, b) for a, b in zip(before, trained.model.parameters(), strict=True)
    )
