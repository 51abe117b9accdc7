"""The Work of a grouped product on wgmma (csrc/gemm/groups_sm90.cuh, scaled_groups_sm90.cuh): that of one product whose
rows are those of all groups, with the rows that their last tiles lack, and a matrix b of each group; of groups of terms
that of a product whose tiles have the terms of one group each."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from benchmarks.model.evidence import Evidence, NotModelledError
from benchmarks.model.gemm_sm90_work import PlanSm90, choose, gemm_sm90_work
from benchmarks.model.gpus import Gpu
from benchmarks.model.scaled_work import ROW_BLOCK, scaled_plan, scaled_work, shared_lines, tile_name
from benchmarks.model.work import Amounts, Persistent, Time, Work, time_of

SIZE = 2
# Cycles until a consumer has the group of an item. In bfloat16 it finds it: loads from L2, sums over lanes. In FP8 the
# scales' warp does, ahead of time, and the consumer reads it from shared memory.
FIND, READ = 400, 60
# Assumed: cycles in which two warps issue the copies of a k tile of gathered rows, 16 of each lane. Those of half of
# the stages are under way (csrc/gemm/gather_sm90.cuh).
GATHER = 1000
# Warp instructions of an activation per 32 sums, as in csrc/gemm/plan_sm90.h, and its exponential and reciprocal.
ACTIVATION_INSTRUCTIONS, ACTIVATION_SPECIAL = 300 / 8, 2


@dataclass(frozen=True)
class GroupedPrediction:
    tile: str
    flops: float
    time: Time


def predict_grouped(
    gpu: Gpu,
    rows: int,
    groups: int,
    n: int,
    k: int,
    float8: bool = False,
    gather: bool = False,
    activation: str | None = None,
    gated: bool = False,
) -> GroupedPrediction:
    """bfloat16, or FP8 with an output in bfloat16; groups of random sizes. bfloat16: the last tile of a group is
    multiplied whole, and is half full on average; FP8: its row blocks that have rows. gather: the loads follow indices
    of rows. gated: b has n gate and n up columns."""
    if float8:
        tile, work = _scaled(gpu, rows, groups, n, k)
    else:
        tile, work = _bfloat16(gpu, rows, groups, n, k, gather, activation, gated)
    columns = 2 * n if gated else n
    moved = (1 if float8 else SIZE) * (rows * k + groups * columns * k) + SIZE * rows * n
    time = time_of(_with_groups(work, moved, READ if float8 else FIND), gpu)
    return GroupedPrediction(tile, 2.0 * rows * columns * k, time)


def predict_terms(gpu: Gpu, terms: int, groups: int, m: int, n: int) -> GroupedPrediction:
    """The gradient of matrices (groups, m, n) from operands in E4M3 with a scale for each 128 elements, in bfloat16.
    Sums of a group begin at a multiple of 128 terms: half a k tile of each is zeros."""
    plan = scaled_plan(gpu, m, n, terms, groups=groups, of_terms=True)
    plan["k_tiles"] = math.ceil(terms / groups / 128 + 0.5)
    work = scaled_work(gpu, plan, m, n, terms, columns_vary=True, of_terms=True)
    work = dataclasses.replace(work, blocks=groups * work.blocks)
    moved = terms * (m + n) + SIZE * groups * m * n
    time = time_of(_with_groups(work, moved, READ, launches=0), gpu)
    return GroupedPrediction(tile_name(plan), 2.0 * terms * m * n, time)


def predict_copied_rows(gpu: Gpu, rows: int, k: int) -> float:
    """Seconds to copy rows of bfloat16 that are at indices, as `grouped_mm` need not."""
    return gpu.launch + 2.0 * SIZE * rows * k / gpu.memory_bytes


def _with_groups(work: Work, moved: float, restart: int, launches: int = 1) -> Work:
    """launches: of the kernel that clears the rows after the last group."""
    assert work.persistent is not None
    persistent: Persistent = dataclasses.replace(work.persistent, restart=work.persistent.restart + restart)
    return dataclasses.replace(
        work, memory_bytes=float(moved), launches=work.launches + launches, persistent=persistent
    )


def _scaled(gpu: Gpu, rows: int, groups: int, n: int, k: int) -> tuple[str, Work]:
    plan = scaled_plan(gpu, rows, n, k, groups=groups)
    block_m = plan["block_m"]
    # The last tile of a group has from 1 row block to all of them, and needs the tile of b however few it has.
    lines = [shared_lines(row_blocks, plan["block_n"]) for row_blocks in range(1, block_m // ROW_BLOCK + 1)]
    tiles = math.ceil(rows / block_m + groups * (mean(lines) / lines[-1] - 0.5))
    plan["row_tiles"] = tiles
    plan["clusters"] = min(tiles * plan["column_groups"], gpu.sms // plan["cluster"])
    return tile_name(plan), scaled_work(gpu, plan, tiles * block_m, n, k)


def _grouped_plan(
    gpu: Gpu, rows: int, groups: int, n: int, k: int, gather: bool, activation: str | None, gated: bool
) -> PlanSm90:
    """What the launcher chooses."""
    import cuda_ext.ops  # noqa: F401

    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    indices = empty(rows, dtype=torch.int32) if gather else None
    b, offs = empty(groups, 2 * n if gated else n, k).mT, empty(groups, dtype=torch.int32)
    plan: Any = torch.ops.cuda_ext._gemm_plan
    kernel, _, _, numbers, cycles = plan(
        empty(rows, k), b, None, None, None, offs, indices, activation, 1.0, 1.0, None, gated, False,
        gpu.compute_capability, gpu.sms,
    )  # fmt: skip
    if kernel != "sm_90":
        raise NotModelledError(f"grouped products are modelled on wgmma, which {gpu.name} does not have")
    return PlanSm90(dict(numbers), cycles)


def _bfloat16(
    gpu: Gpu, rows: int, groups: int, n: int, k: int, gather: bool, activation: str | None, gated: bool
) -> tuple[str, Work]:
    chosen = _grouped_plan(gpu, rows, groups, n, k, gather, activation, gated)
    tile_rows = chosen.block_m * chosen.cluster
    padded = math.ceil(rows / tile_rows + groups / 2) * tile_rows
    columns = 2 * n if gated else n
    plan = choose(gpu, padded, columns, k, "bfloat16", "nt", chosen.config, chosen.cluster, splits=1)
    assert plan is not None
    work = gemm_sm90_work(gpu, Evidence.recorded().simt.gemm_order, padded, columns, k, "bfloat16", plan)
    area, outside = plan.block_m * plan.block_n, work.outside
    if gated:  # stores half as much
        outside = dataclasses.replace(outside, shared=outside.shared / 2, l2=outside.l2 / 2)
    if activation is not None:
        activated = area / 2 if gated else area
        outside += Amounts(issue=ACTIVATION_INSTRUCTIONS * activated / 32, special=ACTIVATION_SPECIAL * activated)
    if gather:
        work = dataclasses.replace(work, in_flight=plan.stages // 2, lone_cycles=GATHER)
    return str(plan), dataclasses.replace(work, outside=outside)
