"""The walk over a draft writes as the target would, exactly, whatever the draft; rules that do not are seen to fail."""

import itertools

import numpy as np
import pytest

from whet.draft.base import truncate, walk

V, DEPTH = 3, 3


def target(rng: np.random.Generator) -> dict[tuple[int, ...], np.ndarray]:
    """p(. | what was written) for everything up to DEPTH tokens."""
    texts = [t for n in range(DEPTH) for t in itertools.product(range(V), repeat=n)]
    return {t: rng.dirichlet(np.full(V, 0.7)) for t in texts}


def chance(p: dict[tuple[int, ...], np.ndarray], text: tuple[int, ...], given: int = 0) -> float:
    return float(np.prod([p[text[:i]][text[i]] for i in range(given, len(text))]))


def written_by_the_walk(
    p: dict[tuple[int, ...], np.ndarray], draft: np.ndarray
) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first DEPTH tokens: every outcome of the draws, walked by the code under test."""
    places = draft.size + 1
    draws = np.array(list(itertools.product(range(V), repeat=places)))
    rows = len(draws)
    counts = walk(np.tile(draft, (rows, 1)), np.full(rows, draft.size), draws)
    at = [p.get(tuple(draft[:i].tolist()), np.full(V, 1 / V)) for i in range(places)]
    out = dict.fromkeys(itertools.product(range(V), repeat=DEPTH), 0.0)
    for row in range(rows):
        weight = np.prod([at[i][draws[row, i]] for i in range(places)])
        run = tuple(draws[row, : counts[row]].tolist())[:DEPTH]
        for text in out:
            if text[: len(run)] == run:
                out[text] += weight * chance(p, text, len(run))
    return out


@pytest.mark.parametrize("seed", range(60))
def test_the_walk_is_exact_for_any_draft(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = target(rng)
    got = written_by_the_walk(p, rng.integers(0, V, int(rng.integers(0, 5))))
    assert max(abs(got[text] - chance(p, text)) for text in got) < 1e-12


def test_one_token_is_exact_for_ten_thousand_targets() -> None:
    """The first two tokens with a draft of one, all outcomes of the two draws at once."""
    rng = np.random.default_rng(0)
    draws = np.array(list(itertools.product(range(V), repeat=2)))
    first, second = draws.T
    worst = 0.0
    for _ in range(10_000):
        root, *after = rng.dirichlet(np.ones(V), 1 + V)
        guess = rng.integers(0, V)
        counts = walk(np.full((len(draws), 1), guess), np.ones(len(draws), int), draws)
        weight = root[first] * after[guess][second]
        joint = np.zeros((V, V))
        np.add.at(joint, (first[counts > 1], second[counts > 1]), weight[counts > 1])
        alone = np.bincount(first[counts == 1], weight[counts == 1], minlength=V)
        joint += alone[:, None] * np.array(after)
        worst = max(worst, float(np.abs(joint - root[:, None] * np.array(after)).max()))
    assert worst < 1e-12


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / 2)


def rejection(p: np.ndarray, q: np.ndarray, argmax: bool, residual: bool) -> np.ndarray:
    """Output of the p/q rule: the draft is drawn from q or its argmax; the rest from (p - q)+ or from p."""
    drafted = np.eye(V)[q.argmax()] if argmax else q
    accept = drafted * np.minimum(1, p / q)
    rest = np.maximum(p - q, 0) if residual else p
    return accept + (1 - accept.sum()) * rest / rest.sum()


def test_rules_that_must_fail_do() -> None:
    rng = np.random.default_rng(1)
    far = {"argmax": 0.0, "no residual": 0.0, "both": 0.0, "per path": 0.0}
    for _ in range(200):
        p, q = rng.dirichlet(np.ones(V), 2)
        # the harness itself is right
        assert distance(rejection(p, q, argmax=False, residual=True), p) < 1e-12
        far["argmax"] = max(far["argmax"], distance(rejection(p, q, argmax=True, residual=True), p))
        far["no residual"] = max(
            far["no residual"], distance(rejection(p, q, argmax=False, residual=False), p)
        )
        far["both"] = max(far["both"], distance(rejection(p, q, argmax=True, residual=False), p))
        # each candidate path draws at the root for itself; the first that agrees is taken
        per_path = np.zeros(V)
        for a, b in itertools.product(range(V), repeat=2):
            per_path[0 if a == 0 else 1 if b == 1 else a] += p[a] * p[b]
        far["per path"] = max(far["per path"], distance(per_path, p))
    assert min(far.values()) > 0.05, far


def test_walk_counts_agreements_and_one_more() -> None:
    drafted = np.array([[1, 2, 3], [1, 2, 3], [9, 2, 3], [1, 9, 3], [0, 0, 0]])
    sampled = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [0, 0, 0, 0]])
    assert walk(drafted, np.array([3, 2, 3, 3, 0]), sampled).tolist() == [4, 3, 1, 2, 1]
    assert walk(np.zeros((2, 0), int), np.zeros(2, int), np.ones((2, 1), int)).tolist() == [1, 1]


def test_truncation_stops_where_plain_decoding_would() -> None:
    rng = np.random.default_rng(3)
    written, counts = rng.integers(0, 6, (400, 5)), rng.integers(1, 6, 400)
    stops, room = np.tile([4, -1], (400, 1)), rng.integers(1, 8, 400)
    kept = truncate(counts, written, stops, room)
    for i in range(400):
        n = 0
        for token in written[i, : counts[i]]:  # one token at a time
            n += 1
            if token == 4 or n >= room[i]:
                break
        assert kept[i] == n
