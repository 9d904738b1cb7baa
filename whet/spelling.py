"""From tokens to text by a table of bytes, for tokenizers whose tokens are runs of bytes (GPT-2's scheme, and since
then that of Llama 3, Qwen, SmolLM and others): a fifteenth of the time that the tokenizer takes, once a rollout.

`text.Codec` asks for tables; a tokenizer of another kind gets none, and spells for itself.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any


def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: a byte that is a visible character stands for itself, the others for the characters from 256
    on, so that every token can be written down.

    >>> found = byte_of_character()
    >>> found["a"], found[chr(0x120)], len(found)  # 0x120 is the space
    (97, 32, 256)
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(visible))
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}


def byte_table(backend: Any) -> dict[int, bytes] | None:
    """The bytes of every token of a `tokenizers.Tokenizer`. None if they are not what it spells them as."""
    if type(getattr(backend, "decoder", None)).__name__ != "ByteLevel":
        return None
    known = byte_of_character()
    table = {}
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        try:
            table[number] = bytes([known[character] for character in token])
        except KeyError:  # added as it is to be read
            table[number] = token.encode()
    everything = sorted(table)
    return table if spell(table, everything) == backend.decode(everything, skip_special_tokens=False) else None


def without(table: dict[int, bytes], silent: Set[int]) -> dict[int, bytes]:
    """The same, where some tokens are not heard."""
    return {**table, **dict.fromkeys(silent, b"")}


def spell(table: dict[int, bytes], ids: Sequence[int]) -> str:
    """Raises KeyError for a token that is in no table. Bytes that are no text become U+FFFD, as tokenizers do it."""
    return b"".join(map(table.__getitem__, ids)).decode(errors="replace")
