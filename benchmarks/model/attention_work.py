"""The Work of attention."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.model.evidence import (
    DTYPES,
    EPILOGUE_INSTRUCTIONS,
    PROLOGUE_INSTRUCTIONS,
    SECTOR,
    Evidence,
    ModelError,
    NotModelledError,
    demangled,
    fit,
    line_through,
    more_instructions,
    multiply_adds,
    sectors,
    wavefronts,
)
from benchmarks.model.gpus import Gpu
from benchmarks.model.work import Amounts, Persistent, Work
from benchmarks.suites.bench_attention import Problem
from cuda_ext.block_mask import BLOCK

THREADS_OF_ROWS = 128  # of attention_bwd_rows
# Of the resources of a step on wgmma: the softmax runs under the other consumers' products, but begins when its logits
# arrive. With 2, the tiles of FlashAttention-3 would reach 513, 692 and 764 TFLOP/s at D = 64, 128 and 256; measured on
# an H100 were 497, 648 and 756 (arXiv 2407.08608, full attention, S = 16k).
OVERLAP_OF_SOFTMAX = 2
# Of a step of backward on wgmma. With 1.25, the same tiles give 543 and 481 TFLOP/s at D = 128 and 64 on an H100; those
# of FlashAttention-3, of the same sizes, measured 561 and 474 (arXiv 2407.08608, full attention, S = 16k). Theirs does
# not store dQ under the next scores.
OVERLAP_OF_GRADIENTS = 1.25
BLOCK_START_CYCLES = 1000  # assumed: barriers, tensor maps, and the task, of a block that is not persistent
ATTENTION_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class AttentionTile:
    dim: int
    dim_v: int
    block_m: int
    block_n: int
    warps: int
    min_blocks: int
    stages: int
    shared_bytes: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}"


@dataclass(frozen=True)
class Division:
    """Of the tiles with the longest lists of a block mask: LongLists in csrc/attention/scheduler.cuh."""

    tiles: int = 0  # of a head
    most_parts: int = 1
    shortest: int = 1  # blocks of a part


@dataclass(frozen=True)
class ListedProblem(Problem):
    """Attention with a block mask."""

    lists: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # blocks listed for each block of queries, and of keys

    def pairs(self) -> float:
        return float(BLOCK**2 * sum(self.lists[0]))

    def op(self) -> str:
        return "flash_attention block mask"

    def parts(self, tile: AttentionTile, backward: bool, division: Division) -> list[int]:
        """Among how many blocks each of the tiles with the longest lists is divided, as divided_among in
        csrc/attention/block_lists.cuh."""
        tiles_of_list = BLOCK // (tile.block_n if backward else tile.block_m)
        counts = sorted(self.lists[backward], reverse=True)
        if not division.tiles:
            return []
        other = max(counts[division.tiles // tiles_of_list], division.shortest)
        return [min(max(counts[n // tiles_of_list] // other, 1), division.most_parts) for n in range(division.tiles)]

    def steps_of_head(self, tile: AttentionTile, backward: bool, division: Division = Division()) -> list[int]:
        """Steps of the blocks of a head, in backward of a group, the longest lists first."""
        looped, own = (tile.block_m, tile.block_n) if backward else (tile.block_n, tile.block_m)
        times = BLOCK // looped * (self.heads // self.groups if backward else 1)
        counts = sorted(self.lists[backward], reverse=True)
        of_tiles = [times * count for count in counts for _ in range(BLOCK // own)]
        parts = self.parts(tile, backward, division)
        steps = []
        for n, count in enumerate(of_tiles):
            part = math.ceil(count / parts[n]) if n < len(parts) else count
            steps += [min(part, count - first) for first in range(0, count, part)] if part else [0]
        return steps


@dataclass(frozen=True)
class PackedProblem(Problem):
    """Causal attention of sequences of different lengths, by the kernels of flash_attention_varlen."""

    lengths: tuple[int, ...] = ()

    def pairs(self) -> float:
        return sum(length**2 / 2 for length in self.lengths)

    def op(self) -> str:
        return "flash_attention_varlen causal"

    def steps_of_head(self, tile: AttentionTile, backward: bool) -> list[int]:
        steps = []
        for length in self.lengths:
            for first in range(0, length, tile.block_n if backward else tile.block_m):
                if backward:
                    of_head = math.ceil(length / tile.block_m) - first // tile.block_m
                    steps.append(of_head * self.heads // self.groups)
                else:
                    steps.append(math.ceil(min(first + tile.block_m, length) / tile.block_n))
        return sorted(steps, reverse=True)


@dataclass(frozen=True)
class AttentionChoice:
    """A launcher's choice for a problem, and the steps of its blocks in launch order."""

    tile: AttentionTile
    kernel: str  # template arguments of the main kernel, as in golden_kernels.json
    steps: tuple[int, ...]
    by_wgmma: bool
    parts: int = 0  # of tiles that are divided, of all heads

    @property
    def has_kernel_for_queries(self) -> bool:
        return "BackwardKeys" in self.kernel


