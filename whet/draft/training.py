"""Training of the EAGLE drafter, beside the policy, on hidden states that the target has computed anyway.

`AdaptiveDrafter` holds the drafter in use, its data and its trainer; the loop calls `train` after each update. What a
trainer does next follows from the number of packs so far, so a run that was stopped, saved and loaded goes on exactly.
Where several processes decode, each has one and practises in its idle time; `SpotDrafter` merges what they learn.

Loss of the pair (h_t, x_{t+1}) with guess f_t, as in EAGLE and TLT, mean over pairs whose guess is of the response:
    SmoothL1(f_t, h_{t+1}) + CE(softmax(head(h_{t+1})), softmax(head(f_t)))
both softmax at temperature 1 over the draft vocabulary. A chain is drafted from guesses, not from hidden states of the
target, so a share of the h_t is replaced by the drafter's own guess of them, made by one more forward pass (OURS; HASS
and EAGLE-3 unroll several steps instead).
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from whet.draft.buffer import DataBuffer, Window
from whet.draft.eagle import EagleHead, draft_vocabulary, eagle_head, read_drafter, write_drafter
from whet.errors import WhetError
from whet.model.head import head_of, wide_type
from whet.model.memory import BUFFER
from whet.model.packing import Boundaries, make_packs

# Shapes: T pairs of a pack, `width` the hidden size of the target.

SHARE = 0.2  # share of a step's tokens that is trained on, at most
CHUNK = 2**26  # logits at once: 256 MiB in fp32
# tokens of an update; small ones learn faster, but take a GPU's host as long
SMALL, LARGE = 2048, 8192
# draft vocabulary of a drafter that learns, where the target has twice as many: the most used
# tokens
WORDS = 16_384
LASTING = 16  # lessons between two choices of the draft vocabulary
MOMENTS = ("exp_avg", "exp_avg_sq")

# Betas, decay and clip are TLT's. OURS: learning rate and warm-up, since TLT's (1e-6, 1000) presuppose a drafter that
# was trained beforehand; equal weights of both losses (TLT has 0.1 for tokens) and small packs, with which a drafter
# that starts from nothing learns faster.
LR, WARMUP = 5e-4, 20  # warm-up in updates
BETAS = (0.9, 0.95)
DECAY = 0.01
CLIP = 1.0
OWN_GUESSES = 0.3  # share of states replaced by guesses


@dataclass(frozen=True, slots=True)
class Pairs:
    """Windows packed: T pairs, document after document."""

    hidden: Tensor  # [T, width]: h_t
    ids: Tensor  # [T]: x_{t+1}
    answer: Tensor  # [T, width]: h_{t+1}
    position: Tensor  # [T]: t
    trained: Tensor  # bool [T]: whether x_{t+2}, which is guessed, belongs to the response
    packed: Boundaries


@dataclass(frozen=True, slots=True)
class Trained:
    """What one run did; means over the pairs that were trained."""

    updates: int
    tokens: int
    feature_loss: float
    token_loss: float
    # share of pairs where the drafter's likeliest token is the target's, in the draft vocabulary
    agreement: float
    skipped: int  # packs without a usable gradient: nothing of a response, or not finite


@dataclass(frozen=True, slots=True)
class Copy:
    """A drafter on its way between a driver and the members of a fleet, in the form of a checkpoint."""

    merged: int  # the number of the merged drafter that it is, or goes on from
    tensors: Mapping[str, np.ndarray]  # moments may be left out: each member has its own
    state: Mapping[str, Any]
    done: Sequence[Trained] = ()  # since it was merged
    counts: np.ndarray | None = None  # of tokens, where the drafter has a vocabulary of its own


def pair_up(windows: Sequence[Window], device: torch.device | str = "cpu") -> Pairs:
    """Pack windows side by side, longest first, as `DataBuffer.sample` gives them."""
    # A pack leaves out the last token of its sequences, so a 0 stands there.
    documents = [(w.entry.ids[w.start + 1 : w.stop + 1].numpy(), [0]) for w in windows]
    (pack,) = make_packs(documents, budget=sum(map(len, windows)), device=device)
    windows = [windows[i] for i in pack.members]

    def put(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.to(device, non_blocking=True) for part in parts])

    return Pairs(
        hidden=put([w.entry.hidden[w.start : w.stop] for w in windows]),
        ids=pack.input_ids[0],
        answer=put([w.entry.hidden[w.start + 1 : w.stop + 1] for w in windows]),
        position=put([torch.arange(w.start, w.stop) for w in windows]),
        trained=put([torch.arange(w.start, w.stop) + 2 >= w.entry.prompt for w in windows]),
        packed=pack.boundaries,
    )


@torch.no_grad()
def with_guesses(head: EagleHead, pairs: Pairs, chosen: Tensor) -> Pairs:
    """Replace the states of the chosen pairs (bool [T]) by the guess made one pair earlier. The first pair of a
    document has no earlier one and keeps its state."""
    guess = head(pairs.hidden, pairs.ids, pairs.position, pairs.packed)
    earlier = guess.roll(1, 0).to(pairs.hidden.dtype)
    chosen = chosen.index_fill(0, pairs.packed.starts[:-1].long(), False)
    return replace(pairs, hidden=torch.where(chosen[:, None], earlier, pairs.hidden))


def losses(head: EagleHead, pairs: Pairs, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    """(feature loss, token loss, agreement), each summed over the pairs that are trained."""
    guess = head(pairs.hidden, pairs.ids, pairs.position, pairs.packed)[pairs.trained]
    wide = torch.promote_types(guess.dtype, torch.float32)
    answer = pairs.answer[pairs.trained]
    features = F.smooth_l1_loss(guess.to(wide), answer.to(wide), reduction="none").mean(-1).sum()
    tokens = features.new_zeros(())
    agreement = features.new_zeros(())
    rows = max(1, chunk // head.draft_head.weight.shape[0])
    for mine, theirs in zip(guess.split(rows), answer.split(rows), strict=True):
        loss, agreed = checkpoint(_token_loss, head, mine, theirs, use_reentrant=False)
        tokens = tokens + loss
        agreement = agreement + agreed
    return features, tokens, agreement


def _token_loss(head: EagleHead, guess: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    ours = head.logits(guess)
    with torch.no_grad():
        theirs = head.logits(answer)
        agreed = (ours.argmax(-1) == theirs.argmax(-1)).sum()
        wanted = theirs.softmax(-1)
    return -(wanted * ours.log_softmax(-1)).sum(), agreed


class DrafterTrainer:
    def __init__(
        self,
        live: EagleHead,
        buffer: DataBuffer,
        *,
        lr: float = LR,
        pack: int = SMALL,
        seed: int = 0,
    ) -> None:
        """`head`, a copy of `live` in fp32, is trained; `live` stays as it is. pack: tokens of an update."""
        self.head = live.copy(wide_type(live.fc))
        self.buffer = buffer
        self.lr = lr
        self.pack = pack
        self.seed = seed
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=lr, betas=BETAS, weight_decay=DECAY
        )
        self.half = live.fc.is_cuda  # matrices are multiplied in bfloat16; the weights stay fp32
        # taken from the buffer so far, by this trainer or the one it was loaded from
        self.packs = 0
        self.updates = 0

    def run(self, budget: int, should_stop: Callable[[], bool] = lambda: False) -> Trained:
        """Train on `budget` tokens at most; stop within one pack of `should_stop` turning true."""
        done = updates = skipped = 0
        sums = torch.zeros(4, dtype=torch.float64)
        while done < budget and not should_stop():
            windows = self.buffer.sample(min(self.pack, budget - done), (self.seed, self.packs))
            if not windows:
                break
            found = self._update(pair_up(windows, self.head.fc.device))
            self.packs += 1
            done += sum(map(len, windows))
            if found is None:
                skipped += 1
            else:
                sums = sums + found
                updates = updates + 1
        features, tokens, agreement = (sums[:-1] / sums[-1].clamp(min=1)).tolist()
        return Trained(updates, done, features, tokens, agreement, skipped)

    def state_dict(self) -> dict[str, Any]:
        """The whole state together with `tensors`, given the same buffer."""
        return {"packs": self.packs, "updates": self.updates, "seed": self.seed}

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by name, for safetensors, without the target's tensors."""
        out: dict[str, Tensor] = {}
        for name, weight in self.head.named_parameters():
            state = self.optimizer.state[weight]
            parts = {
                "weight": weight,
                **{moment: state.get(moment, torch.zeros_like(weight)) for moment in MOMENTS},
            }
            out |= {f"{part}.{name}": tensor.detach().clone() for part, tensor in parts.items()}
        return out

    @torch.no_grad()
    def load(
        self, state: dict[str, Any], tensors: dict[str, Tensor], moments: Sequence[str] = MOMENTS
    ) -> None:
        """moments: those that are loaded; the others stay as they are."""
        kinds = ("weight", *moments)
        refuse_misfit(
            {f"{kind}.{name}": w for name, w in self.head.named_parameters() for kind in kinds},
            tensors,
        )
        self.packs, self.updates, self.seed = (
            int(state["packs"]),
            int(state["updates"]),
            int(state["seed"]),
        )
        for name, weight in self.head.named_parameters():
            weight.copy_(tensors[f"weight.{name}"])
            if self.updates and moments:
                loaded = {m: tensors[f"{m}.{name}"].to(weight).clone() for m in moments}
                self.optimizer.state[weight] = {"step": torch.tensor(float(self.updates)), **loaded}

    def _update(self, pairs: Pairs) -> Tensor | None:
        """One update. Returns the sums of `losses` and the number of pairs; None where there was no usable gradient."""
        trained = int(pairs.trained.sum())
        if not trained:
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.updates + 1) / WARMUP)
        drawn = np.random.default_rng([self.seed, self.packs, 1]).random(len(pairs.ids))
        chosen = torch.from_numpy(drawn < OWN_GUESSES).to(self.head.fc.device)
        half = partial(torch.autocast, self.head.fc.device.type, torch.bfloat16, enabled=self.half)
        # its own context: weights that it casts without gradients are kept until it ends
        with half():
            pairs = with_guesses(self.head, pairs, chosen)
        with torch.enable_grad(), half():
            found = losses(self.head, pairs)
        loss = (found[0] + found[1]) / trained
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return None
        self.optimizer.step()
        self.updates += 1
        sums = torch.stack([part.detach().double() for part in found])
        return torch.cat((sums, sums.new_tensor([trained]))).cpu()


