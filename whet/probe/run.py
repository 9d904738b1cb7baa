"""The rollouts of a probe: n for each prompt, judged."""

from __future__ import annotations

from collections.abc import Sequence

from whet.eval import Told, Verdicts, judged_slices
from whet.rollout.base import Engine
from whet.types import Prompt, Request, Rollout, Sampling


def run_probe(
    prompts: Sequence[Prompt],
    engine: Engine,
    judge: Verdicts,
    *,
    n: int,
    sampling: Sampling,
    told: Told | None = None,
) -> list[Rollout]:
    """n judged rollouts a prompt, with traces; group_id is the prompt's place."""
    requests = [
        Request(prompt_id=p.id, group_id=i, n=n, sampling=sampling, phase="probe") for i, p in enumerate(prompts)
    ]
    return [rollout for judged in judged_slices(requests, engine, judge, told) for rollout in judged]
