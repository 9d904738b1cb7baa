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

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from whet.draft.allowance import Allowance
from whet.draft.buffer import DataBuffer
from whet.draft.eagle import EagleHead, draft_vocabulary, eagle_head
from whet.draft.training import DrafterTrainer
from whet.model.head import head_of
from whet.model.memory import BUFFER

SMALL, LARGE = 2048, 8192
"""Tokens of an update. A drafter learns faster by small ones, but on a GPU they take the host as long as large ones."""
WORDS = 16_384
"""Tokens that a drafter which learns may propose, where the target has twice as many: those that rollouts use most. The
rows of the head are most of what a drafted token reads."""
LASTING = 16
"""Lessons between two choices of them."""


class AdaptiveDrafter:
    def __init__(self, model: PreTrainedModel, share: float, seed: int = 0, like: EagleHead | None = None) -> None:
        """share: tokens to train on after a step, of those the step has generated; like: what it begins with and
        leaves as it is, random weights where None."""
        self.vocabulary = len(head_of(model).weight)
        # Before anything was seen the smallest ids, which a tokenizer of merges gives to the most frequent tokens.
        few = share > 0 and self.vocabulary >= 2 * WORDS
        words = draft_vocabulary(np.zeros(self.vocabulary), WORDS) if few else None
        if like is not None:
            words = None if like.draft_ids is None else like.draft_ids.clone()  # it may choose others
        self.live: EagleHead = eagle_head(model, draft_ids=words, dtype=like.dtype if like else None, seed=seed)
        if like is not None:
            self.live.take(like)
        self.buffer = DataBuffer(BUFFER, share=share, device=model.device)
        pack = LARGE if model.device.type == "cuda" else SMALL
        self.trainer = DrafterTrainer(self.live, self.buffer, pack=pack, seed=seed)
        self.share = share
        self.allowance = Allowance()
        self.lessons = 0
        self.failures = 0
        """Of lessons: there are none after the first."""

    def train(self, step_tokens: int, seconds: float = math.inf) -> dict[str, float]:
        """On a share of the step's tokens, then publishes; metrics of it, none where nothing was learnt.

        seconds: what the step grants. Where that is too little for an update nothing is learnt now, and it is kept for
        the next steps; what an update took beyond it is owed (`allowance.py`).
        """
        self.allowance.grant(seconds)
        if not self.share or not self.buffer.entries:
            return {}
        begin = time.perf_counter()
        if self.live.draft_ids is not None and self.lessons % LASTING == 0:
            self.live.speak(draft_vocabulary(self.buffer.counts(self.vocabulary), len(self.live.draft_ids)))
        self.lessons += 1
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

    def give_up(self, error: Exception) -> str:
        """A lesson raised: there are no more, and what was published last goes on drafting. What to tell of it."""
        self.failures += 1
        self.end()
        first = next(iter(str(error).splitlines()), "")
        return (
            f"Training the drafter failed ({type(error).__name__}: {first}): its lessons end here, and it goes on "
            "drafting with what it has learnt; no token of the run depends on it."
        )

    def end(self) -> None:
        """No more lessons, and none of the memory that they want; what was published last goes on drafting."""
        self.share = 0.0
        self.trainer.optimizer.zero_grad(set_to_none=True)
        self.buffer.close()

    def tensors(self) -> dict[str, Tensor]:
        words = {} if self.live.draft_ids is None else {"words": self.live.draft_ids}
        return {**self.trainer.tensors(), **words}

    def state_dict(self) -> dict[str, Any]:
        own = {"lessons": self.lessons, "allowance": self.allowance.state_dict()}
        return {**self.trainer.state_dict(), **own}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """The buffer starts empty: it fills within a step."""
        tensors = dict(tensors)
        words = tensors.pop("words", None)
        if self.live.draft_ids is not None and words is not None:
            self.live.speak(words)
        self.trainer.load(dict(state), tensors)
        self.lessons = state.get("lessons", 0)
        self.allowance.load_state_dict(state.get("allowance", self.allowance.state_dict()))
        self.trainer.publish(self.live)
