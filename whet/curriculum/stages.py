"""FastCuRL's stages (arXiv 2503.17287) around any curriculum, each with prompts, limit and coefficients of its own.

`Stages` builds the curriculum of a stage by `make`, hands every call on to it, and after each update asks whether the
stage is over. Then the next one begins, with prompts and groups of its own: a group never mixes stages. What the old
stage still held is dropped and counted, and so is what comes of it later. How a stage chooses prompts and
rollouts is the inner curriculum's affair.

The paper ends a stage by hand: the first when some 10% of the responses are truncated, the others after about an epoch,
the checkpoint picked by a benchmark. The rule here is OURS: the first of the stage's limits that is met, on averages
over 20 updates (`progress.py`), and never by a benchmark. The last stage never ends. A stage whose limit truncates
nearly every response, with nothing right, ends at once if a later one is wider: it could only starve.
"""

from __future__ import annotations

import base64
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import ValidationError

from whet import config
from whet.config import Stage
from whet.curriculum.base import Curriculum, Hearing, Progress
from whet.curriculum.groups import COUNTERS
from whet.curriculum.ids import Ids
from whet.errors import Starved, WhetError
from whet.types import Batch, Clock, Report, Request, Rollout, Sampling

# ---- split
#
# Which prompts a stage trains on: by length of the problem, of its responses so far, or by task. Pure functions.
#
# FastCuRL (arXiv 2503.17287) takes the length of a problem as a cheap sign of how long its answer will be: L1 is what
# is not longer than the mean, L3 the rest, L2 everything. Called by `stages.py`; nothing here knows a stage or an id.


def short_by_characters(characters: np.ndarray) -> np.ndarray:
    """True where length <= floor(mean), the rule the published files of FastCuRL follow (24,976 of 40,315 problems).

    Never all False: the shortest is at most the mean. All True where all are alike.

    >>> short_by_characters(np.array([10, 12, 15])).tolist()  # mean 12.33
    [True, True, False]
    """
    lengths = np.asarray(characters, np.int64)
    return lengths <= lengths.sum() // max(1, len(lengths))


