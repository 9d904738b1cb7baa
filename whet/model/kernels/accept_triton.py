"""The Triton kernel of `accept`: a program a row. Imported when first launched, since not every machine has Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from whet.model.kernels.accept import State


def launch(state: State, drafts: Tensor, token: Tensor, log_prob: Tensor, read: Tensor) -> None:
    batch, new = drafts.shape[0], drafts.shape[1] + 1
    if batch == 0:
        return
    _accept[batch,](
        state.token,
        state.length,
        state.count,
        state.limit,
        state.stops,
        drafts,
        token.contiguous(),
        log_prob.contiguous().view(torch.int32),
        read,
        new,
        state.stops.stride(0),
        drafts.stride(0),
        read.stride(0),
        STOPS=state.stops.shape[0],
        WIDE=triton.next_power_of_2(new),
        num_warps=1,
    )


@triton.jit
def _accept(  # type: ignore[no-untyped-def]
    newest,
    length,
    count,
    limit,
    stops,
    drafts,
    token,
    bits,
    read,
    new,
    stops_line,
    drafts_line,
    read_line,
    STOPS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.arange(0, WIDE)
    real = place < new
    drawn = tl.load(token + row * new + place, mask=real, other=0).to(tl.int32)
    guess = tl.load(drafts + row * drafts_line + place, mask=place < new - 1, other=-1)
    agreed = tl.min(tl.where((drawn != guess) | (place >= new - 1), place, WIDE), 0)
    kept, written = tl.load(length + row), tl.load(count + row)
    ends = written + place + 1 >= tl.load(limit + row)
    for stop in tl.static_range(STOPS):
        ends = ends | (drawn == tl.load(stops + stop * stops_line + row))
    first = tl.min(tl.where(ends & (place <= agreed), place, new), 0)
    last = tl.minimum(first, agreed)
    tl.store(newest + row, tl.sum(tl.where(place == last, drawn, 0), 0))
    tl.store(length + row, tl.where((kept >= 0) & (first == new), kept + last + 1, -1))
    tl.store(count + row, written + last + 1)
    tl.store(read + row, last + 1)
    tl.store(read + (1 + place) * read_line + row, drawn, mask=real)
    drawn_bits = tl.load(bits + row * new + place, mask=real, other=0)
    tl.store(read + (1 + new + place) * read_line + row, drawn_bits, mask=real)
