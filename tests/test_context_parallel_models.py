"""Models of transformers, and this package's layer, whose sequences ranks share, against one rank."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers_models as models
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cuda_ext
from cuda_ext import _sequence_sharding, nn
from cuda_ext.distributed import BucketedDataParallel
from cuda_ext.distributed.context_parallel import Layout, context_parallel
from cuda_ext.distributed.context_parallel.sharding import SequenceSharding
from cuda_ext.integrations import transformers as integration

NAME = integration.NAME
LENGTH, STEPS = 32, 20


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """What models round to float32 stays in float64."""
    to, float_ = Tensor.to, Tensor.float

    def wide(self: Tensor, *args: Any, **options: Any) -> Tensor:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
            if options.get("dtype") is torch.float32:
                options["dtype"] = torch.float64
        return to(self, *args, **options)

    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(Tensor, "to", wide)
        patched.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else float_(self))
        yield


def batches(steps: int = STEPS, rows: int = 2) -> list[dict[str, Any]]:
    """With labels that are fewer on some ranks than on others."""
    found = []
    for _ in range(steps):
        tokens = models.ids(rows, LENGTH)
        labels = tokens.clone()
        labels[0, :9] = -100
        found.append({"input_ids": tokens, "labels": labels, "use_cache": False})
    return found


def step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(**batch).loss
    loss.backward()
    return loss.detach()


def train_alone(model: Any, data: list[dict[str, Any]]) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in data:
        losses.append(step(model, optimizer, batch))
        optimizer.step()
    return torch.stack(losses)


def train_shared(model: Any, data: list[dict[str, Any]], wrapped: Any, **arguments: Any) -> Tensor:
    """Gradients are averaged by `wrapped` or, if that is the model itself, here."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    losses = []
    for batch in data:
        with context_parallel(**arguments):
            loss = step(wrapped, optimizer, integration.shard_batch(batch))
        if wrapped is model:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(loss / dist.get_world_size())
    return torch.stack(losses)


def assert_learns_the_same(shared: Tensor, alone: Tensor, tolerance: float) -> None:
    assert len(alone.unique()) == len(alone) > 1
    torch.testing.assert_close(shared, alone, rtol=tolerance, atol=0)


@pytest.mark.sampled(cases="every value")
@on_ranks(4)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("sums", ["bucketed", "all-reduce"])
def test_training(name: str, sums: str) -> None:
    data = batches()
    with integration.enable(), exact():
        alone = train_alone(models.decoder(name, NAME).train(), data)
        model = models.decoder(name, NAME).train()
        wrapped = BucketedDataParallel(model) if sums == "bucketed" else model
        integration.calls(reset=True)
        shared = train_shared(model, data, wrapped)
        assert integration.calls() == {"served": {"ring_attention": 2 * STEPS}, "refused": {}}
    assert alone.dtype == torch.float64
    assert_learns_the_same(shared, alone, 1e-10)


SHARDINGS: dict[str, dict[str, Any]] = {
    "contiguous": {"layout": "contiguous"},
    "p2p": {"method": "p2p"},
    "ulysses": {"method": "ulysses"},
    "uneven": {"layout": Layout(LENGTH, (((0, 3), (29, 32)), ((3, 17),), ((17, 18),), ((18, 29),)))},
}


@on_ranks(4)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_shardings(sharding: str) -> None:
    check_training("gemma2", **SHARDINGS[sharding])


@on_ranks(4)
def test_heads_and_keys() -> None:
    """Ranks (0, 1) and (2, 3) exchange heads, (0, 2) and (1, 3) keys."""
    mesh = init_device_mesh("cpu", (2, 2))
    check_training("gpt_oss", group=mesh.get_group(0), ulysses_group=mesh.get_group(1))


def check_training(name: str, data: Any = None, shared_data: Any = None, **arguments: Any) -> None:
    """A few steps in float64."""
    data = batches(3) if data is None else data
    with integration.enable(), exact():
        alone = train_alone(models.decoder(name, NAME).train(), data)
        model = models.decoder(name, NAME).train()
        shared = train_shared(model, data if shared_data is None else shared_data, model, **arguments)
        assert_learns_the_same(shared, alone, 1e-10)


def padded(kind: str) -> list[dict[str, Any]]:
    """Positions of padded rows begin at 0 with the padding."""
    data = batches(2, rows=3)
    for batch in data:
        batch["attention_mask"] = mask = models.padding(kind, length=LENGTH)
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
        batch["position_ids"] = torch.arange(LENGTH)[None]
    return data


