"""The paper model: predicts kernel times on a GPU from work that is counted without one.

    python -m benchmarks model                                      # representative cases, on all GPUs of gpus.py
    python -m benchmarks model --gpu h100 --shapes 4096x4096x4096 --all-configs

docs/model.md has the formulas, their limits, and how to estimate the effect of a change.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence

from benchmarks import results
from benchmarks.model import gpus
from benchmarks.model.attention_work import ATTENTION_DTYPES
from benchmarks.model.cache_work import CacheProblem, predict_cache
from benchmarks.model.cases import CACHES, PACKS, PROBLEMS, SHAPES
from benchmarks.model.document import write
from benchmarks.model.evidence import DTYPES, LAYOUTS, ModelError, NotModelledError
from benchmarks.model.gpus import GPUS, Gpu
from benchmarks.model.measured import key_of_attention, key_of_gemm, key_of_pack, measurements
from benchmarks.model.prediction import Prediction, predict_attention, predict_bucket, predict_gemm
from benchmarks.model.tables import microseconds, show
from benchmarks.model.work import RESOURCES


def parse_shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)\s*[x×]\s*(\d+)\s*[x×]\s*(\d+)", text.strip())
    if match is None or min(map(int, match.groups())) < 1:
        raise ModelError(f"expected a shape MxNxK such as 4096x4096x4096, got {text!r}")
    m, n, k = map(int, match.groups())
    return m, n, k


def predictions(
    gpu: Gpu, shapes: Sequence[tuple[int, int, int]] | None, dtype: str, layout: str, all_configs: bool
) -> Iterator[Prediction]:
    """Predictions for `shapes`, or for all representative and all measured cases."""
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


def row(p: Prediction) -> list[str]:
    """The cells of COLUMNS; resources in microseconds."""
    return [
        (p.case if p.op == "gemm" else f"{p.op.removeprefix('flash_attention ')} {p.case}")
        + (f", {p.dtype}" if p.config == "bucket" else "")
        + ("" if p.aligned else " *"),
        p.kernel + ("" if p.chosen else ", not chosen"),
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


CACHE_COLUMNS = ("sequences x keys", "µs", "attend", "lookups", "combine", "splits", "of bandwidth")


def cache_row(gpu: Gpu, problem: CacheProblem) -> list[str]:
    """The cells of CACHE_COLUMNS. The parts of the time are the launch with its loop, what it looks up before the first
    keys, and the launch that adds up the splits."""
    p = predict_cache(gpu, problem)
    seconds = (p.seconds, p.attend.seconds, p.lookups, p.combine.seconds if p.combine else 0.0)
    of_bandwidth = problem.key_bytes / gpu.memory_bytes / p.seconds
    return [str(problem), *map(microseconds, seconds), str(p.splits), f"{of_bandwidth:.0%}"]


def known_gpu(name: str) -> Gpu:
    if name.lower() not in GPUS:
        raise ModelError(f"expected a GPU among {', '.join(GPUS)}, got {name!r}; others can be added to gpus.py")
    return GPUS[name.lower()]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks model", description="Predicts times of the CUDA kernels; needs no GPU."
    )
    parser.add_argument("--gpu", nargs="+", default=list(GPUS), metavar="GPU", help=f"{', '.join(GPUS)} (default: all)")
    parser.add_argument("--shapes", nargs="+", metavar="MxNxK", help="GEMM shapes (default: representative cases)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="float32: three tf32 products")
    parser.add_argument("--layout", choices=LAYOUTS, default="nn", help="layouts of a and b; t: transposed in memory")
    parser.add_argument("--all-configs", action="store_true", help="also predict configurations that are not chosen")
    parser.add_argument("--json", action="store_true", help="print one object per line")
    parser.add_argument("--figures", action="store_true", help="list the figures of the GPUs with their sources")
    parser.add_argument("--write", action="store_true", help="update docs/model.md and predicted_times.json")
    options = parser.parse_args(arguments)
    try:
        if options.write:
            write()
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
                    title = f"{gpu.name}, {kind}: predicted, and the time of each resource alone, in µs"
                    show(title, COLUMNS, [row(p) for p in of_kind], FIRST_NUMBER)
                if not all(p.aligned for p in of_kind):
                    print("* rows are no multiples of 16 bytes; copying them 4 or 2 bytes at a time is not modelled\n")
            if shapes is None and options.dtype == "bfloat16":
                title = f"{gpu.name}, one query per sequence over a cache: predicted, in µs"
                show(title, CACHE_COLUMNS, [cache_row(gpu, CacheProblem(*sizes)) for sizes in CACHES], first_number=1)
    except (ModelError, results.ResultsError) as error:
        print(f"benchmarks model: {error}", file=sys.stderr)
        return 2
    return 0
