"""Several arrays in one copy come out as they went in, each where a tensor of its own might begin."""

import numpy as np
import pytest
import torch

from whet.model.ops import rms_norm, to_device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_arrive_in_their_form(device: str) -> None:
    arrays = [
        np.arange(65),
        np.zeros((0, 3), np.int32),
        np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
        np.array([-1, 2**31 - 1]),
    ]
    got = to_device(torch.device(device), *arrays)
    for array, tensor in zip(arrays, got, strict=True):
        assert tensor.dtype == torch.int32 and tensor.device.type == device
        assert tensor.shape == array.shape and tensor.tolist() == array.tolist()
    offsets = [tensor.storage_offset() * 4 for tensor in got]
    assert all(offset % 256 == 0 for offset in offsets)
    assert len({tensor.untyped_storage().data_ptr() for tensor in got}) == 1, "one copy"


@pytest.mark.parametrize("device", DEVICES)
def test_the_host_may_go_on_writing(device: str) -> None:
    array = np.arange(5, dtype=np.int32)
    (tensor,) = to_device(torch.device(device), array)
    array[:] = 9
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_a_norm_by_hand() -> None:
    """The mean square of (3, 4) is 12.5; with eps = 12.5 the root is 5."""
    found = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 12.5)
    torch.testing.assert_close(found, torch.tensor([[0.6, 1.6]]))
