"""The classes of swapped blocks.

A block is swapped by giving it a subclass of its class. So parameters, names, hooks of the block, `isinstance`, copies,
`torch.save` and wrappers that change the class again, as FSDP2 does, work as before.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import nn

from cuda_ext.integrations.patching.blocks import run
from cuda_ext.integrations.patching.fusions import Fusion, module_at
from cuda_ext.integrations.patching.gate_up import are_adjacent, lay_adjacent, lay_apart
from cuda_ext.integrations.patching.logits import FLAG, head_forward, model_forward
from cuda_ext.integrations.patching.sources import HELPER, activated_in, rewritten


class Swapped(nn.Module):
    """The first base of the class of each swapped block."""

    _cuda_ext_original: type[nn.Module]
    _cuda_ext_recipe: Any  # what `swapped_class` made the class from, besides the original

    def _get_name(self) -> str:
        name = self._cuda_ext_original.__name__
        # transformers' Trainer looks up the name of a model.
        return name if self._cuda_ext_recipe[0] == "loss" else f"{name}[cuda_ext]"

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        join_gate_up(self)  # .to() and .cuda() give each parameter its own memory
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        join_gate_up(self)  # so does copy.deepcopy

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new, (self._cuda_ext_original, self._cuda_ext_recipe), *reduced[2:])


def _reduced_to_send(block: Swapped) -> Any:
    """For another process, which shares each storage. CUDA can share only memory from the start of an allocation."""
    separate_gate_up(block)
    make, arguments, state, *_ = block.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return make, arguments, state, None, None, _set_state


def _set_state(block: Swapped, state: Any) -> None:
    super(Swapped, block).__setstate__(state)  # does not join gate and up, which would move what is shared


def _new(original: type[nn.Module], recipe: Any) -> nn.Module:
    kind = swapped_class(original, recipe)
    return kind.__new__(kind)


def join_gate_up(block: Swapped) -> bool:
    """Lays gate and up in one buffer, if the block has both; returns whether it reads them without a copy."""
    gate_up = _gate_and_up(block)
    if gate_up is None:
        return True
    if any(type(each) is not nn.Linear for each in gate_up):
        return False
    return lay_adjacent(*gate_up)


def gate_up_is_joined(block: Swapped) -> bool:
    gate_up = _gate_and_up(block)
    return gate_up is None or are_adjacent(gate_up[0].weight, gate_up[1].weight)


def _gate_and_up(block: Swapped) -> Any:
    """The two separate layers; None if the block has not both."""
    recipe = block._cuda_ext_recipe
    if recipe[0] != "block" or len(recipe[1].linears) == 1:
        return None
    return [module_at(block, path) for path in recipe[1].linears]


def separate_gate_up(block: Swapped) -> None:
    """Undoes `join_gate_up`."""
    gate_up = _gate_and_up(block)
    if gate_up is not None and all(type(each) is nn.Linear for each in gate_up):
        lay_apart(*gate_up)


def swapped_class(original: type[nn.Module], recipe: Any) -> Any:
    """The class of a swapped block. ``recipe``: ("block", fusion, name of the method), ("sequential", names of the
    children, ((index, fusion), ...)), ("source", pairs), see `sources`; of a model ("loss", path of its output layer,
    whether it returns logits) and of that layer ("head",), see `logits`."""
    key: Any = original  # mypy does not know that classes are hashable
    return _class(key, recipe)


@functools.cache
def _class(original: Any, recipe: Any) -> Any:
    kind = recipe[0]
    if kind == "block":
        name, method = recipe[2], _block_method(getattr(original, recipe[2]), recipe[1])
    elif kind == "sequential":
        name, method = "forward", _sequential_forward(original.forward, recipe[1], dict(recipe[2]))
    elif kind == "head":
        name, method = "forward", head_forward(original.forward)
    elif kind == "loss":
        name, method = "forward", model_forward(original.forward, recipe[1], recipe[2])
    else:
        name, method = "forward", rewritten(original, recipe[1])
    members = {
        name: method,
        HELPER: activated_in,
        FLAG: False,
        "_cuda_ext_original": original,
        "_cuda_ext_recipe": recipe,
        # The name is that of the original: wrapping policies and device maps name classes.
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    made = type(original.__name__, (Swapped, original), members)
    ForkingPickler.register(made, _reduced_to_send)
    return made


def _block_method(original: Callable[..., Any], fusion: Fusion) -> Callable[..., Any]:
    # A fusion is for one tensor; further arguments that are None by default may be given as None.
    optional = [each.default is None for each in list(inspect.signature(original).parameters.values())[2:]]
    count = optional.index(False) if False in optional else len(optional)

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if 1 <= len(args) <= 1 + count and not kwargs and all(each is None for each in args[1:]):
            out = run(self, fusion, args[0])
            if out is not None:
                return out
        return original(self, *args, **kwargs)

    return method


def _sequential_forward(
    original: Callable[..., Any], names: tuple[str, ...], fusions: dict[int, Fusion]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, input: Any) -> Any:
        if tuple(self._modules) != names:  # a slice, or a child was added
            return original(self, input)
        index = 0
        while index < len(names):
            fusion = fusions.get(index)
            out = run(self, fusion, input) if fusion is not None else None
            if out is None or fusion is None:
                input = self._modules[names[index]](input)  # type: ignore[misc]
                index += 1
            else:
                input = out
                index += 2 + len(fusion.chain)
        return input

    return forward


def swap(block: nn.Module, recipe: Any) -> Swapped:
    swapped: Any = block
    object.__setattr__(block, "__class__", swapped_class(type(block), recipe))
    join_gate_up(swapped)
    return swapped


def unswap(name: str, block: Swapped) -> None:
    kind, original = type(block), block._cuda_ext_original
    if kind is not swapped_class(original, block._cuda_ext_recipe):
        raise RuntimeError(
            f"cuda_ext.unpatch: expected {name or 'the model'} to be of the class that patch gave it, got "
            f"{kind.__module__}.{kind.__qualname__}, a subclass; undo what wrapped it, or unpatch before wrapping"
        )
    separate_gate_up(block)
    block.__dict__.pop(FLAG, None)
    object.__setattr__(block, "__class__", original)
