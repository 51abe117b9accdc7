"""Gradients of weights that go straight into their places in a bucket: values, who else must see them, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from gemm_common import OPS, REFERENCES, integers, rand, shapes_of
from gradient_slots_common import DTYPES, WEIGHTS, Reducer, assert_same, linear_case, whole
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import cuda_ext
from cuda_ext import bucket
from cuda_ext._load import ops
from cuda_ext.testing import emulated

# values


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("op", WEIGHTS)
def test_gradients_equal_those_of_plain_autograd(op: str, lead: tuple[int, ...], dtype: torch.dtype) -> None:
    """First write, accumulation, and a pass that averages, of whole numbers that every dtype here holds exactly."""
    small = dtype in (torch.bfloat16, torch.float16)
    sizes = (3, 4, 5, 3) if small else (7, 65, 131, 33)
    weights = WEIGHTS[op]
    shapes = shapes_of(op, lead, *sizes)
    sign = lambda *shape: torch.randint(-1, 2, shape, dtype=torch.float64)  # noqa: E731
    parameters = {name: sign(*shapes[name]).to(dtype).requires_grad_() for name in weights}
    reducer = Reducer(*parameters.values())
    total = [torch.zeros(shapes[name], dtype=torch.float64) for name in weights]

    def loss(function: Callable[..., Tensor], given: dict[str, Tensor], x: Tensor, factor: Tensor) -> Tensor:
        return (function(input=x, **given, activation=None) * factor).sum()

    for step in range(3):
        x, factor = sign(*shapes["input"]), sign(*lead, sizes[0], sizes[1])
        exact = {name: parameter.detach().double().requires_grad_() for name, parameter in parameters.items()}
        gradients = torch.autograd.grad(loss(REFERENCES[op], exact, x, factor), list(exact.values()))
        total = [before + gradient for before, gradient in zip(total, gradients, strict=True)]
        here = loss(OPS[op], parameters, x.to(dtype), factor.to(dtype))
        if step < 2:
            reducer.accumulate(here)
            reducer.assert_in_place(*total)
        else:
            assert reducer.synchronize(here, 0.25) == [True] * len(weights)
            reducer.assert_in_place(*(0.25 * gradient for gradient in total))
    assert all(reducer.collected)


@pytest.mark.parametrize("op", WEIGHTS)
def test_real_numbers_in_float64(op: str) -> None:
    shapes = shapes_of(op, (3,), 20, 13, 300, 17)
    weights = WEIGHTS[op]
    tensors = {name: rand(*shape, dtype=torch.float64) for name, shape in shapes.items() if name != "residual"}
    plain = torch.autograd.grad(OPS[op](**tensors, activation="gelu").sum(), [tensors[name] for name in weights])
    reducer = Reducer(*(tensors[name] for name in weights))
    for _ in range(2):
        reducer.accumulate(OPS[op](**tensors, activation="gelu").sum())
    assert all(reducer.synchronize(OPS[op](**tensors, activation="gelu").sum(), 1 / 3))
    for view, gradient in zip(reducer.views, plain, strict=True):
        torch.testing.assert_close(view, gradient, rtol=1e-12, atol=1e-12 * float(gradient.abs().max()))
    assert tensors["input"].grad is not None
    assert tensors[weights[0].replace("weight", "bias")].grad is not None


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(), (0,), (1,), (2400,), (3, 2, 50), (2, 5, 3, 4)])
def test_a_product_adds_to_its_own_output(rows: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    """alpha * grad^T input + beta * slot, rounded once, whatever dims are summed over, k split among blocks or not."""
    sizes = [(1, 1), (20, 20), (33, 65)] if backend == "simt" else [(1, 1), (5, 1), (1, 7), (33, 65), (300, 257)]
    for n, k in sizes:
        grad, x = integers(*rows, n, dtype=dtype), integers(*rows, k, dtype=dtype)
        if len(rows) >= 2:  # dims that cannot be merged
            grad, x = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (grad, x))
        weight = torch.zeros(n, k, dtype=dtype)
        product = grad.double().reshape(-1, n).t() @ x.double().reshape(-1, k)
        slot_dtypes = (dtype,) if dtype == torch.float64 else DTYPES[:3]
        for slot_dtype in slot_dtypes:
            for alpha, beta in ((1.0, 0.0), (0.5, 1.0), (2.0, -0.25)):
                memory = integers(n * k + 3, dtype=slot_dtype)
                slot = memory[3:].view(n, k)
                before = slot.to(torch.float64, copy=True) if beta != 0.0 else torch.zeros(())
                if beta == 0.0:
                    slot.fill_(torch.nan)
                edge = memory[:3].clone()
                result = ops.linear_backward.slot(
                    grad,
                    x,
                    weight,
                    None,
                    output_mask=[False, True, False],
                    weight_slot=slot,
                    slot_alpha=alpha,
                    slot_beta=beta,
                )
                assert [t.numel() for t in result] == [0, 0, 0]
                assert_same(slot, alpha * product + beta * before)
                assert_same(memory[:3], edge)


@pytest.mark.every_backend
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_weight_that_is_used_twice(scale: float) -> None:
    x, w, gradient = linear_case()
    reducer = Reducer(w)
    assert reducer.synchronize((cuda_ext.linear(x, w) + cuda_ext.linear(2 * x, w)).sum(), scale) == [True]
    reducer.assert_in_place(scale * 3 * gradient)
    assert reducer.collected == [True]

    square = whole(6, 6)
    x = integers(4, 6)
    plain = square.detach().clone().requires_grad_()
    (x @ plain.t() @ plain.t()).sum().backward()
    reducer = Reducer(square)
    reducer.accumulate(cuda_ext.mlp(x, square, square, activation=None).sum())
    reducer.assert_in_place(plain.grad)


@pytest.mark.every_backend
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("accumulated", [0, 1, 2])
def test_other_ops_contribute_to_the_same_weight(scale: float, first: bool, accumulated: int) -> None:
    """An embedding and a plain linear layer, whose nodes run before or after the one that writes to the slot."""
    x, w, gradient = linear_case()
    index = torch.tensor([1, 4, 1])

    def loss() -> Tensor:
        others = F.embedding(index, w).sum() + F.linear(x, w).sum()
        ours = cuda_ext.linear(x, w).sum()
        return others + ours if first else ours + others

    one = 2 * gradient
    for row in index:
        one[row] += 1
    reducer = Reducer(w)
    for _ in range(accumulated):
        reducer.accumulate(loss())
    assert reducer.synchronize(loss(), scale) == [True]
    reducer.assert_in_place(scale * (accumulated + 1) * one)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_came_the_usual_way_is_taken(dtype: torch.dtype, scale: float) -> None:
    """Alone, beside what an op has written, on top of accumulated gradients, and again when a pass adds to it."""
    x, w, grad = linear_case(dtype)
    reducer = Reducer(w, takes=True)
    assert reducer.synchronize(F.linear(x, w).sum(), scale) == [True]
    reducer.assert_in_place(scale * grad)
    assert reducer.collected == [True]

    w.grad = None
    assert reducer.synchronize((cuda_ext.linear(x, w) + F.linear(x, w)).sum(), scale) == [True]
    reducer.assert_in_place(2 * scale * grad)

    w.grad = None
    reducer.accumulate(F.linear(x, w).sum())
    reducer.assert_in_place(grad)
    reducer.accumulate(F.linear(x, w).sum())
    reducer.assert_in_place(2 * grad)
    assert reducer.synchronize(F.linear(x, w).sum(), scale) == [True]
    reducer.assert_in_place(3 * scale * grad)

    w.grad = None
    reducer.slots.open(scale)
    F.linear(x, w).sum().backward()
    F.linear(x, w).sum().backward()
    assert reducer.slots.lock(0)
    reducer.assert_in_place(2 * scale * grad)


def test_what_is_not_taken() -> None:
    """Sparse gradients, and all once the slot is locked or closed."""
    w = whole(5, 7)
    reducer = Reducer(w, takes=True)
    assert reducer.synchronize(F.embedding(torch.tensor([1, 3]), w, sparse=True).sum()) == [False]
    assert w.grad is not None and w.grad.is_sparse
    x, w, grad = linear_case()
    reducer = Reducer(w, takes=True)
    reducer.slots.open(0.25)
    assert not reducer.slots.lock(0)
    F.linear(x, w).sum().backward()
    assert reducer.collected == [False]
    reducer.slots.unlock_all()
    reducer.slots.close()
    F.linear(x, w).sum().backward()
    assert reducer.collected == [False, False]
    assert reducer.is_untouched()
    assert_same(w.grad, 2 * grad)


def test_a_pass_without_the_op_leaves_the_gradient_to_pack() -> None:
    """What an earlier pass left in the slot and a plain op has added to is unscaled, and lock says so."""
    x, w, gradient = linear_case()
    reducer = Reducer(w)
    reducer.accumulate(cuda_ext.linear(x, w).sum())
    assert reducer.synchronize(F.linear(x, w).sum(), 0.5) == [False]
    reducer.assert_in_place(2 * gradient)
    bucket.pack([w.grad], reducer.bucket, [0], scale=0.5)
    reducer.assert_in_place(gradient)


def test_what_was_in_the_slot_is_read_only_if_it_is_the_gradient() -> None:
    x, w, gradient = linear_case()
    reducer = Reducer(w)
    reducer.accumulate(cuda_ext.linear(x, w).sum())
    w.grad = None
    reducer.bucket.fill_(torch.nan)
    reducer.accumulate(cuda_ext.linear(x, w).sum())
    reducer.assert_in_place(gradient)
    w.grad = reducer.bucket[:35].view(5, 7)  # another tensor, the same memory
    reducer.accumulate(cuda_ext.linear(x, w).sum())
    reducer.assert_in_place(2 * gradient)
    for own in (torch.ones(5, 7), torch.ones(7, 5).t(), torch.eye(5, 7).to_sparse()):
        w.grad = own
        assert reducer.synchronize(cuda_ext.linear(x, w).sum(), 0.5) == [True]
        reducer.assert_in_place(0.5 * (own.to_dense() + gradient))


def test_a_bucket_that_keeps_what_is_in_place() -> None:
    """All of it: two layers whose weights are written in place, and biases that are packed."""
    x, weights, biases = integers(3, 7), [whole(5, 7), whole(2, 5)], [whole(5), whole(2)]
    loss = cuda_ext.linear(cuda_ext.linear(x, weights[0], biases[0]), weights[1], biases[1]).sum()
    expected = torch.autograd.grad(loss, [*weights, *biases], retain_graph=True)
    offsets, size = bucket.aligned_offsets([p.numel() for p in (*weights, *biases)], torch.float32)
    reducer = Reducer(*weights, *biases)
    locked = reducer.synchronize(loss, 0.5)
    assert locked == [True, True, False, False]
    grads = [parameter.grad for parameter in reducer.parameters]
    kept = [index for index, is_kept in enumerate(locked) if is_kept]
    bucket.pack(grads, reducer.bucket, offsets, scale=0.5, kept=kept)
    for view, gradient in zip(reducer.views, expected, strict=True):
        assert_same(view, 0.5 * gradient)
    assert size == reducer.bucket.numel()


# who else must see gradients


def test_gradients_that_were_asked_for_do_not_lie_in_the_slot() -> None:
    x, w, gradient = linear_case()
    x.requires_grad_()
    reducer = Reducer(w)
    reducer.slots.open(0.5)
    (grad,) = torch.autograd.grad(cuda_ext.linear(x, w).sum(), [w])
    assert_same(grad, gradient)
    torch.autograd.grad(cuda_ext.linear(x, w).sum(), [x])
    cuda_ext.linear(x, w).sum().backward(inputs=[x])
    assert w.grad is None and reducer.is_untouched()
    node = cuda_ext.linear(x, w).grad_fn
    assert_same(node(torch.ones(3, 5))[1], gradient)
    assert w.grad is None and reducer.is_untouched()

    hidden = x * 1
    reducer.slots.open(1.0)
    cuda_ext.linear(hidden, w).sum().backward(inputs=[hidden, w])
    reducer.assert_in_place(gradient)
    assert hidden.grad is not None


def _multiply(gradient: Tensor) -> Tensor:
    return 3 * gradient


@pytest.mark.parametrize("kind", ["tensor", "node", "post_accumulate", "create_graph"])
def test_whoever_looks_at_gradients_sees_them(kind: str) -> None:
    x, w, gradient = linear_case()
    reducer, seen = Reducer(w), []
    reducer.slots.open(0.5)
    factor = 1
    if kind == "tensor":
        w.register_hook(_multiply)
        factor = 3
    elif kind == "node":
        get_gradient_edge(w).node.register_prehook(lambda gradients: (_multiply(gradients[0]),))
        factor = 3
    elif kind == "post_accumulate":
        w.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for count in (1, 2):
        cuda_ext.linear(x, w).sum().backward(create_graph=kind == "create_graph")
        assert_same(w.grad.detach(), count * factor * gradient)
        assert reducer.is_untouched() and reducer.collected == [False] * count
    assert len(seen) == (2 if kind == "post_accumulate" else 0)
    w.grad = None


def test_a_locked_or_closed_slot_takes_nothing() -> None:
    x, w, gradient = linear_case()
    reducer = Reducer(w)
    cuda_ext.linear(x, w).sum().backward()  # never opened
    reducer.slots.open(0.5)
    assert not reducer.slots.lock(0)
    cuda_ext.linear(x, w).sum().backward()
    reducer.slots.unlock_all()
    reducer.slots.close()
    cuda_ext.linear(x, w).sum().backward()
    assert_same(w.grad, 3 * gradient)
    assert reducer.is_untouched() and not any(reducer.collected)
    assert reducer.synchronize(cuda_ext.linear(x, w).sum(), 0.5) == [True]
    reducer.assert_in_place(2 * gradient)


def test_frozen_weights() -> None:
    x, w, gradient = linear_case()
    x.requires_grad_()
    reducer = Reducer(w)
    reducer.slots.open(1.0)
    out = cuda_ext.linear(x, w)
    w.requires_grad_(False)
    out.sum().backward()  # frozen after the forward pass: its gradient is dropped
    cuda_ext.linear(x, w).sum().backward()
    assert w.grad is None and reducer.is_untouched()
    w.requires_grad_(True)
    reducer.accumulate(cuda_ext.linear(x, w).sum())
    assert_same(w.grad, gradient)


def test_a_graph_that_is_kept_adds_again() -> None:
    x, w, gradient = linear_case()
    reducer = Reducer(w)
    loss = cuda_ext.linear(x, w).sum()
    reducer.accumulate(loss, retain_graph=True)
    reducer.accumulate(loss, retain_graph=True)
    reducer.assert_in_place(2 * gradient)
    loss.backward()  # without another open
    reducer.assert_in_place(3 * gradient)


@pytest.mark.every_backend
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_activation_checkpoints(use_reentrant: bool, scale: float) -> None:
    """Two checkpoints that share a weight, which a plain op in one of them uses too."""
    x, w = whole(3, 6), whole(6, 6)

    def first(x: Tensor) -> Tensor:
        return cuda_ext.linear(x, w)

    def second(x: Tensor) -> Tensor:
        return cuda_ext.linear(x, w) + F.linear(x, w)

    plain = w.detach().clone().requires_grad_()
    (2 * F.linear(F.linear(x.detach(), plain), plain)).sum().backward()
    reducer = Reducer(w)
    for order in ((first, second), (second, first)):
        out = x
        for part in order:
            out = checkpoint(part, out, use_reentrant=use_reentrant)
        w.grad = None
        assert reducer.synchronize(out.sum(), scale) == [True]
        reducer.assert_in_place(scale * plain.grad)


def test_re_entrant_passes_of_plain_ops_after_the_slot_was_written() -> None:
    """Their gradients arrive unscaled, after `collect`: lock finds them."""
    x, w = whole(3, 6), whole(6, 6)
    plain = w.detach().clone().requires_grad_()
    F.linear(F.linear(x.detach(), plain), plain).sum().backward()
    reducer = Reducer(w)
    hidden = checkpoint(lambda x: F.linear(x, w), x, use_reentrant=True)  # its backward pass comes last
    out = checkpoint(lambda x: cuda_ext.linear(x, w), hidden, use_reentrant=True)
    assert reducer.synchronize(out.sum(), 0.5) == [True]
    reducer.assert_in_place(0.5 * plain.grad)
    assert reducer.collected == [True, True]


def test_saved_tensors_on_their_way_elsewhere() -> None:
    """The weight that comes back from a hook is another tensor; the graph knows whose gradient it is."""
    x, w, gradient = linear_case()
    reducer = Reducer(w)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        loss = cuda_ext.linear(x, w).sum()
    reducer.accumulate(loss)
    reducer.assert_in_place(gradient)


@pytest.mark.parametrize("op", WEIGHTS)
def test_compiled_code_gives_gradients_as_always(op: str) -> None:
    torch._dynamo.reset()
    weights = WEIGHTS[op]
    shapes = shapes_of(op, (), 3, 4, 5)
    tensors = {name: rand(*shape) for name, shape in shapes.items() if name != "residual"}
    plain = torch.autograd.grad(OPS[op](**tensors).sum(), [tensors[name] for name in weights])
    reducer = Reducer(*(tensors[name] for name in weights))
    reducer.slots.open(0.5)
    torch.compile(OPS[op], fullgraph=True, backend="aot_eager")(**tensors).sum().backward()
    for name, gradient in zip(weights, plain, strict=True):
        torch.testing.assert_close(tensors[name].grad, gradient)
    assert reducer.is_untouched()


# autocast


@pytest.mark.every_backend
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("op", WEIGHTS)
def test_autocast_writes_float32(op: str, cached: bool, backend: str) -> None:
    """Two uses of one weight, of the sums of which the plain path rounds each to 16 bits."""
    shapes = {name: shape for name, shape in shapes_of(op, (2,), 9, 33, 70, 17).items() if name != "residual"}
    device = torch.get_default_device()
    tensors = {name: rand(*shape).to(device).detach().requires_grad_() for name, shape in shapes.items()}
    weights = [tensors[name] for name in WEIGHTS[op]]

    def loss(function: Callable[..., Tensor] = OPS[op], given: dict[str, Tensor] = tensors) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cached):
            return sum(function(**given, activation="silu").float().sum() for _ in range(2))

    plain = torch.autograd.grad(loss(), weights)
    # The forward pass rounds in both the same way; what is left is how its gradient comes to float32.
    low = {name: tensor.detach().bfloat16() for name, tensor in tensors.items()}
    reducer = Reducer(*weights)
    assert reducer.synchronize(loss(), 1.0) == [True] * len(weights)
    if op != "linear":
        for view, gradient in zip(reducer.views, plain, strict=True):
            torch.testing.assert_close(view, gradient, rtol=2**-7, atol=2**-7 * float(gradient.abs().max()))
        return
    exact = {name: tensor.double().requires_grad_() for name, tensor in low.items()}
    preact = OPS[op](**low).double()
    slope = torch.sigmoid(preact) * (1 + preact * (1 - torch.sigmoid(preact)))
    reference = 2 * (slope.bfloat16().double().flatten(0, -2).t() @ exact["input"].detach().flatten(0, -2))
    error, plain_error = (float((t.double() - reference).abs().max()) for t in (reducer.views[0], plain[0]))
    assert error <= plain_error
    assert error < 2**-20 * float(reference.abs().max()) * 70


def test_a_cast_that_somebody_looks_at_is_not_passed_by() -> None:
    x, w, gradient = linear_case()
    reducer = Reducer(w)
    x = x.bfloat16()

    def loss(cast: Tensor) -> Tensor:
        return cuda_ext.linear(x, cast).float().sum()

    reducer.slots.open(0.5)
    hooked = w.bfloat16()
    hooked.register_hook(_multiply)
    loss(hooked).backward()
    retained = w.bfloat16()
    retained.retain_grad()
    loss(retained).backward()
    assert_same(retained.grad, gradient)
    asked = w.bfloat16()
    assert_same(torch.autograd.grad(loss(asked), [asked])[0], gradient)
    doubled = w.double().bfloat16()  # two casts
    loss(doubled).backward()
    assert_same(w.grad, 5 * gradient)
    assert reducer.is_untouched()
    w.grad = None
    reducer.accumulate(loss(w.bfloat16()))
    reducer.assert_in_place(gradient)
    w64 = w.detach().double().requires_grad_()
    reducer = Reducer(w64)
    reducer.accumulate(cuda_ext.linear(x.float(), w64.float()).sum())  # no product of float32 has a float64 output
    assert reducer.is_untouched()
    assert_same(w64.grad, gradient)


# the cost


def _counted(parameters: Sequence[Tensor], loss: Callable[[], Tensor], prepare: Callable[[], object]) -> dict[str, int]:
    value = loss()
    prepare()
    with emulated() as emulation:
        value.backward()
    return emulation.counters


@pytest.mark.simt
@pytest.mark.parametrize("op", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_slot_costs_what_a_new_tensor_costs(op: str, dtype: torch.dtype) -> None:
    """Every instruction and byte of the backward pass, on the emulator: the same, and to accumulate one read more."""
    sizes = (40, 48, 64, 56)  # rows of whole sectors
    tensors = {name: rand(*shape, dtype=dtype) for name, shape in shapes_of(op, (), *sizes).items()}
    weights = [tensors[name] for name in WEIGHTS[op]]

    def forget() -> None:
        for tensor in tensors.values():
            tensor.grad = None

    def loss() -> Tensor:
        return OPS[op](**tensors, activation="gelu").sum()

    fresh = _counted(weights, loss, forget)
    reducer = Reducer(*weights)
    reducer.slots.open(1.0)
    first = _counted(weights, loss, forget)
    assert fresh["mma"] > 0 and first == fresh
    again = _counted(weights, loss, lambda: reducer.slots.open(0.5))
    numbers = sum(weight.numel() for weight in weights)
    expected = dict(fresh)
    expected["global_load_bytes"] += numbers * weights[0].element_size()
    expected["global_load_sectors"] += numbers * weights[0].element_size() // 32
    assert again == expected
    assert reducer.collected == [True] * (2 * len(weights))


def test_no_memory_of_the_size_of_a_gradient_is_allocated() -> None:
    """And nothing runs that does not run without slots."""
    x, w = torch.randn(4, 2048), torch.randn(2048, 2048, requires_grad=True)
    size = w.numel() * w.element_size()

    def profiled() -> tuple[int, set[str]]:
        w.grad = None
        loss = cuda_ext.linear(x, w).sum()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss.backward()
        results = profiler.profiler.kineto_results  # of which the public events only show sums over ops
        largest = max(event.nbytes() for event in results.events() if event.name() == "[memory]")
        return largest, {event.name for event in profiler.events() if "::" in event.name}

    largest, operations = profiled()
    assert largest >= size
    reducer = Reducer(w)
    reducer.slots.open(1.0)
    largest, with_slots = profiled()
    assert 0 < largest < size / 4
    assert w.grad is reducer.views[0]
    assert "cuda_ext::linear_backward" in with_slots
    assert with_slots <= operations


def test_modules() -> None:
    """`cuda_ext.nn`, a plain layer among them, against the same without slots."""
    torch.manual_seed(0)
    model = nn.Sequential(cuda_ext.nn.Linear(6, 8), cuda_ext.nn.GatedMLP(8, 12), nn.Linear(8, 3)).double()
    parameters = list(model.parameters())
    x = torch.randn(5, 6, dtype=torch.float64)
    plain = torch.autograd.grad(model(x).square().sum(), parameters)
    reducer = Reducer(*parameters)
    locked = reducer.synchronize(model(x).square().sum(), 0.5)
    for parameter, gradient, in_slot in zip(parameters, plain, locked, strict=True):
        expected = 0.5 * gradient if in_slot else gradient
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-12)
    assert sum(locked) == 3  # of one linear layer and the two of the MLP
