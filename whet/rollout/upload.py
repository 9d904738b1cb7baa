"""What the host tells the device without waiting for it.

A copy from ordinary memory waits until the device has done all that was launched before it, steps ahead of their turn
among them, and then the device waits for the host. A copy from pinned memory takes its turn behind them. Used where
rows come and go (`lanes.py`, `guesser.py`); `device_rows.py` has buffers of its own for what it writes at every step.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

ALIGNED = 64
"""Numbers, 256 bytes: each array begins where a tensor of its own might, as kernels are compiled for that."""


def sent(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Arrays of whole numbers on the device, as int32 and in one copy.

    >>> sent(torch.device("cpu"), np.array([[1, 2], [3, 4]]), np.array([5]))
    [tensor([[1, 2],
            [3, 4]], dtype=torch.int32), tensor([5], dtype=torch.int32)]
    """
    ends = list(accumulate(-(-array.size // ALIGNED) * ALIGNED for array in arrays))
    packed = torch.empty(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers, starts = packed.numpy(), [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        numbers[start : start + array.size] = array.ravel()
    there = packed.to(device, non_blocking=True)  # torch keeps the pinned memory until the copy is done
    return [there[start : start + a.size].view(a.shape) for start, a in zip(starts, arrays, strict=True)]
