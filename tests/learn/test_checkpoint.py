import errno
import hashlib
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from whet.errors import WhetError
from whet.learn.checkpoint import (
    FORMAT,
    load_checkpoint,
    load_weights_into,
    save_checkpoint,
    verify_checkpoint,
)
from whet.model.load import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer("0123456789+-*=")


def small(seed: int = 0, dtype: torch.dtype = torch.float32, hidden: int = 12):
    return tiny_model(
        len(TOKENIZER), hidden=hidden, layers=1, heads=3, context=32, seed=seed, dtype=dtype
    ).eval()


def save(folder: Path, model=None, **parts) -> None:
    parts = {"tensors": {}, "arrays": {}, "states": {}} | parts
    save_checkpoint(
        folder, model=model, tokenizer=TOKENIZER if model is not None else None, **parts
    )


def test_the_folder_is_an_ordinary_hugging_face_model(tmp_path, capfd):
    model = small()
    save(tmp_path / "c", model, tensors={"masters": {"w": torch.ones(3)}})
    assert capfd.readouterr() == ("", "")
    assert verify_checkpoint(tmp_path / "c") is None
    ids = torch.tensor([[3, 5, 7, 2]])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "c").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "c")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert tokenizer("12+3=").input_ids == TOKENIZER("12+3=").input_ids
    assert tokenizer.eos_token_id == again.generation_config.eos_token_id == 1
    # Serving engines load every *.safetensors beside the weights.
    assert [p.name for p in (tmp_path / "c").glob("*.safetensors")] == ["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_saving_leaves_the_model_as_it_was(tmp_path):
    model = small()
    settings = model.generation_config
    before = (model.config.dtype, settings)
    save(tmp_path / "c", model)
    assert (
        model.config.dtype,
        model.generation_config,
    ) == before and model.generation_config is settings


def test_generation_settings_that_transformers_calls_inconsistent_are_saved_too(tmp_path):
    model = small()
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.6
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "plain")
    save(tmp_path / "c", model)
    stored = json.loads((tmp_path / "c" / "generation_config.json").read_text())
    assert stored["temperature"] == 0.6 and stored["eos_token_id"] == 1


def test_tensors_arrays_and_states_come_back(tmp_path):
    base, flat = torch.arange(12.0).reshape(3, 4), torch.arange(10)
    tensors = {
        "moments": {
            "a": torch.randn(3, 2).to(torch.bfloat16),
            "b": torch.tensor(7, dtype=torch.int64),
        },
        "reference": {"tied": base, "also": base, "turned": base.t(), "row": base[1]},
        "flat": {"head": flat[:4], "middle": flat[3:6], "tail": flat[6:]},
        "none": {},
    }
    arrays = {
        "traces": {"ids": np.arange(5, dtype=np.int32), "empty": np.zeros((0, 2))},
        "nothing": {},
    }
    states = {
        "curriculum": {"x": 0.1 + 0.2, "big": 2**80, "text": "ä\n\u2028"},
        "judge": [1, None],
        "moments": 3,
    }
    save(tmp_path / "c", tensors=tensors, arrays=arrays, states=states)
    assert verify_checkpoint(tmp_path / "c") is None
    loaded = load_checkpoint(tmp_path / "c")
    assert loaded.folder == tmp_path / "c" and loaded.states == states
    assert (
        set(loaded.tensors) == set(tensors)
        and len(loaded.tensors) == 4
        and set(loaded.arrays) == set(arrays)
    )
    for name, entry in tensors.items():
        assert loaded.tensors[name].keys() == entry.keys()
        for key, tensor in entry.items():
            assert (
                torch.equal(loaded.tensors[name][key], tensor)
                and loaded.tensors[name][key].dtype == tensor.dtype
            )
    for name, table in arrays.items():
        assert loaded.arrays[name].keys() == table.keys()
        for key, array in table.items():
            assert (
                np.array_equal(loaded.arrays[name][key], array)
                and loaded.arrays[name][key].dtype == array.dtype
            )


