"""Fake kernels of the GEMM family: the shapes, dtypes and strides of the results, and the errors, of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext._activations import ACTIVATIONS, listed
from cuda_ext._checks import (
    broadcasts_to,
    check,
    check_floating,
    check_same_device,
    check_same_dtype,
    check_shape,
    dtype_name,
    is_floating,
    shape_of,
)
from cuda_ext._toolchain import NAMESPACE

_KNOWN_ACTIVATIONS = listed([*map(repr, ACTIVATIONS)], "or")


def _empty(like: Tensor, *size: Any, wanted: bool = True) -> Tensor:
    """A result: contiguous, or of size (0,) if it is not `wanted`."""
    return like.new_empty(size if wanted else (0,))


def needs_preact(activation: str | None, gated: bool = False, has_residual: bool = False) -> bool:
    return gated or not (activation is None or (activation == "relu" and not has_residual))


def _gemm_size(op: str, a: Tensor, b: Tensor) -> list[Any]:
    check_floating(op, "a", a)
    check_same_dtype(op, "b", b, "a", a)
    check_same_device(op, "a", a, b=b)
    check(a.dim() >= 2, op, f"expected a of shape (..., M, K), got {shape_of(a)}")
    expected = f"expected b of shape (..., {a.shape[-1]}, N) to match a {shape_of(a)}, got {shape_of(b)}"
    check(b.dim() >= 2, op, expected)
    check(b.shape[-2] == a.shape[-1], op, expected)
    for size_a, size_b in zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False):
        check(
            (size_a == size_b) | (size_a == 1) | (size_b == 1),
            op,
            f"expected the batch dims of a and b to broadcast, got a {shape_of(a)} and b {shape_of(b)}",
        )
    return [*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]]


def _linear_width(
    op: str, input: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, layer: str = ""
) -> tuple[Any, Any]:
    """(rows of the weight, output features: half of them if gated)."""
    name, rows = f"weight{layer}", "2N" if gated else "N"
    check_floating(op, "input", input)
    check_same_dtype(op, name, weight, "input", input)
    check_same_device(op, "input", input, **{name: weight})
    check(input.dim() >= 1, op, "expected input of shape (..., K), got a 0-dim tensor")
    expected = (
        f"expected {name} of shape ({rows}, {input.shape[-1]}) to match input {shape_of(input)}, got {shape_of(weight)}"
    )
    check(weight.dim() == 2, op, expected)
    check(weight.shape[1] == input.shape[-1], op, expected)
    width = weight.shape[0]
    if gated:
        check(
            width % 2 == 0,
            op,
            f"expected {name} to have an even number of rows, [gate; up], got {shape_of(weight)}",
        )
    _check_bias(op, f"bias{layer}", bias, input, input.dtype, width)
    return width, width // 2 if gated else width


def _output_dtype(op: str, wanted: torch.dtype | None, input: Tensor) -> torch.dtype:
    dtype = wanted or input.dtype
    check(
        is_floating(dtype) and (dtype == torch.float64) == (input.dtype == torch.float64),
        op,
        (
            "expected out_dtype float32, float16 or bfloat16 (float64 for float64 inputs), got "
            f"{dtype_name(dtype)} for inputs of {dtype_name(input.dtype)}"
        ),
    )
    return dtype


def check_addend(
    op: str, name: str, addend: Tensor | None, input: Tensor, out_dtype: torch.dtype, size: Sequence[Any]
) -> None:
    if addend is None:
        return
    check(
        addend.dtype in (input.dtype, out_dtype),
        op,
        (
            f"expected {name} of dtype {dtype_name(input.dtype)} (the inputs') or {dtype_name(out_dtype)} (the "
            f"output's), got {dtype_name(addend.dtype)}; convert it with .to()"
        ),
    )
    check_same_device(op, "the inputs", input, **{name: addend})
    check(
        broadcasts_to(addend.shape, size),
        op,
        f"expected {name} to broadcast to the output {tuple(size)}, got {shape_of(addend)}",
    )


def _check_bias(op: str, name: str, bias: Tensor | None, input: Tensor, out_dtype: torch.dtype, width: Any) -> None:
    if bias is not None:
        check_shape(op, name, bias, [width])
        check_addend(op, name, bias, input, out_dtype, [width])


def _check_activation(op: str, activation: str | None) -> None:
    check(activation in ACTIVATIONS, op, f"expected activation to be {_KNOWN_ACTIVATIONS}, got '{activation}'")


def _check_gradient(op: str, grad_out: Tensor, size: Sequence[Any], input: Tensor, **tensors: Tensor | None) -> None:
    check_floating(op, "grad_out", grad_out)
    check_same_device(op, "the inputs", input, grad_out=grad_out, **tensors)
    check_shape(op, "grad_out", grad_out, size)


def _register_fakes(op: str, fake: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Registers `fake` for X_forward, and its first result for X."""
    torch.library.register_fake(f"{NAMESPACE}::{op}_forward")(fake)
    torch.library.register_fake(f"{NAMESPACE}::{op}")(lambda *args, **options: fake(*args, **options)[0])


