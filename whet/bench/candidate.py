"""What `whet bench draft` measures, made ready: the model on its device, the batch, a drafter if there is one, and one
that goes on learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from whet import config
from whet.bench.draft_lessons import Lessons
from whet.bench.drafter import saved_drafter, trained_drafter
from whet.bench.shapes import shape_model
from whet.bench.tail import Work, model_work, shape_work
from whet.draft.eagle import EagleHead, undraftable
from whet.errors import WhetError
from whet.model.load import check_model, load_model
from whet.model.storage import share_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    model: Path | None = None
    shape: str = ""
    prompts: Path | None = None
    device: str = "auto"
    dtype: str = ""
    """Of a model folder's weights; "" is bfloat16 on a GPU and float32 elsewhere."""
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


Told = Callable[[str], None]


def prepared(asked: Asked, out: Path, told: Told) -> tuple[PreTrainedModel, Work, EagleHead | None, dict[str, Any]]:
    """Model, work, drafter, and what to write down of them. A drafter that is trained here goes to out/drafter."""
    device = _device(asked.device)
    if (asked.model is None) == (not asked.shape):
        raise WhetError("whet bench draft wants --model with a folder, or --shape, one of them.")
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
    head, notes = _drafter(model, asked, work, out, told)
    kind = {
        "model": str(asked.model or asked.shape),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device,
    }
    return model, work, head, {**kind, **notes, "from_scratch": asked.from_scratch, "seed": asked.seed}


def _drafter(
    model: PreTrainedModel, asked: Asked, work: Work, out: Path, told: Told
) -> tuple[EagleHead | None, dict[str, Any]]:
    """None where none is wanted or can be: rungs with EAGLE are left out, which is said."""
    why = undraftable(model)
    if why is None and asked.drafter is None and not asked.train:
        why = "no trained drafter is given (--drafter) or made (--train)"
    elif why is None and asked.train and asked.model is None:
        why = "a shape with random weights writes nothing that a drafter could learn"
    if why is not None:
        told(f"Rungs with {'a frozen ' if asked.from_scratch else ''}EAGLE are left out: {why}.")
        return None, {"drafter": None, "no_drafter": why}
    if asked.drafter is not None:
        return saved_drafter(model, asked.drafter), {"drafter": str(asked.drafter)}
    others = _others(asked, work)
    folder = out / "drafter"
    head, history = trained_drafter(model, others, rounds=asked.train, seed=asked.seed, folder=folder, told=told)
    return head, {"drafter": str(folder), "training": history}


def lessons_for(asked: Asked, model: PreTrainedModel, work: Work, head: EagleHead | None, told: Told) -> Lessons | None:
    """On the prompts that are not measured; None where it has nothing to begin with or to learn from."""
    if not asked.lessons or asked.model is None or (head is None and not asked.from_scratch):
        return None
    if why := undraftable(model):
        told(f"The rung with lessons is left out: {why}.")
        return None
    try:
        others = _others(asked, work)
    except WhetError as error:
        if asked.from_scratch:
            raise
        told(f"The rung with lessons is left out: {error}")
        return None
    return Lessons(model, others, None if asked.from_scratch else head, seed=asked.seed)


def _others(asked: Asked, work: Work) -> Work:
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
