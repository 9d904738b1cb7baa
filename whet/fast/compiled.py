"""The decoder layers and the LM head of a model, compiled for the learner: one graph for all layers and every pack.

`compiled_layers(model, form)` goes around the forward and backward passes inside `packing.packed_attention`. It hangs
a compiled `forward` on each layer while it lasts and takes it off again, so modules, parameter names, copies (the
rollout twin, the reference) and checkpoints never see it. Layers, not the model: that takes minutes and buys 2%. Tokens
and the longest sequence are symbols in the graph, weights are its inputs. `best_form` takes the first of `FORMS` whose
log-probs and gradient are those of the plain model, at the size of a real pack, which the compiler then tunes for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.model.head import CHUNK, Chunked, Head, HeadJob, finish, head_of, log_probs, wide_type
from whet.model.packing import APART, Pack, Pair, hidden_states, make_packs, packed_attention

# What is compiled, most first; the head always is, and without a form nothing is. Where attention is not the flash
# kernel it is never inside a graph. A split layer is four graphs: no fusion is lost, since attention and the matrix
# products beside it fuse with nothing, but the host has three more calls to check and start, which short packs feel.
FORMS = {
    "whole": "whole layers",
    "split": "layers around their attention",
    "head": "the head alone",
}
TRIAL, FEW = 8192, 256  # tokens of the largest trial, and tokens that are compared
MIXED = "triton.mix_order_reduction"

Gradient = dict[str, Tensor]


@contextmanager
def compiled_layers(model: Any, form: str = "whole", backend: str = "inductor") -> Iterator[None]:
    """Runs the layers compiled while it lasts, if the form says so. A layer with a `forward` of its own (put there by
    another library) is left as it is."""
    wanted = form in ("whole", "split")
    layers = [m for m in model.modules() if wanted and isinstance(m, GradientCheckpointingLayer)]
    layers = [layer for layer in layers if "forward" not in vars(layer)]
    before = model.config._attn_implementation
    if form == "split":
        model.config._attn_implementation = APART
    for layer in layers:
        layer.forward = functools.partial(_compile(type(layer).forward, backend), layer)
    try:
        yield
    finally:
        if form == "split":
            model.config._attn_implementation = before
        for layer in layers:
            del layer.forward


def best_form(
    model: Any, tokens: int, checkpoint: bool = False, backend: str = "inductor"
) -> tuple[str, str]:
    """The first form that works, and why the ones before it do not; empty strings where there is none."""
    reasons: list[str] = []
    for form, what in FORMS.items():
        reason = why_not(model, tokens, form, checkpoint, backend)
        if not reason:
            return form, "; ".join(reasons)
        reasons.append(f"{what}: {reason}")
    return "", "; ".join(reasons)


def why_not(
    model: Any,
    tokens: int,
    form: str = "whole",
    checkpoint: bool = False,
    backend: str = "inductor",
) -> str:
    """Why this model should not be compiled in this form, in a few words; empty if log-probs and gradient are the same.

    A plain pass over a few tokens, a compiled one over about `tokens`, and one over the few to compare. No gradient
    is left behind. The compiler may fail in any way, so any error counts, except a full memory, which is the caller's.
    """
    few = _trial(model, FEW)
    plain_lp, plain = _pass(model, few, checkpoint, "", backend)
    if where := not_finite(plain):
        return f"the plain gradient is not finite in {where}"
    try:
        many = _trial(model, min(tokens, TRIAL))
        _, at_size = _pass(model, many, checkpoint, form, backend)
        if where := not_finite(at_size):
            return f"its gradient of {many.input_ids.numel()} tokens is not finite in {where}"
        del at_size
        lp, gradient = _pass(model, few, checkpoint, form, backend)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return first_line(error)
    if where := not_finite(gradient):
        return f"its gradient of {few.input_ids.numel()} tokens is not finite in {where}"
    loose = model.dtype in (torch.bfloat16, torch.float16)
    gap = float((lp - plain_lp).abs().mean())
    if not gap < (0.1 if loose else 1e-3):
        return f"its log-probs are off by {gap:.2g}"
    apart = _norm({name: gradient[name] - plain[name] for name in plain}) / max(_norm(plain), 1e-30)
    return "" if apart < (0.25 if loose else 1e-2) else f"its gradient is off by {apart:.0%}"


def not_finite(gradient: Gradient) -> str:
    """The parameters whose gradient is not finite, the last first, where a backward pass met it. Empty if none is."""
    if not gradient:
        return ""
    sound = torch.stack([g.isfinite().all() for g in gradient.values()]).tolist()
    bad = [name for name, fine in zip(gradient, sound, strict=True) if not fine][::-1]
    return (
        ""
        if not bad
        else bad[0]
        if len(bad) == 1
        else f"{bad[0]} ({len(bad)} of {len(gradient)} parameters)"
    )


def first_line(error: Exception) -> str:
    """The first line of an error, since the compiler's are pages long."""
    lines = (str(error).strip() or "no reason given").splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}"


