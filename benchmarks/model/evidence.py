"""What is known of the CUDA kernels.

Sources: the emulator's counters (tests/simt/golden_counters), the table of compiled kernels (docs/kernels.md) and the
launchers' own choices (csrc/emulated).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.model.gpus import Gpu

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

from static_gates import Kernel, blocks_per_multiprocessor, documented_kernels, readable  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "simt" / "golden_counters"

# Not counted by the emulator, so assumed: warp instructions for each wavefront of shared memory that an epilogue reads
# or writes (4 floats of each lane are 4 wavefronts, and take addresses, scaling, conversion and a store), and of a
# warp before its first product.
EPILOGUE_INSTRUCTIONS = 4
PROLOGUE_INSTRUCTIONS = 300
SECTOR = 32


class ModelError(ValueError):
    """Something that the model cannot do; says what, and what to do."""


class NotModelledError(ModelError):
    """A case that the model does not know."""


@dataclass(frozen=True)
class Arithmetic:
    index: int  # of csrc/gemm/plan_sm80.h
    golden: str  # its name in golden_counters/gemm.json
    element: str  # and in docs/kernels.md
    multiply_adds: int  # of one mma, as Amounts.tensor counts
    products: int  # that it makes of one, as 16-bit ones


DTYPES = {
    "bfloat16": Arithmetic(0, "bfloat16", "bfloat16_t", 16 * 8 * 16, 1),
    "float16": Arithmetic(0, "float16", "half_t", 16 * 8 * 16, 1),
    "tf32": Arithmetic(1, "tf32", "float", 2 * 16 * 8 * 8, 2),
    "float32": Arithmetic(2, "three_tf32", "float", 2 * 16 * 8 * 8, 6),
}
LAYOUTS = ("nn", "nt", "tn", "tt")


@dataclass(frozen=True)
class GemmConfig:
    """As csrc/gemm/plan_sm80.h has it."""

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
        """In docs/kernels.md."""
        sizes = ", ".join(str(value) for value in dataclasses.astuple(self)[:7])
        a_k_major, b_k_major = (str(letter == k).lower() for letter, k in zip(layout, "nt"))
        kind = f"{arithmetic.element}, {arithmetic.index}, {a_k_major}, {b_k_major}"
        return f"gemm_sm80<Gemm<{kind}, GemmConfig{{{sizes}}}>>"


Counters = dict[str, dict[str, int]]  # by case, as golden_counters has them


@dataclass(frozen=True)
class Evidence:
    """All that is known of the kernels."""

    gemm: Counters
    bucket: Counters
    attention: Counters
    kernels: dict[str, dict[str, Kernel]]  # by architecture and name
    configs: list[list[GemmConfig]]  # by arithmetic and shape
    simt: Any  # the module _simt, for the launchers' choices

    @classmethod
    @functools.cache
    def recorded(cls) -> Evidence:
        from cuda_ext import _emulator

        try:
            simt = _emulator.load()
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"the launchers' choices cannot be asked for, which takes a C++ compiler: {error}"
            ) from None
        gemm, bucket, attention = (
            json.loads((GOLDEN / f"{kernels}.json").read_text()) for kernels in ("gemm", "bucket", "attention")
        )
        configs = [[GemmConfig(**config) for config in of_arithmetic] for of_arithmetic in simt.gemm_configs()]
        return cls(gemm, bucket, attention, documented_kernels(), configs, simt)

    def kernel(self, gpu: Gpu, name: str) -> Kernel:
        try:
            return self.kernels[gpu.arch][name]
        except KeyError:
            raise ModelError(
                f"expected {name} among the kernels of {gpu.arch} in docs/kernels.md, got none; "
                "build with CUDA_EXT_CUDA=1 make build, and run tools/static_gates.py --write"
            ) from None


def line_through(points: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Of counters at two sizes: what one more costs, and what the rest does."""
    (small, low), (large, high) = points
    names = {**low, **high}
    slope = {name: (high.get(name, 0) - low.get(name, 0)) / (large - small) for name in names}
    return slope, {name: low.get(name, 0) - small * slope[name] for name in names}


def sectors(cost: dict[str, float]) -> float:
    return cost.get("global_load_sectors", 0) + cost.get("global_store_sectors", 0)


def wavefronts(cost: dict[str, float]) -> float:
    return cost.get("shared_wavefronts", 0) + cost.get("matrix_wavefronts", 0)


def fit(kernel: Kernel, gpu: Gpu, shared_bytes: int = 0) -> int:
    """Blocks of a kernel that fit a multiprocessor at once; `shared_bytes` beside what docs/kernels.md knows."""
    arch = {80: "sm_80", 89: "sm_89", 90: "sm_90a"}[gpu.compute_capability]
    blocks = blocks_per_multiprocessor(dataclasses.replace(kernel, arch=arch), kernel.shared_bytes + shared_bytes)
    if not blocks:
        raise ModelError(f"{kernel.name}: expected to fit a multiprocessor of {gpu.name}, which it does not")
    return blocks


@functools.cache
def demangled(mangled: str) -> str:
    """A C++ name as in docs/kernels.md."""
    (name,) = readable([f"_Z{mangled}"])
    return name
