"""The engine emits exactly what slow decoding emits, whatever the batch, the slots, the pages and the order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_engine import (
    PROMPTS,
    ask,
    by_key,
    check_against_slow,
    expecting_short,
    make_engine,
    reference_race,
    sharp_model,
    sharpen,
)
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from whet.errors import WhetError
from whet.types import Request

FORMS = [{}, {"page": 4}, {"page": 3, "pages": 24}]


class Race(LogitsProcessor):
    """Our noise for `generate`: its greedy choice over these scores is our draw."""

    def __init__(self, keys: list[tuple[int, int]], start: int, temperature: float) -> None:
        self.keys, self.start, self.temperature = keys, start, temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lp = torch.log_softmax(scores.double() / self.temperature, -1).numpy()
        at = input_ids.shape[1] - self.start
        return torch.from_numpy(
            np.stack(
                [reference_race(lp[i], 5, False, g, n, at) for i, (g, n) in enumerate(self.keys)]
            )
        )


@pytest.mark.wide
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_equals_generate(form: dict[str, int], temperature: float) -> None:
    """Left-padded batch of ragged prompts through transformers' own loop and cache."""
    model = sharp_model()
    requests = [ask(i, temperature=temperature) for i in range(6)]
    engine = make_engine(model, **form)
    engine.submit(requests)
    got = by_key(engine.collect())
    width = max(len(PROMPTS[r.prompt_id]) for r in requests)
    ids = torch.tensor(
        [[0] * (width - len(PROMPTS[r.prompt_id])) + PROMPTS[r.prompt_id] for r in requests]
    )
    mask = torch.tensor(
        [
            [0] * (width - len(PROMPTS[r.prompt_id])) + [1] * len(PROMPTS[r.prompt_id])
            for r in requests
        ]
    )
    race = [Race([(r.group_id, 0) for r in requests], width, temperature)] if temperature else []
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=race,
    )
    for request, tokens in zip(requests, out[:, width:].tolist(), strict=True):
        assert got[request.group_id, 0] == tokens


@pytest.mark.wide
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kv_heads", [6, 3, 2], ids=["gqa1", "gqa2", "gqa3"])
def test_equals_slow_decoding(form: dict[str, int], kv_heads: int) -> None:
    """Tokens and log-probs, for mixed temperatures, lengths and group sizes."""
    model = sharp_model(heads=6, kv_heads=kv_heads)
    requests = [
        ask(0, n=3),
        ask(1, temperature=0.0),
        ask(2, n=2, temperature=0.6, max_tokens=7),
        ask(3, phase="eval"),
        ask(4, first=5, n=2),
    ]
    engine = make_engine(model, **form)
    engine.submit(requests)
    check_against_slow(model, requests, engine.collect())


