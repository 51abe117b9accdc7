"""vmap rules of the GEMM family: the mapped dimension becomes another leading or batch dimension, without a copy if the
strides allow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_ext._activations import ACTIVATIONS
from cuda_ext._load import ops
from cuda_ext._rules.gemm_fakes import check_addend
from cuda_ext._toolchain import NAMESPACE

_gemm = ops.gemm.default
_linear = ops.linear.default
_gated_linear = ops.gated_linear.default
_mlp = ops.mlp.default
_gated_mlp = ops.gated_mlp.default

InDims = tuple[int | None, ...]


def _in_front(tensor: Tensor | None, dim: int | None, rank: int) -> Tensor | None:
    """A mapped tensor as (mapped, 1, ..., 1, its own dims), with `rank` dims after the first; others unchanged."""
    if tensor is None or dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    return tensor.reshape(tensor.shape[0], *[1] * (rank - tensor.dim() + 1), *tensor.shape[1:])


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _own_rank(tensor: Tensor | None, dim: int | None) -> int:
    return 0 if tensor is None else tensor.dim() - (dim is not None)


@torch.library.register_vmap(f"{NAMESPACE}::gemm")
def _(
    info: Any,
    in_dims: InDims,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, int]:
    dim_a, dim_b, dim_c, dim_bias = (*in_dims, None, None)[:4]
    rank = max(_own_rank(a, dim_a), _own_rank(b, dim_b))
    a_, b_, c_ = _in_front(a, dim_a, rank), _in_front(b, dim_b, rank), _in_front(c, dim_c, rank)
    assert a_ is not None and b_ is not None
    if dim_a is None and dim_b is None:
        a_ = a_.expand(info.batch_size, *[1] * (rank - a_.dim()), *a_.shape)
    if bias is None or dim_bias is None:
        return _gemm(a_, b_, c_, bias, **options), 0
    row, beta = _in_front(bias, dim_bias, rank), options.pop("beta", 1.0)
    assert row is not None
    if c_ is None or beta == 0.0:
        return _gemm(a_, b_, row, **options), 0
    # c and bias become one addend, in the accumulation dtype so that their sum is not rounded.
    dtype, exact = options.pop("out_dtype", None) or a.dtype, _accumulation_dtype(a)
    check_addend("gemm", "c", c_, a, dtype, c_.shape)
    check_addend("gemm", "bias", row, a, dtype, row.shape)
    addend = torch.add(row.to(exact), c_.to(exact), alpha=beta)
    return _gemm(a_, b_, addend, **options, out_dtype=exact).to(dtype), 0


def _vmap_linear(
    info: Any,
    in_dims: InDims,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[Tensor, int | None]:
    if all(dim is None for dim in in_dims):
        return _linear(input, weight, bias, residual, activation=activation), None
    dim_input, dim_weight, dim_bias, dim_residual = (*in_dims, None, None)[:4]
    rank = _own_rank(input, dim_input)
    input_ = _in_front(input, dim_input, rank)
    assert input_ is not None
    if dim_input is None:
        input_ = input_.expand(info.batch_size, *input_.shape)
    residual_ = _in_front(residual, dim_residual, rank)
    if dim_weight is None and dim_bias is None:
        return _linear(input_, weight, bias, residual_, activation=activation), 0
    weight_ = _in_front(weight, dim_weight, 2)
    assert weight_ is not None
    rows = input_.flatten(1, -2) if rank > 1 else input_.unsqueeze(1)
    bias_ = bias if dim_bias is None else None
    c = None if dim_bias is None else _in_front(bias, dim_bias, 2)
    out_dtype = None if residual_ is None else _accumulation_dtype(input)
    out = _gemm(rows, weight_.mT, c, bias_, activation=activation, out_dtype=out_dtype)
    out = out.reshape(*input_.shape[:-1], out.shape[-1])
    return (out if residual_ is None else (out + residual_).to(input.dtype)), 0


def _vmap_gated_linear(
    info: Any,
    in_dims: InDims,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> tuple[Tensor, int | None]:
    if all(dim is None for dim in in_dims):
        return _gated_linear(input, weight, bias, activation=activation), None
    if all(dim is None for dim in in_dims[1:]):
        return _gated_linear(input.movedim(in_dims[0] or 0, 0), weight, bias, activation=activation), 0

    both, _ = _vmap_linear(info, in_dims, input, weight, bias)
    gate, up = both.chunk(2, dim=-1)
    return ACTIVATIONS[activation].function(gate) * up, 0


def _mlp_vmap(fused: Callable[..., Tensor], first: Callable[..., Any], default: str) -> Callable[..., Any]:
    def rule(
        info: Any,
        in_dims: InDims,
        input: Tensor,
        weight1: Tensor,
        weight2: Tensor,
        bias1: Tensor | None = None,
        bias2: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        activation: str | None = default,
    ) -> tuple[Tensor, int | None]:
        dim_input, dim1, dim2, dim_bias1, dim_bias2, dim_residual = (*in_dims, None, None, None)[:6]
        if dim_input is not None and all(dim is None for dim in (dim1, dim2, dim_bias1, dim_bias2)):
            residual = _in_front(residual, dim_residual, _own_rank(input, dim_input))
            tensors = input.movedim(dim_input, 0), weight1, weight2, bias1, bias2, residual
            return fused(*tensors, activation=activation), 0
        hidden, dim = first(info, (dim_input, dim1, dim_bias1), input, weight1, bias1, activation=activation)
        return _vmap_linear(info, (dim, dim2, dim_bias2, dim_residual), hidden, weight2, bias2, residual)

    return rule


torch.library.register_vmap(f"{NAMESPACE}::linear", _vmap_linear)
torch.library.register_vmap(f"{NAMESPACE}::gated_linear", _vmap_gated_linear)
torch.library.register_vmap(f"{NAMESPACE}::mlp", _mlp_vmap(_mlp, _vmap_linear, "gelu"))
torch.library.register_vmap(f"{NAMESPACE}::gated_mlp", _mlp_vmap(_gated_mlp, _vmap_gated_linear, "silu"))


@torch.library.register_vmap(f"{NAMESPACE}::grouped_mm")
def _(
    info: Any,
    in_dims: InDims,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, int]:
    """One after the other: their groups differ."""
    tensors = list(zip((mat_a, mat_b, offs, bias, indices), (*in_dims, None, None)[:5], strict=True))

    def call(index: int) -> Tensor:
        of_index = [t if t is None or dim is None else t.select(dim, index) for t, dim in tensors]
        return ops.grouped_mm.default(*of_index, **options)

    return torch.stack([call(index) for index in range(info.batch_size)]), 0
