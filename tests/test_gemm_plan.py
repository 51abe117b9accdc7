"""`gemm_plan` tells what the launchers do; `batch_invariant` makes the bits of a row independent of the other rows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import testing
from cuda_ext.plan import GPUS, GemmPlan, gemm_plan

SIZES = (4096, 4096, 4096)


def operands(
    m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, layout: str = "nt", device: str = "meta"
) -> tuple[Tensor, Tensor]:
    """a (m, k) and b (k, n); t: stored transposed."""

    def operand(rows: int, columns: int, letter: str) -> Tensor:
        if letter == "n":
            return torch.empty(rows, columns, dtype=dtype, device=device)
        return torch.empty(columns, rows, dtype=dtype, device=device).mT

    return operand(m, k, layout[0]), operand(k, n, layout[1])


def test_a_large_product_on_hopper() -> None:
    plan = gemm_plan(*operands(*SIZES), device="H200")
    expected = GemmPlan(
        *SIZES,
        torch.bfloat16,
        "h200",
        "sm_90",
        tile=(128, 256, 64),
        schedule="cooperative",
        stages=plan.stages,
        cluster=2,
        grid=(128, 1),
        threads=384,
        cycles=plan.cycles,
        limit="tensor cores",
    )
    assert plan == expected
    # 4 tiles of 64 k tiles each, at most 2048 multiply-adds per cycle.
    assert 1 < plan.cycles / (4 * 64 * 128 * 256 * 64 / 2048) < 1.2
    assert str(plan).splitlines() == [
        "4096 x 4096 x 4096 bfloat16 on h200: sm_90, wgmma",
        f"  tile 128 x 256 x 64, {plan.stages} stages, cooperative; clusters of 2; 128 blocks of 384 threads; "
        "no workspace",
        f"  {plan.cycles / 1e3:.3g} thousand cycles predicted, limited by tensor cores",
    ]


@pytest.mark.parametrize("device", GPUS)
def test_the_kernel_follows_the_device(device: str) -> None:
    plan = gemm_plan(*operands(*SIZES), device=device)
    hopper = device in ("h100", "h200")
    assert plan.kernel == ("sm_90" if hopper else "sm_80")
    assert ("no wgmma" in plan.refusal) == (not hopper)
    if not hopper:
        assert plan.schedule == "multistage" and str(plan).splitlines()[-1] == f"  not wgmma: {plan.refusal}"


# Problem -> part of the reason why wgmma does not serve it.
REFUSED = {
    "odd k": (operands(64, 64, 100), "a has a stride that is no multiple of 16 bytes"),
    "odd n": (operands(64, 100, 64, layout="nn"), "b has a stride that is no multiple of 16 bytes"),
    "misaligned": (
        (operands(64, 64, 65)[0][:, 1:].expand(64, 64), operands(64, 64, 64)[1]),
        "a does not begin at a multiple of 16 bytes",
    ),
    "float32": (operands(64, 64, 64, torch.float32), "float32 takes three products of tf32"),
    "no k": (operands(64, 64, 0), "k is 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_tma_cannot_read_goes_to_mma_sync(case: str) -> None:
    (a, b), reason = REFUSED[case]
    plan = gemm_plan(a, b, device="h200")
    assert (plan.kernel, plan.refusal) == ("sm_80", reason)


def test_tf32_needs_operands_along_k() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        kernels = {
            layout: gemm_plan(*operands(256, 256, 256, torch.float32, layout), device="h200").kernel
            for layout in ("nn", "nt", "tn", "tt")
        }
    finally:
        torch.set_float32_matmul_precision(before)
    assert kernels == {"nn": "sm_80", "nt": "sm_90", "tn": "sm_80", "tt": "sm_80"}


def test_the_epilogue_counts() -> None:
    a, b = operands(*SIZES)
    plain = gemm_plan(a, b, device="h200")
    bias, c = torch.empty(4096, dtype=a.dtype, device="meta"), torch.empty(4096, 4096, dtype=a.dtype, device="meta")
    gelu = gemm_plan(a, b, activation="gelu", device="h200")
    assert gemm_plan(a, b, bias=bias, activation="gelu", device="h200").cycles == gelu.cycles > plain.cycles
    assert gemm_plan(a, b, c, device="h200").cycles > plain.cycles
    assert gemm_plan(a, b, c, beta=0.0, device="h200") == plain
    assert gemm_plan(a, b, residual=c, device="h200").cycles > plain.cycles
    saved = gemm_plan(a.requires_grad_(), b, activation="gelu", device="h200")
    assert saved.cycles > gelu.cycles, "the pre-activation is saved"
    with torch.no_grad():
        assert gemm_plan(a, b, activation="gelu", device="h200") == gelu
    assert gemm_plan(a.detach(), b, out_dtype=torch.float32, device="h200").cycles > plain.cycles
    gated = gemm_plan(a.detach(), b, activation="silu", gated=True, device="h200")
    assert gated.grid == plain.grid and gated.kernel == "sm_90"


def test_few_rows_are_transposed() -> None:
    plan = gemm_plan(*operands(16, 8192, 8192), device="h200")
    assert plan.swapped and plan.limit == "memory" and "of the transposed product" in str(plan)
    few_tiles = gemm_plan(*operands(1, 1024, 8192), device="h200")
    assert few_tiles.k_blocks > 1 and few_tiles.workspace == 0
    assert few_tiles.grid[0] == few_tiles.k_blocks * 1024 // few_tiles.tile[0]
    assert f"k split among {few_tiles.k_blocks} blocks of a cluster" in str(few_tiles)


def test_tall_k_is_split() -> None:
    plan = gemm_plan(*operands(256, 256, 65536), device="h200")
    assert plan.splits > 4 and plan.workspace >= 4 * plan.splits * 256 * 256
    assert f"k split among {plan.splits} blocks" in str(plan) and f"{plan.workspace} bytes of workspace" in str(plan)
    on_ampere = gemm_plan(*operands(256, 256, 65536), device="a100")
    assert on_ampere.splits > 4 and on_ampere.grid[1] == on_ampere.splits


def test_batches() -> None:
    a = torch.empty(6, 128, 64, dtype=torch.float16, device="meta")
    assert gemm_plan(a, a.mT, device="h200").m == 6 * 128
    assert gemm_plan(a, torch.empty(64, 256, dtype=torch.float16, device="meta"), device="h200").kernel == "sm_90"


def test_on_the_cpu_the_cpu_kernels_run() -> None:
    plan = gemm_plan(torch.zeros(4, 8), torch.zeros(8, 4))
    assert str(plan) == "4 x 4 x 8 float32 on cpu: the CPU kernels"
    assert gemm_plan(torch.zeros(0, 8), torch.zeros(8, 4)).kernel == "none"
    assert "nothing runs" in str(gemm_plan(torch.zeros(0, 8), torch.zeros(8, 4), device="h200"))


def test_the_emulated_device_is_planned_for() -> None:
    a, b = operands(64, 64, 64, device="cpu")
    for arch, kernel in (("sm_80", "sm_80"), ("sm_90a", "sm_90")):
        with testing.emulated(arch, processors=132):
            plan = cuda_ext.gemm_plan(a, b)
        assert plan.kernel == kernel
        if kernel == "sm_90":
            assert dataclasses.replace(plan, device="h200") == gemm_plan(a, b, device="h200")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_counters_agree_with_the_plan(arch: str) -> None:
    """What runs on the emulator is what the plan says."""
    a, b = torch.randn(200, 96, dtype=torch.bfloat16), torch.randn(96, 328, dtype=torch.bfloat16)
    with testing.emulated(arch) as emulation:
        plan = cuda_ext.gemm_plan(a, b)
        cuda_ext.gemm(a, b)
    assert emulation.counters["blocks"] == plan.grid[0] * plan.grid[1] + (plan.splits > 1)
    assert bool(emulation.counters["wgmma"]) == (plan.kernel == "sm_90")


DOUBLE = torch.empty(4, 8, dtype=torch.float64, device="meta")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "v100"}, r"gemm_plan: expected device to be None or one of 't4', 'a100', .*, got 'v100'"),
        ({"b": torch.empty(5, 4, device="meta")}, r"gemm_plan: expected b of shape \(\.\.\., 8, N\) to match a"),
        ({"activation": "swish"}, r"gemm_plan: expected activation to be None, 'relu'"),
        ({"bias": torch.empty(3, device="meta")}, r"gemm_plan: expected bias of shape \(4,\), got \(3,\)"),
        ({"residual": torch.empty(3, device="meta")}, r"gemm_plan: expected residual to broadcast"),
        ({"alpha": float("nan")}, r"gemm_plan: expected alpha to be a number, got nan"),
        ({"out_dtype": torch.int32}, r"gemm_plan: expected out_dtype float32, float16 or bfloat16"),
        ({"gated": True, "b": torch.empty(8, 3, device="meta")}, r"gemm_plan: expected b of shape \(\.\.\., K, 2N\)"),
        ({"gated": True, "c": torch.empty(4, 4, device="meta")}, r"gemm_plan: expected c to be None with gated=True"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    given = {"a": torch.empty(4, 8, device="meta"), "b": torch.empty(8, 4, device="meta"), "device": "h200"} | arguments
    with pytest.raises(RuntimeError, match=f"cuda_ext::{message}"):
        gemm_plan(**given)  # type: ignore[arg-type]


def test_float64_is_composed() -> None:
    plan = gemm_plan(DOUBLE, DOUBLE.mT, device="h200")
    assert plan.kernel == "composed"
    assert str(plan).endswith("no kernel; composed of other ops: there are no kernels for float64")


def test_meta_tensors_need_a_device() -> None:
    with pytest.raises(
        NotImplementedError, match="gemm_plan: expected tensors on a CUDA device or the CPU, got device meta"
    ):
        gemm_plan(*operands(4, 4, 4))


# Batch-invariant products.


@pytest.fixture
def invariant() -> Iterator[None]:
    with cuda_ext.batch_invariant():
        yield


def rows_of(op: str, x: Tensor, w: dict[str, Tensor]) -> Tensor:
    if op == "gemm":
        return cuda_ext.gemm(x, w["w1"].mT, bias=w["b1"], activation="gelu", alpha=0.5)
    if op == "linear":
        return cuda_ext.linear(x, w["w1"], w["b1"], activation="silu")
    if op == "gated_linear":
        return cuda_ext.gated_linear(x, w["w1"], w["b1"])
    if op == "mlp":
        return cuda_ext.mlp(x, w["w1"], w["w2"], w["b1"])
    if op == "gated_mlp":
        return cuda_ext.gated_mlp(x, w["w1"], w["half"], w["b1"])
    # Of all these rows the limit has some columns only; of one row more.
    target = torch.arange(len(x)) % len(w["b1"])
    options = {"linear_bias": w["b1"], "return_entropy": True, "memory_limit": 400_000}
    return torch.stack(cuda_ext.linear_log_prob(x, w["w1"], target, **options), dim=1)


OPS = ("gemm", "linear", "gated_linear", "mlp", "gated_mlp", "linear_log_prob")


def check_rows(op: str, dtype: torch.dtype, most: int, k: int, hidden: int) -> None:
    """The first rows alone, in a batch of others, and those of other memory: with the gradient, the same bits."""
    w = {
        name: torch.randn(*sizes, dtype=dtype) / sizes[-1] ** 0.5
        for name, sizes in {"w1": (hidden, k), "w2": (24, hidden), "half": (24, hidden // 2), "b1": (hidden,)}.items()
    }
    x = torch.randn(most, k, dtype=dtype)
    grads = torch.randn_like(rows_of(op, x, w))
    results = []
    for count in (most, 1, 2, random.randrange(3, most)):
        for some in (x[:count], torch.cat((x[:count], torch.randn(3, k, dtype=dtype))).mT.contiguous().mT[:count]):
            leaf = some.detach().requires_grad_()
            out = rows_of(op, leaf, w)
            (grad,) = torch.autograd.grad(out, leaf, grads[:count])
            results.append((count, out.detach(), grad))
    _, whole, whole_grad = results[0]
    for count, out, grad in results[1:]:
        assert torch.equal(out, whole[:count]), f"{op}: {count} rows"
        assert torch.equal(grad, whole_grad[:count]), f"{op}: gradient of {count} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("invariant")
def test_rows_on_the_cpu(op: str, dtype: torch.dtype) -> None:
    """Of sizes for which the CPU has three methods: for few rows, packed, and for float32 a BLAS."""
    check_rows(op, dtype, 300, random.choice((300, 520)), 2 * random.choice((140, 260)))


def test_the_mode_is_needed_on_the_cpu() -> None:
    x, w = torch.randn(300, 1024), torch.randn(512, 1024)
    apart = [torch.equal(cuda_ext.linear(x[:count], w), cuda_ext.linear(x, w)[:count]) for count in (1, 2, 5, 33)]
    assert not all(apart)
    with cuda_ext.batch_invariant():
        together = [
            torch.equal(cuda_ext.linear(x[:count], w), cuda_ext.linear(x, w)[:count]) for count in (1, 2, 5, 33)
        ]
    assert all(together)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("invariant")
def test_rows_in_the_cuda_kernels(op: str, arch: str) -> None:
    """With few SMs k would be split for few rows, and 64 x 64 or transposed tiles be used."""
    with testing.emulated(arch, processors=8):
        check_rows(op, random.choice((torch.bfloat16, torch.float16)), 150, random.choice((384, 392, 389)), 144)


@pytest.mark.parametrize("device", ["a100", "h200"])
def test_plans_of_few_rows_do_not_split(device: str) -> None:
    a, b = operands(4, 256, 8192)
    plan = gemm_plan(a, b, device=device)
    assert plan.splits * plan.k_blocks > 1
    with cuda_ext.batch_invariant():
        plan = gemm_plan(a, b, device=device)
    assert (plan.splits, plan.k_blocks, plan.swapped) == (1, 1, False)


def test_the_kernel_does_not_depend_on_the_number_of_rows() -> None:
    """Rows of a padded, a transposed and a misaligned tensor: without the mode the kernels differ."""
    for k in (96, 100):
        tensors = {
            "padded": torch.empty(8, 104, dtype=torch.bfloat16)[:, :k],
            "padded by 4 bytes": torch.empty(8, 102, dtype=torch.bfloat16)[:, :k],
            "transposed": torch.empty(k, 9, dtype=torch.bfloat16).mT,
            "misaligned": torch.empty(8 * k + 1, dtype=torch.bfloat16)[1:].view(8, k),
        }
        b = torch.empty(k, 64, dtype=torch.bfloat16)
        with cuda_ext.batch_invariant():
            kernels = {
                gemm_plan(a[:count], b, device="h200").kernel for a in tensors.values() for count in (1, 2, 5, len(a))
            }
        assert kernels == {"sm_90" if k == 96 else "sm_80"}


def test_the_switch_is_restored() -> None:
    switch = torch.ops.cuda_ext._set_batch_invariant
    assert switch(False) is False
    with cuda_ext.batch_invariant(), cuda_ext.batch_invariant(False):
        assert switch(False) is False
    assert switch(False) is False
    cuda_ext.batch_invariant(True)
    try:
        assert switch(True) is True
    finally:
        cuda_ext.batch_invariant(False)
    with pytest.raises(RuntimeError, match="batch_invariant: expected enabled to be a bool, got 1"):
        cuda_ext.batch_invariant(1)  # type: ignore[arg-type]


def test_grouped_products() -> None:
    """Of any number of groups; b's layout, dtypes and strides decide the kernel."""
    a, b = (
        torch.empty(65536, 4096, dtype=torch.bfloat16, device="meta"),
        torch.empty(64, 1024, 4096, dtype=torch.bfloat16, device="meta"),
    )
    offs = torch.empty(64, dtype=torch.int32, device="meta")
    plan = gemm_plan(a, b.mT, offs=offs, device="h200")
    assert (plan.m, plan.n, plan.k) == (65536, 1024, 4096) and plan.kernel == "sm_90"
    assert plan.tile == (128, 256, 64) and plan.cluster == 2 and plan.grid == (132, 1)
    wgrad = gemm_plan(a.t(), torch.empty(65536, 1024, dtype=torch.bfloat16, device="meta"), offs=offs, device="h200")
    assert wgrad.kernel == "sm_90" and (wgrad.m, wgrad.n, wgrad.k) == (4096, 1024, 65536)
    odd = gemm_plan(a, torch.empty(64, 4096, 1001, dtype=torch.bfloat16, device="meta"), offs=offs, device="h200")
    assert odd.kernel == "sm_80" and "16 bytes" in odd.refusal
    assert gemm_plan(a, b.mT, offs=offs, device="a100").kernel == "sm_80"
    assert gemm_plan(a.float(), b.mT.float(), offs=offs, device="h200").refusal.startswith("float32")
    gated = {"activation": "silu", "gated": True, "offs": offs}
    assert gemm_plan(a, b.mT, device="h200", **gated).kernel == "sm_90"
    assert gemm_plan(a, b.mT, device="a100", **gated).kernel == "sm_80"
    wide = gemm_plan(a, b.mT, device="h200", out_dtype=torch.float32, **gated)
    assert wide.kernel == "sm_80" and "without a gate, float32" in wide.refusal
    with pytest.raises(RuntimeError, match="gemm_plan: expected no c with offs, or operands in FP8"):
        gemm_plan(a, b.mT, a, offs=offs, device="h200")


