"""Compares a swapped block with its own forward: a second proof, after the recording, that both compute the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cuda_ext.integrations.patching.blocks import activated, run
from cuda_ext.integrations.patching.fusions import Path, is_transposed, module_at
from cuda_ext.integrations.patching.swapping import Swapped

# Of the norm of a result, in roundings of the dtype: sums in another order, and for 16 bits the intermediate roundings
# that fusing leaves out. A block that computes something else differs by far more.
ROUNDINGS = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 4, torch.float16: 16}


class _Comparison(NamedTuple):
    first: nn.Module  # the linear layer that takes the input
    parts: list[nn.Module]  # all that takes part
    old: Callable[[Tensor], Tensor]
    new: Callable[[Tensor], Tensor | None]


def verified(block: Swapped) -> str | None:
    """Why outputs or gradients of a swapped block differ from those of its own forward; None if they do not.

    In training and in evaluation mode, with the same dropout, on a random input of two tokens.
    """
    for comparison in _comparisons(block):
        weight: Tensor = comparison.first.weight  # type: ignore[assignment]
        parameters = [each for part in comparison.parts for each in part.parameters()]
        if weight.dtype not in ROUNDINGS or any(type(each) is not nn.Parameter or each.is_meta for each in parameters):
            continue
        if problem := _problem(comparison, weight):
            return problem
    return None


def _comparisons(block: Swapped) -> Iterator[_Comparison]:
    recipe, original = block._cuda_ext_recipe, block._cuda_ext_original
    if recipe[0] == "block":
        old, new = (functools.partial(getattr(kind, recipe[2]), block) for kind in (original, type(block)))
        yield _Comparison(_child(block, recipe[1].linears[0]), [block], old, new)
    elif recipe[0] == "sequential":
        for index, fusion in recipe[2]:
            parts = [_child(block, (name,)) for name in recipe[1][index : index + 2 + len(fusion.chain)]]
            yield _Comparison(
                parts[0], parts, functools.partial(_one_by_one, parts), functools.partial(run, block, fusion)
            )
    else:
        for one, two in recipe[1]:
            parts = [_child(block, (two,)), _child(block, (one,))]
            yield _Comparison(
                parts[0], parts, functools.partial(_one_by_one, parts), functools.partial(activated, *parts)
            )


def _child(block: nn.Module, path: Path) -> nn.Module:
    module = module_at(block, path)
    assert module is not None
    return module


def _one_by_one(parts: list[nn.Module], x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x


def _problem(comparison: _Comparison, weight: Tensor) -> str | None:
    modes = {module: module.training for part in comparison.parts for module in part.modules()}
    devices = [weight.device] if weight.is_cuda else []
    features = weight.shape[0 if is_transposed(comparison.first) else 1]
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            for training in (False, True):
                for module in modes:
                    module.training = training
                if problem := _difference(comparison, torch.randn(1, 2, features).to(weight.device, weight.dtype)):
                    return problem
    except Exception as error:
        return f"with this package's op it raises {type(error).__name__}: {' '.join(str(error).split())[:150]}"
    finally:
        for module, training in modes.items():
            module.training = training
    return None


def _difference(comparison: _Comparison, x: Tensor) -> str | None:
    leaves = {"the input": x.requires_grad_()}
    for part in comparison.parts:
        leaves.update((name, each) for name, each in part.named_parameters() if each.requires_grad)
    seed = int(torch.randint(2**31, ()))
    results = []
    gradient = None
    for forward in (comparison.old, comparison.new):
        torch.manual_seed(seed)
        out = forward(x)
        if out is None:
            return None  # the fusion does not apply now, and may later
        gradient = torch.randn_like(out) if gradient is None else gradient
        gradients = torch.autograd.grad(out, list(leaves.values()), gradient, allow_unused=True)
        results.append({"output": out.detach(), **{f"gradient of {n}": g for n, g in zip(leaves, gradients)}})
    tolerance = ROUNDINGS[x.dtype] * _rounding(x.dtype)
    for name, expected in results[0].items():
        actual = results[1][name]
        if (expected is None) != (actual is None):
            return f"verification: only one of both has a {name}"
        if expected is None or actual is None:
            continue
        error, size = (float(torch.linalg.vector_norm(each.double())) for each in (actual - expected, expected))
        if not error <= tolerance * size + torch.finfo(x.dtype).tiny:
            return f"verification: its {name} differs by {error / max(size, 1e-300):.1e} of its norm"
    return None


def _rounding(dtype: torch.dtype) -> float:
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-8  # products may be of bfloat16
    return torch.finfo(dtype).eps
