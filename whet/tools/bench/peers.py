"""The engines that `whet bench rollout` measures: ours, vLLM and transformers' `generate`, and how each is timed.

A `Peer` is made ready for a batch size and a context, then given prompts and lengths. All sample at temperature 1 from
the whole distribution, never stop early, and count the tokens that were requested. Ours and vLLM return the log-prob of
each token, which RL needs; `generate` does not. Each has a model of its own, because some change theirs: random weights
in the sizes of known models, because speed does not depend on the weights.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, ClassVar, TypeVar

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from whet.errors import WhetError
from whet.fast.compiled import first_line
from whet.fast.fused import share_storage
from whet.fast.graphs import GraphRunners
from whet.model.twin import PAGE
from whet.rollout.engine import LocalEngine
from whet.types import Request, Rollout, Sampling

Prompts = Sequence[Sequence[int]]
CONTEXT = 32_768  # longest context of every shape
# share of the GPU for vLLM: of 141 GB, room for 256 sequences of 4k of the 1.5B shape
VLLM_MEMORY = 0.35
ANSWER = 600.0  # seconds that a process of its own may take for one answer
T = TypeVar("T")

# ---- models with random weights

SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
SHAPES: dict[str, tuple[type[PretrainedConfig], tuple[int, ...]]] = {
    "135m": (LlamaConfig, (49_152, 576, 1536, 30, 9, 3)),  # SmolLM2-135M
    "1.5b": (Qwen2Config, (151_936, 1536, 8960, 28, 12, 2)),  # Qwen2.5-1.5B
    "tiny": (LlamaConfig, (64, 48, 96, 2, 3, 1)),  # for machines without a GPU
}


def shape_config(name: str) -> PretrainedConfig:
    if name not in SHAPES:
        raise WhetError(f'There is no shape "{name}"; there are {", ".join(SHAPES)}.')
    family, sizes = SHAPES[name]
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    named = dict(zip(SIZES.split(), sizes, strict=True))
    return family(**named, max_position_embeddings=CONTEXT, tie_word_embeddings=True, **tokens)


def shape_model(name: str, device: torch.device | str) -> PreTrainedModel:
    """The model in bf16 on a GPU, in float32 on a CPU; the same weights every time."""
    device = torch.device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape_config(name), dtype=dtype, attn_implementation="sdpa"
        )
        # A fresh model's padding token is a zero vector, whose gradient grows at every norm until it overflows.
        model.get_input_embeddings().weight.data[0].normal_(0, model.config.initializer_range)
    return model.eval().requires_grad_(False)


# ---- peers


class PeerFailed(Exception):
    """A peer could not do a piece of work; the text says why. The others go on."""


class Peer:
    """An engine with a model of its own, and the seconds that it takes in this process."""

    note: ClassVar[str] = ""  # what a reader of its figures must know
    # All steps take the same long time, so few new tokens give the decode rate, its warm-up is a whole call, the
    # long-tailed workload is run once and unwarmed, and cells with short prompts are left out.
    slow: ClassVar[bool] = False
    sizes = (0, 0)  # batch and context that it is ready for

    def __init__(self, shape: str, device: torch.device | str) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.model = shape_model(shape, device)

    def open(self, batch: int, context: int) -> None:
        """Gets ready for `batch` sequences of up to `context` tokens, prompt included. Called again after `free`."""

    def run(self, prompts: Prompts, lengths: Sequence[int]) -> int:
        """Continues all prompts to their lengths; returns the number of tokens once they are known on the host."""
        raise NotImplementedError

    def free(self) -> None:
        """Frees what `open` took."""

    def prepare(self, batch: int, context: int) -> float:
        """Seconds until the peer was ready."""
        self.sizes = (batch, context)
        self.close()
        begun = self._now()
        _or_failed(lambda: self.open(batch, context))
        return self._now() - begun

    def timed(self, prompts: Prompts, lengths: Sequence[int]) -> float:
        """Seconds that the peer took to continue all prompts to their lengths."""
        begun = self._now()
        try:
            tokens = _or_failed(lambda: self.run(prompts, lengths))
        except PeerFailed:
            # made anew, so that the next run finds nothing of the one that failed
            self.prepare(*self.sizes)
            raise
        seconds = self._now() - begun
        if tokens != sum(lengths):
            raise PeerFailed(f"{tokens} tokens were made where {sum(lengths)} were asked for")
        return seconds

    def close(self) -> None:
        self.free()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class Whet(Peer):
    note = "LocalEngine, submit and collect, log-probs returned"
    prompts: Prompts = ()
    visits = 0
    engine: LocalEngine | None = None

    def __init__(self, shape: str, device: torch.device | str) -> None:
        super().__init__(shape, device)
        share_storage(self.model)

    def open(self, batch: int, context: int) -> None:
        self.engine = LocalEngine(
            self.model,
            encode=lambda i: list(self.prompts[int(i)]),
            decode=no_stop_strings,
            seed=0,
            slots=batch,
            context=-(-context // PAGE) * PAGE,
            runners=GraphRunners() if self.model.device.type == "cuda" else None,
        )

    def run(self, prompts: Prompts, lengths: Sequence[int]) -> int:
        return sum(rollout.length for rollout in self.rollouts(prompts, lengths))

    def rollouts(self, prompts: Prompts, lengths: Sequence[int]) -> list[Rollout]:
        assert self.engine is not None, "prepare comes first"
        self.prompts = prompts
        self.engine.submit(requests_of(lengths, self.visits))
        self.visits += len(lengths)
        done = self.engine.collect()
        assert all(r.trace is not None and len(r.trace.log_probs) == r.length for r in done)
        return done

    def free(self) -> None:
        self.engine = None


def requests_of(lengths: Sequence[int], first_group: int = 0) -> list[Request]:
    """One rollout per length; prompts are named by their place."""
    return [
        Request(
            prompt_id=str(i), group_id=first_group + i, n=1, sampling=Sampling(max_tokens=length)
        )
        for i, length in enumerate(lengths)
    ]


def no_stop_strings(ids: Any) -> str:
    raise AssertionError("no text is needed here")


class Generate(Peer):
    note = "transformers generate, dynamic cache, sdpa; no log-probs"
    slow = True

    def run(self, prompts: Prompts, lengths: Sequence[int]) -> int:
        return generate_batch(self.model, prompts, lengths)


def generate_batch(model: PreTrainedModel, prompts: Prompts, lengths: Sequence[int]) -> int:
    """One batch, padded on the left, that runs until its longest request is done; only requested tokens count."""
    width = max(map(len, prompts))
    ids = torch.tensor(
        [[0] * (width - len(row)) + list(row) for row in prompts], device=model.device
    )
    mask = torch.tensor(
        [[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=model.device
    )
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    ends = {"max_new_tokens": max(lengths), "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=mask, **plain, **ends).cpu()
    return sum(row[width : width + n].numel() for row, n in zip(out, lengths, strict=True))


class VLLM(Peer):
    """vLLM runs in a process of its own (`Apart`), because its memory and its settings are the process's."""

    note = "vLLM in-process, prefix caching off, log-prob of each sampled token returned"

    vllm: Any = None  # the package
    llm: Any = None

    def __init__(self, shape: str, device: torch.device | str) -> None:
        self.shape = shape
        self.cuda = True

    def open(self, batch: int, context: int) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self.vllm = importlib.import_module("vllm")
        self.folder = tempfile.TemporaryDirectory(prefix="whet-vllm-")
        config = shape_config(self.shape)
        config.architectures = [
            "Qwen2ForCausalLM" if config.model_type == "qwen2" else "LlamaForCausalLM"
        ]
        config.save_pretrained(self.folder.name)
        weights = {"load_format": "dummy", "dtype": "bfloat16", "seed": 0}
        room = {
            "gpu_memory_utilization": VLLM_MEMORY,
            "max_model_len": context,
            "max_num_seqs": batch,
        }
        without = {
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        self.llm = self.vllm.LLM(model=self.folder.name, **weights, **room, **without)

    def run(self, prompts: Prompts, lengths: Sequence[int]) -> int:
        options = {
            "temperature": 1.0,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0,
            "flat_logprobs": True,
        }
        done = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [self.vllm.SamplingParams(max_tokens=length, **options) for length in lengths],
            use_tqdm=False,
        )
        outputs = [result.outputs[0] for result in done]
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        return sum(len(output.token_ids) for output in outputs)

    def free(self) -> None:
        if self.llm is not None:
            self.llm = None
            self.folder.cleanup()


