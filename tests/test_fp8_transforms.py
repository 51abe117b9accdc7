"""The ops and layers of FP8 under PyTorch's transforms, each against plain calls: vmap, torch.func, DTensor, fake
tensors, export, compile, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import cuda_ext
from cuda_ext import fp8, scaled_grouped_mm, scaled_mm

SCALINGS = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")


def assert_same(found: Any, expected: Any) -> None:
    """Bit for bit; also numbers of FP8, which have no comparison of their own in all releases."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert mine.float().equal(theirs.float())


def assert_near(found: Any, expected: Any) -> None:
    """But for the order of sums in float32, which may depend on the number of rows."""
    for mine, theirs in zip(found, expected, strict=True):
        eps = max(2.0**-18, torch.finfo(theirs.dtype).eps)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=eps * float(theirs.detach().abs().max()))


def one_by_one(function: Callable[..., Any], *batches: Any) -> list[Tensor]:
    results = [function(*each) for each in zip(*batches, strict=True)]
    results = [each if isinstance(each, tuple) else (each,) for each in results]
    return [torch.stack(each) for each in zip(*results, strict=True)]


def as_tuple(results: Any) -> Any:
    return results if isinstance(results, tuple) else (results,)


# vmap and torch.func


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("op", [fp8.quantize, fp8.quantize_both])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_vmap_of_quantisation(scaling: str, op: Callable[..., Any], dim: int) -> None:
    x = torch.randn(3, 5, 200).mul(torch.tensor([1.0, 100.0, 0.01])[:, None, None])  # no scale of all would do
    call = lambda each: op(each, scaling, power_of_two=True)  # noqa: E731
    found = torch.vmap(call, in_dims=dim)(x.movedim(0, dim))
    assert_same(found, one_by_one(call, x))


