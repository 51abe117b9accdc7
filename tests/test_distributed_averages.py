"""BucketedDataParallel: averages of gradients of all kinds."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_common import (
    NAME,
    SMALL,
    Branches,
    assert_gradients,
    assert_same_on_all_ranks,
    count_ops,
    gradients,
    make_model,
    mean_over_ranks,
    shard,
)
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cuda_ext import bucket as bucket_ops
from cuda_ext.distributed import AllreduceState, BucketedDataParallel, all_reduce_coalesced, allreduce_hook
from cuda_ext.distributed.bucketing import assignment
from cuda_ext.distributed.bucketing.links import Link
from cuda_ext.distributed.bucketing.simulation import Gradient
from cuda_ext.distributed.bucketing.units import MIB

# the average


@pytest.mark.sampled
@on_ranks(4)
def test_training_equals_one_process_with_the_whole_batch() -> None:
    whole = make_model()
    model = BucketedDataParallel(copy.deepcopy(whole), bucket_cap_mb=SMALL)
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
@pytest.mark.parametrize("bucket_cap_mb", [SMALL, "auto"])
def test_bitwise_equal_to_torch(set_to_none: bool, bucket_cap_mb: float | str) -> None:
    """Halving is exact and a sum of two has only one order, so float32 results must be equal."""
    model = BucketedDataParallel(make_model(torch.float32), bucket_cap_mb=bucket_cap_mb)
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
    model = BucketedDataParallel(make_model(), bucket_cap_mb=SMALL)
    sent: list[list[bool]] = []
    hooks = [
        parameter.register_hook(lambda _: sent.append([bucket.sent for bucket in model._reducer.buckets]))
        for parameter in model.parameters()
    ]
    for _ in range(2):
        sent.clear()
        model.zero_grad()
        model(torch.randn(2, 7, dtype=torch.float64)).sum().backward()
        assert sent[0] == [False] * 6
        assert sent[-1] == [True] * 5 + [False]
        assert all(flags == sorted(flags, reverse=True) for flags in sent)
        for bucket in model._reducer.buckets:
            assert not bucket.sent
            begin, end = bucket.wire.data_ptr(), bucket.wire.data_ptr() + bucket.wire.nbytes
            for parameter in bucket.parameters:
                assert begin <= parameter.grad.data_ptr() < end
                assert (parameter.grad.data_ptr() - begin) % 64 == 0
    for hook in hooks:  # they keep the model alive, with its shared memory, in a cycle that gc cannot see
        hook.remove()


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
    model = BucketedDataParallel(Zoo(), bucket_cap_mb=SMALL)
    plain = copy.deepcopy(model.module)
    names = [name for bucket in model._reducer.buckets for name in bucket.names]
    assert sorted(names) == sorted(name for name, p in plain.named_parameters() if p.requires_grad)
    torch.manual_seed(dist.get_rank())
    for set_to_none in (True, False, True):
        tokens = torch.randint(11, (3, 7))
        for m in (model, plain):
            m.zero_grad(set_to_none=set_to_none)
            zoo_loss(m(tokens)).backward()
        # Both sides compute the same float32 and bfloat16 gradients and add two of them, so results are bitwise equal.
        expected = {n: None if g is None else mean_over_ranks(g) for n, g in gradients(plain).items()}
        assert_gradients(model.module, expected, tolerance=0)
        for parameter in model.parameters():
            if parameter.grad is not None:
                assert parameter.grad.stride() == parameter.stride()


@on_ranks(2)
@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_wire_dtype(wire_dtype: torch.dtype) -> None:
    model = BucketedDataParallel(make_model(torch.float32), bucket_cap_mb=SMALL, wire_dtype=wire_dtype)
    plain = copy.deepcopy(model.module)
    assert "float32 as " + str(wire_dtype).removeprefix("torch.") in model.describe()
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        batch = torch.randn(4, 7)
        for m in (model, plain):
            m.zero_grad()
            m(batch).square().mean().backward()
        # Expected: each half is rounded to the wire dtype, and their sum is rounded again.
        expected = {}
        for name, grad in gradients(plain).items():
            halves = [torch.empty_like(grad) for _ in range(2)]
            dist.all_gather(halves, grad)
            a, b = ((half * 0.5).to(wire_dtype) for half in halves)
            expected[name] = (a + b).float()
        assert_gradients(model, expected, tolerance=0)
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())

        with count_ops() as count:
            norm = model.clip_grad_norm_(math.inf)
        assert count["bucket_stats"] == 0, "the norm should have come with unpack"
        # Both sides are float32 and round a few times.
        torch.testing.assert_close(norm, nn.utils.get_total_norm(list(expected.values())), rtol=1e-6, atol=0)


@on_ranks(4)
@pytest.mark.parametrize("algorithm", ["auto", "float32", "all_reduce"])
def test_bfloat16_wire_is_rounded_once_where_sums_are_float32(algorithm: str) -> None:
    """For four values an all-reduce rounds three sums; in float32 only the values and the total are rounded."""
    model = BucketedDataParallel(
        nn.Linear(300, 200), wire_dtype=torch.bfloat16, algorithm=algorithm, broadcast_buffers=False
    )
    plain = copy.deepcopy(model.module)
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(4, 300)
    for m in (model, plain):
        m(batch).square().mean().backward()
    halves = mean_over_ranks((plain.weight.grad / 4).bfloat16().double()) * 4
    exactly_rounded = (model.module.weight.grad == halves.bfloat16().float()).float().mean()
    if algorithm == "all_reduce":
        assert exactly_rounded < 0.95
    else:
        assert exactly_rounded == 1.0


def test_error_feedback(group: None) -> None:
    """Rounding errors of a step are added to the next ones: the mean over steps converges to the exact gradient."""
    errors = {}
    batch = torch.randn(4, 7)
    module = make_model(torch.float32)
    for error_feedback in (False, True):
        model = BucketedDataParallel(
            copy.deepcopy(module), bucket_cap_mb=SMALL, wire_dtype=torch.bfloat16, error_feedback=error_feedback
        )
        module.zero_grad()
        module(batch).square().mean().backward()
        total = torch.zeros(31, 7, dtype=torch.float64)
        for step in range(66):
            model.zero_grad()
            model(batch).square().mean().backward()
            if step >= 2:  # after the first step, buckets may change
                total += model.module[0].weight.grad
        errors[error_feedback] = float((total / 64 - module[0].weight.grad).norm())
    assert errors[True] < 0.1 * errors[False]
    with pytest.raises(ValueError, match=f"^{re.escape(NAME)}: expected a wire_dtype for error_feedback=True, got"):
        BucketedDataParallel(make_model(), error_feedback=True)


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

    # These calls bypass the forward of the wrapper: its hooks on parameters must work without those on outputs.
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
    model = BucketedDataParallel(make_model(), bucket_cap_mb=SMALL)
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


@on_ranks(4)
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, SMALL, "auto"])
def test_unused_parameters_need_no_option(bucket_cap_mb: float | str) -> None:
    model = BucketedDataParallel(Branches(), bucket_cap_mb=bucket_cap_mb)
    plain = copy.deepcopy(model.module)
    rank = dist.get_rank()
    # For each step, the branches that each rank uses. Branch 4 is used only near the end.
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


class Optional(nn.Module):
    """May return a tensor that does not depend on parameters, with or without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches()

    def forward(self, x: Tensor, used: list[int] | str) -> Tensor:
        if used == "leaf":
            return torch.zeros(1, dtype=x.dtype, requires_grad=True).sum()
        if used == "raise":
            raise ValueError("no such batch")
        return torch.zeros((), dtype=x.dtype) if used == "constant" else self.branches(x, used)


