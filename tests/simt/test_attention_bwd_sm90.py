"""What attention backward on wgmma has that the other kernels do not. tests/test_attention_cuda.py runs it as well: an
emulated device is of either architecture there."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from attention_sm90_cases import (
    BEGINS,
    PACKING,
    Sizes,
    assert_removals_are_noticed,
    qkv,
    random_problem,
    rows_of_others,
)
from torch import Tensor

import cuda_ext
from cuda_ext import testing
from cuda_ext.testing import reference_attention

# Those of the tiles, of which the last two have a kernel for dQ; then others.
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (80, 40), (8, 128), (8, 160), (200, 136))


def forward(tensors: list[Tensor], options: dict[str, Any]) -> Tensor:
    if "cu_seqlens_q" in options:
        return cuda_ext.flash_attention_varlen(*(each[0] for each in tensors), **options)
    return cuda_ext.flash_attention(*tensors, **options)


def gradients(
    tensors: list[Tensor], options: dict[str, Any], grad_out: Tensor | None = None, **emulation: Any
) -> tuple[list[Tensor], dict[str, int], list[Any]]:
    """The gradients of query, key and value, and the counters and synchronisation calls of their backward. Forward runs
    with none of the options of the emulator."""
    leaves = [each.detach().requires_grad_() for each in tensors]
    torch.manual_seed(3)  # of dropout
    with testing.emulated("sm_90a"):
        out = forward(leaves, options)
    grad_out = torch.ones_like(out) if grad_out is None else grad_out
    with testing.emulated("sm_90a", **emulation) as emulated:
        return list(torch.autograd.grad(out, leaves, grad_out)), emulated.counters, emulated.sync_sites


def assert_right(tensors: list[Tensor], options: dict[str, Any], **emulation: Any) -> dict[str, int]:
    """The errors are at most twice those of plain PyTorch in the dtype of the tensors or of flash attention in float64.

    Flash attention computes the sums of dO * O from the rounded O, and a gradient of the scores is a difference from
    them: with a few keys, it cancels. An error d of the sums has the effect of a gradient -d of the lse.
    """
    meaning = {name: options[name] for name in options if name != "deterministic"}
    dtype = tensors[0].dtype
    grad_out = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1]).to(dtype)

    def of_reference(evaluated_in: torch.dtype, rounds_out: bool = False) -> list[Tensor]:
        leaves = [each.detach().to(evaluated_in).requires_grad_() for each in tensors]
        out, lse = reference_attention(*leaves, **meaning, return_lse=True)
        error = (grad_out * (out.to(dtype) - out)).sum(-1).transpose(1, 2) if rounds_out else torch.zeros_like(lse)
        gradients = torch.autograd.grad([out, lse], leaves, [grad_out.to(evaluated_in), -error.detach()])
        return [each.double() for each in gradients]

    ours, counters, _ = gradients(tensors, options, grad_out, **emulation)
    exact = of_reference(torch.float64)
    errors = [
        [(x.double() - y).abs().max() for x, y in zip(each, exact, strict=True)]
        for each in (ours, of_reference(dtype), of_reference(torch.float64, rounds_out=True))
    ]
    for error, plain, flash, gradient in zip(*errors, exact, strict=True):
        # A gradient that is exactly 0, as that of a query with one key, is a difference of float32 sums of up to 256
        # products of about 1, multiplied by up to 400 keys or queries.
        assert error <= 2 * max(plain, flash) + 2 * torch.finfo(dtype).eps * gradient.abs().max() + 2e-4
    return counters


def lazily() -> dict[str, Any]:
    return {"mode": "lazy", "schedule": "pct", "seed": random.randrange(2**31)}


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_runs_where_it_can(dims: tuple[int, int], causal: bool) -> None:
    tensors = qkv(2, random.randint(1, 300), random.randint(1, 300), 2, 1, *dims, torch.bfloat16)
    counters = assert_right(tensors, {"causal": causal}, **lazily())
    assert counters["wgmma"] > 0 and counters["tma_load_bytes"] > 0 and counters["mma"] == 0


@pytest.mark.parametrize("dim", [64, 128])
def test_products_and_bytes_are_those_that_are_needed(dim: int) -> None:
    """Full attention: the products of a step and, for each block, those of the scores after its last step, which are
    not used. Bytes of keys and values once, of queries and output gradients once for each block of keys, and of the
    sums of dQ likewise."""
    batch, heads, queries, keys = 2, 3, 256, 512
    tensors = qkv(batch, queries, keys, heads, heads, dim, dim, torch.bfloat16)
    _, counters, _ = gradients(tensors, {})
    block_m, block_n = {64: (128, 128), 128: (64, 128)}[dim]
    blocks, steps = batch * heads * keys // block_n, queries // block_m
    scores, grad_keys, grad_query = dim // 16, block_m // 16, block_n // 16
    assert counters["wgmma"] == 2 * blocks * (steps * (2 * scores + 2 * grad_keys + grad_query) + scores)
    rows = 2 * queries * dim * 2 + 2 * queries * 4  # Q and dO, lse and delta
    assert counters["tma_load_bytes"] == blocks * (2 * block_n * dim * 2 + rows)
    stored = 2 * block_n * dim * 2 + queries * dim * 4
    assert counters["tma_store_bytes"] == blocks * stored


@pytest.mark.parametrize("dims", DIMS[3:5], ids=str)
def test_products_and_bytes_with_a_kernel_for_dq(dims: tuple[int, int]) -> None:
    """The first kernel reads keys and values once, and queries and output gradients for each block of keys; the second
    the opposite. Nothing is added in memory."""
    batch, heads, queries, keys = 2, 3, 256, 512
    tensors = qkv(batch, queries, keys, heads, heads, *dims, torch.bfloat16)
    _, counters, _ = gradients(tensors, {}, processors=1)
    scores, width = sum(dims) // 16, 2 * sum(dims)  # bytes of a row of both
    pairs, tiles = batch * heads, (keys // 64) * (queries // 64)
    of_keys = tiles * (scores + 2 * 4)
    of_queries = tiles * (scores + 4)
    assert counters["wgmma"] == pairs * (of_keys + of_queries)
    rows = queries * (width + 2 * 4)  # Q and dO, lse and delta
    loaded_by_keys = keys * width + keys // 64 * rows
    loaded_by_queries = queries * width + queries // 128 * keys * width
    assert counters["tma_load_bytes"] == pairs * (loaded_by_keys + loaded_by_queries)
    assert counters["tma_store_bytes"] == pairs * (keys * width + queries * 2 * dims[0])
    assert counters["atomic"] == 0


@pytest.mark.parametrize("dims", DIMS[:5], ids=str)
def test_no_bank_conflicts(dims: tuple[int, int]) -> None:
    for options in ({"causal": True}, {"softcap": 4.0}):
        _, counters, _ = gradients(qkv(1, 200, 200, 2, 1, *dims, torch.float16), options)
        assert counters["matrix_wavefronts"] == counters["matrix_ideal_wavefronts"] > 0
        assert counters["shared_wavefronts"] == counters["shared_ideal_wavefronts"]


@pytest.mark.parametrize("dim", [64, 128])
def test_causal_wastes_no_tile_of_queries(dim: int) -> None:
    """A block of keys multiplies only tiles of queries that see one of its keys."""
    length = 1024
    _, counters, _ = gradients(qkv(1, length, length, 1, 1, dim, dim, torch.bfloat16), {"causal": True}, processors=1)
    block_m = {64: 128, 128: 64}[dim]
    blocks = length // 128
    steps = sum((length - 128 * block) // block_m for block in range(blocks))
    assert counters["wgmma"] == 2 * (steps * (2 * dim // 16 + 2 * block_m // 16 + 8) + blocks * dim // 16)


def test_causal_wastes_no_tile_with_a_kernel_for_dq() -> None:
    length, dim = 512, 256
    _, counters, _ = gradients(qkv(1, length, length, 1, 1, dim, dim, torch.bfloat16), {"causal": True}, processors=1)
    of_keys = sum((length - key) // 64 for key in range(0, length, 64))
    of_queries = sum((query + 128) // 64 for query in range(0, length, 128))
    assert counters["wgmma"] == of_keys * (2 * dim // 16 + 8) + 2 * of_queries * (2 * dim // 16 + 4)


@pytest.mark.sampled(check="races", slow=True)
@pytest.mark.parametrize("dims", DIMS[:5], ids=str)
def test_deterministic(dims: tuple[int, int]) -> None:
    tensors = qkv(1, *((300, 500, 4, 2) if dims[0] <= 128 else (150, 200, 2, 1)), *dims, torch.bfloat16)
    options = {"causal": True, "deterministic": True}
    expected, _, _ = gradients(tensors, options)
    for _ in range(3):
        again, counters, _ = gradients(tensors, options, **lazily(), check_races=True, ordered_sums=True)
        assert counters["wgmma"] > 0 and all(map(torch.equal, again, expected))
    assert_right(tensors, options)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 9.0])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_of_other_sequences_do_not_matter(poison: float, dim: int) -> None:
    """TMA reads them together with the last rows of a sequence."""
    tensors = qkv(1, 237, 237, 2, 2, dim, dim, torch.bfloat16)
    options = {"cu_seqlens_q": BEGINS, "cu_seqlens_k": BEGINS, "deterministic": True}
    grad_out = torch.randn_like(tensors[0][0])
    clean, _, _ = gradients(tensors, options, grad_out)
    for own, others in rows_of_others([*tensors, grad_out[None]], poison):
        dirty, counters, _ = gradients(others[:3], options, others[3][0], **lazily())
        assert counters["wgmma"] > 0
        assert all(torch.equal(x[:, own], y[:, own]) for x, y in zip(dirty, clean, strict=True))


def test_falls_back_with_an_expanded_gradient_of_the_output() -> None:
    tensors = qkv(1, 50, 70, 2, 2, 64, 64, torch.float16)
    ones, _, _ = gradients(tensors, {}, torch.ones(1, 50, 2, 64).half())
    expanded, _, _ = gradients(tensors, {}, torch.ones(1).half().expand(1, 50, 2, 64), **lazily())
    for x, y in zip(ones, expanded, strict=True):
        torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-2)


@pytest.mark.sampled(cases=12)
@pytest.mark.parametrize("case", range(400))
def test_random_problems(case: int) -> None:
    tensors, options = random_problem(largest_dim=random.choice((128, 256)))
    options["deterministic"] = random.random() < 0.3
    counters = assert_right(tensors, options, **lazily())
    assert counters["wgmma"] > 0 and counters["mma"] == 0


# Sizes, options and numbers of SMs that together reach every synchronisation; the fastest first.
RACES: list[tuple[Sizes, dict[str, Any], int]] = [
    ((1, 130, 70, 1, 1, 136, 8), {"softcap": 3.0, "dropout_p": 0.3}, 1),
    ((1, 180, 180, 1, 1, 136, 8), {"cu_seqlens_q": PACKING, "cu_seqlens_k": PACKING}, 1),
    ((1, 300, 64, 1, 1, 136, 8), {}, 8),
    ((1, 200, 200, 1, 1, 136, 136), {"causal": True}, 1),
    ((1, 180, 180, 1, 1, 64, 64), {"cu_seqlens_q": PACKING, "cu_seqlens_k": PACKING, "deterministic": True}, 1),
    ((1, 130, 140, 2, 2, 64, 64), {"softcap": 3.0, "dropout_p": 0.3, "deterministic": True}, 1),
    ((1, 500, 100, 2, 2, 64, 64), {"deterministic": True}, 8),
    ((1, 300, 200, 2, 2, 64, 64), {"causal": True, "deterministic": True}, 1),
    ((1, 200, 300, 2, 1, 128, 128), {"deterministic": True}, 1),
]


@pytest.mark.sampled(check="races")
@pytest.mark.parametrize(("sizes", "options", "processors"), RACES, ids=str)
def test_no_races(sizes: Sizes, options: dict[str, Any], processors: int) -> None:
    tensors = qkv(*sizes, torch.bfloat16)  # type: ignore[arg-type]
    expected, _, _ = gradients(tensors, options, processors=processors, check_races=True, ordered_sums=True)
    for mode, schedule in (("lazy", "fifo"), ("lazy", "pct"), ("eager", "pct")):
        how = {"mode": mode, "schedule": schedule, "seed": random.randrange(2**31), "processors": processors}
        assert all(map(torch.equal, gradients(tensors, options, **how)[0], expected))


# Calls whose removal nothing notices, with the reason.
HARMLESS = {
    f"arch::wgmma_wait<0>(registers_of({gradient}));": "no product is in flight; it tells the compiler that "
    "the registers have changed"
    for gradient in ("grad_value", "grad_key")
} | {
    "barrier_wait(shared.q_full[stage], step / Kernel::kStages % 2);": "the other consumer has waited for it before it "
    "hands over probs; PTX promises what TMA has written only to threads that wait",
    "ConsumerThreads::sync();  // all warps have read their queries": "a warp overwrites only the rows that its own "
    "products read; PTX does not say that wgmma reads no others",
}


@pytest.mark.sampled(check="races", slow=True)
def test_removal_of_any_synchronisation_is_noticed() -> None:
    def once(*arguments: Any, **emulation: Any) -> tuple[list[Tensor], list[Any]]:
        results, _, sites = gradients(*arguments, ordered_sums=emulation.get("check_races", False), **emulation)
        return results, sites

    def is_backward(file: str) -> bool:
        return "sm90" in file and ("_bwd_" in file or "backward_" in file)

    assert_removals_are_noticed(RACES, once, is_backward, HARMLESS)
