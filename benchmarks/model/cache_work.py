"""The work of attention over a cache (csrc/attention/attention_cache_sm80.cuh): decoding.

Bytes, products and steps are those that tests/simt/test_attention_cache.py counts; instructions come from the machine
code. Not modelled: masks, so all queries see all keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.model.evidence import (
    DTYPES,
    EPILOGUE_INSTRUCTIONS,
    PROLOGUE_INSTRUCTIONS,
    Evidence,
    demangled,
    fit,
    multiply_adds,
)
from benchmarks.model.gpus import Gpu
from benchmarks.model.work import Amounts, Time, Work, time_of

DTYPE = "bfloat16"
SIZE = 2  # bytes of an element
ROWS_OF_COMBINE = 4  # of a block of attention_cache_combine
# Loads that wait for each other before the first keys: the lengths, an entry of the block table.
LOOKUPS = 2


@dataclass(frozen=True)
class CacheProblem:
    """Sequences of one length, each with some newest queries."""

    batch: int
    keys: int
    heads: int
    heads_kv: int
    dim: int
    queries: int = 1

    def __str__(self) -> str:
        several = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{self.batch} x {self.keys}, H={self.heads}/{self.heads_kv} D={self.dim}{several}"

    @property
    def key_bytes(self) -> int:
        """Of keys and values, read once for all heads of a group."""
        return 2 * self.batch * self.keys * self.heads_kv * self.dim * SIZE

    @property
    def rows(self) -> int:
        return self.batch * self.queries * self.heads


@dataclass(frozen=True)
class CachePrediction:
    problem: CacheProblem
    splits: int
    items: int
    blocks: int
    attend: Time
    lookups: float  # seconds, before the first keys
    combine: Time | None  # of the parts
    append: float  # seconds, for one more launch

    @property
    def seconds(self) -> float:
        """Without the append, which a model may do in another kernel."""
        return self.attend.seconds + self.lookups + (self.combine.seconds if self.combine else 0.0)


def predict_cache(gpu: Gpu, problem: CacheProblem, evidence: Evidence | None = None) -> CachePrediction:
    evidence = evidence or Evidence.recorded()
    p = problem
    choice = evidence.simt.cache_choice(
        [p.keys] * p.batch, p.keys, p.queries, (p.heads, p.heads_kv), p.dim, gpu.compute_capability, gpu.sms
    )
    tile = choice.tile
    kernel = evidence.kernel(gpu, f"attention_cache_sm80<{demangled(choice.kernel)}>")
    rows_of_item = (
        p.queries * p.heads // p.heads_kv / math.ceil(len(choice.steps) / (p.batch * p.heads_kv * choice.splits))
    )
    of_mma = DTYPES[DTYPE].multiply_adds
    tile_bytes = tile["block_n"] * 2 * tile["dim"] * SIZE
    key_warps = tile["warps"] * 16 // tile["block_m"]
    parts = p.rows * (p.dim + 1) * 4 if choice.splits > 1 else 0  # bytes of one split
    # Each warp reads its keys and values, and all of its queries for each tile.
    queries_read = tile["block_m"] * tile["dim"] * SIZE * key_warps
    iteration = Amounts(
        tensor=tile["block_m"] * tile["block_n"] * 2 * tile["dim"] * multiply_adds(gpu, DTYPE) / of_mma,
        shared=(tile_bytes * (1 + tile["warps"] / key_warps) + queries_read) / 128,
        issue=kernel.loop.instructions * tile["warps"],
        special=tile["block_m"] * tile["block_n"],
        l2=tile_bytes,
    )
    stored = key_warps * tile["block_m"] * tile["dim"] * 4
    outside = Amounts(
        shared=2 * stored / 128,
        issue=EPILOGUE_INSTRUCTIONS * 2 * stored / 128 + PROLOGUE_INSTRUCTIONS * tile["warps"],
        l2=rows_of_item * p.dim * (SIZE + 4),
    )
    attend = Work(
        blocks=len(choice.steps),
        blocks_per_sm=min(tile["min_blocks"], fit(kernel, gpu, tile["shared_bytes"])),
        iterations=choice.steps[0] if len(set(choice.steps)) == 1 else choice.steps,
        iteration=iteration,
        outside=outside,
        in_flight=1,
        memory_bytes=p.key_bytes + p.rows * p.dim * 2 * SIZE,
    )
    combine = None
    if parts:
        name = f"attention_cache_combine<bfloat16_t, {tile['block_n']}, 128>"
        blocks = math.ceil(p.rows / ROWS_OF_COMBINE)
        combine = time_of(
            Work(
                blocks=blocks,
                blocks_per_sm=fit(evidence.kernel(gpu, name), gpu),
                iterations=0,
                iteration=Amounts(),
                outside=Amounts(l2=parts * choice.splits / blocks),
                in_flight=1,
                memory_bytes=0.0,  # what the first launch wrote is in L2
                tail_waits=1,  # sums of probs, then outputs
            ),
            gpu,
        )
    wait = gpu.memory_latency / gpu.clock
    return CachePrediction(
        problem,
        choice.splits,
        len(choice.steps),
        choice.blocks,
        time_of(attend, gpu),
        LOOKUPS * wait,
        combine,
        gpu.launch,
    )
