"""Where K and V lie on the device: plain tensors, or a range of addresses whose memory can be lent to the learner.

On one card the cache idles while the learner works, and the other way round. A CUDA graph keeps addresses, so the
cache may not move; but the driver tells addresses from memory (`cuMemAddressReserve` against `cuMemCreate`): `release`
unmaps the memory and gives it back to the card, `take_back` maps fresh memory to the same addresses, and tensors and
graphs over them stay valid. `pages.py` decides what lies where, the engine when; here nothing is known of either.
Not on CUDA, or where all fits at once, it is plain zeros, and both calls do nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from whet.errors import WhetError

ALIGN = 512
"""Bytes that tensors begin at multiples of, as torch's own do."""
PINNED, DEVICE, READ_WRITE, NO_MEMORY = 1, 1, 3, 2
"""Of cuda.h: CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, .._PROT_READWRITE, .._OUT_OF_MEMORY."""

Piece = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


class Arena:
    """Tensors of zeros, one for each piece.

    >>> arena = Arena([((2, 3), torch.float32), ((4,), torch.bfloat16)], torch.device("cpu"))
    >>> [tuple(t.shape) for t in arena.tensors], arena.resident
    ([(2, 3), (4,)], True)
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device, *, releasable: bool = False) -> None:
        """releasable: on CUDA, by the driver's own calls. torch.OutOfMemoryError where the card is full."""
        self._range: Range | None = None
        if not releasable or device.type != "cuda":
            self.tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in pieces]
            return
        places, size = layout(pieces)
        self._range = Range(size, device)
        self._bytes = self._range.tensor()
        self._bytes.zero_()
        self.tensors = [
            self._bytes[place].view(dtype).view(shape) for place, (shape, dtype) in zip(places, pieces, strict=True)
        ]

    @property
    def releasable(self) -> bool:
        return self._range is not None

    @property
    def resident(self) -> bool:
        """Whether the tensors may be touched."""
        return self._range is None or self._range.mapped

    def release(self) -> None:
        """What is in the tensors is lost; to touch them before `take_back` is an illegal access."""
        if self._range is not None:
            self._range.unmap()

    def take_back(self) -> None:
        """Zeros again. Fresh memory holds whatever was there, and a masked key still meets its value: 0 times a stray
        nan is nan. A pass over the memory at full bandwidth is cheap beside mapping it."""
        if self._range is None or self._range.mapped:
            return
        try:
            self._range.map()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # what the learner has freed is still with torch's allocator
            self._map_or_tell(self._range)
        self._bytes.zero_()

    def _map_or_tell(self, memory: Range) -> None:
        try:
            memory.map()
        except torch.OutOfMemoryError as error:
            raise WhetError(
                f"The KV cache lent its {memory.size / 2**30:.1f} GiB to the learner, and the card has no room to take "
                "it back; if nothing else runs on the card, lower rollout.pages, rollout.slots or learn.pack_tokens."
            ) from error


def layout(pieces: Sequence[Piece]) -> tuple[list[slice], int]:
    """Bytes from..to of each piece, one after the other, and of all.

    >>> layout([((3,), torch.float32), ((2, 2), torch.bfloat16)])
    ([slice(0, 12, None), slice(512, 520, None)], 520)
    """
    places: list[slice] = []
    end = 0
    for shape, dtype in pieces:
        begin = -(-end // ALIGN) * ALIGN
        end = begin + math.prod(shape) * dtype.itemsize
        places.append(slice(begin, end))
    return places, end


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Range:
    """Addresses for `size` bytes on a CUDA device, with memory behind them while `mapped`."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.init()
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.wanted = size
        self.mapped = False
        self._address, self._handle = ctypes.c_uint64(), ctypes.c_uint64()
        self._driver = _driver()
        torch.cuda.synchronize(self.device)  # makes torch's context this thread's: the calls below work in it
        self._where = Location(DEVICE, self.device.index)
        self._properties = Properties(type=PINNED, location=self._where)
        unit = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), ctypes.c_int(0))
        self.size = max(1, -(-size // unit.value)) * unit.value
        zero = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(self._address), self._bytes, ctypes.c_size_t(0), zero, zero)
        self.map()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.wanted,), "typestr": "|u1", "data": (self._address.value, False), "version": 2}

    def tensor(self) -> Tensor:
        """All of it as bytes; views of it keep the addresses alive. Made while mapped: torch asks whose they are."""
        return torch.as_tensor(self, device=self.device)

    def map(self) -> None:
        zero, access = ctypes.c_uint64(0), Access(self._where, READ_WRITE)
        self._call("cuMemCreate", ctypes.byref(self._handle), self._bytes, ctypes.byref(self._properties), zero)
        try:
            self._call("cuMemMap", self._address, self._bytes, ctypes.c_size_t(0), self._handle, zero)
            self._call("cuMemSetAccess", self._address, self._bytes, ctypes.byref(access), ctypes.c_size_t(1))
        except BaseException:
            self._forget()
            raise
        self.mapped = True

    def unmap(self) -> None:
        """After all work that may touch it; the driver would not wait."""
        if not self.mapped:
            return
        torch.cuda.synchronize(self.device)
        self.mapped = False
        self._call("cuMemUnmap", self._address, self._bytes)
        self._call("cuMemRelease", self._handle)

    @property
    def _bytes(self) -> ctypes.c_size_t:
        return ctypes.c_size_t(self.size)

    def _forget(self) -> None:
        """A mapping that failed half-way: the memory goes back, whatever state it is in."""
        with suppress(WhetError, torch.OutOfMemoryError):
            self._call("cuMemUnmap", self._address, self._bytes)
        with suppress(WhetError, torch.OutOfMemoryError):
            self._call("cuMemRelease", self._handle)

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process the driver may be gone before us
            self.unmap()
            self._call("cuMemAddressFree", self._address, self._bytes)

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self.device):
            code = getattr(self._driver, name)(*arguments)
        if code == NO_MEMORY:
            raise torch.OutOfMemoryError(f"The card has no {self.size / 2**30:.1f} GiB left for the KV cache ({name}).")
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            why = (text.value or b"unknown").decode(errors="replace")
            raise WhetError(f"The CUDA driver refused {name} for the KV cache: error {code}, {why}.")


def _driver() -> Any:
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise WhetError("The CUDA driver's library, libcuda.so.1, cannot be loaded; without it memory cannot be shared.")
