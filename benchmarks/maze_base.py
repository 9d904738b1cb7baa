"""Trains the base of the maze runs from nothing: a Llama that writes depth-first searches in random order.

    python -m benchmarks.maze_base benchmarks/starts/maze

4.7M parameters in bfloat16, 2,500 updates of 256 searches of grids of side 3 to 16; five minutes on an H200 with 14
cores beside it, which draw the searches. The bytes differ between machines: `starts/maze` is the one that runs use.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from whet import config
from whet.learn.learner import warm_start
from whet.model.load import eos_of, load_model, load_tokenizer
from whet.tasks.maze import MazeTask
from whet.text import Codec
from whet.types import Prompt

MODEL = config.Model(name="tiny", dtype="bfloat16", hidden=256, layers=6, heads=4)
CONTEXT = 1024
STEPS, BATCH, RATE = 2500, 256, 1e-3
# searches drawn by one process at a time, and how often; then they come again, shuffled
CHUNK, CHUNKS = 4096, 100
PACK = 131_072

Pair = tuple[list[int], list[int]]


def draw(seed: int) -> list[tuple[Prompt, str]]:
    """One chunk of searches, in random order, of at most 120 cells."""
    rng = np.random.default_rng((0, 7919, seed))
    return MazeTask(train_count=1).solutions(rng, CHUNK, sides="3-16", max_cells=120)


def batches(codec: Codec, workers: int) -> Iterator[list[Pair]]:
    """Batches of token ids: every search once while they are drawn, then all of them again in a new order."""
    every: list[Pair] = []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for pairs in pool.imap(draw, range(CHUNKS)):
            prompts = codec.encode_all([prompt for prompt, _ in pairs])
            found = list(
                zip(prompts, (codec.encode_response(text) for _, text in pairs), strict=True)
            )
            every += found
            yield from (found[i : i + BATCH] for i in range(0, CHUNK, BATCH))
    rng = np.random.default_rng(1)
    while True:
        order = rng.permutation(len(every))
        for i in range(0, len(every) - BATCH, BATCH):
            yield [every[j] for j in order[i : i + BATCH]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=14)
    given = parser.parse_args()
    tokenizer = load_tokenizer(MODEL, MazeTask.alphabet)
    codec = Codec(tokenizer, eos_of(MODEL), config.Text())
    model = load_model(MODEL, vocab_size=len(tokenizer), context=CONTEXT, seed=0)

    def show(step: int, loss: float) -> None:
        if step % 100 == 0:
            print(f"update {step} of {STEPS}: loss {loss:.4f}", flush=True)

    loss = warm_start(
        model, batches(codec, given.workers), steps=STEPS, lr=RATE, pack_tokens=PACK, on_step=show
    )
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    print(f"loss {loss:.4f}; {given.out}")


if __name__ == "__main__":
    main()
