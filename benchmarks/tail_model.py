"""Trains the long-tail model of the speculation benchmarks from nothing: a small Llama that searches by trial.

Data. A prompt asks for x, "7*x mod 11=3". The worked solution tries numbers from 10 to 99, drawn anew each time, until
one fits; each trial is worked out in full:
    try 46: 7*46=322, 11*29=319, left 3, yes
    x=46
So the number of trials is geometric with mean m (the modulus, one of MODULI), and lengths have a long tail; those over
the cap are cut there, without an end. A drafter may guess what repeats (words, the figures of a number tried before, in
this response or in a sibling's), not the numbers drawn nor the words around them, of which there are several.

Model. Character tokens, 16 layers of 320, 5 heads on 1 of keys and values, tied embeddings: 17 million parameters,
34 MB as bfloat16; rather deep than wide, since it is the layers that make a step take time. Training.
`whet.learn.learner` on packed responses: 800 updates of 128 problems, 50 million tokens in all, learning rate 1e-3
falling to a tenth, all drawn from one seed. Then 256 of its own samples are measured. Written: DIR/model (a Hugging
Face folder, with prompts.jsonl) and DIR/tail_model.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet import files
from whet.fast.fused import share_storage
from whet.fast.graphs import GraphRunners
from whet.learn.learner import warm_start
from whet.model.load import SPECIAL, load_weights, tiny_model, tiny_tokenizer
from whet.model.packing import Pair
from whet.model.twin import PAGE
from whet.rollout.engine import LocalEngine
from whet.tools.experiment import circumstances
from whet.types import Request, Rollout, Sampling

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz0123456789*=,:"
MODULI = (5, 7, 11, 13, 17, 19)
FACTORS = range(2, 10)
OPENINGS = ("try", "take", "now", "test")
CLOSINGS = ("no", "not it", "wrong")
EOS = SPECIAL.index("<eos>")
CODES = np.zeros(128, np.int32)
"""Token of each character."""
CODES[[ord(c) for c in ALPHABET]] = len(SPECIAL) + np.arange(len(ALPHABET))


def problem(rng: np.random.Generator, modulus: int = 0) -> tuple[int, int, int]:
    """(a, m, r) of a * x mod m = r; it has solutions, as m is a prime that does not divide a."""
    m = modulus or MODULI[rng.integers(len(MODULI))]
    factors = [a for a in FACTORS if a % m]
    return factors[rng.integers(len(factors))], m, int(rng.integers(m))


def question(a: int, m: int, r: int) -> str:
    """
    >>> question(7, 11, 3)
    '7*x mod 11=3\\n'
    """
    return f"{a}*x mod {m}={r}\n"


@functools.cache
def trial(a: int, m: int, x: int) -> str:
    """
    >>> trial(7, 11, 46)
    ' 46: 7*46=322, 11*29=319, left 3, '
    """
    product, left = a * x, a * x % m
    return f" {x}: {a}*{x}={product}, {m}*{product // m}={product - left}, left {left}, "


def solution(a: int, m: int, r: int, rng: np.random.Generator, most: int) -> str:
    """Trials until one fits, or until there are more than `most` characters."""
    text = ""
    while len(text) <= most:
        draws = rng.integers((10, 0, 0), (100, len(OPENINGS), len(CLOSINGS)), (32, 3)).tolist()
        for x, opening, closing in draws:
            fits = a * x % m == r
            text += OPENINGS[opening] + trial(a, m, x) + ("yes" if fits else CLOSINGS[closing]) + "\n"
            if fits:
                return text + f"x={x}"
    return text


def encode(text: str) -> np.ndarray:
    return CODES[np.frombuffer(text.encode("ascii"), np.uint8)]


def worked(rng: np.random.Generator, cap: int) -> Pair:
    """A prompt and its response with the end token, cut at the cap."""
    asked = problem(rng)
    return encode(question(*asked)), np.append(encode(solution(*asked, rng, cap)), EOS)[:cap]


def batches(seed: int, size: int, cap: int) -> Iterator[list[Pair]]:
    for step in itertools.count():
        rng = np.random.default_rng((seed, step))
        yield [worked(rng, cap) for _ in range(size)]


def is_right(prompt: str, response: str) -> bool:
    """
    >>> is_right("7*x mod 11=3\\n", "try 46: ... yes\\nx=46"), is_right("7*x mod 11=3\\n", "x=45")
    (True, False)
    """
    a, m, r = map(int, re.findall(r"\d+", prompt))
    found = re.search(r"x=(\d{1,9})$", response)
    return found is not None and a * int(found[1]) % m == r


def lengths_of(lengths: Sequence[int], cap: int) -> dict[str, float]:
    """
    >>> lengths_of([2, 4, 8, 10], cap=10)["share_at_cap"], lengths_of([2, 4, 8, 10], cap=10)["median"]
    (0.25, 6.0)
    """
    at = np.percentile(lengths, [50, 90, 99])
    return {
        "mean": float(np.mean(lengths)),
        "median": float(at[0]),
        "p90": float(at[1]),
        "p99": float(at[2]),
        "share_at_cap": float(np.mean(np.array(lengths) >= cap)),
    }


def held_out(count: int, seed: int) -> list[str]:
    """Prompts to ask, every modulus as often."""
    rng = np.random.default_rng((seed, 1, 1))
    return [question(*problem(rng, MODULI[i % len(MODULI)])) for i in range(count)]


def train(options: argparse.Namespace, losses: list[float]) -> Any:
    model: Any = tiny_model(
        len(SPECIAL) + len(ALPHABET),
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        context=options.cap + 128,
        dtype=torch.bfloat16 if options.device == "cuda" else torch.float32,
        seed=options.seed,
    ).to(options.device)

    def on_progress(step: int, loss: float) -> None:
        losses.append(loss)
        if step % 50 == 0:
            print(f"update {step}: loss {loss:.3f}", flush=True)

    data = batches(options.seed, options.batch, options.cap)
    warm_start(model, data, steps=options.steps, lr=options.lr, pack_tokens=options.pack, on_step=on_progress)
    return model


def save(model: Any, folder: Path, prompts: Sequence[str]) -> None:
    """As bfloat16, whatever it was trained in."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer(ALPHABET).save_pretrained(folder)
    files.write_text(folder / "prompts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in prompts))


def sample(folder: Path, prompts: Sequence[str], options: argparse.Namespace) -> list[Rollout]:
    """Four responses to each prompt by the model as it was saved."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = load_weights(folder, dtype).to(options.device).eval()
    share_storage(model)
    engine = LocalEngine(
        model,
        encode=lambda name: encode(prompts[int(name)]).tolist(),
        decode=lambda ids: "",
        seed=options.seed,
        slots=min(256, 4 * len(prompts)),
        context=(options.cap + 128) // PAGE * PAGE,
        runners=GraphRunners() if options.device == "cuda" else None,
    )
    wanted = Sampling(max_tokens=options.cap, stop_ids=(EOS,))
    engine.submit([Request(prompt_id=str(i), group_id=i, n=4, sampling=wanted) for i in range(len(prompts))])
    return engine.collect()


def examine(rollouts: Sequence[Rollout], prompts: Sequence[str], cap: int) -> dict[str, Any]:
    """Lengths, right answers among those that ended, and how sure the model was of what it drew."""
    tokenizer = tiny_tokenizer(ALPHABET)
    ended = [r for r in rollouts if r.finish == "stop" and r.trace is not None]
    texts = [tokenizer.decode(r.trace.ids[:-1].tolist()) for r in ended if r.trace is not None]
    right = [is_right(prompts[int(r.prompt_id)], text) for r, text in zip(ended, texts, strict=True)]
    log_probs = np.concatenate([r.trace.log_probs for r in rollouts if r.trace is not None])
    return {
        "samples": len(rollouts),
        "lengths": lengths_of([r.length for r in rollouts], cap),
        "ended": len(ended) / len(rollouts),
        "right_of_ended": float(np.mean(right)) if right else None,
        "entropy_estimate": float(-log_probs.mean()),
        "unsure_share": float((log_probs < np.log(0.9)).mean()),
        "example": prompts[int(ended[0].prompt_id)] + texts[0] if ended else None,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser().parse_args(arguments)
    losses: list[float] = []
    begin = time.perf_counter()
    model = train(options, losses)
    seconds = time.perf_counter() - begin
    prompts = held_out(64 if options.cap >= 1024 else 8, options.seed)
    folder = options.out / "model"
    save(model, folder, prompts)
    rng = np.random.default_rng((options.seed, 2))
    result = {
        "what": "a Llama trained from nothing on trial and error with a geometric tail; see benchmarks/tail_model.py",
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "parameters": model.num_parameters(),
        "weights_mb": sum(p.stat().st_size for p in folder.glob("*.safetensors")) / 1e6,
        "training": {"seconds": seconds, "first_loss": losses[0], "last_loss": float(np.mean(losses[-20:]))},
        "data_lengths": lengths_of([len(worked(rng, options.cap)[1]) for _ in range(2000)], options.cap),
        "own": examine(sample(folder, prompts, options), prompts, options.cap),
        "circumstances": circumstances(),
    }
    files.write_text(options.out / "tail_model.json", json.dumps(result, indent=1) + "\n")
    return result


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--steps", type=int, default=800)
    made.add_argument("--batch", type=int, default=128, help="problems an update")
    made.add_argument("--pack", type=int, default=81_920, help="tokens in one forward pass")
    made.add_argument("--lr", type=float, default=1e-3)
    made.add_argument("--cap", type=int, default=2048, help="tokens of a response at most")
    made.add_argument("--hidden", type=int, default=320)
    made.add_argument("--layers", type=int, default=16)
    made.add_argument("--heads", type=int, default=5)
    made.add_argument("--kv-heads", type=int, default=1)
    made.add_argument("--seed", type=int, default=0)
    return made


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
