"""The comparison of two forms of a network: no right one is refused for its rounding, and wrong ones always are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from families import FAMILIES, small
from real_statistics import CHANNEL, FORMS, KEY_BIAS, LOUD, LOUDNESS, real_like
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from whet.errors import WhetError
from whet.fast import fused
from whet.fast.fused import fuse, share_storage
from whet.model import packing
from whet.model.packing import check_packing
from whet.model.twin import NAME, Probe, rollout_twin, sharing_copy
from whet.model.wide import WIDE, Wide, distance, probe_logits

TYPES = [torch.bfloat16, torch.float32]
typed = pytest.mark.parametrize("dtype", TYPES, ids=str)
Change = Callable[[Any], None]  # of an attention module

# ---- what is right


def test_the_tiny_models_have_the_statistics_they_name() -> None:
    model = real_like("qwen2 tied", torch.float32)
    assert float(model.model.layers[0].self_attn.k_proj.bias.detach().abs().max()) == KEY_BIAS
    with torch.no_grad():
        ids = torch.tensor([[2, 3, LOUD, 7, 8]])
        out = model(ids, output_hidden_states=True)
        rounded = real_like("qwen2 tied", torch.bfloat16)(ids).logits
    stream = out.hidden_states[2][0]
    assert LOUDNESS / 2 < float(stream[2, CHANNEL].abs()) < LOUDNESS * 2
    assert float(stream.abs().median()) < LOUDNESS / 100
    # The old bound on the largest difference of two forms in bfloat16 was 0.05 (1 + the largest logit).
    assert float((rounded.float() - out.logits).abs().max()) > 0.05 * (
        1.0 + float(out.logits.abs().max())
    )


@typed
@pytest.mark.parametrize("form", FORMS)
def test_models_with_the_statistics_of_real_ones_are_taken(form: str, dtype: torch.dtype) -> None:
    model = real_like(form, dtype)
    assert share_storage(model)
    stack, why = fuse(rollout_twin(model))
    assert stack is not None and why is None
    check_packing(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_two_forms_are_equal_where_nothing_is_rounded(family: str) -> None:
    """Not merely within bounds. Gemma 2 takes its softmax in fp32 whatever its type."""
    model = small(family, torch.bfloat16)
    wide = Wide(sharing_copy(model, model.parameters()))
    own = wide.reference(probe_logits)
    twin = rollout_twin(model)
    ours = Wide(sharing_copy(twin, twin.parameters()))
    theirs = ours.run(partial(probe_logits, ctx=Probe()), NAME, WIDE)
    assert distance(theirs, own.logits) < (1e-12 if family != "gemma2" else 2 * own.rounding)
    assert 0 < own.rounding < 1e-5 * own.size


@typed
def test_experts_are_compared_too(dtype: torch.dtype) -> None:
    """Their fast product has no fp64."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).to(dtype).eval()
    rollout_twin(model)
    check_packing(model)


def test_the_weights_stay_as_they_are() -> None:
    model = real_like("qwen2 untied")
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    settings = model.config.to_dict()
    rollout_twin(model)
    check_packing(model)
    for name, p in model.named_parameters():
        same, place, values = before[name]
        assert p is same and p.data_ptr() == place and torch.equal(p, values)
    assert (
        model.config.to_dict() == settings and model.lm_head.out_features == model.config.vocab_size
    )


