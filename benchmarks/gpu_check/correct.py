"""Compares a few cases of one family of kernels with the reference: shows in seconds whether it works at all.

    python -m benchmarks.gpu_check.correct gemm cuda
    python -m benchmarks.gpu_check.correct attention-backward simt    # on the emulator instead of a GPU

The families are gemm, attention-forward (with caches), attention-backward and bucket. Only torch is needed, not pytest;
the tests have many more cases and tighter tolerances. The name of a case is printed before it runs, in case it hangs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from benchmarks.suites.measure import TF32_TOLERANCE, TOLERANCE
from cuda_ext import bucket, testing

# name -> (actual, expected).
Results = dict[str, tuple[Tensor, Tensor]]
Case = tuple[str, Callable[[], Results]]
LEFT_OUT = "whose CUDA kernels are in this library"  # of csrc/attention/attention_left_out.cpp


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Products, with the gradients of all operands


def product(op: Callable[..., Tensor], reference: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> Results:
    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        out = function(*leaves, **options)
        generator = torch.Generator(out.device).manual_seed(1)
        grad_out = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float64)
        return [out, *torch.autograd.grad(out, leaves, grad_out.to(tensors[0].dtype).to(dtype))]

    names = ["output", *(f"gradient {i}" for i in range(len(tensors)))]
    return dict(zip(names, zip(run(op, tensors[0].dtype), run(reference, torch.float64))))


def in_tf32(case: Callable[[], Results]) -> Results:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return case()
    finally:
        torch.set_float32_matmul_precision(before)


def gemm_cases(large: bool) -> Iterator[Case]:
    def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, transposed: bool = False) -> Tensor:
        tensor = torch.randn(shape[::-1] if transposed else shape, dtype=torch.float32).mul_(shape[0] ** -0.5).to(dtype)
        return tensor.t() if transposed else tensor

    def gemm(m: int, n: int, k: int, dtype: torch.dtype, layout: str = "nn") -> Results:
        a, b = (
            rand(m, k, dtype=dtype, transposed=layout[0] == "t"),
            rand(k, n, dtype=dtype, transposed=layout[1] == "t"),
        )
        return product(cuda_ext.gemm, testing.reference_gemm, a, b)

    for layout in ("nn", "nt", "tn", "tt"):
        yield f"gemm bfloat16 {layout} 136 x 72 x 104", partial(gemm, 136, 72, 104, torch.bfloat16, layout)
    yield "gemm bfloat16 nn 24 x 40 x 4096", partial(gemm, 24, 40, 4096, torch.bfloat16)  # split k
    yield "gemm float16 nn 61 x 37 x 83", partial(gemm, 61, 37, 83, torch.float16)
    yield "gemm float32 nn 72 x 40 x 64", partial(gemm, 72, 40, 64, torch.float32)
    yield "gemm tf32 nn 72 x 40 x 64", partial(in_tf32, partial(gemm, 72, 40, 64, torch.float32))
    yield (
        "linear bfloat16 gelu 33 x 72 x 40",
        lambda: product(
            cuda_ext.linear, testing.reference_linear, rand(33, 40), rand(72, 40), rand(72), activation="gelu"
        ),
    )
    yield (
        "gated_mlp bfloat16 17 x 24, 40",
        lambda: product(cuda_ext.gated_mlp, testing.reference_gated_mlp, rand(17, 24), rand(80, 24), rand(24, 40)),
    )
    if large:  # whole tiles, many waves, split k
        for m, n, k in ((1024, 1024, 1024), (4096, 2048, 1024), (64, 1024, 8192), (1000, 1000, 1000)):
            yield f"gemm bfloat16 nn {m} x {n} x {k}", partial(gemm, m, n, k, torch.bfloat16)
        for dtype in (torch.float16, torch.float32):
            yield f"gemm {name_of(dtype)} nt 1024 x 768 x 512", partial(gemm, 1024, 768, 512, dtype, "nt")


# Attention


def attention_inputs(
    batch: int, length: int, heads: int, heads_kv: int, dim: int, dim_v: int, dtype: torch.dtype
) -> list[Tensor]:
    shapes = ((heads, dim), (heads_kv, dim), (heads_kv, dim_v))
    return [torch.randn(batch, length, *shape).to(dtype) for shape in shapes]


def attention_forward(sizes: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Results:
    inputs = attention_inputs(*sizes, dtype)  # type: ignore[call-arg, arg-type]
    out, lse = cuda_ext.flash_attention(*inputs, return_lse=True, **options)
    exact = testing.reference_attention(*(tensor.double() for tensor in inputs), return_lse=True, **options)
    return {"output": (out, exact[0]), "lse": (lse, exact[1])}


def attention_backward(sizes: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Results:
    """Backward alone, from the output and LSE of the reference, so that an error in forward is not attributed to it."""
    inputs = attention_inputs(*sizes, dtype)  # type: ignore[call-arg, arg-type]
    names = {key: options[key] for key in ("causal", "softcap") if key in options}
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    out, lse = testing.reference_attention(*leaves, return_lse=True, **names)
    grad_out = torch.randn(out.shape).to(dtype)
    exact = torch.autograd.grad(out, leaves, grad_out.double())
    grads = torch.ops.cuda_ext.flash_attention_backward(
        grad_out, None, *inputs, out.detach().to(dtype), lse.detach().float(), None, **options
    )
    return {f"gradient of {name}": pair for name, pair in zip(("query", "key", "value"), zip(grads, exact))}


def attention_cache(batch: int, keys: int, queries: int, heads: tuple[int, int], dim: int, page_size: int) -> Results:
    """Appends the keys of the queries to a cache in pages, and attends to all."""
    dtype, rows = torch.bfloat16, keys + queries
    width = -(-rows // page_size)
    query, new_key, new_value = attention_inputs(batch, queries, *heads, dim, dim, dtype)
    pools = [torch.full((batch * width, page_size, heads[1], dim), float("nan")).to(dtype) for _ in range(2)]
    table = torch.randperm(batch * width).reshape(batch, width)
    earlier = [torch.randn(batch, keys, heads[1], dim).to(dtype) for _ in range(2)]
    at = torch.arange(keys)
    for pool, tensor in zip(pools, earlier):
        pool[table[:, at // page_size], at % page_size] = tensor
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    out = cuda_ext.flash_attention_with_kvcache(
        query, pools[0], pools[1], new_key, new_value, cache_seqlens=lengths, block_table=table.int(), causal=True
    )
    whole = [torch.cat(pair, 1).double() for pair in zip(earlier, (new_key, new_value))]
    at = torch.arange(rows)
    appended = pools[0][table[:, at // page_size], at % page_size]
    exact, _ = testing.reference_attention(query.double(), whole[0], whole[1], causal=True, return_lse=True)
    return {"output": (out, exact), "keys in the cache": (appended, whole[0])}


def cache_cases(large: bool) -> Iterator[Case]:
    found = [
        (2, 70, 1, (4, 2), 64, 16),
        (1, 300, 1, (8, 1), 128, 4),
        (1, 90, 40, (4, 2), 128, 16),
        (1, 40, 3, (2, 2), 256, 1),
    ]
    if large:
        found += [(8, 4096, 1, (64, 8), 128, 16), (1, 20000, 1, (32, 8), 128, 256), (4, 1024, 512, (16, 4), 64, 32)]
    for sizes in found:
        batch, keys, queries, (heads, heads_kv), dim, page_size = sizes
        name = f"cache bfloat16 B={batch} S={queries}/{keys} H={heads}/{heads_kv} D={dim} pages of {page_size}"
        yield name, partial(attention_cache, *sizes)


def forward_cases(large: bool) -> Iterator[Case]:
    yield from attention_cases(large, backward=False)
    yield from cache_cases(large)


def attention_cases(large: bool, backward: bool) -> Iterator[Case]:
    run = attention_backward if backward else attention_forward
    phase = "backward" if backward else "forward"
    found: list[tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = [
        ((2, 67, 4, 2, 64, 64), torch.bfloat16, {"causal": True}),
        ((1, 70, 2, 2, 40, 40), torch.float16, {}),
        ((1, 130, 2, 1, 128, 128), torch.float16, {"causal": True}),
        ((1, 65, 2, 1, 128, 128), torch.bfloat16, {"softcap": 5.0}),
        ((1, 66, 1, 1, 192, 128), torch.bfloat16, {"causal": True}),
        ((1, 66, 1, 1, 256, 256), torch.bfloat16, {}),
        # So many blocks that the keys are not split among blocks.
        ((3, 140, 4, 4, 64, 64), torch.bfloat16, {}),
        ((3, 140, 4, 4, 128, 128), torch.bfloat16, {"causal": True}),
    ]
    if backward:
        found.append(((1, 67, 2, 1, 64, 64), torch.float16, {"causal": True, "deterministic": True}))
    if large:
        for dim, dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
            found.append(((4, 1024, 16, 8, dim, dim_v), torch.bfloat16, {"causal": True}))
            found.append(((1, 1000, 4, 4, dim, dim_v), torch.float16, {}))
    for sizes, dtype, options in found:
        batch, length, heads, heads_kv, dim, dim_v = sizes
        words = " ".join(name if value is True else f"{name} {value}" for name, value in options.items())
        shape = f"B={batch} S={length} H={heads}/{heads_kv} D={dim}/{dim_v}"
        yield " ".join(f"{phase} {name_of(dtype)} {shape} {words}".split()), partial(run, sizes, dtype, **options)


# Buckets


def pack_and_unpack(counts: list[int], dtype: torch.dtype, of_bucket: torch.dtype) -> Results:
    tensors = [torch.randn(count).to(dtype) for count in counts]
    offsets, size = bucket.aligned_offsets(counts, of_bucket)
    flat = torch.full((size,), float("nan")).to(of_bucket)
    stats = bucket.pack(tensors, flat, offsets, scale=0.5)
    expected = torch.zeros(size, dtype=torch.float64)
    for tensor, offset in zip(tensors, offsets):
        expected[offset : offset + tensor.numel()] = (0.5 * tensor.float()).to(of_bucket).double()
    back = [torch.empty_like(tensor) for tensor in tensors]
    bucket.unpack(flat, back, offsets, scale=2.0)
    exact = [(2.0 * (0.5 * tensor.float()).to(of_bucket).float()).to(dtype).double() for tensor in tensors]
    return {
        "bucket": (flat, expected),
        "squared norm": (stats[:1], expected.square().sum()[None]),
        "unpacked": (torch.cat(back), torch.cat(exact)),
    }


def squared_norm(counts: list[int], dtype: torch.dtype) -> Results:
    tensors = [torch.randn(count).to(dtype) for count in counts]
    stats = bucket.stats(tensors)
    return {"squared norm": (stats[:1], torch.cat(tensors).double().square().sum()[None])}


def bucket_cases(large: bool) -> Iterator[Case]:
    for title, counts in (("short", [1, 63, 1000]), ("long", [70_001, 4096])):
        for dtype, of_bucket in (
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.float16, torch.float16),
        ):
            name = f"pack and unpack {title} {name_of(dtype)}, bucket {name_of(of_bucket)}"
            yield name, partial(pack_and_unpack, counts, dtype, of_bucket)
        yield f"stats {title} float32", partial(squared_norm, counts, torch.float32)
    if large:
        many = [1 + 9973 * i % 50_000 for i in range(300)]
        yield "pack and unpack 300 tensors", partial(pack_and_unpack, many, torch.bfloat16, torch.float32)
        yield "pack and unpack 64 Mi", partial(pack_and_unpack, [1 << 26], torch.float32, torch.bfloat16)


FAMILIES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "gemm": gemm_cases,
    "attention-forward": forward_cases,
    "attention-backward": partial(attention_cases, backward=True),
    "bucket": bucket_cases,
}


def run(cases: Iterator[Case], on_gpu: bool) -> int:
    """Prints the verdict of each case; returns how many are wrong, or not run because the GPU is lost."""
    wrong, right, lost = 0, 0, ""
    for name, case in cases:
        if lost:
            print(f"{name}: NOT RUN: the GPU was lost in {lost}", flush=True)
            wrong += 1
            continue
        print(f"{name}:", end=" ", flush=True)
        try:
            for what, (actual, exact) in case().items():
                expect(what, actual, exact, tf32="tf32" in name)
        except AssertionError as error:
            print(f"WRONG: {error}", flush=True)
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            if LEFT_OUT in first:
                print(f"not in this build: {first}", flush=True)
                continue
            print(f"FAILED: {first}", flush=True)
        else:
            print("right", flush=True)
            right += 1
            continue
        wrong += 1
        if on_gpu:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                lost = name
    print(f"correct: {right} right, {wrong} not", flush=True)
    return wrong if right else max(1, wrong)


def expect(what: str, actual: Tensor, exact: Tensor, tf32: bool) -> None:
    """Raises AssertionError if an error exceeds the tolerance, relative to the largest element."""
    dtype = actual.dtype
    actual, exact = actual.detach().double(), exact.detach().to(actual.dtype).double()
    if actual.shape != exact.shape:
        raise AssertionError(f"{what}: expected shape {tuple(exact.shape)}, got {tuple(actual.shape)}")
    finite = exact.isfinite()
    tolerance = TF32_TOLERANCE if tf32 else TOLERANCE[name_of(dtype)]
    allowed = tolerance * float(exact.abs().where(finite, 0.0).max())
    # Infinities must be equal; a NaN equals nothing.
    wrong = torch.where(finite, ~((actual - exact).abs() <= allowed), actual != exact)
    if count := int(wrong.sum()):
        first = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {count} of {wrong.numel()} elements are wrong by more than {allowed:.2g}, the first at {first}: "
            f"expected {float(exact[first]):.6g}, got {float(actual[first]):.6g}"
        )


def main(family: str, backend: str) -> int:
    emulated = testing.emulated(mode="lazy") if backend == "simt" else nullcontext()
    with emulated, torch.device("cuda" if backend == "cuda" else "cpu"):
        where = "the emulator" if backend == "simt" else torch.cuda.get_device_name()
        print(f"{family} on {where}", flush=True)
        return 1 if run(FAMILIES[family](backend == "cuda"), backend == "cuda") else 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in FAMILIES or sys.argv[2] not in ("cuda", "simt"):
        sys.exit(f"{__doc__}\nexpected a family and cuda or simt, got {sys.argv[1:]}")
    sys.exit(main(*sys.argv[1:]))
