"""vLLM as the rollout engine: its scheduler, kernels and prefix cache behind `whet.rollout.base.Engine`, in process.

`VllmEngine` keeps the queue, one vLLM request per rollout, so that each has its own limit and seed, and reads tokens as
they are drawn, so that each knows the version of the weights that drew it. vLLM holds a copy of the weights. It is
filled from the learner's Parameters after each update and then compared with them. What vLLM lacks is keyed noise: a
token depends on the batch that it was drawn in, so a run does not repeat exactly.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import logging
import math
import os
import random
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from whet.errors import WhetError
from whet.model.twin import kv_shapes
from whet.rollout.base import PARTS
from whet.rollout.flights import FlightEngine
from whet.rollout.rows import Flight
from whet.rollout.scheduler import Queue
from whet.rollout.vllm_fit import KNOWN, version_of_vllm
from whet.types import Finish, Trace

BLOCK = 128  # the largest block of tokens that vLLM caches as one, on any device


@dataclass(slots=True)
class Written:
    """A flight in vLLM, and what it has written so far."""

    flight: Flight
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    begun: bool = False  # whether its prompt was fed

    def trace(self, dtype: np.dtype[Any]) -> Trace:
        return Trace(
            ids=np.array(self.ids, np.int32),
            log_probs=np.array(self.log_probs, dtype),
            versions=np.array(self.versions, np.int32),
        )


class VllmEngine(FlightEngine):
    """Decodes rollouts of one model by vLLM, in this process and on this model's device.

    `scheduler` has the flights that wait, `running` those that vLLM has, as many as there are slots. What vLLM calls a
    request begins anew wherever a flight comes back with tokens, after a checkpoint or where memory was lent: its
    prompt is then the flight's prompt and tokens so far, and its seed another.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        cached: int = 0,
        releasable: bool = False,
        drafts: Mapping[str, Any] | None = None,
        cards: int = 1,
        **common: Any,
    ) -> None:
        """cached: tokens whose keys and values vLLM may keep; 0: all slots at full context. releasable: on a GPU, vLLM
        sleeps while the learner works. drafts: as in `speculation_of`. cards: vLLM divides the weights among processes
        with one GPU each; the model itself is in main memory then. common: as for `FlightEngine`."""
        if hasattr(model, "peft_config"):
            raise WhetError(
                f"{type(model).__name__} has adapters, which vLLM would decode without; use the native engine."
            )
        self.can = frozenset(
            {"token_versions", "stream", "cut", "recompute", "keep", *(["draft"] if drafts else [])}
        )
        super().__init__(model, slots=slots, context=context, dtype=np.dtype(np.float32), **common)
        self.model = model
        self.sleeps = releasable and model.device.type == "cuda"
        self.asleep = False
        self.scheduler = Queue()
        self.running: dict[str, Written] = {}  # by the name that vLLM knows
        self.stale = True  # whether vLLM's weights may differ from the model's
        # vLLM's level of sleep: below 2 it keeps weights on the host
        self.deep = 1 if "model" in (drafts or {}) else 2
        self.core = build_core(
            model, slots, context, cached, sleeps=self.sleeps, drafts=drafts, cards=cards
        )
        if "model" in (drafts or {}):
            self.core.collective_rpc(load_head, args=((drafts or {})["model"],))
        # of the first process, and of the others
        self.modules, *self.others = self.core.apply_model(module_names)

    # ---- what callers use

    @property
    def load(self) -> int:
        return len(self.running) + len(self.scheduler.waiting)

    @property
    def written(self) -> int:
        return sum(len(written.ids) for written in self.running.values())

    def update(self, version: int) -> None:
        if self.on_update == "cut":
            self._evict_all()
            self._cut(self.scheduler.cut(), self.version)
        self.scheduler.updated()
        self.version = version
        self._publish()

    def release(self) -> None:
        """Lend vLLM's memory, weights and cache, to the learner's step, unless running rollouts need what is cached."""
        if not self.sleeps or self.asleep or (self.on_update == "keep" and self.running):
            return
        self._evict_all()
        self.core.reset_prefix_cache()
        # weights are sent again, keys and values made again; a head is neither
        self.core.sleep(level=self.deep)
        self.asleep = True

    def take_back(self) -> None:
        # a warm start may have trained; the next step sends the weights, if no update does
        self.stale = True

    def close(self) -> None:
        """End vLLM's engine and forget its process group, so that another may be made in this process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.core.engine_core.shutdown()
        del self.core
        cleanup_dist_env_and_memory()

    def stats(self) -> dict[str, float]:
        """Return the counters since the last call and reset them. vLLM does not say how often it preempted."""
        rows = max(1, self._stats["verified"])
        saved = float(self._stats["saved"])
        drafts = (
            {"draft/accept_length": 1 + saved / rows, "draft/saved": saved}
            if "draft" in self.can
            else {}
        )
        return self._counted("tokens", "steps", "prefill_tokens", "finished", "cut") | drafts

    def state_dict(self) -> dict[str, Any]:
        return self._state(
            ((w.flight, w.trace(self.dtype)) for w in self.running.values()), draft=None
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.stale = True

    # ---- one step

    def step(self) -> None:
        """Fill the free slots, let vLLM draw, and retire what has ended."""
        if self.stale:
            self._publish()
        begin = time.perf_counter()
        entered = self._admit()
        with quietly(self.model.device):
            outputs = self.core.step()
        ended = []
        for output in outputs:
            if (written := self.running.get(output.request_id)) is not None and (
                finish := self._read(written, output)
            ):
                ended.append((self.running.pop(output.request_id), finish))
        self._stats["steps"] += 1
        self._retire(ended)
        rows = len(self.running) + len(ended)
        self._took(time.perf_counter() - begin, rows, fed=entered > 0)
        self.trail.add(rows)

    def _admit(self) -> int:
        """Give vLLM as many flights as have a slot; returns their number."""
        entered = 0
        while self.scheduler.waiting and len(self.running) < self.slots:
            flight = self.scheduler.waiting.popleft()
            trace = flight.trace
            name = str(flight.arrival)
            written = Written(flight, *(getattr(trace, part).tolist() for part in PARTS))
            prompt: dict[str, Any] = {"prompt_token_ids": [*flight.prompt.tolist(), *written.ids]}
            # Cached prompts are those of the weights that read them: under other weights they have another name.
            prompt["cache_salt"] = str(self.version)
            with quietly(self.model.device):
                self.core.add_request(name, prompt, sampling_params(flight, len(written.ids)))
            self.running[name] = written
            self.scheduler.begin(flight)
            entered += 1
        return entered

    def _read(self, written: Written, output: Any) -> Finish | None:
        """Write down what vLLM drew, up to the token that ends the rollout. Returns how it ended, if it has."""
        flight, (drawn,) = written.flight, output.outputs
        sampling = flight.request.sampling
        before = len(written.ids)
        self._stats["verified"] = self._stats["verified"] + written.begun
        if not written.begun:  # nothing was drafted for its first token
            written.begun = True
            self._stats["prefill_tokens"] += flight.known - (output.num_cached_tokens or 0)
        finish: Finish | None = None
        for token, found in zip(drawn.token_ids, drawn.logprobs, strict=True):
            if not math.isfinite(log_prob := found[token].logprob):
                raise WhetError(
                    f'vLLM drew a token of prompt "{flight.request.prompt_id}" with the log-prob {log_prob}.'
                )
            written.ids.append(token)
            written.log_probs.append(log_prob)
            written.versions.append(self.version)
            self._stats["tokens"] += 1
            watched = bool(sampling.stop_strings) and flight.stops_in(
                np.array(written.ids), self.decode
            )
            if token in sampling.stop_ids or watched:
                finish = "stop"
                break
        saved = max(0, len(written.ids) - before - 1)
        flight.accepted, self._stats["saved"] = (
            flight.accepted + saved,
            self._stats["saved"] + saved,
        )
        if finish is None and len(written.ids) >= flight.limit:
            finish = "length"
        if finish is None and output.finished:
            raise WhetError(
                f'vLLM ended a rollout of prompt "{flight.request.prompt_id}" ({drawn.finish_reason}).'
            )
        if finish is not None and not output.finished:  # a stop string, which vLLM does not know
            self.core.abort_request([output.request_id])
        return finish

    def _retire(self, ended: Sequence[tuple[Written, Finish]]) -> None:
        self._stats["finished"] += len(ended)
        for written, finish in sorted(ended, key=lambda pair: pair[0].flight.arrival):
            flight = written.flight
            flight.trace = written.trace(self.dtype)
            self._land(flight, finish)

    def _evict_all(self) -> None:
        self.core.abort_request(list(self.running))
        for written in self.running.values():
            written.flight.trace = written.trace(self.dtype)
        self.scheduler.give_back(written.flight for written in self.running.values())
        self.running.clear()

    def _publish(self) -> None:
        """Send the model's weights to vLLM, compare, and see to what was computed with the old ones."""
        if self.asleep:
            self.core.wake_up()
            self.asleep = False
        weights = named_weights(self.model, self.modules)
        with quietly(self.model.device):
            try:
                self.core.collective_rpc(
                    "reload_weights", kwargs={"weights_iterator": iter(weights.items())}
                )
            except (KeyError, ValueError, AssertionError) as error:
                name, why = type(self.model).__name__, str(error).partition(". ")[0].rstrip(".")
                raise WhetError(
                    f"vLLM does not take the weights of {name} by their names here: {why}."
                ) from error
            # Where weights are divided, none holds a tensor as it was sent; `learn/mismatch` has to do then.
            other = (
                None
                if self.others
                else self.core.apply_model(lambda theirs: first_difference(theirs, weights))[0]
            )
        if other is not None:
            raise WhetError(
                f"vLLM does not hold the weights it was sent: {other} differs after the update."
            )
        # Under "keep" running rollouts go on with what is cached; new ones find nothing there, by their salt.
        if self.on_update != "keep" or not self.running:
            self.core.reset_prefix_cache(reset_running_requests=True)
        self.stale = False


