"""What the tests on real weights share: the models at hand, parts as a run has them, and references in fp32."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from whet.build import build_model
from whet.draft.base import DraftArm
from whet.fast.graphs import GraphRunners
from whet.model.load import LOCAL
from whet.model.noise import noise_bits, row_key, uniform
from whet.recipe import load_config
from whet.resolve import RunPlan, check_run
from whet.rollout.engine import LocalEngine
from whet.types import Request, Rollout, Sampling

VARIABLE = "WHET_REAL_MODELS"
HERE = Path(__file__).parent
ABSENT = (
    f"there are no real weights in build/models, nor does ${VARIABLE} name a folder of models; "
    "`python benchmarks/gguf_model.py smollm2 build/models/smollm2` writes one"
)
SEED = 7
LENGTH = {"cpu": 32, "cuda": 256}
"""Tokens of most responses: a CPU takes a quarter of a second for a step of a dozen rows of the smallest model."""
ROUNDING = 1e-3
"""What log-probs in fp32 may differ by, whatever the order of a sum."""


def model_folders() -> list[Path]:
    """The model that the variable names, or all models in a folder."""
    given = Path(os.environ.get(VARIABLE) or HERE.parents[1] / "build" / "models")
    if (given / "config.json").is_file():
        return [given]
    return sorted(path.parent for path in given.glob("*/config.json"))


# ---- parts as a run has them


@lru_cache(maxsize=1)
def plan_of(folder: Path, device: str, *sets: str, dtype: str = "") -> RunPlan:
    """In bfloat16 on a GPU and float32 on a CPU, unless a dtype is named."""
    base = {
        "seed": SEED,
        "model": {"name": str(folder), "device": device, "dtype": dtype or usual_dtype(device)},
        "data": [{"path": str(HERE / "problems.jsonl"), "reward": "real_parts:even"}],
        "held_out": {"size": 0},
        "rollout": {"slots": 16, "max_tokens": max(96, LENGTH[device])},
        "learn": {"pack_tokens": 1024, "lr": 1e-5},
    }
    return check_run(load_config(None, sets, base=base))


def usual_dtype(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


@lru_cache(maxsize=1)
def model_of(folder: Path, device: str) -> PreTrainedModel:
    """The weights that most tests share, and leave as they are."""
    return build_model(plan_of(folder, device))


def engine_of(plan: RunPlan, model: PreTrainedModel, **more: Any) -> LocalEngine:
    """As a run builds it, but that speculation may be any."""
    engine = LocalEngine(
        model,
        encode=plan.encoded,
        decode=plan.codec.decode,
        seed=SEED,
        slots=plan.settings.rollout.slots,
        context=plan.settings.rollout.context,
        runners=GraphRunners() if model.device.type == "cuda" else None,
        **more,
    )
    engine.begin()
    return engine


def ask(
    plan: RunPlan, count: int = 12, *, n: int = 1, first: int = 0, **sampling: Any
) -> list[Request]:
    """Rollouts of the first prompts, in groups of their own."""
    limit = LENGTH[plan.settings.model.device]
    given = {"max_tokens": limit, "stop_ids": plan.codec.stop_ids, **sampling}
    table = plan.problems.train
    ids = [table.at(i).id for i in range(min(count, len(table)))]
    return [
        Request(prompt_id=name, group_id=first + i, n=n, sampling=Sampling(**given))
        for i, name in enumerate(ids)
    ]


def run(engine: Any, requests: Sequence[Request]) -> list[Rollout]:
    """All rollouts of the requests, in the order of their keys."""
    engine.submit(requests)
    done: list[Rollout] = []
    while not engine.idle:
        done += engine.collect()
    return sorted(done, key=lambda rollout: rollout.key)


def ids_of(rollout: Rollout) -> list[int]:
    assert rollout.trace is not None
    return rollout.trace.ids.tolist()


def even(prompt: Any, response: str) -> float:
    """A reward that any model earns about half the time."""
    return float(len(response) % 2 == 0)


# ---- references


@lru_cache(maxsize=1)
def plain(folder: Path, device: str, dtype: str = "float32") -> PreTrainedModel:
    """Hugging Face's own model with its eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", **LOCAL
    )
    return model.to(device).eval()


