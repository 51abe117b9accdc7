"""The kernels of attention over a cache: bytes, bank conflicts, splits, races, and that each synchronisation is needed.
tests/test_kvcache.py tests their results."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_sm90_cases import unnoticed_removals
from torch import Tensor

import cuda_ext
from cuda_ext import testing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvcache_common import make_cache

HEADS_KV = 2


def inputs(lengths: list[int], queries: int, group: int, dim: int, page_size: int, new_rows: int = 0) -> Any:
    cache = make_cache(
        *(lengths, max(lengths) + new_rows, HEADS_KV, dim, dim, torch.bfloat16), page_size=page_size, new_rows=new_rows
    )
    batch = len(lengths)
    query = torch.randn(batch, queries, group * HEADS_KV, dim).bfloat16()
    new = [torch.randn(batch, new_rows, HEADS_KV, dim).bfloat16() for _ in range(2)] if new_rows else [None, None]
    return cache, query, *new


def run(problem: Any, options: dict[str, Any], **settings: Any) -> tuple[list[Tensor], list[Any]]:
    cache, query, key, value = problem
    ours = cache.clone()
    with testing.emulated(**{"arch": "sm_80", "processors": 2, **settings}) as emulation:
        results = cuda_ext.flash_attention_with_kvcache(
            query, ours.keys, ours.values, key, value, **cache.arguments, **options, return_lse=True
        )
        sites = emulation.sync_sites
    in_cache = [tensor.nan_to_num() for tensor in (ours.keys, ours.values)]
    return [*results, *in_cache], sites


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_keys_are_read_once_for_a_group_of_heads(dim: int, group: int) -> None:
    keys = 4096
    cache, query, _, _ = inputs([keys], 1, group, dim, 16)
    with testing.emulated("sm_80", processors=32) as emulation:
        cuda_ext.flash_attention_with_kvcache(query, cache.keys, cache.values, **cache.arguments)
    counted = emulation.counters
    ideal = 2 * keys * HEADS_KV * dim * 2
    splits = 16  # of 256 keys
    parts = splits * HEADS_KV * group * (dim + 1) * 4
    # What the second kernel reads was written just before it, so it is in L2.
    assert counted["global_load_bytes"] - parts <= 1.05 * ideal
    assert counted["global_store_bytes"] <= 1.05 * parts
    assert counted["shared_wavefronts"] == counted["shared_ideal_wavefronts"]
    assert counted["matrix_wavefronts"] == counted["matrix_ideal_wavefronts"]


def test_one_short_sequence_fills_the_device() -> None:
    """1024 keys of 8 heads: 128 blocks for 132 SMs, and those of the second kernel."""
    keys = torch.randn(1, 1024, 8, 128).bfloat16()
    query = torch.randn(1, 1, 32, 128).bfloat16()
    with testing.emulated("sm_80", processors=132) as emulation:
        cuda_ext.flash_attention_with_kvcache(query, keys, keys, cache_seqlens=1024)
    assert emulation.counters["blocks"] == 128 + 32 // 4


def test_the_launch_does_not_depend_on_the_lengths() -> None:
    """So that a captured graph serves growing ones: the same blocks, but more work."""
    cache, query, _, _ = inputs([2000, 2000], 1, 4, 64, 16)
    launched = set()
    for length in (0, 1, 700, 2000):
        cache.arguments["cache_seqlens"].fill_(length)
        with testing.emulated("sm_80", processors=132) as emulation:
            cuda_ext.flash_attention_with_kvcache(query, cache.keys, cache.values, **cache.arguments)
        launched.add(emulation.counters["blocks"])
    assert len(launched) == 1


RUNS: dict[str, tuple[tuple[list[int], int, int, int, int, int], dict[str, Any]]] = {
    "split": (([300, 5, 700], 1, 4, 64, 16, 1), {"causal": True}),
    "many rows": (([90, 300], 40, 4, 128, 4, 40), {"causal": True, "softcap": 5.0}),
    "a window": (([500, 20], 3, 2, 256, 32, 3), {"window": (100, 0), "num_splits": 3}),
}


@pytest.mark.sampled(check="races", slow=True)
@pytest.mark.parametrize("name", RUNS)
def test_the_same_bits_in_all_schedules_without_races(name: str) -> None:
    sizes, options = RUNS[name]
    problem = inputs(*sizes)
    expected, _ = run(problem, options)
    for mode, schedule in itertools.product(("eager", "lazy"), ("fifo", "pct")):
        found, _ = run(problem, options, mode=mode, schedule=schedule, seed=1)
        assert all(map(torch.equal, found, expected))
    found, _ = run(problem, options, mode="lazy", schedule="pct", check_races=True)
    assert all(map(torch.equal, found, expected))


def test_removal_of_any_synchronisation_is_noticed() -> None:
    problems = [(inputs(*sizes), options) for sizes, options in RUNS.values()]
    runs = [lambda p=p, o=o, **settings: run(p, o, **settings) for p, o in problems]
    count, unnoticed = unnoticed_removals(runs, lambda name: "attention_cache" in name)
    assert count >= 8 and unnoticed == []