def test_saving_again_replaces(tmp_path):
    save(tmp_path / "c", states={"a": 1, "only": 2})
    save(tmp_path / "c", states={"a": 3})
    assert (
        load_checkpoint(tmp_path / "c").states == {"a": 3}
        and verify_checkpoint(tmp_path / "c") is None
    )
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_loaded_in_place(tmp_path, dtype):
    saved, model = small(seed=1, dtype=dtype), small(seed=2, dtype=dtype)
    save(tmp_path / "c", saved)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    objects = {name: id(p) for name, p in model.named_parameters()}
    load_weights_into(model, tmp_path / "c")
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert {name: id(p) for name, p in model.named_parameters()} == objects
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), saved.parameters(), strict=True)
    )
    assert all(p.requires_grad for p in model.parameters())


def test_weights_in_several_files_are_loaded(tmp_path):
    saved, model = small(seed=1), small(seed=2)
    saved.save_pretrained(tmp_path / "c", max_shard_size="2KB")
    assert len(list((tmp_path / "c").glob("model-*.safetensors"))) > 1
    load_weights_into(model, tmp_path / "c")
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), saved.parameters(), strict=True)
    )


def mixture(seed: int) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
    )
    return MixtralForCausalLM(config)


def test_weights_saved_under_other_names_are_loaded(tmp_path, capfd):
    saved, model = mixture(1), mixture(2)
    save(tmp_path / "c", saved)
    from safetensors import safe_open

    with safe_open(tmp_path / "c" / "model.safetensors", framework="pt") as file:
        assert not set(file.keys()) <= set(model.state_dict()), (
            "transformers saves experts one by one"
        )
    places = [p.data_ptr() for p in model.parameters()]
    load_weights_into(model, tmp_path / "c")
    assert places == [p.data_ptr() for p in model.parameters()]
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), saved.parameters(), strict=True)
    )
    assert capfd.readouterr() == ("", "")


def test_weights_of_another_model_are_refused(tmp_path):
    save(tmp_path / "c", small())
    with pytest.raises(
        WhetError, match=r"another model: .* is \(.*\) there and \(.*\) in the model"
    ):
        load_weights_into(small(hidden=24), tmp_path / "c")
    untied = small()
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.clone())
    with pytest.raises(WhetError, match=r"lm_head.weight is not among them"):
        load_weights_into(untied, tmp_path / "c")
    with pytest.raises(WhetError, match=r"holds no model.safetensors"):
        load_weights_into(small(), tmp_path)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda c: (c / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda c: (c / "state" / "s.json").unlink(), "state/s.json is missing"),
        (
            lambda c: (c / "model.safetensors").write_bytes(b"x"),
            r"model.safetensors has 1 bytes instead of \d+",
        ),
        (
            lambda c: flip_a_byte(c / "model.safetensors"),
            "model.safetensors was changed or damaged",
        ),
        (
            lambda c: flip_a_byte(c / "state" / "t.safetensors"),
            "state/t.safetensors was changed or damaged",
        ),
        (lambda c: flip_a_byte(c / "state" / "a.npz"), "state/a.npz was changed or damaged"),
        (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda c: (c / "manifest.json").write_bytes(b"\xff\x00{"), "manifest.json is unreadable"),
        (lambda c: (c / "manifest.json").write_text("[1]"), "manifest.json is unreadable"),
        (lambda c: (c / "manifest.json").write_text("{}"), "manifest.json is unreadable"),
        (lambda c: rewrite(c / "manifest.json", files=[1]), "manifest.json is unreadable"),
        (lambda c: rewrite(c / "manifest.json", files={"a": 1}), "manifest.json is unreadable"),
        (
            lambda c: rewrite(c / "manifest.json", format=FORMAT + 1, files=7),
            "newer whet .format 2, .* up to 1",
        ),
        (
            lambda c: (c / "pytorch_model.bin").write_bytes(b""),
            "pytorch_model.bin, and files that run code",
        ),
        (
            lambda c: (c / "state" / "optimizer.pt").write_bytes(b""),
            "optimizer.pt, and files that run code",
        ),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(tmp_path, harm, words):
    folder = tmp_path / "c"
    save(
        folder,
        small(),
        tensors={"t": {"x": torch.zeros(9)}},
        arrays={"a": {"x": np.zeros(9)}},
        states={"s": {"x": 1}},
    )
    assert verify_checkpoint(folder) is None
    harm(folder)
    wrong = verify_checkpoint(folder)
    assert wrong is not None and "\n" not in wrong and re.search(words, wrong)


