"""AdamW against its formula; half-precision weights must move as fp32 ones do."""

import copy

import pytest
import torch
from torch import nn

from whet.errors import WhetError
from whet.learn.optimizer import AdamW, learning_rate
from whet.model.load import tiny_model


def test_learning_rate_by_hand():
    assert [learning_rate(s, 0.0, peak=2.0, warmup=4, schedule="constant") for s in range(5)] == [
        0.5,
        1.0,
        1.5,
        2.0,
        2.0,
    ]
    assert learning_rate(9, 0.25, peak=2.0, warmup=0, schedule="linear") == 1.5
    assert learning_rate(9, 0.5, peak=2.0, warmup=0, schedule="cosine") == pytest.approx(1.0)
    assert learning_rate(9, 1.0, peak=2.0, warmup=0, schedule="cosine") == pytest.approx(0.0)
    assert learning_rate(0, 0.5, peak=2.0, warmup=2, schedule="linear") == 0.5


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.lin = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)


def test_two_steps_by_the_formula_and_decay_only_on_matrices():
    model = Small().double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    adam = AdamW(model, weight_decay=0.1, grad_clip=100.0)
    grads = {n: torch.full_like(p, 0.5) for n, p in model.named_parameters()}
    for _ in range(2):
        for n, p in model.named_parameters():
            p.grad = grads[n].clone()
        adam.step(0.01, adam.grad_norm())
    for name, p in model.named_parameters():
        want, m, v = before[name].clone(), 0.0, 0.0
        for t in (1, 2):
            m, v = 0.9 * m + 0.1 * 0.5, 0.999 * v + 0.001 * 0.25
            want = want * (1 - 0.01 * 0.1) if name == "lin.weight" else want
            want = want - 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)) ** 0.5 + 1e-8)
        torch.testing.assert_close(p.detach(), want)
        assert p.grad is None


def test_a_head_tied_to_the_embedding_is_not_decayed():
    model = tiny_model(7, hidden=8, layers=1, heads=1)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    adam = AdamW(model, weight_decay=0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    adam.step(0.1, 0.0)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.endswith("proj.weight")}


def test_the_gradient_is_clipped_by_its_global_norm():
    model = nn.Linear(2, 1, bias=True).double()
    adam = AdamW(model, grad_clip=1.0)
    model.weight.grad = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    model.bias.grad = torch.tensor([4.0], dtype=torch.float64)
    assert adam.grad_norm() == pytest.approx(5.0)
    adam.step(0.1, 5.0)
    assert adam.moment_tensors()["exp_avg.weight"].tolist()[0] == pytest.approx([0.06, 0.0])
    assert adam.moment_tensors()["exp_avg.bias"].tolist() == pytest.approx([0.08])


def test_fp32_weights_are_their_own_masters():
    model = nn.Linear(3, 3)
    adam = AdamW(model)
    assert adam.masters["weight"] is model.weight
    assert adam.master_tensors() == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_moves_as_fp32_does(dtype):
    """50 steps at lr 1e-6: the masters follow the fp32 run; bf16 weights updated in place would hardly move."""
    torch.manual_seed(0)
    half = nn.Linear(64, 64, bias=False).to(dtype)
    full, naive = copy.deepcopy(half).float(), copy.deepcopy(half)
    start = half.weight.detach().clone()
    address = half.weight.data_ptr()
    ours, reference = AdamW(half), AdamW(full)
    in_place = torch.optim.AdamW(naive.parameters(), lr=1e-6, weight_decay=0.0)
    for step in range(50):
        grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step % 5)).to(dtype)
        half.weight.grad, full.weight.grad, naive.weight.grad = (
            grad.clone(),
            grad.float(),
            grad.clone(),
        )
        ours.accumulate()
        ours.step(1e-6, 0.0)
        reference.step(1e-6, 0.0)
        in_place.step()
    torch.testing.assert_close(ours.masters["weight"], full.weight, rtol=0, atol=0)
    assert torch.equal(half.weight, full.weight.to(dtype))
    assert half.weight.data_ptr() == address
    assert half.weight.grad is None
    moved = (ours.masters["weight"] - start.float()).abs()
    assert float((moved > 0).float().mean()) > 0.99
    if dtype == torch.bfloat16:
        assert float((naive.weight != start).float().mean()) < 0.05
        with torch.no_grad():
            lost = (naive.weight.float() - full.weight).norm() / (
                full.weight - start.float()
            ).norm()
        assert float(lost) > 0.5


def test_micro_batches_add_up_in_fp32():
    """1 + 256 times 1/512 is 1.5; summed in bf16 it stays 1."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    adam = AdamW(model)
    for value in (1.0, *[1 / 512] * 256):
        model.weight.grad = torch.full((1, 1), value, dtype=torch.bfloat16)
        adam.accumulate()
    assert adam.grad_norm() == 1.5
    adam.zero_grad()
    assert adam.grad_norm() == 0.0


def test_load_repeats_bit_for_bit_and_reset_forgets():
    def train(model: nn.Module, adam: AdamW, steps: range) -> None:
        for step in steps:
            model.weight.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).to(
                model.weight.dtype
            )
            adam.accumulate()
            adam.step(1e-2, adam.grad_norm())

    torch.manual_seed(0)
    straight = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    other = copy.deepcopy(straight)
    adam = AdamW(straight)
    train(straight, adam, range(3))
    masters = {k: v.clone() for k, v in adam.master_tensors().items()}
    moments = {k: v.clone() for k, v in adam.moment_tensors().items()}
    train(straight, adam, range(3, 6))
    resumed = AdamW(other)
    resumed.load(masters, moments)
    train(other, resumed, range(3, 6))
    assert torch.equal(other.weight, straight.weight)
    assert torch.equal(resumed.masters["weight"], adam.masters["weight"])
    resumed.reset()
    assert resumed.moment_tensors() == {}


def test_weights_written_by_others_are_taken_over():
    """A warm start runs after the learner was made; its masters must not bring the old weights back."""
    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    adam = AdamW(model)
    for value in (3.0, 5.0):
        with torch.no_grad():
            model.weight.fill_(value)
        assert adam.master_tensors()["weight"].unique().tolist() == [value]
        with torch.no_grad():
            model.weight.fill_(value + 1)
        model.weight.grad = torch.zeros_like(model.weight)
        adam.accumulate()
        adam.step(1e-3, 0.0)
        assert model.weight.unique().tolist() == [value + 1]


def test_a_checkpoint_of_another_model_is_refused():
    adam = AdamW(nn.Linear(2, 2).to(torch.bfloat16))
    with pytest.raises(WhetError, match="masters do not fit"):
        adam.load({}, {})
    with pytest.raises(WhetError, match="does not train"):
        AdamW(nn.Linear(2, 2)).load({}, {"exp_avg.other": torch.zeros(1)})


def test_frozen_parameters_are_left_alone():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert list(AdamW(model).live) == ["weight"]