# ---- the one place that knows vLLM's names


def build_core(
    model: PreTrainedModel,
    slots: int,
    context: int,
    cached: int,
    *,
    sleeps: bool,
    drafts: Any = None,
    cards: int = 1,
) -> Any:
    """A vLLM engine in this process for a model of this kind. It has no weights yet, and no tokenizer."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)  # it speaks before it has read the variable
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    on_cpu = model.device.type == "cpu" and (cards == 1 or not torch.cuda.is_available())
    if on_cpu:
        # the learner has the same cores
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    heads = [(max(1, s.heads // cards), s) for s in kv_shapes(model)]  # of each card
    heads += heads[-1:] if "model" in (drafts or {}) else []  # the drafter is one layer more
    token_bytes = sum(mine * (s.key_dim + s.value_dim) * s.dtype.itemsize for mine, s in heads)
    tokens = cached or slots * -(-context // BLOCK) * BLOCK
    with quietly(model.device), _own_state():
        from vllm import envs
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if on_cpu:
            _refuse_heads(model)
        shape = copy.deepcopy(model.config)
        # else vLLM may guess another use of such a network
        shape.architectures = [type(model).__name__]
        settings = {
            "model": str(_stored(shape, Path(envs.VLLM_CACHE_ROOT) / "whet")),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "generation_config": "vllm",
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": context,
            "max_num_seqs": slots,
            "kv_cache_memory_bytes": (tokens + BLOCK) * token_bytes,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "enforce_eager": on_cpu,
            "enable_sleep_mode": sleeps,
            "async_scheduling": False,  # a step returns the tokens that it drew: their version is known
            "distributed_executor_backend": "uni" if cards == 1 else "mp",
            "tensor_parallel_size": cards,
            "disable_log_stats": True,
        }
        if not on_cpu:
            # vLLM wants so much to be free, and takes what it is told above
            settings["gpu_memory_utilization"] = 0.01
        settings |= {"speculative_config": dict(drafts)} if drafts else {}
        fields = {field.name for field in dataclasses.fields(EngineArgs)}
        lacking = [name for name in settings if name not in fields]
        if (
            "reset_running_requests"
            not in inspect.signature(LLMEngine.reset_prefix_cache).parameters
        ):
            lacking.append("reset_running_requests")
        if lacking:
            raise WhetError(
                f"vLLM {version_of_vllm()} lacks {', '.join(lacking)}; whet runs with {KNOWN}."
            )
        try:
            return LLMEngine.from_engine_args(EngineArgs(**settings))
        except (
            ValueError,
            RuntimeError,
            AttributeError,
            AssertionError,
            KeyError,
            ImportError,
        ) as error:
            first = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise WhetError(f"vLLM does not start with this model: {first}") from error


def load_head(worker: Any, folder: str) -> None:
    """Put the weights of a drafting head where vLLM's newer runner has made some up, as it has for the model; the older
    one has read them by `draft_load_config`."""
    if (drafter := getattr(worker.model_runner, "speculator", None)) is not None:
        drafter.model.load_weights(load_file(Path(folder) / "model.safetensors").items())


def _stored(shape: PretrainedConfig, cache: Path) -> Path:
    """The folder of this config, the same in each run: vLLM finds what it has compiled by the path of a model."""
    folder = cache / hashlib.sha256(shape.to_json_string().encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may read it meanwhile
        shape.save_pretrained(own)
        os.replace(Path(own) / "config.json", folder / "config.json")
    return folder


def _refuse_heads(model: PreTrainedModel) -> None:
    """On a CPU vLLM would find out at its first step."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    if other := [shape.key_dim for shape in kv_shapes(model) if shape.key_dim not in known]:
        has = ", ".join(map(str, known))
        raise WhetError(
            f"vLLM on a CPU has no attention for heads of {other[0]} numbers; it has {has}."
        )


