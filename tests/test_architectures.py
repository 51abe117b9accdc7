"""What differs between GPUs: instructions, shared memory, and the kernels that follow from them."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from gemm_common import OPS, arguments, check

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import architectures
import static_gates

import cuda_ext
from cuda_ext import _build, _toolchain, testing
from cuda_ext.testing import assert_op_matches_reference, reference_attention
from cuda_ext.testing.emulation import EMULATED_ARCHS

DTYPES = [torch.float16, torch.bfloat16]
WGMMA = "sm_90a"
# Head dims of query and key, and of value: one for each kernel.
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


def emulate(arch: str) -> AbstractContextManager[testing.Emulation]:
    return testing.emulated(arch, mode="lazy", schedule="pct", seed=random.randrange(2**31))


# (architecture, source) but for those that the library is built for.
COMPILED = [
    (arch, path.name)
    for arch in sorted({*architectures.ARCHS, "8.9"} - {"8.0", "9.0a"})
    for path in architectures.sources()
    if _build.archs_of(path, (arch,)) and (arch != "8.9" or _build.SM89_SOURCES in path.name)
]


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize(("arch", "source"), COMPILED)
def test_no_kernel_spills(arch: str, source: str) -> None:
    toolkit = architectures.find_toolkit()
    if toolkit is None:
        pytest.skip("no nvcc")
    (path,) = (path for path in architectures.sources() if path.name == source)
    compiled = architectures.compile_source(path, arch, toolkit)
    assert compiled.kernels and compiled.bytes > 0 and compiled.seconds > 0
    assert [kernel.name for kernel in compiled.spilling] == []


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("source", [path for path in architectures.sources() if _build.SM89_SOURCES in path.name])
@pytest.mark.parametrize("arch", ["8.9", "12.0"])
def test_the_loop_of_fp8_products(arch: str, source: Path, tmp_path: Path) -> None:
    """The library that other tests read has none of these kernels."""
    toolkit = architectures.find_toolkit()
    if toolkit is None:
        pytest.skip("no nvcc")
    command = [str(toolkit.home / "bin" / "nvcc"), *_build.NVCC_FLAGS, f"-I{_build.CSRC}", "-c", str(source)]
    command += [*_toolchain.gencode_flags([arch]), "-o", str(tmp_path / "kernels.o")]
    subprocess.run(command, check=True)
    kernels = static_gates.read_kernels(tmp_path / "kernels.o")
    found = static_gates.faults(kernels)
    if arch == "12.0" and "groups" in source.name:
        # Not solved: in the loop of the larger tile of groups, ptxas puts a step's loads between two products.
        known = ("28 instructions between two products of its loop, got 50", "4 LDSM and LDGSTS between two products")
        of_large = [fault for fault in found if "{128, 128" in fault and any(text in fault for text in known)]
        assert len(of_large) == len(known), "solved: remove these lines"
        found = [fault for fault in found if fault not in of_large]
    assert len(kernels) == 2 and found == []
    for kernel in kernels:
        # 16 rows, 8 columns and 32 terms each; a warp has an eighth of the tile.
        assert kernel.count("QMMA") == (64 if "{128" in kernel.name else 16) and kernel.count("HMMA") == 0
        assert sum("QMMA" in text for text in kernel.loop.body) == kernel.count("QMMA")


def test_a_kernel_that_spills_is_found(tmp_path: Path) -> None:
    toolkit = architectures.find_toolkit()
    if toolkit is None:
        pytest.skip("no nvcc")
    source = tmp_path / "spills.cu"
    source.write_text(
        "__global__ void good(int* x) { *x = 1; }\n"
        "__global__ void spills(int* x) { int y[64]; for (int i = 0; i < 64; ++i) y[x[i]] = i; *x = y[x[64]]; }\n"
    )
    compiled = architectures.compile_source(source, "7.5", toolkit)
    assert [kernel.name for kernel in compiled.kernels] == ["good", "spills"]
    assert [kernel.name for kernel in compiled.spilling] == ["spills"]
    head, _, row, *_ = architectures.table([compiled]).splitlines()
    assert head == "| registers | 7.5 |" and row.startswith("| `spills` | ")


def test_each_can_be_compiled_for() -> None:
    assert set(architectures.ARCHS) <= set(architectures.ALL_ARCHS)
    assert [_toolchain.sm_name(arch) for arch in architectures.ALL_ARCHS] == list(EMULATED_ARCHS)
    versions = [f"{arch.removeprefix('sm_').rstrip('a')[:-1]}.{arch.rstrip('a')[-1]}" for arch in EMULATED_ARCHS]
    assert [_toolchain.sm_name(arch) for arch in _toolchain.arch_list(";".join(versions))] == list(EMULATED_ARCHS)


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("arch", EMULATED_ARCHS)
def test_products(arch: str, op: str, dtype: torch.dtype) -> None:
    with emulate(arch):
        check(op, arguments(op, (), 70, 40, 200, f=72, dtype=dtype), activation="silu")


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("arch", EMULATED_ARCHS)
def test_attention(arch: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    heads = (2, 1, 1)
    tensors = {
        name: torch.randn(1, rows, n, dim).to(dtype).requires_grad_()
        for name, rows, n, dim in zip(("query", "key", "value"), (70, 75, 75), heads, (dims[0], *dims))
    }
    options = random.choice([{"causal": True}, {"softcap": 3.0}, {"window": (20, 9)}, {"deterministic": True}])
    eps = torch.finfo(dtype).eps
    with emulate(arch):
        assert_op_matches_reference(
            *(cuda_ext.flash_attention, reference_attention, tensors, {"return_lse": True, **options}),
            gradient_factor=3.0,
            atol=(8 if dtype == torch.float32 else 2) * eps,  # as in test_attention_cuda.py
        )


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", EMULATED_ARCHS)
def test_attention_over_a_cache(arch: str, dim: int, queries: int) -> None:
    dtype = random.choice([*DTYPES, torch.float32])
    query = torch.randn(2, queries, 4, dim).to(dtype)
    keys, values = torch.randn(2, 2, 300, 2, dim).to(dtype)
    lengths = torch.tensor([300, 117], dtype=torch.int32)
    with emulate(arch):
        out = cuda_ext.flash_attention_with_kvcache(query, keys, values, cache_seqlens=lengths, causal=True)
    for b, length in enumerate(lengths.tolist()):
        inputs = (query[b : b + 1], keys[b : b + 1, :length], values[b : b + 1, :length])
        exact = reference_attention(*(x.double() for x in inputs), causal=True)
        plain = reference_attention(*inputs, causal=True)
        error, of_plain = ((x.double() - exact).abs().max() for x in (out[b : b + 1], plain))
        assert error <= 2 * of_plain + 1e-5


def test_float32_is_exact_where_tensor_cores_have_no_tf32() -> None:
    """In float32 arithmetic whatever the precision: no part of an operand is dropped, nothing overflows on the way."""
    a, b = torch.randn(70, 200), torch.randn(200, 40)
    a[0, 0], b[0], b[0, 0] = 3e38, 0.0, 1.0  # beyond what can be split into two tf32
    before = torch.get_float32_matmul_precision()
    results = []
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            with testing.emulated("sm_75") as emulation:
                results.append(cuda_ext.gemm(a, b))
            assert emulation.counters["mma"] == 0
    finally:
        torch.set_float32_matmul_precision(before)
    exact = a.double() @ b.double()
    terms = a.double().abs() @ b.double().abs()
    assert torch.equal(*results)
    assert ((results[0].double() - exact).abs() <= 200 * 2**-24 * terms).all()


def test_sm_75_copies_through_registers_and_multiplies_float16_in_halves() -> None:
    a, b = torch.randn(128, 64).half(), torch.randn(64, 128).half()
    counted = {}
    for arch in ("sm_75", "sm_80"):
        with testing.emulated(arch) as emulation:
            counted[arch] = (cuda_ext.gemm(a, b), emulation.counters)
    (out, turing), (same, ampere) = counted["sm_75"], counted["sm_80"]
    assert turing["cp_async_bytes"] == 0 < ampere["cp_async_bytes"]
    assert turing["mma"] == 2 * ampere["mma"] == 2 * 128 * 64 * 128 // (16 * 8 * 16)
    torch.testing.assert_close(out, same)


def test_bfloat16_on_sm_75_uses_no_tensor_core() -> None:
    a, b = torch.randn(40, 64).bfloat16(), torch.randn(64, 50).bfloat16()
    with testing.emulated("sm_75") as emulation:
        out = cuda_ext.gemm(a, b, out_dtype=torch.float32)
    assert emulation.counters["mma"] == 0
    torch.testing.assert_close(out, a.float() @ b.float())


def test_the_largest_backward_of_sm_75_is_composed() -> None:
    """No tile of 256 head dims fits in 64 KiB; the random numbers of dropout are those of the forward kernel."""
    tensors = [torch.randn(1, 20, 2, 256).half().requires_grad_() for _ in range(3)]
    results = {}
    for arch in ("sm_75", "sm_80"):
        torch.manual_seed(3)
        with testing.emulated(arch) as emulation:
            out = cuda_ext.flash_attention(*tensors, causal=True, dropout_p=0.3)
            results[arch] = torch.autograd.grad(out.float().square().sum(), tensors)
        assert emulation.counters["mma"] > 0
    for composed, fused in zip(results["sm_75"], results["sm_80"]):
        torch.testing.assert_close(composed, fused, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("arch", EMULATED_ARCHS)
def test_only_hopper_has_wgmma(arch: str) -> None:
    query = torch.randn(1, 128, 2, 128).half()
    a = torch.randn(256, 256).half()
    with testing.emulated(arch) as emulation:
        cuda_ext.flash_attention(query, query, query)
        cuda_ext.gemm(a, a)
    assert (emulation.counters["wgmma"] > 0) == (arch == WGMMA)
    assert (emulation.counters["mma"] > 0) == (arch != WGMMA)
