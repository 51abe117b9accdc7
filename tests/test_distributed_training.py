"""Fifty steps on 2, 4 and 8 ranks give the same parameters as one process with the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_common import assert_same_on_all_ranks
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import cuda_ext.nn
from cuda_ext.distributed import BucketedDataParallel

STEPS = 50
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


class Net(nn.Module):
    """Our layers and PyTorch's, a shared weight, a branch that is only used sometimes, and odd sizes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 9)
        self.first = cuda_ext.nn.Linear(9, 13, activation="gelu_tanh")
        self.middle = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.gated = cuda_ext.nn.GatedMLP(13, 21)
        self.sometimes = nn.Linear(13, 13)
        self.last = cuda_ext.nn.Linear(13, 9, bias=False)
        self.checkpoints = False
        self.to(dtype)

    def forward(self, tokens: Tensor, sometimes: bool) -> Tensor:  # tokens (B, S)
        x = self.first(self.embedding(tokens))
        for layer in self.middle:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)).tanh()
        x = x + self.gated(x.to(next(self.gated.parameters()).dtype)).to(x.dtype)
        if sometimes:
            x = x + self.sometimes(x)
        return self.last(x) @ self.embedding.weight.t()


def loss_of(net: nn.Module, tokens: Tensor, step: int) -> Tensor:
    scores = net(tokens[:, :-1], step % 3 == 0)
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 1e-3},
    "over sockets": {"bucket_cap_mb": 1e-3, "algorithm": "all_reduce"},
    "wire": {"bucket_cap_mb": 1e-3, "wire_dtype": torch.float64},
    "sharded": {"bucket_cap_mb": 1e-3, "shard_optimizer": True},
    "hierarchical": {"bucket_cap_mb": 2e-3},
}
STYLES = ("plain", "accumulate", "keep gradients", "checkpoint", "compile", "freeze", "mixed dtypes", "uneven")


def train_and_compare(dtype: torch.dtype, options: str, style: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = Net(dtype)
    if style == "mixed dtypes":
        whole.gated.float()
    arguments = dict(OPTIONS[options])
    if options == "hierarchical":
        arguments["process_group"] = DeviceMesh("cpu", torch.arange(ranks).view(2, -1))
    module = copy.deepcopy(whole)
    module.checkpoints = style == "checkpoint"
    inner = torch.compile(module, backend="aot_eager") if style == "compile" else module
    model = BucketedDataParallel(inner, **arguments)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    if options == "sharded":
        optimizer = model.sharded_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    micros = 2 if style == "accumulate" else 1
    lasts = STEPS - 10 if style == "uneven" else STEPS  # steps for which the last rank has inputs
    own_steps = lasts if rank == ranks - 1 else STEPS

    def step_of_whole(step: int) -> Tensor:
        tokens = torch.randint(11, (micros, ranks, 2, 8))
        given = tokens if step < lasts else tokens[:, :-1]  # averages still divide by the number of all ranks
        (loss_of(whole, given.flatten(0, 2), step) * (given.shape[1] / ranks)).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        plain.step()
        plain.zero_grad(set_to_none=style != "keep gradients")
        return tokens

    def step_of_rank(step: int, tokens: Tensor) -> None:
        for micro in range(micros - 1):
            with model.no_sync():
                (loss_of(model, tokens[micro, rank], step) / micros).backward()
        (loss_of(model, tokens[-1, rank], step) / micros).backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=style != "keep gradients")

    with Join([model], enable=style == "uneven"):
        for step in range(own_steps):
            if style == "freeze" and step in (10, 30):
                for net in (whole, module):
                    for part in (net.embedding, net.middle[0], net.gated):
                        part.requires_grad_(step == 30)
            step_of_rank(step, step_of_whole(step))
    for step in range(own_steps, STEPS):
        step_of_whole(step)
    for (name, actual), expected in zip(module.named_parameters(), whole.parameters(), strict=True):
        tolerance = TOLERANCE[torch.float32 if style == "mixed dtypes" else dtype]
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert_same_on_all_ranks(list(module.parameters()))


# Sharded wrappers refuse freezing and uneven inputs, as pieces of parameters are distributed: see test_sharded.py and
# test_distributed_adapts.py. Hierarchical: two ranks are two nodes; four and eight ranks fill nodes below.
EVERY_PAIR = [(o, s) for o in OPTIONS for s in STYLES if o != "sharded" or s not in ("freeze", "uneven")]


@pytest.mark.sampled(cases="every value", slow=True)
@on_ranks(2)
@pytest.mark.parametrize(("options", "style"), EVERY_PAIR)
def test_every_option_in_every_style_on_two_ranks(options: str, style: str) -> None:
    train_and_compare(torch.float64, options, style)


@pytest.mark.sampled(cases=3, slow=True)
@on_ranks(4)
@pytest.mark.parametrize("style", STYLES)
def test_styles_on_four_ranks(style: str) -> None:
    train_and_compare(torch.float64, "default", style)


@pytest.mark.sampled(cases=2, slow=True)
@on_ranks(4)
@pytest.mark.parametrize("options", OPTIONS)
def test_float32_on_four_ranks(options: str) -> None:
    train_and_compare(torch.float32, options, "plain")


@pytest.mark.sampled(cases=1, slow=True)
@on_ranks(8)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_on_eight_ranks(options: str) -> None:
    train_and_compare(torch.float64, options, "accumulate")
