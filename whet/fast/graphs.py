"""The step on CUDA: state on the device, decoding as one captured graph for each size of batch.

A decode step is forward, draw and bookkeeping in one graph replay; the host tells the device of rows only when one
came, went or got a page, and reads two numbers a row when the step is done. Where nothing stands against it the next
steps are launched before these are read, a few at once, so that the device does not wait for the host: the device ends
rows by itself, and what it draws for them after that is left out. Prompts are prefilled apart (`prefill.py`), by the
same network. On a CPU everything runs as plain calls, which is how the tests compare it with `EagerRunner`. A
step that speculates is two replays, the drafter's (`lanes.py`, `guesser.py`) and the target's, and several numbers a
row.

Graphs (`captures.py`) are made for sizes up to the number of slots. Rows beyond the batch are padding: length -1,
written to the page that is nobody's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from whet.draft.base import OFF, Arm
from whet.draft.speculation import Speculation
from whet.fast import lanes as on_device
from whet.fast.fused import KERNELS, Network, graphs_lack, network_of
from whet.fast.kernels.decode import State, accept, race
from whet.fast.lanes import COUNT, HEAT, KEY0, KEY1, LANE, LENGTH, LIMIT, MOST, STOPS, TOKEN, DeviceRows, Lanes
from whet.fast.pool import Captures, Key
from whet.model.ops import to_device
from whet.model.twin import GRAPHED, PAGE, KVShape
from whet.rollout.guesser import Guesser, extra_shapes
from whet.rollout.pages import Cache, PagedCache
from whet.rollout.rows import Chunk, Flight, Rows, sample
from whet.rollout.runner import Drawn, burst, fork_rows, joined, single

# ---- prefill
#
# The forward over tokens of prompts: a graph where they are few, plain calls where they are many.
#
# Every launch takes the host its time, and a forward is hundreds: with a small model more than a thousand tokens take
# the device, while the rows that run wait. So waves of up to 2,048 tokens are padded to one of a few sizes, each
# captured once. Padding is of no row: it writes to the page of no row, and what is computed of it is left out. Used by
# `graphs.py`, which draws.


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
        news = to_device(self.device, *fed(chunks, table, tokens, ROWS, self.width))
        self._fed.tokens[:, :tokens].copy_(news[0])
        for there, new in zip(self._fed[1:], news[1:], strict=True):
            there.copy_(new)

    def step(self, tokens: int, most: int) -> Tensor:
        """[tokens, width] after the last norm, of what was told."""
        return self._forward(self._fed._replace(tokens=self._fed.tokens[:, :tokens]), most)

    def plain(self, chunks: Sequence[Chunk], table: np.ndarray) -> Tensor:
        """The same at once, without padding."""
        sizes = [chunk.size for chunk in chunks]
        given = to_device(self.device, *fed(chunks, table, sum(sizes), len(chunks), table.shape[1]))
        return self._forward(Fed(*given), max(sizes))

    def _forward(self, given: Fed, most: int) -> Tensor:
        ids, position, row = given.tokens
        hidden = self.network.forward(ids, position, row, *given[1:], most)
        if self.guesser is not None:
            self.guesser.keep(hidden, given.table, row, position)
        return hidden


MOST_DRAFTS = 47
"""Tokens a row may be ahead of the target: with the newest, 48 to verify."""
BURST = 4
"""Steps that are launched together ahead of their turn: what the host does for each takes it longer than a small model
takes for its step. Rows that end meanwhile stay in the batch, doing nothing, for so many steps more."""
STALE = (-1, -1)
"""No number of edits: what the device has is not what the host has."""


def buckets(slots: int) -> list[int]:
    """Sizes of batches that get a graph. One alone is padded to two: compilers make a special case of one.

    >>> buckets(100)
    [2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    """
    sizes = [2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(320, 1025, 64), *range(1152, slots + 1, 128)]
    return [*(size for size in sizes if size < slots), max(2, slots)]


@dataclass(slots=True)
class Launch:
    """Decode steps under way."""

    arm: Arm
    logits: Tensor
    """Of the last of them."""
    drawn: Tensor
    """[steps, lines, rows] on the host, once `done`."""
    done: torch.cuda.Event | None


class GraphRunners:
    """The `RunnerFactory` of this file: `whet.assembly` hands one to the engine on CUDA."""

    page = PAGE

    def lack(self, shapes: Iterable[KVShape], device: torch.device) -> str | None:
        return graphs_lack(shapes, device)

    def make(
        self,
        twin: PreTrainedModel,
        cache: Cache,
        rows: Rows,
        guesser: Guesser | None,
        speculation: Speculation | None,
    ) -> GraphRunner:
        assert isinstance(cache, PagedCache), "graphs read pages"
        layers = len(cache.keys) - (0 if guesser is None else len(extra_shapes(guesser.head)))
        network = network_of(twin, cache.keys[:layers], cache.values[:layers])
        lanes = Lanes(*rows.ids.shape, rows.device) if speculation is not None else None
        if guesser is not None:
            guesser.head.ops = KERNELS  # a captured step must not read lengths on the host
        return GraphRunner(network, cache, rows, guesser, lanes, speculation)


class GraphRunner:
    packed = True

    def __init__(
        self,
        network: Network,
        cache: PagedCache,
        rows: Rows,
        guesser: Guesser | None = None,
        lanes: Lanes | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """lanes: texts on the device, from which drafts are made there; guesser: the drafter that wants the hidden
        states, if there is one; speculation: whose guards are told of a drafter that fails here."""
        self.network, self.cache, self.rows, self.guesser, self.lanes = network, cache, rows, guesser, lanes
        self.own = frozenset() if lanes is None else frozenset({"ngram", "suffix"})
        if guesser is not None and lanes is not None:
            self.own |= {guesser.name}
        self.guards = speculation.drafters if speculation is not None else {}
        self.device = rows.device
        self.wave = max(1, len(rows.token) // 16)
        self.sizes = buckets(len(rows.token))
        most = self.sizes[-1]
        width = cache.table.shape[1] + 1  # padded drafts lie beyond the last page
        self.device_rows = DeviceRows(most, width, self.device, cache.trash)
        self.prefill = Prefill(network, guesser, width, self.device)
        self.numbers = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        self.places = torch.arange(MOST_DRAFTS + 1, dtype=torch.int32, device=self.device)
        self.drafts = torch.full((most, MOST_DRAFTS), -1, dtype=torch.int32, device=self.device)
        self.drawn = torch.zeros(2 * MOST_DRAFTS + 4, most, dtype=torch.int32, device=self.device)
        """What `accept` says of each row."""
        on_gpu = self.device.type == "cuda"
        self._drawn = [torch.zeros(BURST, *self.drawn.shape, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._drafts = torch.zeros(most, MOST_DRAFTS, dtype=torch.int32, pin_memory=on_gpu)
        self._fed, self._fed_with_drafts = _fast(on_device.fed, on_gpu), _fast(on_device.fed_with_drafts, on_gpu)
        self._uploaded = STALE
        self._next: Launch | None = None
        """Launched before its turn."""
        self._launches = 0
        self._wishes = self._told = 0
        """How often the rows' wishes for drafts changed, and were told."""
        self.captures = Captures(self.device, self._captured, self._at_rest)

    def advance(
        self, running: int, chunks: Sequence[Chunk], source: Sequence[int], arm: Arm = OFF, ahead: bool = True
    ) -> Drawn:
        drawn = []
        with torch.inference_mode(False), torch.no_grad():
            if running:
                drawn.append(self._decode(running, arm, ahead=ahead and not chunks))
            else:
                self.forget()
            if chunks:
                with self.captures.meter.span():
                    drawn.append(single(*self._prefill(running, chunks, source)))
        return drawn[0] if len(drawn) == 1 else joined(*drawn)

    def go_ahead(self, running: int, arm: Arm) -> None:
        if self._next is None:
            with torch.inference_mode(False), torch.no_grad():
                arm = self._ready(running, arm)
                if steps := self._steps_ahead(running, arm):
                    self._upload(running)
                    self._next = self._launch(running, arm, steps)

    def enter(self, first: int) -> None:
        if self.lanes is not None and first < self.rows.size:
            self.rows.lane[first : self.rows.size] = self.lanes.enter(self.rows.flights[first:])

    def leave(self, flight: Flight) -> None:
        if self.lanes is not None:
            self.lanes.leave(flight)

    def stats(self) -> dict[str, float]:
        return self.captures.stats()

    def forget(self) -> None:
        """What was launched ahead is of no use: the weights change, or its rows are gone."""
        self._next, self._uploaded = None, STALE

    def budgeted(self) -> None:
        self._wishes += 1

    # ---- decoding

    def _decode(self, running: int, arm: Arm, ahead: bool) -> Drawn:
        """`ahead`: the next steps may be launched; not where prompts are fed in this, as their rows would be missing.
        What is waited for at once is one step: tokens come soon, and the host has time while the next ones run."""
        step, order = self._next, self.rows.launched[:running].copy()
        if step is None or order.min() < 0:
            arm = self._ready(running, arm)
            self._upload(running)
            step, order = self._launch(running, arm), np.arange(running)
        self._next = None
        if ahead and (steps := self._steps_ahead(running, arm, step)):
            self._arrange(order)
            self._next = self._launch(running, arm, steps)
        return self._read(step, order)

    def _arrange(self, order: np.ndarray) -> None:
        """Rows as the host has them in the order it has them now, however far the device has come with them."""
        if self._uploaded[0] != self.rows.edits:
            self.device_rows.arrange(order)
        if self._uploaded != (self.rows.edits, self.cache.edits):
            self.device_rows.upload_table(self.cache.table, len(order))
        self._uploaded = (self.rows.edits, self.cache.edits)

    def _ready(self, running: int, arm: Arm) -> Arm:
        """The arm, or OFF where it lacks pages; a drafter that has missed tokens reads them."""
        rows = self.rows
        drafts = np.clip(rows.limit[:running] - rows.count[:running] - 1, 0, arm.depth)
        if self.cache.lacking(rows.length[:running] + drafts) > self.cache.free:
            return OFF
        self.cache.grow(rows.length[:running] + drafts)
        if self.guesser is not None and arm.drafter == self.guesser.name:
            return arm if self._held(arm.drafter, self.guesser.catch_up, running, arm.depth) else OFF
        return arm

    def _steps_ahead(self, running: int, then: Arm, step: Launch | None = None) -> int:
        """How many of `then` may be launched, after the steps under way if there are any, of which the host needs to
        learn nothing; gives rows their pages."""
        rows, under_way, tokens = self.rows, 0, 0
        if rows.picky[:running].any():
            return 0
        if step is not None:
            arm, under_way = step.arm, len(step.drawn)
            tokens = under_way * arm.tokens
            reads = self.guesser is not None and then.drafter == self.guesser.name
            if reads and (arm.drafter != then.drafter or then.depth < arm.depth):
                return 0  # it may have to read more than it does by itself
        left = rows.limit[:running] - rows.count[:running]
        going = left > under_way
        most = min(BURST, int(left.max()) - under_way)
        for steps in (most, 1) if most > 1 else (most,):
            reach = tokens + steps * then.tokens - 1
            length = np.where(going, rows.length[:running] + np.minimum(reach, left - 1), -1)
            if steps > 0 and self.cache.lacking(length) <= self.cache.free:
                self.cache.grow(length)
                return steps
        return 0

    def _launch(self, running: int, arm: Arm, steps: int = 1) -> Launch:
        drawn = self._drawn[self._launches % 2][:steps, : 2 * arm.tokens + 2]
        self._launches += 1
        if self._told != self._wishes:
            self.device_rows.tell(MOST, self.rows.most[:running])
            self._told = self._wishes
        keys = self._ready_keys(self._size(running), arm)
        with self.captures.meter.span():
            for lines in drawn:
                logits = [self.captures.replay(key) for key in keys][-1]
                lines.copy_(self.drawn[: len(lines)], non_blocking=True)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        self.rows.launched[:running] = np.arange(running)
        return Launch(arm, logits, drawn, done)

    def _read(self, step: Launch, order: np.ndarray) -> Drawn:
        if step.done is not None:
            step.done.synchronize()
        lines, new = step.drawn.numpy()[:, :, order], step.arm.tokens
        token = np.ascontiguousarray(lines[:, 2 : 2 + new].swapaxes(1, 2))
        log_prob = np.ascontiguousarray(lines[:, 2 + new :].swapaxes(1, 2)).view(np.float32)
        picky = np.flatnonzero(self.rows.picky[: len(order)])
        if picky.size:  # only evaluations may be, step by step; their tokens are drawn outside of the graph
            self._uploaded = STALE
            logits = step.logits[self._tensor(order[picky], np.int64)]
            token[0, picky, 0], log_prob[0, picky, 0] = self._draw(logits, picky)
        counted = lines[:, 0]
        if self.guesser is not None and step.arm.drafter == self.guesser.name:
            self.rows.paired[: len(order)] = self.rows.length[: len(order)] + counted[:-1].sum(0)
        return burst(token, log_prob, counted, lines[:, 1], step.arm)

    def verify(self, drafts: np.ndarray) -> Drawn:
        assert self._next is None, "a step under way knows nothing of drafts"
        running, most = drafts.shape
        self._drafts.numpy()[:running, :most] = drafts
        with torch.inference_mode(False), torch.no_grad():
            self._upload(running)
            self.drafts[:running, :most].copy_(self._drafts[:running, :most], non_blocking=True)
            step = self._launch(running, Arm("", most))
        return self._read(step, np.arange(running))

    def prepare(self, running: int, arm: Arm) -> float:
        begin = time.perf_counter()
        if arm.depth:
            self.captures.capture(self._keys(self._size(running), arm))
        return time.perf_counter() - begin

    @property
    def ahead(self) -> bool:
        return self._next is not None

    def _size(self, running: int) -> int:
        return next(size for size in self.sizes if size >= running)

    def begin(self, served: Sequence[tuple[int, Arm]] = ()) -> None:
        """Prompts and plain steps of every size, the largest first: what a run is sure to want. And those that
        speculate with so many rows, which would else be captured one by one while a batch waits."""
        self.captures.capture([*self.prefill.keys, *((size, 1, "") for size in reversed(self.sizes))])
        largest = sorted(served, key=lambda pair: -pair[0] * pair[1].tokens)
        self.captures.capture(list(dict.fromkeys(key for size, arm in largest for key in self._keys(size, arm))))

    def _keys(self, size: int, arm: Arm) -> list[Key]:
        """The graphs of a step: the target's, which all drafters share, and before it the drafter's, if it is ours."""
        target = (size, arm.tokens, "")
        return [(size, arm.depth, arm.drafter), target] if arm.drafter in self.own else [target]

    def _ready_keys(self, size: int, arm: Arm) -> list[Key]:
        keys = self._keys(size, arm)
        if not all(key in self.captures.graphs for key in keys):
            self.begin()
            self.captures.capture(keys)
        return keys

    def _captured(self, size: int, tokens: int, drafter: str) -> Tensor:
        if drafter == PROMPTS:
            return self.prefill.step(size, tokens)
        if not drafter:
            return self._step(size, tokens)
        drafts = self.drafts[:size, :tokens]
        if not self._held(drafter, self._draft, size, tokens, drafter):
            drafts.fill_(-1)  # it has no idea: the target's step is a plain one, and so is what is captured of this
        return drafts

    def _held(self, drafter: str, work: Callable[..., None], *args: Any) -> bool:
        """Whether the drafter's part was done; what it raises retires it. Not from within a capture, which leaves
        CUDA's state broken: most of what can fail there fails in the calls before it."""
        guard = self.guards.get(drafter)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if guard is None or (capturing and not guard.retired):
            work(*args)
            return True
        return guard.hold(work, *args)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """No row is anybody's, so that a step writes nothing but to the page that is nobody's."""
        state = self.device_rows.state
        before = state.clone()
        state[LENGTH] = -1
        self.prefill.rest()
        yield
        state.copy_(before)

    def _upload(self, running: int) -> None:
        """Rows and tables as the host has them, if they are not what the device has."""
        if self._uploaded == (self.rows.edits, self.cache.edits):
            return
        self.device_rows.upload(self.rows, self.cache.table, running)
        if self.lanes is not None:
            self.lanes.newest(self.device_rows.state[:, :running])
        self._uploaded = (self.rows.edits, self.cache.edits)

    def _step(self, size: int, new: int) -> Tensor:
        """The newest token of rows 0..size-1 and new - 1 drafts, on the device alone: draws, and the logits they are
        drawn from."""
        state, table = self.device_rows.state[:, :size], self.device_rows.table[:size]
        drafts = self.drafts[:size, : new - 1]
        keys, count, heat = state[KEY0 : KEY1 + 1], state[COUNT], state[HEAT].view(torch.float32)
        if new == 1:
            ids, (row, position, length) = state[TOKEN], self._fed(state, self.numbers[:size])
            starts = self.numbers[: size + 1]
        else:
            ids, row, position, length = self._fed_with_drafts(state, drafts, self.numbers[:size])
            starts = self.numbers[: size + 1] * new
            keys, heat = keys.repeat_interleave(new, 1), heat.repeat_interleave(new)
            count = (count[:, None] + self.places[:new]).flatten()
        hidden = self.network.forward(ids, position, row, table, length, starts, new)
        if self.guesser is not None:
            self.guesser.keep(hidden, table, row, position)
        logits = self.network.logits(hidden)
        token, log_prob = race(logits, keys, count, heat)
        rows = State(state[TOKEN], state[LENGTH], state[COUNT], state[LIMIT], state[STOPS:])
        texts = None if self.lanes is None else self.lanes.texts(state[LANE])
        accept(rows, drafts, token, log_prob, self.drawn[: 2 * new + 2, :size], texts)
        return logits

    def _draft(self, size: int, depth: int, drafter: str) -> None:
        """Guesses for rows 0..size-1, left where `_step` reads them."""
        assert self.lanes is not None
        state, drafts = self.device_rows.state[:, :size], self.drafts[:size, :depth]
        length = state[LENGTH]
        most = torch.minimum(state[MOST], state[LIMIT] - state[COUNT] - 1)
        if self.guesser is not None and drafter == self.guesser.name:
            row = torch.where(length >= 0, self.numbers[:size], -1)
            newest = self.lanes.last(state[LANE], length, depth + 1)
            guesses = self.guesser.round(newest, length, row, self.device_rows.table[:size], depth)
            drafts.copy_(torch.where(self.places[:depth] < most[:, None], guesses, -1))
        else:
            lane = torch.where(length >= 0, state[LANE], -1)
            self.lanes.lookup(lane, most, drafts, siblings=drafter == "suffix")

    # ---- prompts

    def _prefill(self, running: int, chunks: Sequence[Chunk], source: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of the chunks in one forward, packed; their forks draw from the same logits."""
        n, table = len(chunks), self.cache.table[running : running + len(chunks)]
        if key := self.prefill.key(chunks):
            self.captures.capture([key])
            self.prefill.tell(chunks, table, key[0])
            hidden = self.captures.replay(key)
        else:
            hidden = self.prefill.plain(chunks, table)
        self._uploaded = STALE
        if not chunks[-1].last:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        (last,) = to_device(self.device, np.cumsum([chunk.size for chunk in chunks]) - 1)
        logits = self.network.logits(hidden[last])
        if source:
            fork_rows(self.cache, self.rows, running + n, source)
            (asked,) = to_device(self.device, np.array([*range(n), *(row - running for row in source)]))
            logits = logits[asked]
        return self._draw(logits, slice(running, self.rows.size))

    def _draw(self, logits: Tensor, part: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A token for each row of `part` by the host's columns."""
        rows = self.rows
        if rows.picky[part].any():
            token, log_prob = sample(logits, rows.draws_of(part), self._tensor(rows.count[part], np.int32))
        else:
            bits = rows.temperature[part].astype(np.float32).view(np.int32)
            keys, count, heat = to_device(self.device, rows.keys[:, part], rows.count[part], bits)
            token, log_prob = race(logits, keys, count, heat.view(torch.float32))
        return token.cpu().numpy(), log_prob.cpu().numpy()

    def _tensor(self, column: np.ndarray, dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column, dtype)).to(self.device)


def _fast(function: Callable[..., Any], on_gpu: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if on_gpu else function
