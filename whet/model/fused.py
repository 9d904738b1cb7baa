"""The fused stack: the layers of a Llama-like model as decoding runs them, with fewer and larger launches.

`fused_stack` makes one over a rollout twin whose projections share storage (`whet.model.storage`), or says why not:
the caller then runs the Hugging Face modules themselves. The weights are views of the model's own, so an in-place
update is seen at once, and what is computed here was compared with the model's own logits before it is used.

Between two attentions lie three functions, each compiled once for all layers: out-projection, residual, norm; gate and
up; down, residual, and the next layer's norm and q, k, v. So a residual sum and the norm after it are one kernel also
across layers, and the compiler sees weights and one changing size, the tokens, and nothing of the cache: rotary
positions with the cache write, attention, and gate and up of few tokens, are kernels of ours (`whet.model.kernels`).
It owns no cache, draws no token, and knows neither rows that come and go nor graphs.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.model.attention import PAGE
from whet.model.fused_layer import FusedLayer, Heads, Projection, Tail, between, enter, leave, settle
from whet.model.head import Head, head_of
from whet.model.kernels import gated
from whet.model.kernels.attention import paged_attention
from whet.model.kernels.rope import rope_write
from whet.model.storage import joined, layers_of, unshareable
from whet.model.twin import Probe

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes of transformers whose layer is x + attention(norm(x)), then x + down(silu(gate) * up) of norm(x)."""
FIXED = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary positions whose angles do not change with the length of what is read."""
PROBED = 3
"""Tokens the stack is compared on, as the twin is; no more, since the probe knows no sliding window."""


@dataclass(slots=True)
class FusedStack:
    embedding: Tensor
    rotary: nn.Module
    """The model's own, with whatever scaling it does."""
    layers: list[FusedLayer]
    norm: Tensor
    eps: Tensor
    head: Head
    sources: list[tuple[Sequence[Tensor], Tensor]]
    """Parameters of the model, and the view of them that is used here."""
    keys: Sequence[Tensor] = ()
    """One a layer, [pages, kv heads, page, d]."""
    values: Sequence[Tensor] = ()
    _circle: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    """cos and sin of every position."""
    _enter: Callable[..., Tensor] = field(default=enter, repr=False)
    _settle: Callable[..., tuple[Tensor, Tensor]] = field(default=settle, repr=False)
    _gate: Callable[..., Tensor] = field(default=gated.reference, repr=False)
    _gate_few: Callable[..., Tensor] = field(default=gated.reference, repr=False)
    """Of few tokens: the kernel, once the stack is compiled."""
    _between: Callable[..., tuple[Tensor, Tensor]] = field(default=between, repr=False)
    _leave: Callable[..., Tensor] = field(default=leave, repr=False)

    def attach(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """The cache that forwards from now on write to and read."""
        assert len(keys) == len(values) == len(self.layers), "one pair a layer"
        self.keys, self.values = keys, values

    def compile(self, **options: Any) -> None:
        """Five small graphs, however many layers; a single token takes a second set, so pad it to two.

        What cannot be one graph is an error, not a slow run. `options` are those of torch.compile.
        """
        options = {"dynamic": True, "fullgraph": True, **options}
        # The compiler advises fp32 models to use TensorFloat32: they are fp32 because someone wants it exact.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
        self._enter, self._settle = _compiled(enter, options), _compiled(settle, options)
        self._gate, self._between = _compiled(gated.reference, options), _compiled(between, options)
        self._gate_few, self._leave = gated.gated, _compiled(leave, options)

    def forward(
        self,
        ids: Tensor,
        position: Tensor,
        row: Tensor,
        table: Tensor,
        length: Tensor,
        starts: Tensor,
        most: int,
        *,
        splits: int = 0,
        tree: Tensor | None = None,
    ) -> Tensor:
        """[T, width] after the final norm, for T new tokens; their K and V go to the pages of their rows.

        ids, position and row [T], the latter two int32: the token, its place in its sequence, its row of the table or
        -1 for padding. The others are those of `paged_attention`. Call it without gradients.
        """
        x = F.embedding(ids, self.embedding)
        cos, sin = self._angles(x, position, table.shape[1] * self.keys[0].shape[2])
        qkv = self._enter(x, self.layers[0].qkv)
        gate = self._gate_few if gated.takes(x, self.layers[0].tail.gate_up.weight) else self._gate
        last = len(self.layers) - 1
        for i, (layer, keys, values) in enumerate(zip(self.layers, self.keys, self.values, strict=True)):
            a = layer.attention
            query = rope_write(
                qkv,
                cos,
                sin,
                keys,
                values,
                table,
                row,
                position,
                heads=a.heads,
                kv_heads=a.kv_heads,
                q_norm=a.q_norm,
                k_norm=a.k_norm,
                eps=a.eps,
            )
            mixed = paged_attention(
                query,
                keys,
                values,
                table,
                length,
                starts,
                most=most,
                scaling=a.scaling,
                window=a.window,
                softcap=a.softcap,
                splits=splits,
                tree=tree,
            )
            x, normed = self._settle(mixed.flatten(1), x, layer.tail)
            inner = gate(normed, layer.tail.gate_up.weight, layer.tail.gate_up.bias)
            if i < last:
                x, qkv = self._between(inner, x, layer.tail, self.layers[i + 1].qkv)
        return self._leave(inner, x, self.layers[last].tail, self.norm, self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logit scale and soft-cap included."""
        return self.head.narrow_logits(hidden)

    @property
    def stale(self) -> bool:
        """Whether a weight of the model was moved instead of written in place; a new stack must then be made."""
        return any(joined(parts) is None or parts[0].data_ptr() != view.data_ptr() for parts, view in self.sources)

    def _angles(self, x: Tensor, position: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """cos and sin [T, d] in the type of x, the same for every layer; looked up where they hang on nothing else."""
        if getattr(self.rotary, "rope_type", None) not in FIXED:
            cos, sin = self.rotary(x[None], position[None])
            return cos[0], sin[0]
        if len(self._circle) < context:
            cos, sin = self.rotary(x[None], torch.arange(context, device=x.device)[None])
            self._circle = torch.cat((cos[0], sin[0]), -1)
        cos, sin = F.embedding(position, self._circle).chunk(2, -1)
        return cos, sin


def fused_stack(twin: PreTrainedModel) -> FusedStack | None:
    """The stack of a rollout twin; None where the Hugging Face modules must be run instead (`unfused` says why).
    It is compared before it is compiled, rounding by rounding: one rounding less moves SmolLM2's logits by 4.7."""
    return _try(twin)[0]


def unfusable(model: PreTrainedModel) -> str | None:
    """Why `model` can have no fused stack by what it declares, or None; its weights may be on the meta device."""
    kind, config = type(model), model.config
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers."):
        return f"{kind.__name__} is not one of {', '.join(sorted(FAMILIES))}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    if len({parameter.dtype for parameter in model.parameters()}) > 1:
        return "its weights are not all of one type"
    if odd := [n for n, m in model.named_modules() if n.endswith(("o_proj", "down_proj")) and type(m) is not nn.Linear]:
        return f"{odd[0]} is not a plain linear layer"
    return unshareable(model)


def unfused(twin: PreTrainedModel) -> str | None:
    """Why `twin` has no fused stack, in a few words; None where it has one."""
    return _try(twin)[1]


@torch.no_grad()
def _try(twin: PreTrainedModel) -> tuple[FusedStack | None, str | None]:
    if why := unfusable(twin):
        return None, why
    asked = Asked()
    ids = torch.arange(PROBED, device=twin.device) % twin.config.vocab_size
    want = twin(input_ids=ids[None], position_ids=ids.new_tensor([range(PROBED)]), use_cache=False, ctx=asked).logits[0]
    stack = _build(twin, asked)
    if stack is None:
        return None, "its q, k, v and gate, up projections do not share storage"
    got = _first_logits(stack, ids)
    half = want.dtype in (torch.bfloat16, torch.float16)
    allowed = (0.05 if half else 1e-3) * (1.0 + want.abs().max().item())
    gap = (got.double() - want.double()).abs().max().item()
    if not gap <= allowed:  # nan is not
        return None, f"the fused layers give other logits than {type(twin).__name__} (off by {gap:.3g})"
    return stack, None


@dataclass(slots=True)
class Asked(Probe):
    """Notes also how each layer calls its attention, which its config tells less surely."""

    calls: dict[int, tuple[int, float, int | None, float | None]] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        extra: dict[str, Any],
    ) -> Tensor:
        self.calls[layer] = (query.shape[1], scaling, window, softcap)
        return Probe.attend(self, layer, query, key, value, scaling, window, softcap, extra)


def _build(twin: Any, asked: Asked) -> FusedStack | None:
    sources: list[tuple[Sequence[Tensor], Tensor]] = []
    epsilons: dict[float, Tensor] = {}

    def view(*parts: Tensor | None) -> Any:
        """The model's weights as one frozen Parameter over the same storage; None where they lie apart."""
        if parts[0] is None:
            return None
        tensors = [part for part in parts if part is not None]
        whole = joined(tensors)
        if whole is None:
            raise _ApartError
        sources.append((tensors, nn.Parameter(whole, requires_grad=False)))
        return sources[-1][1]

    def eps(norm: Any) -> Tensor:
        value = float(norm.variance_epsilon)
        return epsilons.setdefault(value, torch.tensor(value, dtype=torch.float32, device=twin.device))

    def project(norm: Any, *linears: Any) -> Projection:
        weight, bias = (view(*(getattr(linear, name) for linear in linears)) for name in ("weight", "bias"))
        return Projection(view(norm.weight), eps(norm), weight, bias)

    def layer(index: int, module: Any) -> FusedLayer:
        attn, mlp = module.self_attn, module.mlp
        heads, scaling, window, softcap = asked.calls[index]
        norms = [getattr(attn, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (None if norm is None else view(norm.weight) for norm in norms)
        head_eps = 0.0 if norms[0] is None else float(norms[0].variance_epsilon)
        return FusedLayer(
            project(module.input_layernorm, attn.q_proj, attn.k_proj, attn.v_proj),
            Heads(heads, asked.shapes[index].heads, scaling, window, softcap, q_norm, k_norm, head_eps),
            Tail(
                view(attn.o_proj.weight),
                view(attn.o_proj.bias),
                project(module.post_attention_layernorm, mlp.gate_proj, mlp.up_proj),
                view(mlp.down_proj.weight),
                view(mlp.down_proj.bias),
            ),
        )

    try:
        layers = [layer(i, module) for i, module in enumerate(layers_of(twin))]
    except _ApartError:
        return None
    embedding, final = view(twin.get_input_embeddings().weight), twin.model.norm
    return FusedStack(embedding, twin.model.rotary_emb, layers, view(final.weight), eps(final), head_of(twin), sources)


class _ApartError(Exception):
    """Weights that should lie side by side do not."""


def _first_logits(stack: FusedStack, ids: Tensor) -> Tensor:
    """Of one row, in a small cache that is let go of afterwards."""

    def cache() -> list[Tensor]:
        sizes = ((layer.attention, layer.qkv.weight.shape[0]) for layer in stack.layers)
        return [ids.new_zeros(2, a.kv_heads, PAGE, n // (a.heads + 2 * a.kv_heads), dtype=dtype) for a, n in sizes]

    def numbers(values: object) -> Tensor:
        return ids.new_tensor(values, dtype=torch.int32)

    dtype, tokens = stack.embedding.dtype, len(ids)
    stack.attach(cache(), cache())
    hidden = stack.forward(
        ids,
        numbers(range(tokens)),
        numbers([0] * tokens),
        numbers([[0]]),
        numbers([tokens]),
        numbers([0, tokens]),
        tokens,
    )
    stack.keys = stack.values = ()
    return stack.logits(hidden)


def _compiled(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """With all but the first size of its plain tensors declared constant: the compiler would else take the width for
    the number of tokens wherever the two happen to be equal at the first call."""
    run = torch.compile(_own(function), **options)

    def call(*given: Any) -> Any:
        for tensor in given:
            if isinstance(tensor, Tensor) and tensor.dim() == 2:
                torch._dynamo.mark_static(tensor, 1)
        return run(*given)

    return call


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with its own code object: by these the compiler counts recompilations, and a second model is one."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
