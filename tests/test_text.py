"""Tokens and text, with real tokenizers made on the spot, and what hostile strings cannot do to a terminal."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from whet.errors import WhetError
from whet.model.load import tiny_tokenizer
from whet.tasks.chain import ChainTask
from whet.text import Codec, printable
from whet.types import Prompt

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|turn|>{{ m['role'] }}:{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)
BOS, EOS, TURN = 256, 257, 258


def bytes_tokenizer(
    *, bos: bool = False, eos: bool = False, chat: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level, as the tokenizers of large models are, without merges: any text, one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"<s>": BOS, "</s>": EOS, "<|turn|>": TURN}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos or eos:
        single = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|turn|>"],
    )
    fast.chat_template = TEMPLATE if chat else None
    return fast


def plain(text: str, prompt_id: str = "p") -> Prompt:
    return Prompt(id=prompt_id, text=text, answer="a", task="text")


def chat(*contents: str, role: str = "user") -> Prompt:
    messages = tuple({"role": role, "content": content} for content in contents)
    return Prompt(id="c", messages=messages, answer="a", task="text")


def test_plain_text_is_encoded_plainly() -> None:
    codec = Codec(bytes_tokenizer())
    assert codec.encode(plain("abc")) == codec.tokenizer("abc")["input_ids"]
    assert len(codec.encode(plain("abc"))) == 3


def test_the_tiny_model_reads_and_writes_chains() -> None:
    codec = Codec(tiny_tokenizer(ChainTask.alphabet))
    for prompt, solution in ChainTask().solutions(np.random.default_rng(0), 50):
        assert len(codec.encode(prompt)) == len(prompt.text)
        ids = codec.encode_response(solution)
        assert ids[-1] in codec.stop_ids and len(ids) == len(solution) + 1
        assert codec.decode(codec.encode(prompt)) == prompt.text and codec.decode(ids) == solution


@pytest.mark.parametrize("eos", [False, True])
def test_bos_follows_the_tokenizer(eos: bool) -> None:
    """An eos that the tokenizer would append must not end a prompt before its response."""
    body = Codec(bytes_tokenizer()).encode(plain("abc"))
    assert Codec(bytes_tokenizer(bos=True, eos=eos)).encode(plain("abc")) == [BOS, *body]
    assert Codec(bytes_tokenizer(bos=False, eos=eos)).encode(plain("abc")) == body


def test_messages_use_the_template() -> None:
    codec = Codec(bytes_tokenizer(bos=True, chat=True))
    ids = codec.encode(chat("1+1?"))
    assert ids[:2] == [BOS, TURN] and ids.count(BOS) == 1
    assert codec.tokenizer.decode(ids) == "<s><|turn|>user:1+1?<|turn|>assistant:"


def test_messages_without_a_template() -> None:
    with pytest.raises(
        WhetError,
        match='The prompt "c" is a list of chat messages, but the model has no chat template',
    ):
        Codec(bytes_tokenizer()).encode(chat("1+1?"))


def test_a_template_that_refuses() -> None:
    with pytest.raises(WhetError, match='The chat template refuses the prompt "c": no tools here'):
        Codec(bytes_tokenizer(chat=True)).encode(chat("1+1?", role="tool"))


def test_no_tokens_at_all() -> None:
    with pytest.raises(WhetError, match='The prompt "p" has no tokens'):
        Codec(bytes_tokenizer()).encode(plain(""))


def test_a_prompt_is_known_by_its_text_and_messages() -> None:
    codec = Codec(bytes_tokenizer(chat=True))
    assert codec.encode(plain("a")) == codec.encode(plain("a", "another id"))
    assert codec.encode(chat("x")) == codec.encode(chat("x")) != codec.encode(chat("y"))


@pytest.mark.parametrize(
    ("eos", "stop", "end"),
    [
        (None, (EOS,), EOS),
        (EOS, (EOS,), EOS),
        ([TURN, EOS], (TURN, EOS), EOS),
        ([TURN, 5], (TURN, 5, EOS), TURN),
        (TURN, (TURN, EOS), TURN),
    ],
)
def test_stop_and_end(eos, stop: tuple[int, ...], end: int) -> None:
    """The tokenizer's eos ends a worked solution, unless the generation config lists others only."""
    codec = Codec(bytes_tokenizer(), eos)
    assert codec.stop_ids == stop
    assert codec.encode_response("ab") == [*codec.encode(plain("ab")), end]


def test_no_end_token() -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.eos_token = None
    codec = Codec(tokenizer)
    assert codec.stop_ids == ()
    with pytest.raises(WhetError, match="no end-of-sequence token"):
        codec.encode_response("ab")


