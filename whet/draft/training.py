"""Training of the EAGLE drafter on what the target has computed anyway.

`DrafterTrainer.run` takes tokens from a `DataBuffer` under a budget, one optimiser update a pack, and asks between
packs whether to stop; what it has done and what comes next follow from the number of packs so far, so a run that was
stopped, saved and loaded goes on exactly as one that was not. `publish` writes the weights into the drafter in use,
in place. It trains a copy of its own in fp32 and needs nothing but tensors: it may live in the engine's process or in
another. When to run, and on which device or stream, is the caller's business.

Loss of the pair (h_t, x_{t+1}) with guess f_t, as in EAGLE and TLT, mean over pairs whose guess is of the response:
    feature_weight * SmoothL1(f_t, h_{t+1}) + token_weight * CE(softmax(head(h_{t+1})), softmax(head(f_t)))
both softmax at temperature 1 over the draft vocabulary, renormalised on it: its order is all that drafting uses.
A chain is drafted from guesses, not from hidden states of the target. So a share of the h_t is replaced by the
drafter's own guess of them, made by one more forward pass (OURS; HASS and EAGLE-3 unroll several steps instead).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from whet.draft.buffer import DataBuffer, Window
from whet.draft.eagle import EagleHead, draft_vocabulary, eagle_head
from whet.errors import WhetError
from whet.model.head import head_of
from whet.model.memory import BUFFER
from whet.model.packing import Boundaries, make_packs

SHARE = 0.2
"""Of a step's tokens, at most trained on."""
CHUNK = 2**26
"""Logits at once: 256 MiB in fp32."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Windows packed: T pairs, document after document."""

    hidden: Tensor
    """[T, width]: h_t."""
    ids: Tensor
    """[T]: x_{t+1}."""
    answer: Tensor
    """[T, width]: h_{t+1}."""
    position: Tensor
    """[T]: t."""
    trained: Tensor
    """bool [T]: whether x_{t+2}, which is what is guessed, belongs to the response."""
    packed: Boundaries


@dataclass(frozen=True, slots=True)
class Trained:
    """What one run did; means over the pairs that were trained."""

    updates: int
    tokens: int
    feature_loss: float
    token_loss: float
    agreement: float
    """Share of pairs where the drafter's likeliest token is the target's likeliest of the draft vocabulary."""
    skipped: int
    """Packs without a gradient to follow: nothing of a response, or not finite."""
    stopped: bool
    """Whether it was told to stop before its budget was spent."""


def pair_up(windows: Sequence[Window], device: torch.device | str = "cpu") -> Pairs:
    """Windows side by side, longest first (`DataBuffer.sample` gives them so)."""
    # A pack leaves out the last token of its sequences: a token that is nobody's stands there.
    documents = [(w.entry.ids[w.start + 1 : w.stop + 1].numpy(), [0]) for w in windows]
    (pack,) = make_packs(documents, budget=sum(map(len, windows)), device=device)
    windows = [windows[i] for i in pack.members]

    def put(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.to(device, non_blocking=True) for part in parts])

    return Pairs(
        hidden=put([w.entry.hidden[w.start : w.stop] for w in windows]),
        ids=pack.input_ids[0],
        answer=put([w.entry.hidden[w.start + 1 : w.stop + 1] for w in windows]),
        position=put([torch.arange(w.start, w.stop) for w in windows]),
        trained=put([torch.arange(w.start, w.stop) + 2 >= w.entry.prompt for w in windows]),
        packed=pack.boundaries,
    )


@torch.no_grad()
def with_guesses(head: EagleHead, pairs: Pairs, chosen: Tensor) -> Pairs:
    """The states of pairs that are chosen (bool [T]) replaced by the guess made one pair earlier.

    The first pair of a document has none before it and keeps its state.
    """
    guess = head(pairs.hidden, pairs.ids, pairs.position, pairs.packed)
    earlier = guess.roll(1, 0).to(pairs.hidden.dtype)
    chosen = chosen.index_fill(0, pairs.packed.starts[:-1].long(), False)
    return replace(pairs, hidden=torch.where(chosen[:, None], earlier, pairs.hidden))


