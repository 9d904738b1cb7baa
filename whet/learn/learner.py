"""The learner: it turns a batch of judged rollouts into a better policy.

The loop calls `step` once per batch; each call is one version. Rollouts become samples (`samples.py`), samples become
packs (`model/packing.py`), each pack is one forward and backward pass, and all packs of a batch are one optimiser step
(or several, by `learn.updates` and `learn.minibatches`). A batch without any signal takes no optimiser step: weights
and moments stay, and the version still advances, since the loop counts batches. A checkpoint holds `tensors` and
`state_dict`; training resumed by `load` equals the uninterrupted one bit for bit on a CPU. With LoRA only the adapters
require a gradient, so only they are optimised, saved and copied. `warm_start` is the supervised
training before reinforcement learning.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from whet.config import Learn
from whet.errors import Diverged, WhetError
from whet.learn.base import Team
from whet.learn.checkpoint import Checkpoint, load_weights_into, write_weights
from whet.learn.losses import ESTIMATORS, importance, k3
from whet.learn.optimizer import AdamW, learning_rate, part_of
from whet.learn.samples import Encode, Sample, Sums, make_samples, minibatches
from whet.model.head import Heat, head_of, log_probs, score_sums, wide_type
from whet.model.packing import (
    Pack,
    Pair,
    check_packing,
    hidden_states,
    idle_pack,
    make_packs,
    packed_attention,
    upload,
)
from whet.model.twin import sharing_copy
from whet.types import Batch, Key, Report

# what a checkpoint keeps
STATE = ("version", "updates", "skipped", "skipped_in_row", "ooms", "pack_tokens")
PATIENCE = 3  # updates in a row that are not finite before the run ends

T = TypeVar("T")
Run = Callable[[Pack], Tensor]  # a pack to its hidden states
Scores = dict[Key, Tensor] | None  # filled by a pass where a curriculum needs them


class Passes:
    """The passes of a model over packs, without compilation. `whet.fast.graphed.FastPasses` compiles and captures them.
    All of them are called inside `packed_attention(model)` and `layers(model)`."""

    def __init__(self, model: Any, config: Learn, whole: Any = None) -> None:
        """whole: the network with all of its weights, where those of `model` are divided among processes."""
        self.model = model

    def layers(self, model: Any) -> AbstractContextManager[None]:
        """A context around passes of `model`, which is the policy or its reference."""
        return nullcontext()

    def hidden_states(self, pack: Pack) -> Tensor:
        """The hidden states of the policy, for a backward pass."""
        return hidden_states(self.model, pack)

    def read(self, model: Any, pack: Pack) -> Tensor:
        """Hidden states without a gradient."""
        return hidden_states(model, pack)

    def log_probs(
        self, hidden: Tensor, model: Any, pack: Pack, temperature: Heat, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        return log_probs(hidden, head_of(model), pack.targets, temperature, entropy_grad)

    def rehearsals(self, pack_tokens: int, share: bool) -> Iterable[list[Sample]]:
        """Made-up samples that fill each size of pack that is prepared at its first use, the largest first."""
        return ()

    def recover(self, error: Exception) -> bool:
        """After a pass raised `error`: change to another form and return True if the pass may then work."""
        return False

    def free(self) -> bool:
        """On a full device: release memory that is held between passes; False where there is none."""
        return False

    def standing(self) -> tuple[str, bool]:
        """(the form that is compiled, whether memory is held between passes), to be told to a team."""
        return "", False

    def agree(self, standings: Iterable[tuple[str, bool]]) -> None:
        """Give up what another learner of the team had to give up."""


class _Terms(NamedTuple):
    """The terms of a loss beside the policy's."""

    kl: float = 0.0
    entropy: float = 0.0
    scores: Scores = None


