from __future__ import annotations

import copy
import gc
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, workers  # noqa: F401
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cuda_ext import bucket as bucket_ops
from cuda_ext.distributed import AllreduceState, BucketedDataParallel, all_reduce_coalesced, allreduce_hook, plan

NAME = "cuda_ext.distributed.BucketedDataParallel"
Gradients = dict[str, Tensor | None]
SMALL = 1e-3  # MiB: about one layer of the models below in a bucket


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Six buckets of SMALL; odd sizes. float64, so that the order of additions does not matter beyond 1e-12."""
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


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone, for what needs no second rank to be seen."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# the average


@on_ranks(4)
def test_training_equals_one_process_with_the_whole_batch() -> None:
    whole = make_model()
    model = BucketedDataParallel(copy.deepcopy(whole), bucket_mb=SMALL)
    assert len(model.describe().splitlines()) == 2 + 6
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, model)]
    for _ in range(4):
        batch = torch.randn(24, 7, dtype=torch.float64)
        whole(batch).square().mean().backward()
        model(shard(batch)).square().mean().backward()
        assert_gradients(model, whole)
        norms = nn.utils.clip_grad_norm_(whole.parameters(), 0.05), model.clip_grad_norm_(0.05)
        torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_on_all_ranks(list(model.parameters()))


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bucket_mb", [SMALL, "auto"])
def test_every_bit_is_that_of_torch(set_to_none: bool, bucket_mb: float | str) -> None:
    """Halving is exact and the sum of two has one order, so float32 leaves no room for a difference."""
    model = BucketedDataParallel(make_model(torch.float32), bucket_mb=bucket_mb)
    theirs = DistributedDataParallel(copy.deepcopy(model.module))
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        batch = torch.randn(5, 7)
        for m in (model, theirs):
            m.zero_grad(set_to_none=set_to_none)
            m(batch).square().mean().backward()
        assert_gradients(model.module, theirs.module, tolerance=0)


@on_ranks(2)
def test_gradients_are_views_that_travel_while_backward_runs() -> None:
    model = BucketedDataParallel(make_model(), bucket_mb=SMALL)
    launched: list[list[bool]] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: launched.append([bucket.launched for bucket in model._reducer.buckets]))
    for _ in range(2):
        launched.clear()
        model.zero_grad()
        model(torch.randn(2, 7, dtype=torch.float64)).sum().backward()
        assert launched[0] == [False] * 6
        assert launched[-1] == [True] * 5 + [False]
        assert all(flags == sorted(flags, reverse=True) for flags in launched)
        for bucket in model._reducer.buckets:
            assert not bucket.launched
            begin, end = bucket.wire.data_ptr(), bucket.wire.data_ptr() + bucket.wire.nbytes
            for parameter in bucket.parameters:
                assert begin <= parameter.grad.data_ptr() < end
                assert (parameter.grad.data_ptr() - begin) % 64 == 0


class Zoo(nn.Module):
    """Parameters of every dtype and layout, shared, frozen, empty and scalar ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.convolution = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.low = nn.Linear(4, 3, dtype=torch.bfloat16)
        self.high = nn.Linear(4, 3, dtype=torch.float64)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = self.embedding(tokens)  # (B, S, 6)
        y = self.convolution(torch.stack([x, self.frozen(x)], 1)).mean(dim=(2, 3))  # (B, 4)
        z = (x @ self.transposed.t()).tanh().sum() * self.scalar + self.empty.sum()
        return {
            "loss": z + self.head(x).logsumexp(-1).sum(),
            "heads": [self.low(y.bfloat16()), self.high(y.double())],
        }


def zoo_loss(output: dict[str, Any]) -> Tensor:
    return output["loss"] + sum(head.square().sum() for head in output["heads"])


@on_ranks(2)
def test_parameters_of_every_kind() -> None:
    model = BucketedDataParallel(Zoo(), bucket_mb=SMALL)
    plain = copy.deepcopy(model.module)
    names = [name for bucket in model._reducer.buckets for name in bucket.names]
    assert sorted(names) == sorted(name for name, p in plain.named_parameters() if p.requires_grad)
    torch.manual_seed(dist.get_rank())
    for set_to_none in (True, False, True):
        tokens = torch.randint(11, (3, 7))
        for m in (model, plain):
            m.zero_grad(set_to_none=set_to_none)
            zoo_loss(m(tokens)).backward()
        # Both sides compute the same float32 and bfloat16 gradients and add two of them: equal to the last bit.
        expected = {n: None if g is None else mean_over_ranks(g) for n, g in gradients(plain).items()}
        assert_gradients(model.module, expected, tolerance=0)
        for parameter in model.parameters():
            if parameter.grad is not None:
                assert parameter.grad.stride() == parameter.stride()


