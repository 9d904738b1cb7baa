"""A model over KV pages, as the engine's graphs run it: new tokens in, hidden states out.

The graph runner calls `network_of`, which gives the fused stack, or `PlainNetwork` where that is not possible. The
fused stack runs the layers of a Llama-like model with fewer and larger launches. Its weights are views of the model's
own (`share_storage` laid them side by side), so an in-place update is seen at once, and its logits are compared with
the model's before it is used. Shapes: T new tokens of N rows, `width` numbers per hidden state, d per head; see
`whet.model.ops` for the pages.
"""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from whet.fast.kernels import layer as gated
from whet.fast.kernels.attention import kernel_lacks, paged_attention
from whet.fast.kernels.layer import rope_write, write_kv
from whet.model.head import Head, head_of
from whet.model.ops import FAMILIES, Ops, rms_norm
from whet.model.twin import NAME, PAGE, How, KVShape, Probe, sharing_copy
from whet.model.wide import TOKENS, WIDE, Wide, probe_logits, spread_ids

# they take the plain forms where Triton cannot run
KERNELS = Ops(paged_attention, rope_write, write_kv)
# The parts of a decoder layer, each with its projections in the order that their rows take in the shared buffer.
GROUPS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
# rotary types whose angles do not depend on the length
FIXED = frozenset({"default", "linear", "llama3", "yarn"})


# ---- networks


class Feed(NamedTuple):
    """T new tokens for a network: their ids, positions and rows (-1: padding), all int32 [T]; the table, lengths and
    starts of the rows as `paged_attention` wants them; and `most`, the new tokens of a row at most."""

    ids: Tensor
    position: Tensor
    row: Tensor
    table: Tensor
    length: Tensor
    starts: Tensor
    most: int


