"""Projections that share storage are still the model's own Parameters to all that trains, copies or saves them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, small
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from whet import config
from whet.fast.fused import _shares, joined, layers_of, share_storage, unshareable
from whet.learn.checkpoint import load_weights_into, save_checkpoint
from whet.learn.optimizer import AdamW
from whet.model.twin import rollout_twin, sharing_copy

LLAMA_LIKE = ("llama", "smollm2", "mistral", "qwen2", "qwen3")
IDS = torch.arange(2, 2 + 24).view(2, 12) % VOCAB


def is_shared(model: nn.Module) -> bool:
    """Whether the projections of every layer lie in shared buffers now."""
    return unshareable(model) is None and all(joined(parts) is not None for parts in _shares(model))


def shared(family: str = "qwen2", dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    model = small(family, dtype, **kwargs)
    assert share_storage(model) and is_shared(model)
    return model


def held(model: nn.Module) -> int:
    """Bytes of all storages behind the Parameters, each once."""
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    return sum(storages.values())


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_parameters_stay_what_they_were(family: str) -> None:
    model = small(family, torch.float32)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    before = [(n, p, p.clone(), p.requires_grad) for n, p in model.named_parameters()]
    want, bytes_before = model(IDS).logits, held(model)
    assert not is_shared(model) and share_storage(model) and is_shared(model)
    assert held(model) == bytes_before
    after = list(model.named_parameters())
    for (name, parameter, value, grad), (name_now, now) in zip(before, after, strict=True):
        assert name_now == name and now is parameter and now.requires_grad == grad and now.is_leaf
        assert torch.equal(now, value)
    assert torch.equal(model(IDS).logits, want)


def test_one_buffer_a_layer() -> None:
    attn = shared("qwen2").model.layers[1].self_attn
    linears = (attn.q_proj, attn.k_proj, attn.v_proj)
    weight, bias = joined([m.weight for m in linears]), joined([m.bias for m in linears])
    assert weight is not None and bias is not None and not weight.requires_grad
    assert torch.equal(weight, torch.cat([m.weight for m in linears]))
    assert torch.equal(bias, torch.cat([m.bias for m in linears]))
    with torch.no_grad():
        attn.k_proj.weight.fill_(5.0)
    q, k = (m.weight.shape[0] for m in linears[:2])
    assert (
        (weight[q : q + k] == 5.0).all()
        and not (weight[:q] == 5.0).any()
        and not (weight[q + k :] == 5.0).any()
    )


def test_joined_takes_neighbours_only() -> None:
    both = torch.arange(12.0).view(6, 2)
    whole = joined([both[1:2], both[2:5]])
    assert whole is not None and torch.equal(whole, both[1:5])
    assert joined([both[2:5], both[1:2]]) is None
    assert joined([both[:2], both[3:]]) is None
    assert joined([both[:2], both[:2]]) is None
    assert joined([both[:2], both[2:].clone()]) is None
    assert joined([both[:2, :1], both[2:, :1]]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_training_is_the_same(family: str, dtype: torch.dtype) -> None:
    models = [small(family, dtype), shared(family, dtype)]
    optimizers = [AdamW(model, weight_decay=0.1) for model in models]
    for _ in range(3):
        gradients = []
        for model, optimizer in zip(models, optimizers, strict=True):
            logits = model(IDS).logits.float()
            nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
            ).backward()
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
            optimizer.accumulate()
            optimizer.step(1e-2, optimizer.grad_norm())
        for name in gradients[0]:
            assert torch.equal(gradients[0][name], gradients[1][name]), name
    for (name, one), (_, other) in zip(
        models[0].named_parameters(), models[1].named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    assert is_shared(models[1])


def test_a_write_is_noted_on_its_own_parameter() -> None:
    """The optimiser tells by version counters whether others wrote a weight."""
    attn = shared().model.layers[0].self_attn
    before = attn.q_proj.weight._version
    with torch.no_grad():
        attn.k_proj.weight.add_(1.0)
    assert attn.q_proj.weight._version == before


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_saved_and_loaded(family: str, tied: bool, tmp_path: Path) -> None:
    plain, model = small(family, torch.float32, tied=tied), shared(family, tied=tied)
    none: dict[str, Any] = {"tokenizer": None, "arrays": {}, "states": {}}
    live = {name: p.detach() for name, p in model.named_parameters()}
    save_checkpoint(tmp_path / "plain", model=plain, tensors={}, **none)
    save_checkpoint(tmp_path / "shared", model=model, tensors={"live": live}, **none)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("plain", "shared")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("plain", "shared")]
    assert sizes[0] == sizes[1]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "shared")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    state = load_file(tmp_path / "shared" / "state" / "live.safetensors")
    assert all(torch.equal(state[name], live[name]) for name in live)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load_weights_into(model, tmp_path / "shared")
    assert is_shared(model) and torch.equal(again(IDS).logits, model(IDS).logits)


def test_safetensors_takes_slices_of_one_buffer(tmp_path: Path) -> None:
    """What the two tests around rest on: it refuses tensors that overlap, not those that lie side by side."""
    both = torch.arange(6.0).view(3, 2)
    save_file({"a": both[:1], "b": both[1:]}, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["b"], both[1:])
    with pytest.raises(RuntimeError, match="share memory"):
        save_file({"a": both[:2], "b": both[1:]}, tmp_path / "y.safetensors")


def test_load_state_dict_is_in_place() -> None:
    model, other = shared(), small("qwen2", torch.float32, noise=0.1)
    model.load_state_dict(other.state_dict())
    assert is_shared(model) and torch.equal(model(IDS).logits, other(IDS).logits)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: sharing_copy(model, [])], ids=["deepcopy", "sharing"]
)
def test_a_copy_costs_one_model(copied: Any) -> None:
    model = shared()
    twice = copied(model)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not own & {p.untyped_storage().data_ptr() for p in twice.parameters()}
    assert held(twice) == held(model) == sum(p.nbytes for p in model.parameters())
    assert share_storage(twice) and is_shared(model)


def test_the_twin_shares_the_buffers() -> None:
    assert is_shared(rollout_twin(shared()))


def test_twice_is_once() -> None:
    model = shared()
    places = [p.data_ptr() for p in model.parameters()]
    assert share_storage(model)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_a_move_parts_them_and_is_seen() -> None:
    model = shared()
    assert is_shared(model.to("cpu")), "a move to where it is moves nothing"
    model.double()
    assert not is_shared(model) and unshareable(model) is None
    assert share_storage(model) and is_shared(model)


@pytest.mark.gpu
def test_laid_out_on_the_device_that_it_is_on() -> None:
    """The slices stay where they are, also where the model is sent there again."""
    model = small("qwen2", torch.float32)
    want = model(IDS).logits
    key = model.to("cuda").model.layers[0].self_attn.k_proj.weight
    assert share_storage(model) and key.device.type == "cuda"
    place = key.data_ptr()
    assert is_shared(model.to("cuda")) and share_storage(model) and key.data_ptr() == place
    assert model.model.layers[0].self_attn.k_proj.weight is key
    torch.testing.assert_close(model(IDS.cuda()).logits.cpu(), want, rtol=1e-3, atol=1e-3)


def test_adapters_are_left_alone() -> None:
    pytest.importorskip("peft")
    from whet.model.lora import add_lora

    model = small("qwen2", torch.float32)
    add_lora(model, config.Lora(rank=2), "base", seed=0)
    places = [p.data_ptr() for p in model.parameters()]
    assert "q_proj" in str(unshareable(model)) and not share_storage(model) and not is_shared(model)
    assert [p.data_ptr() for p in model.parameters()] == places


def tie(model: Any) -> None:
    first, second = layers_of(model)
    second.self_attn.k_proj.weight = first.self_attn.k_proj.weight


def tie_data(model: Any) -> None:
    first, second = layers_of(model)
    second.mlp.up_proj.weight.data = first.mlp.up_proj.weight.data


def drop_bias(model: Any) -> None:
    layers_of(model)[1].self_attn.v_proj.bias = None


def narrow(model: Any) -> None:
    layers_of(model)[1].mlp.gate_proj.to(torch.bfloat16)


class Quantised(nn.Linear): ...


def quantise(model: Any) -> None:
    layers_of(model)[1].mlp.gate_proj.__class__ = Quantised


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (tie, "self_attn.k_proj is tied"),
        (tie_data, "mlp.up_proj is tied"),
        (drop_bias, "of self_attn differ"),
        (narrow, "of mlp differ"),
        (quantise, "mlp.gate_proj is a Quantised"),
    ],
)
def test_odd_models_are_not_touched(change: Any, why: str) -> None:
    model = small("qwen2", torch.float32)
    change(model)
    places = [p.data_ptr() for p in model.parameters()]
    assert why in str(unshareable(model)) and not share_storage(model) and not is_shared(model)
    assert [p.data_ptr() for p in model.parameters()] == places


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gemma2", "gemma3", *LLAMA_LIKE}))
def test_other_layers_are_not_touched(family: str) -> None:
    """Phi-3 has one q, k, v projection already, Phi no gate."""
    assert not share_storage(small(family)) and unshareable(small(family)) is not None
