"""The ops and layers on DTensors, over 2 and 4 ranks, against the same computation on one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

import cuda_ext

DOUBLE = {"dtype": torch.float64}


def world_size() -> int:
    return torch.distributed.get_world_size()


Splits = dict[str, int]  # the dim at which a tensor is split; others are whole on every rank


def sharded(tensors: dict[str, Tensor], *splits: Splits) -> dict[str, Any]:
    """DTensors over a mesh with a dimension, of 2 ranks if there are several, for each of `splits`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,) * len(splits) if len(splits) > 1 else (world_size(),))
    return {
        name: distribute_tensor(
            tensor, mesh, [Shard(each[name]) if name in each else Replicate() for each in splits or ({},)]
        ).requires_grad_(tensor.is_floating_point())
        for name, tensor in tensors.items()
    }


def check(
    op: Callable[..., Any],
    shapes: dict[str, tuple[int, ...]],
    *splits: Splits,
    out: str | None = None,
    **options: Any,
) -> None:
    """`op` with arguments split along each dimension of a mesh: the result, in the placements `out` if given, and all
    gradients, are those of the whole tensors."""
    whole = {name: torch.randn(shape, **DOUBLE, requires_grad=True) for name, shape in shapes.items()}
    parts = sharded({name: tensor.detach() for name, tensor in whole.items()}, *splits)
    with torch.no_grad():
        first(op(**parts, **options)).full_tensor()
    expected, actual = op(**whole, **options), op(**parts, **options)
    label = f"{getattr(op, '__name__', op)} {splits} {options}"
    if out is not None:
        assert " ".join(str(placement) for placement in first(actual).placements) == out, label
    for result, wanted in zip(as_tuple(actual), as_tuple(expected), strict=True):
        torch.testing.assert_close(result.full_tensor(), wanted, msg=lambda text: f"{label}: {text}")
    weights = [torch.randn_like(result) for result in as_tuple(expected)]
    spread = sharded({str(n): weight for n, weight in enumerate(weights)}, *({} for _ in splits))
    loss = sum((result * weight).sum() for result, weight in zip(as_tuple(actual), spread.values(), strict=True))
    wanted_loss = sum((result * weight).sum() for result, weight in zip(as_tuple(expected), weights, strict=True))
    grads = torch.autograd.grad(loss, list(parts.values()))
    for name, grad, wanted in zip(parts, grads, torch.autograd.grad(wanted_loss, list(whole.values())), strict=True):
        torch.testing.assert_close(grad.full_tensor(), wanted, msg=lambda text, n=name: f"{label}, grad {n}: {text}")


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def first(results: Any) -> Any:
    return as_tuple(results)[0]


def every_split(shapes: dict[str, tuple[int, ...]], names: Sequence[str]) -> Iterator[Splits]:
    """Each of the tensors `names` whole or split at any of its dims, in every combination."""
    choices = [[None, *range(len(shapes[name]))] for name in names]
    for dims in itertools.product(*choices):
        yield {name: dim for name, dim in zip(names, dims, strict=True) if dim is not None}


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.parametrize("size", [2, 4])
def test_products(size: int, workers: Any) -> None:
    workers.run(size, __name__, "products", {})