@on_ranks(2)
@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_wire_dtype(wire_dtype: torch.dtype) -> None:
    model = BucketedDataParallel(make_model(torch.float32), bucket_mb=SMALL, wire_dtype=wire_dtype)
    plain = copy.deepcopy(model.module)
    assert "float32 as " + str(wire_dtype).removeprefix("torch.") in model.describe()
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        batch = torch.randn(4, 7)
        for m in (model, plain):
            m.zero_grad()
            m(batch).square().mean().backward()
        # What should travel: each half rounded to the wire, their sum rounded once more.
        expected = {}
        for name, grad in gradients(plain).items():
            halves = [torch.empty_like(grad) for _ in range(2)]
            dist.all_gather(halves, grad)
            a, b = ((half * 0.5).to(wire_dtype) for half in halves)
            expected[name] = (a + b).float()
        assert_gradients(model, expected, tolerance=0)
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())

        before = [bucket._stats for bucket in model._reducer.buckets]
        norm = model.clip_grad_norm_(math.inf)
        after = [bucket._stats for bucket in model._reducer.buckets]
        assert all(a is b for a, b in zip(before, after, strict=True)), "the norm should have come with unpack"
        # float32 against float32: each rounds a few times.
        torch.testing.assert_close(norm, nn.utils.get_total_norm(list(expected.values())), rtol=1e-6, atol=0)


# accumulation


@on_ranks(2)
@pytest.mark.parametrize("wire_dtype", [None, torch.float32])
def test_no_sync(wire_dtype: torch.dtype | None) -> None:
    dtype = torch.float64 if wire_dtype is None else torch.float32
    tolerance = 1e-12 if wire_dtype is None else 1e-6
    model = BucketedDataParallel(nn.ModuleDict({"a": make_model(dtype), "b": make_model(dtype)}), wire_dtype=wire_dtype)
    plain = copy.deepcopy(model.module)
    rank = dist.get_rank()

    def forward(module: nn.Module, branch: str, batch: Tensor) -> Tensor:
        return module[branch](batch).square().mean()

    # These calls pass by the forward of the wrapper: its hooks on the parameters have to do without those on outputs.
    for set_to_none in (True, False):
        for m in (model, plain):
            m.zero_grad(set_to_none=set_to_none)
        batches = [torch.randn(2, 3, 7, dtype=dtype) for _ in range(4)]
        with model.no_sync():
            forward(model.module, "a", batches[0][rank]).backward()
            with model.no_sync():
                forward(model.module, "a", batches[1][rank]).backward()
            forward(model.module, "b", batches[1][rank]).backward()
        forward(model.module, "b", batches[2][rank]).backward()  # reaches b alone, averages a as well
        for batch in batches[:2]:
            sum(forward(plain, "a", batch[r]) for r in range(2)).div(2).backward()
        for batch in batches[1:3]:
            sum(forward(plain, "b", batch[r]) for r in range(2)).div(2).backward()
        assert_gradients(model.module, plain, tolerance)
        # On top of averages: mean(average + local) is average + mean(local).
        forward(model.module, "a", batches[3][rank]).backward()
        sum(forward(plain, "a", batches[3][r]) for r in range(2)).div(2).backward()
        assert_gradients(model.module, plain, tolerance)


@on_ranks(2)
def test_no_sync_keeps_gradients_local() -> None:
    model = BucketedDataParallel(make_model())
    plain = copy.deepcopy(model.module)
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(4, 7, dtype=torch.float64)
    with pytest.raises(ZeroDivisionError), model.no_sync():
        model(batch).square().mean().backward()
        plain(batch).square().mean().backward()
        assert_gradients(model, plain, tolerance=0)
        raise ZeroDivisionError
    model(batch).square().mean().backward()
    plain(batch).square().mean().backward()
    assert_gradients(model, {name: mean_over_ranks(grad) for name, grad in gradients(plain).items()})


