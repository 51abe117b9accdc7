"""Gradient slots: what they refuse, their lifetime, and other uses of the parameters meanwhile."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable

import pytest
import torch
from gemm_common import integers
from gradient_slots_common import Reducer, assert_same, linear_case
from torch import Tensor

import cuda_ext
from cuda_ext import bucket
from cuda_ext._load import ops
from cuda_ext.testing import emulated


def _refusals() -> dict[str, tuple[Callable[[bucket.GradientSlots, Tensor], object], str]]:
    assign = "cuda_ext::GradientSlots.assign: expected "
    return {
        "count": (lambda s, w: s.assign([w], []), assign + "one view for each of 1 parameters, got 0"),
        "shape": (
            lambda s, w: s.assign([w], [torch.zeros(7, 5)]),
            assign
            + "views[0] contiguous and of shape (5, 7), that of its parameter, got shape (7, 5) with strides (5, 1)",
        ),
        "layout": (
            lambda s, w: s.assign([w], [torch.zeros(7, 5).t()]),
            assign
            + "views[0] contiguous and of shape (5, 7), that of its parameter, got shape (5, 7) with strides (1, 5)",
        ),
        "dtype": (
            lambda s, w: s.assign([w], [torch.zeros(5, 7).bfloat16()]),
            assign + "views[0] of dtype float32 on device cpu, as its parameter, got bfloat16 on cpu",
        ),
        "gradient": (
            lambda s, w: s.assign([w], [torch.zeros(5, 7, requires_grad=True)]),
            assign + "views[0] to need no gradient, got requires_grad=True; detach it",
        ),
        "sparse": (
            lambda s, w: s.assign([w], [torch.zeros(5, 7).to_sparse()]),
            assign + "parameters[0] and its view to be dense tensors, got a tensor subclass",
        ),
        "twice": (
            lambda s, w: s.assign([w, w], [torch.zeros(5, 7), torch.zeros(5, 7)]),
            assign + "every parameter once, got parameters[1] again",
        ),
        "two holders": (
            lambda s, w: bucket.GradientSlots().assign([w], [torch.zeros(5, 7)]),
            assign + "parameters[0] without a slot, got one that has a slot of another holder; release that first",
        ),
        "scale": (lambda s, w: s.open(float("nan")), "cuda_ext::GradientSlots.open: expected a finite scale, got nan"),
        "index": (
            lambda s, w: s.collect(1),
            "cuda_ext::GradientSlots.collect: expected the index of one of 1 slots, got 1",
        ),
        "no leaf": (
            lambda s, w: s.assign([w * 2], [torch.empty_like(w)]),
            "cuda_ext::GradientSlots.assign: expected parameters[0] to be a leaf, whose gradient autograd accumulates, "
            "got the result of an op",
        ),
        "negative index": (
            lambda s, w: s.lock(-1),
            "cuda_ext::GradientSlots.lock: expected the index of one of 1 slots, got -1",
        ),
    }


@pytest.mark.parametrize("case", _refusals())
def test_refusals(case: str) -> None:
    x, w, gradient = linear_case()
    reducer = Reducer(w)
    call, message = _refusals()[case]
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}($|\n)"):
        call(reducer.slots, w)
    reducer.accumulate(cuda_ext.linear(x, w).sum())  # slots are unchanged
    reducer.assert_in_place(gradient)


@pytest.mark.parametrize("how", ["release", "delete", "assign"])
def test_slots_vanish_with_their_holder(how: str) -> None:
    x, w, gradient = linear_case()
    slots, view = bucket.GradientSlots(), torch.full((5, 7), torch.nan)
    slots.assign([w], [view])
    slots.open(1.0)
    if how == "release":
        slots.release()
    elif how == "assign":
        slots.assign([], [])
    else:
        del slots
        gc.collect()
    cuda_ext.linear(x, w).sum().backward()
    assert_same(w.grad, gradient)
    assert view.isnan().all()
    Reducer(w)  # which may have another slot now


def test_parameters_that_die() -> None:
    """They are not kept alive, and a new parameter at the same address has no slot."""
    memory = bytearray(20 * 256)

    def parameter_at(index: int) -> Tensor:
        tensor = torch.frombuffer(memory, dtype=torch.float32, offset=index * 256, count=35).view(5, 7)
        return tensor.copy_(integers(5, 7)).requires_grad_()

    slots = bucket.GradientSlots()
    parameters = [parameter_at(index) for index in range(20)]
    addresses = [parameter.data_ptr() for parameter in parameters]
    slots.assign(parameters, [torch.full((5, 7), torch.nan) for _ in parameters])
    slots.open(1.0)
    del parameters
    gc.collect()
    assert not slots.collect(0) and not slots.lock(3)
    x = integers(3, 7)
    others = [parameter_at(index) for index in range(20)]
    assert [other.data_ptr() for other in others] == addresses
    for other in others:
        cuda_ext.linear(x, other).sum().backward()
        assert_same(other.grad, torch.ones(5, 3) @ x)


def test_an_op_that_fails_leaves_the_gradient() -> None:
    x, w, gradient = linear_case()
    reducer = Reducer(w)
    reducer.accumulate(cuda_ext.linear(x, w).sum())
    loss = cuda_ext.linear(x, w).sum()
    with emulated("sm_80") as emulation:
        cuda_ext.gemm(torch.ones(40, 40), torch.ones(40, 40))
    barriers = [site for site in emulation.sync_sites if "gemm_sm80.cuh" in site[0] and site[2] == "sync_threads"]
    barrier = barriers[-1]  # before the result is stored
    with emulated("sm_80", check_races=True, skip=barrier), pytest.raises(RuntimeError, match="gemm_sm80: block"):
        loss.backward()
    reducer.assert_in_place(gradient)
    reducer.accumulate(cuda_ext.linear(x, w).sum())
    reducer.assert_in_place(2 * gradient)


def test_writes_are_counted() -> None:
    x, w, _ = linear_case()
    reducer = Reducer(w)
    before = reducer.bucket._version
    reducer.accumulate(cuda_ext.linear(x, w).sum())
    assert reducer.bucket._version > before


def test_models_in_two_threads() -> None:
    failures: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(30):
                x = torch.randint(-3, 4, (6, 9), generator=generator).float()
                w = torch.zeros(4, 9, requires_grad=True)
                reducer = Reducer(w)
                for _ in range(3):
                    reducer.accumulate(cuda_ext.linear(x, w).sum())
                assert reducer.synchronize(cuda_ext.linear(x, w).sum(), 0.5) == [True]
                reducer.assert_in_place(2 * torch.ones(4, 6) @ x)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_a_parameter_of_another_dtype_than_its_slot() -> None:
    """As after ``module.to(dtype)``: slots do not change what autograd does then."""
    x, w, gradient = linear_case()
    reducer = Reducer(w)
    w.data = w.data.bfloat16()
    reducer.slots.open(1.0)
    cuda_ext.linear(x.bfloat16(), w).sum().backward()
    assert_same(w.grad, gradient)
    assert reducer.is_untouched()


def _refused_slots() -> dict[str, tuple[Tensor, str]]:
    shape = "contiguous and of shape (5, 7), that of the weight, got shape "
    return {
        "shape": (torch.zeros(5, 8), shape + "(5, 8) with strides (8, 1)"),
        "layout": (torch.zeros(7, 5).t(), shape + "(5, 7) with strides (1, 5)"),
        "dtype": (
            torch.zeros(5, 7, dtype=torch.float64),
            "of dtype float32, float16 or bfloat16 (float64 for a weight of float64), "
            "got float64 for a weight of float32",
        ),
        "integers": (
            torch.zeros(5, 7, dtype=torch.int32),
            "of dtype float32, float16 or bfloat16 (float64 for a weight of float64), "
            "got int32 for a weight of float32",
        ),
    }


@pytest.mark.parametrize("case", _refused_slots())
def test_slots_that_ops_refuse(case: str) -> None:
    slot, message = _refused_slots()[case]
    x, w, grad = torch.zeros(3, 7), torch.zeros(5, 7), torch.zeros(3, 5)
    options = {"weight_slot": slot, "slot_alpha": 1.0, "slot_beta": 0.0}
    expected = f"cuda_ext::linear_backward: expected weight_slot {message}"
    with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}($|\n)"):
        ops.linear_backward.slot(grad, x, w, None, output_mask=[True] * 3, **options)
    expected = expected.replace("linear", "mlp_hidden")
    with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}($|\n)"):
        ops.mlp_hidden_backward.slot(
            grad, w, x, None, None, activation="gelu", gated=False, output_mask=[True] * 4, **options
        )
