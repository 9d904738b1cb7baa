"""The learner's passes on a GPU: compiled layers, and CUDA graphs for models so small that the host cannot keep up.

`whet.build` hands `FastPasses` to the learner, which calls it in place of the plain `Passes`. A `Graphed` captures
the network's forward and backward pass; head, loss and optimiser stay outside: they are few launches. A pack is padded
to one of few sizes, by sequences of their own whose gradient is zero, so that they add exactly nothing. A size that
comes a second time is captured, and replayed from then on. All graphs lie in one memory pool, so a backward pass must
follow its own forward pass before another is replayed (it raises if not). On a CPU the same buffers go through plain
calls, which is how the tests compare it with `hidden_states`. Shapes: `tokens` padded tokens of a pack, `sequences` + 1
starts, `width` numbers per hidden state.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from whet.config import Learn
from whet.fast.compiled import (
    FEW,
    FORMS,
    best_form,
    compiled_layers,
    compiled_log_probs,
    first_line,
)
from whet.fast.graphs import capturing, pool_bytes
from whet.learn.learner import Passes
from whet.learn.samples import Sample
from whet.model.head import head_of, log_probs
from whet.model.memory import host_bound
from whet.model.packing import Boundaries, Keys, Pack, Padding, hidden_states
from whet.model.twin import changed

MOST = 16  # sizes that are captured; those that come later take the plain way
# Parts of the budget that tokens are padded to, by less than half unless they are fewer than the least.
PARTS = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8)
# Times the tokens that keys are padded to where prompts are shared, or twice that, and so on. Eight responses to a
# prompt of twice their length have 2.4 times as many.
KEYS = 3
# The least sizes. There are few, since a capture takes as long as several plain passes, and blocks of attention that
# find no sequence, or none so long, end at once.
SEQUENCES = 256
LONGEST = 512
TRIED = 2  # layers that are enough to try the compiler
# share of the free memory that a capture may need: one that runs out half-way is worse than none
SPARE = 0.9


class Size(NamedTuple):
    tokens: int
    sequences: int
    longest: int
    keys: int = 0  # where sequences share prompts; 0: they do not


def size_of(tokens: int, sequences: int, longest: int, budget: int, keys: int = 0) -> Size | None:
    """The size a pack is padded to: tokens to a part of the budget, keys to 3, 6, ... times these, the rest to powers
    of two; None for one sequence beyond the budget, which is rare and long enough to keep the device busy.

    Padding is cut into sequences no longer than the pack's own, since a model may have no later position.

    >>> size_of(15000, sequences=20, longest=1000, budget=16384)
    Size(tokens=16384, sequences=256, longest=1024, keys=0)
    >>> size_of(10000, sequences=128, longest=200, budget=16384, keys=20000).keys
    36864
    """
    if tokens > budget:
        return None
    padded = min(size for size in full_sizes(budget) if size >= tokens)
    padding = -(-(padded - tokens) // longest)
    if keys:
        keys = KEYS * padded * _power(-(-(keys + padded - tokens) // (KEYS * padded)))
    return Size(
        padded, _power(max(SEQUENCES, sequences + padding)), _power(max(LONGEST, longest)), keys
    )


def full_sizes(budget: int) -> list[int]:
    """Tokens of packs that fill each size, the largest first, since its memory serves the others.

    >>> full_sizes(16384)
    [16384, 12288, 8192, 6144, 4096, 3072, 2048]
    """
    return sorted({math.ceil(part * budget) for part in PARTS}, reverse=True)


def worth_graphs(model: Any, tokens: int) -> bool:
    """Whether the model is `host_bound` and attends by the flash kernel: the other depends on each pack's lengths."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    flash = (
        getattr(config, "attn_logit_softcapping", None) is None and width % 8 == 0 and width <= 256
    )
    return flash and host_bound(
        sum(p.numel() for p in model.parameters()), config.num_hidden_layers, tokens
    )