def test_no_more_than_a_layer_is_widened_at_once() -> None:
    """Of a vocabulary of 152k neither the embedding nor the head, which would be most of a small model."""
    model = real_like("qwen2 tied")
    wide = Wide(sharing_copy(model, model.parameters()))
    widest = max(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    wide.reference(probe_logits)
    assert len(wide._room) <= max(widest, 256 * model.config.hidden_size)
    assert wide.run(probe_logits, wide.own, WIDE).shape == (8, 256)


# ---- what is wrong: the form under test computes something else than the model


def when_ours(model: Any, change: Change) -> Any:
    """Every layer's attention is changed for as long as whet's attention is used."""

    def before(module: Any, args: Any, kwargs: Any) -> None:
        if module.config._attn_implementation == NAME:
            change(module)

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(before, with_kwargs=True)
    return model


def other_scale(attention: Any) -> None:
    attention.scaling = 1.02 * attention.head_dim**-0.5


def no_softcap(attention: Any) -> None:
    attention.attn_logit_softcapping = None


def other_window(attention: Any) -> None:
    if attention.sliding_window is not None:
        attention.sliding_window = attention.config.sliding_window + 1


def without(name: str) -> Change:
    def drop(attention: Any) -> None:
        getattr(attention, name).bias = None

    return drop


def slower(rotary: nn.Module, args: Any) -> None:
    """A hook of the module that makes cosines and sines."""
    ours = rotary.config._attn_implementation == NAME
    rotary.inv_freq = rotary.original_inv_freq * (0.98 if ours else 1.0)


WRONG: dict[str, tuple[str, Change]] = {
    "scale": ("qwen2", other_scale),
    "soft-cap": ("gemma2", no_softcap),
    "window": ("gemma3", other_window),
    "query bias": ("qwen2", without("q_proj")),
    "key bias": ("qwen2", without("k_proj")),
    "value bias": ("qwen2", without("v_proj")),
}


@typed
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_attention_is_refused(wrong: str, dtype: torch.dtype) -> None:
    family, change = WRONG[wrong]
    rollout_twin(small(family, dtype))
    with pytest.raises(WhetError, match="other logits"):
        rollout_twin(when_ours(small(family, dtype), change))


@typed
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", ["scale", "query bias", "key bias", "value bias"])
def test_a_wrong_attention_is_refused_though_rounding_hides_it(
    form: str, wrong: str, dtype: torch.dtype
) -> None:
    with pytest.raises(WhetError, match="other logits"):
        rollout_twin(when_ours(real_like(form, dtype), WRONG[wrong][1]))


@typed
@pytest.mark.parametrize(
    "model_of", [partial(small, "qwen2"), partial(real_like, "qwen2 tied")], ids=["small", "real"]
)
def test_wrong_rotary_positions_are_refused(model_of: Any, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    model.model.rotary_emb.register_forward_pre_hook(slower)
    with pytest.raises(WhetError, match="other logits"):
        rollout_twin(model)


@typed
def test_a_soft_cap_that_the_models_own_attention_leaves_out_is_noticed(dtype: torch.dtype) -> None:
    """As transformers' default attention does for Gemma 2."""
    model = small("gemma2", dtype)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(WhetError, match="attn_implementation = 'eager'"):
        rollout_twin(model)
    with pytest.raises(WhetError, match="packed sequences"):
        check_packing(model)


# ---- the fused stack


@contextmanager
def replaced(name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    before = getattr(fused, name)
    setattr(fused, name, by(before))
    try:
        yield
    finally:
        setattr(fused, name, before)


def fused_scale(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, scaling, **rest: attend(*given, scaling=1.02 * scaling, **rest)


def fused_window(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, window=None, **rest: attend(*given, window=None, **rest)


def fused_rope(write: Callable[..., Any]) -> Callable[..., Any]:
    return lambda qkv, cos, sin, *given, **rest: write(qkv, cos, 0.98 * sin, *given, **rest)


def fused_bias(build: Callable[..., Any]) -> Callable[..., Any]:
    def without_bias(*given: Any) -> Any:
        stack = build(*given)
        stack.layers = [layer._replace(qkv=layer.qkv._replace(bias=None)) for layer in stack.layers]
        return stack

    return without_bias


def fused_head(build: Callable[..., Any]) -> Callable[..., Any]:
    def with_other_head(*given: Any) -> Any:
        stack = build(*given)
        stack.head = replace(stack.head, scale=1.02)
        return stack

    return with_other_head


WRONG_FUSED = {
    "scale": ("paged_attention", fused_scale),
    "rope": ("rope_write", fused_rope),
    "bias": ("_build", fused_bias),
    "head": ("_build", fused_head),
}


@typed
@pytest.mark.parametrize("wrong", WRONG_FUSED)
@pytest.mark.parametrize(
    "model_of", [partial(small, "qwen2"), partial(real_like, "qwen2 tied")], ids=["small", "real"]
)
def test_a_wrong_fused_stack_is_refused(model_of: Any, wrong: str, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    assert share_storage(model)
    twin = rollout_twin(model)
    name, by = WRONG_FUSED[wrong]
    with replaced(name, by):
        stack, why = fuse(twin)
    assert stack is None and "other logits" in str(why)
    assert fuse(twin)[0] is not None


@typed
def test_a_fused_stack_without_the_window_is_refused(dtype: torch.dtype) -> None:
    """The window has more keys than are fed: it is made shorter on both sides."""
    model = small("mistral", dtype)
    model.config.sliding_window = 40
    assert share_storage(model)
    twin = rollout_twin(model)
    with replaced("paged_attention", fused_window):
        stack, why = fuse(twin)
    assert stack is None and "other logits" in str(why)
    stack, _ = fuse(twin)
    assert stack is not None and stack.layers[0].attention["window"] == 40


def test_a_fused_stack_that_is_wrong_in_the_own_type_alone_is_refused() -> None:
    """As a kernel may be: it has no fp64."""

    def narrow(attend: Callable[..., Any]) -> Callable[..., Any]:
        def call(query: Any, *given: Any, **rest: Any) -> Any:
            out = attend(query, *given, **rest)
            return out * 1.5 if query.dtype == torch.bfloat16 else out

        return call

    model = small("llama", torch.bfloat16)
    assert share_storage(model)
    twin = rollout_twin(model)
    with replaced("paged_attention", narrow):
        stack, why = fuse(twin)
    assert stack is None and "other logits" in str(why)


# ---- packed sequences


def packed_scale(scaling: float | None, window: int | None, softcap: float | None) -> Any:
    return 1.02 * (scaling or 1.0), window, softcap


def packed_cap(scaling: float | None, window: int | None, softcap: float | None) -> Any:
    return scaling, window, None


def packed_window(scaling: float | None, window: int | None, softcap: float | None) -> Any:
    return scaling, None, softcap


@typed
@pytest.mark.parametrize(
    ("model_of", "wrong"),
    [
        (partial(small, "qwen2"), packed_scale),
        (partial(real_like, "qwen2 untied"), packed_scale),
        (partial(small, "gemma2"), packed_cap),
        (partial(small, "mistral"), packed_window),
    ],
    ids=["scale", "scale, real", "soft-cap", "window"],
)
def test_wrong_packed_attention_is_refused(
    model_of: Any, wrong: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(dtype)
    right = packing._attend_padded
    monkeypatch.setattr(
        packing, "_attend_padded", lambda *given: right(*given[:-1], wrong(*given[-1]))
    )
    with pytest.raises(WhetError, match="packed sequences get other logits"):
        check_packing(model)
    monkeypatch.setattr(packing, "_attend_padded", right)
    check_packing(model)