@on_ranks(2)
def test_several_forwards_and_several_backwards() -> None:
    model = BucketedDataParallel(make_model(), bucket_mb=SMALL)
    plain = copy.deepcopy(model.module)
    batches = torch.randn(4, 2, 3, 7, dtype=torch.float64)

    def both_ranks(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        function(model, batches[:, dist.get_rank()]).backward()
        sum(function(plain, batches[:, r]) for r in range(2)).div(2).backward()
        assert_gradients(model, plain)

    both_ranks(lambda m, x: (m(x[0]) * m(x[1])).sum())
    both_ranks(lambda m, x: m(x[2]).exp().sum())
    loss = model(batches[3, dist.get_rank()]).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    sum(2 * plain(batches[3, r]).square().sum() for r in range(2)).div(2).backward()
    assert_gradients(model, plain)


# parameters without gradients


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(7, 7, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(7, 3, dtype=torch.float64) for _ in range(5))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return sum(self.branches[n](self.common(x)).square().mean() for n in used)


@on_ranks(4)
@pytest.mark.parametrize("bucket_mb", [1e-4, SMALL, "auto"])
def test_unused_parameters_need_no_flag(bucket_mb: float | str) -> None:
    model = BucketedDataParallel(Branches(), bucket_mb=bucket_mb)
    plain = copy.deepcopy(model.module)
    rank = dist.get_rank()
    # Of every step: the branches that each rank uses. Branch 4 at last, then nowhere again.
    steps = [([0], [1], [0, 2], [1]), ([3], [3], [3], [3]), ([0], [1], [2], [3, 4]), ([0], [0], [0], [0])]
    for set_to_none in (True, False):
        for used in steps:
            for m in (model, plain):
                m.zero_grad(set_to_none=set_to_none)
            batches = torch.randn(4, 2, 7, dtype=torch.float64)
            model(batches[rank], used[rank]).backward()
            sum(plain(batches[r], used[r]) for r in range(4)).div(4).backward()
            assert_gradients(model, plain)
            norms = nn.utils.clip_grad_norm_(plain.parameters(), 0.01), model.clip_grad_norm_(0.01)
            torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
            assert_gradients(model, plain)
            assert not model.found_nonfinite()


# norms


@on_ranks(2)
@pytest.mark.parametrize("wire_dtype", [None, torch.float64])
def test_clipping_sees_what_was_done_to_the_gradients(wire_dtype: torch.dtype | None) -> None:
    """As a gradient scaler, a hook of the user, or one who freezes a layer by hand would."""
    model = BucketedDataParallel(make_model(torch.float32), bucket_mb=SMALL, wire_dtype=wire_dtype)
    torch.manual_seed(dist.get_rank())

    def clip_and_compare(max_norm: float) -> None:
        plain = copy.deepcopy(model.module)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        actual = model.clip_grad_norm_(max_norm)
        assert actual.dtype == torch.float32
        assert actual.shape == ()
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)  # float32, a few roundings on each side
        assert_gradients(model, plain, tolerance=1e-6)

    model(torch.randn(4, 7)).square().mean().backward()
    clip_and_compare(1e6)
    clip_and_compare(1e-2)
    parameters = list(model.parameters())
    torch._foreach_mul_([parameter.grad for parameter in parameters], 8.0)
    clip_and_compare(1e-2)
    parameters[2].grad = parameters[2].grad * 100.0
    parameters[5].grad = None
    clip_and_compare(1e-2)
    model.zero_grad()
    clip_and_compare(1e-2)
    with model.no_sync():
        model(torch.randn(4, 7)).square().mean().backward()
    clip_and_compare(1e-2)


@on_ranks(2)
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_one_bad_value_on_one_rank_is_known_to_all(wire_dtype: torch.dtype | None) -> None:
    model = BucketedDataParallel(make_model(torch.float32), bucket_mb=SMALL, wire_dtype=wire_dtype)
    batch = torch.randn(4, 7)
    model(batch).square().mean().backward()
    assert not model.found_nonfinite()
    assert model.found_nonfinite().dtype == torch.bool
    model.zero_grad()
    if dist.get_rank() == 1:
        model.module[2].weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor(3), math.inf))
    model(batch).square().mean().backward()
    assert model.found_nonfinite()
    before = gradients(model)
    message = rf"^{re.escape(NAME)}\.clip_grad_norm_: expected gradients of finite norm, got inf; skip this step"
    with pytest.raises(RuntimeError, match=message):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert_gradients(model, before, tolerance=0)
    assert model.clip_grad_norm_(1.0) == math.inf


# state that is not gradients