def losses(head: EagleHead, pairs: Pairs, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    """(feature loss, token loss, agreement), each summed over the pairs that are trained."""
    guess = head(pairs.hidden, pairs.ids, pairs.position, pairs.packed)[pairs.trained]
    wide = torch.promote_types(guess.dtype, torch.float32)
    answer = pairs.answer[pairs.trained]
    features = F.smooth_l1_loss(guess.to(wide), answer.to(wide), reduction="none").mean(-1).sum()
    tokens, agreement = features.new_zeros(()), features.new_zeros(())
    rows = max(1, chunk // head.draft_head.weight.shape[0])
    for mine, theirs in zip(guess.split(rows), answer.split(rows), strict=True):
        loss, agreed = checkpoint(_token_loss, head, mine, theirs, use_reentrant=False)
        tokens, agreement = tokens + loss, agreement + agreed
    return features, tokens, agreement


def _token_loss(head: EagleHead, guess: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    ours = head.logits(guess)
    with torch.no_grad():
        theirs = head.logits(answer)
        agreed = (ours.argmax(-1) == theirs.argmax(-1)).sum()
        wanted = theirs.softmax(-1)
    return -(wanted * ours.log_softmax(-1)).sum(), agreed


class DrafterTrainer:
    def __init__(
        self,
        live: EagleHead,
        buffer: DataBuffer,
        *,
        lr: float = 5e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        warmup: int = 20,
        clip: float = 1.0,
        feature_weight: float = 1.0,
        token_weight: float = 1.0,
        own_guesses: float = 0.3,
        pack: int = 2048,
        half: bool | None = None,
        seed: int = 0,
    ) -> None:
        """Starts from `live`, which it leaves alone until `publish`. `warmup` in updates, `pack` in tokens.

        Betas, decay, clip and the feature weight are TLT's. OURS: learning rate and warm-up, since TLT's (1e-6, 1000)
        presuppose a drafter trained beforehand; a token weight of 1 for 0.1, and small packs, both of which a drafter
        that starts from nothing learns faster with; `own_guesses`, the share of states replaced by guesses.
        `half`: whether matrices are multiplied in bfloat16, on a GPU where nothing is said; the weights stay fp32.
        """
        wide = torch.float64 if live.dtype == torch.float64 else torch.float32
        self.head, self.buffer = live.copy(wide), buffer
        self.lr, self.warmup, self.clip, self.pack, self.seed = lr, warmup, clip, pack, seed
        self.feature_weight, self.token_weight, self.own_guesses = feature_weight, token_weight, own_guesses
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)
        self.half = live.fc.is_cuda if half is None else half
        self.packs = 0
        """Taken from the buffer so far, by this trainer or the one it was loaded from."""
        self.updates = 0

    def run(self, budget: int, should_stop: Callable[[], bool] = lambda: False) -> Trained:
        """Trains on `budget` tokens at most; stops within one pack of `should_stop` turning true."""
        done = updates = 0
        sums = torch.zeros(4, dtype=torch.float64)
        stopped, skipped = False, 0
        while done < budget:
            if stopped := should_stop():
                break
            windows = self.buffer.sample(min(self.pack, budget - done), (self.seed, self.packs))
            if not windows:
                break
            found = self._update(pair_up(windows, self.head.fc.device))
            self.packs += 1
            done += sum(map(len, windows))
            if found is None:
                skipped += 1
            else:
                sums, updates = sums + found, updates + 1
        features, tokens, agreement = (sums[:-1] / sums[-1].clamp(min=1)).tolist()
        return Trained(updates, done, features, tokens, agreement, skipped, stopped)

    def budget(self, step_tokens: int, share: float = SHARE) -> int:
        """Tokens to train on in a step that generated `step_tokens`."""
        return int(share * step_tokens)

    @torch.no_grad()
    def publish(self, live: EagleHead) -> None:
        """The trained weights into the drafter in use, in place, at a moment when nothing runs on it."""
        live.take(self.head)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """JSON; with `tensors` all there is to continue from, given the same buffer."""
        return {"packs": self.packs, "updates": self.updates, "seed": self.seed}

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by name, for safetensors. Nothing of the target's."""
        out = {}
        for name, weight in self.head.named_parameters():
            state = self.optimizer.state[weight]
            out[f"weight.{name}"] = weight.detach().clone()
            out |= {
                f"{m}.{name}": state[m].clone() if m in state else torch.zeros_like(weight).detach() for m in MOMENTS
            }
        return out

    @torch.no_grad()
    def load(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        parts = {f"{part}.{name}": w for name, w in self.head.named_parameters() for part in ("weight", *MOMENTS)}
        wrong = [name for name, w in parts.items() if name not in tensors or tensors[name].shape != w.shape]
        if wrong:
            raise WhetError(
                f"The saved drafter does not fit this model ({wrong[0]}); start it anew or change the model."
            )
        self.packs, self.updates, self.seed = int(state["packs"]), int(state["updates"]), int(state["seed"])
        for name, weight in self.head.named_parameters():
            weight.copy_(tensors[f"weight.{name}"])
            if self.updates:
                moments = {m: tensors[f"{m}.{name}"].to(weight).clone() for m in MOMENTS}
                self.optimizer.state[weight] = {"step": torch.tensor(float(self.updates)), **moments}

    # ---- one pack

    def _update(self, pairs: Pairs) -> Tensor | None:
        """Sums of `losses` and the pairs they are over; None where there was no gradient to follow."""
        trained = int(pairs.trained.sum())
        if not trained:
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.updates + 1) / max(1, self.warmup))
        if self.own_guesses:
            drawn = np.random.default_rng([self.seed, self.packs, 1]).random(len(pairs.ids))
            chosen = torch.from_numpy(drawn < self.own_guesses).to(self.head.fc.device)
            with self._precision():  # one of its own: weights that it casts without gradients are kept until it ends
                pairs = with_guesses(self.head, pairs, chosen)
        with torch.enable_grad(), self._precision():
            found = losses(self.head, pairs)
        loss = (self.feature_weight * found[0] + self.token_weight * found[1]) / trained
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.clip)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return None
        self.optimizer.step()
        self.updates += 1
        sums = torch.stack([part.detach().double() for part in found])
        return torch.cat((sums, sums.new_tensor([trained]))).cpu()

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.head.fc.device.type, torch.bfloat16, enabled=self.half)