def sampling_params(flight: Flight, written: int) -> Any:
    """How vLLM draws for a flight that has written so many tokens. The seed is that of the flight and its position:
    with the flight's alone, one that begins again would meet the noise that has made its first tokens."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = flight.request.sampling
    low, high = (word & 0x7FFFFFFF for word in flight.key)
    return SamplingParams(
        max_tokens=flight.limit - written,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,
        seed=(low << 31 | high) ^ (written * 0x9E3779B1),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


@contextmanager
def quietly(device: torch.device) -> Iterator[None]:
    """Without vLLM's warnings, which are for its developers; on a CPU without its compiled helpers, which take longer
    to compile than they save."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.compiler.set_stance("force_eager") if device.type == "cpu" else nullcontext():
            yield


@contextmanager
def _own_state() -> Iterator[None]:
    """Put back what vLLM changes for the whole process: seeds, and on a CPU the number of threads for good."""
    threads = torch.set_num_threads
    states = (random.getstate(), np.random.get_state())
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads = threads
            random.setstate(states[0])
            np.random.set_state(states[1])


# ---- weights
#
# vLLM joins some matrices into one (q, k and v; gate and up) and on a CPU packs them into a form of its own, from which
# they cannot be read back. Matrices that are there are compared number by number; of a packed one the product with a
# fixed vector is, which every number of it enters.

