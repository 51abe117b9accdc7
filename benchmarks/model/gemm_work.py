"""The Work of a matrix product."""

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
    more_instructions,
    multiply_adds,
    sectors,
    wavefronts,
)
from benchmarks.model.gpus import Gpu
from benchmarks.model.work import Amounts, Work

GROUP_ROWS = 8  # kBand of find_tile: blocks cover this many rows of tiles before the next column


def _of_block(cost: dict[str, int]) -> dict[str, Any]:
    return {name: count / cost["blocks"] for name, count in cost.items()}


def block_costs(evidence: Evidence, dtype: str, layout: str, config: GemmConfig) -> tuple[dict[str, float], ...]:
    """Counters of a block: per k tile, and for the rest of its work; for a tile inside the matrix."""
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
    """Split k: bytes per float of a tile's sums that each block writes, and that the last block of a tile reads."""
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
    # Tiles at the edges multiply as much as others, but read and write only what is inside the matrix.
    read = (m / rows + n / columns) / (config.block_m + config.block_n)
    written = m * n / (tiles * area)
    warps = config.warps_m * config.warps_n
    blocks_per_sm = fit(kernel, gpu, config.shared_bytes)
    iteration = Amounts(
        tensor=k_tile["mma"] * multiply_adds(gpu, dtype),
        shared=wavefronts(k_tile),
        issue=kernel.loop.instructions * warps + more_instructions(gpu, k_tile, dtype),
        l2=sectors(k_tile) * SECTOR * read,
    )
    outside = Amounts(
        tensor=rest["mma"] * multiply_adds(gpu, dtype),
        shared=wavefronts(rest),
        issue=EPILOGUE_INSTRUCTIONS * rest["shared_wavefronts"] + PROLOGUE_INSTRUCTIONS * warps,
        l2=sectors(rest) * SECTOR * written,
    )
    loaded = k_tile["global_load_sectors"] * SECTOR
    excess = loaded / ((config.block_m + config.block_n) * config.block_k * config.element_bytes)
    work = Work(
        blocks=tiles * splits,
        blocks_per_sm=blocks_per_sm,
        iterations=k_tiles,
        iteration=iteration,
        outside=outside,
        in_flight=config.stages - 1 if gpu.has_cp_async else 1,
        lead=kernel.loop.lead * warps / gpu.issued + (0 if gpu.has_cp_async else gpu.memory_latency),
        memory_bytes=excess * operand_bytes(gpu, m, n, k, config, blocks_per_sm) + m * n * config.element_bytes,
    )
    if splits == 1:
        return work
    stored, summed = split_bytes(evidence)
    sums = float(tiles * splits * area)
    beyond_l2 = max(0.0, sums * stored - gpu.l2_capacity / 2)
    finishing = math.ceil(tiles / gpu.sms) * splits  # splits of the tiles of the busiest SM
    return dataclasses.replace(
        work,
        outside=outside + Amounts(l2=stored * area),
        memory_bytes=work.memory_bytes + 2 * beyond_l2,
        launches=2,  # one more kernel resets the split-k arrival counters
        tail=Amounts(l2=finishing * summed * area),
        tail_waits=3,  # stores, arrival, loads
    )


def operand_bytes(gpu: Gpu, m: int, n: int, k: int, config: GemmConfig, blocks_per_sm: int) -> float:
    """Bytes that a product reads from memory. Concurrent blocks advance through k together and share what they read;
    half of L2 is assumed to retain what later blocks read again."""
    rows, columns = math.ceil(m / config.block_m), math.ceil(n / config.block_n)
    running = gpu.sms * blocks_per_sm
    retained = gpu.l2_capacity / 2
    a, b = m * k * config.element_bytes, n * k * config.element_bytes
    # a: the rows of a group are read again for each set of concurrent columns, unless L2 retains them.
    of_group = min(GROUP_ROWS, rows) * config.block_m * k * config.element_bytes
    passes_a = 1 if of_group <= retained else math.ceil(columns / max(1, running // GROUP_ROWS))
    # b: read again for each set of concurrent groups, unless L2 retains all of it.
    groups_running = max(1, running // (GROUP_ROWS * columns))
    passes_b = 1 if b <= retained else math.ceil(math.ceil(rows / GROUP_ROWS) / groups_running)
    return a * passes_a + b * passes_b
