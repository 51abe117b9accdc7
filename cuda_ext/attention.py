"""Flash attention: softmax(scale * query @ key^T) @ value in memory linear in the sequence length, forward and
backward.

The method is FlashAttention (Dao et al., arXiv 2205.14135) with the online softmax of Milakov and Gimelshein (arXiv
1805.02867). The CPU kernels keep one block of logits per thread; gradients are summed in a fixed order, so a run
repeats bit for bit.

DTensors are split by batch and by heads, without dropout; other placements are gathered first.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuda_ext._checks import (
    broadcasts_to,
    check,
    check_constants,
    check_floating,
    check_same_device,
    check_same_dtype,
    check_shape,
    dtype_name,
    has_shape,
    is_finite,
    number_text,
    shape_of,
)
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

__all__ = ["flash_attention", "flash_attention_varlen"]

_attention = ops.flash_attention.default
_attention_varlen = ops.flash_attention_varlen.default

Window = tuple[int | None, int | None]


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head attention over `(batch, seq, heads, dim)` tensors.

    With `i` a query, `j` a key and `d = j - (i + Sk - Sq)` their distance from the bottom-right diagonal::

        logits = scale * query[i] . key[j];   logits = softcap * tanh(logits / softcap)   if softcap > 0
        logits += -alibi_slopes * |d|;   logits += bias[i, j]
        out[i] = dropout(softmax over the visible j of logits) @ value

    Args:
        query: `(B, Sq, H, D)`, float16 or bfloat16; on the CPU also float32 and float64. On a CUDA device D and Dv are
            multiples of 8 up to 256.
        key: `(B, Sk, Hk, D)`, dtype and device of `query`. `H` is a multiple of `Hk` (GQA, MQA): query head `h` reads
            key head `h // (H // Hk)`.
        value: `(B, Sk, Hk, Dv)`; `Dv` may differ from `D`.
        causal: hide the keys right of the diagonal, which is aligned bottom-right when `Sq != Sk`.
        window: `(left, right)`, how many keys either side of the diagonal stay visible; `None` on a side is unbounded.
            With `causal` the right side is 0 or `None`.
        scale: defaults to `1 / sqrt(D)`.
        softcap: in units of logits; 0 for none (Gemma 2, arXiv 2408.00118).
        alibi_slopes: `(H,)` or `(B, H)`, not differentiable (Press et al., arXiv 2108.12409).
        sinks: `(H,)`, a learnable logit per head that joins every row's softmax with no value behind it; `lse` includes
            it. Differentiable. Attention in parts that `lse` merges has them in one part only.
        bias: up to four dimensions that broadcast to `(B, H, Sq, Sk)`, aligned to the right, with any strides.
            Numbers, in the dtype of `query` or float32, are added to the logits, and `-inf` hides a key; they
            are differentiable. Booleans hide the keys where they are `False`, as `attn_mask` of
            `torch.nn.functional.scaled_dot_product_attention` does. Leave a dimension 1 rather than to `expand` it: the
            gradient is as large as the tensor given. Hide with `-inf`, not with a large number: in a row of nothing but
            -1e30 the logits are lost to rounding.
        dropout_p: in [0, 1). The mask is Philox4x32-10 of a seed and an offset from torch's default generator of the
            device, so `torch.manual_seed` and `torch.cuda.manual_seed` rule, and each replay of a captured CUDA graph
            draws anew. It is made again in backward instead of being stored. The same seed and offset give the same
            mask on every device, but generators of different devices draw different ones.
        deterministic: that backward gives the same bits in every run; `None` follows
            `torch.use_deterministic_algorithms`. On the CPU every call does, for a given number of threads, as does
            forward on a CUDA device. There, blocks then take turns at adding to the gradient of `query`, and that of a
            broadcast `bias` takes a float32 tensor of `(B, H, Sq, Sk)`.
        return_lse: also return `lse`, `(B, H, Sq)`, the logarithm of the sum of exponentials of each row's logits, in
            float32 (float64 for float64). Differentiable.

    Returns:
        `(B, Sq, H, Dv)` in the dtype of `query`, contiguous; with `return_lse` a pair. A row that sees no key, whether
        `causal`, `window` or `bias` hides all or there is none, gives zeros and an `lse` of `-inf`, with zero
        gradients. With sinks, which nothing hides, its `lse` is the sink.

    Any strides are read in place as long as the last dimension is dense; other tensors are made contiguous first.
    Dimensions of size 0 work. Nested tensors of layout `torch.jagged`, `(B, jagged S, H, D)` all three, without
    `bias`: `flash_attention_varlen` on their packed rows, nothing is padded; `lse` is `(B, H, jagged S)`.

    Differentiable to any order and in both modes, and under the transforms of `torch.func`. Only the first derivative
    by `backward` is fused. The others are composed of our products and PyTorch's elementwise ops, through the full
    matrix of scores, `(B, H, Sq, Sk)`. In forward mode and under `torch.func` dropout is that of
    `torch.nn.functional.dropout`.

    Raises:
        RuntimeError: wrong ranks, shapes, dtypes, devices, window, scale, softcap or dropout, naming the argument.
        NotImplementedError: a CUDA tensor where no CUDA kernel is built.
    """
    if query is not None and query.is_nested:
        options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
        options |= {
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "dropout_p": dropout_p,
            "deterministic": deterministic,
        }
        return _jagged_attention(query, key, value, bias, return_lse, options)
    has_tensors = alibi_slopes is not None or sinks is not None or bias is not None
    has_numbers = scale is not None or not (type(softcap) is type(dropout_p) is float and softcap == 0.0 == dropout_p)
    if has_tensors or has_numbers or window is not None or deterministic is not None:
        left, right = _window_sides("flash_attention", window)
        check_constants("flash_attention", scale=scale, softcap=softcap, dropout_p=dropout_p)
        if dropout_p > 0:
            query = _mapped_where_masks_differ("flash_attention", query)
        out, lse = _attention(
            query,
            key,
            value,
            alibi_slopes,
            sinks,
            bias,
            causal=causal,
            window_left=left,
            window_right=right,
            scale=scale,
            softcap=softcap,
            dropout_p=dropout_p,
            deterministic=deterministic,
        )
    elif causal:
        # Each argument that reaches the dispatcher costs up to a tenth of a small call.
        out, lse = _attention(query, key, value, causal=True)
    else:
        out, lse = _attention(query, key, value)
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` over sequences of different lengths, packed one after the other without padding.

    Args:
        query: `(total_q, H, D)`: sequence `b` is rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`.
        key: `(total_k, Hk, D)`, by `cu_seqlens_k`.
        value: `(total_k, Hk, Dv)`.
        cu_seqlens_q: `(batch + 1,)` int32 on the device of `query`: 0, then the running sums of the lengths, up to
            `total_q`. On the CPU the values are checked; on a GPU that would stall the stream.
        cu_seqlens_k: the same for keys. A sequence may have length 0.
        max_seqlen_q: at least the longest sequence, below 2^31; `None` takes it from `cu_seqlens_q`, for which a GPU
            has to wait.
        max_seqlen_k: the same for keys. It also sets the row pitch of the dropout numbers.

    The remaining arguments are those of `flash_attention`, which alone takes a `bias`; causal and window are aligned to
    each sequence's own bottom-right corner.

    Returns:
        `(total_q, H, Dv)`; with `return_lse` also `lse`, `(H, total_q)`.

    Raises:
        RuntimeError: as `flash_attention`; also `cu_seqlens` that do not start at 0, decrease, or do not end at the
            number of rows.
        NotImplementedError: a CUDA tensor where no CUDA kernel is built.
    """
    left, right = _window_sides("flash_attention_varlen", window)
    check_constants("flash_attention_varlen", scale=scale, softcap=softcap, dropout_p=dropout_p)
    if dropout_p > 0:
        query = _mapped_where_masks_differ("flash_attention_varlen", query)
    out, lse = _attention_varlen(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        sinks,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window_left=left,
        window_right=right,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    return (out, lse) if return_lse else out


def _jagged_attention(
    query: Any, key: Any, value: Any, bias: Tensor | None, return_lse: bool, options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of `(batch, jagged seq, heads, dim)`: the packed form, which their memory has already."""
    op = f"{NAMESPACE}::flash_attention"  # not `check`, which torch.compile cannot follow
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        is_jagged = tensor.is_nested and tensor.layout == torch.jagged and tensor.dim() == 4
        if not (is_jagged and tensor._ragged_idx == 1 and tensor.lengths() is None):
            layout = tensor.layout if tensor.is_nested else "not nested"
            raise RuntimeError(
                f"{op}: expected query, key and value to be contiguous nested tensors of layout torch.jagged and shape "
                f"(batch, jagged seq, heads, dim), got {name} with {tensor.dim()} dimensions, {layout}"
            )
    if key.shape[1] != value.shape[1]:
        raise RuntimeError(
            f"{op}: expected value of the same sequences as key, got offsets of its own; make it with those of key "
            "(torch.nested.nested_tensor_from_jagged)"
        )
    if bias is not None:
        raise RuntimeError(f"{op}: expected bias=None with nested tensors; call it for each sequence")
    offsets = query.offsets()
    result = flash_attention_varlen(
        query.values(),
        key.values(),
        value.values(),
        offsets.int(),
        key.offsets().int(),
        max_seqlen_q=query._maybe_max_seqlen,
        max_seqlen_k=key._maybe_max_seqlen,
        return_lse=True,
        **options,
    )
    known = {"min_seqlen": query._maybe_min_seqlen, "max_seqlen": query._maybe_max_seqlen}
    out = torch.nested.nested_tensor_from_jagged(result[0], offsets, **known)
    if not return_lse:
        return out
    return out, torch.nested.nested_tensor_from_jagged(result[1], offsets, jagged_dim=2, **known)


