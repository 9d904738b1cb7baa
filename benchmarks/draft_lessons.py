"""A drafter that goes on learning while it is measured: the rung "training" of `draft_bench.py`.

Before each of its runs it takes the lesson that an RL step of that size would give it (`whet.draft.training`): a batch
of prompts that are not measured is generated, and a share of its tokens trained on and published in place. There is no
limit on its time, which `whet train` sets on a GPU, so what a lesson takes is seen. The target does not change.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tail_work import TailWork, model_work, shape_work
from transformers import PreTrainedModel

from whet import config
from whet.draft.eagle import EagleHead, eagle_head, read_drafter, undraftable, write_drafter
from whet.draft.training import SHARE, AdaptiveDrafter
from whet.errors import WhetError
from whet.fast.fused import share_storage
from whet.fast.graphs import GraphRunners
from whet.model.load import check_model, load_model
from whet.rollout.engine import LocalEngine
from whet.tools.bench.peers import shape_model


class Lessons:
    def __init__(self, model: PreTrainedModel, work: TailWork, head: EagleHead | None = None, *, seed: int = 0) -> None:
        """work: what it learns from; head: what it begins with and leaves as it is, random weights where None."""
        self.work = renamed(work)
        self.adaptive = AdaptiveDrafter(model, SHARE, seed, head)
        self.rows: list[dict[str, Any]] = []
        """What became of each lesson, and of the run after it."""

    def take(self, engine: LocalEngine) -> dict[str, Any]:
        """One lesson, from a batch that `engine` writes plainly: its choosers know of nothing but what is measured, and
        what is measured is never learnt from."""
        held, engine.speculation, engine.buffer = engine.speculation, None, self.adaptive.buffer
        engine.submit(self.work.again(len(self.rows) + 1))
        tokens = sum(rollout.length for rollout in engine.collect())
        engine.speculation, engine.buffer = held, None
        engine.update(engine.version + 1)
        begin = self._now()
        found = self.adaptive.train(tokens)
        return {
            "tokens": tokens,
            "tokens_trained": found.get("draft/tokens_trained", 0.0),
            "seconds": self._now() - begin,
            "loss": found.get("draft/loss"),
            "agreement": found.get("draft/agreement"),
        }

    def ended(self, lesson: dict[str, Any], makespan: float, **accepted: float | None) -> None:
        """The run after a lesson took so long. Its share is of both: an RL step of that size without the update."""
        share = lesson["seconds"] / (lesson["seconds"] + makespan)
        self.rows.append({"round": len(self.rows), **lesson, "share": share, "makespan": makespan, **accepted})

    def _now(self) -> float:
        if self.adaptive.live.fc.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def renamed(work: TailWork) -> TailWork:
    """Its prompts by other names, so that one engine can tell them from those that are measured."""
    requests = [dataclasses.replace(r, prompt_id=f"lesson {r.prompt_id}") for r in work.requests]
    return TailWork({f"lesson {name}": ids for name, ids in work.prompts.items()}, requests, work.context)


# ---- drafter
#
# A drafter for `draft_bench.py`: read from a folder, or trained here on prompts that are not measured.
#
# Training goes as in a run (`whet.draft.training`): the rollouts of a round are generated, and their hidden states are
# trained on before the next. The weights do not change meanwhile, and there is no budget to keep: each round is trained
# on for PASSES times its tokens, so that a few rounds do what many updates of a run would.


PASSES = 4.0


def saved_drafter(model: PreTrainedModel, folder: Path) -> EagleHead:
    head = eagle_head(model)
    read_drafter(folder, head)
    return head


def trained_drafter(
    model: PreTrainedModel,
    work: TailWork,
    *,
    rounds: int,
    share: float = PASSES,
    seed: int = 0,
    folder: Path | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
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
        runners=GraphRunners() if model.device.type == "cuda" else None,
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
        on_progress(f"drafter, round {visit + 1} of {rounds}: agreement {found.get('draft/agreement', 0.0):.2f}")
        engine.update(visit + 1)
    if folder is not None:
        write_drafter(folder, adaptive.live, model.config)
    return adaptive.live, history


# ---- candidate
#
# What `draft_bench.py` measures, made ready: the model on its device, the batch, a drafter if there is one, and one
# that goes on learning.


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateAsked:
    model: Path | None = None
    shape: str = ""
    prompts: Path | None = None
    device: str = "auto"
    dtype: str = ""
    """Type of a model folder's weights; "" is bfloat16 on a GPU and float32 elsewhere."""
    rollouts: int = 128
    siblings: int = 8
    cap: int = 2048
    drafter: Path | None = None
    train: int = 0
    """Rounds."""
    lessons: bool = True
    """With a drafter there is also a copy of it that goes on learning,"""
    from_scratch: bool = False
    """or one that begins with random weights instead."""
    naive: bool = False
    """The memory of graphs is measured too."""
    seed: int = 0


