"""flash_attention on the CPU against scaled_dot_product_attention, forward and forward + backward, and its peak memory.

Each side gets its own natural layout, contiguous: (B, S, H, D) ours, (B, H, S, D) theirs. A ratio above 1 means that
ours is faster. TFLOP/s count 4 B H S^2 D forward and 2.5 times that backward, half when causal.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from side_by_side import alternate, environment

import cuda_ext

SHAPES = [(1, 8, 1024, 64), (1, 8, 2048, 128)]


def sides(
    shape: tuple[int, int, int, int], dtype: torch.dtype, causal: bool
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    theirs = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]
    ours = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in theirs]
    grad = torch.randn(shape).to(dtype)
    our_grad = grad.transpose(1, 2).contiguous()

    def our_forward() -> torch.Tensor:
        return cuda_ext.flash_attention(*ours, causal=causal)

    def their_forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(*theirs, is_causal=causal)

    torch.testing.assert_close(our_forward().transpose(1, 2), their_forward(), atol=2e-2, rtol=2e-2)
    return {
        "forward": (torch.no_grad()(our_forward), torch.no_grad()(their_forward)),
        "forward + backward": (
            lambda: torch.autograd.grad(our_forward(), ours, our_grad),
            lambda: torch.autograd.grad(their_forward(), theirs, grad),
        ),
    }


def compare(dtypes: list[str], budget: float) -> None:
    print(f"{'B, H, S, D':<18}{'dtype':<10}{'mask':<8}{'':<20}{'ours':>10}{'SDPA':>10}{'ratio':>8}{'TFLOP/s':>10}")
    for shape in SHAPES:
        batch, heads, length, dim = shape
        for dtype in dtypes:
            for causal in (False, True):
                for name, (ours, theirs) in sides(shape, getattr(torch, dtype), causal).items():
                    if dtype == "float16" and "backward" in name and length > 1024:
                        continue  # theirs takes several seconds a call
                    a, b, ratio = alternate(ours, theirs, budget)
                    flops = (
                        4
                        * batch
                        * heads
                        * length**2
                        * dim
                        * (0.5 if causal else 1.0)
                        * (3.5 if "backward" in name else 1.0)
                    )
                    print(
                        f"{shape!s:<18}{dtype:<10}{'causal' if causal else 'full':<8}{name:<20}"
                        f"{a * 1e3:>7.2f} ms{b * 1e3:>7.2f} ms"
                        f"{ratio:>8.2f}{flops / a / 1e12:>10.3f}",
                        flush=True,
                    )


def peak_memory(length: int, heads: int, dim: int) -> None:
    """Prints the peak of resident memory while forward + backward run, over what was held before their tensors."""
    tensors = [torch.randn(1, 8, heads, dim, requires_grad=True) for _ in range(3)]
    # A first backward with a gradient given makes torch import 30 MiB of Python modules, which are not attention's.
    cuda_ext.flash_attention(*tensors).backward(torch.ones_like(tensors[0]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tensors = [torch.randn(1, length, heads, dim, requires_grad=True) for _ in range(3)]
    grad_out = torch.randn(1, length, heads, dim)
    out = cuda_ext.flash_attention(*tensors)
    out.backward(grad_out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    # inputs: query, key, value and the gradient given; output; gradients: of query, key, value
    needed = 8 * out.numel() * out.element_size()
    print(
        f"peak memory, forward + backward, S = {length}, H = {heads}, D = {dim}, float32: {peak / 2**20:.1f} MiB, "
        f"{peak / needed:.2f} x (inputs + output + gradients = {needed / 2**20:.1f} MiB)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of both sides (default: 2)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"], help="default: all three")
    parser.add_argument("--budget", type=float, default=3.0, metavar="SECONDS", help="time for each row (default: 3)")
    parser.add_argument("--memory", action="store_true", help="only the peak memory, in this process")
    args = parser.parse_args()
    environment_line = environment(args.threads)
    if args.memory:
        return peak_memory(16384, 2, 64)
    print(environment_line)
    compare(args.dtypes, args.budget)
    sys.stdout.flush()
    # In a process of its own: a peak is never forgotten.
    subprocess.run([sys.executable, __file__, "--memory", "--threads", str(args.threads)], check=True)


if __name__ == "__main__":
    main()
