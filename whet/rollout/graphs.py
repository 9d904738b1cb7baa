"""The step on CUDA: state on the device, decoding as one captured graph for each size of batch.

A decode step is forward, draw and bookkeeping in one graph replay; the host tells the device of rows only when one
came, went or got a page, and reads two numbers a row when the step is done. Where nothing stands against it the next
step is launched before these are read, so that the device does not wait for the host: rows that turn out to have ended
are left out of what it gives. Prompts are prefilled apart, packed without padding, by the same network. On a CPU
everything runs as plain calls, which is how the tests compare it with `EagerRunner`.

Graphs (`captures.py`) are made for sizes up to the number of slots. Rows beyond the batch are padding: length -1,
written to the page that is nobody's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from whet.model.kernels.accept import State, accept
from whet.model.kernels.race import race
from whet.rollout import device_rows as on_device
from whet.rollout.captures import Captures
from whet.rollout.device_rows import COUNT, HEAT, KEY0, KEY1, LENGTH, LIMIT, STOPS, TOKEN, DeviceRows
from whet.rollout.flight import Chunk, Flight
from whet.rollout.guesser import Guesser
from whet.rollout.pages import PagedCache
from whet.rollout.rows import Rows
from whet.rollout.runner import fork_rows
from whet.rollout.sampling import sample

MOST_DRAFTS = 47
"""Tokens a row may be ahead of the target: with the newest, 48 to verify."""
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


@dataclass(slots=True)
class Launch:
    """A decode step under way."""

    flights: list[Flight]
    """Whose rows it decodes, in order."""
    logits: Tensor
    drawn: Tensor
    """[2, B] on the host, once `done`."""
    done: torch.cuda.Event | None


class GraphRunner:
    def __init__(self, network: Network, cache: PagedCache, rows: Rows, guesser: Guesser | None = None) -> None:
        """guesser: the drafter that wants the hidden states, if there is one."""
        self.network, self.cache, self.rows, self.guesser = network, cache, rows, guesser
        if guesser is not None:
            guesser.runner = self
        self.device = rows.device
        self.sizes = buckets(len(rows.token))
        most = self.sizes[-1]
        width = cache.table.shape[1] + 1  # padded drafts lie beyond the last page
        self.device_rows = DeviceRows(most, width, self.device, cache.trash)
        self.numbers = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        self.places = torch.arange(MOST_DRAFTS + 1, dtype=torch.int32, device=self.device)
        self.drafts = torch.full((most, MOST_DRAFTS), -1, dtype=torch.int32, device=self.device)
        self.newest = torch.zeros(most, MOST_DRAFTS + 1, dtype=torch.int32, device=self.device)
        """Of each row, for the drafter."""
        self.verified = torch.zeros(2 * MOST_DRAFTS + 3, most, dtype=torch.int32, device=self.device)
        """How many of a row's draws count, the draws, and their log-probs as bits."""
        self.drawn = torch.zeros(2, most, dtype=torch.int32, device=self.device)
        """Token and, as bits, log-prob of each row."""
        on_gpu = self.device.type == "cuda"
        self._drawn = [torch.zeros(2, most, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._drafts = torch.zeros(most, MOST_DRAFTS + 1, dtype=torch.int32, pin_memory=on_gpu)
        self._verified = torch.zeros_like(self.verified, device="cpu", pin_memory=on_gpu)
        self._fed, self._advanced = _fast(on_device.fed, on_gpu), _fast(on_device.advanced, on_gpu)
        self._fed_with_drafts = _fast(on_device.fed_with_drafts, on_gpu)
        self._uploaded = STALE
        self._next: Launch | None = None
        """Launched before its turn."""
        self._launches = 0
        self.captures = Captures(self.device, lambda size, new: self._form(new)(size, new), self._at_rest)
        """By rows, and tokens that each feeds; drafts of so many where it is negative."""

    def advance(
        self, running: int, chunks: Sequence[Chunk], source: Sequence[int], ahead: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        drawn = []
        with torch.inference_mode(False), torch.no_grad():
            if running:
                drawn.append(self._decode(running, ahead=ahead and not chunks))
            else:
                self.forget()
            if chunks:
                with self.captures.meter.span():
                    drawn.append(self._prefill(running, chunks, source))
        if len(drawn) == 1:
            return drawn[0]
        tokens, log_probs = zip(*drawn, strict=True)
        return np.concatenate(tokens), np.concatenate(log_probs)

    def stats(self) -> dict[str, float]:
        return self.captures.stats()

    def forget(self) -> None:
        """What was launched ahead is of no use: the weights change, or its rows are gone."""
        self._next, self._uploaded = None, STALE

    # ---- decoding

    def _decode(self, running: int, ahead: bool) -> tuple[np.ndarray, np.ndarray]:
        """`ahead`: the next step may be launched; not where prompts are fed in this, as their rows would be missing."""
        order = None if self._next is None else _places(self.rows.flights[:running], self._next.flights)
        step = self._next
        if step is None or order is None:
            self._upload(running)
            step, order = self._launch(running), np.arange(running)
        self._next = None
        if ahead and self._may_run_ahead(running):
            if self._uploaded != (self.rows.edits, self.cache.edits):
                self.device_rows.arrange(order, self.cache.table)
                self._uploaded = (self.rows.edits, self.cache.edits)
            self._next = self._launch(running)
        return self._read(step, order)

    def _read(self, step: Launch, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if step.done is not None:
            step.done.synchronize()
        token, log_prob = step.drawn.numpy()[:, order]
        log_prob = log_prob.view(np.float32)
        picky = np.flatnonzero(self.rows.picky[: len(order)])
        if picky.size:  # only evaluations may be; their tokens are drawn outside of the graph
            self._uploaded = STALE
            logits = step.logits[self._tensor(order[picky], np.int64)]
            token[picky], log_prob[picky] = self._draw(logits, picky)
        return token, log_prob

    def _may_run_ahead(self, running: int) -> bool:
        """Whether the rows' next step needs nothing that the host learns from this one; gives them their pages."""
        rows = self.rows
        if rows.picky[:running].any():
            return False
        length = np.where(rows.count[:running] + 1 < rows.limit[:running], rows.length[:running] + 1, -1)
        if length.max() < 0 or self.cache.lacking(length) > self.cache.free:
            return False
        self.cache.grow(length)
        return True

    def _launch(self, running: int) -> Launch:
        drawn = self._drawn[self._launches % 2]
        self._launches += 1
        logits = self._replay(self._size(running), 1)
        drawn.copy_(self.drawn, non_blocking=True)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Launch(self.rows.flights[:running], logits, drawn, done)

    def verify(self, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows' newest tokens and their drafts [running, K], -1 for none, in one forward: draws [running, K + 1],
        their log-probs, and how many of each row's draws count. Pages for them must be there."""
        assert self._next is None, "a step under way knows nothing of drafts"
        (running, most), size = drafts.shape, self._size(len(drafts))
        self._drafts.numpy()[:running, :most] = drafts
        with torch.inference_mode(False), torch.no_grad():
            self._upload(running)
            self.drafts[:running, :most].copy_(self._drafts[:running, :most], non_blocking=True)
            self._replay(size, most + 1)
            self._verified.copy_(self.verified, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        counted, *lines = self._verified.numpy()[: 2 * most + 3, :running]
        token, bits = np.array(lines[: most + 1]).T, np.ascontiguousarray(np.array(lines[most + 1 :]).T)
        return token, bits.view(np.float32), counted.copy()

    def guess(self, ids: np.ndarray, depth: int) -> np.ndarray:
        """`Guesser.round` for rows 0..B-1, whose newest tokens are ids [B, depth + 1]."""
        assert self.guesser is not None and self._next is None
        running, size = len(ids), self._size(len(ids))
        self._drafts.numpy()[:running, : depth + 1] = ids
        with torch.inference_mode(False), torch.no_grad():
            self._upload(running)
            self.newest[:running, : depth + 1].copy_(self._drafts[:running, : depth + 1], non_blocking=True)
            self._replay(size, -depth)
            drafts: np.ndarray = self.drafts[:running, :depth].cpu().numpy()
        return drafts

    def _guess_step(self, size: int, new: int) -> Tensor:
        """Drafts of -new tokens for every row, left where `_verify_step` reads them."""
        assert self.guesser is not None
        length, table = self.device_rows.state[LENGTH, :size], self.device_rows.table[:size]
        row = torch.where(length >= 0, self.numbers[:size], -1)
        drafts = self.guesser.round(self.newest[:size, : 1 - new], length, row, table, -new)
        self.drafts[:size, :-new] = drafts
        return drafts

    def _form(self, new: int) -> Callable[[int, int], Tensor]:
        """What is captured under this number: a plain step, one that verifies, or (negative) one that drafts."""
        return self._step if new == 1 else self._verify_step if new > 1 else self._guess_step

    def prepare(self, running: int, new: int) -> None:
        self.captures.capture([(self._size(running), new)])

    @property
    def ahead(self) -> bool:
        return self._next is not None

    def _size(self, running: int) -> int:
        return next(size for size in self.sizes if size >= running)

    def _replay(self, size: int, new: int) -> Tensor:
        """`new` tokens a row: the newest and, if more, drafts. All sizes of plain steps are captured at once."""
        wanted = [(each, 1) for each in reversed(self.sizes)] if new == 1 else [(size, new)]
        return self.captures.replay(size, new, wanted)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """No row is anybody's, so that a step writes nothing but to the page that is nobody's."""
        state = self.device_rows.state
        before = state.clone()
        state[LENGTH] = -1
        yield
        state.copy_(before)

    def _upload(self, running: int) -> None:
        """Rows and tables as the host has them, if they are not what the device has."""
        if self._uploaded == (self.rows.edits, self.cache.edits):
            return
        self.device_rows.upload(self.rows, self.cache.table, running)
        self._uploaded = (self.rows.edits, self.cache.edits)

    def _step(self, size: int, new: int = 1) -> Tensor:
        """One token for rows 0..size-1, on the device alone; the logits it was drawn from."""
        state = self.device_rows.state[:, :size]
        row, position, length = self._fed(state, self.numbers[:size])
        table, starts = self.device_rows.table[:size], self.numbers[: size + 1]
        hidden = self.network.forward(state[TOKEN], position, row, table, length, starts, 1)
        if self.guesser is not None:
            self.guesser.keep(hidden, table, row, position)
        logits = self.network.logits(hidden)
        token, log_prob = race(logits, state[KEY0 : KEY1 + 1], state[COUNT], state[HEAT].view(torch.float32))
        state[: COUNT + 1], self.drawn[:, :size] = self._advanced(state, token, log_prob)
        return logits

    def _verify_step(self, size: int, new: int) -> Tensor:
        """As `_step`, with new - 1 drafts a row."""
        state, drafts = self.device_rows.state[:, :size], self.drafts[:size, : new - 1]
        ids, row, position, length = self._fed_with_drafts(state, drafts, self.numbers[:size])
        table, starts = self.device_rows.table[:size], self.numbers[: size + 1] * new
        hidden = self.network.forward(ids, position, row, table, length, starts, new)
        if self.guesser is not None:
            self.guesser.keep(hidden, table, row, position)
        logits = self.network.logits(hidden)
        keys = state[KEY0 : KEY1 + 1].repeat_interleave(new, 1)
        count = (state[COUNT][:, None] + self.places[:new]).flatten()
        heat = state[HEAT].view(torch.float32).repeat_interleave(new)
        token, log_prob = race(logits, keys, count, heat)
        rows = State(state[TOKEN], state[LENGTH], state[COUNT], state[LIMIT], state[STOPS:])
        accept(rows, drafts, token, log_prob, self.verified[: 2 * new + 1, :size])
        return logits

    # ---- prompts

    def _prefill(self, running: int, chunks: Sequence[Chunk], source: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of the chunks in one forward, packed; their forks draw from the same logits."""
        sizes, n = np.array([chunk.size for chunk in chunks]), len(chunks)
        ends = np.cumsum(sizes)
        position = self._tensor(np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks]), np.int32)
        row = self._tensor(np.repeat(np.arange(n), sizes), np.int32)
        table = self._tensor(self.cache.table[running : running + n], np.int32)
        hidden = self.network.forward(
            self._tensor(np.concatenate([chunk.ids() for chunk in chunks]), np.int32),
            position,
            row,
            table,
            self._tensor(np.array([chunk.stop for chunk in chunks]), np.int32),
            self._tensor(np.concatenate(([0], ends)), np.int32),
            int(sizes.max()),
        )
        if self.guesser is not None:
            self.guesser.keep(hidden, table, row, position)
        self._uploaded = STALE
        if not chunks[-1].last:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        logits = self.network.logits(hidden[self._tensor(ends - 1, np.int64)])
        if source:
            fork_rows(self.cache, self.rows, running + n, source)
            logits = logits[self._tensor(np.array([*range(n), *(row - running for row in source)]), np.int64)]
        return self._draw(logits, slice(running, self.rows.size))

    def _draw(self, logits: Tensor, part: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


def _fast(function: Callable[..., Any], on_gpu: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if on_gpu else function


def _places(flights: Sequence[Flight], among: Sequence[Flight]) -> np.ndarray | None:
    """Where each of `flights` is among others; None if one is not there."""
    if len(flights) == len(among) and all(map(operator.is_, flights, among)):
        return np.arange(len(flights))
    place = {id(flight): i for i, flight in enumerate(among)}
    found = [place.get(id(flight), -1) for flight in flights]
    return None if -1 in found else np.array(found)
