"""Log-probs of given tokens, and entropies, from hidden states: the LM head, without ever holding [tokens, vocab].

The learner and the warm start call `log_probs`. Tokens go through the head in chunks; the backward pass computes each
chunk again instead of keeping it, and adds up the head's gradient in fp32. `score_sums`, the gradient of a response's
log-prob in its hidden states, is for curricula that ask for it (CurES); it takes no backward pass. `Head.logits` is
what a Hugging Face model does after its last layer (bias, logit scale, soft-cap), in fp32 once the matrix product is
done. What it does not know (a head wrapped by an adapter, a transform of its own) is refused here or found by
`packing.check_packing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import WhetError

CHUNK = 2**27
"""Logits at once: 882 tokens of a vocabulary of 152k, 512 MiB in fp32. Each chunk adds to the head's gradient once."""


@dataclass(frozen=True, slots=True)
class Head:
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    """Gemma 2: logits become c tanh(logits / c)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32, or fp64 for an fp64 model."""
        return self.finish(nn.functional.linear(hidden, self.weight, self.bias))

    def finish(self, product: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        """What comes after the matrix product: fp32, scale, soft-cap, temperature (a number, or one a token)."""
        logits = product if product.dtype == torch.float64 else product.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if isinstance(temperature, Tensor):
            return logits / temperature.to(logits.dtype).unsqueeze(-1)
        return logits if temperature == 1.0 else logits / temperature


def head_of(model: Any) -> Head:
    """The head of a Hugging Face causal model, its live weights not copied."""
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:
        kind = type(linear).__name__
        raise WhetError(
            f"{type(model).__name__} ends in {kind}, where a plain linear head is needed; choose another model."
        )
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(linear.weight, linear.bias, _logit_scale(config), softcap)


def log_probs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    entropy_grad: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(log-prob of `targets`, entropy) of softmax(logits / temperature), both [tokens] in fp32 (fp64 for fp64).

    hidden is [tokens, width], temperature a number or [tokens]. The entropy carries a gradient only when asked to.
    No tensor larger than `chunk` logits (or one token's) is made.
    """
    rows = max(1, chunk // head.weight.shape[0])
    if hidden.shape[0] <= rows:
        product = nn.functional.linear(hidden, head.weight, head.bias)
        return _score(head.finish(product, temperature), targets, entropy_grad)
    lp, entropy = _Chunked.apply(hidden, head.weight, head.bias, head, targets, temperature, rows, entropy_grad)
    return lp, entropy


@torch.no_grad()
def score_sums(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    counts: Sequence[int],
    temperature: Tensor | float = 1.0,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """[responses, width]: s = sum over a response's tokens of d log-prob / d hidden, in fp32 (fp64 for fp64).

    For a plain head that is sum_t (onehot(y_t) - pi_t) W / temperature, the score of a bias added to the last hidden
    state; logit scale and soft-cap come in as they do in the log-prob. `counts`: tokens of each response, which lie
    one after the other. Tokens are summed before they meet W, so a chunk costs one product with the head, not two,
    and nothing larger than it is made.
    """
    sums = torch.zeros(len(counts), hidden.shape[1], dtype=_wide(hidden), device=hidden.device)
    for part, pieces in _pieces(counts, max(1, chunk // head.weight.shape[0])):
        product = nn.functional.linear(hidden[part], head.weight, head.bias).to(sums.dtype)
        ones = product.new_ones(len(product))
        gradient = _product_gradient(head, product, targets[part], _of(temperature, part), ones, None)
        owners = slice(pieces[0][0], pieces[-1][0] + 1)
        of_logits = torch.stack([piece.sum(0) for piece in gradient.split([tokens for _, tokens in pieces])])
        sums[owners] += of_logits.to(head.weight.dtype) @ head.weight
    return sums


def _pieces(counts: Sequence[int], rows: int) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
    """Chunks of `rows` tokens, and of whom they are: (response, tokens of it in the chunk).

    >>> [pieces for _, pieces in _pieces([2, 3], rows=4)]
    [[(0, 2), (1, 2)], [(1, 1)]]
    """
    start, pieces, room = 0, list[tuple[int, int]](), rows
    for owner, count in enumerate(counts):
        while count:
            tokens = min(count, room)
            pieces.append((owner, tokens))
            count, room = count - tokens, room - tokens
            if not room:
                yield slice(start, start + rows), pieces
                start, pieces, room = start + rows, [], rows
    if pieces:
        yield slice(start, start + rows - room), pieces


def _score(logits: Tensor, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def _score_gradient(logits: Tensor, targets: Tensor, of_lp: Tensor, of_entropy: Tensor | None) -> Tensor:
    """Of `_score` in the logits: d lp / dz = onehot - p, dH / dz = -p (log p + H). Few passes: memory is the limit."""
    if of_entropy is None:
        gradient = torch.softmax(logits, dim=-1).mul_(-of_lp[:, None])
    else:
        log_p = torch.log_softmax(logits, dim=-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        gradient = -p * (of_lp[:, None] + of_entropy[:, None] * (log_p + entropy))
    return gradient.scatter_add_(-1, targets[:, None], of_lp[:, None])


def _product_gradient(
    head: Head,
    product: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
    of_lp: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """Of `_score` in the head's matrix product: back through temperature, soft-cap and scale."""
    product.requires_grad_()
    with torch.enable_grad():
        logits = head.finish(product, temperature)
    of_logits = _score_gradient(logits.detach(), targets, of_lp, of_entropy)
    return of_logits if logits is product else torch.autograd.grad(logits, product, of_logits)[0]


class _Chunked(torch.autograd.Function):
    """`_score` over the head, chunk by chunk; nothing of a chunk outlives it but its two numbers a token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        targets: Tensor,
        temperature: Tensor | float,
        rows: int,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.head, ctx.targets, ctx.temperature, ctx.rows, ctx.entropy_grad = (
            head,
            targets,
            temperature,
            rows,
            entropy_grad,
        )
        scores = []
        for part in _parts(hidden, rows):
            logits = head.finish(nn.functional.linear(hidden[part], weight, bias), _of(temperature, part))
            scores.append(_score(logits, targets[part], False))
        lp, entropy = (torch.cat(values) for values in zip(*scores, strict=True))
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return lp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=_wide(weight)) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=_wide(bias)) if ctx.needs_input_grad[2] else None
        for part in _parts(hidden, ctx.rows):
            of_lp, of_entropy = grads[0][part], grads[1][part] if ctx.entropy_grad else None
            product, heat = nn.functional.linear(hidden[part], weight, bias), _of(ctx.temperature, part)
            of_product = _product_gradient(ctx.head, product, ctx.targets[part], heat, of_lp, of_entropy)
            of_hidden[part] = of_product @ weight
            if of_weight is not None:
                of_weight += of_product.T @ hidden[part]
            if of_bias is not None:
                of_bias += of_product.sum(0)
        narrow = (None if g is None else g.to(hidden.dtype) for g in (of_weight, of_bias))
        return of_hidden, *narrow, None, None, None, None, None


def _parts(hidden: Tensor, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, hidden.shape[0], rows)]


def _of(temperature: Tensor | float, part: slice) -> Tensor | float:
    return temperature[part] if isinstance(temperature, Tensor) else temperature


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _logit_scale(config: Any) -> float:
    """What transformers multiplies the logits by. Granite and MiniCPM3 divide by `logits_scaling`, HyperCLOVA X
    multiplies by it; Cohere multiplies by `logit_scale`, Falcon-H1 by `lm_head_multiplier`."""
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    scale = scaling if config.model_type == "hyperclovax" else 1.0 / scaling
    for name in ("logit_scale", "lm_head_multiplier"):
        value = getattr(config, name, None)
        scale *= float(value) if isinstance(value, int | float) else 1.0
    return scale
