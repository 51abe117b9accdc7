"""The ways in which a loss is computed: which tiles, where gradients go, what is counted."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from gradient_slots_common import Reducer
from loss_common import operands
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cuda_ext
from cuda_ext import testing

METHODS = ("forward", "recompute")


def gradients(tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    names = [name for name, tensor in tensors.items() if tensor.requires_grad]
    return torch.autograd.grad(cuda_ext.linear_cross_entropy(**tensors, **options), [tensors[name] for name in names])


@pytest.mark.every_backend
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_limit", [None, 50_000])
def test_gradients_go_to_slots(method: str, dtype: torch.dtype, memory_limit: int | None) -> None:
    """First write, a second pass that adds, and one that averages all three; with one tile and with several."""
    tensors = operands((150,), 390, 33, dtype)
    options: dict[str, Any] = {"method": method, "memory_limit": memory_limit, "label_smoothing": 0.1}
    plain = gradients(tensors, **options)
    weight = tensors["linear_weight"]
    reducer = Reducer(weight)
    loss = lambda: cuda_ext.linear_cross_entropy(**tensors, **options)  # noqa: E731
    eps = torch.finfo(dtype).eps * float(plain[1].double().abs().max())
    reducer.accumulate(loss())
    assert weight.grad is reducer.views[0]
    torch.testing.assert_close(reducer.views[0].double(), plain[1].double(), rtol=0, atol=eps)
    reducer.accumulate(loss())
    torch.testing.assert_close(reducer.views[0].double(), 2 * plain[1].double(), rtol=0, atol=4 * eps)
    assert reducer.synchronize(loss(), 0.25) == [True]
    torch.testing.assert_close(reducer.views[0].double(), 0.75 * plain[1].double(), rtol=0, atol=4 * eps)
    torch.testing.assert_close(tensors["input"].grad, 3 * plain[0], rtol=0, atol=8 * eps)


def test_a_tied_weight_has_one_slot_for_the_embedding_and_the_loss() -> None:
    table = torch.randn(70, 12, requires_grad=True)
    index, target = torch.tensor([3, 60, 3]), torch.tensor([1, 2, 69])

    def loss() -> Tensor:
        return cuda_ext.linear_cross_entropy(torch.nn.functional.embedding(index, table), table, target)

    (plain,) = torch.autograd.grad(loss(), table)
    reducer = Reducer(table)
    reducer.accumulate(loss())
    torch.testing.assert_close(reducer.views[0], plain)


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_gpu_prints_wrong_targets(dtype: torch.dtype, backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    tensors = operands((300,), 70, 16, dtype)
    tensors["target"][[3, 299]] = torch.tensor([70, -1])
    tensors["target"][5] = -100
    if backend == "cpu":
        with pytest.raises(IndexError, match="got 70 at row 3"):
            cuda_ext.linear_cross_entropy(**tensors)
        return
    loss = cuda_ext.linear_cross_entropy(**tensors, reduction="none")
    loss.sum().backward()  # says no more
    if backend == "cuda":
        torch.cuda.synchronize()
    ctypes.CDLL(None).fflush(None)
    wanted = "cuda_ext: linear_cross_entropy: expected targets in [0, 70) or ignore_index -100, got"
    assert sorted(capfd.readouterr().out.splitlines()) == [f"{wanted} -1 at row 299", f"{wanted} 70 at row 3"]
    assert loss.isnan().nonzero().flatten().tolist() == [3, 299]


def test_the_method_is_chosen_after_autocast() -> None:
    """Of float32 operands as bfloat16 the sums of the weight's gradient, in float32, count."""
    tensors = operands((1100,), 2000, 256, torch.float32)
    limit = 1100 * 2000 * 6 // 2  # two tiles of complete rows, without the sums
    with torch.autocast("cpu", torch.bfloat16):
        loss = cuda_ext.linear_cross_entropy(**tensors, memory_limit=limit)
    assert "LinearLossBackward" not in type_names(loss)
    loss = cuda_ext.linear_cross_entropy(**tensors, memory_limit=limit)
    assert "LinearLossBackward" in type_names(loss)


