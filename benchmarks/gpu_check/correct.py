"""Compares a few cases of each family of kernels with the reference: shows in seconds whether they work at all.

    python -m benchmarks.gpu_check.correct all cuda
    python -m benchmarks.gpu_check.correct gemm,attention-backward simt    # on the emulator instead of a GPU
    python -m benchmarks.gpu_check.correct gemm cuda "wgmma 128x256"       # the cases whose names contain this

The families are gemm, attention-forward (with caches), attention-backward, loss and bucket. They run side by side, each
case in a child process: one that hangs or crashes costs no other. Only torch is needed, not pytest; the tests have many
more cases and tighter tolerances. The last lines name, for each family, the cases that are not right.
"""

from __future__ import annotations

import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from benchmarks.gpu_check import isolated
from benchmarks.gpu_check.mismatch import compare
from benchmarks.gpu_check.product_cases import (
    EMULATED,
    SAME_BITS,
    Case,
    NotHere,
    Results,
    again,
    gemm_cases,
    name_of,
    settle,
)
from benchmarks.suites.measure import TF32_TOLERANCE, TOLERANCE
from cuda_ext import BlockMask, _emulator, bucket, testing
from cuda_ext._attention_options import op_arguments
from cuda_ext._relative_bias import bias_arguments

LEFT_OUT = "whose CUDA kernels are in this library"  # of csrc/attention/dispatch.h
LANES = 3  # processes of a family on a GPU


# Attention


def attention_inputs(
    batch: int, length: int, heads: int, heads_kv: int, dim: int, dim_v: int, dtype: torch.dtype
) -> list[Tensor]:
    shapes = ((heads, dim), (heads_kv, dim), (heads_kv, dim_v))
    return [torch.randn(batch, length, *shape).to(dtype) for shape in shapes]