def network_of(
    twin: PreTrainedModel, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> FusedStack | PlainNetwork:
    """The fastest form that computes what the twin does, over these pages; compiled where it runs on a GPU. There a
    warning says if that is the slow one."""
    stack, why = fuse(twin)
    if stack is None:
        if twin.device.type == "cuda":
            slow = f"{type(twin).__name__} decodes by its own modules, several times as slowly as it might"
            warnings.warn(f"{slow}: {why}.", stacklevel=2)
        return PlainNetwork(twin, keys, values)
    stack.attach(keys, values)
    if twin.device.type == "cuda":
        stack.compile()
    return stack


def graphs_lack(
    shapes: Iterable[KVShape], device: torch.device, dtype: torch.dtype | None = None
) -> str | None:
    """Why the kernels cannot serve a model with this cache, in a few words; None where they can, as their plain form
    does off CUDA. dtype: the type of the weights, where they are not loaded yet."""
    if device.type != "cuda":
        return None
    lacks = (kernel_lacks(dtype or shape.dtype, shape.key_dim, shape.value_dim) for shape in shapes)
    return next((why for why in lacks if why), None)


class PlainNetwork:
    """The twin's own modules with our attention kernels: for any family that the twin allows. It is their
    `AttentionContext`, whose pages are read and written by kernels."""

    fed: Feed  # what the forward under way was given

    def __init__(
        self, twin: PreTrainedModel, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        self.decoder = twin.get_decoder()
        self.head = head_of(twin)
        self.keys = keys
        self.values = values

    def forward(self, fed: Feed) -> Tensor:
        """As `FusedStack.forward`."""
        self.fed, position = fed, fed.position[None].long()
        out = self.decoder(
            input_ids=fed.ids[None], position_ids=position, use_cache=False, ctx=self
        )
        return out.last_hidden_state[0]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How, extra: dict[str, Any]
    ) -> Tensor:
        keys = self.keys[layer]
        values = self.values[layer]
        fed = self.fed
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        write_kv(key, value, keys, values, fed.table, fed.row, fed.position)
        return paged_attention(query, keys, values, *fed[3:6], most=fed.most, **how._asdict())[None]


# ---- shared storage
#
# q, k and v of a layer, and gate and up, keep their own Parameters (same objects, names, shapes), but each becomes a
# row slice of one buffer, so that decoding multiplies by all of them at once while training, checkpoints and adapters
# see what they always saw. Nothing is registered: `joined` finds the buffer again from where the Parameters lie, and
# finds none after anything moved them.


def share_storage(model: nn.Module) -> bool:
    """Lays the projections of every layer into shared buffers.

    False, and nothing is touched, where `unshareable` gives a reason. Call it on the model's device, since a later move
    would part the slices again, and before the optimiser and the rollout twin are made: it is the last time that
    `.data` is rebound.
    """
    if unshareable(model) is not None:
        return False
    for parts in _shares(model):
        if joined(parts) is None:
            buffer = torch.cat([part.detach() for part in parts])
            for part, rows in zip(parts, buffer.split([len(part) for part in parts]), strict=True):
                part.data = rows
    return True


def unshareable(model: nn.Module) -> str | None:
    """Why the projections of `model` cannot share storage, in a few words; None where they can."""
    layers = layers_of(model)
    if not layers:
        return "its layers are not where they are looked for (model.layers)"
    used = Counter(
        _owner(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
    )
    for layer in layers:
        for part, names in GROUPS:
            linears: list[Any] = [getattr(getattr(layer, part, None), name, None) for name in names]
            for name, linear in zip(names, linears, strict=True):
                if why := _odd(linear, used):
                    return f"{part}.{name} {why}"
            if (
                len(
                    {
                        (a.in_features, a.weight.dtype, a.weight.device, a.bias is None)
                        for a in linears
                    }
                )
                > 1
            ):
                return f"{', '.join(names)} of {part} differ in type, place, width or bias"
    return None


def layers_of(model: nn.Module) -> list[Any]:
    """The decoder layers of a Hugging Face causal model with the usual names, else none."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The one tensor whose row slices, in order, are the parts; None where there is none. No copy, no gradient.

    >>> both = torch.arange(6.0).view(3, 2)
    >>> joined([both[:1], both[1:]]).shape, joined([both[1:], both[:1]])
    (torch.Size([3, 2]), None)
    """
    first = parts[0]
    rows = sum(part.shape[0] for part in parts)
    places = {(p.untyped_storage().data_ptr(), p.device, p.dtype, p.shape[1:]) for p in parts}
    end = first.storage_offset()
    for part in parts:
        if len(places) > 1 or not part.is_contiguous() or part.storage_offset() != end:
            return None
        end += part.numel()
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _shares(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The Parameters of each shared buffer, in order."""
    for layer in layers_of(model):
        for part, names in GROUPS:
            linears = [getattr(getattr(layer, part), name) for name in names]
            yield [linear.weight for linear in linears]
            if linears[0].bias is not None:
                yield [linear.bias for linear in linears]


def _owner(parameter: Tensor) -> int:
    """One number for weights tied as one object or through their data; on the meta device there is no address."""
    return parameter.data_ptr() or id(parameter)


def _odd(linear: object, used: Counter[int]) -> str | None:
    if linear is None:
        return "is missing"
    if type(linear) is not nn.Linear:  # an adapter, a quantised layer, a parametrised one
        return f"is a {type(linear).__name__}, not a plain linear layer"
    if any(type(p) is not nn.Parameter or not p.is_floating_point() for p in linear.parameters()):
        return "holds weights of a special kind"
    return (
        "is tied to another weight"
        if any(used[_owner(p)] > 1 for p in linear.parameters())
        else None
    )


# ---- a layer of the fused stack as pure functions
#
# In order: `enter` the first layer; for every layer `settle`, gate and up (`kernels.layer`), `between`; after the last
# one `leave`. Each is compiled once for all layers. So a residual sum and the norm after it are one kernel also across
# layers, and the compiler sees weights and one changing size, the tokens, and nothing of the cache: rotation with the
# cache write, attention, and gate and up of few tokens are kernels.


class Projection(NamedTuple):
    """A norm and the linear map that reads it.

    Weights are frozen Parameters, because the compiler takes a Parameter's shape for a constant; eps is a tensor,
    because it takes a float that is an argument for something that may change.
    """

    norm: Tensor
    eps: Tensor
    weight: Tensor
    bias: Tensor | None


class LayerTail(NamedTuple):
    """The weights of a layer after its attention."""

    out: Tensor
    out_bias: Tensor | None
    gate_up: Projection
    down: Tensor
    down_bias: Tensor | None


class FusedLayer(NamedTuple):
    qkv: Projection
    rope: dict[str, Any]  # the options of `rope_write`: heads, and their norms (Qwen 3)
    attention: dict[str, Any]  # the options of `paged_attention`
    tail: LayerTail


def enter(x: Tensor, to: Projection) -> Tensor:
    """q, k and v of the first layer, [T, q + k + v]."""
    return F.linear(rms_norm(x, to.norm, to.eps), to.weight, to.bias)


def settle(mixed: Tensor, x: Tensor, tail: LayerTail) -> tuple[Tensor, Tensor]:
    """The residual stream after a layer's attention [T, heads * d], and what gate and up read."""
    x = _add(x, F.linear(mixed, tail.out, tail.out_bias))
    return x, rms_norm(x, tail.gate_up.norm, tail.gate_up.eps)


def between(inner: Tensor, x: Tensor, tail: LayerTail, to: Projection) -> tuple[Tensor, Tensor]:
    """From silu(gate) * up to the next layer's residual stream, and q, k, v."""
    x = _add(x, F.linear(inner, tail.down, tail.down_bias))
    return x, enter(x, to)


def leave(inner: Tensor, x: Tensor, tail: LayerTail, norm: Tensor, eps: Tensor) -> Tensor:
    """From the last layer's silu(gate) * up to what the head reads."""
    return rms_norm(_add(x, F.linear(inner, tail.down, tail.down_bias)), norm, eps)


def _add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, to the same bits. The casts keep the compiler from making it a part of the product before it, which would
    copy x first: one more launch, while the norm that follows reads both anyway."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) + y.to(wide)).to(x.dtype)


@dataclass(slots=True)
class FusedStack:
    embedding: Tensor
    rotary: nn.Module  # the model's own, with its scaling
    layers: Sequence[FusedLayer]
    norm: Tensor
    eps: Tensor
    head: Head
    keys: Sequence[Tensor] = ()  # one per layer, [pages, kv heads, page, d]
    values: Sequence[Tensor] = ()
    # cos and sin of every position
    _circle: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    _enter: Callable[..., Tensor] = field(default=enter, repr=False)
    _settle: Callable[..., tuple[Tensor, Tensor]] = field(default=settle, repr=False)
    _gate: Callable[..., Tensor] = field(default=gated.gated_reference, repr=False)
    # the kernel, once compiled
    _gate_few: Callable[..., Tensor] = field(default=gated.gated_reference, repr=False)
    _between: Callable[..., tuple[Tensor, Tensor]] = field(default=between, repr=False)
    _leave: Callable[..., Tensor] = field(default=leave, repr=False)

    def attach(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """The cache that forwards from now on write to and read."""
        assert len(keys) == len(values) == len(self.layers), "one pair per layer"
        self.keys = keys
        self.values = values

    def compile(self, **options: Any) -> None:
        """Compiles five small graphs, however many layers there are. A single token would take a second set, so callers
        pad it to two. What cannot be one graph is an error, not a slow run. `options` are those of torch.compile."""
        options = {"dynamic": True, "fullgraph": True, **options}
        # The compiler advises fp32 models to use TensorFloat32, but fp32 is chosen where results must be exact.
        warnings.filterwarnings(
            "ignore", message="TensorFloat32 tensor cores", category=UserWarning
        )
        self._enter, self._settle = _compiled(enter, options), _compiled(settle, options)
        self._gate, self._between = (
            _compiled(gated.gated_reference, options),
            _compiled(between, options),
        )
        self._gate_few, self._leave = gated.gated, _compiled(leave, options)

    def forward(self, fed: Feed) -> Tensor:
        """[T, width] after the last norm; writes K and V to the pages. Called without gradients."""
        x = F.embedding(fed.ids, self.embedding)
        # only the position counts: cos and sin are looked up
        if getattr(self.rotary, "rope_type", None) in FIXED:
            if len(self._circle) < (context := fed.table.shape[1] * self.keys[0].shape[2]):
                self._circle = torch.cat(
                    self.rotary(x[None], torch.arange(context, device=x.device)[None]), -1
                )[0]
            cos, sin = F.embedding(fed.position, self._circle).chunk(2, -1)
        else:
            cos, sin = (each[0] for each in self.rotary(x[None], fed.position[None]))
        qkv = self._enter(x, self.layers[0].qkv)
        gate = self._gate_few if gated.takes(x, self.layers[0].tail.gate_up.weight) else self._gate
        last = len(self.layers) - 1
        for i, (layer, keys, values) in enumerate(
            zip(self.layers, self.keys, self.values, strict=True)
        ):
            query = rope_write(
                qkv, cos, sin, keys, values, fed.table, fed.row, fed.position, **layer.rope
            )
            mixed = paged_attention(
                query, keys, values, *fed[3:6], most=fed.most, **layer.attention
            )
            x, normed = self._settle(mixed.flatten(1), x, layer.tail)
            inner = gate(normed, layer.tail.gate_up.weight, layer.tail.gate_up.bias)
            if i < last:
                x, qkv = self._between(inner, x, layer.tail, self.layers[i + 1].qkv)
        return self._leave(inner, x, self.layers[last].tail, self.norm, self.eps)


def unfusable(model: PreTrainedModel) -> str | None:
    """Why `model` can have no fused stack by what it declares, or None; its weights may be on the meta device."""
    kind = type(model)
    config = model.config
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers."):
        return f"{kind.__name__} is not one of {', '.join(sorted(FAMILIES))}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    if len({parameter.dtype for parameter in model.parameters()}) > 1:
        return "its weights are not all of one type"
    if odd := [
        n
        for n, m in model.named_modules()
        if n.endswith(("o_proj", "down_proj")) and type(m) is not nn.Linear
    ]:
        return f"{odd[0]} is not a plain linear layer"
    return unshareable(model)


@torch.no_grad()
def fuse(twin: PreTrainedModel) -> tuple[FusedStack | None, str | None]:
    """The stack of a rollout twin; or None, and why the Hugging Face modules must be run instead.

    It is compared before it is compiled, while it rounds as the modules do.
    """
    if why := unfusable(twin):
        return None, why
    if any(
        joined(parts) is None
        for parts in (*_shares(twin), *([weight] for weight in twin.parameters()))
    ):
        return None, "its q, k, v and gate, up projections do not share storage"
    asked = FusedInput()
    probe_logits(twin, ctx=asked)
    if why := _unlike(twin):
        return None, f"the fused layers give other logits than {type(twin).__name__} ({why})"
    return _build(twin, asked), None


def _unlike(twin: PreTrainedModel) -> str | None:
    """How the fused layers differ from the twin: computed in fp64, then as the engine would, with its kernels."""
    wide = Wide(sharing_copy(twin, twin.parameters()))
    asked = FusedInput()
    asking = partial(probe_logits, ctx=asked)
    reference = wide.reference(asking)
    stack = _build(wide.model, asked)
    ids = spread_ids(twin, TOKENS)
    # the rest of it would be widened for nothing
    few = replace(stack, embedding=stack.embedding[ids])
    if why := reference.off(
        _logits_of(_widened(few), torch.arange(TOKENS, device=ids.device), asked, WIDE)
    ):
        return why
    theirs = wide.run(asking, NAME, None)
    return reference.off_rounded(_logits_of(stack, ids, asked, twin.dtype), theirs)


def _logits_of(stack: FusedStack, ids: Tensor, asked: FusedInput, dtype: torch.dtype) -> Tensor:
    """The logits of one row of new tokens, [tokens, vocabulary]; its cache is dropped."""
    tokens = len(ids)
    numbers = (range(tokens), [0] * tokens, [[0]], [tokens], [0, tokens])
    position, row, table, length, starts = (
        ids.new_tensor(each, dtype=torch.int32) for each in numbers
    )
    shapes = [asked.shapes[i] for i in range(len(stack.layers))]
    stack.attach(
        *(
            [ids.new_zeros(2, s.heads, PAGE, s.key_dim, dtype=dtype) for s in shapes]
            for _ in range(2)
        )
    )
    return stack.head.narrow_logits(
        stack.forward(Feed(ids, position, row, table, length, starts, tokens))
    )


def _widened(stack: FusedStack) -> FusedStack:
    embedding = stack.embedding.to(WIDE)
    norm = stack.norm.to(WIDE)
    return replace(
        stack,
        embedding=embedding,
        layers=WideLayers(stack.layers),
        norm=norm,
        head=stack.head.to(WIDE),
    )


def _wide(part: Any) -> Any:
    return part.to(WIDE) if isinstance(part, Tensor) else part


class WideLayers(Sequence[FusedLayer]):
    """Layers in fp64, each made when it is asked for, since all together would take four times the model."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._layers = layers
        # a forward pass asks for each layer twice in a row
        self._last: tuple[int, FusedLayer] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        if self._last is None or self._last[0] != index:
            self._last = index, tree_map(_wide, self._layers[index])
        return self._last[1]


@dataclass(slots=True)
class FusedInput(Probe):
    """Also notes how each layer calls its attention, which is surer than reading the config."""

    calls: dict[int, tuple[int, How]] = field(default_factory=dict)  # query heads, and the rest

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How, extra: dict[str, Any]
    ) -> Tensor:
        self.calls[layer] = (query.shape[1], how)
        return Probe.attend(self, layer, query, key, value, how, extra)


def _build(twin: Any, asked: FusedInput) -> FusedStack:
    epsilons: dict[float, Tensor] = {}

    def view(*parts: Tensor | None) -> Any:
        """The model's weights, which lie side by side, as one frozen Parameter over the same storage."""
        tensors = [part for part in parts if part is not None]
        whole = joined(tensors) if tensors else None
        return None if whole is None else nn.Parameter(whole, requires_grad=False)

    def eps(norm: Any) -> Tensor:
        value = float(norm.variance_epsilon)
        return epsilons.setdefault(
            value, torch.tensor(value, dtype=torch.float32, device=twin.device)
        )

    def project(norm: Any, *linears: Any) -> Projection:
        weight, bias = (
            view(*(getattr(linear, name) for linear in linears)) for name in ("weight", "bias")
        )
        return Projection(view(norm.weight), eps(norm), weight, bias)

    def layer(index: int, module: Any) -> FusedLayer:
        attn = module.self_attn
        mlp = module.mlp
        heads, how = asked.calls[index]
        rope: dict[str, Any] = {"heads": heads, "kv_heads": asked.shapes[index].heads}
        if (q_norm := getattr(attn, "q_norm", None)) is not None:
            rope |= {"q_norm": view(q_norm.weight), "k_norm": view(attn.k_norm.weight)}
            rope["eps"] = float(q_norm.variance_epsilon)
        gate_up = project(module.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
        out, down = (
            (view(linear.weight), view(linear.bias)) for linear in (attn.o_proj, mlp.down_proj)
        )
        qkv = project(module.input_layernorm, attn.q_proj, attn.k_proj, attn.v_proj)
        return FusedLayer(qkv, rope, how._asdict(), LayerTail(*out, gate_up, *down))

    layers = [layer(i, module) for i, module in enumerate(layers_of(twin))]
    embedding = view(twin.get_input_embeddings().weight)
    final = twin.model.norm
    return FusedStack(
        embedding, twin.model.rotary_emb, layers, view(final.weight), eps(final), head_of(twin)
    )


def _compiled(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compiles with all but the first size of its plain tensors declared constant: the compiler would else take the
    width for the number of tokens wherever the two happen to be equal at the first call."""
    # A copy with its own code object: by these the compiler counts recompilations, and a second model is one.
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    run = torch.compile(own, **options)

    def call(*given: Any) -> Any:
        for tensor in given:
            if isinstance(tensor, Tensor) and tensor.dim() == 2:
                torch._dynamo.mark_static(tensor, 1)
        return run(*given)

    return call
