"""vmap rules of attention: the mapped dimension joins the batch, whose entries have dropout masks of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

_attention = ops.flash_attention.default
_attention_varlen = ops.flash_attention_varlen.default


def mapped_where_masks_differ(op: str, query: Tensor) -> Tensor:
    """`query`, mapped inside `torch.vmap` with randomness="different", so that each element gets its own dropout mask
    even if no argument is mapped. Raises with randomness="error". An empty random tensor, which draws no number, makes
    PyTorch apply the setting."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None:
        return query
    try:
        empty = torch.rand(0, dtype=query.dtype, device=query.device)
    except RuntimeError:
        raise _no_randomness(op) from None
    return query + empty.sum()


def _no_randomness(op: str) -> RuntimeError:
    return RuntimeError(
        f"{NAMESPACE}::{op}: expected torch.vmap with randomness='same' or 'different' for dropout_p > 0, "
        "got randomness='error'; pass one of them, or call the op outside vmap"
    )


def _needs_one_mask(op: str, info: Any, options: dict[str, Any]) -> bool:
    if options.get("dropout_p", 0.0) == 0.0:
        return False
    if info.randomness == "error":
        raise _no_randomness(op)
    return bool(info.randomness == "same")


@torch.library.register_vmap(f"{NAMESPACE}::flash_attention")
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    *bias_and_mask: Tensor | None,
    **options: Any,
) -> Any:
    one_mask = _needs_one_mask("flash_attention", info, options)
    has_bias_or_mask = any(tensor is not None for tensor in bias_and_mask)
    if one_mask or has_bias_or_mask or any(dim is not None for dim in in_dims[3:]):
        tensors = query, key, value, alibi_slopes, sinks, *bias_and_mask
        return _one_call_per_element(_attention, info, in_dims, *tensors, one_mask=one_mask, **options)
    size = info.batch_size
    mapped = [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip((query, key, value), in_dims, strict=False)
    ]
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        alibi_slopes = alibi_slopes.repeat(size, 1)
    out, lse = _attention(*(tensor.flatten(0, 1) for tensor in mapped), alibi_slopes, sinks, **options)
    batch = mapped[0].shape[1]
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


@torch.library.register_vmap(f"{NAMESPACE}::flash_attention_varlen")
def _(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None, **options: Any) -> Any:
    one_mask = _needs_one_mask("flash_attention_varlen", info, options)
    return _one_call_per_element(_attention_varlen, info, in_dims, *tensors, one_mask=one_mask, **options)


def _one_call_per_element(
    op: Any, info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None, one_mask: bool, **options: Any
) -> Any:
    query = tensors[0]
    assert query is not None
    calls = []
    for n in range(info.batch_size):
        of_n = (t if t is None or dim is None else t.select(dim, n) for t, dim in zip(tensors, in_dims, strict=False))
        # With one_mask all calls start from the same generator state; the last leaves it as a single call would.
        forked = one_mask and n + 1 < info.batch_size
        with torch.random.fork_rng([query.device] if query.is_cuda else [], enabled=forked):
            calls.append(op(*of_n, **options))
    return (torch.stack([out for out, _ in calls]), torch.stack([lse for _, lse in calls])), (0, 0)
