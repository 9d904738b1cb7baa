"""The forward over tokens of prompts: a graph where they are few, plain calls where they are many.

Every launch takes the host its time, and a forward is hundreds: with a small model more than a thousand tokens take the
device, while the rows that run wait. So waves of up to 2,048 tokens are padded to one of a few sizes, each captured
once. Padding is of no row: it writes to the page of no row, and what is computed of it is left out. Used by
`graphs.py`, which draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from whet.model.attention import GRAPHED
from whet.model.network import Network
from whet.rollout.captures import Key
from whet.rollout.flight import Chunk
from whet.rollout.guesser import Guesser
from whet.rollout.upload import sent

PROMPTS = "prompts"
"""Stands in a graph's key where a drafter's name would."""
SIZES = (128, 256, 512, 1024, GRAPHED)
"""Tokens of a graph."""
ROWS = 64
"""Prompts of a graph at most."""
LONGEST = 512
"""Tokens of one of them at most: the attention has programs for so many in every row, which end at once if idle."""


class Fed(NamedTuple):
    """What `Network.forward` wants of N rows, but for `most`; or the same as numpy arrays."""

    tokens: Any
    """[3, T]: ids, positions, rows."""
    table: Any
    length: Any
    starts: Any


def fed(chunks: Sequence[Chunk], table: np.ndarray, tokens: int, rows: int, width: int) -> Fed:
    """Of so many tokens, rows and pages of a row; beyond those of the chunks, tokens of no row and empty rows."""
    sizes = np.array([chunk.size for chunk in chunks])
    real, n = int(sizes.sum()), len(chunks)
    lines, tables = np.zeros((3, tokens), np.int32), np.zeros((rows, width), np.int32)
    lines[0, :real] = np.concatenate([chunk.ids() for chunk in chunks])
    lines[1, :real] = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
    lines[2] = -1
    lines[2, :real] = np.repeat(np.arange(n), sizes)
    tables[:n, : table.shape[1]] = table
    length, starts = np.zeros(rows, np.int32), np.full(rows + 1, real, np.int32)
    length[:n] = [chunk.stop for chunk in chunks]
    starts[: n + 1] = [0, *np.cumsum(sizes)]
    return Fed(lines, tables, length, starts)


class Prefill:
    def __init__(self, network: Network, guesser: Guesser | None, width: int, device: torch.device) -> None:
        """width: pages of a row; guesser: the drafter that wants the hidden states, if there is one."""
        self.network, self.guesser, self.device, self.width = network, guesser, device, width
        shapes = ((3, SIZES[-1]), (ROWS, width), (ROWS,), (ROWS + 1,))
        self._fed = Fed(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))
        """What graphs read."""

    @property
    def keys(self) -> list[Key]:
        """Of all graphs, the largest first."""
        return [(size, min(size, LONGEST), PROMPTS) for size in reversed(SIZES)]

    def key(self, chunks: Sequence[Chunk]) -> Key | None:
        """The graph that serves them; None where plain calls do."""
        tokens, longest = sum(chunk.size for chunk in chunks), max(chunk.size for chunk in chunks)
        if len(chunks) > ROWS:
            return None
        return next((key for key in reversed(self.keys) if tokens <= key[0] and longest <= key[1]), None)

    def rest(self) -> None:
        """From now on `step` feeds no row."""
        self._fed.tokens[2] = -1
        self._fed.starts.zero_()

    def tell(self, chunks: Sequence[Chunk], table: np.ndarray, tokens: int) -> None:
        """What `step` feeds next: rows with the pages of `table`."""
        news = sent(self.device, *fed(chunks, table, tokens, ROWS, self.width))
        self._fed.tokens[:, :tokens].copy_(news[0])
        for there, new in zip(self._fed[1:], news[1:], strict=True):
            there.copy_(new)

    def step(self, tokens: int, most: int) -> Tensor:
        """[tokens, width] after the last norm, of what was told."""
        return self._forward(self._fed._replace(tokens=self._fed.tokens[:, :tokens]), most)

    def plain(self, chunks: Sequence[Chunk], table: np.ndarray) -> Tensor:
        """The same at once, without padding."""
        sizes = [chunk.size for chunk in chunks]
        given = sent(self.device, *fed(chunks, table, sum(sizes), len(chunks), table.shape[1]))
        return self._forward(Fed(*given), max(sizes))

    def _forward(self, given: Fed, most: int) -> Tensor:
        ids, position, row = given.tokens
        hidden = self.network.forward(ids, position, row, *given[1:], most)
        if self.guesser is not None:
            self.guesser.keep(hidden, given.table, row, position)
        return hidden