def short_by_responses(characters: np.ndarray, tokens: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """True where the mean response of a prompt is not longer than the mean over all prompts that have any. OURS.

    `tokens` is the sum over the `seen` responses of each prompt. A prompt without a response goes by its
    characters, against all others' characters: the two units are never compared with each other.

    >>> short_by_responses(np.array([9, 9, 1, 5]), np.array([40, 20, 0, 0]), np.array([4, 1, 0, 0])).tolist()
    [True, False, True, True]
    """
    visited = np.asarray(seen) > 0
    short = short_by_characters(characters)
    if visited.any():
        means = np.asarray(tokens)[visited] / np.asarray(seen)[visited]
        short[visited] = means <= means.mean()
    return short


def of_tasks(tasks: Sequence[str] | np.ndarray, wanted: Sequence[str]) -> np.ndarray:
    """True where a prompt's task is wanted.

    >>> of_tasks(["chain", "text", "chain"], ["chain"]).tolist()
    [True, False, True]
    """
    return np.isin(np.asarray(tasks, dtype=str), list(wanted))


# ---- lengths
#
# How long a prompt's responses were so far: a sum and a count for each prompt, for stages that split by them.
#
# Kept by `stages.py` over the whole run, since what an earlier stage saw is what the next border splits by.


class ResponseLengths:
    """Cut rollouts do not count, those at the limit count as long as the limit.

    >>> ResponseLengths(["a", "b"]).seen.tolist()
    [0, 0]
    """

    def __init__(self, ids: Sequence[str]):
        self.tokens = np.zeros(len(ids), "<i8")
        self.seen = np.zeros(len(ids), "<i8")
        self.ids = Ids.of(ids)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            if rollout.finish != "cut" and (row := self.ids.row(rollout.prompt_id)) is not None:
                self.tokens[row] += rollout.length
                self.seen[row] += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "tokens": base64.b64encode(self.tokens.tobytes()).decode(),
            "seen": base64.b64encode(self.seen.tobytes()).decode(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens = np.frombuffer(base64.b64decode(state["tokens"]), "<i8").copy()
        self.seen = np.frombuffer(base64.b64decode(state["seen"]), "<i8").copy()


Make = Callable[[Stage, Sequence[str], int], Curriculum]
"""(stage, ids of its prompts, id of its first group) -> the curriculum of the stage."""

LEAST = 0.25
"""Passes over its prompts before the share of truncated responses may end a stage. OURS."""

HOPELESS, FEWEST = 0.95, 16
"""If more of the responses since the last right one are truncated, over a batch of groups and so many responses at
least, the stage is over. OURS."""

COUNTED = (*COUNTERS, "probed", "screened", "qualified", "rollouts_saved", "skipped_solved", "resets")
"""Metrics that count since the start of a run and go on over borders; all others are gauges of the present stage."""


def default_stages(max_tokens: int) -> tuple[Stage, ...]:
    """For whoever asks for stages and names none. OURS: FastCuRL's first step and then everything.

    >>> [(stage.subset, stage.max_tokens) for stage in default_stages(1000)]
    [('short', 500), ('all', 1000)]
    """
    return (
        Stage(subset="short", max_tokens=max(1, max_tokens // 2), truncated=0.10, epochs=1.0),
        Stage(subset="all", max_tokens=max_tokens),
    )


def stage_sampling(stage: Stage, sampling: Sampling) -> Sampling:
    """How a stage draws its tokens: what it does not say is as given.

    >>> stage_sampling(Stage(max_tokens=8), Sampling(max_tokens=32, temperature=0.6))
    Sampling(max_tokens=8, temperature=0.6, top_k=0, top_p=1.0, stop_ids=(), stop_strings=())
    """
    limit, temperature = stage.max_tokens or sampling.max_tokens, stage.temperature or sampling.temperature
    return replace(sampling, max_tokens=limit, temperature=temperature)


def stage_settings(stage: Stage, settings: config.Curriculum) -> config.Curriculum:
    """The settings of the curriculum inside a stage, put to the same tests as a recipe's.

    >>> stage_settings(Stage(rollouts=8), config.Curriculum(name="speed", rollouts=24)).rollouts
    8
    """
    own = {"groups": stage.groups or settings.groups, "rollouts": stage.rollouts or settings.rollouts, "stages": ()}
    try:
        return config.Curriculum.model_validate({**settings.model_dump(), **own})
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise WhetError(f"A stage of curriculum.stages does not fit: {message}.") from None


class Stages:
    """`characters` and `tasks`: of each prompt, in the order of `ids`; needed where a stage splits by them.
    `max_tokens`: the limit of a stage that names none; 0 means that it has none.

    What a source has learnt of its prompts may go on into the next stage (`make`'s affair).
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        make: Make,
        *,
        ids: Sequence[str],
        characters: Sequence[int] | np.ndarray = (),
        tasks: Sequence[str] | np.ndarray = (),
        max_tokens: int = 0,
    ):
        assert stages, "a list of stages has at least one"
        self.stages = tuple(stages)
        self.make = make
        self.limits = [stage.max_tokens or max_tokens or math.inf for stage in stages]
        self.ids = Ids.of(ids)
        self._characters = np.asarray(characters, np.int64)
        self._tasks = tasks
        self._of_tasks = [self._rows_of_tasks(stage) for stage in self.stages]  # too dear for a border
        by_responses = any(stage.by == "responses" and stage.subset != "all" for stage in stages)
        self.lengths = ResponseLengths(self.ids) if by_responses else None
        self._check()
        self.border = self.late = 0  # groups dropped at borders, rollouts that came after theirs
        self.next_id = 0
        self.hearing = Hearing()
        self.fresh = False  # the first batch after a border is still to come
        self._before = dict.fromkeys(COUNTED, 0.0)  # what the stages that are over counted
        self._tokens: dict[int, int] = {}  # of the groups held, for the count of what a border drops
        self._enter(0, self._rows(0))

    @property
    def stage(self) -> Stage:
        return self.stages[self.number]

    # The protocol

    def plan(self, clock: Clock) -> list[Request]:
        if not self.inner.holds():
            self._leave_if_hopeless(self._clock(clock).groups)
        requests = self.inner.plan(self._clock(clock))
        for request in requests:
            self.next_id = max(self.next_id, request.group_id + 1)
            self.asked += request.first_index == 0 and request.phase != "probe"
        return requests

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        mine = [rollout for rollout in rollouts if rollout.group_id >= self.first_id]
        self.late += len(rollouts) - len(mine)
        self._before["tokens_dropped"] += sum(r.length for r in rollouts if r.group_id < self.first_id)
        for rollout in mine:
            self._tokens[rollout.group_id] = self._tokens.get(rollout.group_id, 0) + rollout.length
            self._count_in_vain(rollout)
        self.hearing.rollouts += rollouts
        self.inner.observe(mine)

    def emit(self, clock: Clock) -> Batch | None:
        try:
            batch = self.inner.emit(self._clock(clock))
        except Starved as error:
            sentence = f"{error} {self._about_limit()}".strip()
            if self._leave_if_hopeless(self._clock(clock).groups):
                return None
            raise Starved(sentence) from None
        if batch is None:
            return None
        self.hearing.emitted(clock)
        stage, fresh, self.fresh = self.stage, self.fresh, False
        return replace(
            batch,
            stage=self.number,
            kl_coef=batch.kl_coef if stage.kl_coef is None else stage.kl_coef,
            entropy_coef=batch.entropy_coef if stage.entropy_coef is None else stage.entropy_coef,
            minibatches=stage.minibatches or batch.minibatches,
            reset_reference=batch.reset_reference or (fresh and stage.reset_reference),
            reset_optimizer=batch.reset_optimizer or (fresh and stage.reset_optimizer),
        )

    def updated(self, clock: Clock, report: Report) -> None:
        self.inner.updated(self._clock(clock), report)
        self.step += 1
        held = self.inner.holds()
        heard = self.hearing.updated(clock, held)
        if self.lengths is not None:
            self.lengths.observe(heard)
        self.progress.observe([rollout for rollout in heard if rollout.group_id >= self.first_id])
        self.progress.update()
        self._tokens = {group_id: tokens for group_id, tokens in self._tokens.items() if group_id in held}
        if self.number + 1 < len(self.stages) and self._over():
            self._advance()

    def holds(self) -> set[int]:
        return self.inner.holds()

    def metrics(self) -> dict[str, float]:
        """Counters of all stages together; gauges of this one, `epoch` among them."""
        metrics = self.inner.metrics()
        epochs = self._epochs(metrics)
        for name, before in self._before.items():
            if (key := f"curriculum/{name}") in metrics:
                metrics[key] += before
        metrics |= {
            "curriculum/stage": float(self.number),
            "curriculum/stage_step": float(self.step),
            "curriculum/stage_epoch": epochs,
            "curriculum/stage_prompts": float(len(self.rows)),
            "curriculum/truncated_ema": self.progress.truncated or 0.0,
            "curriculum/border": float(self.border),
            "curriculum/late": float(self.late),
        }
        if self.stage.groups:
            metrics.setdefault("curriculum/groups", float(self.stage.groups))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        mask = np.zeros(len(self.ids), bool)
        mask[self.rows] = True
        return {
            "stage": self.number,
            "stages": len(self.stages),
            "prompts": len(self.ids),
            "subset": base64.b64encode(np.packbits(mask).tobytes()).decode(),
            "first_id": self.first_id,
            "next_id": self.next_id,
            "fresh": self.fresh,
            "step": self.step,
            "asked": self.asked,
            "border": self.border,
            "late": self.late,
            "in_vain": list(self.in_vain),
            "before": dict(self._before),
            "tokens": [list(pair) for pair in self._tokens.items()],
            "progress": self.progress.state_dict(),
            "hearing": self.hearing.state_dict(),
            "lengths": None if self.lengths is None else self.lengths.state_dict(),
            "inner": self.inner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["prompts"] != len(self.ids) or state["stages"] != len(self.stages):
            raise WhetError(
                f"The checkpoint was written over {state['prompts']} prompts in {state['stages']} stages, not the "
                f"{len(self.ids)} in {len(self.stages)} given now; resume with the same recipe and data, or start a "
                "new run."
            )
        packed = np.frombuffer(base64.b64decode(state["subset"]), np.uint8)
        self.next_id = state["first_id"]
        self._enter(state["stage"], np.flatnonzero(np.unpackbits(packed, count=len(self.ids))))
        self.inner.load_state_dict(state["inner"])
        for name in ("next_id", "fresh", "step", "asked", "border", "late"):
            setattr(self, name, state[name])
        self.in_vain = list(state.get("in_vain", (0, 0, 0)))
        self._before = dict(state["before"])
        self._tokens = dict(state["tokens"])
        self.progress.load_state_dict(state["progress"])
        self.hearing.load_state_dict(state.get("hearing", ()))
        if self.lengths is not None:
            self.lengths.load_state_dict(state["lengths"])

    # Stages

    def _enter(self, number: int, rows: np.ndarray) -> None:
        self.number = number
        self.rows = rows
        self.first_id = self.next_id
        self.step = self.asked = 0
        self.in_vain = [0, 0, 0]  # since the last right answer: groups begun, responses, truncated ones
        self.progress = Progress(keep=self.stage.plateau)
        self._tokens = {}
        self.inner: Curriculum = self.make(self.stage, self.ids.some(rows), self.first_id)
        self.needs = self.inner.needs

    def _advance(self) -> None:
        metrics = self.inner.metrics()
        for name in COUNTED:
            self._before[name] += metrics.get(f"curriculum/{name}", 0.0)
        held = self.inner.holds()  # the others are counted as kept or dropped already
        self._before["tokens_dropped"] += sum(self._tokens.get(group_id, 0) for group_id in held)
        self.border += len(held)
        self._enter(self.number + 1, self._rows(self.number + 1))
        self.fresh = True

    def _count_in_vain(self, rollout: Rollout) -> None:
        if rollout.verdict == "right":
            self.in_vain = [0, 0, 0]
        elif rollout.finish != "cut":
            found = (rollout.index == 0, 1, rollout.finish == "length")
            self.in_vain = [old + new for old, new in zip(self.in_vain, found, strict=True)]

    def _leave_if_hopeless(self, batch: int) -> bool:
        """Nothing right in a batch of groups, and nearly all of it truncated: on to the next stage, one at a time, as
        long as a wider limit is to come. Asked where no group is held or a batch starves, so that nothing is lost."""
        groups, responses, truncated = self.in_vain
        limit, later = self.limits[self.number], self.limits[self.number + 1 :]
        enough = groups >= batch and responses >= FEWEST and truncated > HOPELESS * responses
        if not enough or max(later, default=0) <= limit:
            return False
        why = f"Stage {self.number} ends early: {self._about_limit()} None was right in {groups} groups."
        self._advance()
        warnings.warn(f"{why} Stage {self.number} begins; give such a stage a wider limit, or none.", stacklevel=3)
        return True

    def _about_limit(self) -> str:
        """A sentence where the limit may be why nothing trains."""
        _, responses, truncated = self.in_vain
        limit = self.limits[self.number]
        if not truncated or limit == math.inf:
            return ""
        return (
            f"{truncated} of its last {responses} responses were truncated at its limit of {limit} tokens "
            f"(curriculum.stages.{self.number}.max_tokens)."
        )

    def _over(self) -> bool:
        """The first limit that is met ends the stage."""
        stage, truncated, epochs = self.stage, self.progress.truncated, self._epochs(self.inner.metrics())
        enough = bool(stage.truncated) and truncated is not None and truncated <= stage.truncated and epochs >= LEAST
        return (
            enough
            or (stage.steps > 0 and self.step >= stage.steps)
            or (stage.epochs > 0 and epochs >= stage.epochs)
            or self.progress.stalled(stage.plateau)
        )

    def _epochs(self, metrics: Mapping[str, float]) -> float:
        """Prompts handed out over prompts there are; one that is asked again for want of a verdict counts once."""
        return max(0.0, self.asked - metrics.get("curriculum/reasked", 0.0)) / len(self.rows)

    def _clock(self, clock: Clock) -> Clock:
        return replace(clock, groups=self.stage.groups) if self.stage.groups else clock

    # Subsets

    def _rows_of_tasks(self, stage: Stage) -> np.ndarray:
        return np.flatnonzero(of_tasks(self._tasks, stage.tasks)) if stage.tasks else np.arange(len(self.ids))

    def _rows(self, number: int) -> np.ndarray:
        """Of the stage's prompts. The mean is taken over the prompts of its tasks.

        A split by responses that leaves nothing, as where all are of one length, takes all: it is found in the middle
        of a run, which goes on, and `stage_prompts` tells.
        """
        stage, rows = self.stages[number], self._of_tasks[number]
        if stage.subset == "all" or not len(rows):
            return rows
        if stage.by == "responses" and self.lengths is not None:
            short = short_by_responses(self._characters[rows], self.lengths.tokens[rows], self.lengths.seen[rows])
        else:
            short = short_by_characters(self._characters[rows])
        chosen = rows[short if stage.subset == "short" else ~short]
        return rows if stage.by == "responses" and not len(chosen) else chosen

    def _check(self) -> None:
        """Before anything runs: every stage has prompts and an end, but for the last, and can be built."""
        for number, stage in enumerate(self.stages):
            where = f"curriculum.stages.{number}"
            assert not stage.tasks or len(self._tasks) == len(self.ids), "stages by task need the task of each prompt"
            split = stage.subset != "all"
            assert not split or len(self._characters) == len(self.ids), "a split needs the length of each prompt"
            if unknown := sorted(set(stage.tasks) - set(self._tasks)):
                raise WhetError(f'{where} wants prompts of task "{unknown[0]}", but the data has none.')
            if len(self.ids) and not len(self._rows(number)):
                raise WhetError(
                    f'{where} has no prompts: none is "{stage.subset}" by {stage.by}; take subset = "all" or more data.'
                )
            if number + 1 < len(self.stages) and not (stage.steps or stage.epochs or stage.truncated or stage.plateau):
                raise WhetError(f"{where} would never end; give it steps, epochs, truncated or plateau.")
            if number:  # what it refuses is better known now than at the border
                self.make(stage, self.ids.some(self._rows(number)), 0)