def packed() -> list[dict[str, Any]]:
    data = batches(2, rows=1)
    lengths = [7, 1, 15, 9]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    for batch in data:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 15, "max_length_k": 15}
    return data


@on_ranks(4)
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
@pytest.mark.parametrize("case", ["left", "right", "holes", "packed", "found in position ids"])
def test_padded_and_packed(name: str, case: str) -> None:
    data = padded(case) if case in ("left", "right", "holes") else packed()
    given = data
    if case == "found in position ids":
        given = [{key: value for key, value in batch.items() if not key.startswith(("cu_", "max_"))} for batch in data]
    integration.calls(reset=True)
    check_training(name, data, given)
    served = integration.calls()["served"]
    form = "ring_attention: padding" if "attention_mask" in data[0] else "ring_attention_varlen: packed sequences"
    assert served[form] == 4


@on_ranks(4)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """Backward, which computes attention again, runs after the block."""
    (batch,) = batches(1)
    with integration.enable(), exact():
        gradients = []
        for kind in ("alone", "shared"):
            model = models.decoder("mistral", NAME).train()
            if kind == "shared":
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                with context_parallel():
                    loss = model(**integration.shard_batch(batch)).loss
            else:
                loss = model(**batch).loss
            loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
    for alone, shared in zip(*gradients, strict=True):
        dist.all_reduce(shared)
        torch.testing.assert_close(shared / 4, alone, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_compiled() -> None:
    torch._dynamo.reset()
    (batch,) = batches(1)
    with integration.enable(), context_parallel():
        model = models.decoder("mistral", NAME, torch.float32, num_hidden_layers=1).train()
        inputs = integration.shard_batch(batch)
        losses = [run(**inputs).loss for run in (model, torch.compile(model, backend="eager"))]
    expected, found = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@on_ranks(4)
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_wrappers_of_torch(wrapper: str) -> None:
    data = batches(3)
    with integration.enable(), exact():
        alone = train_alone(models.decoder("llama", NAME).train(), data)
        model = models.decoder("llama", NAME).train()
        if wrapper == "DDP":
            wrapped: Any = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (4,))
            for layer in (*model.model.layers, model):
                wrapped = fully_shard(layer, mesh=mesh)
        shared = train_shared(None, data, wrapped)
    assert_learns_the_same(shared, alone, 1e-10)


@on_ranks(4)
def test_replicas_that_share_sequences() -> None:
    """Two replicas with other data, each of two ranks: the losses of one rank with all data, as its labels are equally
    many on both."""
    mesh = init_device_mesh("cpu", (2, 2))
    replica = mesh.get_local_rank(0)
    data = batches(3, rows=4)
    for batch in data:
        batch["labels"][2, :9] = -100
    own = [
        {
            name: value[2 * replica : 2 * replica + 2] if isinstance(value, Tensor) else value
            for name, value in b.items()
        }
        for b in data
    ]
    with integration.enable(), exact():
        alone = train_alone(models.decoder("llama", NAME).train(), data)
        model = models.decoder("llama", NAME).train()
        shared = train_shared(model, own, BucketedDataParallel(model), group=mesh.get_group(1))
    assert_learns_the_same(shared, alone, 1e-10)


@on_ranks(2)
def test_loss_without_logits() -> None:
    """`cuda_ext.patch` computes the loss from shifted labels, too."""
    (batch,) = batches(1)
    with integration.enable():
        model = models.decoder("llama", NAME, torch.float32).train()
        alone = model(**batch).loss
        cuda_ext.patch(model)
        with context_parallel():
            loss = model(**integration.shard_batch(batch)).loss.detach()
    dist.all_reduce(loss)
    torch.testing.assert_close(loss / 2, alone, rtol=1e-5, atol=0)


# What is refused, on all ranks


@on_ranks(2)
def test_errors_of_models() -> None:
    tokens = models.ids(2, 16)
    with integration.enable():
        model = models.decoder("mistral", NAME, torch.float32)
        with pytest.raises(RuntimeError, match="expected to be called in a block of context_parallel"):
            integration.shard_batch({"input_ids": tokens})
        with context_parallel() as sharding:
            with pytest.raises(ValueError, match=r"position_ids: .*expected the positions of this rank's rows"):
                model(sharding.shard(tokens), position_ids=torch.arange(8)[None] + 1, use_cache=False)
            with pytest.raises(ValueError, match="expected packed sequences in one row"):
                integration.shard_batch({"input_ids": tokens, "position_ids": torch.arange(8).repeat(2, 2)})
            with pytest.raises(ValueError, match=r"expected position_ids of \(2 or 1, 16\), got \(2, 2, 16\)"):
                integration.shard_batch({"input_ids": tokens, "position_ids": torch.arange(16).expand(2, 2, 16)})
            with pytest.raises(ValueError, match="multiple of 2 ranks, got 15; pad"):
                integration.shard_batch({"input_ids": tokens[:, :15]})
            with pytest.raises(NotImplementedError, match=r"1 queries for \d+ keys \(a cache"):
                inputs = integration.shard_batch({"input_ids": tokens})
                cache = model(**inputs, use_cache=True).past_key_values
                model(tokens[:, :1], past_key_values=cache)
        model = models.decoder("llama4", NAME, torch.float32)
        with context_parallel(), pytest.raises(NotImplementedError, match="a mask of every pair"):
            model(**integration.shard_batch({"input_ids": tokens}))


BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "ring"}, "expected method 'all_gather' or 'p2p' or 'ulysses', got 'ring'"),
    "layout": ({"layout": "stripe"}, "'zigzag' or 'contiguous', or a Layout, got 'stripe'"),
    "ranks": ({"layout": Layout.zigzag(12, 3)}, "expected a layout for the 2 ranks of group, got one for 3"),
    "two groups": ({"method": "ulysses", "ulysses_group": True}, "expected no ulysses_group with method 'ulysses'"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", BLOCKS)
def test_errors_of_the_block(case: str) -> None:
    arguments, message = BLOCKS[case]
    if "ulysses_group" in arguments:
        arguments = {**arguments, "ulysses_group": dist.group.WORLD}
    with pytest.raises(ValueError, match=message), context_parallel(**arguments):
        pass


@on_ranks(2)
def test_blocks_are_nested() -> None:
    assert _sequence_sharding.active is None
    with context_parallel() as outer:
        with pytest.raises(ZeroDivisionError), context_parallel():
            1 / 0  # noqa: B018
        assert _sequence_sharding.active is outer


# The layer


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks and window": {"sinks": True, "window": (9, None), "num_kv_heads": 2, "bias": True},
    "both directions": {"causal": False, "softcap": 4.0},
    "dropout": {"dropout_p": 0.3},
}


@on_ranks(4)
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("sharding", ["zigzag", "contiguous", "uneven", "ulysses"])
def test_layer(case: str, sharding: str) -> None:
    sizes: dict[str, Any] = {"dtype": torch.float64, **LAYERS[case]}
    alone = nn.SelfAttention(32, 4, **sizes)
    named = SHARDINGS.get(sharding, {"layout": sharding})
    given = {f"context_{name}": value for name, value in named.items()}
    shared = nn.SelfAttention(32, 4, **sizes, context_group=dist.group.WORLD, **given)
    shared.load_state_dict(alone.state_dict())
    assert shared.state_dict().keys() == alone.state_dict().keys()
    shared = copy.deepcopy(shared)
    x, residual, weights = (torch.randn(2, LENGTH, 32, dtype=torch.float64) for _ in range(3))
    whole = [t.requires_grad_() for t in (x, residual)]
    sharder = SequenceSharding(**named)
    own = [sharder.shard(t.detach()).requires_grad_() for t in whole]
    torch.manual_seed(5)
    expected = alone(*whole)
    torch.manual_seed(5)
    found = shared(*own)
    torch.testing.assert_close(found, sharder.shard(expected), rtol=1e-6, atol=1e-6)  # angles are float32
    (expected * weights).sum().backward()
    (found * sharder.shard(weights)).sum().backward()
    for mine, theirs in zip(own, whole):
        torch.testing.assert_close(mine.grad, sharder.shard(theirs.grad), rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-5)


@on_ranks(2)
def test_layer_refuses_caches() -> None:
    layer = nn.SelfAttention(32, 4, context_group=dist.group.WORLD)
    cache = nn.KeyValueCache(1, [16], 4, 8)
    with torch.no_grad(), pytest.raises(RuntimeError, match="expected no cache with context_group"):
        layer(torch.randn(1, 4, 32), cache=cache[0])


def test_rotary_positions() -> None:
    rotary = nn.RotaryEmbedding(8)
    x = torch.randn(2, 11, 3, 8, dtype=torch.float64)
    places = torch.randperm(11)
    for given in ({}, {"length": 40}):
        assert torch.equal(rotary(x[:, places], positions=places, **given), rotary(x)[:, places])
    each = torch.stack([places, places.flip(0)])
    rows = x.gather(1, each[..., None, None].expand_as(x))
    assert torch.equal(rotary(rows, positions=each), rotary(x).gather(1, each[..., None, None].expand_as(x)))
