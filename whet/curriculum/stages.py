"""FastCuRL's stages (arXiv 2503.17287) around any curriculum, each with prompts, a token limit and coefficients.

The next stage has prompts and groups of its own: a group never mixes stages. What the old stage still holds is dropped
and counted, and so is what arrives for it later. The paper ends a stage by hand: the first when about 10% of the
responses are truncated, the others after about an epoch, with the checkpoint picked by a benchmark. The rule here is
OURS: the first of the stage's limits that is met, on averages over 20 updates (`base.Progress`), and never by a
benchmark. The last stage never ends.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import ValidationError

from whet import config
from whet.config import Stage
from whet.curriculum.base import (
    Curriculum,
    Evidence,
    Progress,
    Saved,
    Wrapper,
    expect,
    from_json,
    named,
    refuse_state,
)
from whet.curriculum.groups import COUNTERS
from whet.curriculum.source import Ids
from whet.errors import Starved, WhetError
from whet.types import Batch, Clock, Report, Request, Rollout, Sampling

# (stage, ids of its prompts, id of its first group)
Make = Callable[[Stage, Sequence[str], int], Curriculum]

# passes over its prompts before the share of truncated responses may end a stage. OURS
LEAST = 0.25
# A stage ends at once if more than this share of the responses since the last right one is truncated, over a batch of
# groups and at least so many responses. OURS.
HOPELESS = 0.95
FEWEST = 16
# Metrics that count since the start of a run and go on over borders; all others are gauges of the present stage.
COUNTED = (
    *COUNTERS,
    "probed",
    "screened",
    "qualified",
    "rollouts_saved",
    "skipped_solved",
    "resets",
)

# ---- which prompts a stage trains on


def short_by_characters(characters: np.ndarray) -> np.ndarray:
    """True where length <= floor(mean): FastCuRL takes the length of a problem as a cheap sign of that of its answer.

    This is the rule of its published files: L1 is the short part (24,976 of 40,315 problems), L3 the rest, L2 all.
    Never all False, since the shortest is at most the mean; all True where all lengths are equal.
    """
    lengths = np.asarray(characters, np.int64)
    return lengths <= lengths.sum() // max(1, len(lengths))


def short_by_responses(characters: np.ndarray, tokens: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """True where a prompt's mean response is not longer than the mean over all prompts that have any. OURS.

    `tokens` is the sum over the `seen` responses of each prompt. A prompt without a response goes by its characters,
    against those of all others: the two units are never compared with each other.
    """
    visited = np.asarray(seen) > 0
    short = short_by_characters(characters)
    if visited.any():
        means = np.asarray(tokens)[visited] / np.asarray(seen)[visited]
        short[visited] = means <= means.mean()
    return short


class LengthRecord(Saved):
    """Tokens and number of a prompt's responses over the whole run, for stages that split by them.

    Cut rollouts do not count; those that end at the limit count with the limit.
    """

    state_names = ("tokens", "seen")

    def __init__(self, ids: Sequence[str]):
        self.ids = Ids.of(ids)
        self.tokens, self.seen = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        done = [rollout for rollout in rollouts if rollout.finish != "cut"]
        rows = self.ids.rows([rollout.prompt_id for rollout in done])
        np.add.at(
            self.tokens, rows[rows >= 0], np.array([r.length for r in done], np.int64)[rows >= 0]
        )
        np.add.at(self.seen, rows[rows >= 0], 1)


# ---- settings of a stage


def named_in(stage: Stage, names: Sequence[str]) -> list[str]:
    """Those of these settings that a stage has for itself; the others are the recipe's."""
    return [name for name in names if getattr(stage, name) != Stage.model_fields[name].default]


def stage_sampling(stage: Stage, sampling: Sampling) -> Sampling:
    """The sampling of a stage: what it leaves open is as in `sampling`."""
    limit = stage.max_tokens or sampling.max_tokens
    temperature = stage.temperature or sampling.temperature
    return replace(sampling, max_tokens=limit, temperature=temperature)


def stage_settings(stage: Stage, settings: config.CurriculumSettings) -> config.CurriculumSettings:
    """The settings of the curriculum inside a stage, validated like those of a recipe."""
    own = {
        "groups": stage.groups or settings.groups,
        "rollouts": stage.rollouts or settings.rollouts,
        "stages": (),
    }
    try:
        return config.CurriculumSettings.model_validate({**settings.model_dump(), **own})
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise WhetError(f"A stage of curriculum.stages does not fit: {message}.") from None


# ---- the curriculum


