"""The data buffer: what the target has written lately, with the hidden states it computed while doing so.

Whoever runs the target adds finished rollouts; the drafter's trainer samples windows of them. Hidden states lie on the
device where the trainer wants them (to bring them to the host would make it wait at every rollout's end), and are
measured in tokens. A drafter trains before the longest responses of a step exist, so those of the last one stay: when a
step begins, of the last one only the longest quarter is kept, and nothing of those before (TLT, "one-step-off"). Beyond
capacity the lengths share alike (OURS): the class of lengths (by powers of two) that holds the most tokens loses its
oldest entry. A lesson takes a share of a step's tokens, so not all that end are wanted (`wants`, OURS).

What it holds and gives follows from what was added and from the key of the sample alone. It knows no model.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.errors import WhetError

KEPT = 0.25
"""Share of the last step's entries that stay, the longest."""
FEW = 4096
"""Tokens of a step below which all that ends is wanted."""
SCRAP = 8
"""Pairs below which the rest of a sample's room is left empty, rather than filled with a snippet without context."""


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """A rollout. hidden[t] is the target's last hidden state after ids[t], so it predicts ids[t + 1].

    The last token is never read by the target, so there is often one hidden state less than there are tokens.
    """

    uid: str
    step: int
    ids: Tensor
    """int64 [tokens]."""
    hidden: Tensor
    """[tokens or less, width]."""
    prompt: int
    """Tokens of the prompt: guesses of these are not trained."""

    def __len__(self) -> int:
        return len(self.hidden)


