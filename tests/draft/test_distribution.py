"""What is written with drafts is distributed as the target says, three tokens jointly; wrong rules are seen to fail.

The target is a table: the next token, of 16, hangs on the last two. The engine's own columns and runner decode it, for
200,000 rollouts at once, with drafters that do their worst; only the forward is looked up. Token 0 ends a rollout.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from adversaries import adversaries
from torch import Tensor

from whet.draft.base import OFF, DraftArm, Drafter
from whet.draft.lookup import NGram, Suffix
from whet.model.load import tiny_model
from whet.model.noise import GOLDEN64, row_key
from whet.rollout import runner as runner_module
from whet.rollout.rows import Rows, sample
from whet.rollout.runner import Drawn, EagerRunner
from whet.types import Request

sys.path.append(str(Path(__file__).parent.parent / "rollout"))
import slow_engine as slow
from test_speculation import EOS, Whim, plain_tokens, requests, run, same, speculating

N, V, LENGTH, GROUP = 200_000, 16, 3, 8
START, END, HEAT = V, 0, 0.8
LOGITS = 1.2 * torch.randn(V + 1, V + 1, V, generator=torch.Generator().manual_seed(1))
"""After the last token but one, and the last; START stands before a text."""
P = torch.softmax(LOGITS.double() / HEAT, -1).numpy()
BEST, SUMS = P.argmax(-1), P.cumsum(-1)[..., :-1]


# ---- statistics


def exact_joint() -> np.ndarray:
    """[V^3]: what follows an END is END."""
    after = P.copy()
    after[:, END] = np.eye(V)[END]
    first = P[START, START]
    return (first[:, None, None] * after[START, :V, :, None] * after[:V, :V]).ravel()


def p_value(statistic: float, freedom: int) -> float:
    """Upper tail of chi-square, Q(a, y) with a = freedom / 2, y = statistic / 2.

    Q(a + 1, y) = Q(a, y) + y^a e^-y / Gamma(a + 1), from Q(0, y) = 0 or Q(1/2, y) = erfc(sqrt(y)) up: all terms are
    positive, so nothing is lost (Abramowitz and Stegun 6.5.21).
    """
    y, odd = statistic / 2, freedom % 2
    steps = (k + odd / 2 for k in range(freedom // 2))
    return (math.erfc(math.sqrt(y)) if odd else 0.0) + math.fsum(
        math.exp(a * math.log(y) - y - math.lgamma(a + 1)) for a in steps
    )


class Fit(NamedTuple):
    """Two p-values, and the total variation."""

    chi_square: float
    g_test: float
    distance: float


def fit(counts: np.ndarray, joint: np.ndarray) -> Fit:
    """Pearson's chi-square, and G with Williams' correction; cells where less than 5 are expected are one."""
    total = counts.sum()
    rare = total * joint < 5
    expected = total * np.append(joint[~rare], joint[rare].sum())
    seen = np.append(counts[~rare], counts[rare].sum())
    if expected[-1] == 0:
        assert seen[-1] == 0, "what cannot be was written"
        expected, seen = expected[:-1], seen[:-1]
    freedom = expected.size - 1
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    g = 2 * float((seen * np.log(np.where(seen, seen, 1) / expected)).sum())
    correction = 1 + (float((total / expected).sum()) - 1) / (6 * total * freedom)
    distance = float(np.abs(counts / total - joint).sum() / 2)
    return Fit(p_value(chi_square, freedom), p_value(g / correction, freedom), distance)


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    [
        (2, 2, math.exp(-1)),
        (4, 4, 3 * math.exp(-2)),
        (3.841459, 1, 0.05),
        (7.814728, 3, 0.05),
        (124.342113, 100, 0.05),
    ],
)
def test_the_tail_of_chi_square(statistic: float, freedom: int, tail: float) -> None:
    assert p_value(statistic, freedom) == pytest.approx(tail, rel=1e-5)


def test_a_fit_by_hand() -> None:
    """Expected 50, 30, 16 and, of two rare ones together, 4."""
    found = fit(np.array([60, 20, 18, 2, 0]), np.array([0.5, 0.3, 0.16, 0.03, 0.01]))
    assert found.chi_square == pytest.approx(p_value(2 + 10 / 3 + 0.25 + 1, 3))
    g = 2 * (60 * math.log(1.2) + 20 * math.log(2 / 3) + 18 * math.log(1.125) + 2 * math.log(0.5))
    correction = 1 + (100 / 50 + 100 / 30 + 100 / 16 + 100 / 4 - 1) / (6 * 100 * 3)
    assert found.g_test == pytest.approx(p_value(g / correction, 3))
    assert found.distance == pytest.approx(0.12)


JOINT = exact_joint()


def test_true_draws_fit_as_often_as_they_should() -> None:
    rng = np.random.default_rng(0)
    fits = np.array([fit(rng.multinomial(N, JOINT), JOINT) for _ in range(200)])
    for p in fits.T[:2]:
        assert 0.01 <= (p < 0.05).mean() <= 0.1 and 0.35 < (p < 0.5).mean() < 0.65


@pytest.fixture(scope="module")
def bound() -> float:
    """A distance that one in a thousand samples of the target itself exceeds."""
    rng = np.random.default_rng(1)
    return float(np.quantile(np.abs(rng.multinomial(N, JOINT, 1000) / N - JOINT).sum(1) / 2, 0.999))


# ---- the engine's decoding, of a table


class TableRunner(EagerRunner):
    """The plain runner, whose model is looked up."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.device, self.guesser = rows, rows.device, None

    def _forward(
        self, blocks: Sequence[tuple[slice, np.ndarray, np.ndarray]], every: bool = False
    ) -> Tensor:
        ((_, ids, position),) = blocks
        newest = position <= self.rows.length[:, None]
        before = np.where(newest, older_of(self.rows)[:, None], np.roll(ids, 1, 1))
        return LOGITS[torch.from_numpy(before.ravel()), torch.from_numpy(ids.ravel())]


