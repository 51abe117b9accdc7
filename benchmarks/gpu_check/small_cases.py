"""Every op with CUDA kernels, forward and backward, on small sizes: for tools that check every memory access.

    compute-sanitizer --tool memcheck python -m benchmarks.gpu_check.small_cases cuda
    python -m benchmarks.gpu_check.small_cases simt racecheck             # on the emulator instead of GPU and tool
    python -m benchmarks.gpu_check.small_cases simt memcheck bfloat16     # one dtype

Results are not compared; the tests do that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from cuda_ext import bucket, testing


def differentiate(op: Callable[..., Any], *tensors: Tensor, **options: object) -> None:
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = op(*leaves, **options)
    torch.autograd.grad(out, leaves, torch.randn_like(out))


def attention(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 37, heads, 40, dtype=dtype) for heads in (4, 2, 2))
    differentiate(cuda_ext.flash_attention, q, k, v, causal=True)
    differentiate(cuda_ext.flash_attention, q, k, v, softcap=5.0, dropout_p=0.1, deterministic=True)


def buckets(dtype: torch.dtype) -> None:
    tensors = [torch.randn(count, dtype=dtype) for count in (1, 63, 1000)]
    offsets, size = bucket.aligned_offsets([tensor.numel() for tensor in tensors], torch.float32)
    flat = torch.empty(size)
    bucket.pack(tensors, flat, offsets, scale=0.5)
    bucket.unpack(flat, tensors, offsets)
    bucket.stats(tensors)


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    yield "gemm", lambda: differentiate(cuda_ext.gemm, rand(37, 45), rand(45, 51))
    yield (
        "linear",
        lambda: differentiate(cuda_ext.linear, rand(33, 40), rand(72, 40), rand(72), activation="gelu"),
    )
    yield "gated_mlp", lambda: differentiate(cuda_ext.gated_mlp, rand(17, 24), rand(80, 24), rand(24, 40))
    yield "bucket", lambda: buckets(dtype)
    if dtype != torch.float32:
        yield "flash_attention", lambda: attention(dtype)


DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def main(backend: str, tool: str = "racecheck", *dtypes: str) -> None:
    watched = testing.emulated(mode="lazy", check_races=tool == "racecheck") if backend == "simt" else nullcontext()
    with watched, torch.device("cuda" if backend == "cuda" else "cpu"):
        print(f"small cases on {torch.ones(1).sum().device}", flush=True)
        for dtype in [DTYPES[name] for name in dtypes or DTYPES]:
            for name, case in cases(dtype):
                try:
                    case()
                except NotImplementedError as error:
                    print(f"{name} {dtype}: {error}", flush=True)
                else:
                    print(f"{name} {dtype}: done", flush=True)
        if backend == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    known = (["cuda"], ["simt"], ["simt", "memcheck"], ["simt", "racecheck"])
    if sys.argv[1:3] not in known or not set(sys.argv[3:]) <= set(DTYPES):
        sys.exit(f"{__doc__}\nexpected cuda, simt memcheck or simt racecheck, and dtypes; got {sys.argv[1:]}")
    main(*sys.argv[1:])
