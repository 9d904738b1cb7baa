"""What a pass over a batch adds up for its metrics; the learner makes one for each update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Sums:
    """Sums over the tokens of a pass; they stay on the device until the metrics are asked for."""

    loss: Tensor | float = 0.0
    mismatch_max: Tensor | float = 0.0
    totals: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, loss: Tensor, parts: Mapping[str, Tensor]) -> None:
        self.loss = self.loss + loss.detach()
        self.tokens += parts["mismatch"].numel()
        self.mismatch_max = torch.clamp(parts["mismatch"].max(), min=self.mismatch_max)
        for name, values in parts.items():
            total = values.detach().sum(dtype=torch.float64)
            self.totals[name] = self.totals[name] + total if name in self.totals else total

    def join(self, other: Sums, share: float) -> None:
        """Another pass, whose loss counts for so much."""
        self.loss = self.loss + share * other.loss
        self.tokens += other.tokens
        self.mismatch_max = torch.clamp(torch.as_tensor(other.mismatch_max), min=self.mismatch_max)
        self.totals = {name: total + self.totals.get(name, 0.0) for name, total in other.totals.items()}

    def metrics(self) -> dict[str, float]:
        means = {f"learn/{name}": float(total) / self.tokens for name, total in self.totals.items()}
        means["learn/importance_mean"] = means.pop("learn/importance")
        return {"learn/loss": float(self.loss), "learn/mismatch_max": float(self.mismatch_max), **means}
