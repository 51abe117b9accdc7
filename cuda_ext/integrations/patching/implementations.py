"""What transformers' own settings choose in a model: its attention and its experts. Others are left with a hint."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from cuda_ext.integrations import transformers
from cuda_ext.integrations.patching.report import PatchReport
from cuda_ext.integrations.transformers import NAME


class _Setting(NamedTuple):
    kind: str  # in the report
    name: str  # in the names of transformers

    @property
    def previous(self) -> str:
        return f"_cuda_ext_previous_{self.kind}"

    def of(self, config: Any) -> Any:
        return getattr(config, f"_{self.name}_implementation", None)

    def set(self, owner: Any, implementation: Any) -> None:
        getattr(owner, f"set_{self.name}_implementation")(implementation)


_ATTENTION = _Setting("attention", "attn")
_EXPERTS = _Setting("experts", "experts")


def patch_attention(model: nn.Module, report: PatchReport) -> None:
    owners = _transformers_models(model)
    for name, owner in owners.items():
        _set(_ATTENTION, name, owner, report)
    inside = tuple(f"{name}." if name else "" for name in owners)
    for name, module in model.named_modules():
        if "Attention" in type(module).__name__ and not (inside and name.startswith(inside)):
            report.left[label(name, module)] = "attention goes through SDPA: use cuda_ext.integrations.sdpa"


def patch_experts(model: nn.Module, report: PatchReport) -> None:
    for name, owner in _transformers_models(model).items():
        if any(has_experts_setting(module) for module in owner.modules()):
            _set(_EXPERTS, name, owner, report)


def unpatch_implementations(model: nn.Module) -> None:
    for owner in _transformers_models(model).values():
        for setting in (_ATTENTION, _EXPERTS):
            if (previous := owner.__dict__.pop(setting.previous, None)) is not None:
                setting.set(owner, previous)


def has_experts_setting(module: nn.Module) -> bool:
    """Whether it is the experts of a layer whose function the model's config chooses."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "is_concatenated")


def _set(setting: _Setting, name: str, owner: Any, report: PatchReport) -> None:
    if setting.of(owner.config) == NAME:
        return
    previous = _implementations(setting, owner.config)
    try:
        transformers.enable()
        setting.set(owner, NAME)
    except (AttributeError, ImportError, ValueError) as error:
        report.left[label(name, owner)] = f"{setting.kind}: {' '.join(str(error).split())[:150]}"
        return
    owner.__dict__[setting.previous] = previous
    report.add(setting.kind, label(name, owner))


def _transformers_models(model: nn.Module) -> dict[str, Any]:
    """The outermost models of transformers."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if hasattr(type(module), "set_attn_implementation") and not inside:
            found[name] = module
    return found


def _implementations(setting: _Setting, config: Any) -> dict[str, Any]:
    """Of the model ("") and of the parts of a composite one."""
    parts = {"": config, **{key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}}
    return {key: setting.of(part) for key, part in parts.items() if part is not None}


def label(name: str, module: nn.Module) -> str:
    return name or f"(the model, {type(module).__name__})"
