"""Attention in parts, merged, against attention in one piece."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import cuda_ext


def inputs(dtype: torch.dtype = torch.float64, heads_kv: int = 2) -> list[Tensor]:
    shapes = ((2, 7, 4, 16), (2, 50, heads_kv, 16), (2, 50, heads_kv, 24))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def in_parts(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[int, ...], sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = cuda_ext.flash_attention(q, k[:, : ends[0]], v[:, : ends[0]], sinks=sinks, return_lse=True)
    for begin, end in itertools.pairwise((*ends, k.shape[1])):
        part = cuda_ext.flash_attention(q, k[:, begin:end], v[:, begin:end], return_lse=True)
        out, lse = cuda_ext.merge_attention(out, lse, *part)
    return out, lse


@pytest.mark.parametrize("ends", [(20,), (0,), (50,), (3, 3, 31)], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_values_and_gradients(ends: tuple[int, ...], with_sinks: bool) -> None:
    tensors = inputs()
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    whole = cuda_ext.flash_attention(*tensors, sinks=sinks, return_lse=True)
    merged = in_parts(*tensors, ends, sinks)
    torch.testing.assert_close(merged, whole)
    leaves = [*tensors, *([sinks] if sinks is not None else [])]
    grads = [torch.randn_like(each) for each in whole]
    torch.testing.assert_close(torch.autograd.grad(merged, leaves, grads), torch.autograd.grad(whole, leaves, grads))


def test_a_prefix_that_sequences_share() -> None:
    """Cascade: all queries attend to the prefix as one sequence, then each to its own suffix, causally."""
    q, k, v = inputs(torch.float32)
    prefix = 30
    queries = q.reshape(1, -1, 4, 16)
    whole_k, whole_v = (torch.cat([x[:1, :prefix].expand(2, -1, -1, -1), x[:, prefix:]], 1) for x in (k, v))
    out, lse = cuda_ext.flash_attention(queries, k[:1, :prefix], v[:1, :prefix], return_lse=True)
    shared = out.reshape(2, 7, 4, 24), lse.reshape(4, 2, 7).transpose(0, 1)
    own = cuda_ext.flash_attention(q, k[:, prefix:], v[:, prefix:], causal=True, return_lse=True)
    whole = cuda_ext.flash_attention(q, whole_k, whole_v, causal=True, return_lse=True)
    torch.testing.assert_close(cuda_ext.merge_attention(*shared, *own), whole, atol=1e-5, rtol=1e-5)


def test_rows_without_keys() -> None:
    out = torch.randn(1, 3, 2, 8, requires_grad=True)
    lse = torch.tensor([-math.inf, 0.0, 1.0]).expand(1, 2, 3).clone().requires_grad_()
    nothing = torch.zeros_like(out, requires_grad=True), torch.full_like(lse, -math.inf).requires_grad_()
    merged, merged_lse = cuda_ext.merge_attention(out, lse, *nothing)
    assert not merged[:, 0].any() and torch.equal(merged[:, 1:], out[:, 1:]) and torch.equal(merged_lse, lse)
    leaves = (out, lse, *nothing)
    grads = torch.autograd.grad((merged.sum(), merged_lse[..., 1:].sum()), leaves)
    assert not any(grad.isnan().any() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_packed_in_half_precision(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(rows, 2, 32).to(dtype) for rows in (9, 40, 40))
    cu_q, cu_k = torch.tensor([0, 4, 9]).int(), torch.tensor([0, 20, 40]).int()
    halves = [torch.cat([torch.arange(begin, begin + 10), torch.arange(begin + 20, begin + 30)]) for begin in (0, 10)]
    parts = [cuda_ext.flash_attention_varlen(q, k[rows], v[rows], cu_q, cu_k // 2, return_lse=True) for rows in halves]
    merged = cuda_ext.merge_attention(*parts[0], *parts[1])
    whole = cuda_ext.flash_attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    assert merged[0].dtype == dtype and merged[1].dtype == torch.float32
    torch.testing.assert_close(merged, whole, atol=1e-2, rtol=1e-2)


@pytest.mark.sampled
def test_compiled_and_transformed() -> None:
    q, k, v = inputs()
    parts = [cuda_ext.flash_attention(q, k[:, at], v[:, at], return_lse=True) for at in (slice(0, 9), slice(9, 50))]
    flat = [tensor.detach().requires_grad_() for part in parts for tensor in part]
    assert torch.autograd.gradcheck(cuda_ext.merge_attention, flat)
    torch.testing.assert_close(
        torch.compile(cuda_ext.merge_attention, fullgraph=True)(*flat), cuda_ext.merge_attention(*flat)
    )
    torch.testing.assert_close(torch.func.vmap(cuda_ext.merge_attention)(*flat), cuda_ext.merge_attention(*flat))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out_b": torch.zeros(1, 3, 2, 9)}, "expected out_b of shape"),
        ({"lse_b": torch.zeros(1, 3, 2)}, "expected lse_b of shape"),
        ({"lse_a": torch.zeros(1, 3, 2), "lse_b": torch.zeros(1, 3, 2)}, "expected lse_a of shape"),
        ({"out_b": torch.zeros(1, 3, 2, 8).double()}, "expected out_b of dtype"),
    ],
)
def test_bad_input(changed: dict[str, Tensor], message: str) -> None:
    arguments = {"out_a": torch.zeros(1, 3, 2, 8), "lse_a": torch.zeros(1, 2, 3)}
    arguments |= {"out_b": arguments["out_a"], "lse_b": arguments["lse_a"]}
    with pytest.raises(RuntimeError, match=f"merge_attention: {message}"):
        cuda_ext.merge_attention(**{**arguments, **changed})
