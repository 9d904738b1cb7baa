"""A learner that holds a part of every weight: `learn.shard = "full"`, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

The member's engine keeps the model with all weights in its own type; the learner has a second model around parts of
them, which is what `shard_model` makes. A layer is whole only while it runs: its weights are gathered before, its
gradients are summed and divided after, so masters, moments and gradients take 1/N of their memory each. After a step
the weights go into the engine's copy, bucket by bucket. A pass takes all processes: they make as many of them
(`Team.rounds`), and none can repeat one alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.cluster.ranks import ShardedRanks, buckets, exchange
from whet.config import Learn
from whet.errors import WhetError
from whet.learn.checkpoint import Checkpoint
from whet.learn.learner import Learner, Passes, T
from whet.learn.optimizer import AdamW, part_of
from whet.learn.samples import Encode, Sample, Sums
from whet.model.packing import Pair
from whet.model.twin import sharing_copy
from whet.types import Batch, Report

_HALF = (torch.bfloat16, torch.float16)


def shard_model(whole: Any, *, trained: bool = True) -> Any:
    """The same network around this process's part of each weight of `whole`, which stays as it is. Of a model in half
    precision the parts that are trained are fp32: they are the masters. Not `trained`: a reference, without gradient.

    It is run by `hidden_states`. The embedding, the last norm and the head stay whole after a forward pass, until the
    backward pass ends or `reshard` is called, since the learner reads the head's weight in between."""
    model = sharing_copy(whole, whole.parameters())
    if any(
        name.endswith("experts") and isinstance(m, nn.ModuleList)
        for name, m in model.named_modules()
    ):
        alone = "has experts that are modules of their own, and processes may choose different ones"
        raise WhetError(
            f'{type(whole).__name__} {alone}: learn.shard = "full" cannot train it; use "optimizer".'
        )
    half = trained and whole.dtype in _HALF
    policy = MixedPrecisionPolicy(whole.dtype, torch.float32, cast_forward_inputs=False)
    given: dict[str, Any] = {"mp_policy": policy} if half else {}
    mesh = init_device_mesh(whole.device.type, (dist.get_world_size(),))
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in (*layers, model):
        _detach(module, trained, torch.float32 if half else whole.dtype)
        fully_shard(module, mesh=mesh, reshard_after_forward=module is not model, **given)
        # token weights are those of the whole batch: sums, not means
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    # else the compiler would leave out what it checks of a layer before it is run
    for module in model.modules():
        module._is_fsdp_managed_module = False
    # Packs go through the decoder, but it is the model that FSDP must see called, to gather what lies outside layers.
    model.run_decoder = model.get_decoder().__call__
    register_fsdp_forward_method(model, "run_decoder")
    model.get_decoder = lambda: model.run_decoder
    return model


def _detach(module: nn.Module, trained: bool, dtype: torch.dtype) -> None:
    """Give a module Parameters of its own, for `fully_shard` to divide; those that it has divided stay."""
    fresh: dict[int, nn.Parameter] = {}  # a weight may have several places
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None and not isinstance(p, DTensor):
                if id(p) not in fresh:
                    grad = trained and p.requires_grad
                    fresh[id(p)] = nn.Parameter(p.detach().to(dtype) if grad else p.detach(), grad)
                owner._parameters[name] = fresh[id(p)]


class ShardedLearner(Learner):
    """Trains a model of which each process of a group, formed before, holds a part. `whole` is the engine's model."""

    def __init__(
        self, whole: Any, config: Learn, *, encode: Encode, passes: Callable[..., Passes] = Passes
    ) -> None:
        self._whole = whole.eval()
        self._half = whole.dtype in _HALF
        passes = partial(passes, whole=whole)
        super().__init__(
            shard_model(whole), config, encode=encode, passes=passes, team=ShardedRanks()
        )
        self._targets: dict[str, Tensor] = {
            n: p.detach() for n, p in whole.named_parameters() if p.requires_grad
        }

    @property
    def whole(self) -> Any:
        return self._whole

    def step(self, batch: Batch, progress: float = 0.0, needs: Set[str] = frozenset()) -> Report:
        before = self.updates
        report = super().step(batch, progress, needs)
        if self.updates != before:
            self.publish()
        return report

    @torch.no_grad()
    def warm_start(
        self,
        batches: Iterable[Sequence[Pair]],
        *,
        steps: int,
        lr: float,
        on_step: Callable[[int, float], None],
    ) -> None:
        with torch.enable_grad():
            super().warm_start(batches, steps=steps, lr=lr, on_step=on_step)
        self.publish()
        # in half precision training goes on from the rounded weights, as it does elsewhere
        self._follow()

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        masters = checkpoint.tensors.get("masters")
        if masters is None:
            self._follow()

    @torch.no_grad()
    def publish(self) -> None:
        """Write the weights into the engine's copy, a bucket at a time: one exchange for many tensors."""
        live = self.optimizer.live
        size = self.team.size
        sides = {id(target): (live[name], target) for name, target in self._targets.items()}
        for bucket in buckets(list(self._targets.values())):
            parts, targets = zip(*(sides[id(target)] for target in bucket), strict=True)
            # of each part; the last ones may have fewer
            rows = [-(-len(target) // size) for target in targets]
            ends = list(
                itertools.accumulate(
                    n * target[0].numel() for n, target in zip(rows, targets, strict=True)
                )
            )
            spans = list(itertools.starmap(slice, itertools.pairwise((0, *ends))))
            own = bucket[0].new_zeros(ends[-1])
            whole = own.new_empty(size * ends[-1])
            locals_ = [part.to_local().flatten() for part in parts]
            places = [
                own[span][: local.numel()] for span, local in zip(spans, locals_, strict=True)
            ]
            torch._foreach_copy_(places, locals_)
            with exchange():
                dist.all_gather_into_tensor(whole, own)
            by_rank = whole.view(size, -1)
            found = [
                by_rank[:, span].reshape(-1)[: target.numel()]
                for span, target in zip(spans, targets, strict=True)
            ]
            torch._foreach_copy_([target.view(-1) for target in targets], found)

    @torch.no_grad()
    def _follow(self) -> None:
        """Take over the weights of the engine's copy."""
        for name, p in self.optimizer.live.items():
            part_of(p, p.detach()).copy_(part_of(p, self._targets[name]))

    def _optimizer(self, **settings: Any) -> AdamW:
        return AdamW(self.model, half=self._half, **settings)

    def _make_reference(self) -> Any:
        return shard_model(self._whole, trained=False)

    def _gradient(self, *args: Any) -> Sums:
        try:
            return super()._gradient(*args)
        finally:
            self.model.reshard()

    def _score(self, model: Any, *args: Any) -> list[Tensor]:
        try:
            return super()._score(model, *args)
        finally:
            model.reshard()

    def _within_memory(self, samples: list[Sample], work: Callable[[], T]) -> T:
        """The others are in the pass that failed here, and would wait for this process."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            alone = 'The GPU was full in an update, and with learn.shard = "full" no process can repeat it alone'
            way = f"--resume --set learn.pack_tokens={max(16, self.pack_tokens // 2)} goes on from the last checkpoint"
            raise WhetError(f"{alone}; {way}.") from error
