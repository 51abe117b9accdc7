"""The Work of a grouped product on wgmma (csrc/gemm/groups_sm90.cuh): that of one product whose rows are those of all
groups, with the rows that their last tiles lack, and a matrix b of each group."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from benchmarks.model.evidence import Evidence, NotModelledError
from benchmarks.model.gemm_sm90_work import choose, gemm_sm90_work
from benchmarks.model.gpus import Gpu
from benchmarks.model.work import Time, time_of

TILE_ROWS, SIZE = 128, 2
WIDE, NARROW = 0, 2  # of kConfigs, as kGroupedConfigs
FIND = 400  # cycles until a warp has the group of an item: loads from L2, sums over lanes


@dataclass(frozen=True)
class GroupedPrediction:
    tile: str
    flops: float
    time: Time


def predict_grouped(gpu: Gpu, rows: int, groups: int, n: int, k: int) -> GroupedPrediction:
    """bfloat16; groups of random sizes, whose last tile is half full on average."""
    cluster = 2 if math.ceil(rows / groups / TILE_ROWS) >= 4 else 1
    tile_rows = TILE_ROWS * cluster
    padded = math.ceil(rows / tile_rows + groups / 2) * tile_rows
    plan = choose(gpu, padded, n, k, "bfloat16", "nt", WIDE if n > 128 else NARROW, cluster, splits=1)
    if plan is None:
        raise NotModelledError(f"grouped products are modelled on wgmma, which {gpu.name} does not have")
    work = gemm_sm90_work(gpu, Evidence.recorded().simt.gemm_order, padded, n, k, "bfloat16", plan)
    persistent = work.persistent
    assert persistent is not None
    time = time_of(
        dataclasses.replace(
            work,
            memory_bytes=float(SIZE * (rows * k + groups * n * k + rows * n)),
            launches=work.launches + 1,  # one more kernel clears the rows after the last group
            persistent=dataclasses.replace(persistent, restart=persistent.restart + FIND),
        ),
        gpu,
    )
    return GroupedPrediction(str(plan), 2.0 * rows * n * k, time)
