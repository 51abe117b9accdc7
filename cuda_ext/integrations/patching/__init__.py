"""`cuda_ext.patch`: an existing model on this package's ops, with the same parameters.

    report = cuda_ext.patch(model)
    print(report)           # what runs on these ops now, and what does not and why
    cuda_ext.unpatch(model) # as before

What is swapped is recognised by what its forward computes, see `recognition`, never by the name of its class. When it
is called and something has changed since, such as a LoRA adapter, a hook or a sharded weight, its own forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cuda_ext.integrations.patching.fusions import is_linear
from cuda_ext.integrations.patching.implementations import (
    has_experts_setting,
    patch_attention,
    patch_experts,
    unpatch_implementations,
)
from cuda_ext.integrations.patching.loss import patch_loss
from cuda_ext.integrations.patching.recognition import MOST_MODULES, methods, recognised, sequential_fusions
from cuda_ext.integrations.patching.recording import NotRecognised
from cuda_ext.integrations.patching.report import PatchReport
from cuda_ext.integrations.patching.sources import activated_pairs
from cuda_ext.integrations.patching.swapping import (
    Swapped,
    gate_up_is_joined,
    join_gate_up,
    swap,
    swapped_class,
    unswap,
)
from cuda_ext.integrations.patching.verification import verified

__all__ = ["PatchReport", "patch", "unpatch"]

_Checked = dict[Any, str] | None  # the results of verification for each kind of block; None: nothing is verified


@torch.inference_mode(False)  # what is made inside it can never be trained
def patch(
    model: nn.Module,
    *,
    attention: bool = True,
    mlp: bool = True,
    loss: bool = True,
    return_logits: bool = False,
    verify: bool = True,
) -> PatchReport:
    """Makes a model compute its feed-forward layers, attention and loss with this package's ops, in place.

    Swapped are: a linear layer followed by an activation, two of them with an activation between (MLP), and gated ones
    (SwiGLU, GEGLU), each with the dropout and norm layers between and after them. Activations are those of
    `cuda_ext.gemm`. For models of transformers, attention becomes ``attn_implementation="cuda_ext"``, the experts of
    mixtures ``experts_implementation="cuda_ext"`` (`cuda_ext.mixture_of_experts`), and with
    labels those with a vocabulary compute their loss by `cuda_ext.linear_cross_entropy`, without logits, in training
    and in evaluation. They then return no logits: ``outputs.logits`` is None, and not in a tuple of outputs.

    Parameters remain the same objects under the same names, so optimizers, checkpoints and `save_pretrained` are not
    affected. The separate weights of gate and up are moved into one buffer; each keeps a storage of its own, so savers
    write both. Patching a second time swaps only what is not swapped yet, and moves gate and up together again if they
    are no longer.

    Args:
        model: any module; may itself be a block. Not yet wrapped in FSDP2 (`fully_shard`): patch first.
        attention: whether to switch the attention of a transformers model. Default True.
        mlp: whether to swap linear layers, MLPs, gated ones and experts. Default True.
        loss: whether to compute losses without logits. Default True.
        return_logits: whether to form logits, besides the loss, when labels are given. Default False.
        verify: whether to compare each kind of block with what it replaces, outputs and gradients, on a random input of
            two tokens, and to leave it if they differ. Default True. Impossible on the meta device.

    Returns:
        What was swapped and what was left, with reasons.

    Raises:
        TypeError: ``model`` is not a module.

    Example::

        model = AutoModelForCausalLM.from_config(config)
        print(cuda_ext.patch(model))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"cuda_ext.patch: expected model to be a torch.nn.Module, got {type(model).__name__}")
    report = PatchReport()
    if attention:
        patch_attention(model, report)
    if mlp:
        patch_experts(model, report)
        checked: _Checked = {} if verify else None
        for name, module in _top_down(model):
            _patch_module(name, module, report, checked)
    if loss:
        patch_loss(model, report, return_logits)
    return report


