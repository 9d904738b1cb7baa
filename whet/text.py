"""Text to tokens and back: prompts are rendered and encoded, responses are decoded, and text is made safe to show.

A Codec renders prompts as the recipe's [text] says, by the model's chat template or plainly, finds the tokens that end
a response, and decodes any response without raising an error. For tokenizers whose tokens are runs of bytes (GPT-2's
scheme: Llama 3, Qwen, SmolLM and others) a table of bytes decodes in a fifteenth of the tokenizer's time.
"""

from __future__ import annotations

import unicodedata
from codecs import getincrementaldecoder
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from whet import config
from whet.errors import WhetError
from whet.types import Prompt

THINK = "<think>"
THOUGHT = "</think>"
_DEFAULT = config.Text()
_QUESTION = Prompt(id="?", text="?", answer="", task="")
_SAID = "xyzzy"  # a word that no template writes by itself


def byte_table(backend: Any) -> dict[int, bytes] | None:
    """Return the bytes of every token of a `tokenizers.Tokenizer`, or None if it does not decode by them."""
    if type(getattr(backend, "decoder", None)).__name__ != "ByteLevel":
        return None
    # GPT-2's alphabet: byte -> character
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    known = {character: byte for byte, character in bytes_to_unicode().items()}
    table = {}
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        try:
            table[number] = bytes([known[character] for character in token])
        except KeyError:  # an added token is plain text
            table[number] = token.encode()
    everything = sorted(table)
    return (
        table
        if spell(table, everything) == backend.decode(everything, skip_special_tokens=False)
        else None
    )


def spell(table: dict[int, bytes], ids: Sequence[int]) -> str:
    """Decode ids by the table; bytes that are no text become U+FFFD. Raise KeyError for an unknown token."""
    return b"".join(map(table.__getitem__, ids)).decode(errors="replace")


