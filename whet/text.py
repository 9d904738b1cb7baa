"""Between text and tokens: prompts in, responses out, and text that is safe to show.

A Codec wraps the tokenizer object it is given (Hugging Face's interface) and imports none. It renders chat prompts
with the model's own template, knows which tokens end a response, and decodes whatever a model wrote without ever
raising. `printable` is for all who show model output on a terminal; it does no markup and no HTML.
"""

from __future__ import annotations

import json
import unicodedata
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from whet.errors import WhetError
from whet.types import Prompt

LENGTH_BATCH = 1024
"""Prompts tokenised in one call while lengths are checked."""


class Codec:
    """What the model reads and writes, as text."""

    def __init__(self, tokenizer: Any, eos: int | Sequence[int] | None = None, *, cache: int = 8192) -> None:
        """`eos` is the generation config's eos_token_id, one, several or none; `cache` counts encoded prompts."""
        self.tokenizer = tokenizer
        listed = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        own = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*listed, *([own] if own is not None else [])]))
        """Every token that ends a response: those of the generation config and the tokenizer's own."""
        self._end = own if own in listed or not listed else listed[0]
        self._prefix = self._default_prefix()
        self._cache: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._cache_size = cache

    def encode(self, prompt: Prompt) -> list[int]:
        """Chat messages by the chat template, up to where the model speaks; plain text as it is."""
        key = prompt.text if not prompt.messages else json.dumps(prompt.messages)
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return list(known)
        ids = self._encode_chat(prompt) if prompt.messages else [*self._prefix, *self._tokens(prompt.text)]
        if not ids:
            raise WhetError(f'The prompt "{prompt.id}" has no tokens; a model needs at least one to start from.')
        self._cache[key] = tuple(ids)
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return ids

    def encode_response(self, text: str) -> list[int]:
        """The tokens of a worked solution, and the token that ends it."""
        if self._end is None:
            raise WhetError("The tokenizer has no end-of-sequence token, so a model cannot learn where to stop.")
        return [*self._tokens(text), self._end]

    def decode(self, ids: Sequence[int] | Any) -> str:
        """Without special tokens. Never raises: ids that no tokenizer knows count for nothing."""
        numbers = [int(i) for i in ids]
        try:
            return self._decode(numbers)
        except Exception:  # OverflowError, KeyError, TypeError: each kind of tokenizer has its own
            size = len(self.tokenizer)
            return self._decode([i for i in numbers if 0 <= i < size])

    def check_lengths(self, prompts: Iterable[Prompt], context: int, max_tokens: int = 1) -> None:
        """Refuses the first prompt that leaves no room for a response of `max_tokens` in `context` tokens."""
        for prompt, length in self._lengths(prompts):
            if length + max_tokens > context:
                raise WhetError(
                    f'The prompt "{prompt.id}" has {length} tokens, which with {max_tokens} for the response is more '
                    f"than rollout.context = {context}; raise rollout.context, or leave this prompt out."
                )

    def _lengths(self, prompts: Iterable[Prompt]) -> Iterator[tuple[Prompt, int]]:
        """As `encode` would make them, in batches and past the cache: a million prompts pass here."""
        rest = iter(prompts)
        while batch := list(islice(rest, LENGTH_BATCH)):
            texts = [prompt.text for prompt in batch if not prompt.messages]
            plain = iter(self._tokens(texts) if texts else [])
            for prompt in batch:
                ids = self._encode_chat(prompt) if prompt.messages else [*self._prefix, *next(plain)]
                yield prompt, len(ids)

    def _encode_chat(self, prompt: Prompt) -> list[int]:
        if not self.tokenizer.chat_template:
            raise WhetError(
                f'The prompt "{prompt.id}" is a list of chat messages, but the model has no chat template; '
                "give plain text, or a model tuned for chat."
            )
        messages = [dict(message) for message in prompt.messages]
        try:
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # templates refuse roles and orders of turns by raising what they like
            raise WhetError(f'The chat template refuses the prompt "{prompt.id}": {error}') from error
        return list(ids)

    def _tokens(self, text: str | list[str]) -> Any:
        """Of a text, or of each. Quietly: what is too long, `check_lengths` says."""
        return self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _default_prefix(self) -> list[int]:
        """The bos token, where the tokenizer would set it itself. An eos it would append ends no prompt of ours."""
        bos = self.tokenizer.bos_token_id
        first = self.tokenizer("")["input_ids"][:1]
        return [bos] if bos is not None and list(first) == [bos] else []


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Text that can do nothing to a terminal: what is not plainly visible is spelled out.

    Control characters (so also every ANSI escape), bidirectional overrides, zero-width and unassigned characters
    become \x1b, \u202e, ...; newline and tab stay unless `one_line`.

    >>> printable("a\x1b[31mred\u202e") == r"a\x1b[31mred\u202e", printable("1\n2", one_line=True) == r"1\n2"
    (True, True)
    """
    if text.isprintable():
        return text
    kept = "" if one_line else "\n\t"
    return "".join(c if c in kept or _visible(c) else c.encode("unicode_escape").decode() for c in text)


def _visible(character: str) -> bool:
    """isprintable, and the spaces of other scripts, which it leaves out; line separators are no spaces."""
    return character.isprintable() or unicodedata.category(character) == "Zs"
