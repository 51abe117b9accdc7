"""What a swapped block computes, as data: the fusions that `recognition` makes and `blocks` runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from cuda_ext._activations import ACTIVATIONS

Path = tuple[str, ...]  # of a module inside its block: ("net", "0", "proj")

FUNCTIONS = {call: name for name, each in ACTIVATIONS.items() if name for call in each.calls}
ABSENT = ...  # the value in a fusion of an attribute that did not exist


class Fusion(NamedTuple):
    """``chain`` applied to an activated or gated linear layer of the input of a block."""

    linears: tuple[Path, ...]  # one, or gate and up
    gated: bool  # with one linear layer: its first rows are the gate
    activation: str
    activation_path: Path | None  # None: a function
    chain: tuple[Path | float, ...] = ()  # modules, and the probabilities of calls of F.dropout
    inlined: tuple[tuple[Path, type], ...] = ()  # modules between the block and its leaves, whose forward was followed
    attributes: tuple[tuple[Path, str, Any], ...] = ()  # what the forwards read: the fusion holds while these are equal
    reads_dtype: bool = False
    device: str | None = None  # the type of device, if the forward reads it

    @property
    def kind(self) -> str:
        core = "gated linear" if self.gated else "linear + activation"
        return core if not self.second else "gated MLP" if self.gated else "MLP"

    second: Path | None = None  # the linear layer in the chain that joins the first one in one op


def module_at(block: nn.Module, path: Path) -> nn.Module | None:
    found: nn.Module | None = block
    for name in path:
        found = None if found is None else found._modules.get(name)
    return found


def is_linear(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module | None) -> bool:
    """Whether it is the linear layer of GPT-2, whose weight is (K, N)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_plain(module: nn.Module) -> bool:
    """Whether a call does nothing but the forward of its class: neither hooks nor a forward of its own."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def does_nothing(module: nn.Module) -> bool:
    """Whether leaving out a call changes nothing."""
    kind = type(module)
    off = kind is nn.Identity or (kind is nn.Dropout and (not module.training or module.p == 0))
    return bool(off) and is_plain(module)