def _fake_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    size = _gemm_size("gemm", a, b)
    _check_activation("gemm", activation)
    dtype = _output_dtype("gemm", out_dtype, a)
    check_addend("gemm", "c", c, a, dtype, size)
    _check_bias("gemm", "bias", bias, a, dtype, size[-1])
    for name, value in (("alpha", alpha), ("beta", beta)):
        check(value == value, "gemm", f"expected {name} to be a number, got nan")
    out = a.new_empty(size, dtype=dtype)
    return out, _empty(out, *size, wanted=needs_preact(activation))


def _fake_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    width, _ = _linear_width("linear", input, weight, bias, False)
    size = [*input.shape[:-1], width]
    _check_activation("linear", activation)
    check_addend("linear", "residual", residual, input, input.dtype, size)
    save = needs_preact(activation, has_residual=residual is not None)
    return _empty(input, *size), _empty(input, *size, wanted=save)


def _fake_gated_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu"
) -> tuple[Tensor, Tensor]:
    rows, width = _linear_width("gated_linear", input, weight, bias, True)
    _check_activation("gated_linear", activation)
    return _empty(input, *input.shape[:-1], width), _empty(input, *input.shape[:-1], rows)


def _mlp_widths(
    op: str,
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    gated: bool,
) -> tuple[Any, Any]:
    """(rows of weight1, rows of weight2)."""
    rows, hidden = _linear_width(op, input, weight1, bias1, gated, layer="1")
    check_same_dtype(op, "weight2", weight2, "input", input)
    check_same_device(op, "input", input, weight2=weight2)
    expected = f"expected weight2 of shape (N, {hidden}) to match weight1 {shape_of(weight1)}, got {shape_of(weight2)}"
    check(weight2.dim() == 2, op, expected)
    check(weight2.shape[1] == hidden, op, expected)
    _check_bias(op, "bias2", bias2, input, input.dtype, weight2.shape[0])
    return rows, weight2.shape[0]


