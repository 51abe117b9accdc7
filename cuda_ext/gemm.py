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

import torch
from torch import Tensor

import cuda_ext._rules  # noqa: F401
from cuda_ext._checks import check_constants
from cuda_ext._load import ops

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
