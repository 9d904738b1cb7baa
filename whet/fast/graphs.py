"""The rollout step on CUDA: state on the device, decoding as one captured graph for each size of batch.

`whet.build` hands `GraphRunners` to the engine, which calls the `GraphRunner` it makes in place of `EagerRunner`. A
decode step is forward, draw and bookkeeping in one graph replay; a step that speculates is two replays, the drafter's
and the target's. The device ends rows by itself, so the next steps can be launched before the host has read these; what
is drawn for a row after its end is left out. Graphs (`Captures`) are made for sizes up to the number of slots;
rows beyond the batch are padding, with length -1. On a CPU everything runs as plain calls, which the tests compare.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from whet.draft.base import OFF, DraftArm
from whet.draft.speculation import Speculation
from whet.fast import lanes as on_device
from whet.fast.fused import KERNELS, Feed, FusedStack, PlainNetwork, graphs_lack, network_of
from whet.fast.kernels.decode import State, Texts, accept, race
from whet.fast.lanes import (
    COUNT,
    HEAT,
    KEY0,
    KEY1,
    LANE,
    LENGTH,
    LIMIT,
    STOPS,
    TOKEN,
    DeviceRows,
    Lanes,
)
from whet.model.ops import DeviceMeter, to_device
from whet.model.twin import GRAPHED, PAGE, KVShape
from whet.rollout.guesser import Guesser, extra_shapes
from whet.rollout.pages import Cache, PagedCache
from whet.rollout.rows import Chunk, Flight, Rows, sample
from whet.rollout.runner import Drawn, Runner, fork_rows, single

# Shapes: B rows, N prompts of a wave, T tokens, K drafts per row, V vocabulary.
#
# A steady stretch of decoding, four steps at a time. The device has the next burst before the host reads the last one,
# so it never waits; the host records tokens, retires rows and admits new ones while the device computes:
#
#   host    | launch 1 | launch 2-5 | read 1, record | engine work   | launch 6-9 | read 2-5, record | engine work ...
#   device             | step 1     | step 2 | step 3 | step 4 | step 5            | step 6 | step 7 | ...
#
# A wave of prompts, a row that needs the host's own sampler, or too few free pages end it: the host reads what is under
# way, changes the rows, uploads them (`_upload`), and begins again with a single step.

PROMPTS = "prompts"  # stands in a graph's key where a drafter's name would
SIZES = (128, 256, 512, 1024, GRAPHED)  # tokens that prompt graphs take
ROWS = 64  # prompts that a graph takes at most
# tokens of one prompt at most: attention starts programs for so many in every row, which end if
# idle
LONGEST = 512
MOST_DRAFTS = 47  # tokens that a row may be ahead of the target: with the newest, 48 to verify
# Steps that are launched together ahead of their turn, by the number of layers: while the device computes LAYERS layers
# the host has time for what it does between. Rows that end meanwhile stay in the batch, idle, for so many steps more.
LAYERS = 48
FEWEST = 4
MOST = 8
STALE = (-1, -1)  # no number of edits: what the device has is not what the host has

Pool = tuple[int, int]  # what `torch.cuda.graph_pool_handle` gives
# rows, tokens that each feeds, and ""; or rows, tokens drafted for each, and the drafter
Key = tuple[int, int, str]
Step = Callable[[int, int, str], Tensor]


# ---- steps captured as CUDA graphs in one memory pool, and what such pools take from the device


def pool_bytes(pool: Pool) -> int:
    """Bytes that a pool has taken; they never shrink while one of its graphs lives. (What torch has reserved in all
    says little: a capture gives back memory that lay unused.)"""
    segments = torch.cuda.memory_snapshot(pool)
    return sum(int(s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))


def driver_bytes(device: torch.device) -> int:
    """Device memory in use beside torch's allocator: the context, kernels, graphs as the driver keeps them; and what
    other processes take, so that a difference means something only where there are none."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what runs here. Meanwhile Python does not look for garbage, which may hold an older graph or pinned
    memory: freeing that within a capture makes it fail."""
    looks = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if looks:
            gc.enable()


class Captures:
    def __init__(
        self, device: torch.device, step: Step, at_rest: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """step(*key): what is captured; at_rest: a context in which a step changes no row."""
        self.device = device
        self.step = step
        self.at_rest = at_rest
        # Each graph with the tensor that its step gave, which every replay writes anew.
        self.graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # what the pool grew by for each: little but for the largest
        self.bytes: dict[Key, int] = {}
        self.driver_bytes = 0  # what the driver took for all of them, beside the pool
        self.meter = DeviceMeter(device)
        self._pool: Any = None  # all graphs share it; it lives as long as one of them

    def replay(self, key: Key) -> Tensor:
        if self.device.type != "cuda":
            return self.step(*key)
        graph, out = self.graphs[key]
        graph.replay()
        return out

    def capture(self, wanted: Sequence[Key]) -> None:
        """Captures these steps, where they have no graph yet; nothing on a CPU. List the largest first: a smaller graph
        fits into the memory of a larger one. Each step is run before, so that no kernel is compiled within a capture. A
        failed capture leaves CUDA's state broken: it is not caught."""
        wanted = [key for key in wanted if key not in self.graphs]
        if self.device.type != "cuda" or not wanted:
            return
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        with torch.inference_mode(False), torch.no_grad(), self.at_rest():
            for key in wanted:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        self.step(*key)
                torch.cuda.current_stream().wait_stream(stream)
                before = driver_bytes(self.device)
                graph = torch.cuda.CUDAGraph()
                with capturing(graph, pool):
                    out = self.step(*key)
                self.graphs[key] = (graph, out)
                self.bytes[key] = pool_bytes(pool) - sum(self.bytes.values())
                self.driver_bytes += driver_bytes(self.device) - before

    def stats(self) -> dict[str, float]:
        """How many graphs there are and their bytes in all; and how long the GPU worked since the last call."""
        out = {
            "rollout/graphs": float(len(self.graphs)),
            "rollout/graph_bytes": float(sum(self.bytes.values())),
            "rollout/graph_driver_bytes": float(self.driver_bytes),
        }
        seconds = self.meter.seconds()
        return out if seconds is None else {**out, "rollout/gpu_seconds": seconds}


