"""The paper model: what a kernel should take on a GPU that is not here, from what it does as counted without one.

    python -m benchmarks model                                      # representative shapes, on all GPUs of gpus.py
    python -m benchmarks model --gpu h100 --shapes 4096x4096x4096 --all-configs

A kernel's work is described by `Work`, whatever the kernel, and `time_of` turns that into seconds; gemm_work and
bucket_work derive it from the emulator's counters (tests/simt/golden_counters), the table of compiled kernels
(docs/kernels.md) and the launchers' own choices (csrc/emulated). docs/model.md has the formulas and their limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpus, results
from benchmarks.gpus import GPUS, Gpu

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from static_gates import Kernel, blocks_per_multiprocessor, documented_kernels  # noqa: E402

GOLDEN = ROOT / "tests" / "simt" / "golden_counters"

# Resources that are all in use at the same time get into each other's way: together they take the norm of this exponent
# of what each takes alone. With infinity the largest would count alone, with 1 nothing would overlap.
OVERLAP = 4
# Not counted by the emulator, so assumed: warp instructions for each wavefront of shared memory that an epilogue reads
# or writes (4 floats of each lane are 4 wavefronts, and take addresses, scaling, conversion and a store), and of a
# warp before its first product.
EPILOGUE_INSTRUCTIONS = 4
PROLOGUE_INSTRUCTIONS = 300
SECTOR = 32
GROUP_ROWS = 8  # kGroup of find_tile: rows of tiles that blocks go down before they go right


@dataclass(frozen=True)
class Amounts:
    """What is asked of one multiprocessor."""

    tensor: float = 0.0  # multiply-adds of 16-bit operands; one of tf32 counts as two
    shared: float = 0.0  # wavefronts of 128 bytes
    issue: float = 0.0  # warp instructions
    l2: float = 0.0  # bytes from and to L2

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def __mul__(self, times: float) -> Amounts:
        return Amounts(*(a * times for a in dataclasses.astuple(self)))


@dataclass(frozen=True)
class Work:
    """What a launch does, whatever the kernel."""

    blocks: int
    at_once: int  # blocks that fit a multiprocessor
    turns: int  # of a block's main loop
    turn: Amounts
    ends: Amounts  # of a block, before and after its loop
    in_flight: int  # turns whose loads are under way at the same time
    memory_bytes: float  # of all blocks, beyond L2
    launches: int = 1
    last: Amounts = Amounts()  # what one multiprocessor does when all others are done
    last_waits: int = 0  # round trips to memory then


RESOURCES = ("tensor", "shared", "issue", "l2", "memory", "latency")


@dataclass(frozen=True)
class Time:
    seconds: float
    resources: dict[str, float]  # seconds that each would take alone
    waves: float

    @property
    def binding(self) -> str:
        return max(self.resources, key=lambda name: self.resources[name])


def time_of(work: Work, gpu: Gpu) -> Time:
    """Until the busiest multiprocessor is done."""
    rates = Amounts(gpu.multiply_adds, gpu.shared_bytes / 128, gpu.issued, gpu.l2_bytes)

    def seconds(amounts: Amounts) -> list[float]:
        return [a / rate / gpu.clock for a, rate in zip(dataclasses.astuple(amounts), dataclasses.astuple(rates))]

    def together(times: Sequence[float]) -> float:
        return sum(t**OVERLAP for t in times) ** (1 / OVERLAP)

    wait = gpu.memory_latency / gpu.clock
    blocks = math.ceil(work.blocks / gpu.processors)
    # A block alone on a multiprocessor fills its pipeline and drains it with nobody to use the time. Among several,
    # only the first fill and the ends of those that run last are seen.
    fills, exposed = (blocks, blocks) if work.at_once == 1 else (1, min(blocks, work.at_once))
    memory = work.memory_bytes / gpu.memory_bytes
    pipeline = math.ceil(blocks / work.at_once) * work.turns / work.in_flight * wait
    main = seconds(work.turn * (blocks * work.turns) + work.ends * (blocks - exposed))
    idle = work.launches * gpu.launch + (fills + work.last_waits) * wait
    total = idle + together([*main, memory, pipeline]) + together(seconds(work.ends * exposed))
    total += together(seconds(work.last))
    each = seconds(work.turn * (blocks * work.turns) + work.ends * blocks + work.last)
    waves = work.blocks / (gpu.processors * work.at_once)
    return Time(total, dict(zip(RESOURCES, [*each, memory, pipeline + idle])), waves)


class ModelError(ValueError):
    """Something that the model cannot do; says what, and what to do."""


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

    def kernel(self, arithmetic: Arithmetic, layout: str) -> str:
        """Its name in docs/kernels.md."""
        sizes = ", ".join(str(value) for value in dataclasses.astuple(self)[:7])
        a_k_major, b_k_major = (str(letter == k).lower() for letter, k in zip(layout, "nt"))
        return f"gemm_sm80<Gemm<{arithmetic.element}, {arithmetic.index}, {a_k_major}, {b_k_major}, GemmConfig{{{sizes}}}>>"


Counters = dict[str, dict[str, int]]  # by case, as golden_counters has them


@dataclass(frozen=True)
class Evidence:
    """All that is known of the kernels."""

    gemm: Counters
    bucket: Counters
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
            json.loads((GOLDEN / "gemm.json").read_text()),
            json.loads((GOLDEN / "bucket.json").read_text()),
            documented_kernels(),
            [[GemmConfig(**config) for config in configs] for configs in simt.gemm_configs()],
            simt,
        )


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
    name = config.kernel(arithmetic, layout)
    try:
        kernel = evidence.kernels[gpu.arch][name]
    except KeyError:
        raise ModelError(
            f"expected {name} of {gpu.arch} in docs/kernels.md; write it with tools/static_gates.py"
        ) from None
    k_tile, rest = block_costs(evidence, dtype, layout, config)
    rows, columns = math.ceil(m / config.block_m), math.ceil(n / config.block_n)
    tiles, area = rows * columns, config.block_m * config.block_n
    k_tiles = math.ceil(math.ceil(k / config.block_k) / splits)
    # Tiles at the edges multiply as much as others, but read and write what there is.
    read = (m / rows + n / columns) / (config.block_m + config.block_n)
    written = m * n / (tiles * area)
    warps = config.warps_m * config.warps_n
    at_once = fit(kernel, config.shared_bytes, gpu)
    turn = Amounts(
        tensor=k_tile["mma"] * arithmetic.multiply_adds,
        shared=_wavefronts(k_tile),
        issue=kernel.loop * warps,
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
        memory_bytes=excess * operand_bytes(gpu, m, n, k, config, at_once) + m * n * config.element_bytes,
    )
    if splits == 1:
        return work
    stored, summed = split_bytes(evidence)
    finishing = math.ceil(tiles / gpu.processors) * splits  # tiles of the busiest multiprocessor, by their sums
    return dataclasses.replace(
        work,
        ends=ends + Amounts(l2=stored * area),
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


def fit(kernel: Kernel, shared_bytes: int, gpu: Gpu) -> int:
    """Blocks of a kernel that fit a multiprocessor of `gpu` at once."""
    arch = {80: "sm_80", 89: "sm_89", 90: "sm_90a"}[gpu.compute_capability]
    blocks = blocks_per_multiprocessor(dataclasses.replace(kernel, arch=arch), shared_bytes)
    if not blocks:
        raise ModelError(f"{kernel.name}: expected to fit a multiprocessor of {gpu.name}, which it does not")
    return blocks


@dataclass(frozen=True)
class Prediction:
    gpu: str
    op: str
    case: str
    dtype: str
    config: str
    splits: int
    chosen: bool  # by the launcher; else for comparison
    waves: float
    blocks_at_once: int
    seconds: float
    flops: float
    bytes: float  # each input read once and each output written once
    of_library: float  # the shortest time by the fastest library and the copy's bandwidth, over this
    binding: str
    resources: dict[str, float]
    measured: float | None = None  # seconds

    @property
    def ratio(self) -> float | None:
        """Predicted over measured: above 1 the kernel is faster than the model thinks."""
        return self.seconds / self.measured if self.measured else None


def predict_gemm(
    gpu: Gpu,
    m: int,
    n: int,
    k: int,
    dtype: str = "bfloat16",
    layout: str = "nn",
    evidence: Evidence | None = None,
    all_configs: bool = False,
) -> list[Prediction]:
    """For the kernel that would be launched, or for all, each with the number of splits that suits it best."""
    evidence = evidence or Evidence.recorded()
    arithmetic = DTYPES[dtype]
    configs = evidence.configs[arithmetic.index]
    choice = evidence.simt.gemm_choice(arithmetic.index, m, n, k, gpu.compute_capability, gpu.processors)
    size = configs[0].element_bytes
    flops, moved = 2.0 * m * n * k, float((m * k + k * n + m * n) * size)
    ideal = max(flops * arithmetic.products / gpu.library_flops, moved / gpu.memory_bytes)

    def predict(config: GemmConfig, splits: int, chosen: bool) -> Prediction:
        work = gemm_work(evidence, gpu, m, n, k, dtype, layout, config, splits)
        time = time_of(work, gpu)
        return Prediction(
            gpu.name, "gemm", f"{m} x {n} x {k}", dtype, str(config), splits, chosen, time.waves, work.at_once,
            time.seconds, flops, moved, ideal / time.seconds, time.binding, time.resources,
        )  # fmt: skip

    found = [predict(configs[choice["shape"]], choice["splits"], True)]
    if all_configs:
        for shape, config in enumerate(configs):
            splits = [s for s in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if s == 1 or s * 4 * config.block_k <= k]
            others = [predict(config, s, False) for s in splits if (shape, s) != (choice["shape"], choice["splits"])]
            found.append(min(others, key=lambda p: p.seconds))
    return found


def predict_bucket(
    gpu: Gpu, op: str, tensors: str, bucket: str, elements: int, entries: int, evidence: Evidence | None = None
) -> Prediction:
    """`entries` tensors of `elements` in all, one next to the other and each long."""
    evidence = evidence or Evidence.recorded()
    points = [
        (float(case.split()[-1]), cost)
        for case, cost in evidence.bucket.items()
        if case.startswith(f"{op} {tensors} {bucket} of ")
    ]
    of_element, _ = _line(sorted(points, key=lambda point: point[0]))
    config = evidence.simt.bucket_config()
    kind = {"pack": 0, "unpack": 1, "stats": 2}[op]
    element = {"float32": "float", "float16": "half_t", "bfloat16": "bfloat16_t"}[
        "float32" if op == "stats" else bucket
    ]
    at_once = fit(evidence.kernels[gpu.arch][f"bucket_kernel<{kind}, {element}>"], 72, gpu)
    moved = _sectors(of_element) * SECTOR
    # A block goes through its elements in turns of what its threads have in flight.
    in_turn = config["threads"] * config["bytes_in_flight"]
    turns = math.ceil(config["block_elements"] * of_element["global_load_bytes"] / in_turn)
    block = Amounts(l2=moved * config["block_elements"])
    work = Work(
        blocks=math.ceil(elements / config["block_elements"]),
        at_once=at_once,
        turns=turns,
        turn=block * (1 / turns),
        ends=Amounts(),
        in_flight=1,
        memory_bytes=moved * elements,
        launches=1 + math.ceil(entries / config["table_entries"]),
        last_waits=3,  # the block's sum, the count of blocks, the sums of all
    )
    time = time_of(work, gpu)
    return Prediction(
        gpu.name, op, f"{elements} in {entries}", f"{tensors} to {bucket}", f"{config['threads']} threads", 1, True,
        time.waves, at_once, time.seconds, 0.0, moved * elements, moved * elements / gpu.memory_bytes / time.seconds,
        time.binding, time.resources,
    )  # fmt: skip


# Squares; a Llama-like layer of width 4096 on 8192 tokens (QKV, output, up, down, and a weight's gradient) and its
# logits; few rows; one that fits no tile.
SHAPES = [(size,) * 3 for size in (1024, 2048, 4096, 8192, 16384)]
SHAPES += [(8192, 6144, 4096), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (4096, 14336, 8192)]
SHAPES += [(2048, 128256, 4096), (1, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096), (256, 4096, 4096)]
SHAPES += [(1000, 1000, 1000)]
# op, dtypes of tensors and bucket, elements, tensors: GPT-2, a bucket of 25 MiB of it, and a small one.
PACKS = [
    ("pack", "bfloat16", "bfloat16", 124_439_808, 148),
    ("pack", "float32", "bfloat16", 124_439_808, 148),
    ("unpack", "bfloat16", "float32", 124_439_808, 148),
    ("pack", "float32", "float32", 6_553_600, 12),
    ("pack", "bfloat16", "bfloat16", 524_288, 20),
]


def measurements(gpu: Gpu, root: Path = results.ROOT) -> dict[tuple[str, str, str], float]:
    """Seconds that ours took on this GPU, by op, case and dtype; the newest counts."""
    found: dict[tuple[str, str, str], results.Measurement] = {}
    for folder in results.iter_devices(root):
        if not folder.name.startswith(gpu.folder):
            continue
        for m in results.read(folder):
            if m.side != results.OURS or m.device != "cuda" or m.seconds is None or m.phase not in ("", "forward"):
                continue
            dtype = m.dtype
            if dtype == "float32" and m.environment.get("float32_matmul_precision", "highest") != "highest":
                dtype = "tf32"
            key = (m.op, m.case, dtype)
            if key not in found or m.date >= found[key].date:
                found[key] = m
    return {key: m.seconds for key, m in found.items() if m.seconds is not None}


def parse_shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)\s*[x×]\s*(\d+)\s*[x×]\s*(\d+)", text.strip())
    if match is None or min(map(int, match.groups())) < 1:
        raise ModelError(f"expected a shape MxNxK such as 4096x4096x4096, got {text!r}")
    m, n, k = map(int, match.groups())
    return m, n, k


def predictions(
    gpu: Gpu, shapes: Sequence[tuple[int, int, int]] | None, dtype: str, layout: str, all_configs: bool
) -> Iterator[Prediction]:
    """Of `shapes`, or of the representative ones, of those that were measured, and of packs."""
    measured = measurements(gpu)
    wanted = list(shapes or SHAPES)
    if shapes is None:
        cases = [case for op, case, of_dtype in measured if op == "gemm" and of_dtype == dtype]
        wanted += [shape for case in cases if (shape := _shape_or_none(case)) is not None and shape not in wanted]
    for shape in wanted:
        for p in predict_gemm(gpu, *shape, dtype, layout, all_configs=all_configs):
            yield dataclasses.replace(p, measured=measured.get((p.op, p.case, dtype)) if p.chosen else None)
    for pack in PACKS if shapes is None else ():
        p = predict_bucket(gpu, *pack)
        yield dataclasses.replace(p, measured=measured.get((p.op, p.case, p.dtype)))


def _shape_or_none(case: str) -> tuple[int, int, int] | None:
    try:
        return parse_shape(case)
    except ModelError:
        return None


COLUMNS = (
    "shape",
    "kernel",
    "waves",
    "µs",
    "TFLOP/s",
    "TB/s",
    "of library",
    "bound by",
    *RESOURCES,
    "measured",
    "ratio",
)


def row(p: Prediction) -> list[str]:
    """As COLUMNS; resources in microseconds."""
    name = p.case if p.op == "gemm" else f"{p.op} {p.case}, {p.dtype}"
    kernel = p.config + (f" / {p.splits}" if p.splits > 1 else "") + ("" if p.chosen else " (not taken)")
    rate = f"{p.flops / p.seconds / 1e12:.1f}" if p.flops else ""
    times = [f"{p.resources[name] * 1e6:.1f}" for name in RESOURCES]
    measured = ["", ""] if p.measured is None else [f"{p.measured * 1e6:.1f}", f"{p.ratio:.2f}"]
    numbers = [
        f"{p.waves:.2f}",
        f"{p.seconds * 1e6:.1f}",
        rate,
        f"{p.bytes / p.seconds / 1e12:.2f}",
        f"{p.of_library:.0%}",
    ]
    return [name, kernel, *numbers, p.binding, *times, *measured]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right_from: int) -> None:
    """A table; columns from `right_from` on are numbers."""
    kept = [i for i, column in enumerate(columns) if any(row[i] for row in rows)]
    columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        print(title)
        for line in [columns, *rows]:
            cells = [c.rjust(w) if i >= right_from else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))]
            print("  ".join(cells).rstrip())
        print()
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i >= right_from else "left", no_wrap=True)
    for line in rows:
        table.add_row(*line)
    needed = sum(max(len(row[i]) for row in [columns, *rows]) + 2 for i in range(len(columns)))
    console = Console(soft_wrap=False)
    console = Console(width=max(console.width, needed))
    console.print(table)
    console.print()


def known_gpu(name: str) -> str:
    if name.lower() not in GPUS:
        raise ModelError(f"expected a GPU among {', '.join(GPUS)}, got {name!r}")
    return name.lower()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks model", description="Predicted times of the CUDA kernels, with no GPU at hand."
    )
    parser.add_argument("--gpu", nargs="+", default=list(GPUS), metavar="GPU", help=f"of {', '.join(GPUS)}; all")
    parser.add_argument("--shapes", nargs="+", metavar="MxNxK", help="products; representative ones, and packs")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="float32: three products of tf32")
    parser.add_argument("--layout", choices=LAYOUTS, default="nn", help="n: k is the last dim of a, the first of b")
    parser.add_argument("--all-configs", action="store_true", help="also the kernels that would not be taken")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--figures", action="store_true", help="what is known of the GPUs, and from where")
    options = parser.parse_args(arguments)
    try:
        chosen = [GPUS[known_gpu(name)] for name in options.gpu]
        if options.figures:
            for gpu in chosen:
                lines = [[name, f"{value:.6g}", source] for name, value, source in gpus.figures(gpu)]
                show(gpu.name, ["figure", "value", "source"], lines, right_from=3)
            return 0
        shapes = [parse_shape(text) for text in options.shapes] if options.shapes else None
        for gpu in chosen:
            found = list(predictions(gpu, shapes, options.dtype, options.layout, options.all_configs))
            if options.json:
                for p in found:
                    print(json.dumps(dataclasses.asdict(p) | {"ratio": p.ratio}))
                continue
            show(
                f"{gpu.name}, {options.dtype}, {options.layout}: predicted, µs by resource; not measured",
                COLUMNS, [row(p) for p in found], right_from=2,
            )  # fmt: skip
    except (ModelError, results.ResultsError) as error:
        print(f"benchmarks model: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