def test_log_probs_equal_a_teacher_forced_forward() -> None:
    model = sharp_model()
    engine = make_engine(model)
    engine.submit([ask(i, temperature=0.8) for i in range(5)])
    for rollout in engine.collect():
        assert rollout.trace is not None
        prompt = PROMPTS[rollout.prompt_id]
        ids = torch.tensor([prompt + rollout.trace.ids.tolist()])
        with torch.no_grad():
            lp = torch.log_softmax(model(ids, use_cache=False).logits[0] / 0.8, -1)
        want = lp[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(rollout.trace.log_probs, want.numpy(), rtol=0, atol=1e-9)


def windowed_models() -> dict[str, PreTrainedModel]:
    sizes = {
        "vocab_size": 23,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    gemma = Gemma2Config(
        **sizes,
        sliding_window=5,
        query_pre_attn_scalar=6,
        final_logit_softcapping=4.0,
        attn_logit_softcapping=2.0,
        attn_implementation="eager",
    )
    return {
        "mistral": sharpen(
            MistralForCausalLM(MistralConfig(**sizes, sliding_window=4)).double(), 10
        ),
        "gemma2": sharpen(Gemma2ForCausalLM(gemma).double(), 6),
    }


@pytest.mark.wide
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_sliding_window_and_soft_caps(form: dict[str, int], name: str) -> None:
    """Sequences several windows long; Gemma 2 also caps scores and logits and alternates its layers."""
    model = windowed_models()[name]
    requests = [ask(i, max_tokens=18) for i in range(4)]
    engine = make_engine(model, **form)
    engine.submit(requests)
    # transformers' eager attention takes its softmax in float32 whatever the model
    check_against_slow(
        model, requests, engine.collect(), tolerance=1e-9 if name == "mistral" else 1e-5
    )


def test_a_window_matters_in_these_tests() -> None:
    model = windowed_models()["mistral"]
    narrow, wide = make_engine(model), make_engine(model)
    wide.twin.config.sliding_window = 1000
    for engine in (narrow, wide):
        engine.submit([ask(i, temperature=0.0) for i in range(5)])
    assert by_key(narrow.collect()) != by_key(wide.collect())


def test_forks_equal_single_requests() -> None:
    model = sharp_model()
    for form in FORMS:
        forked, single = make_engine(model, slots=5, **form), make_engine(model, slots=5, **form)
        forked.submit([ask(i, n=7, max_tokens=8) for i in range(2, 4)])
        single.submit([ask(i, first=k, max_tokens=8) for k in range(7) for i in range(2, 4)])
        assert by_key(forked.collect()) == by_key(single.collect())


def test_a_prompt_is_prefilled_once_for_its_rollouts() -> None:
    engine = make_engine(sharp_model(), slots=8)
    engine.submit([ask(3, n=8)])
    engine.collect()
    assert engine.stats()["rollout/prefill_tokens"] == len(PROMPTS["p3"])


def test_preemption_changes_nothing() -> None:
    model = sharp_model()
    requests = [ask(i, n=2, max_tokens=24) for i in range(4)]
    roomy, tight = (expecting_short(make_engine(model, page=4, pages=pages)) for pages in (0, 16))
    for engine in (roomy, tight):
        engine.submit(requests)
    want, got = roomy.collect(), tight.collect()
    assert by_key(got) == by_key(want)
    for a, b in zip(
        sorted(got, key=lambda r: r.key), sorted(want, key=lambda r: r.key), strict=True
    ):
        np.testing.assert_allclose(a.trace.log_probs, b.trace.log_probs, rtol=0, atol=1e-9)  # type: ignore[union-attr]
    assert tight.stats()["rollout/preempted"] > 0 == roomy.stats()["rollout/preempted"]
    assert tight.cache.free == 16  # nothing leaked


MODEL = sharp_model(seed=3)
WORK = [
    ask(i, n=1 + i % 3, temperature=(1.0, 0.0, 0.5)[i % 3], max_tokens=2 + (7 * i) % 13)
    for i in range(7)
]
WANT: dict[tuple[int, int], list[int]] = {}


@settings(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(7)),
    slots=st.integers(1, 8),
    page=st.sampled_from([0, 1, 3, 8, 64]),
    spare=st.integers(0, 20),
    calls=st.integers(1, 3),
    stream=st.booleans(),
)
def test_tokens_depend_on_the_key_alone(
    order: list[int], slots: int, page: int, spare: int, calls: int, stream: bool
) -> None:
    if not WANT:
        engine = make_engine(MODEL, slots=1)
        engine.submit(WORK)
        WANT.update(by_key(engine.collect()))
    pages = -(-64 // page) + spare if page else 0
    engine = make_engine(
        MODEL, slots=slots, page=page, pages=pages, mode="stream" if stream else "barrier"
    )
    found = []
    for call in range(calls):
        engine.submit([WORK[i] for i in order[call::calls]])
        found += engine.collect()
    while not engine.idle:
        found += engine.collect()
    assert by_key(found) == WANT and len(found) == len(WANT)
    if page:
        assert engine.cache.free == pages


def test_seeds_and_spaces_differ() -> None:
    model = sharp_model()
    runs = []
    for seed, phase in ((5, "train"), (6, "train"), (5, "eval"), (5, "screen"), (5, "continue")):
        engine = make_engine(model, seed=seed)
        runs.append(by_key(engine.generate([ask(1, n=4, phase=phase)])))
    train, other_seed, evaluation, screen, continued = runs
    assert train != other_seed and train != evaluation
    assert train == screen == continued


@pytest.mark.wide
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_float32_within_a_margin(form: dict[str, int]) -> None:
    model = sharp_model(dtype=torch.float32)
    requests = [ask(i, n=2) for i in range(5)]
    engine = make_engine(model, **form)
    engine.submit(requests)
    rollouts = engine.collect()
    assert {r.trace.log_probs.dtype for r in rollouts if r.trace} == {np.dtype(np.float32)}
    check_against_slow(model, requests, rollouts, tolerance=2e-4)


def test_bfloat16_runs() -> None:
    engine = make_engine(sharp_model(dtype=torch.bfloat16))
    engine.submit([ask(i) for i in range(5)])
    rollouts = engine.collect()
    assert [r.length for r in rollouts] == [20] * 5
    assert all(np.isfinite(r.trace.log_probs).all() for r in rollouts if r.trace)


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(WhetError, match="128 positions"):
        make_engine(sharp_model(), context=129)


def test_a_pool_too_small_for_one_rollout_is_refused() -> None:
    with pytest.raises(WhetError, match="it takes 16"):
        make_engine(sharp_model(), page=4, pages=15)


def test_weights_changed_in_place_are_used_at_once() -> None:
    model = sharp_model()
    engine = make_engine(model)
    before = engine.generate([ask(1, temperature=0.0)])
    with torch.no_grad():
        for mine, new in zip(model.parameters(), sharp_model(seed=9).parameters(), strict=True):
            mine.copy_(new)
    request: Request = ask(1, temperature=0.0)
    after = engine.generate([request])
    assert by_key(after) != by_key(before)
    check_against_slow(model, [request], after)
