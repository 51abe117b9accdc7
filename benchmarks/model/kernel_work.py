"""What the CUDA kernels ask of a GPU, as Work: from the emulator's counters (tests/simt/golden_counters), the table of
compiled kernels (docs/kernels.md) and the launchers' own choices (csrc/emulated).

A kernel joins the paper model by a function here that returns its Work.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.model.gpus import Gpu
from benchmarks.model.work import Amounts, Work
from benchmarks.suites.bench_attention import Problem

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

from static_gates import Kernel, blocks_per_multiprocessor, documented_kernels, readable  # noqa: E402

GOLDEN = ROOT / "tests" / "simt" / "golden_counters"

# Not counted by the emulator, so assumed: warp instructions for each wavefront of shared memory that an epilogue reads
# or writes (4 floats of each lane are 4 wavefronts, and take addresses, scaling, conversion and a store), and of a
# warp before its first product.
EPILOGUE_INSTRUCTIONS = 4
PROLOGUE_INSTRUCTIONS = 300
SECTOR = 32
THREADS_OF_ROWS = 128  # of attention_bwd_rows
GROUP_ROWS = 8  # kGroup of find_tile: rows of tiles that blocks go down before they go right


class ModelError(ValueError):
    """Something that the model cannot do; says what, and what to do."""


class NotModelledError(ModelError):
    """A case that the model does not know."""


@dataclass(frozen=True)
class Arithmetic:
    index: int  # of csrc/gemm/plan_sm80.h
    golden: str  # its name in golden_counters/gemm.json
    element: str  # and in docs/kernels.md
    multiply_adds: int  # of one mma, as Amounts.tensor counts
    products: int  # that it makes of one, as 16-bit ones


DTYPES = {
    "bfloat16": Arithmetic(0, "bfloat16", "bfloat16_t", 16 * 8 * 16, 1),
    "float16": Arithmetic(0, "float16", "half_t", 16 * 8 * 16, 1),
    "tf32": Arithmetic(1, "tf32", "float", 2 * 16 * 8 * 8, 2),
    "float32": Arithmetic(2, "three_tf32", "float", 2 * 16 * 8 * 8, 6),
}
LAYOUTS = ("nn", "nt", "tn", "tt")


@dataclass(frozen=True)
class GemmConfig:
    """As csrc/gemm/plan_sm80.h has it."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps_m: int
    warps_n: int
    min_blocks: int
    element_bytes: int
    shared_bytes: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    def kernel_name(self, arithmetic: Arithmetic, layout: str) -> str:
        """In docs/kernels.md."""
        sizes = ", ".join(str(value) for value in dataclasses.astuple(self)[:7])
        a_k_major, b_k_major = (str(letter == k).lower() for letter, k in zip(layout, "nt"))
        kind = f"{arithmetic.element}, {arithmetic.index}, {a_k_major}, {b_k_major}"
        return f"gemm_sm80<Gemm<{kind}, GemmConfig{{{sizes}}}>>"


Counters = dict[str, dict[str, int]]  # by case, as golden_counters has them


@dataclass(frozen=True)
class Evidence:
    """All that is known of the kernels."""

    gemm: Counters
    bucket: Counters
    attention: Counters
    kernels: dict[str, dict[str, Kernel]]  # by architecture and name
    configs: list[list[GemmConfig]]  # by arithmetic and shape
    simt: Any  # the module _simt, for the launchers' choices

    @classmethod
    @functools.cache
    def recorded(cls) -> Evidence:
        from cuda_ext import _emulator

        try:
            simt = _emulator.load()
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"the launchers' choices cannot be asked for, which takes a C++ compiler: {error}"
            ) from None
        return cls(
            *(json.loads((GOLDEN / f"{kernels}.json").read_text()) for kernels in ("gemm", "bucket", "attention")),
            documented_kernels(),
            [[GemmConfig(**config) for config in configs] for configs in simt.gemm_configs()],
            simt,
        )

    def kernel(self, gpu: Gpu, name: str) -> Kernel:
        try:
            return self.kernels[gpu.arch][name]
        except KeyError:
            raise ModelError(
                f"expected {name} among the kernels of {gpu.arch} in docs/kernels.md, got none; "
                "build with CUDA_EXT_CUDA=1 make build, and run tools/static_gates.py --write"
            ) from None


