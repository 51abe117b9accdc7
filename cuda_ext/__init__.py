"""GEMM with fused epilogues, flash attention and gradient bucketing for training transformers with PyTorch.

    import cuda_ext
    cuda_ext.gemm, cuda_ext.linear, cuda_ext.gated_linear, cuda_ext.mlp, cuda_ext.gated_mlp
    cuda_ext.grouped_mm             # products of groups of rows, each with its own matrix: mixtures of experts
    cuda_ext.scaled_mm, cuda_ext.fp8    # products of operands in FP8, and linear layers that train in it
    cuda_ext.mixture_of_experts     # the MLPs of each token's experts, and their weighted sum
    cuda_ext.gemm_plan              # what a product would run on a GPU, and why
    cuda_ext.tuning                 # measures which plan of a product is the fastest, when asked
    cuda_ext.batch_invariant        # a row of a product does not depend on the other rows, to the bit
    cuda_ext.flash_attention, cuda_ext.flash_attention_varlen
    cuda_ext.flash_attention_with_kvcache   # for generation: caches, in pages or not, appended to in place
    cuda_ext.BlockMask              # which blocks of keys attention visits, and their bits
    cuda_ext.merge_attention        # attention that was computed in parts
    cuda_ext.linear_cross_entropy, cuda_ext.linear_log_prob     # of logits that are never in memory
    cuda_ext.attention_plan         # what an attention call would run on a GPU, and why
    cuda_ext.patch, cuda_ext.unpatch    # an existing model on these ops
    cuda_ext.nn, cuda_ext.distributed, cuda_ext.compat, cuda_ext.bucket, cuda_ext.testing, cuda_ext.dev
    cuda_ext.integrations           # existing models on these ops: transformers, torch's SDPA
    import cuda_ext.ops             # defines the ops in torch.ops.cuda_ext, as torch.export.load needs them
    python -m cuda_ext.info         # a report on this installation, even when it is broken

The package imports nothing by itself: the first use of a public name loads torch and the compiled library, and raises
ImportError if the library is missing or does not match. So `python -m cuda_ext.info`, which imports this file first,
can report on an installation whose library does not load; `cuda_ext.dev.load` can load a fresh build instead of the
installed one; and `setup.py` can use the package's modules before there is a library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuda_ext import bucket, compat, dev, distributed, fp8, info, integrations, nn, ops, testing, tuning
    from cuda_ext._experts import mixture_of_experts
    from cuda_ext._gemm import batch_invariant, gated_linear, gated_mlp, gemm, linear, mlp
    from cuda_ext._grouped_mm import grouped_mm
    from cuda_ext._scaled_mm import scaled_grouped_mm, scaled_mm
    from cuda_ext.attention import flash_attention, flash_attention_varlen
    from cuda_ext.block_mask import BlockMask
    from cuda_ext.integrations.patching import patch, unpatch
    from cuda_ext.kvcache import flash_attention_with_kvcache, merge_attention
    from cuda_ext.loss import linear_cross_entropy, linear_log_prob
    from cuda_ext.plan import attention_plan, gemm_plan

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "__version__",
    "attention_plan",
    "batch_invariant",
    "bucket",
    "compat",
    "dev",
    "distributed",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_kvcache",
    "fp8",
    "gated_linear",
    "gated_mlp",
    "gemm",
    "gemm_plan",
    "grouped_mm",
    "info",
    "integrations",
    "linear",
    "linear_cross_entropy",
    "linear_log_prob",
    "merge_attention",
    "mixture_of_experts",
    "mlp",
    "nn",
    "ops",
    "patch",
    "scaled_grouped_mm",
    "scaled_mm",
    "testing",
    "tuning",
    "unpatch",
]

_MODULE_OF = {
    "BlockMask": "block_mask",
    "attention_plan": "plan",
    "batch_invariant": "_gemm",
    "flash_attention": "attention",
    "flash_attention_varlen": "attention",
    "flash_attention_with_kvcache": "kvcache",
    "merge_attention": "kvcache",
    "gated_linear": "_gemm",
    "gated_mlp": "_gemm",
    "gemm": "_gemm",
    "gemm_plan": "plan",
    "grouped_mm": "_grouped_mm",
    "linear": "_gemm",
    "linear_cross_entropy": "loss",
    "linear_log_prob": "loss",
    "mixture_of_experts": "_experts",
    "mlp": "_gemm",
    "patch": "integrations.patching",
    "scaled_grouped_mm": "_scaled_mm",
    "scaled_mm": "_scaled_mm",
    "unpatch": "integrations.patching",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