@torch.inference_mode(False)
def unpatch(model: nn.Module) -> None:
    """Makes a model compute everything as before `patch`.

    Args:
        model: as passed to `patch`; a model without anything swapped is left as it is. Gate and up get memory of their
            own again.

    Raises:
        RuntimeError: a swapped block was wrapped by something that changes its class, such as `fully_shard`.
    """
    for name, module in model.named_modules():
        if isinstance(module, Swapped):
            unswap(name, module)
    unpatch_implementations(model)


def _top_down(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but the inner ones of those that are swapped by the time the caller asks for the next."""
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module | None]] = [("", model)]
    while stack:
        name, module = stack.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        if isinstance(module, Swapped) and module._cuda_ext_recipe[0] == "block":
            recipe = module._cuda_ext_recipe
            if recipe[2] == "forward":
                continue
        children = [(_joined(name, key), child) for key, child in module._modules.items()]
        stack += reversed(children)


def _patch_module(name: str, module: nn.Module, report: PatchReport, checked: _Checked) -> None:
    previous = None
    if isinstance(module, Swapped):
        previous = module._cuda_ext_recipe
        if previous[0] != "source" or type(module) is not swapped_class(module._cuda_ext_original, previous):
            join_gate_up(module)
            return
        unswap(name, module)  # more of it may be recognised now, as after merging an adapter
    if is_linear(module) or not any(is_linear(child) for child in module.modules()):
        if _is_expert_layer(module) and not has_experts_setting(module):
            report.left[name] = "experts with one weight for all of them are not served"
        return
    if type(module).forward is nn.Sequential.forward:
        _patch_sequential(name, module, report, checked)
        return
    reason, close = "", False
    for method in methods(module) if _is_candidate(module) else []:
        try:
            fusion = recognised(module, method)
        except NotRecognised as error:
            reason, close = (reason, True) if close else (str(error), error.close)
            continue
        reason = _swapped(module, ("block", fusion, method), checked)
        if not reason:
            report.add(fusion.kind, name)
            if isinstance(module, Swapped) and not gate_up_is_joined(module):
                report.left[name] = "swapped, but its own forward runs: gate and up share memory with other tensors"
            return
    if pairs := activated_pairs(module):
        recipe = ("source", pairs)
        problem = _swapped(module, recipe, checked)
        if not problem:
            for _, linear in pairs if recipe != previous else ():
                report.add("linear + activation", _joined(name, linear))
            return
        reason, close = reason or problem, True
    if reason and (close or _looks_like_mlp(module)) and not any(name.startswith(f"{each}.") for each in report.left):
        report.left[name] = reason


def _patch_sequential(name: str, module: nn.Module, report: PatchReport, checked: _Checked) -> None:
    fusions = sequential_fusions(module)
    if not fusions:
        return
    names = tuple(module._modules)
    reason = _swapped(module, ("sequential", names, tuple(fusions.items())), checked)
    if reason:
        report.left[name] = reason
        return
    for index, fusion in fusions.items():
        report.add(fusion.kind, _joined(name, names[index]))


def _swapped(module: nn.Module, recipe: Any, checked: _Checked) -> str:
    """Swaps a block; if it then differs from what it was, undoes that and returns the difference."""
    shapes = tuple((each.shape, each.dtype, each.device, each.requires_grad) for each in module.parameters())
    key = (type(module), recipe, shapes)
    block = swap(module, recipe)
    if checked is None:
        return ""
    if key not in checked:
        checked[key] = verified(block) or ""
    if checked[key]:
        unswap("", block)
    return checked[key]


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _is_candidate(module: nn.Module) -> bool:
    overridden = type(module).forward is not nn.Module.forward
    return overridden and sum(1 for _ in module.modules()) <= MOST_MODULES


def _looks_like_mlp(module: nn.Module) -> bool:
    """Whether a reader would expect it in the report: it has linear layers and an activation."""
    lists = [each for child in module.children() if isinstance(child, nn.ModuleList) for each in child]
    own = [*module.children(), *lists]
    return any(map(is_linear, own)) and any("activation" in type(each).__module__ for each in own)


def _is_expert_layer(module: nn.Module) -> bool:
    weights = [each for each in module._parameters.values() if each is not None and each.dim() == 3]
    return len(weights) >= 2 and any("activation" in type(child).__module__ for child in module.children())
