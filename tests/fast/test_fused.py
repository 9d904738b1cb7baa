"""The fused stack computes what the Hugging Face model computes, over pages and in pieces, and follows its weights."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from families import SHAPE, VOCAB, WINDOW, small
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from whet import config
from whet.fast.fused import Feed, FusedStack, _shares, joined, share_storage, unfusable
from whet.fast.fused import fuse as fuse_twin
from whet.model.twin import kv_shapes, rollout_twin

PAGE = 4
LLAMA_LIKE = ("llama", "smollm2", "mistral", "qwen2", "qwen3")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
FORMS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "ratio 1": (LlamaConfig, {"num_key_value_heads": 4}),
    "ratio 7": (Qwen2Config, {"num_attention_heads": 14, "hidden_size": 56}),
    "all biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "biases and head norms": (Qwen3Config, {"attention_bias": True}),
    "one windowed layer": (
        Qwen3Config,
        {
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "wide heads": (MistralConfig, {"head_dim": 20, "sliding_window": None}),
    "llama3 positions": (
        LlamaConfig,
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}},
    ),
    "linear positions": (
        Qwen2Config,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "yarn positions": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "one layer": (LlamaConfig, {"num_hidden_layers": 1}),
}


def build(form: str, dtype: torch.dtype = torch.float64, tied: bool = False) -> Any:
    """As `small`, for the forms above."""
    kind, changes = FORMS[form]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        kind(**{**SHAPE, "tie_word_embeddings": tied, **changes})
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
            p.data = p.data.to(dtype)
    return model.eval()


def fuse(model: Any) -> FusedStack:
    assert share_storage(model)
    stack, _ = fuse_twin(rollout_twin(model))
    assert stack is not None
    return stack


def stale(model: Any, stack: FusedStack) -> bool:
    """Whether a weight of the model was moved instead of written in place; a new stack must then be made."""
    views = [
        leaf
        for leaf in tree_leaves((stack.layers, stack.norm, stack.embedding))
        if isinstance(leaf, nn.Parameter)
    ]
    places = {weight.data_ptr() for weight in model.parameters()}
    parted = any(joined(parts) is None for parts in _shares(model))
    return parted or any(view.data_ptr() not in places for view in views)


class Rows:
    """Sequences that grow by ragged pieces over pages in a scattered order; the last page belongs to no row."""

    def __init__(self, model: Any, stack: FusedStack, rows: int, context: int = 48) -> None:
        self.stack, self.rows, width = stack, rows, -(-context // PAGE)
        scattered = torch.randperm(rows * width, generator=torch.Generator().manual_seed(1))
        self.table = scattered.view(rows, width).int()
        self.length = torch.zeros(rows, dtype=torch.int32)
        shapes = kv_shapes(rollout_twin(model))
        made = [
            [
                torch.full((rows * width + 1, s.heads, PAGE, d), 7.0, dtype=s.dtype)
                for s in shapes
                for d in [s.key_dim]
            ]
            for _ in range(2)
        ]
        stack.attach(*made)

    @torch.no_grad()
    def feed(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The next tokens of every row, none for some; logits after each."""
        counts = [len(piece) for piece in pieces]
        row = torch.repeat_interleave(torch.arange(self.rows), torch.tensor(counts)).int()
        position = torch.cat(
            [torch.arange(n) + at for n, at in zip(counts, self.length.tolist(), strict=True)]
        ).int()
        self.length += torch.tensor(counts, dtype=torch.int32)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        hidden = self.stack.forward(
            Feed(
                torch.cat(list(pieces)), position, row, self.table, self.length, starts, max(counts)
            )
        )
        return list(self.stack.head.narrow_logits(hidden).split(counts))


