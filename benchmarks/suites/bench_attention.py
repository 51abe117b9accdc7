"""Flash attention, forward and backward, against every other implementation, each in its own layout."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cuda_ext
from benchmarks.results import OURS
from benchmarks.suites import baselines
from benchmarks.suites.measure import Call, Case, relative_error

# The reference in higher precision holds all scores in memory, so only a part is compared: this many rows of queries;
# in backward, where gradients of keys need all rows, the heads of one key head, up to this length.
CHECKED_ROWS = 256
CHECKED_BACKWARD_LENGTH = 16384
# SDPA's math backend holds all scores in memory, so longer sequences do not fit.
LONGEST_MATH = 4096
# FlexAttention is compiled for each shape, which takes many times as long as the measurement.
FLEX_LENGTHS = (4096, 16384)


@dataclass(frozen=True)
class Problem:
    batch: int
    length: int  # of queries, and of keys unless `keys` is set
    heads: int
    dim: int
    kv_heads: int = 0  # 0: the same as heads
    causal: bool = False
    window: int | None = None  # number of keys to the left that a query sees; with causal
    deterministic: bool = False
    keys: int = 0  # 0: the same as length

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def seen_keys(self) -> int:
        return self.keys or self.length

    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, by the usual convention: causal counts half of all."""
        if self.window is not None:
            seen = min(self.window + 1, self.seen_keys)
            return float(self.length * seen - seen * (seen - 1) / 2)
        return self.length * self.seen_keys * (0.5 if self.causal and self.length > 1 else 1.0)

    def flops(self, backward: bool) -> float:
        """4 B H Sq Sk D for the two products of forward; backward has five."""
        return 4.0 * self.batch * self.heads * self.pairs() * self.dim * (2.5 if backward else 1.0)

    def elements(self) -> float:
        """Elements of query, key, value and output."""
        return float(2 * self.batch * self.dim * (self.length * self.heads + self.seen_keys * self.groups))

    def name(self) -> str:
        heads = f"H={self.heads}" + (f"/{self.kv_heads}" if self.kv_heads else "")
        length = f"S={self.length}" + (f"/{self.keys}" if self.keys else "")
        return f"B={self.batch} {length} {heads} D={self.dim}"

    def op(self) -> str:
        what = "causal" if self.causal else "full"
        if self.window is not None:
            what = f"window {self.window}"
        return f"flash_attention {what}{' deterministic' if self.deterministic else ''}"


def cases(device: str) -> Iterator[Case]:
    if device == "cpu":
        yield from _cpu_cases()
    else:
        yield from _cuda_cases()


def _cpu_cases() -> Iterator[Case]:
    for length, dim in ((1024, 64), (2048, 128)):
        for dtype in ("float32", "bfloat16"):
            for causal in (False, True):
                for backward in (False, True):
                    problem = Problem(1, length, 8, dim, causal=causal)
                    yield attention(problem, "cpu", dtype, backward, group=f"D={dim}")
    for backward in (False, True):
        yield attention(Problem(1, 1024, 8, 64, kv_heads=2, causal=True), "cpu", "float32", backward, group="GQA")
        yield attention(Problem(1, 4096, 8, 64, causal=True, window=255), "cpu", "float32", backward, group="window")
        yield varlen("cpu", "float32", 4096, 8, 8, 64, backward)
    # Text generation: a few tokens at a time.
    for kv_heads, queries in itertools.product((0, 2), (1, 2, 4, 8, 16)):
        problem = Problem(1, queries, 8, 64, kv_heads=kv_heads, keys=8192)
        yield attention(problem, "cpu", "float32", False, group="decode")
    for dtype, queries in itertools.product(("float32", "bfloat16"), (1, 16)):
        yield cache(Problem(1, queries, 32, 128, kv_heads=8, keys=8192), "cpu", dtype)
    # In float16 PyTorch takes seconds for longer sequences, and for backward.
    for causal in (False, True):
        yield attention(Problem(1, 1024, 8, 64, causal=causal), "cpu", "float16", False, group="D=64")


