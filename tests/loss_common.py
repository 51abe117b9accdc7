"""Helpers of the tests of the loss: operands, and the comparison with the references."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gemm_common import roundings
from torch import Tensor

import cuda_ext
from cuda_ext import testing

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REDUCTIONS = ("mean", "sum", "none")
REFERENCES: dict[str, Callable[..., Any]] = {
    "linear_cross_entropy": testing.reference_linear_cross_entropy,
    "linear_log_prob": testing.reference_linear_log_prob,
}


def operands(
    lead: Sequence[int],
    classes: int,
    features: int,
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
    spread: float = 1.0,
    grad: bool = True,
) -> dict[str, Tensor]:
    """Random operands whose logits have the standard deviation ``spread``, and random targets."""
    shapes = {"input": (*lead, features), "linear_weight": (classes, features)}
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["linear_weight"] *= spread * max(1, features) ** -0.5
    if bias:
        tensors["linear_bias"] = torch.randn(classes, dtype=torch.float64)
    leaves = {name: tensor.to(dtype).requires_grad_(grad) for name, tensor in tensors.items()}
    return {**leaves, "target": torch.randint(classes, tuple(lead))}


def probabilities(lead: Sequence[int], classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*lead, classes, dtype=torch.float64).softmax(dim=-1).to(dtype)


def with_ignored(target: Tensor, ignore_index: int = -100, fraction: float = 0.3) -> Tensor:
    """A copy with about that fraction of the targets ignored, at least one and, of two or more, not all of them."""
    chosen = torch.rand(target.shape) < fraction
    flat = chosen.view(-1)
    flat[-1:] = True
    flat[:-1][:1] = False
    target = target.clone().masked_fill_(chosen, ignore_index)
    if target.numel() > 1 and 0 <= ignore_index == int(target.view(-1)[0]):
        target.view(-1)[0] = ignore_index + 1 if ignore_index == 0 else ignore_index - 1
    return target


def run(
    function: Callable[..., Any],
    tensors: Mapping[str, Tensor],
    options: Mapping[str, Any],
    dtype: Any = None,
    factor: float = 1.0,
) -> dict[str, Tensor]:
    """The outputs of a function, and the gradients of the tensors that require one for fixed random gradients of the
    outputs; the tensors are first converted to ``dtype``, if one is given. The outputs' gradients are multiplied by
    ``factor``, and the results divided by it."""

    def leaf(tensor: Tensor) -> Tensor:
        value = tensor.detach()
        value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        return value.requires_grad_(tensor.requires_grad)

    leaves = {name: leaf(tensor) for name, tensor in tensors.items()}
    out = function(**leaves, **options)
    outputs = list(out) if isinstance(out, tuple) else [out]
    names = ["loss", *(name for name in ("lse", "entropy") if options.get(f"return_{name}"))]
    results = dict(zip(names, outputs, strict=True))
    wanted = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    if wanted:
        generator = torch.Generator(out[0].device if isinstance(out, tuple) else out.device).manual_seed(3)
        # Rounded to float32, so that every dtype of results gets the same.
        weights = [
            torch.randn(o.shape, generator=generator, device=generator.device, dtype=torch.float32).to(o.dtype) * factor
            for o in outputs
        ]
        gradients = torch.autograd.grad(outputs, list(wanted.values()), weights)
        if factor != 1.0:
            gradients = tuple(g.double() / factor for g in gradients)
        results |= {f"gradient of {name}": g for name, g in zip(wanted, gradients, strict=True)}
    return results


class Float32Products(torch.overrides.TorchFunctionMode):
    """Products of 16-bit matrices and their sums with a bias are float32, as from a kernel that stores its
    accumulators. Backward rounds the products' gradient to 16 bits, which its own products need; not the bias's."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a.float() @ b.float()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            a, b = ctx.saved_tensors
            rounded = grad.to(a.dtype).float()
            return (rounded @ b.float().t()).to(a.dtype), (a.float().t() @ rounded).to(b.dtype)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.linear:
            return function(*args, **(kwargs or {}))
        input, weight, *bias = args
        out = self.Product.apply(input.reshape(-1, input.shape[-1]), weight.t())
        out = out.reshape(*input.shape[:-1], weight.shape[0])
        return out + bias[0].float() if bias and bias[0] is not None else out


def check(tensors: Mapping[str, Tensor], op: str = "linear_cross_entropy", **options: Any) -> None:
    """Compares the outputs and gradients of an op with the reference in float64.

    The error may be twice that of plain PyTorch in the same dtype; and for 16-bit operands also twice that of PyTorch
    with `Float32Products`. Of few elements one evaluation may have next to no error by luck, so plain PyTorch adds in
    two orders, and rounds its gradients at three scales. To both come the roundings of `absolute_errors`.
    """
    reference = REFERENCES[op]
    if op == "linear_cross_entropy":
        options = {"reduction": "mean", **options}

    def backwards(**t: Any) -> Any:
        return reference(**{**t, "input": t["input"].flip(-1), "linear_weight": t["linear_weight"].flip(-1)})

    def with_float32_logits(function: Callable[..., Any]) -> Callable[..., Any]:
        def run_with_float32_logits(**t: Any) -> Any:
            with Float32Products():
                return function(**t)

        return run_with_float32_logits

    actual = run(getattr(cuda_ext, op), tensors, options)
    exact = run(reference, tensors, options, torch.float64)
    yardsticks = [(reference, backwards)]
    if tensors["input"].dtype in (torch.bfloat16, torch.float16):
        yardsticks.append((with_float32_logits(reference), with_float32_logits(backwards)))
    errors = absolute_errors(tensors, exact, options)
    fewest = min((t.numel() for name, t in exact.items() if name.startswith("gradient")), default=64)
    few = tensors["input"].dtype.itemsize == 2 and fewest < 64
    for functions in yardsticks:
        plain = [run(function, tensors, options) for function in functions]
        if few:
            plain += [run(functions[0], tensors, options, factor=factor) for factor in (1.25, 1.5)]
        for name, expected in exact.items():
            assert actual[name].dtype == plain[0][name].dtype, name
            dtype = actual[name].dtype
            if name.startswith("gradient") and torch.is_autocast_enabled("cpu"):
                dtype = torch.get_autocast_dtype("cpu")  # in which it is formed, and then converted
            testing.assert_close_to_reference(
                actual[name], [p[name] for p in plain], expected, atol=errors[name](dtype), name=name
            )


