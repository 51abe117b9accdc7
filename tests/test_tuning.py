"""cuda_ext.tuning: what is measured, used, kept in a file and read from it. The emulator's times decide nothing; the
tests are of everything else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import testing, tuning
from cuda_ext.testing import assert_op_matches_reference, reference_gated_mlp, reference_linear


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    tuning.clear()


def operands(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_measured_once_and_right(arch: str, dtype: torch.dtype) -> None:
    a, b = operands(100, 72, 200, dtype)
    with testing.emulated(arch) as emulation:
        expected = cuda_ext.gemm(a, b)
        once = emulation.counters["blocks"]
        with tuning.tune(keep=False) as tuned:
            out = cuda_ext.gemm(a, b)
        assert emulation.counters["blocks"] > 5 * once
        (product,) = tuned.products
        before = emulation.counters["blocks"]
        with tuning.tune(keep=False) as again:
            assert torch.equal(cuda_ext.gemm(a, b), out)
        assert again.products == [] and str(again) == "no new products"
        assert emulation.counters["blocks"] - before < 4 * once
    torch.testing.assert_close(out, expected)
    assert product.name.startswith(f"{arch.rstrip('a')[:5]}")
    assert f"100 x 72 x 200 {str(dtype).removeprefix('torch.')}, a along k, b along n" in product.name
    assert 0 < product.seconds <= product.seconds_of_default and product.name in str(tuned)
    assert tuning.measured() == [product]
    tuning.clear()
    assert tuning.measured() == []


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "home").touch()  # instead of permissions, which do not bind root
    path = tmp_path / "home" / "gemms.json"
    not_kept = pytest.warns(UserWarning, match="pass path or keep=False, or set XDG_CACHE_HOME")
    with testing.emulated("sm_80"), not_kept, tuning.tune(path) as tuned:
        cuda_ext.gemm(*operands(100, 72, 200))
    assert tuning.measured() == tuned.products != []


def plan_numbers(plan: Any) -> tuple[Any, ...]:
    return plan.tile, plan.cluster, plan.k_blocks, plan.splits


@pytest.mark.sampled
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_plan_says_what_was_measured(arch: str) -> None:
    """Every candidate in turn is declared the fastest: it then runs, is what gemm_plan says, and gives the product."""
    a, b = operands(300, 200, 1000)
    seen = set()
    with testing.emulated(arch, processors=132):
        expected = a.float() @ b.float()
        with tuning.tune(keep=False, candidates=1) as tuned:
            cuda_ext.gemm(a, b)
        name, sm80 = tuned.products[0].name, tuned.products[0].sm80
        assert sm80 == (arch == "sm_80")
        for config in range(3):
            for cluster, splits in ((1, 1), (2, 1), (1, 2)):
                torch.ops.cuda_ext._set_measured_gemm(name, [config, cluster, 1, splits, sm80], [1.0, 2.0])
                out = cuda_ext.gemm(a, b)
                torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-1)
                plan = cuda_ext.gemm_plan(a, b)
                assert plan.splits == splits and plan.cluster == (1 if sm80 else cluster)
                seen.add(plan_numbers(plan))
    assert len(seen) >= (6 if sm80 else 8)


def scaled_operands(m: int, n: int, k: int, groups: int = 0) -> tuple[list[Any], dict[str, Any]]:
    """Those of scaled_mm or scaled_grouped_mm, of rows."""
    a, scale_a = cuda_ext.fp8.quantize(torch.randn(m, k))
    b, scale_b = cuda_ext.fp8.quantize(torch.randn(max(groups, 1) * n, k))
    if groups == 0:
        return [a, b.t(), scale_a, "RowWise", scale_b.t(), "RowWise"], {}
    ends = torch.arange(1, groups + 1, dtype=torch.int32) * (m // groups)
    return [a, b.view(groups, n, -1).mT, scale_a, "RowWise", scale_b.view(groups, n), "RowWise"], {"offs": ends}


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("groups", [0, 3])
def test_scaled_products(groups: int, fast: bool) -> None:
    """Every plan in turn is declared the fastest, and then runs: more blocks share rows or not, tiles differ."""
    operands, options = scaled_operands(330, 384, 256, groups)
    op = cuda_ext.scaled_grouped_mm if groups else cuda_ext.scaled_mm
    run = lambda: op(*operands, **options, output_dtype=torch.float32, use_fast_accum=fast)  # noqa: E731
    with testing.emulated("sm_90a", processors=132) as emulation:
        expected = run()
        with tuning.tune(keep=False, candidates=2) as tuned:
            out = run()
        (product,) = tuned.products
        assert "330 x 384 x 256 e4m3 of lines, e4m3 of lines, to float32" in product.name
        assert (", groups 3" in product.name) == (groups > 0) and (", fast" in product.name) == fast
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-2)
        blocks = set()
        configs = (0, 1, *[2] * fast, *[3] * (groups == 0))  # groups have no tiles of 64 columns
        for config in configs:
            for cluster in (1, 2):
                torch.ops.cuda_ext._set_measured_gemm(product.name, [config, cluster, 1, 1, False], [1.0, 2.0])
                before = emulation.counters["blocks"], emulation.counters["wgmma"]
                torch.testing.assert_close(run(), expected, rtol=2e-3, atol=2e-2)
                blocks.add((emulation.counters["blocks"] - before[0], emulation.counters["wgmma"] - before[1], cluster))
        assert len(blocks) == 2 * len(configs)
        torch.ops.cuda_ext._set_measured_gemm(product.name, [99, 1, 1, 1, False], [1.0, 2.0])  # is ignored
        assert run().equal(expected)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_scaled_products_that_have_one_plan(arch: str) -> None:
    operands, options = scaled_operands(40, 48, 64)
    with testing.emulated(arch), tuning.tune(keep=False) as tuned:
        cuda_ext.scaled_mm(*operands, **options)
    assert all("e4m3" not in product.name for product in tuned.products)


@pytest.mark.parametrize("accumulates", [False, True])
def test_scaled_products_are_added_once(accumulates: bool) -> None:
    """Every launch of a measurement would add the product to the slot of a gradient."""
    operands, _ = scaled_operands(64, 128, 256)
    a, b, scale_a, _, scale_b, _ = operands
    numbers = torch.randn(64, 128)
    slot, plain = numbers.clone(), numbers.clone()
    write = lambda to: torch.ops.cuda_ext.scaled_mm.slot(  # noqa: E731
        a, b, scale_a, 1, scale_b, 1, weight_slot=to, slot_alpha=1.0, slot_beta=float(accumulates)
    )
    with testing.emulated("sm_90a"):
        write(plain)
        with tuning.tune(keep=False) as tuned:
            write(slot)
    assert len(tuned.products) == 1 and slot.equal(plain)
    assert (", accumulated" in tuned.products[0].name) == accumulates


@pytest.mark.parametrize("numbers", [[99, 1, 1, 1], [0, 7, 1, 1], [0, 1, 1, 31], [4, 1, 8, 1], [-1, 0, 0, 0]])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_an_impossible_plan_is_ignored(arch: str, numbers: list[int]) -> None:
    a, b = operands(300, 200, 500)
    with testing.emulated(arch):
        default = cuda_ext.gemm_plan(a, b)
        expected = cuda_ext.gemm(a, b)
        with tuning.tune(keep=False, candidates=1) as tuned:
            cuda_ext.gemm(a, b)
        for sm80 in (False, True):
            torch.ops.cuda_ext._set_measured_gemm(tuned.products[0].name, [*numbers, sm80], [1.0, 2.0])
            if not (sm80 and arch == "sm_80" and numbers[0] == 0):  # which has no clusters
                assert plan_numbers(cuda_ext.gemm_plan(a, b)) == plan_numbers(default)
                assert torch.equal(cuda_ext.gemm(a, b), expected)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_ops_forward_and_backward(arch: str) -> None:
    leaf = lambda *shape: torch.randn(shape).to(torch.bfloat16).requires_grad_()  # noqa: E731
    with testing.emulated(arch), tuning.tune(keep=False, candidates=3) as tuned:
        for _ in range(2):
            tensors = {"input": leaf(2, 65, 72), "weight": leaf(40, 72), "bias": leaf(40)}
            assert_op_matches_reference(cuda_ext.linear, reference_linear, tensors, {"activation": "gelu"})
            shapes = {"input": (33, 24), "weight1": (2 * 40, 24), "weight2": (24, 40)}
            tensors = {name: leaf(*shape) for name, shape in shapes.items()}
            assert_op_matches_reference(cuda_ext.gated_mlp, reference_gated_mlp, tensors, {"activation": "silu"})
    names = [product.name for product in tuned.products]
    assert len(names) == len(set(names)) >= 6
    assert any("gated" in name for name in names) and any("saved" in name for name in names)


def test_an_accumulated_product_is_added_once() -> None:
    """The slot of a gradient: measuring launches the product often."""
    x, w = torch.randn(50, 24).bfloat16(), torch.randn(16, 24).bfloat16().requires_grad_()
    slot = torch.randn(16, 24)
    before = slot.clone()
    grad = torch.randn(50, 16).bfloat16()
    with testing.emulated("sm_90a"), tuning.tune(keep=False) as tuned:
        torch.ops.cuda_ext.linear_backward.slot(
            grad, x, w, None, output_mask=[False, True, False], weight_slot=slot, slot_alpha=1.0, slot_beta=1.0
        )
    assert any("accumulated" in product.name for product in tuned.products)
    torch.testing.assert_close(slot, before + grad.float().T @ x.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled
def test_batch_invariant_products_stay_so() -> None:
    a, b = operands(200, 72, 4096)
    with testing.emulated("sm_90a"), cuda_ext.batch_invariant(), tuning.tune(keep=False):
        whole = cuda_ext.gemm(a, b)
        assert torch.equal(cuda_ext.gemm(a[:7], b), whole[:7])
    assert all("batch-invariant" in product.name for product in tuning.measured())


def test_files() -> None:
    path = tuning.default_path()
    with testing.emulated("sm_90a"):
        with pytest.raises(FileNotFoundError):
            tuning.load()
        with tuning.tune() as tuned:
            cuda_ext.gemm(*operands(64, 64, 64))
        first = tuning.measured()
        assert tuned.products == first and path.exists()
        tuning.clear()
        assert tuning.load() == first == tuning.measured()
        tuning.clear()
        with tuning.tune() as tuned:  # reads, measures only what is new, and adds it
            cuda_ext.gemm(*operands(64, 64, 64))
            cuda_ext.gemm(*operands(64, 80, 64))
        assert len(tuned.products) == 1
        tuning.clear()
        assert len(tuning.load()) == 2
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"\xff\xfe",
        lambda content: json.dumps(content)[:-20].encode(),
        lambda content: json.dumps([1]).encode(),
        lambda content: json.dumps({**content, "products": [{"name": "x"}]}).encode(),
        lambda content: json.dumps({**content, "products": [{**content["products"][0], "config": 1 << 40}]}).encode(),
        lambda content: json.dumps({**content, "products": [{**content["products"][0], "config": -1}]}).encode(),
        lambda content: json.dumps({**content, "products": [{**content["products"][0], "splits": "2"}]}).encode(),
        lambda content: json.dumps({**content, "products": [{**content["products"][0], "seconds": 0.0}]}).encode(),
    ],
)
def test_damaged_files(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    with testing.emulated("sm_90a"), tuning.tune(path):
        cuda_ext.gemm(*operands(64, 64, 64))
    content = json.loads(path.read_text())
    path.write_bytes(damage(content))
    tuning.clear()
    for use in (lambda: tuning.load(path), lambda: tuning.tune(path).__enter__()):
        with pytest.raises(ValueError, match=r"cuda_ext\.tuning: .* is damaged; delete it"):
            use()
    assert tuning.measured() == []


def test_files_for_something_else(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    with testing.emulated("sm_90a"), tuning.tune(path):
        cuda_ext.gemm(*operands(64, 64, 64))
    content = json.loads(path.read_text())
    content["made_for"]["driver"] = "580.1"
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"got .*'580\.1'.*; measure again with cuda_ext\.tuning\.tune and another path"
    ):
        tuning.load(path)


def test_wrong_arguments() -> None:
    for candidates in (0, 1.5):
        with pytest.raises((ValueError, RuntimeError), match=f"expected candidates .* at least 1, got {candidates}"):
            tuning.tune(candidates=candidates)  # type: ignore[arg-type]


def test_nothing_is_measured_unasked_nor_on_the_cpu() -> None:
    with testing.emulated("sm_90a"):
        cuda_ext.gemm(*operands(64, 64, 64))
    with tuning.tune(keep=False) as tuned:
        cuda_ext.gemm(*operands(64, 64, 64))
    assert tuned.products == tuning.measured() == []


def test_blocks_may_be_nested() -> None:
    with testing.emulated("sm_90a"):
        with tuning.tune(keep=False) as outer:
            with tuning.tune(keep=False) as inner:
                cuda_ext.gemm(*operands(64, 64, 64))
            cuda_ext.gemm(*operands(64, 72, 64))
        cuda_ext.gemm(*operands(64, 80, 64))
    assert len(inner.products) == 1 and len(outer.products) == 2 == len(tuning.measured())


def test_a_product_is_measured_by_one_thread() -> None:
    a, b = operands(300, 200, 500)  # takes the emulator more than a millisecond, after which no round has two launches
    outs: list[Tensor] = []
    with testing.emulated("sm_90a") as emulation:
        cuda_ext.gemm(a, b)
        once = emulation.counters["blocks"]
        with tuning.tune(keep=False, candidates=1) as tuned:
            threads = [threading.Thread(target=lambda: outs.append(cuda_ext.gemm(a, b))) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert emulation.counters["blocks"] == (1 + 7 + len(threads)) * once  # one for the kernel's start, 6 that are timed
    assert len(tuned.products) == 1 and len(outs) == 4
    assert all(torch.equal(out, outs[0]) for out in outs)
