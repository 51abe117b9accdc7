from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cuda_ext.distributed import Float32ReduceScatter


def make_model(hidden: int = 31) -> nn.Module:
    """Sizes that no number of ranks divides, so that FSDP2 pads."""
    return nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Linear(hidden, 13), nn.Tanh(), nn.Linear(13, 3))


def sharded(
    module: nn.Module,
    comm: Float32ReduceScatter | None,
    *,
    reduce_dtype: torch.dtype | None = None,
    mesh_shape: tuple[int, ...] | None = None,
) -> nn.Module:
    """A copy of ``module``, sharded layer by layer."""
    module = copy.deepcopy(module)
    shape = mesh_shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for layer in (*(layer for layer in module if isinstance(layer, nn.Linear)), module):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if comm is not None:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_reduce_scatter(comm)
    return module


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().mean()


def shard(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach()


def train(module: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        loss(module, shard(batch)).backward()
        optimizer.step()
    return [full(parameter) for parameter in module.parameters()]


@on_ranks(2)
def test_training_on_two_ranks_is_that_of_fsdp2() -> None:
    """Halving is exact and a sum of two has only one order, so float32 results must be equal."""
    module, batches = make_model(), [torch.randn(6, 7) for _ in range(4)]
    for actual, expected in zip(
        train(sharded(module, Float32ReduceScatter()), batches), train(sharded(module, None), batches), strict=True
    ):
        assert torch.equal(actual, expected)


@on_ranks(4)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_training_on_four_ranks_is_that_of_fsdp2(mesh_shape: tuple[int, ...]) -> None:
    module, batches = make_model(), [torch.randn(8, 7) for _ in range(4)]
    models = [sharded(module, comm, mesh_shape=mesh_shape) for comm in (Float32ReduceScatter(), None)]
    for actual, expected in zip(*(train(model, batches) for model in models), strict=True):
        # Both sides are float32, with sums in different orders.
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("reduce_dtype", [torch.float16, torch.float64])
def test_dtypes_that_fsdp2_divides_itself(reduce_dtype: torch.dtype) -> None:
    module, batch = make_model(), torch.randn(6, 7)
    models = [sharded(module, comm, reduce_dtype=reduce_dtype) for comm in (Float32ReduceScatter(), None)]
    for model in models:
        loss(model, shard(batch)).backward()
    for actual, expected in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(full(actual.grad), full(expected.grad))


@on_ranks(4)
def test_sixteen_bits_are_closer_to_the_truth() -> None:
    """Each rank's gradient is rounded once in all three; then FSDP2 rounds three sums, we one, or none.

    The squared errors are as the variances of what is rounded, 4 for the four that are sent, at least 2 + 2 + 4 for the
    sums of FSDP2, 4 for one sum: sqrt(12) to sqrt(8) to sqrt(4), ratios of 1.22 and 1.41.
    """
    module, batch = make_model(hidden=500), torch.randn(8, 7)
    truth = copy.deepcopy(module).double()
    loss(truth, batch.double()).backward()
    expected = torch.cat([parameter.grad.reshape(-1) for parameter in truth.parameters()])

    def error(comm: Float32ReduceScatter | None, reduce_dtype: torch.dtype) -> float:
        model = sharded(module, comm, reduce_dtype=reduce_dtype)
        loss(model, shard(batch)).backward()
        actual = torch.cat([full(parameter.grad).reshape(-1) for parameter in model.parameters()])
        assert actual.dtype == torch.float32
        return (actual.double() - expected).square().mean().sqrt().item()

    plain = error(None, torch.bfloat16)
    rounded = error(Float32ReduceScatter(), torch.bfloat16)
    unrounded = error(Float32ReduceScatter(torch.bfloat16), torch.float32)
    everything = error(Float32ReduceScatter(), torch.float32)
    assert plain > 1.1 * rounded
    assert rounded > 1.2 * unrounded
    assert unrounded > 1000 * everything


@on_ranks(2)
def test_factor_of_the_user() -> None:
    """FSDP2 requests a sum with a factor, which gloo does not support and this does."""
    module, batch = make_model(), torch.randn(6, 7)
    mean, third = (sharded(module, Float32ReduceScatter()) for _ in range(2))
    for part in third.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(3.0)
    for model in (mean, third):
        loss(model, shard(batch)).backward()
    for a, b in zip(mean.parameters(), third.parameters(), strict=True):
        torch.testing.assert_close(full(b.grad), full(a.grad) * 2 / 3, rtol=1e-6, atol=0)


def test_refusals(group: None) -> None:
    name = "cuda_ext.distributed.Float32ReduceScatter"
    with pytest.raises(ValueError, match=f"^{name}: expected wire_dtype to be None or one of .*, got torch.int8"):
        Float32ReduceScatter(torch.int8)
    comm, values = Float32ReduceScatter(), torch.ones(2)
    with pytest.raises(NotImplementedError, match=f"^{re.escape(name)}: expected a sum, a mean or a sum with a factor"):
        comm(torch.empty(2), values, dist.group.WORLD, dist.ReduceOp.MAX)
    with pytest.raises(NotImplementedError, match=f"^{re.escape(name)}: expected async_op=False"):
        comm(torch.empty(2), values, dist.group.WORLD, dist.ReduceOp.SUM, async_op=True)
