"""The rollouts' texts on the device, so that drafts can be made there: a lane of tokens for each flight.

Used by `graphs.py`: a step appends what it draws (`kernels.accept`), `kernels.lookup` reads what followed when the last
tokens were seen before, in the own lane or in those of the same prompt. A flight keeps its lane wherever its row moves;
when it has ended, the text stays for its siblings and for later visits of the prompt until the lane is needed again.
The host writes a lane when its flight enters a row, and never reads one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import torch
from torch import Tensor

from whet.model.kernels.accept import Texts
from whet.model.kernels.lookup import lookup
from whet.rollout.device_rows import LANE, LENGTH, TOKEN
from whet.rollout.flight import Flight
from whet.rollout.upload import sent

KIN = 16
"""Texts of the same prompt that a rollout looks at, beside its own."""
TOKENS = 2**25
"""That lanes hold, where slots want no more."""


class Lanes:
    def __init__(self, slots: int, context: int, device: torch.device) -> None:
        count = min(max(2 * slots, TOKENS // context), 8 * slots)
        self.device = device
        self.history = torch.zeros(count, context + 1, dtype=torch.int32, device=device)
        self.written = torch.zeros(count, dtype=torch.int32, device=device)
        self.of = torch.full((count,), -1, dtype=torch.int32, device=device)
        """The number of the prompt each is a text of."""
        self.kin = torch.full((count, KIN), -1, dtype=torch.int32, device=device)
        """Lanes of the same prompt, the newest first; stale ones are told by `of`."""
        self.lane: dict[int, int] = {}
        """Of flights under way, by arrival."""
        self._prompt: dict[int, str] = {}
        self._family: dict[str, list[int]] = {}
        """Lanes of each prompt, the newest last."""
        self._number: dict[str, int] = {}
        self._numbers = 0
        self._used = np.zeros(count, bool)
        self._turn = 0

    def enter(self, flights: Sequence[Flight]) -> list[int]:
        """They have a row from now on: what they know is written to lanes of theirs."""
        for flight in flights:
            self.lane[flight.arrival] = self._take(flight.request.prompt_id)
        lanes = [self.lane[flight.arrival] for flight in flights]
        known = np.array([flight.known for flight in flights])
        texts = np.zeros((len(flights), known.max()), np.int32)
        for row, flight in zip(texts, flights, strict=True):
            row[: flight.prompt.size], row[flight.prompt.size : flight.known] = flight.prompt, flight.trace.ids
        kin = self._kin({flight.request.prompt_id for flight in flights})
        lane, written, text, *related = sent(self.device, np.array(lanes), known, texts, *kin)
        index = lane.long()
        self.history[index, : text.shape[1]] = text
        self.written[index] = written
        self._acquaint(*related)
        return lanes

    def leave(self, flight: Flight) -> None:
        """It has no row any more. Its text stays; should it go on, it takes another lane."""
        self._used[self.lane.pop(flight.arrival)] = False

    def forget(self) -> None:
        """Texts of rollouts that have ended are nobody's kin any more."""
        self.of.fill_(-1)
        self._acquaint(*sent(self.device, *self._kin({self._prompt[lane] for lane in self.lane.values()})))

    def newest(self, state: Tensor) -> None:
        """The newest tokens of rows, `DeviceRows.state` as the host has just told it: drawn outside of a step, or not
        what the device drew."""
        lane = state[LANE].long()
        self.history[lane, state[LENGTH].long()] = state[TOKEN]
        self.written[lane] = state[LENGTH] + 1

    # ---- on the device alone

    def texts(self, lane: Tensor) -> Texts:
        return Texts(self.history, self.written, lane)

    def last(self, lane: Tensor, length: Tensor, count: int) -> Tensor:
        """The newest `count` tokens of rows with so many cached ones, int32 [B, count]; anything before the first."""
        place = length[:, None] + torch.arange(1 - count, 1, device=length.device)
        return self.history[lane[:, None].long(), place.clamp(min=0)]

    def lookup(self, lane: Tensor, most: Tensor, drafts: Tensor, kin: bool) -> None:
        """Drafts from the rows' own texts, and from those of their kin."""
        lookup(self.history, self.written, self.of, self.kin if kin else self.kin[:, :0], lane, most, drafts)

    # ---- lanes come and go

    def _take(self, prompt: str) -> int:
        """The next in turn that nobody uses: there are two for each row."""
        while self._used[self._turn]:
            self._turn = (self._turn + 1) % self._used.size
        lane, self._turn = self._turn, (self._turn + 1) % self._used.size
        if (before := self._prompt.get(lane)) is not None:
            self._family[before].remove(lane)
            if not self._family[before]:
                del self._family[before], self._number[before]
        self._prompt[lane], self._used[lane] = prompt, True
        if prompt not in self._family:
            self._family[prompt] = []
            self._number[prompt] = self._numbers = self._numbers + 1
        self._family[prompt].append(lane)
        return lane

    def _kin(self, prompts: Set[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lanes in use that are of these prompts, the others of theirs, and the prompts' numbers."""
        lanes = [lane for prompt in prompts for lane in self._family[prompt] if self._used[lane]]
        kin = np.full((len(lanes), KIN), -1, np.int32)
        for row, lane in zip(kin, lanes, strict=True):
            others = [other for other in reversed(self._family[self._prompt[lane]]) if other != lane][:KIN]
            row[: len(others)] = others
        numbers = [self._number[self._prompt[lane]] for lane in lanes]
        return np.array(lanes, np.int32), kin, np.array(numbers, np.int32)

    def _acquaint(self, lane: Tensor, kin: Tensor, number: Tensor) -> None:
        index = lane.long()
        self.kin[index] = kin
        self.of[index] = number
