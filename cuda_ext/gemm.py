"""Matrix products with everything around them fused: bias, activation, gate, residual, and their gradients.

Tensors are float32, float16, bfloat16, or float64 on the CPU; accumulation is float32 (float64 for float64). Tensors of
any strides, expanded ones included, are read in place on the CPU; on a GPU those with a unit stride in one of the last
two dims, and the others are made contiguous. Results are contiguous. Dimensions of size 0 work: an empty sum is 0.

On a GPU float32 products follow `torch.set_float32_matmul_precision`. With "highest", the default, a sum of up to 8
terms is formed in float32. In a longer one each term is three products of tf32 (Ootomo and Yokota, arXiv 2203.03341),
which err by at most 2^-21 of the term; 8 terms at a time are added to the float32 sum. Infinities, NaN and overflow are
those of float32, operands of all normal sizes are as exact, and subnormal ones count to their last place. With other
settings each term is one product of operands rounded to the 11 bits of tf32; none of them becomes an infinity by that.

Activations: ``None``, ``"relu"``, ``"gelu"`` (with erf) and ``"gelu_tanh"`` (Hendrycks and Gimpel, Gaussian Error
Linear Units, arXiv 1606.08415), ``"silu"`` (``x * sigmoid(x)``).

Every op is deterministic, and differentiable to any order and in both modes: by `backward`, also with
``create_graph=True``, by forward mode, and under the transforms of `torch.func`. The first derivative by `backward` is
fused; the others are composed of our products and PyTorch's elementwise ops, and compute the pre-activation again.
Results have the same bits whatever the number of threads, except where a large float32 or float64 product goes to the
BLAS of a CPU: K of 256 and more, and M and N of 256 too (64 without an epilogue; 9 if b is row-major and takes 4 MB or
has rows whole pages apart). On a CPU a row may have other bits in a batch of another size.

Beside its arguments an op saves for backward the pre-activation in the dtype of the output; nothing more for
``activation=None``; for ``"relu"`` its output, or the pre-activation if a residual was added.

All of them raise RuntimeError for wrong ranks, shapes, dtypes, devices or activations, naming the argument, and
NotImplementedError for CUDA tensors where no CUDA kernel is built. Under autocast they run in its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
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
    is_floating,
    shape_of,
)
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

__all__ = ["gated_linear", "gated_mlp", "gemm", "linear", "mlp"]

_gemm = ops.gemm.default
_linear = ops.linear.default
_gated_linear = ops.gated_linear.default
_mlp = ops.mlp.default
_gated_mlp = ops.gated_mlp.default


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``activation(alpha * a @ b + beta * c + bias)``.

    Args:
        a: ``(..., M, K)``.
        b: ``(..., K, N)``, dtype of ``a``. The batch dimensions of ``a`` and ``b`` broadcast as in `torch.matmul`.
        c: broadcasts to the output ``(..., M, N)``; dtype of ``a`` or of the output.
        bias: ``(N,)``; dtype of ``a`` or of the output.
        activation: see the module; default none.
        alpha, beta: a zero removes its term, NaN and infinity in it included, as in `torch.addmm`.
        out_dtype: float32, float16 or bfloat16; default the dtype of ``a``. float64 if and only if ``a`` is.

    Returns:
        ``(..., M, N)``, rounded once from the accumulator.
    """
    if activation is None and out_dtype is None and type(alpha) is type(beta) is float and alpha == 1.0 == beta:
        return _gemm(a, b, c, bias)  # keywords cost as much as the rest of a call on small tensors
    check_constants("gemm", alpha=alpha, beta=beta)
    return _gemm(a, b, c, bias, activation=activation, alpha=alpha, beta=beta, out_dtype=out_dtype)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(input @ weight.T + bias) + residual``.

    Args:
        input: ``(..., K)``.
        weight: ``(N, K)``, as in `torch.nn.Linear`; dtype of ``input``, as all tensors here.
        bias: ``(N,)``.
        activation: see the module; default none.
        residual: broadcasts to the output.

    Returns:
        ``(..., N)``.
    """
    if activation is None:
        return _linear(input, weight, bias, residual)  # as in gemm
    return _linear(input, weight, bias, residual, activation=activation)


def gated_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu"
) -> Tensor:
    """``activation(gate) * up`` with ``[gate, up] = input @ weight.T + bias``.

    After Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.

    Args:
        input: ``(..., K)``.
        weight: ``(2N, K)``, the rows of the gate before those of the other half; dtype of ``input``.
        bias: ``(2N,)``.
        activation: see the module; ``None`` makes it bilinear.

    Returns:
        ``(..., N)``.
    """
    return _gated_linear(input, weight, bias, activation=activation)


def mlp(
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    activation: str | None = "gelu",
) -> Tensor:
    """``activation(input @ weight1.T + bias1) @ weight2.T + bias2``.

    One op, so that in backward the gradients of the activation and of ``bias1`` are formed in the epilogue of the
    product before them, which also forms the hidden tensor again: only its pre-activation is saved.

    Args:
        input: ``(..., K)``.
        weight1: ``(F, K)``; dtype of ``input``, as all tensors here.
        weight2: ``(N, F)``.
        bias1: ``(F,)``.
        bias2: ``(N,)``.
        activation: see the module.

    Returns:
        ``(..., N)``.
    """
    return _mlp(input, weight1, weight2, bias1, bias2, activation=activation)


def gated_mlp(
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> Tensor:
    """``(activation(gate) * up) @ weight2.T + bias2`` with ``[gate, up] = input @ weight1.T + bias1``.

    The feed-forward layer of Llama, fused as `mlp` is.

    Args:
        input: ``(..., K)``.
        weight1: ``(2F, K)``, the rows of the gate before those of the other half; dtype of ``input``, as all tensors.
        weight2: ``(N, F)``.
        bias1: ``(2F,)``.
        bias2: ``(N,)``.
        activation: see the module.

    Returns:
        ``(..., N)``.
    """
    return _gated_mlp(input, weight1, weight2, bias1, bias2, activation=activation)


_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


# Fake kernels: shapes, dtypes and strides of what the real ones return, and what these refuse.


def _empty(like: Tensor, *size: Any, wanted: bool = True) -> Tensor:
    """What a kernel returns: contiguous, or of size (0,) where nothing was asked for."""
    return like.new_empty(size if wanted else (0,))


def _needs_preact(activation: str | None, gated: bool = False, has_residual: bool = False) -> bool:
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
    """(rows of the weight, features that are left of them)."""
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


def _check_addend(
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
        _check_addend(op, name, bias, input, out_dtype, [width])


def _check_activation(op: str, activation: str | None) -> None:
    check(
        activation in _ACTIVATIONS,
        op,
        f"expected activation to be None, 'relu', 'gelu', 'gelu_tanh' or 'silu', got '{activation}'",
    )


def _check_gradient(op: str, grad_out: Tensor, size: Sequence[Any], input: Tensor, **tensors: Tensor | None) -> None:
    check_floating(op, "grad_out", grad_out)
    check_same_device(op, "the inputs", input, grad_out=grad_out, **tensors)
    check_shape(op, "grad_out", grad_out, size)


def _register_fakes(op: str, fake: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """`fake` serves X_forward; X returns the first of its results."""
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
    dtype = out_dtype or a.dtype
    check(
        is_floating(dtype) and (dtype == torch.float64) == (a.dtype == torch.float64),
        "gemm",
        (
            "expected out_dtype float32, float16 or bfloat16 (float64 for float64 inputs), got "
            f"{dtype_name(dtype)} for inputs of {dtype_name(a.dtype)}"
        ),
    )
    _check_addend("gemm", "c", c, a, dtype, size)
    _check_bias("gemm", "bias", bias, a, dtype, size[-1])
    for name, value in (("alpha", alpha), ("beta", beta)):
        check(value == value, "gemm", f"expected {name} to be a number, got nan")
    out = a.new_empty(size, dtype=dtype)
    return out, _empty(out, *size, wanted=_needs_preact(activation))


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
    _check_addend("linear", "residual", residual, input, input.dtype, size)
    save = _needs_preact(activation, has_residual=residual is not None)
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
        *,
        activation: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, width = _mlp_widths(op, input, weight1, weight2, bias1, bias2, gated)
        _check_activation(op, activation)
        return _empty(input, *input.shape[:-1], width), _empty(input, *input.shape[:-1], rows)

    return fake


_register_fakes("gemm", _fake_gemm)
_register_fakes("linear", _fake_linear)
_register_fakes("gated_linear", _fake_gated_linear)
_register_fakes("mlp", _fake_mlp("mlp", False))
_register_fakes("gated_mlp", _fake_mlp("gated_mlp", True))


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


# FLOPs: 2 for each multiply-add of the products; epilogues count nothing, as is usual.


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


@register_flop_formula([ops.gemm, ops.gemm_forward])
def _gemm_flops(a: Sequence[int], b: Sequence[int], *more: Any, **options: Any) -> int:
    return 2 * _product(torch.broadcast_shapes(a[:-2], b[:-2])) * a[-2] * a[-1] * b[-1]


@register_flop_formula(ops.gemm_backward)
def _gemm_backward_flops(
    grad_out: Sequence[int], a: Sequence[int], b: Sequence[int], *more: Any, output_mask: Sequence[bool], **options: Any
) -> int:
    return sum(output_mask[:2]) * _gemm_flops(a, b)


@register_flop_formula([ops.linear, ops.linear_forward, ops.gated_linear, ops.gated_linear_forward])
def _linear_flops(input: Sequence[int], weight: Sequence[int], *more: Any, **options: Any) -> int:
    return 2 * _product(input) * weight[0]


@register_flop_formula(ops.linear_backward)
def _linear_backward_flops(
    grad_out: Sequence[int],
    input: Sequence[int],
    weight: Sequence[int],
    *more: Any,
    output_mask: Sequence[bool],
    **options: Any,
) -> int:
    return sum(output_mask[:2]) * _linear_flops(input, weight)


@register_flop_formula([ops.mlp, ops.mlp_forward, ops.gated_mlp, ops.gated_mlp_forward])
def _mlp_flops(input: Sequence[int], weight1: Sequence[int], weight2: Sequence[int], *more: Any, **options: Any) -> int:
    return 2 * _product(input[:-1]) * (_product(weight1) + _product(weight2))


@register_flop_formula(ops.mlp_hidden_backward)
def _mlp_hidden_backward_flops(
    grad_out: Sequence[int], weight2: Sequence[int], *more: Any, output_mask: Sequence[bool], **options: Any
) -> int:
    wants_preact, wants_weight2, wants_bias1, _ = output_mask
    products = wants_weight2 + (wants_preact or wants_weight2 or wants_bias1)
    return 2 * products * _product(grad_out[:-1]) * _product(weight2)


# vmap: the mapped dimension becomes one more leading or batch dimension, at no copy where strides allow.

InDims = tuple[int | None, ...]


def _in_front(tensor: Tensor | None, dim: int | None, rank: int) -> Tensor | None:
    """A mapped tensor as (mapped, 1, ..., 1, its own dims), `rank` dims behind the first; others as they are."""
    if tensor is None or dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    return tensor.reshape(tensor.shape[0], *[1] * (rank - tensor.dim() + 1), *tensor.shape[1:])


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _own_rank(tensor: Tensor | None, dim: int | None) -> int:
    return 0 if tensor is None else tensor.dim() - (dim is not None)


@torch.library.register_vmap(f"{NAMESPACE}::gemm")
def _(
    info: Any,
    in_dims: InDims,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, int]:
    dim_a, dim_b, dim_c, dim_bias = (*in_dims, None, None)[:4]
    rank = max(_own_rank(a, dim_a), _own_rank(b, dim_b))
    a_, b_, c_ = _in_front(a, dim_a, rank), _in_front(b, dim_b, rank), _in_front(c, dim_c, rank)
    assert a_ is not None and b_ is not None
    if dim_a is None and dim_b is None:
        a_ = a_.expand(info.batch_size, *[1] * (rank - a_.dim()), *a_.shape)
    if bias is None or dim_bias is None:
        return _gemm(a_, b_, c_, bias, **options), 0
    row, beta = _in_front(bias, dim_bias, rank), options.pop("beta", 1.0)
    assert row is not None
    if c_ is None or beta == 0.0:
        return _gemm(a_, b_, row, **options), 0
    # The sum of both as the kernel would form it, unrounded.
    dtype, exact = options.pop("out_dtype", None) or a.dtype, _accumulation_dtype(a)
    _check_addend("gemm", "c", c_, a, dtype, c_.shape)
    _check_addend("gemm", "bias", row, a, dtype, row.shape)
    addend = torch.add(row.to(exact), c_.to(exact), alpha=beta)
    return _gemm(a_, b_, addend, **options, out_dtype=exact).to(dtype), 0


def _vmap_linear(
    info: Any,
    in_dims: InDims,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[Tensor, int | None]:
    if all(dim is None for dim in in_dims):
        return _linear(input, weight, bias, residual, activation=activation), None
    dim_input, dim_weight, dim_bias, dim_residual = (*in_dims, None, None)[:4]
    rank = _own_rank(input, dim_input)
    input_ = _in_front(input, dim_input, rank)
    assert input_ is not None
    if dim_input is None:
        input_ = input_.expand(info.batch_size, *input_.shape)
    residual_ = _in_front(residual, dim_residual, rank)
    if dim_weight is None and dim_bias is None:
        return _linear(input_, weight, bias, residual_, activation=activation), 0
    weight_ = _in_front(weight, dim_weight, 2)
    assert weight_ is not None
    rows = input_.flatten(1, -2) if rank > 1 else input_.unsqueeze(1)
    bias_ = bias if dim_bias is None else None
    c = None if dim_bias is None else _in_front(bias, dim_bias, 2)
    out_dtype = None if residual_ is None else _accumulation_dtype(input)
    out = _gemm(rows, weight_.mT, c, bias_, activation=activation, out_dtype=out_dtype)
    out = out.reshape(*input_.shape[:-1], out.shape[-1])
    return (out if residual_ is None else (out + residual_).to(input.dtype)), 0


def _vmap_gated_linear(
    info: Any,
    in_dims: InDims,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> tuple[Tensor, int | None]:
    if all(dim is None for dim in in_dims):
        return _gated_linear(input, weight, bias, activation=activation), None
    if all(dim is None for dim in in_dims[1:]):
        return _gated_linear(input.movedim(in_dims[0] or 0, 0), weight, bias, activation=activation), 0

    both, _ = _vmap_linear(info, in_dims, input, weight, bias)
    gate, up = both.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up, 0


def _mlp_vmap(fused: Callable[..., Tensor], first: Callable[..., Any], default: str) -> Callable[..., Any]:
    def rule(
        info: Any,
        in_dims: InDims,
        input: Tensor,
        weight1: Tensor,
        weight2: Tensor,
        bias1: Tensor | None = None,
        bias2: Tensor | None = None,
        *,
        activation: str | None = default,
    ) -> tuple[Tensor, int | None]:
        dim_input, dim1, dim2, dim_bias1, dim_bias2 = (*in_dims, None, None)[:5]
        if all(dim is None for dim in in_dims[1:]):
            return fused(input.movedim(dim_input or 0, 0), weight1, weight2, bias1, bias2, activation=activation), 0
        hidden, dim = first(info, (dim_input, dim1, dim_bias1), input, weight1, bias1, activation=activation)
        return _vmap_linear(info, (dim, dim2, dim_bias2), hidden, weight2, bias2)

    return rule


torch.library.register_vmap(f"{NAMESPACE}::linear", _vmap_linear)
torch.library.register_vmap(f"{NAMESPACE}::gated_linear", _vmap_gated_linear)
torch.library.register_vmap(f"{NAMESPACE}::mlp", _mlp_vmap(_mlp, _vmap_linear, "gelu"))
torch.library.register_vmap(f"{NAMESPACE}::gated_mlp", _mlp_vmap(_gated_mlp, _vmap_gated_linear, "silu"))
