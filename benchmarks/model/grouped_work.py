"""The Work of a grouped product on wgmma (csrc/gemm/groups_sm90.cuh): that of one product whose rows are those of all
groups, with the rows that their last tiles lack, and a matrix b of each group."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import mean

from benchmarks.model.evidence import Evidence, NotModelledError
from benchmarks.model.gemm_sm90_work import choose, gemm_sm90_work
from benchmarks.model.gpus import Gpu
from benchmarks.model.scaled_work import ROW_BLOCK, scaled_plan, scaled_work, shared_lines, tile_name
from benchmarks.model.work import Time, Work, time_of

TILE_ROWS, SIZE = 128, 2
WIDE, NARROW = 0, 2  # of kConfigs, as kGroupedConfigs
# Cycles until a consumer has the group of an item. In bfloat16 it finds it: loads from L2, sums over lanes. In FP8 the
# scales' warp does, ahead of time, and the consumer reads it from shared memory.
FIND, READ = 400, 60


@dataclass(frozen=True)
class GroupedPrediction:
    tile: str
    flops: float
    time: Time


def predict_grouped(gpu: Gpu, rows: int, groups: int, n: int, k: int, float8: bool = False) -> GroupedPrediction:
    """bfloat16, or FP8 with an output in bfloat16; groups of random sizes. bfloat16: the last tile of a group is
    multiplied whole, and is half full on average; FP8: its row blocks that have rows."""
    tile, work = (_scaled if float8 else _bfloat16)(gpu, rows, groups, n, k)
    persistent = work.persistent
    assert persistent is not None
    size = 1 if float8 else SIZE
    time = time_of(
        dataclasses.replace(
            work,
            memory_bytes=float(size * (rows * k + groups * n * k) + SIZE * rows * n),
            launches=work.launches + 1,  # one more kernel clears the rows after the last group
            persistent=dataclasses.replace(persistent, restart=persistent.restart + (READ if float8 else FIND)),
        ),
        gpu,
    )
    return GroupedPrediction(tile, 2.0 * rows * n * k, time)


def _scaled(gpu: Gpu, rows: int, groups: int, n: int, k: int) -> tuple[str, Work]:
    plan = scaled_plan(gpu, rows, n, k, groups=groups)
    block_m = plan["block_m"]
    # The last tile of a group has from 1 row block to all of them, and needs the tile of b however few it has.
    lines = [shared_lines(row_blocks, plan["block_n"]) for row_blocks in range(1, block_m // ROW_BLOCK + 1)]
    tiles = math.ceil(rows / block_m + groups * (mean(lines) / lines[-1] - 0.5))
    plan["row_tiles"] = tiles
    plan["clusters"] = min(tiles * plan["column_groups"], gpu.sms // plan["cluster"])
    return tile_name(plan), scaled_work(gpu, plan, tiles * block_m, n, k)


def _bfloat16(gpu: Gpu, rows: int, groups: int, n: int, k: int) -> tuple[str, Work]:
    cluster = 2 if math.ceil(rows / groups / TILE_ROWS) >= 4 else 1
    tile_rows = TILE_ROWS * cluster
    padded = math.ceil(rows / tile_rows + groups / 2) * tile_rows
    plan = choose(gpu, padded, n, k, "bfloat16", "nt", WIDE if n > 128 else NARROW, cluster, splits=1)
    if plan is None:
        raise NotModelledError(f"grouped products are modelled on wgmma, which {gpu.name} does not have")
    work = gemm_sm90_work(gpu, Evidence.recorded().simt.gemm_order, padded, n, k, "bfloat16", plan)
    return str(plan), work
