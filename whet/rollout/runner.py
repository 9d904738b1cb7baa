"""How a step is computed: the forward over running and new rows, and the draw of one token for each.

The engine decides who runs; a runner turns that into tokens. `EagerRunner` is the plain form, for a CPU and for models
that no faster path knows: one packed forward of the Hugging Face twin. A faster form is handed to the engine as a
`RunnerFactory`, such as `whet.fast.graphs.GraphRunners`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.draft.base import OFF, Arm, walk
from whet.draft.speculation import Speculation
from whet.model.twin import KVShape
from whet.rollout.guesser import Guesser
from whet.rollout.pages import Cache
from whet.rollout.rows import Chunk, Flight, Rows, sample


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn in S steps, one or a burst: for each row one token a step or, after drafts, several."""

    token: np.ndarray
    """[rows, W]: those that count, from the left, of all steps."""
    log_prob: np.ndarray
    counted: np.ndarray
    """[S, rows]: how many of a step's draws count: those up to and with the first that is not what was drafted. What
    comes after a row's end is for nothing."""
    proposed: np.ndarray
    """[S, rows]: how many drafts the row had."""
    arm: Arm = OFF
    """What made the drafts."""

    @property
    def before(self) -> np.ndarray:
        """[S, rows]: tokens of the steps before each."""
        return self.counted.cumsum(0) - self.counted

    def real(self, kept: np.ndarray) -> np.ndarray:
        """[S, rows]: tokens of each step where so many [rows] were kept in all; 0 after the row's end."""
        return np.clip(kept - self.before, 0, self.counted)


class Runner(Protocol):
    own: frozenset[str]
    """Drafters it serves by itself: a step is told the arm and makes the drafts where it verifies them."""
    packed: bool
    """Prompts are fed side by side, without padding: a wave may hold prompts of any lengths."""
    wave: int
    """Free slots that a wave waits for while rows run."""

    def begin(self, served: Sequence[tuple[int, Arm]]) -> None:
        """Does now what every run needs once. served: the arms that will be asked for, with their numbers of rows."""

    def enter(self, first: int) -> None:
        """Rows from `first` on are new."""

    def leave(self, flight: Flight) -> None:
        """The flight has no row any more."""

    def advance(
        self, running: int, chunks: Sequence[Chunk], source: Sequence[int], arm: Arm = OFF, ahead: bool = True
    ) -> Drawn:
        """What comes next of every row that is ready: a step of it, or several that were launched together.

        Rows 0..running-1 feed their newest token; then come the rows of `chunks`, whose tokens are fed; then
        rows that fork from the rows `source`, prompts and all. A chunk that is not its flight's last stands alone and
        draws no token. `arm`: of its own drafters, for the next step that is begun; `ahead`: that may be one that is
        not asked for yet.
        """

    def verify(self, drafts: np.ndarray) -> Drawn:
        """The newest token and a draft [running, K], -1 where there is none, of every row in one forward, and a draw
        after each of them. Rows' pages must reach as far."""

    def go_ahead(self, running: int, arm: Arm) -> None:
        """What comes next of these rows may be begun now, unless it has been: the caller has other things to do."""

    def budgeted(self) -> None:
        """The rows' `most` has changed; what is under way keeps to the old one."""

    def prepare(self, running: int, arm: Arm) -> float:
        """So many rows are served by this arm next: what that takes once is done now. Seconds that took."""

    @property
    def ahead(self) -> bool:
        """A step is under way that was not asked for yet: `advance` must come next."""

    def forget(self) -> None:
        """The weights have changed: nothing computed but not handed out may be used."""

    def stats(self) -> dict[str, float]:
        """Of its own, since the start, named "rollout/..."."""


class RunnerFactory(Protocol):
    """Makes the runner of an engine, where a faster form than `EagerRunner` is wanted."""

    page: int
    """Tokens per page of the cache that its runners read best."""

    def lack(self, shapes: Iterable[KVShape], device: torch.device) -> str | None:
        """Why it cannot serve a model with this cache, in a few words; None where it can."""

    def make(
        self,
        twin: PreTrainedModel,
        cache: Cache,
        rows: Rows,
        guesser: Guesser | None,
        speculation: Speculation | None,
    ) -> Runner: ...


