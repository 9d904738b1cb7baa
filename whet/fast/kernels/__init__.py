"""Triton kernels of the rollout engine. This file says whether a kernel can serve a tensor.

`attention`, `layer` and `decode` hold the operators: each checks its arguments, then calls the Triton kernel of the
`*_triton` file beside it, or the plain torch form where `takes_triton` is false. Triton is imported at the first
launch, since not every machine has it.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes_triton(tensor: Tensor) -> bool:
    """Whether a kernel can serve the tensor: a type the kernels have, and a place where they can run."""
    return tensor.dtype in DTYPES and runs_triton(tensor)


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels run where the tensor lies: on CUDA, or anywhere under Triton's interpreter."""
    return (tensor.is_cuda or _interpreted()) and has_triton()


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _interpreted() -> bool:
    """Read once, as Triton itself does when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def require(task: str, broken: dict[str, bool]) -> None:
    """Raises an error that names the broken rules, each true where its condition does not hold."""
    if found := [rule for rule, is_broken in broken.items() if is_broken]:
        raise ValueError(f"{task} needs {'; '.join(found)}")
