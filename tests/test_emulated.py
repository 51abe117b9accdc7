"""The public ops on emulated CUDA kernels: what `cuda_ext.testing.emulated` promises beside equal results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gemm_common import OPS, arguments, check, integers
from torch import Tensor

import cuda_ext
from cuda_ext import _emulator, bucket, testing
from cuda_ext._load import ops


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "sm_70"}, r"expected arch to be one of \('sm_75', 'sm_80', .*\), got 'sm_70'"),
        ({"mode": "late"}, r"expected mode to be one of \('eager', 'lazy'\), got 'late'"),
        ({"schedule": "random"}, r"expected schedule to be one of \('fifo', 'pct'\), got 'random'"),
    ],
)
def test_refusals(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^cuda_ext.testing.emulated: {message}"), testing.emulated(**options):
        pass


def test_counts_what_kernels_do_within_the_block() -> None:
    a, b = integers(128, 64, dtype=torch.bfloat16), integers(64, 128, dtype=torch.bfloat16)
    with testing.emulated() as outer:
        cuda_ext.gemm(a, b)
        before = outer.counters
        with testing.emulated("sm_89", "lazy", "pct", 5) as inner:
            cuda_ext.gemm(a, b)
        cuda_ext.gemm(a, b)
    assert inner.counters == before
    assert inner.counters["mma"] == 128 * 64 * 128 // (16 * 8 * 16)
    assert inner.counters["global_store_bytes"] == 2 * 128 * 128
    assert outer.counters["mma"] == 3 * before["mma"]
    cuda_ext.gemm(a, b)
    assert outer.counters["mma"] == 3 * before["mma"], "the CPU's kernels run outside of the block"


def test_ends_with_an_exception() -> None:
    a = torch.ones(2, 2)
    with pytest.raises(ZeroDivisionError), testing.emulated() as emulation:
        raise ZeroDivisionError
    cuda_ext.gemm(a, a)
    assert emulation.counters["blocks"] == 0


def test_kernels_of_other_sources_are_refused() -> None:
    table = torch.zeros(64, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="expected kernels compiled from the same sources as this library"):
        ops._emulate(table.data_ptr())


@pytest.mark.sampled(check="races", slow=True)
@pytest.mark.parametrize("first", [False, True])
def test_kernels_with_and_without_hooks_are_loaded_side_by_side(run_python: Callable, first: bool) -> None:
    """Whichever comes first: kernels without hooks hide the races of plain accesses."""
    code = f"""
from cuda_ext import _emulator
for hooks in ({first}, {not first}):
    print(_emulator.load(hooks).__file__.rpartition("/")[2])
