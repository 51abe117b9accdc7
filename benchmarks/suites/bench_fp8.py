"""Scaled products of FP8, quantisation, and a linear layer that trains in FP8, against PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cuda_ext
from benchmarks.results import OURS
from benchmarks.suites.measure import Call, Case, relative_error
from cuda_ext import fp8, testing

# Of a product: the scalings of its operands.
SCALINGS = {
    "tensorwise": ("TensorWise", "TensorWise"),
    "rowwise": ("RowWise", "RowWise"),
    "blockwise": ("BlockWise1x128", "BlockWise128x128"),
}
# What PyTorch's product takes in its release 2.11.
PYTORCH = {"cpu": ("tensorwise",), "cuda": ("tensorwise", "rowwise", "blockwise")}


def cases(device: str) -> Iterator[Case]:
    """Most important first: M, N, K."""
    on_cpu = device == "cpu"
    sizes = (
        [(1024, 1024, 1024), (256, 2048, 512)]
        if on_cpu
        else [(8192, 8192, 8192), (8192, 4096, 14336), (64, 8192, 8192)]
    )
    for size in sizes:
        for recipe in SCALINGS:
            yield product(device, recipe, *size)
            if not on_cpu and recipe != "blockwise":
                yield product(device, recipe, *size, fast=True)
            yield layer(device, recipe, *size)
        yield from (quantised(device, size[0], size[2], both) for both in (False, True))


class Operands:
    """Both in FP8, the right one as a layer's weight, whose transpose is multiplied."""

    def __init__(self, device: str, recipe: str, m: int, n: int, k: int) -> None:
        self.scalings = SCALINGS[recipe]
        self.a, self.scale_a = fp8.quantize(torch.randn(m, k, device=device), self.scalings[0])
        self.b, self.scale_b = fp8.quantize(torch.randn(n, k, device=device), self.scalings[1])


def pytorchs_scales(given: Operands) -> tuple[Tensor, Tensor]:
    """In the layout that `torch._scaled_mm` asks for."""
    if given.scalings[0] == "TensorWise":
        return given.scale_a.view(()), given.scale_b.view(())
    if given.scalings[0] == "RowWise":
        return given.scale_a, given.scale_b.t()
    return given.scale_a.t().contiguous().t(), given.scale_b


def product(device: str, recipe: str, m: int, n: int, k: int, fast: bool = False) -> Case:
    """fast: with use_fast_accum."""

    def ours(given: Operands) -> Call:
        left, right = given.scalings
        operands = given.a, given.b.t(), given.scale_a, left, given.scale_b, right
        return lambda: cuda_ext.scaled_mm(*operands, use_fast_accum=fast)

    def theirs(given: Operands) -> Call:
        scales = pytorchs_scales(given)
        operands = given.a, given.b.t(), *scales
        return lambda: torch._scaled_mm(*operands, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def exact(given: Operands) -> Tensor:
        left, right = given.scalings
        return testing.reference_scaled_mm(given.a, given.b.t(), given.scale_a, left, given.scale_b, right)

    sides: dict[str, Callable[[Operands], Call]] = {OURS: ours}
    if recipe in PYTORCH[device]:
        sides["torch._scaled_mm"] = theirs
    return Case(
        op="scaled_mm",
        phase="forward",
        group=recipe,
        name=f"{recipe}{', use_fast_accum' if fast else ''}, {m} × {n} × {k}",
        dtype="bfloat16",
        sides=sides,
        inputs=functools.partial(Operands, device, recipe, m, n, k),
        check=lambda given, out: relative_error(out, exact(given)),
        flops=2.0 * m * n * k,
    )


class Layer:
    def __init__(self, device: str, m: int, n: int, k: int) -> None:
        self.x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
        self.weight = (torch.randn(n, k, device=device) * k**-0.5).bfloat16().requires_grad_()
        self.grad = torch.randn(m, n, device=device, dtype=torch.bfloat16)


def layer(device: str, recipe: str, m: int, n: int, k: int) -> Case:
    def step(function: Callable[[Tensor, Tensor], Tensor], given: Layer) -> Call:
        def call() -> tuple[Tensor, ...]:
            out = function(given.x, given.weight)
            return (out.detach(), *torch.autograd.grad(out, (given.x, given.weight), given.grad))

        return call

    return Case(
        op="fp8.linear",
        phase="forward + backward",
        group=recipe,
        name=f"{recipe}, {m} × {n} × {k}",
        dtype="bfloat16",
        sides={
            OURS: functools.partial(step, functools.partial(fp8.linear, recipe=recipe)),
            "F.linear, bfloat16": functools.partial(step, F.linear),
        },
        inputs=functools.partial(Layer, device, m, n, k),
        check=lambda given, out: relative_error(out, step(F.linear, given)()),
        tolerance=2.0**-3,  # of gradients in E5M2; E4M3 has a bit more
        flops=6.0 * m * n * k,
    )


def quantised(device: str, rows: int, columns: int, both: bool) -> Case:
    """A matrix by its rows, or with its transpose."""

    def ours(x: Tensor) -> Call:
        return lambda: (fp8.quantize_both if both else fp8.quantize)(x, "RowWise")

    def composed(x: Tensor) -> Call:
        def of(x: Tensor) -> tuple[Tensor, Tensor]:
            scales = (x.abs().amax(1, keepdim=True).float() / 448).clamp_min(2.0**-126)
            return (x * scales.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scales

        return lambda: (*of(x), *of(x.t().contiguous())) if both else of(x)

    def check(x: Tensor, out: Any) -> float:
        return relative_error(out[0].float() * out[1], x.float())

    return Case(
        op="fp8.quantize_both" if both else "fp8.quantize",
        phase="forward",
        group="rowwise",
        name=f"{rows} × {columns}",
        dtype="bfloat16",
        sides={OURS: ours, "PyTorch": composed},
        inputs=lambda: torch.randn(rows, columns, device=device, dtype=torch.bfloat16),
        check=check,
        tolerance=2.0**-4,  # the rounding of 4 bits
        bytes=(4.0 if both else 3.0) * rows * columns,
    )
