"""flash-attn's names for attention over a cache and for rotary embeddings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kvcache_common import attend, expected, make_cache, rotate
from torch import Tensor

import cuda_ext
from cuda_ext.compat import flash_attn as flash_attn_2
from cuda_ext.compat import flash_attn_interface as flash_attn_3
from cuda_ext.compat.flash_attn.layers import rotary

DTYPE = torch.float32


def test_the_functions_of_both_versions() -> None:
    cache = make_cache([20, 33], 64, 2, 32, 32, DTYPE, page_size=16, new_rows=3)
    q, k, v = (torch.randn(2, 3, heads, 32) for heads in (4, 2, 2))
    angles = torch.rand(64, 8)
    table = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    for interleaved in (False, True):
        options = {"causal": True, "window_size": (9, -1), "softcap": 4.0, "rotary_interleaved": interleaved, **table}
        own = {"causal": True, "window": (9, None), "softcap": 4.0, "rotary_interleaved": interleaved, **table}
        exact, exact_lse = expected(q, cache.clone(), k, v, torch.float64, **own)
        where = {"cache_seqlens": cache.arguments["cache_seqlens"]}
        for function, pages in (
            (flash_attn_2.flash_attn_with_kvcache, "block_table"),
            (flash_attn_3.flash_attn_with_kvcache, "page_table"),
        ):
            ours = cache.clone()
            paged = {**where, pages: cache.arguments["block_table"]}
            out, lse = function(q, ours.keys, ours.values, k, v, **paged, **options, return_softmax_lse=True)
            torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-4)
            assert torch.equal(
                function(q, ours.keys, ours.values, k, v, **paged, **options), out
            )  # again at the same lengths


def test_positions_of_the_third_version() -> None:
    cache = make_cache([20, 33], 64, 2, 32, 32, DTYPE)
    q, k, v = (torch.randn(2, 1, heads, 32) for heads in (4, 2, 2))
    angles, first = torch.rand(100, 16), torch.tensor([70, 2]).int()
    exact, _ = expected(
        *(q, cache.clone(), k, v, torch.float64),
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        rotary_positions=first,
    )
    table = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_seqlens": first}
    out = flash_attn_3.flash_attn_with_kvcache(q, cache.keys, cache.values, k, v, **cache.arguments, **table)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)


def test_rows_without_keys_have_the_lse_of_each_version() -> None:
    cache = make_cache([0, 2], 64, 2, 32, 32, DTYPE)
    q = torch.randn(2, 3, 4, 32)
    arguments = (q, cache.keys, cache.values)
    options = {**cache.arguments, "causal": True, "return_softmax_lse": True}
    out, lse = flash_attn_2.flash_attn_with_kvcache(*arguments, **options)
    assert (lse[0] == math.inf).all() and (lse[1, :, 0] == math.inf).all() and lse[1, :, 1:].isfinite().all()
    assert not out[0].any() and not out[1, 0].any()
    _, lse_3 = flash_attn_3.flash_attn_with_kvcache(*arguments, **options)
    assert torch.equal(lse_3, lse.masked_fill(lse == math.inf, -math.inf))


def test_packed_queries() -> None:
    """Lengths 0, 1 and more, in both versions."""
    lengths, queries = [20, 5, 33, 40], [3, 0, 1, 7]
    cache = make_cache(lengths, 64, 2, 32, 32, DTYPE, page_size=16)
    q = torch.randn(sum(queries), 4, 32)
    cu_seqlens = torch.tensor([0, *torch.tensor(queries).cumsum(0)]).int()
    cu_keys = torch.tensor([0, *torch.tensor(lengths).cumsum(0)]).int()
    table = cache.arguments["block_table"]
    out, lse, _ = flash_attn_2.flash_attn_varlen_func(
        *(q, cache.keys, cache.values, cu_seqlens, cu_keys, 7, 40),
        causal=True,
        block_table=table,
        return_attn_probs=True,
    )
    out_3, lse_3 = flash_attn_3.flash_attn_with_kvcache(
        *(q, cache.keys, cache.values),
        cache_seqlens=cache.arguments["cache_seqlens"],
        page_table=table,
        cu_seqlens_q=cu_seqlens,
        max_seqlen_q=7,
        causal=True,
        return_softmax_lse=True,
    )
    assert torch.equal(out, out_3) and torch.equal(lse, lse_3)
    for b, (first, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        keys, values = (cache.rows_of(tensor, b, lengths[b]) for tensor in (cache.keys, cache.values))
        exact, exact_lse = attend(q[first:end], keys, values, torch.float64, causal=True)
        torch.testing.assert_close(out[first:end].double(), exact, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lse[:, first:end].double(), exact_lse, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("queries", [[3, 0, 1], []])
def test_packed_queries_after_the_last_sequence(queries: list[int]) -> None:
    cache = make_cache([20, 5, 33][: len(queries)], 64, 2, 32, 32, DTYPE, page_size=16)
    q = torch.randn(sum(queries) + 5, 4, 32)
    q[sum(queries) :] = math.nan
    options = {
        "cache_seqlens": cache.arguments["cache_seqlens"],
        "page_table": cache.arguments["block_table"],
        "cu_seqlens_q": torch.tensor([0, *torch.tensor(queries).cumsum(0)]).int(),
        "max_seqlen_q": 3,
        "return_softmax_lse": True,
    }
    out, lse = flash_attn_3.flash_attn_with_kvcache(q, cache.keys, cache.values, **options)
    used, used_lse = flash_attn_3.flash_attn_with_kvcache(q[: sum(queries)], cache.keys, cache.values, **options)
    assert torch.equal(out, F.pad(used, (0, 0, 0, 0, 0, 5)))
    assert torch.equal(lse, F.pad(used_lse, (0, 5), value=-math.inf))


def test_combine() -> None:
    q, k, v = torch.randn(2, 5, 4, 32), torch.randn(2, 60, 4, 32), torch.randn(2, 60, 4, 32)
    whole, lse = cuda_ext.flash_attention(q, k, v, return_lse=True)
    parts = [cuda_ext.flash_attention(q, k[:, at], v[:, at], return_lse=True) for at in (slice(0, 9), slice(9, 60))]
    empty = (torch.full_like(whole, math.nan), torch.full_like(lse, -math.inf))
    outs, lses = (torch.stack(each) for each in zip(*parts, empty))
    out, combined_lse = flash_attn_3.flash_attn_combine(
        outs, lses.transpose(2, 3).contiguous(), out_dtype=torch.bfloat16
    )
    torch.testing.assert_close(out.float(), whole, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(combined_lse, lse.transpose(1, 2))
    into = torch.empty_like(whole)
    assert flash_attn_3.flash_attn_combine(outs, lses.transpose(2, 3), out=into)[0] is into
    torch.testing.assert_close(into, whole)
    with pytest.raises(RuntimeError, match="flash_attn_combine: expected lse_partial of shape"):
        flash_attn_3.flash_attn_combine(outs, lses)


class TestRotary:
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("offset", [0, 3, "tensor"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_values(self, interleaved: bool, offset: int | str, packed: bool) -> None:
        lengths = [4, 9, 0, 2] if packed else [6, 6, 6, 6]
        first = torch.tensor([0, 5, 1, 30]).int() if offset == "tensor" else torch.full((4,), int(offset))
        angles = torch.rand(31, 8)
        x = torch.randn(sum(lengths), 3, 40)
        parts = [
            rotate(part, angles.cos(), angles.sin(), int(first[b]) + torch.arange(len(part)), interleaved)
            for b, part in enumerate(x.split(lengths))
        ]
        offsets = first if offset == "tensor" else int(offset)
        options = {"interleaved": interleaved, "seqlen_offsets": offsets}
        if packed:
            options["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0)]).int()
        else:
            x = x.reshape(4, 6, 3, 40)
        out = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), **options)
        torch.testing.assert_close(out, torch.cat(parts).reshape(x.shape))
        in_place = x.clone()
        assert rotary.apply_rotary_emb(in_place, angles.cos(), angles.sin(), inplace=True, **options) is in_place
        assert torch.equal(in_place, out)

    @pytest.mark.parametrize("offsets", [0, torch.tensor([2, 30]).int()])
    def test_rows_after_the_last_sequence(self, offsets: Any) -> None:
        angles = torch.rand(64, 8)
        x = torch.randn(20, 3, 16)
        options = {"seqlen_offsets": offsets, "cu_seqlens": torch.tensor([0, 4, 13]).int()}
        turned = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), **options)
        used = rotary.apply_rotary_emb(x[:13], angles.cos(), angles.sin(), **options)
        assert torch.equal(turned, torch.cat([used, x[13:]]))

    def test_gradients(self) -> None:
        x = torch.randn(2, 5, 3, 16, dtype=torch.float64, requires_grad=True)
        angles = torch.rand(9, 4, dtype=torch.float64)

        def turned(x: Tensor, inplace: bool) -> Tensor:
            return rotary.apply_rotary_emb(x * 1, angles.cos(), angles.sin(), inplace=inplace, seqlen_offsets=2)

        grad = torch.randn(2, 5, 3, 16, dtype=torch.float64)
        backward = [torch.autograd.grad(turned(x, inplace), x, grad)[0] for inplace in (False, True)]
        assert torch.equal(*backward)
        # The transpose of a rotation is the rotation back.
        back = rotary.apply_rotary_emb(grad, angles.cos(), -angles.sin(), seqlen_offsets=2)
        torch.testing.assert_close(backward[0], back, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("scale_base", [None, 512.0])
    def test_the_module(self, scale_base: float | None) -> None:
        module = rotary.RotaryEmbedding(16, scale_base=scale_base)
        qkv = torch.randn(2, 7, 3, 4, 32)
        turned = module(qkv.clone(), seqlen_offset=2)
        tables = module.tables(9, qkv)
        exact = [rotary.apply_rotary_emb(qkv[:, :, n], *tables[-2 * n :][:2], seqlen_offsets=2) for n in (0, 1)]
        torch.testing.assert_close(turned, torch.stack([exact[0], exact[1], qkv[:, :, 2]], 2))
        heads = torch.cat(list(qkv.unbind(2)), 2)
        both = module(heads.clone(), seqlen_offset=2, num_heads_q=4)
        torch.testing.assert_close(both, torch.cat(list(turned.unbind(2)), 2))
        query, kv = module(
            qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=torch.tensor([2, 2]), max_seqlen=9
        )
        torch.testing.assert_close(torch.cat([query.unsqueeze(2), kv], 2), turned)
        assert len(module.state_dict()) == 0
