"""Helpers of the GEMM tests: ops and references, inputs, and the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cuda_ext import _activations, testing
from cuda_ext._gemm import gated_linear, gated_mlp, gemm, linear, mlp

ACTIVATIONS = tuple(_activations.ACTIVATIONS)
EXPECTED_ACTIVATION = f"expected activation to be {', '.join(map(repr, ACTIVATIONS[:-1]))} or {ACTIVATIONS[-1]!r}"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPS = {op.__name__: op for op in (gemm, linear, gated_linear, mlp, gated_mlp)}
REFERENCES: dict[str, Callable[..., Tensor]] = {
    "gemm": testing.reference_gemm,
    "linear": testing.reference_linear,
    "gated_linear": testing.reference_gated_linear,
    "mlp": testing.reference_mlp,
    "gated_mlp": testing.reference_gated_mlp,
}


def shapes_of(op: str, lead: tuple[int, ...], m: int, n: int, k: int, f: int = 5) -> dict[str, tuple[int, ...]]:
    """Shapes of an op's tensor arguments for (*lead, m) rows, k inputs, n outputs and f hidden features (mlp)."""
    hidden = {"bias1": (f,), "bias2": (n,), "residual": (*lead, m, n)}
    return {
        "gemm": {"a": (*lead, m, k), "b": (*lead, k, n), "c": (*lead, m, n), "bias": (n,)},
        "linear": {"input": (*lead, m, k), "weight": (n, k), "bias": (n,), "residual": (*lead, m, n)},
        "gated_linear": {"input": (*lead, m, k), "weight": (2 * n, k), "bias": (2 * n,)},
        "mlp": {"input": (*lead, m, k), "weight1": (f, k), "weight2": (n, f), **hidden},
        "gated_mlp": {"input": (*lead, m, k), "weight1": (2 * f, k), "weight2": (n, f), **hidden, "bias1": (2 * f,)},
    }[op]


def rand(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_(grad)


def integers(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """Small integers, whose products and sums are exact in float32 in any order."""
    return torch.randint(-4, 5, shape).to(dtype).requires_grad_(grad)


def arguments(op: str, lead: tuple[int, ...], m: int, n: int, k: int, f: int = 5, **options: Any) -> dict[str, Tensor]:
    """Random inputs, and weights scaled so that the output is of the same size as the input, as in a model.

    With unscaled weights, most pre-activations would be in the linear range of the activation, and the largest error of
    a gradient would depend on the few others, by chance.
    """
    shapes = shapes_of(op, lead, m, n, k, f)
    terms = {"b": k, "weight": k, "weight1": k, "weight2": f}
    return {name: rand(*shape, scale=max(1, terms.get(name, 1)) ** -0.5, **options) for name, shape in shapes.items()}


# The tolerance is twice the error of plain PyTorch plus eight roundings of the largest element, or of 1, the size of
# the inputs, where terms cancel. Over few elements the maximal error of plain PyTorch may be small by chance, and the
# gradients of an mlp pass through three products with rounded operands.
ROUNDINGS = 8


def roundings(operand: Tensor) -> int:
    """The CUDA kernels split a float32 into two tf32: a term of a product then has an error of 2^-22, not 2^-24."""
    as_tf32 = operand.dtype == torch.float32 and (operand.is_cuda or testing.is_emulating())
    return 4 * ROUNDINGS if as_tf32 else ROUNDINGS


def check(op: str, tensors: Mapping[str, Tensor], **options: Any) -> None:
    """Compares the op and the gradients of all tensors that require one with the reference in float64."""

    def run(function: Callable[..., Tensor], dtype: torch.dtype | None) -> tuple[Tensor, list[Tensor]]:
        leaves = {name: tensor.detach() for name, tensor in tensors.items()}
        if dtype is not None:
            leaves = {name: leaf.to(dtype) for name, leaf in leaves.items()}
        for name, leaf in leaves.items():
            leaf.requires_grad_(tensors[name].requires_grad)
        run_options = dict(options)
        if dtype is not None and "out_dtype" in options:
            run_options["out_dtype"] = dtype
        out = function(**leaves, **run_options)
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        generator = torch.Generator(out.device).manual_seed(out.numel())
        weights = (
            torch.randn(out.shape, dtype=torch.float64, generator=generator, device=out.device)
            .to(actual_dtype)
            .to(out.dtype)
        )
        return out, list(torch.autograd.grad(out, wanted, weights)) if wanted else []

    some = next(iter(tensors.values()))
    actual_dtype = options.get("out_dtype") or some.dtype
    out, grads = run(OPS[op], None)
    plain_out, plain_grads = run(REFERENCES[op], None)
    exact_out, exact_grads = run(REFERENCES[op], torch.float64)
    names = ["output", *(f"gradient of {name}" for name, tensor in tensors.items() if tensor.requires_grad)]
    for name, actual, plain, exact in zip(
        names, [out, *grads], [plain_out, *plain_grads], [exact_out, *exact_grads], strict=True
    ):
        assert actual.dtype == plain.dtype, name
        largest = max(1.0, float(exact.detach().abs().max())) if exact.numel() else 0.0
        eps = torch.finfo(actual.dtype).eps
        if actual.dtype == torch.float64:
            eps *= 100  # the reference rounds too
        atol = roundings(some) * eps * largest
        testing.assert_close_to_reference(actual, plain, exact, atol=atol, name=f"{op}: {name}")
