"""The drafter that learns beside the policy: the head in use, what it trains on, and its trainer.

The engine fills the buffer with the hidden states of finished rollouts and drafts with `live`; the loop calls `train`
after each update, when nothing is being decoded, and the trained weights are published in place. It asks for nothing
but tensors, so the trainer may as well run where a GPU is idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from whet.draft.buffer import DataBuffer
from whet.draft.eagle import EagleHead, eagle_head
from whet.draft.training import DrafterTrainer

CAPACITY = 200_000
"""Tokens of the buffer: at 1,536 numbers a token and bfloat16, 600 MB of host memory."""


class AdaptiveDrafter:
    def __init__(self, model: PreTrainedModel, share: float, seed: int = 0) -> None:
        """share: tokens to train on after a step, of those the step has generated."""
        self.live: EagleHead = eagle_head(model, seed=seed)
        self.buffer = DataBuffer(CAPACITY, pin=model.device.type == "cuda")
        self.trainer = DrafterTrainer(self.live, self.buffer, seed=seed)
        self.share = share

    def train(self, step_tokens: int) -> dict[str, float]:
        """On a share of the step's tokens, then publishes; metrics of it, none where nothing was learnt."""
        if not self.share or not self.buffer.entries:
            return {}
        done = self.trainer.run(self.trainer.budget(step_tokens, self.share))
        if not done.updates:
            return {}
        self.trainer.publish(self.live)
        return {
            "draft/loss": done.token_loss,
            "draft/feature_loss": done.feature_loss,
            "draft/agreement": done.agreement,
            "draft/tokens_trained": float(done.tokens),
        }

    def tensors(self) -> dict[str, Tensor]:
        return self.trainer.tensors()

    def state_dict(self) -> dict[str, Any]:
        return self.trainer.state_dict()

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """The buffer starts empty: it fills within a step."""
        self.trainer.load(dict(state), dict(tensors))
        self.trainer.publish(self.live)
