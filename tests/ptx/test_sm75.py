"""nvcc's code for sm_75: float16 products 8 deep, others in float32 arithmetic, copies through registers."""

from __future__ import annotations

import pytest
import torch

from ptx import build, kernels
from ptx.test_same_bits import assert_same_bits

GEMM, ATTENTION = "gemm/instantiations/gemm_sm80", "attention/instantiations/attention"
SOURCES = [
    *(name for names in kernels.LAUNCHERS.values() for name in names),
    *(f"{GEMM}_f16", f"{GEMM}_f32", "bucket/bucket_kernels"),
    *(f"{ATTENTION}_fwd_sm80_f16_d64", f"{ATTENTION}_bwd_sm80_f16_d64", "attention/attention_bwd_passes"),
]
GEMMS = ("gemm 127x130x67", "gemm with k split", "gemm of transposed operands", "gemm of all terms, relu")
ATTENTIONS = ("attention (64, 64) and its gradients", "attention of packed sequences and its gradients")
CASES = [
    *((name, dtype) for name in GEMMS for dtype in (torch.float16, torch.float32)),
    *((name, torch.float16) for name in (*ATTENTIONS, "pack and unpack")),
    # Compiles for a minute: its products in float32 arithmetic are those of float32 with twice the elements.
    *(pytest.param(name, torch.bfloat16, marks=pytest.mark.sampled(full=True)) for name in GEMMS),
]


@pytest.fixture(scope="module")
def library(pytestconfig: pytest.Config) -> kernels.Kernels:
    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    full = pytestconfig.getoption("--full")
    files = [build._emulator.CSRC / f"{name}.cu" for name in [*SOURCES, *[f"{GEMM}_bf16"] * full]]
    name = f"kernels-sm_75{'' if full else '-f16-f32'}"
    return kernels.Kernels(build.build_library(name, files, kernels.OTHERS, arch="sm_75", stubs=True))


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_bits_equal_those_of_the_direct_emulation(library: kernels.Kernels, name: str, dtype: torch.dtype) -> None:
    assert_same_bits(library, name, dtype, "sm_75")
