"""What a task is: prompts, a judge, and (for a warm start) worked solutions. numpy only, never torch."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from whet.tasks.prompts import PromptTable
from whet.types import Prompt


class Task(Protocol):
    name: str
    alphabet: str
    """Characters a tiny model must know; empty where a real tokenizer is meant."""

    def prompts(self, split: str, seed: int) -> PromptTable:
        """split "train" or "eval"; the two share no problem."""

    def judge(self, prompt: Prompt, response: str) -> float:
        """Score in 0..1. Runs in a worker process; may raise or hang, and costs only this rollout then."""

    def solutions(self, rng: np.random.Generator, count: int, **options: Any) -> list[tuple[Prompt, str]]:
        """Worked solutions to imitate: (prompt, response text without the end token)."""
