"""The fused stack with few tokens, which take a kernel where others take a library's product; by the interpreter."""

import copy

import pytest
import torch
from families import small
from kernel_env import interpreted
from test_fused import Rows, fuse

from whet.fast.kernels import layer as module
from whet.fast.kernels.layer import gated


@pytest.mark.skipif(not interpreted, reason="needs TRITON_INTERPRET=1")
def test_few_tokens_take_a_kernel_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("qwen2", torch.float16)
    stack, text, called = fuse(model), torch.arange(2, 12), []
    stack._gate_few = lambda *given: (called.append(given), gated(*given))[1]
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        want = exact(input_ids=text[None], use_cache=False).logits[0]
    off = []
    for few in (9, 10):
        monkeypatch.setattr(module, "FEW", few)
        (got,) = Rows(model, stack, 1).feed([text])
        off.append(float((got.double() - want).abs().mean()))
        assert len(called) == (0 if few == 9 else len(stack.layers))
    assert 0 < off[1] < 1.5 * off[0], "it rounds as often"


@pytest.mark.skipif(not interpreted, reason="needs TRITON_INTERPRET=1")
def test_the_stack_is_compared_with_the_model_rounding_by_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by the kernel, as right but not the same: where logits are ill-conditioned, that looks like a mistake."""
    monkeypatch.setattr(module, "gated", lambda *given: pytest.fail("the kernel was asked"))
    stack = fuse(small("qwen2", torch.float16))
    assert stack._gate_few is module.gated_reference
    stack.compile(backend="eager")
    assert stack._gate_few is module.gated