def attention_choice(evidence: Evidence, gpu: Gpu, problem: Problem, dtype: str, backward: bool) -> AttentionChoice:
    if gpu.compute_capability < 80 and (backward or problem.dim > 128):
        raise NotModelledError(f"{problem.op()} {problem.name()}: the tiles that {gpu.name} alone has are not counted")
    unbounded = -1
    window = (unbounded if problem.window is None else problem.window, 0 if problem.causal else unbounded)
    choice = evidence.simt.attention_choice(
        *(backward, dtype, (problem.length, problem.seen_keys), (problem.heads, problem.groups)),
        *((problem.dim, problem.dim), problem.batch, window, isinstance(problem, ListedProblem)),
        *(gpu.compute_capability, gpu.sms),
    )
    tile = AttentionTile(**choice.tile)
    of_head, parts = choice.steps, 0
    if isinstance(problem, PackedProblem):
        of_head = problem.steps_of_head(tile, backward)
    if isinstance(problem, ListedProblem):
        division = Division(choice.long_tiles, choice.most_parts, evidence.simt.SHORTEST_PART)
        of_head = problem.steps_of_head(tile, backward, division)
        parts = choice.head_batches * sum(n for n in problem.parts(tile, backward, division) if n > 1)
    if choice.splits > 1 or problem.deterministic:
        raise NotModelledError(
            f"{problem.op()} {problem.name()}: expected enough tiles to fill {gpu.name}, in any order; split keys "
            "and deterministic sums are not modelled"
        )
    steps: list[int] = []
    for first in range(0, choice.head_batches, choice.section):
        of_section = min(choice.section, choice.head_batches - first)
        steps += (iterations for iterations in of_head for _ in range(of_section))
    by_wgmma = "4sm90" in choice.kernel  # its namespace
    return AttentionChoice(tile, demangled(choice.kernel), tuple(steps), by_wgmma, parts)


def attention_costs(evidence: Evidence, tile: AttentionTile, backward: bool) -> tuple[dict[str, float], ...]:
    """Counters per step (a tile of queries by a tile of keys), per tile of queries and per tile of keys.

    In forward a block is a tile of queries; in backward it is a tile of keys, and other launches handle the queries.
    """
    phase = "backward" if backward else "forward"
    name = re.compile(rf"{phase} {tile.dim}/{tile.dim_v} by {tile} of (\d+)x(\d+)x(\d+)$")
    points = {}
    for case, cost in evidence.attention.items():
        if match := name.match(case):
            heads, rows, columns = map(int, match.groups())
            of_head = {counter: count / heads for counter, count in cost.items()}
            points[rows / tile.block_m, columns / tile.block_n] = of_head
    if len(points) != 3:
        raise ModelError(
            f"expected three cases {name.pattern!r} in golden_counters/attention.json, got {len(points)}; record them "
            "with CUDA_EXT_RECORD_COUNTERS=1 python -m pytest --full tests/simt/test_attention_kernels.py"
        )
    # count = queries * of_query + keys * of_key + queries * keys * step
    (queries, keys), base = min(points.items(), key=lambda point: point[0])
    more_queries = next((q, cost) for (q, k), cost in points.items() if q > queries and k == keys)
    more_keys = next((k, cost) for (q, k), cost in points.items() if k > keys and q == queries)
    by_query, _ = line_through([(queries, base), more_queries])
    by_key, _ = line_through([(keys, base), more_keys])
    step = {n: (queries * by_query[n] + keys * by_key[n] - base[n]) / (queries * keys) for n in base}
    return (
        step,
        {n: by_query[n] - keys * step[n] for n in base},
        {n: by_key[n] - queries * step[n] for n in base},
    )