def _cuda_cases() -> Iterator[Case]:
    make = functools.partial(attention, device="cuda", dtype="bfloat16")
    # The grid of the FlashAttention papers: 16384 tokens, a width of 2048.
    for dim in (128, 64, 256):
        for causal in (True, False):
            for length in (4096, 1024, 16384, 512, 2048, 8192):
                problem = Problem(16384 // length, length, 2048 // dim, dim, causal=causal)
                for backward in (False, True):
                    yield make(problem, backward=backward, group=f"paper grid D={dim}")
    for heads in (32, 64):
        for length in (2048, 8192):
            for backward in (False, True):
                yield make(Problem(2, length, heads, 128, kv_heads=8, causal=True), backward=backward, group="GQA")
    for backward in (False, True):
        yield varlen("cuda", "bfloat16", 32768, 32, 8, 128, backward)
        for window in (1023, 4095):
            problem = Problem(1, 16384, 16, 128, causal=True, window=window)
            yield make(problem, backward=backward, group="window")
    yield make(Problem(4, 4096, 16, 128, causal=True, deterministic=True), backward=True, group="deterministic")
    for length in (32768, 65536, 131072):
        for backward in (False, True):
            yield make(Problem(1, length, 16, 128, causal=True), backward=backward, group="long context")
    for keys in (4096, 32768):
        yield make(Problem(16, 1, 32, 128, kv_heads=8, keys=keys), backward=False, group="decode")
    for batch, keys in ((8, 16384), (1, 1024), (1, 16384), (8, 4096), (64, 1024)):
        yield cache(Problem(batch, 1, 64, 128, kv_heads=8, keys=keys), "cuda", "bfloat16")
    for length in (1024, 4096):
        for backward in (False, True):
            problem = Problem(16384 // length, length, 16, 128, causal=True)
            yield attention(problem, "cuda", "float16", backward, group="float16")


def attention(problem: Problem, device: str, dtype: str, backward: bool, group: str) -> Case:
    p = problem
    torch_dtype = getattr(torch, dtype)

    def normal(length: int, heads: int) -> Tensor:
        values = torch.randn(p.batch, length, heads, p.dim, device=device)
        return values.to(torch_dtype).requires_grad_(backward)

    def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = normal(p.length, p.heads), normal(p.seen_keys, p.groups), normal(p.seen_keys, p.groups)
        return q, k, v, torch.randn_like(q, requires_grad=False)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Call:
        window = None if p.window is None else (p.window, 0)
        options: dict[str, Any] = {"causal": p.causal, "window": window, "deterministic": p.deterministic or None}
        call = functools.partial(cuda_ext.flash_attention, q, k, v, **options)
        return baselines.with_leaves(call, (q, k, v), lambda t: t)

    if p.window is None and not p.deterministic:
        # On a CPU PyTorch chooses its flash kernel.
        backends = ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"] if device == "cuda" else [""]
        if device == "cuda" and p.length <= LONGEST_MATH:
            backends.append("MATH")
        forwards: dict[str, Any] = {
            f"SDPA {backend.removesuffix('_ATTENTION').lower()}".strip(): functools.partial(
                baselines.sdpa, backend, causal=p.causal
            )
            for backend in backends
        }
    elif p.window is not None and device == "cpu":
        forwards = {"SDPA": functools.partial(_masked_sdpa, window=p.window)}
    else:
        forwards = {}
    if device == "cuda":
        windowed: dict[str, Any] = {"causal": p.causal, "window": p.window}
        if not p.deterministic and p.length in FLEX_LENGTHS:
            forwards["FlexAttention"] = functools.partial(baselines.flex_attention, **windowed)
        if not p.deterministic:
            forwards["flashinfer"] = functools.partial(baselines.flashinfer, **windowed)
        forwards["FlashAttention-2"] = functools.partial(
            baselines.flash_attn, deterministic=p.deterministic, **windowed
        )
        forwards["FlashAttention-3"] = functools.partial(
            baselines.flash_attn_3, deterministic=p.deterministic, **windowed
        )
        if p.window is None and not p.deterministic:
            forwards["xformers"] = functools.partial(baselines.xformers, causal=p.causal)

    def check(qkvg: tuple[Tensor, ...], out: Any) -> float:
        return _gradient_error(p, qkvg, out) if backward else _output_error(p, qkvg, out)

    size = torch_dtype.itemsize
    elements = p.elements()
    return Case(
        op=p.op(),
        phase="backward" if backward else "forward",
        group=group,
        name=p.name(),
        dtype=dtype,
        sides=sides_of({OURS: ours, **forwards}, backward),
        inputs=inputs,
        check=check if not backward or p.length <= CHECKED_BACKWARD_LENGTH else None,
        size=float(p.seen_keys),
        size_name="sequence length",
        flops=p.flops(backward),
        # Backward reads query, key, value, output and its gradient, and writes three gradients.
        bytes=size * elements * (2.0 if backward else 1.0),
        input_bytes=size * elements * (3.0 if backward else 1.0),
        # A gradient results from five products of rounded factors.
        tolerance=3e-2 if backward and dtype != "float32" else None,
    )


PAGE_SIZE = 16


def cache(problem: Problem, device: str, dtype: str) -> Case:
    """Attention over a cache in pages, in random order; the others read contiguous keys, but for flash-attn."""
    p = problem
    torch_dtype = getattr(torch, dtype)

    def inputs() -> tuple[Tensor, ...]:
        def normal(length: int, heads: int) -> Tensor:
            return torch.randn(p.batch, length, heads, p.dim, device=device).to(torch_dtype)

        pages = p.batch * p.seen_keys // PAGE_SIZE
        table = torch.randperm(pages, device=device).reshape(p.batch, -1)
        return normal(p.length, p.heads), normal(p.seen_keys, p.groups), normal(p.seen_keys, p.groups), table.int()

    def paged(tensor: Tensor, table: Tensor) -> Tensor:
        pool = torch.empty_like(tensor).reshape(-1, PAGE_SIZE, p.groups, p.dim)
        pool[table.flatten().long()] = tensor.reshape(-1, PAGE_SIZE, p.groups, p.dim)
        return pool

    def ours(qkvt: tuple[Tensor, ...]) -> Call:
        q, k, v, table = qkvt
        pools = paged(k, table), paged(v, table)
        lengths = torch.full((p.batch,), p.seen_keys, dtype=torch.int32, device=device)
        options: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table}
        return lambda: cuda_ext.flash_attention_with_kvcache(q, *pools, **options)

    def sdpa(qkvt: tuple[Tensor, ...]) -> Call:
        q, k, v, _ = qkvt
        return baselines.sdpa("", q, k, v, causal=False)

    def flash_attn(qkvt: tuple[Tensor, ...]) -> Call:
        q, k, v, _ = qkvt
        lengths = torch.full((p.batch,), p.seen_keys, dtype=torch.int32, device=device)
        return baselines.flash_attn_with_kvcache(q, k, v, lengths)

    sides: dict[str, Any] = {OURS: ours, "SDPA": sdpa}
    if device == "cuda":
        sides["FlashAttention-2"] = flash_attn
    elements = p.elements()
    return Case(
        op="flash_attention_with_kvcache",
        phase="forward",
        group="cache",
        name=p.name(),
        dtype=dtype,
        sides=sides,
        inputs=inputs,
        check=lambda qkvt, out: _output_error(p, qkvt, out),
        size=float(p.seen_keys),
        size_name="sequence length",
        flops=p.flops(False),
        bytes=torch_dtype.itemsize * elements,
        input_bytes=torch_dtype.itemsize * elements,
    )


def sides_of(forwards: dict[str, Any], backward: bool) -> dict[str, Any]:
    """Turns functions of query, key and value into sides, which also get the gradient of the output."""

    def side(forward: Any) -> Any:
        def make(qkvg: tuple[Tensor, ...]) -> Call:
            *qkv, grad_out = qkvg
            return baselines.backward(forward(*qkv), grad_out) if backward else forward(*qkv)

        return make

    return {name: side(forward) for name, forward in forwards.items()}


def _masked_sdpa(q: Tensor, k: Tensor, v: Tensor, window: int) -> Call:
    """SDPA with a window, which is a full mask to it: it skips nothing."""
    i = torch.arange(q.shape[1])[:, None]
    j = torch.arange(k.shape[1])
    mask = (j <= i) & (i - j <= window)
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_(t.requires_grad) for t in (q, k, v))
    call = functools.partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask)
    return baselines.with_leaves(call, (q, k, v), lambda t: t.transpose(1, 2))