class Stages(Wrapper):
    """Runs `stages` one after the other. A source may carry over what it learnt; that is the business of `make`.

    `characters` and `tasks` are those of each prompt, in the order of `ids`, needed where a stage splits by them;
    `max_tokens` is the limit of a stage that names none (0: it has none).
    """

    state_names: tuple[str, ...] = (
        *(
            "ids",
            "next_id",
            "fresh",
            "step",
            "asked",
            "border",
            "late",
            "without_result",
            "_before",
            "_tokens",
        ),
        *("progress", "evidence", "lengths", "inner", "rows", "first_id"),
    )

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
        self.stages, self.make, self.ids = tuple(stages), make, Ids.of(ids)
        self.limits = [stage.max_tokens or max_tokens or math.inf for stage in stages]
        self._characters = np.asarray(characters, np.int64)
        self._tasks = tasks
        named_tasks = np.asarray(tasks, dtype=str) if any(stage.tasks for stage in stages) else ()
        self._of_tasks = [  # now: it is too slow for a border
            np.flatnonzero(np.isin(named_tasks, list(stage.tasks)))
            if stage.tasks
            else np.arange(len(self.ids))
            for stage in stages
        ]
        by_responses = any(stage.by == "responses" and stage.subset != "all" for stage in stages)
        self.lengths = LengthRecord(self.ids) if by_responses else None
        self._check()
        self.border = self.late = 0  # groups dropped at borders, rollouts that came after theirs
        self.next_id = 0
        self.evidence = Evidence()
        self.fresh = False  # the first batch after a border is still to come
        self._before = dict.fromkeys(COUNTED, 0.0)  # counts of the stages that are over
        # tokens of the groups held, for the count of what a border drops
        self._tokens: dict[int, int] = {}
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
        self._before["tokens_dropped"] += sum(
            r.length for r in rollouts if r.group_id < self.first_id
        )
        for rollout in mine:
            self._tokens[rollout.group_id] = self._tokens.get(rollout.group_id, 0) + rollout.length
        last = max(
            (place for place, rollout in enumerate(mine) if rollout.verdict == "right"), default=-1
        )
        since = [rollout for rollout in mine[last + 1 :] if rollout.finish != "cut"]
        found = (
            sum(r.index == 0 for r in since),
            len(since),
            sum(r.finish == "length" for r in since),
        )
        before = self.without_result if last < 0 else (0, 0, 0)
        self.without_result: list[int] = [old + new for old, new in zip(before, found, strict=True)]
        self.evidence.rollouts += rollouts
        self.inner.observe(mine)

    def emit(self, clock: Clock) -> Batch | None:
        try:
            batch = self.inner.emit(self._clock(clock))
        except Starved as error:
            sentence = f"{error} {self._about_limit()}".strip()
            if self._leave_if_hopeless(self._clock(clock).groups):
                return None
            later = range(self.number + 1, len(self.stages))
            nothing_new = all(np.array_equal(self._rows(number), self.rows) for number in later)
            # That this stage's prompts are solved is the end of the training only where no others are to come.
            raise (type(error) if nothing_new else Starved)(sentence) from None
        if batch is None:
            return None
        self.evidence.emitted(clock)
        stage = self.stage
        fresh = self.fresh
        self.fresh = False
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
        rollouts = self.evidence.updated(clock, held)
        if self.lengths is not None:
            self.lengths.observe(rollouts)
        self.progress.update([rollout for rollout in rollouts if rollout.group_id >= self.first_id])
        self._tokens = {
            group_id: tokens for group_id, tokens in self._tokens.items() if group_id in held
        }
        if self.number + 1 < len(self.stages) and self._over():
            self._advance()

    def metrics(self) -> dict[str, float]:
        """Counters of all stages together, and gauges of the present one, `epoch` among them."""
        metrics = self.inner.metrics()
        epochs = self._epochs(metrics)
        for name, before in self._before.items():
            if (key := f"curriculum/{name}") in metrics:
                metrics[key] += before
        own = {
            "stage": self.number,
            "stage_step": self.step,
            "stage_epoch": epochs,
            "stage_prompts": len(self.rows),
            "truncated_ema": self.progress.truncated or 0.0,
            "border": self.border,
            "late": self.late,
        }
        if self.stage.groups:
            metrics.setdefault("curriculum/groups", float(self.stage.groups))
        return metrics | named(own)

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.number, "stages": len(self.stages), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        expect(state, "stages", "stage", "rows", "first_id", "ids")
        if state["stages"] != len(self.stages):
            refuse_state(f"in {state['stages']} stages, not the {len(self.stages)} given now")
        self.ids.load_state_dict(state["ids"])
        self.next_id = state["first_id"]
        self._enter(state["stage"], from_json(state["rows"]))
        super().load_state_dict(state)

    # Borders

    def _enter(self, number: int, rows: np.ndarray) -> None:
        self.number, self.rows, self.first_id = number, rows, self.next_id
        self.step = self.asked = 0
        # since the last right answer: groups begun, responses, truncated ones
        self.without_result = [0, 0, 0]
        self.progress = Progress(self.stage.plateau)
        self._tokens = {}
        self.inner: Curriculum = self.make(self.stage, self.ids.some(rows), self.first_id)
        self.needs = self.inner.needs

    def _advance(self) -> None:
        metrics = self.inner.metrics()
        for name in COUNTED:
            self._before[name] += metrics.get(f"curriculum/{name}", 0.0)
        held = self.inner.holds()  # all other groups are counted as kept or dropped already
        self._before["tokens_dropped"] += sum(self._tokens.get(group_id, 0) for group_id in held)
        self.border += len(held)
        self._enter(self.number + 1, self._rows(self.number + 1))
        self.fresh = True

    def _over(self) -> bool:
        """The first limit that is met ends the stage."""
        stage = self.stage
        truncated = self.progress.truncated
        epochs = self._epochs(self.inner.metrics())
        enough = (
            bool(stage.truncated)
            and truncated is not None
            and truncated <= stage.truncated
            and epochs >= LEAST
        )
        spent = 0 < stage.steps <= self.step or 0 < stage.epochs <= epochs
        return enough or spent or self.progress.stalled

    def _epochs(self, metrics: Mapping[str, float]) -> float:
        """Prompts requested per prompt of the stage; one that is requested again for lack of a verdict counts once."""
        return max(0.0, self.asked - metrics.get("curriculum/reasked", 0.0)) / len(self.rows)

    def _leave_if_hopeless(self, batch: int) -> bool:
        """End a stage with nothing right in a batch of groups and nearly all truncated, if a wider limit is to come.
        Called only where no group is held or a batch starves, so nothing is lost. It moves on one stage at a time."""
        groups, responses, truncated = self.without_result
        limit = self.limits[self.number]
        later = self.limits[self.number + 1 :]
        enough = groups >= batch and responses >= FEWEST and truncated > HOPELESS * responses
        if not enough or max(later, default=0) <= limit:
            return False
        why = f"Stage {self.number} ends early: {self._about_limit()} None was right in {groups} groups."
        self._advance()
        warnings.warn(
            f"{why} Stage {self.number} begins; give such a stage a wider limit, or none.",
            stacklevel=3,
        )
        return True

    def _about_limit(self) -> str:
        """A sentence for the case that the limit is why nothing trains."""
        _, responses, truncated = self.without_result
        limit = self.limits[self.number]
        if not truncated or limit == math.inf:
            return ""
        setting = (
            f"curriculum.stages.{self.number}.max_tokens"
            if self.stage.max_tokens
            else "rollout.max_tokens"
        )
        cut = f"{truncated} of its last {responses} responses were truncated"
        return f"{cut} at its limit of {limit} tokens ({setting})."

    def _clock(self, clock: Clock) -> Clock:
        return replace(clock, groups=self.stage.groups) if self.stage.groups else clock

    # Subsets

    def _rows(self, number: int) -> np.ndarray:
        """The rows of a stage's prompts. The mean length is taken over the prompts of its tasks.

        If a split by responses leaves nothing, as where all have one length, the stage takes all: this turns up in the
        middle of a run, which goes on, and `stage_prompts` shows it.
        """
        stage = self.stages[number]
        rows = self._of_tasks[number]
        if stage.subset == "all" or not len(rows):
            return rows
        if stage.by == "responses" and self.lengths is not None:
            short = short_by_responses(
                self._characters[rows], self.lengths.tokens[rows], self.lengths.seen[rows]
            )
        else:
            short = short_by_characters(self._characters[rows])
        chosen = rows[short if stage.subset == "short" else ~short]
        return rows if stage.by == "responses" and not len(chosen) else chosen

    def _check(self) -> None:
        """Check before anything runs that every stage has prompts, can be built and, but for the last, can end."""
        for number, stage in enumerate(self.stages):
            where = f"curriculum.stages.{number}"
            assert not stage.tasks or len(self._tasks) == len(self.ids), (
                "stages by task need the task of each prompt"
            )
            split = stage.subset != "all"
            assert not split or len(self._characters) == len(self.ids), (
                "a split needs the length of each prompt"
            )
            if unknown := sorted(set(stage.tasks) - set(self._tasks)):
                raise WhetError(
                    f'{where} wants prompts of task "{unknown[0]}", but the data has none.'
                )
            if len(self.ids) and not len(self._rows(number)):
                cure = 'take subset = "all" or more data'
                raise WhetError(
                    f'{where} has no prompts: none is "{stage.subset}" by {stage.by}; {cure}.'
                )
            if number + 1 < len(self.stages) and not (
                stage.steps or stage.epochs or stage.truncated or stage.plateau
            ):
                raise WhetError(
                    f"{where} would never end; give it steps, epochs, truncated or plateau."
                )
            if number:  # a stage that cannot be built is better refused now than at its border
                self.make(stage, self.ids.some(self._rows(number)), 0)