class Rejecting(TableRunner):
    """Keeps a draft x if a coin says so, with chance p(x); else draws from p without x. TLT's rule for a chain."""

    fair, residual = False, True

    def verify(self, drafts: np.ndarray) -> Drawn:
        n, depth = drafts.shape
        rng = np.random.default_rng([n, depth])
        path = np.column_stack((older_of(self.rows), self.rows.token, drafts))
        p = P[path[:, :-1], path[:, 1:]]
        chance = np.take_along_axis(p[:, :depth], drafts[:, :, None], 2)[:, :, 0]
        kept = rng.random((n, depth)) < (0.5 if self.fair else chance)
        if self.residual:
            np.put_along_axis(p[:, :depth], drafts[:, :, None], 0, 2)
        drawn = (rng.random((n, depth + 1, 1)) * p.sum(2, keepdims=True) > p.cumsum(2)).sum(2)
        token = np.column_stack((np.where(kept, drafts, drawn[:, :depth]), drawn[:, depth]))
        counted = np.logical_and.accumulate(kept, axis=1).sum(1) + 1
        return Drawn(token, np.zeros(token.shape), counted[None], np.full((1, n), depth))


class FairCoin(Rejecting):
    """Keeps every second draft."""

    fair = True


class NoResidual(Rejecting):
    """After a rejection it draws from p, the rejected token included."""

    residual = False


class OneTooMany(TableRunner):
    """Keeps the draw after a draft that was wrong."""

    def verify(self, drafts: np.ndarray) -> Drawn:
        drawn = super().verify(drafts)
        return replace(drawn, counted=np.minimum(drawn.counted + 1, drafts.shape[1] + 1))


def older_of(rows: Rows) -> np.ndarray:
    """The token before the newest of each row."""
    return np.where(
        rows.count > 1, rows.ids[np.arange(rows.size), np.maximum(rows.count - 2, 0)], START
    )