# in the order of measurement
PEERS: dict[str, type[Peer]] = {"whet": Whet, "vllm": VLLM, "generate": Generate}


def missing(name: str, device: torch.device | str) -> str | None:
    """The reason why a peer cannot be measured here, or None."""
    if name != "vllm":
        return None
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here."
    return "vLLM is measured on a GPU only." if torch.device(device).type != "cuda" else None


class Apart:
    """A peer in a process of its own, by the same calls; what is sent to the process and back is not counted."""

    def __init__(self, name: str, shape: str, device: torch.device | str) -> None:
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.worker = ProcessPoolExecutor(1, mp_context=spawn)
        self.made = (name, shape, device)
        self.process = 0

    def prepare(self, batch: int, context: int) -> float:
        self.process = self.process or self._ask(_serve, "make", *self.made)
        return self._ask(_serve, "prepare", batch, context)

    def timed(self, prompts: Prompts, lengths: Sequence[int]) -> float:
        return self._ask(_serve, "timed", prompts, lengths)

    def close(self) -> None:
        """Ends the process, by force where it does not answer."""
        with contextlib.suppress(PeerFailed):
            if self.process:
                self._ask(_serve, "close", seconds=30)
        self.worker.shutdown()

    def _ask(self, function: Callable[..., Any], *arguments: Any, seconds: float = ANSWER) -> Any:
        try:
            return self.worker.submit(function, *arguments).result(seconds)
        except TimeoutError:
            if self.process:
                os.kill(self.process, signal.SIGKILL)
            raise PeerFailed(f"no answer in {seconds:.0f} s") from None
        except BrokenProcessPool:
            raise PeerFailed("its process has died") from None


_served: list[Peer] = []  # in the process of `Apart`: its one peer


def _serve(what: str, *arguments: Any) -> Any:
    """Makes the peer of this process and returns the number of the process, or calls a method of the peer."""
    if what == "make":
        _served.append(_or_failed(lambda: PEERS[arguments[0]](*arguments[1:])))
        return os.getpid()
    return getattr(_served[0], what)(*arguments)


def _or_failed(work: Callable[[], T]) -> T:
    """Foreign code may fail in any way; whatever it is, it is that peer's failure and not the benchmark's."""
    try:
        return work()
    except PeerFailed:
        raise
    except torch.OutOfMemoryError:
        reason = "out of GPU memory"
    except Exception as error:
        reason = first_line(error)
    # outside of the handler, so that it does not keep the tensors of the failed frames
    raise PeerFailed(reason)
