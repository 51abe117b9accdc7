"""The tolerance rule: how close an op must be to its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["assert_close_to_reference", "assert_op_matches_reference"]


def assert_close_to_reference(
    actual: Tensor,
    low_precision: Tensor | Sequence[Tensor],
    reference: Tensor,
    *,
    factor: float = 2.0,
    atol: float | None = None,
    name: str = "output",
) -> None:
    """Asserts ``max|actual - reference| <= factor * max|low_precision - reference| + atol``.

    ``low_precision`` is the plain PyTorch evaluation in the dtype of ``actual``, or several, of which the largest error
    counts; ``reference`` the same in float64 (or float32). The default ``atol`` is ``eps(actual.dtype) *
    max|reference|``, two roundings of the largest element; it matters if ``low_precision`` happens to be exact, or
    nearly so. For a float64 ``actual``, which has no reference of higher precision, it is ``1e-12 * max(1,
    max|reference|)``: thousands of roundings, but far below the error of a wrong formula. ``actual`` must be NaN or
    infinite exactly where ``reference``, rounded to ``actual.dtype``, has the same value; such elements of
    ``reference`` and of ``low_precision`` are left out of the maxima.

    Raises AssertionError with the largest error, its position, and both values there.
    """
    plain = [low_precision] if isinstance(low_precision, Tensor) else list(low_precision)
    if any(tensor.shape != reference.shape for tensor in (actual, *plain)):
        raise AssertionError(
            f"{name}: expected shape {tuple(reference.shape)}, got {tuple(actual.shape)} "
            f"(plain PyTorch: {tuple(plain[0].shape)})"
        )
    if actual.numel() == 0:
        return
    actual, reference = actual.detach(), reference.detach()
    rounded = reference.to(actual.dtype)
    finite = rounded.isfinite()
    same_special = torch.where(finite, actual.isfinite(), (actual == rounded) | (actual.isnan() & rounded.isnan()))
    if not same_special.all():
        position = _unravel(int((~same_special).flatten().nonzero()[0]), actual.shape)
        count = int((~same_special).sum())
        raise AssertionError(
            f"{name}: {actual[position].item()} at {position}, expected {reference[position].item()} "
            f"({count} such elements)"
        )

    exact = reference.double()
    if atol is None and actual.dtype == torch.float64:
        atol = 1e-12 * max(1.0, float(exact.abs().where(finite, 0.0).max()))
    elif atol is None:
        atol = torch.finfo(actual.dtype).eps * float(exact.abs().where(finite, 0.0).max())
    error = (actual.double() - exact).abs().where(finite, 0.0)
    plain_error = max(
        float((tensor.detach().double() - exact).abs().where(finite & tensor.isfinite(), 0.0).max()) for tensor in plain
    )
    worst = int(error.argmax())
    position, largest = _unravel(worst, actual.shape), float(error.flatten()[worst])
    if largest > factor * plain_error + atol:
        raise AssertionError(
            f"{name}: largest error {largest:.3e} at {position} (got {actual[position].item():.6g}, "
            f"expected {reference[position].item():.6g}) exceeds {factor:g} x {plain_error:.3e} "
            f"(plain PyTorch in {plain[0].dtype}) + {atol:.3e}"
        )


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        index, remainder = divmod(index, size)
        position.append(remainder)
    return tuple(reversed(position))


def assert_op_matches_reference(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    tensors: Mapping[str, Tensor | None],
    options: Mapping[str, Any] | None = None,
    *,
    reference_options: Mapping[str, Any] | None = None,
    also: Sequence[Callable[..., Any]] = (),
    factor: float = 2.0,
    gradient_factor: float = 2.0,
    atol: float | None = None,
    gradient_atol: Mapping[str, float] | None = None,
) -> None:
    """Compares an op and its gradients with a reference, by the rule of `assert_close_to_reference`.

    ``tensors`` and ``options`` become keyword arguments of both functions; ``reference_options`` only of the reference
    (``seed`` and ``offset`` of dropout). ``also`` are functions like ``reference`` that add in other orders: of few
    elements one evaluation may have next to no error by luck. ``gradient_atol`` overrides ``atol`` for the gradients of
    the tensors in it. Runs ``op``, then ``reference`` in the same dtypes, then ``reference`` with the floating-point
    tensors in float64. Outputs may be a tensor or a tuple. Compares the gradients of all tensors with
    ``requires_grad``, for random gradients of the outputs (drawn from torch's global generator).
    """
    options = dict(options or {})
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def run(
        function: Callable[..., Any], extra: Mapping[str, Any], dtype: torch.dtype | None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        arguments = {name: _fresh_leaf(tensor, dtype) for name, tensor in given.items()}
        result = function(**arguments, **extra)
        outputs = list(result) if isinstance(result, tuple) else [result]
        return outputs, {name: tensor for name, tensor in arguments.items() if tensor.requires_grad}

    double_options = {k: torch.float64 if isinstance(v, torch.dtype) else v for k, v in options.items()}
    extra = dict(reference_options or {})
    actual, actual_leaves = run(op, options, None)
    plain = [run(function, {**options, **extra}, None) for function in (reference, *also)]
    exact, exact_leaves = run(reference, {**double_options, **extra}, torch.float64)
    for n, (a, e, *p) in enumerate(zip(actual, exact, *(outputs for outputs, _ in plain), strict=True)):
        assert a.dtype == p[0].dtype, f"output {n}: expected {p[0].dtype}, got {a.dtype}"
        assert_close_to_reference(a, p, e, factor=factor, atol=atol, name=f"output {n}")
    if not actual_leaves:
        return

    grad_outputs = [torch.randn(a.shape, dtype=torch.float64, device=a.device).to(a.dtype) for a in actual]

    def gradients(outputs: list[Tensor], leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
        weighted = [g.to(o.dtype) for o, g in zip(outputs, grad_outputs, strict=True)]
        return torch.autograd.grad(outputs, list(leaves.values()), weighted)

    computed = [gradients(*pair) for pair in ((actual, actual_leaves), (exact, exact_leaves), *plain)]
    for name, a, e, *p in zip(actual_leaves, *computed, strict=True):
        assert a.dtype == p[0].dtype, f"gradient of {name}: expected {p[0].dtype}, got {a.dtype}"
        own_atol = (gradient_atol or {}).get(name, atol)
        assert_close_to_reference(a, p, e, factor=gradient_factor, atol=own_atol, name=f"gradient of {name}")


def _fresh_leaf(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A new leaf with the values and, unless the dtype changes, the strides of ``tensor``."""
    leaf = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        leaf = leaf.to(dtype, copy=True)
    return leaf.requires_grad_(tensor.requires_grad)