def test_vmap_calls_once_where_scales_are_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapped dimension becomes more rows."""
    from cuda_ext._rules import fp8_vmap

    calls: list[Any] = []

    def counting(op: Any) -> Any:
        return lambda *args, **options: calls.append(op) or op(*args, **options)

    monkeypatch.setitem(fp8_vmap._quantize, "default", counting(fp8_vmap._quantize["default"]))
    monkeypatch.setattr(fp8_vmap, "_scaled_mm", counting(fp8_vmap._scaled_mm))
    x, (b, scale_b) = torch.randn(3, 5, 200), fp8.quantize(torch.randn(7, 200), "BlockWise128x128")
    torch.vmap(lambda each: fp8.quantize(each, "RowWise"))(x)
    assert len(calls) == 1

    def product(each: Tensor) -> Tensor:
        a, scale_a = fp8.quantize(each, "BlockWise1x128")
        return scaled_mm(a, b.t(), scale_a, "BlockWise1x128", scale_b, "BlockWise128x128")

    assert_near([torch.vmap(product)(x)], one_by_one(product, x))
    assert len(calls) == 3
    torch.vmap(lambda each: fp8.quantize(each, "TensorWise"))(x)
    assert len(calls) == 6  # one for each


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_vmap_of_products(scaling: str, mapped: tuple[int | None, int | None]) -> None:
    """Left, right or both operands are mapped, with their scales, a bias and an addend."""
    left, right = torch.randn(3, 5, 200), torch.randn(3, 7, 200)
    a, b = (torch.vmap(lambda each: fp8.quantize(each, scaling))(x) for x in (left, right))
    bias, addend = torch.randn(7), torch.randn(3, 5, 7)
    in_dims = (mapped[0],) * 2 + (mapped[1],) * 2
    given = [t if dim is not None else t[0] for t, dim in zip((*a, *b), in_dims, strict=True)]

    def product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, **more: Any) -> Tensor:
        more |= {"bias": bias, "output_dtype": torch.float32}
        return scaled_mm(a, b.t(), scale_a, scaling, scale_b, scaling, **more)

    batches = [t if dim is not None else [t] * 3 for t, dim in zip(given, in_dims, strict=True)]
    assert_near([torch.vmap(product, in_dims=in_dims)(*given)], one_by_one(product, *batches))
    with_addend = lambda *tensors: product(*tensors[:4], input=tensors[4], beta=0.5)  # noqa: E731
    for dim in (0, None):
        addends = addend if dim == 0 else addend[0]
        found = torch.vmap(with_addend, in_dims=(*in_dims, dim))(*given, addends)
        assert_near([found], one_by_one(with_addend, *batches, addend if dim == 0 else [addends] * 3))


def test_vmap_of_groups() -> None:
    x, offs = torch.randn(3, 9, 64), torch.tensor([[2, 2, 9], [0, 4, 7], [9, 9, 9]])
    weights, scales = fp8.quantize(torch.randn(3 * 16, 64))

    def product(each: Tensor, ends: Tensor) -> Tensor:
        data, scale = fp8.quantize(each)
        matrices = weights.contiguous().view(3, 16, 64).mT
        return scaled_grouped_mm(data, matrices, scale, "RowWise", scales.view(3, 16), "RowWise", offs=ends)

    assert_near([torch.vmap(product)(x, offs)], one_by_one(product, x, offs))


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_vmap_and_gradients_of_linear(recipe: str) -> None:
    """Of each sample, as `torch.func` computes them, and for each of several weights."""
    x, weights, bias = torch.randn(3, 5, 130), torch.randn(3, 8, 130), torch.randn(8)
    call = lambda x, weight: fp8.linear(x, weight, bias, recipe=recipe)  # noqa: E731
    assert_near([torch.vmap(call)(x, weights)], one_by_one(call, x, weights))
    assert_near([torch.vmap(call, (0, None))(x, weights[0])], one_by_one(call, x, [weights[0]] * 3))
    gradients = torch.func.grad(lambda weight, x: call(x, weight).square().sum(), argnums=(0, 1))
    expected = one_by_one(gradients, [weights[0]] * 3, x)
    assert_near(torch.vmap(gradients, (None, 0))(weights[0], x), expected)
    leaves = weights[0].clone().requires_grad_(), x[0].clone().requires_grad_()
    plain = torch.autograd.grad(call(leaves[1], leaves[0]).square().sum(), leaves)
    assert_near([each[0] for each in expected], plain)


def test_gradients_of_each_sample_of_a_converted_model() -> None:
    model = nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 8))
    fp8.convert(model, "blockwise", least_features=1)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    samples = torch.randn(3, 6, 40)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    together = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, samples)
    for number, x in enumerate(samples):
        alone = torch.func.grad(loss)(parameters, x)
        assert_near([together[name][number] for name in alone], alone.values())


def test_forward_mode_is_refused() -> None:
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    message = r"fp8.linear: expected reverse mode, got a tensor with a tangent .*cuda_ext\.fp8\.revert\(model\)"
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(lambda x: fp8.linear(x, weight), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        assert fp8.linear(x, weight).shape == (4, 6)  # without a tangent
        with pytest.raises(RuntimeError, match=message):
            fp8.linear(x, torch.autograd.forward_ad.make_dual(weight, weight))


# Compilers, fake tensors, copies


def converted(recipe: str = "rowwise") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(130, 48), nn.ReLU(), nn.Linear(48, 16))
    fp8.convert(model, recipe, least_features=1)
    return model


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_one_graph_for_any_batch(recipe: str) -> None:
    """Several layers, whose second one met a bug of Dynamo with symbolic defaults."""
    model = converted(recipe)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 5, 33):
        x, twin = (torch.ones(rows, 130).requires_grad_() for _ in range(2))
        out, expected = compiled(x), model(twin)
        assert out.equal(expected)
        found = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
        assert_same(found, torch.autograd.grad(expected.square().sum(), [twin, *model.parameters()]))


def test_one_graph_of_experts_for_any_batch() -> None:
    layer = cuda_ext.nn.MixtureOfExperts(32, 16, 4, 2)
    fp8.convert(layer, fp8.EXPERTS_RECIPES[0], least_features=1)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 5, 33):
        x = torch.randn(rows, 32)
        assert compiled(x).equal(layer(x))


@pytest.mark.parametrize("recipe", fp8.EXPERTS_RECIPES)
def test_batched_gradients_of_experts(recipe: str) -> None:
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((9, 32), (9, 2), (4, 48, 32), (4, 32, 24))]
    ids = torch.randint(0, 5, (9, 2))
    out = cuda_ext.mixture_of_experts(leaves[0], ids, *leaves[1:], fp8=recipe)
    grads = torch.randn(3, 9, 32)
    batched = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
    for index, grad in enumerate(grads):
        for found, expected in zip(batched, torch.autograd.grad(out, leaves, grad, retain_graph=True), strict=True):
            torch.testing.assert_close(found[index], expected)


def test_an_exported_program() -> None:
    """For any batch, also from a file. It has no backward: parameters that require grad are refused."""
    model, x = converted(), torch.randn(3, 130)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in (2, 16, 33):
        x = torch.randn(size, 130)
        with torch.no_grad():
            assert loaded(x).equal(model(x)) and program.module()(x).equal(model(x))
    with pytest.raises(RuntimeError, match=r"expected no tensor that requires grad.* under torch.no_grad\(\)"):
        loaded(x)


def test_fake_tensors() -> None:
    """Shapes, dtypes and strides of real results."""
    x, offs = torch.randn(5, 200), torch.tensor([2, 5])
    weights, scales = fp8.quantize(torch.randn(2 * 16, 200))

    def results(x: Tensor, weights: Tensor, scales: Tensor, offs: Tensor) -> list[Tensor]:
        found = [each for scaling in SCALINGS for each in fp8.quantize_both(x, scaling)]
        data, scale = fp8.quantize(x)
        found.append(scaled_mm(data, weights.t(), scale, "RowWise", scales, "RowWise"))
        matrices = weights.contiguous().view(2, 16, 200).mT
        grouped = scaled_grouped_mm(data, matrices, scale, "RowWise", scales.view(2, 16), "RowWise", offs=offs)
        left, right = (fp8.quantize(each.t(), "BlockWise1x128") for each in (x, 2 * x))
        sums = scaled_grouped_mm(
            left[0], right[0].t(), left[1], "BlockWise1x128", right[1], "BlockWise1x128", offs=offs[1:]
        )
        return [*found, grouped, sums]

    expected = results(x, weights, scales, offs)
    with FakeTensorMode() as mode:
        found = results(*(mode.from_tensor(each) for each in (x, weights, scales, offs)))
    for fake, real in zip(found, expected, strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_copies_and_pickles() -> None:
    experts = cuda_ext.nn.MixtureOfExperts(130, 16, 4, 2)
    fp8.convert(experts, fp8.EXPERTS_RECIPES[0], least_features=1)
    for model in (converted(), experts):
        x = torch.randn(5, 130)
        with fp8.unchanged_weights():
            model(x)  # what is kept is not copied
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert other(x).equal(model(x)) and "fp8=row" in repr(other)
                with torch.no_grad():
                    for parameter in other.parameters():
                        parameter.mul_(2)
                assert not other(x).equal(model(x))


# DTensor


def own_part(tensor: Tensor, dim: int | None) -> Tensor:
    """As Shard splits it."""
    return (
        tensor if dim is None else tensor.chunk(torch.distributed.get_world_size(), dim)[torch.distributed.get_rank()]
    )


def distributed(tensor: Tensor, dim: int | None) -> Any:
    """From parts, as gloo sends no FP8."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    place = Replicate() if dim is None else Shard(dim)
    part = own_part(tensor, dim).contiguous()
    return DTensor.from_local(part, mesh, [place], shape=tensor.shape, stride=tensor.contiguous().stride())