# ---- prompts: a graph where their tokens are few, plain calls where they are many
#
# Every launch takes the host its time, and a forward is hundreds: with a small model that is more than a thousand
# tokens take the device, while running rows wait. So waves of up to 2,048 tokens are padded to one of a few sizes, each
# captured once. Padding has row -1: it is written to the spare page, and its results are left out.


def fed(
    chunks: Sequence[Chunk], table: np.ndarray, tokens: int, rows: int, width: int
) -> tuple[np.ndarray, ...]:
    """The chunks, padded to so many tokens, rows, and pages per row: by tokens of row -1 and empty rows.

    Arrays of a `Feed`: ids, positions and rows as one [3, tokens], then table, lengths and starts.
    """
    sizes = np.array([chunk.size for chunk in chunks])
    real = int(sizes.sum())
    n = len(chunks)
    lines = np.zeros((3, tokens), np.int32)
    tables = np.zeros((rows, width), np.int32)
    lines[0, :real] = np.concatenate([chunk.ids() for chunk in chunks])
    lines[1, :real] = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
    lines[2] = -1
    lines[2, :real] = np.repeat(np.arange(n), sizes)
    tables[:n, : table.shape[1]] = table
    length = np.zeros(rows, np.int32)
    starts = np.full(rows + 1, real, np.int32)
    length[:n] = [chunk.stop for chunk in chunks]
    starts[: n + 1] = [0, *np.cumsum(sizes)]
    return lines, tables, length, starts


