"""FLOP formulas by the usual convention: 2 per multiply-add of the matrix products; epilogues and softmax are not
counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cuda_ext._load import ops

# GEMM family


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


@register_flop_formula([ops.gemm, ops.gemm_forward])
def _gemm_flops(a: Sequence[int], b: Sequence[int], *more: Any, **options: Any) -> int:
    return 2 * _product(torch.broadcast_shapes(a[:-2], b[:-2])) * a[-2] * a[-1] * b[-1]


@register_flop_formula(ops.gemm_backward)
def _gemm_backward_flops(
    grad_out: Sequence[int], a: Sequence[int], b: Sequence[int], *more: Any, output_mask: Sequence[bool], **options: Any
) -> int:
    return sum(output_mask[:2]) * _gemm_flops(a, b)


@register_flop_formula(ops.scaled_grouped_mm)
def _scaled_grouped_mm_flops(a: Sequence[int], b: Sequence[int], *more: Any, **options: Any) -> int:
    # As if each row were in a group: the ends are not known.
    return 2 * a[0] * a[1] * b[-1]


@register_flop_formula([ops.grouped_mm, ops.grouped_mm_forward])
def _grouped_mm_flops(
    a: Sequence[int],
    b: Sequence[int],
    offs: Sequence[int],
    bias: Sequence[int] | None = None,
    indices: Sequence[int] | None = None,
    **options: Any,
) -> int:
    # The same, of rows or terms. As many rows as indices, if those of a are gathered.
    rows = indices[0] if indices is not None and len(b) == 3 else a[0]
    return 2 * rows * a[1] * b[-1]


@register_flop_formula(ops.scaled_mm)
def _scaled_mm_flops(a: Sequence[int], b: Sequence[int], *more: Any, **options: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


@register_flop_formula([ops.linear, ops.linear_forward, ops.gated_linear, ops.gated_linear_forward])
def _linear_flops(input: Sequence[int], weight: Sequence[int], *more: Any, **options: Any) -> int:
    return 2 * _product(input) * weight[0]


@register_flop_formula(ops.linear_backward)
def _linear_backward_flops(
    grad_out: Sequence[int],
    input: Sequence[int],
    weight: Sequence[int],
    *more: Any,
    output_mask: Sequence[bool],
    **options: Any,
) -> int:
    return sum(output_mask[:2]) * _linear_flops(input, weight)


@register_flop_formula([ops.mlp, ops.mlp_forward, ops.gated_mlp, ops.gated_mlp_forward])
def _mlp_flops(input: Sequence[int], weight1: Sequence[int], weight2: Sequence[int], *more: Any, **options: Any) -> int:
    return 2 * _product(input[:-1]) * (_product(weight1) + _product(weight2))


@register_flop_formula(ops.mlp_hidden_backward)
def _mlp_hidden_backward_flops(
    grad_out: Sequence[int], weight2: Sequence[int], *more: Any, output_mask: Sequence[bool], **options: Any
) -> int:
    wants_preact, wants_weight2, wants_bias1, _ = output_mask
    products = wants_weight2 + (wants_preact or wants_weight2 or wants_bias1)
    return 2 * products * _product(grad_out[:-1]) * _product(weight2)


# Losses


@register_flop_formula([ops.logit_statistics, ops.linear_loss])
def _logits_flops(input: Sequence[int], weight: Sequence[int], *more: Any, **options: Any) -> int:
    return 2 * _product(input) * weight[0]


@register_flop_formula(ops.linear_loss_forward)
def _linear_loss_forward_flops(
    input: Sequence[int], weight: Sequence[int], *more: Any, output_mask: Sequence[bool], **options: Any
) -> int:
    return (1 + sum(output_mask[:2])) * _logits_flops(input, weight)


@register_flop_formula(ops.logit_statistics_backward)
def _logit_statistics_backward_flops(
    grad_lse: Any,
    grad_nll: Any,
    grad_dot: Any,
    grad_entropy: Any,
    input: Sequence[int],
    weight: Sequence[int],
    *more: Any,
    output_mask: Sequence[bool],
    **options: Any,
) -> int:
    return (1 + sum(output_mask[:2])) * _logits_flops(input, weight)


# Attention: two products forward and five backward, over the visible scores.


def _visible_scores(seqlen_q: int, seqlen_k: int, causal: bool, left: int | None, right: int | None) -> int:
    def sum_to(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    def scores_before(distance: int) -> int:
        """Scores whose key is less than `distance` right of the diagonal: row i has i + first, clamped to [0, Sk]."""
        first = seqlen_k - seqlen_q + distance
        last = first + seqlen_q - 1
        return sum_to(last) - sum_to(first - 1) - sum_to(last - seqlen_k) + sum_to(first - 1 - seqlen_k)

    if causal:
        right = 0
    to_the_right = seqlen_q * seqlen_k if right is None else scores_before(right + 1)
    return to_the_right - (0 if left is None else scores_before(-left))


def _attention_sizes(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, options: dict[str, Any]
) -> tuple[int, int, int]:
    """(visible scores of all heads, D, Dv). Packed sequences all count as the longest one: a formula must not read
    the lengths, which are data."""
    mask = options.get("causal", False), options.get("window_left"), options.get("window_right")
    if len(query_shape) == 3:
        total_q, heads, dim = query_shape
        seqlen_q = min(options.get("max_seqlen_q") or total_q, total_q)
        seqlen_k = min(options.get("max_seqlen_k") or key_shape[0], key_shape[0])
        scores = heads * _visible_scores(seqlen_q, seqlen_k, *mask) * total_q // max(1, seqlen_q)
    else:
        batch, seqlen_q, heads, dim = query_shape
        scores = batch * heads * _visible_scores(seqlen_q, key_shape[1], *mask)
    return scores, dim, value_shape[-1]


@register_flop_formula([ops.flash_attention, ops.flash_attention_varlen, ops.flash_attention_forward])
def _attention_flops(
    query_shape: torch.Size,
    key_shape: torch.Size,
    value_shape: torch.Size,
    *args: Any,
    out_shape: Any = None,
    **options: Any,
) -> int:
    scores, dim, dim_v = _attention_sizes(query_shape, key_shape, value_shape, options)
    return 2 * scores * (dim + dim_v)


@register_flop_formula(ops.flash_attention_backward)
def _attention_backward_flops(
    grad_out_shape: torch.Size,
    grad_lse_shape: torch.Size | None,
    query_shape: torch.Size,
    key_shape: torch.Size,
    value_shape: torch.Size,
    *args: Any,
    out_shape: Any = None,
    **options: Any,
) -> int:
    scores, dim, dim_v = _attention_sizes(query_shape, key_shape, value_shape, options)
    return 2 * scores * (3 * dim + 2 * dim_v)


def sdpa_flops(
    query_shape: torch.Size,
    key_shape: torch.Size,
    value_shape: torch.Size,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    out_shape: Any = None,
    **options: Any,
) -> int:
    """Of `torch.nn.functional.scaled_dot_product_attention`, query (..., Sq, D), without the scores that is_causal
    hides: it is aligned to the top left."""
    *batch, seqlen_q, dim = query_shape
    seqlen_k = key_shape[-2]
    right = seqlen_q - seqlen_k if is_causal else None  # _visible_scores counts from the bottom right
    scores = _product(batch) * _visible_scores(seqlen_q, seqlen_k, False, None, right)
    return 2 * scores * (dim + value_shape[-1])
