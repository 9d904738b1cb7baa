"""The walk over a draft writes as the target would, exactly, whatever the draft; rules that do not are seen to fail."""

import itertools

import numpy as np
import pytest

from whet.draft.base import truncate, walk, walk_tree

V, DEPTH = 3, 3
Tree = tuple[np.ndarray, np.ndarray]


def random_tree(rng: np.random.Generator, nodes: int) -> Tree:
    """Parents and tokens; siblings may repeat a token, as a bad drafter's may."""
    parent = np.array([-1, *(rng.integers(0, i) for i in range(1, nodes))])
    return parent, np.array([0, *rng.integers(0, V, nodes - 1)])


def prefix(tree: Tree, node: int) -> tuple[int, ...]:
    parent, tokens = tree
    return () if node == 0 else (*prefix(tree, int(parent[node])), int(tokens[node]))


def target(rng: np.random.Generator) -> dict[tuple[int, ...], np.ndarray]:
    """p(. | what was written) for everything up to DEPTH tokens."""
    texts = [t for n in range(DEPTH) for t in itertools.product(range(V), repeat=n)]
    return {t: rng.dirichlet(np.full(V, 0.7)) for t in texts}


def chance(p: dict[tuple[int, ...], np.ndarray], text: tuple[int, ...], given: int = 0) -> float:
    return float(np.prod([p[text[:i]][text[i]] for i in range(given, len(text))]))


def written_by_the_walk(p: dict[tuple[int, ...], np.ndarray], tree: Tree) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first DEPTH tokens: every outcome of the draws, walked by the code under test."""
    nodes = tree[0].size
    draws = np.array(list(itertools.product(range(V), repeat=nodes)))
    rows = len(draws)
    visited, counts = walk_tree(np.tile(tree[0], (rows, 1)), np.tile(tree[1], (rows, 1)), draws)
    at = [p.get(prefix(tree, i), np.full(V, 1 / V)) for i in range(nodes)]
    out = dict.fromkeys(itertools.product(range(V), repeat=DEPTH), 0.0)
    for row in range(rows):
        weight = np.prod([at[i][draws[row, i]] for i in range(nodes)])
        run = tuple(int(t) for t in draws[row, visited[row, : counts[row]]])[:DEPTH]
        for text in out:
            if text[: len(run)] == run:
                out[text] += weight * chance(p, text, len(run))
    return out


@pytest.mark.parametrize("seed", range(60))
def test_the_walk_is_exact_for_any_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = target(rng)
    got = written_by_the_walk(p, random_tree(rng, int(rng.integers(1, 5))))
    assert max(abs(got[text] - chance(p, text)) for text in got) < 1e-12


def test_one_level_is_exact_for_ten_thousand_trees() -> None:
    """The first two tokens after a root with two children, all outcomes of the three draws at once."""
    rng = np.random.default_rng(0)
    draws = np.array(list(itertools.product(range(V), repeat=3)))
    worst = 0.0
    for _ in range(10_000):
        root, *after = rng.dirichlet(np.ones(V), 1 + V)
        children = rng.integers(0, V, 2)
        tokens = np.tile([0, *children], (len(draws), 1))
        nodes, counts = walk_tree(np.tile([-1, 0, 0], (len(draws), 1)), tokens, draws)
        weight = root[draws[:, 0]] * after[children[0]][draws[:, 1]] * after[children[1]][draws[:, 2]]
        first, second = draws[:, 0], draws[np.arange(len(draws)), nodes[:, 1]]
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
        assert distance(rejection(p, q, argmax=False, residual=True), p) < 1e-12  # the harness itself is right
        far["argmax"] = max(far["argmax"], distance(rejection(p, q, argmax=True, residual=True), p))
        far["no residual"] = max(far["no residual"], distance(rejection(p, q, argmax=False, residual=False), p))
        far["both"] = max(far["both"], distance(rejection(p, q, argmax=True, residual=False), p))
        per_path = np.zeros(V)  # each candidate path draws at the root for itself; the first that agrees is taken
        for a, b in itertools.product(range(V), repeat=2):
            per_path[0 if a == 0 else 1 if b == 1 else a] += p[a] * p[b]
        far["per path"] = max(far["per path"], distance(per_path, p))
    assert min(far.values()) > 0.05, far


def test_walk_counts_agreements_and_one_more() -> None:
    drafted = np.array([[1, 2, 3], [1, 2, 3], [9, 2, 3], [1, 9, 3], [0, 0, 0]])
    sampled = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [0, 0, 0, 0]])
    assert walk(drafted, np.array([3, 2, 3, 3, 0]), sampled).tolist() == [4, 3, 1, 2, 1]
    assert walk(np.zeros((2, 0), int), np.zeros(2, int), np.ones((2, 1), int)).tolist() == [1, 1]


def test_a_chain_is_a_thin_tree() -> None:
    rng = np.random.default_rng(2)
    drafted, sampled = rng.integers(0, 3, (500, 4)), rng.integers(0, 3, (500, 5))
    parent = np.tile(np.arange(-1, 4), (500, 1))
    nodes, counts = walk_tree(parent, np.concatenate((np.zeros((500, 1), int), drafted), 1), sampled)
    assert (counts == walk(drafted, np.full(500, 4), sampled)).all()
    assert all(nodes[i, :n].tolist() == list(range(n)) for i, n in enumerate(counts))


def test_padding_of_a_tree_is_never_followed() -> None:
    parent, tokens = np.array([[-1, -1, 0]]), np.array([[0, 5, -1]])
    assert walk_tree(parent, tokens, np.array([[5, 5, 5]]))[1].tolist() == [1]


def test_truncation_stops_where_plain_decoding_would() -> None:
    rng = np.random.default_rng(3)
    written, counts = rng.integers(0, 6, (400, 5)), rng.integers(1, 6, 400)
    stops, room = np.tile([4, -1], (400, 1)), rng.integers(1, 8, 400)
    kept, stopped, full = truncate(counts, written, stops, room)
    for i in range(400):
        n, how = 0, "goes on"
        for token in written[i, : counts[i]]:  # one token at a time
            n += 1
            if token == 4:
                how = "stop"
            elif n >= room[i]:
                how = "full"
            if how != "goes on":
                break
        assert (kept[i], stopped[i], full[i]) == (n, how == "stop", how == "full")
