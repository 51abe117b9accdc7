"""Which models of transformers compute their loss without logits, see `logits`."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from cuda_ext.integrations.patching.fusions import is_plain
from cuda_ext.integrations.patching.implementations import label
from cuda_ext.integrations.patching.logits import HEAD
from cuda_ext.integrations.patching.report import PatchReport
from cuda_ext.integrations.patching.swapping import Swapped, swap, unswap


def patch_loss(model: nn.Module, report: PatchReport, return_logits: bool) -> None:
    for name, owner in list(model.named_modules()):
        head = _output_layer(owner)
        if head is None or not (path := next((each for each, it in owner.named_modules() if it is head), "")):
            continue
        recipe = ("loss", tuple(path.split(".")), return_logits)
        swapped = isinstance(owner, Swapped)
        if swapped and owner._cuda_ext_recipe == recipe and isinstance(head, Swapped):
            continue
        if reason := _reason(owner, head):
            report.left[f"{name}.{path}" if name else path] = f"loss: {reason}"
            continue
        if swapped:
            unswap(name, owner)
        if not isinstance(head, Swapped):
            swap(head, HEAD)
        swap(owner, recipe)
        report.add("loss", label(name, owner))


def _output_layer(owner: nn.Module) -> nn.Module | None:
    """The layer whose output is the logits of a model that also computes a loss."""
    kind: Any = type(owner)
    if hasattr(kind, "get_output_embeddings") and "labels" in inspect.signature(kind.forward).parameters:
        found: nn.Module | None = kind.get_output_embeddings(owner)
        return found
    return None


def _reason(owner: nn.Module, head: nn.Module) -> str:
    """Why the loss is left as it is; empty if it need not be."""
    if "forward" in owner.__dict__:
        return f"{type(owner).__name__} has a forward of its own, not that of its class"
    if isinstance(owner, Swapped) and owner._cuda_ext_recipe[0] != "loss":
        return f"{type(owner).__name__} is swapped for its linear layers"
    if type(head) is not nn.Linear and not isinstance(head, Swapped):
        return f"the output layer is a {type(head).__name__}"
    return "" if is_plain(head) else "the output layer has hooks or a forward of its own"
