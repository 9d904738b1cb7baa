"""The step on CUDA: state on the device, decoding as one captured graph for each size of batch.

A decode step is forward, draw and bookkeeping in one graph replay; the host uploads rows only when one came, went or
got a page, and reads two numbers a row when the step is done. Prompts are prefilled apart, packed without padding, by
the same network. On a CPU everything runs as plain calls, which is how the tests compare it with `EagerRunner`.

Graphs are made for sizes up to the number of slots, the largest first, and share one memory pool: a smaller one
fits into what the largest took. Rows beyond the batch are padding: length -1, written to the page that is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from whet.model.kernels.race import race
from whet.rollout.flight import Flight
from whet.rollout.pages import PagedCache
from whet.rollout.rows import Rows
from whet.rollout.runner import fork_rows
from whet.rollout.sampling import sample

TOKEN, LENGTH, COUNT, KEY0, KEY1, HEAT = range(6)
"""Lines of the device's state: newest token, cached tokens, generated tokens, noise keys, temperature (its bits)."""
STALE = (-1, -1)
"""No number of edits: what the device has is not what the host has."""


class Network(Protocol):
    """A model over pages (`whet.model.fused`, `whet.model.network`). T new tokens: ids, positions and rows, all int32
    [T]; and of the rows they belong to the table, keys and queries, as `paged_attention` wants them."""

    def forward(
        self, ids: Tensor, position: Tensor, row: Tensor, table: Tensor, length: Tensor, starts: Tensor, most: int
    ) -> Tensor:
        """[T, width] after the last norm; writes K and V. `most`: new tokens of a row at most."""

    def logits(self, hidden: Tensor) -> Tensor: ...


def buckets(slots: int) -> list[int]:
    """Sizes of batches that get a graph. One alone is padded to two: compilers make a special case of one.

    >>> buckets(100)
    [2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    """
    sizes = [2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(320, 1025, 64), *range(1152, slots + 1, 128)]
    return [*(size for size in sizes if size < slots), max(2, slots)]