def _trial(model: Any, tokens: int) -> Pack:
    """Sequences of 37 tokens: a number of them that no other size of a network is likely to share, since the compiler
    takes two sizes that are equal at first sight for one. Never the padding token: in a fresh model its embedding is
    zero, and each norm of a zero multiplies the slope by 1 / sqrt(eps), past any number after a dozen layers."""
    table = model.get_input_embeddings()
    usable = torch.arange(table.num_embeddings)
    usable = usable[usable != (-1 if table.padding_idx is None else table.padding_idx)]
    ids = usable[torch.arange(37) * 7 % len(usable)]
    pairs: list[Pair] = [
        (ids[:2].tolist(), ids[1 + i % 3 :].tolist()) for i in range(max(3, tokens // 37))
    ]
    (pack,) = make_packs(pairs, budget=40 * len(pairs), device=table.weight.device)
    return pack


def _pass(
    model: Any, pack: Pack, checkpoint: bool, form: str, backend: str
) -> tuple[Tensor, Gradient]:
    """Log-probs, and the gradient of their mean. Each token's slope is a number of its own, as in the learner's loss:
    the compiler would take a mean's one number for all as another layout."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with (
        packed_attention(model, checkpoint),
        compiled_layers(model, form, backend),
        torch.enable_grad(),
    ):
        compute = compiled_log_probs if form else log_probs
        lp, _ = compute(hidden_states(model, pack), head_of(model), pack.targets)
        loss = (lp * torch.full_like(lp, 1.0 / len(lp))).sum()
        slopes = (
            torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if trained else ()
        )
    return lp.detach(), {name: g for name, g in zip(trained, slopes, strict=True) if g is not None}


def _norm(gradient: Gradient) -> float:
    return float(torch.nn.utils.get_total_norm(list(gradient.values()))) if gradient else 0.0


@functools.cache
def _compile(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compiled once per class, with the layer as first argument: weights are then inputs, and 30 layers one graph.

    torch 2.10 to 2.13 can sum a norm's weight gradient in the kernel of its input gradient, and adds rows past the
    last token to it when they are not a multiple of its block (pytorch issue 195845): not here.
    """
    mixes = backend == "inductor" and MIXED in inductor.get_config_copy()
    return torch.compile(
        forward, dynamic=True, backend=backend, options={MIXED: False} if mixes else None
    )


# ---- the LM head: the work after its matrix product is one kernel forward and one backward, and no fp32 logits are
# ever written. `whet.model.head` has the plain form.


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

    def on_chunk(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            product: Tensor, targets: Tensor, heat: Tensor, head: Head, *known: Tensor | None
        ) -> Any:
            # tokens differ from chunk to chunk, the vocabulary never
            torch._dynamo.mark_static(product, 1)
            return _compile_chunk(function)(
                product, targets, heat, head.scale, head.softcap, *known
            )

        return call

    rows = max(1, chunk // head.weight.shape[0]) * max(1, 8 // hidden.element_size())
    if not isinstance(temperature, Tensor):  # a number would be compiled in
        temperature = torch.full((1,), temperature, dtype=wide_type(hidden), device=hidden.device)
    work = on_chunk(score_chunk), on_chunk(gradient_chunk)
    lp, entropy = Chunked.apply(
        hidden,
        head.weight,
        head.bias,
        HeadJob(head, targets, temperature, rows, entropy_grad, *work),
    )
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
    scale: float,
    softcap: float | None,
    of_lp: Tensor,
    of_entropy: Tensor | None,
    entropy: Tensor,
    log_sum: Tensor,
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


_compile_chunk = functools.cache(functools.partial(torch.compile, dynamic=True))
