"""The experts function of `experts_implementation="cuda_ext"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

from cuda_ext._activations import activation_of
from cuda_ext._experts import Gate, mixture_of_experts
from cuda_ext._fp8_recipes import EXPERTS_RECIPES
from cuda_ext.fp8 import ConvertibleLayer, convertible_layers
from cuda_ext.integrations.transformers.names import NAME, counter

__all__ = ["experts_forward"]


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of one layer; called by transformers' models.

    Args:
        module: the experts, whose attributes say how weights are laid out.
        hidden_states: `(tokens, K)`.
        top_k_index: `(tokens, k)`. Ids from the number of experts on are those of other ranks.
        top_k_weights: `(tokens, k)`.

    Returns:
        `(tokens, K)`.
    """
    if module.has_post_expert_norm:
        counter.refused("experts with a norm after each: computed by 'grouped_mm'")
        return moe.grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    counter.served("mixture_of_experts")
    up = "gate_up_proj" if module.has_gate else "up_proj"
    w_up, w_down = getattr(module, up), module.down_proj
    if module.is_transposed:
        w_up, w_down = w_up.mT, w_down.mT
    return mixture_of_experts(
        hidden_states.to(w_up.dtype),
        top_k_index,
        top_k_weights,
        w_up,
        w_down,
        getattr(module, f"{up}_bias") if module.has_bias else None,
        module.down_proj_bias if module.has_bias else None,
        activation=_gate_of(module),
        gated=module.has_gate,
        fp8=getattr(module, "fp8", None),
    ).to(hidden_states.dtype)


def _convertible(module: torch.nn.Module) -> ConvertibleLayer | None:
    """Of experts that have `experts_implementation`; `cuda_ext.fp8.convert` sets their attribute `fp8`."""
    experts: Any = module
    if not all(hasattr(experts, name) for name in ("has_gate", "is_transposed", "has_post_expert_norm", "config")):
        return None
    obstacle = ""
    if experts.config._experts_implementation != NAME:
        obstacle = f"experts of {experts.config._experts_implementation!r}: call cuda_ext.patch(model) first"
    elif experts.has_post_expert_norm or callable(_gate_of(experts)):
        obstacle = "experts with a norm or a gate of their own"
    down = experts.down_proj.mT if experts.is_transposed else experts.down_proj
    return ConvertibleLayer((down.shape[1], down.shape[2]), EXPERTS_RECIPES, obstacle)


convertible_layers.append(_convertible)


def _gate_of(module: Any) -> str | Gate:
    """By name where the function has one, so that little is kept for backward; else the function itself."""
    gate: Gate = module._apply_gate if module.has_gate else module.act_fn
    if module.has_gate and (type(module)._apply_gate is not moe._default_apply_gate or not module.is_concatenated):
        return gate
    activation = module.act_fn
    if not isinstance(activation, torch.nn.Module) or activation._forward_hooks or activation._forward_pre_hooks:
        return gate
    return activation_of(activation) or gate
