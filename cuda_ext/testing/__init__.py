"""Tools to test the ops: references, a tolerance rule, dropout's random numbers, and the emulator of the CUDA kernels.

Each ``reference_*`` function has the signature and the meaning of one public op, in a few lines of plain PyTorch. It
works in any dtype, and autograd differentiates it, so it serves two purposes: in float64 it is the reference, and in
the dtype of the op under test it is the plain PyTorch evaluation whose error sets the tolerance
(`assert_close_to_reference`). The references of attention and of the loss hold the whole matrix of scores or logits:
they are written to be correct and readable, not fast.

`emulated` runs the CUDA kernels without a GPU. `attention_without_wgmma` runs attention's kernels for sm_80 on Hopper.

Importing this package needs only torch, not the compiled library.
"""

from cuda_ext.testing.emulation import Emulation, attention_without_wgmma, emulated, is_emulating
from cuda_ext.testing.philox import dropout_mask, philox_uint32
from cuda_ext.testing.references import (
    reference_attention,
    reference_attention_varlen,
    reference_gated_linear,
    reference_gated_mlp,
    reference_gemm,
    reference_grouped_mm,
    reference_linear,
    reference_linear_cross_entropy,
    reference_linear_log_prob,
    reference_mixture_of_experts,
    reference_mlp,
    reference_scaled_mm,
)
from cuda_ext.testing.tolerance import assert_close_to_reference, assert_op_matches_reference

__all__ = [
    "Emulation",
    "assert_close_to_reference",
    "assert_op_matches_reference",
    "attention_without_wgmma",
    "dropout_mask",
    "emulated",
    "is_emulating",
    "philox_uint32",
    "reference_attention",
    "reference_attention_varlen",
    "reference_gated_linear",
    "reference_gated_mlp",
    "reference_gemm",
    "reference_grouped_mm",
    "reference_linear",
    "reference_linear_cross_entropy",
    "reference_linear_log_prob",
    "reference_mixture_of_experts",
    "reference_mlp",
    "reference_scaled_mm",
]
