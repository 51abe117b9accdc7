"""ZeRO stage 1: a sharded optimizer gives the same results as an unsharded one."""

from __future__ import annotations

import copy
import re
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_common import NAME, SMALL, Branches, assert_same_on_all_ranks, make_model
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from cuda_ext.distributed import BucketedDataParallel


@on_ranks(4)
@pytest.mark.parametrize("bucket_cap_mb", [SMALL, "auto"])
@pytest.mark.parametrize("wire_dtype", [None, torch.float32])
def test_trains_as_one_process(bucket_cap_mb: float | str, wire_dtype: torch.dtype | None) -> None:
    whole = make_model()
    model = BucketedDataParallel(
        copy.deepcopy(whole), bucket_cap_mb=bucket_cap_mb, wire_dtype=wire_dtype, shard_optimizer=True
    )
    tolerance = 1e-12 if wire_dtype is None else 1e-5
    decayed = {p for name, p in whole.named_parameters() if "weight" in name}

    def groups(module: torch.nn.Module) -> list[dict[str, object]]:
        weights = [p for name, p in module.named_parameters() if "weight" in name]
        biases = [p for name, p in module.named_parameters() if "bias" in name]
        return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]

    assert len(decayed) == 4
    plain = torch.optim.AdamW(groups(whole), lr=1e-2)
    sharded = model.sharded_optimizer(torch.optim.AdamW, groups(model.module), lr=1e-2)
    for _ in range(5):
        batch = torch.randn(4, 6, 7, dtype=torch.float64)
        whole(batch).square().mean().backward()
        model(batch[dist.get_rank()]).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        norms = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05), model.clip_grad_norm_(0.05)
        torch.testing.assert_close(*norms, rtol=tolerance, atol=0)
        for optimizer in (plain, sharded):
            optimizer.step()
            optimizer.zero_grad()
        for actual, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        assert_same_on_all_ranks(list(model.parameters()))
    # Each rank has about a quarter of the state.
    count = sum(p.numel() for p in whole.parameters())
    held = sum(shard.numel() for _, shard in model.named_shards())
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert total == count
    if bucket_cap_mb == "auto":
        assert held < 0.5 * count


@on_ranks(4)
def test_parameters_that_no_rank_uses_stay_as_they_are() -> None:
    model = BucketedDataParallel(Branches(), bucket_cap_mb=SMALL, shard_optimizer=True)
    plain = copy.deepcopy(model.module)
    optimizer = model.sharded_optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.1)
    rank = dist.get_rank()
    for used in (([0], [1], [0, 2], [1]), ([3], [3], [3], [3]), ([0], [1], [2], [3])):
        batches = torch.randn(4, 2, 7, dtype=torch.float64)
        with model.no_sync():
            model(batches[rank], used[rank]).backward()
        model(batches[rank], used[rank]).backward()
        sum(2 * plain(batches[r], used[r]) for r in range(4)).div(4).backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