class Codec:
    """Renders, encodes and decodes what a model reads and writes."""

    def __init__(
        self,
        tokenizer: Any,
        eos: int | Sequence[int] | None = None,
        settings: config.Text = _DEFAULT,
    ):
        """`eos` is the generation config's eos_token_id: one, several or none."""
        self.tokenizer = tokenizer
        self._settings = settings
        self._words: dict[int, str] = {}
        self._chat = bool(tokenizer.chat_template) and settings.template != "plain"
        self._switches: dict[str, bool] = {}  # arguments of the template beside the messages
        self._refuse_the_impossible()
        if settings.thinking != "auto":
            self._switches = {"enable_thinking": settings.thinking == "on"}
        # The bos token if the tokenizer would add it. An eos that it would append must not end a prompt.
        bos = tokenizer.bos_token_id
        first = tokenizer("")["input_ids"][:1]
        self._prefix = [bos] if bos is not None and list(first) == [bos] else []
        self._read_specials(eos)
        # Templates of reasoning models end prompts with the opening mark. `judged` puts it back in front: without it a
        # thought that was cut short would read like an answer.
        self._opening = ""
        # the real prompts may have another form; if not, they raise it again
        with suppress(WhetError):
            self._opening = f"{THINK}\n" if self._text(_QUESTION).rstrip().endswith(THINK) else ""

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of `render(prompt)`, which the model reads before it writes."""
        return self.encode_all([prompt])[0]

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Render prompts one by one and tokenise them together, which saves most of the calls' cost."""
        rows: list[list[int]] = self._tokens([self._text(prompt) for prompt in prompts])
        if self._prefix and not self._chat:
            rows = [row if row[:1] == self._prefix else [*self._prefix, *row] for row in rows]
        if [] in rows:
            empty = prompts[rows.index([])].id
            raise WhetError(
                f'The prompt "{empty}" has no tokens; a model needs at least one to start from.'
            )
        return rows

    def render(self, prompt: Prompt) -> str:
        """Return the exact text that the model reads, special tokens included."""
        text = self._text(prompt)
        bos = self.tokenizer.bos_token if self._prefix and not self._chat else ""
        return text if text.startswith(bos) else bos + text

    def encode_response(self, text: str) -> list[int]:
        """Return the tokens of a worked solution and the token that ends a turn (chat) or a text (plain)."""
        if self._end is None:
            raise WhetError(
                "The tokenizer has no end-of-sequence token, so a model cannot learn where to stop."
            )
        return [*self._tokens(text), self._end]

    def stop_tokens(self) -> list[tuple[int, str]]:
        """Return (id, token) of every token that ends a response."""
        return [(i, str(self.tokenizer.convert_ids_to_tokens(i))) for i in self.stop_ids]

    def decode(self, ids: Sequence[int] | Any) -> str:
        """Decode for readers, without special tokens. Unknown ids are left out; nothing is raised."""
        return self._decode(ids, self._special)

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        """The text of `decode`, divided into one piece per token; None for a tokenizer whose text does not divide so.
        A character that several tokens spell belongs to the last of them; special and stop tokens are silent."""
        numbers = list(ids)
        whole = self.decode(ids)
        if numbers and numbers[-1] in self.stop_ids:
            numbers = numbers[:-1]
        if self._special in self._tables:
            table = self._tables[self._special]
            decoder = getincrementaldecoder("utf-8")("replace")
            pieces = [decoder.decode(table.get(i, b"")) for i in numbers]
        elif "".join(pieces := [self._word(i) for i in numbers]) != whole:
            pieces = self._grown(numbers)
        if numbers and len(told := "".join(pieces)) < len(whole):  # half a character at the end
            pieces[-1] += whole[len(told) :]
        pieces += [""] * (len(ids) - len(numbers))
        return pieces if "".join(pieces) == whole else None

    def _word(self, token: int) -> str:
        """Its text where it stands alone."""
        if token not in self._words:
            self._words[token] = self.decode([token])
        return self._words[token]

    def _grown(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text of the few before it, which is decoded with it: tokens may join."""
        # decoded from `first` on; the text up to `known` was handed out
        pieces, first, known = list[str](), 0, 0
        for end in range(1, len(ids) + 1):
            before = self.decode(ids[first:known])
            now = self.decode(ids[first:end])
            whole = len(now) > len(before) and not now.endswith("\ufffd")
            pieces.append(now[len(before) :] if whole else "")
            if whole:
                first = known
                known = end
        return pieces

    def judged(self, ids: Sequence[int] | Any) -> str:
        """Decode for judges: as `decode`, with the thinking marks, which stay even if they are special tokens."""
        return self._opening + self._decode(ids, self._silent)

    def _text(self, prompt: Prompt) -> str:
        """Return the tokenizer's input. Under chat the template writes the bos token, if the model wants one."""
        if self._chat:
            try:
                return self._apply(
                    self._turns(prompt), add_generation_prompt=True, **self._switches
                )
            except WhetError:
                raise
            except (
                Exception
            ) as error:  # a template may raise any error for roles or orders of turns it refuses
                raise WhetError(
                    f'The chat template refuses the prompt "{prompt.id}": {error}'
                ) from error
        if prompt.messages:
            why = "the model has no chat template; give plain text, or a model tuned for chat."
            if self.tokenizer.chat_template:
                why = 'text.template = "plain" takes plain text only; set it to "auto".'
            raise WhetError(f'The prompt "{prompt.id}" is a list of chat messages, but {why}')
        return prompt.text + self._settings.prompt_suffix

    def _turns(self, prompt: Prompt) -> list[dict[str, str]]:
        turns = [dict(message) for message in prompt.messages] or [
            {"role": "user", "content": prompt.text}
        ]
        if self._settings.prompt_suffix:
            last = next((turn for turn in reversed(turns) if turn["role"] == "user"), None)
            if last is None:
                raise WhetError(
                    f'The prompt "{prompt.id}" has no user message to which text.prompt_suffix could go.'
                )
            last["content"] += self._settings.prompt_suffix
        if self._settings.system_prompt and all(turn["role"] != "system" for turn in turns):
            turns.insert(0, {"role": "system", "content": self._settings.system_prompt})
        return turns

    def _apply(self, turns: list[dict[str, str]], **switches: bool) -> str:
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **switches))

    def _tokens(self, text: str | list[str]) -> Any:
        """Tokenise a text or a list of texts, without warnings: `check_run` reports what is too long."""
        return self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]

    @cached_property
    def _tables(self) -> dict[frozenset[int], dict[int, bytes]]:
        """Silent tokens -> the bytes of every token, none for a silent one; {} if the tokenizer has no such bytes."""
        table = byte_table(getattr(self.tokenizer, "backend_tokenizer", None))
        kinds = {self._special, self._silent} if table is not None else ()
        return {silent: {**(table or {}), **dict.fromkeys(silent, b"")} for silent in kinds}

    def _decode(self, ids: Sequence[int] | Any, silent: frozenset[int]) -> str:
        """Decode by a table of bytes if there is one, else by the tokenizer."""
        numbers = ids if type(ids) is list else [int(i) for i in ids]
        # it ended the response and need not be a special token
        if numbers and numbers[-1] in self.stop_ids:
            numbers = numbers[:-1]
        if (table := self._tables.get(silent)) is not None:
            try:
                return spell(table, numbers)
            except KeyError:
                return spell(table, [i for i in numbers if i in table])
        kept = [i for i in numbers if i not in silent]
        try:
            return self._ask(kept)
        except (
            Exception
        ):  # each kind of tokenizer raises its own: OverflowError, KeyError, TypeError
            return self._ask([i for i in kept if self._exists(i)])

    def _ask(self, ids: list[int]) -> str:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # `decode` would first check every id, which is most of its time
            return str(backend.decode(ids, skip_special_tokens=False))
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _refuse_the_impossible(self) -> None:
        settings = self._settings
        if not self._chat:
            why = (
                'text.template = "plain"'
                if self.tokenizer.chat_template
                else "the model has no chat template"
            )
            if settings.template == "chat":
                raise WhetError(
                    f'text.template = "chat", but {why}; set it to "plain", or take a chat model.'
                )
            for name, asked in (
                ("system_prompt", settings.system_prompt),
                ("thinking", settings.thinking != "auto"),
            ):
                if asked:
                    raise WhetError(f"text.{name} is for chat templates, but {why}; leave it out.")
        elif settings.thinking != "auto":
            turns = self._turns(_QUESTION)
            try:
                on, off = (
                    self._apply(turns, add_generation_prompt=True, enable_thinking=it)
                    for it in (True, False)
                )
            except Exception as error:
                raise WhetError(f"The chat template refuses a plain question: {error}") from error
            if on == off:
                why = "the chat template of the model has no such switch (enable_thinking makes no difference to it)"
                raise WhetError(f'text.thinking = "{settings.thinking}", but {why}; leave it out.')

    def _read_specials(self, eos: int | Sequence[int] | None) -> None:
        listed = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        listed = list(filter(self._exists, listed))
        own = self.tokenizer.eos_token_id
        turn = self._end_of_turn()
        # A response ends with an eos of the generation config, the tokenizer's own, or the template's end of turn.
        self.stop_ids: tuple[int, ...] = tuple(
            dict.fromkeys(i for i in (*listed, own, turn) if i is not None)
        )
        self._end = own if own in listed or not listed else listed[0]
        if self._chat and turn is not None:
            self._end = turn
        added = self.tokenizer.added_tokens_decoder
        silent = {i for i, token in added.items() if token.special} | set(
            self.tokenizer.all_special_ids
        )
        self._special = frozenset(silent)
        self._silent = frozenset(
            silent - {i for i, token in added.items() if token.content in (THINK, THOUGHT)}
        )

    def _end_of_turn(self) -> int | None:
        """Return the token that the template writes after the assistant's turn, whatever its name is."""
        if not self.tokenizer.chat_template:
            return None
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        try:
            _, said, rest = self._apply(turns).rpartition(_SAID)
        except Exception:  # some templates have no assistant turns
            return None
        rest = rest.lstrip() if said else ""
        ends = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items()}
        found = [content for content in ends if content and rest.startswith(content)]
        return ends[max(found, key=len)] if found else None

    def _exists(self, token: int) -> bool:
        return 0 <= token < len(self.tokenizer) or token in self.tokenizer.added_tokens_decoder


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Return text that is safe for a terminal: every character that is not plainly visible is spelled out.

    Control characters (and so every ANSI escape), bidirectional overrides, zero-width and unassigned characters become
    \x1b, \u202e, ...; newline and tab stay unless `one_line`.

    >>> printable("a\x1b[31mred\u202e") == r"a\x1b[31mred\u202e", printable("1\n2", one_line=True) == r"1\n2"
    (True, True)
    """
    if text.isprintable():
        return text
    kept = "" if one_line else "\n\t"
    # isprintable refuses the spaces of other scripts (Zs), which are harmless; line separators are not.
    shown = (c in kept or c.isprintable() or unicodedata.category(c) == "Zs" for c in text)
    return "".join(
        c if fine else c.encode("unicode_escape").decode()
        for c, fine in zip(text, shown, strict=True)
    )