@given(st.text(max_size=50))
def test_decode_undoes_encode(text: str) -> None:
    codec = Codec(bytes_tokenizer(bos=True))
    assert codec.decode(np.array(codec.encode_response(text), np.int32)) == text
    assert codec.decode(codec.encode(plain(text))) == text


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 300), max_size=30))
def test_decode_never_raises(ids: list[int]) -> None:
    codec = Codec(bytes_tokenizer())
    known = [i for i in ids if 0 <= i < len(codec.tokenizer)]
    assert codec.decode(ids) == codec.decode(known)
    assert codec.decode(np.array(ids, np.int64)) == codec.decode(known)


def test_half_a_character_decodes() -> None:
    codec = Codec(bytes_tokenizer())
    assert codec.decode(codec.encode(plain("\u00e9"))[:1]) == "\ufffd"
    assert codec.decode([]) == ""


@given(st.lists(st.integers(0, 260), max_size=30))
def test_pieces_join_to_what_is_decoded(ids: list[int]) -> None:
    """Any bytes, halves of characters among them, special tokens, and ids that are none."""
    codec = Codec(bytes_tokenizer())
    pieces = codec.pieces(ids)
    assert pieces is not None and len(pieces) == len(ids) and "".join(pieces) == codec.decode(ids)


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    codec = Codec(bytes_tokenizer())
    ids = codec.encode(plain("a\u00e9\U0001f600"))
    assert codec.pieces([*ids, EOS]) == ["a", "", "\u00e9", "", "", "", "\U0001f600", ""]
    assert codec.pieces(ids[:-1]) == ["a", "", "\u00e9", "", "", "\ufffd"], (
        "half a character ends the text"
    )
    assert codec.pieces([ids[1], ids[0], TURN]) == ["", "\ufffda", ""] and codec.pieces([]) == []


# as SentencePiece has them
SPACED = ["<s>", "</s>", "\u2581on", "e", "\u2581two", ",", "<0xC3>", "<0xA9>"]


@given(st.lists(st.integers(0, len(SPACED) - 1), max_size=12))
def test_pieces_where_spaces_belong_to_tokens(ids: list[int]) -> None:
    """The decoder of Llama 2 drops the first space, and joins bytes that no word covers."""
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(SPACED)}, merges=[]))
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    codec = Codec(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    )
    assert codec.pieces([2, 3, 4, 5, 6, 7, 1]) == ["on", "e", " two", ",", "", "\u00e9", ""]
    pieces = codec.pieces(ids)
    assert pieces is None or (len(pieces) == len(ids) and "".join(pieces) == codec.decode(ids))


def test_spaces_before_punctuation_survive() -> None:
    codec = Codec(bytes_tokenizer())
    assert codec.decode(codec.encode(plain("a , b . c 's"))) == "a , b . c 's"


def test_prompts_encoded_together_are_those_encoded_one_by_one() -> None:
    codec = Codec(bytes_tokenizer(bos=True))
    prompts = [plain("a" * n, f"p{n}") for n in range(1200)]
    assert codec.encode_all(prompts[:50]) == [codec.encode(p) for p in prompts[:50]]
    assert [len(ids) for ids in codec.encode_all(prompts)] == list(range(1, 1201))
    chatting = Codec(bytes_tokenizer(bos=True, chat=True))
    both = [chat("b" * 10), plain("b" * 10)]
    assert (
        [len(ids) for ids in chatting.encode_all(both)]
        == [28, 28]
        == [len(chatting.encode(p)) for p in both]
    )


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        (
            "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
            r"\x1b]8;;http://evil\x1b\click\x1b]8;;\x1b" + "\\",
        ),
        ("\x9b31m", r"\x9b31m"),
        ("right\rwrong", r"right\rwrong"),
        ("a\x08b\x7fc\x00d", r"a\x08b\x7fc\x00d"),
        ("\u202eevil\u202c", r"\u202eevil\u202c"),
        ("\u2066x\u2069", r"\u2066x\u2069"),
        ("a\u200bb\ufeffc\u00add", r"a\u200bb\ufeffc\xadd"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
        ("\U000e0041", r"\U000e0041"),
        ("\ud800", r"\ud800"),
        ("\ue000", r"\ue000"),
    ],
)
def test_hostile_strings_are_spelled_out(hostile: str, shown: str) -> None:
    assert printable(hostile) == shown


def test_plain_text_stays() -> None:
    for text in (
        "",
        "abc",
        "a\n\tb",
        "\u00e9\u4e2d\u6587\u3000\u0627\u0644 \U0001f600",
        "a\u00a0b",
        r"\frac{1}{2}",
    ):
        assert printable(text) == text
    assert printable("a\n\tb\u3000c", one_line=True) == r"a\n\tb" + "\u3000c"


@given(
    st.text() | st.text(st.characters(categories=["Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"])),
    st.booleans(),
)
def test_nothing_invisible_gets_through(text: str, one_line: bool) -> None:
    shown = printable(text, one_line=one_line)
    kept = set() if one_line else set("\n\t")
    assert {unicodedata.category(c) for c in set(shown) - kept}.isdisjoint(
        {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    )
    assert printable(shown, one_line=one_line) == shown
