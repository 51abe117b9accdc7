"""What the tests of the kernels of scaled products share."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from cuda_ext import scaled_mm, testing
from cuda_ext.fp8 import quantize
from cuda_ext.testing import reference_scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")


def problem(m: int, n: int, k: int, scalings: tuple[str, str], formats: tuple[torch.dtype, torch.dtype]) -> list[Any]:
    (a, scale_a), (b, scale_b) = (
        quantize(torch.randn(lines, k), scaling, dtype=dtype, power_of_two=True)
        for lines, scaling, dtype in zip((m, n), scalings, formats, strict=True)
    )
    return [a, b.t(), scale_a, scalings[0], scale_b, scalings[1]]


def random_epilogue(m: int, n: int, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {"output_dtype": dtype}
    if random.random() < 0.5:
        options["bias"] = torch.randn(n, dtype=random.choice((dtype, torch.float32)))
    if random.random() < 0.5:
        options |= {"input": torch.randn(m, n, dtype=dtype), "beta": 0.5}
    return options


def run(
    arch: str, arguments: list[Any], options: dict[str, Any], **emulation: Any
) -> tuple[Tensor, dict[str, int], list[Any]]:
    with testing.emulated(arch, **emulation) as emulated:
        out = scaled_mm(*arguments, **options)
        return out, dict(emulated.counters), emulated.sync_sites


def assert_near(out: Tensor, arguments: list[Any], options: dict[str, Any]) -> None:
    """The result in float64, within the error of sums in float32 and the roundings of the output and its addends."""
    terms = {name: value for name, value in options.items() if name not in ("output_dtype", "use_fast_accum")}
    exact = reference_scaled_mm(*arguments, **terms)
    magnitudes = [each.float().abs().to(each.dtype) for each in arguments[:2]]
    magnitude = reference_scaled_mm(*magnitudes, *arguments[2:])
    addends = sum(value.double().abs() for value in (terms.get("bias"), terms.get("input")) if value is not None)
    rounding = torch.finfo(out.dtype).eps * exact.abs() + torch.finfo(torch.float32).eps * addends
    assert ((out.double() - exact).abs() <= 2.0**-20 * magnitude + rounding).all()


def race_problem(sizes: tuple[int, int, int], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    m, n, _ = sizes
    scalings = options.get("scalings", ("BlockWise1x128", options.get("scaling_b", "BlockWise1x128")))
    arguments = problem(*sizes, scalings, (E4M3, E4M3))
    options = {name: value for name, value in options.items() if name not in ("scaling_b", "scalings")}
    tensors = {"input": torch.randn(m, n), "bias": torch.randn(n)}
    return arguments, {name: tensors.get(name, value) for name, value in options.items()}
