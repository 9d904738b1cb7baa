"""From a name to a model: folders, hub names from the cache, and what is refused before any weight is read."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SHAPE, small
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, Gemma3Config, PreTrainedModel

from whet.config import Model
from whet.errors import WhetError
from whet.model.load import (
    check_model,
    eos_of,
    load_model,
    load_tokenizer,
    locate_model,
    resolve_model,
    tiny_model,
    tiny_tokenizer,
)

TOKENIZER = tiny_tokenizer("0123456789+-*=")
SHA = "0123456789abcdef0123456789abcdef01234567"


def save(folder: Path, dtype: torch.dtype = torch.float32, model: Any = None) -> PreTrainedModel:
    model = (
        model
        or tiny_model(len(TOKENIZER), hidden=12, layers=1, heads=3, context=32, dtype=dtype).eval()
    )
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return model


def load(name: object, **changes: Any) -> PreTrainedModel:
    settings = Model(name=str(name), device="cpu", **changes)
    return load_model(settings, vocab_size=len(TOKENIZER), context=16, seed=0)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache laid out as huggingface_hub does, and no network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def put(hub: Path, repo: str, sha: str = SHA, ref: str | None = "main") -> Path:
    home = hub / f"models--{repo.replace('/', '--')}"
    if ref:
        (home / "refs").mkdir(parents=True, exist_ok=True)
        (home / "refs" / ref).write_text(sha)
    folder = home / "snapshots" / sha
    save(folder)
    return folder


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float64"])
def test_weights_of_either_type_load_as_either(
    tmp_path: Path, saved: torch.dtype, wanted: str
) -> None:
    model = save(tmp_path / "m", saved)
    again = load(tmp_path / "m", dtype=wanted)
    assert {str(p.dtype) for p in again.parameters()} == {f"torch.{wanted}"}
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    for (name, mine), theirs in zip(again.named_buffers(), model.buffers(), strict=True):
        assert mine.dtype == torch.float32 and torch.equal(mine, theirs), (
            f"{name}: rotary angles need fp32"
        )


def test_a_soft_cap_is_not_lost(tmp_path: Path) -> None:
    """transformers' default attention for Gemma 2 would leave it out."""
    model = save(tmp_path / "m", model=small("gemma2", torch.float32))
    ids = torch.tensor([[5, 3, 8, 1, 2, 9]])
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "m").eval()(ids).logits, model(ids).logits)


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "org" / "name")
    assert resolve_model(str(tmp_path / "org" / "name")) == tmp_path / "org" / "name"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name"), "a folder comes before the hub"
    assert locate_model("org/name").base == str(tmp_path / "org" / "name")


def test_a_hub_name_is_found_in_the_cache(hub: Path) -> None:
    folder = put(hub, "org/name")
    other = put(hub, "org/name", "f" * 40, ref="v2")
    assert resolve_model("org/name") == resolve_model(f"org/name@{SHA}") == folder
    assert resolve_model("org/name@v2") == other
    assert locate_model("org/name").base == f"org/name@{SHA}"
    settings = Model(name="org/name", device="cpu")
    check_model(settings)
    assert load_tokenizer(settings, "")("1+1").input_ids == TOKENIZER("1+1").input_ids
    assert load("org/name").config.hidden_size == 12


@pytest.mark.parametrize("name", ["org/other", "org/name@v3", f"org/name@{'a' * 40}"])
def test_what_is_neither_cached_nor_reachable_is_one_sentence(hub: Path, name: str) -> None:
    put(hub, "org/name")
    with pytest.raises(
        WhetError, match=r"^There is no folder .* not \(whole\) in the local cache.*hf download"
    ) as raised:
        check_model(Model(name=name))
    assert "\n" not in str(raised.value)


