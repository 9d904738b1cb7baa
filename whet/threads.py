"""How many threads torch computes with: another number of them rounds sums in another order.

So where a run is to be the same on every machine, or a time is to be compared, it is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
