"""`import cuda_ext.ops` defines the ops in `torch.ops.cuda_ext`.

`import cuda_ext` alone loads nothing. Import this module before you load an exported program that contains these ops,
or call them through ``torch.ops.cuda_ext``. It raises ImportError if the compiled library is missing or does not match:

    import cuda_ext.ops
    program = torch.export.load("model.pt2")
"""

from __future__ import annotations

from typing import Any

import cuda_ext._rules  # noqa: F401
from cuda_ext._load import ops

__all__ = ["compute_intensive_ops"]


def compute_intensive_ops() -> list[Any]:
    """The ops whose results selective activation checkpointing should keep, because to recompute them is slow.

    Returns:
        Overloads for the list of `torch.utils.checkpoint.create_selective_checkpoint_contexts`, whose policies see the
        ops below autograd: `torch.ops.cuda_ext.linear_forward`, not `torch.ops.cuda_ext.linear`.

    Example::

        from functools import partial
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        contexts = partial(create_selective_checkpoint_contexts, cuda_ext.ops.compute_intensive_ops())
        checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    """
    names = ("gemm", "linear", "gated_linear", "mlp", "gated_mlp", "flash_attention")  # the last for packed ones too
    alone = (ops.grouped_mm, ops.grouped_mm_forward, ops.scaled_mm, ops.scaled_grouped_mm)  # used in both modes
    return [getattr(ops, f"{name}_forward").default for name in names] + [op.default for op in alone]
