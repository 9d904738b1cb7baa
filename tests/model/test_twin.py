"""The twin holds the trainer's very tensors, computes what it computes, and refuses what it cannot."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from whet.errors import WhetError
from whet.model.load import tiny_model
from whet.model.twin import (
    KVShape,
    Probe,
    kv_shapes,
    refuse_unsupported,
    rollout_twin,
    sharing_copy,
)

SIZES = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED_EXPERTS = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"},
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


def build(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def logits(model: PreTrainedModel, **kwargs: object) -> torch.Tensor:
    ids = torch.tensor([[5, 3, 8, 1, 2]])
    with torch.no_grad():
        return model(
            input_ids=ids, position_ids=torch.arange(5)[None], use_cache=False, **kwargs
        ).logits


def test_shares_every_parameter_and_buffer_object() -> None:
    model = tiny_model(20).train()
    twin = rollout_twin(model)
    theirs = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ours = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in theirs)
    # tied in the trainer, tied in the twin
    assert twin.lm_head.weight is model.model.embed_tokens.weight
    assert not any(t.is_meta for t in ours.values())


def test_trainer_keeps_its_attention_and_mode() -> None:
    model = tiny_model(20).train()
    model.model.layers[1].eval()
    config = copy.deepcopy(model.config)
    twin = rollout_twin(model)
    assert (
        model.config._attn_implementation == "sdpa" and twin.config._attn_implementation == "whet"
    )
    assert model.config.to_dict() == config.to_dict()
    assert model.training and model.model.layers[0].training and not model.model.layers[1].training
    assert not any(module.training for module in twin.modules())
    assert all(p.requires_grad for p in twin.parameters())


class Uncopyable:
    """A forward that calls the model it was made for and cannot be copied, as accelerate's autocast is."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = model.forward

    def __call__(self, *args: object, **kwargs: object) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("cannot be copied")


def test_a_forward_that_a_trainer_hung_on_the_model_is_dropped() -> None:
    model = tiny_model(20)
    before = logits(model)
    model.forward = hung = Uncopyable(model)
    twin = rollout_twin(model)
    assert model.forward is hung and "forward" not in vars(twin)
    torch.testing.assert_close(logits(twin, ctx=Probe()), before)
    assert twin.lm_head.weight is model.lm_head.weight
    copied = sharing_copy(model, [])
    with torch.no_grad():
        model.lm_head.weight.zero_()
    # the trainer's forward would give the new weights
    torch.testing.assert_close(logits(copied), before)


def test_an_update_in_place_is_seen_at_once() -> None:
    model = tiny_model(20)
    twin = rollout_twin(model)
    before = logits(twin, ctx=Probe())
    torch.testing.assert_close(before, logits(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    after = logits(twin, ctx=Probe())
    torch.testing.assert_close(after, logits(model))
    assert (after - before).abs().max() > 0.1


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        ),
        CohereConfig(**SIZES, logit_scale=0.3),
        GPT2Config(
            vocab_size=32,
            n_embd=24,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ],
    ids=lambda c: type(c).__name__,
)
def test_others_than_the_promised_families_compute_the_same(config: PreTrainedConfig) -> None:
    model = build(config).eval()
    torch.testing.assert_close(
        logits(rollout_twin(model), ctx=Probe()), logits(model), rtol=1e-4, atol=1e-5
    )


def test_shapes_of_the_cache() -> None:
    twin = rollout_twin(build(LlamaConfig(**SIZES)))
    assert kv_shapes(twin) == [KVShape(heads=2, key_dim=6, value_dim=6, dtype=torch.float32)] * 2


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BloomConfig(vocab_size=32, hidden_size=24, n_layer=1, n_head=2), "attention be replaced"),
        (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "type conv"),
        (
            LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "dynamic rot",
        ),
        (GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1), "s_aux"),
        (Qwen2MoeConfig(**WINDOWED_EXPERTS), "sliding window"),
    ],
    ids=lambda c: type(c).__name__ if isinstance(c, PreTrainedConfig) else "",
)
def test_refuses_what_it_cannot_reproduce(config: PreTrainedConfig, why: str) -> None:
    model = build(config)
    with pytest.raises(WhetError, match=why):
        rollout_twin(model)


def test_refuses_other_things_than_causal_models() -> None:
    with pytest.raises(WhetError, match="Hugging Face"):
        rollout_twin(nn.Linear(2, 2))  # type: ignore[arg-type]
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(WhetError):
        rollout_twin(t5)


def test_a_model_changed_after_loading_is_followed() -> None:
    """What the config does not tell is in the modules, and these are copied: adapters live on that."""
    model = tiny_model(20).eval()
    before = logits(model)
    model.model.layers[0].self_attn.scaling *= 30
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, nn.Linear(96, 96))
    twin = rollout_twin(model)
    torch.testing.assert_close(logits(twin, ctx=Probe()), logits(model))
    assert (logits(model) - before).abs().max() > 0.1
    assert twin.model.layers[1].mlp[1] is not model.model.layers[1].mlp[1]
    assert twin.model.layers[1].mlp[1].weight is model.model.layers[1].mlp[1].weight


def test_refuses_a_network_that_computes_something_else() -> None:
    """Same modules, other arithmetic by the name of the attention: only running it can tell."""
    model = tiny_model(20)
    for parameter in model.parameters():
        parameter.data.mul_(4)

    def scale(
        module: nn.Module, args: object, out: tuple[torch.Tensor, None]
    ) -> tuple[torch.Tensor, None]:
        return (out[0] * (1.0 if module.config._attn_implementation == "sdpa" else 3.0), None)

    model.model.layers[0].self_attn.register_forward_hook(scale)
    with pytest.raises(WhetError, match="other logits"):
        rollout_twin(model)


def test_refuses_models_that_read_more_than_text() -> None:
    text = Gemma3TextConfig(**SIZES)
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Gemma3Config(text_config=text, vision_config=vision)
        )
    with pytest.raises(WhetError, match="text-only"):
        refuse_unsupported(model)
