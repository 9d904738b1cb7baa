"""Log-probs of given tokens, and entropies, from hidden states: the LM head, without ever holding [tokens, vocab].

The learner and the warm start call `log_probs`. Tokens go through the head in chunks; the backward pass computes each
chunk again instead of keeping it, and adds up the head's gradient in fp32. Compiled (on a GPU), what a chunk does after
its matrix product is one kernel forward and one backward, and no fp32 logits are ever written. `score_sums`, the
gradient of a response's log-prob in its hidden states, is for curricula that ask for it (CurES); it takes no backward
pass. `Head.logits` is what a Hugging Face model does after its last layer (bias, logit scale, soft-cap), in fp32 once
the matrix product is done. What it does not know (a head wrapped by an adapter, a transform of its own) is refused here
or found by `packing.check_packing`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
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

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """In the type of the product where nothing is done to it: whoever reads them widens them on the way."""
        product = nn.functional.linear(hidden, self.weight, self.bias)
        return product if self.scale == 1.0 and self.softcap is None else self.finish(product)

    def finish(self, product: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        """What comes after the matrix product: fp32, scale, soft-cap, temperature (a number, or one a token)."""
        return _finish(product, temperature, self.scale, self.softcap)


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
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-prob of `targets`, entropy) of softmax(logits / temperature), both [tokens] in fp32 (fp64 for fp64).

    hidden is [tokens, width], temperature a number or [tokens]. The entropy carries a gradient only when asked to.
    No tensor larger than `chunk` logits (or one token's) is made. `compiled` makes two narrow copies of the logits
    where the plain way makes four wide ones, so its chunks are larger by as much.
    """
    rows = max(1, chunk // head.weight.shape[0])
    if compiled:
        rows *= max(1, 8 // hidden.element_size())
        if not isinstance(temperature, Tensor):  # a number would be compiled in
            temperature = torch.full((1,), temperature, dtype=wide_type(hidden), device=hidden.device)
        lp, entropy = _Compiled.apply(hidden, head.weight, head.bias, head, targets, temperature, rows, entropy_grad)
        return lp, entropy
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
    sums = torch.zeros(len(counts), hidden.shape[1], dtype=wide_type(hidden), device=hidden.device)
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
        add = _Gradients(ctx, hidden, weight, bias)
        for part in _parts(hidden, ctx.rows):
            of_lp, of_entropy = grads[0][part], grads[1][part] if ctx.entropy_grad else None
            product, heat = nn.functional.linear(hidden[part], weight, bias), _of(ctx.temperature, part)
            add(part, _product_gradient(ctx.head, product, ctx.targets[part], heat, of_lp, of_entropy))
        return (*add.narrow(), None, None, None, None, None)


class _Compiled(torch.autograd.Function):
    """`_Chunked` with the work after the matrix product compiled; it also keeps log(sum of exp) a token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        targets: Tensor,
        temperature: Tensor,
        rows: int,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        work, scores = _compile(score_chunk), []
        for part in _parts(hidden, rows):
            product = _static_width(nn.functional.linear(hidden[part], weight, bias))
            scores.append(work(product, targets[part], _of(temperature, part), head.scale, head.softcap))
        lp, entropy, log_sum = (torch.cat(values) for values in zip(*scores, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, log_sum, entropy)
        ctx.head, ctx.rows, ctx.entropy_grad = head, rows, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return lp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, log_sum, entropy = ctx.saved_tensors
        work, add = _compile(gradient_chunk), _Gradients(ctx, hidden, weight, bias)
        for part in _parts(hidden, ctx.rows):
            product = _static_width(nn.functional.linear(hidden[part], weight, bias))
            of_lp, of_entropy = grads[0][part], grads[1][part] if ctx.entropy_grad else None
            known = targets[part], _of(temperature, part), log_sum[part], entropy[part]
            add(part, work(product, *known, of_lp, of_entropy, ctx.head.scale, ctx.head.softcap))
        return (*add.narrow(), None, None, None, None, None)


class _Gradients:
    """Of hidden states, weight and bias, from the chunks' gradients of the matrix product; summed in fp32."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.inputs, self.of_hidden = (hidden, weight), torch.empty_like(hidden)
        wanted = [t if need else None for t, need in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)]
        self.of_weight, self.of_bias = (None if t is None else torch.zeros_like(t, dtype=wide_type(t)) for t in wanted)

    def __call__(self, part: slice, of_product: Tensor) -> None:
        hidden, weight = self.inputs
        self.of_hidden[part] = of_product @ weight
        if self.of_weight is not None:
            self.of_weight += of_product.T @ hidden[part]
        if self.of_bias is not None:
            self.of_bias += of_product.sum(0)

    def narrow(self) -> tuple[Tensor | None, ...]:
        parts = (self.of_weight, self.of_bias)
        return self.of_hidden, *(None if g is None else g.to(self.of_hidden.dtype) for g in parts)


def score_chunk(
    product: Tensor, targets: Tensor, temperature: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob, entropy, log sum exp) of a chunk's matrix product: `_score`, written to be compiled."""
    logits = _finish(product, temperature, scale, softcap)
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
    """`_product_gradient`, written to be compiled: elementwise, the target found by comparison and not by scatter."""
    logits = _finish(product, temperature, scale, softcap)
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


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _static_width(product: Tensor) -> Tensor:
    """Tokens differ from chunk to chunk, the vocabulary never."""
    torch._dynamo.mark_static(product, 1)
    return product


def _finish(product: Tensor, temperature: Tensor | float, scale: float, softcap: float | None) -> Tensor:
    logits = product if product.dtype == torch.float64 else product.float()
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if isinstance(temperature, Tensor):
        return logits / temperature.to(logits.dtype).unsqueeze(-1)
    return logits if temperature == 1.0 else logits / temperature


def _parts(hidden: Tensor, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, hidden.shape[0], rows)]


def _of(temperature: Tensor | float, part: slice) -> Tensor | float:
    return temperature[part] if isinstance(temperature, Tensor) and len(temperature) > 1 else temperature


def wide_type(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for an fp64 tensor: the type that sums, softmaxes and losses are computed in."""
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
