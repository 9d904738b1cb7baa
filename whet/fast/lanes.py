"""State of the rollouts on the device: the rows that a decode step reads, and the texts that drafts are made from.

`graphs.py` alone uses it. The host writes rows to `DeviceRows` when one came, went or got a page; between, the device
counts by itself and ends rows at their limit or a stop id, so that a step may be launched before the host has seen the
one before. `Lanes` holds a text per flight, which the host writes when the flight enters a row and never reads: a step
appends what it draws (`kernels.decode.accept`), and `lookup` reads what followed when the last tokens were seen before.
A flight keeps its lane wherever its row moves; when it has ended, the text stays for siblings and later visits of the
prompt until the lane is needed again. Shapes: B rows, L lanes, K drafts per row.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import torch
from torch import Tensor

from whet.fast.kernels.decode import lookup
from whet.model.ops import to_device
from whet.rollout.rows import Flight, Rows

# Lines of the state: newest token, cached tokens (-1: no row), generated tokens and their limit, noise keys,
# temperature (its bits), lane of the text, and from here on stop ids.
TOKEN, LENGTH, COUNT, LIMIT, KEY0, KEY1, HEAT, LANE, STOPS = range(9)
MOST_STOPS = 4  # a row with more stop ids is ended by the host, one step later
SIBLINGS = 16  # texts of the same prompt that a rollout looks at, beside its own
TOKENS = 2**25  # tokens that all lanes hold, where the slots need no more


class DeviceRows:
    """What the host writes goes through two pinned buffers in turn: a copy may be under way when the next is made."""

    def __init__(self, most: int, width: int, device: torch.device, spare: int = 0) -> None:
        """width: pages per row; spare: the page that pads tables."""
        lines = STOPS + MOST_STOPS
        self.device = device
        self.state = torch.zeros(lines, most, dtype=torch.int32, device=device)
        # pages of each row
        self.table = torch.full((most, width), spare, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._states = [
            torch.zeros(lines, most, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._tables = [
            torch.full((most, width), spare, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._orders = [torch.zeros(most, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]

    def upload(self, rows: Rows, table: np.ndarray, running: int) -> None:
        """Writes rows 0..running-1 as the host has them; the rows beyond are empty."""
        staged = self._next(self._states)
        state = staged.numpy()
        state[LENGTH] = -1
        columns: tuple[np.ndarray, ...] = (
            rows.token,
            rows.length,
            rows.count,
            rows.limit,
            rows.lane,
        )
        for line, column in zip((TOKEN, LENGTH, COUNT, LIMIT, LANE), columns, strict=True):
            state[line, :running] = column[:running]
        state[KEY0 : KEY1 + 1, :running] = rows.keys[:, :running]
        state[HEAT, :running] = rows.temperature[:running].astype(np.float32).view(np.int32)
        stops = rows.stops[:running, :MOST_STOPS].T
        state[STOPS:, :running] = -1
        state[STOPS : STOPS + len(stops), :running] = stops
        self.state.copy_(staged, non_blocking=True)
        self.upload_table(table, running)

    def arrange(self, order: np.ndarray) -> None:
        """Row i becomes what row order[i] is, however far the device has come with it; the rows beyond are empty. The
        caller uploads the tables."""
        staged = self._next(self._orders)
        running = len(order)
        staged.numpy()[:running] = order
        moved = self.state.index_select(1, staged[:running].to(self.device, non_blocking=True))
        self.state[LENGTH] = -1
        self.state[:, :running] = moved

    def upload_table(self, table: np.ndarray, running: int) -> None:
        staged = self._next(self._tables)
        staged.numpy()[:running, : table.shape[1]] = table[:running]
        self.table[:running].copy_(staged[:running], non_blocking=True)

    def _next(self, buffers: list[Tensor]) -> Tensor:
        """The buffer of the two that was written longer ago."""
        buffers.reverse()
        return buffers[0]


def fed(state: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row (-1: padding), position and number of keys of the token that each row feeds: all int32 [B]."""
    length = state[LENGTH]
    active = length >= 0
    row = torch.where(active, numbers, -1)
    return row, torch.where(active, length, 0), length + 1


