"""Fake kernels of the bucket ops: the shapes and dtypes of the results, and the errors, of the real ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext._checks import check, check_floating, is_finite, number_text, shape_of
from cuda_ext._toolchain import NAMESPACE


def _stats_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _check_tensors(op: str, tensors: Sequence[Tensor], device: torch.device) -> None:
    for i, tensor in enumerate(tensors):
        check_floating(op, f"tensors[{i}]", tensor)
        expected = f"expected tensors[{i}] on device {device}, got {tensor.device}; move it with .to()"
        check(tensor.device == device, op, expected)


def _check_bucket(op: str, tensors: Sequence[Tensor], bucket: Tensor, offsets: Sequence[int], scale: float) -> None:
    check(
        bucket.dim() == 1 and bucket.is_contiguous(),
        op,
        (f"expected bucket of shape (N,) and contiguous, got shape {shape_of(bucket)} with strides {bucket.stride()}"),
    )
    check_floating(op, "bucket", bucket)
    _check_tensors(op, tensors, bucket.device)
    check(
        len(offsets) == len(tensors),
        op,
        f"expected one offset for each of {len(tensors)} tensors, got {len(offsets)}",
    )
    check(is_finite(scale), op, f"expected a finite scale, got {number_text(scale)}")


def _pack_fake(
    tensors: Sequence[Tensor],
    bucket: Tensor,
    offsets: Sequence[int],
    *,
    scale: float = 1.0,
    kept: Sequence[int] = (),
    stats: bool = True,
) -> Tensor:
    _check_bucket("bucket_pack", tensors, bucket, offsets, scale)
    return bucket.new_empty(2 if stats else 0, dtype=_stats_dtype([bucket]))


def _unpack_fake(bucket: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    _check_bucket("bucket_unpack", tensors, bucket, offsets, scale)
    return bucket.new_empty(2, dtype=_stats_dtype([bucket]))


def _stats_fake(tensors: Sequence[Tensor]) -> Tensor:
    _check_tensors("bucket_stats", tensors, tensors[0].device)
    return tensors[0].new_empty(2, dtype=_stats_dtype(tensors))


def _refuse_vmap(*args: object, **kwargs: object) -> None:
    raise NotImplementedError(f"{NAMESPACE}: the bucket ops have no rule for torch.func.vmap; call them outside vmap")


for _name, _fake in (("bucket_pack", _pack_fake), ("bucket_unpack", _unpack_fake), ("bucket_stats", _stats_fake)):
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake)
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", _refuse_vmap)
