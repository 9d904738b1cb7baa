"""The sampler: one token a row by the exponential race with keyed noise, and its log-prob, without a look at the host.

Called by the rollout's step once a forward, within its captured graph; `whet.rollout.sampling.sample` is the general
form with top-k and top-p. Takes the Triton kernels of `race_triton` on CUDA (or under Triton's interpreter), else
`reference`.

Token i of a row arrives at E_i / p_i, E_i = -log1p(-u_i) with u_i from `whet.model.noise`; the first wins. The kernels
race p_i / E_i itself where `sample` races log p_i - log E_i: one logarithm less, and nothing that could win is rounded
to 0, since 2^-25 <= E < 17.4 keeps every winner within a factor of 6e8 of the likeliest token.

Both draw the same token unless the two best of a row are closer than rounding: |log race_1 - log race_2| below about
4e-6 for |logits / T| up to 32 (a few units in the last place of float32), in proportion above. The gap of a race lies
below x with probability at most x, so a token in about 250,000 may differ. Greedy rows compare logits as they
are and never differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.model.kernels.dispatch import takes_triton
from whet.model.noise import noise_bits, uniform


def race(logits: Tensor, keys: Tensor, position: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and log-softmax(logits / T) of them, float32 [B].

    logits [B, V]; keys int32 [2, B] from `row_key`; position int32 [B], how many tokens the row has generated;
    temperature [B], 0 for greedy rows: the first of the largest logits, recorded at T = 1. A logit that is not a
    number gives a log-prob that is none, and a token of the vocabulary all the same.
    """
    batch = len(logits)
    if keys.shape != (2, batch) or position.shape != (batch,) or temperature.shape != (batch,):
        raise ValueError(f"{batch} rows of logits need two keys, a position and a temperature each")
    if keys.dtype != torch.int32 or position.dtype != torch.int32:
        raise ValueError("keys and positions are int32, the words of the hash")
    if takes_triton(logits):
        from whet.model.kernels.race_triton import launch

        return launch(logits, keys, position, temperature)
    return reference(logits, keys, position, temperature)


def reference(logits: Tensor, keys: Tensor, position: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """`race` in plain torch, in float64 if the logits are: the oracle, and the path without Triton."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    greedy = (temperature == 0)[:, None]
    heated = logits / temperature.to(logits.dtype)[:, None].masked_fill(greedy, 1.0)
    log_probs = heated - heated.logsumexp(-1, keepdim=True)  # log_softmax adds up a long row less exactly on a CPU
    u = uniform(noise_bits(keys, position, logits.shape[1])).to(logits.dtype)
    log_delay = (-torch.log1p(-u)).log().masked_fill(greedy, 0.0)
    token = torch.where(greedy, logits, log_probs - log_delay).argmax(-1)
    return token, log_probs.gather(1, token[:, None])[:, 0].float()
