"""The decoder layers of a Hugging Face model, compiled for the learner: one graph for all of them and for every pack.

`compiled_layers(model)` goes around the forward and backward passes inside `packing.packed_attention`. It hangs a
compiled `forward` on each layer while it lasts and takes it off again, so modules, parameter names, copies (the
rollout twin, the reference) and checkpoints never see it. Layers, not the model: that takes minutes and buys 2%. The
token dimension and the longest sequence are symbols in the graph, weights are its inputs. Where attention is not the
flash kernel it stays outside, and a layer is two graphs. `why_not` tries it once, at the size of a real pack: what the
compiler sees first is what it tunes for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.model.head import head_of, log_probs
from whet.model.packing import Pack, Pair, hidden_states, make_packs, packed_attention

TRIAL = 8192
"""Tokens of the largest trial."""
FEW = 256
"""Tokens that are compared."""


@contextmanager
def compiled_layers(model: Any, on: bool = True, backend: str = "inductor") -> Iterator[None]:
    """Until it ends, the layers run compiled; with `on` false nothing happens. A layer that has a `forward` of its own
    (put there by another library) is left as it is."""
    layers = [m for m in model.modules() if on and isinstance(m, GradientCheckpointingLayer)]
    layers = [layer for layer in layers if "forward" not in vars(layer)]
    for layer in layers:
        layer.forward = functools.partial(_compile(type(layer).forward, backend), layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def why_not(model: Any, tokens: int, checkpoint: bool = False, backend: str = "inductor") -> str:
    """Why this model is better not compiled, in a few words; empty if it works: same log-probs, same gradient.

    First a compiled forward and backward pass over about `tokens` tokens, then one over a few, compiled and plain. No
    gradient is left behind. The compiler may fail in any way, so any error counts, but for a full memory: that is the
    caller's.
    """
    try:
        _pass(model, _trial(model, min(tokens, TRIAL)), checkpoint, True, backend)
        few = _trial(model, FEW)
        lp, gradient = _pass(model, few, checkpoint, True, backend)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return first_line(error)
    plain_lp, plain = _pass(model, few, checkpoint, False, backend)
    loose = model.dtype in (torch.bfloat16, torch.float16)
    gap = float((lp - plain_lp).abs().mean())
    if not gap < (0.1 if loose else 1e-3):
        return f"its log-probs are off by {gap:.2g}"
    apart = _norm([a - b for a, b in zip(gradient, plain, strict=True)]) / max(_norm(plain), 1e-30)
    return "" if apart < (0.25 if loose else 1e-2) else f"its gradient is off by {apart:.0%}"


def first_line(error: Exception) -> str:
    """The compiler's errors are pages long."""
    lines = (str(error).strip() or "no reason given").splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}"


def _trial(model: Any, tokens: int) -> Pack:
    """Sequences of 37 tokens: a number of them that no other size of a network is likely to share, since the compiler
    takes two sizes that are equal at first sight for one."""
    table = model.get_input_embeddings()
    ids = torch.arange(37) * 7 % table.num_embeddings
    pairs: list[Pair] = [(ids[:2].tolist(), ids[1 + i % 3 :].tolist()) for i in range(max(3, tokens // 37))]
    (pack,) = make_packs(pairs, budget=40 * len(pairs), device=table.weight.device)
    return pack


def _pass(model: Any, pack: Pack, checkpoint: bool, compiled: bool, backend: str) -> tuple[Tensor, list[Tensor]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    with packed_attention(model, checkpoint), compiled_layers(model, compiled, backend), torch.enable_grad():
        lp, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets, compiled=compiled)
        gradient = torch.autograd.grad(lp.mean(), trained, allow_unused=True) if trained else ()
    return lp.detach(), [g for g in gradient if g is not None]


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors)) if tensors else 0.0


@functools.cache
def _compile(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """One a class, with the layer as its first argument: its weights are then inputs, and 30 layers one graph."""
    return torch.compile(forward, dynamic=True, backend=backend)
