from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

from cuda_ext.distributed.grad_scaler import GradScaler
from cuda_ext.distributed.wrapper import BucketedDataParallel

LOOK = "_amp_foreach_non_finite_check_and_unscale_"  # torch's pass over the gradients
OPTIONS = {"init_scale": 2.0**10, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 2}
Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 31), nn.Tanh(), nn.Linear(31, 3))


@contextmanager
def counting_looks() -> Iterator[list[int]]:
    original, calls = getattr(torch, LOOK), []

    def look(grads: list[Tensor], *args: Tensor) -> None:
        calls.append(len(grads))
        original(grads, *args)

    setattr(torch, LOOK, look)
    try:
        yield calls
    finally:
        setattr(torch, LOOK, original)


OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": lambda module: [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)],
    "AdamW": lambda module: [torch.optim.AdamW(module.parameters(), lr=1e-2)],
    "fused AdamW": lambda module: [torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)],
    "two": lambda module: [
        torch.optim.SGD(module[0].parameters(), lr=0.1),
        torch.optim.AdamW(module[2].parameters(), lr=1e-2),
    ],
}


@on_ranks(2)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizers", OPTIMIZERS)
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_steps_are_those_of_torch(optimizers: str, clip: bool, wire_dtype: torch.dtype | None) -> None:
    """Growth and backoff over nine steps, with infinities on one rank in three of them, bitwise equal to torch's.

    The gradients that torch's scaler sees are averaged as well, so it serves as the reference.
    """
    module = make_model()
    ours, theirs = (BucketedDataParallel(copy.deepcopy(module), wire_dtype=wire_dtype) for _ in range(2))
    scalers = [GradScaler(ours, **OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)]
    sets = [OPTIMIZERS[optimizers](model.module) for model in (ours, theirs)]
    torch.manual_seed(dist.get_rank())
    scales = []
    for step in range(9):
        batch = torch.randn(5, 7)
        overflow = torch.inf if step in (2, 3, 7) and dist.get_rank() == 1 else 1.0
        looks = []
        for model, scaler, optimizer_set in zip((ours, theirs), scalers, sets, strict=True):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            for optimizer in optimizer_set:
                optimizer.zero_grad()
            with counting_looks() as calls:
                scaler.scale(model(batch).square().mean() * overflow).backward()
                if clip:
                    for optimizer in optimizer_set:
                        scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                for optimizer in optimizer_set:
                    scaler.step(optimizer)
                scaler.update()
            looks.append(len(calls))
            kept = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert kept == (step in (2, 3, 7))
        assert looks == [0 if optimizers != "two" else 2, len(sets[1])]
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        scales.append(scalers[0].get_scale())
    assert scales == [2.0**power for power in (10, 11, 9, 7, 7, 8, 8, 6, 6)]
    everyone = [None] * 2
    dist.all_gather_object(everyone, [scales, [parameter.tolist() for parameter in ours.parameters()]])
    assert everyone[0] == everyone[1]


@on_ranks(2)
def test_with_the_clipping_of_the_wrapper() -> None:
    module, batch = make_model(), torch.randn(5, 7)
    ours = BucketedDataParallel(module)
    scaler, optimizer = GradScaler(ours), torch.optim.SGD(ours.parameters(), lr=0.1)
    plain = copy.deepcopy(module)
    plain(batch).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    scaler.scale(ours(batch).square().mean()).backward()
    scaler.unscale_(optimizer)
    assert ours.clip_grad_norm_(0.1) == pytest.approx(norm.item(), rel=1e-5)  # float32, 300 gradients
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_one_optimizer_of_two_skips() -> None:
    """As with torch, only the optimizer with infinite gradients skips its step, and the scale is reduced."""
    module = nn.ModuleDict({"good": nn.Linear(3, 2), "bad": nn.Linear(3, 2)})
    model = BucketedDataParallel(module)
    scaler = GradScaler(model)
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in module.items()}
    before = copy.deepcopy(module)
    batch = torch.ones(2, 3)
    spoilt = batch.clone().fill_(torch.inf) if dist.get_rank() == 1 else batch
    scaler.scale(module["good"](batch).sum() + module["bad"](spoilt).sum()).backward()
    for optimizer in optimizers.values():
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(before["bad"].weight, module["bad"].weight)
    assert not torch.equal(before["good"].weight, module["good"].weight)


def test_frozen_unused_and_mixed_parameters(group: None) -> None:
    """An optimizer may have parameters that never get a gradient; float64 ones are unscaled as by torch."""
    module = nn.ModuleDict({n: nn.Linear(3, 2) for n in ("used", "unused", "frozen")})
    module["wide"] = nn.Linear(3, 2, dtype=torch.float64)
    module["frozen"].requires_grad_(False)
    model = BucketedDataParallel(module)
    plain = copy.deepcopy(module)
    batch = torch.randn(4, 3)

    def loss(m: nn.Module) -> Tensor:
        return m["used"](batch).square().sum() + m["wide"](batch.double()).square().sum().float()

    grads = []
    for m, scaler in (
        (module, GradScaler(model, init_scale=3.0)),
        (plain, torch.amp.GradScaler("cpu", init_scale=3.0)),
    ):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        with counting_looks() as calls:
            scaler.scale(loss(m)).backward()
            scaler.unscale_(optimizer)
        assert len(calls) == (0 if m is module else 2)
        scaler.step(optimizer)
        scaler.update()
        grads.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 4
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_state_and_errors(group: None) -> None:
    model = BucketedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(model, init_scale=8.0)
    scaler.scale(model(torch.randn(2, 7)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="has already been called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    other = GradScaler(model)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 8.0

    disabled = GradScaler(model, enabled=False)
    weight = model.module[0].weight.detach().clone()
    disabled.step(optimizer)
    assert disabled.get_scale() == 1.0 and not torch.equal(weight, model.module[0].weight)

    half = BucketedDataParallel(nn.Linear(3, 2, dtype=torch.float16))
    scaler = GradScaler(half)
    scaler.scale(half(torch.ones(1, 3, dtype=torch.float16)).sum()).backward()
    message = (
        r"^cuda_ext\.distributed\.GradScaler: expected gradients that can be unscaled without underflow, got float16"
    )
    with pytest.raises(ValueError, match=message):
        scaler.unscale_(torch.optim.SGD(half.parameters(), lr=0.1))


def test_no_gradient_at_all(group: None) -> None:
    """As with torch, the step of an optimizer without gradients raises."""
    model = BucketedDataParallel(make_model())
    scaler, optimizer = GradScaler(model), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)