def _mapped_where_masks_differ(op: str, query: Tensor) -> Tensor:
    """Inside of `torch.vmap` with randomness="different", mapped, so that each element has a mask of its own even where
    no argument is mapped; with randomness="error", an error. PyTorch decides: an empty random tensor asks it, and draws
    nothing."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None:
        return query
    try:
        nothing = torch.rand(0, dtype=query.dtype, device=query.device)
    except RuntimeError:
        raise _no_randomness(op) from None
    return query + nothing.sum()


def _window_sides(op: str, window: Window | None) -> Window:
    if window is None:
        return None, None
    try:
        left, right = window
        return _window_side(left), _window_side(right)
    except (TypeError, ValueError):
        raise RuntimeError(
            f"{NAMESPACE}::{op}: expected window to be None or (left, right), each a number of keys or None, "
            f"got {window!r}"
        ) from None


def _window_side(side: Any) -> int | None:
    return side if side is None else index(side)


# Fake kernels: shapes, dtypes and strides of what the real ones return, and what these refuse.


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _check_attention(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **unchecked: Any,
) -> None:
    packed = cu_seqlens_q is not None
    rank, layout = (3, "(total, heads, dim)") if packed else (4, "(batch, seq, heads, dim)")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        expected = f"expected {name} of shape {layout}, got {shape_of(tensor)}"
        check(tensor.dim() == rank, op, expected)
    check_floating(op, "query", query)
    check_same_dtype(op, "key", key, "query", query)
    check_same_dtype(op, "value", value, "query", query)
    check_same_device(op, "query", query, key=key, value=value)

    heads, dim = query.shape[-2:]
    heads_kv = key.shape[-2]
    check(
        key.shape[-1] == dim,
        op,
        f"expected key of head dim {dim} to match query {shape_of(query)}, got {shape_of(key)}",
    )
    for size, wanted in zip(value.shape[:-1], key.shape[:-1], strict=True):
        check(
            size == wanted,
            op,
            (
                f"expected value of shape {tuple(key.shape[:-1])} + (dim_v,) to match key {shape_of(key)}, "
                f"got {shape_of(value)}"
            ),
        )
    check(
        heads % heads_kv == 0 if heads_kv != 0 else heads == 0,
        op,
        f"expected the heads of query to be a multiple of the heads of key, got {heads} and {heads_kv}",
    )
    if cu_seqlens_q is None:
        batch = query.shape[0]
        check(
            key.shape[0] == batch,
            op,
            f"expected key of batch {batch} to match query {shape_of(query)}, got {shape_of(key)}",
        )
    else:
        check(cu_seqlens_k is not None, op, "expected cu_seqlens_k beside cu_seqlens_q, got None")
        assert cu_seqlens_k is not None
        for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            expected = (
                f"expected {name} of shape (batch + 1,) and dtype int32, got {shape_of(cu_seqlens)} and dtype "
                f"{dtype_name(cu_seqlens.dtype)}"
            )
            fits = cu_seqlens.dim() == 1 and cu_seqlens.dtype == torch.int32
            check(fits, op, expected)
            check(cu_seqlens.shape[0] >= 1, op, expected)
            check_same_device(op, "query", query, **{name: cu_seqlens})
        check_shape(op, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, " to match cu_seqlens_q")
        batch = cu_seqlens_q.shape[0] - 1
        most = 2**31 - 1
        for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            expected = f"expected {name} of at most {most}, all that int32 cu_seqlens can hold, got {longest}"
            check(longest is None or longest <= most, op, expected)

    for name, side in (("left", window_left), ("right", window_right)):
        expected = f"expected window {name} to be >= 0 or None (unbounded), got {side}"
        check(side is None or side >= 0, op, expected)
    check(
        not causal or window_right is None or window_right == 0,
        op,
        (
            "expected window right to be 0 or None with causal=True, which hides every key to the right, got "
            f"{window_right}"
        ),
    )
    check(scale is None or is_finite(scale), op, f"expected a finite scale, got {number_text(scale)}")
    check(
        is_finite(softcap) and softcap >= 0,
        op,
        f"expected a finite softcap >= 0 (0 for none), got {number_text(softcap)}",
    )
    check(0 <= dropout_p < 1, op, f"expected dropout_p in [0, 1), got {number_text(dropout_p)}")
    if alibi_slopes is not None:
        check(
            has_shape(alibi_slopes, [heads]) | has_shape(alibi_slopes, [batch, heads]),
            op,
            f"expected alibi_slopes of shape ({heads},) or ({batch}, {heads}), got {shape_of(alibi_slopes)}",
        )
        check_floating(op, "alibi_slopes", alibi_slopes)
    if sinks is not None:
        check_shape(op, "sinks", sinks, [heads])
        check_floating(op, "sinks", sinks)
    check_same_device(op, "query", query, alibi_slopes=alibi_slopes, sinks=sinks)
    if bias is not None:
        check(not packed, op, "expected no bias beside cu_seqlens_q; call the op once for each sequence")
        _check_bias(op, bias, query, [batch, heads, query.shape[1], key.shape[1]])


def _check_bias(op: str, bias: Tensor, query: Tensor, full: list[Any]) -> None:
    check(
        broadcasts_to(bias.shape, full),
        op,
        (
            f"expected bias of a shape that broadcasts to (batch, heads, seqlen_q, seqlen_k) = {tuple(full)}, got "
            f"{shape_of(bias)}; give it these sizes or 1, aligned to the right"
        ),
    )
    accumulation = _lse_dtype(query)
    storage = "" if query.dtype == accumulation else f", {dtype_name(query.dtype)}"
    check(
        bias.dtype in (torch.bool, query.dtype, accumulation),
        op,
        (
            f"expected bias of dtype Bool{storage} or {dtype_name(accumulation)} to match query, got "
            f"{dtype_name(bias.dtype)}; convert it with .to()"
        ),
    )
    check_same_device(op, "query", query, bias=bias)


def _out_and_lse(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out = query.new_empty([*query.shape[:-1], value.shape[-1]])
    lse_shape = [query.shape[1], query.shape[0]] if query.dim() == 3 else [query.shape[n] for n in (0, 2, 1)]
    return out, query.new_empty(lse_shape, dtype=_lse_dtype(query))


@torch.library.register_fake(f"{NAMESPACE}::flash_attention")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    **scalars: Any,
) -> tuple[Tensor, Tensor]:
    _check_attention("flash_attention", query, key, value, None, None, alibi_slopes, sinks, bias, **scalars)
    return _out_and_lse(query, value)


@torch.library.register_fake(f"{NAMESPACE}::flash_attention_varlen")
def _(query: Tensor, key: Tensor, value: Tensor, *more: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    _check_attention("flash_attention_varlen", query, key, value, *more, **options)
    return _out_and_lse(query, value)


@torch.library.register_fake(f"{NAMESPACE}::flash_attention_forward")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *more: Tensor | None,
    dropout_p: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "flash_attention" if cu_seqlens_q is None else "flash_attention_varlen"
    _check_attention(op, query, key, value, cu_seqlens_q, *more, dropout_p=dropout_p, **options)
    return *_out_and_lse(query, value), query.new_empty([0 if dropout_p == 0 else 2], dtype=torch.int64)


@torch.library.register_fake(f"{NAMESPACE}::flash_attention_backward")
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rng_state: Tensor | None,
    needs_grad_bias: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    op = "flash_attention_backward"
    _check_attention(op, query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, bias, **options)
    check_same_device(op, "query", query, out=out, lse=lse)
    check_same_dtype(op, "out", out, "query", query)
    for name, grad, other_name, other in (("grad_out", grad_out, "out", out), ("grad_lse", grad_lse, "lse", lse)):
        if grad is not None:
            check_shape(op, name, grad, other.shape, f" to match {other_name}")
            check_same_dtype(op, name, grad, other_name, other)
            check_same_device(op, other_name, other, **{name: grad})
    if rng_state is not None and rng_state.numel() > 0 and query.device.type != "meta":  # else it lives on the CPU
        check(rng_state.device.type != "meta", op, "expected rng_state with values, got one on device meta")
    grad_sinks = lse.new_empty([0]) if sinks is None else sinks.new_empty(sinks.shape)
    grad_bias = bias.new_empty(bias.shape) if bias is not None and needs_grad_bias else lse.new_empty([0])
    grad_query, grad_key, grad_value = (t.new_empty(t.shape) for t in (query, key, value))
    return grad_query, grad_key, grad_value, grad_sinks, grad_bias


# FLOPs by the field's convention: 2 per multiply-add of the two forward and five backward products, over visible pairs.


def _visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool, left: int | None, right: int | None) -> int:
    def sum_to(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    def pairs_before(distance: int) -> int:
        """Those whose key is less than this far right of the diagonal: row i has i + first, but within 0 and Sk."""
        first = seqlen_k - seqlen_q + distance
        last = first + seqlen_q - 1
        return sum_to(last) - sum_to(first - 1) - sum_to(last - seqlen_k) + sum_to(first - 1 - seqlen_k)

    if causal:
        right = 0
    to_the_right = seqlen_q * seqlen_k if right is None else pairs_before(right + 1)
    return to_the_right - (0 if left is None else pairs_before(-left))


def _products(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, options: dict[str, Any]
) -> tuple[int, int, int]:
    """(query-key pairs over all heads, D, Dv). Packed sequences count as one of the longest: lengths are data, which a
    formula must not read."""
    mask = options.get("causal", False), options.get("window_left"), options.get("window_right")
    if len(query_shape) == 3:
        total_q, heads, dim = query_shape
        seqlen_q = min(options.get("max_seqlen_q") or total_q, total_q)
        seqlen_k = min(options.get("max_seqlen_k") or key_shape[0], key_shape[0])
        pairs = heads * _visible_pairs(seqlen_q, seqlen_k, *mask) * total_q // max(1, seqlen_q)
    else:
        batch, seqlen_q, heads, dim = query_shape
        pairs = batch * heads * _visible_pairs(seqlen_q, key_shape[1], *mask)
    return pairs, dim, value_shape[-1]


@register_flop_formula([ops.flash_attention, ops.flash_attention_varlen, ops.flash_attention_forward])
def _forward_flops(
    query_shape: torch.Size,
    key_shape: torch.Size,
    value_shape: torch.Size,
    *args: Any,
    out_shape: Any = None,
    **options: Any,
) -> int:
    pairs, dim, dim_v = _products(query_shape, key_shape, value_shape, options)
    return 2 * pairs * (dim + dim_v)


@register_flop_formula(ops.flash_attention_backward)
def _backward_flops(
    grad_out_shape: torch.Size,
    grad_lse_shape: torch.Size | None,
    query_shape: torch.Size,
    key_shape: torch.Size,
    value_shape: torch.Size,
    *args: Any,
    out_shape: Any = None,
    **options: Any,
) -> int:
    pairs, dim, dim_v = _products(query_shape, key_shape, value_shape, options)
    return 2 * pairs * (3 * dim + 2 * dim_v)


# vmap: the mapped dimension joins the batch, whose entries have masks of their own under dropout.


def _no_randomness(op: str) -> RuntimeError:
    return RuntimeError(
        f"{NAMESPACE}::{op}: expected torch.vmap with randomness='same' or 'different' where dropout_p > 0, "
        "got randomness='error'; give one of them, or call the op outside of vmap"
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
    bias: Tensor | None = None,
    **options: Any,
) -> Any:
    one_mask = _needs_one_mask("flash_attention", info, options)
    if one_mask or bias is not None or any(dim is not None for dim in in_dims[3:]):
        tensors = query, key, value, alibi_slopes, sinks, bias
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
        # All calls begin with one state of the generator; the last leaves it as a single call would.
        forked = one_mask and n + 1 < info.batch_size
        with torch.random.fork_rng([query.device] if query.is_cuda else [], enabled=forked):
            calls.append(op(*of_n, **options))
    return (torch.stack([out for out, _ in calls]), torch.stack([lse for _, lse in calls])), (0, 0)
