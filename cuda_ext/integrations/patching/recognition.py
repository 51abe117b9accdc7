"""Which blocks this package's ops can compute, by what their forward computes and not by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cuda_ext._activations import NAMES, activation_of, listed
from cuda_ext.integrations.patching.fusions import (
    Fusion,
    Path,
    is_linear,
    is_transposed,
    module_at,
)
from cuda_ext.integrations.patching.recording import Expression, NotRecognised, Recording

MOST_MODULES = 16  # of a block: larger ones are no MLP, but have some inside
METHODS = ("forward", "_ff_block")  # the second is that of nn.TransformerEncoderLayer and nn.TransformerDecoderLayer
LINEAR, ACTIVATED = "linear", "activation"


class Core(NamedTuple):
    linears: tuple[Path, ...]
    gated: bool
    activation: str
    activation_path: Path | None


def _activated(e: Expression) -> Core | None:
    """activation(linear(input))"""
    if e[0] == ACTIVATED and e[3][0] == LINEAR and e[3][2] == ("input",):
        return Core((e[3][1],), False, e[1], e[2])
    return None


def _gated_by_two(e: Expression) -> Core | None:
    """activation(gate(input)) * up(input)"""
    for one, two in _factors(e):
        gate = _activated(one)
        if gate is not None and two[0] == LINEAR and two[2] == ("input",) and two[1] != gate.linears[0]:
            return Core((gate.linears[0], two[1]), True, gate.activation, gate.activation_path)
    return None


def _gated_by_one(e: Expression) -> Core | None:
    """activation(gate) * up with gate, up = linear(input).chunk(2, -1)"""
    for one, two in _factors(e):
        if one[0] == ACTIVATED and one[3][0] == two[0] == "half" and one[3][2] is two[2]:
            gate_up = two[2]
            if gate_up[0] != LINEAR or gate_up[2] != ("input",) or one[3][1] == two[1]:
                continue
            if one[3][1] == 1:
                raise NotRecognised(
                    f"the gate is in the last rows of {'.'.join(gate_up[1])}; cuda_ext.gated_linear has it in the "
                    "first",
                    close=True,
                )
            return Core((gate_up[1],), True, one[1], one[2])
    return None


# One row per kind of block; a chain of modules may follow each.
CORES: tuple[Callable[[Expression], Core | None], ...] = (_activated, _gated_by_two, _gated_by_one)


def _factors(e: Expression) -> Iterator[tuple[Expression, Expression]]:
    if e[0] == "product":
        yield e[1], e[2]
        yield e[2], e[1]


def _matched(expression: Expression) -> tuple[Core, tuple[Path | float, ...]]:
    chain: list[Path | float] = []
    while True:
        core = next((found for row in CORES if (found := row(expression)) is not None), None)
        if core is not None:
            return core, tuple(reversed(chain))
        kind = expression[0]
        if kind in ("module", LINEAR, "dropout"):
            chain.append(expression[1])
            expression = expression[2]
        elif kind == ACTIVATED and expression[2] is not None:
            chain.append(expression[2])
            expression = expression[3]
        else:
            raise NotRecognised("it is neither an activated nor a gated linear layer of its input", close=True)


def _second(block: nn.Module, chain: tuple[Path | float, ...]) -> Path | None:
    """The linear layer that only dropout or nothing separates from the first."""
    for step in chain:
        if isinstance(step, float):
            continue
        module = module_at(block, step)
        if is_linear(module):
            return step
        if not isinstance(module, nn.Dropout | nn.Identity):
            return None
    return None


def recognised(block: nn.Module, method: str) -> Fusion:
    """The fusion of a block; raises NotRecognised with a reason. Runs its forward, without gradients, on two tokens in
    training and in evaluation mode."""
    modules = list(block.modules())
    if any(True for _ in block.buffers()):
        raise NotRecognised("it has buffers")
    modes = {module: module.training for module in modules}
    try:
        fusions = []
        for training in (False, True):
            for module in modules:
                module.training = training
            fusions.append(_recorded(block, method))
    finally:
        for module, training in modes.items():
            module.training = training
    if fusions[0] != fusions[1]:
        raise NotRecognised("its forward computes something else in training than in evaluation")
    return fusions[0]


def _recorded(block: nn.Module, method: str) -> Fusion:
    first = next(module for module in block.modules() if is_linear(module))
    weight: Tensor = first.weight  # type: ignore[assignment]
    sizes = dict.fromkeys(_features(module) for module in block.modules() if is_linear(module))
    failure = None
    devices = [weight.device] if weight.device.type == "cuda" else []
    for features in sizes:
        with torch.random.fork_rng(devices):
            sample = torch.randn(1, 2, features).to(weight.device, weight.dtype)
            recording = Recording(block)
            try:
                expression = recording.run(method, sample)
                _check_activation(block, expression)
                core, chain = _matched(expression)
            except NotRecognised as error:
                failure = error
                continue
            except (
                Exception
            ) as error:  # of the block's own code, for example because this size is not that of its input
                text = " ".join(str(error).split())
                failure = failure or NotRecognised(f"its forward raises {type(error).__name__}: {text[:100]}")
                continue
        second = _second(block, chain)
        _check_innermost(block, core, second)
        attributes = tuple((path, name, value) for (path, name), value in recording.attributes.items())
        return Fusion(
            linears=core.linears,
            gated=core.gated,
            activation=core.activation,
            activation_path=core.activation_path,
            chain=chain,
            inlined=tuple((path, type(module)) for path, module in recording.inlined.items() if path),
            attributes=attributes,
            reads_dtype=recording.reads_dtype,
            device=weight.device.type if recording.reads_device else None,
            second=second,
        )
    assert failure is not None
    raise failure


def _check_activation(block: nn.Module, e: Expression) -> None:
    """Names an activation that the ops do not have."""
    if e[0] == "module" and e[2][0] in (LINEAR, "half"):
        module = module_at(block, e[1])
        if "activation" in type(module).__module__:
            name = f"{'.'.join(e[1])} ({type(module).__name__})"
            raise NotRecognised(f"its activation {name} is none of {listed(NAMES, 'and')}", close=True)
    for each in e[1:]:
        if isinstance(each, tuple) and each and each[0] in (LINEAR, ACTIVATED, "module", "dropout", "half", "product"):
            _check_activation(block, each)


def _check_innermost(block: nn.Module, core: Core, second: Path | None) -> None:
    """Leaves to a part of the block what that part computes alone."""
    paths = [*core.linears, *([second] if second else []), *([core.activation_path] if core.activation_path else [])]
    for length in range(1, min(map(len, paths))):
        prefix = paths[0][:length]
        part = module_at(block, prefix)
        if (
            all(path[:length] == prefix for path in paths)
            and getattr(type(part), "forward", None) is not nn.Module.forward
        ):
            raise NotRecognised(f"its part {'.'.join(prefix)} computes it")


def _features(module: nn.Module) -> int:
    weight: Any = module.weight
    return int(weight.shape[0 if is_transposed(module) else 1])


def methods(module: nn.Module) -> list[str]:
    """The methods of a module that may be a block's forward: they take one tensor."""
    return [name for name in METHODS if callable(getattr(type(module), name, None)) and _takes_one(module, name)]


def _takes_one(module: nn.Module, name: str) -> bool:
    try:
        inspect.signature(getattr(module, name)).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def sequential_fusions(module: nn.Module) -> dict[int, Fusion]:
    """The runs of children of an nn.Sequential that one op computes, by the index of the first."""
    names = list(module._modules)
    children = list(module._modules.values())
    found: dict[int, Fusion] = {}
    index = 0
    while index < len(children) - 1:
        name = activation_of(children[index + 1])
        if not is_linear(children[index]) or name is None:
            index += 1
            continue
        end = index + 2
        while end < len(children) and isinstance(children[end], nn.Dropout | nn.Identity):
            end += 1
        end = end + 1 if end < len(children) and is_linear(children[end]) else index + 2
        # The last linear layer of a run may be followed by an activation: then it starts a run of its own.
        if end > index + 2 and end < len(children) and activation_of(children[end]) is not None:
            end = index + 2
        chain = tuple((each,) for each in names[index + 2 : end])
        found[index] = Fusion(
            ((names[index],),), False, name, (names[index + 1],), chain, second=chain[-1] if chain else None
        )
        index = end
    return found
