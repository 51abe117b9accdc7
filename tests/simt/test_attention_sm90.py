"""What attention forward on wgmma has that the other kernels do not. tests/test_attention_cuda.py runs it as well: an
emulated device is of either architecture there."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from attention_sm90_cases import BEGINS, PACKING, assert_removals_are_noticed, qkv, random_problem, rows_of_others
from torch import Tensor

import cuda_ext
from cuda_ext import testing
from cuda_ext.testing import reference_attention

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (80, 40), (8, 136))


def assert_right(out: Tensor, tensors: list[Tensor], **options: Any) -> None:
    """The error is at most twice that of the same formula in the dtype of the tensors."""
    exact = reference_attention(*(each.double() for each in tensors), **options)
    plain = reference_attention(*tensors, **options)
    error, allowed = ((each.double() - exact).abs().max() for each in (out, plain))
    assert error <= 2 * allowed + 2 * torch.finfo(out.dtype).eps


def counted(arch: str, tensors: list[Tensor], **options: Any) -> tuple[Tensor, dict[str, int]]:
    with testing.emulated(arch, "lazy", "pct", random.randrange(2**31)) as emulation:
        out = cuda_ext.flash_attention(*tensors, **options)
        return out, dict(emulation.counters)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_runs_where_it_can(dims: tuple[int, int], causal: bool) -> None:
    tensors = qkv(2, random.randint(1, 300), random.randint(1, 300), 2, 1, *dims, torch.bfloat16)
    out, counters = counted("sm_90a", tensors, causal=causal)
    assert_right(out, tensors, causal=causal)
    assert counters["wgmma"] > 0 and counters["tma_load_bytes"] > 0 and counters["mma"] == 0


@pytest.mark.parametrize(
    "sizes",
    [(0, 5, 7, 2, 2, 64, 64), (2, 0, 7, 2, 2, 64, 64), (2, 5, 0, 2, 2, 64, 64), (2, 5, 7, 0, 2, 64, 64),
     (2, 5, 7, 0, 0, 64, 64), (2, 5, 7, 2, 1, 0, 64), (2, 5, 7, 2, 1, 64, 0), (2, 5, 7, 2, 1, 0, 0)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_sizes_of_zero(sizes: tuple[int, ...], packed: bool) -> None:
    tensors = [each.requires_grad_() for each in qkv(*sizes, torch.bfloat16)]
    references = [each.detach().double().requires_grad_() for each in tensors]
    expected = reference_attention(*references, scale=1.0)
    with testing.emulated("sm_90a"):
        if packed:
            offsets = [torch.arange(sizes[0] + 1, dtype=torch.int32) * sizes[place] for place in (1, 2)]
            flat = cuda_ext.flash_attention_varlen(
                *(each.flatten(0, 1) for each in tensors),
                *offsets,
                max_seqlen_q=sizes[1],
                max_seqlen_k=sizes[2],
                scale=1.0,
            )
            out = flat.unflatten(0, (sizes[0], sizes[1]))
        else:
            out = cuda_ext.flash_attention(*tensors, scale=1.0)
        out.float().square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(out.double(), expected, atol=0.05, rtol=0.02)
    for each, reference in zip(tensors, references, strict=True):
        torch.testing.assert_close(each.grad.double(), reference.grad, atol=0.1, rtol=0.05)


def test_products_and_bytes_are_those_that_are_needed() -> None:
    """Full attention, 2 x 3 x 2 tiles of 128 rows: bytes of queries and outputs once, of keys and values once for each
    tile, and no other access to global memory than that of the log-sum-exp."""
    batch, heads, tiles, keys, dim = 2, 3, 2, 512, 128
    tensors = qkv(batch, 128 * tiles, keys, heads, heads, dim, dim, torch.bfloat16)
    _, counters = counted("sm_90a", tensors)
    blocks = batch * heads * tiles
    assert counters["wgmma"] == blocks * 2 * (keys // 128) * (dim // 16 + 128 // 16)
    assert counters["tma_load_bytes"] == blocks * (128 * dim * 2 + 2 * keys * dim * 2)
    assert counters["tma_store_bytes"] == blocks * 128 * dim * 2
    assert counters["global_store_bytes"] == blocks * 128 * 4
    assert counters["global_load_bytes"] == 0


@pytest.mark.parametrize("dims", DIMS[:5], ids=str)
def test_no_bank_conflicts(dims: tuple[int, int]) -> None:
    """With queries of four heads in a tile, too, whose outputs do not leave through TMA."""
    for heads, queries in ((2, 130), (4, 20)):
        _, counters = counted("sm_90a", qkv(4, queries, 200, heads, 1, *dims, torch.float16), causal=True)
        assert counters["matrix_wavefronts"] == counters["matrix_ideal_wavefronts"] > 0
        assert counters["shared_wavefronts"] == counters["shared_ideal_wavefronts"]


def test_causal_wastes_no_block_of_keys() -> None:
    """A tile of rows multiplies only blocks of which it sees a key."""
    length, dim = 1024, 128
    _, counters = counted("sm_90a", qkv(1, length, length, 1, 1, dim, dim, torch.bfloat16), causal=True)
    blocks = sum(tile + 1 for tile in range(length // 128))
    assert counters["wgmma"] == blocks * 2 * (dim // 16 + 128 // 16)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 9.0])
def test_rows_of_other_sequences_do_not_matter(poison: float) -> None:
    """TMA reads them together with the last rows of a sequence."""
    tensors = qkv(1, 237, 237, 2, 2, 64, 64, torch.bfloat16)
    with testing.emulated("sm_90a", "lazy", "pct", random.randrange(2**31)):
        clean = cuda_ext.flash_attention_varlen(*(each[0] for each in tensors), BEGINS, BEGINS)
        for own, others in rows_of_others(tensors, poison):
            out = cuda_ext.flash_attention_varlen(*(each[0] for each in others), BEGINS, BEGINS)
            assert torch.equal(out[own], clean[own])


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(lambda q, k, v: (q, k[:, :1].expand(-1, 100, -1, -1), v), id="equal keys"),
        pytest.param(lambda q, k, v: (q, k[:, :0], v[:, :0]), id="no keys"),
    ],
)
def test_falls_back_to_the_other_kernel(tensors: Any) -> None:
    query, key, value = tensors(*qkv(1, 100, 100, 2, 2, 64, 64, torch.bfloat16))
    out, counters = counted("sm_90a", [query, key, value])
    assert counters["wgmma"] == 0
    assert_right(out, [query, key, value])


@pytest.mark.parametrize("views", ["heads expanded", "batch expanded", "packed qkv", "one row"])
def test_reads_views_in_place(views: str) -> None:
    query, key, value = qkv(2, 100, 70, 4, 4, 64, 64, torch.float16)
    if views == "heads expanded":
        key, value = key[:, :, :1].expand(-1, -1, 4, -1), value[:, :, :1].expand(-1, -1, 4, -1)
    elif views == "batch expanded":
        key, value = key[:1].expand(2, -1, -1, -1), value[:1].expand(2, -1, -1, -1)
    elif views == "packed qkv":
        query, key, value = torch.randn(2, 100, 3, 4, 64).half().unbind(2)
    else:
        query = query[:, :1]
    out, counters = counted("sm_90a", [query, key, value])
    assert counters["wgmma"] > 0
    assert_right(out, [query, key, value])


@pytest.mark.sampled(cases=16)
@pytest.mark.parametrize("case", range(400))
def test_random_problems(case: int) -> None:
    tensors, options = random_problem(largest_dim=256)
    out, counters = counted("sm_90a", tensors, **options)
    assert counters["wgmma"] > 0 and counters["mma"] == 0
    assert_right(out, tensors, **options)


def run(tensors: list[Tensor], options: dict[str, Any], **emulation: Any) -> tuple[Tensor, list[Any]]:
    torch.manual_seed(3)  # of dropout
    with testing.emulated("sm_90a", **emulation) as emulated:
        if "cu_seqlens_q" in options:
            out = cuda_ext.flash_attention_varlen(*(each[0] for each in tensors), **options)
        else:
            out = cuda_ext.flash_attention(*tensors, **options)
        return out, emulated.sync_sites


# Sizes, options and numbers of SMs that together reach every synchronisation: several tiles in a block, so that stages
# and the memory of queries are used again; packed heads; split keys; packed sequences.
RACES: list[tuple[tuple[int, ...], dict[str, Any], int]] = [
    ((1, 200, 520, 2, 2, 64, 64), {"causal": True}, 1),
    ((1, 140, 300, 1, 1, 128, 128), {}, 1),
    ((1, 140, 250, 1, 1, 256, 256), {"window": (100, 30)}, 1),
    ((2, 9, 300, 4, 2, 64, 64), {"softcap": 3.0, "dropout_p": 0.3}, 1),
    ((1, 9, 500, 4, 2, 64, 64), {}, 4),
    ((1, 180, 180, 1, 1, 64, 64), {"cu_seqlens_q": PACKING, "cu_seqlens_k": PACKING}, 1),
]


@pytest.mark.sampled(check="races")
@pytest.mark.parametrize(("sizes", "options", "processors"), RACES, ids=str)
def test_no_races(sizes: tuple[int, ...], options: dict[str, Any], processors: int) -> None:
    tensors = qkv(*sizes, torch.bfloat16)  # type: ignore[arg-type]
    seed = random.randrange(2**31)
    expected, _ = run(tensors, options, processors=processors, check_races=True)
    for mode, schedule in (("lazy", "fifo"), ("lazy", "pct"), ("eager", "pct")):
        out, _ = run(tensors, options, processors=processors, mode=mode, schedule=schedule, seed=seed)
        assert torch.equal(out, expected)


# Calls whose removal nothing notices, with the reason.
HARMLESS = {
    "named_barrier_sync(kFirstBarrier + ConsumerThreads::consumer()": "turns make a step faster, not right",
    "ConsumerThreads::sync();  // all warps have read their queries": "a warp overwrites only the rows that its own "
    "products read; PTX does not say that wgmma reads no others",
}


@pytest.mark.sampled(check="races", slow=True)
def test_removal_of_any_synchronisation_is_noticed() -> None:
    def once(*arguments: Any, **emulation: Any) -> tuple[list[Tensor], list[Any]]:
        out, sites = run(*arguments, **emulation)
        return [out], sites

    def is_forward(file: str) -> bool:
        return "_sm90" in file and "_bwd_" not in file and "backward" not in file

    assert_removals_are_noticed(RACES, once, is_forward, HARMLESS)
