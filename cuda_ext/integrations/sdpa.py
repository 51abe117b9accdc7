"""`torch.nn.functional.scaled_dot_product_attention` (SDPA) on this package's flash attention, in the whole process.

    from cuda_ext.integrations import sdpa

    sdpa.enable()          # until sdpa.disable()
    with sdpa.enable():    # or for a block
        model(inputs)
    sdpa.calls()           # {'served': 24}: how many calls ran here, and why the others did not

Calls that `cuda_ext.flash_attention` cannot serve exactly run in PyTorch, as without this module. The documentation
(`docs/sdpa.md`) lists them.

Importing this module registers the implementation "cuda_ext" with `torch.nn.attention`, but activates nothing:
`torch.nn.attention.activate_flash_attention_impl("cuda_ext")` has the effect of `enable()`, and
`restore_flash_attention_impl()` that of `disable()`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
import torch.compiler.config
import torch.nn.attention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry, shape_wrapper

from cuda_ext._load import ops
from cuda_ext._rules.flops import sdpa_flops
from cuda_ext._switch import Enabled, Switch
from cuda_ext._toolchain import NAMESPACE
from cuda_ext.attention import flash_attention_varlen

__all__ = ["Enabled", "calls", "disable", "enable", "is_enabled"]

MhaFastpath = Literal["off", "keep"]


class _Before(NamedTuple):
    """What PyTorch has while this is not active."""

    fastpath_was_enabled: bool
    jagged_attention: Any  # PyTorch's function for jagged nested tensors
    flop_formulas: dict[Any, Any]  # of SDPA itself


def _activate(mha_fastpath: MhaFastpath) -> _Before:
    from torch.nested._internal import ops as nested_ops

    _set_kernels(True)
    # The fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer does not call SDPA.
    fastpath_was_enabled = mha_fastpath == "off" and torch.backends.mha.get_fastpath_enabled()
    if fastpath_was_enabled:
        torch.backends.mha.set_fastpath_enabled(False)
    # SDPA of jagged nested tensors is a function in Python.
    jagged_attention = nested_ops.jagged_scaled_dot_product_attention
    nested_ops.jagged_scaled_dot_product_attention = _jagged_attention
    # Graphs that contain this package's op must not be found in the caches by a process without it.
    torch.compiler.config.cache_key_tag += _CACHE_TAG
    # In inference mode, FlopCounterMode replaces an op without a formula by PyTorch's own composition of it.
    flop_formulas = {key: flop_registry[key] for key in _FLOPS if key in flop_registry}
    flop_registry.update(_FLOPS)
    return _Before(fastpath_was_enabled, jagged_attention, flop_formulas)


def _deactivate(before: _Before) -> None:
    from torch.nested._internal import ops as nested_ops

    _set_kernels(False)
    if before.fastpath_was_enabled:
        torch.backends.mha.set_fastpath_enabled(True)
    nested_ops.jagged_scaled_dot_product_attention = before.jagged_attention
    torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag.replace(_CACHE_TAG, "")
    for key in _FLOPS:
        del flop_registry[key]
    flop_registry.update(before.flop_formulas)


def _set_kernels(active: bool) -> None:
    ops._sdpa_switch(active)
    # Python's dispatch of the op remembers for which keys there was a kernel. If one is gone, compiled functions would
    # have no gradient. The cache is private: a release without it has nothing to forget.
    getattr(_SDPA.default, "_dispatch_cache", {}).clear()


_CACHE_TAG = "+cuda_ext.sdpa"
# FlopCounterMode looks up the overload to know whether there is a formula, and the packet to find it.
_SDPA = torch.ops.aten.scaled_dot_product_attention
_FLOPS: dict[Any, Any] = dict.fromkeys((_SDPA, _SDPA.default), shape_wrapper(sdpa_flops))
_switch = Switch(_activate, _deactivate)


def enable(*, mha_fastpath: MhaFastpath = "off") -> Enabled:
    """Routes `torch.nn.functional.scaled_dot_product_attention` to `cuda_ext.flash_attention`, in all threads.

    Calling it again changes nothing. A function that `torch.compile` has compiled keeps the attention that it was
    compiled with: call `enable()` first.

    Args:
        mha_fastpath: "off" (the default) disables the fast path of `nn.MultiheadAttention` and
            `nn.TransformerEncoderLayer` in inference, which does not call SDPA, until this integration is disabled;
            "keep" leaves `torch.backends.mha.set_fastpath_enabled` as it is. Without effect if already enabled.

    Returns:
        An object for `with`: at the end of the block SDPA is what it was before. Blocks may be nested, and overlap in
        several threads.

    Raises:
        ValueError: another value of `mha_fastpath`.

    Example::

        with sdpa.enable():
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    """
    if mha_fastpath not in ("off", "keep"):
        raise ValueError(f'sdpa.enable: expected mha_fastpath to be "off" or "keep", got {mha_fastpath!r}')
    return _switch.turn_on(mha_fastpath=mha_fastpath)


def disable() -> None:
    """Takes back `enable()`, and the settings that it changed. A `with` block that is running stays active to its end.
    Without an earlier `enable()` it does nothing."""
    _switch.turn_off()


def is_enabled() -> bool:
    """Whether SDPA is routed to this package now, by `enable()` or by a `with` block in any thread."""
    return _switch.is_active


def calls(*, reset: bool = False) -> dict[str, int]:
    """The number of SDPA calls since the start of the process, or since the last reset, while this was enabled.

    Args:
        reset: set all numbers to 0 after reading them.

    Returns:
        `"served"`: calls that ran in `cuda_ext.flash_attention`; every other key is a reason for which calls ran in
        PyTorch. A compiled function counts when it is traced, perhaps several times, and not when it runs. Calls that
        `torch.vmap` decomposes are not counted.

    Example::

        >>> sdpa.calls()
        {'served': 12, 'attn_mask together with is_causal': 1}
    """
    return dict(ops._sdpa_calls(reset))


def _knows_type(tensor: Any) -> bool:
    """Whether a tensor with a `__torch_dispatch__` of its own can run this package's ops."""
    if isinstance(tensor, (FakeTensor, FunctionalTensor)):
        return True
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or type(tensor) is not distributed.DTensor:
        return False
    # Split along the sequence, it may belong to context parallelism, which computes SDPA piece by piece.
    sequence = tensor.ndim - 2
    return all(place.is_replicate() or (place.is_shard() and place.dim < sequence) for place in tensor.placements)


