"""How a step is computed: the forward over running and new rows, and the draw of one token for each.

The engine decides who runs; a runner turns that into tokens. `EagerRunner` is the plain form, for a CPU and for models
that no faster path knows: one packed forward of the Hugging Face twin. `graphs.py` has the form for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from whet.rollout.flight import Chunk
from whet.rollout.pages import Cache
from whet.rollout.rows import Rows
from whet.rollout.sampling import sample


class Runner(Protocol):
    def advance(self, running: int, chunks: Sequence[Chunk], source: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The next token of every row that is ready, and its log-prob.

        Rows 0..running-1 feed their newest token; then come the rows of `chunks`, whose tokens are fed; then
        rows that fork from the rows `source`, prompts and all. A chunk that is not its flight's last stands alone and
        draws no token.
        """

    def forget(self) -> None:
        """The weights have changed: nothing computed but not handed out may be used."""

    def stats(self) -> dict[str, float]:
        """Of its own, since the start, named "rollout/..."."""


class EagerRunner:
    def __init__(self, twin: PreTrainedModel, cache: Cache, rows: Rows) -> None:
        self.twin, self.cache, self.rows = twin, cache, rows
        self.device = twin.device

    def advance(self, running: int, chunks: Sequence[Chunk], source: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rows
        blocks = [(slice(0, running), rows.token[:running, None], rows.length[:running, None])] if running else []
        if chunks:
            blocks.append((slice(running, running + len(chunks)), *right_aligned(chunks)))
        logits = self._forward(blocks)[: rows.ready]
        if source:
            first = running + len(chunks)
            fork_rows(self.cache, rows, first, source)
            logits = logits[torch.tensor([*range(first), *source], device=self.device)]
        token, log_prob = sample(logits, rows.draws(), rows.positions())
        if self.device.type != "cpu":  # one transfer for both; ids are exact in float32 up to 16 million
            token, log_prob = torch.stack((token.to(log_prob.dtype), log_prob)).cpu()
        return token.numpy(), log_prob.numpy()

    def forget(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def _forward(self, blocks: Sequence[tuple[slice, np.ndarray, np.ndarray]]) -> Tensor:
        """Logits [rows, vocab] after each row's newest token; the model's own head, soft-cap and scale included."""
        context = self.cache.context([(rows, position) for rows, _, position in blocks])
        ids = np.concatenate([ids.ravel() for _, ids, _ in blocks])
        keep: int | Tensor = 0  # all: every row has one new token
        if sum(len(ids) for _, ids, _ in blocks) < ids.size:
            last = np.cumsum(np.concatenate([np.full(*ids.shape) for _, ids, _ in blocks])) - 1
            keep = torch.from_numpy(last).to(self.device)
        out = self.twin(
            input_ids=torch.from_numpy(ids).to(self.device)[None],
            position_ids=context.position[None],
            use_cache=False,
            logits_to_keep=keep,
            ctx=context,
        )
        logits: Tensor = out.logits[0]
        return logits


def fork_rows(cache: Cache, rows: Rows, first: int, source: Sequence[int]) -> None:
    """Rows from `first` on take the cache of the rows `source`."""
    target = range(first, first + len(source))
    cache.fork(source, target, rows.length[target].tolist())


def right_aligned(chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and positions [B, longest], padded on the left: every row's newest token is in the last column."""
    width = max(chunk.size for chunk in chunks)
    ids = np.zeros((len(chunks), width), np.int64)
    position = np.full((len(chunks), width), -1)
    for row, chunk in enumerate(chunks):
        ids[row, width - chunk.size :] = chunk.ids()
        position[row, width - chunk.size :] = np.arange(chunk.start, chunk.stop)
    return ids, position
