"""The KV cache: which pages a row has, and the memory behind them.

The engine opens, forks, grows, moves and closes rows; the runner takes the `PageContext` of a forward. Two forms:
`Cache`, where a page is a whole row of `context` tokens and row i owns page i, read by slice: the fast form on a CPU.
`PagedCache`, with pages of a few tokens, a block table, and prompt pages shared by the rollouts of a prompt. Both keep
rows 0..B-1 dense: the engine moves the last row into a hole. The contents of pages are never looked at.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.errors import WhetError
from whet.model.packing import ranges
from whet.model.twin import Block, KVShape, PageContext

Shapes = Sequence[KVShape]  # one for each layer

# Shapes: B rows, q new tokens per row, T = sum of B * q over the blocks of a forward.
# Keys and values of a layer: [pages + 1, kv heads, page, head size]; the last page takes what padding writes.


class Cache:
    """Keys and values of all layers, where every row has a page of its own: no page is ever missing."""

    def __init__(
        self, shapes: Shapes, pages: int, page: int, device: torch.device, releasable: bool = False
    ) -> None:
        """page: tokens of a page. releasable: on CUDA the memory can be lent (`arena`)."""
        dims = [(s, s.key_dim) for s in shapes] + [(s, s.value_dim) for s in shapes]
        # Zeros: a masked key still meets its value, and 0 times a stray nan is nan.
        pieces = [((pages + 1, s.heads, page, dim), s.dtype) for s, dim in dims]
        tensors, self.arena = allocate(pieces, device, releasable)
        self.keys, self.values = tensors[: len(shapes)], tensors[len(shapes) :]
        self.page = page
        self.device = device
        self.trash = pages  # the page that padding is written to
        self.table = np.arange(pages, dtype=np.int32)[:, None]  # pages of each row in order
        self.notes: list[str] = []  # what the user should know about the cache

    @property
    def free(self) -> int:
        """Pages that are not in use."""
        return sys.maxsize

    def open(self, row: int, tokens: int) -> None:
        """Begin a row that will be filled with `tokens` tokens."""

    def fork(self, source: Sequence[int], target: Sequence[int], tokens: Sequence[int]) -> None:
        """Begin rows `target` with the first `tokens` tokens of the rows `source`."""
        longest = max(tokens)
        index = torch.tensor([source, target], device=self.device)
        for pages in (*self.keys, *self.values):
            pages[index[1], :, :longest] = pages[index[0], :, :longest]

    def lacking(self, length: np.ndarray) -> int:
        """Pages missing to give rows 0..B-1 of these lengths room for one more token; a length of -1 wants none."""
        return 0

    def grow(self, length: np.ndarray) -> None:
        """Give rows 0..B-1 that room."""

    def move(self, source: np.ndarray, target: np.ndarray, tokens: np.ndarray) -> None:
        """Rows `source`, of so many tokens, become the rows `target`, one after the other."""
        for old, new, n in zip(source, target, tokens, strict=True):
            for pages in (*self.keys, *self.values):
                pages[new, :, :n] = pages[old, :, :n]

    def close(self, rows: list[int]) -> None: ...

    def context(self, blocks: Sequence[tuple[slice, np.ndarray]]) -> PageContext:
        """For blocks of rows with new tokens at `position` [B, q]; -1 marks padding."""
        where = np.concatenate([self._place(rows, position) for rows, position in blocks], 1)
        page, offset, flat = torch.from_numpy(where).to(self.device)
        out = []
        at = 0
        for rows, position in blocks:
            first = int(position.min())
            last = int(position.max())
            places = flat[at : at + position.size].view(position.shape)
            level = first == last and position.shape[1] == 1
            out.append(
                Block(places, last + 1, rows=rows, table=self._table(rows, last), level=level)
            )
            at += position.size
        return PageContext(self.keys, self.values, page, offset, flat, out)

    def _place(self, rows: slice, position: np.ndarray) -> np.ndarray:
        """Page, offset and position [3, B * q] of a block's tokens; padding goes to the trash page."""
        place = np.empty((3, *position.shape), np.int64)
        place[0], place[1] = self._locate(rows, position)
        place[2] = position
        if position.shape[1] > 1:
            place[:, position < 0] = [[self.trash], [0], [0]]
        return place.reshape(3, -1)

    def _locate(self, rows: slice, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Page and offset of each token."""
        return np.arange(rows.start, rows.stop)[:, None], position

    def _table(self, rows: slice, last: int) -> Tensor | None:
        """The block table of these rows up to position `last`, where pages are not whole slots."""
        return None


class PagedCache(Cache):
    def __init__(
        self,
        shapes: Shapes,
        slots: int,
        context: int,
        page: int,
        pages: int,
        device: torch.device,
        releasable: bool,
    ) -> None:
        super().__init__(shapes, pages, page, device, releasable)
        self.owners = [0] * pages  # rows that have each page
        self._free = list(range(pages - 1, -1, -1))
        # Entries beyond a row's pages name the trash page: what a draft writes too far is lost there.
        self.table = np.full((slots, -(-context // page)), self.trash, np.int32)
        self.edits = 0  # times the table changed
        self.held = np.zeros(slots, np.int64)  # pages of each row

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """Give so many free pages their first owner."""
        assert n <= len(self._free), "the scheduler admits and preempts so that pages suffice"
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self.owners[page] = 1
        return taken

    def share(self, pages: Sequence[int], times: int = 1) -> None:
        for page in pages:
            assert self.owners[page] > 0, "only a page in use can be shared"
            self.owners[page] += times

    def drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self.owners[page] > 0, "a page is dropped once by each owner"
            self.owners[page] -= 1
            if self.owners[page] == 0:
                self._free.append(page)

    def open(self, row: int, tokens: int) -> None:
        self._set([row], [self.take(-(-tokens // self.page))])

    def fork(self, source: Sequence[int], target: Sequence[int], tokens: Sequence[int]) -> None:
        """Full pages are shared; a half-filled last page is copied, since its owners will write to it."""
        copied: list[tuple[int, int]] = []
        ways = zip(source, target, tokens, strict=True)
        # the rows of a group come together
        for (src, n), some in groupby(ways, key=lambda way: (way[0], way[2])):
            rows = [row for _, row, _ in some]
            shared = self.table[src, : n // self.page].tolist()
            half = int(n % self.page > 0)
            self.share(shared, len(rows))
            own = self.take(half * len(rows))
            copied += [(int(self.table[src, len(shared)]), page) for page in own]
            self._set(rows, [[*shared, *own[i * half : (i + 1) * half]] for i in range(len(rows))])
        if copied:
            old, new = torch.tensor(copied, device=self.device).T
            for pages in (*self.keys, *self.values):
                pages[new] = pages[old]

    def lacking(self, length: np.ndarray) -> int:
        return int(self._missing(length).sum())

    def grow(self, length: np.ndarray) -> None:
        missing = self._missing(length)
        if not missing.any():
            return
        rows = np.flatnonzero(missing)
        more = missing[rows]
        each = np.repeat(rows, more)
        self.table[each, self.held[each] + ranges(more)] = self.take(each.size)
        self.held[rows] += more
        self.edits += rows.size

    def _missing(self, length: np.ndarray) -> np.ndarray:
        return np.maximum(length // self.page + 1 - self.held[: length.size], 0)

    def move(self, source: np.ndarray, target: np.ndarray, tokens: np.ndarray) -> None:
        moved = self.table[source]
        held = self.held[source]
        self.table[source] = self.trash
        self.held[source] = 0
        self.table[target] = moved
        self.held[target] = held
        self.edits += 1

    def close(self, rows: list[int]) -> None:
        self.drop(self.table[rows][np.arange(self.table.shape[1]) < self.held[rows, None]].tolist())
        self.table[rows] = self.trash
        self.held[rows] = 0

    def _locate(self, rows: slice, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        page, offset = np.divmod(np.maximum(position, 0), self.page)
        return np.take_along_axis(self.table[rows], page, 1), offset

    def _table(self, rows: slice, last: int) -> Tensor:
        return torch.from_numpy(self.table[rows, : last // self.page + 1].astype(np.int64)).to(
            self.device
        )

    def _set(self, rows: list[int], pages: list[list[int]]) -> None:
        """Give each row as many pages."""
        assert not self.held[rows].any(), "a row is closed before it is used again"
        self.table[rows, : len(pages[0])] = pages
        self.edits += len(rows)
        self.held[rows] = len(pages[0])


def make_cache(
    shapes: Shapes,
    slots: int,
    context: int,
    page: int,
    pages: int,
    device: torch.device,
    releasable: bool = False,
) -> Cache:
    """Make whole slots where `page` is 0, else pages. On a full GPU the pool is halved until it fits, at least one
    context."""
    if page == 0:
        try:
            return Cache(shapes, slots, context, device, releasable)
        except torch.OutOfMemoryError as error:
            raise WhetError(
                f"The KV cache of rollout.slots = {slots} x rollout.context = {context} does not fit in memory; "
                "lower one of them, or set rollout.page = 128 and rollout.pages."
            ) from error
    full = -(-context // page)
    if 0 < pages < full:
        one = f"one rollout of rollout.context = {context}"
        raise WhetError(f"rollout.pages = {pages} cannot hold {one}; it takes {full}.")
    pages = wanted = pages or slots * full
    while True:
        try:
            cache = PagedCache(shapes, slots, context, page, pages, device, releasable)
            fewer = f"The GPU has no room for {wanted} KV pages: the pool has {pages}; when they are full, "
            cache.notes = [fewer + "the youngest rollouts wait."] if pages < wanted else []
            return cache
        except torch.OutOfMemoryError as error:
            if pages == full:
                raise WhetError(
                    f"Not even one rollout of rollout.context = {context} fits into memory beside the model; "
                    "lower rollout.context, or take a smaller model."
                ) from error
        pages = max(full, pages // 2)
        if device.type == "cuda":
            torch.cuda.empty_cache()


# ---- memory that can be lent
#
# On one GPU the cache idles while the learner works, and the other way round. A CUDA graph keeps addresses, so the
# cache may not move; but the driver separates addresses from memory (`cuMemAddressReserve` and `cuMemCreate`).
# `release` unmaps the memory and returns it to the GPU, `take_back` maps fresh memory to the same addresses, so that
# tensors and graphs over them stay valid. Elsewhere, or where everything fits, it is plain zeros, and both do nothing.

ALIGN = 512  # bytes: tensors begin at multiples of it, as torch's own do
# From cuda.h: CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, .._PROT_READWRITE, .._OUT_OF_MEMORY.
PINNED = 1
DEVICE = 1
READ_WRITE = 3
NO_MEMORY = 2

Piece = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor


def allocate(
    pieces: Sequence[Piece], device: torch.device, releasable: bool
) -> tuple[list[Tensor], Arena | None]:
    """A tensor of zeros for each piece, and the memory behind them where it can be lent, which is on CUDA alone."""
    if not releasable or device.type != "cuda":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in pieces], None
    places, size = layout(pieces)
    arena = Arena(size, device)
    whole = arena.zeros()  # views of it keep the arena alive
    tensors = [
        whole[at].view(dtype).view(shape) for at, (shape, dtype) in zip(places, pieces, strict=True)
    ]
    return tensors, arena


def layout(pieces: Sequence[Piece]) -> tuple[list[slice], int]:
    """The bytes of each piece, one after the other, and their number in all."""
    places: list[slice] = []
    end = 0
    for shape, dtype in pieces:
        begin = -(-end // ALIGN) * ALIGN
        end = begin + math.prod(shape) * dtype.itemsize
        places.append(slice(begin, end))
    return places, end


class Location(ctypes.Structure):  # CUmemLocation
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Arena:
    """Addresses for `wanted` bytes on a CUDA device, with memory behind them while `mapped`."""

    def __init__(self, wanted: int, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError on a full GPU."""
        torch.cuda.init()
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self.wanted = wanted
        self.mapped = False
        self._address, self._handle = ctypes.c_uint64(), ctypes.c_uint64()
        self._driver = _load_driver()
        # makes torch's context this thread's: the calls below work in it
        torch.cuda.synchronize(self.device)
        self._where = Location(DEVICE, self.device.index)
        self._properties = Properties(type=PINNED, location=self._where)
        unit = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(unit),
            ctypes.byref(self._properties),
            ctypes.c_int(0),
        )
        self.size = max(1, -(-wanted // unit.value)) * unit.value
        self._bytes, zero = ctypes.c_size_t(self.size), ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            self._bytes,
            ctypes.c_size_t(0),
            zero,
            zero,
        )
        self._map()

    def take_back(self) -> None:
        """Map fresh memory and zero it: a masked key still meets its value, and 0 times a stray nan is nan."""
        if self.mapped:
            return
        try:
            self._map()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # what the learner has freed is still with torch's allocator
            try:
                self._map()
            except torch.OutOfMemoryError as error:
                raise WhetError(
                    f"The KV cache lent its {self.size / 2**30:.1f} GiB to the learner, and the GPU has no room to "
                    "take it back; if it runs nothing else, lower rollout.pages, rollout.slots or learn.pack_tokens."
                ) from error
        self.zeros()

    def zeros(self) -> Tensor:
        """All bytes, set to 0. It is made while mapped, since torch looks up the owner of the addresses, and not kept:
        it keeps the arena alive, which would then never be freed."""
        return torch.as_tensor(self, device=self.device).zero_()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.wanted,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 2,
        }

    def _map(self) -> None:
        zero = ctypes.c_uint64(0)
        access = Access(self._where, READ_WRITE)
        self._call(
            "cuMemCreate",
            ctypes.byref(self._handle),
            self._bytes,
            ctypes.byref(self._properties),
            zero,
        )
        try:
            self._call(
                "cuMemMap", self._address, self._bytes, ctypes.c_size_t(0), self._handle, zero
            )
            self._call(
                "cuMemSetAccess",
                self._address,
                self._bytes,
                ctypes.byref(access),
                ctypes.c_size_t(1),
            )
        except BaseException:  # half mapped: return the memory, whatever state it is in
            for name, place in (
                ("cuMemUnmap", (self._address, self._bytes)),
                ("cuMemRelease", (self._handle,)),
            ):
                with suppress(WhetError, torch.OutOfMemoryError):
                    self._call(name, *place)
            raise
        self.mapped = True

    def release(self) -> None:
        """Lose the contents; using the tensors before `take_back` is an illegal access."""
        if not self.mapped:
            return
        # the driver would not wait for work that uses the memory
        torch.cuda.synchronize(self.device)
        self.mapped = False
        self._call("cuMemUnmap", self._address, self._bytes)
        self._call("cuMemRelease", self._handle)

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process the driver may be gone before us
            self.release()
            self._call("cuMemAddressFree", self._address, self._bytes)

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self.device):
            code = getattr(self._driver, name)(*arguments)
        if code == NO_MEMORY:
            raise torch.OutOfMemoryError(
                f"The GPU has no {self.size / 2**30:.1f} GiB left for the KV cache ({name})."
            )
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            why = (text.value or b"unknown").decode(errors="replace")
            raise WhetError(
                f"The CUDA driver refused {name} for the KV cache: error {code}, {why}."
            )


def _load_driver() -> Any:
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise WhetError(
        "The CUDA driver's library, libcuda.so.1, cannot be loaded; without it memory cannot be shared."
    )