class Buffers:
    """The tensors that a pass of one size reads and writes, always in the same place; on CUDA, its graphs."""

    def __init__(self, size: Size, hidden: tuple[int, torch.dtype], device: torch.device) -> None:
        self.size = size
        # One after the other, as in a pack: a compiled layer holds positions to how they lie in memory.
        whole = torch.zeros(2 * size.tokens, dtype=torch.int64, device=device)
        self.ids, self.position = (half[None] for half in whole.split(size.tokens))
        self.starts = torch.zeros(size.sequences + 1, dtype=torch.int32, device=device)
        # the incoming gradient
        self.slope = torch.zeros(1, size.tokens, hidden[0], dtype=hidden[1], device=device)
        self.out: Tensor | None = None  # [1, tokens, width], written anew by every forward pass
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self.keys: Keys | None = None
        if size.keys:
            rows, own = (
                torch.zeros(n, dtype=torch.int64, device=device) for n in (size.keys, size.tokens)
            )
            self.keys = Keys(rows, torch.zeros_like(self.starts), own)
        self.boundaries = Boundaries(
            self.starts, size.longest, True, Padding((), device), self.keys
        )
        self._counted = torch.arange(max(*size), device=device)

    def fill(self, pack: Pack) -> None:
        """Writes a pack and its padding: copies of its first token, in sequences as long as its longest; those after
        the last token are empty."""
        real = pack.input_ids.shape[1]
        n = len(pack.members)
        longest = pack.boundaries.longest
        rest = self.size.tokens - real
        self.ids[:, :real] = pack.input_ids
        self.ids[:, real:] = pack.input_ids[:, :1]
        self.position[:, :real] = pack.position_ids
        self.position[:, real:] = self._counted[:rest] % longest
        ends = ((self._counted[: self.size.sequences - n] + 1) * longest).clamp(max=rest)
        self.starts[: n + 1] = pack.boundaries.starts
        self.starts[n + 1 :] = ends + real
        keys = self.keys
        if keys is not None and pack.boundaries.keys is not None:
            theirs = pack.boundaries.keys
            known = theirs.rows.numel()
            keys.rows[:known] = theirs.rows
            # padding attends to itself
            keys.rows[known : known + rest] = self._counted[:rest] + real
            keys.rows[known + rest :] = -1
            keys.starts[: n + 1] = theirs.starts
            keys.starts[n + 1 :] = ends + known
            keys.own[:real] = theirs.own
            keys.own[real:] = self._counted[:rest] + known
            keys = replace(keys, rows=keys.rows[: known + rest])
        # never within a graph: what attends here depends on each length
        if not pack.boundaries.flash:
            more = (longest,) * (rest // longest) + (rest % longest,) * (rest % longest > 0)
            padding = Padding([*pack.boundaries.padding.lengths, *more], self.starts.device)
            self.boundaries = Boundaries(self.starts, self.size.longest, False, padding, keys)


class Graphed:
    def __init__(self, model: Any, budget: int) -> None:
        """`budget`: tokens of a full pack."""
        self.model = model
        self.budget = budget
        self.decoder = model.get_decoder()
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.ready: dict[Size, Buffers] = {}
        self.bytes = 0  # what the graphs' memory pool took
        self.stopped = False
        # parameters with a gradient, in the order of `slopes`
        self.trained: list[nn.Parameter] = []
        # their gradient from the last backward pass, whatever its size was
        self.slopes: list[Tensor] = []
        self._seen = Counter[Size]()
        self._owners = [
            (m, name)
            for m in self.decoder.modules()
            for name, p in m._parameters.items()
            if p is not None
        ]
        self._places: tuple[int, ...] = ()
        # Stand-ins for the parameters, by their id: the same memory, but leaves of their own. Autograd remembers the
        # stream that a leaf is used on for as long as any pass over it is kept: outside, it may be one that is not
        # captured.
        self._stand_ins: dict[int, nn.Parameter] = {}
        self._turn: object = None  # the forward pass whose backward pass may be run
        self._pool: Any = None
        # the one stream of trials: each stream keeps a workspace for matrix products
        self._aside: Any = None

    def __call__(self, pack: Pack) -> Tensor:
        """As `hidden_states(model, pack)`."""
        size = self._size(pack) if torch.is_grad_enabled() and not self.stopped else None
        if size is not None:
            self._look_around()
            self._seen[size] += 1
            if size not in self.ready and self._seen[size] >= 2 and len(self.ready) < MOST:
                self._make_ready(size, pack)
        buffers = self._known(size, pack)
        if buffers is None:
            return hidden_states(self.model, pack)
        hidden: Tensor = _Pass.apply(self, buffers, pack, *self.trained)
        return hidden

    def read(self, pack: Pack) -> Tensor:
        """The same without a gradient: by the graph of a forward pass if this size has one, else by the pass with a
        gradient, since the compiler has done its work for that one."""
        buffers = None if self.stopped else self._known(self._size(pack), pack)
        if buffers is None:
            with torch.enable_grad():
                return hidden_states(self.model, pack).detach()
        self._turn = None  # a backward pass would find another pack
        with torch.no_grad():
            return self.forward(buffers)[0].index_select(0, pack.predict)

    def stop(self, reason: str) -> None:
        """Takes the plain way from now on, and frees the memory of the graphs."""
        self._forget()
        if not self.stopped:
            self.stopped = True
            what = f"{type(self.model).__name__} is trained without CUDA graphs, more slowly"
            warnings.warn(f"{what}: {reason}", stacklevel=2)

    def forward(self, buffers: Buffers) -> Tensor:
        if buffers.graphs is not None:
            buffers.graphs[0].replay()
        else:
            buffers.out = self._decode(buffers)
        assert buffers.out is not None
        return buffers.out.detach()

    def backward(self, buffers: Buffers) -> list[Tensor]:
        """The gradient of `trained`, copied by few launches: the next replay overwrites what this one wrote."""
        if buffers.graphs is not None:
            buffers.graphs[1].replay()
        else:
            assert buffers.out is not None
            self._differentiate(buffers.out, buffers)
            buffers.out = None
        return list(torch._foreach_mul(self.slopes, 1.0))

    # ---- making ready

    def _known(self, size: Size | None, pack: Pack) -> Buffers | None:
        """The buffers of this size, filled with the pack; None where they are not ready."""
        if size is None:
            return None
        self._look_around()
        found = self.ready.get(size)
        if found is not None:
            found.fill(pack)
        return found

    def _size(self, pack: Pack) -> Size | None:
        if self.device.type == "cuda" and not pack.boundaries.flash:
            return None
        around = pack.boundaries
        keys = 0 if around.keys is None else around.keys.rows.numel()
        return size_of(pack.input_ids.numel(), len(pack.members), around.longest, self.budget, keys)

    def _look_around(self) -> None:
        """Begins anew if a weight has moved: graphs hold addresses."""
        weights = [module._parameters[name] for module, name in self._owners]
        places = tuple(0 if weight is None else weight.data_ptr() for weight in weights)
        if places != self._places:
            self._forget()
            self._places = places
            self._stand_ins = {
                id(p): nn.Parameter(p.detach(), p.requires_grad) for p in weights if p is not None
            }

    def _forget(self) -> None:
        if self.device.type == "cuda" and self.ready:
            torch.cuda.synchronize(self.device)
        self.ready = {}
        self._pool = None
        self._turn = None
        self.bytes = 0
        self.trained = []
        self.slopes = []
        self._stand_ins = {}
        self._places = ()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _make_ready(self, size: Size, pack: Pack) -> None:
        weight = self.model.get_input_embeddings().weight
        buffers = Buffers(
            size, (self.model.config.get_text_config().hidden_size, weight.dtype), self.device
        )
        buffers.fill(pack)
        if reason := self._tried(buffers) or (
            self._captured(buffers) if self.device.type == "cuda" else ""
        ):
            self.stop(reason)
        else:
            self.ready[size] = buffers

    def _tried(self, buffers: Buffers) -> str:
        """Why the passes cannot be captured, or an empty string. Compiles what is to be compiled, and finds what a
        graph cannot hold, since a failed capture would leave CUDA's state broken."""
        try:
            if self.device.type != "cuda":
                self._differentiate(self._decode(buffers), buffers)
                return ""
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved(self.device)
            self._aside = self._aside or torch.cuda.Stream(self.device)
            self._aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._aside):
                self._differentiate(self._decode(buffers), buffers)
                with _no_waiting():
                    self._differentiate(self._decode(buffers), buffers)
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError:
            return "they do not fit in memory"
        except Exception as error:  # a compiler's or a model's, of any kind
            return first_line(error)
        needed = torch.cuda.memory_reserved(self.device) - reserved
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return "" if needed - self.bytes < SPARE * free else "they do not fit in memory"

    def _captured(self, buffers: Buffers) -> str:
        """Captures; why it failed, if it did. Errors other than a full memory leave CUDA's state broken: not caught."""
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        forward = torch.cuda.CUDAGraph()
        backward = torch.cuda.CUDAGraph()
        try:
            with capturing(forward, pool):
                out = self._decode(buffers)
            with capturing(backward, pool):
                self._differentiate(out, buffers)
        except torch.OutOfMemoryError:
            return "they do not fit in memory"
        buffers.out = out.detach()
        buffers.graphs = (forward, backward)
        self.bytes = pool_bytes(pool)
        return ""

    # ---- the passes

    def _decode(self, buffers: Buffers) -> Tensor:
        with self._standing_in(), torch.enable_grad():
            out: Tensor = self.decoder(
                input_ids=buffers.ids,
                position_ids=buffers.position,
                packed=buffers.boundaries,
                use_cache=False,
            ).last_hidden_state
        return out

    def _differentiate(self, out: Tensor, buffers: Buffers) -> None:
        """Writes `slopes`. The first call finds out which weights have one: an unused weight must not get a zero."""
        asked = self.trained or [p for p in self.decoder.parameters() if p.requires_grad]
        leaves = [self._stand_ins[id(p)] for p in asked]
        found = torch.autograd.grad(out, leaves, buffers.slope, allow_unused=True)
        if not self.trained:
            self.trained = [p for p, slope in zip(asked, found, strict=True) if slope is not None]
            self.slopes = [torch.empty_like(slope) for slope in found if slope is not None]
        torch._foreach_copy_(self.slopes, [slope for slope in found if slope is not None])

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        before = [(module, name, module._parameters[name]) for module, name in self._owners]
        for module, name, weight in before:
            module._parameters[name] = self._stand_ins[id(weight)]
        try:
            yield
        finally:
            for module, name, weight in before:
                module._parameters[name] = weight


