"""grouped_mm with indices: the bits of the product of rows that were copied, gradients, traps, transforms, errors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gemm_common import DTYPES, integers, rand
from test_grouped_mm import random_offs, random_strides
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cuda_ext import gemm_plan, grouped_mm, testing
from cuda_ext.testing import reference_grouped_mm

FORMS = ("2d x 3d", "2d x 2d", "3d x 2d")
SIZES = (1, 7, 8, 33, 64, 130, 136)


def place_of_rows(form: str) -> tuple[str, int]:
    """The operand whose rows or columns are gathered, and their dim."""
    return {"2d x 3d": ("mat_a", 0), "2d x 2d": ("mat_b", 0), "3d x 2d": ("mat_b", 1)}[form]


def shapes(form: str, groups: int, sources: int, t: int, m: int, n: int, k: int) -> tuple[tuple[int, ...], ...]:
    return {
        "2d x 3d": ((sources, k), (groups, k, n)),
        "2d x 2d": ((m, t), (sources, n)),
        "3d x 2d": ((groups, m, k), (k, sources)),
    }[form]


def copied(form: str, tensors: dict[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
    """The operands whose rows are where the indices say."""
    name, dim = place_of_rows(form)
    return {**tensors, name: tensors[name].transpose(0, dim)[indices.long()].contiguous().transpose(0, dim)}


def case(form: str, dtype: torch.dtype, make: Any) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    groups, sources, t, m, n, k = random.choice((1, 3, 40)), *(random.choice(SIZES) for _ in range(5))
    shape_a, shape_b = shapes(form, groups, sources, t, m, n, k)
    tensors = {
        "mat_a": random_strides(make(*shape_a, dtype=dtype)),
        "mat_b": random_strides(make(*shape_b, dtype=dtype)),
    }
    options: dict[str, Any] = {"offs": random_offs(groups, t)}
    if dtype != torch.float64 and random.random() < 0.3:
        options["out_dtype"] = torch.float32
    if form == "2d x 3d" and random.random() < 0.5:
        tensors["bias"] = make(groups, n, dtype=dtype)
    kind = random.choice((torch.int32, torch.int64))
    repeats = random.random() < 0.7
    indices = torch.randint(0, sources, (t,)) if repeats else torch.randperm(max(sources, t))[:t] % sources
    return tensors, options, indices.to(kind)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", range(12))
def test_bits_of_the_product_of_copies(number: int, form: str, dtype: torch.dtype) -> None:
    tensors, options, indices = case(form, dtype, rand)
    with torch.no_grad():
        out = grouped_mm(**tensors, **options, indices=indices)
        assert out.equal(grouped_mm(**copied(form, tensors, indices), **options))


@pytest.mark.every_backend
@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", range(6))
def test_gradients_are_those_of_copies(number: int, form: str, dtype: torch.dtype) -> None:
    """Integers, so that sums are exact in any order."""
    tensors, options, indices = case(form, dtype, lambda *shape, dtype: integers(*shape, dtype=dtype))
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    out = grouped_mm(**leaves, **options, indices=indices)
    grad = integers(*out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, [*leaves.values()], grad)
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    options.pop("out_dtype", None)
    expected = reference_grouped_mm(**exact, offs=options["offs"], indices=indices)
    assert out.equal(expected.to(out.dtype))
    for own, of_exact in zip(found, torch.autograd.grad(expected, [*exact.values()], grad.double()), strict=True):
        assert own.equal(of_exact.to(dtype))


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sources", "t", "ends"), [(1, 200, [70, 70, 200]), (5, 0, [0, 0, 0]), (0, 0, [0, 0, 0]), (300, 2, [0, 1, 1])]
)
def test_extremes(sources: int, t: int, ends: list[int], dtype: torch.dtype) -> None:
    """One row for all, no indices, no rows, and indices after the last group, which are not read."""
    offs, indices = torch.tensor(ends), torch.randint(0, max(1, sources), (t,))
    indices[ends[-1] :] = 10**6
    safe = indices.clamp(max=max(0, sources - 1))
    for form in FORMS:
        shape_a, shape_b = shapes(form, 3, sources, t, 16, 24, 40)
        a, b = integers(*shape_a, dtype=dtype), integers(*shape_b, dtype=dtype)
        out = grouped_mm(a, b, offs=offs, indices=indices)
        assert out.equal(reference_grouped_mm(a.double(), b.double(), offs=offs, indices=safe).to(dtype))


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_indices_out_of_range(form: str, dtype: torch.dtype, backend: str) -> None:
    """Rows of zeros on a GPU, where the host does not know them."""
    offs, sources = torch.tensor([30, 30, 77]), 50
    shape_a, shape_b = shapes(form, 3, sources, 90, 16, 24, 40)
    tensors = {"mat_a": integers(*shape_a, dtype=dtype), "mat_b": integers(*shape_b, dtype=dtype)}
    indices = torch.randint(0, sources, (90,), dtype=torch.int32)
    bad = [0, 29, 30, 76]
    for at, index in zip(bad, (-1, sources, 2**31 - 1, -(2**31)), strict=True):
        indices[at] = index
    if backend == "cpu":
        with pytest.raises(RuntimeError, match=r"expected indices from 0 to 49, of the 50 rows .*, got -1 at index 0"):
            grouped_mm(**tensors, offs=offs, indices=indices)
        return
    safe = indices.clone()
    safe[bad] = 0
    exact = copied(form, tensors, safe)
    name, dim = place_of_rows(form)
    exact[name].transpose(0, dim)[bad] = 0
    leaf = tensors[name].requires_grad_()
    out = grouped_mm(**tensors, offs=offs, indices=indices)
    assert out.equal(grouped_mm(**exact, offs=offs))
    grad = integers(*out.shape, dtype=dtype)
    (found,) = torch.autograd.grad(out, leaf, grad)
    rows = exact[name].requires_grad_()
    (of_rows,) = torch.autograd.grad(grouped_mm(**exact, offs=offs), rows, grad)
    good = [at for at in range(90) if at not in bad]
    expected = torch.zeros(sources, leaf.shape[1 - dim], dtype=torch.float64)
    expected.index_add_(0, indices[good].long(), of_rows.transpose(0, dim)[good].double())
    assert found.transpose(0, dim).equal(expected.to(dtype))


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_int64_beyond_int32_is_out_of_range(dtype: torch.dtype, backend: str) -> None:
    """Not what its lower 32 bits say."""
    a, b = integers(5, 40, dtype=dtype), integers(2, 40, 24, dtype=dtype)
    indices, offs, far_ends = torch.tensor([2**32, 1 - 2**32, 1]), torch.tensor([1, 3]), torch.tensor([1, 2**32 + 2])
    if backend == "cpu":
        with pytest.raises(RuntimeError, match="expected offs to be ends"):
            grouped_mm(a, b, offs=far_ends)
        return
    assert grouped_mm(a, b, offs=offs, indices=indices)[:2].count_nonzero() == 0
    assert grouped_mm(a, b, offs=far_ends).equal(grouped_mm(a, b, offs=torch.tensor([1, 5])))


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_no_index_names_reach_nothing(dtype: torch.dtype) -> None:
    """NaN in them, and terms of other groups, which are gathered from there."""
    offs, named = torch.tensor([30, 30, 77]), 20
    a, b = integers(90, 40, dtype=dtype), integers(3, 40, 24, dtype=dtype)
    indices = torch.randint(0, named, (90,))
    indices[77:] = torch.randint(named, 90, (13,))
    a[named:] = torch.nan
    assert grouped_mm(a, b, offs=offs, indices=indices).isfinite().all()
    left = integers(16, 90, dtype=dtype)
    assert grouped_mm(left, a, offs=offs, indices=indices).isfinite().all()


@pytest.mark.simt
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@pytest.mark.parametrize("form", ["2d x 3d", "2d x 2d"])
def test_no_races(form: str, arch: str) -> None:
    offs = torch.tensor([0, 70, 70, 205, 260])
    indices = torch.randint(0, 150, (300,))
    for k, n in ((72, 136), (71, 135)):
        a, b = (integers(150, k), integers(5, k, n)) if form == "2d x 3d" else (integers(n, 300), integers(150, k))
        with testing.emulated(arch, check_races=True):
            out = grouped_mm(a.bfloat16(), b.bfloat16(), offs=offs, indices=indices, out_dtype=torch.float32)
        assert out.equal(reference_grouped_mm(a, b, offs=offs, indices=indices))


# PyTorch's transforms


def small(form: str = "2d x 3d") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    shape_a, shape_b = shapes(form, 3, 4, 6, 4, 3, 5)
    tensors = {"mat_a": rand(*shape_a, dtype=torch.float64), "mat_b": rand(*shape_b, dtype=torch.float64)}
    if form == "2d x 3d":
        tensors["bias"] = rand(3, 3, dtype=torch.float64)
    return tensors, {"offs": torch.tensor([2, 2, 5]), "indices": torch.tensor([3, 0, 3, 3, 1, 2])}


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_of_any_order(form: str) -> None:
    tensors, groups = small(form)

    def call(*given: Tensor) -> Tensor:
        return grouped_mm(given[0], given[1], **groups, bias=given[2] if len(given) > 2 else None)

    inputs = tuple(tensors.values())
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True)


def test_vmap_and_functional_gradients() -> None:
    tensors, groups = small()
    a, b, _ = (t.detach() for t in tensors.values())
    offs, indices = groups["offs"], groups["indices"]
    many = torch.stack([indices, indices.flip(0)])
    out = torch.vmap(lambda i: grouped_mm(a, b, offs=offs, indices=i))(many)
    torch.testing.assert_close(out, torch.stack([grouped_mm(a, b, offs=offs, indices=i) for i in many]))
    grads = torch.func.grad(lambda x, w: grouped_mm(x, w, **groups).square().sum(), argnums=(0, 1))(a, b)
    x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
    grouped_mm(x, w, **groups).square().sum().backward()
    torch.testing.assert_close(grads, (x.grad, w.grad))


@pytest.mark.parametrize("form", FORMS)
def test_opcheck_and_compile(form: str) -> None:
    tensors, groups = small(form)
    for dtype in (torch.float64, torch.bfloat16):
        given = {name: x.detach().to(dtype).requires_grad_() for name, x in tensors.items()}
        if form != "3d x 2d":
            arguments = given["mat_a"], given["mat_b"], groups["offs"], given.get("bias"), groups["indices"]
            torch.library.opcheck(torch.ops.cuda_ext.grouped_mm.default, arguments)
        compiled = torch.compile(lambda **x: grouped_mm(**x), fullgraph=True, backend="aot_eager", dynamic=True)
        out, expected = compiled(**given, **groups), grouped_mm(**given, **groups)
        torch.testing.assert_close(out, expected)
        grads = torch.autograd.grad(out.sum(), [*given.values()])
        torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), [*given.values()]))


def test_autocast_flops_and_plans() -> None:
    tensors, groups = small()
    given = {name: t.detach().float() for name, t in tensors.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_mm(**given, **groups).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        grouped_mm(given["mat_a"], given["mat_b"], **groups)
    assert counter.get_total_flops() == 2 * 6 * 5 * 3
    meta: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    a, b = torch.empty(8192, 4096, **meta), torch.empty(64, 4096, 1024, **meta)
    offs = torch.empty(64, dtype=torch.int32, device="meta")
    indices = torch.empty(65536, dtype=torch.int64, device="meta")
    plan = gemm_plan(a, b, offs=offs, indices=indices, device="h200")
    assert (plan.m, plan.n, plan.k, plan.kernel, plan.copies, plan.cluster) == (65536, 1024, 4096, "sm_90", "", 2)
    grad = torch.empty(65536, 1024, **meta)
    wgrad = gemm_plan(grad.t(), a, offs=offs, indices=indices, device="h200")
    assert (wgrad.m, wgrad.n, wgrad.k, wgrad.kernel, wgrad.copies) == (1024, 4096, 65536, "sm_90", "")
    assert wgrad.cluster == 1  # b is not shared
    assert gemm_plan(a.float(), b.float(), offs=offs, indices=indices, device="h200").copies == "a"
    assert gemm_plan(grad.t().float(), a.float(), offs=offs, indices=indices, device="a100").copies == "b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": torch.zeros(6)}, r"expected indices of shape \(T,\) and dtype int32 or int64, got .* of float32"),
        ({"indices": torch.zeros(2, 3, dtype=torch.int64)}, r"expected indices of shape \(T,\) .*, got \(2, 3\)"),
        (
            {"indices": torch.zeros(6, dtype=torch.int64, device="meta")},
            "expected indices on device cpu to match mat_a",
        ),
        ({"indices": torch.tensor([0, 4, 0, 0, 0, 0])}, "from 0 to 3, of the 4 rows to gather from, got 4 at index 1"),
        ({"indices": torch.tensor([0, 2**32, 0, 0, 0, 0])}, "got 4294967296 at index 1"),
        ({"indices": torch.zeros(4, dtype=torch.int64)}, "expected offs to be ends .* at most 4, got 5"),
        (
            {"mat_a": rand(2, 6), "mat_b": rand(9, 4), "indices": torch.zeros(5, dtype=torch.int64)},
            "expected 6 indices",
        ),
        ({"mat_a": rand(3, 2, 3), "offs": None}, "expected no indices for matrices of all groups"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    given = {"mat_a": rand(4, 3), "mat_b": rand(3, 3, 4), "offs": torch.tensor([2, 5, 5])}
    with pytest.raises(RuntimeError, match=f"cuda_ext::grouped_mm: .*{message}"):
        grouped_mm(**{**given, "indices": torch.zeros(6, dtype=torch.int64), **change})