def test_gradients_of_float16_are_scaled_before_they_are_rounded() -> None:
    """As `torch.amp.GradScaler` does; without a factor most gradients of logits would be 1.7e-7 or 0."""
    tensors = operands((200,), 30_000, 8, torch.float16, spread=0.1)
    loss = cuda_ext.linear_cross_entropy(**tensors)
    (found,) = torch.autograd.grad(loss * 2.0**16, tensors["linear_weight"])
    exact = {n: t.detach().double() if t.is_floating_point() else t for n, t in tensors.items()}
    weight = exact["linear_weight"].requires_grad_()
    (expected,) = torch.autograd.grad(testing.reference_linear_cross_entropy(**exact), weight)
    error = found.double() / 2.0**16 - expected
    assert error.norm() < 1e-3 * expected.norm()


def type_names(loss: Tensor) -> str:
    """The nodes of a graph."""
    found, queue = [], [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None:
            found.append(node.name())
            queue += [following for following, _ in node.next_functions]
    return " ".join(found)


@pytest.mark.parametrize("method", METHODS)
def test_flops(method: str) -> None:
    rows, classes, features = 6, 40, 9
    tensors = operands((2, 3), classes, features, torch.float32, bias=True)
    with FlopCounterMode(display=False) as counter:
        cuda_ext.linear_cross_entropy(**tensors, method=method).backward()
    products = 3 if method == "forward" else 4
    assert counter.get_total_flops() == products * 2 * rows * classes * features
    tensors["linear_weight"].requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        cuda_ext.linear_cross_entropy(**tensors, method=method).backward()
    assert counter.get_total_flops() == (products - 1) * 2 * rows * classes * features


@pytest.mark.cpu_only("emulated as a test wants it")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("features", [64, 33])
@pytest.mark.parametrize("target", [390, 2**40, -1])
def test_kernels_give_nan_for_a_target_out_of_range(target: int, features: int, arch: str) -> None:
    tensors = operands((5,), 390, features, torch.bfloat16)
    tensors["target"][3] = target
    with testing.emulated(arch):
        losses = cuda_ext.linear_cross_entropy(**tensors, reduction="none")
        assert losses.isnan().tolist() == [False, False, False, True, False]
        assert all(g.isfinite().all() for g in torch.autograd.grad(losses[:3].sum(), list(tensors.values())[:2]))


EPILOGUES = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "capped": {"softcap": 5.0, "scale": 0.7},
    "entropy": {"return_entropy": True},
    "z-loss and lse": {"z_loss": 0.1, "return_lse": True},
}


@pytest.mark.cpu_only("emulated as a test wants it")
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", EPILOGUES)
@pytest.mark.sampled(cases="every value")
def test_epilogues_are_as_exact_as_tiles_in_memory(options: str, dtype: torch.dtype, arch: str) -> None:
    """Operands that are contiguous along rows have no epilogue of their own, and are multiplied in the same order."""
    tensors = operands((140,), 523, 64, dtype, bias=True)
    other = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    other["input"] = other["input"].t().contiguous().t()
    with testing.emulated(arch):
        of_epilogue, of_tiles = (
            results_of(
                {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in t.items()}, **EPILOGUES[options]
            )
            for t in (tensors, other)
        )
    for ours, tiles in zip(of_epilogue, of_tiles, strict=True):
        limit = 8 * torch.finfo(ours.dtype).eps * max(1.0, float(tiles.abs().max()))
        torch.testing.assert_close(ours, tiles, rtol=0, atol=limit)


def results_of(tensors: dict[str, Tensor], **options: Any) -> list[Tensor]:
    out = cuda_ext.linear_cross_entropy(**tensors, **options, reduction="sum")
    outputs = list(out) if isinstance(out, tuple) else [out]
    leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
    return [*outputs, *torch.autograd.grad(sum(o.sum() for o in outputs), leaves)]