def attention_work(evidence: Evidence, gpu: Gpu, problem: Problem, dtype: str, backward: bool) -> list[Work]:
    """The Work of the main launch; also that of the launches before and after it, which only move bytes."""
    choice = attention_choice(evidence, gpu, problem, dtype, backward)
    return [*works_of_choice(evidence, gpu, problem, dtype, backward, choice), *parts_work(choice, backward)]


def parts_work(choice: AttentionChoice, backward: bool) -> list[Work]:
    """attention_combine_lists, or attention_bwd_finish of dK and of dV, which add what the parts of tiles have stored;
    it is in L2."""
    if not choice.parts:
        return []
    tile = choice.tile
    bytes_of_part = 4 * (tile.block_n * (tile.dim + tile.dim_v) if backward else tile.block_m * (tile.dim_v + 1))
    return [
        Work(
            blocks=choice.parts,
            blocks_per_sm=1,
            iterations=0,
            iteration=Amounts(),
            outside=Amounts(l2=2 * bytes_of_part),  # also what the main launch writes
            in_flight=1,
            memory_bytes=0.0,
            launches=2 if backward else 1,
            tail_waits=3,  # the lists, and what the parts have stored
        )
    ]


def works_of_choice(
    evidence: Evidence, gpu: Gpu, problem: Problem, dtype: str, backward: bool, choice: AttentionChoice
) -> list[Work]:
    if choice.by_wgmma:
        if choice.has_kernel_for_queries:
            return separate_backward_sm90_work(evidence, gpu, problem, choice)
        if backward:
            return backward_sm90_work(evidence, gpu, problem, choice)
        return [forward_sm90_work(evidence, gpu, problem, choice)]
    tile = choice.tile
    step, of_queries, of_keys = attention_costs(evidence, tile, backward)
    kernel = evidence.kernel(gpu, f"attention_{'bwd' if backward else 'fwd'}_sm80<{choice.kernel}>")
    queries = problem.batch * problem.heads * problem.length
    keys = problem.batch * problem.groups * problem.seen_keys
    # Tiles at the edges, and head dims smaller than the tile's, multiply as much as others but read less.
    width = 2 * problem.dim / (tile.dim + tile.dim_v)
    query_tiles, key_tiles = math.ceil(problem.length / tile.block_m), math.ceil(problem.seen_keys / tile.block_n)
    rows = width * problem.length / (query_tiles * tile.block_m)
    columns = width * problem.seen_keys / (key_tiles * tile.block_n)
    block, streamed = (of_keys, rows) if backward else (of_queries, columns)
    kept = width * (keys / tile.block_n if backward else queries / tile.block_m) / len(choice.steps)

    iteration = Amounts(
        tensor=step["mma"] * multiply_adds(gpu, dtype),
        shared=wavefronts(step),
        issue=kernel.loop.instructions * tile.warps + more_instructions(gpu, step, dtype),
        special=tile.block_m * tile.block_n,
        l2=sectors(step) * SECTOR * streamed,
        reduce=step.get("atomic", 0) * 4,
    )
    outside = Amounts(
        shared=wavefronts(block),
        issue=EPILOGUE_INSTRUCTIONS * block["shared_wavefronts"] + PROLOGUE_INSTRUCTIONS * tile.warps,
        l2=sectors(block) * SECTOR * kept,
    )
    size = 2  # bytes of an element
    sums = 2 * 4 * queries * tile.dim if backward else 0  # read and written
    written = 2 * size * keys * problem.dim if backward else 4 * queries
    uniform = len(set(choice.steps)) == 1
    main = Work(
        blocks=len(choice.steps),
        blocks_per_sm=fit(kernel, gpu, tile.shared_bytes),
        iterations=choice.steps[0] if uniform else choice.steps,
        iteration=iteration,
        outside=outside,
        in_flight=1,
        memory_bytes=size * problem.elements() + sums + written,
        lone_cycles=lone_cycles(gpu, tile, iteration, step, backward),
    )
    if not backward:
        return [main]
    moved = sectors(of_queries) * SECTOR * rows
    rows_kernel = f"{DTYPES[dtype].element}, {tile.block_m}, {tile.dim}, {THREADS_OF_ROWS}"
    tiles = problem.batch * problem.heads * query_tiles
    around = Work(
        blocks=round(of_queries["blocks"]) * tiles,
        blocks_per_sm=fit(evidence.kernel(gpu, f"attention_bwd_rows<{rows_kernel}>"), gpu),
        iterations=0,
        iteration=Amounts(),
        outside=Amounts(shared=wavefronts(of_queries), l2=moved) * (1 / of_queries["blocks"]),
        in_flight=1,
        memory_bytes=moved * tiles,
        launches=round(of_queries["blocks"]),
    )
    return [main, around]


