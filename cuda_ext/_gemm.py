"""Matrix products with fused bias, activation, gate and residual, and their gradients.

Tensors are float32, float16, bfloat16, or float64 on the CPU; accumulation is float32 (float64 for float64). On the
CPU, tensors of any strides, including expanded ones, are read in place; on a GPU those with a unit stride in one of the
last two dims, while others are made contiguous. Results are contiguous. Dimensions of size 0 work: an empty sum is 0.

Precision of float32 on a GPU follows `torch.set_float32_matmul_precision`. With "highest", the default, sums of up to 8
terms are computed in float32. In longer sums each term is three tf32 products (Ootomo and Yokota, arXiv 2203.03341)
with an error of at most 2^-21 of the term; groups of 8 terms are added to the float32 sum. Infinities, NaN and overflow
are those of float32, operands of all normal magnitudes are equally precise, and subnormal ones keep all their bits.
With other settings each term is one product of operands rounded to the 11 bits of tf32; rounding never gives an
infinity.

Activations: ``None``, ``"relu"``, ``"gelu"`` (with erf) and ``"gelu_tanh"`` (Hendrycks and Gimpel, Gaussian Error
Linear Units, arXiv 1606.08415), ``"silu"`` (``x * sigmoid(x)``), ``"relu2"`` (``relu(x) ** 2``: So et al., Primer,
arXiv 2109.08668).

Every op is deterministic, and differentiable to any order in reverse and forward mode, including ``create_graph=True``
and the transforms of `torch.func`. The first derivative by `backward` is fused; the others are composed of this
package's products and PyTorch's elementwise ops, and recompute the pre-activation. Results have the same bits for any
number of threads, unless a large float32 or float64 product goes to the BLAS of the CPU: K >= 256, and M and N >= 256
(64 without an epilogue; 9 if b is row-major and takes 4 MB or has rows whole pages apart). On the CPU the bits of a row
may depend on the batch size, and so they may on a GPU, except under `batch_invariant`.

In addition to its arguments an op saves the pre-activation for backward, in the dtype of the output; for ``"relu"`` its
output instead, unless a residual was added; for ``activation=None`` nothing.

All of them raise RuntimeError for a wrong rank, shape, dtype, device or activation, naming the argument, and
NotImplementedError for CUDA tensors if no CUDA kernel is built. Under autocast they run in its dtype.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

import cuda_ext._rules  # noqa: F401
from cuda_ext._checks import check, check_constants
from cuda_ext._load import calls, ops

__all__ = ["batch_invariant", "gated_linear", "gated_mlp", "gemm", "linear", "mlp"]

_gemm = ops.gemm.default
_linear = ops.linear.default
_gated_linear = ops.gated_linear.default
_mlp = ops.mlp.default
_gated_mlp = ops.gated_mlp.default
_is_compiling = torch.compiler.is_compiling  # compilers see the ops alone, and no function of `calls`


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
        alpha, beta: zero removes its term, including NaN and infinity, in every dtype. So does `torch.addmm` with
            `beta`; with `alpha` on a CPU only in float32 and float64, while in float16 and bfloat16 a NaN in `a` or `b`
            stays.
        out_dtype: float32, float16 or bfloat16; default the dtype of ``a``. float64 only for float64 inputs, which
            allow nothing else.

    Returns:
        ``(..., M, N)``, rounded once from the accumulator.
    """
    if not _is_compiling():
        out = calls.gemm(a, b, c, bias, activation, alpha, beta, out_dtype)
        if out is not NotImplemented:
            return out
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
        weight: ``(N, K)``, as in `torch.nn.Linear`; dtype of ``input``, like all tensors here.
        bias: ``(N,)``.
        activation: see the module; default none.
        residual: broadcasts to the output.

    Returns:
        ``(..., N)``.
    """
    if not _is_compiling() and (out := calls.linear(input, weight, bias, residual, activation)) is not NotImplemented:
        return out
    return _linear(input, weight, bias, residual, activation=activation)


def gated_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu"
) -> Tensor:
    """``activation(gate) * up`` with ``[gate, up] = input @ weight.T + bias``.

    Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.

    Args:
        input: ``(..., K)``.
        weight: ``(2N, K)``, the rows of the gate first, then those of ``up``; dtype of ``input``.
        bias: ``(2N,)``.
        activation: see the module; ``None`` gives the bilinear form.

    Returns:
        ``(..., N)``.
    """
    if not _is_compiling() and (out := calls.gated_linear(input, weight, bias, activation)) is not NotImplemented:
        return out
    return _gated_linear(input, weight, bias, activation=activation)


def mlp(
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    activation: str | None = "gelu",
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(input @ weight1.T + bias1) @ weight2.T + bias2 + residual``.

    Saves only the pre-activation of the hidden layer for backward: there the epilogue of the first product forms the
    gradients of the activation and of ``bias1``, and recomputes the hidden tensor.

    Args:
        input: ``(..., K)``.
        weight1: ``(F, K)``; dtype of ``input``, like all tensors here.
        weight2: ``(N, F)``.
        bias1: ``(F,)``.
        bias2: ``(N,)``.
        activation: see the module.
        residual: broadcasts to the output.

    Returns:
        ``(..., N)``.
    """
    if not _is_compiling():
        out = calls.mlp(input, weight1, weight2, bias1, bias2, residual, activation)
        if out is not NotImplemented:
            return out
    return _mlp(input, weight1, weight2, bias1, bias2, residual, activation=activation)


