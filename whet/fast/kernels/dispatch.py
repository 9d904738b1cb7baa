"""Whether a Triton kernel can serve a tensor, or its torch reference must. Asked by the operators beside it."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes_triton(tensor: Tensor) -> bool:
    """A type the kernels know, on CUDA or anywhere under Triton's interpreter, with Triton installed."""
    return tensor.dtype in DTYPES and (tensor.is_cuda or _interpreted()) and has_triton()


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _interpreted() -> bool:
    """Read once, as Triton itself does when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"
