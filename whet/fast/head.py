"""The LM head of the learner with the work after its matrix product compiled: see `whet.model.head` for the plain form.

`FastPasses` and the trials of `whet.fast.compiled` call `compiled_log_probs` in place of `log_probs`. The work on a
chunk is one kernel forward and one backward, and no fp32 logits are ever written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whet.model.head import CHUNK, Chunked, Head, Job, finish, wide_type


def compiled_log_probs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    entropy_grad: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """`log_probs`. It makes two narrow copies of the logits where the plain form makes four wide ones, so its chunks
    are larger by as much."""
    rows = max(1, chunk // head.weight.shape[0]) * max(1, 8 // hidden.element_size())
    if not isinstance(temperature, Tensor):  # a number would be compiled in
        temperature = torch.full((1,), temperature, dtype=wide_type(hidden), device=hidden.device)
    job = Job(head, targets, temperature, rows, entropy_grad, _score, _gradient)
    lp, entropy = Chunked.apply(hidden, head.weight, head.bias, job)
    return lp, entropy


def score_chunk(
    product: Tensor, targets: Tensor, temperature: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob, entropy, log sum exp) of the matrix product of a chunk."""
    logits = finish(product, temperature, scale, softcap)
    log_sum = torch.logsumexp(logits, dim=-1)
    log_p = logits - log_sum[:, None]
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), log_sum


def gradient_chunk(
    product: Tensor,
    targets: Tensor,
    temperature: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    of_lp: Tensor,
    of_entropy: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """The gradient of the product, element by element: the target is found by comparison and not by a scatter."""
    logits = finish(product, temperature, scale, softcap)
    log_p = logits - log_sum[:, None]
    p = log_p.exp()
    hit = torch.arange(product.shape[1], device=product.device) == targets[:, None]
    gradient = torch.where(hit, of_lp[:, None], 0.0) - p * of_lp[:, None]
    if of_entropy is not None:
        gradient = gradient - p * of_entropy[:, None] * (log_p + entropy[:, None])
    gradient = gradient / temperature.to(gradient.dtype)[:, None]
    if softcap is not None:  # d c tanh(x / c) = 1 - tanh^2
        tanh = torch.tanh(product.to(gradient.dtype) * scale / softcap)
        gradient = gradient * (1.0 - tanh * tanh)
    return (gradient * scale).to(product.dtype)


def _score(product: Tensor, targets: Tensor, temperature: Tensor, head: Head) -> tuple[Tensor, ...]:
    scores: tuple[Tensor, ...] = _compile(score_chunk)(
        _static_width(product), targets, temperature, head.scale, head.softcap
    )
    return scores


def _gradient(
    product: Tensor,
    targets: Tensor,
    temperature: Tensor,
    head: Head,
    of_lp: Tensor,
    of_entropy: Tensor | None,
    entropy: Tensor,
    log_sum: Tensor,
) -> Tensor:
    known = targets, temperature, log_sum, entropy, of_lp, of_entropy
    gradient: Tensor = _compile(gradient_chunk)(_static_width(product), *known, head.scale, head.softcap)
    return gradient


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _static_width(product: Tensor) -> Tensor:
    """Tokens differ from chunk to chunk, the vocabulary never."""
    torch._dynamo.mark_static(product, 1)
    return product
