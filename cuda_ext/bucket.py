"""Gradient buckets: many tensors of mixed dtype and one flat buffer, moved in one pass with scale, cast and statistics.

Data parallel training averages gradients over ranks. One collective for each tensor pays its latency hundreds of times,
so gradients travel in flat buffers; the plain way there is a copy of each tensor, a division, a cast, and later another
pass for the norm. `pack` and `unpack` do all of it while the values go by once. Neither has a gradient, nor a rule for
``torch.func.vmap``: both refuse.

Statistics are a tensor (2,), float32 (float64 where noted). ``[0]`` is the sum of the squares of the values *as the
destination stores them*, after scale and cast; it is infinite, or 0, where float32 cannot hold it. ``[1]`` is 1.0 if
one of the values is infinite or NaN, else 0.0. The sum is taken in float64 over fixed blocks of the buffer, which are
added in order, so that it does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

__all__ = ["aligned_offsets", "pack", "stats", "unpack"]


def aligned_offsets(counts: Sequence[int], dtype: torch.dtype, *, alignment: int = 64) -> tuple[list[int], int]:
    """Where tensors of ``counts`` elements go in a bucket of ``dtype``, each at a multiple of ``alignment`` bytes.

    Returns the offsets and the size of the bucket, a multiple too, all in elements. With the default, a cache line, a
    tensor of odd size costs those behind it neither whole vectors nor a line shared between threads.
    """
    step = max(1, alignment // dtype.itemsize)
    offsets, end = [], 0
    for count in counts:
        offsets.append(end)
        end = -(-(end + count) // step) * step
    return offsets, end


def pack(tensors: Sequence[Tensor], bucket: Tensor, offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    """Writes ``cast(scale * tensor)`` of every tensor into ``bucket`` at its offset, and zeros everywhere else.

    tensors: any number, of any shape; float32, float16, bfloat16 or float64, mixed at will. One that is not contiguous
    is
        copied first. One may be a view of the bucket, of its dtype and at its own offset: it is then scaled where it
        is, and only read if ``scale`` is 1.
    bucket: (N,), contiguous, of one of these dtypes.
    offsets: one for each tensor, in elements of the bucket, ascending, such that tensors do not overlap.
    scale: finite, default 1. Applied in float32 (float64 if either dtype is), before the cast to nearest even.

    Returns the statistics of the bucket, float64 if it is. Raises RuntimeError for other dtypes, layouts or devices,
    for offsets out of order or range, for a tensor that overlaps the bucket elsewhere, and for a tensor that requires
    grad while gradients are enabled.
    """
    return ops.bucket_pack(tensors, bucket, offsets, scale=scale)


def unpack(bucket: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    """Writes ``cast(scale * value)`` of the bucket's values into ``tensors``: the inverse of `pack`.

    Arguments, dtypes and errors are those of `pack`. A tensor that is not contiguous is written through a copy; one
    whose elements share memory, as an expanded one's do, is refused. Tensors may not overlap each other (not checked).

    Returns the statistics of the tensors, float64 if the bucket is.
    """
    return ops.bucket_unpack(bucket, tensors, offsets, scale=scale)


def stats(tensors: Sequence[Tensor]) -> Tensor:
    """The statistics of ``tensors`` as they are: the norm of many tensors in one pass.

    tensors: at least one, of any shape; float32, float16, bfloat16 or float64, mixed at will. One whose memory has gaps
        is copied first. The statistics are float64 if one of them is.

    Raises RuntimeError for none, for other dtypes, layouts or devices, and for a tensor that requires grad while
    gradients are enabled.
    """
    if len(tensors) == 0:  # by the tensors the dispatcher would know the device
        raise RuntimeError(f"{NAMESPACE}::bucket_stats: expected at least one tensor, got none")
    return ops.bucket_stats(tensors)


def _stats_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _pack_fake(tensors: Sequence[Tensor], bucket: Tensor, offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    return bucket.new_empty(2, dtype=_stats_dtype([bucket]))


def _unpack_fake(bucket: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    return bucket.new_empty(2, dtype=_stats_dtype([bucket]))


def _stats_fake(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(2, dtype=_stats_dtype(tensors))


def _refuse_vmap(*args: object, **kwargs: object) -> None:
    raise NotImplementedError(f"{NAMESPACE}: the bucket ops have no rule for torch.func.vmap; call them outside of it")


for _name, _fake in (("bucket_pack", _pack_fake), ("bucket_unpack", _unpack_fake), ("bucket_stats", _stats_fake)):
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake)
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", _refuse_vmap)