@on_ranks(2)
def test_state_of_the_first_rank_goes_to_all() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, dtype=torch.bfloat16))
    module[1].running_mean.normal_()
    module[1].num_batches_tracked.fill_(dist.get_rank() + 5)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = BucketedDataParallel(module)
    assert_same_on_all_ranks(list(model.state_dict().values()))
    assert model.state_dict().keys() == before.keys()
    if dist.get_rank() == 0:
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@on_ranks(2)
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers(broadcast_buffers: bool) -> None:
    model = BucketedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), broadcast_buffers=broadcast_buffers)
    mean = model.module[1].running_mean
    torch.manual_seed(dist.get_rank())
    model(torch.randn(8, 3)).sum().backward()
    assert not torch.equal(mean, mean_over_ranks(mean))

    # None of these broadcasts, or this would wait for a forward that only one rank runs.
    if dist.get_rank() == 1:
        with torch.no_grad():
            model(torch.randn(8, 3))
        with model.no_sync():
            model(torch.randn(8, 3))
        model.eval()
        model(torch.randn(8, 3))
        model.train()
    seen = []
    model.module[1].register_forward_pre_hook(lambda module, _: seen.append(module.running_mean.clone()))
    model(torch.randn(8, 3)).sum().backward()
    assert torch.equal(seen[0], mean_over_ranks(seen[0])) == broadcast_buffers


