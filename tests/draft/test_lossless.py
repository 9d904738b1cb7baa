"""Plain and speculative decoding of a small model write the same tokens: every drafter, arms that switch at random."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from adversaries import adversaries

from whet.draft.base import Drafter, RowView, truncate, walk
from whet.draft.lookup import NGram, Suffix
from whet.draft.speculation import DraftGuard
from whet.model.noise import row_key
from whet.rollout.rows import Draws, sample

VOCAB, EOS, LIMIT = 9, 0, 60
GROUPS, SIZE = 3, 5
KEYS = [row_key(7, False, g, i) for g in range(GROUPS) for i in range(SIZE)]
PROMPTS = [np.array([1 + g, 2, 3, 1 + g, 2], np.int32) for g in range(GROUPS)]
_LOGITS = 2 * torch.randn(
    VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64
)
_LOGITS[:, :, EOS] -= 4


def draw(before: np.ndarray, last: np.ndarray, row: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The target: its next token hangs on the last two."""
    keys = torch.tensor([KEYS[r] for r in row], dtype=torch.int32).T.contiguous()
    logits = _LOGITS[torch.from_numpy(before.astype(int)), torch.from_numpy(last.astype(int))]
    return sample(logits, Draws(keys=keys), torch.from_numpy(position).int())[0].numpy()


def plain() -> dict[tuple[int, int], np.ndarray]:
    out = {}
    for g in range(GROUPS):
        for i in range(SIZE):
            text = PROMPTS[g].tolist()
            while len(text) < 5 + LIMIT and (len(text) == 5 or text[-1] != EOS):
                new = draw(
                    np.array(text[-2:-1]),
                    np.array(text[-1:]),
                    np.array([g * SIZE + i]),
                    np.array([len(text) - 5]),
                )
                text.append(int(new[0]))
            out[g, i] = np.array(text[5:], np.int32)
    return out


PLAIN = plain()


def speculative(drafter: Drafter, seed: int) -> tuple[dict[tuple[int, int], np.ndarray], int]:
    """A step: draft within random budgets, draw at every place, walk, cut at the end. What was written, in how many."""
    rng, guard = np.random.default_rng(seed), DraftGuard(drafter, VOCAB)
    written = np.zeros((GROUPS * SIZE, LIMIT), np.int32)
    views = [
        RowView(r, f"p{r // SIZE}", r // SIZE, r % SIZE, PROMPTS[r // SIZE], written[r, :0])
        for r in range(15)
    ]
    for view in views:
        guard.begin(view)
    live, out, steps = list(views), {}, 0
    while live:
        steps += 1
        rows, count = np.array([v.uid for v in live]), np.array([v.ids.size for v in live])
        most = rng.integers(0, rng.integers(1, 9), len(live))
        drafted, counts = guard.propose(live, most)
        tail = np.array([np.append(v.prompt, v.ids)[-2:] for v in live])
        fed = np.concatenate((tail, drafted), 1)
        width = drafted.shape[1] + 1
        sampled = np.stack(
            [draw(fed[:, k], fed[:, k + 1], rows, count + k) for k in range(width)], 1
        )
        kept = truncate(
            walk(drafted, counts, sampled), sampled, np.full((len(live), 1), EOS), LIMIT - count
        )
        over = (sampled[np.arange(len(live)), kept - 1] == EOS) | (count + kept >= LIMIT)
        for k, view in enumerate(live):
            new = sampled[k, : kept[k]]
            written[view.uid, count[k] : count[k] + kept[k]] = new
            view.ids = written[view.uid, : count[k] + kept[k]]
            if over[k]:
                out[view.group_id, view.index] = view.ids.copy()
                guard.finish(view)
        live = [v for k, v in enumerate(live) if not over[k]]
    return out, steps


DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NGram, "suffix": Suffix}
DRAFTERS |= {d.name: (lambda d=d: d) for d in adversaries(VOCAB, EOS, PLAIN)}  # type: ignore[misc]


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_same_tokens(name: str, seed: int) -> None:
    got, steps = speculative(DRAFTERS[name](), seed)
    assert got.keys() == PLAIN.keys()
    assert all(np.array_equal(got[key], PLAIN[key]) for key in PLAIN)
    longest = max(text.size for text in PLAIN.values())
    assert steps <= longest
    if name in ("ngram", "suffix", "oracle"):
        assert steps < longest
    assert {text.size for text in PLAIN.values()} > {LIMIT}  # some stop, some reach the limit
