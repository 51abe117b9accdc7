"""Fake kernels and vmap rules of the passes between the products of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext._activations import ACTIVATIONS
from cuda_ext._checks import check, check_floating, check_same_device, check_shape, shape_of
from cuda_ext._rules.fp8_vmap import register_one_by_one
from cuda_ext._toolchain import NAMESPACE


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@torch.library.register_fake(f"{NAMESPACE}::combine_experts")
def _(results: Tensor, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    op = "combine_experts"
    check_floating(op, "results", results)
    check_same_device(op, "results", results, rows=rows, weights=weights)
    check(results.dim() == 2, op, f"expected results of two dims, got {shape_of(results)}")
    indices = f"expected rows of 2 dims and dtype int64, got {shape_of(rows)} of {rows.dtype}"
    check(rows.dim() == 2 and rows.dtype == torch.int64, op, indices)
    if weights is not None:
        check_floating(op, "weights", weights)
        check_shape(op, "weights", weights, rows.shape, " to match rows")
    return results.new_empty(rows.shape[0], results.shape[1])


@torch.library.register_fake(f"{NAMESPACE}::experts_gate_backward")
def _(
    grad_hidden: Tensor,
    product: Tensor,
    weights: Tensor,
    pairs: Tensor,
    *,
    activation: str | None,
    gated: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    op = "experts_gate_backward"
    for name, tensor in (("product", product), ("grad_hidden", grad_hidden), ("weights", weights)):
        check_floating(op, name, tensor)
    check(grad_hidden.dim() == 2, op, f"expected grad_hidden of two dims, got {shape_of(grad_hidden)}")
    check_same_device(op, "grad_hidden", grad_hidden, product=product, weights=weights, pairs=pairs)
    check(activation in ACTIVATIONS, op, f"expected an activation by name or None, got {activation!r}")
    rows, n = grad_hidden.shape
    check_shape(op, "product", product, [rows, n * (1 + gated)])
    check_shape(op, "pairs", pairs, [rows])
    check(weights.numel() == rows, op, f"expected weights of {rows} elements, got {shape_of(weights)}")
    return (
        product.new_empty(product.shape if output_mask[0] else (0,)),
        product.new_empty(grad_hidden.shape if output_mask[1] else (0,)),
        weights.new_empty(weights.shape if output_mask[2] else (0,), dtype=_sum_dtype(product)),
    )


@torch.library.register_fake(f"{NAMESPACE}::gather_fp8")
def _(rows: Tensor, index: Tensor) -> Tensor:
    op = "gather_fp8"
    check(rows.dim() == 2, op, f"expected rows of two dims, got {shape_of(rows)}")
    check_same_device(op, "rows", rows, index=index)
    return rows.new_empty(index.shape[0], rows.shape[1])


register_one_by_one("combine_experts")
register_one_by_one("gather_fp8")
register_one_by_one("experts_gate_backward")
