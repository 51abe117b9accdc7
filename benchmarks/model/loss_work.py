"""The time of a loss without logits on wgmma: the products of csrc/ops/loss.cpp, whose logits stay in registers
(csrc/loss/logits_sm90.cuh) or, where gradients are formed in forward, are tiles in memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.model.evidence import Evidence, NotModelledError
from benchmarks.model.gemm_sm90_work import choose, gemm_sm90_work
from benchmarks.model.gpus import Gpu
from benchmarks.model.prediction import predict_gemm
from benchmarks.model.work import Amounts, time_of

CONFIG = 0  # kLogitConfig
# Warp instructions per 32 logits in the machine code of the epilogues, without options: moving a part of the
# accumulators, scaling, and the maximum, difference, exponential and sum; or the gradient, its conversion and store.
STATISTICS_INSTRUCTIONS, GRADIENT_INSTRUCTIONS = 12, 22
PART_COLUMNS, PART_BYTES = 64, 8  # a maximum and a sum


@dataclass(frozen=True)
class LossProblem:
    rows: int
    classes: int
    features: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"M={self.rows}, K={self.features}, V={self.classes}"

    @property
    def flops(self) -> float:
        """Of one product."""
        return 2.0 * self.rows * self.classes * self.features


@dataclass(frozen=True)
class LossPrediction:
    """Seconds."""

    product: float  # of the logits alone, written in the operands' dtype
    forward: float
    backward: float
    in_forward: float  # both, if gradients are formed in forward
    three_products: float  # that a loss cannot do without


def _of_logits(
    gpu: Gpu, problem: LossProblem, rows: int, classes: int, evidence: Evidence, gradient: bool, keeps: bool = False
) -> float:
    """The product with one of the two epilogues; `keeps`: that of statistics also stores the logits, in float32."""
    plan = choose(gpu, rows, classes, problem.features, problem.dtype, "nt", config=CONFIG, splits=1)
    if plan is None:
        raise NotModelledError(f"losses are modelled on wgmma, which {gpu.name} does not have")
    work = gemm_sm90_work(gpu, evidence.simt.gemm_order, rows, classes, problem.features, problem.dtype, plan)
    area, size = plan.block_m * plan.block_n, 128 // plan.block_k
    stored = size if gradient else PART_BYTES / PART_COLUMNS + 4 * keeps  # bytes per logit
    outside = Amounts(
        issue=(GRADIENT_INSTRUCTIONS if gradient else STATISTICS_INSTRUCTIONS) * area / 32,
        special=area,
        l2=stored * area,
    )
    memory = work.memory_bytes + rows * classes * (stored - size)
    if not gradient:  # total_statistics reads the parts
        memory += rows * classes * PART_BYTES / PART_COLUMNS
    launches = work.launches + (not gradient)
    return time_of(dataclasses.replace(work, outside=outside, memory_bytes=memory, launches=launches), gpu).seconds


def predict_loss(gpu: Gpu, problem: LossProblem, memory_limit: int = 2**30) -> LossPrediction:
    evidence = Evidence.recorded()
    m, v, k = problem.rows, problem.classes, problem.features
    dtype, size = problem.dtype, 2

    def product(a: int, b: int, c: int, layout: str) -> float:
        return predict_gemm(gpu, a, b, c, dtype, layout, evidence)[0].seconds

    def moved(count: float) -> float:
        return count / gpu.memory_bytes

    # tile_of_backward: a square of gradients, of whole rows if they fit.
    side = int((memory_limit / size) ** 0.5)
    rows = min(m, max(1024, side // 128 * 128))
    classes = min(v, memory_limit // (rows * size + 4 * k * (rows < m)) // 128 * 128)
    tiles = [(min(rows, m - i), min(classes, v - j)) for j in range(0, v, classes) for i in range(0, m, rows)]
    of_tile = {
        (r, c): _of_logits(gpu, problem, r, c, evidence, True) + product(r, k, c, "nn") + product(c, k, r, "tn")
        for r, c in set(tiles)
    }
    backward = sum(of_tile[tile] for tile in tiles)
    # Sums over several tiles are float32, read and written by each.
    columns, parts = -(-v // classes), -(-m // rows)
    backward += moved(8.0 * m * k * (columns - 1) + 8.0 * v * k * (parts - 1))

    # tile_of_rows: complete rows of float32 logits and their gradients.
    row_bytes = v * (4 + size)
    sums = 0 if memory_limit // row_bytes >= m else 4 * v * k
    fit = min(m, max(1, max(memory_limit - sums, memory_limit // 2) // row_bytes))
    count = -(-m // fit)
    rows = -(-m // count)
    logits = _of_logits(gpu, problem, rows, v, evidence, False, keeps=True)
    gradient_pass = moved(float(rows * v) * (4 + size)) + gpu.launch
    in_forward = count * (logits + gradient_pass + product(rows, k, v, "nn") + product(v, k, rows, "tn"))
    in_forward += moved(8.0 * v * k * (count - 1))
    return LossPrediction(
        product=product(m, v, k, "nt"),
        forward=_of_logits(gpu, problem, m, v, evidence, False),
        backward=backward,
        in_forward=in_forward,
        three_products=product(m, v, k, "nt") + product(m, k, v, "nn") + product(v, k, m, "tn"),
    )
