"""A tiny model, prompts of known difficulty and a config, for the tests of the TRL adapter."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, RLOOConfig, RLOOTrainer

from whet.model.load import tiny_model, tiny_tokenizer

LETTERS = "0123456789+=abcd"


def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer(LETTERS)


def model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_model(len(tokenizer()), hidden=16, layers=1, heads=2, context=64, dtype=dtype)


def prompts(
    count: int = 120, seed: int = 0, sizes: tuple[int, ...] = (0, 0, 0, 1, 6, 12, 16, 16)
) -> Dataset:
    """A completion is right if its first letter is one of the answer's, so the size of the answer is the difficulty."""
    drawn = np.random.default_rng(seed).choice(sizes, count)
    return Dataset.from_list(
        [
            {"id": f"p{i}", "prompt": f"{i:03d}=", "answer": LETTERS[:size]}
            for i, size in enumerate(drawn.tolist())
        ]
    )


def first_letter(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [
        float(bool(text) and text[0] in right)
        for text, right in zip(completions, answer, strict=True)
    ]


def config(folder: Path, kind: str = "grpo", **own: Any) -> Any:
    """Four groups of eight an update, in four slices, on a CPU."""
    plain: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        "beta": 0.0,
    }
    return (GRPOConfig if kind == "grpo" else RLOOConfig)(**{**plain, **own})


def trainer(
    kind: type, folder: Path, *, data: Dataset | None = None, network: Any = None, **own: Any
) -> Any:
    """A trainer of this class; `args` are settings of its config, other arguments are its own."""
    args = config(
        folder, "rloo" if issubclass(kind, RLOOTrainer) else "grpo", **own.pop("args", {})
    )
    return kind(
        model=model() if network is None else network,
        args=args,
        train_dataset=prompts() if data is None else data,
        processing_class=tokenizer(),
        reward_funcs=own.pop("reward_funcs", first_letter),
        **own,
    )


def logged(trained: Any, name: str) -> list[float]:
    return [row[name] for row in trained.state.log_history if name in row]
