"""Inner products of the score gradients of rollouts, exactly, without a backward pass for each of them.

s_i = grad log pi(y_i | x); K_ij = <s_i, s_j>. The gradient of a linear layer is sum_t b_t a_t' over its inputs a and
output gradients b. `score_gram` keeps both by hooks in one packed forward and backward of all rollouts (they do not see
each other, so the sum of their log-probs separates), multiplies them sequence by sequence and adds up G G' layer by
layer, a tile at a time: gradients of all layers never exist at once. (The other order, (a_t . a_u)(b_t . b_u) for
every pair of tokens, costs tokens^2 where this costs tokens x rollouts; a rollout has hundreds of tokens.)
K covers every weight matrix that is trained, head and embedding included (tied: as the one table they are). Norm
weights and biases are left out. `benchmarks/snr.py` calls it; the ratio itself is `snr.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.errors import WhetError
from whet.model.head import Head, head_of, log_probs
from whet.model.packing import Pack, hidden_states, make_packs, packed_attention

PACK = 8192
"""Tokens of one forward and backward: bounds the activations."""
KEEP = 8 * 2**30
"""Bytes of inputs and output gradients kept at once; where all layers need more, they take turns, one pass each."""
TILE = 2**27
"""Numbers of per-rollout gradients made at once."""


def score_gram(
    model: Any,
    prompt: Sequence[int],
    responses: Sequence[np.ndarray],
    temperature: float = 1.0,
    *,
    pack: int = PACK,
    keep: int = KEEP,
    tile: int = TILE,
) -> np.ndarray:
    """K_ij = <s_i, s_j> in fp64, s_i = grad sum_t log pi(y_t) at the temperature; products in the model's own dtype."""
    linears, matrices = _covered(model)
    packs = make_packs([(prompt, response) for response in responses], pack, model.device)
    order = np.array([member for p in packs for member in p.members])
    tokens = sum(p.input_ids.numel() for p in packs)
    spans = _spans([end - start for p in packs for start, end in pairwise(p.boundaries.starts.tolist())])
    gram = np.zeros((len(order), len(order)))
    for turn, names in enumerate(_turns({k: sum(m.weight.shape) for k, m in linears.items()}, keep, tokens, model)):
        walk = _walk(model, packs, {name: linears[name] for name in names}, temperature)
        if turn == 0:
            gram += _vocabulary_gram(model, packs, walk, spans, temperature, matrices, tile)
        for name in names:
            a, b = (torch.cat(parts) for parts in zip(*walk.kept.pop(name), strict=True))
            gram += _gram(partial(_products, a, b, spans), b.shape[1], tile, len(spans), a)
    back = np.empty_like(gram)
    back[np.ix_(order, order)] = gram
    return back


def explicit_gram(
    model: Any, prompt: Sequence[int], responses: Sequence[np.ndarray], temperature: float = 1.0
) -> np.ndarray:
    """The same by one plain backward pass a response: what `score_gram` is checked against."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    scores = []
    for response in responses:
        ids = torch.tensor([[*prompt, *np.asarray(response).tolist()]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        score = torch.log_softmax(logits / temperature, -1).gather(-1, ids[0, len(prompt) :, None]).sum()
        scores.append(torch.cat([g.flatten() for g in torch.autograd.grad(score, matrices)]))
    rows = torch.stack(scores)
    return (rows @ rows.T).double().cpu().numpy()


@dataclass(slots=True)
class _Walk:
    """What forward and backward over all packs left behind."""

    kept: dict[str, list[tuple[Tensor, Tensor]]]
    """Per linear layer and pack, inputs [T, in] and output gradients [T, out]."""
    hidden: list[Tensor]
    """Per pack, what the head reads."""
    embedded: list[Tensor]
    """Per pack, gradients of the embedding's output."""


