"""The Work of a scaled product of FP8 on wgmma (csrc/gemm/scaled_gemm_sm90.cuh)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.model.compiled import golden_kernels
from benchmarks.model.evidence import NotModelledError
from benchmarks.model.gemm_sm90_work import RATE_OF_COLUMNS, REMOTE_LATENCY, RESTART, TMA_STORE_INSTRUCTIONS
from benchmarks.model.gpus import Gpu
from benchmarks.model.work import Amounts, Persistent, Time, Work, time_of

LINE, CONSUMER_WARPS = 128, 8
OF_16_BITS = 0.5  # the time of a multiply-add, beside one of 16-bit operands
OUTPUT_BYTES = 2


@dataclass(frozen=True)
class ScaledPrediction:
    tile: str
    flops: float
    time: Time


def predict_scaled(gpu: Gpu, m: int, n: int, k: int) -> ScaledPrediction:
    """Operands in E4M3, contiguous along k; output in bfloat16; no scales for each 128 elements of b."""
    import cuda_ext.ops  # noqa: F401

    find: Any = torch.ops.cuda_ext._scaled_mm_plan
    refusal, plan = find(m, n, k, gpu.compute_capability, gpu.sms)
    if refusal:
        raise NotModelledError(f"scaled products are modelled on wgmma: {refusal}")
    block_m, block_n, cluster = plan["block_m"], plan["block_n"], plan["cluster"]
    config = f"ScaledConfig{{{block_m}, {plan['stages']}}}"
    kernel = golden_kernels()["sm_90a"][f"scaled_gemm_sm90<ScaledGemm<float8_e4m3_t, float8_e4m3_t, {config}, false>>"]
    area, row_blocks = block_m * block_n, block_m / 64
    iteration = Amounts(
        tensor=OF_16_BITS * area * LINE / RATE_OF_COLUMNS[block_n],
        # TMA writes both tiles; each wgmma reads 64 rows and all columns; each of its warps reads three scales.
        shared=block_m + block_n + row_blocks * (64 + block_n) + row_blocks * 4 * 3,
        issue=CONSUMER_WARPS * kernel.loop.instructions,
        l2=(min(m, block_m) / cluster + min(n, block_n)) * LINE,
    )
    outside = Amounts(
        shared=2 * area * OUTPUT_BYTES / LINE,
        issue=TMA_STORE_INSTRUCTIONS * area / 32,
        l2=area * OUTPUT_BYTES,
    )
    bands = -(-plan["row_tiles"] // plan["raster"])  # each of which reads b again, unless all of it stays in L2
    b_bytes = n * k * (1 if n * k <= gpu.l2_capacity / 2 else bands)
    workers = plan["clusters"] * cluster
    work = Work(
        blocks=plan["row_tiles"] * plan["column_groups"] * cluster,
        blocks_per_sm=1,
        iterations=plan["k_tiles"],
        iteration=iteration,
        outside=outside,
        in_flight=plan["stages"] - 1,
        memory_bytes=float(m * k + b_bytes + OUTPUT_BYTES * m * n),
        persistent=Persistent(workers, False, RESTART, 2.0 * REMOTE_LATENCY * (cluster > 1)),
    )
    return ScaledPrediction(f"{block_m}x{block_n}x{LINE}", 2.0 * m * n * k, time_of(work, gpu))