def forward_sm90_work(evidence: Evidence, gpu: Gpu, problem: Problem, choice: AttentionChoice) -> Work:
    """csrc/attention/attention_fwd_sm90.cuh, whose bytes and products tests/simt/test_attention_sm90.py counts."""
    tile, size = choice.tile, 2
    kernel = evidence.kernel(gpu, f"attention_fwd_sm90<{choice.kernel}>")
    consumers = tile.block_m // 64
    queries = problem.batch * problem.heads * problem.length
    keys = tile.block_n * (tile.dim + tile.dim_v) * size  # bytes of keys and values
    area = tile.block_m * tile.block_n
    iteration = Amounts(
        tensor=area * (tile.dim + tile.dim_v),
        # TMA writes keys and values, and each consumer reads them; Q K^T reads its queries, too.
        shared=((1 + consumers) * keys + tile.block_m * tile.dim * size) / 128,
        issue=kernel.loop.instructions * 4 * consumers,
        special=area,
        # Keys beyond the sequence, and head dims beyond the tensor, are filled with zeros, not read.
        l2=keys * 2 * problem.dim / (tile.dim + tile.dim_v),
    )
    staged = tile.block_m * tile.dim_v * size
    outside = Amounts(
        shared=(tile.block_m * tile.dim * size + 2 * staged) / 128,
        issue=EPILOGUE_INSTRUCTIONS * staged / 128,
        l2=2 * queries * problem.dim * size / len(choice.steps),
    )
    # Between two tiles: the queries arrive, their first logits become probs, and the last values are added.
    products = iteration.tensor / gpu.wgmma_multiply_adds
    softmax = max(iteration.issue / gpu.issued, iteration.special / gpu.special) / consumers
    uniform = len(set(choice.steps)) == 1
    return Work(
        blocks=len(choice.steps),
        blocks_per_sm=1,
        iterations=choice.steps[0] if uniform else choice.steps,
        iteration=iteration,
        outside=outside,
        in_flight=tile.stages,
        memory_bytes=size * problem.elements() + 4 * queries,
        persistent=Persistent(
            workers=min(len(choice.steps), gpu.sms),
            hides_epilogues=False,
            restart=gpu.memory_latency + products / consumers + softmax,
            overlap=OVERLAP_OF_SOFTMAX,
        ),
    )


