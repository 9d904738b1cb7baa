"""A drafter for `whet bench draft`: read from a folder, or trained here on prompts that are not measured.

Training goes as in a run (`whet.draft.adaptive`): the rollouts of a round are generated, and their hidden states are
trained on before the next. The weights do not change meanwhile, and there is no budget to keep: each round is trained
on for PASSES times its tokens, so that a few rounds do what many updates of a run would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from whet.bench.tail import Work
from whet.draft.adaptive import AdaptiveDrafter
from whet.draft.eagle import EagleHead, eagle_head
from whet.draft.export import read_drafter, write_drafter
from whet.rollout.engine import LocalEngine

PASSES = 4.0


def saved_drafter(model: PreTrainedModel, folder: Path) -> EagleHead:
    head = eagle_head(model)
    read_drafter(folder, head)
    return head


def trained_drafter(
    model: PreTrainedModel,
    work: Work,
    *,
    rounds: int,
    share: float = PASSES,
    seed: int = 0,
    folder: Path | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> tuple[EagleHead, list[dict[str, Any]]]:
    """A drafter after `rounds` of work, each trained on for a `share` of its tokens, and how that went.

    folder: where it is written, to be read again.
    """
    adaptive = AdaptiveDrafter(model, share, seed=seed)
    engine = LocalEngine(
        model,
        encode=lambda name: work.prompts[name],
        decode=lambda ids: "",
        seed=seed + 1,
        slots=work.rollouts,
        context=work.context,
        graphs=model.device.type == "cuda",
        eagle=adaptive.live,
        buffer=adaptive.buffer,
    )
    history = []
    for visit in range(rounds):
        engine.submit(work.again(visit))
        tokens = sum(rollout.length for rollout in engine.collect())
        begin = time.perf_counter()
        found = adaptive.train(tokens)
        history.append({"tokens": tokens, "seconds": time.perf_counter() - begin, **found})
        told(f"drafter, round {visit + 1} of {rounds}: agreement {found.get('draft/agreement', 0.0):.2f}")
        engine.update(visit + 1)
    if folder is not None:
        write_drafter(folder, adaptive.live, model.config)
    return adaptive.live, history
