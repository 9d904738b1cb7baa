"""Plain warnings about a run that goes wrong quietly: each said once, with the knob to turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Metrics = Mapping[str, float]

PATIENCE = 5
"""A sign must stand for so many steps in a row: single steps are noise."""


def _judged(metrics: Metrics) -> float:
    """Responses the judges were given: masked ones are nobody's failure."""
    return sum(metrics.get(f"judge/{count}", 0.0) for count in ("right", "wrong", "unjudged"))


SIGNS: dict[str, tuple[Callable[[Metrics], bool], str]] = {
    "truncated": (
        lambda m: m.get("length/truncated", 0.0) > 0.5,
        "More than half of the responses hit the limit and were cut off; raise rollout.max_tokens.",
    ),
    "no_reward": (
        lambda m: m.get("verdict/right", 1.0) == 0.0,
        "Not one response was right for {patience} steps; the prompts are too hard for this model, or the judge does "
        "not see its answers (whet view shows them).",
    ),
    "unjudged": (
        lambda m: m.get("judge/unjudged", 0.0) > 0.05 * _judged(m),
        "More than 5% of the responses were not judged; mend the judge, or raise judge.timeout_s or judge.memory_mb. "
        "The last one: {complaint}.",
    ),
    "signal": (
        lambda m: m.get("learn/signal_share", 1.0) < 0.05,  # of what trains: a filter turns down the rest by design
        'Fewer than 5% of the groups trained on have both right and wrong answers; try curriculum.name = "dapo", more '
        "curriculum.rollouts, or prompts nearer to what the model can do.",
    ),
    "entropy": (
        lambda m: 0.0 < m.get("learn/entropy", 1.0) < 0.005,
        "The model's entropy is close to zero: it no longer explores; set learn.entropy_coef or lower learn.lr.",
    ),
    "slots": (
        lambda m: m.get("rollout/occupied", 1.0) < 0.4 and "rollout/gpu_seconds" in m,  # a CPU decodes row by row
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
    """Feed it each step's metrics; it answers with the sentences that are due now."""

    def __init__(self) -> None:
        self._streak = dict.fromkeys(SIGNS, 0)

    def check(self, metrics: Metrics, complaint: str = "") -> list[str]:
        """`complaint`: what the last failing judge said, told along with the warning about it."""
        due = []
        for name, (shows, sentence) in SIGNS.items():
            self._streak[name] = self._streak[name] + 1 if shows(metrics) else min(self._streak[name], 0)
            if self._streak[name] == PATIENCE:
                due.append(sentence.format(patience=PATIENCE, complaint=complaint))
                self._streak[name] = -(10**9)  # never again in this run
        return due
