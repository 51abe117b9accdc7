"""The paper model of attention over a cache, against what the emulator counts and what is known of GPUs."""

from __future__ import annotations

import pytest
import torch

import cuda_ext
from benchmarks.model.cache_work import CacheProblem, predict_cache
from benchmarks.model.gpus import GPUS
from cuda_ext import _emulator, testing


@pytest.mark.parametrize(("batch", "keys"), [(1, 1000), (3, 4096), (2, 64)])
def test_blocks_and_products_are_those_that_are_counted(batch: int, keys: int) -> None:
    choice = _emulator.load().cache_choice([keys] * batch, keys, 1, (8, 2), 64, 80, 20)
    tensors = [torch.randn(batch, rows, heads, 64).bfloat16() for rows, heads in ((1, 8), (keys, 2), (keys, 2))]
    with testing.emulated("sm_80", processors=20) as emulation:
        cuda_ext.flash_attention_with_kvcache(*tensors)
    combine = batch * 8 // 4 if choice.splits > 1 else 0
    assert emulation.counters["blocks"] == choice.blocks + combine
    area = choice.tile["block_m"] * choice.tile["block_n"]
    assert emulation.counters["mma"] == sum(choice.steps) * area * 2 * 64 // (16 * 8 * 16)


def test_long_contexts_reach_the_bandwidth_and_short_ones_are_latency() -> None:
    gpu = GPUS["h200"]
    long = predict_cache(gpu, CacheProblem(8, 16384, 64, 8, 128))
    assert 0.85 < long.problem.key_bytes / gpu.memory_bytes / long.seconds < 1 and long.attend.binding == "memory"
    short = predict_cache(gpu, CacheProblem(1, 1024, 64, 8, 128))
    assert short.attend.binding == "latency" and 2 * gpu.launch < short.seconds < 10e-6
    assert short.items == 128 and short.combine is not None


def test_more_keys_take_longer_and_one_split_needs_no_second_launch() -> None:
    gpu = GPUS["a100"]
    times = [predict_cache(gpu, CacheProblem(4, keys, 32, 8, 128)).seconds for keys in (1024, 2048, 8192, 65536)]
    assert times == sorted(times)
    many = predict_cache(gpu, CacheProblem(4, 1024, 256, 128, 128))
    assert many.splits == 1 and many.combine is None