@torch.no_grad()
def log_probs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """[R, V] in fp32 on the CPU: what the model says at each place of the response."""
    ids = torch.tensor([[*prompt, *response]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, -1).cpu()


def gaps(wide: PreTrainedModel, plan: RunPlan, rollouts: Sequence[Rollout]) -> np.ndarray:
    """|recorded log-prob - the model's| of every token of the rollouts."""
    found = []
    for rollout in rollouts:
        ids, heat = ids_of(rollout), rollout.sampling.temperature or 1.0
        said = log_probs(wide, plan.encoded(rollout.prompt_id), ids, heat)
        wanted = said[torch.arange(len(ids)), torch.tensor(ids)].numpy()
        assert rollout.trace is not None
        found.append(np.abs(rollout.trace.log_probs - wanted))
    return np.concatenate(found)


def rounding_of(folder: Path, device: str, plan: RunPlan, rollouts: Sequence[Rollout]) -> float:
    """The most that Hugging Face's own forward in the run's type is away from fp32 on these tokens. In fp32 it is
    taken as ROUNDING."""
    if plan.settings.model.dtype == "float32":
        return ROUNDING
    return max(ROUNDING, float(own_gaps(folder, device, plan, rollouts).max()))


def own_gaps(folder: Path, device: str, plan: RunPlan, rollouts: Sequence[Rollout]) -> np.ndarray:
    """As `gaps`, of Hugging Face's own forward in the run's type against the one in fp32."""
    dtype = plan.settings.model.dtype
    rows = [(plan.encoded(r.prompt_id), ids_of(r), r.sampling.temperature or 1.0) for r in rollouts]
    chosen = [torch.tensor(ids)[:, None] for _, ids, _ in rows]
    each = []
    for kind in (dtype, "float32"):
        model = plain(folder, device, kind)
        each.append(
            [log_probs(model, *row).gather(1, at) for row, at in zip(rows, chosen, strict=True)]
        )
    return torch.cat([(a - b).abs() for a, b in zip(*each, strict=True)]).numpy()


def race(said: Tensor, rollout: Rollout, position: int) -> Tensor:
    """The scores that a draw is the largest of, at one place, [V]: log p - log E, greedily log p."""
    if not rollout.sampling.temperature:
        return said
    words = row_key(SEED, rollout.phase == "eval", rollout.group_id, rollout.index)
    keys = torch.tensor(words, dtype=torch.int32)[:, None]
    u = uniform(noise_bits(keys, torch.tensor([position], dtype=torch.int32), said.numel()))
    return said - torch.log(-torch.log1p(-u[0]))


def margins(
    wide: PreTrainedModel,
    plan: RunPlan,
    rollouts: Sequence[Rollout],
    others: Mapping[Any, Sequence[int]],
) -> list[float]:
    """For each rollout whose text is not the other's: how far apart the two tokens were in fp32 where they part."""
    found = []
    for rollout in rollouts:
        mine, other = ids_of(rollout), list(others[rollout.key])
        if mine == other:
            continue
        parted = [i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b]
        assert parted, f"{rollout.prompt_id}: one text goes on where the other ends"
        at = parted[0]
        said = log_probs(
            wide,
            plan.encoded(rollout.prompt_id),
            mine[: at + 1],
            rollout.sampling.temperature or 1.0,
        )
        scores = race(said[at], rollout, at)
        found.append(abs(float(scores[mine[at]] - scores[other[at]])))
    return found


ARMS = {name: DraftArm(name, 4) for name in ("ngram", "suffix", "eagle")}
