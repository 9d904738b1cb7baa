"""The exponential race draws from the distribution asked for, and records the log-prob training needs."""

import numpy as np
import pytest
import torch

from whet.model.noise import row_key
from whet.rollout.rows import Draws, _dropped, sample


def keys(n: int, group: int = 0) -> torch.Tensor:
    return torch.tensor(
        [row_key(1, False, group, i) for i in range(n)], dtype=torch.int32
    ).T.contiguous()


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


def chi_square_ok(tokens: torch.Tensor, p: np.ndarray) -> bool:
    counts = np.bincount(tokens.numpy(), minlength=p.size)
    kept = p > 0
    assert counts[~kept].sum() == 0
    expected = p[kept] * len(tokens)
    df = kept.sum() - 1
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    return bool(statistic < df + 4 * np.sqrt(2 * df))


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -4.0])
    n = 20_000
    tokens, log_probs = sample(logits.expand(n, -1), Draws(keys=keys(n)), zeros(n))
    assert chi_square_ok(tokens, torch.softmax(logits, 0).numpy())
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, 0)[tokens])


def test_temperature_divides_and_is_recorded() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0]).double()
    n = 10_000
    half = Draws(keys=keys(n), temperature=torch.full((n, 1), 0.5, dtype=torch.float64))
    tokens, log_probs = sample(logits.expand(n, -1), half, zeros(n))
    assert chi_square_ok(tokens, torch.softmax(logits / 0.5, 0).numpy())
    torch.testing.assert_close(log_probs, torch.log_softmax(logits / 0.5, 0)[tokens])


def test_greedy_rows_among_sampled_ones() -> None:
    logits = torch.randn(40, 9, generator=torch.Generator().manual_seed(0))
    greedy = (torch.arange(40) % 2 == 0)[:, None]
    mixed, log_probs = sample(logits, Draws(keys=keys(40), greedy=greedy), zeros(40))
    sampled, _ = sample(logits, Draws(keys=keys(40)), zeros(40))
    best, _ = sample(
        logits,
        Draws(keys=keys(40), greedy=torch.ones(40, 1, dtype=torch.bool), all_greedy=True),
        zeros(40),
    )
    assert torch.equal(best, logits.argmax(-1))
    assert torch.equal(mixed, torch.where(greedy[:, 0], best, sampled))
    torch.testing.assert_close(
        log_probs, torch.log_softmax(logits, -1).gather(1, mixed[:, None])[:, 0]
    )


def kept_reference(p: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """Most likely first: at most k, and until their share of what top-k left reaches top_p."""
    order = sorted(range(p.size), key=lambda i: (-p[i], i))[: top_k or p.size]
    total, share, kept = sum(p[i] for i in order), 0.0, set()
    for i in order:
        if top_p < 1 and share >= top_p and kept:
            break
        kept.add(i)
        share += p[i] / total
    return kept


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(3, 1.0), (0, 0.7), (4, 0.6), (1, 1.0), (0, 0.01), (100, 0.999)]
)
def test_top_k_and_top_p(top_k: int, top_p: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(top_k)).double() * 2
    n = 4000
    draws = Draws(
        keys=keys(n),
        top_k=torch.full((n, 1), top_k) if top_k else None,
        top_p=torch.full((n, 1), top_p, dtype=torch.float64) if top_p < 1 else None,
    )
    tokens, log_probs = sample(logits.expand(n, -1), draws, zeros(n))
    p = torch.softmax(logits, 0).numpy()
    kept = kept_reference(p, top_k, top_p)
    share = np.where([i in kept for i in range(12)], p, 0.0)
    assert (
        chi_square_ok(tokens, share / share.sum())
        if len(kept) > 1
        else set(tokens.tolist()) == kept
    )
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, 0)[tokens])  # before the cut


def test_rows_that_ask_for_nothing_are_untouched_by_those_that_do() -> None:
    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
    plain, _ = sample(logits, Draws(keys=keys(30)), zeros(30))
    k = torch.tensor([[0], [2], [0]] * 10)
    p = torch.tensor([[1.0], [1.0], [0.3]] * 10)
    some, _ = sample(logits, Draws(keys=keys(30), top_k=k, top_p=p), zeros(30))
    assert torch.equal(some[::3], plain[::3])
    assert (some[1::3] != plain[1::3]).any() and (some[2::3] != plain[2::3]).any()


def test_top_p_of_one_keeps_all_also_where_rounding_fills_it() -> None:
    log_probs = torch.log_softmax(torch.tensor([[30.0, 0.0, -1.0], [30.0, 0.0, -1.0]]), -1)
    assert _dropped(log_probs, None, torch.tensor([[1.0], [0.9]])).tolist() == [
        [False] * 3,
        [False, True, True],
    ]


def test_tokens_depend_on_the_key_not_on_the_place_in_the_batch() -> None:
    logits = torch.randn(10, 30, generator=torch.Generator().manual_seed(2))
    at = torch.arange(10, dtype=torch.int32)
    tokens, _ = sample(logits, Draws(keys=keys(10)), at)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    moved, _ = sample(logits[order], Draws(keys=keys(10)[:, order]), at[order])
    assert torch.equal(moved, tokens[order])
    later, _ = sample(logits, Draws(keys=keys(10)), at + 1)
    assert not torch.equal(later, tokens)


def test_half_precision_logits_are_recorded_in_float32() -> None:
    logits = torch.randn(4, 30).bfloat16()
    tokens, log_probs = sample(logits, Draws(keys=keys(4)), zeros(4))
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(
        log_probs, torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None])[:, 0]
    )


def test_a_certain_token_always_wins() -> None:
    """Rounding may lose a token of tiny probability, but never force one."""
    logits = torch.full((5000, 4), -100.0)
    logits[:, 2] = 100.0
    tokens, _ = sample(logits, Draws(keys=keys(5000)), zeros(5000))
    assert (tokens == 2).all()
