"""The long-tailed batches of `draft_bench.py`: a model that ends when it will, or a bare shape with lengths given.

A model folder brings its prompts (`prompts.jsonl`), or a file does: one {"text": ...} or {"question": ...} a line. A
shape has random weights and no end: its lengths are drawn, log-normal, and nothing it writes repeats, so that
speculation can only lose there; the controller has to notice.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet import config
from whet.errors import WhetError
from whet.model.load import eos_of, load_tokenizer
from whet.model.twin import PAGE
from whet.text import Codec
from whet.types import Key, Prompt, Request, Sampling

PROMPTS = "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class TailWork:
    prompts: dict[str, list[int]]
    """Token ids, by name."""
    requests: list[Request]
    context: int

    @property
    def rollouts(self) -> int:
        return sum(request.n for request in self.requests)

    def described(self, written: Mapping[Key, np.ndarray]) -> dict[str, Any]:
        """With the lengths that came of it."""
        lengths = np.array([ids.size for ids in written.values()])
        return {
            "requests": self.rollouts,
            "prompts": len(self.prompts),
            "context": self.context,
            "tokens": int(lengths.sum()),
            "lengths": {
                **{f"p{q}": float(np.percentile(lengths, q)) for q in (50, 90, 99)},
                "mean": float(lengths.mean()),
                "max": int(lengths.max()),
            },
        }

    def again(self, visit: int) -> list[Request]:
        """The same prompts as other groups: the noise is another."""
        by = visit * len(self.prompts)
        return [dataclasses.replace(request, group_id=request.group_id + by) for request in self.requests]


def model_work(
    folder: Path, file: Path | None, *, rollouts: int, siblings: int, cap: int, skip: int = 0, wrap: bool = False
) -> TailWork:
    """`rollouts` in groups of `siblings`, each until the model ends it or `cap` does.

    skip: prompts at the head of the file that others use; wrap: the rest may be asked more than once.
    """
    settings = config.Model.model_validate({"name": str(folder)})
    codec = Codec(load_tokenizer(settings, ""), eos_of(settings))
    texts = read_texts(file or folder / PROMPTS)[skip:]
    groups = _groups(rollouts, siblings)
    if len(texts) < (1 if wrap else groups):
        raise WhetError(f"{file or folder / PROMPTS} has too few prompts: {groups} are needed after the first {skip}.")
    texts = list(itertools.islice(itertools.cycle(texts), groups))
    prompts = {str(i): codec.encode(Prompt(id=str(i), text=texts[i], answer="", task="")) for i in range(groups)}
    sampling = Sampling(max_tokens=cap, stop_ids=tuple(codec.stop_ids))
    requests = [Request(prompt_id=name, group_id=int(name), n=siblings, sampling=sampling) for name in prompts]
    return TailWork(prompts, requests, _context(prompts.values(), cap))


def shape_work(vocab: int, *, rollouts: int, siblings: int, cap: int, seed: int) -> TailWork:
    """Lengths with the median at an eighth of the cap and sigma 1, cut at the cap."""
    rng = np.random.default_rng(seed)
    groups = _groups(rollouts, siblings)
    prompts = {str(i): rng.integers(1, vocab, 32).tolist() for i in range(groups)}
    lengths = np.exp(np.log(cap / 8) + rng.standard_normal(rollouts)).clip(1, cap).astype(int)
    requests = [
        Request(
            prompt_id=str(i // siblings),
            group_id=i // siblings,
            first_index=i % siblings,
            n=1,
            sampling=Sampling(max_tokens=int(length)),
        )
        for i, length in enumerate(lengths)
    ]
    return TailWork(prompts, requests, _context(prompts.values(), cap))


def read_texts(path: Path) -> list[str]:
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return [str(line["text"] if "text" in line else line["question"]) for line in lines]
    except OSError as error:
        raise WhetError(f"There are no prompts at {path}; name a file of them with --prompts.") from error
    except (ValueError, LookupError, TypeError) as error:
        raise WhetError(f'{path} is not one {{"text": ...}} a line: {error}') from error


def _groups(rollouts: int, siblings: int) -> int:
    if rollouts % siblings:
        raise WhetError(f"{rollouts} requests cannot be groups of {siblings}; give a multiple of it.")
    return rollouts // siblings


def _context(prompts: Sequence[Sequence[int]] | Any, cap: int) -> int:
    """Whole pages for the longest prompt and its response."""
    return -(-(max(map(len, prompts)) + cap) // PAGE) * PAGE
