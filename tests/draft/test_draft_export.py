"""The drafter as a folder for vLLM and SGLang: names, shapes and config by their loaders' tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import qwen3_target, target
from safetensors.torch import load_file, save_file

from whet.draft.eagle import (
    CONFIG,
    WEIGHTS,
    check_layout,
    copy_drafter,
    eagle_head,
    read_drafter,
    write_drafter,
)
from whet.errors import WhetError

NAMES = {
    # what the public EAGLE-1 drafters for Llama hold, less the embedding
    "fc.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
}


def config_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / CONFIG).read_text())
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("make", [target, qwen3_target])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_written_drafter_has_the_layout_and_reads_back(
    tmp_path: Path, make: Any, engine: str
) -> None:
    model = make()
    head = eagle_head(model, seed=1)
    write_drafter(tmp_path / "vllm", head, model.config)
    folder = tmp_path / engine
    if engine == "sglang":
        copy_drafter(tmp_path / "vllm", folder, engine=engine)
    check_layout(folder)
    saved = load_file(folder / WEIGHTS)
    assert set(saved) == (NAMES if engine == "vllm" else NAMES | {"fc.bias"})
    assert engine == "vllm" or not saved["fc.bias"].any()
    other = eagle_head(model, seed=2)
    places = [p.data_ptr() for p in other.parameters()]
    read_drafter(folder, other)
    for mine, theirs in zip(head.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [p.data_ptr() for p in other.parameters()] == places


def test_the_config_is_a_llama_of_one_layer(tmp_path: Path) -> None:
    model = target()
    write_drafter(tmp_path / "v", eagle_head(model, draft_ids=torch.tensor([1, 5])), model.config)
    config = config_of(tmp_path / "v")
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert (config["num_hidden_layers"], config["vocab_size"], config["rope_theta"]) == (
        1,
        23,
        10000.0,
    )
    assert config["rope_scaling"] is None and config["tie_word_embeddings"] is False
    assert {path.name for path in (tmp_path / "v").iterdir()} == {CONFIG, WEIGHTS}, "no pickle"


def test_a_vocabulary_in_a_pickle_is_refused(tmp_path: Path) -> None:
    model = target()
    write_drafter(tmp_path, eagle_head(model), model.config)
    (tmp_path / CONFIG).write_text(json.dumps({**config_of(tmp_path), "hot_vocab_size": 3}))
    with pytest.raises(WhetError, match="pickle"):
        check_layout(tmp_path)


def test_a_drafter_is_copied_from_one_engine_to_the_other_and_back(tmp_path: Path) -> None:
    model = target()
    write_drafter(tmp_path / "v", eagle_head(model, seed=1), model.config)
    copy_drafter(tmp_path / "v", tmp_path / "s", engine="sglang")
    copy_drafter(tmp_path / "s", tmp_path / "back", engine="vllm")
    assert config_of(tmp_path / "s") == {
        **config_of(tmp_path / "v"),
        "architectures": ["LlamaForCausalLMEagle"],
    }
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "v" / name).read_bytes()
    biased = load_file(tmp_path / "s" / WEIGHTS)
    biased["fc.bias"][0] = 1
    save_file(biased, tmp_path / "s" / WEIGHTS)
    with pytest.raises(WhetError, match="bias"):
        copy_drafter(tmp_path / "s", tmp_path / "worse")
    with pytest.raises(WhetError, match="vllm or sglang"):
        copy_drafter(tmp_path / "v", tmp_path / "worse", engine="other")
    assert not (tmp_path / "worse").exists()


def test_scaled_rotary_angles_are_told_in_both_forms(tmp_path: Path) -> None:
    model = target()
    head = eagle_head(model)
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    write_drafter(tmp_path, head, model.config)
    config = config_of(tmp_path)
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 2.0,
    }


def test_what_a_loader_would_not_take_is_named(tmp_path: Path) -> None:
    model = target()
    write_drafter(tmp_path, eagle_head(model), model.config)
    good = load_file(tmp_path / WEIGHTS)
    norm = "layers.0.input_layernorm.weight"
    worse = {
        r"lacks fc\.weight": {n: t for n, t in good.items() if n != "fc.weight"},
        norm.replace(".", r"\."): {**good, norm: torch.ones(32)},
        r"another shape layers\.0\.mlp\.down": {
            **good,
            "layers.0.mlp.down_proj.weight": torch.ones(2, 2),
        },
    }
    for sentence, tensors in worse.items():
        save_file(tensors, tmp_path / WEIGHTS)
        with pytest.raises(WhetError, match=sentence):
            check_layout(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"rubbish")
    with pytest.raises(WhetError, match="cannot be read"):
        check_layout(tmp_path)
    for text in (
        "{",
        "[]",
        '{"architectures": ["LlamaForCausalLM"]}',
        '{"architectures": ["Other"]}',
    ):
        (tmp_path / CONFIG).write_text(text)
        with pytest.raises(WhetError, match="is not the config"):
            check_layout(tmp_path)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    model = target()
    write_drafter(tmp_path, eagle_head(model), model.config)
    with pytest.raises(WhetError, match="another target"):
        read_drafter(tmp_path, eagle_head(qwen3_target()))
