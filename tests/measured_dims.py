"""The sizes of the two models whose decoding and training were measured."""

from whet.estimate import Dims

SMOLLM2_135M = Dims(
    layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152
)
QWEN25_15B = Dims(
    layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_dim=128, vocab=151936
)
