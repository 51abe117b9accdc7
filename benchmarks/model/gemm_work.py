"""What a matrix product asks of a GPU, as Work."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from benchmarks.model.evidence import (
    DTYPES,
    EPILOGUE_INSTRUCTIONS,
    PROLOGUE_INSTRUCTIONS,
    SECTOR,
    Evidence,
    GemmConfig,
    ModelError,
    fit,
    line_through,
    sectors,
    wavefronts,
)
from benchmarks.model.gpus import Gpu
from benchmarks.model.work import Amounts, Work

GROUP_ROWS = 8  # kGroup of find_tile: rows of tiles that blocks go down before they go right


def _of_block(cost: dict[str, int]) -> dict[str, Any]:
    return {name: count / cost["blocks"] for name, count in cost.items()}


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
    return line_through(sorted(points, key=lambda point: point[0]))


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
        shared=wavefronts(k_tile),
        issue=kernel.loop.instructions * warps,
        l2=sectors(k_tile) * SECTOR * read,
    )
    ends = Amounts(
        tensor=rest["mma"] * arithmetic.multiply_adds,
        shared=wavefronts(rest),
        issue=EPILOGUE_INSTRUCTIONS * rest["shared_wavefronts"] + PROLOGUE_INSTRUCTIONS * warps,
        l2=sectors(rest) * SECTOR * written,
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
        lead=kernel.loop.lead * warps / gpu.issued,
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
