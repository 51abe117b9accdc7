"""Attention over sequences that ranks share, against one rank, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_common import Case, Check, groups_of_two
from ranks import on_ranks

from cuda_ext.distributed import context_parallel as cp
from cuda_ext.distributed.context_parallel import Layout

CASES = {
    "plain": Case(4, 4, (24, 24)),
    "causal": Case(4, 2, (24, 24), {"causal": True}),
    "odd": Case(6, 3, (37, 37), {"causal": True}),
    "fewer rows than ranks": Case(4, 1, (3, 3), {"causal": True}),
    "one key head": Case(5, 1, (29, 29), {"causal": True, "softcap": 3.0, "scale": 0.3}),
    "heads that groups do not divide": Case(10, 2, (29, 29), {"causal": True}),
    "more keys": Case(4, 2, (19, 43), {"causal": True}),
    "more queries": Case(4, 2, (43, 19), {"causal": True}),
    "window": Case(4, 2, (53, 53), {"causal": True, "window": (7, None)}),
    "window both sides": Case(4, 2, (53, 61), {"window": (5, 9)}),
    "window left": Case(4, 2, (61, 53), {"window": (5, None)}),
    "window right": Case(4, 2, (47, 47), {"window": (None, 11)}),
    "sinks": Case(4, 2, (37, 37), {"causal": True, "sinks": (4,)}),
    "sinks without keys": Case(4, 2, (43, 19), {"causal": True, "sinks": (4,)}),
    "alibi": Case(4, 2, (37, 37), {"alibi_slopes": (4,)}),
    "alibi of batches, causal": Case(4, 2, (37, 41), {"causal": True, "alibi_slopes": (2, 4)}),
    "bias": Case(4, 2, (31, 37), {"attn_bias": (2, 4, 31, 37)}),
    "bias of keys": Case(4, 2, (31, 37), {"attn_bias": (37,), "causal": True}),
    "bias of heads": Case(4, 2, (31, 31), {"attn_bias": (4, 31, 31), "window": (9, 2)}),
    "mask": Case(4, 2, (31, 37), {"attn_mask": (31, 37)}),
    "relative bias": Case(4, 2, (37, 37), {"relative_bias": (4, 21)}),
    "relative bias and alibi": Case(4, 2, (37, 29), {"relative_bias": (21,), "alibi_slopes": (4,), "window": (15, 3)}),
    "relative bias and bias": Case(4, 2, (23, 29), {"relative_bias": (2, 4, 9), "attn_bias": (23, 29)}),
}
SAME = tuple((n, n) for n in (13, 1, 0, 40, 7, 22))
OTHER = ((5, 9), (0, 4), (11, 3), (17, 17), (3, 0), (20, 31))
TINY = tuple((n % 4, n % 4) for n in range(100))
PACKED = {
    "plain": Case(4, 2, SAME),
    "causal": Case(4, 2, SAME, {"causal": True}),
    "other lengths": Case(4, 2, OTHER, rest=3),
    "other lengths, causal": Case(4, 2, OTHER, {"causal": True}, rest=3),
    "one document": Case(4, 2, ((61, 61),), {"causal": True}),
    "tiny documents": Case(4, 4, TINY, {"causal": True}),
    "window": Case(4, 2, SAME, {"causal": True, "window": (6, None)}),
    "window both sides": Case(4, 2, OTHER, {"window": (4, 3)}),
    "sinks": Case(4, 2, SAME, {"causal": True, "sinks": (4,), "softcap": 4.0}),
    "sinks, rows after the last": Case(4, 2, OTHER, {"sinks": (4,)}, rest=7),
    "alibi": Case(4, 2, OTHER, {"alibi_slopes": (6, 4)}),
    "alibi, causal": Case(4, 2, SAME, {"alibi_slopes": (4,), "causal": True}),
    "relative bias": Case(4, 2, SAME, {"relative_bias": (4, 21)}),
    "relative bias, causal": Case(4, 2, SAME, {"relative_bias": (6, 1, 9), "causal": True}),
    "bias": Case(4, 2, SAME, {"attn_bias": (6, 4, 40, 40), "causal": True}),
    "bias of keys and mask": Case(4, 2, OTHER, {"attn_bias": (31,), "attn_mask": (6, 1, 20, 31)}),
    "no documents": Case(4, 2, ((0, 0),), rest=12),
}
KINDS = ("zigzag", "contiguous", "uneven")


def both(cases: dict[str, Case]) -> Any:
    return pytest.mark.parametrize("case", list(cases))


kinds = pytest.mark.parametrize("kind", KINDS)
methods = pytest.mark.parametrize("method", ["all_gather", "p2p"])


@pytest.mark.sampled(cases="every value")
@on_ranks(4)
@both(CASES)
@kinds
@methods
def test_ring(case: str, kind: str, method: str) -> None:
    Check(CASES[case], kind).run(cp.ring_attention, method=method)


@pytest.mark.sampled(cases="every value")
@on_ranks(4)
@both(CASES)
@kinds
def test_ulysses(case: str, kind: str) -> None:
    Check(CASES[case], kind).run(cp.ulysses_attention)


@pytest.mark.sampled(cases="every value")
@on_ranks(4)
@both(PACKED)
@kinds
@methods
def test_packed_ring(case: str, kind: str, method: str) -> None:
    Check(PACKED[case], kind).run(cp.ring_attention_varlen, method=method)


@pytest.mark.sampled(cases="every value")
@on_ranks(4)
@both(PACKED)
@kinds
def test_packed_ulysses(case: str, kind: str) -> None:
    Check(PACKED[case], kind).run(cp.ulysses_attention_varlen)


@on_ranks(4)
@pytest.mark.parametrize("ends", [(1, 1, 30), (1, 5, 30), (1, 2, 3)], ids=["1, 0, 29, 1", "1, 4, 25, 1", "1, 1, 1, 1"])
def test_ranks_with_one_row(ends: tuple[int, ...]) -> None:
    """Such a rank cannot tell a bias of its row from one of all rows."""
    length = ends[-1] + 1
    edges = [0, *ends, length]
    layout = Layout(length, tuple(((first, end),) if first < end else () for first, end in zip(edges, edges[1:])))
    for option in ({"attn_bias": (4, length, 9)}, {"attn_bias": (4, 1, 9)}, {"attn_mask": (length, 9)}):
        case = Case(4, 2, (length, 9), option)
        for attention in (cp.ulysses_attention, cp.ring_attention):
            Check(case, "", layouts=[layout, Layout.contiguous(9, 4)]).run(attention)


def check_few_ranks() -> None:
    for name in ("odd", "window both sides", "sinks", "bias", "relative bias"):
        for method in ("all_gather", "p2p"):
            Check(CASES[name], "zigzag").run(cp.ring_attention, method=method)
        Check(CASES[name], "zigzag").run(cp.ulysses_attention)
    Check(PACKED["other lengths, causal"], "uneven").run(cp.ring_attention_varlen)


@on_ranks(1)
def test_one_rank() -> None:
    check_few_ranks()


@on_ranks(2)
def test_two_ranks() -> None:
    check_few_ranks()


@on_ranks(3)
def test_three_ranks() -> None:
    check_few_ranks()


@pytest.mark.sampled(cases="every value")
@on_ranks(4)
@both({name: CASES[name] for name in CASES if name != "fewer rows than ranks"})
@methods
def test_two_dimensions(case: str, method: str) -> None:
    ring, heads = groups_of_two()
    layouts = [Layout.zigzag(length, 2).divided(2) for length in CASES[case].rows]
    check = Check(CASES[case], "", layouts=layouts)
    check.run(cp.ring_attention, method=method, group=ring, ulysses_group=heads)


@on_ranks(4)
@both(PACKED)
def test_packed_in_two_dimensions(case: str) -> None:
    ring, heads = groups_of_two()
    layouts = [Layout.zigzag(length, 2).divided(2) for length in PACKED[case].rows]
    check = Check(PACKED[case], "", layouts=layouts)
    check.run(cp.ring_attention_varlen, group=ring, ulysses_group=heads)


@on_ranks(4)
def test_layouts_by_name() -> None:
    """Without a Layout, and with gradients through `shard_sequence` and `unshard_sequence`."""
    whole = [torch.randn(2, 32, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    ring, heads = groups_of_two()
    expected = Check(Case(4, 2, (32, 32), {"causal": True}), "zigzag").whole._replace(tensors=whole).attend()[0]
    weights = torch.randn_like(expected)
    grads = torch.autograd.grad((expected * weights).sum(), whole)
    flat = Layout.zigzag(32, 2).divided(2)
    for function, layout, groups in (
        (cp.ring_attention, "zigzag", {}),
        (cp.ring_attention, "contiguous", {}),
        (cp.ulysses_attention, "contiguous", {}),
        (cp.ulysses_attention, "zigzag", {}),
        (cp.ring_attention, flat, {"group": ring, "ulysses_group": heads}),
    ):
        own = [cp.shard_sequence(tensor, layout=layout) for tensor in whole]
        by_name = "zigzag" if layout is flat else layout
        out = function(*own, layout=by_name, causal=True, **groups)
        result = cp.unshard_sequence(out, layout=layout)
        Check.compare("out", result, expected, 1e-12)
        own_grads = torch.autograd.grad((result * weights).sum(), whole)
        for name, own_grad, grad in zip("qkv", own_grads, grads):
            total = own_grad.clone()
            dist.all_reduce(total)
            Check.compare(f"gradient of {name}", total, grad, 1e-12)


DROPOUT = {
    "causal": Case(4, 2, (40, 40), {"causal": True, "dropout_p": 0.3}),
    "window": Case(4, 2, (53, 61), {"window": (9, 5), "dropout_p": 0.5}),
    "sinks and bias": Case(6, 2, (37, 37), {"sinks": (6,), "attn_bias": (37, 37), "dropout_p": 0.2}),
    "packed": Case(4, 2, SAME, {"causal": True, "dropout_p": 0.3}),
    "packed, other lengths": Case(4, 4, OTHER, {"window": (5, 6), "dropout_p": 0.4}, rest=2),
}


@on_ranks(4)
@both(DROPOUT)
@pytest.mark.parametrize("method", ["all_gather", "p2p", "ulysses", "both"])
def test_dropout_of_one_rank(case: str, method: str) -> None:
    """From the same random state, in forward and backward."""
    problem = DROPOUT[case]
    name = "ulysses_attention" if method == "ulysses" else "ring_attention"
    function = getattr(cp, f"{name}_varlen" if problem.packed else name)
    options: dict[str, Any] = {"method": method} if method in ("all_gather", "p2p") else {}
    layouts = None
    if method == "both":
        options["group"], options["ulysses_group"] = groups_of_two()
        layouts = [Layout.zigzag(length, 2).divided(2) for length in problem.rows]
    Check(problem, "zigzag", layouts=layouts).run(function, same_state=True, **options)