@on_ranks(2)
def products() -> None:
    """The splits of tensor parallel layers keep the work split; all others are right, whatever they cost."""
    from torch.distributed.tensor import DTensor, Replicate

    from cuda_ext import gated_linear, gated_mlp, gemm, linear, mlp

    n = world_size()
    linear_shapes = {"input": (3, 5, 8), "weight": (12, 8), "bias": (12,), "residual": (3, 5, 12)}
    frozen = sharded({name: torch.randn(shape) for name, shape in linear_shapes.items() if name != "residual"}, {})
    for wanted in (["input"], ["weight"], ["input", "bias"]):  # DTensor caches what shapes the gradients have
        leaves = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in frozen.items()}
        linear(**leaves).sum().backward()
        assert all(leaves[name].grad.shape == leaves[name].shape for name in wanted)
    for activation in (None, "relu", "gelu"):
        check(linear, linear_shapes, {"weight": 0, "bias": 0}, out="S(2)", activation=activation)
        check(linear, linear_shapes, {"input": 1, "residual": 1}, out="S(1)", activation=activation)
        rowwise = "P(sum)" if activation is None else None
        check(linear, linear_shapes, {"input": 2, "weight": 1}, out=rowwise, activation=activation)
    uneven = {"input": (n + 1, 7), "weight": (2 * n + 1, 7), "bias": (2 * n + 1,)}
    for splits in every_split(uneven, ["input", "weight"]):
        check(linear, uneven, splits, activation="silu")
    gated = {"input": (5, 8), "weight": (12, 8), "bias": (12,)}
    for splits in every_split(gated, ["input", "weight"]):
        check(gated_linear, gated, splits, out="S(0)" if splits == {"input": 0} else None)
    layers = {"input": (3, 4, 8), "weight1": (12, 8), "weight2": (8, 12), "bias1": (12,), "bias2": (8,)}
    layers["residual"] = (3, 4, 8)
    check(mlp, layers, {"weight1": 0, "weight2": 1, "bias1": 0}, out="P(sum)", activation="gelu_tanh")
    check(mlp, layers, {"input": 1, "residual": 1}, out="S(1)")
    check(mlp, layers, {"weight2": 0})
    gated_layers = {**layers, "weight2": (8, 6)}
    check(gated_mlp, gated_layers, {"input": 1}, out="S(1)")
    check(gated_mlp, gated_layers, {"weight1": 0, "weight2": 1, "bias1": 0})
    terms = {"a": (4, 5, 8), "b": (8, 6), "c": (5, 1), "bias": (6,)}
    scales = {"alpha": 0.5, "beta": 2.0}
    for splits, out in (
        ({"a": 0}, "S(0)"),
        ({"a": 1, "c": 0}, "S(1)"),
        ({"b": 1, "bias": 0}, "S(2)"),
        ({"c": 0}, None),
    ):
        check(gemm, terms, splits, out=out, activation="gelu", **scales)
    check(gemm, terms, {"a": 2, "b": 0}, out="P(sum)", **scales)
    check(gemm, terms, {"a": 2, "b": 0}, activation="relu", **scales)  # after the sum, not before
    grouped = {"mat_a": (9, 8), "mat_b": (3, 8, 12), "bias": (3, 12)}
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)

    def grouped_mm(indices: Any = None, **tensors: Any) -> Any:
        a = tensors["mat_a"]
        ends = offs
        if isinstance(a, DTensor):
            ends = DTensor.from_local(offs, a.device_mesh, [Replicate()])
            indices = None if indices is None else DTensor.from_local(indices, a.device_mesh, [Replicate()])
        return cuda_ext.grouped_mm(**tensors, offs=ends, indices=indices)

    check(grouped_mm, grouped, {"mat_b": 2, "bias": 1}, out="S(1)")
    check(grouped_mm, grouped, {"mat_a": 1, "mat_b": 1}, out="P(sum)")
    check(grouped_mm, grouped, {"mat_a": 0})
    check(grouped_mm, grouped, {"mat_b": 2, "bias": 1}, out="S(1)", activation="gelu")
    check(grouped_mm, grouped, {"mat_a": 1, "mat_b": 1}, activation="relu")  # after the sum, not before
    check(grouped_mm, grouped, {"mat_b": 2, "bias": 1}, gated=True)  # the halves of gate and up are not those of ranks
    rows = {"mat_a": (5, 8), "mat_b": (3, 8, 12), "bias": (3, 12)}
    for split, out in (({"mat_b": 2, "bias": 1}, "S(1)"), ({"mat_a": 1, "mat_b": 1}, "P(sum)"), ({"mat_a": 0}, None)):
        check(grouped_mm, rows, split, out=out, indices=torch.arange(9) % 5)
    batches = {"a": (4, 5, 3), "b": (2, 4, 3, 6)}
    for splits in ({"a": 0, "b": 1}, {"b": 0}, {"a": 0}):
        check(gemm, batches, splits)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 4])
