"""`attn_implementation="cuda_ext"` and `experts_implementation="cuda_ext"` for the models of the transformers library.

    import cuda_ext
    cuda_ext.integrations.transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="cuda_ext")
    model.set_attn_implementation("cuda_ext")  # or later
    model.set_experts_implementation("cuda_ext")  # mixtures of experts

docs/transformers.md says what is served and how fast it is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from cuda_ext._switch import Enabled, Switch
from cuda_ext.integrations.transformers.names import NAME, counter
from cuda_ext.integrations.transformers.sharding import shard_batch

__all__ = ["NAME", "calls", "disable", "enable", "shard_batch"]


def enable() -> Enabled:
    """Registers the attention implementation `"cuda_ext"` in transformers and, where it has that setting, the experts
    implementation `"cuda_ext"`.

    Models are not changed: a model uses them if it is created with `attn_implementation="cuda_ext"` and
    `experts_implementation="cuda_ext"`, or told by `model.set_attn_implementation("cuda_ext")` and
    `model.set_experts_implementation("cuda_ext")`. A second call changes nothing.

    Returns:
        An object for `with`: at the end of the block the implementation is unregistered, unless something else has
        enabled it. Blocks may be nested, and overlap in several threads. Without `with`, it stays registered until
        `disable`.

    Raises:
        ImportError: transformers is not installed, or its version is not supported (5 or newer).

    Example::

        with cuda_ext.integrations.transformers.enable():
            model = LlamaForCausalLM._from_config(config, attn_implementation="cuda_ext")
            model(input_ids)
        print(cuda_ext.integrations.transformers.calls())
    """
    return _switch.turn_on()


def disable() -> None:
    """Unregisters what `enable` registered, at the end of the `with` blocks that are running.

    A model that is still set to `"cuda_ext"` raises `KeyError` when it runs; choose other implementations for it by
    `model.set_attn_implementation("sdpa")` and `model.set_experts_implementation("grouped_mm")`. Does nothing if
    `enable` was not called.
    """
    _switch.turn_off()


def calls(*, reset: bool = False) -> dict[str, dict[str, int]]:
    """How many attention calls and calls of experts of models set to `"cuda_ext"`, and losses of models that
    `cuda_ext.patch` has changed, were served, by which op and form, and how many were not.

    Args:
        reset: start at 0 again.

    Returns:
        Two dicts, `served` and `refused`. The keys of `served` name the op and the form of the mask, such as
        `"flash_attention"` or `"flash_attention_varlen: padding"`; those of `refused` are the reasons of the errors
        that were raised, the operation for which a loss has formed logits, or why experts were left to
        transformers. A call in compiled code counts once for each compilation, not for each run. Attention that a model
        computes without transformers' registry is not counted.

    Example::

        >>> calls()
        {'served': {'flash_attention': 24}, 'refused': {}}
    """
    return counter.report(reset=reset)


def _registries() -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
    """The registered functions for attention and for masks, which all models share."""
    try:
        modeling = importlib.import_module("transformers.modeling_utils")
        masking = importlib.import_module("transformers.masking_utils")
    except ImportError as error:
        raise ImportError(
            "cuda_ext.integrations.transformers needs the package transformers, version 5 or newer: "
            "pip install 'transformers>=5'"
        ) from error
    if "q_length" not in inspect.signature(masking.sdpa_mask).parameters:
        raise ImportError(
            "cuda_ext.integrations.transformers needs transformers 5 or newer, got "
            f"{importlib.import_module('transformers').__version__}: pip install -U 'transformers>=5'"
        )
    # `register` has no counterpart that unregisters.
    return modeling.AttentionInterface._global_mapping, masking.AttentionMaskInterface._global_mapping


def _experts() -> dict[str, Callable[..., Any]]:
    """The registered functions for experts; a new dict if transformers has no registry for them."""
    try:
        moe = importlib.import_module("transformers.integrations.moe")
    except ImportError:
        return {}
    interface = getattr(moe, "ExpertsInterface", None)
    return {} if interface is None else interface._global_mapping


def _register() -> None:
    functions, masks = _registries()
    # Without the function for masks, transformers gives the attention function no mask at all: it would ignore padding
    # silently.
    masks[NAME] = importlib.import_module(f"{__name__}.masks").attention_mask
    functions[NAME] = importlib.import_module(f"{__name__}.attention").attention_forward
    experts = _experts()
    if experts:
        experts[NAME] = importlib.import_module(f"{__name__}.experts").experts_forward


def _unregister(_: None) -> None:
    for registry in (*_registries(), _experts()):
        registry.pop(NAME, None)


_switch = Switch(_register, _unregister)
