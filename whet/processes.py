"""A run by several processes: which it may have, how they are started, and what each of them builds.

`api.py` calls it where `--gpus` is more than 1. The process of the run keeps the loop, the data, the judges and the
folder, and holds no weights; `whet.cluster` has what moves between it and the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import config
from whet.assembly import (
    Basis,
    Parts,
    RunPlan,
    build_engine,
    build_judge,
    build_learner,
    build_model,
    build_vllm,
    refuse_unmet,
    tiny_skeleton,
    training_sampling,
)
from whet.errors import WhetError
from whet.eval import eval_sets
from whet.text import Codec
from whet.watch import Stopwatch

if TYPE_CHECKING:
    from whet.learn.learner import Learner
    from whet.learn.samples import Encode
    from whet.rollout.engine import LocalEngine
    from whet.rollout.vllm import VllmEngine


def build_fleet_parts(plan: RunPlan, gpus: int, weights: Path | None = None) -> Parts:
    """The parts of a run whose model is held by `gpus` processes, with a GPU or a share of the cores each."""
    from whet.cluster.chorus import Chorus
    from whet.cluster.crew import Crew
    from whet.cluster.fleet import Fleet

    assert plan.curriculum is not None
    settings, watch = plan.settings, Stopwatch()
    environments, backend = member_environments(plan, gpus)
    order = {
        "settings": settings.model_dump_json(),
        "weights": str(weights or ""),
        "alphabet": plan.problems.alphabet,
        "later": settings.learn.shard == "full",
    }
    with ExitStack() as stack:
        judge = build_judge(plan)
        stack.callback(judge.close)
        crew = Crew(order, environments, backend, divided=settings.learn.shard != "none")
        stack.callback(crew.close)
        engine = Fleet(crew, plan.encoded, slots=settings.rollout.slots, mode=settings.rollout.mode)
        many, each = ("1 process", "") if gpus == 1 else (f"{gpus} processes", " each")
        ready = f"Ready after {watch.without():.0f} s: {many} with a model, an engine and a learner{each}."
        parts = Parts(
            plan=plan,
            model=None,
            engine=engine,
            judge=judge,
            evals=eval_sets(settings, plan.problems.evals, training_sampling(settings, plan.codec)),
            notes=(ready, *engine.notes()),
            learner=Chorus(crew, plan.encoded),
            curriculum=plan.curriculum,
            crew=crew,
        )
        refuse_unmet(parts)
        stack.pop_all()
    return parts


def check_gpus(settings: config.Config, gpus: int) -> None:
    """Refuse a number of processes that this machine or this recipe cannot have."""
    import torch

    from whet.model.load import pick_device

    if gpus == 1 and settings.learn.shard != "full":
        return
    if settings.learn.shard == "full" and settings.rollout.engine == "vllm":
        raise WhetError('rollout.engine = "vllm" cannot decode beside learn.shard = "full"; use "native".')
    if "eagle" in settings.draft.drafters:
        raise WhetError(
            f'draft.drafters holds "eagle", which trains in one process; with --gpus {gpus} use ngram or suffix.'
        )
    if pick_device(settings.model).type == "cuda":
        if gpus > (there := torch.cuda.device_count()):
            raise WhetError(f"--gpus {gpus} is more than the {there} GPU{'s' * (there > 1)} that torch sees here.")
    elif settings.model.device != "cpu" and gpus > 1:
        raise WhetError(f'--gpus {gpus}, but torch sees no GPU; model.device = "cpu" divides the cores instead.')


def member_environments(plan: RunPlan, gpus: int) -> tuple[list[dict[str, str]], str]:
    """The environment of each process, with its own GPU or its share of the cores, and how they exchange gradients."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cuda = plan.footprint.device.type == "cuda"
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    environments = []
    for number in range(gpus):
        own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        own.setdefault("OMP_NUM_THREADS", str(max(1, cores // gpus)))
        if sys.platform == "linux":  # else gloo asks which address the host's name has, and not every host has one
            own.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environments.append(own | ({"CUDA_VISIBLE_DEVICES": seen.split(",")[number]} if cuda else {}))
    return environments, "nccl" if cuda else "gloo"


def serve_member(handle: int, parent: int) -> None:
    """The program of a process of `build_fleet_parts`."""
    from whet.cluster.member import run_member

    run_member(handle, parent, build_member)


def build_member(order: Mapping[str, Any], encode: Encode) -> tuple[LocalEngine | VllmEngine, Callable[[], Learner]]:
    """What a process without data builds of a run: its engine, and what makes its learner."""
    from whet.model.load import check_model, eos_of, load_tokenizer

    settings = config.Config.model_validate_json(order["settings"])
    codec = Codec(load_tokenizer(settings.model, order["alphabet"]), eos_of(settings.model), settings.text)
    network = check_model(settings.model) or tiny_skeleton(settings)
    plan = Basis(settings=settings, codec=codec, encoded=encode, network=network, processes=order["size"])
    room = plan.room  # measured before the weights are loaded
    model = build_model(plan, Path(order["weights"]) if order["weights"] else None)
    engine = (build_vllm if settings.rollout.engine == "vllm" else build_engine)(plan, model, room)
    if order["later"]:
        from whet.cluster.shards import ShardedLearner

        return engine, partial(build_learner, plan, model, engine, ShardedLearner)
    from whet.learn.learner import Learner

    shares = plan.footprint.shares
    share = (order["rank"] if shares > 1 else 0, shares)
    return engine, partial(build_learner, plan, model, engine, partial(Learner, share=share))
