"""What the attention kernels do with a block mask: they visit the listed blocks alone, without races, and read no more
than those. tests/test_attention_block_mask.py tests their results."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_sm90_cases import PACKING, qkv
from torch import Tensor

import cuda_ext
from cuda_ext import BlockMask, testing

DIMS = (64, 96, 128, 256)
BLOCK = 128
# Tiles of the kernels with options: (rows, keys) of forward, (queries, keys) of backward.
FORWARD = {
    "sm_80": {64: (128, 64), 96: (128, 32), 128: (128, 32), 256: (128, 32)},
    "sm_90a": {64: (128, 128), 96: (128, 128), 128: (128, 128), 256: (128, 64)},
}
BACKWARD = {
    "sm_80": {64: (32, 128), 96: (64, 64), 128: (64, 64), 256: (32, 64)},
    "sm_90a": {64: (128, 128), 96: (64, 128), 128: (64, 128)},
}


def random_blocks(queries: int, keys: int, heads: int) -> tuple[BlockMask, Tensor]:
    """A mask of each head, and which blocks it lists, (heads, query blocks, key blocks); some rows list none."""
    listed = torch.rand(heads, -(-queries // BLOCK), -(-keys // BLOCK)) < 0.5
    listed[0, 1] = False
    return BlockMask.blocks(listed[None], BLOCK, queries, keys), listed


def parts(length: int, block: int, rows: int) -> int:
    """The tiles of `rows` that a block has up to the length."""
    return -(-min(BLOCK, length - block * BLOCK) // rows)


def visits(listed: Tensor, queries: int, keys: int, tile: tuple[int, int]) -> int:
    """Pairs of tiles of queries and of keys in the listed blocks."""
    return sum(parts(queries, i, tile[0]) * parts(keys, j, tile[1]) for _, i, j in listed.nonzero().tolist())


def counted(arch: str, tensors: list[Tensor], **options: Any) -> tuple[dict[str, int], dict[str, int]]:
    """The counters of forward, and of backward."""
    leaves = [each.detach().requires_grad_() for each in tensors]
    # One processor, so that no block is divided.
    with testing.emulated(arch, "lazy", "pct", random.randrange(2**31), processors=1) as emulation:
        out = cuda_ext.flash_attention(*leaves, **options)
        forward = dict(emulation.counters)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    return forward, {name: value - forward[name] for name, value in emulation.counters.items()}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("arch", FORWARD)
def test_products_are_those_of_the_listed_blocks(arch: str, dim: int) -> None:
    queries, keys, heads = 300, 520, 2
    mask, listed = random_blocks(queries, keys, heads)
    forward, backward = counted(arch, qkv(1, queries, keys, heads, 1, dim, dim, torch.bfloat16), block_mask=mask)
    rows, columns = FORWARD[arch][dim]
    steps = visits(listed, queries, keys, (rows, columns))
    if arch == "sm_80":
        assert forward["mma"] == steps * 2 * rows * columns * dim // (16 * 8 * 16)
    else:
        assert forward["wgmma"] == steps * 2 * (dim // 16 + columns // 16)
        # Queries of every tile once, keys and values once for each visit.
        tiles = heads * -(-queries // rows)
        assert forward["tma_load_bytes"] == (tiles * rows + 2 * steps * columns) * 2 * -(-dim // 64) * 64
    if dim not in BACKWARD[arch]:
        of_keys, of_queries = (visits(listed, queries, keys, tile) for tile in ((64, 64), (128, 64)))
        assert backward["wgmma"] == of_keys * (2 * dim // 16 + 8) + 2 * of_queries * (2 * dim // 16 + 4)
        return
    rows, columns = BACKWARD[arch][dim]
    steps = visits(listed, queries, keys, (rows, columns))
    if arch == "sm_80":
        assert backward["mma"] == steps * 5 * rows * columns * dim // (16 * 8 * 16)
    else:
        # Scores once more at the end of each block of keys.
        blocks = int(listed.any(0).any(0).sum())
        assert backward["wgmma"] == 2 * (steps * (2 * dim // 16 + 2 * rows // 16 + columns // 16) + blocks * dim // 16)


def test_tiles_outside_the_window_are_left_out() -> None:
    """Also of a list that has them all."""
    size = 4 * BLOCK
    mask = BlockMask.from_dense(torch.ones(size, size, dtype=torch.bool))
    tensors = qkv(1, size, size, 1, 1, 128, 128, torch.bfloat16)
    listed = counted("sm_90a", tensors, block_mask=mask, causal=True)
    plain = counted("sm_90a", tensors, causal=True)
    for phase, other in zip(listed, plain, strict=True):
        assert phase["wgmma"] == other["wgmma"] > 0
        assert phase["tma_load_bytes"] == other["tma_load_bytes"]


def test_bits_are_read_once_for_each_visit_of_a_partial_block() -> None:
    size, dim = 4 * BLOCK, 128
    tensors = qkv(1, size, size, 1, 1, dim, dim, torch.bfloat16)
    full = BlockMask.blocks(torch.ones(4, 4).tril().bool(), BLOCK)
    causal = BlockMask.causal(size, size)
    of_full, of_causal = (counted("sm_90a", tensors, block_mask=mask) for mask in (full, causal))
    # A block has two tiles of queries in backward, and a word bits of both.
    for phase, other, times in zip(of_causal, of_full, (1, 2), strict=True):
        assert phase["wgmma"] == other["wgmma"]
        assert phase["global_load_bytes"] - other["global_load_bytes"] == times * 4 * BLOCK * 16


def test_the_longest_lists_come_first() -> None:
    mask = BlockMask.window_with_global(5 * BLOCK, 10, 3)
    for lists in mask.op_tensors[:2]:
        counts = lists[0, 0, :, 1]
        order = lists[0, 0, :, 0].long()
        assert sorted(order.tolist()) == list(range(5))
        assert counts[order].tolist() == sorted(counts.tolist(), reverse=True)


def lists_of_packed() -> BlockMask:
    return BlockMask.from_dense(torch.rand(2, 1, 110, 110) < 0.5)


RACES = [
    ("sm_80", (1, 200, 300, 2, 1, 64, 64), {}),
    ("sm_80", (1, 200, 300, 2, 2, 256, 256), {}),
    ("sm_90a", (1, 200, 300, 2, 1, 64, 64), {}),
    ("sm_90a", (1, 200, 300, 2, 1, 128, 128), {"causal": True}),
    ("sm_90a", (1, 200, 300, 1, 1, 256, 256), {}),
    ("sm_90a", (1, 180, 180, 2, 1, 64, 64), {"cu_seqlens_q": PACKING, "cu_seqlens_k": PACKING}),
    ("sm_90a", (1, 180, 180, 1, 1, 256, 256), {"cu_seqlens_q": PACKING, "cu_seqlens_k": PACKING}),
]


def results(arch: str, tensors: list[Tensor], mask: BlockMask, options: dict[str, Any], **emulation: Any) -> Any:
    leaves = [each.detach().requires_grad_() for each in tensors]
    options = {"block_mask": mask, "deterministic": True, **options}
    with testing.emulated(arch, **emulation):
        if "cu_seqlens_q" in options:
            longest = {"max_seqlen_q": 110, "max_seqlen_k": 110}
            out = cuda_ext.flash_attention_varlen(*(each[0] for each in leaves), **options, **longest)
        else:
            out = cuda_ext.flash_attention(*leaves, **options)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.sampled(check="races")
@pytest.mark.parametrize(("arch", "sizes", "options"), RACES, ids=str)
def test_no_races_and_the_same_bits(arch: str, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    tensors = qkv(*sizes, torch.bfloat16)  # type: ignore[arg-type]
    packed = "cu_seqlens_q" in options
    mask = lists_of_packed() if packed else BlockMask.from_dense(torch.rand(1, sizes[3], sizes[1], sizes[2]) < 0.5)
    expected = results(arch, tensors, mask, options, check_races=True, ordered_sums=True)
    for mode, schedule in (("lazy", "fifo"), ("lazy", "pct"), ("eager", "pct")):
        seed = random.randrange(2**31)
        again = results(arch, tensors, mask, options, mode=mode, schedule=schedule, seed=seed)
        assert all(map(torch.equal, again, expected))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("arch", FORWARD)
def test_no_bank_conflicts(arch: str, dim: int) -> None:
    mask = BlockMask.from_dense(torch.rand(200, 200) < 0.5)
    for counters in counted(arch, qkv(1, 200, 200, 1, 1, dim, dim, torch.float16), block_mask=mask):
        assert counters["matrix_wavefronts"] == counters["matrix_ideal_wavefronts"] > 0
        assert counters["shared_wavefronts"] == counters["shared_ideal_wavefronts"]