def test_passes_of_experts(size: int, workers: Any) -> None:
    workers.run(size, __name__, "passes_of_experts", {})


@on_ranks(2)
def passes_of_experts() -> None:
    """Columns stay split; where a row is needed as a whole, ranks exchange it."""
    import cuda_ext._rules  # noqa: F401
    from cuda_ext._load import ops

    combine, gate_backward = ops.combine_experts, ops.experts_gate_backward
    pairs = torch.randperm(6)
    given = {"x": torch.randn(6, 8), "gated": torch.randn(6, 16), "rows": pairs.view(3, 2), "pairs": pairs}
    given["weights"] = torch.rand(3, 2)
    for gated, dim in itertools.product((False, True), (0, 1)):
        splits = {"x": dim, "gated": dim}
        spread = {name: t.detach() for name, t in sharded(given, splits).items()}
        if dim == 1:  # gloo does not move FP8
            gathered = ops.gather_fp8(spread["x"].to(torch.float8_e4m3fn), spread["pairs"])
            assert str(gathered.placements[0]) == "S(1)"
            torch.testing.assert_close(gathered.to_local().float(), spread["x"].to_local()[pairs], rtol=0.07, atol=2e-3)
        out = combine(spread["x"], spread["rows"], spread["weights"])
        assert dim == 0 or str(out.placements[0]) == "S(1)"
        torch.testing.assert_close(out.full_tensor(), combine(given["x"], given["rows"], given["weights"]))
        for mask in ([True] * 3, [False, True, False]):
            options: dict[str, Any] = {"activation": "silu", "gated": gated, "output_mask": mask}
            names = ("x", "gated" if gated else "x", "weights", "pairs")
            found = gate_backward(*(spread[name] for name in names), **options)
            expected = gate_backward(*(given[name] for name in names), **options)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine.full_tensor(), theirs)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 4])
def test_attention(size: int, workers: Any) -> None:
    workers.run(size, __name__, "attention", {})


