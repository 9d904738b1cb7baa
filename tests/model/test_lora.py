"""Adapters: exact in the twin and in files, frozen below, plain LoRA only."""

import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import FAMILIES, VOCAB, small, some_pairs
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from whet.config import Lora, Model
from whet.errors import WhetError
from whet.learn.checkpoint import load_weights_into, save_checkpoint
from whet.learn.optimizer import AdamW
from whet.model.head import head_of, log_probs
from whet.model.load import (
    check_model,
    load_model,
    load_tokenizer,
    locate_model,
    tiny_model,
    tiny_tokenizer,
)
from whet.model.lora import add_lora, base_name, is_lora, load_lora, merge_lora
from whet.model.packing import check_packing, hidden_states, make_packs, packed_attention
from whet.rollout.engine import LocalEngine
from whet.types import Request, Sampling

RANK = Lora(rank=4, alpha=8.0)
IDS = torch.tensor([[5, 3, 8, 2, 9, 11, 4]])
TOKENIZER = tiny_tokenizer("0123456789+-*=")


def adapted(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    settings: Lora = RANK,
    *,
    tied: bool = True,
) -> Any:
    model = small(family, dtype, tied=tied)
    add_lora(model, settings, "org/base@abc")
    return model


def stir(model: PreTrainedModel, seed: int = 0) -> None:
    """Trained adapters: B is no longer zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=0.2)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_fresh_adapters_change_nothing_and_alone_are_trained() -> None:
    plain, model = small("llama", torch.float32, tied=True), adapted()
    assert is_lora(model) and not is_lora(plain)
    assert torch.equal(logits(model), logits(plain))
    assert trained(model) and all(
        ".lora_A." in name or ".lora_B." in name for name in trained(model)
    )
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained(model)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    q = model.model.layers[0].self_attn.q_proj
    a, b = q.lora_A["default"].weight.detach(), q.lora_B["default"].weight.detach()
    assert a.shape == (4, 32) and a.count_nonzero() == 128 and b.count_nonzero() == 0
    assert q.scaling["default"] == 2.0, "alpha / rank"


def test_adapters_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, again, other = (small("llama", torch.float32) for _ in range(3))
    for model, seed in ((one, 7), (again, 7), (other, 8)):
        add_lora(model, RANK, "b", seed)
        torch.rand(3)
    key = "model.layers.1.mlp.up_proj.lora_A.default.weight"
    assert torch.equal(trained(one)[key], trained(again)[key])
    assert not torch.equal(trained(one)[key], trained(other)[key])
    torch.set_rng_state(state)
    expected = torch.rand(3)
    torch.set_rng_state(state)
    add_lora(small("llama", torch.float32), RANK, "b", 7)
    assert torch.equal(torch.rand(3), expected), "the random numbers of other code are not used up"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_adapters_have_the_models_type(dtype: torch.dtype) -> None:
    model = adapted(dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    stir(model)
    check_packing(model)


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_equal_generate_also_after_a_step(family: str) -> None:
    """Exact twin: every family's layers adapted, and again after the optimiser wrote A and B in place."""
    model = adapted(family, tied=False)
    stir(model)
    prompts = {"a": IDS[0].tolist(), "b": [4, 7]}
    engine = LocalEngine(model, encode=prompts.__getitem__, decode=str, seed=0, slots=2, context=48)
    optimizer = AdamW(model)

    def check() -> list[list[int]]:
        sampling = Sampling(max_tokens=12, temperature=0.0)
        got = engine.generate(
            [
                Request(prompt_id=p, group_id=i, n=1, sampling=sampling)
                for i, p in enumerate(prompts)
            ]
        )
        out = []
        for rollout in got:
            ids = torch.tensor([prompts[rollout.prompt_id]])
            want = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert rollout.trace is not None
            assert rollout.trace.ids.tolist() == want[0, ids.shape[1] :].tolist()
            out.append(rollout.trace.ids.tolist())
        return out

    before = check()
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.accumulate()
    optimizer.step(0.3, optimizer.grad_norm())
    assert check() != before, "the step changed what is written"
    assert all(p is q for p, q in zip(engine.twin.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_packed_gradients_of_adapters_are_autograds(checkpoint: bool, dtype: torch.dtype) -> None:
    """Also with activations computed again, where the frozen embedding's output needs no gradient of its own."""
    model, pairs = adapted("qwen3", dtype), some_pairs(count=4)
    stir(model)
    loss = torch.zeros(())
    for prompt, response in pairs:
        ids = torch.tensor([[*prompt, *response]])
        lp = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        loss = loss + lp[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).exp().sum()
    want = torch.autograd.grad(loss, list(trained(model).values()))
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    (pack,) = make_packs(pairs, 1000)
    with packed_attention(model, checkpoint):
        lp, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets, chunk=5 * VOCAB)
        lp.exp().sum().backward()
    for (name, parameter), b in zip(trained(model).items(), want, strict=True):
        assert parameter.grad is not None and float(b.abs().max()) > 0, name
        if dtype == torch.float64:
            torch.testing.assert_close(parameter.grad, b, rtol=1e-4, atol=1e-5)
        else:
            assert float((parameter.grad - b).float().norm() / b.float().norm()) < 0.1, name
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def save_base(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    tiny_model(
        len(TOKENIZER), hidden=12, layers=1, heads=3, context=32, dtype=dtype
    ).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def load(name: object, rank: int = 0, **changes: Any) -> Any:
    settings = Model(name=str(name), device="cpu", lora=Lora(rank=rank, alpha=8.0), **changes)
    return load_model(settings, vocab_size=len(TOKENIZER), context=16, seed=3).eval()


def save(folder: Path, model: Any, tokenizer: Any = TOKENIZER) -> None:
    save_checkpoint(folder, model=model, tokenizer=tokenizer, tensors={}, arrays={}, states={})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_a_peft_folder_and_loads_again(
    tmp_path: Path, dtype: str, capfd: Any
) -> None:
    base = save_base(tmp_path / "base")
    model = load(base, rank=4, dtype=dtype)
    stir(model)
    save(tmp_path / "c", model)
    names = {p.name for p in (tmp_path / "c").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not names & {"config.json", "model.safetensors"}
    stored = json.loads((tmp_path / "c" / "adapter_config.json").read_text())
    assert (stored["r"], stored["lora_alpha"], stored["lora_dropout"]) == (4, 8, 0.0)
    assert stored["base_model_name_or_path"] == str(base)

    again = load(tmp_path / "c", dtype=dtype)
    assert (
        torch.equal(logits(again), logits(model)) and trained(again).keys() == trained(model).keys()
    )
    assert all(torch.equal(p, trained(model)[name]) for name, p in trained(again).items())
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    theirs = peft.PeftModel.from_pretrained(
        plain, tmp_path / "c", autocast_adapter_dtype=False
    ).eval()
    assert torch.equal(logits(theirs), logits(model)), "peft itself reads it"
    assert (
        load_tokenizer(Model(name=str(tmp_path / "c")), "")("1+1").input_ids
        == TOKENIZER("1+1").input_ids
    )

    save(tmp_path / "d", again)
    assert (
        load_file(tmp_path / "c" / "adapter_model.safetensors").keys()
        == load_file(tmp_path / "d" / "adapter_model.safetensors").keys()
    )
    assert base_name(tmp_path / "d") == str(base), "and says so again"
    assert capfd.readouterr().out == ""


def test_saved_adapters_are_put_back_in_place(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    saved, model = load(base, rank=4), load(base, rank=4)
    stir(saved)
    save(tmp_path / "c", saved)
    objects = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    load_weights_into(model, tmp_path / "c")
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == objects
    assert torch.equal(logits(model), logits(saved))
    other = load(base, rank=2)
    with pytest.raises(WhetError, match=r"another model: .* is \(4, 12\) there and \(2, 12\)"):
        load_weights_into(other, tmp_path / "c")
    fewer = tiny_model(len(TOKENIZER), hidden=12, layers=1, heads=3)
    add_lora(fewer, Lora(rank=4, targets=("q_proj",)), "b")
    with pytest.raises(WhetError, match="unknown to this model"):
        load_weights_into(fewer, tmp_path / "c")
    with pytest.raises(WhetError, match=r"holds no adapter_model.safetensors"):
        load_weights_into(model, base)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "phi"])
def test_merged_weights_compute_the_same_and_are_a_plain_folder(
    tmp_path: Path, family: str
) -> None:
    model = adapted(family)
    stir(model)
    want = logits(model)
    plain = merge_lora(model)
    torch.testing.assert_close(logits(plain), want, rtol=1e-4, atol=1e-4)
    assert not is_lora(plain) and not any("lora" in name for name, _ in plain.named_parameters())
    assert all(p.requires_grad for p in plain.parameters())
    plain.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file() and not (
        tmp_path / "adapter_config.json"
    ).exists()
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=model.config._attn_implementation
    ).eval()
    assert torch.equal(logits(again), logits(plain))
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (
            ("q_proj", "v_prj"),
            '"v_prj", but LlamaForCausalLM has no such linear layer; nearest are .*v_proj',
        ),
        (("lm_head",), "neither embeddings nor the head"),
        (("embed_tokens",), "neither embeddings nor the head"),
        (("self_attn",), "no such linear layer"),
    ],
)
def test_wrong_targets_are_refused_before_weights_are_loaded(
    tmp_path: Path, targets: Any, words: str
) -> None:
    save_base(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not even looked at")
    with pytest.raises(WhetError, match=words):
        check_model(Model(name=str(tmp_path), lora=Lora(rank=4, targets=targets)))
    check_model(
        Model(name=str(tmp_path), lora=Lora(rank=4, targets=("q_proj", "layers.0.mlp.up_proj")))
    )


def test_targets_are_heeded() -> None:
    model = adapted(settings=Lora(rank=2, targets=("v_proj", "layers.1.mlp.up_proj")))
    assert {name.split(".lora_")[0] for name in trained(model)} == {
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.v_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_the_tiny_model_has_nothing_to_adapt() -> None:
    with pytest.raises(WhetError, match="no trained weights to adapt"):
        check_model(Model(name="tiny", lora=Lora(rank=4)))


def test_a_missing_or_unfit_base_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    save(tmp_path / "c", load(base, rank=4), tokenizer=None)
    assert load_tokenizer(Model(name=str(tmp_path / "c")), "")("1").input_ids, (
        "a bare adapter has its base's tokenizer"
    )
    with pytest.raises(
        WhetError, match=r"rank = 8 and alpha = 8, but the adapter in .* has 4 and 8"
    ):
        load(tmp_path / "c", rank=8)
    base.rename(tmp_path / "moved")
    with pytest.raises(
        WhetError, match=r"stands on .*base, which is not to be had: There is no model folder"
    ):
        check_model(Model(name=str(tmp_path / "c")))
    (tmp_path / "c" / "adapter_config.json").rename(tmp_path / "moved" / "adapter_config.json")
    with pytest.raises(WhetError, match="stands on"):
        check_model(Model(name=str(tmp_path / "moved")))


def test_a_hub_base_is_remembered_with_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = adapted()
    save(tmp_path / "c", model, tokenizer=None)
    stored = json.loads((tmp_path / "c" / "adapter_config.json").read_text())
    assert (stored["base_model_name_or_path"], stored["revision"]) == ("org/base", "abc")
    assert base_name(tmp_path / "c") == "org/base@abc"
    with pytest.raises(WhetError, match=r"stands on org/base@abc, which is not to be had"):
        locate_model(str(tmp_path / "c"))


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"target_parameters": ["experts"]},
        {"alora_invocation_tokens": [1]},
        {"something_new": True},
        {"base_model_name_or_path": None},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["nothing"]},
        {"r": "many"},
    ],
    ids=str,
)
def test_more_than_plain_lora_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    base = save_base(tmp_path / "base")
    save(tmp_path / "c", load(base, rank=4))
    path = tmp_path / "c" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(WhetError) as raised:
        load(tmp_path / "c")
    assert "\n" not in str(raised.value) and "adapter" in str(raised.value)


def test_without_peft_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base")
    save(tmp_path / "c", load(base, rank=4))
    monkeypatch.setitem(sys.modules, "peft", None)
    load(base)
    for settings in (Model(name=str(base), lora=RANK), Model(name=str(tmp_path / "c"))):
        with pytest.raises(WhetError, match=r'LoRA needs peft; pip install "whet\[lora\]"'):
            check_model(settings)


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c", load(save_base(tmp_path / "base"), rank=4))
    other = tiny_model(len(TOKENIZER), hidden=24, layers=1, heads=3)
    with pytest.raises(WhetError, match="another model"):
        load_lora(other, tmp_path / "c")
