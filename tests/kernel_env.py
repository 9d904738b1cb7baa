"""Where kernels can run: on a CUDA device, or on the CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

import importlib.util
import os
from typing import Any

import pytest
import torch

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
device = torch.device("cuda" if torch.cuda.is_available() and not interpreted else "cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or interpreted),
    reason="needs CUDA, or TRITON_INTERPRET=1 and triton",
)


def mend_interpreter() -> None:
    """Two faults of the interpreter of Triton 3.6: numpy 2.4 refuses its loop bounds, and it is needlessly slow.

    It turns an array of one number into a Python number by int(), and it patches the whole language anew at every
    call of a function inside a kernel; once a launch and module is enough.
    """
    from triton.runtime import interpreter

    patch_tensor, patch_lang, run = (
        interpreter._patch_lang_tensor,
        interpreter._patch_lang,
        interpreter.GridExecutor,
    )
    patched: set[int] = set()

    def _patch_lang_tensor(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def _patch_lang(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch_lang(function)

    class GridExecutor(run):
        def __call__(self, *args: Any, **kwargs: Any) -> None:
            patched.clear()
            super().__call__(*args, **kwargs)

    interpreter._patch_lang_tensor, interpreter._patch_lang = _patch_lang_tensor, _patch_lang
    interpreter.GridExecutor = GridExecutor


if interpreted and importlib.util.find_spec("triton"):
    mend_interpreter()