"""
    done = run_python("-c", code)
    names = {False: "_simt.so", True: "_simt_hooks.so"}
    assert done.returncode == 0 and done.stdout.split() == [names[first], names[not first]], done.stdout


def test_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_emulator, "CSRC", tmp_path / "csrc")
    with pytest.raises(
        RuntimeError, match=r"emulation compiles the kernels, but .*csrc is missing; use a source checkout"
    ):
        _emulator.build_library("nothing", [])


def test_a_compiler_error_is_shown(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("int kernel() { return undeclared; }\n")
    with pytest.raises(RuntimeError, match=r"cannot build broken-\w+.o: (.|\n)*broken.cu(.|\n)*undeclared"):
        _emulator.build_library("broken", [source])


# The race checker, with all plain accesses hooked, on what the tests of values run without it.


@pytest.mark.sampled(check="races")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_gemm_has_no_race(op: str, dtype: torch.dtype, seed: int) -> None:
    with testing.emulated(mode="lazy", schedule="pct", seed=seed, check_races=True):
        check(op, arguments(op, (), 70, 40, 200, f=72, dtype=dtype), activation="silu")


@pytest.mark.sampled(check="races")
def test_bucket_has_no_race() -> None:
    tensors = [torch.randn(count) for count in (3, 20000, 1, 0, 40001)]
    offsets, size = bucket.aligned_offsets([tensor.numel() for tensor in tensors], torch.float32)
    packed = torch.empty(size, dtype=torch.bfloat16)
    for seed in range(2):
        with testing.emulated(mode="lazy", schedule="pct", seed=seed, check_races=True):
            bucket.pack(tensors, packed, offsets, scale=0.5)
            bucket.unpack(packed, tensors, offsets)
            bucket.stats(tensors)


def products() -> Tensor:
    a, b = torch.ones(130, 300, dtype=torch.bfloat16), torch.ones(300, 140, dtype=torch.bfloat16)
    return cuda_ext.gemm(a, b, activation="relu", out_dtype=torch.float32)


@pytest.mark.sampled(check="races")
def test_a_missing_wait_is_caught() -> None:
    """Emulation of the ops can fail: without one wait there is NaN in the result, and a race, or a read of nothing."""
    with testing.emulated() as emulation:
        products()
    wait = next(site for site in emulation.sync_sites if site[2] == "cp_async_wait" and "gemm_sm80" in site[0])
    with testing.emulated(mode="lazy", schedule="pct", seed=1, skip=wait):
        assert not torch.equal(products(), torch.full((130, 140), 300.0))
    race = r"gemm_sm80: .*(ldmatrix|cp_async) at .*\.cuh:\d+.*race: .*(cp_async|ldmatrix)"
    message = rf"(?s){race}|reads shared address 0x\w+, which was never written"
    with testing.emulated(mode="lazy", check_races=True, skip=wait), pytest.raises(RuntimeError, match=message):
        products()


def test_same_bits_whatever_the_schedule() -> None:
    """Split k included: sums are added in the order of k, whichever block comes last."""
    a, b = torch.randn(40, 3000), torch.randn(3000, 50)
    gradients = [torch.randn(count) for count in (70000, 3)]

    def run() -> list[Tensor]:
        packed = torch.empty(70016, dtype=torch.bfloat16)
        return [cuda_ext.gemm(a, b), bucket.pack(gradients, packed, [0, 70008]), packed]

    results = []
    for options in ({}, {"mode": "lazy"}, *({"schedule": "pct", "seed": seed} for seed in range(4))):
        with testing.emulated(**options):
            results.append(run())
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_precision_of_float32_follows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    exact = a.double() @ b.double()

    def error() -> float:
        with testing.emulated():
            return float((cuda_ext.gemm(a, b).double() - exact).abs().max())

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        highest = error()
        torch.set_float32_matmul_precision("high")
        high = error()
    finally:
        torch.set_float32_matmul_precision(before)
    assert highest < 1e-4 < 1e-3 < high < 1e-1


TRAIN = """
import torch, cuda_ext
from cuda_ext import testing
model = cuda_ext.nn.GatedMLP(32, 64)
x = torch.randn(10, 32)
with testing.emulated(mode="lazy"):
    model(x).sum().backward()
print(all(torch.isfinite(p.grad).all() for p in model.parameters()))
"""


@pytest.mark.sampled
def test_a_module_of_a_new_process(run_python: Callable) -> None:
    done = run_python("-c", TRAIN)
    assert done.returncode == 0 and done.stdout.endswith("True\n"), done.stdout


def test_sync_sites_are_those_of_a_block() -> None:
    """Not those of other blocks; an outer block has those of the blocks in it."""

    def files(emulation: testing.Emulation) -> set[str]:
        return {Path(site[0]).name for site in emulation.sync_sites}

    x = torch.randn(40, 64)
    with testing.emulated() as outer:
        products()
        assert files(outer) == files(outer) != set()  # asking does not use them up
        with testing.emulated() as inner:
            cuda_ext.flash_attention(*[x.view(1, 40, 1, 64)] * 3)
            assert not any(name.startswith("gemm") for name in files(inner))
    assert files(inner) < files(outer)
    with testing.emulated() as empty:
        pass
    assert not files(empty)
