"""GEMM on the CPU against `torch.matmul`, and `linear` with bias and gelu against the unfused sequence.

Medians of both sides, run in turn, and the median of their ratio. Inputs are random.

    python benchmarks/bench_gemm.py --threads 2
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from side_by_side import alternate, environment

from cuda_ext.gemm import gemm, linear

SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (64, 4096, 1024))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def report(name: str, shape: tuple[int, int, int], ours: float, theirs: float, ratio: float, bar: float) -> None:
    m, n, k = shape
    flops = 2e-9 * m * n * k
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
    print(f"{environment(options.threads)}; shapes are M x N x K")
    bars = {"float32": 0.95, "bfloat16": 0.95, "float16": 50.0}

    for name in options.dtypes:
        for shape in SHAPES:
            m, n, k = shape
            if name == "float16" and m == 2048:
                continue  # plain PyTorch takes half a minute for one product
            a, b = torch.randn(m, k).to(DTYPES[name]), torch.randn(k, n).to(DTYPES[name])
            times = alternate(lambda: gemm(a, b), lambda: torch.matmul(a, b), options.seconds)  # noqa: B023
            report(f"gemm {name}", shape, *times, bars[name])
    for shape in SHAPES:
        m, n, k = shape
        x, w, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        times = alternate(
            lambda: linear(x, w, bias, activation="gelu"),  # noqa: B023
            lambda: F.gelu(F.linear(x, w, bias)),  # noqa: B023
            options.seconds,
        )
        report("linear bias gelu float32", shape, *times, 1.1)


if __name__ == "__main__":
    main()