def assert_parts(found: Any, expected: Any, dim: int | None) -> None:
    """Each rank has its part of a result that is split at `dim`."""
    for mine, theirs in zip(as_tuple(found), as_tuple(expected), strict=True):
        assert str(mine.placements[0]) == ("R" if dim is None else f"S({dim})")
        assert mine.shape == theirs.shape
        part = own_part(theirs, dim)
        if part.dtype.itemsize == 1 or part.shape == theirs.shape:
            assert_same([mine.to_local()], [part])
        else:
            assert_near([mine.to_local()], [part])


@pytest.mark.parametrize("rows", [6, 7])
@on_ranks(2)
def test_dtensors_are_quantised_by_rows(rows: int) -> None:
    """Split rows stay split where scales are of rows; all else is gathered, and right."""
    x = torch.randn(rows, 300)
    for scaling in SCALINGS:
        for op in (fp8.quantize, fp8.quantize_both):
            for dim in (None, 0, 1):
                stays = op is fp8.quantize and dim == 0 and scaling in ("RowWise", "BlockWise1x128")
                assert_parts(op(distributed(x, dim), scaling), op(x, scaling), 0 if stays else None)


@on_ranks(2)
def test_products_of_dtensors() -> None:
    """A left operand split by rows, a right one by columns, or none, whose scales are not of blocks of lines."""
    x, w, bias, addend = torch.randn(7, 300), torch.randn(9, 300), torch.randn(9), torch.randn(7, 9)
    for left, right in [(left, right) for left in SCALINGS for right in SCALINGS]:
        (a, scale_a), (b, scale_b) = fp8.quantize(x, left), fp8.quantize(w, right)
        expected = scaled_mm(
            a, b.t(), scale_a, left, scale_b, right, bias=bias, input=addend, output_dtype=torch.float32
        )
        for out in (0, 1, None):
            at_a, at_b = 0 if out == 0 else None, 0 if out == 1 else None
            if (left if out == 0 else right if out == 1 else "") == "BlockWise128x128":
                continue  # needs the whole operand, which gloo does not send
            found = scaled_mm(
                distributed(a, at_a),
                distributed(b, at_b).t(),
                distributed(scale_a, None if left == "TensorWise" else at_a),
                left,
                distributed(scale_b, None if right == "TensorWise" else at_b),
                right,
                bias=distributed(bias, at_b),
                input=distributed(addend, out),
                output_dtype=torch.float32,
            )
            assert_parts(found, expected, out)


