"""BucketedDataParallel as a module: its state, its use of autograd, and errors."""

from __future__ import annotations

import copy
import gc
import math
import re
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_common import (
    NAME,
    SMALL,
    assert_gradients,
    assert_same_on_all_ranks,
    make_model,
    mean_over_ranks,
    shard,
)
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cuda_ext.distributed import BucketedDataParallel, GradScaler, SymmetricArena, all_reduce_coalesced, collectives
from cuda_ext.distributed.collectives import LARGEST_SHARED, broadcast_coalesced

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
def test_the_first_broadcast_copies_little() -> None:
    torch.manual_seed(dist.get_rank())
    tensors = [torch.randn(1 << 14) for _ in range(100)]  # 64 KiB each
    tensors += [torch.randn(1 << 20), torch.randn(300, 400).t(), torch.zeros(0), torch.randn(3, dtype=torch.float64)]
    copied: list[int] = []
    real = collectives._flatten_dense_tensors

    def flatten(pieces: list[Tensor]) -> Tensor:
        copied.append(sum(piece.nbytes for piece in pieces))
        return real(pieces)

    with mock.patch.object(collectives, "_flatten_dense_tensors", flatten):
        broadcast_coalesced(tensors, dist.group.WORLD)
    assert_same_on_all_ranks(tensors)
    assert len(copied) == 3  # twice float32, once float64
    assert max(copied) <= LARGEST_SHARED + (300 * 400 * 4)
    assert sum(copied) == sum(tensor.nbytes for tensor in tensors) - (4 << 20)


@on_ranks(2)
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers(broadcast_buffers: bool) -> None:
    model = BucketedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), broadcast_buffers=broadcast_buffers)
    mean = model.module[1].running_mean
    torch.manual_seed(dist.get_rank())
    model(torch.randn(8, 3)).sum().backward()
    assert not torch.equal(mean, mean_over_ranks(mean))

    # None of these broadcasts; otherwise this would wait for a forward pass that only one rank runs.
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
    model = BucketedDataParallel(make_model(), bucket_cap_mb=SMALL)
    plain = copy.deepcopy(model.module)
    batch = torch.randn(4, 7, dtype=torch.float64)
    for m in (model, plain):
        m(batch).square().mean().backward()
    assert_gradients(model, plain, tolerance=0)
    with torch.inference_mode():
        assert torch.equal(model(batch), plain(batch))


@pytest.mark.sampled
@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled(group: None, where: str) -> None:
    module = make_model()
    plain = copy.deepcopy(module)
    if where == "inside":
        model = BucketedDataParallel(torch.compile(module, backend="aot_eager"), bucket_cap_mb=SMALL)
    else:
        model = torch.compile(BucketedDataParallel(module, bucket_cap_mb=SMALL), backend="aot_eager")
    for _ in range(2):
        batch = torch.randn(4, 7, dtype=torch.float64)
        for m in (model, plain):
            m(batch).square().mean().backward()
        assert_gradients(module, plain)


def test_deleting_the_wrapper_releases_the_module(group: None) -> None:
    module = make_model()
    model = BucketedDataParallel(module, bucket_cap_mb=SMALL)
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

    model = BucketedDataParallel(Checkpointed(), bucket_cap_mb=SMALL)
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


@on_ranks(2)
def test_gradients_of_gradients() -> None:
    model = BucketedDataParallel(make_model(), bucket_cap_mb=SMALL)
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
    """Identity with a backward that raises on request."""

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
        return Fails.apply(x, self.fails_at == len(self.layers)).view_as(x)


