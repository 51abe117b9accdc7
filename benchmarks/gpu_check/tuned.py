"""How much the plans of products lose: measures the candidates of `cuda_ext.tuning` and compares them with the plan.

    python -m benchmarks.gpu_check.tuned cuda
    python -m benchmarks.gpu_check.tuned simt      # a small product on the emulator, whose times mean nothing

Prints a line per product, the largest loss first, and the geometric mean of the gains.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext

import torch

import cuda_ext
from cuda_ext import testing, tuning

# (M, N, K): squares, the layers of an 8B model in training, and of few tokens.
WIDTHS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SHAPES = [(n, n, n) for n in (512, 1024, 2048, 4096, 8192)]
SHAPES += [(tokens, n, k) for tokens in (1, 16, 64, 256, 8192) for n, k in WIDTHS]


def main(backend: str) -> None:
    on_gpu = backend == "cuda"
    device = torch.device("cuda" if on_gpu else "cpu")
    with nullcontext() if on_gpu else testing.emulated("sm_90a"), tuning.tune(keep=False, candidates=10) as tuned:
        for m, n, k in SHAPES if on_gpu else [(64, 72, 200)]:
            x = torch.randn(m, k, dtype=torch.bfloat16, device=device, requires_grad=True)
            w = torch.randn(n, k, dtype=torch.bfloat16, device=device, requires_grad=True)
            out = cuda_ext.linear(x, w)
            if not on_gpu or m >= 512:
                torch.autograd.grad(out, (x, w), torch.randn_like(out))
    gains = [math.log(product.seconds_of_default / product.seconds) for product in tuned.products]
    print(tuned)
    print(f"{len(gains)} products; tuned they are {math.exp(sum(gains) / len(gains)):.3f} times as fast")


if __name__ == "__main__":
    main(sys.argv[1])