def absolute_errors(
    tensors: Mapping[str, Tensor], exact: Mapping[str, Tensor], options: Mapping[str, Any]
) -> dict[str, Callable[[torch.dtype], float]]:
    """What rounding alone may change in each result, as a function of its dtype.

    Two roundings of the result's largest element; of float16 also those of the gradients of logits, which may be
    subnormal numbers, all rounded in the same direction, as in plain PyTorch without a GradScaler; and a few of the
    largest logit, taken as the sum of its absolute terms, for the logits and their softmax have this error relative to
    theirs: times what one logit can change.
    """
    values = {n: t.detach().double() for n, t in tensors.items() if t.is_floating_point()}
    value, target = options.get, tensors["target"]
    rows, classes = max(1, math.prod(tensors["input"].shape[:-1])), tensors["linear_weight"].shape[0]

    sums = values["input"].abs() @ values["linear_weight"].abs().t()
    if "linear_bias" in values:
        sums = sums + values["linear_bias"].abs().nan_to_num(posinf=0.0)
    largest = abs(value("scale", 1.0)) * float(sums.max()) if sums.numel() else 0.0
    if value("softcap", 0.0) > 0.0:
        largest = min(largest, options["softcap"])  # its derivative falls faster than the logit grows
    largest = max(1.0, largest)

    # How fast the loss of a row can change with its logits, for a gradient of one.
    row = float(values["weight"].abs().max()) if "weight" in values else 1.0
    counted = torch.ones((), dtype=torch.float64).expand(rows)
    if target.is_floating_point():
        row *= max(1.0, float(values["target"].sum(-1).max())) if target.numel() else 1.0
    else:
        kept = target[target != value("ignore_index", -100)]
        counted = values["weight"][kept] if "weight" in values else torch.ones(kept.shape, dtype=torch.float64)
    mean = value("reduction") == "mean" and counted.sum() != 0.0
    share = row / abs(float(counted.sum())) if mean else row
    slope = 1.0 + 2.0 * value("z_loss", 0.0) * largest
    more = (1.0 + math.log(classes)) if value("return_entropy") else 1.0
    total = share * rows if value("reduction", "none") != "none" else row

    size = {"loss": total * slope, "lse": 1.0, "entropy": 1.0 + math.log(classes)}
    each = abs(value("scale", 1.0)) * more * max(share * slope, float("lse" in exact or "entropy" in exact))
    # Of a class that has all the probability, the rows' errors have one direction, and the weights sum them.
    for name, other, terms in (("input", "linear_weight", 1), ("linear_weight", "input", rows)):
        largest_other = float(values[other].abs().max()) if values[other].numel() else 1.0
        size[f"gradient of {name}"] = each * terms * largest_other
    size["gradient of linear_bias"] = each * rows
    subnormal: dict[str, float] = {}
    if tensors["input"].dtype == torch.float16:
        half = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps / 2
        for name, other, count in (("input", "linear_weight", classes), ("linear_weight", "input", rows)):
            largest_other = float(values[other].abs().max()) if values[other].numel() else 0.0
            subnormal[f"gradient of {name}"] = half * count * largest_other
        subnormal["gradient of linear_bias"] = half * rows

    def error_of(name: str) -> Callable[[torch.dtype], float]:
        element = float(exact[name].detach().abs().nan_to_num(0.0, 0.0).max()) if exact[name].numel() else 0.0
        double = tensors["input"].dtype == torch.float64
        # The reference rounds float64 too.
        logit = largest * (100 * torch.finfo(torch.float64).eps if double else torch.finfo(torch.float32).eps)
        rounded = roundings(tensors["input"]) * logit * size[name] + subnormal.get(name, 0.0)
        return lambda dtype: torch.finfo(dtype).eps * element + rounded

    return {name: error_of(name) for name in exact}


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers in memory laid out in another way."""
    value = tensor.detach()
    if layout == "transposed" and value.dim() >= 2:
        value = value.mT.contiguous().mT
    elif layout == "padded":
        value = torch.nn.functional.pad(value, (0, 3))[..., :-3]
    elif layout == "every other":
        value = value.repeat_interleave(2, dim=-1)[..., ::2]
    elif layout == "shifted":
        value = torch.cat([value.new_zeros(1), value.flatten()])[1:].view(value.shape)
    assert torch.equal(value, tensor)
    return value.requires_grad_(tensor.requires_grad)
