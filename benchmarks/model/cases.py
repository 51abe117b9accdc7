"""Representative cases."""

from __future__ import annotations

from benchmarks.model.bucket_work import Pack
from benchmarks.model.loss_work import LossProblem
from benchmarks.suites.bench_attention import Problem

# Squares; a Llama-like layer of width 4096 on 8192 tokens (QKV, output, up, down, and a weight's gradient) and its
# logits; few rows; a size that is no multiple of any tile.
SHAPES = [(size,) * 3 for size in (1024, 2048, 4096, 8192, 16384)]
SHAPES += [(8192, 6144, 4096), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (4096, 14336, 8192)]
SHAPES += [(2048, 128256, 4096), *((m, 4096, 4096) for m in (1, 16, 64, 256)), (512, 4096, 14336), (1000,) * 3]

# Attention over a cache: sequences, keys of each, query heads, key heads, head dim.
CACHES = [
    (sequences, keys, heads, heads_kv, 128)
    for heads, heads_kv in ((64, 8), (32, 8), (32, 32))
    for sequences, keys in ((1, 1024), (1, 16384), (8, 4096), (8, 16384), (64, 1024), (1, 131072))
]

# All of GPT-2, a bucket of 25 MiB, and a small bucket.
PACKS = [
    Pack("pack", "bfloat16", "bfloat16", 124_439_808, 148),
    Pack("pack", "float32", "bfloat16", 124_439_808, 148),
    Pack("unpack", "bfloat16", "float32", 124_439_808, 148),
    Pack("pack", "float32", "float32", 6_553_600, 12),
    Pack("pack", "bfloat16", "bfloat16", 524_288, 20),
]

# The grid of the FlashAttention papers: 16384 tokens, a width of 2048.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PROBLEMS = [
    Problem(16384 // length, length, 2048 // dim, dim, causal=causal)
    for dim in (64, 128, 256)
    for causal in (False, True)
    for length in LENGTHS
]

# Losses of a vocabulary: rows, classes, features.
LOSSES = [LossProblem(*sizes) for sizes in ((8192, 131072, 4096), (4096, 131072, 4096), (32768, 131072, 4096))]
LOSSES += [LossProblem(*sizes) for sizes in ((8192, 131072, 2048), (8192, 32768, 2048), (8192, 262144, 1152))]
