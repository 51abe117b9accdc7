"""grouped_mm: values and derivatives of all forms, groups of any sizes, traps, transforms, errors."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_common import ACTIVATIONS, DTYPES, EXPECTED_ACTIVATION, integers, rand
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cuda_ext
from cuda_ext import grouped_mm, testing
from cuda_ext.testing import assert_op_matches_reference, reference_grouped_mm

SIZES = (1, 2, 7, 8, 33, 64, 100, 130)


def spans(offs: Tensor) -> list[slice]:
    ends = [0, *offs.tolist()]
    return [slice(begin, end) for begin, end in zip(ends, ends[1:])]


def random_offs(groups: int, size: int) -> Tensor:
    """Ends of groups, some of them empty, up to `size` or less."""
    ends = torch.randint(0, size + 1, (groups,)).sort().values
    if groups > 2 and random.random() < 0.5:
        ends[random.randrange(groups - 1)] = ends[-1]
        ends = ends.cummax(0).values
    if groups and random.random() < 0.5:
        ends[-1] = size
    return ends.to(random.choice((torch.int32, torch.int64)))


def random_strides(tensor: Tensor) -> Tensor:
    """The same values, in any memory order, with gaps."""
    order = random.sample(range(tensor.dim()), tensor.dim())
    shape = [tensor.shape[d] for d in order]
    gap = random.choice((0, 0, 1, 8))
    memory = torch.full((*shape[:-1], shape[-1] + gap), torch.nan, dtype=tensor.dtype)
    view = memory[..., : shape[-1]].permute(*(order.index(d) for d in range(tensor.dim())))
    return view.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def random_case(
    form: str, dtype: torch.dtype, activation: str | None = None, gated: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    groups, m, n, k, t = random.choice((1, 2, 5, 40)), *(random.choice(SIZES) for _ in range(4))
    if random.random() < 0.1:  # sums without terms
        k, t = (k, 0) if form == "2d x 2d" else (0, t)
    scale = {"scale": max(1, t if form == "2d x 2d" else k) ** -0.5, "dtype": dtype}
    shapes = {
        "2d x 3d": ((t, k), (groups, k, n)),
        "2d x 2d": ((m, t), (t, n)),
        "3d x 2d": ((groups, m, k), (k, t)),
        "3d x 3d": ((groups, m, k), (groups, k, n)),
    }[form]
    tensors = {
        "mat_a": random_strides(rand(*shapes[0], dtype=dtype)),
        "mat_b": random_strides(rand(*shapes[1], **scale)),
    }
    if gated:
        tensors["mat_b"] = random_strides(rand(groups, k, 2 * n, **scale))
    options: dict[str, Any] = {} if activation is None else {"activation": activation}
    if gated:
        options["gated"] = True
    if form != "3d x 3d":
        options["offs"] = random_offs(groups, t)
    if dtype != torch.float64 and random.random() < 0.3:
        options["out_dtype"] = random.choice((torch.float32, torch.bfloat16))
    if (form == "2d x 3d" and random.random() < 0.5) or (form == "3d x 3d" and not options):
        tensors["bias"] = rand(groups, tensors["mat_b"].shape[2], dtype=dtype)
    return tensors, options


def check(tensors: dict[str, Tensor], options: dict[str, Any]) -> None:
    # Gradients are formed from one that is rounded to the dtype of the operands; three tf32 products leave out 2^-22 of
    # each term, two roundings. Of a sum of uniform errors of so much, five standard deviations are 5 / sqrt(3) * 2
    # roundings of a term, times the root of the number of terms. In outputs terms are smaller by the root of theirs.
    dtype = tensors["mat_a"].dtype
    eps = torch.finfo(dtype).eps * (2 if dtype == torch.float64 else 1)  # whose reference is rounded as often
    largest = {name: float(t.detach().abs().max()) if t.numel() else 0.0 for name, t in tensors.items()}
    rows = max(1, *(size for t in tensors.values() for size in t.shape))
    out, slope = sizes_of_epilogue(tensors, options)
    # What is saved for backward has the dtype of the output.
    eps = max(eps, torch.finfo(options.get("out_dtype", dtype)).eps if slope > 1 else 0.0)
    gradient_atol = {name: 6 * eps * rows**0.5 * max(1.0, *largest.values()) * slope for name in tensors}
    assert_op_matches_reference(
        grouped_mm,
        reference_grouped_mm,
        tensors,
        options,
        atol=6 * eps * max(1.0, out, *largest.values()),
        gradient_atol=gradient_atol,
    )


def sizes_of_epilogue(tensors: dict[str, Tensor], options: dict[str, Any]) -> tuple[float, float]:
    """The largest result, and the largest derivative of a result with respect to the product; 0 and 1 without an
    activation and a gate."""
    activation, gated = options.get("activation"), options.get("gated", False)
    if activation is None and not gated:
        return 0.0, 1.0
    exact = {name: t.detach().double() for name, t in tensors.items()}
    z = reference_grouped_mm(**exact, offs=options.get("offs")).requires_grad_()
    out = testing.references.hidden_of(z, activation, gated)
    (slope,) = torch.autograd.grad(out.sum(), z)
    if out.numel() == 0:
        return 0.0, 2.0
    return float(out.detach().abs().max()), max(1.0 + 1e-9, float(slope.abs().max()))


@pytest.mark.every_backend
@pytest.mark.sampled(cases=20)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["2d x 3d", "2d x 2d", "3d x 2d", "3d x 3d"])
@pytest.mark.parametrize("case", range(25))
def test_random_cases(case: int, form: str, dtype: torch.dtype) -> None:
    check(*random_case(form, dtype))


@pytest.mark.every_backend
@pytest.mark.sampled(cases=20)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", ["2d x 3d", "3d x 2d", "3d x 3d"])
@pytest.mark.parametrize("case", range(5))
def test_random_epilogues(case: int, form: str, activation: str | None, gated: bool, dtype: torch.dtype) -> None:
    check(*random_case(form, dtype, activation, gated and form != "3d x 2d"))


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("ends", [[1, 2, 3], [127, 128, 129], [150, 150, 299], [0, 0, 300]], ids=str)
def test_an_epilogue_in_each_group(ends: list[int], gated: bool, dtype: torch.dtype) -> None:
    """The product is exact, so the result is that of `gemm` and `gated_linear` for each group, bit for bit, and so is
    what is saved for backward. Rows of no group are 0 in both outputs."""
    n = 25 if random.random() < 0.3 else 24
    offs = torch.tensor(ends, dtype=torch.int32)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    activation = random.choice(ACTIVATIONS[1:])
    a, b = integers(300, 40, dtype=dtype), integers(3, 40, 2 * n if gated else n, dtype=dtype)
    bias = integers(3, b.shape[2], dtype=dtype)
    rows = torch.full((310, 40), torch.nan, dtype=dtype)  # rows after the tensor are not read
    rows[:300] = a
    options: dict[str, Any] = {"activation": activation, "gated": gated}
    _, preact = torch.ops.cuda_ext.grouped_mm_forward(rows[:300], b, offs, bias, out_dtype=wide, **options)
    out = grouped_mm(rows[:300], b, offs=offs, bias=bias, **options)
    saved, _ = torch.ops.cuda_ext.grouped_mm_forward(rows[:300], b, offs, bias, **options)
    assert torch.equal(out, saved) and not out[ends[-1] :].any() and not preact[ends[-1] :].any()
    for group, span in enumerate(spans(offs)):
        if preact.numel():
            assert torch.equal(preact[span].double(), a[span].double() @ b[group].double() + bias[group].double())
        if gated:
            alone = cuda_ext.gated_linear(a[span], b[group].t(), bias[group], activation=activation)
        else:
            alone = cuda_ext.gemm(a[span], b[group], bias=bias[group], activation=activation)
        assert torch.equal(out[span], alone)


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("activation", "gated"), [("relu", False), ("gelu", False), ("silu", True), (None, True)])
def test_what_backward_reads_of_an_epilogue(activation: str | None, gated: bool, dtype: torch.dtype) -> None:
    """Gradients are those of the reference; NaN in rows of no group, and in their gradient, reaches nothing."""
    offs = torch.tensor([30, 30, 77], dtype=torch.int32)
    a, b = rand(200, 40, dtype=dtype), rand(3, 40, 48 if gated else 24, dtype=dtype, scale=0.2)
    bias, grad = rand(3, b.shape[2], dtype=dtype), rand(200, 24, dtype=dtype, grad=False)
    results = []
    for rest in (0.0, torch.nan):
        rows, grads = a.detach().clone(), grad.clone()
        rows[77:], grads[77:] = rest, rest
        out = grouped_mm(rows.requires_grad_(), b, offs=offs, bias=bias, activation=activation, gated=gated)
        results.append((out, *torch.autograd.grad(out, (rows, b, bias), grads)))
    for good, bad in zip(*results):
        assert torch.equal(good, bad) and good.isfinite().all()
    assert not results[0][0][77:].any() and not results[0][1][77:].any()
    assert not results[0][2][1].any() and not results[0][3][1].any()  # of the empty group
    x, w, c = (t.detach().double().requires_grad_() for t in (a, b, bias))
    exact = reference_grouped_mm(x, w, offs=offs, bias=c, activation=activation, gated=gated)
    for ours, theirs in zip(results[0][1:], torch.autograd.grad(exact, (x, w, c), grad.double())):
        atol = 6 * torch.finfo(dtype).eps * float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=0.0, atol=atol)


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "ends",
    [[0, 0, 300], [300, 300, 300], [0, 0, 0], [1, 2, 3], [127, 128, 129], [150, 150, 299]],
    ids=str,
)
def test_integers_are_exact(ends: list[int], dtype: torch.dtype) -> None:
    """Equal to a loop of `gemm`, bit for bit: all in one group, none in any, groups of one, around a tile's size."""
    offs = torch.tensor(ends, dtype=torch.int32)
    a, b, g = integers(300, 40, dtype=dtype), integers(3, 40, 24, dtype=dtype), integers(300, 24, dtype=dtype)
    out = grouped_mm(a, b, offs=offs, out_dtype=None if dtype == torch.float64 else torch.float32)
    sums = grouped_mm(a.t(), g, offs=offs)
    for group, span in enumerate(spans(offs)):
        assert torch.equal(out[span].double(), a[span].double() @ b[group].double())
        assert torch.equal(sums[group], cuda_ext.gemm(a[span].t(), g[span]))
    assert not out[ends[-1] :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_groups_and_no_elements(dtype: torch.dtype) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    for size in (0, 5):
        a, b = rand(size, 3, dtype=dtype), rand(0, 3, 4, dtype=dtype)
        out = grouped_mm(a, b, offs=none)
        assert out.shape == (size, 4) and not out.any()
        grads = torch.autograd.grad(out.sum(), (a, b))
        assert not grads[0].any() and grads[1].shape == (0, 3, 4)
        assert grouped_mm(a.t(), rand(size, 4, dtype=dtype), offs=none).shape == (0, 3, 4)


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_no_group_reach_nothing(dtype: torch.dtype) -> None:
    """NaN after the last group, as in a buffer that is larger than its tokens, and in the gradient of these rows."""
    offs = torch.tensor([30, 30, 77], dtype=torch.int32)
    a, b = rand(200, 40, dtype=dtype), rand(3, 40, 24, dtype=dtype)
    bias, grad = rand(3, 24, dtype=dtype), rand(200, 24, dtype=dtype, grad=False)
    results = []
    for rest in (0.0, torch.nan):
        rows, grads = a.detach().clone(), grad.clone()
        rows[77:], grads[77:] = rest, rest
        out = grouped_mm(rows.requires_grad_(), b, offs=offs, bias=bias)
        results.append((out, *torch.autograd.grad(out, (rows, b, bias), grads)))
    for good, bad in zip(*results):
        assert torch.equal(good, bad) and good.isfinite().all()
    assert not results[0][0][77:].any() and not results[0][1][77:].any()
    assert not results[0][2][1].any() and not results[0][3][1].any()  # of the empty group


@pytest.mark.every_backend
@pytest.mark.parametrize("ends", [[-5, 40, 90], [60, 30, 64], [10, 2**31 - 1, -(2**31)]], ids=str)
def test_ends_out_of_range_stay_inside(ends: list[int], backend: str) -> None:
    """On a GPU the host does not know them: whatever they are, nothing outside of the tensors is read or written."""
    offs = torch.tensor(ends, dtype=torch.int32)
    if backend == "cpu":
        with pytest.raises(RuntimeError, match="expected offs to be ends that do not decrease, from 0 to at most 64"):
            grouped_mm(rand(64, 8), rand(3, 8, 16), offs=offs)
        return
    guarded = torch.full((80, 8), torch.nan)
    rows = guarded[8:72].copy_(torch.ones(64, 8))
    assert grouped_mm(rows, torch.ones(3, 8, 16), offs=offs).isfinite().all()
    assert grouped_mm(rows.t(), torch.ones(64, 16), offs=offs).isfinite().all()


@pytest.mark.simt
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("form", ["2d x 3d", "2d x 2d"])
def test_no_races(form: str, arch: str) -> None:
    offs = torch.tensor([0, 70, 70, 205, 260], dtype=torch.int32)
    a, b = (integers(300, 72), integers(5, 72, 136)) if form == "2d x 3d" else (integers(136, 300), integers(300, 72))
    for dtype in (torch.bfloat16, torch.float32):
        with testing.emulated(arch, check_races=True):
            out = grouped_mm(a.to(dtype), b.to(dtype), offs=offs, out_dtype=torch.float32)
        assert torch.equal(out, reference_grouped_mm(a, b, offs=offs))
        if form == "2d x 3d":
            with testing.emulated(arch, check_races=True):
                out, product = torch.ops.cuda_ext.grouped_mm_forward(
                    a.to(dtype), b.to(dtype), offs, out_dtype=torch.float32, gated=True
                )
            assert torch.equal(out, reference_grouped_mm(a, b, offs=offs, gated=True))
            assert torch.equal(product, reference_grouped_mm(a, b, offs=offs))


@pytest.mark.simt
def test_many_groups_fill_the_grid_they_need() -> None:
    """The host launches a tile more for each group than their rows fill; more than a warp's lanes of groups."""
    for groups in (31, 32, 33, 64, 100):
        sizes = torch.randint(0, 9, (groups,))
        offs = sizes.cumsum(0).int()
        a, b = integers(int(offs[-1]) + 3, 16), integers(groups, 16, 24)
        with testing.emulated("sm_80"):
            out = grouped_mm(a, b, offs=offs)
        assert torch.equal(out, reference_grouped_mm(a, b, offs=offs))


# PyTorch's transforms


def small(form: str = "2d x 3d") -> tuple[dict[str, Tensor], Tensor]:
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    shapes = {"2d x 3d": ((6, 3), (3, 3, 4)), "2d x 2d": ((4, 6), (6, 3)), "3d x 2d": ((3, 4, 2), (2, 6))}[form]
    tensors = {name: rand(*shape, dtype=torch.float64) for name, shape in zip(("mat_a", "mat_b"), shapes)}
    if form == "2d x 3d":
        tensors["bias"] = rand(3, 4, dtype=torch.float64)
    return tensors, offs


@pytest.mark.parametrize("form", ["2d x 3d", "2d x 2d", "3d x 2d"])
def test_derivatives_of_any_order(form: str) -> None:
    tensors, offs = small(form)

    def call(*given: Tensor) -> Tensor:
        return grouped_mm(given[0], given[1], offs=offs, bias=given[2] if len(given) > 2 else None)

    inputs = tuple(tensors.values())
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize(("activation", "gated"), [("gelu", False), ("relu2", False), ("silu", True), (None, True)])
def test_derivatives_of_any_order_with_an_epilogue(activation: str | None, gated: bool) -> None:
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    inputs = tuple(rand(*shape, dtype=torch.float64) for shape in ((6, 3), (3, 3, 4), (3, 4)))

    def call(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return grouped_mm(a, b, offs=offs, bias=bias, activation=activation, gated=gated)

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True)
    a, b, bias = (t.detach() for t in inputs)
    many = torch.stack([a, 2 * a])
    out = torch.vmap(lambda x: call(x, b, bias))(many)
    torch.testing.assert_close(out, torch.stack([call(x, b, bias) for x in many]))
    grads = torch.func.grad(lambda *x: call(*x).square().sum(), argnums=(0, 1, 2))(a, b, bias)
    torch.testing.assert_close(grads, torch.autograd.grad(call(*inputs).square().sum(), inputs))


def test_vmap_and_functional_gradients() -> None:
    tensors, offs = small()
    a, b, bias = (t.detach() for t in tensors.values())
    many = torch.stack([a, 2 * a])
    out = torch.vmap(lambda x: grouped_mm(x, b, offs=offs, bias=bias))(many)
    torch.testing.assert_close(out, torch.stack([grouped_mm(x, b, offs=offs, bias=bias) for x in many]))
    ends = torch.tensor([[2, 2, 5], [0, 6, 6]], dtype=torch.int32)
    out = torch.vmap(lambda x, o: grouped_mm(x, b, offs=o), in_dims=(None, 0))(a, ends)
    torch.testing.assert_close(out, torch.stack([grouped_mm(a, b, offs=o) for o in ends]))
    grads = torch.func.grad(lambda x, w: grouped_mm(x, w, offs=offs).square().sum(), argnums=(0, 1))(a, b)
    x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
    grouped_mm(x, w, offs=offs).square().sum().backward()
    torch.testing.assert_close(grads, (x.grad, w.grad))


def test_an_expanded_gradient() -> None:
    """PyTorch's refuses the gradient of a sum, which is expanded."""
    tensors, offs = small()
    grouped_mm(tensors["mat_a"], tensors["mat_b"], offs=offs).sum().backward()
    assert tensors["mat_a"].grad is not None and tensors["mat_a"].grad.shape == (6, 3)


@pytest.mark.parametrize("form", ["2d x 3d", "2d x 2d", "3d x 2d"])
def test_opcheck_and_compile(form: str) -> None:
    tensors, offs = small(form)
    for t in (torch.float64, torch.bfloat16):
        given = {name: x.detach().to(t).requires_grad_() for name, x in tensors.items()}
        if form != "3d x 2d":
            torch.library.opcheck(
                torch.ops.cuda_ext.grouped_mm.default, (given["mat_a"], given["mat_b"], offs, given.get("bias"))
            )
        compiled = torch.compile(lambda **x: grouped_mm(**x, offs=offs), fullgraph=True, backend="aot_eager")
        out = compiled(**given)
        torch.testing.assert_close(out, grouped_mm(**given, offs=offs))
        out.sum().backward()
        assert all(x.grad is not None for x in given.values())


@pytest.mark.parametrize(("activation", "gated"), [("relu", False), ("gelu", False), ("silu", True)])
def test_opcheck_and_compile_an_epilogue(activation: str, gated: bool) -> None:
    tensors, offs = small()
    options: dict[str, Any] = {"activation": activation, "gated": gated}
    ops = torch.ops.cuda_ext
    for dtype in (torch.float64, torch.bfloat16):
        given = {name: x.detach().to(dtype).requires_grad_() for name, x in tensors.items()}
        args = (given["mat_a"], given["mat_b"], offs, given["bias"])
        torch.library.opcheck(ops.grouped_mm.default, args, options)
        torch.library.opcheck(ops.grouped_mm_forward.default, tuple(x.detach() for x in args), options)
        compiled = torch.compile(lambda **x: grouped_mm(**x, offs=offs, **options), fullgraph=True, backend="aot_eager")
        results = []
        for call in (compiled, lambda **x: grouped_mm(**x, offs=offs, **options)):
            out = call(**given)
            results.append((out, *torch.autograd.grad(out.square().sum(), tuple(given.values()))))
        assert all(map(torch.equal, *results))


def test_no_groups_with_an_epilogue() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    for size in (0, 5):
        a, b = rand(size, 3), rand(0, 3, 4)
        out = grouped_mm(a, b, offs=none, activation="silu", gated=True)
        assert out.shape == (size, 2) and not out.any()
        grads = torch.autograd.grad(out.sum(), (a, b))
        assert not grads[0].any() and grads[1].shape == (0, 3, 4)
    assert grouped_mm(rand(0, 2, 3), rand(0, 3, 4), gated=True).shape == (0, 2, 2)
    assert grouped_mm(rand(2, 0, 3), rand(2, 3, 4), gated=True).shape == (2, 0, 2)
    assert grouped_mm(rand(4, 3), rand(1, 3, 0), offs=torch.tensor([4]), gated=True).shape == (4, 0)
    (grad,) = torch.autograd.grad(
        grouped_mm(x := rand(4, 0), rand(1, 0, 6), offs=torch.tensor([4]), gated=True).sum(), x
    )
    assert grad.shape == (4, 0)


def test_autocast_and_flops() -> None:
    tensors, offs = small()
    given = {name: t.detach().float() for name, t in tensors.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_mm(**given, offs=offs).dtype == torch.bfloat16
        assert grouped_mm(**given, offs=offs, activation="silu", gated=True).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        grouped_mm(given["mat_a"], given["mat_b"], offs=offs)
    assert counter.get_total_flops() == 2 * 6 * 3 * 4
    with FlopCounterMode(display=False) as counter:
        leaf = given["mat_a"].requires_grad_()
        grouped_mm(leaf, given["mat_b"], offs=offs, gated=True).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 6 * 3 * 4


# As PyTorch's


@pytest.mark.cpu_only("PyTorch's own op")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equals_pytorch(dtype: torch.dtype) -> None:
    """The cases of PyTorch's own tests: all four forms, strided and transposed operands."""
    m, n, k, groups = 16, 32, 64, 4
    offs = torch.arange(m, groups * m + 1, m, dtype=torch.int32)
    long = torch.arange(k, groups * k + 1, k, dtype=torch.int32)
    wide = torch.arange(n, groups * n + 1, n, dtype=torch.int32)
    x = {"dtype": dtype, "grad": False}
    cases = [
        (rand(m * groups, k, **x), rand(groups, n, k, **x).mT, offs),
        (rand(m * groups, 2 * k, **x)[:, :k], rand(groups, 2 * n, 2 * k, **x)[:, :n, :k].mT, offs),
        (rand(m, groups * k, **x), rand(n, groups * k, **x).t(), long),
        (rand(groups * k, m, **x).t(), rand(groups * k, n, **x), long),
        (rand(groups, m, k, **x), rand(groups * n, k, **x).t(), wide),
        (rand(groups, m, k, **x), rand(groups, n, k, **x).mT, None),
    ]
    for a, b, ends in cases:
        ours, theirs = grouped_mm(a, b, offs=ends), F.grouped_mm(a, b, offs=ends)
        torch.testing.assert_close(ours, theirs, atol=0.05 if dtype != torch.float32 else 1e-4, rtol=0.02)


def test_a_layer_of_experts_trains() -> None:
    """Tokens sorted by their expert, as in a mixture: the same as a loop over torch.nn.Linear layers."""
    experts, tokens, width = 4, 50, 8
    layers = [torch.nn.Linear(width, width, dtype=torch.float64) for _ in range(experts)]
    others = copy.deepcopy(layers)
    of_token = torch.randint(0, experts, (tokens,)).sort().values
    x = rand(tokens, width, dtype=torch.float64, grad=False)
    offs = torch.bincount(of_token, minlength=experts).cumsum(0)
    weight = torch.stack([layer.weight for layer in layers]).mT
    out = grouped_mm(x, weight, offs=offs, bias=torch.stack([layer.bias for layer in layers]))
    out.square().sum().backward()
    expected = torch.cat([others[e](x[of_token == e]) for e in range(experts)])
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    for layer, other in zip(layers, others):
        torch.testing.assert_close(layer.weight.grad, other.weight.grad)
        torch.testing.assert_close(layer.bias.grad, other.bias.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mat_a": rand(6)}, r"expected mat_a \(T, K\) with mat_b \(groups, K, N\), or .* got \(6,\) and \(3, 3, 4\)"),
        ({"mat_a": rand(6, 5)}, r"expected mat_b of shape \(groups, 5, N\) to match mat_a \(6, 5\), got \(3, 3, 4\)"),
        ({"mat_a": rand(6, 3).double()}, "expected mat_b of dtype float64 to match mat_a, got float32"),
        ({"mat_a": integers(6, 3).int()}, "expected mat_a of dtype float32, float16, bfloat16 or float64, got int32"),
        ({"offs": None}, r"expected offs, the ends of the groups, for mat_a \(6, 3\) and mat_b \(3, 3, 4\)"),
        ({"offs": torch.tensor([2, 6])}, "expected mat_b of 2 matrices, one for each element of offs"),
        ({"offs": torch.tensor([2.0, 5, 6])}, "expected offs of shape .* and dtype int32 or int64, got .* of float32"),
        ({"offs": torch.tensor([5, 2, 6])}, "expected offs to be ends that do not decrease.* got 2 after 5 at index 1"),
        ({"offs": torch.tensor([2, 5, 7])}, "from 0 to at most 6, got 7 after 5 at index 2"),
        ({"bias": rand(4)}, r"expected bias of shape \(3, 4\), got \(4,\)"),
        ({"bias": rand(3, 4).double()}, "expected bias of dtype float32 or float32, got float64"),
        ({"mat_a": rand(2, 6), "mat_b": rand(6, 4), "bias": rand(3, 4)}, "expected no bias where the groups cut the"),
        (
            {"mat_a": rand(3, 2, 5), "mat_b": rand(5, 6), "bias": rand(3, 6)},
            "expected no bias where the groups cut col",
        ),
        ({"mat_a": rand(3, 2, 3)}, r"expected no offs for matrices of all groups, got mat_a \(3, 2, 3\)"),
        ({"activation": "swish"}, EXPECTED_ACTIVATION + ", got 'swish'"),
        (
            {"mat_b": rand(3, 3, 5), "gated": True},
            r"expected mat_b of shape \(groups, 3, 2N\), \[gate, up\], with gated",
        ),
        ({"gated": True, "bias": rand(3, 2)}, r"expected bias of shape \(3, 4\), got \(3, 2\)"),
        (
            {"mat_a": rand(2, 6), "mat_b": rand(6, 4), "gated": True},
            "expected activation=None and gated=False where the",
        ),
        ({"mat_a": rand(2, 6), "mat_b": rand(6, 4), "activation": "relu"}, "where the groups cut the terms of a sum"),
        ({"mat_a": rand(3, 2, 5), "mat_b": rand(5, 6), "gated": True}, "expected gated=False where the groups cut col"),
        ({"out_dtype": torch.float64}, "expected out_dtype float32, float16 or bfloat16"),
        ({"offs": torch.tensor([2, 5, 6], device="meta")}, "expected offs on device cpu to match mat_a, got meta"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    given = {"mat_a": rand(6, 3), "mat_b": rand(3, 3, 4), "offs": torch.tensor([2, 5, 6], dtype=torch.int32)}
    with pytest.raises(RuntimeError, match=f"cuda_ext::grouped_mm: .*{message}"):
        grouped_mm(**{**given, **change})


@pytest.mark.parametrize("gated", [False, True])
def test_errors_of_matrices_of_all_groups(gated: bool) -> None:
    """They have the sizes of the caller, not those of what the ops multiply."""
    a, b, columns = rand(3, 5, 4), rand(3, 4, 6), r"2N\), the columns of the gate first," if gated else r"N\)"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mat_b": rand(2, 4, 6)}, rf"mat_b of shape \(3, 4, {columns} to match mat_a \(3, 5, 4\), got \(2, 4, 6\)"),
        ({"mat_b": rand(3, 5, 6)}, rf"mat_b of shape \(3, 4, {columns} to match mat_a \(3, 5, 4\), got \(3, 5, 6\)"),
        ({"mat_b": b.double()}, "mat_b of dtype float32 to match mat_a, got float64; convert one with .to()"),
        ({"bias": rand(6)}, r"bias of shape \(3, 6\), got \(6,\)"),
        ({"bias": rand(15, 6)}, r"bias of shape \(3, 6\), got \(15, 6\)"),
    ]
    for change, message in cases + [({"mat_b": rand(3, 4, 5)}, r"mat_b of shape .* got \(3, 4, 5\)")] * gated:
        with pytest.raises(RuntimeError, match=f"cuda_ext::grouped_mm: expected {message}"):
            grouped_mm(**{"mat_a": a, "mat_b": b, **change}, gated=gated)