def backward_sm90_work(evidence: Evidence, gpu: Gpu, problem: Problem, choice: AttentionChoice) -> list[Work]:
    """csrc/attention/attention_bwd_sm90.cuh, whose bytes and products tests/simt/test_attention_bwd_sm90.py counts, and
    the launches before and after it, which only move bytes."""
    tile, size = choice.tile, 2
    kernel = evidence.kernel(gpu, f"attention_bwd_sm90<{choice.kernel}>")
    consumers = tile.block_n // 64
    queries = problem.batch * problem.heads * problem.length
    keys = problem.batch * problem.groups * problem.seen_keys
    area, dims = tile.block_m * tile.block_n, tile.dim + tile.dim_v
    rows = tile.block_m * dims * size  # bytes of queries and output gradients
    sums_dim = math.ceil(tile.dim / 64) * 64  # columns of dQ, of which the last may be zeros
    sums = tile.block_m * sums_dim * 4
    # For dQ each consumer reads its rows of dS and all keys or, if they share the rows, all of dS and half of the keys.
    of_scores, of_keys = (consumers, 1) if tile.block_m == 64 else (1, consumers)
    of_sums = of_scores * area + of_keys * tile.block_n * sums_dim
    read = 2 * consumers * rows + (tile.block_n * dims + of_sums) * size
    iteration = Amounts(
        tensor=area * (2 * dims + sums_dim),
        # TMA writes queries and output gradients and reads sums; threads write dS and sums; wgmma reads the rest.
        shared=(rows + read + area * size + 2 * sums) / 128,
        issue=kernel.loop.instructions * 4 * consumers,
        special=area,
        l2=rows * 2 * problem.dim / dims + 2 * tile.block_m * 4,
        reduce=sums,
    )
    block = tile.block_n * dims * size
    outside = Amounts(
        shared=3 * block / 128,
        issue=EPILOGUE_INSTRUCTIONS * block / 128,
        l2=2 * keys * 2 * problem.dim * size / len(choice.steps),
    )
    # Between two blocks: keys and the first queries arrive, then the first scores become probs.
    scores = area * tile.dim / gpu.wgmma_multiply_adds
    uniform = len(set(choice.steps)) == 1
    main = Work(
        blocks=len(choice.steps),
        blocks_per_sm=1,
        iterations=choice.steps[0] if uniform else choice.steps,
        iteration=iteration,
        outside=outside,
        in_flight=tile.stages,
        memory_bytes=size * problem.elements() + 2 * 4 * queries * sums_dim + 2 * size * keys * problem.dim,
        persistent=Persistent(
            workers=min(len(choice.steps), gpu.sms),
            hides_epilogues=False,
            restart=BLOCK_START_CYCLES + gpu.memory_latency + scores,
            overlap=OVERLAP_OF_GRADIENTS,
        ),
    )
    # attention_bwd_rows reads outputs and their gradients and clears the sums, attention_bwd_finish reads the sums.
    moved = queries * (2 * size * problem.dim + 2 * 4 * sums_dim + size * problem.dim + 2 * 4)
    rows_kernel = f"bfloat16_t, {tile.block_m}, {sums_dim}, {THREADS_OF_ROWS}"
    blocks = 2 * problem.batch * problem.heads * math.ceil(problem.length / tile.block_m)
    around = Work(
        blocks=blocks,
        blocks_per_sm=fit(evidence.kernel(gpu, f"attention_bwd_rows<{rows_kernel}>"), gpu),
        iterations=0,
        iteration=Amounts(),
        outside=Amounts(l2=moved / blocks),
        in_flight=1,
        memory_bytes=moved,
        launches=2,
    )
    return [main, around]


QUERIES_OF_SEPARATE = 128  # of a tile of attention_bwd_queries_sm90


