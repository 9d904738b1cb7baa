"""The rows as the device has them: what a decode step reads, and moves on by itself.

Used by `graphs.py` alone. The host writes rows here when one came, went or got a page; between, the device keeps count
of its own, and ends rows at their limit or a stop id, so that a step may be launched before the host has seen the one
before. What the host writes goes through two pinned buffers in turn: a copy may be under way when the next is made.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from whet.rollout.rows import Rows

TOKEN, LENGTH, COUNT, LIMIT, KEY0, KEY1, HEAT, LANE, MOST, STOPS = range(10)
"""Lines of the state: newest token, cached tokens (-1: nobody), generated tokens and their limit, noise keys,
temperature (its bits), lane of the text, drafts wanted at most, and from here on stop ids."""
MOST_STOPS = 4
"""A row with more of them is ended by the host, one step later."""


class DeviceRows:
    def __init__(self, most: int, width: int, device: torch.device, nobody: int = 0) -> None:
        """nobody: the page that pads tables."""
        lines = STOPS + MOST_STOPS
        self.device = device
        self.state = torch.zeros(lines, most, dtype=torch.int32, device=device)
        self.table = torch.full((most, width), nobody, dtype=torch.int32, device=device)
        """Pages of each row."""
        pinned = device.type == "cuda"
        self._states = [torch.zeros(lines, most, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._tables = [torch.full((most, width), nobody, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._lines = [torch.zeros(most, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._orders = [torch.zeros(most, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]

    def upload(self, rows: Rows, table: np.ndarray, running: int) -> None:
        """Rows 0..running-1 as the host has them; nobody beyond."""
        staged = self._next(self._states)
        state = staged.numpy()
        state[LENGTH] = -1
        columns: tuple[np.ndarray, ...] = (rows.token, rows.length, rows.count, rows.limit, rows.lane, rows.most)
        for line, column in zip((TOKEN, LENGTH, COUNT, LIMIT, LANE, MOST), columns, strict=True):
            state[line, :running] = column[:running]
        state[KEY0 : KEY1 + 1, :running] = rows.keys[:, :running]
        state[HEAT, :running] = rows.temperature[:running].astype(np.float32).view(np.int32)
        stops = rows.stops[:running, :MOST_STOPS].T
        state[STOPS:, :running] = -1
        state[STOPS : STOPS + len(stops), :running] = stops
        self.state.copy_(staged, non_blocking=True)
        self.upload_table(table, running)

    def arrange(self, order: np.ndarray) -> None:
        """Row i becomes what row order[i] is, however far the device has come with it; nobody beyond. Its table is the
        host's to tell."""
        staged = self._next(self._orders)
        running = len(order)
        staged.numpy()[:running] = order
        index = staged[:running].to(self.device, non_blocking=True)
        moved = self.state.index_select(1, index)
        self.state[LENGTH] = -1
        self.state[:, :running] = moved

    def tell(self, line: int, column: np.ndarray) -> None:
        """One line of the first rows, whose order is the host's."""
        staged = self._next(self._lines)
        staged.numpy()[: column.size] = column
        self.state[line, : column.size].copy_(staged[: column.size], non_blocking=True)

    def upload_table(self, table: np.ndarray, running: int) -> None:
        staged = self._next(self._tables)
        staged.numpy()[:running, : table.shape[1]] = table[:running]
        self.table[:running].copy_(staged[:running], non_blocking=True)

    def _next(self, buffers: list[Tensor]) -> Tensor:
        """The one of its kind that was written longer ago."""
        buffers.reverse()
        return buffers[0]


def fed(state: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row (-1: nobody), position and keys of the token each row feeds: all int32 [B]."""
    length = state[LENGTH]
    active = length >= 0
    row = torch.where(active, numbers, -1)
    return row, torch.where(active, length, 0), length + 1


def fed_with_drafts(state: Tensor, drafts: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `fed`, for the newest token and K drafts [B, K] (-1: none): ids, row and position [B (K + 1)], keys [B].

    What is no draft is fed as padding, so that a row may have fewer than the others.
    """
    new = drafts.shape[1] + 1
    ids = torch.cat((state[TOKEN][:, None], drafts), 1)
    place = torch.arange(new, dtype=torch.int32, device=state.device)
    length = state[LENGTH][:, None]
    real = (length >= 0) & (ids >= 0)
    row = torch.where(real, numbers[:, None], -1)
    position = torch.where(real, length + place, 0)
    keys = torch.where(length >= 0, length + new, 0)[:, 0]
    return ids.clamp(min=0).flatten(), row.flatten(), position.flatten(), keys