def keys_of(seed: int, rows: int) -> np.ndarray:
    """int32 [2, rows]: `row_key` of rollouts in groups of GROUP, all at once."""
    number, state = np.arange(rows, dtype=np.uint64), np.zeros(rows, np.uint64)
    for word in (
        np.uint64(seed),
        np.uint64(0),
        number // np.uint64(GROUP),
        number % np.uint64(GROUP),
    ):
        x = (state ^ word) + np.uint64(GOLDEN64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = x ^ (x >> np.uint64(31))
    return np.stack((state.astype(np.uint32), (state >> np.uint64(32)).astype(np.uint32))).view(
        np.int32
    )


def test_keys_are_those_of_the_engine() -> None:
    keys = keys_of(7, 100)
    assert [tuple(keys[:, i]) for i in range(100)] == [
        row_key(7, False, i // GROUP, i % GROUP) for i in range(100)
    ]


class Seen(NamedTuple):
    """What drafters may look at, and one of them may not: what plain decoding writes."""

    older: np.ndarray
    newest: np.ndarray
    written: np.ndarray
    plain: np.ndarray
    rng: np.random.Generator


Draft = Callable[[Seen, int], np.ndarray]
"""Guesses [rows, depth], -1 where there is none."""


def nothing(seen: Seen, depth: int) -> np.ndarray:
    return np.full((seen.written.size, depth), -1)


def at_random(seen: Seen, depth: int) -> np.ndarray:
    """Any number of any tokens."""
    rng, n = seen.rng, seen.written.size
    return np.where(
        np.arange(depth) < rng.integers(0, depth + 1, (n, 1)), rng.integers(0, V, (n, depth)), -1
    )


def always_end(seen: Seen, depth: int) -> np.ndarray:
    return np.full((seen.written.size, depth), END)


def chain(
    seen: Seen, depth: int, pick: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    older, newest, drafts = seen.older, seen.newest, []
    for _ in range(depth):
        drafts.append(pick(older, newest))
        older, newest = newest, drafts[-1]
    return np.stack(drafts, 1)


def likeliest(seen: Seen, depth: int) -> np.ndarray:
    return chain(seen, depth, lambda older, newest: BEST[older, newest])


def half_wrong(seen: Seen, depth: int) -> np.ndarray:
    return chain(
        seen,
        depth,
        lambda older, newest: (BEST[older, newest] + seen.rng.integers(0, 2, len(newest))) % V,
    )


def drawn_from_the_target(seen: Seen, depth: int) -> np.ndarray:
    return chain(
        seen,
        depth,
        lambda older, newest: (seen.rng.random((len(newest), 1)) > SUMS[older, newest]).sum(1),
    )


def oracle(seen: Seen, depth: int) -> np.ndarray:
    """What is going to be written; half of the time something else from a place on."""
    place = np.minimum(seen.written[:, None] + np.arange(depth), LENGTH - 1)
    drafts = np.take_along_axis(seen.plain, place, 1)
    return np.where(
        np.arange(depth) < seen.rng.integers(0, 2 * depth, len(drafts))[:, None], drafts, drafts ^ 1
    )


DRAFTERS = (nothing, at_random, always_end, likeliest, half_wrong, drawn_from_the_target, oracle)


def switching(seen: Seen, depth: int) -> np.ndarray:
    """At each step every rollout has another drafter, and a depth of its own."""
    older, newest, written, plain, rng = seen
    which, drafts = rng.integers(0, len(DRAFTERS), written.size), nothing(seen, depth)
    for i, drafter in enumerate(DRAFTERS):
        mine = which == i
        drafts[mine] = drafter(
            Seen(older[mine], newest[mine], written[mine], plain[mine], rng), depth
        )
    return np.where(np.arange(depth) < rng.integers(0, depth + 1, (written.size, 1)), drafts, -1)


def write(
    seed: int,
    drafter: Draft,
    depth: int,
    kind: type[TableRunner] = TableRunner,
    plain: np.ndarray | None = None,
) -> tuple[np.ndarray, float]:
    """Texts [N, LENGTH] of rollouts, END behind their ends, and tokens that a step brought in the mean.

    Depth 0 is plain decoding. Drafts may be longer than what is left.
    """
    rng, keys = np.random.default_rng(seed), keys_of(seed, N)
    texts, count = np.full((N, LENGTH), END, np.int32), np.zeros(N, np.int32)
    live, steps = np.arange(N), 0
    while live.size:
        rows = Rows(live.size, LENGTH, np.dtype(np.float32), torch.device("cpu"))
        rows.size, rows.count[:], rows.ids[:], rows.keys[:] = (
            live.size,
            count[live],
            texts[live],
            keys[:, live],
        )
        rows.limit[:], rows.stops[:], rows.temperature[:], rows.length[:] = (
            LENGTH,
            END,
            HEAT,
            rows.count,
        )
        rows.token[:] = np.where(
            rows.count > 0, rows.ids[np.arange(live.size), rows.count - 1], START
        )
        seen = Seen(
            older_of(rows), rows.token, rows.count, (texts if plain is None else plain)[live], rng
        )
        runner = kind(rows)
        drawn = runner.verify(drafter(seen, depth)) if depth else runner.advance(live.size, (), ())
        rows.record_runs(drawn, live.size, 0, lambda ids: "")
        texts[live], count[live] = rows.ids, rows.count
        steps += live.size
        live = live[(rows.token != END) & (rows.count < LENGTH)]
    return texts, float(count.sum()) / steps


def counts_of(texts: np.ndarray) -> np.ndarray:
    return np.bincount((texts[:, 0] * V + texts[:, 1]) * V + texts[:, 2], minlength=V**LENGTH)


# ---- the tests

DEPTHS: dict[Draft, str] = {
    nothing: "01",
    at_random: "12",
    always_end: "2",
    likeliest: "123",
    half_wrong: "13",
}
DEPTHS |= {drawn_from_the_target: "2", oracle: "2", switching: "3"}
CELLS = [(drafter, int(depth)) for drafter, depths in DEPTHS.items() for depth in depths]
ALPHA = 1e-3 / (2 * len(CELLS))
"""Bonferroni: two tests a cell."""


def fits(found: Fit, bound: float) -> bool:
    return found.chi_square > ALPHA and found.g_test > ALPHA and found.distance < bound


@pytest.mark.wide
@pytest.mark.parametrize(
    ("drafter", "depth"), CELLS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_joint_of_three_tokens(drafter: Draft, depth: int, bound: float) -> None:
    """Every cell has noise of its own."""
    seed = 100 + CELLS.index((drafter, depth))
    plain = write(seed, nothing, 0)[0] if drafter in (oracle, switching) else None
    texts, pace = write(seed, drafter, depth, plain=plain)
    found = fit(counts_of(texts), JOINT)
    assert fits(found, bound), found
    assert (pace > 1.01) == (drafter not in (nothing, always_end)), (
        "drafts were kept, unless the end was all"
    )
    assert plain is None or (texts == plain).all(), "the same noise, the same tokens"


@pytest.mark.parametrize("kind", [FairCoin, NoResidual, OneTooMany])
def test_wrong_rules_do_not_fit(kind: type[TableRunner], bound: float) -> None:
    found = fit(counts_of(write(1, half_wrong, 1, kind)[0]), JOINT)
    assert found.chi_square < 1e-12 and found.g_test < 1e-12 and found.distance > 1.2 * bound, found


def test_another_exact_rule_fits(bound: float) -> None:
    """So what the wrong ones are blamed for is their error, not the harness."""
    found = fit(counts_of(write(2, half_wrong, 1, Rejecting)[0]), JOINT)
    assert fits(found, bound), found


@pytest.mark.parametrize(
    "of", [lambda position: position // 2, torch.zeros_like], ids=["two", "all"]
)
def test_noise_used_twice_does_not_fit(
    of: Any, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two positions, or by all."""
    monkeypatch.setattr(
        runner_module, "sample", lambda logits, draws, position: sample(logits, draws, of(position))
    )
    found = fit(counts_of(write(3, likeliest, 1)[0]), JOINT)
    assert found.chi_square < 1e-12 and found.g_test < 1e-12 and found.distance > 1.2 * bound, found


# ---- a model in the engine: drafters take turns within a rollout


def taking_turns(plain: Sequence[Any], seed: int) -> tuple[Any, Whim]:
    """Every drafter there is, and none, at three depths."""
    drafters: list[Drafter] = [
        NGram(),
        Suffix(),
        *adversaries(slow.VOCAB, EOS, plain_tokens(plain)),
    ]
    whim = Whim(
        [OFF, *(DraftArm(drafter.name, depth) for drafter in drafters for depth in (1, 3, 6))], seed
    )
    return speculating(drafters, whim), whim


@pytest.mark.parametrize("seed", range(3))
def test_drafters_that_take_turns(seed: int) -> None:
    model = slow.sharp_model(seed)
    plain = run(slow.make_engine(model), requests())
    speculation, whim = taking_turns(plain, seed)
    same(
        plain,
        run(slow.make_engine(model, slots=3 + seed, page=4, speculation=speculation), requests()),
    )
    assert len({name.rsplit("_", 3)[0] for name in whim.used}) > 5 and whim.accepted > 10


def margins(
    model: Any, request: Request, index: int, ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """For each draw, by how much the first was ahead of the second, [T], and which they were, [T, 2]."""
    prompt = slow.PROMPTS[request.prompt_id]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
    log_probs = torch.log_softmax(logits.double(), -1).numpy()
    race = np.stack(
        [
            slow.reference_race(lp, 5, False, request.group_id, index, at)
            for at, lp in enumerate(log_probs)
        ]
    )
    order = np.argsort(-race)[:, :2]
    first, second = np.take_along_axis(race, order, 1).T
    return first - second, order


@pytest.mark.slow
def test_in_bfloat16_only_close_draws_turn_out_otherwise() -> None:
    """Forwards of other shapes round otherwise, here by up to 0.02 in a log-prob. What that changes, with drafts as
    without them in other batches, are draws whose first two were as close; and after them the text is another."""
    model = slow.sharpen(
        tiny_model(slow.VOCAB, hidden=48, heads=6, kv_heads=3, dtype=torch.bfloat16), 6.0
    )
    asked = [slow.ask(i, n=8, max_tokens=48) for i in range(12)]
    plain = run(slow.make_engine(model, slots=48), asked)
    speculation, whim = taking_turns(plain, 0)
    drafted = run(slow.make_engine(model, slots=48, page=4, speculation=speculation), asked)
    smaller = run(slow.make_engine(model, slots=17, page=4), asked)
    before, flips = slow.by_key(plain), [0, 0]
    for which, other in enumerate((drafted, smaller)):
        for (group, index), ids in slow.by_key(other).items():
            old = before[group, index]
            if (
                at := next(
                    (i for i, pair in enumerate(zip(old, ids, strict=True)) if len({*pair}) > 1),
                    None,
                )
            ) is None:
                continue
            flips[which] += 1
            ahead, first_two = margins(model, asked[group - 100], index, old[: at + 1])
            assert ahead[-1] < 0.06 and {*first_two[-1]} == {old[at], ids[at]}
    assert whim.accepted > 100 and flips[0] <= 2 * flips[1] + 5, flips
    usual = np.concatenate([margins(model, asked[i], 0, before[100 + i, 0])[0] for i in range(3)])
    assert (usual < 0.06).mean() < 0.1, "such draws are few"