class _Pass(torch.autograd.Function):
    """The parameters are arguments, so that autograd hands them their gradient as in a plain pass."""

    @staticmethod
    def forward(
        ctx: Any, graphed: Graphed, buffers: Buffers, pack: Pack, *trained: Tensor
    ) -> Tensor:
        hidden = graphed.forward(buffers)[0].index_select(0, pack.predict)
        ctx.graphed, ctx.buffers, ctx.predict, ctx.turn = graphed, buffers, pack.predict, object()
        graphed._turn = ctx.turn
        return hidden

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        graphed = ctx.graphed
        buffers = ctx.buffers
        if graphed._turn is not ctx.turn:
            raise RuntimeError(
                "Another forward pass ran on the memory of this one before its backward pass."
            )
        graphed._turn = None
        buffers.slope.zero_()
        if buffers.size.keys:  # the last token of a shared prompt predicts several
            buffers.slope[0].index_add_(0, ctx.predict, slope)
        else:
            buffers.slope[0].index_copy_(0, ctx.predict, slope)
        return None, None, None, *graphed.backward(buffers)


class FastPasses(Passes):
    """The learner's passes on a GPU in half precision: compiled, and captured where the host would hold the device up.
    Elsewhere, and where `config.compile` is off, they are the plain ones."""

    def __init__(self, model: Any, config: Learn, graphs: bool = True, whole: Any = None) -> None:
        """graphs: the memory of a pass may be kept from one step to the next. Where weights are divided there are none,
        since they hold addresses and a layer is gathered anew for each pass; and the compiler is tried on the first
        layers of `whole`, since there is no room for a gradient of all."""
        super().__init__(model, config)
        self.config = config
        tried = self.tried = model if whole is None else whole
        fast = (
            tried.device.type == "cuda"
            and tried.dtype in (torch.bfloat16, torch.float16)
            and config.compile
        )
        few = (tried.config.get_text_config(), "num_hidden_layers", TRIED)
        with changed(*([] if whole is None else [few])):
            # one of `compiled.FORMS`; empty: nothing is compiled
            self.form = self._best_form() if fast else ""
        graphs = graphs and fast and not config.checkpoint_activations and whole is None
        graphs = graphs and worth_graphs(model, config.pack_tokens)
        self.graphed = Graphed(model, config.pack_tokens) if graphs else None

    def layers(self, model: Any) -> AbstractContextManager[None]:
        return compiled_layers(model, self.form)

    def hidden_states(self, pack: Pack) -> Tensor:
        return hidden_states(self.model, pack) if self.graphed is None else self.graphed(pack)

    def read(self, model: Any, pack: Pack) -> Tensor:
        graphed = self.graphed if model is self.model else None
        return hidden_states(model, pack) if graphed is None else graphed.read(pack)

    def log_probs(
        self,
        hidden: Tensor,
        model: Any,
        pack: Pack,
        temperature: Tensor | float,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        compute = compiled_log_probs if self.form else log_probs
        return compute(hidden, head_of(model), pack.targets, temperature, entropy_grad=entropy_grad)

    def rehearsals(self, pack_tokens: int, share: bool) -> list[list[Sample]]:
        if self.graphed is None:
            return []
        sizes = full_sizes(pack_tokens)
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", sizes[0])
        return [made_up(tokens, longest, share) for tokens in sizes]

    def recover(self, error: Exception) -> bool:
        """The compiler may fail after its trial: passes without a gradient were not tried."""
        if not isinstance(error, TorchDynamoException):
            return False
        self.form = ""
        self._say_what_is_compiled("", first_line(error))
        return True

    def free(self) -> bool:
        if self.graphed is None:
            return False
        self.graphed.stop("the memory they hold is needed")
        self.graphed = None
        return True

    def standing(self) -> tuple[str, bool]:
        return self.form, self.graphed is not None and not self.graphed.stopped

    def agree(self, standings: Iterable[tuple[str, bool]]) -> None:
        forms, held = zip(*standings, strict=True)
        if (least := max(forms, key=[*FORMS, ""].index)) != self.form:
            self.form = least
            self._say_what_is_compiled(least, "another process cannot compile more")
        if not all(held):
            self.free()

    def _best_form(self) -> str:
        """The form that works, tried before the first batch; where the compiler fails the model is trained as it is."""
        tokens = self.config.pack_tokens
        found = None
        while found is None:
            try:
                found = best_form(self.tried, tokens, self.config.checkpoint_activations)
            except torch.OutOfMemoryError:
                tokens, found = (
                    tokens // 2,
                    None if tokens > FEW else ("", "it does not fit in memory"),
                )
            torch.cuda.empty_cache()
        form, reason = found
        if reason:
            self._say_what_is_compiled(form, reason)
        return form

    def _say_what_is_compiled(self, form: str, reason: str) -> None:
        how = f"with only {FORMS[form]} compiled" if form else "without the compiler"
        warnings.warn(
            f"{type(self.model).__name__} is trained {how}, more slowly: {reason}", stacklevel=3
        )


def made_up(tokens: int, longest: int, share: bool = False) -> list[Sample]:
    """Samples that feed a model `tokens` tokens in all, at most `longest` each.

    share: eight samples at a time have one prompt, which is fed once.

    >>> [len(s.prompt) + s.response.size - 1 for s in made_up(600, 1024)]
    [256, 256, 88]
    >>> [(len(s.prompt), s.response.size - 1) for s in made_up(600, 1024, share=True)][-2:]
    [(64, 64), (12, 12)]
    """
    many, half = (8, min(longest, 128) // 2) if share else (1, min(longest, 256) // 2)
    sizes = [(half, half, i // many) for i in range(tokens // (half + many * half) * many)]
    tokens %= half + many * half
    while tokens > 0:
        prompt = min(half, -(-tokens // 2))
        sizes.append((prompt, min(half, tokens - prompt), len(sizes)))
        tokens -= sum(sizes[-1][:2])
    zeros = np.zeros(half + 1, np.int32), np.zeros(half + 1, np.float32)
    samples = []
    for i, (length, own, family) in enumerate(sizes):
        # another prompt for each family
        ids = np.array([family >> place & 1 for place in range(length)])
        samples.append(Sample((0, i), ids, zeros[0][: own + 1], zeros[1][: own + 1], 1.0, 1.0, 1.0))
    return samples


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Makes it an error that the host waits for the device, as it would be in a capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it may overlook some
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