def test_a_half_downloaded_snapshot_is_not_taken(hub: Path) -> None:
    folder = put(hub, "org/name")
    save(folder, model=None).save_pretrained(folder, max_shard_size="2KB")
    (folder / "model.safetensors").unlink()
    assert resolve_model("org/name") == folder
    sorted(folder.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(WhetError):
        load("org/name")


@pytest.fixture
def refusing_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A hub on this machine that answers every question with one status and error code."""
    answer: dict[str, Any] = {}

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer["status"])
            self.send_header("X-Error-Code", answer["code"])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield answer
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "GatedRepo", "org/name is gated.*hf auth login"),
        (401, "RepoNotFound", "is not known; check the spelling, or run `hf auth login`"),
        (404, "RepoNotFound", "is not known"),
        (404, "RevisionNotFound", "no such revision as v9"),
        (400, "", "hub cannot be reached"),
    ],
)
def test_what_the_hub_says_is_one_sentence(
    refusing_hub: dict[str, Any], status: int, code: str, words: str
) -> None:
    refusing_hub.update(status=status, code=code)
    with pytest.raises(WhetError, match=words) as raised:
        resolve_model("org/name@v9")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["gpt2", "a/b/c", "/no/such/folder", "org/na me", "../up", "https://x/y"]
)
def test_other_names_are_refused_without_any_request(name: str) -> None:
    with pytest.raises(WhetError, match="no model folder at"):
        check_model(Model(name=name))


def write_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def bloom(folder: Path) -> None:
    BloomConfig(
        vocab_size=32, hidden_size=24, n_layer=1, n_head=2, architectures=["BloomForCausalLM"]
    ).save_pretrained(folder)


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "holds no config.json"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "reads no pickled weights",
        ),
        (lambda f: (f / "config.json").write_text("{"), "cannot be loaded"),
        (lambda f: write_config(f, model_type="nosuch"), "cannot be loaded"),
        (lambda f: write_config(f, num_attention_heads="many"), "cannot be loaded"),
        (
            lambda f: write_config(f, quantization_config={"quant_method": "gptq", "bits": 4}),
            "quantised",
        ),
        (bloom, "attention be replaced"),
        (
            lambda f: Gemma3Config(
                text_config=SHAPE, architectures=["Gemma3ForConditionalGeneration"]
            ).save_pretrained(f),
            "text-only",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_before_weights_are_loaded(
    tmp_path: Path, harm: Any, words: str
) -> None:
    save(tmp_path)
    check_model(Model(name=str(tmp_path)))
    harm(tmp_path)
    (tmp_path / "model.safetensors").is_file() and (tmp_path / "model.safetensors").write_bytes(
        b"not even looked at"
    )
    with pytest.raises(WhetError, match=words) as raised:
        check_model(Model(name=str(tmp_path)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose_a_weight, "not whole: model.layers.0.mlp.up_proj.weight"),
        (lambda f: (f / "model.safetensors").write_bytes(b"rubbish"), "cannot be loaded"),
    ],
)
def test_broken_weights_are_refused(tmp_path: Path, harm: Any, words: str) -> None:
    """transformers would fill a missing weight with random numbers."""
    save(tmp_path)
    harm(tmp_path)
    with pytest.raises(WhetError, match=words):
        load(tmp_path)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    save(tmp_path / "m")
    sprung = tmp_path / "sprung"
    (tmp_path / "m" / "trap.py").write_text(f"open({str(sprung)!r}, 'w')\nclass Trap: pass\n")
    trap = {"AutoConfig": "trap.Trap", "AutoModelForCausalLM": "trap.Trap"}
    write_config(tmp_path / "m", auto_map=trap, model_type="own")
    with pytest.raises(WhetError, match="cannot be loaded"):
        load(tmp_path / "m")
    assert not sprung.exists()


def test_more_context_than_positions_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not even looked at")
    with pytest.raises(WhetError, match="context = 33 is more than the 32 positions"):
        load_model(Model(name=str(tmp_path)), vocab_size=0, context=33, seed=0)


def test_end_tokens_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    model = save(tmp_path)
    settings = Model(name=str(tmp_path))
    assert eos_of(settings) == load(tmp_path).generation_config.eos_token_id == 1
    model.generation_config.eos_token_id = [1, 3]
    model.generation_config.save_pretrained(tmp_path)
    assert eos_of(settings) == load(tmp_path).generation_config.eos_token_id == [1, 3]
    (tmp_path / "generation_config.json").unlink()
    write_config(tmp_path, eos_token_id=2)
    assert eos_of(settings) == load(tmp_path).generation_config.eos_token_id == 2
    tiny = tiny_model(8)
    assert eos_of(Model(name="tiny")) == tiny.generation_config.eos_token_id


@given(st.text(st.characters(codec="utf-8")))
def test_bytes_read_and_write_any_text(text: str) -> None:
    tokenizer = tiny_tokenizer("")
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_tiny_tokenizers_agree_on_their_special_tokens() -> None:
    assert len(tiny_tokenizer("")) == 2 + 256
    for tokenizer in (tiny_tokenizer(""), tiny_tokenizer("abc")):
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
