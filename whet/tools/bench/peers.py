"""Who is measured by `whet bench rollout` on a GPU: our engine, three ways of transformers, and vLLM.

Each is a `Peer`: told how much may come at once, then given prompts and lengths. All sample at temperature 1 from the
whole distribution, never stop early, and count the tokens that were asked for. Ours, `generate_batch` and vLLM return
the log-prob of each token, which RL needs; `generate` does not. Each has a model of its own, as some leave traces on
theirs. No peer is timed here: `whet.tools.bench.stand` does that.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from whet.errors import WhetError
from whet.fast.fused import share_storage
from whet.fast.graphs import GraphRunner, GraphRunners
from whet.fast.pool import graph_name
from whet.model.twin import PAGE
from whet.rollout.engine import LocalEngine
from whet.types import Request, Rollout, Sampling

# ---- shapes
#
# Models with the sizes of known ones and random weights: speed does not ask what the weights are.
#
# SmolLM2-135M and Qwen2.5-1.5B as published but for the longest context, which is 32k for all, and a tiny one for
# machines without a GPU. `whet.tools.bench.rollout` builds them on the device; nothing is read from disk or network.


CONTEXT = 32_768

SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, int]]] = {
    "135m": (
        LlamaConfig,
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "1.5b": (
        Qwen2Config,
        {
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
    ),
    "tiny": (
        LlamaConfig,
        {
            "vocab_size": 64,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
}


def shape_config(name: str) -> PretrainedConfig:
    if name not in SHAPES:
        raise WhetError(f'There is no shape "{name}"; there are {", ".join(SHAPES)}.')
    family, sizes = SHAPES[name]
    settings: dict[str, Any] = {
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return family(**sizes, **settings)


def shape_model(name: str, device: torch.device | str) -> PreTrainedModel:
    """bf16 on a GPU, float32 on a CPU; the same weights every time."""
    device = torch.device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape_config(name), dtype=dtype, attn_implementation="sdpa"
        )
        # a fresh model's padding token is a zero vector, whose slope grows at every norm until it is no number
        model.get_input_embeddings().weight.data[0].normal_(0, model.config.initializer_range)
    return model.eval().requires_grad_(False)


Prompts = Sequence[Sequence[int]]
VLLM_MEMORY = 0.35
"""Share of the GPU it takes: of 141 GB, room for 256 sequences of 4k of the 1.5B shape, and the rest for the others."""


class Peer(Protocol):
    name: str
    note: str
    """What a reader of its figures must know."""
    sized: bool
    """Made anew when the lengths to come grow; the others are made once, for the longest."""

    def prepare(self, batch: int, context: int) -> None:
        """Ready for `batch` sequences of up to `context` tokens, prompt included. May be called again."""

    def run(self, prompts: Prompts, lengths: Sequence[int]) -> int:
        """All prompts to their lengths; how many tokens that were. Returns when they are known on the host."""

    def stats(self) -> dict[str, float]:
        """Of the run before: what the peer tells of itself."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a peer takes part, and how."""

    cells: frozenset[str] | None = None
    """None: all."""
    most: int | None = None
    """New tokens where only the decode rate counts, for a peer whose steps all take the same time."""
    tail_repeats: bool = True
    """Else the long-tailed workload is run once, unwarmed."""
    warm_whole: bool = False
    """Its first call of a length is slower than those after it, so the warm-up is as long as the rest."""

    short: bool = True
    """Takes part where prompts are short and the prefill counts: cells that are there to compare engines."""

    def takes(self, cell: str) -> bool:
        return (self.cells is None or cell in self.cells) and (self.short or not cell.endswith("_p128"))


LIMITS = {
    "whet": Limits(),
    "vllm": Limits(),
    "generate": Limits(most=32, tail_repeats=False, warm_whole=True, short=False),
    "static": Limits(cells=frozenset({"b1_c512", "b64_c512"}), warm_whole=True),
    "generate_batch": Limits(cells=frozenset({"b1_c512", "b8_c512", "b64_c512"}), most=32, warm_whole=True),
}


class Whet:
    name = "whet"
    note = "LocalEngine, submit and collect, log-probs returned"
    sized = True

    def __init__(self, shape: str, device: torch.device | str) -> None:
        self.model = shape_model(shape, device)
        share_storage(self.model)
        self.prompts: list[list[int]] = []
        self.visits = 0
        self.engine: LocalEngine | None = None

    def prepare(self, batch: int, context: int) -> None:
        self.close()
        context = -(-context // PAGE) * PAGE
        self.engine = LocalEngine(
            self.model,
            encode=lambda i: self.prompts[int(i)],
            decode=_never,
            seed=0,
            slots=batch,
            context=context,
            runners=GraphRunners() if self.model.device.type == "cuda" else None,
        )

    def run(self, prompts: Prompts, lengths: Sequence[int]) -> int:
        return sum(rollout.length for rollout in self.rollouts(prompts, lengths))

    def rollouts(self, prompts: Prompts, lengths: Sequence[int]) -> list[Rollout]:
        assert self.engine is not None, "prepare comes first"
        self.prompts = [list(prompt) for prompt in prompts]
        self.engine.submit(
            [
                Request(prompt_id=str(i), group_id=self.visits + i, n=1, sampling=Sampling(max_tokens=length))
                for i, length in enumerate(lengths)
            ]
        )
        self.visits += len(lengths)
        done = self.engine.collect()
        assert all(r.trace is not None and len(r.trace.log_probs) == r.length for r in done)
        return done

    def stats(self) -> dict[str, float]:
        if self.engine is None:
            return {}
        runner = self.engine.runner
        bytes_ = runner.captures.bytes if isinstance(runner, GraphRunner) else {}
        return self.engine.stats() | {f"graph_bytes/{graph_name(key)}": float(size) for key, size in bytes_.items()}

    def close(self) -> None:
        self.engine = None


class Generate:
    """One batch, padded on the left, running until its longest request is done."""

    name = "generate"
    note = "transformers generate, dynamic cache, sdpa; no log-probs"
    sized = False
    cache: str | None = None

    def __init__(self, shape: str, device: torch.device | str) -> None:
        self.model = shape_model(shape, device)

    def prepare(self, batch: int, context: int) -> None:
        pass

    def run(self, prompts: Prompts, lengths: Sequence[int]) -> int:
        width = max(map(len, prompts))
        device = self.model.device
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device)
        options: dict[str, Any] = {"cache_implementation": self.cache} if self.cache else {}
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(lengths),
            eos_token_id=None,
            pad_token_id=0,
            **options,
        ).cpu()
        return sum(row[width : width + n].numel() for row, n in zip(out, lengths, strict=True))

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class Static(Generate):
    name = "static"
    note = "transformers generate, static cache; on a GPU its decode step compiled with graphs; no log-probs"
    cache = "static"