def test_products_in_fp8() -> None:
    a, b = (torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="meta") for _ in range(2))
    plan = gemm_plan(a, b.t(), device="h200")
    assert plan.kernel == "sm_90" and plan.tile == (256, 128, 128) and plan.cluster == 2 and not plan.copies
    assert plan.splits == 1 and plan.workspace == 0 and "predicted, limited by shared memory" in str(plan)
    left, right = (torch.empty(lines, 8192, dtype=torch.float8_e4m3fn, device="meta") for lines in (64, 1024))
    few = gemm_plan(left, right.t(), device="h200")
    assert few.tile == (128, 64, 128) and few.splits > 1 and f"k split among {few.splits} blocks" in str(few)
    assert few.grid[0] == 16 * few.splits and few.workspace > few.grid[0] * 128 * 64 * 4  # the sums of all tiles
    with cuda_ext.batch_invariant():
        assert gemm_plan(left, right.t(), device="h200").splits == 1
    assert gemm_plan(a, b, device="h200").copies == "b"
    assert gemm_plan(a[:, :4090], b.t()[:4090], device="h200").copies == ""
    refused = gemm_plan(a, b.t(), device="a100")
    assert refused.kernel == "composed" and refused.refusal == "the device has no mma.sync of FP8; it is sm_80"
    for device in ("l4", "4090", "5090"):
        plan = gemm_plan(a, b.t(), device=device)
        assert plan.kernel == "sm_89" and plan.tile == (128, 128, 128) and plan.grid == (32 * 32, 1)
        assert (plan.stages, plan.schedule, plan.threads, plan.workspace) == (3, "multistage", 256, 0)
        assert "no wgmma" in plan.refusal and plan.cycles > 0 and "sm_89, mma.sync of FP8" in str(plan)
    assert gemm_plan(a[:64], b[:64].t(), device="4090").tile == (64, 64, 128)
    assert gemm_plan(a, b.t(), device="b200").tile == (64, 64, 128)
    copied = gemm_plan(a, b, device="4090")
    assert copied.copies == "b" and "copies b first, which the kernel cannot read in place" in str(copied)
    assert gemm_plan(torch.ones(3, 4).to(torch.float8_e5m2), torch.ones(4, 5).to(torch.float8_e4m3fn)).kernel == "cpu"
    with pytest.raises(RuntimeError, match="both of FP8"):
        gemm_plan(a, b.t().bfloat16(), device="h200")


@pytest.mark.parametrize(("fp8", "arch"), [(False, "sm_90a"), (True, "sm_90a"), (True, "sm_89"), (True, "sm_120")])
def test_plans_of_groups_and_fp8_are_those_of_the_launchers(fp8: bool, arch: str) -> None:
    with testing.emulated(arch, processors=4) as device:
        if fp8:
            a, b = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.randn(100, 200).to(torch.float8_e4m3fn).t()
            plan, one = gemm_plan(a, b), torch.ones(1)
            cuda_ext.scaled_mm(a, b, one, "TensorWise", one, "TensorWise")
        else:
            a, b = torch.randn(300, 64, dtype=torch.bfloat16), torch.randn(3, 64, 128, dtype=torch.bfloat16)
            offs = torch.tensor([100, 100, 300], dtype=torch.int32)
            plan = gemm_plan(a, b, offs=offs)
            cuda_ext.grouped_mm(a, b, offs=offs)
        on_hopper = arch == "sm_90a"
        assert plan.kernel == ("sm_90" if on_hopper else "sm_89")
        assert device.counters["wgmma" if on_hopper else "mma"] > 0
        assert device.counters["blocks"] >= plan.grid[0]
