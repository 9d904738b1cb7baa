"""The data buffer: what the target has written lately, with the hidden states that it computed while doing so.

The engine adds finished rollouts (`rollout.guesser`); the drafter's trainer samples windows of them. Hidden states lie
on the device where the trainer wants them, since moving them to the host would make it wait at every rollout's end.
A drafter trains before the longest responses of a step exist, so when a step begins the longest quarter of the last
one is kept, and nothing older (TLT, "one-step-off"). Beyond capacity the class of lengths (by powers of two) that holds
the most tokens loses its oldest entry (OURS). A lesson takes a share of a step's tokens, so not all that end are wanted
(`wants`, OURS). What it holds and gives follows only from what was added and from the key of the sample.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.errors import WhetError

KEPT = 0.25  # share of the last step's entries that stay, the longest
FEW = 4096  # tokens of a step below which all that ends is wanted
SCRAP = 8  # pairs below which the rest of a sample's room stays empty: a snippet has no context


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """A rollout. hidden[t] is the target's last hidden state after ids[t], so it predicts ids[t + 1]. The last token is
    never read by the target, so there is often one hidden state less than there are tokens."""

    step: int
    ids: Tensor  # int64 [tokens]
    hidden: Tensor  # [tokens or less, width]
    prompt: int  # tokens of the prompt: guesses of these are not trained

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
        self, capacity: int, *, share: float = 1.0, device: torch.device | str = "cpu"
    ) -> None:
        """capacity: in tokens; share: the part of a step's tokens that a lesson trains on."""
        if capacity < 2:
            raise WhetError(
                f"A buffer of {capacity} tokens holds no pair to train a drafter on; give it at least 2."
            )
        self.capacity, self.share, self.device = capacity, share, torch.device(device)
        self.step = 0
        self.entries: list[BufferEntry] = []  # in the order they came
        # Tokens by class of lengths, counted as entries come and go, since rollouts end while a GPU may wait.
        self._held = Counter[int]()
        # lengths that ended in the last step and in this one, sorted
        self._lengths: list[list[int]] = [[], []]
        # tokens that ended in this step, and those wanted whatever their length
        self.ended = self._fair = 0
        self.trained = 0  # tokens trained on in idle time since this step began

    def wants(self, step: int, tokens: int) -> bool:
        """Whether a rollout that has just ended is worth its memory; call it once for each rollout. OURS: the rollouts
        whose turn it is (`due`), and the longest ones for the step to come."""
        if self.share <= 0 or tokens < 2:
            return False
        self._turn(step)
        mine = due(self._fair, self.ended, self.share)
        wanted = mine or among_longest(tokens, self._lengths, KEPT)
        insort(self._lengths[1], tokens)
        self.ended += tokens
        self._fair += tokens if mine else 0
        return wanted

    def add(self, step: int, ids: Any, hidden: Tensor, prompt: int = 0) -> None:
        """Copy a finished rollout, the token ids of prompt and response. Rollouts with less than two hidden states hold
        no pair and are left out; longer ones than the buffer are cut."""
        ids = torch.as_tensor(ids, dtype=torch.int64).cpu()[: self.capacity].clone()
        if not len(ids) - 1 <= len(hidden[: self.capacity]) <= len(ids):
            raise ValueError(f"{len(hidden)} hidden states for {len(ids)} tokens")
        hidden = hidden.detach()[: self.capacity]
        if len(hidden) < 2:
            return
        self._turn(step)
        self.entries.append(BufferEntry(step, ids, hidden.to(self.device, copy=True), prompt))
        self._held[_class(self.entries[-1])] += len(hidden)
        while self.tokens > self.capacity:  # the newest stays: it fits by itself
            held = self._held.copy()
            held[_class(self.entries[-1])] -= len(hidden)
            fullest = max(held, key=lambda c: (held[c], c))
            oldest = next(i for i, entry in enumerate(self.entries) if _class(entry) == fullest)
            self._held[fullest] -= len(self.entries.pop(oldest))

    def sample(self, tokens: int, key: Sequence[int]) -> list[Window]:
        """Windows of at most `tokens` pairs in all, longest first: entries in an order drawn from `key`. An entry that
        is longer than the room left gives a window at a drawn place."""
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

    def close(self) -> None:
        """Drop all entries and want nothing more: there are no more lessons."""
        self.share = 0.0
        self._keep(())

    @property
    def tokens(self) -> int:
        return self._held.total()

    def _keep(self, entries: Iterable[BufferEntry]) -> None:
        """Hold these entries and no others."""
        self.entries = list(entries)
        self._held.clear()
        for entry in self.entries:
            self._held[_class(entry)] += len(entry)

    def _turn(self, step: int) -> None:
        """Begin this step, unless it is the one under way; a run that goes back to a checkpoint repeats some."""
        if step == self.step:
            return
        last = sorted((e for e in self.entries if e.step == self.step), key=len, reverse=True)
        longest = {id(e) for e in last[: math.ceil(KEPT * len(last))]}
        self._keep(e for e in self.entries if id(e) in longest)
        self.step = step
        self.ended = 0
        self._fair = 0
        self.trained = 0
        self._lengths = [self._lengths[1], []]


def due(fair: int, ended: int, share: float) -> bool:
    """Whether the next rollout is wanted whatever its length, when `fair` of `ended` tokens were (OURS).

    A lesson trains on a share of them; twice that leaves it a choice. In a small step all are wanted.

    >>> [due(fair, 100_000, 0.2) for fair in (4_095, 40_000, 40_001)]
    [True, True, False]
    >>> due(3_000, 3_000, 0.2), due(100_000, 100_000, 0.5)
    (True, True)
    """
    return fair < FEW or fair <= 2 * share * ended


def among_longest(tokens: int, lengths: Sequence[Sequence[int]], kept: float) -> bool:
    """Whether less than a share `kept` of these lengths, each part sorted, are as long or longer (OURS).

    The last step's lengths are among them: rollouts that begin together end the shortest first.

    >>> [among_longest(n, ([10, 20, 30, 40], [10, 20, 30, 40]), 0.25) for n in (30, 31, 40, 41)]
    [False, False, False, True]
    """
    longer = sum(len(part) - bisect_left(part, tokens) for part in lengths)
    return longer < kept * sum(map(len, lengths))


def _class(entry: BufferEntry) -> int:
    return len(entry).bit_length()