def steps_of_queries(problem: Problem, tile: AttentionTile) -> list[int]:
    """Steps of the blocks of attention_bwd_queries_sm90, in launch order."""
    if isinstance(problem, (ListedProblem, PackedProblem)):
        of_head = problem.steps_of_head(dataclasses.replace(tile, block_m=QUERIES_OF_SEPARATE), backward=False)
        return [count for count in of_head for _ in range(problem.batch * problem.heads)]
    steps, block_n = [], tile.block_n
    behind = problem.seen_keys - problem.length
    for first in range(0, problem.length, QUERIES_OF_SEPARATE):
        last = min(first + QUERIES_OF_SEPARATE, problem.length) - 1
        end = min(last + behind + 1, problem.seen_keys) if problem.causal else problem.seen_keys
        begin = 0 if problem.window is None else max(0, first + behind - problem.window)
        steps.append(math.ceil(end / block_n) - begin // block_n)
    return [count for count in reversed(steps) for _ in range(problem.batch * problem.heads)]


def separate_backward_sm90_work(evidence: Evidence, gpu: Gpu, problem: Problem, choice: AttentionChoice) -> list[Work]:
    """csrc/attention/attention_bwd_keys_sm90.cuh and attention_bwd_queries_sm90.cuh, whose bytes and products
    tests/simt/test_attention_bwd_sm90.py counts, and the launch before them, which only moves bytes."""
    tile, size = choice.tile, 2
    dims, of_pair = tile.dim + tile.dim_v, 2 * problem.dim  # columns of a tile, and those that are not zeros
    queries = problem.batch * problem.heads * problem.length
    keys = problem.batch * problem.groups * problem.seen_keys

    def work(kernel: str, steps: Sequence[int], iteration: Amounts, staged: float, kept: float, written: float) -> Work:
        """Bytes: what a block stages, and what all blocks keep during their loops and write."""
        iteration += Amounts(issue=evidence.kernel(gpu, kernel).loop.instructions * 4 * 2)
        return Work(
            blocks=len(steps),
            blocks_per_sm=1,
            iterations=steps[0] if len(set(steps)) == 1 else steps,
            iteration=iteration,
            outside=Amounts(
                shared=3 * staged / 128, issue=EPILOGUE_INSTRUCTIONS * staged / 128, l2=(kept + written) / len(steps)
            ),
            in_flight=tile.stages,
            memory_bytes=size * problem.elements() + written,
            persistent=Persistent(
                workers=min(len(steps), gpu.sms),
                hides_epilogues=False,
                # Between two blocks: what they keep and the first tile arrive, then scores are multiplied.
                restart=BLOCK_START_CYCLES + gpu.memory_latency + iteration.tensor / 4 / gpu.wgmma_multiply_adds,
                # As in forward, one consumer multiplies while the other computes P, without a barrier that joins them.
                overlap=OVERLAP_OF_SOFTMAX,
            ),
        )

    area = tile.block_m * tile.block_n
    rows = tile.block_m * dims * size  # bytes of queries and output gradients
    of_keys = work(
        f"attention_bwd_keys_sm90<{choice.kernel}>",
        choice.steps,
        Amounts(
            tensor=area * 2 * dims,
            # TMA writes queries and output gradients; scores and dP read them and keys and values; dK and dV read them
            # again. Weights go from one consumer to the other.
            shared=(3 * rows + tile.block_n * dims * size + 2 * area * 4) / 128,
            special=area,
            l2=rows * of_pair / dims + 2 * tile.block_m * 4,
        ),
        staged=tile.block_n * dims * size,
        kept=keys * of_pair * size,
        written=keys * of_pair * size,
    )
    consumers, area = QUERIES_OF_SEPARATE // 64, QUERIES_OF_SEPARATE * tile.block_n
    columns = tile.block_n * dims * size  # bytes of keys and values
    of_queries = work(
        f"attention_bwd_queries_sm90<{choice.kernel.replace('BackwardKeys', 'BackwardQueries')}>",
        steps_of_queries(problem, tile),
        Amounts(
            tensor=area * (2 * tile.dim + tile.dim_v),
            # TMA writes keys and values; a consumer reads them, its queries and output gradients, and keys again.
            shared=(
                (1 + consumers) * columns + (QUERIES_OF_SEPARATE * dims + consumers * tile.block_n * tile.dim) * size
            )
            / 128,
            special=area,
            l2=columns * of_pair / dims,
        ),
        staged=QUERIES_OF_SEPARATE * tile.dim * size,
        kept=queries * of_pair * size,
        written=queries * problem.dim * size,
    )
    # attention_bwd_rows reads outputs and their gradients.
    moved = queries * (2 * size * problem.dim + 2 * 4)
    blocks = problem.batch * problem.heads * math.ceil(problem.length / tile.block_m)
    around = Work(
        blocks=blocks,
        blocks_per_sm=fit(
            evidence.kernel(gpu, f"attention_bwd_rows<bfloat16_t, {tile.block_m}, 0, {THREADS_OF_ROWS}>"), gpu
        ),
        iterations=0,
        iteration=Amounts(),
        outside=Amounts(l2=moved / blocks),
        in_flight=1,
        memory_bytes=moved,
    )
    return [of_keys, of_queries, around]


def lone_cycles(gpu: Gpu, tile: AttentionTile, iteration: Amounts, step: dict[str, float], backward: bool) -> float:
    """Cycles per step of a block that has its SM to itself: products, work between products, and waiting for late data,
    one after the other."""
    products = iteration.tensor / gpu.multiply_adds
    between = max((iteration.issue - step["mma"] - step["ldmatrix"]) / gpu.issued, iteration.special / gpu.special)
    if backward:
        # The next queries are requested before the last of the five products.
        covers = [products * tile.dim / (3 * tile.dim + 2 * tile.dim_v)]
    else:
        # Values arrive during the first product, and keys during the rest.
        first = products * tile.dim / (tile.dim + tile.dim_v)
        covers = [first, products - first + between]
    if not gpu.has_cp_async:  # a block waits for what it copies
        covers = [0.0] * len(covers)
    return products + between + sum(max(0.0, gpu.memory_latency - cover) for cover in covers)