@on_ranks(2)
def attention() -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
    from torch.utils import _pytree as pytree

    from cuda_ext import BlockMask, flash_attention

    def call(**arguments: Any) -> Any:
        return flash_attention(**arguments, causal=True, return_lse=True)

    def masked(attn_bias: Any, **arguments: Any) -> Any:
        return flash_attention(**arguments, attn_bias=attn_bias, attn_mask=attn_bias.detach() < 1, return_lse=True)

    n = world_size()
    dense = torch.arange(n * 4 * n * 5 * 7).view(n, 4 * n, 5, 7) % 3 != 0

    def blocked(**arguments: Any) -> Any:
        """Its tensors become DTensors as those of any pytree do."""
        mask = BlockMask.from_dense(dense)
        if isinstance(arguments["query"], DTensor):
            mesh = arguments["query"].device_mesh
            mask = pytree.tree_map(lambda t: distribute_tensor(t, mesh, [Replicate()] * mesh.ndim), mask)
        return flash_attention(**arguments, block_mask=mask, return_lse=True)

    def shapes(batch: int, heads: int, heads_kv: int, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        kv = (batch, 7, heads_kv, 4)
        return {"query": (batch, 5, heads, 4), "key": kv, "value": (*kv[:3], 6), **more}

    by_heads, by_batch = (dict.fromkeys(("query", "key", "value"), dim) for dim in (2, 0))
    full = shapes(n, 4 * n, 2 * n, sinks=(4 * n,), attn_bias=(n, 4 * n, 5, 7))
    check(call, full, {**by_heads, "sinks": 0, "attn_bias": 1}, out="S(2)")
    check(call, full, {**by_batch, "attn_bias": 0}, out="S(0)")
    check(masked, full, {**by_heads, "sinks": 0, "attn_bias": 1}, out="S(2)")
    check(masked, full, {**by_batch, "attn_bias": 0}, out="S(0)")
    by_distance = shapes(n, 4 * n, 2 * n, relative_bias=(4 * n, 9))
    check(call, by_distance, {**by_heads, "relative_bias": 0}, out="S(2)")
    check(call, by_distance, by_batch, out="S(0)")
    check(blocked, shapes(n, 4 * n, 2 * n), by_heads, out="S(2)")
    check(blocked, shapes(n, 4 * n, 2 * n), by_batch, out="S(0)")
    check(call, shapes(2 * n + 1, 2, 1, attn_bias=(5, 7)), by_batch, out="S(0)")
    check(call, shapes(2, n + 1, n + 1, attn_bias=(n + 1, 1, 1)), by_heads, out="S(2)")  # uneven
    check(call, shapes(2, 2 * n, 1), {"query": 2}, out="S(2)")  # all read one head
    check(call, shapes(1, 2 * (n + 1), n + 1), by_heads)  # groups do not come out even: gathered
    check(call, shapes(2, 4, 2), {"query": 1, "key": 1})
    parts = sharded({name: torch.randn(shape) for name, shape in shapes(n, 2, 2).items()}, {})
    assert all(isinstance(part, DTensor) for part in parts.values())
    with pytest.raises(NotImplementedError, match=r"cuda_ext::flash_attention: expected dropout_p=0 for DTensors"):
        flash_attention(**parts, dropout_p=0.5)


ATTENTION: dict[str, tuple[int, ...]] = {"query": (2, 5, 8, 4), "key": (2, 7, 4, 4), "value": (2, 7, 4, 6)}


@pytest.mark.parametrize("size", [2, 4])
def test_split_sequences(size: int, workers: Any) -> None:
    workers.run(size, __name__, "sequences", {})


@on_ranks(2)
def sequences() -> None:
    """Rings, which give results in the placements of queries; other rules gather, and give whole results."""
    import cuda_ext.distributed.context_parallel  # noqa: F401 makes flash_attention use rings
    from cuda_ext import flash_attention

    def call(**arguments: Any) -> Any:
        return flash_attention(**arguments, causal=True, return_lse=True)

    def masked(attn_bias: Any, **arguments: Any) -> Any:
        return flash_attention(**arguments, attn_bias=attn_bias, attn_mask=attn_bias.detach() < 1, softcap=3.0)

    by_rows = dict.fromkeys(ATTENTION, 1)
    check(flash_attention, ATTENTION, by_rows, out="S(1)")  # uneven, and on 4 ranks one has no rows
    check(flash_attention, ATTENTION, by_rows, out="S(1)", window=(2, 1))
    check(call, {**ATTENTION, "sinks": (8,), "attn_bias": (2, 8, 5, 7)}, {**by_rows, "attn_bias": 2}, out="S(1)")
    check(call, {**ATTENTION, "relative_bias": (8, 5), "attn_bias": (7,)}, by_rows, out="S(1)")
    check(masked, {**ATTENTION, "attn_bias": (5, 1)}, by_rows, out="S(1)")
    check(call, ATTENTION, {"query": 1, "key": 1}, out="R")
    with pytest.raises(NotImplementedError, match=r"cuda_ext::flash_attention: expected dropout_p=0 for DTensors"):
        parts = sharded({name: torch.randn(shape) for name, shape in ATTENTION.items()}, by_rows)
        flash_attention(**parts, dropout_p=0.5)
    if world_size() == 4:
        for other in (0, 2):
            places = dict.fromkeys(ATTENTION, other), by_rows
            options = {"sinks": (8,), "attn_bias": (1, 8, 5, 7), "relative_bias": (8, 9)}
            check(call, {**ATTENTION, **options}, *places, out=f"S({other}) S(1)")
            check(call, {**ATTENTION, **options}, *reversed(places), out=f"S(1) S({other})")
        check(call, ATTENTION, {}, by_rows, out="R S(1)")
        check(call, ATTENTION, by_rows, by_rows)  # of two dims: gathered
        check(call, {**ATTENTION, "key": (2, 7, 1, 4), "value": (2, 7, 1, 6)}, dict.fromkeys(ATTENTION, 2), by_rows)


@pytest.mark.sampled
def test_two_dimensions_of_a_mesh(workers: Any) -> None:
    workers.run(4, __name__, "two_dimensions", {})


@on_ranks(2)
def two_dimensions() -> None:
    """Data parallel along the first, tensor parallel along the second; and the other way round."""
    from cuda_ext import flash_attention, flash_attention_varlen, linear, mlp

    lengths = {"cu_seqlens_q": torch.tensor([0, 4, 9]).int(), "cu_seqlens_k": torch.tensor([0, 7, 12]).int()}
    whole_lengths = sharded(lengths, {}, {})

    def varlen(**tensors: Any) -> Any:
        more = whole_lengths if hasattr(tensors["query"], "placements") else lengths
        return flash_attention_varlen(**tensors, **more, max_seqlen_q=5, max_seqlen_k=7, causal=True)

    layer = {"input": (4, 6, 8), "weight": (12, 8), "bias": (12,)}
    layers = {"input": (3, 4, 8), "weight1": (12, 8), "weight2": (8, 12)}
    shapes = {"query": (2, 5, 8, 4), "key": (2, 7, 4, 4), "value": (2, 7, 4, 6)}
    packed = {"query": (9, 8, 4), "key": (12, 4, 4), "value": (12, 4, 6)}
    by_batch, by_heads, by_packed_heads = (dict.fromkeys(packed, dim) for dim in (0, 2, 1))
    for op, tensors, along_data, along_model, out, options in (
        (linear, layer, {"input": 0}, {"weight": 0, "bias": 0}, "S(0) S(2)", {"activation": "gelu"}),
        (linear, layer, {"input": 0}, {"input": 2, "weight": 1}, "S(0) P(sum)", {}),
        (linear, layer, {"weight": 0}, {"weight": 1}, None, {}),
        (linear, layer, {"input": 0, "weight": 0}, {"input": 1, "weight": 1}, None, {"activation": "relu"}),
        (mlp, layers, {"input": 1}, {"weight1": 0, "weight2": 1}, "S(1) P(sum)", {"activation": "silu"}),
        (flash_attention, shapes, by_batch, by_heads, "S(0) S(2)", {"causal": True}),
        (flash_attention, shapes, by_batch, {"query": 1}, None, {}),
        (varlen, packed, {}, by_packed_heads, "R S(1)", {}),
        (varlen, packed, by_packed_heads, {"query": 0}, None, {}),
    ):
        check(op, tensors, along_data, along_model, out=out, **options)
        other_way = " ".join(reversed(out.split())) if out else None
        check(op, tensors, along_model, along_data, out=other_way, **options)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, **DOUBLE)
        self.up = cuda_ext.nn.Linear(8, 16, activation="gelu", **DOUBLE)
        self.down = cuda_ext.nn.Linear(16, 8, **DOUBLE)

    def forward(self, input: Tensor) -> Tensor:
        return self.down(self.up(self.norm(input)))