# of the largest product: what rounding may make
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def named_weights(model: Any, modules: Set[str]) -> dict[str, Tensor]:
    """The weights by the names of a checkpoint. A tied head is among them under its own name, too, if it is one of
    vLLM's `modules`: vLLM may have packed it apart from the embedding."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        again = any(tensor is other for other in weights.values())
        if not again or name.rpartition(".")[0] in modules:
            weights[name] = tensor
    return {name: tensor.detach() for name, tensor in weights.items()}


def module_names(theirs: Any) -> set[str]:
    return {name for name, _ in theirs.named_modules()}


@torch.no_grad()
def first_difference(theirs: Any, ours: Mapping[str, Tensor]) -> str | None:
    """The first tensor of ours that vLLM's model does not hold as it is; None where it holds all of them."""
    joined = getattr(theirs, "packed_modules_mapping", {})
    left = dict(ours)
    for name, module in theirs.named_modules():
        above, _, own = name.rpartition(".")
        for kind, held in module.named_parameters(recurse=False):
            names = [f"{above}.{part}.{kind}".lstrip(".") for part in joined.get(own, [own])]
            pieces = [ours[piece] for piece in names if piece in ours]
            if len(pieces) == len(names) and not _holds(module, held, pieces):
                return names[0]
            for piece in names:
                left.pop(piece, None)
    tied = {tensor.data_ptr() for name, tensor in ours.items() if name not in left}
    return next((name for name, tensor in left.items() if tensor.data_ptr() not in tied), None)


def _holds(module: Any, held: Tensor, pieces: Sequence[Tensor]) -> bool:
    whole = torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
    packed = getattr(module, "cpu_linear", None) if whole.ndim == 2 else None
    # vocabularies are padded
    same = held.shape[1:] == whole.shape[1:] and torch.equal(held[: whole.shape[0]], whole)
    if packed is None or (held.numel() and not same):
        return same
    probe = torch.cos(torch.arange(whole.shape[1])).to(whole.dtype)
    product = packed(probe[None], held, None)[0, : whole.shape[0]].float()
    wanted = (whole @ probe).float()
    return bool((product - wanted).abs().max() <= CLOSE[whole.dtype] * wanted.abs().max())
