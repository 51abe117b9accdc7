"""Gradient buckets: many tensors of mixed dtype and one flat buffer, moved in one pass with scale, cast and statistics.

Data parallel training sums gradients across ranks. A collective on every tensor pays its latency hundreds of times, so gradients travel in flat
buffers; the plain way there is a copy per tensor, a division, a cast, and later one more pass for the norm. `pack` and `unpack` do all of it while the
values go by once. None of these functions has a gradient, and under ``torch.func.vmap`` they raise NotImplementedError.

Statistics are returned as a tensor (2,), float32 (float64 where noted): ``[0]`` is the sum of the squares of the values *as the destination stores
them*, after scale and cast, and ``[1]`` is 1.0 if one of them is infinite or NaN, else 0.0. The sum is taken in float64 over fixed blocks of the buffer
that are added in order, so it does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

__all__ = ["aligned_offsets", "pack", "stats", "unpack"]


def aligned_offsets(counts: Sequence[int], dtype: torch.dtype, *, alignment: int = 64) -> tuple[list[int], int]:
    """Where tensors of ``counts`` elements go in a bucket of ``dtype``, each at a multiple of ``alignment`` bytes (default 64, a cache line).

    Returns the offsets, in elements, and the number of elements of the bucket, which is aligned as well: an odd-sized tensor then costs those behind it
    neither vector loads nor a shared cache line.
    """
    step = max(1, alignment // dtype.itemsize)
    offsets, end = [], 0
    for count in counts:
        offsets.append(end)
        end = -(-(end + count) // step) * step
    return offsets, end


def pack(tensors: Sequence[Tensor], bucket: Tensor, offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    """Writes ``cast(scale * tensor)`` of every tensor into ``bucket`` from its offset on, and zeros everywhere else; returns the statistics.

    tensors: any number, of any shape; float32, float16, bfloat16 or float64, mixed at will. One that is not contiguous is copied first.
    bucket (N,): contiguous, one of the same dtypes. The statistics are float64 if it is float64.
    offsets: one for each tensor, in elements of the bucket, ascending; tensors may not overlap.
    scale: finite. It is applied in float32 (in float64 if either dtype is float64), before the cast, which rounds to nearest even.

    A tensor may be a view of the bucket at its own offset and in the bucket's dtype: it is then scaled where it is, and only read if ``scale`` is 1.

    Raises RuntimeError for other dtypes, layouts, devices or overlaps, for offsets out of order or out of range, and for a tensor that requires grad
    while gradients are enabled.
    """
    return ops.bucket_pack(tensors, bucket, offsets, scale=scale)


def unpack(bucket: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    """Writes ``cast(scale * value)`` of the bucket's values into ``tensors``; returns the statistics of what the tensors then hold.

    The inverse of `pack`, with the same arguments, dtypes and errors. A tensor that is not contiguous is written through a copy; one whose elements
    share memory (an expanded one) is refused.
    """
    return ops.bucket_unpack(bucket, tensors, offsets, scale=scale)


def stats(tensors: Sequence[Tensor]) -> Tensor:
    """The statistics of ``tensors`` as they are: for the norm of many tensors, in one pass and with no copy.

    tensors: at least one, of any shape; float32, float16, bfloat16 or float64, mixed at will. The statistics are float64 if one of them is float64.
    Raises RuntimeError for none, for other dtypes or layouts, and for a tensor that requires grad while gradients are enabled.
    """
    if len(tensors) == 0:  # the dispatcher finds the device by the tensors
        raise RuntimeError(f"{NAMESPACE}::bucket_stats: expected at least one tensor, got none")
    return ops.bucket_stats(tensors)


def _stats_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


@torch.library.register_fake(f"{NAMESPACE}::bucket_pack")
def _(tensors: Sequence[Tensor], bucket: Tensor, offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    return bucket.new_empty(2, dtype=_stats_dtype(bucket.dtype))


@torch.library.register_fake(f"{NAMESPACE}::bucket_unpack")
def _(bucket: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    return bucket.new_empty(2, dtype=_stats_dtype(bucket.dtype))


@torch.library.register_fake(f"{NAMESPACE}::bucket_stats")
def _(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(2, dtype=_stats_dtype(*(tensor.dtype for tensor in tensors)))


def _refuse_vmap(name: str) -> None:
    def refuse(info: object, in_dims: object, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{NAMESPACE}::{name}: expected no torch.func.vmap around it, which has no rule for it; call it outside")

    torch.library.register_vmap(f"{NAMESPACE}::{name}", refuse)


for _name in ("bucket_pack", "bucket_unpack", "bucket_stats"):
    _refuse_vmap(_name)