def fed_with_drafts(
    state: Tensor, drafts: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `fed`, for the newest token and K drafts [B, K]: ids, row and position [B (K + 1)], keys [B]. A draft of -1 is
    fed as padding, so that a row may have fewer than the others."""
    new = drafts.shape[1] + 1
    ids = torch.cat((state[TOKEN][:, None], drafts), 1)
    place = torch.arange(new, dtype=torch.int32, device=state.device)
    length = state[LENGTH][:, None]
    real = (length >= 0) & (ids >= 0)
    row = torch.where(real, numbers[:, None], -1)
    position = torch.where(real, length + place, 0)
    keys = torch.where(length >= 0, length + new, 0)[:, 0]
    return ids.clamp(min=0).flatten(), row.flatten(), position.flatten(), keys


class Lanes:
    def __init__(self, slots: int, context: int, device: torch.device) -> None:
        count = min(max(2 * slots, TOKENS // context), 8 * slots)
        self.device = device
        self.history = torch.zeros(count, context + 1, dtype=torch.int32, device=device)
        self.written = torch.zeros(count, dtype=torch.int32, device=device)
        # the number of each text's prompt
        self.of = torch.full((count,), -1, dtype=torch.int32, device=device)
        # Lanes of the same prompt, the newest first. A lane that was taken over since has another number in `of`.
        self.siblings = torch.full((count, SIBLINGS), -1, dtype=torch.int32, device=device)
        self.lane: dict[int, int] = {}  # lanes of flights under way, by arrival
        self._prompt: dict[int, str] = {}
        self._family: dict[str, list[int]] = {}  # lanes of each prompt, the newest last
        self._number: dict[str, int] = {}
        self._numbers = 0
        self._used = np.zeros(count, bool)
        self._turn = 0

    def enter(self, flights: Sequence[Flight]) -> list[int]:
        """Gives each flight a lane and writes its known tokens there; the lanes."""
        for flight in flights:
            self.lane[flight.arrival] = self._take(flight.request.prompt_id)
        lanes = [self.lane[flight.arrival] for flight in flights]
        known = np.array([flight.known for flight in flights])
        texts = np.zeros((len(flights), known.max()), np.int32)
        for row, flight in zip(texts, flights, strict=True):
            row[: flight.prompt.size], row[flight.prompt.size : flight.known] = (
                flight.prompt,
                flight.trace.ids,
            )
        siblings = self._related({flight.request.prompt_id for flight in flights})
        lane, written, text, *related = to_device(
            self.device, np.array(lanes), known, texts, *siblings
        )
        index = lane.long()
        self.history[index, : text.shape[1]] = text
        self.written[index] = written
        self._relate(*related)
        return lanes

    def leave(self, flight: Flight) -> None:
        """Frees the lane of a flight without a row. Its text stays; should the flight go on, it takes another lane."""
        self._used[self.lane.pop(flight.arrival)] = False

    def forget(self) -> None:
        """Makes texts of rollouts that have ended siblings of none."""
        self.of.fill_(-1)
        self._relate(
            *to_device(
                self.device, *self._related({self._prompt[lane] for lane in self.lane.values()})
            )
        )

    def newest(self, state: Tensor) -> None:
        """Appends the newest tokens of rows, `DeviceRows.state` as the host has just uploaded it: they were drawn
        outside of a step, or differ from what the device drew."""
        lane = state[LANE].long()
        self.history[lane, state[LENGTH].long()] = state[TOKEN]
        self.written[lane] = state[LENGTH] + 1

    # ---- on the device alone

    def last(self, lane: Tensor, length: Tensor, count: int) -> Tensor:
        """The newest `count` tokens of rows with so many cached ones, int32 [B, count]; anything before the first."""
        place = length[:, None] + torch.arange(1 - count, 1, device=length.device)
        return self.history[lane[:, None].long(), place.clamp(min=0)]

    def lookup(self, lane: Tensor, most: Tensor, drafts: Tensor, siblings: bool) -> None:
        """Makes drafts from the rows' own texts, and from those of their siblings."""
        others = self.siblings if siblings else self.siblings[:, :0]
        lookup(self.history, self.written, self.of, others, lane, most, drafts)

    # ---- lanes come and go

    def _take(self, prompt: str) -> int:
        """Takes the next lane in turn that no flight uses: there are at least two for each row."""
        while self._used[self._turn]:
            self._turn = (self._turn + 1) % self._used.size
        lane = self._turn
        self._turn = (self._turn + 1) % self._used.size
        if (before := self._prompt.get(lane)) is not None:
            self._family[before].remove(lane)
            if not self._family[before]:
                del self._family[before], self._number[before]
        self._prompt[lane] = prompt
        self._used[lane] = True
        if prompt not in self._family:
            self._family[prompt] = []
            self._number[prompt] = self._numbers = self._numbers + 1
        self._family[prompt].append(lane)
        return lane

    def _related(self, prompts: Set[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lanes in use that hold texts of these prompts, their siblings, and the numbers of their prompts."""
        lanes = [lane for prompt in prompts for lane in self._family[prompt] if self._used[lane]]
        siblings = np.full((len(lanes), SIBLINGS), -1, np.int32)
        for row, lane in zip(siblings, lanes, strict=True):
            others = [
                other for other in reversed(self._family[self._prompt[lane]]) if other != lane
            ][:SIBLINGS]
            row[: len(others)] = others
        numbers = [self._number[self._prompt[lane]] for lane in lanes]
        return np.array(lanes, np.int32), siblings, np.array(numbers, np.int32)

    def _relate(self, lane: Tensor, siblings: Tensor, number: Tensor) -> None:
        index = lane.long()
        self.siblings[index] = siblings
        self.of[index] = number
