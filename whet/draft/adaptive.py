"""The drafter that learns beside the policy: the head in use, what it trains on, and its trainer.

The engine fills the buffer with the hidden states of finished rollouts and drafts with `live`; the loop calls `train`
after each update, when nothing is being decoded, and the trained weights are published in place. It asks for nothing
but tensors, so the trainer may as well run where a GPU is idle.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from whet.draft.allowance import Allowance
from whet.draft.buffer import DataBuffer
from whet.draft.eagle import EagleHead, eagle_head
from whet.draft.training import DrafterTrainer
from whet.model.memory import BUFFER

SMALL, LARGE = 2048, 8192
"""Tokens of an update. A drafter learns faster by small ones, but on a GPU they take the host as long as large ones."""


class AdaptiveDrafter:
    def __init__(self, model: PreTrainedModel, share: float, seed: int = 0) -> None:
        """share: tokens to train on after a step, of those the step has generated."""
        self.live: EagleHead = eagle_head(model, seed=seed)
        self.buffer = DataBuffer(BUFFER, device=model.device)
        pack = LARGE if model.device.type == "cuda" else SMALL
        self.trainer = DrafterTrainer(self.live, self.buffer, pack=pack, seed=seed)
        self.share = share
        self.allowance = Allowance()

    def train(self, step_tokens: int, seconds: float = math.inf) -> dict[str, float]:
        """On a share of the step's tokens, then publishes; metrics of it, none where nothing was learnt.

        seconds: what the step grants. Where that is too little for an update nothing is learnt now, and it is kept for
        the next steps; what an update took beyond it is owed (`allowance.py`).
        """
        self.allowance.grant(seconds)
        if not self.share or not self.buffer.entries:
            return {}
        begin = time.perf_counter()
        budget = self.trainer.budget(step_tokens, self.share)
        done = self.trainer.run(budget, should_stop=lambda: not self.allowance.allows(time.perf_counter() - begin))
        if done.updates:
            self.trainer.publish(self.live)
        self.allowance.spend(time.perf_counter() - begin, done.updates + done.skipped)
        if not done.updates:
            return {}
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