@pytest.mark.parametrize("size", [2, 4])
def test_parallelize_module(size: int, workers: Any) -> None:
    workers.run(size, __name__, "parallel_layers", {})


@on_ranks(2)
def parallel_layers() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    mesh = init_device_mesh("cpu", (world_size(),))
    torch.manual_seed(0)

    def compare(module: nn.Module, split: nn.Module, **names: str) -> None:
        """Of `split`, whose state was that of `module`, the output and the gradients."""
        input = torch.randn(2, 4, 8, **DOUBLE)
        expected, actual = module(input), split(input)
        actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
        torch.testing.assert_close(actual, expected)
        expected.square().sum().backward()
        actual.square().sum().backward()
        for (name, parameter), other in zip(module.named_parameters(), split.parameters(), strict=True):
            grad = other.grad.full_tensor() if isinstance(other.grad, DTensor) else other.grad
            torch.testing.assert_close(grad, parameter.grad, msg=lambda text, n=name: f"{n}: {text}")

    def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
        module, split = make(), make()
        split.load_state_dict(module.state_dict())
        return module, split

    module, split = pair(Block)
    plan: dict[str, Any] = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    compare(module, tp.parallelize_module(split, mesh, plan))
    module, split = pair(Block)
    sequence = {
        "": tp.PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
        "norm": tp.SequenceParallel(),
        "up": tp.ColwiseParallel(input_layouts=Shard(1)),
        "down": tp.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    compare(module, tp.parallelize_module(split, mesh, sequence))
    module, split = pair(lambda: cuda_ext.nn.GatedMLP(8, 16, bias=True, **DOUBLE))
    gated = {
        "": tp.PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        "gate_up_proj": tp.ColwiseParallel(),
        "down_proj": tp.RowwiseParallel(),
    }
    compare(module, tp.parallelize_module(split, mesh, gated))


@pytest.mark.sampled
@pytest.mark.parametrize("order", ["cuda_ext.ops, torch.distributed.tensor", "torch.distributed.tensor, cuda_ext.ops"])
def test_rules_are_registered_in_either_order_and_only_then(order: str, run_python: Callable[..., Any]) -> None:
    code = f"""
import sys, cuda_ext._rules
assert "torch.distributed.tensor" not in sys.modules and "cuda_ext._rules.dtensor" not in sys.modules
import {order}
from torch.distributed.tensor import DTensor
assert torch.ops.cuda_ext.linear.default in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
"""
    if order.startswith("torch"):
        code = code.replace("import sys, cuda_ext._rules", "import sys").replace(" and", " #")
    done = run_python("-c", code)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.sampled)])