def _fake_mlp(op: str, gated: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(
        input: Tensor,
        weight1: Tensor,
        weight2: Tensor,
        bias1: Tensor | None = None,
        bias2: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        activation: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, width = _mlp_widths(op, input, weight1, weight2, bias1, bias2, gated)
        size = [*input.shape[:-1], width]
        check_addend(op, "residual", residual, input, input.dtype, size)
        _check_activation(op, activation)
        return _empty(input, *size), _empty(input, *input.shape[:-1], rows)

    return fake


_register_fakes("gemm", _fake_gemm)
_register_fakes("linear", _fake_linear)
_register_fakes("gated_linear", _fake_gated_linear)
_register_fakes("mlp", _fake_mlp("mlp", False))
_register_fakes("gated_mlp", _fake_mlp("gated_mlp", True))


def _fake_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    op = "grouped_mm"
    _check_activation(op, activation)
    check_floating(op, "mat_a", mat_a)
    dtype = _output_dtype(op, out_dtype, mat_a)
    check_same_dtype(op, "mat_b", mat_b, "mat_a", mat_a)
    check_same_device(op, "mat_a", mat_a, mat_b=mat_b, offs=offs, bias=bias, indices=indices)
    check(
        offs.dim() == 1 and offs.dtype in (torch.int32, torch.int64),
        op,
        f"expected offs of shape (groups,) and dtype int32 or int64, got {shape_of(offs)} of {dtype_name(offs.dtype)}",
    )
    check(
        mat_a.dim() == 2 and mat_b.dim() in (2, 3),
        op,
        "expected mat_a (T, K) with mat_b (groups, K, N), or mat_a (M, T) with mat_b (T, N), got "
        f"{shape_of(mat_a)} and {shape_of(mat_b)}",
    )
    (rows, terms), groups, width = mat_a.shape, offs.shape[0], mat_b.shape[-1]
    cuts_rows = mat_b.dim() == 3
    if indices is not None:
        kind = f"expected indices of shape (T,) and dtype int32 or int64, got {shape_of(indices)} of "
        is_index = indices.dim() == 1 and indices.dtype in (torch.int32, torch.int64)
        check(is_index, op, f"{kind}{dtype_name(indices.dtype)}")
    if indices is not None and cuts_rows:
        rows = indices.shape[0]
    elif indices is not None:
        wanted = f"expected {terms} indices, one for each term of mat_a {shape_of(mat_a)}"
        check(indices.shape[0] == terms, op, f"{wanted}, got {indices.shape[0]}")
    if indices is None or cuts_rows:
        expected = f"expected mat_b of shape ({'groups, ' if cuts_rows else ''}{terms}, N) to match mat_a "
        check(mat_b.shape[-2] == terms, op, f"{expected}{shape_of(mat_a)}, got {shape_of(mat_b)}")
    if not cuts_rows:
        plain = activation is None and not gated
        check(plain, op, "expected activation=None and gated=False where the groups cut the terms of a sum")
        check(bias is None, op, "expected no bias where the groups cut the terms of a sum")
        return mat_a.new_empty([groups, rows, width], dtype=dtype), mat_a.new_empty([0], dtype=dtype)
    count = f"expected mat_b of {groups} matrices, one for each element of offs, got {shape_of(mat_b)}"
    check(mat_b.shape[0] == groups, op, count)
    halves = f"expected mat_b of shape (groups, {terms}, 2N), [gate, up], with gated=True, got {shape_of(mat_b)}"
    check(not gated or width % 2 == 0, op, halves)
    if bias is not None:
        check_shape(op, "bias", bias, [groups, width])
        check(
            bias.dtype in (mat_a.dtype, dtype),
            op,
            f"expected bias of dtype {dtype_name(mat_a.dtype)} or {dtype_name(dtype)}, got {dtype_name(bias.dtype)}",
        )
    preact = [rows, width] if needs_preact(activation, gated) else [0]
    out = [rows, width // 2 if gated else width]
    return mat_a.new_empty(out, dtype=dtype), mat_a.new_empty(preact, dtype=dtype)


_register_fakes("grouped_mm", _fake_grouped_mm)


def _bias_gradient(input: Tensor, bias: Tensor | None, width: Any, wanted: bool) -> Tensor:
    return _empty(input if bias is None else bias, width, wanted=wanted)


@torch.library.register_fake(f"{NAMESPACE}::gemm_backward")
def _(
    grad_out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    *,
    alpha: float,
    beta: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    _check_gradient("gemm_backward", grad_out, _gemm_size("gemm_backward", a, b), a, bias=bias)
    return (
        _empty(a, *a.shape, wanted=output_mask[0]),
        _empty(b, *b.shape, wanted=output_mask[1]),
        _empty(grad_out, *grad_out.shape, wanted=output_mask[2]),
        _bias_gradient(a, bias, b.shape[-1], output_mask[3]),
    )


@torch.library.register_fake(f"{NAMESPACE}::activation_backward")
def _(
    grad_out: Tensor, preact: Tensor, *, activation: str | None, gated: bool, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    op = "activation_backward"
    _check_activation(op, activation)
    check_floating(op, "grad_out", grad_out)
    check_same_device(op, "grad_out", grad_out, preact=preact)
    check(grad_out.dim() >= 1, op, f"expected grad_out of shape (..., N), got {shape_of(grad_out)}")
    width = grad_out.shape[-1] * (1 + gated)
    check_shape(op, "preact", preact, [*grad_out.shape[:-1], width])
    bias = grad_out if bias_dtype is None else grad_out.new_empty(0, dtype=bias_dtype)
    return _empty(grad_out, *preact.shape), _empty(bias, width, wanted=bias_dtype is not None)


@torch.library.register_fake(f"{NAMESPACE}::linear_backward")
@torch.library.register_fake(f"{NAMESPACE}::linear_backward.slot")
def _(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    output_mask: Sequence[bool],
    weight_slot: Tensor | None = None,
    slot_alpha: float = 1.0,
    slot_beta: float = 0.0,
) -> tuple[Tensor, ...]:
    op = "linear_backward"
    width, _ = _linear_width(op, input, weight, None, gated=False)
    _check_gradient(op, grad_out, [*input.shape[:-1], width], input, bias=bias, weight_slot=weight_slot)
    return (
        _empty(input, *input.shape, wanted=output_mask[0]),
        _empty(weight, *weight.shape, wanted=output_mask[1] and weight_slot is None),
        _bias_gradient(input, bias, width, output_mask[2]),
    )


@torch.library.register_fake(f"{NAMESPACE}::mlp_hidden_backward")
@torch.library.register_fake(f"{NAMESPACE}::mlp_hidden_backward.slot")
def _(
    grad_out: Tensor,
    weight2: Tensor,
    preact: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    *,
    activation: str | None,
    gated: bool,
    output_mask: Sequence[bool],
    weight_slot: Tensor | None = None,
    slot_alpha: float = 1.0,
    slot_beta: float = 0.0,
) -> tuple[Tensor, ...]:
    op = "mlp_hidden_backward"
    _check_activation(op, activation)
    check_floating(op, "grad_out", grad_out)
    check_floating(op, "weight2", weight2)
    others = {"weight2": weight2, "preact": preact, "bias1": bias1, "bias2": bias2, "weight_slot": weight_slot}
    check_same_device(op, "grad_out", grad_out, **others)
    check(
        grad_out.dim() >= 1 and weight2.dim() == 2 and weight2.shape[0] == grad_out.shape[-1],
        op,
        (
            "expected grad_out of shape (..., N) and weight2 of shape (N, K), got "
            f"{shape_of(grad_out)} and {shape_of(weight2)}"
        ),
    )
    width = weight2.shape[1] * (1 + gated)
    check_shape(op, "preact", preact, [*grad_out.shape[:-1], width])
    return (
        _empty(weight2, *preact.shape, wanted=output_mask[0]),
        _empty(weight2, *weight2.shape, wanted=output_mask[1] and weight_slot is None),
        _bias_gradient(weight2, bias1, width, output_mask[2]),
        _bias_gradient(weight2, bias2, grad_out.shape[-1], output_mask[3]),
    )
