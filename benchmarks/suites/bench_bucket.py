"""Packing gradients into a bucket and back, for the parameters of known models, against PyTorch's ops.

In one pass, pack copies many tensors to a flat buffer with scale, cast, squared norm and non-finite flag; unpack does
the same in the other direction; stats computes only norm and flag. The baselines are
  copy_     one tensor as large as all of them, copied or cast: the attainable bandwidth
  foreach   torch._foreach_copy_ between the tensors and views of the buffer: no scale, no statistics
  passes    foreach, then scale and flag as in torch.amp.GradScaler, then the norm: the same result
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import OURS
from benchmarks.suites.measure import Call, Case, relative_error
from cuda_ext import bucket as bucket_ops

SCALE = 0.5

Sizes = list[tuple[int, ...]]


def gpt2() -> Sizes:
    """The 124 million parameters of GPT-2's smallest (Radford et al. 2019)."""
    d = 768
    block = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *block * 12, (d,), (d,)]


def llama_block() -> Sizes:
    """One of the 32 blocks of Llama 3 8B (arXiv 2407.21783)."""
    d, kv, hidden = 4096, 1024, 14336
    return [(d, d), (kv, d), (kv, d), (d, d), (hidden, d), (hidden, d), (d, hidden), (d,), (d,)]


def llama_8b() -> Sizes:
    return [(128256, 4096), *llama_block() * 32, (4096,), (128256, 4096)]


def resnet50() -> Sizes:
    """Convolutions, batch norms and the classifier (He et al., arXiv 1512.03385)."""
    sizes: Sizes = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                sizes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                sizes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*sizes, (1000, 2048), (1000,)]


def cases(device: str) -> Iterator[Case]:
    models = {"ResNet-50": resnet50(), "GPT-2 124M": gpt2(), "Llama 3 8B, a block": llama_block()}
    dtypes = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
    if device == "cuda":
        models["Llama 3 8B"] = llama_8b()
    for name, sizes in models.items():
        for dtype, bucket_dtype in dtypes:
            if device == "cpu" and name != "ResNet-50" and dtype != bucket_dtype:
                continue  # gigabytes, without new information
            if name == "Llama 3 8B" and "float32" in (dtype, bucket_dtype):
                continue  # exceeds the memory of most GPUs
            for op in ("pack", "unpack", "stats"):
                if op != "stats" or dtype == bucket_dtype:
                    yield make_case(op, device, name, sizes, dtype, bucket_dtype)


def norm_of(tensors: list[Tensor]) -> Tensor:
    """The squared norm; not finite if any element is not, so it is the flag as well."""
    return torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).square().sum()


class Inputs:
    """Tensors, a bucket for them, and views of the bucket."""

    def __init__(self, device: str, sizes: Sizes, dtype: str, bucket_dtype: str) -> None:
        of_tensors, of_bucket = getattr(torch, dtype), getattr(torch, bucket_dtype)
        self.tensors = [torch.randn(size, device=device).to(of_tensors).flatten() for size in sizes]
        counts = [tensor.numel() for tensor in self.tensors]
        self.offsets, total = bucket_ops.aligned_offsets(counts, of_bucket)
        self.bucket = torch.randn(total, device=device).to(of_bucket)
        self.views = [self.bucket[start : start + count] for start, count in zip(self.offsets, counts)]

    @functools.cached_property
    def flat(self) -> Tensor:
        return torch.randn(self.bucket.shape, device=self.bucket.device).to(self.tensors[0].dtype)


def ours(op: str, given: Inputs) -> Call:
    if op == "pack":
        return lambda: bucket_ops.pack(given.tensors, given.bucket, given.offsets, scale=SCALE)
    if op == "unpack":
        return lambda: bucket_ops.unpack(given.bucket, given.tensors, given.offsets, scale=SCALE)
    return lambda: bucket_ops.stats(given.tensors)


def in_passes(op: str, given: Inputs) -> Call:
    device = given.bucket.device
    found, scale = torch.zeros((), device=device), torch.full((), SCALE, device=device)

    def scale_and_check(tensors: list[Tensor]) -> None:
        """As torch.amp.GradScaler does."""
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, scale)

    def pack() -> Any:
        torch._foreach_copy_(given.views, given.tensors)
        scale_and_check([given.bucket])
        return norm_of([given.bucket])

    def unpack() -> Any:
        torch._foreach_copy_(given.tensors, given.views)
        scale_and_check(given.tensors)
        return norm_of(given.tensors)

    return {"pack": pack, "unpack": unpack, "stats": lambda: norm_of(given.tensors)}[op]


def foreach(op: str, given: Inputs) -> Call:
    if op == "pack":
        return lambda: torch._foreach_copy_(given.views, given.tensors)
    return lambda: torch._foreach_copy_(given.tensors, given.views)


def copy(op: str, given: Inputs) -> Call:
    source, target = (given.flat, given.bucket) if op == "pack" else (given.bucket, given.flat)
    return lambda: target.copy_(source)


def make_case(op: str, device: str, model: str, sizes: Sizes, dtype: str, bucket_dtype: str) -> Case:
    total = sum(map(math.prod, sizes))
    item, bucket_item = (getattr(torch, name).itemsize for name in (dtype, bucket_dtype))

    def check(given: Inputs, out: Any) -> float:
        """Compares our copies and our norm with separate steps; other sides return neither."""
        if not (isinstance(out, Tensor) and out.shape == (2,)):
            return 0.0
        if op == "stats":
            moved, expected = given.tensors, None
        elif op == "pack":
            moved, expected = given.views, [(t.float() * SCALE).to(given.bucket.dtype) for t in given.tensors]
        else:
            moved, expected = given.tensors, [(v.float() * SCALE).to(given.tensors[0].dtype) for v in given.views]
        if expected is not None and not all(torch.equal(a, b) for a, b in zip(moved, expected)):
            return math.inf
        norm = torch.stack(torch._foreach_norm(moved, dtype=torch.float64)).square().sum()
        return relative_error(out[0], norm)

    sides: dict[str, Any] = {OURS: functools.partial(ours, op), "passes": functools.partial(in_passes, op)}
    if op != "stats":
        sides |= {"foreach": functools.partial(foreach, op), "copy_": functools.partial(copy, op)}
    moved = float(total * (item + (0 if op == "stats" else bucket_item)))
    return Case(
        op=op,
        phase="forward",
        group=f"{dtype} → {bucket_dtype}" if op == "pack" else f"{bucket_dtype} → {dtype}" if op == "unpack" else dtype,
        name=model if dtype == bucket_dtype else f"{model}, bucket {bucket_dtype}",
        dtype=dtype,
        sides=sides,
        inputs=functools.partial(Inputs, device, sizes, dtype, bucket_dtype),
        check=check,
        size=float(total),
        size_name="parameters",
        bytes=moved,
        input_bytes=moved,
        # The squared norm of rounded values, summed in float32 or better.
        tolerance=1e-3,
        extra={"elements": total, "tensors": len(sizes), "bucket dtype": bucket_dtype},
    )
