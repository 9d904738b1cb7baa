"""Log-probs of given tokens, and entropies, from hidden states: the LM head, without ever holding [tokens, vocab].

The learner and the warm start call `log_probs`. Tokens go through the head in chunks; the backward pass computes each
chunk again instead of keeping it, and adds up the gradient of the head in fp32. `score_sums`, the gradient of a
response's log-prob in its hidden states, is for curricula that need it (CurES); it takes no backward pass.
`Head.logits` is what a Hugging Face model does after its last layer (bias, logit scale, soft-cap), in fp32 after the
matrix product. A head that it cannot reproduce (wrapped by an adapter, a transform of its own) is refused here or found
by `packing.check_packing`. `whet.fast.compiled` compiles the work on a chunk for GPUs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from whet.errors import WhetError

# Shapes: hidden [R, width], weight [V, width], bias [V], product and logits [r, V] for r of the R tokens, targets,
#         log-probs and entropies [R], temperature a number or [R].

CHUNK = 2**27  # logits at once: 882 tokens of a vocabulary of 152k, 512 MiB in fp32
Heat = Tensor | float  # a temperature, for all tokens or for each


@dataclass(frozen=True, slots=True)
class Head:
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None  # Gemma 2: logits become c tanh(logits / c)

    def to(self, dtype: torch.dtype) -> Head:
        """The same with weights of another type."""
        return replace(
            self,
            weight=self.weight.to(dtype),
            bias=None if self.bias is None else self.bias.to(dtype),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in fp32, or in fp64 for an fp64 model."""
        return self.finish(linear(hidden, self.weight, self.bias))

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """Logits in the type of the product where nothing follows it: the reader widens them on the way."""
        product = linear(hidden, self.weight, self.bias)
        return product if self.scale == 1.0 and self.softcap is None else self.finish(product)

    def finish(self, product: Tensor, temperature: Heat = 1.0) -> Tensor:
        """The logits of a matrix product, divided by the temperature (a number, or one per token)."""
        return finish(product, temperature, self.scale, self.softcap)


def finish(product: Tensor, temperature: Heat, scale: float, softcap: float | None) -> Tensor:
    logits = product.to(wide_type(product))
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if isinstance(temperature, Tensor):
        return logits / temperature.to(logits.dtype).unsqueeze(-1)
    return logits if temperature == 1.0 else logits / temperature


