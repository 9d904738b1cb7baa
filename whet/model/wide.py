"""Whether two ways to run a network are the same function, told apart from what rounding makes of it.

`rollout_twin`, the fused stack and `check_packing` ask this before they are trusted with a model. In bfloat16 rounding
would drown the answer: key biases of 200 and activations of 1000 move the logits of a right model as far as a wrong
scale does. So both ways compute in fp64 here, on a few tokens, and may differ by a small multiple of what fp32 makes of
the model's own way. This measures how much the network multiplies an error, whatever the type of its weights. Where
code has a form for the own type alone (a kernel), that form is held to the rounding of the model in this type. Weights
are widened one layer at a time, so a large model is never copied whole, and of the head a part is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

WIDE = torch.float64
TOKENS = 8  # fed to a network whose ways are compared
# keys that a query sees there in a layer with a sliding window: a real one would hide nothing of so
# few
WINDOW = 3
HEAD = 256  # rows of the head that are compared
# What a right form may be off by in fp64 and in the model's own type: times the model's own rounding, since rounding is
# luck, and at least so much of the logits. In fp64 some steps are fp32 whatever the type.
ROOM = 8.0
LEAST = 1e-6
ROOM_OWN = 4.0
LEAST_OWN = 1e-3

Work = Callable[[Any], Tensor]  # from a model to logits [rows, vocabulary]


class Wide:
    """A copy of a model that can compute in a wider type, on weights that stay as they are.

    copy: modules of its own around shared weights (`twin.sharing_copy`); this changes them.
    """

    def __init__(self, copy: PreTrainedModel) -> None:
        self.model = copy.eval()
        self.own = copy.config._attn_implementation
        # Flash and flex attention are kernels for the own type alone.
        self.exact = "eager" if "flash" in self.own or "flex" in self.own else self.own
        self.dtype: torch.dtype | None = None
        # the weights of the module that is widened now
        self._narrow: list[tuple[nn.Module, str, nn.Parameter]] = []
        # for wide weights; always the same, since fresh memory costs more than the copy
        self._room = torch.empty(0)
        copy.config._experts_implementation = "eager"  # the fast ones have no fp64
        self._cut_head()
        self._shorten_windows()
        for module in _units(copy):
            if isinstance(
                module, nn.Embedding
            ):  # its rows are exact in the wider type: no need to widen all of them
                module.register_forward_hook(self._widen_output)
            else:
                module.register_forward_pre_hook(self._widen_weights)
                module.register_forward_hook(self._restore_weights)

    @torch.no_grad()
    def run(self, work: Work, attention: str, dtype: torch.dtype | None) -> Tensor:
        """What `work` makes of the model with this attention in this type; None: each weight in its own."""
        self.dtype = dtype
        self.model.config._attn_implementation = attention
        return work(self.model).to(WIDE)

    def reference(self, work: Work) -> Reference:
        """What the model computes with its own attention."""
        return Reference(
            self.run(work, self.exact, WIDE), self.run(work, self.exact, torch.float32)
        )

    def _cut_head(self) -> None:
        """Keep every so many rows: the whole head of a large vocabulary would take gigabytes in fp64."""
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear:
            return
        rows = slice(None, None, -(-head.out_features // HEAD))
        for name, weight in head._parameters.items():
            head._parameters[name] = (
                None if weight is None else nn.Parameter(weight.detach()[rows], False)
            )
        head.out_features = len(head.weight)

    def _shorten_windows(self) -> None:
        window = getattr(self.model.config, "sliding_window", None)
        for owner in (self.model.config, *self.model.modules()):
            if window is not None and getattr(owner, "sliding_window", None) == window:
                owner.sliding_window = min(WINDOW, window)

    def _widen_output(self, module: nn.Module, given: Any, out: Tensor) -> Tensor:
        return out if self.dtype is None else out.to(self.dtype)

    def _widen_weights(self, module: nn.Module, given: Any) -> None:
        if self.dtype is None:
            return
        for part in module.modules():
            found = [
                (name, weight) for name, weight in part._parameters.items() if weight is not None
            ]
            self._narrow += [
                (part, name, weight) for name, weight in found if weight.is_floating_point()
            ]
        wide = self._widened([weight for _, _, weight in self._narrow], self.dtype)
        for (part, name, _), tensor in zip(self._narrow, wide, strict=True):
            part._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def _restore_weights(self, module: nn.Module, given: Any, out: Any) -> None:
        for part, name, weight in self._narrow:
            part._parameters[name] = weight
        self._narrow = []

    def _widened(self, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The weights in the wider type; they hold until the next call."""
        sizes = [weight.numel() for weight in weights]
        if self._room.dtype != dtype or len(self._room) < sum(sizes):
            self._room = torch.empty(sum(sizes), dtype=dtype, device=self.model.device)
        pieces = self._room[: sum(sizes)].split(sizes)
        return [
            piece.view(w.shape).copy_(w.detach()) for piece, w in zip(pieces, weights, strict=True)
        ]


class Reference:
    """What a model computes, and by how much rounding in fp32 moves that: a measure of how it multiplies errors."""

    def __init__(self, logits: Tensor, narrower: Tensor) -> None:
        self.logits = logits
        self.rounding = distance(narrower, logits)
        self.size = float(logits.square().mean().sqrt())

    def off(self, logits: Tensor) -> str | None:
        """How far another form is off in the wide type, in a few words; None where rounding may account for it."""
        return self._beyond(
            distance(logits, self.logits), max(ROOM * self.rounding, LEAST * self.size)
        )

    def off_rounded(self, logits: Tensor, theirs: Tensor) -> str | None:
        """The same for one in the type of the weights, in which the model itself computes `theirs`."""
        own = distance(theirs, self.logits)
        return self._beyond(
            distance(logits, self.logits), max(ROOM_OWN * own, LEAST_OWN * self.size)
        )

    def _beyond(self, gap: float, allowed: float) -> str | None:
        if gap <= allowed:  # nan is not
            return None
        return f"off by {gap / self.size:.1e} of their size, where {allowed / self.size:.1e} may be rounding"


def probe_logits(model: Any, **extra: Any) -> Tensor:
    """The logits of a few tokens, [tokens, vocabulary]."""
    ids = spread_ids(model, TOKENS)
    position = torch.arange(TOKENS, device=ids.device)
    logits: Tensor = model(
        input_ids=ids[None], position_ids=position[None], use_cache=False, **extra
    ).logits[0]
    return logits


def spread_ids(model: Any, count: int) -> Tensor:
    """Tokens from all over the vocabulary. The first ones of many are special, and so seldom trained that a right model
    rounds their logits by half of what they are."""
    vocabulary = model.config.get_text_config().vocab_size
    return (torch.arange(count, device=model.device) + 1) * vocabulary // (count + 1)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The root mean square of their difference."""
    return float((ours.to(WIDE) - theirs.to(WIDE)).square().mean().sqrt())


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose weights are widened together: each layer, since an adapter's module looks at the type of its
    parts before it calls them, and each module outside the layers that has weights of its own."""
    inside = set[int]()
    for module in model.modules():  # a layer comes before what is inside it
        if id(module) in inside:
            continue
        if isinstance(module, GradientCheckpointingLayer):
            inside |= {id(part) for part in module.modules()}
            yield module
        elif module._parameters:
            yield module