OnLine = Callable[[str], None]


def prepared(
    asked: CandidateAsked, out: Path, on_progress: OnLine
) -> tuple[PreTrainedModel, TailWork, EagleHead | None, dict[str, Any]]:
    """Model, work, drafter, and what to write down of them. A drafter that is trained here goes to out/drafter."""
    device = _device(asked.device)
    if (asked.model is None) == (not asked.shape):
        raise WhetError("draft_bench.py wants --model with a folder, or --shape, one of them.")
    if asked.drafter is not None and asked.train:
        raise WhetError("--drafter brings a trained drafter and --train makes one; give one of them.")
    if asked.from_scratch and asked.model is None:
        raise WhetError("--from-scratch wants --model: a shape with random weights writes nothing to learn from.")
    if asked.from_scratch and not asked.lessons:
        raise WhetError("--from-scratch is how the drafter with lessons begins, and --no-lessons leaves it out.")
    if asked.dtype not in ("", "float32", "bfloat16"):
        raise WhetError(f'There is no dtype "{asked.dtype}" here; there are float32 and bfloat16.')
    if asked.naive and device != "cuda":
        raise WhetError("--naive measures the memory of CUDA graphs, and there are none on a CPU; leave it out.")
    sizes: dict[str, Any] = {"rollouts": asked.rollouts, "siblings": asked.siblings, "cap": asked.cap}
    if asked.model is None:
        model = shape_model(asked.shape, device)
        work = shape_work(model.config.get_text_config().vocab_size, **sizes, seed=asked.seed)
    else:
        half = "bfloat16" if device == "cuda" else "float32"
        names = {"name": str(asked.model), "device": device, "dtype": asked.dtype or half}
        settings = config.Model.model_validate(names)
        check_model(settings)
        work = model_work(asked.model, asked.prompts, **sizes)
        model = load_model(settings, vocab_size=0, context=work.context, seed=asked.seed)
    model = model.eval().requires_grad_(False)
    share_storage(model)
    head, notes = _drafter(model, asked, work, out, on_progress)
    kind = {
        "model": str(asked.model or asked.shape),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device,
    }
    return model, work, head, {**kind, **notes, "from_scratch": asked.from_scratch, "seed": asked.seed}


def _drafter(
    model: PreTrainedModel, asked: CandidateAsked, work: TailWork, out: Path, on_progress: OnLine
) -> tuple[EagleHead | None, dict[str, Any]]:
    """None where none is wanted or can be: rungs with EAGLE are left out, which is said."""
    why = undraftable(model)
    if why is None and asked.drafter is None and not asked.train:
        why = "no trained drafter is given (--drafter) or made (--train)"
    elif why is None and asked.train and asked.model is None:
        why = "a shape with random weights writes nothing that a drafter could learn"
    if why is not None:
        on_progress(f"Rungs with {'a frozen ' if asked.from_scratch else ''}EAGLE are left out: {why}.")
        return None, {"drafter": None, "no_drafter": why}
    if asked.drafter is not None:
        return saved_drafter(model, asked.drafter), {"drafter": str(asked.drafter)}
    others = _others(asked, work)
    folder = out / "drafter"
    head, history = trained_drafter(
        model, others, rounds=asked.train, seed=asked.seed, folder=folder, on_progress=on_progress
    )
    return head, {"drafter": str(folder), "training": history}


def lessons_for(
    asked: CandidateAsked, model: PreTrainedModel, work: TailWork, head: EagleHead | None, on_progress: OnLine
) -> Lessons | None:
    """On the prompts that are not measured; None where it has nothing to begin with or to learn from."""
    if not asked.lessons or asked.model is None or (head is None and not asked.from_scratch):
        return None
    if why := undraftable(model):
        on_progress(f"The rung with lessons is left out: {why}.")
        return None
    try:
        others = _others(asked, work)
    except WhetError as error:
        if asked.from_scratch:
            raise
        on_progress(f"The rung with lessons is left out: {error}")
        return None
    return Lessons(model, others, None if asked.from_scratch else head, seed=asked.seed)


def _others(asked: CandidateAsked, work: TailWork) -> TailWork:
    """As large a batch, of prompts that `work` does not hold."""
    assert asked.model is not None
    sizes: dict[str, Any] = {"rollouts": asked.rollouts, "siblings": asked.siblings, "cap": asked.cap}
    return model_work(asked.model, asked.prompts, **sizes, skip=len(work.prompts), wrap=True)


def _device(name: str) -> str:
    if name not in ("auto", "cuda", "cpu"):
        raise WhetError(f'There is no device "{name}"; there are auto, cuda and cpu.')
    if name == "cuda" and not torch.cuda.is_available():
        raise WhetError("There is no CUDA device here; --device cpu measures the CPU.")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
