"""What averaging costs of a GPU's memory, counted by the emulator: nothing for weights of our layers, else one pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cuda_ext.nn
from cuda_ext.distributed import BucketedDataParallel
from cuda_ext.testing import emulated

pytestmark = pytest.mark.simt

Counters = dict[str, int]


def layers(kind: str, width: int) -> nn.Sequential:
    if kind == "ours":
        return nn.Sequential(*(cuda_ext.nn.Linear(width, width, bias=False) for _ in range(3)))
    return nn.Sequential(*(Foreign(width) for _ in range(3)))


class Foreign(nn.Linear):
    """A layer whose weight gradient comes out of an op that knows no slots: a product by `cuda_ext.gemm`."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return cuda_ext.gemm(input, self.weight)


def backward_cost(kind: str, width: int, wrapped: bool, passes: int = 1) -> Counters:
    """Bytes of global memory in a backward pass; in the last of ``passes``, the others under no_sync."""
    module = layers(kind, width)
    model = BucketedDataParallel(module, bucket_cap_mb=1e3) if wrapped else module
    batch = torch.randn(64, width)
    for step in range(2):  # the first settles the order of gradients
        model.zero_grad()
        for _ in range(passes - 1):
            with model.no_sync():  # type: ignore[operator]
                model(batch).sum().backward()
        loss = model(batch).sum()
        with emulated() as emulation:
            if step == 1:
                loss.backward()
    return {name: emulation.counters.get(name, 0) for name in ("global_load_bytes", "global_store_bytes", "blocks")}


@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_bytes_of_a_gradient_element(group: None, kind: str) -> None:
    widths = (64, 96)  # of gradients that a CPU, which these tensors are on, leaves to the pack as a GPU does
    extra = []
    for width in widths:
        plain, wrapped = backward_cost(kind, width, False), backward_cost(kind, width, True)
        extra.append({name: wrapped[name] - plain[name] for name in plain})
    elements = [3 * width**2 for width in widths]
    for way in ("global_load_bytes", "global_store_bytes"):
        each = (extra[1][way] - extra[0][way]) / (elements[1] - elements[0])
        assert each == (0 if kind == "ours" else 4), f"{way}: {each} bytes an element"
    assert extra[0]["blocks"] == 1, "one launch of one block, as the smaller bucket fills no second"
