"""Seconds of work on a GPU, against the wall clock; off CUDA nothing is claimed."""

import time

import pytest
import torch

from whet.model.ops import FOLD, DeviceMeter


def test_off_cuda_there_is_nothing_to_say() -> None:
    meter = DeviceMeter(torch.device("cpu"))
    with meter.span():
        pass
    assert meter.seconds() is None


@pytest.mark.gpu
def test_work_is_counted_and_waiting_is_not() -> None:
    meter = DeviceMeter(torch.device("cuda"))
    a = torch.randn(4096, 4096, device="cuda")
    (a @ a).sum().item()
    begun = time.perf_counter()
    for _ in range(5):
        with meter.span():
            for _ in range(10):
                a @ a
        torch.cuda.synchronize()
        time.sleep(0.02)
    wall = time.perf_counter() - begun
    busy = meter.seconds()
    assert busy is not None and 0 < busy <= wall - 0.1
    assert meter.seconds() == 0.0, "since the last call"


@pytest.mark.gpu
def test_many_spans_are_summed_up_on_the_way() -> None:
    meter = DeviceMeter(torch.device("cuda"))
    a = torch.zeros(8, device="cuda")
    for _ in range(2 * FOLD + 3):
        with meter.span():
            a.add_(1)
    assert len(meter._spans) == 3
    assert (meter.seconds() or 0) > 0