MASKS: dict[str, Callable[[int], BlockMask]] = {
    "documents": lambda length: BlockMask.documents([0, length // 5, length // 2, length], causal=True),
    "window and global": lambda length: BlockMask.window_with_global(length, length // 6, length // 20),
}


def with_tensors(options: dict[str, Any], length: int, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """block_mask by its name, and relative_bias by how many distances it has on each side."""
    found = dict(options)
    if "block_mask" in found:
        found["block_mask"] = MASKS[found["block_mask"]](length)
    if "relative_bias" in found:
        found["relative_bias"] = torch.randn(heads, 2 * found["relative_bias"] + 1).to(dtype)
    return found


def attention_forward(sizes: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Results:
    inputs = attention_inputs(*sizes, dtype)  # type: ignore[call-arg, arg-type]
    options = with_tensors(options, sizes[1], sizes[2], dtype)
    out, lse = cuda_ext.flash_attention(*inputs, return_lse=True, **options)
    settle()
    exact = testing.reference_attention(*(tensor.double() for tensor in inputs), return_lse=True, **options)
    results = {"output": (out, exact[0]), "lse": (lse, exact[1])}
    return results | again(cuda_ext.flash_attention, *inputs, **options)


def without_wgmma(case: Callable[[], Results]) -> Results:
    with testing.attention_without_wgmma():
        return case()


def attention_backward(sizes: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Results:
    """Backward alone, from the output and LSE of the reference, so that an error in forward is not attributed to it."""
    inputs = attention_inputs(*sizes, dtype)  # type: ignore[call-arg, arg-type]
    options = with_tensors(options, sizes[1], sizes[2], dtype)
    mask, table = options.pop("block_mask", None), options.pop("relative_bias", None)
    query, key, value = (tensor.double().requires_grad_() for tensor in inputs)
    of_table = None if table is None else table.double().requires_grad_()
    leaves = [leaf for leaf in (query, key, value, of_table) if leaf is not None]
    of_reference: dict[str, Any] = {key: options[key] for key in ("causal", "softcap") if key in options}
    of_reference |= {"block_mask": mask, "relative_bias": of_table}
    out, lse = testing.reference_attention(query, key, value, return_lse=True, **of_reference)
    grad_out = torch.randn(out.shape).to(dtype)
    exact = torch.autograd.grad(out, leaves, grad_out.double())
    tensors, numbers = op_arguments("flash_attention", {"block_mask": mask, **options})
    if table is not None:
        bias = table.clone().requires_grad_()
        arguments = bias_arguments("flash_attention", bias, None, inputs[0], inputs[1])
        tensors[2] = arguments["attn_bias"]
        numbers["bias_is_relative"] = True
    *grads, _, grad_bias = torch.ops.cuda_ext.flash_attention_backward(
        grad_out,
        None,
        *inputs,
        out.detach().to(dtype),
        lse.detach().float(),
        None,
        table is not None,
        None,
        None,
        *(None if tensor is None else tensor.detach() for tensor in tensors),
        **numbers,
    )
    if table is not None:
        grads += torch.autograd.grad(arguments["attn_bias"], bias, grad_bias)
    names = ("query", "key", "value", "relative_bias")
    return {f"gradient of {name}": pair for name, pair in zip(names, zip(grads, exact))}


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
        (2, 50, 3, (4, 2), 20, 16),  # rows of 40 bytes
        (1, 40, 1, (4, 1), 320, 16),  # without a kernel
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
        # Padded, composed, and float32 as exact as float32.
        ((1, 70, 2, 1, 20, 33), torch.bfloat16, {"causal": True}),
        ((1, 40, 2, 1, 320, 64), torch.float16, {"causal": True}),
        ((1, 67, 4, 2, 64, 64), torch.float32, {"causal": True}),
        ((1, 70, 2, 1, 128, 128), torch.float32, {"softcap": 5.0}),
        ((1, 66, 1, 1, 256, 256), torch.float32, {}),
        # So many blocks that the keys are not split among blocks.
        ((3, 140, 4, 4, 64, 64), torch.bfloat16, {}),
        ((3, 140, 4, 4, 128, 128), torch.bfloat16, {"causal": True}),
    ]
    for dim in (64, 128, 256):
        found.append(((1, 330, 2, 1, dim, dim), torch.bfloat16, {"block_mask": "documents"}))
        found.append(((1, 150, 2, 2, dim, dim), torch.float16, {"relative_bias": 40, "causal": dim == 64}))
    found.append(((1, 300, 2, 2, 96, 96), torch.float32, {"block_mask": "window and global", "relative_bias": 7}))
    if backward:
        found.append(((1, 67, 2, 1, 64, 64), torch.float16, {"causal": True, "deterministic": True}))
    if large:
        for dim, dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
            found.append(((4, 1024, 16, 8, dim, dim_v), torch.bfloat16, {"causal": True}))
            found.append(((1, 1000, 4, 4, dim, dim_v), torch.float16, {}))
            found.append(((1, 2000, 8, 4, dim, dim_v), torch.bfloat16, {"block_mask": "window and global"}))
            found.append(((2, 1000, 4, 4, dim, dim_v), torch.bfloat16, {"relative_bias": 128}))
    for sizes, dtype, options in found:
        batch, length, heads, heads_kv, dim, dim_v = sizes
        words = " ".join(name if value is True else f"{name} {value}" for name, value in options.items())
        shape = f"B={batch} S={length} H={heads}/{heads_kv} D={dim}/{dim_v}"
        name, case = f"{phase} {name_of(dtype)} {shape} {words}".strip(), partial(run, sizes, dtype, **options)
        yield name, case
        if batch > 1:
            yield f"{name} mma.sync", partial(without_wgmma, case)


# Losses


def loss(sizes: tuple[int, int, int], dtype: torch.dtype, **options: Any) -> Results:
    rows, classes, features = sizes
    target = torch.randint(classes, (rows,))
    target[::5] = -100
    given = [torch.randn(rows, features).to(dtype), (features**-0.5 * torch.randn(classes, features)).to(dtype)]
    of_kernels = {name: options.pop(name) for name in ("method", "memory_limit") if name in options}

    def run(function: Callable[..., Any], operands: Sequence[Tensor], **more: Any) -> list[Tensor]:
        leaves = [operand.requires_grad_() for operand in operands]
        value = function(*leaves, target, **options, **more)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    actual = run(cuda_ext.linear_cross_entropy, [operand.clone() for operand in given], **of_kernels)
    settle()
    exact = run(testing.reference_linear_cross_entropy, [operand.double() for operand in given])
    names = ("loss", "gradient of input", "gradient of weight")
    return dict(zip(names, zip(actual, exact)))


def loss_cases(large: bool) -> Iterator[Case]:
    sizes = [(33, 391, 72), (200, 1000, 64)] + [(4096, 32_003, 512)] * large
    for each in sizes:
        shape = "{} x {} x {}".format(*each)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for method in ("forward", "recompute"):
                yield f"{method} {name_of(dtype)} {shape}", partial(loss, each, dtype, method=method)
        yield f"recompute bfloat16 {shape} softcap", partial(loss, each, torch.bfloat16, softcap=30.0, z_loss=1e-4)
        small = 2 * each[1] * 128  # bytes: several tiles
        yield f"recompute bfloat16 {shape} tiles", partial(loss, each, torch.bfloat16, memory_limit=small)


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
    "loss": loss_cases,
    "bucket": bucket_cases,
}


def verdict(name: str, case: Callable[[], Results]) -> isolated.Answer:
    """Runs a case in this process; a second of two faults on a GPU may be a consequence of the first."""
    torch.manual_seed(zlib.crc32(name.encode()))
    good, worst, texts = False, 0.0, []
    try:
        for what, (actual, exact) in case().items():
            text, error = compare(what, actual, exact, tolerance_of(name, what, actual))
            texts += [f"WRONG: {text}"] * bool(text)
            worst = max(worst, error)
        good = not texts
        if good:
            texts = [f"right, errors up to {worst:.1e}"]
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        good = LEFT_OUT in first or isinstance(error, NotHere)
        texts.append(f"not here: {first}" if good else f"FAILED: {first}")
    return isolated.Answer(good, "\n".join(texts), spoilt=not good and gpu_is_lost())


def tolerance_of(name: str, what: str, actual: Tensor) -> float:
    if what.startswith(SAME_BITS):
        return 0.0
    return TF32_TOLERANCE if "tf32" in name else TOLERANCE[name_of(actual.dtype)]


def gpu_is_lost() -> bool:
    try:
        settle()
    except RuntimeError:
        return True
    return False


def prepare(backend: str) -> None:
    torch.set_num_threads(1)  # the threads of the parent do not exist in a child
    if backend == "cuda":  # the context, and cuBLAS, which the references need
        one = torch.ones(8, 8, dtype=torch.float64, device="cuda")
        (one @ one).sum().item()


def kind_of(name: str) -> str:
    """ "wgmma 128x256", "linear bias": if several of a kind hang, all do."""
    return " ".join(name.split()[:2])


def verdict_on(backend: str, family: str, name: str) -> isolated.Answer:
    """`verdict`, in a child."""
    with ExitStack() as stack:
        for context in contexts(backend):
            stack.enter_context(context)
        return verdict(name, dict(FAMILIES[family](backend == "cuda"))[name])


def contexts(backend: str) -> list[AbstractContextManager[Any]]:
    if backend == "cuda":
        return [torch.device("cuda")]
    arch, processors = EMULATED
    return [torch.device("cpu"), testing.emulated(arch, mode="lazy", processors=processors)]


def check(
    families: Sequence[str],
    backend: str,
    containing: str = "",
    patience: float = isolated.PATIENCE,
    start_patience: float = isolated.START_PATIENCE,
) -> int:
    """Prints the verdict of each case as it comes, and those that are not right again at the end. Returns the exit
    status."""
    names = {
        family: found
        for family in families
        if (found := [name for name, _ in FAMILIES[family](backend == "cuda") if containing in name])
    }
    answers: dict[str, dict[str, isolated.Answer]] = {family: {} for family in names}
    if backend == "simt":
        _emulator.load(hooks=False)  # which may compile it, so no child should
    results = isolated.run(
        names,
        partial(verdict_on, backend),
        prepare=partial(prepare, backend),
        kind=kind_of,
        lanes=LANES if backend == "cuda" else 1,
        patience=patience,
        start_patience=start_patience,
    )
    try:
        for result in results:
            answers[result.group][result.case] = result.answer
            for line in result.answer.text.splitlines():
                print(f"{result.group}: {result.case}: {line} ({result.seconds:.1f} s)", flush=True)
    except KeyboardInterrupt:
        print("correct: stopped before the end", flush=True)
    finally:
        results.close()
    for family in names:
        print(f"correct: {family}: {summary(names[family], answers[family])}", flush=True)
    if not names:
        print(f"correct: no case has {containing!r} in its name", flush=True)
    return 0 if names and all(is_right(names[family], answers[family]) for family in names) else 1


def is_right(names: Sequence[str], answers: dict[str, isolated.Answer]) -> bool:
    """Whether nothing is wrong, and something was found right."""
    return all(name in answers and answers[name].good for name in names) and any(
        answer.text.startswith("right") for answer in answers.values()
    )


def summary(names: Sequence[str], answers: dict[str, isolated.Answer]) -> str:
    """ "60 right, 1 not run, 2 not right: linear bfloat16 ... (WRONG), ..." """
    right = sum(answer.text.startswith("right") for answer in answers.values())
    counts = [f"{right} right"]
    if left_out := sum(answer.good for answer in answers.values()) - right:
        counts.append(f"{left_out} not here")
    if missing := len(names) - len(answers):
        counts.append(f"{missing} not run")
    bad = [f"{name} ({answer.text.partition(':')[0]})" for name, answer in answers.items() if not answer.good]
    return ", ".join([*counts, f"{len(bad)} not right"]) + (f": {'; '.join(bad)}" if bad else "")


def main(arguments: Sequence[str]) -> int:
    families, backend, containing = [*arguments, ""][:3]
    chosen = list(FAMILIES) if families == "all" else families.split(",")
    # On SIGTERM, which a stage receives when its time is over, say what is known.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return check(chosen, backend, containing)


if __name__ == "__main__":
    known = len(sys.argv) in (3, 4) and set(sys.argv[1].split(",")) <= {*FAMILIES, "all"}
    if not known or sys.argv[2] not in ("cuda", "simt"):
        sys.exit(f"{__doc__}\nexpected families, cuda or simt, and perhaps a part of names; got {sys.argv[1:]}")
    sys.exit(main(sys.argv[1:]))
