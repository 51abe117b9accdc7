"""What a call costs beside its arithmetic: our ops on small CPU tensors that need gradients, against `torch.mul`.

python benchmarks/bench_overhead.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from side_by_side import alternate, environment

import cuda_ext

CALLS = 1000


def repeat(function: Callable[[], torch.Tensor], backward: bool) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            out = function()
            if backward:
                out.backward(torch.ones_like(out))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="small tensors are not worth a second (default 1)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each line (default 1)")
    options = parser.parse_args()
    print(f"{environment(options.threads)}; microseconds a call, median; bar: forward at most 3x torch.mul")

    x, y, half, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 4), (4, 4), (4, 2), (4,)))
    q, k, v = (torch.randn(1, 4, 1, 8, requires_grad=True) for _ in range(3))
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "linear": lambda: cuda_ext.linear(x, y),
        "linear bias gelu": lambda: cuda_ext.linear(x, y, bias, activation="gelu"),
        "gemm": lambda: cuda_ext.gemm(x, y),
        "gated_mlp": lambda: cuda_ext.gated_mlp(x, y, half),
        "flash_attention": lambda: cuda_ext.flash_attention(q, k, v),
        "torch F.linear": lambda: torch.nn.functional.linear(x, y),
    }
    for name, call in calls.items():
        for backward in (False, True):
            ours, theirs, speed = alternate(
                repeat(call, backward), repeat(lambda: torch.mul(x, y), backward), options.seconds
            )
            what = "forward + backward" if backward else "forward"
            print(f"{name:<18}{what:<20}{ours / CALLS * 1e6:8.2f}   mul {theirs / CALLS * 1e6:8.2f}{1 / speed:8.2f}x")


if __name__ == "__main__":
    main()
