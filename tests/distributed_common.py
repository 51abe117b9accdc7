"""Helpers of the tests of BucketedDataParallel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_ext._toolchain import NAMESPACE

NAME = "cuda_ext.distributed.BucketedDataParallel"
Gradients = dict[str, Tensor | None]
SMALL = 1e-3  # MiB: buckets of about one layer of the models below


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with odd sizes and six buckets of SMALL. In float64 the order of additions matters only by 1e-12."""
    layers = [nn.Linear(7, 31), nn.Tanh(), nn.Linear(31, 13), nn.Tanh(), nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 3)]
    return nn.Sequential(*layers).to(dtype)


def gradients(module: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def assert_gradients(actual: nn.Module, expected: nn.Module | Gradients, tolerance: float = 1e-12) -> None:
    expected = expected if isinstance(expected, dict) else gradients(expected)
    for name, grad in gradients(actual).items():
        if expected[name] is None:
            assert grad is None, name
        else:
            assert grad is not None, name
            torch.testing.assert_close(
                grad, expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


def assert_same_on_all_ranks(tensors: list[Tensor]) -> None:
    flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    for other in everyone:
        assert torch.equal(other, flat)


def mean_over_ranks(tensor: Tensor) -> Tensor:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return torch.stack(everyone).mean(dim=0)


def shard(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


@contextmanager
def count_ops() -> Iterator[Counter[str]]:
    """Counts the calls of each of our ops, and as "elements" the elements that `bucket_stats` reads."""
    count: Counter[str] = Counter()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == NAMESPACE:
                name = func._opname
                count[name] += 1
                if name == "bucket_stats":
                    count["elements"] += sum(tensor.numel() for tensor in args[0])
            return func(*args, **(kwargs or {}))

    with Mode():
        yield count


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(7, 7, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(7, 3, dtype=torch.float64) for _ in range(5))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return sum(self.branches[n](self.common(x)).square().mean() for n in used)