def wide_type(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for an fp64 tensor: the type that sums, softmaxes and losses are computed in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def head_of(model: Any) -> Head:
    """The head of a Hugging Face causal model; its live weights are not copied."""
    last = model.get_output_embeddings()
    if type(last) is not nn.Linear:
        ending = f"{type(model).__name__} ends in {type(last).__name__}"
        raise WhetError(f"{ending}, where a plain linear head is needed; choose another model.")
    config = model.config.get_text_config()
    # Granite and MiniCPM3 divide logits by `logits_scaling`, HyperCLOVA X multiplies by it; Cohere multiplies by
    # `logit_scale`, Falcon-H1 by `lm_head_multiplier`.
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    scale = scaling if config.model_type == "hyperclovax" else 1.0 / scaling
    for name in ("logit_scale", "lm_head_multiplier"):
        value = getattr(config, name, None)
        scale *= float(value) if isinstance(value, int | float) else 1.0
    return Head(last.weight, last.bias, scale, getattr(config, "final_logit_softcapping", None))


def log_probs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: Heat = 1.0,
    entropy_grad: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(log-prob of `targets`, entropy) of softmax(logits / temperature), both [R] in fp32 (fp64 for fp64). The entropy
    has a gradient only with `entropy_grad`. No tensor is larger than `chunk` logits, or those of one token."""
    rows = max(1, chunk // head.weight.shape[0])
    if hidden.shape[0] <= rows:
        return _score(
            linear(hidden, head.weight, head.bias), targets, temperature, head, entropy_grad
        )
    job = HeadJob(head, targets, temperature, rows, entropy_grad, _score, _gradient)
    lp, entropy = Chunked.apply(hidden, head.weight, head.bias, job)
    return lp, entropy


class HeadJob(NamedTuple):
    """Log-probs in chunks of `rows` tokens; `score` and `gradient` are the work on a chunk after its matrix product."""

    head: Head
    targets: Tensor
    temperature: Heat
    rows: int
    entropy_grad: bool
    # (product, targets, temperature, head) -> log-probs, entropies, and further tensors [r] to keep
    score: Callable[..., tuple[Tensor, ...]]
    # (product, targets, temperature, head, of_lp, of_entropy or None, entropies, *kept) -> gradient of the product
    gradient: Callable[..., Tensor]

    def inputs(self, part: slice) -> tuple[Tensor, Heat, Head]:
        return self.targets[part], _pick(self.temperature, part), self.head


def _score(
    product: Tensor, targets: Tensor, heat: Heat, head: Head, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(head.finish(product, heat), dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def _gradient(
    product: Tensor,
    targets: Tensor,
    heat: Heat,
    head: Head,
    of_lp: Tensor,
    of_entropy: Tensor | None,
    *_: Tensor,
) -> Tensor:
    """d lp / dz = onehot - p and dH / dz = -p (log p + H) in the logits z, then back to the product by autograd."""
    product.requires_grad_()
    with torch.enable_grad():
        finished = head.finish(product, heat)
    logits = finished.detach()
    if of_entropy is None:  # few passes over the logits: memory bandwidth is the limit
        of_logits = torch.softmax(logits, dim=-1).mul_(-of_lp[:, None])
    else:
        log_p = torch.log_softmax(logits, dim=-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        of_logits = -p * (of_lp[:, None] + of_entropy[:, None] * (log_p + entropy))
    of_logits.scatter_add_(-1, targets[:, None], of_lp[:, None])
    return (
        of_logits if finished is product else torch.autograd.grad(finished, product, of_logits)[0]
    )


class Chunked(torch.autograd.Function):
    """Scores chunk by chunk; only a few numbers per token are kept of a chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: HeadJob
    ) -> tuple[Tensor, Tensor]:
        ctx.parts = [
            slice(start, start + job.rows) for start in range(0, hidden.shape[0], job.rows)
        ]
        scores = [
            job.score(linear(hidden[part], weight, bias), *job.inputs(part)) for part in ctx.parts
        ]
        lp, entropy, *kept = (torch.cat(values) for values in zip(*scores, strict=True))
        ctx.save_for_backward(hidden, weight, bias, entropy, *kept)
        ctx.job = job
        if not job.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return lp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *kept = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        wanted = [
            t if need else None
            for t, need in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        ]
        of_weight, of_bias = (
            None if t is None else torch.zeros_like(t, dtype=wide_type(t)) for t in wanted
        )
        for part in ctx.parts:
            product = linear(hidden[part], weight, bias)
            of_scores = grads[0][part], grads[1][part] if ctx.job.entropy_grad else None
            known = [tensor[part] for tensor in kept]
            of_product = ctx.job.gradient(product, *ctx.job.inputs(part), *of_scores, *known)
            of_hidden[part] = of_product @ weight
            if of_weight is not None:
                of_weight += of_product.T @ hidden[part]
            if of_bias is not None:
                of_bias += of_product.sum(0)
        return (
            of_hidden,
            *(None if g is None else g.to(hidden.dtype) for g in (of_weight, of_bias)),
            None,
        )


@torch.no_grad()
def score_sums(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    counts: Sequence[int],
    temperature: Heat = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """[responses, width]: s = sum over the tokens of a response of d log-prob / d hidden, in fp32 (fp64 for fp64).

    For a plain head that is sum_t (onehot(y_t) - pi_t) W / temperature, the score of a bias added to the last hidden
    state; logit scale and soft-cap enter as they do in the log-prob. `counts` are the tokens of each response, which
    lie in order. Tokens are summed before they meet W, so that a chunk costs one product with the head, not two, and
    nothing larger than the chunk is made.
    """
    sums = torch.zeros(len(counts), hidden.shape[1], dtype=wide_type(hidden), device=hidden.device)
    rows = max(1, chunk // head.weight.shape[0])
    ends = list(accumulate(counts))
    for start in range(0, ends[-1] if ends else 0, rows):
        part = slice(start, min(start + rows, ends[-1]))
        product = linear(hidden[part], head.weight, head.bias).to(sums.dtype)
        of_lp = product.new_ones(len(product))
        heat = _pick(temperature, part)
        gradient = _gradient(product, targets[part], heat, head, of_lp, None)
        # the responses of this chunk
        first, last = bisect_right(ends, part.start), bisect_left(ends, part.stop)
        tokens = [
            end - begin for begin, end in pairwise([part.start, *ends[first:last], part.stop])
        ]
        of_logits = torch.stack([piece.sum(0) for piece in gradient.split(tokens)])
        sums[first : last + 1] += of_logits.to(head.weight.dtype) @ head.weight
    return sums


def _pick(temperature: Heat, part: slice) -> Heat:
    return (
        temperature[part]
        if isinstance(temperature, Tensor) and len(temperature) > 1
        else temperature
    )
