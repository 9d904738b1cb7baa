"""The Triton kernel of `accept`: a program a row. Imported when first launched, since not every machine has Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from whet.model.kernels.accept import State, Texts


def launch(state: State, drafts: Tensor, token: Tensor, log_prob: Tensor, read: Tensor, texts: Texts | None) -> None:
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
        *(read, read, read, 0)
        if texts is None
        else (texts.history, texts.written, texts.lane, texts.history.stride(0)),
        new,
        state.stops.stride(0),
        drafts.stride(0),
        read.stride(0),
        STOPS=state.stops.shape[0],
        WIDE=triton.next_power_of_2(max(2, new)),
        TEXTS=texts is not None,
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
    history,
    text_sizes,
    lanes,
    history_line,
    new,
    stops_line,
    drafts_line,
    read_line,
    STOPS: tl.constexpr,
    WIDE: tl.constexpr,
    TEXTS: tl.constexpr,
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
    tl.store(read + read_line + row, tl.sum((guess >= 0).to(tl.int32), 0))
    tl.store(read + (2 + place) * read_line + row, drawn, mask=real)
    drawn_bits = tl.load(bits + row * new + place, mask=real, other=0)
    tl.store(read + (2 + new + place) * read_line + row, drawn_bits, mask=real)
    if TEXTS:
        lane = tl.load(lanes + row)
        text = history + lane.to(tl.int64) * history_line + kept + 1
        tl.store(text + place, drawn, mask=(place <= last) & (kept >= 0))
        tl.store(text_sizes + lane, kept + last + 2, mask=kept >= 0)
