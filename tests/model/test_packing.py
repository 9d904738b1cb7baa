"""Packed sequences must get the log-probs and gradients they get alone, padded, or in any other pack."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, SHAPE, small, some_pairs
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)

from whet.errors import WhetError
from whet.model import packing as packed
from whet.model.head import head_of, log_probs
from whet.model.packing import check_packing, divide, hidden_states, make_packs, packed_attention


def padded_log_probs(model: Any, pairs: Any) -> list[torch.Tensor]:
    """The plain way: right padding, an attention mask, the model's own attention and logits.

    transformers' eager attention (Gemma 2) makes NaN of rows that see padding alone; causal rows need no mask.
    """
    rows = [[*prompt, *response] for prompt, response in pairs]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    mask = None if model.config._attn_implementation == "eager" else mask
    lp = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    out = []
    for i, (prompt, response) in enumerate(pairs):
        at = torch.arange(len(prompt), len(prompt) + len(response))
        out.append(lp[i, at - 1, ids[i, at]])
    return out


def packed_log_probs(
    model: Any, pairs: Any, budget: int, share: bool = False, device: str = "cpu"
) -> list[torch.Tensor]:
    out: dict[int, torch.Tensor] = {}
    for pack in make_packs(pairs, budget, device, share):
        lp, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets)
        out.update(zip(pack.members, lp.split(pack.counts), strict=True))
    return [out[i] for i in range(len(pairs))]


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1, 24, 1000])
def test_packed_equals_padded(family, budget):
    """Log-probs, a nonlinear loss of them and every gradient. transformers' norms round to fp32: hence 1e-6."""
    model, pairs = small(family), some_pairs()
    plain = padded_log_probs(model, pairs)
    want = torch.autograd.grad(sum(x.exp().sum() for x in plain), model.parameters())
    with packed_attention(model):
        packed = packed_log_probs(model, pairs, budget)
        got = torch.autograd.grad(sum(x.exp().sum() for x in packed), model.parameters())
    for a, b in zip(packed, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def family_pairs(seed: int = 0) -> Any:
    """Prompts with one, three and five responses, of one token and more, in no order."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 30, n).tolist() for n in (6, 1, 9)]
    pairs = [
        (prompts[i], rng.integers(2, 30, int(rng.integers(1, 12))))
        for i in (0, 1, 1, 1, 2, 2, 2, 2, 2)
    ]
    pairs[2] = (prompts[1], np.array([7]))
    return [pairs[i] for i in rng.permutation(len(pairs))]


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1, 24, 1000])
def test_a_prompt_that_is_fed_once_is_what_it_is_for_each(family, budget):
    """Log-probs and every gradient, also of windows and soft caps."""
    model, pairs = small(family), family_pairs()
    with packed_attention(model):
        plain = packed_log_probs(model, pairs, budget)
        want = torch.autograd.grad(sum(x.exp().sum() for x in plain), model.parameters())
        shared = packed_log_probs(model, pairs, budget, share=True)
        got = torch.autograd.grad(sum(x.exp().sum() for x in shared), model.parameters())
    for a, b in zip(shared, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_shared_pack_by_hand():
    (pack,) = make_packs(
        [([5, 6], [7, 8, 9]), ([5, 6], [3]), ([5, 6], [4, 2])], budget=10, share=True
    )
    assert pack.input_ids.tolist() == [[5, 6, 7, 8, 4]] and pack.position_ids.tolist() == [
        [0, 1, 2, 3, 2]
    ]
    assert pack.members == (0, 1, 2) and pack.counts == (3, 1, 2)
    assert pack.predict.tolist() == [1, 2, 3, 1, 1, 4] and pack.targets.tolist() == [
        7,
        8,
        9,
        3,
        4,
        2,
    ]
    assert pack.boundaries.starts.tolist() == [0, 4, 4, 5] and pack.boundaries.longest == 4
    keys = pack.boundaries.keys
    assert keys.rows.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 4] and keys.starts.tolist() == [
        0,
        4,
        6,
        9,
    ]
    assert keys.own.tolist() == [0, 1, 2, 3, 8]


def test_prompts_are_fed_once_only_where_that_leaves_fewer_than_nine_tokens_in_ten():
    """Three prompts of 9 tokens, two of them the same: 18 of 27 are left. Two responses of 18 tokens: 36 of 38."""
    short = [([5] * 9, [1]), ([5] * 9, [2]), ([6] * 9, [3])]
    long = [([5, 6], [7] * 18), ([5, 6], [8] * 18)]
    assert [pack.input_ids.numel() for pack in make_packs(short, budget=64, share=True)] == [18]
    assert [pack.input_ids.numel() for pack in make_packs(long, budget=64, share=True)] == [38]


@given(st.integers(0, 1000), st.integers(1, 60))
def test_shared_packs_hold_every_pair_and_keep_to_the_budget(seed, budget):
    pairs = family_pairs(seed)
    packs = make_packs(pairs, budget, share=True)
    assert sorted(i for pack in packs for i in pack.members) == list(range(len(pairs)))
    for pack in packs:
        tokens = pack.input_ids.shape[1]
        assert tokens <= budget or len({tuple(pairs[i][0]) for i in pack.members}) == 1
        assert (
            tokens <= budget or len(pack.members) == 1 or tokens == len(pairs[pack.members[0]][0])
        ), "or no own token"
        for member, (at, count) in enumerate(
            zip(np.cumsum((0, *pack.counts)), pack.counts, strict=False)
        ):
            prompt, response = pairs[pack.members[member]]
            read = pack.input_ids[0, pack.predict[at : at + count]].tolist()
            assert read == [*prompt, *response][len(prompt) - 1 : -1]


def test_the_context_leaves_the_model_as_it_was():
    model = small("llama")
    before = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), packed_attention(model, checkpoint=True):
        assert model.config._attn_implementation == packed.NAME
        assert model.model.layers[0].training
        assert not model.model.layers[0].self_attn.training
        raise ZeroDivisionError
    assert model.config._attn_implementation == before
    assert not model.model.layers[0].training


def test_divide_by_hand():
    assert divide([3, 9, 4, 2, 4], budget=8) == [[1], [2, 4], [0, 3]]
    assert divide([], budget=8) == []
    assert divide([20, 5], budget=8) == [[0], [1]]


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 60))
def test_divide_holds_each_once_within_the_budget(lengths, budget):
    packs = divide(lengths, budget)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= budget or len(pack) == 1 for pack in packs)
    assert all(
        sum(lengths[i] for i in a) + lengths[b[0]] > budget for a, b in itertools.pairwise(packs)
    )


def test_a_pack_by_hand():
    """Prompt 5 6 7 with response 8 9, and prompt 2 with response 3: the last tokens are not inputs."""
    (pack,) = make_packs([([2], [3]), ([5, 6, 7], np.array([8, 9]))], budget=10)
    assert pack.members == (1, 0)
    assert pack.counts == (2, 1)
    assert pack.input_ids.tolist() == [[5, 6, 7, 8, 2]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 0]]
    assert pack.boundaries.starts.tolist() == [0, 4, 5]
    assert pack.boundaries.longest == 4
    assert pack.predict.tolist() == [2, 3, 4]
    assert pack.targets.tolist() == [8, 9, 3]
    assert pack.owner.tolist() == [0, 0, 1]
    assert [(b.sequences, b.longest, b.rows.tolist()) for b in pack.boundaries.padding.buckets] == [
        (1, 4, [0, 1, 2, 3]),
        (1, 1, [0]),
    ]


def test_sequences_of_similar_length_share_a_bucket():
    pairs = [([2] * 5, [3] * n) for n in (16, 15, 12, 4)]
    (pack,) = make_packs(pairs, budget=100)
    assert [(b.sequences, b.longest, b.rows.numel()) for b in pack.boundaries.padding.buckets] == [
        (3, 20, 55),
        (1, 8, 8),
    ]


@pytest.mark.parametrize("pair", [([], [3]), ([2], [])])
def test_empty_sequences_are_refused(pair):
    with pytest.raises(WhetError, match="empty prompt or response"):
        make_packs([pair], 10)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_good_models_pass_the_check(family, dtype):
    check_packing(small(family, dtype))


def test_a_model_that_carries_state_across_sequences_is_refused():
    """Bamba mixes Mamba layers in: packed, one sequence would leak into the next."""
    shape = {**SHAPE, "num_hidden_layers": 2}
    config = BambaConfig(
        **shape,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_expand=2,
    )
    torch.manual_seed(0)
    model = BambaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    with pytest.raises(WhetError, match="Bamba"):
        check_packing(model)


def test_a_logit_transform_of_its_own_is_refused():
    model = small("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: out * 1.5)
    with pytest.raises(WhetError, match="other logits"):
        check_packing(model)


def test_attention_sinks_are_refused():
    config = GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    with pytest.raises(WhetError, match="s_aux"):
        check_packing(model)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d"), [(4, 4, 32), (9, 3, 64), (12, 2, 128), (4, 1, 256)]
)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [False, True])
def test_varlen_equals_the_reference(heads, kv_heads, d, window, dtype, share):
    """The flash kernel in half precision against the padded reference in fp32. Where prompts are shared, queries are
    fewer than keys and must stand at their ends."""
    pairs = [
        ([2] * prompt, [3] * n)
        for prompt, ns in ((3, (200, 190, 1)), (150, (64, 5, 1, 33)))
        for n in ns
    ]
    (pack,) = make_packs(pairs, 2000, "cuda", share)
    assert (pack.boundaries.keys is not None) == share
    tokens = pack.input_ids.shape[1]
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, h, tokens, d) for h in (heads, kv_heads, kv_heads)]
    half = [
        torch.randn(s, generator=generator, device="cuda").to(dtype).requires_grad_()
        for s in shapes
    ]
    wide = [x.detach().float().requires_grad_() for x in half]
    assert pack.boundaries.flash
    assert packed.can_varlen(half[0][0], half[2][0], None)
    assert not packed.can_varlen(wide[0][0], wide[2][0], None)
    kwargs: dict[str, Any] = {
        "packed": pack.boundaries,
        "scaling": d**-0.5,
        "sliding_window": window,
    }
    ours, _ = packed.attention(None, *half, None, **kwargs)
    reference, _ = packed.attention(None, *wide, None, **kwargs)
    torch.testing.assert_close(ours.float(), reference, rtol=0.03, atol=0.02)
    weights = torch.randn(ours.shape, generator=generator, device="cuda")
    got = torch.autograd.grad((ours.float() * weights).sum(), half)
    want = torch.autograd.grad((reference * weights).sum(), wide)
    for a, b in zip(got, want, strict=True):
        assert float((a.float() - b).norm() / b.norm()) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded_on_a_gpu(family):
    """bf16 with the flash kernel where it serves, against fp32 on the CPU: errors of rounding only."""
    exact = small(family, torch.float32)
    several = some_pairs(count=40)
    pairs = [(several[i // 4][0], response) for i, (_, response) in enumerate(several)]
    with packed_attention(exact), torch.no_grad():
        want = torch.cat(packed_log_probs(exact, pairs, 64))
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.2)):
        model = small(family, torch.float32).to("cuda", dtype)
        check_packing(model)
        for share in (False, True):
            with packed_attention(model), torch.no_grad():
                got = torch.cat(packed_log_probs(model, pairs, 64, share, "cuda")).cpu()
            assert float((got - want).abs().mean()) < bound