class GraphRunner:
    def __init__(self, network: Network, cache: PagedCache, rows: Rows) -> None:
        self.network, self.cache, self.rows = network, cache, rows
        self.device = rows.device
        self.sizes = buckets(len(rows.token))
        most, width = self.sizes[-1], cache.table.shape[1]
        self.state = torch.zeros(6, most, dtype=torch.int32, device=self.device)
        self.table = torch.zeros(most, width, dtype=torch.int32, device=self.device)
        self.drawn = torch.zeros(2, most, dtype=torch.int32, device=self.device)
        """Token and, as bits, log-prob of each row."""
        self.numbers = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        pinned = self.device.type == "cuda"
        self._state = torch.zeros(6, most, dtype=torch.int32, pin_memory=pinned)
        self._table = torch.zeros(most, width, dtype=torch.int32, pin_memory=pinned)
        self._drawn = torch.zeros(2, most, dtype=torch.int32, pin_memory=pinned)
        self._host = self._drawn.numpy()
        self._uploaded = STALE
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._bytes = 0

    def advance(self, running: int, leaders: Sequence[Flight], source: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        drawn = []
        with torch.inference_mode(False), torch.no_grad():
            if running:
                drawn.append(self._decode(running))
            if leaders:
                drawn.append(self._prefill(running, leaders, source))
        if len(drawn) == 1:
            return drawn[0]
        tokens, log_probs = zip(*drawn, strict=True)
        return np.concatenate(tokens), np.concatenate(log_probs)

    def stats(self) -> dict[str, float]:
        return {"rollout/graphs": float(len(self._graphs)), "rollout/graph_bytes": float(self._bytes)}

    # ---- decoding

    def _decode(self, running: int) -> tuple[np.ndarray, np.ndarray]:
        self._upload(running)
        logits = self._replay(next(size for size in self.sizes if size >= running))
        if self.rows.picky[:running].any():  # only evaluations may be; their tokens are drawn outside of the graph
            self._uploaded = STALE
            return self._draw(logits[:running], slice(0, running))
        self._drawn.copy_(self.drawn, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self._host[0, :running].copy(), self._host[1, :running].view(np.float32).copy()

    def _replay(self, size: int) -> Tensor:
        if self.device.type != "cuda":
            return self._step(size)
        if not self._graphs:
            state = self.state.clone()
            self._capture()
            self.state.copy_(state)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits

    def _upload(self, running: int) -> None:
        """Rows and tables as the host has them, if they are not what the device has."""
        rows = self.rows
        if self._uploaded == (rows.edits, self.cache.edits):
            return
        state = self._state.numpy()
        state[LENGTH] = -1
        for line, column in ((TOKEN, rows.token), (LENGTH, rows.length), (COUNT, rows.count)):
            state[line, :running] = column[:running]
        state[KEY0 : KEY1 + 1, :running] = rows.keys[:, :running]
        state[HEAT, :running] = rows.temperature[:running].astype(np.float32).view(np.int32)
        self._table.numpy()[:running] = self.cache.table[:running]
        self.state.copy_(self._state, non_blocking=True)
        self.table.copy_(self._table, non_blocking=True)
        self._uploaded = (rows.edits, self.cache.edits)

    def _step(self, size: int) -> Tensor:
        """One token for rows 0..size-1, on the device alone; the logits it was drawn from."""
        state = self.state[:, :size]
        active = (state[LENGTH] >= 0).to(torch.int32)
        row = self.numbers[:size] * active + (active - 1)  # -1 for padding
        hidden = self.network.forward(
            state[TOKEN],
            state[LENGTH] * active,
            row,
            self.table[:size],
            state[LENGTH] + 1,
            self.numbers[: size + 1],
            1,
        )
        logits = self.network.logits(hidden)
        token, log_prob = race(logits, state[KEY0 : KEY1 + 1], state[COUNT], state[HEAT].view(torch.float32))
        self.drawn[0, :size] = token
        self.drawn[1, :size] = log_prob.view(torch.int32)
        state[TOKEN] = token
        state[LENGTH : COUNT + 1] += active
        return logits

    def _capture(self) -> None:
        """Every size, the largest first; each is run before, so that no kernel is compiled within a capture."""
        self.state[LENGTH] = -1
        torch.cuda.empty_cache()  # as each capture does: what is freed meanwhile must not be set off against graphs
        before = torch.cuda.memory_reserved(self.device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for size in reversed(self.sizes):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._step(size)
            self._graphs[size] = (graph, logits)
        self._bytes = torch.cuda.memory_reserved(self.device) - before

    # ---- prompts

    def _prefill(self, running: int, leaders: Sequence[Flight], source: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """All tokens of the leaders in one forward, packed; their forks draw from the same logits."""
        known = np.array([f.known for f in leaders])
        ids = np.concatenate([part for f in leaders for part in (f.prompt, f.trace.ids)])
        ends = np.cumsum(known)
        position = np.arange(ids.size) - np.repeat(ends - known, known)
        hidden = self.network.forward(
            self._tensor(ids, np.int32),
            self._tensor(position, np.int32),
            self._tensor(np.repeat(np.arange(known.size), known), np.int32),
            self._tensor(self.cache.table[running : running + known.size], np.int32),
            self._tensor(known, np.int32),
            self._tensor(np.concatenate(([0], ends)), np.int32),
            int(known.max()),
        )
        logits = self.network.logits(hidden[self._tensor(ends - 1, np.int64)])
        if source:
            fork_rows(self.cache, self.rows, running + known.size, source)
            own = np.arange(known.size)
            logits = logits[self._tensor(np.concatenate((own, np.array(source) - running)), np.int64)]
        self._uploaded = STALE
        return self._draw(logits, slice(running, self.rows.size))

    def _draw(self, logits: Tensor, part: slice) -> tuple[np.ndarray, np.ndarray]:
        """A token for each row of `part` by the host's columns."""
        rows = self.rows
        if rows.picky[part].any():
            token, log_prob = sample(logits, rows.draws_of(part), self._tensor(rows.count[part], np.int32))
        else:
            heat = self._tensor(rows.temperature[part], np.float32)
            token, log_prob = race(
                logits, self._tensor(rows.keys[:, part], np.int32), self._tensor(rows.count[part], np.int32), heat
            )
        return token.cpu().numpy(), log_prob.cpu().numpy()

    def _tensor(self, column: np.ndarray, dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column, dtype)).to(self.device)
