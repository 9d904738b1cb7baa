"""The sampler's kernels draw the tokens of `whet.rollout.rows.sample`, and record its log-probs."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_env import device, needs_triton
from plain_noise import reference_bits
from torch import Tensor

from whet.fast.kernels.decode import race, race_reference
from whet.model.noise import noise_bits, row_key, uniform
from whet.rollout.rows import Draws, sample

MARGIN = 4e-6
"""How close the two best of a race must be for two ways of rounding to disagree, logits / T up to 32."""
TRITON = pytest.param("triton", marks=needs_triton)


def rows(
    batch: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, keys and positions."""
    logits = 4 * torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed))
    keys = torch.tensor(
        [row_key(seed, False, i // 8, i % 8) for i in range(batch)], dtype=torch.int32
    ).T.contiguous()
    position = (torch.arange(batch, dtype=torch.int32) * 37) % 4096
    return logits.to(device, dtype), keys.to(device), position.to(device)


def sampled(logits: Tensor, keys: Tensor, position: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    greedy = (heat == 0)[:, None]
    draws = Draws(keys, heat[:, None].masked_fill(greedy, 1.0), greedy)
    return sample(logits, draws, position)


def gap(logits: Tensor, keys: Tensor, position: Tensor, heat: Tensor) -> Tensor:
    """Between the two best of each row's race, in float64."""
    log_probs = torch.log_softmax(logits.double() / heat.double()[:, None], -1)
    u = uniform(noise_bits(keys, position, logits.shape[1])).double()
    best = (log_probs - (-torch.log1p(-u)).log()).topk(2).values
    return best[:, 0] - best[:, 1]


def assert_drawn(logits: Tensor, keys: Tensor, position: Tensor, heat: Tensor, path: str) -> None:
    chosen = race if path == "triton" else race_reference
    token, log_prob = chosen(logits, keys, position, heat)
    want, _ = sampled(logits, keys, position, heat)
    assert token.dtype == torch.int64 and log_prob.dtype == torch.float32
    clear = (heat == 0) | (gap(logits, keys, position, heat.masked_fill(heat == 0, 1.0)) > MARGIN)
    assert clear.float().mean() > 0.99
    assert torch.equal(token[clear], want[clear])
    exact = torch.log_softmax(
        logits.double() / heat.double().masked_fill(heat == 0, 1.0)[:, None], -1
    )
    exact = exact.gather(1, token[:, None])[:, 0]
    # torch on a CPU adds up a long row in few sums, the kernel in one a chunk
    torch.testing.assert_close(
        log_prob.double(), exact, rtol=0, atol=5e-6 if path == "triton" else 5e-5
    )


@pytest.mark.parametrize("path", ["reference", TRITON])
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(2, torch.float32), (23, torch.bfloat16), (150, torch.float16), (150, torch.float32)],
)
def test_many_short_rows(path: str, vocab: int, dtype: torch.dtype) -> None:
    batch = 160 if device.type == "cpu" else 20_000
    heat = torch.tensor([1.0, 0.6, 0.0, 1.7], device=device).repeat(batch // 4)
    assert_drawn(*rows(batch, vocab, dtype, seed=vocab), heat, path)


@pytest.mark.parametrize("path", ["reference", TRITON])
@pytest.mark.parametrize("vocab", [2048, 2049, 49_152, 151_936])
def test_rows_of_many_chunks(path: str, vocab: int) -> None:
    heat = torch.tensor([1.0, 0.0, 0.7], device=device)
    assert_drawn(*rows(3, vocab, torch.bfloat16, seed=vocab), heat, path)


@needs_triton
def test_a_row_is_the_same_bits_in_any_batch() -> None:
    logits, keys, position = rows(5, 5000)
    heat = torch.full((5,), 0.9, device=device)
    token, log_prob = race(logits, keys, position, heat)
    for i in range(5):
        alone = race(logits[i : i + 1], keys[:, i : i + 1], position[i : i + 1], heat[i : i + 1])
        assert torch.equal(alone[0], token[i : i + 1]) and torch.equal(
            alone[1], log_prob[i : i + 1]
        )


@pytest.mark.parametrize("path", ["reference", TRITON])
def test_greedy_takes_the_first_of_the_largest(path: str) -> None:
    """Also where exp(x - max) would call two different logits equal, and across chunks."""
    logits = torch.zeros(4, 5000, device=device)
    logits[0, [4500, 30, 2100]] = 7.0
    logits[1, [10, 2500]] = torch.tensor([1e-10, 1.1e-10], device=device)
    logits[2] -= torch.inf
    logits[2, [4999, 4998]] = torch.tensor([-2.0, -3.0], device=device)
    _, keys, position = rows(4, 2)
    chosen = race if path == "triton" else race_reference
    token, log_prob = chosen(logits, keys, position, torch.zeros(4, device=device))
    assert token.tolist() == [30, 2500, 4999, 0]
    torch.testing.assert_close(log_prob[2].item(), -math.log1p(math.exp(-1.0)))
    assert log_prob[3].item() == pytest.approx(-math.log(5000), abs=1e-5)


@pytest.mark.filterwarnings("ignore:divide by zero")  # log(0) in the interpreter
@pytest.mark.parametrize("path", ["reference", TRITON])
def test_tokens_that_cannot_be_drawn(path: str) -> None:
    """Whole chunks of -inf, as vocabularies padded to a round number have."""
    logits, keys, position = rows(8, 7000)
    logits[:, 100:] = -torch.inf
    assert_drawn(logits, keys, position, torch.ones(8, device=device), path)


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_what_is_no_number_stays_one_but_the_token_is_of_the_vocabulary(
    bad: float, heat: float
) -> None:
    logits, keys, position = rows(2, 2100)
    logits[0] = bad
    logits[1, 2099] = bad
    token, log_prob = race(logits, keys, position, torch.full((2,), heat, device=device))
    assert ((token >= 0) & (token < 2100)).all() and log_prob.isnan().all()


@needs_triton
def test_keys_may_be_a_view_and_rows_apart() -> None:
    logits, keys, position = rows(6, 300)
    heat = torch.ones(6, device=device)
    want = race(logits, keys, position, heat)
    wide = torch.zeros(5, 9, dtype=torch.int32, device=device)
    wide[1:3, :6] = keys
    apart = torch.zeros(6, 400, device=device)
    apart[:, :300] = logits
    got = race(apart[:, :300], wide[1:3, :6], position, heat)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert race(logits[:0], keys[:, :0], position[:0], heat[:0])[0].shape == (0,)


def test_wrong_shapes_and_words_are_refused() -> None:
    logits, keys, position = rows(4, 9)
    heat = torch.ones(4, device=device)
    with pytest.raises(ValueError, match="4 rows of logits"):
        race(logits, keys.T, position, heat)
    with pytest.raises(ValueError, match="int32"):
        race(logits, keys.long(), position, heat)


def delay_in_torch(u: Tensor) -> Tensor:
    """`race_triton.delay`, line by line."""
    w = 1.0 - u
    e = (w - 1.0) + u
    return e * u + e - torch.log(w)


def test_the_delay_is_right_for_every_u() -> None:
    """All 2^24 of them against float64; log(1 - u) alone would be wrong by all of E for the smallest."""
    worst = 0.0
    for part in torch.arange(2**24, dtype=torch.int32).split(2**21):
        u = uniform(part << 8)
        exact = -torch.log1p(-u.double())
        worst = max(worst, ((delay_in_torch(u).double() - exact) / exact).abs().max().item())
    assert worst < 2.0**-22
    assert delay_in_torch(torch.tensor(2.0**-25)).item() == 2.0**-25
    assert -torch.log(1 - torch.tensor(2.0**-25)).item() == 0.0


HASHED = [
    (0, False, 0, 0, 0),
    (1234, False, 987654321, 15, 4095),
    (2**31 - 1, True, 2**40 + 3, 7, 100_000),
]


@needs_triton
@pytest.mark.parametrize("key", HASHED)
def test_the_hash_is_the_same_bits(key: tuple[int, bool, int, int, int]) -> None:
    """In the kernel, in torch, and in plain Python."""
    from race_probe_triton import show_hash

    *name, position = key
    words = torch.tensor([*row_key(*name), position], dtype=torch.int32, device=device)
    bits = torch.zeros(4096, dtype=torch.int32, device=device)
    show_hash[1,](words, bits, 4096)
    assert torch.equal(bits[None], noise_bits(words[:2, None], words[2:], 4096))
    assert bits[17].item() & 0xFFFFFFFF == reference_bits(*key, 17)


@needs_triton
def test_uniform_and_delay_of_the_kernel() -> None:
    """On CUDA for every u; under the interpreter for the smallest, the largest and a spread."""
    from race_probe_triton import show_delay

    k = torch.arange(2**24, dtype=torch.int32, device=device)
    if device.type == "cpu":
        k = torch.cat((k[:4096], k[-4096:], k[:: 2**24 // 8192]))
    bits = (k << 8) + 255
    u, late = torch.zeros(2, len(k), device=device)
    show_delay[len(k) // 4096,](bits, u, late, 4096)
    assert torch.equal(u, uniform(bits))
    exact = -torch.log1p(-u.double())
    assert ((late.double() - exact) / exact).abs().max() < 2.0**-21
