"""Existing models on this package's ops, without a change to their code. Nothing is active until it is asked for.

cuda_ext.integrations.transformers.enable()   # attn_implementation="cuda_ext"
cuda_ext.integrations.sdpa.enable()           # torch.nn.functional.scaled_dot_product_attention
cuda_ext.integrations.linear_cross_entropy.enable()   # torch.nn.functional.linear_cross_entropy
cuda_ext.integrations.flex.enable()           # torch.nn.attention: flex_attention and varlen_attn
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuda_ext.integrations import flex, linear_cross_entropy, onnx, sdpa, transformers

__all__ = ["flex", "linear_cross_entropy", "onnx", "sdpa", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