def compare(model: Any, stack: FusedStack | None = None) -> float:
    """Largest difference of logits: ragged prompts, then single tokens, then both at once, against one forward."""
    rows = Rows(model, stack or fuse(model), 3)
    torch.manual_seed(4)
    texts = [torch.randint(2, VOCAB, (n,)) for n in (17, 9, 26)]
    cuts = [[5, 6, 7, 8, 15, 16, 17], [1, 2, 3, 4, 4, 8, 9], [9, 10, 11, 12, 12, 13, 26]]
    got: list[list[Tensor]] = [[], [], []]
    for a, b in zip(([0] * 3, *zip(*cuts, strict=True)), zip(*cuts, strict=True), strict=False):
        for out, piece in zip(
            got, rows.feed([t[i:j] for t, i, j in zip(texts, a, b, strict=True)]), strict=True
        ):
            out.append(piece)
    with torch.no_grad():
        want = [model(input_ids=text[None], use_cache=False).logits[0] for text in texts]
    assert min(float(w.std()) for w in want) > 0.3, "weights too tame to show an error"
    return max(float((torch.cat(g) - w).abs().max()) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_families(family: str, dtype: torch.dtype, tied: bool) -> None:
    """RMSNorm and rotary angles are float32 in transformers whatever the model, and the same numbers here."""
    assert compare(small(family, dtype, tied=tied)) < (1e-5 if dtype == torch.float64 else 2e-4)


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    assert compare(build(form)) < 1e-5


def test_half_precision_is_as_near_as_the_model_itself() -> None:
    """Both round; neither may be further from float32 than the other."""
    model = small("qwen2", torch.bfloat16)
    exact = copy.deepcopy(model).float()
    text = torch.arange(2, 20)
    rows = Rows(model, fuse(model), 1)
    with torch.no_grad():
        want, theirs = (
            m(input_ids=text[None], use_cache=False).logits[0].float() for m in (exact, model)
        )
    ours = torch.cat([piece for i in range(0, 18, 3) for piece in rows.feed([text[i : i + 3]])])
    assert ours.dtype == torch.bfloat16, "as the product gives them: the draw widens them"
    ours = ours.float()
    assert float((ours - want).abs().mean()) < 1.5 * float((theirs - want).abs().mean())


def test_an_update_in_place_is_seen() -> None:
    model = small("qwen3", torch.float32)
    stack = fuse(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids = torch.arange(2, 14)[None]
    before = model(ids).logits
    before.logsumexp(-1).mean().backward()
    optimizer.step()
    assert float((model(ids).logits - before).detach().abs().max()) > 0.1
    assert not stale(model, stack) and compare(model, stack) < 2e-4


def test_a_moved_weight_is_noticed() -> None:
    for change in (
        lambda m: m.double(),
        lambda m: setattr(
            m.model.layers[1].mlp.up_proj.weight,
            "data",
            m.model.layers[1].mlp.up_proj.weight.clone(),
        ),
        lambda m: setattr(m.model.norm.weight, "data", m.model.norm.weight.detach().clone()),
    ):
        model = small("llama", torch.float32)
        stack = fuse(model)
        assert not stale(model, stack)
        change(model)
        assert stale(model, stack)


def test_padding_goes_to_the_last_page() -> None:
    model = small("llama")
    stack = fuse(model)
    rows = Rows(model, stack, 2)
    (alone, _) = rows.feed([torch.arange(5, 10), torch.arange(0)])
    before = [pages[:-1].clone() for pages in (*stack.keys, *stack.values)]
    with torch.no_grad():
        nothing, starts = (
            torch.zeros(2, dtype=torch.int32),
            torch.tensor([0, 1, 2], dtype=torch.int32),
        )
        stack.forward(Feed(nothing.long(), nothing, nothing - 1, rows.table, nothing, starts, 1))
    assert all(
        torch.equal(a, b[:-1]) for a, b in zip(before, (*stack.keys, *stack.values), strict=True)
    )
    assert torch.isfinite(alone).all()


# ---- what has no fused stack


def assert_unfused(twin: Any, why: str) -> None:
    stack, said = fuse_twin(twin)
    assert stack is None and why in str(said)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi", "phi3"])
def test_other_families(family: str) -> None:
    model = small(family, torch.float32)
    share_storage(model)
    twin = rollout_twin(model)
    assert_unfused(twin, "is not one of")


def test_known_without_weights() -> None:
    with torch.device("meta"):
        models = [
            AutoModelForCausalLM.from_config(kind(**SHAPE))
            for kind in (LlamaConfig, Qwen3Config, PhiConfig)
        ]
    assert [unfusable(model) is None for model in models] == [True, True, False]


def test_storage_must_be_shared() -> None:
    twin = rollout_twin(small("llama"))
    assert_unfused(twin, "share storage")
    assert fuse_twin(rollout_twin(share(small("llama"))))[1] is None


def share(model: Any) -> Any:
    assert share_storage(model)
    return model


def test_adapters() -> None:
    pytest.importorskip("peft")
    from whet.model.lora import add_lora

    model = share(small("llama", torch.float32))
    add_lora(model, config.Lora(rank=2), "base", seed=0)
    twin = rollout_twin(model)
    assert_unfused(twin, "proj")


def test_another_activation() -> None:
    model = share(AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, hidden_act="gelu")))
    assert_unfused(rollout_twin(model), "gelu")