class Learner:
    """Trains `model` in place, one batch at a time; `learn/base.py` says what its methods are for."""

    # signals per rollout that a curriculum may ask for
    can_signal: frozenset[str] = frozenset({"score"})

    def __init__(
        self,
        model: Any,
        config: Learn,
        *,
        encode: Encode,
        passes: Callable[[Any, Learn], Passes] = Passes,
        team: Team | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`passes` makes the object that runs the model; `team`: the learners that train it together; `share`: (rank,
        size) of it where masters and moments are divided among them."""
        self.model = model.eval()
        self.config = config
        self.version = self.skipped = self.skipped_in_row = self.ooms = 0
        self.updates = 0  # optimiser steps taken: the learning rate warms up by them
        # seconds of the last step for log-probs under the old policy and the reference
        self.scored_s = 0.0
        self.pack_tokens = config.pack_tokens
        self.share = True  # prompts that several responses of a pack have are fed once
        self.device = model.device
        self.share_of_state = share
        self.optimizer = self._optimizer(
            weight_decay=config.weight_decay, grad_clip=config.grad_clip
        )
        self.team = team or Team()
        self._encode = encode
        self._estimator = ESTIMATORS[config.estimator]
        self._aggregate = (
            self._estimator.aggregate if config.aggregate == "published" else config.aggregate
        )
        self._entropies: dict[Key, Tensor] = {}  # by token, of the rollouts of the last step
        self._reference: Any = None
        if config.checkpoint_activations:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        check_packing(self.whole)
        self.passes = passes(model, config)

    def step(self, batch: Batch, progress: float = 0.0, needs: Set[str] = frozenset()) -> Report:
        """Train on a batch. `progress` 0..1 of the run sets the learning rate, `needs` which signals are reported.
        Signals belong to the rollouts that went through the model, under the weights before the first update."""
        kl = self.config.kl_coef if batch.kl_coef is None else batch.kl_coef
        entropy = self.config.entropy_coef if batch.entropy_coef is None else batch.entropy_coef
        # samples.py turns rewards into advantages and lengths into token weights: one sample per judged rollout.
        samples, signal = make_samples(
            batch, self._encode, self._estimator, self._aggregate, self.config.overlong
        )
        if not kl and not entropy:
            samples = [s for s in samples if s.advantage != 0.0]  # their gradient is exactly zero
        if batch.reset_optimizer:
            self.optimizer.reset()
        # The reference is made when KL is first used, from the weights of that time.
        if (kl and self._reference is None) or (
            self._reference is not None and batch.reset_reference
        ):
            self._set_reference(self.optimizer.live)
        lr = self._learning_rate(progress)
        scores: Scores = {} if "score" in needs else None
        metrics = {"learn/loss": 0.0, "learn/grad_norm": 0.0}
        self.scored_s = 0.0
        self._entropies = {}
        if samples:
            count = min(batch.minibatches or self.config.minibatches, len(samples))
            metrics = self._learn(samples, _Terms(kl, entropy, scores), count, progress)
        self.version += 1
        metrics |= {
            "learn/lr": lr,
            "learn/tokens": float(sum(s.response.size for s in samples)),
            "learn/rollouts": float(len(samples)),
            "learn/signal_share": signal / len(batch.groups) if batch.groups else 0.0,
            "learn/skipped": float(self.skipped),
            "learn/oom": float(self.ooms),
        }
        if self.device.type == "cuda":  # the peak so far, weights and cache included
            metrics["learn/memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        signals: dict[Key, dict[str, float | np.ndarray]] = {}
        if scores:  # not those of an update that diverges: a curriculum would remember them
            rows = torch.stack(list(scores.values())).float().cpu().numpy()
            signals = {
                key: {"score": row}
                for key, row in zip(scores, rows, strict=True)
                if np.isfinite(row).all()
            }
        if scores is not None:
            signals = {
                key: signal for share in self.team.gather(signals) for key, signal in share.items()
            }
        return Report(metrics=finite, signals=signals)

    def entropies(self, keys: Iterable[Key]) -> dict[Key, np.ndarray]:
        """From the pass that trained, the first where there were several: nothing is computed for it. A rollout that
        did not train, and one of another process, has none."""
        known = [key for key in keys if key in self._entropies]
        found = [self._entropies[key] for key in known]
        values = torch.cat(found).float().cpu() if found else torch.zeros(0)  # one transfer
        parts = values.split([part.numel() for part in found])
        return {key: part.numpy() for key, part in zip(known, parts, strict=True)}

    def rehearse(self) -> None:
        for samples in self.passes.rehearsals(self.pack_tokens, self.share):
            for _ in range(2):  # a size is captured at its second pass
                self._within_memory(samples, partial(self._gradient, samples, _Terms()))
                self.optimizer.zero_grad()
            self._within_memory(samples, partial(self._score, self.model, samples))

    def warm_start(
        self,
        batches: Iterable[Sequence[Pair]],
        *,
        steps: int,
        lr: float,
        on_step: Callable[[int, float], None],
    ) -> None:
        given: dict[str, Any] = {
            "pack_tokens": self.config.pack_tokens,
            "on_step": on_step,
            "team": self.team,
        }
        warm_start(self.model, batches, steps=steps, lr=lr, optimizer=self._optimizer(), **given)

    def _optimizer(self, **settings: Any) -> AdamW:
        return AdamW(self.model, share=self.share_of_state, **settings)

    @property
    def whole(self) -> Any:
        """The model with all of its weights."""
        return self.model

    def trained(self) -> list[Tensor]:
        """The weights that are trained, as an engine has them."""
        return [p.detach() for p in self.whole.parameters() if p.requires_grad]

    # ---- checkpoints

    def write(self, folder: Path) -> None:
        write_weights(folder, self.whole, self.tensors())

    def restore(self, checkpoint: Checkpoint) -> None:
        load_weights_into(self.whole, checkpoint.folder)
        self.load(checkpoint.tensors, checkpoint.states["learner"])

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds beside the live weights; masters only for half precision, reference only under KL."""
        kinds = {
            "masters": self.optimizer.master_tensors(),
            "optimizer": self.optimizer.moment_tensors(),
            "reference": self._reference_tensors(),
        }
        return {kind: named for kind, named in kinds.items() if named}

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint; the caller has loaded the live weights before."""
        self.optimizer.load(tensors.get("masters", {}), tensors.get("optimizer", {}))
        self._reference = None
        if reference := tensors.get("reference"):
            self._set_reference(reference)
        for name in STATE:
            setattr(self, name, state[name])
        # a recipe may have been given smaller ones
        self.pack_tokens = min(self.pack_tokens, self.config.pack_tokens)

    # ---- the reference

    @torch.no_grad()
    def _set_reference(self, weights: Mapping[str, Tensor]) -> None:
        """Copy what is trained and share what is frozen: a whole model, or under LoRA a second pair of adapters. Fresh
        adapters (B = 0) add exactly nothing, so their reference is the model with adapters off."""
        if self._reference is None:
            self._reference = self._make_reference()
        for name, tensor in self._reference_tensors().items():
            part_of(tensor, tensor).copy_(part_of(tensor, weights[name]))

    def _make_reference(self) -> Any:
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        return sharing_copy(self.model, frozen).requires_grad_(False)

    def _reference_tensors(self) -> dict[str, Tensor]:
        if self._reference is None:
            return {}
        return {name: self._reference.get_parameter(name).detach() for name in self.optimizer.live}

    # ---- updates

    def _learning_rate(self, progress: float) -> float:
        c = self.config
        return learning_rate(
            self.updates, progress, peak=c.lr, warmup=c.warmup, schedule=c.schedule
        )

    def _learn(
        self, samples: list[Sample], terms: _Terms, count: int, progress: float
    ) -> dict[str, float]:
        """All updates of a batch, cut into `count` parts; a skipped update ends it. Metrics belong to the last pass,
        scores to the weights before the first update."""
        begun = time.perf_counter()
        several = self.config.updates * count > 1
        parts = [self.team.divide(part) for part in minibatches(samples, count)]
        samples = [sample for part in parts for sample in part]
        if several:
            old = self._within_memory(
                samples, partial(self._score, self.model, samples, terms.scores)
            )
            for sample, lp in zip(samples, old, strict=True):
                sample.old = lp
            terms = terms._replace(scores=None)
        if terms.kl:
            reference = self._within_memory(samples, partial(self._score, self._reference, samples))
            for sample, lp in zip(samples, reference, strict=True):
                sample.reference = lp
        if several or terms.kl:
            if self.device.type == "cuda":  # work that is still queued counts too
                torch.cuda.synchronize(self.device)
            self.scored_s = time.perf_counter() - begun
        metrics: dict[str, float] = {}
        for _ in range(self.config.updates):
            sums = Sums()
            for part in parts:
                found = self._together(
                    self._within_memory(part, partial(self._gradient, part, terms))
                )
                norm = self.team.norm(self.optimizer.grad_norm())
                sums.join(found, 1 / count)
                metrics = {**sums.metrics(), "learn/grad_norm": norm}
                if not (math.isfinite(float(found.loss)) and math.isfinite(norm)):
                    self.optimizer.zero_grad()
                    self.skipped += 1
                    self.skipped_in_row += 1
                    if self.skipped_in_row >= PATIENCE:
                        times = f"{PATIENCE} times in a row (last at version {self.version})"
                        cure = "lower learn.lr, or go back to the last checkpoint"
                        raise Diverged(f"The loss or its gradient was not finite {times}; {cure}.")
                    return metrics
                self.optimizer.step(self._learning_rate(progress), norm)
                if self.optimizer.divided:
                    self.team.give(self.optimizer.live, self.optimizer.owners)
                self.updates += 1
                self.skipped_in_row = 0
        return metrics

    def _gradient(self, samples: list[Sample], terms: _Terms) -> Sums:
        """Leave the gradient of all samples in the optimiser, pack by pack."""
        sums = Sums()
        with (
            packed_attention(self.model, self.config.checkpoint_activations),
            self.passes.layers(self.model),
        ):
            packs, idle = self._rounds(samples)
            for pack in packs:
                loss, metrics = self._loss(pack, [samples[i] for i in pack.members], terms)
                loss.backward()
                self.optimizer.accumulate()  # half-precision gradients are summed in fp32
                sums.add(loss, metrics)
            for pack in idle:
                lp, _ = self.passes.log_probs(
                    self.passes.hidden_states(pack), self.model, pack, 1.0
                )
                (0.0 * lp).sum().backward()
                self.optimizer.accumulate()
        return sums

    def _together(self, found: Sums) -> Sums:
        """Add up the gradient and the sums of the team, which then has packs of one size and passes of one form."""
        if self.team.size == 1:
            return found
        own = (found.as_numbers(), self.pack_tokens, self.ooms, self.passes.standing())
        sums, tokens, ooms, standings = zip(*add_up(self.team, self.optimizer, own), strict=True)
        self.pack_tokens, self.ooms = min(tokens), max(ooms)
        self.passes.agree(standings)
        whole = Sums()
        for share in sums:
            whole.join(share)
        return whole

    def _loss(
        self, pack: Pack, members: list[Sample], terms: _Terms
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(the loss of a pack, metrics with one number per token); see `losses.py` for the formula."""
        # The columns are made before the forward pass is queued: a copy from the host after it could wait for its end.
        rows = [np.concatenate([s.behaviour for s in members])]
        rows += [
            np.repeat([getattr(s, name) for s in members], pack.counts)
            for name in ("advantage", "weight")
        ]
        behaviour, advantage, weight = upload(
            rows, self.device, wide_type(head_of(self.model).weight)
        )
        run = self.passes.hidden_states
        low = self.config.clip_low
        high = self.config.clip_high
        lp, entropies = self._forward(
            self.model, pack, members, run, terms.scores, entropy_grad=terms.entropy != 0.0
        )
        for sample, part in zip(
            members, entropies.detach().clone().split(pack.counts), strict=True
        ):
            self._entropies.setdefault(sample.key, part)
        old = [s.old for s in members if s.old is not None]
        lp_old = torch.cat(old) if old else lp.detach()
        w = importance(lp_old, behaviour)
        surrogate, clipped = self._estimator.surrogate(lp, lp_old, advantage, pack.owner, low, high)
        token_loss = w * surrogate
        metrics = {
            "entropy": entropies,
            "importance": w,
            "clipped": clipped,
            "mismatch": (lp_old - behaviour).abs(),
        }
        if reference := [s.reference for s in members if s.reference is not None]:
            metrics["kl"] = k3(lp, torch.cat(reference))
            token_loss = token_loss + terms.kl * metrics["kl"]
        if terms.entropy:
            token_loss = token_loss - terms.entropy * entropies
        return (weight * token_loss).sum(), metrics

    @torch.no_grad()
    def _score(self, model: Any, samples: list[Sample], scores: Scores = None) -> list[Tensor]:
        """Log-probs of every response under `model`, in the order of the samples."""
        out: dict[int, Tensor] = {}
        with packed_attention(model), self.passes.layers(model):
            packs, idle = self._rounds(samples)
            for pack in packs:
                members = [samples[i] for i in pack.members]
                lp, _ = self._forward(
                    model, pack, members, partial(self.passes.read, model), scores
                )
                out.update(zip(pack.members, lp.split(pack.counts), strict=True))
            for pack in idle:
                self.passes.read(model, pack)
        return [out[i] for i in range(len(samples))]

    def _forward(
        self,
        model: Any,
        pack: Pack,
        members: list[Sample],
        run: Run,
        scores: Scores,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the response tokens of a pack. Scores, if wanted, are those of its members."""
        heats = [s.temperature for s in members]
        heat: Heat = heats[0]
        if len(set(heats)) > 1:
            heat = torch.tensor(heats, dtype=torch.float64, device=pack.owner.device)[pack.owner]
        hidden = run(pack)
        if scores is not None:
            sums = score_sums(hidden, head_of(model), pack.targets, pack.counts, heat)
            scores.update(zip((s.key for s in members), sums, strict=True))
        return self.passes.log_probs(hidden, model, pack, heat, entropy_grad)

    def _packs(self, samples: list[Sample], device: torch.device) -> list[Pack]:
        return make_packs(
            [(s.prompt, s.response) for s in samples], self.pack_tokens, device, self.share
        )

    def _rounds(self, samples: list[Sample]) -> tuple[list[Pack], list[Pack]]:
        """The packs of these samples, and those that are run besides where the team makes its passes together."""
        packs = self._packs(samples, self.device)
        return packs, [idle_pack(self.device)] * (self.team.rounds(len(packs)) - len(packs))

    def _within_memory(self, samples: list[Sample], work: Callable[[], T]) -> T:
        """Run `work`, again with smaller packs each time the device is full, down to one sequence per pack."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                self.ooms += 1
            except Exception as error:
                if not self.passes.recover(error):
                    raise
                self.optimizer.zero_grad()
                continue
            # Here, after the handler, the traceback no longer keeps the failed pass alive.
            self.optimizer.zero_grad()
            if self.passes.free():
                continue
            packs = self._packs(samples, torch.device("cpu"))
            if max(len(pack.members) for pack in packs) == 1:
                longest = max(pack.boundaries.longest for pack in packs)
                ways = "set learn.checkpoint_activations = true, lower rollout.max_tokens, or train a smaller model"
                raise WhetError(
                    f"A single sequence of {longest} tokens does not fit in memory; {ways}."
                )
            largest = max(pack.input_ids.numel() for pack in packs)
            self.pack_tokens = max(1, min(self.pack_tokens, largest) // 2)
            torch.cuda.empty_cache()


def warm_start(
    model: Any,
    batches: Iterable[Sequence[Pair]],
    *,
    steps: int,
    lr: float,
    pack_tokens: int = 4096,
    on_step: Callable[[int, float], None] | None = None,
    team: Team | None = None,
    optimizer: AdamW | None = None,
) -> float:
    """Supervised fine-tuning on worked solutions, so that the base is sometimes right; returns the last loss.

    `steps` updates, one per batch of (prompt ids, response ids with the end token), by `warm_start_rate`. The loss is
    the mean cross-entropy over the response tokens, at temperature 1. Nothing is drawn at random, so the same batches
    give the same weights. `on_step(step, loss)` is called after each update. The learners of a team get the same
    batches, and each runs its share of them.
    """
    model.eval()
    if optimizer is None:  # a learner has one, and has checked its model
        check_packing(model)
    optimizer = optimizer or AdamW(model)
    team = team or Team()
    loss = math.nan
    step = -1
    for step, pairs in enumerate(itertools.islice(batches, steps)):
        loss = 0.0
        tokens = sum(len(response) for _, response in pairs)
        with packed_attention(model):
            packs = make_packs(pairs[team.rank :: team.size], pack_tokens, model.device)
            idle = [idle_pack(model.device)] * (team.rounds(len(packs)) - len(packs))
            for number, pack in enumerate((*packs, *idle)):
                lp, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets)
                part = -lp.sum() / tokens if number < len(packs) else (0.0 * lp).sum()
                part.backward()
                optimizer.accumulate()
                loss += float(part.detach())
        if team.size > 1:
            loss = sum(add_up(team, optimizer, loss))
        norm = team.norm(optimizer.grad_norm())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(
                f"The warm start was not finite at step {step} (loss {loss}); lower warm_start.lr = {lr}."
            )
        optimizer.step(warm_start_rate(lr, step, steps), norm)
        if optimizer.divided:
            team.give(optimizer.live, optimizer.owners)
        if on_step is not None:
            on_step(step, loss)
    if step + 1 < steps:
        raise WhetError(
            f"The warm start wants {steps} batches of worked solutions and got {step + 1}."
        )
    return loss


def add_up(team: Team, optimizer: AdamW, own: T) -> list[T]:
    """Replace the gradient of each member by the sum of all; returns what each found, by rank."""
    owns, reached = zip(*team.gather((own, optimizer.reached())), strict=True)
    team.add(optimizer.gradients(set().union(*reached)))
    return list(owns)


def warm_start_rate(lr: float, step: int, steps: int) -> float:
    """The rate rises to lr over the first twentieth of the steps, and falls linearly to lr / 10 at the last one.

    >>> [round(warm_start_rate(1.0, s, 40), 3) for s in (0, 1, 39)]
    [0.5, 0.977, 0.1]
    """
    rising = min(1.0, (step + 1) / max(1, steps // 20))
    return lr * rising * (1.0 - 0.9 * step / max(steps - 1, 1))