@dataclass(frozen=True, slots=True)
class Window:
    """Pairs start .. stop - 1 of an entry; pair t is (hidden[t], ids[t + 1]), and its answer hidden[t + 1]."""

    entry: BufferEntry
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class DataBuffer:
    def __init__(
        self, capacity: int, *, kept: float = KEPT, share: float = 1.0, device: torch.device | str = "cpu"
    ) -> None:
        """share: of a step's tokens, what a lesson trains on."""
        if capacity < 2:
            raise WhetError(f"A buffer of {capacity} tokens holds no pair to train a drafter on; give it at least 2.")
        self.capacity, self.kept, self.share, self.device = capacity, kept, share, torch.device(device)
        self.step = 0
        self.entries: list[BufferEntry] = []
        """In the order they came."""
        self.tokens = 0
        """Of all entries: counted as they come and go, since rollouts end while a GPU may wait."""
        self._held = Counter[int]()
        """The same by classes of lengths."""
        self._lengths: list[list[int]] = [[], []]
        """Of rollouts that ended, in the last step and in this one, sorted."""
        self._ended = self._fair = 0
        """Tokens that ended in this step, and of these wanted whatever their length."""

    def wants(self, step: int, tokens: int) -> bool:
        """Whether a rollout that has just ended is worth its memory: to be asked once of each, before its hidden
        states are looked for. OURS: those whose turn it is (`due`), and the longest for the step to come."""
        if self.share <= 0 or tokens < 2:
            return False
        self._turn(step)
        mine = due(self._fair, self._ended, self.share)
        wanted = mine or among_longest(tokens, self._lengths, self.kept)
        insort(self._lengths[1], tokens)
        self._ended += tokens
        self._fair += tokens if mine else 0
        return wanted

    def add(
        self, uid: str, step: int, ids: Tensor | np.ndarray | Sequence[int], hidden: Tensor, prompt: int = 0
    ) -> None:
        """A finished rollout, prompt and response; copied. Steps must not fall.

        Two hidden states make the first pair: shorter ones teach nothing and are left out; what is longer than the
        buffer is cut at its end.
        """
        ids = torch.as_tensor(ids, dtype=torch.int64).cpu()[: self.capacity].clone()
        if step < self.step:
            raise ValueError(f"step {step} comes after step {self.step}")
        if not len(ids) - 1 <= len(hidden[: self.capacity]) <= len(ids):
            raise ValueError(f"{len(hidden)} hidden states for {len(ids)} tokens")
        hidden = hidden.detach()[: self.capacity]
        if len(hidden) < 2:
            return
        self._turn(step)
        self._put(BufferEntry(uid, step, ids, hidden.to(self.device, copy=True), prompt))
        while self.tokens > self.capacity:
            self._evict()

    def sample(self, tokens: int, key: Sequence[int]) -> list[Window]:
        """Windows of at most `tokens` pairs together, longest first: entries in an order drawn from `key`.

        An entry longer than the room left gives a window of it at a place drawn as well.
        """
        random = np.random.default_rng(list(key))
        windows: list[Window] = []
        for i in random.permutation(len(self.entries)):
            if tokens < (SCRAP if windows else 1):
                break
            pairs = len(self.entries[i]) - 1
            start = int(random.integers(pairs - tokens + 1)) if pairs > tokens else 0
            windows.append(Window(self.entries[i], start, start + min(pairs, tokens)))
            tokens -= len(windows[-1])
        return sorted(windows, key=len, reverse=True)

    def counts(self, vocabulary: int) -> np.ndarray:
        """How often each token occurs, for `draft_vocabulary`."""
        ids = [entry.ids.numpy() for entry in self.entries]
        return np.bincount(np.concatenate([np.zeros(0, np.int64), *ids]), minlength=vocabulary)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """JSON; with `tensors` all there is to continue from."""
        described = [[e.uid, e.step, e.prompt, len(e.ids), len(e)] for e in self.entries]
        seen = {"lengths": [list(part) for part in self._lengths], "ended": self._ended, "fair": self._fair}
        return {"step": self.step, "entries": described, **seen}

    def tensors(self) -> dict[str, Tensor]:
        if not self.entries:
            return {}
        return {"ids": torch.cat([e.ids for e in self.entries]), "hidden": torch.cat([e.hidden for e in self.entries])}

    def load(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._clear()
        self.step, self._ended, self._fair = int(state["step"]), int(state["ended"]), int(state["fair"])
        self._lengths = [list(part) for part in state["lengths"]]
        described = state["entries"]
        if not described:
            return
        ids = tensors["ids"].split([line[3] for line in described])
        hidden = tensors["hidden"].split([line[4] for line in described])
        for (uid, step, prompt, _, _), mine, states in zip(described, ids, hidden, strict=True):
            self._put(BufferEntry(uid, step, mine.clone(), states.to(self.device, copy=True), prompt))

    def close(self) -> None:
        """There are no more lessons: it lets go of all it has, and wants nothing."""
        self.share = 0.0
        self._clear()

    # ---- what stays

    def _clear(self) -> None:
        self.entries, self.tokens = [], 0
        self._held.clear()

    def _put(self, entry: BufferEntry) -> None:
        self.entries.append(entry)
        self.tokens += len(entry)
        self._held[_class(entry)] += len(entry)

    def _turn(self, step: int) -> None:
        if step <= self.step:
            return
        last = sorted((e for e in self.entries if e.step == self.step), key=len, reverse=True)
        longest = {id(e) for e in last[: math.ceil(self.kept * len(last))]}
        entries = [e for e in self.entries if id(e) in longest]
        self._clear()
        for entry in entries:
            self._put(entry)
        self.step, self._ended, self._fair = step, 0, 0
        self._lengths = [self._lengths[1], []]

    def _evict(self) -> None:
        """Never the newest, which fits by itself."""
        newest, held = self.entries[-1], self._held.copy()
        held[_class(newest)] -= len(newest)
        fullest = max(held, key=lambda c: (held[c], c))
        oldest = next(i for i, entry in enumerate(self.entries) if _class(entry) == fullest)
        gone = self.entries.pop(oldest)
        self.tokens -= len(gone)
        self._held[fullest] -= len(gone)


def due(fair: int, ended: int, share: float) -> bool:
    """Whether the next rollout is wanted whatever its length, when of `ended` tokens so many were (OURS).

    A lesson trains on a share of them; twice that leaves it a choice. Of a small step all are.

    >>> [due(fair, 100_000, 0.2) for fair in (4_095, 40_000, 40_001)]
    [True, True, False]
    >>> due(3_000, 3_000, 0.2), due(100_000, 100_000, 0.5)
    (True, True)
    """
    return fair < FEW or fair <= 2 * share * ended


def among_longest(tokens: int, lengths: Sequence[Sequence[int]], kept: float) -> bool:
    """Whether less than `kept` of these lengths, each part of them sorted, are as long or longer (OURS).

    The last step's are among them: rollouts that begin together end the shortest first, each the longest so far.

    >>> [among_longest(n, ([10, 20, 30, 40], [10, 20, 30, 40]), 0.25) for n in (30, 31, 40, 41)]
    [False, False, False, True]
    """
    longer = sum(len(part) - bisect_left(part, tokens) for part in lengths)
    return longer < kept * sum(map(len, lengths))


def _class(entry: BufferEntry) -> int:
    return len(entry).bit_length()
