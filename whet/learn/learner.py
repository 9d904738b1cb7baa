"""The learner: a batch of judged rollouts in, one better policy out.

The loop calls `step` once a batch; each call is one version. Rollouts become samples (`samples.py`), samples become
packs (`model/packing.py`), each pack one forward and backward, all packs of a batch one optimiser step (or several: by
`learn.updates` and `learn.minibatches`). A batch without any signal takes no optimiser step: moments and weights stay,
the version still advances, since the loop counts batches. It never touches rollouts, curricula or files: `tensors`,
`state_dict` and `load` are what a checkpoint needs, and resumed training is bit for bit the uninterrupted one on a CPU.
With LoRA the adapters are all that asks for a gradient, so they are all that is optimised, saved and copied here.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from whet.config import Learn
from whet.errors import Diverged, WhetError
from whet.learn.losses import ESTIMATORS, importance, k3
from whet.learn.optimizer import AdamW, learning_rate
from whet.learn.samples import Sample, Sums, made_up, make_samples, minibatches
from whet.model.head import head_of, log_probs, score_sums
from whet.model.packing import Pack, Pair, check_packing, hidden_states, make_packs, packed_attention, put
from whet.model.twin import sharing_copy
from whet.types import Batch, Key, Report

PATIENCE = 3
"""So many updates in a row that are not finite end the run."""

T = TypeVar("T")


class Passes:
    """The passes of a model over packs, in plain form. `whet.fast.graphed.FastPasses` compiles and captures them.

    All of them are called inside `packed_attention(model)` and `layers(model)`.
    """

    compiled = False
    """Whether the LM head is compiled."""

    def __init__(self, model: Any, config: Learn) -> None:
        self.model = model

    def layers(self, model: Any) -> AbstractContextManager[None]:
        """Goes around passes of `model`, which is the policy or its reference."""
        return nullcontext()

    def hidden_states(self, pack: Pack) -> Tensor:
        """The policy's hidden states, for a backward pass."""
        return hidden_states(self.model, pack)

    def read(self, model: Any, pack: Pack) -> Tensor:
        """Hidden states without a gradient."""
        return hidden_states(model, pack)

    def sizes(self, pack_tokens: int) -> Sequence[int]:
        """Tokens of the packs that a rehearsal should pass, the largest first."""
        return ()

    def recover(self, error: Exception) -> bool:
        """After a pass raised `error`: whether these passes are another form from now on, so that it may work."""
        return False

    def free(self) -> bool:
        """The device is full: gives back memory that is held from one pass to the next; False where none is."""
        return False


