"""Attention with block masks, against dense masks, FlexAttention and, for documents, packed sequences; and with a bias
by distance, against the same values in a matrix, and FlexAttention."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cuda_ext
from benchmarks.results import OURS
from benchmarks.suites import baselines
from benchmarks.suites.bench_attention import CHECKED_ROWS, sides_of
from benchmarks.suites.measure import Call, Case, relative_error
from cuda_ext.block_mask import BLOCK, BlockMask

NAMES = ("causal documents", "window + global", "prefix-LM", "all blocks")  # the last: the rate of dense blocks
DOCUMENT, WINDOW, GLOBAL_TOKENS = 512, 256, 64
# Python functions of FlexAttention, (b, h, i, j) -> bool
Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Mask:
    name: str
    length: int
    document: int = DOCUMENT  # tokens, on average

    @property
    def ends(self) -> list[int]:
        """Of documents, from 0 on."""
        generator, ends = torch.Generator().manual_seed(0), [0]
        while ends[-1] < self.length:
            size = int(torch.randint(self.document // 2, self.document * 3 // 2, (), generator=generator))
            ends.append(min(self.length, ends[-1] + size))
        return ends

    def blocks(self, device: str) -> BlockMask:
        return _blocks(self, device)

    def build(self, device: str) -> BlockMask:
        if self.name == "all blocks":
            return BlockMask.window(self.length, self.length, None, None, device=device)
        if self.name == "causal documents":
            return BlockMask.documents(self.ends, causal=True, device=device)
        if self.name == "window + global":
            return BlockMask.window_with_global(self.length, WINDOW, GLOBAL_TOKENS, device=device)
        return BlockMask.prefix_lm(self.length // 4, self.length, device=device)

    def mod(self, device: str) -> Mod:
        if self.name == "causal documents":
            ids = torch.bucketize(torch.arange(self.length), torch.tensor(self.ends[1:-1]), right=True).to(device)
            return lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)
        if self.name == "window + global":
            return lambda b, h, i, j: ((i - j).abs() <= WINDOW) | (i < GLOBAL_TOKENS) | (j < GLOBAL_TOKENS)
        if self.name == "all blocks":
            return lambda b, h, i, j: j >= 0
        prefix = self.length // 4
        return lambda b, h, i, j: (j < prefix) | (j <= i)


@functools.lru_cache(maxsize=4)
def _blocks(mask: Mask, device: str) -> BlockMask:
    return mask.build(device)


def cases(device: str) -> Iterator[Case]:
    length, heads, kv_heads, dim = (4096, 8, 2, 64) if device == "cpu" else (16384, 16, 16, 128)
    dtypes = ("float32", "bfloat16") if device == "cpu" else ("bfloat16",)
    for name in NAMES:
        for dtype in dtypes:
            for backward in (False, True):
                yield masked(name, length, heads, kv_heads, dim, device, dtype, backward)
    for dtype in dtypes:
        for backward in (False, True):
            yield biased(length // 2, kv_heads, dim, device, dtype, backward)


def masked(
    name: str, length: int, heads: int, kv_heads: int, dim: int, device: str, dtype: str, backward: bool
) -> Case:
    mask, torch_dtype = Mask(name, length), getattr(torch, dtype)

    def normal(count: int) -> Tensor:
        return torch.randn(1, length, count, dim, device=device).to(torch_dtype).requires_grad_(backward)

    def inputs() -> tuple[Tensor, ...]:
        q = normal(heads)
        return q, normal(kv_heads), normal(kv_heads), torch.randn_like(q, requires_grad=False)

    forwards: dict[str, Any] = {
        OURS: lambda q, k, v: _ours(q, k, v, mask.blocks(device)),
        "SDPA": lambda q, k, v: _sdpa(q, k, v, mask.blocks(device).to_dense()),
    }
    if name == "causal documents":
        forwards["flash_attention_varlen"] = lambda q, k, v: _varlen(q, k, v, mask.ends)
    if device == "cuda" or not backward:  # on a CPU it has no backward
        forwards["FlexAttention"] = lambda q, k, v: baselines.flex_attention_of(q, k, v, mask.mod(device))
    visible = mask.blocks(device).visible_blocks()
    moved = float(torch_dtype.itemsize * 2 * dim * length * (heads + kv_heads))
    return Case(
        op=f"flash_attention {name}",
        phase="backward" if backward else "forward",
        group="block masks",
        name=f"S={length} H={heads}/{kv_heads} D={dim}, {visible} of {(length // BLOCK) ** 2} blocks",
        dtype=dtype,
        sides=sides_of(forwards, backward),
        inputs=inputs,
        check=lambda qkvg, out: _error(mask, qkvg, out, backward),
        size=float(length),
        size_name="sequence length",
        flops=4.0 * heads * visible * BLOCK**2 * dim * (2.5 if backward else 1.0),  # of whole blocks
        bytes=moved * (2.0 if backward else 1.0),
        input_bytes=moved * (3.0 if backward else 1.0),
        tolerance=3e-2 if backward and dtype != "float32" else None,
    )


def biased(length: int, heads: int, dim: int, device: str, dtype: str, backward: bool) -> Case:
    """A learned bias for each distance up to 128, as T5 has it, without a mask."""
    torch_dtype, most = getattr(torch, dtype), 128
    distance = (torch.arange(length) - torch.arange(length)[:, None]).clamp(-most, most).to(device)

    def inputs() -> tuple[Tensor, ...]:
        q, k, v = (torch.randn(1, length, heads, dim, device=device).to(torch_dtype) for _ in range(3))
        table = torch.randn(heads, 2 * most + 1, device=device)  # a parameter, which autocast leaves in float32
        return *(t.requires_grad_(backward) for t in (q, k, v, table)), torch.randn_like(q)

    def attend(name: str, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Call:
        def call() -> Tensor:
            bias: Any = {name: table if name == "relative_bias" else table[:, distance + most].to(q.dtype)}
            return cuda_ext.flash_attention(q, k, v, **bias)

        return baselines.with_leaves(call, (q, k, v, table), lambda t: t)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Call:
        q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_(backward) for t in (q, k, v))
        call = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=table[:, distance + most][None].to(q.dtype))  # noqa: E731
        return baselines.with_leaves(call, (q, k, v, table), lambda t: t.transpose(1, 2) if t.dim() == 4 else t)

    def flex(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Call:
        return baselines.flex_attention_with(
            q, k, v, table, lambda s, b, h, i, j: s + table[h, (j - i).clamp(-most, most) + most]
        )

    forwards: dict[str, Any] = {
        OURS: functools.partial(attend, "relative_bias"),
        "attn_bias": functools.partial(attend, "attn_bias"),
        "SDPA": sdpa,
    }
    if device == "cuda" or not backward:
        forwards["FlexAttention"] = flex

    def check(tensors: tuple[Tensor, ...], out: Any) -> float:
        """Of the first head, by PyTorch in higher precision."""
        precise = torch.float64 if device == "cpu" else torch.float32
        q, k, v, table = (
            t.detach()[(slice(None),) * (t.dim() - 2) + (slice(1),) if t.dim() == 4 else slice(1)].to(precise)
            for t in tensors[:4]
        )
        leaves = [t.requires_grad_(backward) for t in (q, k, v, table)]
        expected = sdpa(*leaves)
        result = expected().transpose(1, 2)
        if not backward:
            return relative_error(out[:, :, :1], result)
        grads = torch.autograd.grad(result, expected.leaves, tensors[4][:, :, :1].to(precise))  # type: ignore[attr-defined]
        wanted = [expected.to_ours(t) for t in grads]  # type: ignore[attr-defined]
        return relative_error(tuple(t[:, :, :1] if t.dim() == 4 else t[:1] for t in out), tuple(wanted))

    moved = float(torch_dtype.itemsize * 4 * dim * length * heads)
    return Case(
        op="flash_attention bias by distance",
        phase="backward" if backward else "forward",
        group="block masks",
        name=f"S={length} H={heads}/{heads} D={dim}, distances up to {most}",
        dtype=dtype,
        sides=sides_of(forwards, backward),
        inputs=inputs,
        check=check,
        size=float(length),
        size_name="sequence length",
        flops=4.0 * heads * length**2 * dim * (2.5 if backward else 1.0),
        bytes=moved * (2.0 if backward else 1.0),
        input_bytes=moved * (3.0 if backward else 1.0),
        tolerance=3e-2 if backward and dtype != "float32" else None,
    )


def _ours(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Call:
    call = functools.partial(cuda_ext.flash_attention, q, k, v, block_mask=mask)
    return baselines.with_leaves(call, (q, k, v), lambda t: t)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, dense: Tensor) -> Call:
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_(t.requires_grad) for t in (q, k, v))
    call = functools.partial(F.scaled_dot_product_attention, q, k, v, attn_mask=dense, enable_gqa=repeats > 1)
    return baselines.with_leaves(call, (q, k, v), lambda t: t.transpose(1, 2))


def _varlen(q: Tensor, k: Tensor, v: Tensor, ends: list[int]) -> Call:
    """The same documents as packed sequences, which no other mask can be."""
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=q.device)
    longest = max(end - begin for begin, end in itertools.pairwise(ends))
    q, k, v = (t.detach()[0].requires_grad_(t.requires_grad) for t in (q, k, v))
    call = functools.partial(
        cuda_ext.flash_attention_varlen,
        *(q, k, v, cu_seqlens, cu_seqlens),
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )
    # From and to (1, S, H, D), as the other sides have it.
    return baselines.with_leaves(lambda: call()[None], (q, k, v), lambda t: t[None] if t.dim() == 3 else t)


def _error(mask: Mask, qkvg: tuple[Tensor, ...], out: Any, backward: bool) -> float:
    """Of random rows of the output, or of the gradients of the first key head and the query heads that share it."""
    q, k, v, grad = (t.detach() for t in qkvg)
    repeats, precise = q.shape[2] // k.shape[2], torch.float64 if q.is_cpu else torch.float32
    dense = mask.blocks(q.device.type).to_dense()[0, 0]
    rows = torch.arange(mask.length) if backward else torch.randperm(mask.length)[:CHECKED_ROWS]
    heads, groups = (repeats, 1) if backward else (q.shape[2], k.shape[2])
    q, grad = (t[:, :, :heads].to(precise).requires_grad_(backward) for t in (q, grad))
    k, v = (t[:, :, :groups].to(precise).requires_grad_(backward) for t in (k, v))
    shared_k, shared_v = (t.repeat_interleave(repeats, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows], shared_k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~dense[rows], -torch.inf).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, shared_v)
    if not backward:
        return relative_error(out[:, rows], expected)
    gradients = torch.autograd.grad(expected, (q, k, v), grad.detach())
    return relative_error(tuple(t[:, :, : e.shape[2]] for t, e in zip(out, gradients, strict=True)), gradients)