ALGORITHMS = ("auto", "float32", "all_reduce")


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("wire_dtype", [None, torch.float32])
def test_a_backward_that_reaches_no_parameter_takes_part_with_zeros(
    algorithm: str, wire_dtype: torch.dtype | None
) -> None:
    model = BucketedDataParallel(Optional(), bucket_cap_mb=SMALL, algorithm=algorithm, wire_dtype=wire_dtype)
    plain = copy.deepcopy(model.module)
    rank = dist.get_rank()
    # For each step, what each rank uses. After the first that reaches parameters, buckets have their order.
    for used in (("leaf", "leaf"), ([0], "leaf"), ("leaf", [1, 2]), ([3], [3]), ("leaf", "leaf"), ([4], "leaf")):
        for m in (model, plain):
            m.zero_grad()
        batches = torch.randn(2, 2, 7, dtype=torch.float64)
        model(batches[rank], used[rank]).backward()
        sum(plain(batches[r], used[r]) for r in range(2)).div(2).backward()
        assert_gradients(model, plain, tolerance=1e-12 if wire_dtype is None else 1e-6)


@on_ranks(2)
def test_a_backward_that_reaches_no_parameter_leaves_the_sharded_optimizer_its_averages() -> None:
    model = BucketedDataParallel(Optional(), bucket_cap_mb=SMALL, shard_optimizer=True)
    plain = copy.deepcopy(model.module)
    optimizers = model.sharded_optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    batch = torch.randn(2, 7, dtype=torch.float64)
    model(batch, [0, 1] if dist.get_rank() == 0 else "leaf").backward()
    (plain(batch, [0, 1]) / 2).backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-12, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("wire_dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("how", ["no backward", "constant", "raise"])
def test_a_skipped_backward_is_reported_on_all_ranks(
    algorithm: str, wire_dtype: torch.dtype | None, guilty: int, how: str
) -> None:
    """Otherwise the next pass of that rank would be matched with this one of the others, until the end."""
    model = BucketedDataParallel(Optional(), bucket_cap_mb=SMALL, algorithm=algorithm, wire_dtype=wire_dtype)
    plain = copy.deepcopy(model.module)
    rank = dist.get_rank()
    batches = torch.randn(2, 2, 7, dtype=torch.float64)

    def step() -> None:
        for m in (model, plain):
            m.zero_grad()
        model(batches[rank], [0, 1]).backward()
        sum(plain(batches[r], [0, 1]) for r in range(2)).div(2).backward()
        assert_gradients(model, plain, tolerance=1e-12 if wire_dtype is None else 3e-2)

    step()
    if rank == guilty:
        if how == "no backward":
            model(batches[rank], [0])
        elif how == "constant":
            model(batches[rank], "constant").clone().requires_grad_().backward()
        else:
            with pytest.raises(ValueError, match="no such batch"):
                model(batches[rank], "raise")
    message = (
        f"{NAME}: expected backward to reach an output of every forward pass, or of none on all ranks, got a "
        f"forward pass on rank {guilty} that backward has not reached: "
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        model(batches[rank], [0, 1]).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    step()
    step()


@on_ranks(2)
def test_forward_passes_may_differ_where_none_is_left_out() -> None:
    model = BucketedDataParallel(Optional(), bucket_cap_mb=1e-4)
    plain = copy.deepcopy(model.module)
    rank = dist.get_rank()
    batches = torch.randn(2, 2, 7, dtype=torch.float64)
    # For each step, the forward passes of each rank; their outputs are added.
    steps: list[tuple[list[list[int] | str], ...]] = [
        ([[0]], [[0], [1], [2, 3]]),
        ([[4]], ["leaf", [3], "leaf"]),
        ([[0], [1]], ["leaf"]),
        ([[0, 1, 2, 3, 4]], ["leaf", [0, 1, 2, 3, 4]]),  # the last gradient is ready before that of the first output
    ]
    for used in steps:
        for m in (model, plain):
            m.zero_grad()
        if used is steps[0]:
            model(batches[0], [0])  # without a backward pass, on all ranks
        if rank == 0:
            model.eval()
            model(batches[0], [0])
            model.train()
            with torch.no_grad():
                model(batches[0], [0])
            with model.no_sync():
                model(batches[0], [0])
        sum(model(batches[rank], each) for each in used[rank]).backward()
        sum(plain(batches[r], each) for r in range(2) for each in used[r]).div(2).backward()
        assert_gradients(model, plain)
    # One rank accumulates one batch more.
    for m in (model, plain):
        m.zero_grad()
    if rank == 1:
        with model.no_sync():
            model(batches[0], [2]).backward()
    model(batches[rank], [0]).backward()
    (plain(batches[0], [2]) + sum(plain(batches[r], [0]) for r in range(2))).div(2).backward()
    assert_gradients(model, plain)


# norms


@on_ranks(4)
@pytest.mark.parametrize("algorithm", ["all_reduce", "symmetric"])
def test_the_norm_reads_gradients_once_over_all_ranks_or_never(algorithm: str) -> None:
    model = BucketedDataParallel(make_model(), bucket_cap_mb=SMALL, algorithm=algorithm)
    elements = sum(bucket.gradients.numel() for bucket in model._reducer.buckets)
    model(torch.randn(3, 7, dtype=torch.float64)).square().mean().backward()
    with count_ops() as count:
        norm = model.clip_grad_norm_(1e-3)
        assert not model.found_nonfinite()
        clipped = model.clip_grad_norm_(math.inf)  # the wrapper scaled them, so the norm is known
    read = torch.tensor(count["elements"])
    dist.all_reduce(read)
    assert read == (elements if algorithm == "all_reduce" else 0)
    torch.testing.assert_close(clipped, norm * 1e-3 / (norm + 1e-6), rtol=1e-12, atol=0)
    grads = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(clipped, nn.utils.get_total_norm(grads), rtol=1e-12, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("wire_dtype", [None, torch.float64])
def test_clipping_sees_what_was_done_to_the_gradients(wire_dtype: torch.dtype | None) -> None:
    """As a gradient scaler, a user's hook or freezing a layer by hand would do."""
    model = BucketedDataParallel(make_model(torch.float32), bucket_cap_mb=SMALL, wire_dtype=wire_dtype)
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
    model = BucketedDataParallel(make_model(torch.float32), bucket_cap_mb=SMALL, wire_dtype=wire_dtype)
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


@on_ranks(2)
def test_gradients_of_two_precisions_have_one_norm() -> None:
    module = nn.ModuleDict({"low": nn.Linear(5, 3), "high": nn.Linear(5, 3, dtype=torch.float64)})
    model = BucketedDataParallel(module)
    batch = torch.randn(4, 5)
    (module["low"](batch).square().sum() + module["high"](batch.double()).square().sum()).backward()
    grads = [parameter.grad.double() for parameter in model.parameters()]
    norm = model.clip_grad_norm_(1e9)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, nn.utils.get_total_norm(grads), rtol=1e-7, atol=0)  # one half is float32
    assert bucket_ops.stats(grads)[0].sqrt() == pytest.approx(norm.item(), rel=1e-7)


# buckets


def test_first_capacity_of_a_link() -> None:
    for hides, efficiency in ((1.0, 4 / 5), (0.0, 8 / 9)):
        link = Link(79e-6, 278e9, hides)  # NCCL on 8 Hopper GPUs, messages of 32 MiB and more
        capacity = assignment.first_capacity(link)
        transfer = capacity.other / link.bandwidth
        assert transfer / (link.latency + transfer) == pytest.approx(efficiency)
        assert "an all-reduce takes 79 us + size / (278 GB/s)" in capacity.reason
        if hides:
            assert link.seconds(capacity.last) == pytest.approx(9 / 8 * link.latency)
            assert 64 <= capacity.other / MIB <= 128
            assert 1 <= capacity.last / MIB <= 4
        else:
            assert capacity.last == capacity.other


def test_bucket_mb_is_parsed() -> None:
    assert assignment.parse_bucket_cap_mb("op", "auto") is None
    assert assignment.parse_bucket_cap_mb("op", 2) == 2 * MIB
    assert assignment.parse_bucket_cap_mb("op", 0.5) == MIB / 2


def test_assignment_to_buckets() -> None:
    def assign(*sizes: int, last: float, other: float, max_buckets: int = 0) -> list[list[int]]:
        gradients = [Gradient("", 4 * size, -n, "") for n, size in enumerate(sizes)]
        return assignment.fill(gradients, assignment.Capacity(last, other, ""), max_buckets)

    assert assign(1, last=4, other=4) == [[0]]
    # With one capacity the last bucket has the rest.
    assert assign(5, 5, 5, 5, 5, last=40, other=40) == [[4, 3], [2, 1], [0]]
    assert assign(5, 5, 5, 5, 5, last=20, other=1000) == [[4, 3, 2, 1], [0]]
    assert assign(5, 5, 5, 5, 5, last=1, other=1000) == [[4, 3, 2, 1], [0]]
    assert assign(5, 5, 5, 5, 5, last=40, other=60) == [[4, 3, 2], [1, 0]]
    assert assign(5, 5, 100, 5, 5, last=40, other=40) == [[4, 3], [2], [1, 0]]
    assert assign(5, 5, 5, 5, last=0, other=40) == [[3, 2], [1], [0]]
    assert assign(*[5] * 40, last=20, other=20, max_buckets=3) == [list(range(39, 7, -1)), list(range(7, 0, -1)), [0]]
    assert assign(0, 0, last=0, other=1) == [[1, 0]]
    # Each kind has its own buckets, sent by when the last gradient of each is ready.
    capacity = assignment.Capacity(1, 100, "")
    mixed = [("float32", 16), ("bfloat16", 8)] * 3
    backwards = [Gradient("", size, -n, kind) for n, (kind, size) in enumerate(mixed)]
    assert assignment.fill(backwards, capacity) == [[5, 3], [4, 2], [1], [0]]
    order = [0, 1, 4, 3, 2, 5]
    shuffled = [Gradient("", size, order.index(n), kind) for n, (kind, size) in enumerate(mixed)]
    assert assignment.fill(shuffled, capacity) == [[0, 4], [1, 3], [2], [5]]


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

    for op, divisor in (("sum", 1), ("avg", 4), (dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 4)):
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