class Learner:
    can_signal: frozenset[str] = frozenset({"score"})
    """Per-rollout signals a curriculum may ask for in `Report.signals`."""

    def __init__(
        self,
        model: Any,
        config: Learn,
        *,
        encode: Callable[[str], Sequence[int]],
        device: torch.device | str | None = None,
        passes: Callable[[Any, Learn], Passes] = Passes,
    ) -> None:
        """`encode` gives the token ids of a prompt id. `device` is where batches go, by default the model's. `passes`
        makes the form in which the model is run, once its masters are made."""
        self.model = model.eval()
        self.config = config
        self.version = 0
        self.updates = 0
        """Optimiser steps taken: what warms up the learning rate."""
        self.skipped = 0
        self.skipped_in_row = 0
        self.ooms = 0
        self.scored_s = 0.0
        """Seconds of the last step for log-probs under the policy before it and the reference."""
        self.pack_tokens = config.pack_tokens
        self.device = torch.device(device) if device is not None else model.device
        self.optimizer = AdamW(model, weight_decay=config.weight_decay, grad_clip=config.grad_clip)
        self._encode = encode
        self._estimator = ESTIMATORS[config.estimator]
        published = config.aggregate == "published"
        self._aggregate = self._estimator.aggregate if published else config.aggregate
        self._reference: Any = None
        if config.checkpoint_activations:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        check_packing(model)
        self.share = True
        """Prompts that several responses of a pack have are fed once."""
        self.passes = passes(model, config)

    def step(self, batch: Batch, progress: float = 0.0, needs: Set[str] = frozenset()) -> Report:
        """Train on a batch. `progress` 0..1 of the run sets the learning rate, `needs` what signals are reported.

        Signals are of the rollouts that went through the model, under the weights before the first update.
        """
        kl = self.config.kl_coef if batch.kl_coef is None else batch.kl_coef
        entropy = self.config.entropy_coef if batch.entropy_coef is None else batch.entropy_coef
        samples, signal = make_samples(batch, self._encode, self._estimator, self._aggregate, self.config.overlong)
        if not kl and not entropy:
            samples = [s for s in samples if s.advantage != 0.0]  # their gradient is exactly zero
        self._heed(batch, kl)
        lr = self._learning_rate(progress)
        scores: dict[Key, Tensor] | None = {} if "score" in needs else None
        metrics = {"learn/loss": 0.0, "learn/grad_norm": 0.0}
        self.scored_s = 0.0
        if samples:
            parts = minibatches(samples, batch.minibatches or self.config.minibatches)
            metrics = self._learn(samples, parts, kl, entropy, progress, scores)
        self.version += 1
        metrics |= {
            "learn/lr": lr,
            "learn/tokens": float(sum(s.response.size for s in samples)),
            "learn/rollouts": float(len(samples)),
            "learn/signal_share": signal / len(batch.groups) if batch.groups else 0.0,
            "learn/skipped": float(self.skipped),
            "learn/oom": float(self.ooms),
        }
        if self.device.type == "cuda":  # weights, cache and all, up to here
            metrics["learn/memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return Report(
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            signals=_finite(scores or {}),
        )

    def rehearse(self) -> None:
        """Passes over made-up packs of every size, for nothing: what is compiled or captured at the first of its kind
        is so now, and not in the first updates, while an engine waits. Weights and moments stay."""
        for tokens in self.passes.sizes(self.pack_tokens):
            longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", tokens)
            samples = made_up(tokens, longest, self.share)
            for _ in range(2):  # the second time it is captured
                self._within_memory(samples, partial(self._gradient, samples, None, None, 0.0, 0.0, None))
                self.optimizer.zero_grad()
            self._within_memory(samples, partial(self._score, self.model, samples))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds beside the live weights; masters only for half precision, reference only under KL."""
        kinds = {
            "masters": self.optimizer.master_tensors(),
            "optimizer": self.optimizer.moment_tensors(),
            "reference": self._reference_tensors(),
        }
        return {kind: named for kind, named in kinds.items() if named}

    def state_dict(self) -> dict[str, Any]:
        names = ("version", "updates", "skipped", "skipped_in_row", "ooms", "pack_tokens")
        return {name: getattr(self, name) for name in names}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """The live weights are the caller's to load, before this."""
        self.optimizer.load(tensors.get("masters", {}), tensors.get("optimizer", {}))
        self._reference = None
        if reference := tensors.get("reference"):
            self._make_reference()
            self._fill_reference(reference)
        for name in self.state_dict():
            setattr(self, name, state[name])

    def _heed(self, batch: Batch, kl: float) -> None:
        """Resets, and the reference: made when KL is first wanted, of the weights as they are then."""
        if batch.reset_optimizer:
            self.optimizer.reset()
        if kl and self._reference is None:
            self._make_reference()
        elif batch.reset_reference and self._reference is not None:
            self._fill_reference(self.optimizer.live)

    def _make_reference(self) -> None:
        """Copies what is trained and shares what is frozen: a whole model, or under LoRA a second pair of adapters.

        Fresh adapters (B = 0) add exactly nothing, so their reference is the model with adapters off.
        """
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        self._reference = sharing_copy(self.model, frozen).requires_grad_(False)

    @torch.no_grad()
    def _fill_reference(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self._reference_tensors().items():
            tensor.copy_(weights[name])

    def _reference_tensors(self) -> dict[str, Tensor]:
        if self._reference is None:
            return {}
        return {name: self._reference.get_parameter(name).detach() for name in self.optimizer.live}

    def _learning_rate(self, progress: float) -> float:
        c = self.config
        return learning_rate(self.updates, progress, peak=c.lr, warmup=c.warmup, schedule=c.schedule)

    def _learn(
        self,
        samples: list[Sample],
        parts: list[tuple[list[Sample], list[int]]],
        kl: float,
        entropy: float,
        progress: float,
        scores: dict[Key, Tensor] | None,
    ) -> dict[str, float]:
        """All updates of a batch; a skipped one ends it. Metrics are of the last pass, scores from before the first."""
        begun = time.perf_counter()
        old: list[Tensor] | None = None
        if self.config.updates * len(parts) > 1:
            old = self._within_memory(samples, lambda: self._score(self.model, samples, scores))
            scores = None
        reference = self._within_memory(samples, lambda: self._score(self._reference, samples)) if kl else None
        self.scored_s = self._since(begun) if old or reference else 0.0
        metrics: dict[str, float] = {}
        for _ in range(self.config.updates):
            sums = Sums()
            for mine, places in parts:
                before, against = (None if all_ is None else [all_[i] for i in places] for all_ in (old, reference))
                found = self._within_memory(mine, partial(self._gradient, mine, before, against, kl, entropy, scores))
                norm = self.optimizer.grad_norm()
                sums.join(found, 1 / len(parts))
                metrics = {**sums.metrics(), "learn/grad_norm": norm}
                if not (math.isfinite(float(found.loss)) and math.isfinite(norm)):
                    self._skip()
                    return metrics
                self.optimizer.step(self._learning_rate(progress), norm)
                self.updates += 1
                self.skipped_in_row = 0
        return metrics

    def _since(self, begun: float) -> float:
        """Seconds, what is queued on the device included."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    def _skip(self) -> None:
        self.optimizer.zero_grad()
        self.skipped += 1
        self.skipped_in_row += 1
        if self.skipped_in_row >= PATIENCE:
            raise Diverged(
                f"The loss or its gradient was not finite {PATIENCE} times in a row (last at version {self.version}); "
                "lower learn.lr, or go back to the last checkpoint."
            )

    def _gradient(
        self,
        samples: list[Sample],
        old: list[Tensor] | None,
        reference: list[Tensor] | None,
        kl: float,
        entropy: float,
        scores: dict[Key, Tensor] | None,
    ) -> Sums:
        """The gradient of the whole batch, pack by pack, left in the optimiser; and the scores, if they are wanted."""
        sums = Sums()
        again = self.config.checkpoint_activations
        with packed_attention(self.model, again), self.passes.layers(self.model):
            for pack in self._packs(samples):
                loss, parts = self._loss(pack, samples, old, reference, kl, entropy, scores)
                loss.backward()
                self.optimizer.accumulate()
                sums.add(loss, parts)
        return sums

    def _loss(
        self,
        pack: Pack,
        samples: list[Sample],
        old: list[Tensor] | None,
        reference: list[Tensor] | None,
        kl: float,
        entropy: float,
        scores: dict[Key, Tensor] | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c, members = self.config, [samples[i] for i in pack.members]
        head, heat = head_of(self.model), _temperature(pack, members)
        behaviour, advantage, weight = _columns(members, pack, head.weight)
        hidden = self.passes.hidden_states(pack)
        if scores is not None:
            sums = score_sums(hidden, head, pack.targets, pack.counts, heat)
            scores.update(zip((s.key for s in members), sums, strict=True))
        lp, entropies = log_probs(
            hidden, head, pack.targets, heat, entropy_grad=entropy != 0.0, compiled=self.passes.compiled
        )
        lp_old = lp.detach() if old is None else torch.cat([old[i] for i in pack.members])
        w = importance(lp_old, behaviour, c.importance_cap)
        surrogate, held = self._estimator.surrogate(lp, lp_old, advantage, pack.owner, c.clip_low, c.clip_high)
        token_loss = w * surrogate
        parts = {"entropy": entropies, "importance": w, "clipped": held, "mismatch": (lp_old - behaviour).abs()}
        if reference is not None:
            parts["kl"] = k3(lp, torch.cat([reference[i] for i in pack.members]))
            token_loss = token_loss + kl * parts["kl"]
        if entropy:
            token_loss = token_loss - entropy * entropies
        return (weight * token_loss).sum(), parts

    @torch.no_grad()
    def _score(self, model: Any, samples: list[Sample], scores: dict[Key, Tensor] | None = None) -> list[Tensor]:
        """Log-probs of every response under `model`, in the order of the samples; and the scores, if wanted."""
        out: dict[int, Tensor] = {}
        with packed_attention(model), self.passes.layers(model):
            for pack in self._packs(samples):
                heat = _temperature(pack, [samples[i] for i in pack.members])
                hidden = self.passes.read(model, pack)
                if scores is not None:
                    sums = score_sums(hidden, head_of(model), pack.targets, pack.counts, heat)
                    scores.update(zip((samples[i].key for i in pack.members), sums, strict=True))
                lp, _ = log_probs(hidden, head_of(model), pack.targets, heat, compiled=self.passes.compiled)
                out.update(zip(pack.members, lp.split(pack.counts), strict=True))
        return [out[i] for i in range(len(samples))]

    def _packs(self, samples: list[Sample], device: torch.device | str | None = None) -> list[Pack]:
        pairs = [(s.prompt, s.response) for s in samples]
        return make_packs(pairs, self.pack_tokens, device or self.device, self.share)

    def _within_memory(self, samples: list[Sample], work: Callable[[], T]) -> T:
        """`work`, again with smaller packs each time the device is full, down to one sequence a pack.

        Also again, once, where the compiler fails after all: on the way without gradients it was not tried.
        """
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
            packs = self._packs(samples, "cpu")
            if max(len(pack.members) for pack in packs) == 1:
                longest = max(pack.boundaries.longest for pack in packs)
                raise WhetError(
                    f"A single sequence of {longest} tokens does not fit in memory; "
                    "set learn.checkpoint_activations = true, lower rollout.max_tokens, or train a smaller model."
                )
            largest = max(pack.input_ids.numel() for pack in packs)
            self.pack_tokens = max(1, min(self.pack_tokens, largest) // 2)
            torch.cuda.empty_cache()


def _temperature(pack: Pack, members: list[Sample]) -> Tensor | float:
    heats = [s.temperature for s in members]
    if len(set(heats)) == 1:
        return heats[0]
    return torch.tensor(heats, dtype=torch.float64, device=pack.owner.device)[pack.owner]


def _columns(members: list[Sample], pack: Pack, weight: Tensor) -> list[Tensor]:
    """Behaviour log-probs, advantages and weights, a number a token, in the precision of log-probs.

    Made before the forward pass is queued: a copy from the host after it could wait for its end.
    """
    rows = [np.concatenate([s.behaviour for s in members])]
    rows += [np.repeat([getattr(s, name) for s in members], pack.counts) for name in ("advantage", "weight")]
    return put(rows, pack.owner.device, torch.float64 if weight.dtype == torch.float64 else torch.float32)


def _finite(scores: Mapping[Key, Tensor]) -> dict[Key, dict[str, float | np.ndarray]]:
    """As signals. An update that diverges must not reach what a curriculum remembers."""
    if not scores:
        return {}
    rows = torch.stack(list(scores.values())).float().cpu().numpy()
    return {key: {"score": row} for key, row in zip(scores, rows, strict=True) if np.isfinite(row).all()}


# ---- warm start
#
# Supervised fine-tuning on worked solutions, before reinforcement learning: a base that is right now and then.
#
# The loop calls `warm_start` once, before the first rollout. Same packs, head and optimiser as the learner; the loss is
# the mean cross-entropy over the response tokens of an update, at temperature 1. Nothing is drawn at random here: the
# same batches give the same weights.


def warm_start(
    model: Any,
    batches: Iterable[Sequence[Pair]],
    *,
    steps: int,
    lr: float,
    pack_tokens: int = 4096,
    grad_clip: float = 1.0,
    on_step: Callable[[int, float], None] | None = None,
) -> float:
    """`steps` updates, one a batch of (prompt ids, response ids with the end token); gives the last loss.

    The learning rate is that of `warm_start_rate`. `on_step(step, loss)` is told each loss.
    """
    model.eval()
    check_packing(model)
    optimizer = AdamW(model, grad_clip=grad_clip)
    loss, done = math.nan, 0
    for step, pairs in enumerate(itertools.islice(batches, steps)):
        loss = _cross_entropy(model, optimizer, pairs, pack_tokens)
        norm = optimizer.grad_norm()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(f"The warm start was not finite at step {step} (loss {loss}); lower warm_start.lr = {lr}.")
        optimizer.step(warm_start_rate(lr, step, steps), norm)
        done = step + 1
        if on_step is not None:
            on_step(step, loss)
    if done < steps:
        raise WhetError(f"The warm start wants {steps} batches of worked solutions and got {done}.")
    return loss


def warm_start_rate(lr: float, step: int, steps: int) -> float:
    """Up to lr over the first twentieth of the steps, while falling linearly to lr / 10 at the last one.

    >>> [round(warm_start_rate(1.0, s, 40), 3) for s in (0, 1, 39)]
    [0.5, 0.977, 0.1]
    """
    rising = min(1.0, (step + 1) / max(1, steps // 20))
    return lr * rising * (1.0 - 0.9 * step / max(steps - 1, 1))


def _cross_entropy(model: Any, optimizer: AdamW, pairs: Sequence[Pair], pack_tokens: int) -> float:
    """Leaves the gradient in the optimiser."""
    tokens = sum(len(response) for _, response in pairs)
    total = 0.0
    with packed_attention(model):
        for pack in make_packs(pairs, pack_tokens, model.device):
            lp, _ = log_probs(hidden_states(model, pack), head_of(model), pack.targets)
            loss = -lp.sum() / tokens
            loss.backward()
            optimizer.accumulate()
            total += float(loss.detach())
    return total