def test_state_goes_from_torch_s_wrapper_and_back() -> None:
    """Through torch.distributed.checkpoint: whole states are bitwise equal, and training continues equally."""

    def make() -> nn.Module:
        module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 7), nn.Linear(7, 1, bias=False)).double()
        module[3].weight.requires_grad_(False)
        return module.to(memory_format=torch.channels_last)

    def groups(module: nn.Module) -> list[dict[str, object]]:
        trained = [p for p in module.parameters() if p.requires_grad]
        return [{"params": trained[:1], "lr": 0.02}, {"params": trained[1:], "weight_decay": 0.1}]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in torch.randn(2, 2, 4, 3, 3, 3, dtype=torch.float64, generator=generator):
            model(batch[dist.get_rank()]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def copies(state: dict[str, Any]) -> dict[str, Any]:  # as written and read
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        dcp.save(state, checkpoint_id=folder[0])
        again = tree_map(lambda x: torch.full_like(x, torch.nan) if isinstance(x, torch.Tensor) else x, state)
        dcp.load(again, checkpoint_id=folder[0])
        return again

    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    plain = DistributedDataParallel(make())
    plain_optimizer = torch.optim.AdamW(groups(plain.module), lr=0.1)
    train(plain, plain_optimizer)
    saved = dict(zip(("model", "optimizer"), get_state_dict(plain, plain_optimizer)))

    sharded = BucketedDataParallel(make(), bucket_cap_mb=SMALL, shard_optimizer=True)
    optimizer = sharded.sharded_optimizer(torch.optim.AdamW, groups(sharded.module), lr=0.3)
    read = copies(saved)
    set_model_state_dict(sharded, read["model"])
    sharded.load_optimizer_state_dict(optimizer, read["optimizer"])
    assert_same_states(sharded.optimizer_state_dict(optimizer), saved["optimizer"])
    seed = generator.get_state()
    for model, its_optimizer in ((plain, plain_optimizer), (sharded, optimizer)):
        generator.set_state(seed)
        train(model, its_optimizer)
    for actual, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)

    saved = {"model": get_model_state_dict(sharded), "optimizer": sharded.optimizer_state_dict(optimizer)}
    read = copies(saved)
    back = DistributedDataParallel(make())
    back_optimizer = torch.optim.AdamW(groups(back.module), lr=0.3)
    set_state_dict(back, back_optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    assert_same_states(get_state_dict(back, back_optimizer)[1], saved["optimizer"])

    for call in (
        lambda: get_state_dict(sharded, optimizer),
        lambda: set_optimizer_state_dict(sharded, optimizer, saved["optimizer"]),
    ):
        with pytest.raises(RuntimeError, match=f"^{re.escape(NAME)}: expected model.optimizer_state_dict"):
            call()
    fresh = sharded.sharded_optimizer(torch.optim.AdamW)
    assert sharded.optimizer_state_dict(fresh)["state"] == {}
    with pytest.raises(ValueError, match="expected state_dict to have 1 param_groups, like the optimizer, got 2"):
        sharded.load_optimizer_state_dict(fresh, saved["optimizer"])
    with pytest.raises(ValueError, match="expected param_groups with the same parameters as the optimizer"):
        sharded.load_optimizer_state_dict(fresh, plain_optimizer.state_dict() | {"param_groups": [{"params": [0]}]})
    with pytest.raises(ValueError, match="expected an optimizer from sharded_optimizer of this model, got AdamW"):
        sharded.optimizer_state_dict(back_optimizer)


def assert_same_states(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for name, entries in expected["state"].items():
        assert actual["state"][name].keys() == entries.keys()
        for key, value in entries.items():
            torch.testing.assert_close(actual["state"][name][key], value, rtol=0, atol=0, msg=f"{key} of {name}")


def test_refusals(group: None) -> None:
    model = BucketedDataParallel(make_model(), shard_optimizer=True)
    batch = torch.randn(2, 7, dtype=torch.float64)
    for foreign, what in ((make_model().parameters(), "one of shape (31, 7)"), (["0.weight"], "'0.weight'")):
        message = f"{NAME}.sharded_optimizer: expected parameters of the wrapped module, got {what} that is not one; "
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            model.sharded_optimizer(torch.optim.SGD, foreign, lr=0.1)
    torch.optim.SGD(make_model().parameters()).step()  # other parameters are not affected
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch).sum().backward()
    message = f"{NAME}: expected an optimizer from model.sharded_optimizer, as with shard_optimizer=True only a rank's "
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}.*got SGD with parameter 0.weight, which it would"):
        plain.step()
    model.module[0].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=f"^{re.escape(NAME)}: expected the same parameters to require grad as"):
        model(batch)
    del model
    plain.step()  # the wrapper no longer exists
    model = BucketedDataParallel(make_model())
    with pytest.raises(RuntimeError, match=f"^{re.escape(NAME)}.named_shards: expected shard_optimizer=True, got"):
        list(model.named_shards())
