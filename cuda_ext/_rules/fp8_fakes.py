"""Fake kernels of the ops for FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_ext._checks import check, check_floating, check_same_device, dtype_name, shape_of
from cuda_ext._rules.gemm_fakes import _check_activation
from cuda_ext._toolchain import NAMESPACE

_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)
_BLOCK = 128
_SCALINGS = TENSORWISE, ROWWISE, BLOCKWISE_1X128, BLOCKWISE_128X128 = 0, 1, 4, 5  # ScalingType of PyTorch
BY_ROWS = ROWWISE, BLOCKWISE_1X128  # whose scales are each of one row
_ALIGNMENT = 16  # bytes, of the lines of quantised matrices


def _blocks(size: Any) -> Any:
    return (size + _BLOCK - 1) // _BLOCK


def _check_scales(op: str, argument: str, scales: Tensor, scaling: int, operand: Tensor, is_b: bool) -> None:
    check(
        scales.dtype == torch.float32,
        op,
        f"expected {argument} of dtype float32, got {dtype_name(scales.dtype)}; convert it with .float()",
    )
    k, lines = operand.shape if is_b else operand.shape[::-1]
    shapes: dict[int, tuple[str, tuple[Any, ...]]] = {
        TENSORWISE: ("TensorWise", (1, 1)),
        ROWWISE: ("RowWise", (1, lines) if is_b else (lines, 1)),
        BLOCKWISE_1X128: ("BlockWise1x128", (lines, _blocks(k))),
        BLOCKWISE_128X128: ("BlockWise128x128", (_blocks(k), _blocks(lines))),
    }
    check(
        scaling in _SCALINGS,
        op,
        f"expected scaling TensorWise, RowWise, BlockWise1x128 or BlockWise128x128 for {argument}, got number "
        f"{scaling} of torch.nn.functional.ScalingType",
    )
    scaling_name, expected = shapes[scaling]
    if scaling == TENSORWISE:
        got = f"expected {argument} of one element for scaling TensorWise, got {shape_of(scales)}"
        check(scales.numel() == 1, op, got)
        return
    where = f"{'mat_b' if is_b else 'mat_a'} {shape_of(operand)} with scaling {scaling_name}"
    message = f"expected {argument} of shape {expected} for {where}, got {shape_of(scales)}"
    if scaling == ROWWISE:
        check(scales.numel() == lines, op, message)
        return
    check(scales.dim() == 2, op, message)
    check(scales.shape[1] == expected[1], op, message)
    if scaling == BLOCKWISE_128X128 and scales.shape[0] != expected[0]:  # PyTorch pads them
        check(scales.shape[0] == (expected[0] + 3) // 4 * 4, op, message)
    else:
        check(scales.shape[0] == expected[0], op, message)


@torch.library.register_fake(f"{NAMESPACE}::scaled_mm")
def _(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scaling_a: int,
    scale_b: Tensor,
    scaling_b: int,
    bias: Tensor | None = None,
    input: Tensor | None = None,
    beta: float = 1.0,
    *,
    output_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    op = "scaled_mm"
    for name, operand in (("mat_a", mat_a), ("mat_b", mat_b)):
        check(
            operand.dim() == 2 and operand.dtype in _FORMATS,
            op,
            f"expected {name} of two dims and dtype float8_e4m3fn or float8_e5m2, got {shape_of(operand)} of "
            f"{dtype_name(operand.dtype)}; convert it with cuda_ext.fp8.quantize",
        )
    check_same_device(op, "mat_a", mat_a, mat_b=mat_b, scale_a=scale_a, scale_b=scale_b, bias=bias, input=input)
    check(
        mat_a.shape[1] == mat_b.shape[0],
        op,
        f"expected mat_b of shape ({mat_a.shape[1]}, N) to match mat_a {shape_of(mat_a)}, got {shape_of(mat_b)}",
    )
    check(
        output_dtype in _OUTPUTS,
        op,
        f"expected output_dtype float32, float16 or bfloat16, got {dtype_name(output_dtype)}",
    )
    _check_scales(op, "scale_a", scale_a, scaling_a, mat_a, False)
    _check_scales(op, "scale_b", scale_b, scaling_b, mat_b, True)
    size = (mat_a.shape[0], mat_b.shape[1])
    if bias is not None:
        check(
            bias.dim() == 1 and bias.shape[0] == size[1] and bias.dtype in _OUTPUTS,
            op,
            f"expected bias of shape ({size[1]},) and dtype float32, float16 or bfloat16, got {shape_of(bias)} of "
            f"{dtype_name(bias.dtype)}",
        )
    if input is not None:
        check(
            input.dtype in _OUTPUTS,
            op,
            f"expected input of dtype float32, float16 or bfloat16, got {dtype_name(input.dtype)}",
        )
        input.expand(size)
    return mat_a.new_empty(size, dtype=output_dtype)


@torch.library.register_fake(f"{NAMESPACE}::scaled_grouped_mm")
def _(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scaling_a: int,
    scale_b: Tensor,
    scaling_b: int,
    offs: Tensor,
    bias: Tensor | None = None,
    *,
    output_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    op = "scaled_grouped_mm"
    check(
        mat_a.dim() == 2 and mat_a.dtype in _FORMATS,
        op,
        f"expected mat_a of two dims and dtype float8_e4m3fn or float8_e5m2, got {shape_of(mat_a)} of "
        f"{dtype_name(mat_a.dtype)}; convert it with cuda_ext.fp8.quantize",
    )
    of_terms = mat_b.dim() == 2
    check(
        mat_b.dim() in (2, 3) and mat_b.dtype in _FORMATS and mat_b.shape[-2] == mat_a.shape[1],
        op,
        f"expected mat_b of shape ({'' if of_terms else 'groups, '}{mat_a.shape[1]}, N) and of FP8 to match mat_a "
        f"{shape_of(mat_a)}, got {shape_of(mat_b)} of {dtype_name(mat_b.dtype)}",
    )
    check_same_device(op, "mat_a", mat_a, mat_b=mat_b, scale_a=scale_a, scale_b=scale_b, offs=offs, bias=bias)
    check(
        output_dtype in _OUTPUTS,
        op,
        f"expected output_dtype float32, float16 or bfloat16, got {dtype_name(output_dtype)}",
    )
    if not of_terms:
        return mat_a.new_empty((mat_a.shape[0], mat_b.shape[2]), dtype=output_dtype)
    check(bias is None, op, "expected no bias where the groups cut the terms of a sum")
    _check_scales(op, "scale_a", scale_a, scaling_a, mat_a, False)
    _check_scales(op, "scale_b", scale_b, scaling_b, mat_b, True)
    return mat_a.new_empty((offs.shape[0], mat_a.shape[0], mat_b.shape[1]), dtype=output_dtype)


def _quantized(input: Tensor, lines: Any, elements: Any, dtype: torch.dtype, scaling: int) -> tuple[Tensor, Tensor]:
    pitch = (elements + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    data = input.new_empty((lines, pitch), dtype=dtype).narrow(1, 0, elements)
    transposed = {
        TENSORWISE: (1, 1),
        ROWWISE: (1, lines),
        BLOCKWISE_1X128: (_blocks(elements), lines),
        BLOCKWISE_128X128: (_blocks(lines), _blocks(elements)),
    }[scaling]
    scales = input.new_empty(transposed, dtype=torch.float32)
    return data, scales.view(lines, 1) if scaling == ROWWISE else scales.t()


def _check_quantize(input: Tensor, dtype: torch.dtype, scaling: int) -> None:
    op = "quantize_fp8"
    check_floating(op, "input", input)
    check(
        input.dim() == 2 and input.dtype != torch.float64,
        op,
        f"expected input of two dims and dtype float32, float16 or bfloat16, got {shape_of(input)} of "
        f"{dtype_name(input.dtype)}",
    )
    check(dtype in _FORMATS, op, f"expected dtype float8_e4m3fn or float8_e5m2, got {dtype_name(dtype)}")
    check(
        scaling in _SCALINGS,
        op,
        "expected scaling TensorWise, RowWise, BlockWise1x128 or BlockWise128x128, got number "
        f"{scaling} of torch.nn.functional.ScalingType",
    )


def _width(input: Tensor, activation: str | None, gated: bool) -> Any:
    """Of the matrix that is quantised."""
    op = "quantize_fp8"
    _check_activation(op, activation)
    if not gated:
        return input.shape[1]
    check(
        input.shape[1] % 2 == 0,
        op,
        f"expected gated input of shape (R, 2C), the gate first, got {shape_of(input)}",
    )
    return input.shape[1] // 2


def _fake_quantize(
    input: Tensor,
    dtype: torch.dtype,
    scaling: int,
    power_of_two: bool = False,
    *,
    activation: str | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    _check_quantize(input, dtype, scaling)
    return _quantized(input, input.shape[0], _width(input, activation, gated), dtype, scaling)


def _fake_quantize_both(input: Tensor, dtype: torch.dtype, scaling: int, *args: Any, **options: Any) -> Any:
    data, scales = _fake_quantize(input, dtype, scaling, *args, **options)
    rows, columns = data.shape
    return data, scales, *_quantized(input, columns, rows, dtype, scaling)


for _overload in ("", ".stochastic", ".activation"):
    torch.library.register_fake(f"{NAMESPACE}::quantize_fp8{_overload}")(_fake_quantize)
    torch.library.register_fake(f"{NAMESPACE}::quantize_fp8_both{_overload}")(_fake_quantize_both)
