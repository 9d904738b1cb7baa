"""Drafters that do their worst, for tests of whatever holds them: tokens must come out the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from whet.draft.base import Drafter, RowView


class Empty(Drafter):
    """Never has an idea; the base of the others."""

    name = "empty"


class Random(Empty):
    """Any token of the vocabulary, any number of them."""

    name = "random"

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.vocab, self.rng = vocab, np.random.default_rng(seed)

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.rng.integers(
            0, self.vocab, (len(rows), int(most.max(initial=0))), dtype=np.int32
        )
        return tokens, self.rng.integers(0, most + 1).astype(np.int32)


class Oracle(Empty):
    """Knows what plain decoding wrote, by (group_id, index); wrong from a share of its places on."""

    name = "oracle"

    def __init__(
        self, plain: Mapping[tuple[int, int], np.ndarray], wrong: float = 0.0, seed: int = 0
    ) -> None:
        self.plain, self.wrong, self.rng = plain, wrong, np.random.default_rng(seed)

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens, counts = super().propose(rows, most)
        for i, row in enumerate(rows):
            rest = self.plain[row.group_id, row.index][row.ids.size : row.ids.size + int(most[i])]
            flip = self.rng.random(rest.size) < self.wrong
            tokens[i, : rest.size], counts[i] = np.where(flip, rest ^ 1, rest), rest.size
        return tokens, counts


class AlwaysEnd(Empty):
    """Proposes the end, again and again."""

    name = "always_end"

    def __init__(self, eos: int) -> None:
        self.eos = eos

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.full((len(rows), int(most.max(initial=0))), self.eos, np.int32), most.astype(
            np.int32
        )


class Invalid(Empty):
    """Ids below 0 and beyond the vocabulary."""

    name = "invalid"

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.ids = np.array([-1, -(2**31), vocab, vocab + 7, 2**31 - 1, 0], np.int64)
        self.rng = np.random.default_rng(seed)

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.rng.choice(self.ids, (len(rows), int(most.max(initial=0)))).astype(
            np.int32
        ), most.astype(np.int32)


class TooLong(Empty):
    """More tokens than were asked for, and counts beyond even those."""

    name = "too_long"

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.ones((len(rows), int(most.max(initial=0)) + 50), np.int64), np.full(
            len(rows), 10_000
        )


class BadShape(Empty):
    """Too few rows, as floats."""

    name = "bad_shape"

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.full((max(0, len(rows) - 1), 3), np.nan), np.full(3, 1.5)


class Crashing(Empty):
    """Raises wherever it is called."""

    name = "crashing"

    def begin(self, row: RowView) -> None:
        raise RuntimeError("begin")

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raise ZeroDivisionError("propose")

    def finish(self, row: RowView) -> None:
        raise ValueError("finish")

    def updated(self, version: int) -> None:
        raise MemoryError("updated")


def adversaries(vocab: int, eos: int, plain: Mapping[tuple[int, int], np.ndarray]) -> list[Empty]:
    """All of them; `plain` is what plain decoding wrote, by (group_id, index)."""
    half_wrong = Oracle(plain, wrong=0.5)
    half_wrong.name = "half_wrong"
    return [
        Empty(),
        Random(vocab),
        Oracle(plain),
        half_wrong,
        AlwaysEnd(eos),
        Invalid(vocab),
        TooLong(),
        BadShape(),
        Crashing(),
    ]
