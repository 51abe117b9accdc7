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


def name_of(arguments: list[Any], options: dict[str, Any], processors: int) -> str:
    """By which a plan of wgmma for these arguments is remembered (csrc/ops/tuning.cpp)."""
    a, b = arguments[:2]

    def operand(matrix: Tensor, scaling: str, lines: int) -> str:
        scales = "lines" if scaling == "RowWise" and lines > 1 else "all"
        scales = {"BlockWise1x128": "blocks", "BlockWise128x128": "squares"}.get(scaling, scales)
        return f"{'e4m3' if matrix.dtype == E4M3 else 'e5m2'} of {scales}"

    of_a, of_b = operand(a, arguments[3], len(a)), operand(b, arguments[5], b.shape[1])
    dtype = str(options.get("output_dtype", torch.bfloat16)).removeprefix("torch.")
    name = f"sm_90 x {processors}: {len(a)} x {b.shape[1]} x {a.shape[1]} {of_a}, {of_b}, to {dtype}"
    texts = {"use_fast_accum": ", fast", "bias": ", bias", "input": ", c"}
    return name + "".join(text for option, text in texts.items() if option in options)


def run(
    arch: str,
    arguments: list[Any],
    options: dict[str, Any],
    plan: tuple[int, int, int] | None = None,
    processors: int = 4,
    **emulation: Any,
) -> tuple[Tensor, dict[str, int], list[Any]]:
    """plan: the config, the cluster and the splits of k, as if they had been measured to be the fastest."""
    with testing.emulated(arch, processors=processors, **emulation) as emulated:
        if plan is not None:
            numbers = [plan[0], plan[1], 1, plan[2], False]
            torch.ops.cuda_ext._set_measured_gemm(name_of(arguments, options, processors), numbers, [1.0, 2.0])
        try:
            out = scaled_mm(*arguments, **options)
        finally:
            torch.ops.cuda_ext._clear_measured_gemms()
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
    options = {name: value for name, value in options.items() if name not in ("scaling_b", "scalings", "plan")}
    tensors = {"input": torch.randn(m, n), "bias": torch.randn(n)}
    return arguments, {name: tensors.get(name, value) for name, value in options.items()}
