"""The hash against plain Python integers, and that its draws look like independent uniforms."""

import numpy as np
import pytest
import torch
from plain_noise import reference_bits

from whet.model.noise import noise_bits, row_key, uniform

GOLDEN = {
    # (seed, evaluation, group, index, position, token): bits, from reference_bits
    (0, False, 0, 0, 0, 0): 0xD7545DE9,
    (0, True, 0, 0, 0, 0): 0xCAE62BAB,
    (1234, False, 987654321, 15, 4095, 151935): 0x29F47783,
    (2**31 - 1, False, 2**40 + 3, 7, 100000, 3): 0xBE80B089,
}


def bits(
    seed: int, evaluation: bool, group: int, indices: range, position: int, vocab: int
) -> np.ndarray:
    keys = torch.tensor(
        [row_key(seed, evaluation, group, i) for i in indices], dtype=torch.int32
    ).T.contiguous()
    at = torch.full((len(indices),), position, dtype=torch.int32)
    return noise_bits(keys, at, vocab).numpy().view(np.uint32)


@pytest.mark.parametrize(("key", "want"), GOLDEN.items())
def test_golden(key: tuple[int, bool, int, int, int, int], want: int) -> None:
    seed, evaluation, group, index, position, token = key
    assert reference_bits(*key) == want
    assert (
        bits(seed, evaluation, group, range(index, index + 1), position, token + 1)[0, token]
        == want
    )


def test_equals_the_reference_everywhere() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        seed, group, position = (int(x) for x in rng.integers(0, [2**31, 2**62, 2**17]))
        evaluation = bool(rng.integers(2))
        got = bits(seed, evaluation, group, range(3), position, 40)
        want = [
            [reference_bits(seed, evaluation, group, i, position, t) for t in range(40)]
            for i in range(3)
        ]
        np.testing.assert_array_equal(got, want)


def test_uniform_is_inside_the_unit_interval() -> None:
    u = uniform(torch.tensor([0, 255, 256, -1, -256, 2**31 - 1, -(2**31)], dtype=torch.int32))
    assert u.dtype == torch.float32
    assert (u > 0).all() and (u < 1).all()
    assert u[0] == 2.0**-25 and u[1] == u[0] and u[2] == 2.0**-24 + 2.0**-25
    assert u[3] == u[4] == 1 - 2.0**-24
    assert u[5] == pytest.approx(0.5, abs=1e-6) and u[6] == pytest.approx(0.5, abs=1e-6)


def chi_square(counts: np.ndarray) -> float:
    """Standardised: (X - df) / sqrt(2 df) is about a standard normal."""
    expected = counts.sum() / counts.size
    df = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - df) / np.sqrt(2 * df))


@pytest.mark.parametrize("shift", [24, 16, 8], ids=["high", "middle", "low"])
def test_every_byte_is_uniform(shift: int) -> None:
    draws = np.concatenate(
        [bits(3, False, g, range(16), p, 64).ravel() for g in range(8) for p in range(16)]
    )
    counts = np.bincount((draws >> shift) & 0xFF, minlength=256)
    assert abs(chi_square(counts)) < 4


def neighbours() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs of draws whose keys differ in one part by one."""
    a = np.stack([bits(3, False, g, range(32), 9, 64) for g in range(16)])
    return {
        "token": (a[..., :-1], a[..., 1:]),
        "index": (a[:, :-1], a[:, 1:]),
        "group": (a[:-1], a[1:]),
        "position": (a, np.stack([bits(3, False, g, range(32), 10, 64) for g in range(16)])),
        "seed": (a, np.stack([bits(4, False, g, range(32), 9, 64) for g in range(16)])),
        "space": (a, np.stack([bits(3, True, g, range(32), 9, 64) for g in range(16)])),
    }


@pytest.mark.parametrize("part", ["token", "index", "group", "position", "seed", "space"])
def test_neighbouring_draws_are_independent(part: str) -> None:
    x, y = neighbours()[part]
    x, y = x.ravel(), y.ravel()
    joint = np.bincount((x >> 28) * 16 + (y >> 28), minlength=256)
    assert abs(chi_square(joint)) < 4
    flipped = np.array([int(v).bit_count() for v in (x ^ y)[:4096]])
    assert abs(flipped.mean() - 16) < 4 * np.sqrt(8 / flipped.size)


def test_no_draw_is_a_shifted_copy_of_another() -> None:
    """Every 32-bit value of one draw met in another is chance: about n^2 / 2^32 of them."""
    rows = np.stack([bits(0, False, 1, range(1), p, 4096)[0] for p in range(64)])
    repeated = rows.size - np.unique(rows).size
    assert repeated < 4 * (rows.size**2 / 2**33) + 10


@pytest.mark.gpu
def test_cuda_gives_the_same_bits() -> None:
    keys = torch.tensor(
        [row_key(7, False, g, 3) for g in range(50)], dtype=torch.int32
    ).T.contiguous()
    at = torch.arange(50, dtype=torch.int32)
    here, there = noise_bits(keys, at, 1000), noise_bits(keys.cuda(), at.cuda(), 1000)
    assert torch.equal(here, there.cpu())
    assert torch.equal(uniform(here), uniform(there).cpu())
