"""Supervised fine-tuning on worked solutions, before reinforcement learning: a base that is right now and then.

The loop calls `warm_start` once, before the first rollout. Same packs, head and optimiser as the learner; the loss is
the mean cross-entropy over the response tokens of an update, at temperature 1. Nothing is drawn at random here: the
same batches give the same weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from whet.errors import Diverged, WhetError
from whet.learn.optimizer import AdamW
from whet.model.head import head_of, log_probs
from whet.model.packing import Pair, check_packing, hidden_states, make_packs, packed_attention


def warm_start(
    model: Any,
    batches: Iterable[Sequence[Pair]],
    *,
    steps: int,
    lr: float,
    pack_tokens: int = 4096,
    grad_clip: float = 1.0,
    on_step: Callable[[int, float], None] | None = None,
) -> float:
    """`steps` updates, one a batch of (prompt ids, response ids with the end token); gives the last loss.

    The learning rate is that of `warm_start_rate`. `on_step(step, loss)` is told each loss.
    """
    model.eval()
    check_packing(model)
    optimizer = AdamW(model, grad_clip=grad_clip)
    loss, done = math.nan, 0
    for step, pairs in enumerate(itertools.islice(batches, steps)):
        loss = _cross_entropy(model, optimizer, pairs, pack_tokens)
        norm = optimizer.grad_norm()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(f"The warm start was not finite at step {step} (loss {loss}); lower warm_start.lr = {lr}.")
        optimizer.step(warm_start_rate(lr, step, steps), norm)
        done = step + 1
        if on_step is not None:
            on_step(step, loss)
    if done < steps:
        raise WhetError(f"The warm start wants {steps} batches of worked solutions and got {done}.")
    return loss


def warm_start_rate(lr: float, step: int, steps: int) -> float:
    """Up to lr over the first twentieth of the steps, while falling linearly to lr / 10 at the last one.

    >>> [round(warm_start_rate(1.0, s, 40), 3) for s in (0, 1, 39)]
    [0.5, 0.977, 0.1]
    """
    rising = min(1.0, (step + 1) / max(1, steps // 20))
    return lr * rising * (1.0 - 0.9 * step / max(steps - 1, 1))


def _cross_entropy(model: Any, optimizer: AdamW, pairs: Sequence[Pair], pack_tokens: int) -> float:
    """Leaves the gradient in the optimiser."""
    tokens = sum(len(response) for _, response in pairs)
    total = 0.0
    with packed_attention(model):
        for pack in make_packs(pairs, pack_tokens, model.device):
            lp, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets)
            loss = -lp.sum() / tokens
            loss.backward()
            optimizer.accumulate()
            total += float(loss.detach())
    return total