def test_a_network_that_changed_is_found_by_its_logits() -> None:
    """As a new version of transformers might: same class, same modules, another sum."""

    class Louder(nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.weight, self.variance_epsilon, self.norm = norm.weight, norm.variance_epsilon, norm

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = 1.01 * self.norm(x)
            return out

    model = share(small("llama"))
    layer = model.model.layers[1]
    layer.input_layernorm = Louder(layer.input_layernorm)
    twin = rollout_twin(model)
    assert_unfused(twin, "other logits")


# ---- compiled


@pytest.fixture
def fresh() -> Any:
    """Nothing compiled before or after; gives the graphs and compiled frames since."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()
    counters.clear()


def decode_all(model: Any, stack: FusedStack, sizes: Sequence[int]) -> None:
    """Forwards of so many tokens, of 2 rows each."""
    rows = Rows(model, stack, 2, context=4096)
    for tokens in sizes:
        rows.feed([torch.full((tokens - tokens // 2,), 3), torch.full((tokens // 2,), 5)])


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_one_graph_serves_all_layers_and_sizes(backend: str, fresh: Any) -> None:
    """First with as many tokens as the model is wide, the worst case: the compiler takes equal sizes for the same."""
    kind, changes = FORMS["ratio 1"]
    model = AutoModelForCausalLM.from_config(
        kind(**{**SHAPE, **changes, "num_hidden_layers": 3})
    ).eval()
    stack = fuse(model)
    stack.compile(backend=backend)
    decode_all(model, stack, [32])
    assert fresh["stats"]["unique_graphs"] == 5, "one to enter, three of every layer, one to leave"
    decode_all(model, stack, [24, 40, 2, 3, 64])
    assert fresh["stats"]["unique_graphs"] == 5 and not fresh["graph_break"]
    decode_all(model, stack, [1])
    assert fresh["stats"]["unique_graphs"] == 10, "a single token is the one exception"


def test_compiled_is_the_same(fresh: Any) -> None:
    model = build("biases and head norms", torch.float32)
    stack = fuse(model)
    stack.compile(backend="aot_eager")
    assert compare(model, stack) < 2e-4
    assert fresh["stats"]["unique_graphs"] == 5


@pytest.mark.slow
def test_many_models_in_one_process(fresh: Any) -> None:
    """The compiler gives up on a function it has compiled eight times; each stack has functions of its own."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in (16, 24, 48):
            model = AutoModelForCausalLM.from_config(
                LlamaConfig(**{**SHAPE, "hidden_size": width})
            ).eval()
            stack = fuse(model)
            stack.compile(backend="eager")
            decode_all(model, stack, [24, 40])
    assert fresh["stats"]["unique_graphs"] == 3 * 5


def test_inference_mode_is_one_set_of_graphs(fresh: Any) -> None:
    """The engine runs under it from the first step on."""
    model = small("llama", torch.float32)
    stack = fuse(model)
    stack.compile(backend="aot_eager")
    with torch.inference_mode():
        decode_all(model, stack, [24, 40, 64])
    assert fresh["stats"]["unique_graphs"] == 5
