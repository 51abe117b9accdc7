"""BucketedDataParallel in the place of DistributedDataParallel: its arguments, members, copies and old loops."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed_common import NAME, SMALL, assert_gradients, make_model, mean_over_ranks, shard
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils.rnn import pack_sequence
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import cuda_ext.nn
from cuda_ext.distributed import AllreduceState, BucketedDataParallel, allreduce_hook
from cuda_ext.distributed.ddp_arguments import move_inputs


def batches(count: int = 4) -> Tensor:
    return torch.randn(count, 7, dtype=torch.float64)


def train(model: nn.Module, batch: Tensor, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


# arguments


def test_arguments_are_those_of_torch_in_its_order() -> None:
    theirs, ours = (
        inspect.signature(each.__init__).parameters for each in (DistributedDataParallel, BucketedDataParallel)
    )
    assert list(ours)[: len(theirs)] == list(theirs)
    other = {name for name, one in theirs.items() if ours[name].default != one.default}
    assert other == {"bucket_cap_mb", "gradient_as_bucket_view"}
    own = ("wire_dtype", "algorithm", "error_feedback", "shard_optimizer")
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in own)
    text = inspect.getdoc(BucketedDataParallel) or ""
    assert [name for name in theirs if name != "self" and not re.search(rf"\b{name}\b", text)] == []


@on_ranks(2)
def test_arguments_without_effect() -> None:
    """What they ask for holds anyway."""
    module = make_model()
    named = list(module.named_parameters())
    model = BucketedDataParallel(
        module,
        device_ids=[],
        output_device=torch.device("cpu"),
        dim=1,
        bucket_cap_mb=None,
        find_unused_parameters=True,
        check_reduction=True,
        gradient_as_bucket_view=False,
        static_graph=True,
        delay_all_reduce_named_params=named[:1],
        param_to_hook_all_reduce=named[1][1],
        device_mesh=init_device_mesh("cpu", (2,)),
        skip_all_reduce_unused_params=True,
        batched_grad_copy=True,
    )
    plain = copy.deepcopy(module)
    batch = batches()
    for _ in range(2):
        train(model, shard(batch))
        train(plain, batch)
        assert_gradients(model, plain)
    assert (model.device, model.dim, model.device_mesh.size()) == (torch.device("cpu"), 1, 2)
    assert model.find_unused_parameters and model.static_graph and not model.gradient_as_bucket_view


def test_attributes_of_the_module_come_first(group: None) -> None:
    module = nn.Linear(2, 2)
    module.dim = 512  # type: ignore[assignment]
    model = BucketedDataParallel(module)
    assert model.dim == 512
    with pytest.raises(AttributeError, match="device_mesh"):
        _ = model.device_mesh


@on_ranks(2)
def test_init_sync_false_leaves_the_state_of_every_rank() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Linear(3, 4)
    before = module.weight.detach().clone()
    model = BucketedDataParallel(module, init_sync=False)
    assert torch.equal(model.weight, before)
    assert not torch.equal(before, mean_over_ranks(before))
    model(torch.randn(2, 3)).sum().backward()
    assert torch.equal(module.weight.grad, mean_over_ranks(module.weight.grad))


def refused(**arguments: Any) -> Callable[[], object]:
    return lambda: BucketedDataParallel(nn.Linear(2, 2), **arguments)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "another device": (
        refused(device_ids=[1]),
        "expected device_ids to be None or the device of the module, cpu, got 1",
    ),
    "several devices": (
        refused(device_ids=[0, 1]),
        "expected device_ids to be None or the device of the module, got [0, ",
    ),
    "outputs elsewhere": (
        refused(output_device="cuda:1"),
        "expected output_device to be None or the device of the mod",
    ),
    "mixed precision": (
        refused(mixed_precision=_MixedPrecision(param_dtype=torch.float16)),
        "expected mixed_precision=None, got _MixedPrecision(param_dtype=torch.float16",
    ),
    "sizes": (refused(bucket_cap_mb_list=[1, 2]), "expected bucket_cap_mb_list=None, got [1, 2], but all buckets have"),
    "delayed": (
        refused(delay_all_reduce_named_params=[]),
        "expected delay_all_reduce_named_params and param_to_hook_all_reduce together, got only one",
    ),
    "two groups": (
        lambda: BucketedDataParallel(
            nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (1,))
        ),
        "expected process_group or device_mesh, got both",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arguments(group: None, case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{re.escape(f'{NAME}: {message}')}"):
        call()


def test_inputs_move_to_the_device_of_device_ids(group: None) -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    (first, (second, text)), named = move_inputs(
        ((torch.ones(2), (packed, "text")), {"mask": [torch.ones(1)]}), torch.device("meta")
    )
    assert first.is_meta and second.data.is_meta and text == "text" and named["mask"][0].is_meta
    model = BucketedDataParallel(nn.Linear(2, 2), device_ids=["cpu"])
    with mock.patch("cuda_ext.distributed.wrapper.move_inputs", side_effect=move_inputs) as moves:
        model(input=torch.ones(1, 2))
    assert moves.call_args.args[1] == torch.device("cpu")


@on_ranks(2)
def test_ignored_parameters_and_buffers_stay_local() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3 + dist.get_rank())).double()
    names = ["2.weight", "2.bias", "1.running_mean"]
    BucketedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    model = BucketedDataParallel(module)
    assert model.parameters_to_ignore == set(names)
    module[2] = nn.Linear(5, 2, dtype=torch.float64)  # as modules that are made only when needed
    module[2].weight.requires_grad_(dist.get_rank() == 0)
    for _ in range(3):
        model(batches()).square().mean().backward()
    for parameter in (*module[0].parameters(), *module[1].parameters()):
        assert torch.equal(parameter.grad, mean_over_ranks(parameter.grad))
    if dist.get_rank() == 0:
        assert module[2].weight.grad is not None
    mean, variance = module[1].running_mean.clone(), module[1].running_var.clone()
    assert not torch.equal(mean, mean_over_ranks(mean))
    seen = []
    module[1].register_forward_pre_hook(lambda norm, _: seen.append(norm.running_var.clone()))
    model(batches()).sum().backward()
    assert torch.equal(seen[0], mean_over_ranks(seen[0]))
    assert not torch.equal(variance, mean_over_ranks(variance))
    module[0] = nn.Linear(7, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=re.escape(f"{NAME}: expected the parameters and submodules that were wr")):
        model(batches())


def test_parameters_of_tensor_parallel_layers_are_refused(group: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    layer = parallelize_module(nn.Linear(2, 2), mesh["tensor"], ColwiseParallel())
    with pytest.raises(TypeError, match=f"^{re.escape(NAME)}: expected plain parameters, got weight, a DTensor"):
        BucketedDataParallel(layer, device_mesh=mesh["data"])


# copies


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@on_ranks(2)
@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled, saved])
def test_copies_train_apart(make_copy: Callable[[nn.Module], Any]) -> None:
    model = BucketedDataParallel(make_model(), bucket_cap_mb=SMALL, wire_dtype=torch.float64, algorithm="all_reduce")
    batch = batches()
    train(model, shard(batch))
    model.note = "kept"
    twin = make_copy(model)
    assert twin.note == "kept" and all(parameter.grad is None for parameter in twin.parameters())
    assert twin._parts is None  # no bucket before it trains
    before = [parameter.grad.clone() for parameter in model.parameters()]
    plains = [copy.deepcopy(each.module) for each in (model, twin)]
    train(twin, shard(batch), steps=4)
    assert all(torch.equal(a.grad, b) for a, b in zip(model.parameters(), before, strict=True))
    other = batches()
    train(model, shard(other), steps=3)
    train(plains[0], other, steps=3)
    train(plains[1], batch, steps=4)
    for each, plain in zip((model, twin), plains):
        assert_gradients(each.module, plain)
        assert len(each._reducer.buckets) == 6 and each._bucket_set._options.algorithm == "all_reduce"
    memory = [{bucket.wire.untyped_storage().data_ptr() for bucket in m._reducer.buckets} for m in (model, twin)]
    assert not memory[0] & memory[1]


@on_ranks(2)
def test_a_copy_of_one_rank_alone_is_for_inference() -> None:
    """As an average of the weights on the first rank: nothing in it is a collective until it trains."""
    model = BucketedDataParallel(nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3)).double())
    train(model, batches())
    if dist.get_rank() == 0:
        average = copy.deepcopy(model).requires_grad_(False)
        assert torch.equal(average(batches(2)), average.module(batches(2))) is False  # in training mode
        with torch.no_grad():
            copy.deepcopy(model)(batches())
        assert "has not trained" in average.describe()
        assert average.require_backward_grad_sync
        average.close()
    train(model, batches())


@on_ranks(2)
def test_copies_of_sharded_and_closed_wrappers() -> None:
    model = BucketedDataParallel(make_model(), shard_optimizer=True)
    twin = copy.deepcopy(model)
    model.close()
    again = copy.deepcopy(model)
    batch = batches()
    for each in (twin, again):
        plain = copy.deepcopy(each.module)
        optimizer = each.sharded_optimizer(torch.optim.SGD, lr=0.1)
        each(shard(batch)).square().mean().backward()
        for _, piece in each.named_shards():
            piece.grad.detach_()
        optimizer.step()
        train(plain, batch)
        for a, b in zip(each.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_a_copy_in_join_on_a_rank_without_inputs() -> None:
    model = copy.deepcopy(BucketedDataParallel(make_model()))
    with model.join():
        for _ in range(2 * dist.get_rank()):
            train(model, batches())
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(flat, mean_over_ranks(flat))


@on_ranks(2)
def test_groups_in_copies() -> None:
    """A deep copy keeps its group, which cannot be pickled."""
    for arguments in ({"process_group": dist.new_group([0, 1])}, {"device_mesh": init_device_mesh("cpu", (1, 2))}):
        model = BucketedDataParallel(make_model(), **arguments)
        twin = copy.deepcopy(model)
        assert twin.process_group is model.process_group
        train(twin, batches())
        if "device_mesh" in arguments:
            assert twin.device_mesh is arguments["device_mesh"]
        with pytest.raises(RuntimeError, match=rf"{re.escape(NAME)}: .*torch.save\(model.module, path\)"):
            pickle.dumps(model)
    pickle.dumps(BucketedDataParallel(make_model(), process_group=dist.group.WORLD))


def parts(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@on_ranks(2)
def test_averaged_model() -> None:
    model = BucketedDataParallel(nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3)).double())
    plain = copy.deepcopy(model.module)
    averages = [AveragedModel(each, use_buffers=True) for each in (model, plain)]
    batch = batches()
    for _ in range(3):
        train(model, batch)
        train(plain, batch)
        averages[0].update_parameters(model)
        averages[1].update_parameters(plain)
    for a, b in zip(*map(parts, averages), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(average.eval()(batch) for average in averages), rtol=1e-12, atol=1e-12)
    # Its state, in our form and in that of torch's wrapper, also of another module around the wrapper.
    theirs = AveragedModel(DistributedDataParallel(copy.deepcopy(averages[1].module)))
    for state in (averages[0].state_dict(), theirs.state_dict()):
        loaded = AveragedModel(BucketedDataParallel(nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3)).double()))
        loaded.load_state_dict(state)
        for a, b in zip(parts(loaded.module), parts(averages[0].module), strict=True):
            assert torch.equal(a, b) or torch.allclose(a, b, rtol=1e-12)
    del state["module.module.0.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        loaded.load_state_dict(state)


def test_state_dicts_of_torch_can_be_loaded(group: None) -> None:
    theirs = DistributedDataParallel(nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3)))
    state = theirs.state_dict()
    before = list(state), dict(state._metadata)
    model = BucketedDataParallel(nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3)))
    model.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(parts(model), parts(theirs), strict=True))
    assert (list(state), dict(state._metadata)) == before
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({name: value for name, value in state.items() if "weight" not in name})
    inner = nn.Sequential()
    inner.add_module("module", nn.Linear(7, 3))  # has names with the prefix itself
    nested = BucketedDataParallel(inner)
    nested.load_state_dict(nested.state_dict())


# re-entrant checkpoints


class Repeated(nn.Module):
    """A layer that re-entrant checkpoints use several times, between others."""

    def __init__(self, make: type[nn.Module] = nn.Linear, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(7, width, dtype=torch.float64)
        self.layer = make(width, width, dtype=torch.float64)
        self.last = nn.Linear(width, 7, dtype=torch.float64)
        self.times = 2
        self.checkpoints = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=True) if self.checkpoints else self.layer(x)
        return self.last(self.layer(x))


@on_ranks(2)
@pytest.mark.parametrize("width", [7, 128])  # from 64 KiB on, gradients are packed on arrival
@pytest.mark.parametrize("make", [nn.Linear, cuda_ext.nn.Linear])
@pytest.mark.parametrize("static_graph", [False, True])
def test_reentrant_checkpoints_share_a_layer(static_graph: bool, make: type[nn.Module], width: int) -> None:
    model = BucketedDataParallel(Repeated(make, width), bucket_cap_mb=1e-4, static_graph=static_graph)
    plain = copy.deepcopy(model.module)
    sent: list[list[bool]] = []

    def note(_: Tensor) -> None:
        sent.append([bucket.sent for bucket in model._reducer.buckets])

    handle = model.first.weight.register_hook(note)
    for times in (2, 2, 2, 2) if static_graph else (2, 3, 1, 4):
        plain.times = model.module.times = times
        batch = batches()
        model.zero_grad()
        plain.zero_grad()
        sent.clear()
        model(shard(batch)).square().mean().backward()
        plain(batch).square().mean().backward()
        assert_gradients(model.module, plain)
    # With a static graph the buckets of `last` and `layer` travel while `first` is computed.
    assert any(sent[-1]) and (sum(sent[-1]) >= 3) == static_graph
    handle.remove()


@on_ranks(2)
def test_checkpoints_that_are_turned_on_later() -> None:
    model = BucketedDataParallel(Repeated(), bucket_cap_mb=1e-4)
    plain = copy.deepcopy(model.module)
    batch = batches()
    model.module.checkpoints = False
    train(model, shard(batch))
    train(plain, batch)
    model.module.checkpoints = True
    with pytest.raises(
        RuntimeError,
        match=rf"^{re.escape(NAME)}: expected 1 gradient of parameter layer\.\w+ in a backward pass, .* skip this step",
    ):
        model(shard(batch)).square().mean().backward()
    for _ in range(2):
        train(model, shard(batch))
        train(plain, batch)
        assert_gradients(model.module, plain)


@on_ranks(2)
def test_a_static_graph_that_changes() -> None:
    model = BucketedDataParallel(Repeated(), bucket_cap_mb=1e-4, static_graph=True)
    plain = copy.deepcopy(model.module)
    batch = batches()
    for times in (2, 1, 3):
        plain.times = model.module.times = times
        if times == 3:
            with pytest.raises(RuntimeError, match=r"expected 3 gradients of parameter layer\.\w+ in a backward pass"):
                model(shard(batch)).square().mean().backward()
        train(model, shard(batch), steps=2)  # fewer gradients are averaged at the end of backward
        train(plain, batch, steps=2)
        assert_gradients(model.module, plain)


# old training loops


@on_ranks(2)
@pytest.mark.parametrize("arguments", [{}, {"wire_dtype": torch.float32}, {"bucket_cap_mb": SMALL}])
def test_old_training_loops(arguments: dict[str, Any]) -> None:
    model = BucketedDataParallel(make_model(), **arguments)
    plain = copy.deepcopy(model.module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]

    def detach_and_zero(each: nn.Module, _: torch.optim.Optimizer) -> None:
        for parameter in each.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()

    def zero_data(each: nn.Module, _: torch.optim.Optimizer) -> None:
        for parameter in each.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()

    def zero_in_place(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)

    def zero_by_hook(each: nn.Module, _: torch.optim.Optimizer) -> None:
        each.zero_grad(set_to_none=False)
        grads = [parameter.grad for parameter in each.parameters() if parameter.grad is not None]
        torch._foreach_zero_(grads)

    for clear in (detach_and_zero, zero_data, zero_in_place, zero_by_hook) * 2:
        batch = batches()
        for each, optimizer, part in zip((model, plain), optimizers, (shard(batch), batch), strict=True):
            clear(each, optimizer)
            each(part).square().mean().backward()
            assert not any(parameter.grad._is_view() for parameter in each.parameters())
            optimizer.step()
        assert_gradients(model.module, plain, tolerance=1e-12 if "wire_dtype" not in arguments else 1e-6)
    norm = model.clip_grad_norm_(1e9)
    next(iter(model.parameters())).grad.mul_(3.0)  # noticed: it shares the version of its bucket
    own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    assert own != norm
    torch.testing.assert_close(model.clip_grad_norm_(1e9), own)


# members


def test_members(group: None) -> None:
    model = BucketedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert model.will_sync_module_buffers() and model.require_backward_grad_sync
    with model.no_sync():
        assert not model.require_backward_grad_sync and not model.will_sync_module_buffers()
    model.require_backward_grad_sync = False
    assert not model._reducer.enabled
    model.require_backward_grad_sync = True
    assert not BucketedDataParallel(nn.Linear(2, 2)).will_sync_module_buffers()
    model._set_static_graph()
    assert model.static_graph and model._reducer.static_graph
    with model.join():
        model(torch.randn(3, 2)).sum().backward()
    with pytest.raises(ValueError, match="expected divide_by_initial_world_size=True"):
        model.join(divide_by_initial_world_size=False)
    model._remove_autograd_hooks()
    BucketedDataParallel(model.module)


@pytest.mark.parametrize(
    "name, instead",
    {
        "reducer": "print(model.describe()) shows the buckets",
        "logger": "print(model.describe()) shows the buckets",
        "_get_ddp_logging_data": "print(model.describe()) shows the buckets",
        "_register_buffer_comm_hook": "pass broadcast_buffers=False",
        "_register_builtin_comm_hook": "pass wire_dtype=torch.float16",
        "_register_fused_optim": "call optimizer.step() after backward",
        "_update_process_group": "call model.close(), then BucketedDataParallel(model.module, process_group=group)",
    }.items(),
)
def test_members_without_a_counterpart(group: None, name: str, instead: str) -> None:
    model = BucketedDataParallel(nn.Linear(2, 2))
    assert hasattr(DistributedDataParallel(nn.Linear(2, 2)), name) and not hasattr(model, name)
    with pytest.raises(AttributeError, match=f"^{re.escape(f'{NAME} has no {name}: {instead}')}"):
        getattr(model, name)
    setattr(model.module, name, "the module's own")
    assert getattr(model, name) == "the module's own"


@on_ranks(2)
def test_communication_hooks_that_choose_a_dtype() -> None:
    state = AllreduceState(wire_dtype=torch.bfloat16)
    for hook, state, wire_dtype in (
        (default_hooks.allreduce_hook, None, None),
        (default_hooks.fp16_compress_hook, dist.new_group([0, 1]), torch.float16),
        (default_hooks.bf16_compress_hook, dist.group.WORLD, torch.bfloat16),
        (allreduce_hook, AllreduceState(wire_dtype=torch.float16), torch.float16),
    ):
        model, other = (
            BucketedDataParallel(make_model(torch.float32)),
            BucketedDataParallel(make_model(torch.float32), wire_dtype=wire_dtype),
        )
        other.load_state_dict(model.state_dict())
        model.register_comm_hook(state, hook)
        for _ in range(2):
            batch = batches().float()
            for each in (model, other):
                each.zero_grad()
                each(shard(batch)).square().mean().backward()
            assert_gradients(model.module, other.module, tolerance=0)
            assert model._reducer.buckets[0].wire.dtype == (wire_dtype or torch.float32)
    with pytest.raises(
        ValueError, match="expected allreduce_hook, fp16_compress_hook or bf16_compress_hook, got <func"
    ):
        model.register_comm_hook(None, powerSGD_hook.powerSGD_hook)
    with pytest.raises(ValueError, match="expected the ranks of the wrapper in state"):
        model.register_comm_hook(_alone(), default_hooks.allreduce_hook)
    with pytest.raises(
        RuntimeError, match=r"expected a call before the first backward pass, got one after 2; pass wire"
    ):
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)


def _alone() -> dist.ProcessGroup:
    return [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