class Prefill:
    def __init__(
        self,
        network: FusedStack | PlainNetwork,
        guesser: Guesser | None,
        width: int,
        device: torch.device,
    ) -> None:
        """width: pages per row; guesser: the drafter that reads the hidden states, if there is one."""
        self.network = network
        self.guesser = guesser
        self.device = device
        self.width = width
        shapes = ((3, SIZES[-1]), (ROWS, width), (ROWS,), (ROWS + 1,))
        # graphs read it
        self._fed = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
        # the largest first
        self.keys: list[Key] = [(size, min(size, LONGEST), PROMPTS) for size in reversed(SIZES)]

    def key(self, chunks: Sequence[Chunk]) -> Key | None:
        """The key of the graph that serves these chunks; None where plain calls do."""
        tokens = sum(chunk.size for chunk in chunks)
        longest = max(chunk.size for chunk in chunks)
        if len(chunks) > ROWS:
            return None
        return next(
            (key for key in reversed(self.keys) if tokens <= key[0] and longest <= key[1]), None
        )

    def rest(self) -> None:
        """Makes `step` feed no row from now on."""
        self._fed[0][2] = -1
        self._fed[-1].zero_()

    def tell(self, chunks: Sequence[Chunk], table: np.ndarray, tokens: int) -> None:
        """Uploads what `step` feeds next: rows with the pages of `table`."""
        news = to_device(self.device, *fed(chunks, table, tokens, ROWS, self.width))
        for there, new in zip((self._fed[0][:, :tokens], *self._fed[1:]), news, strict=True):
            there.copy_(new)

    def step(self, tokens: int, most: int) -> Tensor:
        """Hidden states [tokens, width] after the last norm, of what `tell` uploaded."""
        return self._forward(self._fed[0][:, :tokens], *self._fed[1:], most=most)

    def plain(self, chunks: Sequence[Chunk], table: np.ndarray) -> Tensor:
        """The hidden states of these chunks at once, without padding and without a graph."""
        sizes = [chunk.size for chunk in chunks]
        given = to_device(self.device, *fed(chunks, table, sum(sizes), len(chunks), table.shape[1]))
        return self._forward(*given, most=max(sizes))

    def _forward(
        self, tokens: Tensor, table: Tensor, length: Tensor, starts: Tensor, *, most: int
    ) -> Tensor:
        ids, position, row = tokens
        hidden = self.network.forward(Feed(ids, position, row, table, length, starts, most))
        if self.guesser is not None:
            self.guesser.keep(hidden, table, row, position)
        return hidden


def buckets(slots: int) -> list[int]:
    """Sizes of batches that get a graph. A single row is padded to two: compilers make a special case of one.

    >>> buckets(100)
    [2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    """
    sizes = [
        2,
        4,
        8,
        16,
        24,
        32,
        48,
        *range(64, 257, 32),
        *range(320, 1025, 64),
        *range(1152, slots + 1, 128),
    ]
    return [*(size for size in sizes if size < slots), max(2, slots)]


def burst(
    token: np.ndarray,
    log_prob: np.ndarray,
    counted: np.ndarray,
    proposed: np.ndarray,
    arm: DraftArm,
) -> Drawn:
    """Join steps [S, B, W], of whose draws `counted` [S, B] count: what counts moves together.

    >>> token = np.array([[[1, 2]], [[3, 4]]])
    >>> burst(token, token, np.array([[1], [2]]), np.array([[1], [1]]), OFF).token
    array([[1, 3, 4, 0]])
    """
    steps, rows, width = token.shape
    if steps == 1 or width == 1:
        shape = (rows, steps * width)
        tokens = token.swapaxes(0, 1).reshape(shape)
        log_probs = log_prob.swapaxes(0, 1).reshape(shape)
        return Drawn(tokens, log_probs, counted, proposed, arm)
    packed = (
        np.zeros((rows, steps * width), token.dtype),
        np.zeros((rows, steps * width), log_prob.dtype),
    )
    step, row, place = np.nonzero(np.arange(width) < counted[:, :, None])
    at = (counted.cumsum(0) - counted)[step, row] + place
    packed[0][row, at], packed[1][row, at] = token[step, row, place], log_prob[step, row, place]
    return Drawn(*packed, counted, proposed, arm)


def joined(first: Drawn, second: Drawn) -> Drawn:
    """Rows one after the other, where the first may have drawn several tokens in several steps, the second one each."""
    wide = [(0, 0), (0, first.token.shape[1] - 1)]
    late = [(0, len(first.counted) - 1), (0, 0)]
    return Drawn(
        np.concatenate((first.token, np.pad(second.token, wide))),
        np.concatenate((first.log_prob, np.pad(second.log_prob, wide))),
        np.concatenate((first.counted, np.pad(second.counted, late)), 1),
        np.concatenate((first.proposed, np.pad(second.proposed, late)), 1),
        first.arm,
    )


@dataclass(slots=True)
class Launch:
    """Decode steps under way."""

    arm: DraftArm
    logits: Tensor  # those of the last step
    drawn: Tensor  # [steps, lines, rows] on the host, once `done`
    done: torch.cuda.Event | None


