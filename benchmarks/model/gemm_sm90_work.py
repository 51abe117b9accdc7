"""The Work of a matrix product on wgmma (csrc/gemm/gemm_sm90.cuh)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.model.evidence import DTYPES
from benchmarks.model.gpus import Gpu
from benchmarks.model.l2 import bytes_read
from benchmarks.model.work import Amounts, Persistent, Work

# wgmma that reads both operands from shared memory, with n columns, relative to 256 (arXiv 2402.13499, H800, random
# numbers: 87.9, 87.2, 85.7 %). Fewer than 64 are limited by reading a, which counts as use of shared memory.
RATE_OF_COLUMNS = {256: 1.0, 192: 1.0, 128: 0.992, 64: 0.975, 16: 0.975}
# Assumed: warp instructions per 32 sums of an epilogue that stores them by TMA (selecting, scaling, half a conversion
# and an eighth of an stmatrix, with its address), and of one that stages them as floats; and cycles between the last
# product of a tile and the first of the next, without the epilogue.
TMA_STORE_INSTRUCTIONS, STAGED_INSTRUCTIONS = 6, 12
RESTART = 500
# From an SM to the shared memory of another of its cluster: 180 cycles (arXiv 2402.13499); assumed: 16 bytes per cycle.
# A cluster waits for all of its blocks to begin and to end; where they divide k, also for their sums.
REMOTE_LATENCY, REMOTE_BYTES = 180, 16
NUM_CONFIGS, MAX_K_BLOCKS = 5, 8  # of kConfigs
GPC_SMS = 16  # or 18; a cluster is in one GPC
TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class PlanSm90:
    """A plan of csrc/gemm/plan_sm90.h, as the op `_gemm_plan` describes it."""

    numbers: dict[str, int]
    cycles: float  # by the plan's own cost model

    def __getattr__(self, name: str) -> int:
        try:
            return int(self.__dict__["numbers"][name])
        except KeyError:
            raise AttributeError(name) from None

    @property
    def cluster_blocks(self) -> int:
        return self.cluster * self.k_blocks

    def waves(self, sms: int) -> float:
        return self.items * self.cluster_blocks / sms

    def __str__(self) -> str:
        """As the column "kernel" shows it: 128x256x64 cluster 2."""
        notes = [
            f"{self.block_m}x{self.block_n}x{self.block_k}",
            *(["transposed"] * self.swapped),
            *(["ping-pong"] * self.ping_pong),
            *([f"cluster {self.cluster}"] * (self.cluster > 1)),
            *([f"k in {self.k_blocks} blocks"] * (self.k_blocks > 1)),
            *([f"after copies of {self.copies.bit_count()}"] * (self.copies > 0)),
        ]
        return " ".join(notes)


@contextlib.contextmanager
def _float32_as(dtype: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def choose(
    gpu: Gpu,
    m: int,
    n: int,
    k: int,
    dtype: str,
    layout: str,
    config: int = -1,
    cluster: int = 0,
    k_blocks: int = 0,
    splits: int = 0,
) -> PlanSm90 | None:
    """The plan that the launcher chooses, restricted as in sm90::Restriction; None if mma.sync runs instead."""
    import cuda_ext.ops  # noqa: F401

    def operand(rows: int, columns: int, letter: str) -> torch.Tensor:
        sizes = (rows, columns) if letter == "n" else (columns, rows)
        tensor = torch.empty(sizes, dtype=TORCH_DTYPES[dtype], device="meta")
        return tensor if letter == "n" else tensor.mT

    a, b = operand(m, k, layout[0]), operand(k, n, layout[1])
    plan: Any = torch.ops.cuda_ext._gemm_plan
    with _float32_as(dtype):
        kernel, _, _, numbers, cycles = plan(
            a, b, None, None, None, None, None, None, 1.0, 1.0, None, False, False, gpu.compute_capability, gpu.sms,
            config=config, cluster=cluster, k_blocks=k_blocks, splits=splits,
        )  # fmt: skip
    return PlanSm90(dict(numbers), cycles) if kernel == "sm_90" else None


def gemm_sm90_work(gpu: Gpu, order: Any, m: int, n: int, k: int, dtype: str, plan: PlanSm90) -> Work:
    """order: `gemm_order` of the emulated module."""
    arithmetic = DTYPES[dtype]
    size = 128 // plan.block_k
    rows, columns = (n, m) if plan.swapped else (m, n)
    area = plan.block_m * plan.block_n
    row_blocks = plan.block_m / 64
    line = 128.0  # bytes
    # Lines of a tile beyond the matrix are filled with zeros, and not transferred.
    loaded = min(rows, plan.block_m) + min(columns, plan.block_n) / plan.cluster
    iteration = Amounts(
        tensor=area * plan.block_k * arithmetic.products / RATE_OF_COLUMNS[plan.block_n],
        # TMA writes both tiles; each wgmma reads 64 rows and all columns.
        shared=plan.block_m + plan.block_n + row_blocks * (64 + plan.block_n),
        l2=loaded * line,
    )
    per_sum = TMA_STORE_INSTRUCTIONS if plan.tma_store else STAGED_INSTRUCTIONS
    tiles = plan.row_groups * plan.cluster * plan.column_tiles
    stored = m * n * size / tiles
    outside = Amounts(
        shared=2 * area * (size if plan.tma_store else 4) / 128,
        issue=per_sum * area / 32,
        l2=stored,
    )
    k_tiles = plan.k_tiles * plan.k_blocks  # of a work item
    read = bytes_read({**plan.numbers, "k_tiles": k_tiles}, order(plan.numbers), gpu.l2_capacity, size)
    # The simulation reads whole tiles; those at the edges are not whole.
    whole = tiles // plan.column_tiles * plan.block_m * k_tiles * plan.splits * line
    whole_b = plan.column_tiles * plan.block_n * k_tiles * plan.splits * line
    inside = float((m + n) * k * size) / (whole + whole_b)
    once = 2.0 * REMOTE_LATENCY * (plan.cluster_blocks > 1)
    if plan.k_blocks > 1:
        once += REMOTE_LATENCY + (plan.k_blocks - 1) * 4.0 * area / REMOTE_BYTES
    of_gpc = GPC_SMS // plan.cluster_blocks * (gpu.sms // GPC_SMS)
    at_once = gpu.sms // plan.cluster_blocks if plan.cluster_blocks <= 2 else of_gpc
    # A copy is read and written once.
    copied = 2.0 * size * k * (m * (plan.copies & 1) + n * (plan.copies >> 1))
    work = Work(
        blocks=plan.items * plan.cluster_blocks,
        blocks_per_sm=1,
        iterations=plan.k_tiles,
        iteration=iteration,
        outside=outside,
        in_flight=plan.stages - 1,
        memory_bytes=read * inside + m * n * size + copied,
        launches=1 + plan.copies.bit_count(),
        persistent=Persistent(min(plan.clusters, at_once) * plan.cluster_blocks, bool(plan.ping_pong), RESTART, once),
    )
    return with_splits(work, gpu, plan.splits, tiles, plan.clusters * plan.cluster, 4.0 * area)


def with_splits(work: Work, gpu: Gpu, splits: int, tiles: int, at_once: int, sums: float) -> Work:
    """Of `tiles` tiles, `at_once` of which are multiplied at the same time, with k divided through memory. sums: bytes
    of those of a tile."""
    if splits == 1:
        return work
    beyond_l2 = max(0.0, splits * tiles * sums - gpu.l2_capacity / 2)
    finishing = math.ceil(tiles / at_once) * splits
    return dataclasses.replace(
        work,
        outside=work.outside + Amounts(l2=sums),
        memory_bytes=work.memory_bytes + 2 * beyond_l2,
        launches=work.launches + 1,  # one more kernel resets the arrival counters
        tail=Amounts(l2=finishing * sums),
        tail_waits=3,  # stores, arrival, loads
    )