def refuse_misfit(weights: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Refuse tensors that are not those of a drafter with these weights."""
    if wrong := [
        name for name, w in weights.items() if name not in tensors or tensors[name].shape != w.shape
    ]:
        raise WhetError(
            f"The saved drafter does not fit this model ({wrong[0]}); start anew or change the model."
        )


def lesson_metrics(done: Sequence[Trained]) -> dict[str, float]:
    """Means of lessons by their tokens."""
    tokens = [lesson.tokens for lesson in done]
    names = {
        "draft/loss": "token_loss",
        "draft/feature_loss": "feature_loss",
        "draft/agreement": "agreement",
    }
    means = {
        key: float(np.average([getattr(d, name) for d in done], weights=tokens))
        for key, name in names.items()
    }
    return {**means, "draft/tokens_trained": float(sum(tokens))}


class Allowance:
    """Seconds that a drafter's lessons may take: each step grants some, and what is overspent is owed.

    A lesson makes at least one update, so it waits until there is more than the last update took; meanwhile what is
    left is kept. More than that lapses: a slow step does not pay for many quick ones. All that is spent is thus at most
    all that is granted plus one update. The first lesson is not counted, since it prepares kernels.
    """

    def __init__(self) -> None:
        self.left = 0.0
        self.each = 0.0  # seconds per update in the last lesson; known from the second on
        self._begun = False

    def grant(self, seconds: float) -> None:
        self.left = min(self.left, self.each) + seconds

    def allows(self, spent: float = 0.0) -> bool:
        """Whether a lesson that has taken so long may make one more update."""
        return spent + self.each < self.left

    def spend(self, seconds: float, updates: int) -> None:
        """Record a lesson of so many updates."""
        if updates and not self._begun:
            self._begun = True
            return
        self.left -= seconds
        if updates:
            self.each = seconds / updates

    def state_dict(self) -> dict[str, float]:
        """What the next grant would keep. The first lesson of a resumed run is not counted either."""
        return {"left": min(self.left, self.each), "each": self.each}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.left, self.each = float(state["left"]), float(state["each"])


class AdaptiveDrafter:
    """The drafter that learns beside the policy. The engine fills the buffer with the hidden states of rollouts that
    ended and drafts with `live`. Lessons take place after an update, when nothing is being decoded."""

    def __init__(
        self,
        model: PreTrainedModel,
        share: float,
        seed: int = 0,
        like: EagleHead | None = None,
        start: Path | None = None,
    ) -> None:
        """share: part of a step's generated tokens to train on after it. It starts from the weights of `like`, which
        is not changed, or from those in the folder `start`; else from random ones."""
        self.vocabulary, self.config = len(head_of(model).weight), model.config
        # Before anything was seen: the smallest ids, which a tokenizer of merges gives to the most frequent tokens.
        # The rows of the head are most of what a drafted token reads.
        few = share > 0 and self.vocabulary >= 2 * WORDS
        words = torch.arange(WORDS) if few else None
        if like is not None:
            # it may choose others
            words = None if like.draft_ids is None else like.draft_ids.clone()
        self.live = eagle_head(
            model, draft_ids=words, dtype=like.dtype if like else None, seed=seed
        )
        if like is not None:
            self.live.take(like)
        if start is not None:
            read_drafter(start, self.live)
        self.buffer = DataBuffer(BUFFER, share=share, device=model.device)
        pack = LARGE if model.device.type == "cuda" else SMALL
        self.trainer = DrafterTrainer(self.live, self.buffer, pack=pack, seed=seed)
        self.share = share
        self.allowance = Allowance()
        self.lessons = 0
        self.failures = 0  # failed lessons: there are none after the first
        self.merged = 0  # the number of the merged drafter that it goes on from
        self.practised: list[Trained] = []  # since then

    def train(self, step_tokens: int, seconds: float = math.inf) -> dict[str, float]:
        """Train on a share of the step's tokens and publish. Returns metrics, none where nothing was learnt. seconds:
        what the step grants (`Allowance`). Where that is too little for an update it is kept for later steps."""
        self.allowance.grant(seconds)
        if not self.share or not self.buffer.entries:
            return {}
        begin = time.perf_counter()
        if self.live.draft_ids is not None and self.lessons % LASTING == 0:
            self.live.speak(
                draft_vocabulary(self.buffer.counts(self.vocabulary), len(self.live.draft_ids))
            )
        self.lessons += 1
        budget = int(self.share * step_tokens)
        done = self.trainer.run(
            budget, should_stop=lambda: not self.allowance.allows(time.perf_counter() - begin)
        )
        if done.updates:
            self.live.take(self.trainer.head)
        self.allowance.spend(time.perf_counter() - begin, done.updates + done.skipped)
        if not done.updates:
            return {}
        return lesson_metrics([done])

    def give_up(self, error: Exception) -> str:
        """End the lessons after one has raised; what was published last goes on drafting. Returns what to say."""
        self.failures += 1
        self.end()
        first = next(iter(str(error).splitlines()), "")
        return (
            f"Training the drafter failed ({type(error).__name__}: {first}): its lessons end here, and it goes on "
            "drafting with what it has learnt; no token of the run depends on it."
        )

    def end(self) -> None:
        """End the lessons and free their memory; what was published last goes on drafting."""
        self.share = 0.0
        self.practised = []
        self.trainer.optimizer.zero_grad(set_to_none=True)
        self.buffer.close()

    def tensors(self) -> dict[str, Tensor]:
        words = {} if self.live.draft_ids is None else {"words": self.live.draft_ids}
        return {**self.trainer.tensors(), **words}

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.trainer.state_dict(),
            "lessons": self.lessons,
            "allowance": self.allowance.state_dict(),
        }

    def load(
        self,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        moments: Sequence[str] = MOMENTS,
    ) -> None:
        """Load all but the buffer, which starts empty and fills within a step."""
        tensors = dict(tensors)
        words = tensors.pop("words", None)
        if self.live.draft_ids is not None and words is not None:
            self.live.speak(words)
        self.trainer.load(dict(state), tensors, moments)
        self.lessons = state.get("lessons", 0)
        self.allowance.load_state_dict(state.get("allowance", self.allowance.state_dict()))
        self.live.take(self.trainer.head)

    def write(self, folder: Path) -> None:
        write_drafter(folder, self.live, self.config)

    # ---- in a member of a fleet

    @property
    def left(self) -> int:
        """Tokens that may be trained on before more rollouts end: a share of those that ended in this step."""
        return (
            int(self.share * self.buffer.ended) - self.buffer.trained if self.buffer.entries else 0
        )

    def practise(self) -> None:
        """Train on one pack. What drafts stays as it is until a merged drafter comes."""
        done = self.trainer.run(self.left, should_stop=iter((False, True)).__next__)
        self.buffer.trained += done.tokens
        self.practised += [done] if done.updates else []

    def learnt(self) -> Copy | None:
        """What is to be merged; asked again it is the same, or more."""
        if not self.practised:
            return None
        weights = {
            f"weight.{name}": w.detach().cpu().numpy()
            for name, w in self.trainer.head.named_parameters()
        }
        counts = None if self.live.draft_ids is None else self.buffer.counts(self.vocabulary)
        return Copy(self.merged, weights, self.state_dict(), self.practised, counts)

    def draft_with(self, merged: Copy) -> None:
        """Draft with a merged drafter, and go on from it; what was learnt beside it is in it, or is given up."""
        if merged.merged != self.merged:
            self.merged = merged.merged
            self.practised = []
            moments = [kind for kind in MOMENTS if f"{kind}.fc" in merged.tensors]
            self.load(
                {name: torch.from_numpy(array) for name, array in merged.tensors.items()},
                merged.state,
                moments,
            )

    def whole(self) -> tuple[Copy, dict[str, bytes]]:
        """All of it, and the files that `write` makes: for a driver, which has the folder of the run."""
        with tempfile.TemporaryDirectory() as folder:
            self.write(Path(folder))
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        return Copy(self.merged, _arrays(self.tensors()), self.state_dict()), files


def merge(last: Copy, found: Sequence[Copy]) -> Copy:
    """The mean of copies that go on from the `last` merged drafter, by the tokens that each has trained on (OURS)."""
    by = [sum(lesson.tokens for lesson in own.done) for own in found]
    tensors = {
        name: np.average([own.tensors[name] for own in found], axis=0, weights=by).astype(
            like.dtype
        )
        for name, like in found[0].tensors.items()
    }
    if (words := last.tensors.get("words")) is not None:
        counts = np.sum([own.counts for own in found if own.counts is not None], axis=0)
        chosen = (
            draft_vocabulary(counts, len(words)) if last.state["lessons"] % LASTING == 0 else None
        )
        tensors["words"] = words if chosen is None else chosen.numpy()
    furthest = max((own.state for own in found), key=lambda state: state["updates"])
    return Copy(next(_NUMBERS), tensors, {**furthest, "lessons": last.state["lessons"] + 1})


class SpotDrafter:
    """The drafter of a fleet, as its driver has it. Each member trains a copy in its idle time (TLT). Before weights go
    out, the copies are merged, and that goes with them."""

    def __init__(self, crew: Any) -> None:
        """crew: the members that decode, `whet.cluster.crew.Crew`. All go on from what one of them has."""
        self.crew, self._stats, self._before = crew, dict[str, float](), dict[str, float]()
        first, _ = self._ask_one()
        self._share(first.tensors, first.state)

    def update(self) -> None:
        """Merge what members have learnt from the last merged drafter on; what others have learnt is left out."""
        last: Copy = self.crew.drafter
        found = [
            own for own in self.crew.call("learnt") if own is not None and own.merged == last.merged
        ]
        if not found:
            return
        self.crew.drafter = merge(last, found)
        self._stats = lesson_metrics([lesson for own in found for lesson in own.done])
        # A lesson begins with what was merged last, and with rollouts that this has not seen.
        agreement = lesson_metrics([own.done[0] for own in found])["draft/agreement"]
        self._stats |= {**self._before, "draft/agreement_after": agreement}
        self._before = {"draft/agreement_before": agreement}

    def stats(self) -> dict[str, float]:
        """Metrics of the last merge, once."""
        stats = self._stats
        self._stats = {}
        return stats

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint holds them: merged weights, and the moments of one member."""
        own, _ = self._ask_one()
        return {
            name: torch.from_numpy(array)
            for name, array in {**own.tensors, **self.crew.drafter.tensors}.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.crew.drafter.state)

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        refuse_misfit(self.crew.drafter.tensors, tensors)  # what a member began with
        self._share(_arrays(tensors), state)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, data in self._ask_one()[1].items():
            (folder / name).write_bytes(data)

    def _share(self, tensors: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> None:
        self.crew.drafter = Copy(next(_NUMBERS), tensors, state)
        self.crew.call("draft_with", self.crew.drafter)

    def _ask_one(self) -> tuple[Copy, dict[str, bytes]]:
        while not (
            found := self.crew.call_each("drafter", dict.fromkeys(self.crew.present[:1], ()))
        ):
            self.crew.listen(0.1)  # it was lost meanwhile
        return found[0]


# of merged drafters: members outlive a learner, and with it a `SpotDrafter`
_NUMBERS = itertools.count(1)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
