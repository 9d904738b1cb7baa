"""What the TRL adapter is made of that knows no trainer: the course of a run, and a batch as TRL's loss sees it.

A `Course` is a curriculum over the rows of a data set, with its traces and counters. The functions before it turn
groups of any size into the equally many rows per slice that TRL's loss is a mean of.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet import config
from whet.curriculum.base import Saved, refuse_state
from whet.curriculum.build import Facts, build_curriculum
from whet.errors import WrongArgument
from whet.files import write_text, write_with
from whet.learn import losses
from whet.rollout.base import RolloutStore
from whet.tasks.base import PromptTable, problem_hash
from whet.types import Batch, Clock, Group, Key, Report, Rollout, Sampling

STATE = "whet.json"
TRACES = "whet.npz"
EPS = 1e-4  # TRL adds this to a standard deviation


# ---- rows: a batch as TRL's loss sees it


class Row(NamedTuple):
    rollout: Rollout
    # which group of the batch; -1 for a row that only fills the batch and weighs nothing
    group: int


def rows_of(batch: Batch, multiple: int) -> list[Row]:
    """The judged rollouts, group after group, and rows of weight 0 up to a multiple, since TRL cuts equal slices."""
    rows = [
        Row(rollout, number)
        for number, group in enumerate(batch.groups)
        for rollout in group.judged
    ]
    spare = rows[-1].rollout if rows else batch.groups[0].rollouts[0]
    missing = -len(rows) % multiple if rows else multiple
    return rows + [Row(replace(spare, terms={}), -1)] * missing


def row_factors(groups: Sequence[Group], rows: int, by_row: bool) -> list[float]:
    """What multiplies the advantages of each group, so that it has the weight w_g that the curriculum gives it.

    With w_g = Group.weight, or 1 / groups where that is None, and n_g judged rollouts of T_g tokens,
    `whet.learn.losses.token_weights` wants of a loss that TRL makes
    - as a mean over rows, sum_g w_g / n_g sum_i l_i: the factor is w_g * rows / n_g, where `rows` counts filling ones;
    - as a mean over tokens, sum_g w_g sum_t l_t / sum_g w_g T_g: the factor is w_g * sum_g T_g / sum_g w_g T_g.
    """
    weights = [1.0 / len(groups) if group.weight is None else group.weight for group in groups]
    if by_row:
        return [
            w * rows / max(1, len(group.judged)) for w, group in zip(weights, groups, strict=True)
        ]
    tokens = [sum(rollout.length for rollout in group.judged) for group in groups]
    weighed = sum(w * t for w, t in zip(weights, tokens, strict=True))
    return [w * sum(tokens) / weighed if weighed else 0.0 for w in weights]


def by_batch(groups: losses.Groups) -> list[np.ndarray]:
    """A_i = (r_i - mean of the group) / (std of all rewards of the batch + EPS)."""
    rewards = np.concatenate(groups)
    spread = rewards.std(ddof=1) + EPS if rewards.size > 1 else 1.0
    return [centred / spread for centred in losses.dr_grpo(groups)]


# TRL's advantages for groups of any size, by GRPO's scale_rewards or RLOO's normalize_advantages.
ADVANTAGES: dict[str | bool, Callable[[losses.Groups], list[np.ndarray]]] = {
    "group": lambda groups: losses.grpo(groups, EPS),
    "none": losses.dr_grpo,
    "batch": by_batch,
    False: losses.rloo,
    True: lambda groups: losses.reinforce_pp(losses.rloo(groups), EPS),
}


# ---- the course: data, curriculum and what they have come to


class Course(Saved):
    """A curriculum over the rows of a data set. It is the same on every rank, and it is what a checkpoint holds."""

    state_names = ("digest", "rounds", "tokens", "rollouts", "curriculum")

    def __init__(
        self, data: Any, settings: config.CurriculumSettings, sampling: Sampling, seed: int
    ) -> None:
        self.data, self.ids = data, prompt_ids(data)
        self.places = {name: place for place, name in enumerate(self.ids)}
        columns = {
            name: data[name] if name in data.column_names else () for name in ("level", "task")
        }
        texts = [
            p if isinstance(p, str) else "".join(str(turn["content"]) for turn in p)
            for p in data["prompt"]
        ]
        facts = Facts(
            ids=self.ids,
            levels=[
                level if isinstance(level, int | float) else None for level in columns["level"]
            ],
            characters=[len(text) for text in texts],
            tasks=[str(task) for task in columns["task"]],
        )
        self.curriculum: Any = build_curriculum(settings, facts=facts, sampling=sampling, seed=seed)
        self.store = RolloutStore()
        self.digest = problem_hash(
            "course", settings.model_dump_json(exclude={"groups"}), "\n".join(self.ids)
        )
        # rounds: batches emitted, which is the policy's version here
        self.rounds = self.tokens = self.rollouts = 0
        self.groups, self.progress = settings.groups, 0.0  # for the clock
        self.extras: dict[Key, dict[str, Any]] = {}  # what reward functions wrote by log_extra

    def row(self, prompt_id: str) -> dict[str, Any]:
        return dict(self.data[self.places[prompt_id]])

    @property
    def clock(self) -> Clock:
        now = self.rounds
        groups = self.groups
        tokens = self.tokens
        return Clock(
            step=now, version=now, groups=groups, free=None, tokens=tokens, progress=self.progress
        )

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts += len(rollouts)
        self.tokens += sum(rollout.length for rollout in rollouts)
        self.curriculum.observe(self.store.put(rollouts))

    def updated(self) -> None:
        """The batch is handed to TRL: what comes next belongs to the next round."""
        self.rounds += 1
        self.curriculum.updated(self.clock, Report(metrics={}))
        held = self.curriculum.holds()
        self.store.keep(held)
        self.extras = {key: extra for key, extra in self.extras.items() if key[0] in held}

    def save(self, folder: Path) -> None:
        write_with(
            folder / TRACES, lambda path: np.savez(path, allow_pickle=False, **self.store.arrays())
        )
        write_text(folder / STATE, json.dumps(self.state_dict()))

    def load(self, folder: Path) -> None:
        try:
            state = json.loads((folder / STATE).read_text())
            with (folder / TRACES).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                traces = dict(arrays)
            digest = state["digest"]
        except FileNotFoundError as missing:
            raise WrongArgument(
                f"{missing.filename} is missing; a checkpoint of stock TRL has no curriculum."
            ) from None
        except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as broken:
            raise WrongArgument(
                f"The curriculum's state in {folder} cannot be read ({broken!r})."
            ) from None
        if digest != self.digest:
            refuse_state(f"for other prompts or another curriculum ({folder / STATE})")
        self.load_state_dict(state)
        self.store.load(traces)


def prompt_ids(data: Any) -> Sequence[str]:
    """The column "id", else a hash of the prompt, so that ids stay the same when rows move."""
    if "prompt" not in data.column_names:
        raise WrongArgument('The training data has no column "prompt".')
    if "id" not in data.column_names:
        return PromptTable(
            list(data["prompt"]), [""] * len(data), "trl", origin="The training data"
        ).ids
    if None in (given := list(data["id"])):
        raise WrongArgument(
            f'Row {given.index(None)} of the training data has no id; fill the column "id" or drop it.'
        )
    return [str(name) for name in given]


def with_reward(
    rollout: Rollout, terms: Mapping[str, float], total: float, pass_at: float
) -> Rollout:
    """The rollout with its verdict; without any term (every reward function gave None) it stays unjudged."""
    if not terms:
        return rollout
    score = min(1.0, max(0.0, total))
    return replace(
        rollout,
        terms=terms,
        score=score,
        reward=total,
        verdict="right" if total >= pass_at else "wrong",
    )


def parts(
    items: Sequence[Any], size: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Slices of at most size * world items, in order, each with the share of this rank. Every rank has as many, by
    repeats of the last item, since some calls of TRL are collective."""
    for start in range(0, len(items), size * world):
        part = items[start : start + size * world]
        each = -(-len(part) // world)
        yield part, [*part, *[part[-1]] * world][rank * each : (rank + 1) * each]
