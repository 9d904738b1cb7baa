"""Text by a table of bytes is the text that the tokenizer makes."""

import pytest
from chat_families import FAMILIES, family_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from whet.model.load import tiny_tokenizer
from whet.text import Codec, byte_table, spell

MADE = {name: family_tokenizer(name) for name in FAMILIES}


@pytest.mark.wide
@pytest.mark.parametrize("name", FAMILIES)
@given(draws=st.lists(st.integers(0, 10**6), max_size=40))
def test_ids_of_any_kind_are_spelt_as_by_the_tokenizer(name, draws):
    tokenizer = MADE[name]
    backend, codec = tokenizer.backend_tokenizer, Codec(tokenizer)
    assert (not codec._tables) == (type(backend.decoder).__name__ != "ByteLevel")
    ids = [draw % len(tokenizer) for draw in draws] + [5]  # ends with no token that stops
    assert codec.decode(ids) == backend.decode(ids, skip_special_tokens=True)
    heard = [i for i in ids if i not in codec._silent]
    assert codec.judged(ids) == codec._opening + backend.decode(heard, skip_special_tokens=False)
    assert codec.decode([-1, *ids, 10**9]) == codec.decode(ids), "unknown ids count for nothing"


def test_broken_characters_are_those_of_the_tokenizer():
    """The bytes of a character of three, in every part: alone, doubled, and after one another."""
    backend = next(t for t in MADE.values() if byte_table(t.backend_tokenizer)).backend_tokenizer
    table = byte_table(backend)
    assert table is not None
    number = {text: i for i, text in table.items()}
    parts = [number[bytes([b])] for b in "€".encode()]
    for ids in (
        parts,
        parts[:1],
        parts[:2],
        parts[1:],
        parts[::-1],
        parts[:2] + parts,
        parts[:1] * 3,
    ):
        assert spell(table, ids) == backend.decode(ids, skip_special_tokens=False)


def test_a_tokenizer_of_another_kind_has_no_table():
    assert byte_table(None) is None
    assert byte_table(tiny_tokenizer("0123").backend_tokenizer) is None


def test_a_table_that_is_not_what_the_tokenizer_says_is_not_used():
    class Other:
        decoder = decoders.ByteLevel()

        def get_vocab(self, with_added_tokens):
            return {"a": 0, "b": 1}

        def decode(self, ids, skip_special_tokens):
            return "a b"

    assert byte_table(Other()) is None


def test_silent_tokens_are_not_heard():
    assert spell({0: b"a", 1: b""}, [0, 1, 0]) == "aa"
