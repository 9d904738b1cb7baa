"""AdamW that owns fp32 masters where the live weights are bf16 or fp16, and writes them back in place.

The learner and the warm start call it. A bf16 weight near 1 cannot hold a change below 0.004: at lr 1e-6 it would
hardly ever move. So masters, moments and the gradient summed over micro-batches are fp32; fp32 and fp64 weights are
their own masters. The rollout twin shares the live Parameters, so they are only ever written in place. Weight decay is
decoupled and spares norms and biases (fewer than two dimensions), embeddings, and a head tied to them. An update is:
backward and `accumulate` for each micro-batch, `grad_norm`, then `step`, or `zero_grad` to skip it.

A team may divide masters and moments: each member then updates the parameters that it owns, and their owners give the
new live weights to the others (`owners`). Or it divides every weight (`whet.cluster.shards`): then a parameter is a
DTensor, and what is kept and updated here is the part of it that this process holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from whet.errors import WhetError
from whet.learn.base import spread

TINY_MODEL = 10_000_000  # parameters: a model up to this size bears the learning rate of adapters
_HALF = (torch.bfloat16, torch.float16)


def learning_rate(step: int, progress: float, *, peak: float, warmup: int, schedule: str) -> float:
    """Linear warm-up over the first `warmup` steps (step counts from 0), times the schedule at progress 0..1.

    constant: 1; linear: 1 - progress; cosine: (1 + cos(pi progress)) / 2.
    """
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    progress = min(max(progress, 0.0), 1.0)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return peak * warm * shape[schedule]


def default_lr(parameters: int) -> float:
    """2e-4 for adapters (0) and tiny models; for all weights of a larger one 1e-5 up to 0.1 billion, 1e-6 from 1.5 on.

    In between 10^(-5 - ln(N / 0.1e9) / ln(15)), to two digits. 1e-6 at 1.5B is what DeepScaleR, FastCuRL and SPEED
    take (their recipes in recipes/papers); the other end is ours: SmolLM2-135M learns at 5e-6 (recipes/gsm8k.toml).

    >>> [default_lr(n) for n in (0, 223_000, 50_000_000, 135_000_000, 500_000_000, 1_500_000_000, 7_000_000_000)]
    [0.0002, 0.0002, 1e-05, 7.7e-06, 2.5e-06, 1e-06, 1e-06]
    """
    if parameters <= TINY_MODEL:
        return 2e-4
    place = min(1.0, max(0.0, math.log(parameters / 0.1e9) / math.log(15)))
    return float(f"{10 ** (-5 - place):.1e}")


class AdamW:
    """betas (0.9, 0.999), eps 1e-8 (Loshchilov & Hutter 2019), over the parameters that require a gradient."""

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        share: tuple[int, int] = (0, 1),
        half: bool = False,
    ) -> None:
        """share: (rank, size) of the team among which masters and moments are divided. half: the parameters are fp32
        parts of a model that runs in half precision, so they are masters themselves."""
        self.grad_clip, self.divided = grad_clip, share[1] > 1
        self.live = {name: p for name, p in model.named_parameters() if p.requires_grad}
        places = spread(
            {number: p.numel() for number, p in enumerate(self.live.values())}, share[1]
        )
        # by name, the rank that updates it
        self.owners = dict(zip(self.live, places.values(), strict=True))
        own = {name for name, rank in self.owners.items() if rank == share[0]}
        self._halves = [name for name, p in self.live.items() if p.dtype in _HALF]
        copies = {
            name: _master_of(self.live[name], hollow=name not in own) for name in self._halves
        }
        # What this process holds of a divided parameter, in the same memory.
        parts = {
            n: nn.Parameter(part_of(p, p.detach()))
            for n, p in self.live.items()
            if isinstance(p, DTensor)
        }
        self._parts = list(parts)
        self.masters = {name: (copies | parts).get(name, p) for name, p in self.live.items()}
        self._own = {name: master for name, master in self.masters.items() if name in own}
        self._own_halves = [name for name in self._halves if name in own]
        self._kept = self._parts if half else self._halves  # their masters are part of a checkpoint
        # At the last write from a master.
        self._written = {name: self.live[name]._version for name in self._own_halves}
        embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        spared = {name for name, p in self.live.items() if p.ndim < 2 or id(p) in embedded}
        decayed = {
            "params": [m for n, m in self._own.items() if n not in spared],
            "weight_decay": weight_decay,
        }
        others = {"params": [m for n, m in self._own.items() if n in spared], "weight_decay": 0.0}
        groups = [g for g in (decayed, others) if g["params"]] or [
            {"params": [nn.Parameter(torch.zeros(1))]}
        ]
        self._adam = torch.optim.AdamW(groups, lr=0.0, fused=True)

    def accumulate(self) -> None:
        """After each backward: add half-precision gradients to the fp32 gradients of the masters, and drop them."""
        first = list[tuple[Tensor, Tensor]]()
        more = list[tuple[Tensor, Tensor]]()
        for live, master in ((self.live[name], self.masters[name]) for name in self._halves):
            if live.grad is not None:
                pairs = first if master.grad is None else more
                master.grad = torch.empty_like(master) if master.grad is None else master.grad
                pairs.append((master.grad, live.grad))
                live.grad = None
        for name in self._parts:  # summed over the team and the packs so far
            grad = self.live[name].grad
            self.masters[name].grad = grad.to_local() if isinstance(grad, DTensor) else None
        for pairs, write in ((first, torch._foreach_copy_), (more, torch._foreach_add_)):
            if pairs:  # one launch for all tensors, not one for each
                write([to for to, _ in pairs], [what for _, what in pairs])

    def reached(self) -> set[str]:
        """The parameters that have a gradient: experts of a mixture that no token chose have none."""
        return {name for name, master in self.masters.items() if master.grad is not None}

    def gradients(self, names: Set[str]) -> list[Tensor]:
        """The accumulated gradients of these parameters in the model's order, zeros where no pass here reached one."""
        chosen = [master for name, master in self.masters.items() if name in names]
        for master in chosen:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
        return [master.grad for master in chosen if master.grad is not None]

    def grad_norm(self) -> float:
        """Norm of the whole accumulated gradient."""
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        return float(nn.utils.get_total_norm(grads)) if grads else 0.0

    @torch.no_grad()
    def step(self, lr: float, norm: float) -> None:
        """One update, with the gradient scaled down to `grad_clip` where its norm is larger; drops the gradient."""
        self._follow_live()
        for group in self._adam.param_groups:
            group["lr"] = lr
        if norm > self.grad_clip:
            torch._foreach_mul_(
                [m.grad for m in self.masters.values() if m.grad is not None], self.grad_clip / norm
            )
        self._adam.step()
        self.zero_grad()
        self._write_live()

    def zero_grad(self) -> None:
        for p in (*self.live.values(), *self.masters.values()):
            p.grad = None

    def reset(self) -> None:
        """Set the moments to zero and start bias correction again; masters stay."""
        self._adam.state.clear()

    def master_tensors(self) -> dict[str, Tensor]:
        """Masters that are not the live weights themselves. Those of a divided parameter, and moments, are DTensors."""
        self._follow_live()
        return {
            n: _like(self.live[n], self.masters[n].detach()) for n in self._kept if n in self._own
        }

    def moment_tensors(self) -> dict[str, Tensor]:
        """exp_avg, exp_avg_sq and step of each parameter that was updated, as "exp_avg.NAME"."""
        states = {n: self._adam.state.get(m, {}) for n, m in self._own.items()}
        return {
            f"{part}.{n}": _like(self.live[n], t)
            for n, state in states.items()
            for part, t in state.items()
        }

    @torch.no_grad()
    def load(self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Copy in place what `master_tensors` and `moment_tensors` returned; the live weights follow the masters."""
        if odd := sorted(set(masters) ^ set(self._kept)):
            differ = f"The checkpoint's masters do not fit this model (first difference: {odd[0]})"
            raise WhetError(f"{differ}; same model and dtype?")
        for name in self._kept:
            if name in self._own:
                self.masters[name].copy_(part_of(self.live[name], masters[name]))
        self.reset()
        for key, tensor in moments.items():
            part, _, name = key.partition(".")
            if name not in self.masters:
                raise WhetError(
                    f"The checkpoint's optimiser holds {name}, which this model does not train."
                )
            if (master := self._own.get(name)) is not None:
                self._adam.state[master][part] = part_of(self.live[name], tensor).to(
                    master.device, copy=True
                )
        self._write_live()

    @torch.no_grad()
    def _follow_live(self) -> None:
        """Copy live weights that other code wrote since (a warm start, a merge) into their masters."""
        for name, version in self._written.items():
            if self.live[name]._version != version:
                self.masters[name].copy_(self.live[name])
                self._written[name] = self.live[name]._version

    def _write_live(self) -> None:
        if names := self._own_halves:
            torch._foreach_copy_([self.live[n] for n in names], [self.masters[n] for n in names])
            self._written = {name: self.live[name]._version for name in names}


def _master_of(live: nn.Parameter, hollow: bool) -> nn.Parameter:
    """The fp32 master of a half-precision weight; a hollow one has a shape and can have a gradient, but no memory."""
    if not hollow:
        return nn.Parameter(live.detach().float())
    master = torch.empty_like(live, dtype=torch.float32)
    master.untyped_storage().resize_(0)
    return nn.Parameter(master)


def part_of(like: Tensor, value: Tensor) -> Tensor:
    """What this process holds of a value, whole or divided, for a parameter; all of it unless that is divided."""
    if isinstance(value, DTensor):
        return value.to_local()
    if not isinstance(like, DTensor) or not value.ndim:
        return value
    rows = -(-len(value) // like.device_mesh.size())
    first = rows * like.device_mesh.get_local_rank()
    return value[first : first + rows]


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """This process's part of a tensor that is divided as the parameter is."""
    if not isinstance(parameter, DTensor) or not part.ndim:
        return part
    sizes: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, **sizes
    )