def test_it_looks_like_the_module(group: None) -> None:
    module = make_model()
    module.register_buffer("steps", torch.tensor(3))
    module.vocabulary = ["a"]
    model = BucketedDataParallel(module)
    assert model.module is module
    assert list(model.state_dict()) == list(module.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == ["steps"]
    assert all(a is b for a, b in zip(model.parameters(), module.parameters(), strict=True))
    assert model.vocabulary == ["a"]
    assert model.steps == 3
    with pytest.raises(AttributeError, match="vocabulaire"):
        _ = model.vocabulaire
    with pytest.raises(AttributeError, match="module"):
        _ = BucketedDataParallel.__new__(BucketedDataParallel).module
    other = make_model()
    other.register_buffer("steps", torch.tensor(9))
    assert not model.load_state_dict(other.state_dict()).missing_keys
    assert torch.equal(module[0].weight, other[0].weight)
    assert model.steps == 9


def test_one_rank(group: None) -> None:
    model = BucketedDataParallel(make_model(), bucket_mb=SMALL)
    plain = copy.deepcopy(model.module)
    batch = torch.randn(4, 7, dtype=torch.float64)
    for m in (model, plain):
        m(batch).square().mean().backward()
    assert_gradients(model, plain, tolerance=0)
    with torch.inference_mode():
        assert torch.equal(model(batch), plain(batch))


@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled(group: None, where: str) -> None:
    module = make_model()
    plain = copy.deepcopy(module)
    if where == "inside":
        model = BucketedDataParallel(torch.compile(module, backend="aot_eager"), bucket_mb=SMALL)
    else:
        model = torch.compile(BucketedDataParallel(module, bucket_mb=SMALL), backend="aot_eager")
    for _ in range(2):
        batch = torch.randn(4, 7, dtype=torch.float64)
        for m in (model, plain):
            m(batch).square().mean().backward()
        assert_gradients(module, plain)


def test_it_lets_go_of_the_module(group: None) -> None:
    module = make_model()
    model = BucketedDataParallel(module, bucket_mb=SMALL)
    message = f"{NAME}: expected a module that is not wrapped yet, got parameter 0.weight, whose gradient another"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        BucketedDataParallel(nn.Sequential(module[0]))
    batch = torch.randn(4, 7, dtype=torch.float64)
    model(batch).sum().backward()
    wire = model._reducer.buckets[0].wire
    del model
    gc.collect()
    module.zero_grad()
    wire.zero_()
    module(batch).sum().backward()
    assert not wire.any()
    BucketedDataParallel(module)


# autograd


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("what", ["layers", "all"])
def test_checkpoints(use_reentrant: bool, what: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant) if what == "layers" else layer(x)
            return x

    model = BucketedDataParallel(Checkpointed(), bucket_mb=SMALL)
    plain = copy.deepcopy(model.module.layers)
    for _ in range(2):
        batch = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
        if what == "layers":
            output = model(shard(batch))
        else:
            output = checkpoint(model, shard(batch), use_reentrant=use_reentrant)
        output.square().mean().backward()
        plain(batch).square().mean().backward()
        assert_gradients(model.module.layers, plain)


def test_a_second_gradient_after_the_first_was_sent(group: None) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    model = BucketedDataParallel(Shared())
    with pytest.raises(
        RuntimeError, match=r"expected one gradient of parameter layer\.\w+ in a backward pass, got a second"
    ):
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    # In one bucket with a parameter that comes last, the second gradient is in time.
    shared = Shared()
    shared.last = nn.Parameter(torch.ones(3))
    shared.register_forward_pre_hook(lambda module, args: (args[0] * module.last,))
    model = BucketedDataParallel(shared)
    plain = copy.deepcopy(shared)
    batch = torch.randn(2, 3, requires_grad=True)
    for m in (model, plain):
        m(batch).sum().backward()
    assert_gradients(model, plain, tolerance=1e-6)  # float32 in the order of additions of autograd


@on_ranks(2)
def test_gradients_of_gradients() -> None:
    model = BucketedDataParallel(make_model(), bucket_mb=SMALL)
    plain = copy.deepcopy(model.module)
    batches = torch.randn(2, 3, 7, dtype=torch.float64)

    def penalty(module: nn.Module, batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()
        (grad,) = torch.autograd.grad(module(batch).square().sum(), batch, create_graph=True)
        return grad.square().sum()

    penalty(model, batches[dist.get_rank()]).backward()
    sum(penalty(plain, batch) for batch in batches).div(2).backward()
    assert_gradients(model, plain)
    with pytest.raises(RuntimeError, match=f"^{re.escape(NAME)}: expected a backward pass without create_graph, got"):
        model(batches[0]).sum().backward(create_graph=True)


# failures


class Fails(torch.autograd.Function):
    """Identity whose backward raises where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ValueError("this rank fails")
        return grad, None


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.fails_at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(Fails.apply(x, n == self.fails_at))
        return x


@on_ranks(4)
@pytest.mark.parametrize("failing", [[1], [0, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("wire_dtype", [None, torch.float32])
def test_training_goes_on_after_an_exception_in_backward(failing: list[int], wire_dtype: torch.dtype | None) -> None:
    model = BucketedDataParallel(Failing(), bucket_mb=SMALL, wire_dtype=wire_dtype)
    plain = copy.deepcopy(model.module)
    rank = dist.get_rank()
    for fails_at in (4, 6, 1):  # with buckets sent before it, with none, with all but one
        batches = torch.randn(4, 2, 7, dtype=torch.float64)
        model.fails_at = model.module.fails_at = fails_at if rank in failing else None
        message = (
            "this rank fails" if rank in failing else f"^{re.escape(NAME)}: expected every rank to finish the backward"
        )
        with pytest.raises((RuntimeError, ValueError), match=message):
            model(batches[rank]).square().mean().backward()
        model.module.fails_at = None
        for m in (model, plain):
            m.zero_grad()
        model(batches[rank]).square().mean().backward()
        sum(plain(batches[r]).square().mean() for r in range(4)).div(4).backward()
        assert_gradients(model, plain, tolerance=1e-12 if wire_dtype is None else 1e-6)


def test_gradients_of_a_failed_step_are_dropped(group: None) -> None:
    model = BucketedDataParallel(Failing(), bucket_mb=SMALL)
    batch = torch.randn(2, 7, dtype=torch.float64)
    model.module.fails_at = 3
    with pytest.raises(ValueError, match="this rank fails"):
        model(batch).sum().backward()
    model.module.fails_at = None
    output = model(batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    output.sum().backward()
    plain = copy.deepcopy(model.module)
    plain.zero_grad()
    plain(batch).sum().backward()
    assert_gradients(model, plain, tolerance=0)


def test_sparse_gradients_are_refused(group: None) -> None:
    model = BucketedDataParallel(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)))
    message = f"{NAME}: expected a dense gradient of parameter 0.weight, got torch.sparse_coo; buckets are flat"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        model(torch.tensor([1, 2])).sum().backward()


def test_no_process_group() -> None:
    tail = (
        ": expected an initialised process group, got none; call torch.distributed.init_process_group() first, in a "
        "program started by torchrun, which sets rank and world size"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(NAME + tail)}$"):
        BucketedDataParallel(make_model())
    with pytest.raises(RuntimeError, match=f"^{re.escape('cuda_ext.distributed.all_reduce_coalesced' + tail)}$"):
        all_reduce_coalesced([torch.zeros(3)])


@on_ranks(2)
def test_subgroups() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)]
    mine, other = alone[dist.get_rank()], alone[1 - dist.get_rank()]
    model = BucketedDataParallel(make_model(), process_group=mine)
    plain = copy.deepcopy(model.module)
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(3, 7, dtype=torch.float64)
    for m in (model, plain):
        m(batch).sum().backward()
    assert_gradients(model, plain, tolerance=0)
    with pytest.raises(
        RuntimeError, match=f"^{re.escape(NAME)}: expected a process group that holds this process, got"
    ):
        BucketedDataParallel(make_model(), process_group=other)
    tensor = torch.ones(2)
    all_reduce_coalesced([tensor], "sum", group=mine)
    assert tensor.tolist() == [1, 1]


@on_ranks(2)
def test_ranks_that_disagree_say_in_what() -> None:
    first = dist.get_rank() == 0
    prefix = f"^{re.escape(NAME)}: expected the same module and options on every rank, got on rank 0: "
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: BucketedDataParallel(nn.Linear(3, 4 if first else 5)),
            r"parameter weight torch\.float32 \(4, 3\) strides \(3, 1\) cpu trained; "
            r"on rank 1: parameter weight torch\.float32 \(5, 3\) strides",
        ),
        (
            lambda: BucketedDataParallel(nn.Linear(3, 4).requires_grad_(first)),
            r"parameter weight .* trained; on rank 1: parameter weight .* frozen",
        ),
        (
            lambda: BucketedDataParallel(nn.Linear(3, 4, bias=first)),
            r"parameter bias torch\.float32 \(4,\) strides \(1,\) cpu trained; on rank 1: nothing more",
        ),
        (lambda: BucketedDataParallel(nn.Linear(3, 4), bucket_mb=1 if first else 2), "bucket_mb=1, .* bucket_mb=2, "),
        (
            lambda: BucketedDataParallel(nn.BatchNorm1d(3, track_running_stats=first)),
            r"buffer running_mean torch\.float32 \(3,\) cpu; on rank 1: nothing more",
        ),
    ]
    for call, message in cases:
        with pytest.raises(RuntimeError, match=prefix + message):
            call()
    BucketedDataParallel(nn.Linear(3, 4))


def _bad_arguments() -> dict[str, tuple[Callable[[], object], type[Exception], str]]:
    linear = nn.Linear(2, 2)
    mb = f'{NAME}: expected bucket_mb to be "auto" or a positive number of MiB, got '
    wire = (
        "expected wire_dtype to be None or one of (torch.float32, torch.float16, torch.bfloat16, torch.float64), got "
    )
    coalesced = "cuda_ext.distributed.all_reduce_coalesced: expected "
    return {
        "bucket_mb zero": (lambda: BucketedDataParallel(linear, bucket_mb=0), ValueError, f"{mb}0"),
        "bucket_mb negative": (lambda: BucketedDataParallel(linear, bucket_mb=-1.5), ValueError, f"{mb}-1.5"),
        "bucket_mb nan": (lambda: BucketedDataParallel(linear, bucket_mb=math.nan), ValueError, f"{mb}nan"),
        "bucket_mb text": (lambda: BucketedDataParallel(linear, bucket_mb="big"), ValueError, f"{mb}'big'"),
        "bucket_mb bool": (lambda: BucketedDataParallel(linear, bucket_mb=True), ValueError, f"{mb}True"),
        "wire_dtype": (
            lambda: BucketedDataParallel(linear, wire_dtype=torch.int8),
            ValueError,
            f"{NAME}: {wire}torch.int8",
        ),
        "nothing to train": (
            lambda: BucketedDataParallel(nn.Linear(2, 2).requires_grad_(False)),
            ValueError,
            f"{NAME}: expected a module with parameters that require grad, got 2 and none that does",
        ),
        "no parameters": (
            lambda: BucketedDataParallel(nn.ReLU()),
            ValueError,
            f"{NAME}: expected a module with parameters that require grad, got 0 and none that does",
        ),
        "complex": (
            lambda: BucketedDataParallel(nn.Linear(2, 2, dtype=torch.complex64)),
            TypeError,
            f"{NAME}: expected parameter weight of dtype float32, float16, bfloat16 or float64, got torch.complex64",
        ),
        "lazy": (
            lambda: BucketedDataParallel(nn.LazyLinear(2)),
            ValueError,
            f"{NAME}: expected parameters that have a shape, got lazy parameter weight; run one forward pass first",
        ),
        "op": (
            lambda: all_reduce_coalesced([torch.zeros(1)], "max"),
            ValueError,
            f'{coalesced}op to be "mean" or "sum"',
        ),
        "coalesced wire_dtype": (
            lambda: all_reduce_coalesced([torch.zeros(1)], wire_dtype=torch.int32),
            ValueError,
            f"cuda_ext.distributed.all_reduce_coalesced: {wire}torch.int32",
        ),
        "coalesced dtype": (
            lambda: all_reduce_coalesced([torch.zeros(1), torch.zeros(1, dtype=torch.int64)]),
            TypeError,
            f"{coalesced}tensors[1] dense and float32, float16, bfloat16 or float64, got torch.int64 and torch.strided",
        ),
        "coalesced layout": (
            lambda: all_reduce_coalesced([torch.zeros(1, 1).to_sparse()]),
            TypeError,
            f"{coalesced}tensors[0] dense and float32, float16, bfloat16 or float64, got torch.float32 and ",
        ),
    }


@pytest.mark.parametrize("case", _bad_arguments())
def test_bad_arguments(group: None, case: str) -> None:
    call, error, message = _bad_arguments()[case]
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()


def _freeze(module: nn.Module) -> None:
    module[2].weight.requires_grad_(False)


def _unfreeze(module: nn.Module) -> None:
    module[6].bias.requires_grad_(True)


def _add(module: nn.Module) -> None:
    module[4].scale = nn.Parameter(torch.ones(3))


def _replace(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(torch.ones(31, 7))


def _reshape(module: nn.Module) -> None:
    module[0].weight.data = torch.ones(7, 31)


def _move(module: nn.Module) -> None:
    module.to("meta")  # torch puts new parameters in the place of the old


def _append(module: nn.Module) -> None:
    module.append(nn.Linear(3, 3))


def _swap(module: nn.Module) -> None:
    module[2] = nn.Linear(31, 13)


def _remove(module: nn.Module) -> None:
    del module[6]


def _remove_bias(module: nn.Module) -> None:
    module[0].bias = None


def _tail(what: str) -> str:
    return f"expected the parameters and submodules that were wrapped, got {what}; change the module before wrapping it"


CHANGES: dict[Callable[[nn.Module], object], str] = {
    _freeze: "expected parameter 2.weight to keep requires_grad True, got False; change the module before wrapping it",
    _unfreeze: "expected parameter 6.bias to keep requires_grad False, got True; change the module before wrapping it",
    nn.Module.double: "expected parameter 0.weight to keep dtype torch.float32, got torch.float64; change the module",
    _reshape: "expected parameter 0.weight to keep shape torch.Size([31, 7]), got torch.Size([7, 31]); ",
    _add: _tail("4.scale new"),
    _replace: _tail("0.weight new"),
    _move: _tail("0.weight, 0.bias new"),
    _append: _tail("7 new"),
    _swap: _tail("2 new"),
    _remove: _tail("members of the module removed"),
    _remove_bias: _tail("0.bias new"),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_after_wrapping_are_noticed(group: None, change: Callable[[nn.Module], object]) -> None:
    module = make_model(torch.float32)
    module[6].bias.requires_grad_(False)
    model = BucketedDataParallel(module)
    model(torch.randn(2, 7)).sum().backward()
    change(module)
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'{NAME}: {CHANGES[change]}')}"):
        model(torch.randn(2, 7))


# buckets


def test_capacity_by_the_cost_model() -> None:
    nccl, gloo = plan.choose_capacity("auto", "nccl"), plan.choose_capacity("auto", "gloo")
    for capacity, backend, efficiency in ((nccl, "nccl", 4 / 5), (gloo, "gloo", 8 / 9)):
        link = plan.LINKS[backend]
        transfer = capacity.other / link.bandwidth
        assert transfer / (link.latency + transfer) == pytest.approx(efficiency)
        assert f"auto for {backend}: {link.latency * 1e6:.0f} us" in capacity.reason
    link = plan.LINKS["nccl"]
    assert link.latency + nccl.last / link.bandwidth == pytest.approx(9 / 8 * link.latency)
    assert gloo.last == gloo.other
    assert 64 <= nccl.other / plan.MIB <= 128
    assert 1 <= nccl.last / plan.MIB <= 4
    assert plan.choose_capacity("auto", "a backend of the future").other == nccl.other
    assert plan.choose_capacity(2, "gloo") == plan.Capacity(2 * plan.MIB, 2 * plan.MIB, "as given")


def test_assignment_to_buckets() -> None:
    def assign(*sizes: int, last: float, other: float, wire_dtype: torch.dtype | None = None) -> list[list[int]]:
        return plan.assign([torch.empty(n) for n in sizes], plan.Capacity(last, other, ""), wire_dtype)

    assert assign(1, last=4, other=4) == [[0]]
    assert assign(5, 5, 5, 5, 5, last=40, other=40) == [[4, 3], [2], [1, 0]]
    assert assign(5, 5, 5, 5, 5, last=20, other=1000) == [[4, 3, 2, 1], [0]]
    assert assign(5, 5, 5, 5, 5, last=1, other=1000) == [[4, 3, 2, 1], [0]]
    assert assign(5, 5, 100, 5, 5, last=40, other=40) == [[4, 3], [2], [1, 0]]
    assert assign(5, 5, 5, 5, last=0, other=40) == [[3, 2], [1], [0]]
    assert assign(5, 5, 5, 5, last=0, other=40, wire_dtype=torch.bfloat16) == [[3, 2, 1], [0]]
    assert assign(0, 0, last=0, other=1) == [[1, 0]]
    mixed = [torch.empty(4, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) * 3]
    # Sent by when the last gradient of each is expected.
    assert plan.assign(mixed, plan.Capacity(1, 100, ""), None) == [[5, 3], [4, 2], [1], [0]]


# collectives


@on_ranks(4)
def test_all_reduce_coalesced() -> None:
    rank = dist.get_rank()
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)

    def tensors() -> list[Tensor]:
        """Small integers: their sums, and means of four, are exact in every dtype."""
        shapes = [(3, 5), (), (0,), (2, 3, 4), (17,)]
        values = [torch.arange(max(1, math.prod(shape)))[: math.prod(shape)].view(shape) % 7 + rank for shape in shapes]
        result = [value.to(dtype) for value in values for dtype in dtypes]
        result.append(torch.zeros(4, 3).t().copy_(torch.full((3, 4), float(rank))))
        return [tensor.requires_grad_(n % 2 == 0) for n, tensor in enumerate(result)]

    for op, divisor in (("sum", 1), ("mean", 4)):
        for wire_dtype in (None, torch.float32, torch.bfloat16):
            for async_op in (False, True):
                actual, sums = tensors(), [(4 * (t.detach().double() - rank) + 6) / divisor for t in tensors()]
                work = all_reduce_coalesced(actual, op, wire_dtype=wire_dtype, async_op=async_op)
                if async_op:
                    work.wait()
                    work.wait()
                else:
                    assert work is None
                for tensor, expected, original in zip(actual, sums, tensors(), strict=True):
                    assert tensor.dtype == original.dtype
                    assert tensor.stride() == original.stride()
                    assert torch.equal(tensor.detach().double(), expected)
    all_reduce_coalesced([])


@on_ranks(2)
@pytest.mark.parametrize("wire_dtype", [None, torch.float32, torch.bfloat16])
def test_hook_for_the_wrapper_of_torch(wire_dtype: torch.dtype | None) -> None:
    model = DistributedDataParallel(make_model(torch.float32))
    plain = copy.deepcopy(model.module)
    state = None if wire_dtype is None else AllreduceState(dist.group.WORLD, wire_dtype)
    model.register_comm_hook(state, allreduce_hook)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        batch = torch.randn(3, 7)
        for m in (model, plain):
            m.zero_grad()
            m(batch).square().mean().backward()
        expected = {name: mean_over_ranks(grad) for name, grad in gradients(plain).items()}
        # bfloat16 rounds three times, each time by at most 2**-9: the halves, and their sum.
        largest = max(float(grad.abs().max()) for grad in expected.values())
        assert_gradients(
            model.module, expected, tolerance=3 * 2**-9 * max(1.0, largest) if wire_dtype == torch.bfloat16 else 0
        )


@on_ranks(2)
def test_hook_with_a_group_as_its_state() -> None:
    model = DistributedDataParallel(make_model(torch.float32))
    model.register_comm_hook(dist.group.WORLD, allreduce_hook)
    model(torch.randn(3, 7)).sum().backward()
    assert_same_on_all_ranks([parameter.grad for parameter in model.parameters()])


# what the wrapper makes of the statistics of a bucket


@on_ranks(2)
def test_gradients_of_two_precisions_have_one_norm() -> None:
    module = nn.ModuleDict({"low": nn.Linear(5, 3), "high": nn.Linear(5, 3, dtype=torch.float64)})
    model = BucketedDataParallel(module)
    batch = torch.randn(4, 5)
    (module["low"](batch).square().sum() + module["high"](batch.double()).square().sum()).backward()
    grads = [parameter.grad.double() for parameter in model.parameters()]
    norm = model.clip_grad_norm_(1e9)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, nn.utils.get_total_norm(grads), rtol=1e-7, atol=0)  # one half came as float32
    assert bucket_ops.stats(grads)[0].sqrt() == pytest.approx(norm.item(), rel=1e-7)