_library = torch.library.Library(NAMESPACE, "IMPL")
_library.impl("_sdpa_knows_type", _knows_type, "CompositeExplicitAutograd")


def _jagged_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """SDPA of nested tensors of layout torch.jagged, (B, H, jagged S, D)."""
    from torch.nested._internal.nested_tensor import NestedTensor, nested_view_from_values_offsets

    tensors = (query, key, value)
    if not (
        attn_mask is None
        and all(isinstance(t, NestedTensor) and t.dim() == 4 for t in tensors)
        and all(t._ragged_idx == 2 and t._lengths is None for t in tensors)
        and key.shape[2] == value.shape[2]
        # With other lengths, SDPA and flash_attention align is_causal to different corners.
        and (not is_causal or query.shape[2] == key.shape[2])
        and _serves_packed(tensors, dropout_p, is_causal, scale, enable_gqa)
    ):
        return _switch.state.jagged_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q, k, v = (t.transpose(1, 2).values() for t in tensors)
    options: dict[str, Any] = {"max_seqlen_q": query._maybe_max_seqlen, "max_seqlen_k": key._maybe_max_seqlen}
    options |= {"causal": is_causal, "scale": scale, "dropout_p": dropout_p}
    out = flash_attention_varlen(q, k, v, query.offsets().int(), key.offsets().int(), **options)
    known = {"min_seqlen": query._maybe_min_seqlen, "max_seqlen": query._maybe_max_seqlen}
    return nested_view_from_values_offsets(out, query.offsets(), **known).transpose(1, 2)


def _serves_packed(
    tensors: Iterable[Tensor], dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> bool:
    """Whether a dense call with these heads, dtype and device, and sequences of length 0, would be served."""
    with _disable_current_modes():
        empty = [torch.empty((t.shape[1], 0, t.shape[3]), dtype=t.dtype, device=t.device) for t in tensors]
        return bool(ops._sdpa_serves(*empty, dropout_p, is_causal, scale, enable_gqa))


torch.nn.attention.register_flash_attention_impl(NAMESPACE, register_fn=enable)
