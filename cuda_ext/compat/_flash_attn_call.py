"""Shared by both flash-attn interfaces: translates a call to this package's ops."""

from __future__ import annotations

from operator import index
from typing import Any, NoReturn

from torch import Tensor

from cuda_ext.attention import attention_op, flash_attention, flash_attention_varlen


def attend(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: tuple[Tensor, Tensor, int, int] | None = None,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    deterministic: bool,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a dense batch or, given `sequences`, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), of a
    varlen one. `more` are options of `flash_attention`."""
    # Only what differs from the defaults: every argument costs time in small calls.
    options: dict[str, Any] = {name: each for name, each in more.items() if isinstance(each, Tensor) or each}
    if type(window_size) is not tuple or window_size != (-1, -1):
        options["window"] = window_of(function, window_size)
    if deterministic:  # False is flash-attn's default, so torch.use_deterministic_algorithms decides.
        options["deterministic"] = True
    if softmax_scale is not None:
        options["scale"] = softmax_scale
    if sequences is not None:
        *cu_seqlens, options["max_seqlen_q"], options["max_seqlen_k"] = sequences
        return flash_attention_varlen(q, k, v, *cu_seqlens, causal=causal, return_lse=True, **options)
    if options:
        return flash_attention(q, k, v, causal=causal, return_lse=True, **options)
    return attention_op(q, k, v, causal=causal)


def window_of(function: str, window_size: tuple[int, int]) -> tuple[int | None, int | None] | None:
    """The window of `cuda_ext.flash_attention` for flash-attn's, in which -1 is unbounded."""
    try:
        sides = [-1 if side is None else index(side) for side in window_size]
        left, right = (side if side >= 0 else None for side in sides)
    except (TypeError, ValueError):
        raise RuntimeError(
            f"cuda_ext.compat.{function}: expected window_size to be (left, right), each a number of keys or -1 for "
            f"unbounded, got {window_size!r}"
        ) from None
    return None if left is None and right is None else (left, right)


def unpack(function: str, name: str, packed: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Unbinds the third dimension from the end, in a layout such as "(total, 3, heads, dim)"; returns views."""
    sizes = layout.strip("()").split(", ")
    if packed.dim() != len(sizes) or packed.shape[-3] != int(sizes[-3]):
        raise RuntimeError(
            f"cuda_ext.compat.{function}: expected {name} of shape {layout}, got {tuple(packed.shape)}; for "
            "separate tensors, use the function without 'packed' in its name"
        )
    return packed.unbind(-3)


def refuse(function: str, name: str, value: Any, *, expected: str, instead: str) -> NoReturn:
    """Refuses an unsupported argument that would change the result."""
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise NotImplementedError(f"cuda_ext.compat.{function}: expected {name} to be {expected}, got {got}; {instead}")