class GraphRunners:
    """What makes the runner of an engine: `whet.build` hands one to the engine on CUDA."""

    page = PAGE  # tokens per page of the cache that its runners read best

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


class GraphRunner(Runner):
    packed = True

    def __init__(
        self,
        network: FusedStack | PlainNetwork,
        cache: PagedCache,
        rows: Rows,
        guesser: Guesser | None,
        lanes: Lanes | None,
        speculation: Speculation | None,
    ) -> None:
        """guesser: the drafter that reads the hidden states, if there is one; lanes: texts on the device, from which
        drafts are made there; speculation: its guards retire a drafter that fails here."""
        self.network = network
        self.cache = cache
        self.rows = rows
        self.guesser = guesser
        self.lanes = lanes
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
        # by `accept`
        self.drawn = torch.zeros(2 * MOST_DRAFTS + 4, most, dtype=torch.int32, device=self.device)
        on_gpu = self.device.type == "cuda"
        self.burst = min(max(FEWEST, LAYERS // len(cache.keys)), MOST)
        shape = (self.burst, *self.drawn.shape)
        self._drawn = [torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._drafts = torch.zeros(most, MOST_DRAFTS, dtype=torch.int32, pin_memory=on_gpu)
        feeds: list[Callable[..., Any]] = [on_device.fed, on_device.fed_with_drafts]
        self._fed, self._fed_with_drafts = (
            torch.compile(f, dynamic=True) if on_gpu else f for f in feeds
        )
        self._uploaded = STALE  # the edits of rows and pages that the device has
        self._next: Launch | None = None  # launched before its turn
        self._launches = 0
        self.captures = Captures(self.device, self._captured, self._at_rest)

    def advance(
        self,
        running: int,
        chunks: Sequence[Chunk],
        source: Sequence[int],
        arm: DraftArm = OFF,
        ahead: bool = True,
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

    def go_ahead(self, running: int, arm: DraftArm) -> None:
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
        """Drops what was launched ahead: the weights change, or its rows are gone."""
        self._next = None
        self._uploaded = STALE

    # ---- decoding

    def _decode(self, running: int, arm: DraftArm, ahead: bool) -> Drawn:
        """`ahead`: the next steps may be launched; not where prompts are fed now, since their rows would be missing.
        Only one step is waited for at once: its tokens come soon, and the host has time while the next ones run."""
        step = self._next
        order = self.rows.launched[:running].copy()
        if step is None or order.min() < 0:
            arm = self._ready(running, arm)
            self._upload(running)
            step = self._launch(running, arm)
            order = np.arange(running)
        self._next = None
        if ahead and (steps := self._steps_ahead(running, arm, step)):
            # The device's rows take the order that the host has now, however far the device has come with them.
            if self._uploaded[0] != self.rows.edits:
                self.device_rows.arrange(order)
            if self._uploaded != (self.rows.edits, self.cache.edits):
                self.device_rows.upload_table(self.cache.table, running)
            self._uploaded = (self.rows.edits, self.cache.edits)
            self._next = self._launch(running, arm, steps)
        return self._read(step, order)

    def _ready(self, running: int, arm: DraftArm) -> DraftArm:
        """The arm, or OFF where there are too few pages for it; a drafter that has missed tokens reads them."""
        rows = self.rows
        drafts = np.clip(rows.limit[:running] - rows.count[:running] - 1, 0, arm.depth)
        if self.cache.lacking(rows.length[:running] + drafts) > self.cache.free:
            return OFF
        self.cache.grow(rows.length[:running] + drafts)
        if self.guesser is not None and arm.drafter == self.guesser.name:
            return (
                arm if self._held(arm.drafter, self.guesser.catch_up, running, arm.depth) else OFF
            )
        return arm

    def _steps_ahead(self, running: int, then: DraftArm, step: Launch | None = None) -> int:
        """How many steps of `then` may be launched behind `step`, if there is one, before the host has read it; gives
        rows their pages."""
        rows = self.rows
        under_way = 0
        tokens = 0
        if rows.picky[:running].any():
            return 0
        if step is not None:
            arm = step.arm
            under_way = len(step.drawn)
            tokens = under_way * arm.tokens
            reads = self.guesser is not None and then.drafter == self.guesser.name
            if reads and (arm.drafter != then.drafter or then.depth < arm.depth):
                return 0  # the drafter may have to read more tokens than a round reads
        left = rows.limit[:running] - rows.count[:running]
        going = left > under_way
        most = min(self.burst, int(left.max()) - under_way)
        for steps in sorted({most, min(most, FEWEST), min(most, 1)}, reverse=True):
            reach = tokens + steps * then.tokens - 1
            length = np.where(going, rows.length[:running] + np.minimum(reach, left - 1), -1)
            if steps > 0 and self.cache.lacking(length) <= self.cache.free:
                self.cache.grow(length)
                return steps
        return 0

    def _launch(self, running: int, arm: DraftArm, steps: int = 1) -> Launch:
        drawn = self._drawn[self._launches % 2][:steps, : 2 * arm.tokens + 2]
        self._launches += 1
        keys = self._keys(running, arm)
        if not all(key in self.captures.graphs for key in keys):
            self.begin()
            self.captures.capture(keys)
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
        lines = step.drawn.numpy()[:, :, order]
        new = step.arm.tokens
        token = np.ascontiguousarray(lines[:, 2 : 2 + new].swapaxes(1, 2))
        log_prob = np.ascontiguousarray(lines[:, 2 + new :].swapaxes(1, 2)).view(np.float32)
        picky = np.flatnonzero(self.rows.picky[: len(order)])
        # evaluations with top-k or top-p: their tokens are drawn outside of the graph
        if picky.size:
            self._uploaded = STALE
            (asked,) = to_device(self.device, order[picky])
            token[0, picky, 0], log_prob[0, picky, 0] = self._draw(step.logits[asked], picky)
        counted = lines[:, 0]
        if self.guesser is not None and step.arm.drafter == self.guesser.name:
            self.rows.paired[: len(order)] = self.rows.length[: len(order)] + counted[:-1].sum(0)
        return burst(token, log_prob, counted, lines[:, 1], step.arm)

    def verify(self, drafts: np.ndarray) -> Drawn:
        assert self._next is None, "a step under way has no drafts"
        running, most = drafts.shape
        self._drafts.numpy()[:running, :most] = drafts
        with torch.inference_mode(False), torch.no_grad():
            self._upload(running)
            self.drafts[:running, :most].copy_(self._drafts[:running, :most], non_blocking=True)
            step = self._launch(running, DraftArm("", most))
        return self._read(step, np.arange(running))

    def prepare(self, running: int, arm: DraftArm) -> float:
        begin = time.perf_counter()
        if arm.depth:
            self.captures.capture(self._keys(running, arm))
        return time.perf_counter() - begin

    @property
    def ahead(self) -> bool:
        return self._next is not None

    def begin(self, served: Sequence[tuple[int, DraftArm]] = ()) -> None:
        """Captures prompts and plain steps of every size, the largest first, which every run needs; and the steps that
        `served` names, which would else be captured one by one while a batch waits."""
        self.captures.capture(
            [*self.prefill.keys, *((size, 1, "") for size in reversed(self.sizes))]
        )
        largest = sorted(served, key=lambda pair: -pair[0] * pair[1].tokens)
        self.captures.capture(
            list(dict.fromkeys(key for size, arm in largest for key in self._keys(size, arm)))
        )

    def _keys(self, running: int, arm: DraftArm) -> list[Key]:
        """The graphs of a step: the drafter's, if it runs here, then the target's, which all drafters share."""
        size = next(size for size in self.sizes if size >= running)
        target = (size, arm.tokens, "")
        return [(size, arm.depth, arm.drafter), target] if arm.drafter in self.own else [target]

    def _captured(self, size: int, tokens: int, drafter: str) -> Tensor:
        if drafter == PROMPTS:
            return self.prefill.step(size, tokens)
        if not drafter:
            return self._step(size, tokens)
        drafts = self.drafts[:size, :tokens]
        if not self._held(drafter, self._draft, size, tokens, drafter):
            # without drafts the target's step is a plain one, and so is what is captured here
            drafts.fill_(-1)
        return drafts

    def _held(self, drafter: str, work: Callable[..., None], *args: Any) -> bool:
        """Whether the drafter's part was done; an error in it retires the drafter. Errors inside a capture are raised,
        since they leave CUDA's state broken; most of what can fail there fails in the calls before it."""
        guard = self.guards.get(drafter)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if guard is None or (capturing and not guard.retired):
            work(*args)
            return True
        return guard.hold(work, *args)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Empties all rows while it lasts, so that a step writes to the spare page alone."""
        state = self.device_rows.state
        before = state.clone()
        state[LENGTH] = -1
        self.prefill.rest()
        yield
        state.copy_(before)

    def _upload(self, running: int) -> None:
        """Uploads rows and tables, unless the device has them as the host does."""
        if self._uploaded == (self.rows.edits, self.cache.edits):
            return
        self.device_rows.upload(self.rows, self.cache.table, running)
        if self.lanes is not None:
            self.lanes.newest(self.device_rows.state[:, :running])
        self._uploaded = (self.rows.edits, self.cache.edits)

    def _step(self, size: int, new: int) -> Tensor:
        """Feeds the newest token of rows 0..size-1 and new - 1 drafts, on the device alone, and draws after each; gives
        the logits [B * new, V] of the draws."""
        state = self.device_rows.state[:, :size]
        table = self.device_rows.table[:size]
        drafts = self.drafts[:size, : new - 1]
        keys = state[KEY0 : KEY1 + 1]
        count = state[COUNT]
        heat = state[HEAT].view(torch.float32)
        if new == 1:
            ids, (row, position, length) = state[TOKEN], self._fed(state, self.numbers[:size])
            starts = self.numbers[: size + 1]
        else:
            ids, row, position, length = self._fed_with_drafts(state, drafts, self.numbers[:size])
            starts = self.numbers[: size + 1] * new
            keys = keys.repeat_interleave(new, 1)
            heat = heat.repeat_interleave(new)
            count = (count[:, None] + self.places[:new]).flatten()
        hidden = self.network.forward(Feed(ids, position, row, table, length, starts, new))
        if self.guesser is not None:
            self.guesser.keep(hidden, table, row, position)
        logits = self.network.head.narrow_logits(hidden)
        token, log_prob = race(logits, keys, count, heat)
        rows = State(state[TOKEN], state[LENGTH], state[COUNT], state[LIMIT], state[STOPS:])
        texts = (
            None
            if self.lanes is None
            else Texts(self.lanes.history, self.lanes.written, state[LANE])
        )
        accept(rows, drafts, token, log_prob, self.drawn[: 2 * new + 2, :size], texts)
        return logits

    def _draft(self, size: int, depth: int, drafter: str) -> None:
        """Makes drafts for rows 0..size-1, and leaves them where `_step` reads them."""
        assert self.lanes is not None
        state = self.device_rows.state[:, :size]
        drafts = self.drafts[:size, :depth]
        length = state[LENGTH]
        most = state[LIMIT] - state[COUNT] - 1
        if self.guesser is not None and drafter == self.guesser.name:
            row = torch.where(length >= 0, self.numbers[:size], -1)
            newest = self.lanes.last(state[LANE], length, depth + 1)
            guesses = self.guesser.round(newest, length, row, self.device_rows.table[:size], depth)
            drafts.copy_(torch.where(self.places[:depth] < most[:, None], guesses, -1))
        else:
            lane = torch.where(length >= 0, state[LANE], -1)
            self.lanes.lookup(lane, most, drafts, siblings=drafter == "suffix")

    # ---- prompts

    def _prefill(
        self, running: int, chunks: Sequence[Chunk], source: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Feeds the tokens of the chunks in one packed forward; their forks draw from the same logits."""
        n = len(chunks)
        table = self.cache.table[running : running + len(chunks)]
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
        logits = self.network.head.narrow_logits(hidden[last])
        if source:
            fork_rows(self.cache, self.rows, running + n, source)
            (asked,) = to_device(
                self.device, np.array([*range(n), *(row - running for row in source)])
            )
            logits = logits[asked]
        return self._draw(logits, slice(running, self.rows.size))

    def _draw(self, logits: Tensor, part: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draws a token for each row of `part` by the host's columns."""
        rows = self.rows
        if rows.picky[part].any():
            token, log_prob = sample(
                logits, rows.draws_of(part), *to_device(self.device, rows.count[part])
            )
        else:
            bits = rows.temperature[part].astype(np.float32).view(np.int32)
            keys, count, heat = to_device(self.device, rows.keys[:, part], rows.count[part], bits)
            token, log_prob = race(logits, keys, count, heat.view(torch.float32))
        return token.cpu().numpy(), log_prob.cpu().numpy()
