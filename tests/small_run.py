"""What the tests of whole runs share: a recipe that takes a second, a silent watcher, and what "the same run" means."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import torch

from whet.config import Config
from whet.draft.base import OFF, DraftArm
from whet.draft.controller import Controller
from whet.recipe import load_config

SMALL = (
    "steps=5",
    "model.hidden=16",
    "model.layers=1",
    "model.heads=2",
    'data.0.options={train_count=60, mix={"1"=0.5, "2-4"=0.5}}',
    "eval.0.options={eval_count=60}",
    "eval.0.limit=12",
    "eval.0.max_tokens=12",
    "eval.0.every=2",
    "rollout.context=48",
    "rollout.max_tokens=12",
    "rollout.slots=12",
    "curriculum.groups=3",
    "curriculum.rollouts=4",
    "curriculum.patience=50",
    "learn.lr=3e-3",
    "learn.warmup=2",
    "save.every=2",
    "judge.timeout_s=120",
)
"""The model is untrained: rewards come from the fixture's judge, not from skill."""


def small_config(*sets: str) -> Config:
    return load_config(sets=[*SMALL, *sets])


class Silent:
    """A watcher that only keeps what it receives."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.rows: list[dict[str, float]] = []

    def update(self, metrics: dict[str, float], progress: float) -> None:
        self.rows.append(metrics)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None:
        pass


class Restless(Controller):
    """Any arm at any time: what a clock would choose must not decide what is tested."""

    def choose(
        self, batch: int, kv_bytes: float = 0.0, retired: Set[str] = frozenset()
    ) -> DraftArm:
        arms = [
            arm
            for arm in self.arms
            if arm == OFF or (self.serves(arm, batch) and arm.drafter not in retired)
        ]
        return arms[int(self.generator.integers(len(arms)))]


class Stop(Silent):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def update(self, metrics: dict[str, float], progress: float) -> None:
        super().update(metrics, progress)
        if metrics["step"] == self.after:
            os.kill(os.getpid(), signal.SIGINT)


def even_digits(prompt: Any, response: str) -> float:
    """A reward an untrained model earns about half the time, so that groups have spread."""
    return float(sum(c.isdigit() for c in response) % 2 == 0)


TIMED = (
    "time/",
    "time_s",
    "rollout/seconds",
    "rollout/tail_share",
    "rollout/tokens_per_s",
    "judge/seconds",
    "learn/seconds",
    "rollout/gpu_",
    "learn/gpu_",
)


def timeless(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what a clock measured."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]


def newest_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    newest = max((folder / "checkpoints").glob("step_*"))
    return load_file(newest / "model.safetensors")


def read_pictures(run: Path) -> list[dict[str, Any]]:
    """The lines of pictures.jsonl, none of which may be damaged; none before the first step."""
    path = run / "pictures.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_run(one: Path, other: Path) -> None:
    from whet.run import read_metrics

    assert timeless(read_metrics(one)) == timeless(read_metrics(other))
    # a clock's
    drawn, again = ([{**row, "running": 0} for row in read_pictures(run)] for run in (one, other))
    assert drawn == again and len(drawn) == len(read_metrics(one)) - 1
    mine, theirs = newest_weights(one), newest_weights(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    wrote, same = (
        {p.name: p.read_text() for p in (run / "rollouts").iterdir()} for run in (one, other)
    )
    assert wrote == same


def model_folder(path: Path, *, chat: bool = False) -> str:
    """A tiny random model that reads and writes printable ASCII, saved as a Hugging Face folder."""
    from string import printable

    from whet.model.load import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer(printable)
    if chat:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
        tokenizer.chat_template = (
            "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
        )
    tiny_model(len(tokenizer), hidden=16, layers=1, heads=2, context=512).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def problem_file(path: Path, count: int, **extra: Any) -> str:
    """Sums as JSONL: {"prompt": "What is 3+4?", "answer": "7", "level": 1}."""
    rows = [
        {"prompt": f"What is {a}+{a % 7}?", "answer": str(a + a % 7), "level": 1 + a % 2, **extra}
        for a in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
