"""The overhead of a call: ops on tensors so small that arithmetic is negligible; all need gradients.

`torch.mul` is the smallest op; its ratio shows which fraction of our call any PyTorch call costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cuda_ext
from benchmarks.results import OURS
from benchmarks.suites.measure import Call, Case
from cuda_ext import bucket as bucket_ops


def cases(device: str) -> Iterator[Case]:
    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    x, y, half, bias = leaf(4, 4), leaf(4, 4), leaf(4, 2), leaf(4)
    # On a GPU attention has no kernels for float32.
    of_attention = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (leaf(1, 4, 1, 8, dtype=of_attention) for _ in range(3))
    qh, kh, vh = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v))
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "gemm": (lambda: cuda_ext.gemm(x, y), lambda: torch.matmul(x, y)),
        "linear": (lambda: cuda_ext.linear(x, y), lambda: F.linear(x, y)),
        "linear + bias + gelu": (
            lambda: cuda_ext.linear(x, y, bias, activation="gelu"),
            lambda: F.gelu(F.linear(x, y, bias)),
        ),
        "gated_mlp": (lambda: cuda_ext.gated_mlp(x, y, half), lambda: _gated_mlp(x, y, half)),
        "flash_attention": (
            lambda: cuda_ext.flash_attention(q, k, v),
            lambda: F.scaled_dot_product_attention(qh, kh, vh),
        ),
    }
    for op, (ours, theirs) in pairs.items():
        for backward in (False, True):
            sides = {OURS: ours, "PyTorch": theirs, "torch.mul": lambda: torch.mul(x, y)}
            yield Case(
                op=op,
                phase="forward + backward" if backward else "forward",
                group="small calls",
                name="tiny",
                dtype=str(of_attention if op == "flash_attention" else torch.float32).removeprefix("torch."),
                sides={name: functools.partial(_side, call, backward) for name, call in sides.items()},
                # Host time until the call returns; kernels do not matter, so no graph is captured.
                timer="clock",
            )
    yield _bucket_call(device)


def _gated_mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = F.linear(x, w1).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w2)


def _side(call: Callable[[], Tensor], backward: bool, _: Any) -> Call:
    if not backward:
        return call
    gradient = torch.ones_like(call())
    return lambda: call().backward(gradient)


def _bucket_call(device: str) -> Case:
    tensors = [torch.randn(8, device=device) for _ in range(8)]
    offsets, total = bucket_ops.aligned_offsets([8] * 8, torch.float32)
    bucket = torch.zeros(total, device=device)
    views = [bucket[o : o + 8] for o in offsets]
    return Case(
        op="pack of 8 tensors",
        phase="forward",
        group="small calls",
        name="tiny",
        dtype="float32",
        sides={
            OURS: lambda _: lambda: bucket_ops.pack(tensors, bucket, offsets),
            "PyTorch": lambda _: lambda: torch._foreach_copy_(views, tensors),
            "torch.mul": lambda _: lambda: torch.mul(bucket, bucket),
        },
        timer="clock",
    )
