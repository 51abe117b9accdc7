"""ONNX export of models that use this package's ops.

    table = cuda_ext.integrations.onnx.translation_table()
    torch.onnx.export(model.eval(), inputs, "model.onnx", dynamo=True, opset_version=23, custom_translation_table=table)

The exported model consists of standard ONNX operators: `Attention` (since opset 23) where it can express the call,
`Gelu` (since opset 20), and otherwise products and elementwise operators. So it runs wherever ONNX models run, without
this package; it does not contain this package's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cuda_ext import ops as _  # noqa: F401  # defines the ops
from cuda_ext._activations import ACTIVATIONS
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

try:
    import onnxscript
    from onnxscript import ir
except ImportError as error:
    raise ImportError(
        f"{NAMESPACE}.integrations.onnx needs onnxscript, as torch.onnx.export does: pip install onnxscript ({error})"
    ) from error

__all__ = ["translation_table"]

OPSET = 23
_op = onnxscript.opset23
_FLOAT, _INT64, _DOUBLE = 1, 7, 11  # onnx.TensorProto.DataType


def translation_table(opset_version: int = OPSET) -> dict[Any, Callable[..., Any]]:
    """The `custom_translation_table` of `torch.onnx.export(..., dynamo=True)` for every op of this package.

    Args:
        opset_version: that of the export, at least 23.

    Returns:
        A function for each op that builds its ONNX operators.

    Attention is exported for inference: without dropout. The result and the log-sum-exp of a row that sees no key are
    zeros and -inf, as those of `cuda_ext.flash_attention`.

    Raises:
        ValueError: an older opset.
    """
    if opset_version < OPSET:
        raise ValueError(
            f"{NAMESPACE}.integrations.onnx.translation_table: expected opset_version of at least {OPSET}, which has "
            f"the operator Attention, got {opset_version}"
        )
    return {
        ops.gemm.default: _gemm,
        ops.linear.default: _linear,
        ops.gated_linear.default: _gated_linear,
        ops.mlp.default: _mlp,
        ops.gated_mlp.default: _gated_mlp,
        ops.flash_attention.default: _flash_attention,
        ops.flash_attention_varlen.default: _flash_attention_varlen,
        ops.logit_statistics.default: _logit_statistics,
        ops.linear_loss.default: _linear_loss,
    }


# Products


def _activate(x: Any, activation: str | None) -> Any:
    return ACTIVATIONS[activation].onnx(_op, x)


def _linear(input: Any, weight: Any, bias: Any = None, residual: Any = None, activation: str | None = None) -> Any:
    out = _op.MatMul(input, _op.Transpose(weight, perm=[1, 0]))
    if bias is not None:
        out = _op.Add(out, bias)
    out = _activate(out, activation)
    return out if residual is None else _op.Add(out, _op.CastLike(residual, out))


def _gated_linear(input: Any, weight: Any, bias: Any = None, activation: str | None = "silu") -> Any:
    gate, up = _op.Split(_linear(input, weight, bias), num_outputs=2, axis=-1)
    return _op.Mul(_activate(gate, activation), up)


def _mlp(
    input: Any,
    weight1: Any,
    weight2: Any,
    bias1: Any = None,
    bias2: Any = None,
    residual: Any = None,
    activation: str | None = "gelu",
) -> Any:
    return _linear(_linear(input, weight1, bias1, activation=activation), weight2, bias2, residual)


def _gated_mlp(
    input: Any,
    weight1: Any,
    weight2: Any,
    bias1: Any = None,
    bias2: Any = None,
    residual: Any = None,
    activation: str | None = "silu",
) -> Any:
    return _linear(_gated_linear(input, weight1, bias1, activation), weight2, bias2, residual)


def _gemm(
    a: Any,
    b: Any,
    c: Any = None,
    bias: Any = None,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: int | None = None,
) -> Any:
    if out_dtype in (_FLOAT, _DOUBLE):  # the sums must be as precise as the output
        a, b = _op.Cast(a, to=out_dtype), _op.Cast(b, to=out_dtype)
    out = _op.MatMul(a, b)
    if alpha != 1.0:
        out = _op.Mul(out, _constant_like(alpha, out))
    for addend, factor in ((c, beta), (bias, 1.0)):
        if addend is not None:
            addend = _op.CastLike(addend, out)
            out = _op.Add(out, addend if factor == 1.0 else _op.Mul(addend, _constant_like(factor, out)))
    out = _activate(out, activation)
    return out if out_dtype is None else _op.Cast(out, to=out_dtype)


# Losses


def _logit_statistics(
    input: Any,  # (M, K)
    weight: Any,  # (V, K)
    bias: Any = None,
    target: Any = None,
    coefficients: Any = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    memory_limit: int = 0,
    filter_gradients: bool = False,
    entropy: bool = False,
) -> tuple[Any, Any, Any, Any, Any]:
    """(lse, nll, dot, entropy, 0) of all logits; those that are not wanted are 0."""
    dtype = _DOUBLE if input.dtype == ir.DataType.DOUBLE else _FLOAT
    z = _op.MatMul(_op.Cast(input, to=dtype), _op.Transpose(_op.Cast(weight, to=dtype), perm=[1, 0]))
    if bias is not None:
        z = _op.Add(z, _op.CastLike(bias, z))
    z = _op.Mul(z, _constant_like(scale, z))
    if softcap > 0.0:
        z = _op.Mul(_op.Tanh(_op.Div(z, _constant_like(softcap, z))), _constant_like(softcap, z))
    probs, lse = _softmax(z, None)
    zero = nll = dot = own_entropy = _op.Mul(lse, _constant_like(0.0, lse))
    if target is not None:
        valid = _op.Not(_op.Equal(target, _int64(ignore_index)))
        column = _op.Where(valid, target, _int64(0))
        picked = _op.Squeeze(_op.GatherElements(z, _op.Unsqueeze(column, _int64s(1)), axis=1), _int64s(1))
        nll = _op.Where(valid, _op.Sub(lse, picked), zero)
    if coefficients is not None:
        dot = _op.ReduceSum(_op.Mul(z, _op.CastLike(coefficients, z)), _int64s(1), keepdims=0)
    if entropy:
        own_entropy = _op.Sub(lse, _op.ReduceSum(_op.Mul(probs, z), _int64s(1), keepdims=0))
    return lse, nll, dot, own_entropy, zero


def _linear_loss(
    input: Any,
    weight: Any,
    bias: Any = None,
    target: Any = None,
    coefficients: Any = None,
    by_lse: Any = None,
    by_nll: Any = None,
    by_dot: Any = None,
    by_square: Any = None,
    method: str = "auto",
    **options: Any,
) -> Any:
    lse, nll, dot, _entropy, zero = _logit_statistics(input, weight, bias, target, coefficients, **options)
    total = zero
    for by, value in ((by_lse, lse), (by_nll, nll), (by_dot, dot), (by_square, _op.Mul(lse, lse))):
        if by is not None:
            total = _op.Add(total, _op.Mul(by, value))
    return _op.ReduceSum(total, keepdims=0)


# Attention


def _flash_attention(
    query: Any,  # (B, Sq, H, D)
    key: Any,  # (B, Sk, Hk, D)
    value: Any,  # (B, Sk, Hk, Dv)
    alibi_slopes: Any = None,
    sinks: Any = None,
    attn_bias: Any = None,
    attn_mask: Any = None,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    bias_is_relative: bool = False,
) -> tuple[Any, Any]:
    _refuse_dropout("flash_attention", dropout_p)
    if bias_is_relative:
        raise NotImplementedError(
            f"{NAMESPACE}::flash_attention: relative_bias has no ONNX translation; give its values as attn_bias"
        )
    right = 0 if causal else window_right
    visible = distance = None
    if window_left is not None or right is not None or alibi_slopes is not None:
        queries, keys = _positions(_length(query)), _positions(_length(key))
        offset = _op.Sub(_length(key), _length(query))
        distance = _op.Sub(
            _op.Unsqueeze(keys, _int64s(0)), _op.Unsqueeze(_op.Add(queries, offset), _int64s(1))
        )  # (Sq, Sk)
        visible = _in_window(distance, window_left, right)
    visible = _both(visible, attn_mask)
    addend = _bias_and_alibi(attn_bias, alibi_slopes, distance)
    return _attend(query, key, value, visible, addend, sinks, softcap, *_constants(query, key, scale))


def _flash_attention_varlen(
    query: Any,  # (total_q, H, D)
    key: Any,  # (total_k, Hk, D)
    value: Any,
    cu_seqlens_q: Any,  # (B + 1,)
    cu_seqlens_k: Any,
    alibi_slopes: Any = None,
    sinks: Any = None,
    attn_bias: Any = None,
    attn_mask: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    bias_is_relative: bool = False,
) -> tuple[Any, Any]:
    """One attention over all rows, with a mask that keeps the sequences apart."""
    _refuse_dropout("flash_attention_varlen", dropout_p)
    for name, tensor in (("attn_bias", attn_bias), ("attn_mask", attn_mask), ("alibi_slopes", alibi_slopes)):
        if tensor is not None:
            raise NotImplementedError(
                f"{NAMESPACE}::flash_attention_varlen: {name} has no ONNX translation; export with flash_attention"
            )
    sequence_q, behind_q, inside_q = _sequences(query, cu_seqlens_q)
    sequence_k, behind_k, inside_k = _sequences(key, cu_seqlens_k)
    visible = _op.Equal(_op.Unsqueeze(sequence_q, _int64s(1)), _op.Unsqueeze(sequence_k, _int64s(0)))
    visible = _op.And(visible, _op.Unsqueeze(inside_k, _int64s(0)))
    # The distance from the bottom-right diagonal of a sequence: both positions are counted from its end.
    distance = _op.Sub(_op.Unsqueeze(behind_q, _int64s(1)), _op.Unsqueeze(behind_k, _int64s(0)))
    visible = _both(visible, _in_window(distance, window_left, 0 if causal else window_right))
    constants = _constants(query, key, scale)
    q, k, v = (
        _op.Unsqueeze(_op.Where(_op.Unsqueeze(inside, _int64s(1, 2)), tensor, _constant_like(0.0, tensor)), _int64s(0))
        for tensor, inside in ((query, inside_q), (key, inside_k), (value, inside_k))
    )
    out, lse = _attend(q, k, v, visible, None, sinks, softcap, *constants)
    if sinks is not None:
        lse = _op.Where(inside_q, lse, _constant_like(-math.inf, lse))
    return _op.Squeeze(out, _int64s(0)), _op.Squeeze(lse, _int64s(0))


def _refuse_dropout(name: str, dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"{NAMESPACE}::{name}: expected dropout_p = 0 for ONNX, got {dropout_p}; call .eval()"
        )


def _constants(query: Any, key: Any, scale: float | None) -> tuple[float, int, int]:
    """The scale, the number of query heads, and how many of them read one head of `key`."""
    heads, dim = query.shape[-2:]
    return 1 / math.sqrt(dim) if scale is None else scale, heads, heads // key.shape[-2]


def _length(tensor: Any) -> Any:
    """Dimension 1, as a tensor of no dimension."""
    return _op.Squeeze(_op.Shape(tensor, start=1, end=2), _int64s(0))


def _positions(length: Any) -> Any:
    return _op.Range(_int64(0), length, _int64(1))


def _sequences(rows: Any, cu_seqlens: Any) -> tuple[Any, Any, Any]:
    """The sequence of each row of `(total, ...)`, its distance from the end of that, and whether it has one."""
    ends = _op.Slice(_op.Cast(cu_seqlens, to=_INT64), _int64s(1), _int64s(2**62), _int64s(0))  # (B,)
    count = _op.Shape(ends)
    position = _positions(_op.Squeeze(_op.Shape(rows, start=0, end=1), _int64s(0)))  # (total,)
    behind = _op.LessOrEqual(_op.Unsqueeze(ends, _int64s(0)), _op.Unsqueeze(position, _int64s(1)))  # (total, B)
    sequence = _op.ReduceSum(_op.Cast(behind, to=_INT64), _int64s(1), keepdims=0)
    end = _op.Gather(ends, _op.Min(sequence, _op.Sub(count, _int64s(1))))
    return sequence, _op.Sub(end, position), _op.Less(sequence, count)


def _in_window(distance: Any, left: int | None, right: int | None) -> Any:
    """Where the distance of a key from the diagonal lies in the window; None where every key does."""
    seen = None
    if left is not None:
        seen = _op.GreaterOrEqual(distance, _int64(-left))
    if right is not None:
        seen = _both(seen, _op.LessOrEqual(distance, _int64(right)))
    return seen


def _both(first: Any, second: Any) -> Any:
    return second if first is None else first if second is None else _op.And(first, second)


def _bias_and_alibi(bias: Any, slopes: Any, distance: Any) -> Any:
    """What is added to the logits, in float32 at least, or None. Broadcasts to (B, H, Sq, Sk)."""
    if slopes is None:
        return bias
    heads = _op.Unsqueeze(slopes, _int64s(-1, -2))  # (H, 1, 1) or (B, H, 1, 1)
    alibi = _op.Neg(_op.Mul(heads, _op.CastLike(_op.Abs(distance), heads)))
    return alibi if bias is None else _op.Add(alibi, _op.CastLike(bias, alibi))


def _attend(
    query: Any,  # (B, Sq, H, D)
    key: Any,
    value: Any,
    visible: Any,  # None, or boolean, broadcasts to (B, H, Sq, Sk)
    addend: Any,  # None, or added to the logits; broadcasts likewise
    sinks: Any,
    softcap: float,
    scale: float,
    heads: int,
    group: int,  # query heads for each head of key and value
) -> tuple[Any, Any]:
    q, k, v = (_op.Transpose(tensor, perm=[0, 2, 1, 3]) for tensor in (query, key, value))  # (B, H, S, D)
    if addend is not None:
        addend = _op.CastLike(addend, q)
    if visible is not None:
        addend = _op.Where(visible, _constant_like(0.0, q) if addend is None else addend, _constant_like(-math.inf, q))
    logits = _op.Mul(
        _op.MatMul(q, _op.Transpose(_repeat_heads(k, heads, group), perm=[0, 1, 3, 2])), _constant_like(scale, q)
    )
    if softcap > 0.0:
        logits = _op.Mul(_op.Tanh(_op.Div(logits, _constant_like(softcap, q))), _constant_like(softcap, q))
    if addend is not None:
        logits = _op.Add(logits, addend)
    # The exporter removes what leads to a result that is not used.
    probs, lse = _softmax(logits, sinks)
    if sinks is None and softcap == 0.0:
        out, *_ = _op.Attention(q, k, v, addend, scale=scale)
        if addend is not None:
            some = _op.Greater(_op.ReduceMax(addend, _int64s(-1), keepdims=1), _constant_like(-math.inf, q))
            out = _op.Where(some, out, _constant_like(0.0, q))
    else:
        out = _op.MatMul(probs, _repeat_heads(v, heads, group))
    return _op.Transpose(out, perm=[0, 2, 1, 3]), lse


def _softmax(logits: Any, sinks: Any) -> tuple[Any, Any]:
    """The probabilities, (B, H, Sq, Sk), and their log-sum-exp, (B, H, Sq). Rows of -inf have probabilities of 0."""
    zero, lowest = _constant_like(0.0, logits), _constant_like(-math.inf, logits)
    largest = _op.ReduceMax(logits, _int64s(-1), keepdims=1)
    if sinks is not None:
        sinks = _op.CastLike(_op.Reshape(sinks, _int64s(1, -1, 1, 1)), logits)
        largest = _op.Max(largest, sinks)
    largest = _op.Where(_op.Equal(largest, lowest), zero, largest)
    probs = _op.Exp(_op.Sub(logits, largest))
    total = _op.ReduceSum(probs, _int64s(-1), keepdims=1)
    if sinks is not None:
        total = _op.Add(total, _op.Exp(_op.Sub(sinks, largest)))
    lse = _op.Squeeze(_op.Add(_op.Log(total), largest), _int64s(-1))
    divisor = _op.Where(_op.Equal(total, zero), _constant_like(1.0, logits), total)
    return _op.Div(probs, divisor), _op.Cast(lse, to=_DOUBLE if logits.dtype == ir.DataType.DOUBLE else _FLOAT)


def _repeat_heads(tensor: Any, heads: int, group: int) -> Any:
    """`tensor`, (B, Hk, S, D), with each head repeated for the `group` query heads that read it."""
    if group == 1:
        return tensor
    batch, rows = _op.Shape(tensor, start=0, end=1), _op.Shape(tensor, start=2, end=4)
    wide_shape = _op.Concat(batch, _int64s(heads // group, group), rows, axis=0)
    wide = _op.Expand(_op.Unsqueeze(tensor, _int64s(2)), wide_shape)
    return _op.Reshape(wide, _op.Concat(batch, _int64s(heads), rows, axis=0))


# Constants


def _constant_like(value: float, tensor: Any) -> Any:
    return _op.CastLike(_op.Constant(value=ir.tensor(value, dtype=ir.DataType.DOUBLE)), tensor)


def _int64(value: int) -> Any:
    return _op.Constant(value_int=value)


def _int64s(*values: int) -> Any:
    return _op.Constant(value_ints=list(values))
