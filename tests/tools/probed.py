"""Judged rollouts of prompts whose counts of right ones are given."""

from __future__ import annotations

from collections.abc import Sequence

from whet.tools.probe import ProbeReport, probe_report
from whet.types import Prompt, Rollout, Sampling


def probed(
    right: Sequence[int],
    n: int,
    *,
    limit: int = 512,
    right_length: int = 100,
    wrong_length: int = 200,
    unjudged: Sequence[int] = (),
) -> tuple[list[Prompt], list[Rollout]]:
    """Prompt i has right[i] right rollouts of n; in the prompts named in `unjudged` the last rollout has no verdict.

    A wrong response as long as the limit was cut there.
    """
    prompts = [Prompt(id=f"p{i}", text="x", answer="1", task="t") for i in range(len(right))]
    rollouts = []
    for i, hits in enumerate(right):
        for index in range(n):
            length = right_length if index < hits else wrong_length
            verdict = (
                "unjudged"
                if i in unjudged and index == n - 1
                else "right"
                if index < hits
                else "wrong"
            )
            rollouts.append(
                Rollout(
                    prompt_id=f"p{i}",
                    group_id=i,
                    index=index,
                    phase="probe",
                    sampling=Sampling(max_tokens=limit),
                    length=length,
                    finish="length" if length == limit else "stop",
                    first_version=0,
                    last_version=0,
                    verdict=verdict,  # type: ignore[arg-type]
                )
            )
    return prompts, rollouts


def report_of(
    right: Sequence[int], n: int, *, group: int, limit: int = 512, **more: int
) -> ProbeReport:
    prompts, rollouts = probed(right, n, limit=limit, **more)  # type: ignore[arg-type]
    return probe_report(prompts, rollouts, n=n, limit=limit, group=group)
