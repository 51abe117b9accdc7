"""The keyword arguments that the functions of attention share. Most take them as `**options` and pass them on."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any, TypedDict

from torch import Tensor

from cuda_ext._checks import check, check_constants, is_finite, number_text
from cuda_ext._toolchain import NAMESPACE
from cuda_ext.block_mask import BlockMask

Window = tuple[int | None, int | None]


class NumberOptions(TypedDict, total=False):
    """Those that a module of attention has once and for all."""

    window: Window | None
    scale: float | None
    softcap: float


class LogitOptions(NumberOptions, total=False):
    """Those of attention over a cache, too."""

    causal: bool
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class Options(LogitOptions, total=False):
    attn_bias: Tensor | None
    attn_mask: Tensor | None
    relative_bias: Tensor | None
    block_mask: BlockMask | None
    dropout_p: float
    deterministic: bool | None


class VarlenOptions(Options, total=False):
    max_seqlen_q: int | None
    max_seqlen_k: int | None


_PLAIN = (float, int, bool, type(None))  # asking for these first saves a microsecond
_TENSORS = ("alibi_slopes", "sinks", "attn_bias", "attn_mask")


def op_arguments(op: str, options: Mapping[str, Any]) -> tuple[list[Tensor | None], dict[str, Any]]:
    """The tensors of `options`, which are positional arguments of the op, and the other arguments by name."""
    scalars = dict(options)
    tensors = [scalars.pop(name, None) for name in _TENSORS]
    block_mask = scalars.pop("block_mask", None)
    tensors += (None, None, None) if block_mask is None else _block_tensors(op, block_mask)
    scalars["window_left"], scalars["window_right"] = _window_sides(op, scalars.pop("window", None))
    if others := {name: value for name, value in scalars.items() if type(value) not in _PLAIN}:
        check_constants(op, **others)
    return tensors, scalars


def _block_tensors(op: str, block_mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(block_mask, BlockMask):
        remedy = "; give booleans as attn_mask=" if isinstance(block_mask, Tensor) else ""
        got = type(block_mask).__name__
        raise RuntimeError(f"{NAMESPACE}::{op}: expected block_mask to be a cuda_ext.BlockMask, got {got}{remedy}")
    return block_mask.op_tensors


def check_numbers(
    op: str,
    *,
    window_left: int | None = None,
    window_right: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    **unchecked: Any,
) -> None:
    """The checks of fake kernels."""
    for name, side in (("left", window_left), ("right", window_right)):
        check(side is None or side >= 0, op, _expected_side(name, side))
    check(scale is None or is_finite(scale), op, f"expected a finite scale, got {number_text(scale)}")
    check(
        is_finite(softcap) and softcap >= 0,
        op,
        f"expected a finite softcap >= 0 (0 for none), got {number_text(softcap)}",
    )
    check(0 <= dropout_p < 1, op, f"expected dropout_p in [0, 1), got {number_text(dropout_p)}")


def _window_sides(op: str, window: Window | None) -> Window:
    """`window` as two numbers of keys, each None if unbounded."""
    if window is None:
        return None, None
    try:
        left, right = window
        return _window_side(op, "left", left), _window_side(op, "right", right)
    except (TypeError, ValueError):
        raise RuntimeError(
            f"{NAMESPACE}::{op}: expected window to be None or (left, right), each a number of keys or None, "
            f"got {window!r}"
        ) from None


def _window_side(op: str, name: str, side: Any) -> int | None:
    if side is None:
        return None
    keys = index(side)
    if keys >= 0:
        return keys
    # Other packages write -1 for no bound, so that no negative number may quietly be a bound here.
    remedy = "give None for no bound"
    if keys < -1:
        to = "flash_attention or flash_attention_varlen"
        remedy = f"for a band beside the diagonal give block_mask=BlockMask.window(...) to {to}"
    raise RuntimeError(f"{NAMESPACE}::{op}: {_expected_side(name, keys)}; {remedy}")


def _expected_side(name: str, side: int | None) -> str:
    return f"expected window {name} to be >= 0 or None (unbounded), got {side}"
