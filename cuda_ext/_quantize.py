"""Conversion of matrices to FP8 with scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cuda_ext._rules  # noqa: F401
from cuda_ext._load import ops
from cuda_ext._rules.fp8_vmap import mapped_where_roundings_differ
from cuda_ext._scaled_mm import scaling_number
from cuda_ext._toolchain import NAMESPACE

__all__ = ["quantize", "quantize_both"]


def quantize(
    input: Tensor,
    scaling: str = "RowWise",
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    stochastic: bool = False,
    activation: str | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Converts to FP8 with scales: ``input`` is about ``data * scales``.

    A scale is the largest finite magnitude of its block over the largest number of the format (448, or 57344 of
    float8_e5m2), at least 2**-126, and 1 for a block of zeros. An element is divided by it, as a product with its
    reciprocal in float32, and rounded to nearest even, or with `stochastic` at random so that its mean is right;
    infinities become the largest number, NaN stays NaN.

    For a product that sums over the rows of a matrix, quantise its transpose: scales must not change along a sum.

    Args:
        input: ``(R, C)``, float32, float16 or bfloat16. A matrix that is contiguous along neither dim is copied.
        scaling: ``"TensorWise"``, ``"RowWise"`` (default), ``"BlockWise1x128"`` or ``"BlockWise128x128"``, as
            `cuda_ext.scaled_mm` reads them.
        dtype: float8_e4m3fn (default) or float8_e5m2.
        power_of_two: whether scales are rounded up to powers of two, so that they add no rounding error. Default False.
        stochastic: whether an element between two numbers of the format becomes either of them, each with the
            probability that is its nearness, to 2**-28 of the least number. Numbers of the format stay. The random
            numbers are Philox4x32-10 of a seed and an offset that PyTorch's default generator of the device supplies,
            so that `torch.manual_seed` determines them; they do not depend on strides, and CPUs and GPUs compute the
            same of a seed and an offset. Default False; not with `activation` or `gated`.
        activation: quantises ``activation(input)`` without that matrix in memory: it is computed in float32 and rounded
            to the dtype of the input, so the result is that of quantising what `cuda_ext.linear` or `gated_linear`
            would have stored. A name that `cuda_ext.gemm` takes, or None (default).
        gated: ``input`` is ``(R, 2C)``, and ``activation(input[:, :C]) * input[:, C:]`` is quantised. Default False.

    Returns:
        ``data``, ``(R, C)``, with rows that begin at multiples of 16 bytes, and ``scales``, float32, as
        `cuda_ext.scaled_mm` takes them for the left operand: ``(1, 1)``, ``(R, 1)``, ``(R, ceil(C / 128))`` or
        ``(ceil(C / 128), ceil(R / 128))``. They have no gradient. For the right operand of a product pass ``data.t()``
        and the same scales, which for ``"RowWise"`` may have either shape.

    Raises:
        RuntimeError: wrong shape, dtype or scaling.
        NotImplementedError: `stochastic` for a DTensor: its ranks would draw numbers that differ between replicas, or
            repeat between shards.
    """
    arguments = input, dtype, scaling_number(scaling), power_of_two
    quantized: tuple[Tensor, Tensor] = _quantize(ops.quantize_fp8, arguments, stochastic, activation, gated)
    return quantized


def _quantize(packet: Any, arguments: tuple[Any, ...], stochastic: bool, activation: str | None, gated: bool) -> Any:
    if activation is not None or gated:
        if stochastic:
            raise RuntimeError(
                f"{NAMESPACE}::quantize_fp8: expected stochastic=False with an activation or a gate, got True; "
                "quantise the matrix that cuda_ext.linear or gated_linear returns"
            )
        return packet.activation(*arguments, activation=activation, gated=gated)
    if stochastic:
        return packet.stochastic(mapped_where_roundings_differ(arguments[0]), *arguments[1:])
    return packet.default(*arguments)


def quantize_both(
    input: Tensor,
    scaling: str = "RowWise",
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    stochastic: bool = False,
    activation: str | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize` of a matrix and of its transpose, each with its own scales, from one read of the matrix (two for
    ``"TensorWise"`` and ``"RowWise"``, whose scales depend on more than a tile).

    Args:
        input, scaling, dtype, power_of_two, stochastic, activation, gated: as `quantize`. The transpose is rounded by
            random numbers of its own.

    Returns:
        ``data``, ``(R, C)``, and its scales, then those of the transpose, ``(C, R)``.

    Raises:
        RuntimeError, NotImplementedError: as `quantize`.
    """
    arguments = input, dtype, scaling_number(scaling), power_of_two
    both: tuple[Tensor, Tensor, Tensor, Tensor] = _quantize(
        ops.quantize_fp8_both, arguments, stochastic, activation, gated
    )
    return both
