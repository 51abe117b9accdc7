"""Mixtures of experts: products of groups, and the experts of a layer, against PyTorch's and transformers'."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cuda_ext
from benchmarks.results import OURS
from benchmarks.suites import baselines
from benchmarks.suites.measure import NOT_INSTALLED, Call, Case, Failure, relative_error
from cuda_ext import testing

TOP_K = 2


def cases(device: str) -> Iterator[Case]:
    """Most important first: tokens, K, F and the number of experts of Mixtral, and of models with many small ones."""
    on_cpu = device == "cpu"
    sizes = [(1024, 512, 512, 8), (2048, 512, 128, 64)] if on_cpu else [(16384, 4096, 2048, 8), (16384, 2048, 768, 128)]
    for tokens, k, hidden, experts in sizes:
        for dtype in ("float32", "bfloat16") if on_cpu else ("bfloat16",):
            for trains in (True, False):
                shape = {"tokens": tokens, "k": k, "hidden": hidden, "experts": experts}
                yield layer(device=device, dtype=dtype, trains=trains, **shape)
                yield product(device=device, dtype=dtype, trains=trains, **shape)


class Inputs:
    def __init__(self, device: str, dtype: str, tokens: int, k: int, hidden: int, experts: int) -> None:
        kind = getattr(torch, dtype)

        def make(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, device=device)).to(kind).requires_grad_()

        self.input = make(tokens, k)
        self.w_up, self.w_down = (
            make(experts, 2 * hidden, k, scale=k**-0.5),
            make(experts, k, hidden, scale=hidden**-0.5),
        )
        logits = torch.randn(tokens, experts, device=device)
        self.weights, self.ids = logits.softmax(-1).topk(TOP_K)
        self.weights.requires_grad_()
        self.grad = torch.randn(tokens, k, device=device).to(kind)
        # Of a product: as many rows in equal groups as the layer has.
        self.rows = make(tokens * TOP_K, k)
        self.ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (tokens * TOP_K // experts)
        self.grad_rows = torch.randn(tokens * TOP_K, 2 * hidden, device=device).to(kind)


Function = Callable[[Inputs], Tensor]


@dataclass
class Run:
    """Forward alone, or with the gradients of `leaves` for `grad`."""

    leaves: tuple[str, ...]
    grad: str
    trains: bool

    def __call__(self, function: Function, given: Inputs) -> Call:
        def forward() -> Tensor:
            with torch.no_grad():
                return function(given)

        def step() -> tuple[Tensor, ...]:
            out = function(given)
            leaves = [getattr(given, name) for name in self.leaves]
            return (out.detach(), *torch.autograd.grad(out, leaves, getattr(given, self.grad)))

        return step if self.trains else forward

    def exact(self, function: Function, given: Inputs) -> Any:
        precise = torch.float64 if given.input.is_cpu else torch.float32
        wide = copy.copy(given)
        for name, value in vars(given).items():
            if value.is_floating_point():
                setattr(wide, name, value.detach().to(precise).requires_grad_(value.requires_grad))
        return self(function, wide)()


def layer(*, device: str, dtype: str, trains: bool, tokens: int, k: int, hidden: int, experts: int) -> Case:
    run = Run(("input", "weights", "w_up", "w_down"), "grad", trains)

    def ours(given: Inputs) -> Tensor:
        return cuda_ext.mixture_of_experts(given.input, given.ids, given.weights, given.w_up, given.w_down)

    def reference(given: Inputs) -> Tensor:
        return testing.reference_mixture_of_experts(given.input, given.ids, given.weights, given.w_up, given.w_down)

    def theirs(implementation: str, given: Inputs) -> Call:
        forward = baselines.transformers_experts(implementation, given.w_up, given.w_down)
        return run(lambda each: forward(each.input, each.ids, each.weights.to(each.input.dtype)), given)

    return Case(
        op="mixture_of_experts",
        phase=phase_of(trains),
        group=f"{TOP_K} experts a token",
        name=f"{tokens} tokens, {experts} × ({hidden}, {k})",
        dtype=dtype,
        sides={
            OURS: functools.partial(run, ours),
            "transformers, grouped_mm": functools.partial(theirs, "grouped_mm"),
            "transformers, eager": functools.partial(theirs, "eager"),
        },
        inputs=functools.partial(Inputs, device, dtype, tokens, k, hidden, experts),
        check=lambda given, out: relative_error(out, run.exact(reference, given)),
        flops=6.0 * tokens * TOP_K * k * hidden * (3 if trains else 1),
    )


def product(*, device: str, dtype: str, trains: bool, tokens: int, k: int, hidden: int, experts: int) -> Case:
    run = Run(("rows", "w_up"), "grad_rows", trains)

    def ours(given: Inputs) -> Tensor:
        return cuda_ext.grouped_mm(given.rows, given.w_up.mT, offs=given.ends)

    def torch_grouped(given: Inputs) -> Tensor:
        if not hasattr(F, "grouped_mm"):
            raise Failure(f"{NOT_INSTALLED}: PyTorch 2.10")
        return F.grouped_mm(given.rows, given.w_up.mT, offs=given.ends)

    def loop(given: Inputs) -> Tensor:
        parts = given.rows.chunk(len(given.ends))
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, given.w_up, strict=True)])

    sides = {OURS: ours, "F.grouped_mm": torch_grouped, "a loop": loop}
    return Case(
        op="grouped_mm",
        phase=phase_of(trains),
        group="equal groups",
        name=f"{experts} × {tokens * TOP_K // experts} × {2 * hidden} × {k}",
        dtype=dtype,
        sides={name: functools.partial(run, function) for name, function in sides.items()},
        inputs=functools.partial(Inputs, device, dtype, tokens, k, hidden, experts),
        check=lambda given, out: relative_error(out, run.exact(loop, given)),
        flops=4.0 * tokens * TOP_K * k * hidden * (3 if trains else 1),
    )


def phase_of(trains: bool) -> str:
    return "forward + backward" if trains else "forward"
