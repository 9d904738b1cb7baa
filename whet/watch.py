"""What a run shows of itself: metrics of a step, where its time went, warnings, and the guard against collapse.

`loop` calls everything here after each step. A warning is given once per run, with the setting to change. The guard
ends a run whose evaluations have fallen far below what they were, beyond chance: such a run seldom comes back, and
costs as much as one that learns. What they remember (`Guards`) is saved with every checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from whet.types import Group, Rollout, Verdict

Metrics = Mapping[str, float]
VERDICTS = get_args(Verdict)

# Classes of a group's pass rate in percent: never right, above the class before and up to 25, ..., always right.
PASS_RATES = ("0", "to_25", "to_50", "to_75", "to_100", "100")


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """reward/*, verdict/* and length/* of the training rollouts judged during a step; {} for none. verdict/* are shares
    of them, but verdict/mixed: of their groups, those with right and wrong ones."""
    # The engine counts cut rollouts, which never finished; the caller drops what finished beside them (`Evidence`).
    done = [r for r in rollouts if r.finish != "cut"]
    if not done:
        return {}
    metrics = {f"verdict/{v}": sum(r.verdict == v for r in done) / len(done) for v in VERDICTS}
    groups: dict[int, set[Verdict]] = {}
    for rollout in done:
        groups.setdefault(rollout.group_id, set()).add(rollout.verdict)
    metrics["verdict/mixed"] = sum({"right", "wrong"} <= found for found in groups.values()) / len(
        groups
    )
    if rewards := [r.reward for r in done if r.reward is not None]:
        metrics["reward/mean"] = float(np.mean(rewards))
    for name in dict.fromkeys(name for r in done for name in r.terms):
        metrics[f"reward/{name}"] = float(np.mean([r.terms[name] for r in done if name in r.terms]))
    return metrics | {f"length/{name}": value for name, value in length_metrics(done).items()}


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean, percentiles and maximum of the lengths, mean lengths of right and wrong ones, and the truncated share."""
    lengths = {"": [r.length for r in rollouts]}
    lengths |= {v: [r.length for r in rollouts if r.verdict == v] for v in ("right", "wrong")}
    metrics = {name or "mean": float(np.mean(found)) for name, found in lengths.items() if found}
    metrics |= {f"p{share}": float(np.percentile(lengths[""], share)) for share in (50, 90, 99)}
    truncated = sum(r.finish == "length" for r in rollouts) / len(rollouts)
    return {**metrics, "max": float(max(lengths[""])), "truncated": truncated}


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """pass_rate/CLASS of `PASS_RATES`: the share of a batch's groups in each; groups without a verdict are left out."""
    rates = [group.pass_rate for group in groups if group.judged]
    classes = [pass_rate_class(rate) for rate in rates]
    return (
        {f"pass_rate/{name}": classes.count(name) / len(rates) for name in PASS_RATES}
        if rates
        else {}
    )


def pass_rate_class(rate: float) -> str:
    """
    >>> [pass_rate_class(k / 8) for k in (0, 1, 2, 3, 7, 8)]
    ['0', 'to_25', 'to_25', 'to_50', 'to_100', '100']
    """
    return "100" if rate == 1.0 else PASS_RATES[math.ceil(4 * rate)]


def gpu_metrics(
    generating: float | None, learning: float | None, step_s: float
) -> dict[str, float]:
    """The learner's seconds on a GPU and the share of a step in which it idled; {} where there is no GPU.

    >>> gpu_metrics(1.5, 3.0, 5.0), gpu_metrics(2.1, 3.0, 5.0)["time/gpu_idle"]
    ({'learn/gpu_seconds': 3.0, 'time/gpu_idle': 0.1}, 0.0)
    """
    if learning is None or generating is None:
        return {}
    idle = max(0.0, round(1.0 - (generating + learning) / step_s, 6)) if step_s > 0 else 0.0
    return {"learn/gpu_seconds": learning, "time/gpu_idle": idle}


class Stopwatch:
    """Seconds by name since the row of metrics before, for time/*.

    generate, judge, log_probs (under the policy before the update, and the reference), train, sync (memory is lent and
    taken back), eval, save (rollouts, and the checkpoint after the row before), idle (the curriculum, and the rest).
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` of `source` as `target`."""
        if seconds > 0:
            self.seconds[source] -= seconds
            self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def without(self, *names: str) -> float:
        """Seconds up to now, less those of these names."""
        return time.perf_counter() - self.start - sum(self.seconds.get(name, 0.0) for name in names)

    def metrics(self) -> dict[str, float]:
        """time/NAME, time/total, and time/idle: what no name accounts for."""
        total = time.perf_counter() - self.start
        named = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        return {
            **named,
            "time/total": total,
            "time/idle": max(0.0, total - sum(self.seconds.values())),
        }


PATIENCE = 5  # steps in a row for which a sign must stand: single steps are noise
AT_ONCE = 3  # updates in a row that changed nothing, which is hardly noise, until that is said
SIGNS: dict[str, tuple[Callable[[Metrics], bool], str]] = {
    "no_signal": (
        lambda m: m.get("learn/signal_share") == 0.0,
        "Nothing was learned in {at_once} updates: no group had both right and wrong answers. If hardly any is right, "
        "begin with a warm start ([[warm_start]]), take easier prompts or raise rollout.max_tokens; if nearly all are, "
        "take harder ones. whet probe tells which, and whet view whether the judge sees the answers.",
    ),
    "truncated": (
        lambda m: m.get("length/truncated", 0.0) > 0.5,
        "More than half of the responses hit the limit and were cut off; raise rollout.max_tokens.",
    ),
    "no_reward": (  # with a signal all the same, as from partial rewards
        lambda m: m.get("verdict/right", 1.0) == 0.0 and m.get("learn/signal_share") != 0.0,
        "Not one response was right for {patience} steps; the prompts are too hard for this model, or the judge does "
        "not see its answers (whet view shows them).",
    ),
    "unjudged": (
        # The counts are those of the judges, which masked responses never reach.
        lambda m: (
            m.get("judge/unjudged", 0.0)
            > 0.05 * sum(m.get(f"judge/{verdict}", 0.0) for verdict in VERDICTS)
        ),
        "More than 5% of the responses were not judged; repair the judge, or raise judge.timeout_s or judge.memory_mb. "
        "The last one: {complaint}.",
    ),
    "signal": (
        # Share of what trains: a filter drops the rest by design. Of none at all `no_signal` speaks.
        lambda m: 0.0 < m.get("learn/signal_share", 1.0) < 0.05,
        'Fewer than 5% of the groups trained on have both right and wrong answers; try curriculum.name = "dapo", more '
        "curriculum.rollouts, or prompts nearer to what the model can do.",
    ),
    "entropy": (
        lambda m: 0.0 < m.get("learn/entropy", 1.0) < 0.005,
        "The model's entropy is close to zero: it no longer explores; set learn.entropy_coef or lower learn.lr.",
    ),
    "slots": (
        lambda m: (
            m.get("rollout/occupied", 1.0) < 0.4 and "rollout/gpu_seconds" in m
        ),  # a CPU decodes row by row
        "The engine runs with fewer than 40% of its slots, and a GPU takes hardly longer for all of them; raise "
        "curriculum.groups, with learn.minibatches in proportion, or curriculum.max_age and curriculum.look_ahead.",
    ),
    "mismatch": (
        lambda m: m.get("learn/mismatch", 0.0) > 0.1,
        "Recorded and recomputed log-probabilities drift apart; lower curriculum.max_age, or use model.dtype = "
        '"float32".',
    ),
}


class Advice:
    """Turns each step's metrics into the sentences that are due now."""

    def __init__(self) -> None:
        self._streak = dict.fromkeys(SIGNS, 0)

    def check(self, metrics: Metrics, complaint: str = "") -> list[str]:
        """`complaint`: what the last failing judge said, which the warning about it quotes."""
        due = []
        for name, (shows, sentence) in SIGNS.items():
            self._streak[name] = (
                self._streak[name] + 1 if shows(metrics) else min(self._streak[name], 0)
            )
            if self._streak[name] == (AT_ONCE if name == "no_signal" else PATIENCE):
                due.append(sentence.format(patience=PATIENCE, at_once=AT_ONCE, complaint=complaint))
                self._streak[name] = -(10**9)  # never again in this run
        return due

    def state_dict(self) -> dict[str, int]:
        return dict(self._streak)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._streak |= {name: streak for name, streak in state.items() if name in SIGNS}


# mean differences of log-probs that rounding makes, and that it never makes
SOUND, UNSOUND = 0.01, 0.1


def mismatch_jump(before: float | None, now: float) -> bool:
    """Whether `learn/mismatch` of rollouts that the newest weights wrote says that the engine has other weights.
    `before`: that of the update before; None for the first, and where bf16 is never sound nothing is said.

    >>> mismatch_jump(1e-6, 2.0), mismatch_jump(1e-6, 0.02), mismatch_jump(0.03, 0.2), mismatch_jump(None, 2.0)
    (True, False, False, False)
    """
    return before is not None and before < SOUND and now > UNSOUND


# share of its best accuracy that an evaluation must stay above, or within chance of the best
FALL = 0.5
COLLAPSE_PATIENCE = 2  # evaluations in a row that must show the fall


@dataclass(slots=True)
class Level:
    """An evaluation set's best so far, how often it was evaluated, and how often in a row it was far below."""

    accuracy: float
    low: float
    step: int
    times: int = 0
    fallen: int = 0


class CollapseGuard:
    """
    >>> guard = CollapseGuard()
    >>> fine = {"eval/test/accuracy": 0.4, "eval/test/accuracy_low": 0.35, "eval/test/accuracy_high": 0.45}
    >>> worse = {"eval/test/accuracy": 0.1, "eval/test/accuracy_low": 0.08, "eval/test/accuracy_high": 0.13}
    >>> [guard.check(step, metrics) for step, metrics in ((0, fine), (10, worse))]
    ['', '']
    >>> guard.check(20, worse)
    'The accuracy on test fell from 0.400 after step 0 to 0.100'
    """

    def __init__(self) -> None:
        self.levels: dict[str, Level] = {}

    def check(self, step: int, metrics: Metrics) -> str:
        """A sentence on what has collapsed, if all sets have that were evaluated more than once; else ""."""
        found = ""
        for name in [
            key[5:-9] for key in metrics if key.startswith("eval/") and key.endswith("/accuracy")
        ]:
            accuracy, low, high = (
                metrics[f"eval/{name}/accuracy{end}"] for end in ("", "_low", "_high")
            )
            level = self.levels.setdefault(name, Level(accuracy, low, step))
            if low > level.low:
                level.accuracy = accuracy
                level.low = low
                level.step = step
            level.times += 1
            level.fallen = (
                level.fallen + 1 if high < level.low and accuracy < FALL * level.accuracy else 0
            )
            if level.fallen:
                best = f"{level.accuracy:.3f} after step {level.step}"
                found = f"The accuracy on {name} fell from {best} to {accuracy:.3f}"
        again = [level for level in self.levels.values() if level.times > 1]
        return found if again and all(level.fallen >= COLLAPSE_PATIENCE for level in again) else ""

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {name: asdict(level) for name, level in self.levels.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self.levels = {name: Level(**level) for name, level in state.items()}


class Guards:
    """What a run remembers of itself, to warn once and to notice that something is no longer as it was."""

    def __init__(self) -> None:
        self.advice, self.collapse = Advice(), CollapseGuard()
        # learn/mismatch of the last update on rollouts of the newest weights
        self.sound: float | None = None

    def state_dict(self) -> dict[str, Any]:
        advice = self.advice.state_dict()
        collapse = self.collapse.state_dict()
        return {"advice": advice, "collapse": collapse, "sound": self.sound}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.advice.load_state_dict(state["advice"])
        self.collapse.load_state_dict(state["collapse"])
        self.sound = state["sound"]
