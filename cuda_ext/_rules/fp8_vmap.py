"""vmap rules of the ops for FP8: the mapped dimension becomes more rows where no scale depends on several rows; else
there is a call for each of its elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_ext._load import ops
from cuda_ext._rules.fp8_fakes import BY_ROWS, TENSORWISE
from cuda_ext._rules.randomness import draws_the_same, mapped_where_numbers_differ, numbers_of_element
from cuda_ext._toolchain import NAMESPACE

InDims = tuple[int | None, ...]

_OVERLOADS = ("default", "stochastic", "activation")
_quantize = {overload: getattr(ops.quantize_fp8, overload) for overload in _OVERLOADS}
_scaled_mm = ops.scaled_mm.default
_scaled_grouped_mm = ops.scaled_grouped_mm.default
_ROUNDS = "stochastic=True"


def mapped_where_roundings_differ(input: Tensor) -> Tensor:
    return mapped_where_numbers_differ("quantize_fp8", _ROUNDS, input)


def _one_by_one(
    op: Callable[..., Any], info: Any, in_dims: InDims, args: tuple[Any, ...], *, same: bool = False, **options: Any
) -> Any:
    """same: each call draws the same random numbers."""

    def call(index: int) -> Any:
        own = [t if dim is None else t.select(dim, index) for t, dim in zip(args, in_dims, strict=True)]
        with numbers_of_element(index, info, own[0].device, same=same):
            return op(*own, **options)

    results = [call(index) for index in range(info.batch_size)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(map(torch.stack, zip(*results, strict=True)))
    return stacked, (0,) * len(stacked)


def _register_quantize(overload: str) -> None:
    is_random = overload == "stochastic"
    op_of_both = getattr(ops.quantize_fp8_both, overload)

    def rule(
        info: Any, in_dims: InDims, input: Tensor, dtype: torch.dtype, scaling: int, *args: Any, **options: Any
    ) -> Any:
        op = _quantize[overload]
        same = is_random and draws_the_same("quantize_fp8", _ROUNDS, info)
        dim = in_dims[0]
        assert dim is not None
        if same or scaling not in BY_ROWS or input.dim() != 3:
            arguments = input, dtype, scaling, *args
            return _one_by_one(op, info, (dim, *in_dims[1:]), arguments, same=same, **options)
        rows = input.movedim(dim, 0)
        data, scales = op(rows.flatten(0, 1), dtype, scaling, *args, **options)
        shape = rows.shape[:2]
        return (data.unflatten(0, shape), scales.unflatten(0, shape)), (0, 0)

    def rule_of_both(info: Any, in_dims: InDims, *args: Any, **options: Any) -> Any:
        same = is_random and draws_the_same("quantize_fp8", _ROUNDS, info)
        return _one_by_one(op_of_both, info, in_dims, args, same=same, **options)

    torch.library.register_vmap(_quantize[overload], rule)
    torch.library.register_vmap(op_of_both, rule_of_both)


for _overload in _OVERLOADS:
    _register_quantize(_overload)


@torch.library.register_vmap(f"{NAMESPACE}::scaled_mm")
def _(info: Any, in_dims: InDims, *args: Any, **options: Any) -> Any:
    mat_a, mat_b, scale_a, scaling_a, scale_b, scaling_b = args[:6]
    of_a, of_scale_a = in_dims[0], in_dims[2]
    other = [dim for index, dim in enumerate(in_dims) if index not in (0, 2)]
    adds = len(args) > 7 and args[7] is not None
    by_rows = (scaling_a in BY_ROWS and of_scale_a is not None) or (scaling_a == TENSORWISE and of_scale_a is None)
    if of_a is None or not by_rows or adds or mat_a.dim() != 3 or any(dim is not None for dim in other):
        return _one_by_one(_scaled_mm, info, in_dims, args, **options)
    rows = mat_a.movedim(of_a, 0)
    scales = scale_a if of_scale_a is None else scale_a.movedim(of_scale_a, 0).flatten(0, 1)
    out = _scaled_mm(rows.flatten(0, 1), mat_b, scales, scaling_a, scale_b, scaling_b, *args[6:7], **options)
    return out.unflatten(0, rows.shape[:2]), 0


def register_one_by_one(name: str) -> None:
    op = getattr(ops, name).default

    def rule(info: Any, in_dims: InDims, *args: Any, **options: Any) -> Any:
        return _one_by_one(op, info, in_dims, args, **options)

    torch.library.register_vmap(f"{NAMESPACE}::{name}", rule)


register_one_by_one("scaled_grouped_mm")