class GenerateBatch:
    name = "generate_batch"
    note = "transformers generate_batch, paged sdpa, no flash-attn; log-probs returned"
    sized = False

    def __init__(self, shape: str, device: torch.device | str) -> None:
        self.model = shape_model(shape, device)
        self.model.set_attn_implementation("paged|sdpa")  # else it looks for flash-attn, on the hub too
        self.sizes = (0, 0)
        """Requests its manager was made for, and pages of each."""
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it warns of a manager that is kept

    def prepare(self, batch: int, context: int) -> None:
        pass

    def run(self, prompts: Prompts, lengths: Sequence[int]) -> int:
        assert len(set(lengths)) == 1, "generate_batch takes one length for all"
        pages = -(-(max(map(len, prompts)) + lengths[0]) // PAGE) + 1
        if len(prompts) != self.sizes[0] or pages > self.sizes[1]:  # at the warm-up
            self.close()
            self.sizes = (len(prompts), pages)
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=lengths[0],
            eos_token_id=-1,
            pad_token_id=0,
        )
        done = self.model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=settings,
            continuous_batching_config=self._config(),
            persistent_manager=True,
        )
        failed = [result.error for result in done.values() if result.error is not None]
        if failed or len(done) < len(prompts):
            raise RuntimeError(failed[0] if failed else "generate_batch lost requests")
        assert all(len(result.logprobs) == len(result.generated_tokens) for result in done.values())
        return sum(len(result.generated_tokens) for result in done.values())

    def _config(self) -> ContinuousBatchingConfig:
        """Sized by hand: with a mask, its buffer is tokens of a step x tokens of the cache."""
        batch, pages = self.sizes
        return ContinuousBatchingConfig(
            block_size=PAGE,
            num_blocks=batch * pages,
            max_batch_tokens=1024,
            max_requests_per_batch=batch,
            allow_block_sharing=False,
            return_logprobs=True,
        )

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.sizes = (0, 0)
        self.model.destroy_cached_continuous_batching_manager()


class VLLM:
    """In a process of its own (`whet.tools.bench.stand.Apart`), as its memory and its settings are the process's."""

    name = "vllm"
    note = "vLLM in-process, prefix caching off, log-prob of each sampled token returned"
    sized = False

    def __init__(self, shape: str, device: torch.device | str = "cuda") -> None:
        self.shape = shape
        self.vllm: Any = None
        """The package."""
        self.llm: Any = None

    def prepare(self, batch: int, context: int) -> None:
        if self.llm is not None:
            return
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self.vllm = importlib.import_module("vllm")
        self.folder = tempfile.TemporaryDirectory(prefix="whet-vllm-")
        config = shape_config(self.shape)
        config.architectures = ["Qwen2ForCausalLM" if config.model_type == "qwen2" else "LlamaForCausalLM"]
        config.save_pretrained(self.folder.name)
        self.llm = self.vllm.LLM(
            model=self.folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            gpu_memory_utilization=VLLM_MEMORY,
            max_model_len=context,
            max_num_seqs=batch,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def run(self, prompts: Prompts, lengths: Sequence[int]) -> int:
        options = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, "logprobs": 0, "flat_logprobs": True}
        done = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [self.vllm.SamplingParams(max_tokens=length, **options) for length in lengths],
            use_tqdm=False,
        )
        outputs = [result.outputs[0] for result in done]
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        return sum(len(output.token_ids) for output in outputs)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if self.llm is not None:
            self.llm = None
            self.folder.cleanup()


PEERS: dict[str, Callable[[str, torch.device | str], Peer]] = {
    "whet": Whet,
    "vllm": VLLM,
    "generate": Generate,
    "static": Static,
    "generate_batch": GenerateBatch,
}
"""By name, in the order they are measured."""


def missing(name: str, device: torch.device | str) -> str | None:
    """Why a peer cannot be measured here, or None."""
    if name == "vllm":
        if importlib.util.find_spec("vllm") is None:
            return "vLLM is not installed here."
        if torch.device(device).type != "cuda":
            return "vLLM is measured on a GPU only."
    return None


def _never(ids: Any) -> str:
    raise AssertionError("no stop strings here")