def _line(points: Sequence[tuple[float, dict[str, int]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Of counters at two sizes: what one more costs, and what the rest does."""
    (small, low), (large, high) = points
    names = {**low, **high}
    slope = {name: (high.get(name, 0) - low.get(name, 0)) / (large - small) for name in names}
    return slope, {name: low.get(name, 0) - small * slope[name] for name in names}


def _of_block(cost: dict[str, int]) -> dict[str, Any]:
    return {name: count / cost["blocks"] for name, count in cost.items()}


def _sectors(cost: dict[str, float]) -> float:
    return cost.get("global_load_sectors", 0) + cost.get("global_store_sectors", 0)


def _wavefronts(cost: dict[str, float]) -> float:
    return cost.get("shared_wavefronts", 0) + cost.get("matrix_wavefronts", 0)


def block_costs(evidence: Evidence, dtype: str, layout: str, config: GemmConfig) -> tuple[dict[str, float], ...]:
    """Counters of a k tile of a block, and of what it does beside, for a whole tile."""
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
    return _line(sorted(points, key=lambda point: point[0]))


def split_bytes(evidence: Evidence) -> tuple[float, float]:
    """What a float of a tile's sums costs where k is split: bytes written by each block, and read by a tile's last."""
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
    # Tiles at the edges multiply as much as others, but read and write what there is.
    read = (m / rows + n / columns) / (config.block_m + config.block_n)
    written = m * n / (tiles * area)
    warps = config.warps_m * config.warps_n
    at_once = fit(kernel, gpu, config.shared_bytes)
    turn = Amounts(
        tensor=k_tile["mma"] * arithmetic.multiply_adds,
        shared=_wavefronts(k_tile),
        issue=kernel.loop.instructions * warps,
        l2=_sectors(k_tile) * SECTOR * read,
    )
    ends = Amounts(
        tensor=rest["mma"] * arithmetic.multiply_adds,
        shared=_wavefronts(rest),
        issue=EPILOGUE_INSTRUCTIONS * rest["shared_wavefronts"] + PROLOGUE_INSTRUCTIONS * warps,
        l2=_sectors(rest) * SECTOR * written,
    )
    loaded = k_tile["global_load_sectors"] * SECTOR
    excess = loaded / ((config.block_m + config.block_n) * config.block_k * config.element_bytes)
    work = Work(
        blocks=tiles * splits,
        at_once=at_once,
        turns=k_tiles,
        turn=turn,
        ends=ends,
        in_flight=config.stages - 1,
        lead=kernel.loop.lead * warps / gpu.issued,
        memory_bytes=excess * operand_bytes(gpu, m, n, k, config, at_once) + m * n * config.element_bytes,
    )
    if splits == 1:
        return work
    stored, summed = split_bytes(evidence)
    sums = float(tiles * splits * area)
    beyond_l2 = max(0.0, sums * stored - gpu.l2_capacity / 2)
    finishing = math.ceil(tiles / gpu.processors) * splits  # tiles of the busiest multiprocessor, by their sums
    return dataclasses.replace(
        work,
        ends=ends + Amounts(l2=stored * area),
        memory_bytes=work.memory_bytes + 2 * beyond_l2,
        launches=2,  # the kernel that clears the arrivals
        last=Amounts(l2=finishing * summed * area),
        last_waits=3,  # the stores, the arrival, the loads
    )


def operand_bytes(gpu: Gpu, m: int, n: int, k: int, config: GemmConfig, at_once: int) -> float:
    """What a product reads beyond L2. Blocks that run at the same time go through k side by side, so they share what
    they read; half of L2 keeps what the next ones will want again."""
    rows, columns = math.ceil(m / config.block_m), math.ceil(n / config.block_n)
    running = gpu.processors * at_once
    keeps = gpu.l2_capacity / 2
    a, b = m * k * config.element_bytes, n * k * config.element_bytes
    # a: the rows of a group are read again for every set of columns that run, unless they stay.
    of_group = min(GROUP_ROWS, rows) * config.block_m * k * config.element_bytes
    passes_a = 1 if of_group <= keeps else math.ceil(columns / max(1, running // GROUP_ROWS))
    # b: read again for every set of groups that run, unless all of it stays.
    groups_running = max(1, running // (GROUP_ROWS * columns))
    passes_b = 1 if b <= keeps else math.ceil(math.ceil(rows / GROUP_ROWS) / groups_running)
    return a * passes_a + b * passes_b


def fit(kernel: Kernel, gpu: Gpu, shared_bytes: int = 0) -> int:
    """Blocks of a kernel that fit a multiprocessor at once; `shared_bytes` beside what docs/kernels.md knows."""
    arch = {80: "sm_80", 89: "sm_89", 90: "sm_90a"}[gpu.compute_capability]
    blocks = blocks_per_multiprocessor(dataclasses.replace(kernel, arch=arch), kernel.shared_bytes + shared_bytes)
    if not blocks:
        raise ModelError(f"{kernel.name}: expected to fit a multiprocessor of {gpu.name}, which it does not")
    return blocks


@dataclass(frozen=True)
class Pack:
    """A bucket and its tensors, one next to the other and each long."""

    op: str
    tensors: str  # dtype
    bucket: str
    elements: int
    entries: int

    @property
    def dtypes(self) -> str:
        source, target = (self.bucket, self.tensors) if self.op == "unpack" else (self.tensors, self.bucket)
        return f"{source} to {target}"

    def __str__(self) -> str:
        return f"{self.elements} in {self.entries}"


def bucket_work(evidence: Evidence, gpu: Gpu, pack: Pack) -> Work:
    points = [
        (float(case.split()[-1]), cost)
        for case, cost in evidence.bucket.items()
        if case.startswith(f"{pack.op} {pack.tensors} {pack.bucket} of ")
    ]
    of_element, _ = _line(sorted(points, key=lambda point: point[0]))
    config = evidence.simt.bucket_config()
    element = {"float32": "float", "float16": "half_t", "bfloat16": "bfloat16_t"}[pack.bucket]
    if pack.op == "stats":  # one kernel, as there is no bucket
        element = "float"
    kernel = evidence.kernel(gpu, f"bucket_kernel<{('pack', 'unpack', 'stats').index(pack.op)}, {element}>")
    moved = _sectors(of_element) * SECTOR
    # A block goes through its elements in turns of what its threads have in flight.
    in_turn = config["threads"] * config["bytes_in_flight"]
    turns = math.ceil(config["block_elements"] * of_element["global_load_bytes"] / in_turn)
    return Work(
        blocks=math.ceil(pack.elements / config["block_elements"]),
        at_once=fit(kernel, gpu),
        turns=turns,
        turn=Amounts(l2=moved * config["block_elements"] / turns),
        ends=Amounts(),
        in_flight=1,
        memory_bytes=moved * pack.elements,
        launches=1 + math.ceil(pack.entries / config["table_entries"]),
        last_waits=3,  # the block's sum, the count of blocks, the sums of all
    )


ATTENTION_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class AttentionTile:
    dim: int
    dim_v: int
    block_m: int
    block_n: int
    warps: int
    min_blocks: int
    shared_bytes: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}"


@dataclass(frozen=True)
class AttentionChoice:
    """What a launcher takes for a problem, and the steps of its blocks in the order in which they start."""

    tile: AttentionTile
    kernel: str  # what the main kernel is instantiated with, in docs/kernels.md
    steps: tuple[int, ...]


def attention_choice(evidence: Evidence, gpu: Gpu, problem: Problem, dtype: str, backward: bool) -> AttentionChoice:
    unbounded = -1
    window = (unbounded if problem.window is None else problem.window, 0 if problem.causal else unbounded)
    choice = evidence.simt.attention_choice(
        *(backward, dtype, (problem.length, problem.seen_keys), (problem.heads, problem.groups)),
        *((problem.dim, problem.dim), problem.batch, window, gpu.compute_capability, gpu.processors),
    )
    if choice.splits > 1 or problem.deterministic:
        raise NotModelledError(
            f"{problem.op()} {problem.name()}: expected tiles enough to fill {gpu.name}, in any order; the model does "
            "not know what it costs to divide keys among blocks, or to take turns"
        )
    steps: list[int] = []
    for first in range(0, choice.pairs, choice.section):
        of_section = min(choice.section, choice.pairs - first)
        steps += (turns for turns in choice.steps for _ in range(of_section))
    return AttentionChoice(AttentionTile(**choice.tile), _instance(choice.kernel), tuple(steps))


@functools.cache
def _instance(mangled: str) -> str:
    (name,) = readable([f"_Z{mangled}"])
    return name


def attention_costs(evidence: Evidence, tile: AttentionTile, backward: bool) -> tuple[dict[str, float], ...]:
    """Counters of a step, which is a tile of queries by one of keys; of a tile of queries and of a tile of keys beside.
    Forward the tile of queries is a block. Backward that of keys is, and that of queries is what other passes do."""
    phase = "backward" if backward else "forward"
    name = re.compile(rf"{phase} {tile.dim}/{tile.dim_v} by {tile} of (\d+)x(\d+)x(\d+)$")
    points = {}
    for case, cost in evidence.attention.items():
        if match := name.match(case):
            heads, queries, keys = map(int, match.groups())
            of_head = {counter: count / heads for counter, count in cost.items()}
            points[queries / tile.block_m, keys / tile.block_n] = of_head
    if len(points) != 3:
        raise ModelError(
            f"expected three cases {name.pattern!r} in golden_counters/attention.json, got {len(points)}; record them "
            "with CUDA_EXT_RECORD_COUNTERS=1 python -m pytest tests/simt/test_attention_kernels.py"
        )
    # count = queries * of_query + keys * of_key + queries * keys * step
    (queries, keys), base = min(points.items(), key=lambda point: point[0])
    more_queries = next((q, cost) for (q, k), cost in points.items() if q > queries and k == keys)
    more_keys = next((k, cost) for (q, k), cost in points.items() if k > keys and q == queries)
    by_query, _ = _line([(queries, base), more_queries])
    by_key, _ = _line([(keys, base), more_keys])
    step = {n: (queries * by_query[n] + keys * by_key[n] - base[n]) / (queries * keys) for n in base}
    return (
        step,
        {n: by_query[n] - keys * step[n] for n in base},
        {n: by_key[n] - queries * step[n] for n in base},
    )


def attention_work(evidence: Evidence, gpu: Gpu, problem: Problem, dtype: str, backward: bool) -> list[Work]:
    """Of the main launch; and of those before and after it, together, as they do nothing but move bytes."""
    choice = attention_choice(evidence, gpu, problem, dtype, backward)
    tile = choice.tile
    step, of_queries, of_keys = attention_costs(evidence, tile, backward)
    kernel = evidence.kernel(gpu, f"attention_{'bwd' if backward else 'fwd'}_sm80<{choice.kernel}>")
    queries = problem.batch * problem.heads * problem.length
    keys = problem.batch * problem.groups * problem.seen_keys
    # Tiles at the edges, and head dims between those of two tiles, multiply as much as others, but read what there is.
    width = 2 * problem.dim / (tile.dim + tile.dim_v)
    query_tiles, key_tiles = math.ceil(problem.length / tile.block_m), math.ceil(problem.seen_keys / tile.block_n)
    rows = width * problem.length / (query_tiles * tile.block_m)
    columns = width * problem.seen_keys / (key_tiles * tile.block_n)
    block, streamed = (of_keys, rows) if backward else (of_queries, columns)
    kept = width * (keys / tile.block_n if backward else queries / tile.block_m) / len(choice.steps)

    turn = Amounts(
        tensor=step["mma"] * DTYPES[dtype].multiply_adds,
        shared=_wavefronts(step),
        issue=kernel.loop.instructions * tile.warps,
        special=tile.block_m * tile.block_n,
        l2=_sectors(step) * SECTOR * streamed,
        reduce=step.get("atomic", 0) * 4,
    )
    ends = Amounts(
        shared=_wavefronts(block),
        issue=EPILOGUE_INSTRUCTIONS * block["shared_wavefronts"] + PROLOGUE_INSTRUCTIONS * tile.warps,
        l2=_sectors(block) * SECTOR * kept,
    )
    size = 2  # bytes of an element
    sums = 2 * 4 * queries * tile.dim if backward else 0  # read and written
    written = 2 * size * keys * problem.dim if backward else 4 * queries
    uniform = len(set(choice.steps)) == 1
    main = Work(
        blocks=len(choice.steps),
        at_once=fit(kernel, gpu, tile.shared_bytes),
        turns=choice.steps[0] if uniform else choice.steps,
        turn=turn,
        ends=ends,
        in_flight=1,
        memory_bytes=size * problem.elements() + sums + written,
        alone=alone(gpu, tile, turn, step, backward),
    )
    if not backward:
        return [main]
    moved = _sectors(of_queries) * SECTOR * rows
    rows_kernel = f"{DTYPES[dtype].element}, {tile.block_m}, {tile.dim}, {THREADS_OF_ROWS}"
    tiles = problem.batch * problem.heads * query_tiles
    around = Work(
        blocks=round(of_queries["blocks"]) * tiles,
        at_once=fit(evidence.kernel(gpu, f"attention_bwd_rows<{rows_kernel}>"), gpu),
        turns=0,
        turn=Amounts(),
        ends=Amounts(shared=_wavefronts(of_queries), l2=moved) * (1 / of_queries["blocks"]),
        in_flight=1,
        memory_bytes=moved * tiles,
        launches=round(of_queries["blocks"]),
    )
    return [main, around]


def alone(gpu: Gpu, tile: AttentionTile, turn: Amounts, step: dict[str, float], backward: bool) -> float:
    """Cycles of a step of a block that has a multiprocessor to itself: its products, what its warps do between them,
    and what arrives late, one after the other."""
    products = turn.tensor / gpu.multiply_adds
    between = max((turn.issue - step["mma"] - step["ldmatrix"]) / gpu.issued, turn.special / gpu.special)
    if backward:
        # The last queries are asked for ahead of the last of five products.
        covers = [products * tile.dim / (3 * tile.dim + 2 * tile.dim_v)]
    else:
        # Values arrive during the first product, and keys during the rest.
        first = products * tile.dim / (tile.dim + tile.dim_v)
        covers = [first, products - first + between]
    return products + between + sum(max(0.0, gpu.memory_latency - cover) for cover in covers)