# ---- allowance
#
# Seconds that a drafter's lessons may take: each step grants some, and what is overspent is owed.
#
# Used by `adaptive.py`. Numbers alone: who measures them, and what share of a step is granted, is said elsewhere.


class Allowance:
    """An update is the least that a lesson does, so it waits until there is more than the last one took; meanwhile what
    is left is kept. More than that lapses: a step that was slow for reasons of its own is not paid for by quick ones.
    All that is spent is thus at most all that is granted and one update. The first lesson is not counted: it makes
    kernels ready, which says nothing of those to come.

    >>> allowance = Allowance()
    >>> allowance.spend(2.0, updates=1)
    >>> for _ in range(4):
    ...     allowance.grant(0.03)
    ...     if allowance.allows():
    ...         allowance.spend(0.045, updates=1)
    ...     print(f"{allowance.left:.3f}")
    -0.015
    0.015
    0.045
    0.030
    """

    def __init__(self) -> None:
        self.left = 0.0
        self.each = 0.0
        """What an update took in the last lesson; nothing is known before the second."""
        self._begun = False

    def grant(self, seconds: float) -> None:
        self.left = min(self.left, self.each) + seconds

    def allows(self, spent: float = 0.0) -> bool:
        """One more update, in a lesson that has taken so long."""
        return spent + self.each < self.left

    def spend(self, seconds: float, updates: int) -> None:
        """A lesson of so many updates, over."""
        if updates and not self._begun:
            self._begun = True
            return
        self.left -= seconds
        if updates:
            self.each = seconds / updates

    def state_dict(self) -> dict[str, float]:
        """What the next grant would keep. A run that goes on makes its kernels ready again, so its first lesson is not
        counted either."""
        return {"left": min(self.left, self.each), "each": self.each}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.left, self.each = float(state["left"]), float(state["each"])


# ---- adaptive
#
# The drafter that learns beside the policy: the head in use, what it trains on, and its trainer.
#
# The engine fills the buffer with the hidden states of finished rollouts and drafts with `live`; the loop calls `train`
# after each update, when nothing is being decoded, and the trained weights are published in place. It asks for nothing
# but tensors, so the trainer may as well run where a GPU is idle.


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
