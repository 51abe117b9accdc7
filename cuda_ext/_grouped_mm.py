"""Products of groups of rows, each with a matrix of its own, as in the experts of a mixture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_ext._checks import dtype_name, expected, shape_of
from cuda_ext._gemm import gemm
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

__all__ = ["grouped_mm"]

_NAME = f"{NAMESPACE}::grouped_mm"
_grouped_mm = ops.grouped_mm.default


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    indices: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """A product for each group: `torch.nn.functional.grouped_mm`, for any sizes, strides and dtypes of `cuda_ext.gemm`,
    with its activations or a gate in the epilogue.

    Group ``g`` has ``[offs[g - 1], offs[g])`` of a dim of length ``T``, the first from 0 on. Groups may be empty. Four
    forms:

    - ``(T, K)`` and ``(groups, K, N)`` give ``(T, N)``: rows times the matrix of their group. Rows after the last group
      are 0.
    - ``(M, T)`` and ``(T, N)`` give ``(groups, M, N)``: sums over the terms of each group, 0 if it has none. Terms
      after the last group are not used.
    - ``(groups, M, K)`` and ``(K, T)`` give ``(M, T)``: as the first, with rows and columns exchanged.
    - ``(groups, M, K)`` and ``(groups, K, N)`` give ``(groups, M, N)``, without `offs`: as `torch.bmm`.

    The weights of `torch.nn.Linear` layers, ``(groups, N, K)``, are ``weights.mT`` here. On a GPU one kernel
    computes all groups, and the host does not read `offs`; ends that are out of range are cut off, and ends that
    decrease give undefined values in rows of several groups. float64 there is composed of PyTorch's
    products, after a copy of `offs` to the host.

    **Gathered rows.** With `indices` the first form reads row ``indices[t]`` of `mat_a` ``(S, K)``, for any S, where it
    would read row t: it is ``grouped_mm(mat_a[indices], ...)`` without the copy of T rows. The second form reads rows
    of `mat_b` ``(S, N)`` so, and the third columns of `mat_b` ``(K, S)``. Indices may repeat and come in any order. On
    a GPU those out of range give rows of zeros; on a CPU, where those of the groups are checked, they are an error. GPU
    kernels gather float16 and bfloat16; rows of other dtypes are copied first. A CPU copies up to 1,024 rows of a group
    at a time (in the second form all terms of a group). Backward gathers, too: the gradient of `mat_b` is the second
    form. That of `mat_a` is the sum of what was computed for each of its rows, in float32
    (`torch.ops.aten.embedding_dense_backward`): the same bits in each call, unless a compiler replaces that operation
    with one that is not deterministic.

    Differentiable to any order in reverse and forward mode: derivatives are grouped products, too. Rows of no group
    have a gradient of 0. For backward an activation saves what it saves in `cuda_ext.gemm`; a gate the product,
    ``(T, 2N)``.

    Args:
        mat_a, mat_b: float32, float16, bfloat16 or float64, both the same. On a GPU operands whose rows (in the second
            form columns of `mat_a`) are not contiguous are copied.
        offs: ``(groups,)``, int32 or int64: ends, which do not decrease, up to ``T``.
        indices: ``(T,)``, int32 or int64: rows of the operand whose dim of length ``T`` is cut. Default None: 0, 1, ...
        bias: ``(groups, N)``, added to the rows of each group; not in the second and third form. Dtype of `mat_a` or of
            the output.
        out_dtype: float32, float16 or bfloat16; default the dtype of `mat_a`. float64 only for float64 inputs.
        activation: a name that `cuda_ext.gemm` takes, applied after the bias; default none; not in the second form.
            Rows after the last group stay 0.
        gated: in the first and fourth form: `mat_b` is ``(groups, K, 2N)``, the columns of the gate first, and `bias`
            ``(groups, 2N)``; the result, of N columns, is ``activation(gate) * up``, as in `cuda_ext.gated_linear`.

    Returns:
        as above; rounded once from the accumulator, which is float32 (float64 for float64). In the third form
        the transpose is contiguous, else the result.

    Raises:
        RuntimeError: wrong shapes, dtypes or devices; on a CPU also ends that decrease, and ends or indices out of
            range.
        NotImplementedError: CUDA tensors, if no CUDA kernel is built.
    """
    sizes = f"mat_a {shape_of(mat_a)} and mat_b {shape_of(mat_b)}"
    epilogue = {"out_dtype": out_dtype, "activation": activation, "gated": gated}
    if mat_a.dim() == 3 and mat_b.dim() == 3:
        if offs is not None or indices is not None:
            name = "indices" if offs is None else "offs"
            raise RuntimeError(f"{_NAME}: expected no {name} for matrices of all groups, got {sizes}")
        _check_bmm(mat_a, mat_b, bias, gated)
        if gated:
            return _gated_bmm(mat_a, mat_b, bias, epilogue)
        c = None if bias is None else bias.unsqueeze(1)
        return gemm(mat_a, mat_b, c, out_dtype=out_dtype, activation=activation)
    if offs is None:
        raise RuntimeError(f"{_NAME}: expected offs, the ends of the groups, for {sizes}")
    if mat_a.dim() == 3 and mat_b.dim() == 2:
        refused = "no bias" if bias is not None else "gated=False" if gated else ""
        if refused:
            raise RuntimeError(f"{_NAME}: expected {refused} where the groups cut columns, {sizes}")
        return _grouped_mm(mat_b.t(), mat_a.mT, offs, None, indices, **epilogue).t()
    return _grouped_mm(mat_a, mat_b, offs, bias, indices, **epilogue)


def _check_bmm(mat_a: Tensor, mat_b: Tensor, bias: Tensor | None, gated: bool) -> None:
    """Here, because the ops that compute it have other operands."""
    (groups, _, k), columns = mat_a.shape, mat_b.shape[2]
    if mat_b.shape[:2] != (groups, k) or (gated and columns % 2 != 0):
        wanted = f"({groups}, {k}, {'2N), the columns of the gate first,' if gated else 'N)'}"
        raise expected("grouped_mm", f"mat_b of shape {wanted} to match mat_a {shape_of(mat_a)}, got {shape_of(mat_b)}")
    if mat_b.dtype != mat_a.dtype:
        names = dtype_name(mat_a.dtype), dtype_name(mat_b.dtype)
        raise expected(
            "grouped_mm", f"mat_b of dtype {names[0]} to match mat_a, got {names[1]}; convert one with .to()"
        )
    if bias is not None and bias.shape != (groups, columns):
        raise expected("grouped_mm", f"bias of shape ({groups}, {columns}), got {shape_of(bias)}")


def _gated_bmm(mat_a: Tensor, mat_b: Tensor, bias: Tensor | None, epilogue: dict[str, Any]) -> Tensor:
    """Groups of M rows each."""
    groups, m, k = mat_a.shape
    ends = torch.arange(1, groups + 1, device=mat_a.device, dtype=torch.int32) * m
    return _grouped_mm(mat_a.reshape(groups * m, k), mat_b, ends, bias, None, **epilogue).unflatten(0, (groups, m))
