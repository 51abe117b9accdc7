"""The bucket ops on the CPU against what PyTorch offers for the same job.

pack moves many tensors into a flat buffer with scale, cast, squared norm and non-finite flag in one pass, unpack brings
them back likewise, stats is the norm and the flag alone. The other sides are
  copy_     one tensor as large as all of them, copied or cast: the bandwidth there is to have
  foreach   torch._foreach_copy_ between the tensors and views of the buffer: neither scale nor statistics
  passes    foreach, then the scale, the norm and the flag, each a pass of its own: the same result
GB/s are ours and count every byte once that is read or written. A ratio above 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from side_by_side import alternate, environment
from torch import Tensor

from cuda_ext import bucket as bucket_ops

DTYPES = ("float32 float32", "float32 bfloat16", "bfloat16 float32", "bfloat16 bfloat16", "float16 float16")
SCALE = 0.5


def mixed_counts(total: int) -> list[int]:
    """Sizes from 1 to a million, evenly spread over their logarithms, as those of biases, norms and weights are."""
    generator = torch.Generator().manual_seed(0)
    counts: list[int] = []
    while sum(counts) < total:
        counts.append(min(total - sum(counts), int(2 ** (20 * torch.rand((), generator=generator)))))
    return counts


def statistics_in_passes(tensors: list[Tensor]) -> tuple[Tensor, bool]:
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
    return norm, all(bool(tensor.isfinite().all()) for tensor in tensors)


def sides(counts: list[int], dtype: torch.dtype, bucket_dtype: torch.dtype) -> dict[str, dict[str, Callable]]:
    """By op and side; ours comes first."""
    tensors = [torch.randn(count).to(dtype) for count in counts]
    offsets, size = bucket_ops.aligned_offsets(counts, bucket_dtype)
    bucket, flat = torch.zeros(size, dtype=bucket_dtype), torch.randn(size).to(dtype)
    views = [bucket[offset : offset + count] for offset, count in zip(offsets, counts, strict=True)]

    def pack_in_passes() -> None:
        torch._foreach_copy_(views, tensors)
        bucket.mul_(SCALE)
        statistics_in_passes([bucket])

    def unpack_in_passes() -> None:
        torch._foreach_copy_(tensors, views)
        torch._foreach_mul_(tensors, SCALE)
        statistics_in_passes(tensors)

    return {
        "pack": {
            "ours": lambda: bucket_ops.pack(tensors, bucket, offsets, scale=SCALE),
            "copy_": lambda: bucket.copy_(flat),
            "foreach": lambda: torch._foreach_copy_(views, tensors),
            "passes": pack_in_passes,
        },
        "unpack": {
            "ours": lambda: bucket_ops.unpack(bucket, tensors, offsets, scale=SCALE),
            "copy_": lambda: flat.copy_(bucket),
            "foreach": lambda: torch._foreach_copy_(tensors, views),
            "passes": unpack_in_passes,
        },
        "stats": {
            "ours": lambda: bucket_ops.stats(tensors),
            "passes": lambda: statistics_in_passes(tensors),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    parser.add_argument("--elements", type=int, nargs="+", default=[1 << 18, 1 << 24], help="of all tensors together")
    parser.add_argument(
        "--dtypes", nargs="+", default=DTYPES, help="of the tensors and of the buffer, 'float32 bfloat16'"
    )
    parser.add_argument("--budget", type=float, default=0.7, help="seconds for each comparison, default 0.7")
    args = parser.parse_args()
    print(environment(args.threads))
    torch.manual_seed(0)
    for total in args.elements:
        counts = mixed_counts(total)
        print(f"\n{len(counts)} tensors of {total} elements\n{'':<8}{'tensors':<10}{'buffer':<10}{'GB/s':>6}", end="")
        print("".join(f"{'vs ' + name:>12}" for name in ("copy_", "foreach", "passes")))
        for names in args.dtypes:
            dtype, bucket_dtype = (getattr(torch, name) for name in names.split())
            for op, (ours, *others) in ((op, each.items()) for op, each in sides(counts, dtype, bucket_dtype).items()):
                if op == "stats" and dtype != bucket_dtype:
                    continue  # the same as with a buffer of the tensors' dtype
                moved = total * (dtype.itemsize + (0 if op == "stats" else bucket_dtype.itemsize))
                results = {name: alternate(ours[1], other, args.budget) for name, other in others}
                ratios = (
                    f"{results[n][2]:11.2f}x" if n in results else " " * 12 for n in ("copy_", "foreach", "passes")
                )
                fastest = min(seconds for seconds, _, _ in results.values())
                print(
                    f"{op:<8}{names.split()[0]:<10}{names.split()[1]:<10}{moved / fastest / 1e9:6.1f}", *ratios, sep=""
                )


if __name__ == "__main__":
    main()
