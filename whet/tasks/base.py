"""What a task is: prompts, a judge, and (for a warm start) worked solutions. numpy only, never torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from whet.tasks.prompts import PromptTable
from whet.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All that is said of one response, in a judge process.

    >>> Judgement(score=1.0, final="42", terms={"format": 1.0}).score
    1.0
    """

    score: float
    """0..1: decides the verdict."""
    final: str = ""
    """The answer the response settled on; equal answers read the same, so that they can be counted."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Further rewards by name, before their weights."""


class Task(Protocol):
    name: str
    alphabet: str
    """Characters a tiny model must know; empty where a real tokenizer is meant."""

    def prompts(self, split: str, seed: int) -> PromptTable:
        """split "train" or "eval"; the two share no problem."""

    def judge(self, prompt: Prompt, response: str) -> float:
        """Score in 0..1. Runs in a worker process; may raise or hang, and costs only this rollout then."""

    def final(self, response: str) -> str:
        """The answer a response settled on, in a form in which equal answers are equal strings; "" for none."""

    def solutions(self, rng: np.random.Generator, count: int, **options: Any) -> list[tuple[Prompt, str]]:
        """Worked solutions to imitate: (prompt, response text without the end token)."""
