"""The Work of a scaled product of FP8 on wgmma (csrc/gemm/scaled_gemm_sm90.cuh), and of the conversion to FP8
(csrc/gemm/quantize.cuh); together they are the training step of a linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.model.compiled import golden_kernels
from benchmarks.model.evidence import NotModelledError
from benchmarks.model.gemm_sm90_work import (
    RATE_OF_COLUMNS,
    REMOTE_LATENCY,
    RESTART,
    TMA_STORE_INSTRUCTIONS,
    with_splits,
)
from benchmarks.model.gpus import Gpu
from benchmarks.model.prediction import predict_gemm
from benchmarks.model.work import Amounts, Persistent, Time, Work, time_of

LINE, ROW_BLOCK, CONSUMER_WARPS = 128, 64, 8
PROMOTED_COLUMNS = 128  # of tiles whose products are added to sums in float32
OF_16_BITS = 0.5  # the time of a multiply-add, beside one of 16-bit operands
OUTPUT_BYTES = 2
PRODUCT_LATENCY = 60  # assumed: cycles from the last product of a k tile to its sums in registers


@dataclass(frozen=True)
class ScaledPrediction:
    tile: str
    flops: float
    time: Time


def predict_scaled(
    gpu: Gpu, m: int, n: int, k: int, columns_vary: bool = False, fast_accum: bool = False
) -> ScaledPrediction:
    """Operands in E4M3, contiguous along k; output in bfloat16. columns_vary: with a scale for each 128 elements of
    b."""
    plan = scaled_plan(gpu, m, n, k, fast_accum=fast_accum)
    work = scaled_work(gpu, plan, m, n, k, columns_vary)
    return ScaledPrediction(tile_name(plan), 2.0 * m * n * k, time_of(work, gpu))


def scaled_plan(
    gpu: Gpu, m: int, n: int, k: int, *, groups: int = 0, fast_accum: bool = False, of_terms: bool = False
) -> dict[str, int]:
    import cuda_ext.ops  # noqa: F401

    find: Any = torch.ops.cuda_ext._scaled_mm_plan
    refusal, plan = find(m, n, k, gpu.compute_capability, gpu.sms, groups, fast_accum, of_terms)
    if refusal:
        raise NotModelledError(f"scaled products are modelled on wgmma: {refusal}")
    return dict(plan)


def tile_name(plan: dict[str, int]) -> str:
    splits = f" / {plan['splits']}" if plan["splits"] > 1 else ""
    return f"{plan['block_m']}x{plan['block_n']}x{LINE}{splits}"


def shared_lines(row_blocks: int, block_n: int, columns_vary: bool = False) -> int:
    """Lines of 128 bytes that a k tile writes to shared memory and reads: TMA writes both operands; each wgmma reads 64
    rows and all columns; with promotion each of its warps reads scales: two of rows, and one of all columns or those
    of its columns, two at a time."""
    scales = 4 * (2 + (block_n // 8 if columns_vary else 1)) if block_n <= PROMOTED_COLUMNS else 0
    return block_n + row_blocks * (ROW_BLOCK + ROW_BLOCK + block_n + scales)


def scaled_work(
    gpu: Gpu, plan: dict[str, int], m: int, n: int, k: int, columns_vary: bool = False, of_terms: bool = False
) -> Work:
    """The work of `predict_scaled`, as planned; of_terms: of the kernel for groups of terms."""
    block_m, block_n, cluster = plan["block_m"], plan["block_n"], plan["cluster"]
    tile_blocks = block_m // ROW_BLOCK
    row_blocks = min(tile_blocks, -(-m // ROW_BLOCK))  # others are neither loaded nor multiplied
    promotes = str(block_n <= PROMOTED_COLUMNS).lower()
    config = f"ScaledConfig{{{block_m}, {block_n}, {plan['stages']}, {promotes}}}"
    name, vary = ("ScaledTerms", "") if of_terms else ("ScaledGemm", f", {str(columns_vary).lower()}")
    kernel = golden_kernels()["sm_90a"][f"scaled_gemm_sm90<{name}<float8_e4m3_t, float8_e4m3_t, {config}{vary}>>"]
    area = row_blocks * ROW_BLOCK * block_n
    iteration = Amounts(
        tensor=OF_16_BITS * area * LINE / RATE_OF_COLUMNS[block_n],
        shared=shared_lines(row_blocks, block_n, columns_vary),
        issue=CONSUMER_WARPS * kernel.loop.instructions * row_blocks / tile_blocks,
        l2=(min(m, block_m) / cluster + min(n, block_n)) * LINE,
    )
    outside = Amounts(
        shared=2 * area * OUTPUT_BYTES / LINE,
        issue=TMA_STORE_INSTRUCTIONS * area / 32,
        l2=area * OUTPUT_BYTES,
    )
    # A consumer alone multiplies and adds by turns.
    lone = iteration.tensor / gpu.wgmma_multiply_adds + kernel.loop.instructions + PRODUCT_LATENCY
    bands = -(-plan["row_tiles"] // plan["raster"])  # each of which reads b again, unless all of it stays in L2
    b_bytes = n * k * (1 if n * k <= gpu.l2_capacity / 2 else bands)
    workers = plan["clusters"] * cluster
    splits, tiles = plan["splits"], plan["row_tiles"] * plan["column_groups"] * cluster
    work = Work(
        blocks=tiles * splits,
        blocks_per_sm=1,
        iterations=plan["k_tiles"],
        iteration=iteration,
        outside=outside,
        in_flight=plan["stages"] - 1,
        memory_bytes=float(m * k + b_bytes + OUTPUT_BYTES * m * n),
        lone_cycles=lone if row_blocks == 1 and promotes == "true" else 0.0,
        persistent=Persistent(workers, False, RESTART, 2.0 * REMOTE_LATENCY * (cluster > 1)),
    )
    return with_splits(work, gpu, splits, tiles, workers, 4.0 * area)


# Warp instructions of a tile of 128 x 128 bfloat16, counted in the machine code: loading it; its largest magnitudes;
# its scales; converting and storing a copy.
TILE, TILES_PER_SM = 128, 2
LOADS, MAGNITUDES, SCALES, COPY = 8 * 160, 8 * 560, 8 * 150, 8 * 360


def predict_quantize(gpu: Gpu, rows: int, columns: int, *, blocks: bool, copies: int) -> float:
    """Seconds to convert a matrix of bfloat16: scales of blocks, or of whole lines, which take a kernel before, and one
    that clears its sums; 2 copies: its transpose, too."""
    tiles = -(-rows // TILE) * -(-columns // TILE)
    elements, area = rows * columns, TILE * TILE
    # What the first kernel has read is still in L2, if it fits.
    read_again = 0.0 if 2 * elements <= gpu.l2_capacity / 2 else 2.0 * elements

    def time(issue: int, written: int, memory_bytes: float, launches: int = 1) -> float:
        shared = 2 * area / LINE * (written > 1)  # the transpose
        outside = Amounts(issue=issue, shared=shared, l2=area * (2 + written))
        work = Work(
            blocks=tiles,
            blocks_per_sm=TILES_PER_SM,
            iterations=0,
            iteration=Amounts(),
            outside=outside,
            in_flight=1,
            memory_bytes=memory_bytes,
            launches=launches,
        )
        return time_of(work, gpu).seconds

    if blocks:
        return time(LOADS + MAGNITUDES + SCALES + copies * COPY, copies, (2.0 + copies) * elements)
    return time(LOADS + MAGNITUDES, 0, 2.0 * elements, launches=2) + time(
        LOADS + SCALES + copies * COPY, copies, read_again + copies * elements
    )


@dataclass(frozen=True)
class LayerPrediction:
    """Seconds of the training step of a linear layer."""

    wide: float  # in bfloat16
    products: float
    quantisation: float
    weights: float  # the part of `quantisation` that fp8.unchanged_weights does once for several steps


def predict_layer(gpu: Gpu, tokens: int, inputs: int, outputs: int, recipe: str) -> LayerPrediction:
    """Forward and backward by "rowwise" or "blockwise"."""
    forward, of_input, of_weight = (tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens)
    wide = sum(
        predict_gemm(gpu, *shape, "bfloat16", layout)[0].seconds
        for shape, layout in ((forward, "nt"), (of_input, "nn"), (of_weight, "tn"))
    )
    blocks = recipe == "blockwise"
    products = sum(predict_scaled(gpu, *shape).time.seconds for shape in (forward, of_input))
    products += predict_scaled(gpu, *of_weight, columns_vary=blocks).time.seconds
    weights = 2 * predict_quantize(gpu, outputs, inputs, blocks=blocks, copies=1)
    both = sum(predict_quantize(gpu, tokens, features, blocks=blocks, copies=2) for features in (inputs, outputs))
    return LayerPrediction(wide, products, weights + both, weights)