@on_ranks(4)
@pytest.mark.parametrize("failing", [[1], [0, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("wire_dtype", [None, torch.float32])
def test_training_continues_after_an_exception_in_backward(failing: list[int], wire_dtype: torch.dtype | None) -> None:
    model = BucketedDataParallel(Failing(), bucket_cap_mb=SMALL, wire_dtype=wire_dtype)
    plain = copy.deepcopy(model.module)
    rank = dist.get_rank()
    # After some buckets were sent, none, all but one, and between the output and the first parameter.
    for fails_at in (4, 6, 1, 7):
        batches = torch.randn(4, 2, 7, dtype=torch.float64)
        model.fails_at = model.module.fails_at = fails_at if rank in failing else None
        message = (
            "this rank fails" if rank in failing else f"^{re.escape(NAME)}: expected every rank to complete the back"
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
    model = BucketedDataParallel(Failing(), bucket_cap_mb=SMALL)
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
        RuntimeError, match=f"^{re.escape(NAME)}: expected a process group that contains this process, got"
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
        (
            lambda: BucketedDataParallel(nn.Linear(3, 4), bucket_cap_mb=1 if first else 2),
            r"bucket_cap_mb=1, .* on rank 1: bucket_cap_mb=2, ",
        ),
        (
            lambda: BucketedDataParallel(nn.BatchNorm1d(3, track_running_stats=first)),
            r"buffer running_mean torch\.float32 \(3,\) cpu; on rank 1: nothing more",
        ),
    ]
    for call, message in cases:
        with pytest.raises(RuntimeError, match=prefix + message):
            call()
    BucketedDataParallel(nn.Linear(3, 4))


def _with_optimizer_in_backward(module: nn.Module) -> nn.Module:
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    return module


def _with_hook_in_backward(module: nn.Module) -> nn.Module:
    module.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.detach().sub_(parameter.grad))
    return module


def _bad_arguments() -> dict[str, tuple[Callable[[], object], type[Exception], str]]:
    linear = nn.Linear(2, 2)
    mb = f'{NAME}: expected bucket_cap_mb to be "auto" or a positive number of MiB, got '
    wire = (
        "expected wire_dtype to be None or one of (torch.float32, torch.float16, torch.bfloat16, torch.float64), got "
    )
    coalesced = "cuda_ext.distributed.all_reduce_coalesced: expected "
    return {
        "bucket_cap_mb zero": (lambda: BucketedDataParallel(linear, bucket_cap_mb=0), ValueError, f"{mb}0"),
        "bucket_cap_mb negative": (lambda: BucketedDataParallel(linear, bucket_cap_mb=-1.5), ValueError, f"{mb}-1.5"),
        "bucket_cap_mb nan": (lambda: BucketedDataParallel(linear, bucket_cap_mb=math.nan), ValueError, f"{mb}nan"),
        "bucket_cap_mb text": (lambda: BucketedDataParallel(linear, bucket_cap_mb="big"), ValueError, f"{mb}'big'"),
        "bucket_cap_mb bool": (lambda: BucketedDataParallel(linear, bucket_cap_mb=True), ValueError, f"{mb}True"),
        "wire_dtype": (
            lambda: BucketedDataParallel(linear, wire_dtype=torch.int8),
            ValueError,
            f"{NAME}: {wire}torch.int8",
        ),
        "algorithm": (
            lambda: BucketedDataParallel(linear, algorithm="ring"),
            ValueError,
            f"{NAME}: expected algorithm to be one of ('auto', 'all_reduce', 'float32', 'symmetric'), got 'ring'",
        ),
        "nothing to train": (
            lambda: BucketedDataParallel(nn.Linear(2, 2).requires_grad_(False)),
            ValueError,
            f"{NAME}: expected a module with parameters that require grad, got 2, none of which does",
        ),
        "optimizer in backward": (
            lambda: BucketedDataParallel(_with_optimizer_in_backward(nn.Linear(2, 2))),
            ValueError,
            f"{NAME}: expected parameters whose optimizer steps after backward, got an optimizer inside backward",
        ),
        "hook on accumulated gradients": (
            lambda: BucketedDataParallel(_with_hook_in_backward(nn.Linear(2, 2))),
            ValueError,
            f"{NAME}: expected parameters without hooks of register_post_accumulate_grad_hook, got weight with one",
        ),
        "no parameters": (
            lambda: BucketedDataParallel(nn.ReLU()),
            ValueError,
            f"{NAME}: expected a module with parameters that require grad, got 0, none of which does",
        ),
        "complex": (
            lambda: BucketedDataParallel(nn.Linear(2, 2, dtype=torch.complex64)),
            TypeError,
            f"{NAME}: expected parameter weight of dtype float32, float16, bfloat16 or float64, got torch.complex64",
        ),
        "infinite": (lambda: BucketedDataParallel(linear, bucket_cap_mb=math.inf), ValueError, f"{mb}inf"),
        "on meta": (
            lambda: BucketedDataParallel(nn.Linear(2, 2, device="meta")),
            ValueError,
            f"{NAME}: expected parameters and buffers that have memory, got weight on meta; allocate memory",
        ),
        "buffer on meta": (
            lambda: BucketedDataParallel(
                nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False, device="meta"))
            ),
            ValueError,
            f"{NAME}: expected parameters and buffers that have memory, got 1.running_mean on meta; allocate",
        ),
        "in inference mode": (
            torch.inference_mode()(lambda: BucketedDataParallel(linear)),
            RuntimeError,
            f"{NAME}: expected to be constructed outside torch.inference_mode(), got a call inside it",
        ),
        "made in inference mode": (
            lambda: BucketedDataParallel(torch.inference_mode()(lambda: nn.Linear(2, 2))()),
            ValueError,
            f"{NAME}: expected parameters and buffers made outside torch.inference_mode(), got weight made inside it",
        ),
        "max_norm negative": (
            lambda: BucketedDataParallel(make_model()).clip_grad_norm_(-1.0),
            ValueError,
            f"{NAME}.clip_grad_norm_: expected max_norm to be 0 or more, got -1.0",
        ),
        "max_norm nan": (
            lambda: BucketedDataParallel(make_model()).clip_grad_norm_(math.nan),
            ValueError,
            f"{NAME}.clip_grad_norm_: expected max_norm to be 0 or more, got nan",
        ),
        "scaler": (
            lambda: GradScaler(linear),  # type: ignore[arg-type]
            TypeError,
            "cuda_ext.distributed.GradScaler: expected model to be a BucketedDataParallel, got Linear; wrap it first",
        ),
        "arena without a size": (
            lambda: SymmetricArena(None, dist.group.WORLD, torch.device("cpu")),  # type: ignore[arg-type]
            ValueError,
            "cuda_ext.distributed.SymmetricArena: expected nbytes >= 0, got None",
        ),
        "arena without a group": (
            lambda: SymmetricArena(8, None, torch.device("cpu")),  # type: ignore[arg-type]
            TypeError,
            "cuda_ext.distributed.SymmetricArena: expected group to be a process group that contains this process, got",
        ),
        "lazy": (
            lambda: BucketedDataParallel(nn.LazyLinear(2)),
            ValueError,
            f"{NAME}: expected parameters that have a shape, got lazy parameter weight; run one forward pass first",
        ),
        "op": (
            lambda: all_reduce_coalesced([torch.zeros(1)], "max"),
            ValueError,
            f'{coalesced}op to be "avg" or "sum"',
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


def _add(module: nn.Module) -> None:
    module[4].scale = nn.Parameter(torch.ones(3))


def _replace(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(torch.ones(31, 7))


def _reshape(module: nn.Module) -> None:
    module[0].weight.data = torch.ones(7, 31)


def _move(module: nn.Module) -> None:
    module.to("meta")  # torch replaces the parameters


def _append(module: nn.Module) -> None:
    module.append(nn.Linear(3, 3))


def _swap(module: nn.Module) -> None:
    module[2] = nn.Linear(31, 13)


def _remove(module: nn.Module) -> None:
    del module[6]


def _remove_bias(module: nn.Module) -> None:
    module[0].bias = None


def _delete_buffer(module: nn.Module) -> None:
    del module[7].running_mean


def _set_buffer_to_none(module: nn.Module) -> None:
    module[7].running_var = None


def _tail(what: str) -> str:
    return f"expected the parameters and submodules that were wrapped, got {what}; change the module before wrapping it"


CHANGES: dict[Callable[[nn.Module], object], str] = {
    nn.Module.double: "expected parameter 0.weight to keep dtype torch.float32, got torch.float64; change the module",
    _reshape: "expected parameter 0.weight to keep shape torch.Size([31, 7]), got torch.Size([7, 31]); ",
    _add: _tail("4.scale new"),
    _replace: _tail("0.weight new"),
    _move: _tail("0.weight, 0.bias new"),
    _append: _tail("8 new"),
    _swap: _tail("2 new"),
    _delete_buffer: "expected buffer 7.running_mean, which existed when the module was wrapped and is broadcast",
    _set_buffer_to_none: "expected buffer 7.running_var, which existed when the module was wrapped and is broadcast",
    _remove: _tail("members of the module removed"),
    _remove_bias: _tail("0.bias new"),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_after_wrapping_are_noticed(group: None, change: Callable[[nn.Module], object]) -> None:
    module = make_model(torch.float32).append(nn.BatchNorm1d(3))
    module[6].bias.requires_grad_(False)
    model = BucketedDataParallel(module)
    model(torch.randn(2, 7)).sum().backward()
    change(module)
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'{NAME}: {CHANGES[change]}')}"):
        model(torch.randn(2, 7))


@pytest.mark.parametrize("change", [_with_optimizer_in_backward, _with_hook_in_backward])
def test_early_use_of_gradients_is_refused(group: None, change: Callable[[nn.Module], nn.Module]) -> None:
    module = nn.Linear(2, 2)
    model = BucketedDataParallel(module)
    model(torch.randn(3, 2)).sum().backward()
    change(module)
    with pytest.raises(
        ValueError, match=rf"^{re.escape(NAME)}: expected parameters .* before the gradient is averaged"
    ):
        model(torch.randn(3, 2))


ASSIGNMENTS: dict[str, Callable[[BucketedDataParallel], object]] = {
    "module": lambda model: setattr(model, "module", nn.Linear(3, 2)),
    "head": lambda model: setattr(model, "head", nn.Linear(3, 2)),
    "scale": lambda model: setattr(model, "scale", nn.Parameter(torch.ones(3))),
    "added": lambda model: model.add_module("added", nn.Linear(3, 2)),
    "registered": lambda model: model.register_module("registered", nn.Linear(3, 2)),
    "parameter": lambda model: model.register_parameter("parameter", nn.Parameter(torch.ones(3))),
    "buffer": lambda model: model.register_buffer("buffer", torch.ones(3)),
}


def test_members_of_the_wrapper_are_refused(group: None) -> None:
    """They would be neither trained nor saved."""
    model = BucketedDataParallel(nn.Linear(7, 3))
    model.threshold = 3.0
    for name, assign in ASSIGNMENTS.items():
        with pytest.raises(
            RuntimeError, match=rf"^{re.escape(NAME)}: expected .* before it is wrapped, got {name} for"
        ):
            assign(model)
    model(torch.randn(2, 7)).sum().backward()


def test_compiled_autograd_is_refused(group: None) -> None:
    model = BucketedDataParallel(nn.Linear(7, 3))
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    message = f"{NAME}: expected a backward pass that autograd runs, got compiled autograd; turn it off"
    with compiled, pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        model(torch.randn(2, 7))
    batch = torch.randn(2, 7)
    output = model(batch)
    around_backward = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with around_backward, pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        output.sum().backward()
    model(batch).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, batch.sum(0).expand(3, 7))


@on_ranks(2)
def test_a_rank_outside_of_the_mesh() -> None:
    mesh = DeviceMesh("cpu", [0])
    if dist.get_rank() == 0:
        BucketedDataParallel(nn.Linear(2, 2), process_group=mesh)
    else:
        with pytest.raises(
            ValueError, match=f"^{re.escape(NAME)}: expected a device mesh that contains this rank, got rank 1"
        ):
            BucketedDataParallel(nn.Linear(2, 2), process_group=mesh)


@on_ranks(2)
@pytest.mark.parametrize("inner", ["sequence", "layer"])
def test_state_dicts_of_torch_distributed_checkpoint(inner: str) -> None:
    """As for DistributedDataParallel, names are those of the module, and each can load the other's state."""

    def make(wrap: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
        layer = nn.Linear(7, 3, dtype=torch.float64)
        norm = nn.BatchNorm1d(3, dtype=torch.float64)
        norm.register_buffer("scratch", torch.zeros(3), persistent=False)
        model = wrap(nn.Sequential(layer, norm) if inner == "sequence" else layer)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = torch.randn(5, 7, dtype=torch.float64)
    model, optimizer = make(BucketedDataParallel)
    step(model, optimizer)
    saved = get_state_dict(model, optimizer)
    assert list(saved[0]) == list(model.state_dict())
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder[0])
    step(model, optimizer)
    for wrap in (BucketedDataParallel, DistributedDataParallel):
        torch.manual_seed(1)
        other, other_optimizer = make(wrap)
        state = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer)))
        dcp.load(state, checkpoint_id=folder[0])
        set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step(other, other_optimizer)
        for (name, actual), expected in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("ends", ["freed", "closed"])
@on_ranks(2)
def test_backward_of_a_wrapper_that_is_gone(ends: str) -> None:
    module, x = nn.Linear(3, 4), torch.randn(2, 3)
    model = BucketedDataParallel(module)
    loss = model(x).sum()
    if ends == "closed":
        model.close()
    del model
    gc.collect()
    message = "expected a wrapper in use during backward, got one that was freed or closed after forward; keep a"
    with pytest.raises(RuntimeError, match=f"{NAME}: {message} reference to it until backward"):
        loss.backward()
    assert module.weight.grad is None
    model = BucketedDataParallel(module)
    model(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, x.sum(0).expand(4, 3))


@on_ranks(2)
def test_a_wrapper_that_is_gone_accumulates_without_sync() -> None:
    """As the averages are not needed, neither is the wrapper."""
    module, x = nn.Linear(3, 4), torch.randn(2, 3)
    model = BucketedDataParallel(module)
    with model.no_sync():
        loss = model(x).sum()
        del model
        gc.collect()
        loss.backward()
    torch.testing.assert_close(module.weight.grad, x.sum(0).expand(4, 3))
