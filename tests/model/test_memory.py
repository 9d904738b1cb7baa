"""The memory plan: numbers worked out by hand, and held against the tensors that a real engine and optimiser hold."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

from whet import config
from whet.learn.optimizer import AdamW
from whet.model import memory
from whet.model.load import tiny_model
from whet.model.memory import Footprint, MemoryPlan, ModelShape, Room, measure, pool_of
from whet.model.packing import hidden_states, make_packs, packed_attention
from whet.recipe import load_config
from whet.rollout.engine import LocalEngine

SHAPE = ModelShape(
    parameters=1000,
    adapted=50,
    layers=2,
    hidden=8,
    inner=16,
    heads=2,
    query=8,
    cached=16,
    vocab=100,
    softcap=False,
    flash=True,
)


def recipe(*sets: str) -> config.Config:
    """A recipe that decodes by plain calls, unless `sets` says otherwise."""
    own = ["rollout.slots=3", "rollout.context=32", "rollout.max_tokens=16", "rollout.graphs=false"]
    return load_config(sets=[*own, *sets])


def footprint(
    settings: config.Config, *, shape: ModelShape = SHAPE, flash: bool = False, device: str = "cuda"
) -> Footprint:
    return Footprint(shape=shape, settings=settings, device=torch.device(device), flash=flash)


def plan(settings: config.Config, *, shape: ModelShape = SHAPE, flash: bool = False) -> MemoryPlan:
    return footprint(settings, shape=shape, flash=flash).plan()


def lay_out(settings: config.Config, within: int, *, flash: bool = False) -> Room:
    return footprint(settings, flash=flash).lay_out(within)


def meta(settings: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings)


def test_by_hand_in_fp32() -> None:
    got = plan(recipe("learn.pack_tokens=64"))
    assert got == MemoryPlan(
        weights=4000,
        masters=0,
        moments=8000,
        reference=0,
        cache=(3 + 1) * 32 * 16 * 4,
        gradients=4000,
        # per token and layer: norms 2 * 8 * 12, attention 5 * 8 * 4, feed-forward 4 * 16 * 4
        activations=64 * 2 * (192 + 160 + 256),
        logits=4 * 64 * 100 * 4,
        decoding=3 * 4 * (32 * (8 + 4) + 600),
    )
    assert got.total == 4000 + 8000 + 8192 + 4000 + 77824 + 102400


def test_by_hand_in_bf16() -> None:
    """2 + 4 + 8 + 6 bytes per parameter: bf16 halves the cache and the activations, not the training state."""
    got = plan(
        recipe("learn.pack_tokens=64", 'model.dtype="bfloat16"', "learn.kl_coef=0.1"), flash=True
    )
    assert (got.weights, got.masters, got.moments, got.gradients) == (2000, 4000, 8000, 6000)
    assert got.reference == 2000
    assert got.cache == (3 + 1) * 32 * 16 * 2
    # norms 2 * 8 * (4 + 2 + 2), attention (2 * 8 + 8) * 2, feed-forward 4 * 16 * 2
    assert got.activations == 64 * 2 * (128 + 48 + 128)


def test_adapters_alone_are_trained() -> None:
    got = plan(
        recipe("model.lora.rank=4", 'model.dtype="bfloat16"', "learn.kl_coef=0.1"), flash=True
    )
    assert got.weights == (1000 + 200) * 2
    assert (got.masters, got.moments, got.gradients, got.reference) == (800, 1600, 1200, 400)


def test_pages_and_a_pool() -> None:
    assert pool_of(config.RolloutSettings(slots=3, context=33, page=16)) == (3 * 3, 16)
    assert pool_of(config.RolloutSettings(slots=3, context=33, page=16, pages=5)) == (5, 16)
    assert pool_of(config.RolloutSettings(slots=3, context=33, page=0, pages=5, graphs=False)) == (
        3,
        33,
    )


def test_long_sequences_and_checkpoints() -> None:
    alone = plan(recipe("learn.pack_tokens=16")).activations
    assert alone == 32 * 2 * 608, (
        "a sequence of 32 tokens does not fit a pack of 16 and stands alone"
    )
    kept = plan(recipe("learn.pack_tokens=16", "learn.checkpoint_activations=true")).activations
    assert kept == 32 * (2 * 8 * 4 + 608)


def test_logits_are_those_of_a_chunk() -> None:
    half = plan(
        recipe("learn.pack_tokens=4096", 'model.dtype="bfloat16"'),
        shape=dataclasses.replace(SHAPE, vocab=2**17),
    )
    assert half.logits == 1024 * 2**17 * 4 * 4, "four copies in fp32"


def test_peak_is_the_larger_of_learning_and_decoding() -> None:
    sizes = {
        "masters": 0,
        "moments": 0,
        "reference": 0,
        "cache": 5,
        "gradients": 1,
        "activations": 2,
        "logits": 3,
    }
    assert MemoryPlan(weights=10, decoding=4, **sizes).total == 21
    assert MemoryPlan(weights=10, decoding=9, **sizes).total == 24
    assert MemoryPlan(weights=10, decoding=9, **sizes).parts() == [
        ("weights", 10),
        ("decoding", 9),
        ("cache", 5),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page", [0, 16])
def test_plan_is_what_engine_and_optimiser_hold(dtype: str, page: int) -> None:
    settings = recipe(f'model.dtype="{dtype}"', f"rollout.page={page}")
    model = tiny_model(40, heads=4, kv_heads=2, context=64, dtype=getattr(torch, dtype))
    got = plan(settings, shape=measure(model))
    engine = LocalEngine(
        model,
        encode=lambda _: [1],
        decode=lambda _: "",
        seed=0,
        slots=3,
        context=32,
        page=settings.rollout.page,
    )
    assert held(*engine.cache.keys, *engine.cache.values) == got.cache  # type: ignore[attr-defined]
    assert held(*model.parameters()) == got.weights
    optimizer = AdamW(model)
    model(torch.arange(8)[None]).logits.float().square().mean().backward()
    live = held(*(p.grad for p in model.parameters() if p.grad is not None))
    optimizer.accumulate()
    masters = held(*(m.grad for m in optimizer.masters.values() if m.grad is not None))
    assert (live + masters if dtype == "bfloat16" else masters) == got.gradients
    optimizer.step(1e-3, 1.0)
    assert held(*optimizer.master_tensors().values()) == got.masters
    moments = {
        name: t for name, t in optimizer.moment_tensors().items() if not name.startswith("step.")
    }
    assert held(*moments.values()) == got.moments


def test_shape_of_families_without_weights() -> None:
    """Heads, dims and inner widths as each family has them; a tied head is counted once."""
    common = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    llama = measure(meta(LlamaConfig(**common, **heads, tie_word_embeddings=True)))
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48
    assert llama.parameters == 50 * 32 + 3 * (layer + 2 * 32) + 32
    assert (llama.query, llama.cached, llama.layers, llama.softcap) == (64, 3 * 2 * 32, 3, False)
    assert llama.adapted == 3 * (32 + 64 + 2 * (32 + 32) + 64 + 32 + 3 * (32 + 48))
    qwen = measure(
        meta(Qwen3Config(**common, **heads, tie_word_embeddings=False)), targets=("q_proj",)
    )
    assert qwen.parameters == 2 * 50 * 32 + 3 * (layer + 2 * 32 + 2 * 16) + 32
    assert qwen.adapted == 3 * (32 + 64)
    gemma = measure(meta(Gemma2Config(**common, **heads, sliding_window=8)))
    assert llama.flash and not gemma.flash and gemma.softcap
    assert not measure(meta(LlamaConfig(**common, **{**heads, "head_dim": 12}))).flash
    assert gemma.cached == llama.cached, "windowed layers keep all tokens too"


def test_adapter_count_is_pefts() -> None:
    pytest.importorskip("peft")
    from whet.model.lora import add_lora

    for targets in ((), ("q_proj", "self_attn.o_proj")):
        model = tiny_model(40, heads=4, kv_heads=2)
        shape = measure(model, targets)
        add_lora(model, config.Lora(rank=3, targets=targets), base="org/name")
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 3 * shape.adapted


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_about_what_autograd_keeps(dtype: str, kv_heads: int) -> None:
    """Within a fifth, on the padded path: two sequences of 64 tokens."""
    model = tiny_model(
        40, hidden=96, layers=3, heads=4, kv_heads=kv_heads, dtype=getattr(torch, dtype)
    )
    (pack,) = make_packs([(range(2, 33), [3] * 34)] * 2, budget=200)
    kept = saved_bytes(model, lambda: forward(model, pack))
    sets = ("learn.pack_tokens=128", "rollout.context=64", f'model.dtype="{dtype}"')
    got = plan(recipe(*sets), shape=measure(model)).activations
    assert got == pytest.approx(kept, rel=0.2)


def test_soft_capped_scores_are_counted() -> None:
    settings = Gemma2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        sliding_window=512,
    )
    model = AutoModelForCausalLM.from_config(settings).eval()
    (pack,) = make_packs([(range(2, 33), [3] * 225)] * 2, budget=1000)
    kept = saved_bytes(model, lambda: forward(model, pack))
    got = plan(
        recipe("learn.pack_tokens=510", "rollout.context=255"), shape=measure(model)
    ).activations
    assert got == pytest.approx(kept, rel=0.25)


def test_ways_to_fit() -> None:
    settings = recipe("learn.pack_tokens=1024", "rollout.slots=64")
    total = plan(settings).total
    ways = dict(footprint(settings, device="cpu").ways_to_fit(total // 2))
    assert "learn.pack_tokens = 256" in ways and ways["learn.pack_tokens = 256"] <= total // 2
    assert all(left <= total // 2 for left in ways.values()), (
        "only what is enough by itself, where there is any"
    )
    halfway = plan(recipe("learn.pack_tokens=256", "rollout.slots=64")).total
    assert ways["learn.pack_tokens = 256"] == halfway
    none = footprint(settings, device="cpu").ways_to_fit(1)
    assert none == sorted(none, key=lambda way: way[1]) and none[0][1] > 1
    assert not [text for text, _ in none if "context" in text and int(text.split()[-1]) <= 16], (
        "room for a prompt"
    )
    adapted = recipe("model.lora.rank=2", 'model.dtype="bfloat16"')
    offered = [text.split(" =")[0] for text, _ in footprint(adapted, device="cpu").ways_to_fit(1)]
    assert "model.lora.rank" not in offered and "model.dtype" not in offered


def test_graphs_are_resident_and_decode_by_the_prompts() -> None:
    got = plan(recipe("rollout.graphs=true", "rollout.context=256"))
    assert got.graphs == 3 * 256 * 4 * (4 * 8 + 2 * 8 + 3 * 16), (
        "prompts of all slots, which are more than the logits"
    )
    wide = dataclasses.replace(SHAPE, vocab=10_000)
    many = plan(recipe("rollout.graphs=true", "rollout.context=256"), shape=wide)
    assert many.graphs == 18 * 3 * 10_000
    assert got.cache == (3 * 256 + memory.PAGE) * 16 * 4, (
        "whole pages, and the one that padding goes to"
    )
    assert got.decoding == memory.PREFILL * 4 * (4 * 8 + 2 * 8 + 3 * 16)
    plain = plan(recipe(f"rollout.page={memory.PAGE}", "rollout.context=256"))
    assert got.resident - plain.resident == got.graphs


PAGED = ("rollout.page=8", "learn.pack_tokens=64")


def test_all_at_once_where_it_fits() -> None:
    whole = plan(recipe(*PAGED))
    room = lay_out(recipe(*PAGED), whole.total)
    assert room.plan == whole and not room.release and room.pages == 0 and room.total == whole.total


def test_graphs_of_updates_are_the_first_to_go() -> None:
    """1,000 parameters of 2 layers wait for the host; activations and two bf16 gradients stay with their graphs."""
    half = ("model.dtype=bfloat16", *PAGED)
    whole = plan(recipe(*half), flash=True)
    assert whole.replays == whole.activations + 2 * 1000 * 2
    assert lay_out(recipe(*half), whole.total, flash=True).plan == whole
    room = lay_out(recipe(*half), whole.total - 1, flash=True)
    assert room.plan.replays == 0 and not room.release and room.total == whole.total - whole.replays
    for without in (
        recipe(*half, "learn.compile=false"),
        recipe(*half, "learn.checkpoint_activations=true"),
    ):
        assert plan(without, flash=True).replays == 0


def test_the_cache_is_lent_where_that_is_enough() -> None:
    """Fixed 4000 + 8000; cache 13 pages of 8 x 64 bytes; an update 4000 + 77824 + 102400."""
    whole = plan(recipe(*PAGED))
    assert whole.cache == 13 * 8 * 64
    assert (
        whole.lent
        == 12_000 + max(4000 + 77_824 + 102_400, 6656 + whole.decoding)
        == whole.total - 6656
    )
    room = lay_out(recipe(*PAGED), whole.total - 1)
    assert room.release and room.plan == whole and room.total == whole.lent
    kept = lay_out(
        recipe(*PAGED, "rollout.mode=stream", "rollout.on_update=keep", "curriculum.max_age=1"),
        whole.total - 1,
    )
    assert not kept.release and kept.pages == 11 and kept.total == whole.total - 8 * 64, (
        "one page fewer is enough"
    )


def test_fewer_pages_where_decoding_does_not_fit() -> None:
    settings = recipe("rollout.page=8", "learn.pack_tokens=16", "rollout.slots=300")
    whole = plan(settings)
    assert whole.cache + whole.decoding > whole.learning, "or lending would be enough"
    for missing in (1, 8 * 64, 8 * 64 * 100):
        room = lay_out(settings, whole.lent - missing)
        assert room.pages == 1200 - -(-missing // (8 * 64)) and room.total <= whole.lent - missing
    least = lay_out(settings, 1)
    assert least.pages == 4 and least.total > 1, (
        "one context; that it does not fit is the caller's to see"
    )


def test_a_worker_and_a_learner_on_one_card_plan_their_own_part() -> None:
    settings = recipe("learn.pack_tokens=64", 'model.dtype="bfloat16"', "rollout.page=8")
    both = footprint(settings)
    worker, learner = (dataclasses.replace(both, role=role) for role in ("worker", "learner"))
    alone, taught, whole = worker.plan(), learner.plan(), both.plan()
    assert alone.learning == alone.masters == alone.moments == taught.cache == taught.decoding == 0
    twice = 2 * whole.weights  # the model of the worker, and the learner's copy for it
    assert (
        alone.resident + taught.resident + taught.learning
        == whole.resident + whole.learning + twice
    )
    within = alone.total - 3 * 8 * both.cached
    assert worker.lay_out(within).pages == 9, "of twelve pages those that fit its share"
    assert learner.lay_out(taught.total).total == taught.total


def test_whole_slots_are_never_fewer() -> None:
    room = lay_out(recipe(), 1)
    assert room.pages == 0 and room.release and room.plan == plan(recipe())


def test_ways_to_fit_reckon_with_lending() -> None:
    """Packs of 32 tokens fit if the cache is lent, and only then."""
    smaller = plan(recipe("rollout.page=8", "learn.pack_tokens=32"))
    free = smaller.total - 1
    assert smaller.lent <= free < plan(recipe(*PAGED)).lent
    ways = [
        dict(footprint(recipe(*PAGED), device=device).ways_to_fit(free))
        for device in ("cpu", "cuda")
    ]
    assert [way["learn.pack_tokens = 32"] for way in ways] == [smaller.total, smaller.lent]


def held(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def forward(model: Any, pack: Any) -> Tensor:
    with packed_attention(model):
        return hidden_states(model, pack)


def saved_bytes(model: nn.Module, work: Callable[[], Tensor]) -> int:
    """Bytes of the storages that autograd keeps for a backward pass, without the weights."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = work()
    assert out.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


