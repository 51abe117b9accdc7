"""What the CUDA kernels ask of a GPU, as Work: from the emulator's counters (tests/simt/golden_counters), the table of
compiled kernels (docs/kernels.md) and the launchers' own choices (csrc/emulated).

A kernel joins the paper model by a function here that returns its Work.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpus import Gpu
from benchmarks.work import Amounts, Work

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))

from static_gates import Kernel, blocks_per_multiprocessor, documented_kernels  # noqa: E402

GOLDEN = ROOT / "tests" / "simt" / "golden_counters"

# Not counted by the emulator, so assumed: warp instructions for each wavefront of shared memory that an epilogue reads
# or writes (4 floats of each lane are 4 wavefronts, and take addresses, scaling, conversion and a store), and of a
# warp before its first product.
EPILOGUE_INSTRUCTIONS = 4
PROLOGUE_INSTRUCTIONS = 300
SECTOR = 32
GROUP_ROWS = 8  # kGroup of find_tile: rows of tiles that blocks go down before they go right


class ModelError(ValueError):
    """Something that the model cannot do; says what, and what to do."""


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
        return cls(
            json.loads((GOLDEN / "gemm.json").read_text()),
            json.loads((GOLDEN / "bucket.json").read_text()),
            documented_kernels(),
            [[GemmConfig(**config) for config in configs] for configs in simt.gemm_configs()],
            simt,
        )

    def kernel(self, gpu: Gpu, name: str) -> Kernel:
        try:
            return self.kernels[gpu.arch][name]
        except KeyError:
            raise ModelError(
                f"expected {name} among the kernels of {gpu.arch} in docs/kernels.md, got none; "
                "build with CUDA_EXT_CUDA=1 make build, and run tools/static_gates.py --write"
            ) from None


def _line(points: Sequence[tuple[float, dict[str, int]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Of counters at two sizes: what one more costs, and what the rest does."""
    (small, low), (large, high) = points
    names = {**low, **high}
    slope = {name: (high.get(name, 0) - low.get(name, 0)) / (large - small) for name in names}
    return slope, {name: low.get(name, 0) - small * slope[name] for name in names}


def _of_block(cost: dict[str, int]) -> dict[str, Any]:
    return {name: count / cost["blocks"] for name, count in cost.items()}


def _sectors(cost: dict[str, float]) -> float:
    return cost.get("global_load_sectors", 0) + cost.get("global_store_sectors", 0)


def _wavefronts(cost: dict[str, float]) -> float:
    return cost.get("shared_wavefronts", 0) + cost.get("matrix_wavefronts", 0)


def block_costs(evidence: Evidence, dtype: str, layout: str, config: GemmConfig) -> tuple[dict[str, float], ...]:
    """Counters of a k tile of a block, and of what it does beside, for a whole tile."""
    name = re.compile(rf"{DTYPES[dtype].golden} {layout} {config} of \d+x\d+x(\d+)$")
    points = [
        (int(match[1]) / config.block_k, _of_block(cost))
        for case, cost in evidence.gemm.items()
        if (match := name.match(case))
    ]
    if len(points) != 2:
        raise ModelError(
            f"expected two cases {name.pattern!r} in golden_counters/gemm.json, got {len(points)}; record them with "
            "CUDA_EXT_RECORD_COUNTERS=1 python -m pytest tests/simt/test_gemm_kernels.py"
        )
    return _line(sorted(points, key=lambda point: point[0]))


def split_bytes(evidence: Evidence) -> tuple[float, float]:
    """What a float of a tile's sums costs where k is split: bytes written by each block, and read by a tile's last."""
    ((case, cost),) = [(case, cost) for case, cost in evidence.gemm.items() if re.search(r" in \d+$", case)]
    match = re.match(r"bfloat16 nn (\d+)x(\d+)x(\d+) of \d+x\d+x(\d+) in (\d+)$", case)
    assert match is not None
    block_m, block_n, block_k, k, splits = map(int, match.groups())
    config = next(c for c in evidence.configs[0] if (c.block_m, c.block_n, c.block_k) == (block_m, block_n, block_k))
    k_tile, rest = block_costs(evidence, "bfloat16", "nn", config)
    both = []
    for name in ("global_store_sectors", "global_load_sectors"):
        unsplit = k / block_k * k_tile[name] + rest[name]
        both.append((cost[name] - unsplit) * SECTOR / (splits * block_m * block_n))
    return both[0], both[1]