def gated_mlp(
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    activation: str | None = "silu",
    residual: Tensor | None = None,
) -> Tensor:
    """``(activation(gate) * up) @ weight2.T + bias2 + residual`` with ``[gate, up] = input @ weight1.T + bias1``.

    The feed-forward layer of Llama-style models, fused like `mlp`.

    Args:
        input: ``(..., K)``.
        weight1: ``(2F, K)``, the rows of the gate first, then those of ``up``; dtype of ``input``, like all tensors
            here.
        weight2: ``(N, F)``.
        bias1: ``(2F,)``.
        bias2: ``(N,)``.
        activation: see the module.
        residual: broadcasts to the output.

    Returns:
        ``(..., N)``.
    """
    if not _is_compiling():
        out = calls.gated_mlp(input, weight1, weight2, bias1, bias2, residual, activation)
        if out is not NotImplemented:
            return out
    return _gated_mlp(input, weight1, weight2, bias1, bias2, residual, activation=activation)


class batch_invariant:
    """Switches products to a mode in which the bits of an output row do not depend on the other rows.

    ``batch_invariant()`` switches for the process, all threads included; as a context manager, until its end::

        with cuda_ext.batch_invariant():
            one = cuda_ext.linear(x[:1], w)
        # equal to cuda_ext.linear(x, w)[:1] in the same mode

    In this mode a row of `gemm`, `linear`, `gated_linear`, `mlp` and `gated_mlp`, and of the gradient with respect to
    their first argument, is the same however many rows there are and whatever is in them. So are the values of each row
    that `linear_log_prob` and `linear_cross_entropy` return. It holds for a given device, build and floating-point
    precision, and arguments that are equal but for the rows; not for gradients of weights and biases, which are sums
    over rows, nor for attention. Deterministic the ops are in either mode.

    The cost on a GPU: k is not split, so few rows use only as many SMs as there are tiles of the output, and tall k
    with a small output is slow; up to 64 rows take the tiles of 128; and a first argument that is not contiguous, or
    does not begin at a multiple of 16 bytes, is copied. On the CPU: the BLAS and the method for few rows are not used.

    Args:
        enabled: whether to switch on or off.
    """

    def __init__(self, enabled: bool = True) -> None:
        check(isinstance(enabled, bool), "batch_invariant", f"expected enabled to be a bool, got {enabled!r}")
        self._before = ops._set_batch_invariant(enabled)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ops._set_batch_invariant(self._before)
