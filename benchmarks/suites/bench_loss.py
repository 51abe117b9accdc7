"""The loss of a vocabulary from hidden states, against an output layer and a cross entropy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cuda_ext
from benchmarks.results import OURS
from benchmarks.suites import baselines
from benchmarks.suites.measure import Call, Case, relative_error

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # input (M, K), weight (V, K), target (M,)


def cases(device: str) -> Iterator[Case]:
    """Most important first."""
    rows, features = (512, 256) if device == "cpu" else (8192, 4096)
    make = functools.partial(step, device=device, rows=rows, features=features)
    dtypes = ("float32", "bfloat16") if device == "cpu" else ("bfloat16", "float32")
    for classes in (32768, 131072, 65536):
        for dtype in dtypes:
            if device == "cpu" or dtype != "float32":
                yield make(classes=classes, dtype=dtype)
    if device == "cuda":
        # Liger's benchmarks, and a vocabulary of Gemma's size
        yield step(device=device, rows=4096, features=4096, classes=128256, dtype="bfloat16")
        yield step(device=device, rows=8192, features=2304, classes=256000, dtype="bfloat16")
        yield make(classes=32768, dtype="float32")
    for dtype in dtypes:
        yield forward(device=device, rows=rows, features=features, classes=32768, dtype=dtype)


def plain(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As models do, with logits in float32 for the loss."""
    logits = F.linear(input, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


class Inputs:
    def __init__(self, device: str, rows: int, features: int, classes: int, dtype: str) -> None:
        kind = getattr(torch, dtype)
        self.input = torch.randn(rows, features, device=device).to(kind).requires_grad_()
        self.weight = (torch.randn(classes, features, device=device) * features**-0.5).to(kind).requires_grad_()
        self.target = torch.randint(classes, (rows,), device=device)

    @functools.cached_property
    def exact(self) -> tuple[Tensor, ...]:
        """The loss and its gradients; float64 where that does not take longer than the measurement."""
        precise = torch.float64 if self.input.is_cpu else torch.float32
        input, weight = (each.detach().to(precise).requires_grad_() for each in (self.input, self.weight))
        loss = plain(input, weight, self.target)
        return (loss.detach(), *torch.autograd.grad(loss, (input, weight)))


def trained(loss: Loss, given: Inputs) -> Call:
    def call() -> tuple[Tensor, ...]:
        value = loss(given.input, given.weight, given.target)
        return (value.detach(), *torch.autograd.grad(value, (given.input, given.weight)))

    return call


def evaluated(loss: Loss, given: Inputs) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            return loss(given.input, given.weight, given.target)

    return call


def ours(method: str, memory_limit: int | None = None) -> Loss:
    return functools.partial(cuda_ext.linear_cross_entropy, method=method, memory_limit=memory_limit)


def sides_of(device: str, run: Callable[[Loss, Inputs], Call]) -> dict[str, Any]:
    sides: dict[str, Any] = {
        OURS: functools.partial(run, ours("auto")),
        "PyTorch": functools.partial(run, plain),
        "linear_cross_entropy": lambda given: run(baselines.torch_linear_cross_entropy(), given),
    }
    if device == "cpu":  # where PyTorch chooses chunks of a few rows
        rows = 128
        sides[f"linear_cross_entropy, {rows} rows"] = lambda given: run(
            baselines.torch_linear_cross_entropy(rows), given
        )
    if device == "cuda":
        sides |= {
            "torch.compile": lambda given: run(baselines.compiled(plain), given),
            "Liger": lambda given: run(baselines.liger_linear_cross_entropy(), given),
            "Cut Cross-Entropy": lambda given: run(baselines.cut_cross_entropy(), given),
        }
    return sides


def step(*, device: str, rows: int, features: int, classes: int, dtype: str) -> Case:
    size = getattr(torch, dtype).itemsize
    moved = float(2 * size * features * (rows + classes))  # operands and gradients
    sides = sides_of(device, trained)
    sides |= {f"{OURS}, {method}": functools.partial(trained, ours(method)) for method in ("forward", "recompute")}
    return Case(
        op="linear_cross_entropy",
        phase="forward + backward",
        group=f"M = {rows}, K = {features}",
        name=f"{rows} × {classes} × {features}",
        dtype=dtype,
        sides=sides,
        inputs=functools.partial(Inputs, device, rows, features, classes, dtype),
        check=lambda given, out: relative_error(out, given.exact),
        size=float(classes),
        size_name="V",
        flops=6.0 * rows * features * classes,
        bytes=moved,
        input_bytes=moved,
    )


def forward(*, device: str, rows: int, features: int, classes: int, dtype: str) -> Case:
    moved = float(getattr(torch, dtype).itemsize * features * (rows + classes))
    return Case(
        op="linear_cross_entropy",
        phase="forward",
        group=f"M = {rows}, K = {features}",
        name=f"{rows} × {classes} × {features}",
        dtype=dtype,
        sides=sides_of(device, evaluated),
        inputs=functools.partial(Inputs, device, rows, features, classes, dtype),
        check=lambda given, out: relative_error(out, given.exact[0]),
        size=float(classes),
        size_name="V",
        flops=2.0 * rows * features * classes,
        bytes=moved,
        input_bytes=moved,
    )