@on_ranks(2)
def test_groups_of_dtensors() -> None:
    (a, scale_a), (b, scale_b) = fp8.quantize(torch.randn(9, 64)), fp8.quantize(torch.randn(3 * 16, 64))
    b, scale_b = b.contiguous().view(3, 16, 64), scale_b.view(3, 16)
    offs, bias = torch.tensor([2, 2, 7]), torch.randn(3, 16)
    expected = scaled_grouped_mm(a, b.mT, scale_a, "RowWise", scale_b, "RowWise", offs=offs, bias=bias)
    for split in (1, None):
        found = scaled_grouped_mm(
            distributed(a, None),
            distributed(b, split).mT,
            distributed(scale_a, None),
            "RowWise",
            distributed(scale_b, split),
            "RowWise",
            offs=distributed(offs, None),
            bias=distributed(bias, split),
        )
        assert_parts(found, expected, split)


@on_ranks(2)
def test_groups_of_terms_of_dtensors() -> None:
    (a, scale_a), (b, scale_b) = (fp8.quantize(torch.randn(lines, 384), "BlockWise1x128") for lines in (6, 16))
    scaling, offs = "BlockWise1x128", torch.tensor([128, 128, 384])
    expected = scaled_grouped_mm(a, b.t(), scale_a, scaling, scale_b, scaling, offs=offs)
    for out, at_a, at_b in ((1, 0, None), (2, None, 0), (None, None, None)):
        found = scaled_grouped_mm(
            distributed(a, at_a),
            distributed(b, at_b).t(),
            distributed(scale_a, at_a),
            scaling,
            distributed(scale_b, at_b),
            scaling,
            offs=distributed(offs, None),
        )
        assert_parts(found, expected, out)


@pytest.mark.parametrize("recipe", fp8.RECIPES)
@on_ranks(2)
def test_layers_on_dtensors(recipe: str) -> None:
    """Split as tensor and data parallel layers are: values and gradients of the whole."""
    leaves = {"x": torch.randn(6, 40), "weight": torch.randn(10, 40), "bias": torch.randn(10)}
    whole = {name: t.clone().requires_grad_() for name, t in leaves.items()}
    expected = fp8.linear(whole["x"], whole["weight"], whole["bias"], recipe=recipe)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, list(whole.values()), grad)
    for splits in ({}, {"x": 0}, {"weight": 0, "bias": 0}, {"x": 1, "weight": 1}):
        parts = {name: distributed(t, splits.get(name)).requires_grad_() for name, t in leaves.items()}
        out = fp8.linear(parts["x"], parts["weight"], parts["bias"], recipe=recipe)
        torch.testing.assert_close(out.full_tensor(), expected)
        of_out = distributed(grad, 0 if splits == {"x": 0} else None)
        found = torch.autograd.grad(out, list(parts.values()), of_out)
        for mine, theirs in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)
        if recipe == "rowwise_with_gw_hp" and splits == {"x": 0}:  # nothing of the size of the input is gathered
            where = [str(each.placements[0]) for each in (out, *found)]
            assert where == ["S(0)", "S(0)", "P(sum)", "P(sum)"], where
