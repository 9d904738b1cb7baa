"""Would trees of guesses be accepted further than chains? Counted on the long-tail task's own texts, without a model.

The longest of a prompt's eight solutions (`tail_model.py`) is written again, step by step; the suffix drafter's rule
looks for what followed where the last tokens were seen before, in its own text and in those of its siblings. A chain
verifies the best continuation, a tree the best few that begin differently, with as many tokens in all. What counts is
the tokens written in a step at equal tokens to verify; a tree costs a gather of keys and values on top.

    python benchmarks/draft_trees.py --out benchmarks/results
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tail_model import MODULI, encode, problem, solution

from whet import files
from whet.fast.kernels.decode import LONGEST, SHORTEST
from whet.tools.bench.stand import circumstances

SHAPES = ((1, 8), (2, 4), (1, 16), (2, 8), (4, 4), (1, 32), (2, 16), (4, 8))
"""Branches and the depth of each."""
FIRST = 40
"""Tokens that are there to begin with."""


def matches(text: np.ndarray, newest: np.ndarray) -> np.ndarray:
    """How many of the newest tokens agree with what stands before each place of a text.

    >>> matches(np.array([1, 2, 3, 1, 2, 9]), np.array([7, 1, 2]))
    array([0, 0, 2, 0, 0, 2])
    """
    agree, count = np.ones(text.size, bool), np.zeros(text.size, np.int64)
    for back, token in enumerate(newest[::-1], start=1):
        agree[:back] = False
        agree[back:] &= text[: text.size - back] == token
        count += agree
    return count


def guesses(texts: Sequence[np.ndarray], own: int, at: int, depth: int) -> Iterator[np.ndarray]:
    """Continuations of texts[own][:at], the longest match first, its own text before its siblings', newest first."""
    found = []
    for i, text in enumerate(texts):
        seen = text[:at] if i == own else text
        match = matches(seen, texts[own][max(0, at - LONGEST) : at])
        found += [(-match[p], i != own, -p, i) for p in np.flatnonzero(match >= SHORTEST)]
    for match, _, place, i in sorted(found):
        end = at if i == own else texts[i].size
        size = depth if -match >= LONGEST else min(depth, -match)
        yield texts[i][-place : min(-place + size, end)]


def agreed(guess: np.ndarray, truth: np.ndarray) -> int:
    """
    >>> agreed(np.array([1, 2, 3]), np.array([1, 2, 4, 5])), agreed(np.array([1, 2]), np.array([1, 2, 4]))
    (2, 2)
    """
    apart = np.flatnonzero(guess[: truth.size] != truth[: guess.size])
    return int(apart[0]) if apart.size else min(guess.size, truth.size)


def written(texts: Sequence[np.ndarray], own: int, branches: int, depth: int, most: int) -> tuple[int, int]:
    """Tokens of the text up to `most`, and the steps they took."""
    text, at, steps = texts[own], FIRST, 0
    while at < min(text.size - 1, most):
        best, begun = 0, set[tuple[int, ...]]()
        for guess in guesses(texts, own, at, depth):
            if (begins := tuple(guess[:2].tolist())) in begun:
                continue
            begun.add(begins)
            best = max(best, agreed(guess, text[at:]))
            if len(begun) == branches:
                break
        at, steps = at + best + 1, steps + 1
    return at - FIRST, steps


def compare(problems: int, most: int, seed: int) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(seed)
    taken = {shape: np.zeros(2) for shape in SHAPES}
    for i in range(problems):
        asked = problem(rng, MODULI[-1 - i % 3])  # the long ones
        texts = [encode(solution(*asked, rng, 2048))[:2048] for _ in range(8)]
        own = int(np.argmax([text.size for text in texts]))
        for shape in SHAPES:
            taken[shape] += written(texts, own, *shape, most)
    return {
        f"{branches} of {depth}": {"verify": branches * depth + 1, "accept_length": float(tokens / steps)}
        for (branches, depth), (tokens, steps) in taken.items()
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--problems", type=int, default=12)
    made.add_argument("--most", type=int, default=900, help="tokens of a text that are written again")
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args(arguments)
    settings = {"problems": options.problems, "most": options.most, "seed": options.seed}
    result = {"settings": settings, "shapes": compare(**settings), "circumstances": circumstances()}
    files.make_folder(options.out)
    files.write_text(options.out / "draft_trees.json", json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    print(json.dumps(main()["shapes"], indent=1))
