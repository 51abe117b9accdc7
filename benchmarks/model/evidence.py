"""What the model knows about the CUDA kernels.

Sources: the emulator's counters (tests/simt/golden_counters), the compiled kernels (tests/simt/golden_kernels.json) and
the launchers' own choices (csrc/emulated).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.model.compiled import Kernel, blocks_per_sm, golden_kernels, readable
from benchmarks.model.gpus import Gpu

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "simt" / "golden_counters"

# Assumed, because the emulator does not count them: warp instructions per wavefront of shared memory that an epilogue
# reads or writes (4 floats per lane are 4 wavefronts, and need addresses, scaling, conversion and a store), and per
# warp before its first product.
EPILOGUE_INSTRUCTIONS = 4
PROLOGUE_INSTRUCTIONS = 300
SECTOR = 32


class ModelError(ValueError):
    """The model cannot do something; the message says what, and what to do."""


class NotModelledError(ModelError):
    """The case is not modelled."""


@dataclass(frozen=True)
class Arithmetic:
    index: int  # its index in csrc/gemm/plan_sm80.h
    golden: str  # its name in golden_counters/gemm.json
    element: str  # the element type in golden_kernels.json
    multiply_adds: int  # per mma, in the units of Amounts.tensor
    products: int  # cost of a product relative to one of 16-bit types


DTYPES = {
    "bfloat16": Arithmetic(0, "bfloat16", "bfloat16_t", 16 * 8 * 16, 1),
    "float16": Arithmetic(0, "float16", "half_t", 16 * 8 * 16, 1),
    "tf32": Arithmetic(1, "tf32", "float", 2 * 16 * 8 * 8, 2),
    "float32": Arithmetic(2, "three_tf32", "float", 2 * 16 * 8 * 8, 6),
}
LAYOUTS = ("nn", "nt", "tn", "tt")


@dataclass(frozen=True)
class GemmConfig:
    """GemmConfig of csrc/gemm/plan_sm80.h."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps_m: int
    warps_n: int
    min_blocks: int
    element_bytes: int
    shared_bytes: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    def kernel_name(self, arithmetic: Arithmetic, layout: str) -> str:
        """The name in golden_kernels.json."""
        sizes = ", ".join(str(value) for value in dataclasses.astuple(self)[:7])
        a_k_major, b_k_major = (str(letter == k).lower() for letter, k in zip(layout, "nt"))
        kind = f"{arithmetic.element}, {arithmetic.index}, {a_k_major}, {b_k_major}"
        return f"gemm_sm80<Gemm<{kind}, GemmConfig{{{sizes}}}>>"


Counters = dict[str, dict[str, int]]  # case -> counter -> value, as in golden_counters


@dataclass(frozen=True)
class Evidence:
    """Counters, compiled kernels and launchers' choices."""

    gemm: Counters
    bucket: Counters
    attention: Counters
    kernels: dict[str, dict[str, Kernel]]  # architecture -> name -> kernel
    configs: list[list[GemmConfig]]  # indexed by arithmetic and shape
    simt: Any  # the module _simt, which makes the launchers' choices

    @classmethod
    @functools.cache
    def recorded(cls) -> Evidence:
        from cuda_ext import _emulator

        try:
            simt = _emulator.load()
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"cannot compile the emulator, which makes the launchers' choices; it needs a C++ compiler: {error}"
            ) from None
        gemm, bucket, attention = (
            json.loads((GOLDEN / f"{kernels}.json").read_text()) for kernels in ("gemm", "bucket", "attention")
        )
        configs = [[GemmConfig(**config) for config in of_arithmetic] for of_arithmetic in simt.gemm_configs()]
        return cls(gemm, bucket, attention, golden_kernels(), configs, simt)

    def kernel(self, gpu: Gpu, name: str) -> Kernel:
        try:
            return self.kernels[gpu.arch][name]
        except KeyError:
            raise ModelError(
                f"expected {name} among the kernels of {gpu.arch} in golden_kernels.json, got none; "
                "build with CUDA_EXT_CUDA=1 make build, and run tools/static_gates.py --write"
            ) from None


def multiply_adds(gpu: Gpu, dtype: str) -> float:
    """Of an mma of the emulator's counters, in the units of Amounts.tensor."""
    arithmetic = DTYPES[dtype]
    if not gpu.float32_multiply_adds or dtype == "float16":
        return arithmetic.multiply_adds
    # One product of 16 bytes per row in float32 arithmetic, where others count three of tf32.
    products = 16 * 8 * 16 if arithmetic.index == 0 else 16 * 8 * 8
    return products / (3 if dtype == "float32" else 1) * gpu.multiply_adds / gpu.float32_multiply_adds


def more_instructions(gpu: Gpu, cost: Mapping[str, float], dtype: str) -> float:
    """Warp instructions that sm_75 needs beyond those of sm_80's code: a product of float16 is two, and a copy of 16
    bytes a load and a store. Those of products in float32 arithmetic are in their rate."""
    if gpu.has_cp_async:
        return 0.0
    copies = cost.get("global_load_sectors", 0) * SECTOR / (32 * 16)
    return copies + (cost.get("mma", 0) if dtype == "float16" else 0.0)


def line_through(points: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[dict[str, float], dict[str, float]]:
    """(slope, intercept) of counters at two sizes."""
    (small, low), (large, high) = points
    names = {**low, **high}
    slope = {name: (high.get(name, 0) - low.get(name, 0)) / (large - small) for name in names}
    return slope, {name: low.get(name, 0) - small * slope[name] for name in names}


def sectors(cost: dict[str, float]) -> float:
    return cost.get("global_load_sectors", 0) + cost.get("global_store_sectors", 0)


def wavefronts(cost: dict[str, float]) -> float:
    return cost.get("shared_wavefronts", 0) + cost.get("matrix_wavefronts", 0)


def fit(kernel: Kernel, gpu: Gpu, shared_bytes: int = 0) -> int:
    """The number of blocks that fit on an SM; `shared_bytes` are added to those in golden_kernels.json."""
    arch = f"sm_{gpu.compute_capability}" + "a" * (gpu.compute_capability == 90)
    blocks = blocks_per_sm(kernel, arch, kernel.shared_bytes + shared_bytes)
    if not blocks:
        raise ModelError(f"{kernel.name}: expected a block to fit on an SM of {gpu.name}, but it does not")
    return blocks


@functools.cache
def demangled(mangled: str) -> str:
    """A C++ name as in golden_kernels.json."""
    (name,) = readable([f"_Z{mangled}"])
    return name
