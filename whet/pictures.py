"""What a run draws of itself, for the page: one object per step (RUN/pictures.jsonl), and the tokens of saved rollouts.

`loop.Log` makes one `Pictures` and calls it at each step. All of it follows from what is counted or at hand anyway:
the requests and judged rollouts of the step, the curriculum's counters, and what engine and sources note besides
(`pictures`, which a curriculum or an engine of another kind need not have). Keys that a run cannot give are left out.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from whet import __version__
from whet.curriculum.base import pictures_of
from whet.text import Codec
from whet.types import Group, Key, Prompt, Request, Rollout

BINS = 10  # pass rates are counted in 0, 0.1, ..., 1
DETAILED = 20_000  # tokens of a file of rollouts that are written one by one, beside the text
SHARE = "draft/share_"  # metrics: the share of the time of each way to speculate
# Counters of a curriculum (since the start of the run) whose growth in a step is a part of its flow.
FLOW = {"too_easy": ("rejected_easy",), "too_hard": ("rejected_hard",), "stale": ("cut", "expired")}
Lookup = Callable[[str], Prompt]
PHASES = {"screened": "screen", "continued": "continue", "probed": "probe"}


class Pictures:
    """Gathers a step's object. Nothing of it is saved: it is whole when the step's row of metrics is written."""

    def __init__(self, counters: Mapping[str, float]) -> None:
        """counters: the curriculum's, where the run begins or goes on."""
        self.before = counters
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.start = time.perf_counter()
        self.asked: Counter[str] = Counter()
        self.noted: dict[str, Any] = {}  # by engine and curriculum

    def observe(self, asked: Iterable[Request]) -> None:
        for request in asked:
            self.asked[request.phase] += 1
            self.asked["asked"] += request.first_index == 0

    def note(self, engine: object, curriculum: object) -> None:
        """Ask engine and curriculum; to be called before the engine's counters are reset."""
        self.noted = {**pictures_of(engine), **pictures_of(curriculum)}
        if running := self.noted.get("running"):
            self.noted["running"] = [
                [round(max(0.0, at - self.start), 3), rows] for at, rows in running
            ]

    def drawn(
        self,
        seen: Sequence[Rollout],
        trained: Sequence[Group],
        metrics: Mapping[str, float],
        lookup: Lookup,
    ) -> dict[str, Any]:
        """The object of this step. seen: what was judged in it; metrics: its row; lookup: the prompt of an id."""
        judged = [rollout for rollout in seen if rollout.judged and rollout.finish != "cut"]
        shares = {
            name.removeprefix(SHARE): value
            for name, value in metrics.items()
            if name.startswith(SHARE)
        }
        found = {
            "pass_rates": pass_rates(judged) if judged else None,
            "flow": flow(self.asked, self.before, metrics, len(trained)),
            "levels": by_level(judged, lookup) or None,
            "arm": max(shares, key=lambda name: shares[name], default=None),
            **self.noted,
        }
        self.before = metrics
        return {name: value for name, value in found.items() if value is not None}


def pass_rates(judged: Iterable[Rollout]) -> list[int]:
    """Groups by pass rate, as far as their rollouts came in this step: 11 counts, for 0, 0.1, ..., 1. The first and the
    last are of groups that were never and always right, whatever their size: of those without signal."""
    counts = [0] * (BINS + 1)
    groups: dict[int, list[bool]] = {}
    for rollout in judged:
        groups.setdefault(rollout.group_id, []).append(rollout.verdict == "right")
    for hits in groups.values():
        mixed = min(max(round(BINS * sum(hits) / len(hits)), 1), BINS - 1)
        counts[BINS if all(hits) else mixed if any(hits) else 0] += 1
    return counts


def flow(
    asked: Mapping[str, int], before: Mapping[str, float], after: Mapping[str, float], trained: int
) -> dict[str, int]:
    """Where groups went in a step: requested, rejected, trained, dropped as stale (cut by an update, or too old), and
    spare: ready to train, and kept for a later update."""
    found = {"asked": asked.get("asked", 0) - asked.get("probe", 0)}
    found |= {name: asked[phase] for name, phase in PHASES.items() if asked.get(phase)}
    for name, counters in FLOW.items():
        if keys := [key for counter in counters if (key := f"curriculum/{counter}") in after]:
            found[name] = int(sum(max(0.0, after[key] - before.get(key, 0.0)) for key in keys))
    ready = {"spare": int(after["curriculum/ready"])} if "curriculum/ready" in after else {}
    return found | {"trained": trained} | ready


def by_level(judged: Iterable[Rollout], lookup: Lookup) -> dict[str, list[int]]:
    """Judged rollouts, and right ones among them, of each level that the prompts have."""
    levels: dict[str, list[int]] = {}
    for (prompt_id, right), count in Counter(
        (r.prompt_id, r.verdict == "right") for r in judged
    ).items():
        if (level := lookup(prompt_id).meta.get("level")) is not None:
            total = levels.setdefault(str(level), [0, 0])
            total[0], total[1] = total[0] + count, total[1] + right * count
    return dict(sorted(levels.items()))


# ---- rollouts, token by token


def token_rows(
    rollouts: Sequence[Rollout], codec: Codec, entropies: Mapping[Key, np.ndarray]
) -> list[dict[str, Any]]:
    """For each rollout its text in pieces, one per token, with the log-prob of each, its entropy where it is known, and
    whether it came from a draft (1); of the first rollouts only, since text alone is a tenth of that."""
    rows = list[dict[str, Any]]()
    room = DETAILED
    for rollout in rollouts:
        trace = rollout.trace
        row = dict[str, Any]()
        room -= rollout.length
        if (
            trace is not None
            and room >= 0
            and (pieces := codec.pieces(trace.ids.tolist())) is not None
        ):
            row = {"pieces": pieces, "log_probs": _short(trace.log_probs)}
            if trace.guessed is not None:
                row["drafted"] = "".join("01"[mark] for mark in trace.guessed.tolist())
            if (known := entropies.get(rollout.key)) is not None:
                row["entropies"] = _short(known)
        rows.append(row)
    return rows


def _short(values: np.ndarray) -> list[float]:
    return [round(value, 2) for value in values.tolist()]


# ---- the machine


def machine(device: str, cards: int, recipe: str) -> dict[str, str]:
    """RUN/machine.json. device: the name of the GPU, or "" for a CPU."""
    from whet.processes import available_cores  # not at the top: it imports what imports this file

    cores = available_cores()
    hardware = (
        f"{cards} x {device}"
        if device
        else f"{cores} core{'s' * (cores > 1)}, {platform.machine()}"
    )
    versions = {"whet": __version__, "torch": installed("torch")}
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "hardware": hardware,
        **versions,
        "python": platform.python_version(),
        "started": started,
        "recipe": recipe,
    }


def installed(package: str) -> str:
    """Its version; "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
