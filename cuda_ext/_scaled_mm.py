"""Products of operands in FP8 with scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import cuda_ext._rules  # noqa: F401
from cuda_ext._checks import check_constants
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

__all__ = ["scaled_grouped_mm", "scaled_mm"]

_NAME = f"{NAMESPACE}::scaled_mm"
_scaled_mm = ops.scaled_mm.default
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALINGS = {"TensorWise": 0, "RowWise": 1, "BlockWise1x128": 4, "BlockWise128x128": 5}


def _only(argument: str, value: Any) -> Any:
    """PyTorch takes lists of scales and scalings, for formats with two levels of scales."""
    if isinstance(value, (list, tuple)):
        if not value and argument.startswith("swizzle"):
            return None
        if len(value) != 1:
            raise RuntimeError(f"{_NAME}: expected one {argument}, got {len(value)}: formats of one level of scales")
        return value[0]
    return value


def scaling_number(scaling: Any, op: str = f"{NAMESPACE}::quantize_fp8", argument: str = "scaling") -> int:
    name = scaling if isinstance(scaling, str) else getattr(scaling, "name", str(scaling))
    if name not in _SCALINGS:
        raise RuntimeError(f"{op}: expected {argument} of {', '.join(_SCALINGS)}, got {scaling!r}")
    return _SCALINGS[name]


def _check_defaults(op: str, swizzle_a: Any, swizzle_b: Any, contraction_dim: Sequence[int]) -> None:
    """Of arguments that PyTorch has for other formats."""
    for argument, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        swizzle = _only(argument, swizzle)
        if swizzle is not None and getattr(swizzle, "name", None) != "NO_SWIZZLE":
            raise RuntimeError(f"{op}: expected no {argument}, got {swizzle!r}")
    if tuple(contraction_dim) not in ((), (1, 0), (-1, -2), (1, -2), (-1, 0)):
        raise RuntimeError(f"{op}: expected contraction_dim () or (1, 0), got {tuple(contraction_dim)}")


def _scaling_numbers(op: str, scale_recipe_a: Any, scale_recipe_b: Any) -> list[int]:
    return [
        scaling_number(_only(argument, scaling), op, argument)
        for argument, scaling in (("scale_recipe_a", scale_recipe_a), ("scale_recipe_b", scale_recipe_b))
    ]


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | Sequence[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | Sequence[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    input: Tensor | None = None,
    beta: float = 1.0,
) -> Tensor:
    """``(scale_a * mat_a) @ (scale_b * mat_b) + bias + beta * input`` of operands in FP8, with the arguments of
    `torch.nn.functional.scaled_mm` in their order, and `input` and `beta` as in `torch.addmm`.

    Products are exact and sums in float32; scales multiply the sum of their block or, on a CPU and if none depends on
    the place along K, that of all terms. Any sizes and strides work, also 0.

    On Hopper, Ada and Blackwell a kernel multiplies on the tensor cores of FP8, which on Hopper keep about 14 bits of a
    sum, and adds each 128 terms, times their scales, to a sum in float32. Operands that are not contiguous along K, or
    whose rows are not aligned to 16 bytes, are copied. On other CUDA devices, and in a library without code for these
    architectures, operands are converted to bfloat16, in which both formats are exact, and multiplied by the kernel of
    `cuda_ext.gemm`: no faster than bfloat16, and with temporary copies.

    Args:
        mat_a: ``(M, K)``, float8_e4m3fn or float8_e5m2.
        mat_b: ``(K, N)``, either format.
        scale_a, scale_b: float32 factors by which the operands are multiplied, of shapes that the scalings ask for.
        scale_recipe_a, scale_recipe_b: a `torch.nn.functional.ScalingType` or its name, any pair of them:
            ``"TensorWise"``, one element; ``"RowWise"``, ``(M, 1)`` and ``(1, N)``; ``"BlockWise1x128"``,
            ``(M, ceil(K / 128))`` and ``(N, ceil(K / 128))``; ``"BlockWise128x128"``,
            ``(ceil(K / 128), ceil(M / 128))`` and ``(ceil(K / 128), ceil(N / 128))``, of which the blocks of K may be
            padded to a multiple of 4. These are PyTorch's shapes; any strides.
        swizzle_a, swizzle_b, contraction_dim: as PyTorch's defaults, for its other formats.
        bias: ``(N,)``, float32, float16 or bfloat16.
        output_dtype: bfloat16 (default), float16 or float32; or a format of FP8, with its largest number at most.
        use_fast_accum: whether the tensor cores of Hopper may keep the sums, with about 14 bits, which is faster: the
            error grows with K, to 1e-3 of a sum of 8192 positive terms. Default False. No effect with scales of blocks,
            and where another kernel runs.
        input: expands to ``(M, N)``; float32, float16 or bfloat16.
        beta: 0 leaves `input` out, including NaN.

    Returns:
        ``(M, N)``, rounded once from the sum.

    Raises:
        RuntimeError: wrong shapes, dtypes, devices or scalings, or a tensor that requires grad: the numbers of FP8 have
            no derivative. `cuda_ext.fp8.linear` has.
        NotImplementedError: CUDA tensors, if no CUDA kernel is built.
    """
    check_constants("scaled_mm", beta=beta)
    _check_defaults(_NAME, swizzle_a, swizzle_b, contraction_dim)
    numbers = _scaling_numbers(_NAME, scale_recipe_a, scale_recipe_b)
    dtype = torch.bfloat16 if output_dtype is None else output_dtype
    # Under dynamic=True Dynamo makes a symbol of the default of beta, which it fails to pass into a second Function.
    addend = () if input is None else (input, beta)
    out: Tensor = _scaled_mm(
        mat_a,
        mat_b,
        _only("scale_a", scale_a),
        numbers[0],
        _only("scale_b", scale_b),
        numbers[1],
        bias,
        *addend,
        output_dtype=torch.float32 if dtype in _FP8 else dtype,
        use_fast_accum=use_fast_accum,
    )
    return out.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype) if dtype in _FP8 else out


def scaled_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | Sequence[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | Sequence[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`scaled_mm` of groups of rows, each with a matrix of its own, or of groups of terms, as `cuda_ext.grouped_mm`;
    with the arguments of `torch.nn.functional.scaled_grouped_mm` in their order.

    Groups may be empty, and the host does not read `offs`. Two forms:

    - ``(T, K)`` and ``(groups, K, N)`` give ``(T, N)``: group ``g`` has the rows ``[offs[g - 1], offs[g])`` of `mat_a`.
      Rows after the last group are 0. Where `scaled_mm` has a kernel on the tensor cores of FP8, so has this form, if
      `mat_b` is float8_e4m3fn and, on Hopper, rows of the output are whole units of 16 bytes. Elsewhere on CUDA
      operands are converted to bfloat16 for `cuda_ext.grouped_mm`.
    - ``(M, T)`` and ``(T, N)`` give ``(groups, M, N)``: sums over the terms ``[offs[g - 1], offs[g])``, 0 without any.
      Terms after the last group are not used. Groups end at multiples of 128, where a sum of FP8 can begin, or at
      ``T``: pad each with zeros, and `cuda_ext.fp8.quantize_both` with ``"BlockWise1x128"`` gives transposes whose
      blocks belong to one group each. A GPU rounds other ends up. On Hopper a kernel on the tensor cores of FP8, with
      the same condition, if both operands are float8_e4m3fn. Elsewhere on CUDA operands times their scales are
      rounded to float32 for `cuda_ext.grouped_mm`.

    Kernels find the groups on the device. Operands that are not contiguous along the sum, or whose lines are not
    aligned to 16 bytes, are copied for them.

    Args:
        mat_a: ``(T, K)`` or ``(M, T)``, float8_e4m3fn or float8_e5m2.
        mat_b: ``(groups, K, N)`` or ``(T, N)``, either format. The weights of linear layers, ``(groups, N, K)``, are
            ``weights.mT``.
        scale_a: ``"TensorWise"``, one element; ``"RowWise"``, ``(T, 1)``; ``"BlockWise1x128"``,
            ``(T, ceil(K / 128))``. With groups of terms those of `scaled_mm`, as `scale_b`.
        scale_b: ``"TensorWise"``, one element, or ``(groups,)``; ``"RowWise"``, ``(groups, N)``;
            ``"BlockWise128x128"``, ``(groups, ceil(K / 128), ceil(N / 128))``.
        scale_recipe_a, scale_recipe_b: a `torch.nn.functional.ScalingType` or its name.
        swizzle_a, swizzle_b, contraction_dim: as PyTorch's defaults, for its other formats.
        bias: ``(groups, N)``, added to the rows of each group; float32, float16 or bfloat16. Not with groups of terms.
        offs: ``(groups,)``, int32 or int64: ends, which do not decrease, up to ``T``.
        output_dtype: bfloat16 (default), float16 or float32.
        use_fast_accum: as `scaled_mm`. No effect with groups of terms.

    Returns:
        ``(T, N)`` or ``(groups, M, N)``, rounded once from a sum in float32.

    Raises:
        RuntimeError: wrong shapes, dtypes, devices or scalings, a tensor that requires grad; on a CPU also ends that
            decrease, are out of range or, of terms, are no multiples of 128.
        NotImplementedError: CUDA tensors, if no CUDA kernel is built.
    """
    op = f"{NAMESPACE}::scaled_grouped_mm"
    _check_defaults(op, swizzle_a, swizzle_b, contraction_dim)
    numbers = _scaling_numbers(op, scale_recipe_a, scale_recipe_b)
    if offs is None:
        raise RuntimeError(f"{op}: expected offs, the ends of the groups, got None; without groups call scaled_mm")
    scales = _only("scale_a", scale_a), _only("scale_b", scale_b)
    dtype = torch.bfloat16 if output_dtype is None else output_dtype
    out: Tensor = ops.scaled_grouped_mm.default(
        mat_a,
        mat_b,
        scales[0],
        numbers[0],
        scales[1],
        numbers[1],
        offs,
        bias,
        output_dtype=dtype,
        use_fast_accum=use_fast_accum,
    )
    return out
