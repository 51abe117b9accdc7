"""nvcc's code of the ops gives the same bits as the direct emulation in every mode, and has no races."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import bucket, testing
from cuda_ext._activations import ACTIVATIONS
from ptx import build, kernels

MODES: tuple[dict[str, Any], ...] = (
    {"mode": "eager", "check_races": True},
    {"mode": "lazy", "schedule": "pct", "seed": 1, "check_races": True},
)
TENSOR_TYPES = (torch.bfloat16, torch.float16)  # supported by attention
DTYPES = (*TENSOR_TYPES, torch.float32)

Case = Callable[[torch.dtype], list[Tensor]]
CASES: dict[str, Case] = {}


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = function(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, normal(out.dtype, *out.shape))]


def gemm(dtype: torch.dtype, m: int, n: int, k: int, **options: Any) -> list[Tensor]:
    return [cuda_ext.gemm(normal(dtype, m, k), normal(dtype, k, n), **options)]


def gemm_of_all(dtype: torch.dtype, activation: str | None) -> list[Tensor]:
    a, b, c, bias = normal(dtype, 70, 50), normal(dtype, 50, 90), normal(dtype, 70, 90), normal(dtype, 90)
    return [cuda_ext.gemm(a, b, c, bias=bias, activation=activation, alpha=0.7, beta=-1.5)]


def transposed(dtype: torch.dtype) -> list[Tensor]:
    return [cuda_ext.gemm(normal(dtype, 72, 130).t(), normal(dtype, 61, 72).t(), out_dtype=torch.float32)]


CASES["gemm 256x256x64"] = lambda dtype: gemm(dtype, 256, 256, 64)
CASES["gemm 127x130x67"] = lambda dtype: gemm(dtype, 127, 130, 67)
CASES["gemm with k split"] = lambda dtype: gemm(dtype, 64, 64, 2048)
CASES["gemm of transposed operands"] = transposed
for name in ACTIVATIONS:
    CASES[f"gemm of all terms, {name}"] = lambda dtype, name=name: gemm_of_all(dtype, name)
    CASES[f"linear and its gradients, {name}"] = lambda dtype, name=name: with_gradients(
        cuda_ext.linear, normal(dtype, 96, 40), normal(dtype, 72, 40), normal(dtype, 72), activation=name
    )
    CASES[f"gated linear and its gradients, {name}"] = lambda dtype, name=name: with_gradients(
        cuda_ext.gated_linear, normal(dtype, 96, 40), normal(dtype, 144, 40), normal(dtype, 144), activation=name
    )
CASES["mlp and its gradients"] = lambda dtype: with_gradients(
    cuda_ext.mlp, normal(dtype, 64, 40), normal(dtype, 72, 40), normal(dtype, 24, 72), normal(dtype, 72)
)
CASES["gated mlp and its gradients"] = lambda dtype: with_gradients(
    cuda_ext.gated_mlp, normal(dtype, 64, 40), normal(dtype, 144, 40), normal(dtype, 24, 72)
)


def pack_and_unpack(dtype: torch.dtype) -> list[Tensor]:
    tensors = [normal(dtype, count) for count in (4096, 1000, 3)]
    offsets, size = [0, 4101, 5120], 8192
    packed = torch.zeros(size, dtype=torch.float32)
    stats = bucket.pack(tensors, packed, offsets, scale=0.3)
    out = [torch.empty_like(each) for each in tensors]
    return [packed, stats, bucket.unpack(packed, out, offsets, scale=3.0), *out, bucket.stats(tensors)]


CASES["pack and unpack"] = pack_and_unpack


def attention(dtype: torch.dtype, dim: int, dim_v: int, backward: bool = False, **options: Any) -> list[Tensor]:
    q, k, v = normal(dtype, 1, 70, 4, dim), normal(dtype, 1, 90, 2, dim), normal(dtype, 1, 90, 2, dim_v)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(4)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(4)
    if "attn_mask" in options:
        options["attn_mask"] = torch.rand(70, 90) < 0.8
    if "attn_bias" in options:
        options["attn_bias"] = torch.randn(4, 70, 90)
    if backward:
        return with_gradients(cuda_ext.flash_attention, q, k, v, deterministic=True, **options)
    return list(cuda_ext.flash_attention(q, k, v, return_lse=True, **options))


def packed(dtype: torch.dtype) -> list[Tensor]:
    """With rows after the last sequence."""
    q, k, v = normal(dtype, 100, 2, 64), normal(dtype, 120, 2, 64), normal(dtype, 120, 2, 64)
    lengths = [torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 60, 93], [0, 33, 50, 110])]

    def call(*inputs: Tensor) -> Tensor:
        return cuda_ext.flash_attention_varlen(*inputs, *lengths, causal=True, deterministic=True)

    return with_gradients(call, q, k, v)


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and softcap": {"window": (20, 9), "softcap": 3.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "mask": {"attn_mask": True},
    "bias": {"attn_bias": True},
    "dropout": {"dropout_p": 0.2},
}
for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
    CASES[f"attention {dims}"] = lambda dtype, dims=dims: attention(dtype, *dims)
    CASES[f"attention {dims} and its gradients"] = lambda dtype, dims=dims: attention(dtype, *dims, backward=True)
for name in FEATURES:
    CASES[f"attention with {name} and its gradients"] = lambda dtype, name=name: attention(
        dtype, 64, 64, backward=True, **FEATURES[name]
    )
CASES["attention of packed sequences and its gradients"] = packed
CASES["attention of one query, split keys"] = lambda dtype: list(
    cuda_ext.flash_attention(normal(dtype, 1, 1, 4, 64), normal(dtype, 1, 900, 1, 64), normal(dtype, 1, 900, 1, 64),
                             return_lse=True)
)  # fmt: skip


# Reasons why an output differs from the direct emulation's, by at most MAX_UNITS in the last place of its largest
# element. All other outputs have the same bits.
MAX_UNITS = 2.0
LIBRARY = "the erf, exp and tanh of CUDA's library differ from the C++ library's in the last bit"
CONTRACTED = "nvcc contracts alpha * sum + beta * c to fma"


def reason(name: str, dtype: torch.dtype) -> str:
    """Why the bits may differ; empty if they must be equal. For 16-bit types the kernels use the approximate exp and
    tanh instructions, which are the same functions in both emulations."""
    if "gelu" in name.split() or "softcap" in name or name.startswith("mlp"):
        return LIBRARY
    if dtype == torch.float32 and ("gelu" in name or "silu" in name or "gated mlp" in name):
        return LIBRARY
    return CONTRACTED if dtype == torch.float32 and "all terms" in name else ""


@pytest.fixture(scope="module")
def library(pytestconfig: pytest.Config) -> kernels.Kernels:
    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    return kernels.load(everything=pytestconfig.getoption("--full"))


def run(case: Case, dtype: torch.dtype, emulated: AbstractContextManager[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    with emulated:
        return case(dtype)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dtype" in metafunc.fixturenames:
        rows = [
            pytest.param(name, dtype, marks=[] if dtype == DTYPES[0] else pytest.mark.sampled(full=True))
            for name in CASES
            for dtype in DTYPES
            if dtype in TENSOR_TYPES or "attention" not in name
        ]
        metafunc.parametrize(("name", "dtype"), rows, ids=lambda value: str(value).removeprefix("torch."))


def units_apart(a: Tensor, b: Tensor) -> float:
    """The difference in units in the last place of the largest element."""
    one = b.abs().max().double() * torch.finfo(b.dtype).eps
    return float(((a.double() - b.double()).abs() / one).max())


@pytest.mark.sampled
def test_bits_equal_those_of_the_direct_emulation(library: kernels.Kernels, name: str, dtype: torch.dtype) -> None:
    assert_same_bits(library, name, dtype)


def assert_same_bits(library: kernels.Kernels, name: str, dtype: torch.dtype, arch: str = "sm_80") -> None:
    expected = run(CASES[name], dtype, testing.emulated(arch, threads=1))
    most = MAX_UNITS if reason(name, dtype) else 0.0
    first: list[Tensor] = []
    for options in MODES:
        got = run(CASES[name], dtype, kernels.emulated(library, arch, threads=1, **options))
        first = first or got
        for number, (ours, theirs, eager) in enumerate(zip(got, expected, first, strict=True)):
            assert torch.equal(ours, eager), f"output {number} differs between eager mode and mode {options['mode']}"
            if not torch.equal(ours, theirs):
                apart = units_apart(ours, theirs)
                assert 0 < apart <= most, (
                    f"output {number} is {apart} units apart; {reason(name, dtype) or 'no reason'}"
                )
