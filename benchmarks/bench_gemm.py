"""GEMM on the CPU against `torch.matmul`, and `linear` with bias and gelu against the unfused sequence.

Both sides run in turn (A B A B ...) in the same process; the medians and their ratio are printed. Inputs are random.

    python benchmarks/bench_gemm.py --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from cuda_ext.gemm import gemm, linear

SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (64, 4096, 1024))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def alternate(ours: Callable[[], object], theirs: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Median seconds of each side, run in turn until `seconds` have passed and each has run at least three times."""
    ours()
    theirs()
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for side, function in zip(times, (ours, theirs), strict=True):
            start = time.perf_counter()
            function()
            side.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def report(name: str, shape: tuple[int, int, int], ours: float, theirs: float, bar: float) -> None:
    m, n, k = shape
    flops = 2e-9 * m * n * k
    ratio = theirs / ours
    print(
        f"{name:<28} {m:>5} x {n:>5} x {k:>5}   ours {ours * 1e3:9.2f} ms {flops / ours:7.1f} GFLOP/s   "
        f"torch {theirs * 1e3:9.2f} ms {flops / theirs:7.1f} GFLOP/s   {ratio:7.2f}x (bar {bar:g}x)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each line (default 2)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads; shapes are M x N x K")
    bars = {"float32": 0.95, "bfloat16": 0.95, "float16": 50.0}

    for name in options.dtypes:
        for shape in SHAPES:
            m, n, k = shape
            if name == "float16" and m == 2048:
                continue  # plain PyTorch takes half a minute for one product
            a, b = torch.randn(m, k).to(DTYPES[name]), torch.randn(k, n).to(DTYPES[name])
            ours, theirs = alternate(lambda: gemm(a, b), lambda: torch.matmul(a, b), options.seconds)  # noqa: B023
            report(f"gemm {name}", shape, ours, theirs, bars[name])
    for shape in SHAPES:
        m, n, k = shape
        x, w, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        ours, theirs = alternate(
            lambda: linear(x, w, bias, activation="gelu"),  # noqa: B023
            lambda: F.gelu(F.linear(x, w, bias)),  # noqa: B023
            options.seconds,
        )
        report("linear bias gelu float32", shape, ours, theirs, 1.1)


if __name__ == "__main__":
    main()
