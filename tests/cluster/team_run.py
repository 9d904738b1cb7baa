"""Three updates of a tiny learner by each of `CASES`, and a warm start, alone or as one rank: RANK SIZE FOLDER [full].
"full": each rank holds a part of every weight, and says how much that is, and what becomes of a full memory."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

sys.path.insert(0, str(Path(__file__).parents[1]))
from learner_batches import encode, exact_model, make_batch

from whet.cluster.ranks import Ranks, is_unmet
from whet.config import Learn, Lora
from whet.errors import WhetError
from whet.fast.graphed import FastPasses, Graphed
from whet.learn.base import Team
from whet.learn.learner import Learner, Passes, warm_start
from whet.learn.optimizer import part_of
from whet.model.lora import add_lora

MIXED = [
    [1.0, 0.0, 0.0],
    [1.0, 1.0],
    [0.0, 1.0, None, 0.3, 1.0],
    [0.1, 0.1, 0.1],
    [0.0, 1.0],
    [1.0, 0.0, 0.0, 0.0],
]
ESTIMATORS = ("reinforce", "rloo", "grpo", "dr_grpo", "dapo", "reinforce_pp", "gspo", "cispo")
CASES: dict[str, dict[str, Any]] = {
    **{name: {"estimator": name} for name in ESTIMATORS},
    "kl and entropy": {"kl_coef": 0.1, "entropy_coef": 0.01},
    "two updates": {"updates": 2},
    "minibatches": {"minibatches": 3, "kl_coef": 0.1},
    "small packs": {"pack_tokens": 16},
    "adapters": {"kl_coef": 0.1},
    "half precision": {},
    "one group": {},  # a rank has nothing to do
    "not finite": {},
}


def taught(team: Team | None = None) -> dict[str, Any]:
    """Losses of a warm start, and the weights at its end. The last batch is smaller than the team."""
    model, losses = exact_model(), list[float]()
    pairs = [(encode(f"p{i}"), [(3 * i + j) % 17 + 2 for j in range(3 + i % 4)]) for i in range(13)]
    given: dict[str, Any] = {"on_step": lambda step, loss: losses.append(loss), "team": team}
    warm_start(
        model, [pairs[:6], pairs[6:12], pairs[12:]], steps=3, lr=0.01, pack_tokens=40, **given
    )
    return {
        "losses": losses,
        "weights": {name: p.flatten().tolist() for name, p in model.named_parameters()},
    }


def trained(case: str, team: Team | None = None, full: bool = False) -> dict[str, Any]:
    """Metrics of each update, what its signals add up to, and the weights at the end."""
    model = exact_model(torch.bfloat16 if case == "half precision" else torch.float64)
    if case == "adapters":
        add_lora(model, Lora(rank=3, alpha=6.0), "base", 0)
    settings = Learn(lr=0.01, warmup=0, **CASES[case])
    if full:
        from whet.cluster.shards import ShardedLearner

        learner: Learner = ShardedLearner(model, settings, encode=encode)
    else:
        learner = Learner(model, settings, encode=encode, team=team)
    metrics, signals = [], []
    for seed in range(3):
        batch = make_batch([[1.0, 0.0, 0.0]] if case == "one group" else MIXED, seed=seed)
        if case == "not finite" and seed == 1:
            bad = batch.groups[-1]  # whose rank alone sees it
            traces = [
                dataclasses.replace(r.trace, log_probs=r.trace.log_probs * math.nan)
                for r in bad.rollouts
            ]
            rollouts = tuple(
                dataclasses.replace(r, trace=t) for r, t in zip(bad.rollouts, traces, strict=True)
            )
            batch = dataclasses.replace(
                batch, groups=(*batch.groups[:-1], dataclasses.replace(bad, rollouts=rollouts))
            )
        report = learner.step(batch, seed / 3, frozenset({"score"}))
        metrics.append(report.metrics)
        signals.append(
            sorted((key, float(one["score"].sum())) for key, one in report.signals.items())
        )
    weights = {
        name: p.detach().double().flatten().tolist()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    found = {
        "metrics": metrics,
        "signals": signals,
        "weights": weights,
        "state": learner.state_dict(),
    }
    if full:
        own = {
            "masters": learner.optimizer.masters.values(),
            "moments": learner.optimizer.moment_tensors().values(),
        }
        held = {kind: [part_of(t, t) for t in tensors if t.ndim] for kind, tensors in own.items()}
        found["held"] = {kind: sum(t.numel() for t in parts) for kind, parts in held.items()}
        found["types"] = sorted({str(t.dtype) for parts in held.values() for t in parts})
    return found


def full_memory() -> str:
    """What a learner with parts of the weights says where memory is full on the second rank."""
    from whet.cluster.shards import ShardedLearner
    from whet.learn.learner import Passes

    class Full(Passes):
        def log_probs(self, *args: Any) -> Any:
            if dist.get_rank():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().log_probs(*args)

    learner = ShardedLearner(exact_model(), Learn(pack_tokens=64), encode=encode, passes=Full)
    try:
        learner.step(make_batch(MIXED))
    except WhetError as error:
        return str(error)
    except RuntimeError as error:
        return "unmet" if is_unmet(error) else repr(error)
    return ""


class Frail(FastPasses):
    """On a CPU, where nothing is compiled or captured, but forms and buffers are those of a GPU; fails on order."""

    fails: list[Exception]

    def __init__(self, model: Any, config: Learn) -> None:
        super().__init__(model, config)
        self.form, self.graphed, self.fails = "whole", Graphed(model, config.pack_tokens), []

    def layers(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def hidden_states(self, pack: Any) -> Tensor:
        if self.fails:
            raise self.fails.pop()
        return super().hidden_states(pack)

    log_probs = Passes.log_probs


def gives_up(team: Team | None = None) -> list[list[Any]]:
    """After each update how passes run, the tokens of a pack, the full memories, and the loss. In the second update the
    last rank's compiler fails, in the third and fourth its memory is full."""
    learner = Learner(
        exact_model(),
        Learn(lr=0.01, warmup=0, pack_tokens=400),
        encode=encode,
        passes=Frail,
        team=team,
    )
    passes, found = learner.passes, []
    assert isinstance(passes, Frail)
    for seed, failure in enumerate(
        (None, TorchDynamoException("no"), torch.OutOfMemoryError(), torch.OutOfMemoryError())
    ):
        passes.fails = (
            [failure] if failure is not None and learner.team.rank == learner.team.size - 1 else []
        )
        loss = learner.step(make_batch(MIXED, seed=seed)).metrics["learn/loss"]
        assert not passes.fails
        found.append([*passes.standing(), learner.pack_tokens, learner.ooms, loss])
    return found


if __name__ == "__main__":
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(minutes=20)
    )
    full = sys.argv[4:] == ["full"]
    found: dict[str, Any] = {case: trained(case, None if full else Ranks(), full) for case in CASES}
    if not full:
        found |= {"warm start": taught(Ranks()), "gives up": gives_up(Ranks())}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if full and rank:
        (folder / "full memory").write_text(full_memory())
        sys.stdout.flush()
        os._exit(0)  # the others wait for it in the pass, until it is gone
    if full:
        found["left alone"] = full_memory()
        (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