class EagerRunner:
    own: frozenset[str] = frozenset()
    packed, wave = False, 1

    def __init__(self, twin: PreTrainedModel, cache: Cache, rows: Rows, guesser: Guesser | None = None) -> None:
        """guesser: the drafter that wants the hidden states, if there is one."""
        self.twin, self.cache, self.rows, self.guesser = twin, cache, rows, guesser
        self.device = twin.device
        self._hidden: Tensor | None = None
        if guesser is not None:
            twin.get_decoder().register_forward_hook(self._overhear)

    def _overhear(self, decoder: nn.Module, given: Any, out: Any) -> None:
        self._hidden = out.last_hidden_state[0]

    def advance(
        self, running: int, chunks: Sequence[Chunk], source: Sequence[int], arm: Arm = OFF, ahead: bool = True
    ) -> Drawn:
        rows = self.rows
        blocks = [(slice(0, running), rows.token[:running, None], rows.length[:running, None])] if running else []
        if chunks:
            blocks.append((slice(running, running + len(chunks)), *right_aligned(chunks)))
        logits = self._forward(blocks)[: rows.ready]
        if source:
            first = running + len(chunks)
            fork_rows(self.cache, rows, first, source)
            logits = logits[torch.tensor([*range(first), *source], device=self.device)]
        token, log_prob = sample(logits, rows.draws(), rows.positions())
        if self.device.type != "cpu":  # one transfer for both; ids are exact in float32 up to 16 million
            token, log_prob = torch.stack((token.to(log_prob.dtype), log_prob)).cpu()
        return single(token.numpy(), log_prob.numpy())

    def verify(self, drafts: np.ndarray) -> Drawn:
        """Rows are padded on the left, as prompts are; a place that is no draft of a row's is drawn for nothing."""
        rows, (running, most) = self.rows, drafts.shape
        size = (drafts >= 0).sum(1)
        shift = (most - size)[:, None]
        place = np.arange(most + 1) - shift
        fed = np.concatenate((rows.token[:running, None], drafts), 1)
        ids = np.where(place >= 0, np.take_along_axis(fed, np.maximum(place, 0), 1), 0)
        position = np.where(place >= 0, rows.length[:running, None] + place, -1)
        logits = self._forward([(slice(0, running), ids, position)], every=True).unflatten(0, (running, most + 1))
        columns = torch.from_numpy(np.minimum(np.arange(most + 1) + shift, most)).to(self.device)
        numbers, draws, count = torch.arange(running, device=self.device), rows.draws(), rows.positions()
        drawn = [sample(logits[numbers, columns[:, j]], draws, count + j) for j in range(most + 1)]
        token, log_prob = (torch.stack(part, 1).cpu().numpy() for part in zip(*drawn, strict=True))
        return Drawn(token, log_prob, walk(drafts, size, token)[None], size[None])

    def begin(self, served: Sequence[tuple[int, Arm]]) -> None: ...

    def enter(self, first: int) -> None: ...

    def leave(self, flight: Flight) -> None: ...

    def go_ahead(self, running: int, arm: Arm) -> None: ...

    def budgeted(self) -> None: ...

    def prepare(self, running: int, arm: Arm) -> float:
        return 0.0

    @property
    def ahead(self) -> bool:
        return False

    def forget(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def _forward(self, blocks: Sequence[tuple[slice, np.ndarray, np.ndarray]], every: bool = False) -> Tensor:
        """Logits [rows, vocab] after each row's newest token, or after `every` one; the model's own head, soft-cap and
        scale included."""
        context = self.cache.context([(rows, position) for rows, _, position in blocks])
        ids = np.concatenate([ids.ravel() for _, ids, _ in blocks])
        keep: int | Tensor = 0  # all
        if not every and sum(len(ids) for _, ids, _ in blocks) < ids.size:
            last = np.cumsum(np.concatenate([np.full(*ids.shape) for _, ids, _ in blocks])) - 1
            keep = torch.from_numpy(last).to(self.device)
        out = self.twin(
            input_ids=torch.from_numpy(ids).to(self.device)[None],
            position_ids=context.position[None],
            use_cache=False,
            logits_to_keep=keep,
            ctx=context,
        )
        if self.guesser is not None:
            assert self._hidden is not None
            self.guesser.states[context.page, 0, context.offset] = self._hidden
        logits: Tensor = out.logits[0]
        return logits


def single(token: np.ndarray, log_prob: np.ndarray) -> Drawn:
    """One token for each row."""
    ones = np.ones((1, token.size), np.int64)
    return Drawn(token[:, None], log_prob[:, None], ones, 0 * ones)


def burst(token: np.ndarray, log_prob: np.ndarray, counted: np.ndarray, proposed: np.ndarray, arm: Arm) -> Drawn:
    """Steps [S, rows, W], of whose draws `counted` [S, rows] count, as one: what counts moves together.

    >>> token = np.array([[[1, 2]], [[3, 4]]])
    >>> burst(token, token, np.array([[1], [2]]), np.array([[1], [1]]), OFF).token
    array([[1, 3, 4, 0]])
    """
    steps, rows, width = token.shape
    if steps == 1 or width == 1:
        shape = (rows, steps * width)
        tokens, log_probs = token.swapaxes(0, 1).reshape(shape), log_prob.swapaxes(0, 1).reshape(shape)
        return Drawn(tokens, log_probs, counted, proposed, arm)
    packed = np.zeros((rows, steps * width), token.dtype), np.zeros((rows, steps * width), log_prob.dtype)
    step, row, place = np.nonzero(np.arange(width) < counted[:, :, None])
    at = (counted.cumsum(0) - counted)[step, row] + place
    packed[0][row, at], packed[1][row, at] = token[step, row, place], log_prob[step, row, place]
    return Drawn(*packed, counted, proposed, arm)


def joined(first: Drawn, second: Drawn) -> Drawn:
    """Of rows one after the other, where the first may have drawn several tokens in several steps, the second one."""
    wide, late = [(0, 0), (0, first.token.shape[1] - 1)], [(0, len(first.counted) - 1), (0, 0)]
    return Drawn(
        np.concatenate((first.token, np.pad(second.token, wide))),
        np.concatenate((first.log_prob, np.pad(second.log_prob, wide))),
        np.concatenate((first.counted, np.pad(second.counted, late)), 1),
        np.concatenate((first.proposed, np.pad(second.proposed, late)), 1),
        first.arm,
    )


def fork_rows(cache: Cache, rows: Rows, first: int, source: Sequence[int]) -> None:
    """Rows from `first` on take the cache of the rows `source`."""
    target = range(first, first + len(source))
    cache.fork(source, target, rows.length[target].tolist())


def right_aligned(chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and positions [B, longest], padded on the left: every row's newest token is in the last column."""
    width = max(chunk.size for chunk in chunks)
    ids = np.zeros((len(chunks), width), np.int64)
    position = np.full((len(chunks), width), -1)
    for row, chunk in enumerate(chunks):
        ids[row, width - chunk.size :] = chunk.ids()
        position[row, width - chunk.size :] = np.arange(chunk.start, chunk.stop)
    return ids, position
