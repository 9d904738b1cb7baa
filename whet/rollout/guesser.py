"""The EAGLE drafter in the engine: the target's hidden states are kept in pages, and drafts are made over them.

The engine makes a `Guesser` where it is given an `EagleHead`; its rows are the engine's, in order. Two more layers of
the cache hold what it needs, under the rows' own table: the target's last hidden state of every cached token, written
as it is computed, and the drafter's keys and values. So forks, moves and preemption need nothing here, and speculation
can begin in the middle of a rollout with one pass of one layer (`catch_up`). In captured graphs `round` is a part of
the step, and the host proposes nothing. `rows.paired` counts the tokens of each row that the drafter has read. The pair
at a prompt's last token belongs to each rollout but may lie in a page that they share: that can make a guess worse,
never a token wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from whet.draft.base import Drafter, RowView
from whet.draft.buffer import DataBuffer
from whet.draft.eagle import EagleHead
from whet.model.ops import to_device
from whet.model.packing import ranges
from whet.model.twin import KVShape
from whet.rollout.pages import Cache
from whet.rollout.rows import Rows

# Shapes: B rows, T tokens just fed, Q newest tokens of a row, hidden size `width`.
# `states`, the hidden states in pages: [pages + 1, 1, page, width].

AT_ONCE = 2**13  # hidden states that are gathered together, beside those that are kept


def extra_shapes(head: EagleHead) -> list[KVShape]:
    """What the cache needs beside the target's layers; the values of hidden states are unused."""
    target = head.target
    hidden = KVShape(1, target.hidden, 1, target.embedding.dtype)
    return [hidden, KVShape(target.kv_heads, target.dim, target.dim, head.dtype)]


class Guesser(Drafter):
    name = "eagle"

    def __init__(self, head: EagleHead, cache: Cache, rows: Rows) -> None:
        self.head = head
        self.cache = cache
        self.rows = rows
        self.device = rows.device
        self.states, self.dummies = cache.keys[-2], cache.values[-2]
        head.attach(cache.keys[-1], cache.values[-1], (cache.table.shape[1] + 1) * cache.page)

    def keep(self, hidden: Tensor, table: Tensor, row: Tensor, position: Tensor) -> None:
        """Store the hidden states [T, width] of tokens just fed, by the rows of `table`; works in a captured graph."""
        hidden = hidden.to(self.states.dtype)[:, None]
        self.head.ops.write_kv(
            hidden, hidden[..., :1], self.states, self.dummies, table, row, position
        )

    def round(
        self, ids: Tensor, state_length: Tensor, row: Tensor, table: Tensor, depth: int
    ) -> Tensor:
        """Drafts int32 [B, depth] for rows that have read all but their last pairs, whose tokens are ids [B, Q]. The
        last Q pairs are read again whether new or not, so that all rows have one shape. Works on the device alone."""
        batch, new = ids.shape
        place = (
            state_length[:, None] - new + torch.arange(new, dtype=torch.int32, device=ids.device)
        )
        real = (place >= 0) & (row[:, None] >= 0)
        position = torch.where(real, place, 0)
        at = torch.where(real, row[:, None], -1).flatten()
        page = table.gather(1, (position // self.cache.page).long())
        hidden = self.states[
            page.flatten().long(), 0, (position % self.cache.page).flatten().long()
        ]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=ids.device) * new
        length = state_length.clamp(min=0)
        feature = self.head.extend(
            hidden, ids.flatten(), position.flatten(), at, table, length, starts, new
        )
        return self.head.draft(feature.view(batch, new, -1)[:, -1], length, row, table, depth)

    def catch_up(self, running: int, depth: int) -> None:
        """Read in one pass all pairs that the next round of this depth would not read by itself."""
        rows = self.rows
        old = rows.paired[:running]
        new = rows.length[:running]
        count = new - old
        if count.max() <= depth + 1:
            return
        texts = [
            np.concatenate((f.prompt, rows.ids[i, : rows.count[i]]))
            for i, f in enumerate(rows.flights[:running])
        ]
        ids = np.concatenate(
            [text[a + 1 : b + 1] for text, a, b in zip(texts, old, new, strict=True)]
        )
        row = np.repeat(np.arange(running), count)
        position = np.repeat(old, count) + ranges(count)
        starts = np.concatenate(([0], np.cumsum(count)))
        where, token, place, at, table, length, start = to_device(
            self.device,
            self._places(row, position),
            ids,
            position,
            row,
            self.cache.table[:running],
            new,
            starts,
        )
        self.head.extend(
            self._gather(where), token, place, at, table, length, start, int(count.max())
        )
        rows.paired[:running] = new

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        running = len(rows)
        deepest = int(most.max(initial=0))
        if not deepest:
            return np.zeros((running, 0), np.int32), np.zeros(running, np.int32)
        self.catch_up(running, deepest)
        # The newest tokens of each row, prompt included, with zeros before the first.
        new = deepest + 1
        before = np.zeros(deepest, np.int32)
        ids = np.stack(
            [np.concatenate((before, row.prompt[-new:], row.ids[-new:]))[-new:] for row in rows]
        )
        length = self.rows.length[:running]
        last, states, row, table = to_device(
            self.device, ids, length, np.arange(running), self.cache.table[:running]
        )
        drafts: np.ndarray = self.round(last, states, row, table, deepest).cpu().numpy()
        self.rows.paired[:running] = length
        return drafts, most.astype(np.int32)

    def updated(self, version: int) -> None:
        self.head.refresh()

    def remember(self, ended: Sequence[int], buffer: DataBuffer, version: int) -> None:
        """Put the hidden states of ended rows into the buffer that the drafter learns from."""
        rows = self.rows
        trained = [row for row in ended if rows.flights[row].request.phase != "eval"]
        wanted = [row for row in trained if buffer.wants(version, int(rows.length[row]))]
        for row, hidden in zip(wanted, self.read(wanted, buffer.capacity), strict=True):
            prompt = rows.flights[row].prompt
            ids = np.concatenate((prompt, rows.ids[row, : rows.count[row]]))
            buffer.add(version, ids, hidden, prompt.size)

    def read(self, rows: Sequence[int], most: int) -> Iterator[Tensor]:
        """The hidden states [cached tokens, width] of each row, the first `most`. Several rows share one new tensor,
        AT_ONCE tokens or a row that has more. It is queued behind the steps under way and waits for none."""
        length = np.minimum(self.rows.length, most)
        part: list[int] = []
        for i, row in enumerate(rows):
            part.append(row)
            if i + 1 < len(rows) and length[[*part, rows[i + 1]]].sum() <= AT_ONCE:
                continue
            count = length[part]
            (where,) = to_device(self.device, self._places(np.repeat(part, count), ranges(count)))
            yield from self._gather(where).split(count.tolist())
            part = []

    def _places(self, row: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Index in all pages of the tokens at these positions."""
        page, offset = np.divmod(position, self.cache.page)
        return self.cache.table[row, page] * self.cache.page + offset

    def _gather(self, where: Tensor) -> Tensor:
        return self.states.view(-1, self.states.shape[-1]).index_select(0, where)
