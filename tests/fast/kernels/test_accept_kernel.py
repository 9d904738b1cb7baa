"""What counts of verified drafts: numbers by hand, and the kernel against the reference on anything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_env import device, needs_triton
from torch import Tensor

from whet.fast.kernels.decode import State, Texts, accept, accept_reference

TRITON = pytest.param("triton", marks=needs_triton)
STOPS = (9, -1)


def state(*rows: tuple[int, int, int, int]) -> Tensor:
    """The state of (token, length, count, limit), with the stops below."""
    return torch.tensor(
        [(*row, *STOPS) for row in rows], dtype=torch.int32, device=device
    ).T.contiguous()


def lines(lines: Tensor) -> State:
    return State(lines[0], lines[1], lines[2], lines[3], lines[4:])


@pytest.mark.parametrize(
    ("row", "drafts", "drawn", "counted", "after"),
    [
        (
            (4, 7, 2, 9),
            (5, 8),
            (5, 8, 3),
            3,
            (3, 10, 5),
        ),  # all drafts were right, and one more came for free
        (
            (4, 7, 2, 9),
            (5, 8),
            (5, 7, 3),
            2,
            (7, 9, 4),
        ),  # the second was wrong: the target's own draw stands there
        ((4, 7, 2, 9), (5, 8), (6, 8, 3), 1, (6, 8, 3)),  # a right draft after a wrong one is none
        ((4, 7, 2, 9), (-1, -1), (6, 8, 3), 1, (6, 8, 3)),
        (
            (4, 7, 2, 9),
            (5, 9),
            (5, 9, 3),
            2,
            (9, -1, 4),
        ),  # 9 stops, in the midst of what was accepted
        (
            (4, 7, 2, 9),
            (9, 5),
            (6, 5, 3),
            1,
            (6, 8, 3),
        ),  # a stop that was drafted but not drawn is none
        ((4, 7, 2, 4), (5, 8), (5, 8, 3), 2, (8, -1, 4)),  # the limit
        ((0, -1, 0, 0), (-1, -1), (1, 1, 1), 1, (1, -1, 1)),  # no row
        ((4, 7, 2, 9), (), (3,), 1, (3, 8, 3)),  # nothing was drafted: a plain step
        ((4, 7, 4, 5), (), (3,), 1, (3, -1, 5)),
        ((4, 7, 2, 5), (), (9,), 1, (9, -1, 3)),
    ],
)
@pytest.mark.parametrize("path", ["reference", TRITON])
def test_what_counts_of_a_verified_draft(
    row: tuple, drafts: tuple, drawn: tuple, counted: int, after: tuple, path: str
) -> None:
    new = len(drawn)
    log_prob = torch.tensor([-1.0, -2.0, -3.0][:new], device=device)
    draft = torch.tensor([drafts], dtype=torch.int32, device=device).view(1, new - 1)
    rows, read = state(row), torch.zeros(2 + 2 * new, 1, dtype=torch.int32, device=device)
    (accept if path == "triton" else accept_reference)(
        lines(rows), draft, torch.tensor(drawn, device=device), log_prob, read
    )
    assert int(read[0, 0]) == counted and tuple(rows[:3, 0].tolist()) == after
    assert int(read[1, 0]) == sum(draft >= 0 for draft in drafts)
    assert read[2 : 2 + new, 0].tolist() == list(drawn)
    assert torch.equal(read[2 + new :, 0].contiguous().view(torch.float32), log_prob)


@needs_triton
@settings(max_examples=30, deadline=None)
@given(batch=st.integers(1, 9), most=st.integers(1, 47), seed=st.integers(0, 2**16))
def test_the_kernel_is_the_reference(batch: int, most: int, seed: int) -> None:
    """Within wider tensors, as the engine has them; what is beyond stays."""
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 11, (batch, most + 1), generator=rng)
    drafts = torch.full((batch + 2, 47), -1, dtype=torch.int32)
    right = torch.rand(batch, most, generator=rng) < 0.9
    drafts[:batch, :most] = torch.where(
        right, drawn[:, :-1], torch.randint(-1, 11, (batch, most), generator=rng)
    ).int()
    whole = torch.randint(0, 60, (6, batch + 3), generator=rng, dtype=torch.int32)
    whole[1] -= 5
    whole[4:] = torch.randint(-1, 11, (2, batch + 3), generator=rng)
    log_prob = torch.randn(batch * (most + 1), generator=rng).to(device)
    found = []
    for chosen in (accept_reference, accept):
        rows, read = (
            whole.clone().to(device),
            torch.full((96 + 2, batch + 3), -7, dtype=torch.int32, device=device),
        )
        part = read[: 2 * most + 4, :batch]
        history, written = (
            torch.zeros(batch, 120, dtype=torch.int32),
            torch.zeros(batch, dtype=torch.int32),
        )
        texts = Texts(
            history.to(device), written.to(device), torch.arange(batch).flip(0).int().to(device)
        )
        drafted, tokens = drafts[:batch, :most].to(device), drawn.flatten().to(device)
        chosen(lines(rows[:, :batch]), drafted, tokens, log_prob, part, texts)
        found.append((rows, read, texts.history, texts.written))
    for plain, kernel in zip(*found, strict=True):
        assert torch.equal(plain, kernel)
    rows, read, history, written = found[0]
    for row in range(batch):
        counted, length, lane = int(read[0, row]), int(whole[1, row]), batch - 1 - row
        text = [0] * 120
        if length >= 0:
            text[length + 1 : length + 1 + counted] = drawn[row, :counted].tolist()
        assert history[lane].tolist() == text and int(written[lane]) == (
            length + 1 + counted if length >= 0 else 0
        )
    assert (
        (read[0, :batch] >= 1).all()
        and (read[0, :batch] <= most + 1).all()
        and (read[:, batch:] == -7).all()
    )


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows with 3 drafts have 8 draws"):
        accept(
            lines(state((1, 1, 1, 1), (1, 1, 1, 1))),
            torch.zeros(2, 3, dtype=torch.int32),
            torch.zeros(7, dtype=torch.int64),
            torch.zeros(7),
            torch.zeros(10, 2, dtype=torch.int32),
        )
