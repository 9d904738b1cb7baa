"""Drawing tokens from logits with keyed noise, and the log-prob that training needs.

The exponential race: token i arrives at E_i / p_i with E_i = -log1p(-u_i) standard exponential; the first
to arrive is distributed as p, exactly. In logs: argmax(log p_i - log E_i). u is never 0, so rounding can lose an
unlikely token but never force one. Called by the engine once a forward; pure functions of their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whet.model.noise import noise_bits, uniform


@dataclass(frozen=True, slots=True)
class Draws:
    """How B rows draw. None stands for "no row asks", so that the common case does no work."""

    keys: Tensor
    """[2, B] int32, from `row_key`."""
    temperature: Tensor | None = None
    """[B, 1], 1 for greedy rows. None: 1 everywhere."""
    greedy: Tensor | None = None
    """[B, 1] bool."""
    all_greedy: bool = False
    top_k: Tensor | None = None
    """[B, 1] int64; 0 keeps all."""
    top_p: Tensor | None = None
    """[B, 1]."""


def sample(logits: Tensor, draws: Draws, position: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and log-softmax(logits / T) of them [B], taken before top-k and top-p.

    `position` [B] int32 counts each row's generated tokens. Greedy rows record at T = 1.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if draws.temperature is not None:
        logits = logits / draws.temperature
    log_probs = torch.log_softmax(logits, -1)
    race = log_probs
    if draws.top_k is not None or draws.top_p is not None:
        race = race.masked_fill(_dropped(race, draws.top_k, draws.top_p), -torch.inf)
    if not draws.all_greedy:
        u = uniform(noise_bits(draws.keys, position, logits.shape[-1])).to(race.dtype)
        log_delay = u.neg_().log1p_().neg_().log_()
        if draws.greedy is not None:
            log_delay.masked_fill_(draws.greedy, 0.0)
        race = race - log_delay
    token = race.argmax(-1)
    return token, log_probs.gather(1, token[:, None])[:, 0]


def _dropped(log_probs: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """True where top-k, then top-p over what top-k left, takes a token out. The likeliest always stays."""
    ordered, index = log_probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    out = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        out |= (rank >= top_k) & (top_k > 0)
    if top_p is not None:
        probs = torch.softmax(ordered.masked_fill(out, -torch.inf), -1)
        before = probs.cumsum(-1) - probs
        out |= (before >= top_p) & (top_p < 1) & (rank > 0)  # rounding may sum to more than 1
    return torch.empty_like(out).scatter_(-1, index, out)
