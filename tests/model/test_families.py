"""What is promised of every family: the learner's log-probs, the engine's tokens, tied weights, saved weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, SHAPE, VOCAB, WINDOW, small, some_pairs
from transformers import AutoModelForCausalLM, Phi3Config

from whet.errors import WhetError
from whet.learn.checkpoint import save_checkpoint
from whet.model.head import head_of, log_probs
from whet.model.packing import hidden_states, make_packs, packed_attention
from whet.model.twin import refuse_unsupported, rollout_twin
from whet.rollout.engine import LocalEngine
from whet.types import Request, Sampling

CHUNK = 3 * VOCAB
PROMPTS = {
    f"p{n}": [(7 * i + n) % (VOCAB - 2) + 2 for i in range(n)]
    for n in (1, 3, WINDOW + 1, 3 * WINDOW + 2)
}


def packed(model: Any, pairs: Any) -> list[torch.Tensor]:
    out: dict[int, torch.Tensor] = {}
    with packed_attention(model):
        for pack in make_packs(pairs, 40):
            lp, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets, chunk=CHUNK)
            out.update(zip(pack.members, lp.split(pack.counts), strict=True))
    return [out[i] for i in range(len(pairs))]


def plain(model: Any, pairs: Any) -> list[torch.Tensor]:
    """One sequence at a time through the unmodified model."""
    out = []
    for prompt, response in pairs:
        ids = torch.tensor([[*prompt, *response]])
        lp = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        out.append(lp[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0])
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probs_are_the_models_own(family: str, dtype: torch.dtype) -> None:
    """Packed and chunked against logits.float().log_softmax(-1); bf16 within what its rounding does to the logits."""
    model, pairs = small(family, dtype), some_pairs(count=9)
    with torch.no_grad():
        ours, theirs = torch.cat(packed(model, pairs)), torch.cat(plain(model, pairs))
        exact = theirs if dtype == torch.float32 else torch.cat(plain(model.float(), pairs))
    assert ours.dtype == torch.float32
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    else:
        rounding = float((theirs - exact).abs().mean())
        assert float((ours - exact).abs().mean()) < 1.5 * rounding < 0.3
    assert float(theirs.std()) > 0.5, "weights too tame to show an error"


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page", [0, 4])
def test_greedy_tokens_are_those_of_generate(family: str, page: int) -> None:
    """Prompts shorter and much longer than the sliding window, and responses that grow past it."""
    model = small(family, torch.float32)
    engine = LocalEngine(
        model,
        encode=PROMPTS.__getitem__,
        decode=str,
        seed=0,
        slots=3,
        context=64,
        page=page,
        pages=0,
    )
    sampling = Sampling(max_tokens=14, temperature=0.0)
    engine.submit(
        [Request(prompt_id=p, group_id=i, n=1, sampling=sampling) for i, p in enumerate(PROMPTS)]
    )
    got = {r.prompt_id: r.trace.ids.tolist() for r in engine.collect() if r.trace}
    for name, prompt in PROMPTS.items():
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=14,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert got[name] == out[0, len(prompt) :].tolist()
    assert len({token for tokens in got.values() for token in tokens}) > 3, (
        "a constant output would prove nothing"
    )


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embedding_and_head_are_one_parameter_or_two(
    family: str, tied: bool, tmp_path: Path
) -> None:
    """The gradient is autograd's of the plain model, the twin keeps the tie, and so does the saved folder."""
    model, pairs = small(family, tied=tied), some_pairs()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is head) == tied
    wanted = [embedding] if tied else [embedding, head]
    want = torch.autograd.grad(sum(x.exp().sum() for x in plain(model, pairs)), wanted)
    got = torch.autograd.grad(sum(x.exp().sum() for x in packed(model, pairs)), wanted)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert float(b.abs().max()) > 1e-3
    twin = rollout_twin(model)
    assert (
        twin.get_input_embeddings().weight is embedding
        and twin.get_output_embeddings().weight is head
    )

    model = small(family, torch.float32, tied=tied)
    save_checkpoint(tmp_path / "c", model=model, tokenizer=None, tensors={}, arrays={}, states={})
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "c", attn_implementation=model.config._attn_implementation
    ).eval()
    ids = torch.tensor([PROMPTS["p14"]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tied


def test_rotary_positions_that_follow_the_batch_are_refused() -> None:
    half = [1.0] * 4
    rope = {"rope_type": "longrope", "short_factor": half, "long_factor": half, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = 32  # type: ignore[assignment]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Phi3Config(**SHAPE, rope_parameters=rope))
    with pytest.raises(WhetError, match="longrope"):
        refuse_unsupported(model)