def test_documented_bytes_per_parameter() -> None:
    half = plan(recipe('model.dtype="bfloat16"'), flash=True)
    full = plan(recipe(), flash=True)
    assert [p.weights + p.masters + p.moments + p.gradients for p in (half, full)] == [
        20_000,
        16_000,
    ]


def test_graphs_keep_small_pages() -> None:
    """32 pages of 64 tokens for each of 4 slots."""
    rollout = config.RolloutSettings(slots=4, context=2048, graphs=True)
    assert pool_of(rollout) == (4 * 32, 64)
    assert pool_of(rollout.model_copy(update={"pages": 40})) == (40, 64)


def test_a_drafter_takes_a_layer_of_cache_and_its_own_weights() -> None:
    plain = plan(recipe())
    got = plan(recipe('draft.drafters=["eagle"]'))
    h, kv = SHAPE.hidden, SHAPE.cached // SHAPE.layers
    assert got.cache == plain.cache * (SHAPE.cached + h + 1 + kv) // SHAPE.cached
    numbers = 2 * h * h + 2 * h * SHAPE.query + h * kv + 3 * h * SHAPE.inner
    assert got.drafter == numbers * (4 + 16) + 200_000 * 8 * 4 and plain.drafter == 0
    assert got.resident - plain.resident == got.cache - plain.cache + got.drafter
