"""Every plan that a product may run on wgmma, beside the one that is chosen and PyTorch: what a wrong choice costs.

The times of a plan's row are those of the launch that `cuda_ext.tuning` would choose; `extra` has the predicted cycles
of all plans, by the name of the row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from benchmarks.results import OURS
from benchmarks.suites.bench_gemm import Shape, product
from benchmarks.suites.measure import Call, Case
from cuda_ext import tuning
from cuda_ext._load import ops

Plan = tuple[int, int, int, int]  # config, cluster, k_blocks, splits: as in cuda_ext.tuning.Product

# Layers of an 8B model, as (N, K).
WIDTHS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
CONFIGS = range(5)
MOST = 9  # plans of a product, those with the fewest predicted cycles
DIVISIONS = ((0, 0), (1, 1), (1, 2), (1, 4), (4, 1))  # of k: k_blocks, splits; 0: the best by the prediction


def cases(device: str) -> Iterator[Case]:
    if device != "cuda":
        return
    for size in (4096, 8192, 2048, 1024, 512):
        yield plans((size, size, size), "nn", "squares")
    for tokens in (8192, 1, 16, 64, 256):
        for n, k in WIDTHS:
            yield plans((tokens, n, k), "nt", f"{tokens} tokens")
    for n, k in WIDTHS:
        yield plans((8192, k, n), "nn", "gradient of the input")
        yield plans((n, k, 8192), "tn", "gradient of the weight")
    yield plans((2048, 128256, 4096), "nt", "logits")


def plans(shape: Shape, layout: str, group: str, dtype: str = "bfloat16") -> Case:
    case = product(device="cuda", dtype=dtype, shape=shape, layout=layout, group=group, note=layout.upper())
    found = planned(shape, layout, dtype)
    case.op = "gemm plans"
    case.sides = {name: case.sides[name] for name in (OURS, "torch.matmul")}
    case.sides[OURS] = functools.partial(_run, None)
    case.sides |= {name: functools.partial(_run, plan) for name, (plan, _) in found.items()}
    case.extra["cycles"] = {name: cycles for name, (_, cycles) in found.items()}
    return case


def planned(shape: Shape, layout: str, dtype: str) -> dict[str, tuple[Plan, float]]:
    """The plans that fit a product, and their predicted cycles, by name; the default is the one with the fewest."""
    m, n, k = shape
    a, b = (
        torch.empty(stored[::-1] if transposed == "t" else stored, dtype=getattr(torch, dtype), device="meta")
        for stored, transposed in (((m, k), layout[0]), ((k, n), layout[1]))
    )
    a, b = (a.t() if layout[0] == "t" else a), (b.t() if layout[1] == "t" else b)
    gpu = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    device = (10 * gpu.major + gpu.minor, gpu.multi_processor_count) if gpu else (90, 132)
    found: dict[str, tuple[Plan, float]] = {}
    for config in CONFIGS:
        for cluster in (1, 2):
            for division in DIVISIONS:
                wanted = (config, cluster, *division)
                kernel, _, _, numbers, cycles = ops._gemm_plan(
                    a, b, None, None, None, None, None, None, 1.0, 1.0, None, False, False, *device, *wanted
                )
                plan = tuple(numbers.get(name, 0) for name in ("config", "cluster", "k_blocks", "splits"))
                asked = tuple(number or planned for number, planned in zip(wanted[2:], plan[2:]))
                if kernel == "sm_90" and plan == (config, cluster, *asked):
                    found.setdefault(_name(numbers), (plan, cycles))
    return dict(sorted(found.items(), key=lambda item: item[1][1])[:MOST])


def _name(numbers: dict[str, int]) -> str:
    """ "128x256", of a cluster of 2 "128x256 c2", with k divided within a cluster by 4 and among blocks by 3 "... k4
    s3"."""
    text = f"{numbers['block_m']}x{numbers['block_n']}"
    divided = (("c", "cluster"), ("k", "k_blocks"), ("s", "splits"))
    return " ".join([text, *(f"{letter}{numbers[name]}" for letter, name in divided if numbers[name] > 1)])


def _run(plan: Plan | None, operands: tuple[Tensor, Tensor]) -> Call:
    a, b = operands
    if plan is None:

        def default() -> Tensor:
            tuning.clear()
            return cuda_ext.gemm(a, b)

        return default
    name = _name_of_product(a, b)

    def restricted() -> Tensor:
        ops._set_measured_gemm(name, [*plan, 0], [1.0, 1.0])
        return cuda_ext.gemm(a, b)

    return restricted


_names: dict[Any, str] = {}


def _name_of_product(a: Tensor, b: Tensor) -> str:
    """The name that the table of measured plans has for a product."""
    key = (a.shape, b.shape, a.stride(), b.stride(), a.dtype)
    if key not in _names:
        tuning.clear()
        with tuning.tune(keep=False, candidates=1):
            cuda_ext.gemm(a, b)
        (measured,) = tuning.measured()
        _names[key] = measured.name
        tuning.clear()
    return _names[key]
