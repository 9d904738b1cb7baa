"""How a step is computed: the forward over running and new rows, and the draw of their tokens.

The engine decides which rows run and calls a `Runner`. `EagerRunner` is the plain form, for a CPU and for models that
no faster form serves: one packed forward of the Hugging Face twin, then `rows.sample`. A faster form is handed to the
engine by its factory, `whet.fast.graphs.GraphRunners`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.draft.base import OFF, DraftArm, walk
from whet.rollout.guesser import Guesser
from whet.rollout.pages import Cache
from whet.rollout.rows import Chunk, Flight, Rows, sample

# Shapes: B rows, S steps of one turn, W tokens of a row in one turn, K drafted tokens, V vocabulary.


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn in S steps, one or a burst: for each row one token per step or, after drafts, several."""

    token: np.ndarray  # [B, W]: the tokens that count, of all steps, from the left
    log_prob: np.ndarray  # [B, W]
    # [S, B]: draws of a step that count, up to the first that differs from its draft
    counted: np.ndarray
    proposed: np.ndarray  # [S, B]: drafts that the row had
    arm: DraftArm = OFF  # what made the drafts


class Runner:
    """What the engine calls. A runner that computes one step at a time overrides `advance` and `verify` only."""

    # drafters whose drafts it makes itself, where it verifies them
    own: frozenset[str] = frozenset()
    # prompts are fed end to end without padding: a wave may hold prompts of any lengths
    packed: bool = False
    wave: int = 1  # free slots that a wave waits for while rows run

    def begin(self, served: Sequence[tuple[int, DraftArm]]) -> None:
        """Do now what every run needs once. served: the arms that may be used, with their numbers of rows."""

    def enter(self, first: int) -> None:
        """Rows from `first` on are new."""

    def leave(self, flight: Flight) -> None:
        """The flight has no row any more."""

    def advance(
        self,
        running: int,
        chunks: Sequence[Chunk],
        source: Sequence[int],
        arm: DraftArm = OFF,
        ahead: bool = True,
    ) -> Drawn:
        """Draw the next tokens of every ready row: of one step, or of several that were launched together.

        Rows 0..running-1 feed their newest token; then come the rows of `chunks`, whose tokens are fed; then the rows
        that fork from the rows `source`. A chunk that is not its flight's last stands alone and draws no token. `arm`,
        of its own drafters, is for the next step that is begun; `ahead` allows to begin one that is not asked for yet.
        """
        raise NotImplementedError

    def verify(self, drafts: np.ndarray) -> Drawn:
        """Feed the newest token and a draft [B, K], -1 where there is none, of every running row in one forward, and
        draw after each of them. The rows' pages must reach as far."""
        raise NotImplementedError

    def go_ahead(self, running: int, arm: DraftArm) -> None:
        """The next steps of these rows may begin now: the caller has other things to do."""

    def prepare(self, running: int, arm: DraftArm) -> float:
        """Do what this arm needs once for so many rows, and return the seconds that it took."""
        return 0.0

    @property
    def ahead(self) -> bool:
        """Whether a step is under way that was not asked for yet: `advance` must come next."""
        return False

    def forget(self) -> None:
        """The weights have changed: nothing computed but not handed out may be used."""

    def stats(self) -> dict[str, float]:
        """Counters of its own since the start, named "rollout/..."."""
        return {}


class EagerRunner(Runner):
    def __init__(
        self, twin: PreTrainedModel, cache: Cache, rows: Rows, guesser: Guesser | None = None
    ) -> None:
        """guesser: the drafter that reads the target's hidden states, if there is one."""
        self.twin = twin
        self.cache = cache
        self.rows = rows
        self.guesser = guesser
        self.device = twin.device
        self._hidden: Tensor | None = None
        if guesser is not None:
            twin.get_decoder().register_forward_hook(self._keep_hidden)

    def _keep_hidden(self, decoder: nn.Module, given: Any, out: Any) -> None:
        self._hidden = out.last_hidden_state[0]

    def advance(
        self,
        running: int,
        chunks: Sequence[Chunk],
        source: Sequence[int],
        arm: DraftArm = OFF,
        ahead: bool = True,
    ) -> Drawn:
        rows = self.rows
        blocks = (
            [(slice(0, running), rows.token[:running, None], rows.length[:running, None])]
            if running
            else []
        )
        if chunks:
            # Padded on the left: every row's newest token is in the last column.
            width = max(chunk.size for chunk in chunks)
            ids = np.zeros((len(chunks), width), np.int64)
            position = np.full((len(chunks), width), -1)
            for row, chunk in enumerate(chunks):
                ids[row, width - chunk.size :] = chunk.ids()
                position[row, width - chunk.size :] = np.arange(chunk.start, chunk.stop)
            blocks.append((slice(running, running + len(chunks)), ids, position))
        logits = self._forward(blocks)[: rows.ready]
        if source:
            first = running + len(chunks)
            fork_rows(self.cache, rows, first, source)
            # A fork draws from the logits of the prompt that it shares, with noise of its own.
            logits = logits[torch.tensor([*range(first), *source], device=self.device)]
        token, log_prob = sample(logits, rows.draws(), rows.positions())
        # one transfer for both; ids are exact in float32 up to 16 million
        if self.device.type != "cpu":
            token, log_prob = torch.stack((token.to(log_prob.dtype), log_prob)).cpu()
        return single(token.numpy(), log_prob.numpy())

    def verify(self, drafts: np.ndarray) -> Drawn:
        """Rows are padded on the left, as prompts are; what is drawn at a place without a draft is not used."""
        rows, (running, most) = self.rows, drafts.shape
        size = (drafts >= 0).sum(1)
        shift = (most - size)[:, None]
        place = np.arange(most + 1) - shift
        fed = np.concatenate((rows.token[:running, None], drafts), 1)
        ids = np.where(place >= 0, np.take_along_axis(fed, np.maximum(place, 0), 1), 0)
        position = np.where(place >= 0, rows.length[:running, None] + place, -1)
        logits = self._forward([(slice(0, running), ids, position)], every=True).unflatten(
            0, (running, most + 1)
        )
        columns = torch.from_numpy(np.minimum(np.arange(most + 1) + shift, most)).to(self.device)
        numbers = torch.arange(running, device=self.device)
        draws = rows.draws()
        count = rows.positions()
        drawn = [sample(logits[numbers, columns[:, j]], draws, count + j) for j in range(most + 1)]
        token, log_prob = (torch.stack(part, 1).cpu().numpy() for part in zip(*drawn, strict=True))
        return Drawn(token, log_prob, walk(drafts, size, token)[None], size[None])

    def _forward(
        self, blocks: Sequence[tuple[slice, np.ndarray, np.ndarray]], every: bool = False
    ) -> Tensor:
        """Logits [rows, V] after each row's newest token, or after `every` token, through the model's own head."""
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
        return out.logits[0]


def single(token: np.ndarray, log_prob: np.ndarray) -> Drawn:
    """One token [B] for each row."""
    ones = np.ones((1, token.size), np.int64)
    return Drawn(token[:, None], log_prob[:, None], ones, 0 * ones)


def fork_rows(cache: Cache, rows: Rows, first: int, source: Sequence[int]) -> None:
    """Give rows from `first` on the cache of the rows `source`."""
    target = range(first, first + len(source))
    cache.fork(source, target, rows.length[target].tolist())
