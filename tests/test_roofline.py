"""The limits of a decode step against a table worked out beforehand, and by hand for one cell."""

import pytest
import torch
from measured_dims import QWEN25_15B, SMOLLM2_135M
from transformers import LlamaConfig, LlamaForCausalLM

from whet.estimate import MEASURED, PAPER, Dims, Gpu, attainable_step, dims_of
from whet.model.memory import measure

QWEN25_05B = Dims(
    layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, head_dim=64, vocab=151936
)
QWEN25_7B = Dims(
    layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064
)


def kv_bytes(dims: Dims) -> int:
    """Bytes of keys and values per token, in bf16."""
    return 4 * dims.layers * dims.kv_heads * dims.head_dim


def step_bytes(dims: Dims, batch: int, context: int) -> int:
    """Bytes moved from memory at the least: every weight once, all keys and values once."""
    return 2 * dims.weights + kv_bytes(dims) * batch * context


def ideal_rate(dims: Dims, batch: int, context: int) -> float:
    """Tokens per second at full bandwidth and full compute: weights and attention in turn, no floors."""
    products = max(2 * dims.weights / PAPER.bandwidth, 2 * dims.weights * batch / PAPER.flops)
    operations = 4 * dims.layers * dims.heads * dims.head_dim * batch * context
    attention = max(kv_bytes(dims) * batch * context / PAPER.bandwidth, operations / PAPER.flops)
    return batch / (products + attention)


TABLE = [
    # GB moved, ideal and attainable tokens per second as printed, at B = 1, 8, 64, 256
    (SMOLLM2_135M, 512, "0.28 17.1k 1.45k", "0.36 106k 11.6k", "1.02 300k 77k", "3.29 366k 175k"),
    (
        SMOLLM2_135M,
        4096,
        "0.36 13.2k 1.45k",
        "1.02 37.5k 9.7k",
        "6.31 48.7k 29k",
        "24.4 50.2k 36.7k",
    ),
    (QWEN25_05B, 512, "0.99 4.83k 1.47k", "1.04 37.0k 11.8k", "1.39 221k 83k", "2.60 433k 195k"),
    (QWEN25_05B, 4096, "1.04 4.62k 1.47k", "1.39 27.6k 10.9k", "4.21 73k 42.6k", "13.9 87k 60.3k"),
    (QWEN25_15B, 512, "3.10 1.55k 805", "3.20 12.0k 6.4k", "4.03 76k 43.8k", "6.85 162k 94.9k"),
    (QWEN25_15B, 4096, "3.20 1.50k 805", "4.03 9.5k 5.6k", "10.6 29.0k 20.2k", "33.2 36.2k 26.8k"),
    (QWEN25_7B, 512, "14.2 339 245", "14.4 2.67k 1.95k", "16.0 19.2k 14.1k", "21.7 49k 31.7k"),
    (QWEN25_7B, 4096, "14.4 334 244", "16.0 2.40k 1.77k", "29.2 10.5k 8.0k", "74.3 15.8k 11.8k"),
]


def attainable_rate(dims: Dims, batch: int, context: int, gpu: Gpu = PAPER) -> float:
    return batch / attainable_step(dims, batch, context, gpu)


def as_printed(value: float, shown: str) -> str:
    """The value with as many digits as the table shows."""
    unit = 1000 if shown.endswith("k") else 1
    digits = len(shown.removesuffix("k").partition(".")[2])
    return f"{value / unit:.{digits}f}" + ("k" if unit > 1 else "")


@pytest.mark.parametrize(
    ("dims", "context", "row"), [(dims, context, row) for dims, context, *row in TABLE]
)
def test_the_table_to_its_printed_digits(dims: Dims, context: int, row: list[str]) -> None:
    for batch, cell in zip((1, 8, 64, 256), row, strict=True):
        moved, ideal, attainable = cell.split()
        assert as_printed(step_bytes(dims, batch, context) / 1e9, moved) == moved
        assert as_printed(ideal_rate(dims, batch, context), ideal) == ideal
        assert as_printed(attainable_rate(dims, batch, context), attainable) == attainable


def test_one_step_by_hand() -> None:
    """SmolLM2-135M alone at 512 tokens: every kernel of a layer is at its floor of 2 us, 4 + 2 + 5 of them, 30 layers;
    the head reads 2 x 49152 x 576 bytes at 3.84 TB/s = 14.75 us; the sampler 6 us, four small kernels 8 us."""
    assert attainable_step(SMOLLM2_135M, 1, 512) == pytest.approx(
        30 * 22e-6 + 14.7456e-6 + 6e-6 + 8e-6
    )


def test_one_step_by_hand_with_what_was_measured() -> None:
    """The same, k <= 576 for three of the products (3.5 us) and 1536 for the last (5 us), attention 4.5 us, small ones
    1.65 us; and 0.3 us after each of 30 x 11 + 8 kernels."""
    layer = 3 * 3.5e-6 + 5e-6 + 4.5e-6 + 5 * 1.65e-6
    rest = 14.7456e-6 + 3 * 1.65e-6 + 4 * 1.65e-6
    assert attainable_step(SMOLLM2_135M, 1, 512, MEASURED) == pytest.approx(
        30 * layer + rest + 338 * 0.3e-6
    )


def test_what_was_measured_is_slower_where_launches_rule_and_faster_where_memory_does() -> None:
    for dims in (SMOLLM2_135M, QWEN25_15B):
        assert attainable_rate(dims, 1, 512, MEASURED) < attainable_rate(dims, 1, 512)
        assert attainable_rate(dims, 256, 16384, MEASURED) > attainable_rate(dims, 256, 16384)


def test_dims_of_a_network() -> None:
    sizes = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    with torch.device("meta"):
        network = LlamaForCausalLM(
            LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, **sizes)
        )
    assert dims_of(measure(network)) == SMOLLM2_135M