def test_a_folder_that_is_none_is_refused(tmp_path):
    assert (
        verify_checkpoint(tmp_path / "nowhere")
        == "manifest.json is missing, so it was never finished"
    )
    with pytest.raises(WhetError, match=r"nowhere cannot be read: manifest.json is missing"):
        load_checkpoint(tmp_path / "nowhere")


def test_unverified_damage_is_found_when_read(tmp_path):
    for name, damage in (("a.npz", b"PK rubbish"), ("a.npz", b""), ("s.json", b"PK rubbish")):
        save(tmp_path / "c", arrays={"a": {"x": np.zeros(9)}}, states={"s": {"x": 1}})
        (tmp_path / "c" / "state" / name).write_bytes(damage)
        with pytest.raises(WhetError, match="cannot be read"):
            load_checkpoint(tmp_path / "c")


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path(self.where),))

    def __init__(self, where: Path) -> None:
        self.where = str(where)


def test_a_pickle_is_never_read(tmp_path):
    """Not even from an archive whose manifest is in order."""
    sprung = tmp_path / "sprung"
    save(tmp_path / "c", small(), arrays={"a": {"x": np.zeros(2)}})
    path = tmp_path / "c" / "state" / "a.npz"
    np.savez(path, x=np.array([Trap(sprung)], dtype=object))
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest["files"]["state/a.npz"] = {"size": path.stat().st_size, "sha256": digest}
    rewrite(tmp_path / "c" / "manifest.json", **manifest)
    (tmp_path / "c" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    assert verify_checkpoint(tmp_path / "c") is not None
    with pytest.raises(WhetError, match="cannot be read"):
        load_checkpoint(tmp_path / "c")
    load_weights_into(small(), tmp_path / "c")
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists(), "the trap would have sprung"


def test_objects_are_not_written(tmp_path):
    with pytest.raises(AssertionError, match="pickle"):
        save(tmp_path / "c", arrays={"a": {"x": np.array([{}], dtype=object)}})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_only_the_new_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "c", states={"a": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(WhetError, match=r"no space left .* everything saved before is untouched"):
        save(tmp_path / "c", small(), states={"a": 2})
    monkeypatch.undo()
    assert verify_checkpoint(tmp_path / "c") is None and load_checkpoint(tmp_path / "c").states == {
        "a": 1
    }
    assert [p.name for p in tmp_path.iterdir()] == ["c"], "the space is given back"


def test_an_interrupted_save_is_not_seen_and_does_not_hinder_the_next(tmp_path):
    save(tmp_path / "c", states={"a": 1})
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(
            tmp_path / "c",
            model=small(),
            tokenizer=None,
            tensors={},
            arrays={"x": Interrupts()},
            states={},
        )
    assert (
        load_checkpoint(tmp_path / "c").states == {"a": 1}
        and verify_checkpoint(tmp_path / "c") is None
    )
    save(tmp_path / "c", states={"a": 2})
    assert load_checkpoint(tmp_path / "c").states == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


class Interrupts(dict):
    def values(self):
        raise KeyboardInterrupt


def test_a_full_disk_in_transformers_gives_the_same_sentence(tmp_path, monkeypatch):
    import transformers.modeling_utils as modeling
    from safetensors import SafetensorError

    def full(*_, **__):
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(modeling, "safe_save_file", full)
    with pytest.raises(WhetError, match="no space left"):
        save(tmp_path / "c", small())
    assert list(tmp_path.iterdir()) == []
