"""Attention over sequences that ranks share, against one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

from cuda_ext import flash_attention
from cuda_ext.distributed import context_parallel as cp
from cuda_ext.distributed.context_parallel import Layout

Whole = dict[str, Any]

# Each has query heads, key heads, lengths of queries and keys, and options of the whole call.
CASES: dict[str, tuple[int, int, int, int, Whole]] = {
    "plain": (4, 4, 24, 24, {}),
    "causal": (4, 2, 24, 24, {"causal": True}),
    "odd": (6, 3, 37, 37, {"causal": True}),
    "short": (4, 1, 3, 3, {"causal": True}),
    "one key head": (5, 1, 29, 29, {"causal": True, "softcap": 3.0, "scale": 0.3}),
    "more keys": (4, 2, 19, 43, {"causal": True}),
    "more queries": (4, 2, 43, 19, {"causal": True}),
    "window": (4, 2, 53, 53, {"causal": True, "window": (7, None)}),
    "window both sides": (4, 2, 53, 61, {"window": (5, 9)}),
    "window left": (4, 2, 61, 53, {"window": (5, None)}),
    "window right": (4, 2, 47, 47, {"window": (None, 11)}),
    "sinks": (4, 2, 37, 37, {"causal": True, "sinks": (4,)}),
    "sinks without keys": (4, 2, 43, 19, {"causal": True, "sinks": (4,)}),
    "alibi": (4, 2, 37, 37, {"alibi_slopes": (4,)}),
    "alibi of batches, causal": (4, 2, 37, 41, {"causal": True, "alibi_slopes": (2, 4)}),
    "bias": (4, 2, 31, 37, {"attn_bias": (2, 4, 31, 37)}),
    "bias of keys": (4, 2, 31, 37, {"attn_bias": (37,), "causal": True}),
    "bias of heads": (4, 2, 31, 31, {"attn_bias": (4, 31, 31), "window": (9, 2)}),
    "mask": (4, 2, 31, 37, {"attn_mask": (31, 37)}),
    "relative bias": (4, 2, 37, 37, {"relative_bias": (4, 21)}),
    "relative bias and alibi": (4, 2, 37, 29, {"relative_bias": (21,), "alibi_slopes": (4,), "window": (15, 3)}),
    "relative bias and bias": (4, 2, 23, 29, {"relative_bias": (2, 4, 9), "attn_bias": (23, 29)}),
}
DIFFERENTIABLE = ("sinks", "attn_bias", "relative_bias")


def make(shape: Any, name: str) -> Any:
    """The value of an option; a shape stands for a tensor."""
    if not (isinstance(shape, tuple) and name not in ("window",)):
        return shape
    if name == "attn_mask":
        return torch.rand(shape) < 0.7
    value = (
        torch.rand(shape, dtype=torch.float64) if name == "alibi_slopes" else torch.randn(shape, dtype=torch.float64)
    )
    return value.requires_grad_() if name in DIFFERENTIABLE else value


def draw(case: str, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Whole]:
    heads, key_heads, queries, keys, options = CASES[case]
    shapes = [(2, queries, heads, 8), (2, keys, key_heads, 8), (2, keys, key_heads, 12)]
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    return tensors, {name: make(value, name) for name, value in options.items()}


def layouts(kind: str, case: str, ranks: int) -> list[Layout]:
    """Of queries and of keys."""
    made = []
    for length in CASES[case][2:4]:
        if kind == "uneven":  # ranges of random lengths, some empty, on random ranks
            ends = sorted([0, length, *torch.randint(length + 1, (3 * ranks,)).tolist()])
            owners = torch.randint(ranks, (len(ends),)).tolist()
            ranges = [[r for r, owner in zip(zip(ends, ends[1:]), owners) if owner == rank] for rank in range(ranks)]
            made.append(Layout(length, tuple(map(tuple, ranges))))
        else:
            made.append(getattr(Layout, kind)(length, ranks))
    return made


def own_rows(tensor: Tensor, layout: Layout, dim: int = 1) -> Tensor:
    return tensor.index_select(dim, layout.positions(dist.get_rank()))


def own_options(options: Whole, layout: Layout) -> Whole:
    """Those of this rank, as leaves."""
    own = {}
    for name, value in options.items():
        own[name] = value
        if isinstance(value, Tensor):
            has_rows = name in ("attn_bias", "attn_mask") and value.dim() > 1
            own[name] = (own_rows(value, layout, -2) if has_rows else value).detach()
            if name in DIFFERENTIABLE:
                own[name].requires_grad_()
    return own


def check(case: str, kind: str, function: Callable[..., Any], **arguments: Any) -> None:
    ranks = dist.get_world_size()
    tensors, options = draw(case)
    of_queries, of_keys = layouts(kind, case, ranks)
    own = [own_rows(t, layout).detach().requires_grad_() for t, layout in zip(tensors, (of_queries, of_keys, of_keys))]
    given = own_options(options, of_queries)
    results = function(*own, layout=of_queries, key_layout=of_keys, return_lse=True, **given, **arguments)
    expected = flash_attention(*tensors, return_lse=True, **options)
    visible = expected[1].isfinite()
    weights = [torch.randn_like(t) for t in expected]
    whole_lse = torch.where(visible, expected[1], 0.0)
    names = [name for name in DIFFERENTIABLE if name in options]
    leaves = [*tensors, *(options[name] for name in names)]
    grads = torch.autograd.grad((expected[0] * weights[0]).sum() + (whole_lse * weights[1]).sum(), leaves)
    own_weights = own_rows(weights[0], of_queries), own_rows(weights[1], of_queries, 2)
    own_lse = torch.where(results[1].isfinite(), results[1], 0.0)
    loss = (results[0] * own_weights[0]).sum() + (own_lse * own_weights[1]).sum()
    own_grads = torch.autograd.grad(loss, [*own, *(given[name] for name in names)])

    def compare(actual: Tensor, wanted: Tensor, what: str) -> None:
        scale = max(1e-30, float(wanted.abs().max())) if wanted.numel() else 1.0
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12 * scale, msg=lambda text: f"{what}: {text}")

    compare(results[0], own_rows(expected[0], of_queries), "out")
    compare(own_lse, own_rows(whole_lse, of_queries, 2), "lse")
    for name, actual, wanted, layout in zip("qkv", own_grads, grads, (of_queries, of_keys, of_keys)):
        compare(actual, own_rows(wanted, layout), f"gradient of {name}")
    for name, actual, wanted in zip(names, own_grads[3:], grads[3:]):
        if name == "attn_bias" and wanted.dim() > 1:
            compare(actual, own_rows(wanted, of_queries, -2), f"gradient of {name}")
        else:
            total = actual.clone()
            dist.all_reduce(total)
            compare(total, wanted, f"gradient of {name}")


@on_ranks(4)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "uneven"])
@pytest.mark.parametrize("method", ["all_gather", "p2p"])
def test_ring(case: str, kind: str, method: str) -> None:
    check(case, kind, cp.ring_attention, method=method)


@on_ranks(4)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "uneven"])
def test_ulysses(case: str, kind: str) -> None:
    check(case, kind, cp.ulysses_attention)
