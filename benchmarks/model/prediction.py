"""The paper model: what a kernel should take on a GPU that is not here, from what it does as counted without one.

    python -m benchmarks model                                      # representative cases, on all GPUs of gpus.py
    python -m benchmarks model --gpu h100 --shapes 4096x4096x4096 --all-configs

docs/model.md has the formulas, how to judge a change by them, and their limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results
from benchmarks.model import gpus
from benchmarks.model.gpus import GPUS, Gpu
from benchmarks.model.kernel_work import (
    ATTENTION_DTYPES,
    DTYPES,
    LAYOUTS,
    Evidence,
    GemmConfig,
    ModelError,
    NotModelledError,
    Pack,
    attention_choice,
    attention_work,
    bucket_work,
    gemm_work,
)
from benchmarks.model.work import RESOURCES, time_of
from benchmarks.suites.bench_attention import Problem

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "model.md"
BEGIN, END = "<!-- written by python -m benchmarks model --write -->", "<!-- end -->"


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
    resources: dict[str, float]  # seconds that each would take alone
    aligned: bool = True  # lines of 16-byte vectors; what others cost is not counted
    measured: float | None = None  # seconds

    @property
    def ratio(self) -> float | None:
        """Predicted over measured: above 1 the kernel is faster than the model thinks."""
        return self.seconds / self.measured if self.measured else None

    @property
    def kernel(self) -> str:
        return self.config + (f" / {self.splits}" if self.splits > 1 else "")

    @property
    def rate(self) -> str:
        if self.flops:
            return f"{self.flops / self.seconds / 1e12:.3g} TFLOP/s"
        return f"{self.bytes / self.seconds / 1e12:.2f} TB/s"


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
    lines = (k if layout[0] == "n" else m, n if layout[1] == "n" else k)
    flops, moved = 2.0 * m * n * k, float((m * k + k * n + m * n) * size)
    ideal = max(flops * arithmetic.products / gpu.library_flops, moved / gpu.memory_bytes)

    def predict(config: GemmConfig, splits: int, chosen: bool) -> Prediction:
        work = gemm_work(evidence, gpu, m, n, k, dtype, layout, config, splits)
        time = time_of(work, gpu)
        return Prediction(
            gpu=gpu.name,
            op="gemm",
            case=f"{m} x {n} x {k}",
            dtype=dtype,
            config=str(config),
            splits=splits,
            chosen=chosen,
            waves=time.waves,
            blocks_at_once=work.at_once,
            seconds=time.seconds,
            flops=flops,
            bytes=moved,
            of_library=ideal / time.seconds,
            binding=time.binding,
            resources=time.resources,
            aligned=all(line * size % 16 == 0 for line in lines),
        )

    taken = (configs[choice["shape"]], choice["splits"])
    found = [predict(*taken, True)]
    for config in configs if all_configs else ():
        splits = [s for s in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if s == 1 or s * 4 * config.block_k <= k]
        others = [predict(config, s, False) for s in splits if (config, s) != taken]
        found += sorted(others, key=lambda p: p.seconds)[:1]
    return found


def predict_bucket(gpu: Gpu, pack: Pack, evidence: Evidence | None = None) -> Prediction:
    work = bucket_work(evidence or Evidence.recorded(), gpu, pack)
    time = time_of(work, gpu)
    return Prediction(
        gpu=gpu.name,
        op=pack.op,
        case=str(pack),
        dtype=pack.dtypes,
        config="bucket",
        splits=1,
        chosen=True,
        waves=time.waves,
        blocks_at_once=work.at_once,
        seconds=time.seconds,
        flops=0.0,
        bytes=work.memory_bytes,
        of_library=work.memory_bytes / gpu.memory_bytes / time.seconds,
        binding=time.binding,
        resources=time.resources,
    )


def predict_attention(
    gpu: Gpu, problem: Problem, backward: bool, dtype: str = "bfloat16", evidence: Evidence | None = None
) -> Prediction:
    evidence = evidence or Evidence.recorded()
    works = attention_work(evidence, gpu, problem, dtype, backward)
    times = [time_of(work, gpu) for work in works]
    seconds = sum(time.seconds for time in times)
    resources = {name: sum(time.resources[name] for time in times) for name in RESOURCES}
    flops, moved = problem.flops(backward), 2 * problem.elements() * (2 if backward else 1)
    return Prediction(
        gpu=gpu.name,
        op=problem.op(),
        case=f"{problem.name()} {'backward' if backward else 'forward'}",
        dtype=dtype,
        config=str(attention_choice(evidence, gpu, problem, dtype, backward).tile),
        splits=1,
        chosen=True,
        waves=times[0].waves,
        blocks_at_once=works[0].at_once,
        seconds=seconds,
        flops=flops,
        bytes=moved,
        of_library=max(flops / gpu.library_flops, moved / gpu.memory_bytes) / seconds,
        binding=max(resources, key=lambda name: resources[name]),
        resources=resources,
    )


# Squares; a Llama-like layer of width 4096 on 8192 tokens (QKV, output, up, down, and a weight's gradient) and its
# logits; few rows; one that fits no tile.
SHAPES = [(size,) * 3 for size in (1024, 2048, 4096, 8192, 16384)]
SHAPES += [(8192, 6144, 4096), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (4096, 14336, 8192)]
SHAPES += [(2048, 128256, 4096), *((m, 4096, 4096) for m in (1, 16, 64, 256)), (512, 4096, 14336), (1000,) * 3]
# GPT-2, a bucket of 25 MiB of it, and a small one.
PACKS = [
    Pack("pack", "bfloat16", "bfloat16", 124_439_808, 148),
    Pack("pack", "float32", "bfloat16", 124_439_808, 148),
    Pack("unpack", "bfloat16", "float32", 124_439_808, 148),
    Pack("pack", "float32", "float32", 6_553_600, 12),
    Pack("pack", "bfloat16", "bfloat16", 524_288, 20),
]
# The grid of the FlashAttention papers: 16384 tokens, a width of 2048.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PROBLEMS = [
    Problem(16384 // length, length, 2048 // dim, dim, causal=causal)
    for dim in (64, 128, 256)
    for causal in (False, True)
    for length in LENGTHS
]
# TFLOP/s of FlashAttention-2 on an A100 80GB SXM4, forward and backward, for LENGTHS, by head dim and whether causal:
# read off the charts in assets/ of github.com/Dao-AILab/flash-attention, within 2.
FLASH_ATTENTION_2 = {
    (64, False): (132, 153, 162, 171, 175, 176),
    (64, True): (88, 119, 140, 156, 165, 171),
    (128, False): (150, 173, 187, 196, 201, 203),
    (128, True): (99, 133, 155, 173, 182, 189),
}

Key = tuple[object, ...]


def key_of_gemm(m: int, n: int, k: int, dtype: str, layout: str) -> Key:
    return ("gemm", m, n, k, dtype, layout)


def key_of_pack(pack: Pack) -> Key:
    return (pack.op, pack.elements, pack.entries, pack.tensors, pack.bucket)


def key_of_attention(problem: Problem, backward: bool, dtype: str) -> Key:
    return ("attention", problem, backward, dtype)


def problem_of(m: results.Measurement) -> Problem | None:
    """What benchmarks/suites/bench_attention.py gave this name, if it is of a kind that is predicted."""
    name = re.fullmatch(r"B=(\d+) S=(\d+) H=(\d+)(?:/(\d+))? D=(\d+)", m.case)
    op = re.fullmatch(r"flash_attention (?:full|causal|window (\d+))", m.op)
    if name is None or op is None:
        return None
    batch, length, heads, kv_heads, dim = (int(number or 0) for number in name.groups())
    window = int(op[1]) if op[1] else None
    return Problem(batch, length, heads, dim, kv_heads=kv_heads, causal="full" not in m.op, window=window)


def key_of(m: results.Measurement) -> Key | None:
    """What is predicted of it, if anything is; benchmarks/suites/bench_gemm.py and bench_bucket.py write these `extra`."""
    if m.suite == "attention":
        problem = problem_of(m)
        return key_of_attention(problem, m.phase == "backward", m.dtype) if problem else None
    if m.phase != "forward":
        return None
    if m.op in ("gemm", "gemm tf32"):
        dtype = "tf32" if m.op == "gemm tf32" else m.dtype
        return ("gemm", *(m.extra.get(name) for name in ("M", "N", "K")), dtype, m.extra.get("layout"))
    if m.suite == "bucket":
        return (m.op, m.extra.get("elements"), m.extra.get("tensors"), m.dtype, m.extra.get("bucket dtype"))
    return None


def measurements(gpu: Gpu) -> dict[Key, float]:
    """Seconds that ours took on this GPU; the newest counts."""
    found: dict[Key, results.Measurement] = {}
    for folder in results.iter_devices(results.ROOT):
        if folder.name != gpu.folder:
            continue
        for m in results.read(folder):
            if m.side != results.OURS or m.device != "cuda" or m.seconds is None:
                continue
            key = key_of(m)
            if key is not None and (key not in found or m.date >= found[key].date):
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
    """Of `shapes`, or of the representative ones, of those that were measured, of attention and of packs."""
    measured = measurements(gpu)
    wanted = list(shapes or SHAPES)
    problems = list(PROBLEMS) if shapes is None and dtype in ATTENTION_DTYPES else []
    if shapes is None:
        for op, *what in measured:
            if op == "gemm" and what[3:] == [dtype, layout] and tuple(what[:3]) not in wanted:
                wanted.append(tuple(what[:3]))  # type: ignore[arg-type]
            if op == "attention" and what[2] == dtype and what[0] not in problems:
                problems.append(what[0])  # type: ignore[arg-type]
    for shape in wanted:
        seconds = measured.get(key_of_gemm(*shape, dtype, layout))
        for p in predict_gemm(gpu, *shape, dtype, layout, all_configs=all_configs):
            yield dataclasses.replace(p, measured=seconds if p.chosen else None)
    for backward, problem in itertools.product((False, True), problems):
        seconds = measured.get(key_of_attention(problem, backward, dtype))
        try:
            predicted = predict_attention(gpu, problem, backward, dtype)
        except NotModelledError:
            continue
        yield dataclasses.replace(predicted, measured=seconds)
    for pack in PACKS if shapes is None else ():
        yield dataclasses.replace(predict_bucket(gpu, pack), measured=measured.get(key_of_pack(pack)))


FIRST_NUMBER = 3
COLUMNS = ("case", "kernel", "bound by", "per SM", "waves", "µs", "rate", "of library", *RESOURCES, "measured", "ratio")


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}" if seconds >= 1e-4 else f"{seconds * 1e6:.1f}"


def row(p: Prediction) -> list[str]:
    """As COLUMNS; resources in microseconds."""
    return [
        (p.case if p.op == "gemm" else f"{p.op.removeprefix('flash_attention ')} {p.case}")
        + (f", {p.dtype}" if p.config == "bucket" else "")
        + ("" if p.aligned else " *"),
        p.kernel + ("" if p.chosen else ", not taken"),
        p.binding,
        str(p.blocks_at_once),
        f"{p.waves:.2f}",
        microseconds(p.seconds),
        p.rate,
        f"{p.of_library:.0%}",
        *(microseconds(p.resources[name]) if p.resources[name] else "" for name in RESOURCES),
        microseconds(p.measured) if p.measured else "",
        f"{p.ratio:.2f}" if p.ratio else "",
    ]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], first_number: int) -> None:
    """A table, without columns that hold nothing, as wide as it needs to be; numbers are aligned to the right."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    first_number = sum(i < first_number for i in kept)
    lines = [[line[i] for i in kept] for line in [columns, *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(kept))]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for line in lines:
            cells = [c.rjust(w) if i >= first_number else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))]
            print("  ".join(cells).rstrip())
        print()
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(lines[0]):
        table.add_column(column, justify="right" if i >= first_number else "left", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    console = Console(width=max(sum(widths) + 2 * len(widths), len(title)))
    console.print(table)
    console.print()


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def recorded_predictions() -> str:
    """The representative products and buckets on all GPUs, in Markdown."""
    cases: list[tuple[str, list[Prediction]]] = []
    for dtype in ("bfloat16", "tf32", "float32"):
        for shape in SHAPES if dtype == "bfloat16" else [(1024,) * 3, (4096,) * 3]:
            found = [predict_gemm(gpu, *shape, dtype)[0] for gpu in GPUS.values()]
            cases.append((f"{found[0].case}, {dtype}", found))
    for pack in PACKS:
        cases.append((f"{pack.op} {pack}, {pack.dtypes}", [predict_bucket(gpu, pack) for gpu in GPUS.values()]))
    return on_all_gpus(cases)


def on_all_gpus(cases: Sequence[tuple[str, Sequence[Prediction]]]) -> str:
    rows = [[name, *(f"{microseconds(p.seconds)}, {p.rate}, {p.binding}" for p in found)] for name, found in cases]
    return markdown(["", *(gpu.name for gpu in GPUS.values())], rows)


def recorded_attention() -> str:
    """Every other length of the grid, on all GPUs, in Markdown."""
    cases = []
    for problem, backward in itertools.product(PROBLEMS, (False, True)):
        if problem.length in LENGTHS[::2]:
            found = [predict_attention(gpu, problem, backward) for gpu in GPUS.values()]
            phase, mask = "backward" if backward else "forward", "causal" if problem.causal else "full"
            cases.append((f"D={problem.dim}, {mask}, S={problem.length}, {phase} ({found[0].kernel})", found))
    return on_all_gpus(cases)


def forward_and_backward(gpu: Gpu, problem: Problem) -> float:
    """Operations a second of both together."""
    both = [predict_attention(gpu, problem, backward) for backward in (False, True)]
    return sum(p.flops for p in both) / sum(p.seconds for p in both)


def recorded_plausibility() -> str:
    """FlashAttention-2 on an A100 beside what is predicted of ours, in Markdown."""
    rows = []
    for (dim, causal), theirs in FLASH_ATTENTION_2.items():
        problems = [p for p in PROBLEMS if (p.dim, p.causal) == (dim, causal)]
        cells = [f"{tflops}, {forward_and_backward(GPUS['a100'], p) / 1e12:.0f}" for tflops, p in zip(theirs, problems)]
        rows.append([f"D={dim}, {'causal' if causal else 'full'}", *cells])
    return markdown(["", *(f"S={length}" for length in LENGTHS)], rows)


def recorded_doubts() -> str:
    """Where a launcher's choice takes a tenth longer than another, in Markdown."""
    doubts: dict[tuple[str, str, str], list[str]] = {}
    for dtype, shape, gpu in itertools.product(("bfloat16", "float32"), SHAPES, GPUS.values()):
        taken, *others = predict_gemm(gpu, *shape, dtype, all_configs=True)
        best = min(others, key=lambda p: p.seconds)
        if taken.seconds > 1.1 * best.seconds:
            doubt = (f"{taken.case}, {dtype}", taken.kernel, best.kernel)
            doubts.setdefault(doubt, []).append(f"{taken.seconds / best.seconds:.2f} on {gpu.name}")
    rows = [[*doubt, ", ".join(ratios)] for doubt, ratios in doubts.items()]
    return markdown(["product", "taken", "best", "times as long"], rows)


def document_tables() -> str:
    return (
        f"{recorded_predictions()}\n"
        "Attention, 16384 tokens and a width of 2048, bfloat16; each with the tile of queries by keys that an A100 "
        "takes:\n\n"
        f"{recorded_attention()}\n"
        "FlashAttention-2 on an A100, forward and backward together in TFLOP/s, as its authors measured it; behind "
        f"that what the model says of ours:\n\n{recorded_plausibility()}\n"
        f"The launchers' choices that the model doubts:\n\n{recorded_doubts()}"
    )


def read_document() -> tuple[str, str, str]:
    """What stands before the tables in the document, the tables, and what stands behind them."""
    text = DOCUMENT.read_text()
    if BEGIN not in text or END not in text:
        raise ModelError(f"{DOCUMENT.name}: expected the lines {BEGIN} and {END}, between which the tables go")
    before, _, rest = text.partition(f"{BEGIN}\n")
    tables, _, behind = rest.partition(END)
    return before, tables, behind


def write_document() -> None:
    before, _, behind = read_document()
    DOCUMENT.write_text(f"{before}{BEGIN}\n{document_tables()}{END}{behind}")


def known_gpu(name: str) -> Gpu:
    if name.lower() not in GPUS:
        raise ModelError(f"expected a GPU among {', '.join(GPUS)}, got {name!r}; others can be added to gpus.py")
    return GPUS[name.lower()]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks model", description="Predicted times of the CUDA kernels, with no GPU at hand."
    )
    parser.add_argument("--gpu", nargs="+", default=list(GPUS), metavar="GPU", help=f"of {', '.join(GPUS)}; all")
    parser.add_argument("--shapes", nargs="+", metavar="MxNxK", help="products; representative ones, and buckets")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="float32: three products of tf32")
    parser.add_argument("--layout", choices=LAYOUTS, default="nn", help="of a and b; t: transposed in memory")
    parser.add_argument("--all-configs", action="store_true", help="also the kernels that would not be taken")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--figures", action="store_true", help="what is known of the GPUs, and from where")
    parser.add_argument("--write", action="store_true", help="write the tables in docs/model.md anew")
    options = parser.parse_args(arguments)
    try:
        if options.write:
            write_document()
            return 0
        shapes = [parse_shape(text) for text in options.shapes] if options.shapes else None
        for gpu in [known_gpu(name) for name in options.gpu]:
            if options.figures:
                lines = [[name, f"{value:.6g}", source] for name, value, source in gpus.figures(gpu)]
                show(gpu.name, ["figure", "value", "source"], lines, first_number=3)
                continue
            found = list(predictions(gpu, shapes, options.dtype, options.layout, options.all_configs))
            if options.json:
                for p in found:
                    print(json.dumps(dataclasses.asdict(p) | {"ratio": p.ratio}))
                continue
            kinds = {
                f"{options.dtype} {options.layout}": [p for p in found if p.op == "gemm"],
                f"{options.dtype} attention": [p for p in found if p.op.startswith("flash_attention")],
                "buckets": [p for p in found if p.config == "bucket"],
            }
            for kind, of_kind in kinds.items():
                if of_kind:
                    title = f"{gpu.name}, {kind}: predicted, and what each resource would take alone, in µs"
                    show(title, COLUMNS, [row(p) for p in of_kind], FIRST_NUMBER)
                if not all(p.aligned for p in of_kind):
                    print("* copied 4 or 2 bytes at a time, as lines are no multiple of 16, which is not counted\n")
    except (ModelError, results.ResultsError) as error:
        print(f"benchmarks model: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