def _scores_mask(p: Problem, rows: Tensor) -> Tensor:
    """Which keys the queries `rows` see, (rows, Sk)."""
    i = rows[:, None] + (p.seen_keys - p.length)
    j = torch.arange(p.seen_keys, device=rows.device)
    seen = j <= i if p.causal else torch.ones_like(j <= i)
    return seen & (i - j <= p.window) if p.window is not None else seen


def _attend(p: Problem, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Plain attention of the queries `rows`; q, k, v are (B, S, H, D)."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(repeats, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows], k) * p.dim**-0.5
    weights = scores.masked_fill(~_scores_mask(p, rows), -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def _precise(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def _output_error(p: Problem, qkvg: tuple[Tensor, ...], out: Tensor) -> float:
    """The error of random rows of the first sequence."""
    q, k, v, _ = (t.detach()[:1].to(_precise(t.device)) for t in qkvg)
    rows = torch.randperm(p.length)[:CHECKED_ROWS].to(q.device)
    return relative_error(out[:1, rows], _attend(p, q, k, v, rows))


def _gradient_error(p: Problem, qkvg: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> float:
    """The error of the first key head of the first sequence and the query heads that share it."""
    repeats = p.heads // p.groups
    q, k, v, grad = (
        t.detach()[:1, :, :heads].to(_precise(t.device)).requires_grad_()
        for t, heads in zip(qkvg, (repeats, 1, 1, repeats))
    )
    result = _attend(p, q, k, v, torch.arange(p.length, device=q.device))
    expected = torch.autograd.grad(result, (q, k, v), grad)
    got = tuple(t[:1, :, : e.shape[2]] for t, e in zip(gradients, expected, strict=True))
    return relative_error(got, expected)


def lengths_of_documents(total: int) -> list[int]:
    """Lengths of real texts: the topics of Python's language reference, shuffled, at four bytes per token."""
    from pydoc_data import topics

    texts = list(topics.topics.values())
    random.Random(0).shuffle(texts)
    lengths: list[int] = []
    for text in itertools.cycle(texts):
        lengths.append(min(-(-len(text) // 4), total - sum(lengths)))
        if sum(lengths) == total:
            return lengths
    raise AssertionError("a cycle has no end")


def varlen(device: str, dtype: str, total: int, heads: int, kv_heads: int, dim: int, backward: bool) -> Case:
    """Packed documents, each attending to itself, causal."""
    lengths = lengths_of_documents(total)
    torch_dtype = getattr(torch, dtype)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    longest = max(lengths)

    def normal(count: int) -> Tensor:
        return torch.randn(total, count, dim, device=device).to(torch_dtype).requires_grad_(backward)

    def inputs() -> tuple[Tensor, ...]:
        q = normal(heads)
        return q, normal(kv_heads), normal(kv_heads), torch.randn_like(q, requires_grad=False)

    @functools.cache
    def cu_seqlens() -> Tensor:
        return ends.to(device, torch.int32)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Call:
        call = functools.partial(
            cuda_ext.flash_attention_varlen,
            *(q, k, v, cu_seqlens(), cu_seqlens()),
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
        )
        return baselines.with_leaves(call, (q, k, v), lambda t: t)

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Call:
        """PyTorch without padding: a call per sequence."""

        def call() -> Tensor:
            parts = zip(*(t.split(lengths) for t in (q, k, v)))
            outs = []
            for part in parts:
                query, key, value = (t.transpose(0, 1)[None] for t in part)
                outs.append(F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
            return torch.cat([out[0].transpose(0, 1) for out in outs])

        return baselines.with_leaves(call, (q, k, v), lambda t: t)

    forwards: dict[str, Any] = {OURS: ours, "SDPA, each": one_by_one}
    if device == "cuda":
        for name, module in (("FlashAttention-2", "flash_attn"), ("FlashAttention-3", "flash_attn_interface")):
            forwards[name] = lambda q, k, v, module=module: baselines.flash_attn_varlen(
                module, q, k, v, cu_seqlens(), longest, causal=True
            )

    def check(qkvg: tuple[Tensor, ...], out: Any) -> float:
        """The error of the longest document, computed as a separate sequence."""
        start = int(ends[lengths.index(longest)])
        p = Problem(1, longest, heads, dim, kv_heads=kv_heads, causal=True)
        document = slice(start, start + longest)
        own = tuple(t[None, document] for t in qkvg)
        if backward:
            return _gradient_error(p, own, tuple(t[None, document] for t in out))
        return _output_error(p, own, out[None, document])

    elements = 2.0 * dim * total * (heads + kv_heads)
    pairs = sum(length**2 for length in lengths) / 2
    return Case(
        op="flash_attention_varlen causal",
        phase="backward" if backward else "forward",
        group="varlen",
        name=f"{len(lengths)} documents, {total} tokens, H={heads}/{kv_heads} D={dim}",
        dtype=dtype,
        sides=sides_of(forwards, backward),
        inputs=inputs,
        check=check,
        size=float(total),
        size_name="tokens",
        flops=4.0 * heads * pairs * dim * (2.5 if backward else 1.0),
        bytes=torch_dtype.itemsize * elements * (2.0 if backward else 1.0),
        input_bytes=torch_dtype.itemsize * elements * (3.0 if backward else 1.0),
    )