def gemm_work(
    evidence: Evidence, gpu: Gpu, m: int, n: int, k: int, dtype: str, layout: str, config: GemmConfig, splits: int
) -> Work:
    arithmetic = DTYPES[dtype]
    kernel = evidence.kernel(gpu, config.kernel_name(arithmetic, layout))
    k_tile, rest = block_costs(evidence, dtype, layout, config)
    rows, columns = math.ceil(m / config.block_m), math.ceil(n / config.block_n)
    tiles, area = rows * columns, config.block_m * config.block_n
    k_tiles = math.ceil(math.ceil(k / config.block_k) / splits)
    # Tiles at the edges multiply as much as others, but read and write what there is.
    read = (m / rows + n / columns) / (config.block_m + config.block_n)
    written = m * n / (tiles * area)
    warps = config.warps_m * config.warps_n
    at_once = fit(kernel, gpu, config.shared_bytes)
    turn = Amounts(
        tensor=k_tile["mma"] * arithmetic.multiply_adds,
        shared=_wavefronts(k_tile),
        issue=kernel.loop * warps,
        l2=_sectors(k_tile) * SECTOR * read,
    )
    ends = Amounts(
        tensor=rest["mma"] * arithmetic.multiply_adds,
        shared=_wavefronts(rest),
        issue=EPILOGUE_INSTRUCTIONS * rest["shared_wavefronts"] + PROLOGUE_INSTRUCTIONS * warps,
        l2=_sectors(rest) * SECTOR * written,
    )
    loaded = k_tile["global_load_sectors"] * SECTOR
    excess = loaded / ((config.block_m + config.block_n) * config.block_k * config.element_bytes)
    work = Work(
        blocks=tiles * splits,
        at_once=at_once,
        turns=k_tiles,
        turn=turn,
        ends=ends,
        in_flight=config.stages - 1,
        memory_bytes=excess * operand_bytes(gpu, m, n, k, config, at_once) + m * n * config.element_bytes,
    )
    if splits == 1:
        return work
    stored, summed = split_bytes(evidence)
    sums = float(tiles * splits * area)
    beyond_l2 = max(0.0, sums * stored - gpu.l2_capacity / 2)
    finishing = math.ceil(tiles / gpu.processors) * splits  # tiles of the busiest multiprocessor, by their sums
    return dataclasses.replace(
        work,
        ends=ends + Amounts(l2=stored * area),
        memory_bytes=work.memory_bytes + 2 * beyond_l2,
        launches=2,  # the kernel that clears the arrivals
        last=Amounts(l2=finishing * summed * area),
        last_waits=3,  # the stores, the arrival, the loads
    )


def operand_bytes(gpu: Gpu, m: int, n: int, k: int, config: GemmConfig, at_once: int) -> float:
    """What a product reads beyond L2. Blocks that run at the same time go through k side by side, so they share what
    they read; half of L2 keeps what the next ones will want again."""
    rows, columns = math.ceil(m / config.block_m), math.ceil(n / config.block_n)
    running = gpu.processors * at_once
    keeps = gpu.l2_capacity / 2
    a, b = m * k * config.element_bytes, n * k * config.element_bytes
    # a: the rows of a group are read again for every set of columns that run, unless they stay.
    of_group = min(GROUP_ROWS, rows) * config.block_m * k * config.element_bytes
    passes_a = 1 if of_group <= keeps else math.ceil(columns / max(1, running // GROUP_ROWS))
    # b: read again for every set of groups that run, unless all of it stays.
    groups_running = max(1, running // (GROUP_ROWS * columns))
    passes_b = 1 if b <= keeps else math.ceil(math.ceil(rows / GROUP_ROWS) / groups_running)
    return a * passes_a + b * passes_b


def fit(kernel: Kernel, gpu: Gpu, shared_bytes: int = 0) -> int:
    """Blocks of a kernel that fit a multiprocessor at once; `shared_bytes` beside what docs/kernels.md knows."""
    arch = {80: "sm_80", 89: "sm_89", 90: "sm_90a"}[gpu.compute_capability]
    blocks = blocks_per_multiprocessor(dataclasses.replace(kernel, arch=arch), kernel.shared_bytes + shared_bytes)
    if not blocks:
        raise ModelError(f"{kernel.name}: expected to fit a multiprocessor of {gpu.name}, which it does not")
    return blocks


@dataclass(frozen=True)
class Pack:
    """A bucket and its tensors, one next to the other and each long."""

    op: str
    tensors: str  # dtype
    bucket: str
    elements: int
    entries: int

    @property
    def dtypes(self) -> str:
        source, target = (self.bucket, self.tensors) if self.op == "unpack" else (self.tensors, self.bucket)
        return f"{source} to {target}"

    def __str__(self) -> str:
        return f"{self.elements} in {self.entries}"


def bucket_work(evidence: Evidence, gpu: Gpu, pack: Pack) -> Work:
    points = [
        (float(case.split()[-1]), cost)
        for case, cost in evidence.bucket.items()
        if case.startswith(f"{pack.op} {pack.tensors} {pack.bucket} of ")
    ]
    of_element, _ = _line(sorted(points, key=lambda point: point[0]))
    config = evidence.simt.bucket_config()
    element = {"float32": "float", "float16": "half_t", "bfloat16": "bfloat16_t"}[pack.bucket]
    if pack.op == "stats":  # one kernel, as there is no bucket
        element = "float"
    kernel = evidence.kernel(gpu, f"bucket_kernel<{('pack', 'unpack', 'stats').index(pack.op)}, {element}>")
    moved = _sectors(of_element) * SECTOR
    # A block goes through its elements in turns of what its threads have in flight.
    in_turn = config["threads"] * config["bytes_in_flight"]
    turns = math.ceil(config["block_elements"] * of_element["global_load_bytes"] / in_turn)
    return Work(
        blocks=math.ceil(pack.elements / config["block_elements"]),
        at_once=fit(kernel, gpu),
        turns=turns,
        turn=Amounts(l2=moved * config["block_elements"] / turns),
        ends=Amounts(),
        in_flight=1,
        memory_bytes=moved * pack.elements,
        launches=1 + math.ceil(pack.entries / config["table_entries"]),
        last_waits=3,  # the block's sum, the count of blocks, the sums of all
    )
