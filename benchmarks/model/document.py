"""The tables in docs/model.md."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import comparison
from benchmarks.model.cache_work import CacheProblem, predict_cache
from benchmarks.model.cases import CACHES, DECODE_SHAPES, FLASH_ATTENTION_2, LENGTHS, PACKS, PROBLEMS, SHAPES
from benchmarks.model.evidence import ModelError
from benchmarks.model.gpus import GPUS, Gpu
from benchmarks.model.predicted import made_up
from benchmarks.model.prediction import Prediction, predict_attention, predict_bucket, predict_gemm
from benchmarks.model.tables import markdown, microseconds
from benchmarks.suites.bench_attention import Problem

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "model.md"
BEGIN, END = "<!-- written by python -m benchmarks model --write -->", "<!-- end -->"


def recorded_predictions() -> str:
    """Representative products and buckets on all GPUs."""
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
    """Attention on all GPUs, every other length."""
    cases = []
    for problem, backward in itertools.product(PROBLEMS, (False, True)):
        if problem.length in LENGTHS[::2]:
            found = [predict_attention(gpu, problem, backward) for gpu in GPUS.values()]
            phase, mask = "backward" if backward else "forward", "causal" if problem.causal else "full"
            cases.append((f"D={problem.dim}, {mask}, S={problem.length}, {phase} ({found[0].kernel})", found))
    return on_all_gpus(cases)


def forward_and_backward(gpu: Gpu, problem: Problem) -> float:
    """FLOP/s of forward and backward together."""
    both = [predict_attention(gpu, problem, backward) for backward in (False, True)]
    return sum(p.flops for p in both) / sum(p.seconds for p in both)


def recorded_plausibility() -> str:
    """FlashAttention-2 on an A100, and the prediction for ours."""
    rows = []
    for (dim, causal), theirs in FLASH_ATTENTION_2.items():
        problems = [p for p in PROBLEMS if (p.dim, p.causal) == (dim, causal)]
        cells = [f"{tflops}, {forward_and_backward(GPUS['a100'], p) / 1e12:.0f}" for tflops, p in zip(theirs, problems)]
        rows.append([f"D={dim}, {'causal' if causal else 'full'}", *cells])
    return markdown(["", *(f"S={length}" for length in LENGTHS)], rows)


def recorded_wgmma() -> str:
    """The plans of products on wgmma on an H200, and how far they are from the best one."""
    gpu = GPUS["h200"]
    rows = []
    for shape in (*SHAPES, *(shape for shape in DECODE_SHAPES if shape not in SHAPES)):
        taken, *others = predict_gemm(gpu, *shape, layout="nt", all_configs=True)
        best = min([taken, *others], key=lambda p: p.seconds)
        floor = taken.bytes / gpu.memory_bytes
        rows.append(
            [
                taken.case,
                taken.kernel,
                microseconds(taken.seconds),
                taken.rate,
                taken.binding,
                f"{taken.resources['memory'] / floor:.2f}",
                f"{floor / taken.seconds:.2f}, {floor / (taken.seconds - gpu.launch):.2f}",
                f"{taken.seconds / best.seconds:.2f}",
            ]
        )
    head = ["product", "plan", "µs", "rate", "bound by", "bytes / ideal", "of memory's roofline", "time / best plan's"]
    return markdown(head, rows)


def recorded_decoding() -> str:
    """One query over a cache, on the GPUs with the most bandwidth."""
    rows = []
    for problem in (CacheProblem(*sizes) for sizes in CACHES):
        cells = []
        for gpu in (GPUS["a100"], GPUS["h200"]):
            p = predict_cache(gpu, problem)
            of_bandwidth = problem.key_bytes / gpu.memory_bytes / p.seconds
            combine = microseconds(p.combine.seconds) if p.combine else "0"
            parts = f"{microseconds(p.attend.seconds)} + {microseconds(p.lookups)} + {combine}"
            cells += [f"{microseconds(p.seconds)} = {parts}", f"{p.splits}", f"{of_bandwidth:.2f}"]
        rows.append([str(problem), *cells])
    head = ["sequences x keys", *("A100: µs", "splits", "of bandwidth"), *("H200: µs", "splits", "of bandwidth")]
    return markdown(head, rows)


def recorded_doubts() -> str:
    """Choices of a launcher that the model predicts to be at least a tenth slower than another."""
    doubts: dict[tuple[str, str, str], list[str]] = {}
    for dtype, shape, gpu in itertools.product(("bfloat16", "float32"), SHAPES, GPUS.values()):
        taken, *others = predict_gemm(gpu, *shape, dtype, all_configs=True)
        best = min(others, key=lambda p: p.seconds)
        if taken.seconds > 1.1 * best.seconds:
            doubt = (f"{taken.case}, {dtype}", taken.kernel, best.kernel)
            doubts.setdefault(doubt, []).append(f"{taken.seconds / best.seconds:.2f} on {gpu.name}")
    rows = [[*doubt, ", ".join(ratios)] for doubt, ratios in doubts.items()]
    return markdown(["product", "chosen", "best", "time of the choice / best"], rows)


def document_tables() -> str:
    return (
        f"{recorded_predictions()}\n"
        "Products on wgmma, H200, bfloat16, layout nt: the plan; the bytes from and to memory relative to reading each "
        "operand once; the time at memory's speed relative to the predicted time, with the launch and without it; the "
        f"predicted time relative to that of the best plan:\n\n{recorded_wgmma()}\n"
        "Attention, 16384 tokens, heads x head dim = 2048, bfloat16; in parentheses the tile of queries by keys on an "
        "A100:\n\n"
        f"{recorded_attention()}\n"
        "FlashAttention-2 on an A100, forward and backward together, TFLOP/s measured by its authors, then predicted "
        f"for ours:\n\n{recorded_plausibility()}\n"
        "One query per sequence over a cache in bfloat16: the launch with its loop, what it looks up before the first "
        "keys, and the launch that adds up the splits; the time at memory's speed relative to the predicted time:\n\n"
        f"{recorded_decoding()}\n"
        f"Launchers' choices that the model predicts to be slower than another:\n\n{recorded_doubts()}"
    )


def read_document() -> tuple[str, str, str]:
    """The text before the tables, the tables, and the text after them."""
    text = DOCUMENT.read_text()
    if BEGIN not in text or END not in text:
        raise ModelError(f"{DOCUMENT.name}: expected the lines {BEGIN} and {END}, around the tables; add them")
    before, _, rest = text.partition(f"{BEGIN}\n")
    tables, _, after = rest.partition(END)
    return before, tables, after


def recorded_times() -> str:
    """The content of comparison.PREDICTED: predictions of the cases that the suites measure on a GPU."""
    times = {
        gpu.folder: {comparison.name_of(m): float(f"{(m.seconds or 0) * 1e6:.4g}") for m in made_up(gpu)}
        for gpu in GPUS.values()
    }
    return json.dumps(times, indent=0, ensure_ascii=False) + "\n"


def write_document() -> None:
    """Updates the tables of docs/model.md, and the predicted times for reports."""
    comparison.PREDICTED.write_text(recorded_times())
    before, _, after = read_document()
    DOCUMENT.write_text(f"{before}{BEGIN}\n{document_tables()}{END}{after}")
