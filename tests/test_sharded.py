"""ZeRO stage 1: an optimizer of which each rank holds a part trains as one that each holds in full."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from distributed_common import NAME, SMALL, Branches, assert_same_on_all_ranks, make_model
from ranks import on_ranks

from cuda_ext.distributed import BucketedDataParallel


@on_ranks(4)
@pytest.mark.parametrize("bucket_mb", [SMALL, "auto"])
@pytest.mark.parametrize("wire_dtype", [None, torch.float32])
def test_trains_as_one_process(bucket_mb: float | str, wire_dtype: torch.dtype | None) -> None:
    whole = make_model()
    model = BucketedDataParallel(copy.deepcopy(whole), bucket_mb=bucket_mb, wire_dtype=wire_dtype, shard_optimizer=True)
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
    # Each holds about a quarter of the state.
    count = sum(p.numel() for p in whole.parameters())
    held = sum(shard.numel() for _, shard in model.named_shards())
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert total == count
    if bucket_mb == "auto":
        assert held < 0.5 * count


@on_ranks(4)
def test_parameters_that_no_rank_uses_stay_as_they_are() -> None:
    model = BucketedDataParallel(Branches(), bucket_mb=SMALL, shard_optimizer=True)
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


def test_refusals(group: None) -> None:
    model = BucketedDataParallel(make_model(), shard_optimizer=True)
    batch = torch.randn(2, 7, dtype=torch.float64)
    for foreign, what in ((make_model().parameters(), "one of shape (31, 7)"), (["0.weight"], "'0.weight'")):
        message = f"{NAME}.sharded_optimizer: expected parameters of the wrapped module, got {what} that is not one; "
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            model.sharded_optimizer(torch.optim.SGD, foreign, lr=0.1)
    torch.optim.SGD(make_model().parameters()).step()  # of other parameters, no matter
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch).sum().backward()
    message = f"{NAME}: expected an optimizer from model.sharded_optimizer, as with shard_optimizer=True only a rank's "
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}.*got SGD with parameter 0.weight, which it would"):
        plain.step()
    model.module[0].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=f"^{re.escape(NAME)}: expected the same parameters to require grad as"):
        model(batch)
    del model
    plain.step()  # nobody is left to mind
    model = BucketedDataParallel(make_model())
    with pytest.raises(RuntimeError, match=f"^{re.escape(NAME)}.named_shards: expected shard_optimizer=True, got"):
        list(model.named_shards())