def test_losses(size: int, workers: Any) -> None:
    workers.run(size, __name__, "losses", {})


@on_ranks(2)
def losses() -> None:
    """Split by rows; of a weight that is split by rows test_loss_ranks.py has more."""
    n = world_size()

    def check_loss(rows: int, *splits: Splits, out: str | None = None, op: str = "", **options: Any) -> None:
        shapes = {"input": (rows, 5), "linear_weight": (7, 5), "linear_bias": (7,)}
        target = torch.randint(7, (rows,))
        target[0] = -100
        more = {"target": target, "weight": torch.rand(7, **DOUBLE)}
        if options.pop("probabilities", False):
            more["target"] = torch.rand(rows, 7, **DOUBLE)
        elif op:
            del more["weight"]
        parts = {name: part.detach() for name, part in sharded(more, *splits).items()}

        def call(input: Any, **operands: Any) -> Any:
            rest = parts if hasattr(input, "placements") else more
            return getattr(cuda_ext, op or "linear_cross_entropy")(input, **operands, **rest, **options)

        check(call, shapes, *splits, out=out)

    by_rows = {"input": 0, "target": 0}
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1}, {"probabilities": True}):
        check_loss(2 * n + 1, by_rows, method="forward", **options)
        check_loss(2 * n + 1, by_rows, method="recompute", **options)
        every = {"reduction": "none", "return_lse": True, "return_entropy": True}
        check_loss(2 * n + 1, by_rows, out="S(0)", **every, **options)
    check_loss(2 * n + 1, by_rows, out="S(0)", op="linear_log_prob", return_entropy=True)
    for splits in ({}, {"input": 1}, {"linear_weight": 1}, {"linear_weight": 0}):
        check_loss(2 * n + 1, splits, reduction="sum")
