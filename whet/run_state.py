"""What a checkpoint of a run holds beside the weights: `save_parts` writes it, `restore_parts` puts it back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np

from whet.build import Parts, Tally
from whet.errors import WhetError
from whet.learn.checkpoint import Checkpoint, load_arrays, save_checkpoint
from whet.resolve import RunPlan
from whet.rollout.base import RolloutStore
from whet.rollout.vllm_fit import drafter_of
from whet.types import rollout_from_json, rollout_to_json


def save_parts(parts: Parts, folder: Path) -> None:
    from whet.draft.eagle import FOLDER, copy_drafter

    engine = parts.engine.state_dict()
    drafter, waiting = parts.drafter or parts.spot, RolloutStore()
    pending = [rollout_to_json(r) for r in waiting.put(parts.judge.pending())]

    def write(path: Path) -> None:
        parts.learner.write(path)
        if drafter is not None:
            drafter.write(path / FOLDER)
        elif "eagle" in parts.plan.settings.draft.drafters:
            copy_drafter(drafter_of(parts.plan.settings), path / FOLDER)

    save_checkpoint(
        folder,
        model=None,  # the learner writes it
        tokenizer=parts.plan.codec.tokenizer,
        tensors={"drafter": drafter.tensors()} if drafter else {},
        arrays={
            "traces": parts.store.arrays(),
            "judge": waiting.arrays(),
            "prompts": {"marks": parts.plan.problems.marks},
            "engine": {k: v for k, v in engine.items() if isinstance(v, np.ndarray)},
        },
        states={
            "tally": asdict(parts.tally),
            "guards": parts.guards.state_dict(),
            "learner": parts.learner.state_dict(),
            "curriculum": parts.curriculum.state_dict(),
            "drafter": drafter.state_dict() if drafter else None,
            "judge": pending,
            "engine": {k: v for k, v in engine.items() if not isinstance(v, np.ndarray)},
        },
        beside=write,
    )


def refuse_other_prompts(plan: RunPlan, checkpoint: Path) -> None:
    """Refuse to go on over problems that were changed since the checkpoint. Their number is compared with their ids, by
    the curriculum."""
    saved = load_arrays(checkpoint, "prompts").get("marks")
    now = plan.problems.marks
    if saved is None or len(saved) != len(now):  # an older whet did not save them
        return
    changed = np.flatnonzero(saved != now)
    if len(changed):
        name = plan.problems.train.ids[changed[0]]
        what = f'The training problem "{name}" is not what it was when the checkpoint was written'
        count = f"{len(changed):,} of {len(now):,} have another text or answer"
        raise WhetError(f"{what} ({count}); resume with the same data, or start a new run.")


def restore_parts(parts: Parts, checkpoint: Checkpoint) -> None:
    """Put back everything that the checkpoint holds; `parts` were built on its weights."""
    states = checkpoint.states
    arrays = checkpoint.arrays
    try:
        parts.learner.restore(checkpoint)
        parts.curriculum.load_state_dict(states["curriculum"])
        parts.store.load(arrays["traces"])
        parts.engine.load_state_dict({**states["engine"], **arrays["engine"]})
        parts.tally = Tally(**states["tally"])
        if "guards" in states:  # an older whet did not save them
            parts.guards.load_state_dict(states["guards"])
        if (drafter := parts.drafter or parts.spot) and states["drafter"]:
            drafter.load(checkpoint.tensors["drafter"], states["drafter"])
    except KeyError as missing:
        raise WhetError(
            f"{checkpoint.folder} holds no {missing}; was it written by whet train?"
        ) from None
    waiting = RolloutStore()
    waiting.load(arrays["judge"])
    parts.judge.send(waiting.attach_rollouts([rollout_from_json(r) for r in states["judge"]]))
    parts.fresh = False
