"""The attention of a model: switched by transformers' own setting, or left with a hint."""

from __future__ import annotations

from typing import Any

from torch import nn

from cuda_ext.integrations import transformers
from cuda_ext.integrations.patching.report import PatchReport
from cuda_ext.integrations.transformers import NAME

_PREVIOUS = "_cuda_ext_previous_attention"


def patch_attention(model: nn.Module, report: PatchReport) -> None:
    owners = _transformers_models(model)
    for name, owner in owners.items():
        if owner.config._attn_implementation == NAME:
            continue
        previous = _implementations(owner.config)
        try:
            transformers.enable()
            owner.set_attn_implementation(NAME)
        except (ImportError, ValueError) as error:
            report.left[label(name, owner)] = f"attention: {' '.join(str(error).split())[:150]}"
            continue
        owner.__dict__[_PREVIOUS] = previous
        report.add("attention", label(name, owner))
    inside = tuple(f"{name}." if name else "" for name in owners)
    for name, module in model.named_modules():
        if "Attention" in type(module).__name__ and not (inside and name.startswith(inside)):
            report.left[label(name, module)] = "attention goes through SDPA: use cuda_ext.integrations.sdpa"


def unpatch_attention(model: nn.Module) -> None:
    for owner in _transformers_models(model).values():
        if (previous := owner.__dict__.pop(_PREVIOUS, None)) is not None:
            owner.set_attn_implementation(previous)


def _transformers_models(model: nn.Module) -> dict[str, Any]:
    """The outermost models of transformers."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if hasattr(type(module), "set_attn_implementation") and not inside:
            found[name] = module
    return found


def _implementations(config: Any) -> dict[str, str]:
    """Of the model ("") and of the parts of a composite one."""
    parts = {"": config, **{key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}}
    return {key: part._attn_implementation for key, part in parts.items() if part is not None}


def label(name: str, module: nn.Module) -> str:
    return name or f"(the model, {type(module).__name__})"