def _covered(model: Any) -> tuple[dict[str, nn.Linear], frozenset[str]]:
    """The decoder's linear layers that are trained, and which of "head" and "embedding" are; else a refusal."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linears = {
        name: module
        for name, module in model.get_decoder().named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    }
    ends = {"head": head.weight, "embedding": embedding.weight}
    known = {id(p) for p in (*(m.weight for m in linears.values()), *ends.values())}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.ndim >= 2 and id(parameter) not in known:
            raise WhetError(f"{type(model).__name__} trains {name}, which is neither a linear layer nor an embedding.")
    if type(embedding) is not nn.Embedding and embedding.weight.requires_grad:
        raise WhetError(f"{type(model).__name__} trains a {type(embedding).__name__}, which is no plain embedding.")
    return linears, frozenset(name for name, weight in ends.items() if weight.requires_grad)


def _turns(widths: Mapping[str, int], keep: int, tokens: int, model: Any) -> Iterator[list[str]]:
    """Layers in turns whose inputs and output gradients fit into `keep` bytes; one at least, and never no turn."""
    turn: list[str] = []
    held = 0
    for name, width in widths.items():
        size = tokens * width * model.dtype.itemsize
        if turn and held + size > keep:
            yield turn
            turn, held = [], 0
        turn.append(name)
        held += size
    yield turn


def _walk(model: Any, packs: Sequence[Pack], linears: Mapping[str, nn.Linear], temperature: float) -> _Walk:
    walk = _Walk({name: [] for name in linears}, [], [])
    inputs: list[Tensor] = []

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            a = args[0].detach()
            out.register_hook(lambda b: walk.kept[name].append((a.flatten(0, -2), b.detach().flatten(0, -2))))

        return hook

    def open_graph(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        inputs.append(out.requires_grad_())  # all weights are frozen: their gradients are never made
        return inputs[-1]

    handles = [module.register_forward_hook(keep(name)) for name, module in linears.items()]
    handles.append(model.get_input_embeddings().register_forward_hook(open_graph))
    try:
        with _frozen(model), packed_attention(model), torch.enable_grad():
            for number, pack in enumerate(packs, 1):
                hidden = hidden_states(model, pack)
                lp, _ = log_probs(hidden, head_of(model), pack.targets, temperature)
                lp.sum().backward()
                tokens = pack.input_ids.numel()
                for name, kept in walk.kept.items():
                    if len(kept) != number or len(kept[-1][0]) != tokens:
                        raise WhetError(f"{type(model).__name__} does not use {name} once for every token.")
                embedded = inputs.pop().grad
                assert embedded is not None
                walk.embedded.append(embedded.flatten(0, -2))
                walk.hidden.append(hidden.detach())
    finally:
        for handle in handles:
            handle.remove()
    return walk


def _vocabulary_gram(
    model: Any,
    packs: Sequence[Pack],
    walk: _Walk,
    spans: Sequence[slice],
    temperature: float,
    matrices: frozenset[str],
    tile: int,
) -> np.ndarray:
    """Gradient of the head and the embedding; where they are one table, their gradients add up before the product."""
    head, table = head_of(model), model.get_input_embeddings()
    hidden, targets = torch.cat(walk.hidden), torch.cat([p.targets for p in packs])
    embedded, ids = torch.cat(walk.embedded), torch.cat([p.input_ids[0] for p in packs])
    said = _spans([count for p in packs for count in p.counts])
    owner = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor([s.stop - s.start for s in spans]))
    learnt = torch.ones_like(ids, dtype=torch.bool) if table.padding_idx is None else ids != table.padding_idx
    levels = _normalisers(head, hidden, temperature, tile)

    def of_head(rows: slice) -> Tensor:
        return _products(hidden, _slopes(head, hidden, targets, temperature, levels, rows), said)

    def of_embedding(rows: slice) -> Tensor:
        count, inside = rows.stop - rows.start, learnt & (ids >= rows.start) & (ids < rows.stop)
        place = owner.to(ids.device)[inside] * count + ids[inside] - rows.start
        sums = embedded.new_zeros(len(spans) * count, embedded.shape[1]).index_add_(0, place, embedded[inside])
        return sums.unflatten(0, (len(spans), count))

    parts: list[Callable[[slice], Tensor]] = []
    if "head" in matrices:
        parts.append(of_head)
    if "embedding" in matrices:
        parts.append(of_embedding)
    if len(parts) == 2 and table.weight is head.weight:
        parts = [lambda rows: of_head(rows) + of_embedding(rows)]
    gram = np.zeros((len(spans), len(spans)))
    for part in parts:
        gram += _gram(part, table.num_embeddings, tile, len(spans), hidden)
    return gram


def _slopes(head: Head, hidden: Tensor, targets: Tensor, temperature: float, levels: Tensor, rows: slice) -> Tensor:
    """[R, rows]: d log-prob / d (hidden . weight) for some words: (one-hot - softmax) times the slope of `finish`."""
    with torch.enable_grad():
        product = _product(head, hidden, rows).requires_grad_()
        logits = head.finish(product, temperature)
    slope = -(logits.detach() - levels[:, None]).exp()
    inside = ((targets >= rows.start) & (targets < rows.stop)).nonzero()[:, 0]
    slope[inside, targets[inside] - rows.start] += 1
    return slope if logits is product else torch.autograd.grad(logits, product, slope)[0]


def _normalisers(head: Head, hidden: Tensor, temperature: float, tile: int) -> Tensor:
    """[R]: log of the sum of exp of the logits, some words at a time."""
    with torch.no_grad():
        parts = _tiles(head.weight.shape[0], tile, len(hidden))
        levels = [head.finish(_product(head, hidden, rows), temperature).logsumexp(-1) for rows in parts]
        return torch.stack(levels).logsumexp(0)


def _product(head: Head, hidden: Tensor, rows: slice) -> Tensor:
    return nn.functional.linear(hidden, head.weight[rows].detach(), None if head.bias is None else head.bias[rows])


def _gram(make: Callable[[slice], Tensor], rows: int, tile: int, count: int, inputs: Tensor) -> np.ndarray:
    """sum over tiles of G G', where make(rows) gives some rows of every rollout's gradient, [count, rows, in]."""
    gram = torch.zeros(count, count, dtype=torch.float64, device=inputs.device)
    with torch.no_grad():
        for part in _tiles(rows, tile, max(count * inputs.shape[1], len(inputs))):
            flat = make(part).flatten(1)
            gram += (flat @ flat.T).double()
    return gram.cpu().numpy()


def _products(a: Tensor, b: Tensor, spans: Sequence[slice], rows: slice = slice(None)) -> Tensor:
    """[sequences, rows, in]: sum_t b_t a_t' over each sequence's tokens, for some of the outputs."""
    return torch.stack([b[span, rows].T @ a[span] for span in spans])


def _tiles(rows: int, tile: int, each: int) -> Iterator[slice]:
    step = max(1, tile // each)
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def _spans(lengths: Sequence[int]) -> list[slice]:
    return [slice(start, end) for start, end in pairwise([0, *np.cumsum(lengths).tolist()])]


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    asked = [p for p in model.parameters() if p.requires_grad]
    for parameter in asked:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)
