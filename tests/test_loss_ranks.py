"""Losses of a vocabulary that is sharded over ranks, beside one rank that has all classes."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from loss_common import DTYPES, REDUCTIONS, absolute_errors, operands, probabilities, run, with_ignored
from ranks import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_ext
from cuda_ext import testing

Tensors = dict[str, Tensor]


def sizes_of_shards(classes: int, kind: str) -> list[int]:
    """How many classes each rank has; the same on all ranks, which have the same random seed."""
    ranks = dist.get_world_size()
    if kind == "even":
        return [len(part) for part in torch.arange(classes).tensor_split(ranks)]
    cuts = sorted(random.Random(int(torch.randint(2**31, ()))).randrange(classes + 1) for _ in range(ranks - 1))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, classes], strict=True)]


def of_this_rank(sizes: Sequence[int]) -> slice:
    begin = sum(sizes[: dist.get_rank()])
    return slice(begin, begin + sizes[dist.get_rank()])


def part_of(tensors: Tensors, mine: slice) -> Tensors:
    """The operands of this rank."""
    parts = {}
    for name, tensor in tensors.items():
        own = tensor.detach()
        if name in ("linear_weight", "linear_bias", "weight"):
            own = own[mine]
        elif name == "target" and tensor.is_floating_point():
            own = own[..., mine]
        parts[name] = own.clone().requires_grad_(tensor.requires_grad)
    return parts


class Transfers(TorchDispatchMode):
    """What this rank puts into each collective: its name, bytes and largest element."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, int, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if namespace == "_c10d_functional" and name != "wait_tensor":
            largest = float(args[0].double().abs().max()) if args[0].numel() else 0.0
            self.all.append((name, args[0].nbytes, largest))
        return func(*args, **kwargs or {})

    @property
    def sent(self) -> list[tuple[str, int]]:
        return [(name, size) for name, size, _ in self.all]


def largest_part(transfers: Transfers) -> float:
    """The largest element of all ranks' parts of a gradient."""
    own = max((largest for name, _, largest in transfers.all if name == "all_reduce"), default=0.0)
    every = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return float(every)


def beside_one_rank(tensors: Tensors, sizes: Sequence[int], op: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of the shards, and of all classes on one rank, of which the parts of this rank."""
    mine = of_this_rank(sizes)
    function = getattr(cuda_ext, op)
    shards = run(function, part_of(tensors, mine), {**options, "vocab_group": dist.group.WORLD})
    return [shards, of_shard(run(function, tensors, options), mine)]


def of_shard(results: Tensors, mine: slice) -> Tensors:
    split = ("gradient of linear_weight", "gradient of linear_bias")
    return {name: value[mine] if name in split else value for name, value in results.items()}


def check(
    tensors: Tensors, sizes: Sequence[int], op: str = "linear_cross_entropy", **options: Any
) -> dict[str, Tensor]:
    """float64: equal within 1e-12. Others: no further from float64 than twice what one rank is, and than the roundings
    of the sum of the ranks' parts of the input's gradient, which may be larger than the sum."""
    options = {"reduction": "mean", **options} if op == "linear_cross_entropy" else options
    with Transfers() as transfers:
        actual, expected = beside_one_rank(tensors, sizes, op, options)
    if tensors["input"].dtype == torch.float64:
        for name, value in expected.items():
            largest = float(value.nan_to_num(0, 0, 0).abs().max()) if value.numel() else 0.0
            torch.testing.assert_close(
                actual[name], value, rtol=1e-12, atol=1e-12 * max(1.0, largest), equal_nan=True, msg=name
            )
        return actual
    exact = of_shard(run(getattr(cuda_ext, op), tensors, options, torch.float64), of_this_rank(sizes))
    errors = absolute_errors(tensors, exact, options)
    for name, value in exact.items():
        atol = dist.get_world_size() * errors[name](actual[name].dtype)
        if name == "gradient of input":
            atol += dist.get_world_size() * torch.finfo(actual[name].dtype).eps * largest_part(transfers)
        testing.assert_close_to_reference(actual[name], expected[name], value, atol=atol, name=name)
    return actual


def draw(dtype: torch.dtype) -> tuple[Tensors, list[int], dict[str, Any]]:
    pick = random.choice
    classes, features = pick((1, 3, 7, 50, 129, 257)), pick((1, 5, 17))
    lead = pick(((0,), (1,), (7,), (2, 9), (33,), ()))
    tensors = operands(lead, classes, features, dtype, bias=random.random() < 0.5, spread=pick((0.1, 1.0, 4.0, 300.0)))
    sizes = sizes_of_shards(classes, pick(("even", "uneven")))
    options: dict[str, Any] = {
        "reduction": pick(REDUCTIONS),
        "softcap": pick((0.0, 2.0, 30.0)),
        "scale": pick((1.0, 0.3, -1.0)),
        "z_loss": pick((0.0, 0.1)),
        "label_smoothing": pick((0.0, 0.1, 1.0)),
        "ignore_index": pick((-100, 0, classes - 1, classes + 5)),
        "return_lse": random.random() < 0.3,
        "return_entropy": random.random() < 0.3,
    }
    if random.random() < 0.3:
        tensors["weight"] = torch.rand(classes, dtype=torch.float64 if dtype == torch.float64 else torch.float32) + 0.1
    if random.random() < 0.3:
        tensors["target"] = probabilities(lead, classes, dtype)
    else:
        edges = torch.tensor([edge for edge in (0, sizes[0] - 1, sizes[0], classes - 1) if 0 <= edge < classes])
        target = torch.where(torch.rand(lead) < 0.5, edges[torch.randint(len(edges), lead)], tensors["target"])
        tensors["target"] = with_ignored(target, options["ignore_index"]) if classes > 1 else target
    return tensors, sizes, options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_cases(ranks: int, dtype: torch.dtype, workers: Any) -> None:
    workers.run(ranks, __name__, "random_cases", {"dtype": dtype, "count": 8})


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_more_random_cases(ranks: int, dtype: torch.dtype, workers: Any) -> None:
    workers.run(ranks, __name__, "random_cases", {"dtype": dtype, "count": 150})


@on_ranks(2)
def random_cases(dtype: torch.dtype, count: int) -> None:
    random.seed(int(torch.randint(2**31, ())))
    for _ in range(count):
        tensors, sizes, options = draw(dtype)
        check(tensors, sizes, **options)
        if not tensors["target"].is_floating_point():
            tensors.pop("weight", None)
            kept = ("ignore_index", "softcap", "scale", "return_entropy")
            check(tensors, sizes, "linear_log_prob", **{name: options[name] for name in kept})


@on_ranks(4)
def test_targets_at_the_edges_of_shards_and_in_one_shard() -> None:
    sizes = [3, 0, 5, 4]
    for target in ([0, 2, 3, 7, 8, 11], [3, 4, 5, 6, 7, 3], [11] * 6, [-100, 3, -100, 8, 2, -100]):
        tensors = {**operands((6,), 12, 5, torch.float64, bias=True), "target": torch.tensor(target)}
        for reduction in REDUCTIONS:
            check(tensors, sizes, reduction=reduction, label_smoothing=0.1, return_entropy=True)
    check({**tensors, "target": torch.full((6,), -100)}, sizes)  # the mean over nothing


@on_ranks(2)
def test_infinite_and_nan_logits() -> None:
    """Hidden classes, of one shard all; a hidden target; a row of NaN."""
    tensors = operands((5,), 8, 3, torch.float64, bias=True)
    tensors["target"] = torch.tensor([4, 5, 7, 6, 4])
    for hidden in ([0, 5], [0, 1, 2, 3], [0, 1, 2, 3, 5]):
        bias = torch.zeros(8, dtype=torch.float64)
        bias[hidden] = -math.inf
        tensors["linear_bias"] = bias.requires_grad_()
        options = {"reduction": "none", "return_lse": True, "return_entropy": True}
        check(tensors, [4, 4], **options)
        with torch.no_grad():
            losses = cuda_ext.linear_cross_entropy(
                **part_of({**tensors, "target": torch.tensor([0, 5, 7, 6, 4])}, of_this_rank([4, 4])),
                vocab_group=dist.group.WORLD,
                reduction="none",
            )
        assert losses[0] == math.inf and losses[2:].isfinite().all()
    check({**tensors, "linear_bias": torch.full((8,), -math.inf).double().requires_grad_()}, [4, 4], **options)
    with torch.no_grad():
        tensors["input"][3] = math.nan
    tensors["linear_bias"] = torch.zeros(8, dtype=torch.float64)
    losses = check(tensors, [4, 4], **options)["loss"]
    assert losses.isnan().tolist() == [False, False, False, True, False]


@on_ranks(2)
def test_a_common_logit_of_any_size_cancels() -> None:
    """Equal logits: the loss is log(V), in float32 too, and every class has the same probability."""
    target = torch.tensor([0, 7, 3, 3, 5])
    mine = of_this_rank([3, 5])
    for logit in (1.0, 2.0**12, -(2.0**12), 2.0**24):
        bias = torch.full((8,), logit)[mine].requires_grad_()
        own = (torch.zeros(5, 1), torch.zeros(len(bias), 1), target)
        losses, entropies = cuda_ext.linear_cross_entropy(
            *own, linear_bias=bias, reduction="none", return_entropy=True, vocab_group=dist.group.WORLD
        )
        torch.testing.assert_close(losses.detach(), torch.full((5,), math.log(8)), rtol=4e-7, atol=0)
        torch.testing.assert_close(entropies.detach(), torch.full((5,), math.log(8)), rtol=4e-7, atol=0)
        expected = (5 / 8 - torch.bincount(target, minlength=8))[mine]
        torch.testing.assert_close(torch.autograd.grad(losses.sum(), bias)[0], expected, rtol=1e-6, atol=0)


@on_ranks(2)
def test_what_is_sent() -> None:
    rows, features = 33, 24
    group = dist.group.WORLD

    def gathers(*values: int) -> list[tuple[str, int]]:
        """First two integers, how many classes and rows a rank has; then so many floats a row."""
        return [("all_gather_into_tensor", 16), *(("all_gather_into_tensor", 4 * each * rows) for each in values)]

    for dtype in (torch.float32, torch.bfloat16):
        tensors = part_of(operands((rows,), 40, features, dtype, bias=True), of_this_rank([20, 20]))
        leaves = [t for t in tensors.values() if t.requires_grad]
        of_classes = probabilities((rows,), 20)
        for options, sent in (
            ({}, gathers(3)),
            ({"label_smoothing": 0.1}, gathers(4)),
            ({"label_smoothing": 0.1, "return_lse": True, "return_entropy": True}, gathers(5)),
            ({"weight": torch.rand(20)}, gathers(1, 3)),
            ({"target": of_classes, "label_smoothing": 0.1}, gathers(1, 3)),
        ):
            with Transfers() as forward:
                out = cuda_ext.linear_cross_entropy(**{**tensors, **options}, vocab_group=group)
            assert forward.sent == sent
            with Transfers() as backward:
                torch.autograd.grad(out[0] if isinstance(out, tuple) else out, leaves)
            assert backward.sent == [("all_reduce", rows * features * dtype.itemsize)]
        with Transfers() as both:  # the gradients of the weight and the bias are local
            frozen = {**tensors, "input": tensors["input"].detach()}
            torch.autograd.grad(cuda_ext.linear_log_prob(**frozen, vocab_group=group).sum(), leaves[1:])
        assert both.sent == gathers(3)


@on_ranks(4)
def test_all_ranks_and_all_runs_have_the_same_bits() -> None:
    tensors = part_of(operands((70,), 90, 16, torch.bfloat16), of_this_rank([20, 30, 15, 25]))

    def once() -> list[Tensor]:
        losses = cuda_ext.linear_cross_entropy(**tensors, reduction="none", vocab_group=dist.group.WORLD)
        leaves = [tensors["input"], tensors["linear_weight"]]
        return [losses.detach(), *torch.autograd.grad(losses.sum(), leaves)]

    first = once()
    assert all(torch.equal(*pair) for pair in zip(first, once(), strict=True))
    for tensor in first[:2]:
        every = [torch.empty_like(tensor) for _ in range(4)]
        dist.all_gather(every, tensor)
        assert all(torch.equal(tensor, other) for other in every)


@on_ranks(4)
def test_rows_do_not_depend_on_others_in_batch_invariant_mode() -> None:
    """Of the values; the order in which an all-reduce sums an element of the input's gradient depends on its place."""
    tensors = part_of(operands((150,), 900, 40, bias=True), of_this_rank([200, 300, 150, 250]))

    def rows(count: int) -> tuple[Tensor, ...]:
        some = {name: tensors[name][:count] for name in ("input", "target")}
        options = {"reduction": "none", "return_lse": True, "return_entropy": True, "memory_limit": 100_000}
        with torch.no_grad():
            return cuda_ext.linear_cross_entropy(**{**tensors, **some}, **options, vocab_group=dist.group.WORLD)

    with cuda_ext.batch_invariant():
        whole = rows(150)
        for count in (1, 2, 9, 77):
            for some, every in zip(rows(count), whole, strict=True):
                assert torch.equal(some, every[:count])


@on_ranks(4)
def test_groups_of_some_ranks() -> None:
    """Two replicas, of two shards each."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replica, shard = divmod(dist.get_rank(), 2)
    every = [operands((6,), 10, 4, torch.float64) for _ in range(2)][replica]
    own = part_of(every, slice(0, 4) if shard == 0 else slice(4, 10))
    loss = cuda_ext.linear_cross_entropy(**own, vocab_group=groups[replica])
    expected = cuda_ext.linear_cross_entropy(**every)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value, t["input"])[0] for value, t in ((loss, own), (expected, every))]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_second_derivatives() -> None:
    for options in (
        {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0},
        {"reduction": "none", "return_lse": True, "return_entropy": True},
    ):
        tensors = operands((6,), 9, 4, torch.float64, bias=True)
        tensors["target"] = with_ignored(tensors["target"])
        mine = of_this_rank([4, 5])

        def penalty(tensors: Tensors, **more: Any) -> dict[str, Tensor]:
            """The gradients of a function of the input's gradient, which is the same on all ranks."""
            leaves = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
            out = cuda_ext.linear_cross_entropy(**tensors, **options, **more)  # noqa: B023
            total = sum(o.sin().sum() for o in out) if isinstance(out, tuple) else out.sin()
            (gradient,) = torch.autograd.grad(total, tensors["input"], create_graph=True)
            second = torch.autograd.grad(gradient.cos().sum(), list(leaves.values()))
            return {f"gradient of {name}": value for name, value in zip(leaves, second, strict=True)}

        actual = penalty(part_of(tensors, mine), vocab_group=dist.group.WORLD)
        expected = of_shard(penalty(tensors), mine)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-13, msg=name)


@on_ranks(2)
def test_autocast_and_inference() -> None:
    tensors = operands((5,), 12, 7, bias=True)
    own = part_of(tensors, of_this_rank([5, 7]))
    low = {n: t.detach().bfloat16().requires_grad_() if t.requires_grad else t for n, t in own.items()}
    names = ["input", "linear_weight", "linear_bias"]
    with torch.autocast("cpu", torch.bfloat16):
        out = cuda_ext.linear_cross_entropy(**own, vocab_group=dist.group.WORLD)
    expected = cuda_ext.linear_cross_entropy(**low, vocab_group=dist.group.WORLD)
    assert out.dtype == torch.float32 and torch.equal(out, expected)
    for gradient, wanted in zip(
        torch.autograd.grad(out, [own[n] for n in names]),
        torch.autograd.grad(expected, [low[n] for n in names]),
        strict=True,
    ):
        assert gradient.dtype == torch.float32 and torch.equal(gradient, wanted.float())
    with torch.inference_mode():
        assert torch.equal(cuda_ext.linear_cross_entropy(**low, vocab_group=dist.group.WORLD), expected)


def head(tensors: Tensors, options: dict[str, Any]) -> Tensor:
    """What comes before the loss in a model, and after."""
    x = tensors["input"].sin()
    return 2.0 * cuda_ext.linear_cross_entropy(**{**tensors, "input": x}, vocab_group=dist.group.WORLD, **options)


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2)
def test_compiled(backend: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend=backend)
    tensors = part_of(operands((6,), 11, 5, bias=True), of_this_rank([4, 7]))
    tensors["target"] = with_ignored(tensors["target"])
    results = []
    for function in (compiled, head):
        loss = function(tensors, options)
        leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*results)
    if not options and backend == "aot_eager":  # as on a GPU, where the host does not read targets
        assert compiled({**tensors, "target": torch.full((6,), 11)}, options).isnan()


# DTensors


@on_ranks(2)
def test_a_dtensor_of_a_weight_that_is_split_by_rows() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {**operands((3, 4), 7, 5, torch.float64, bias=True), "weight": torch.rand(7).double()}
    options = {"label_smoothing": 0.1, "z_loss": 0.1}
    leaves = [whole[name] for name in ("input", "linear_weight", "linear_bias")]
    for target in (whole["target"], probabilities((3, 4), 7, torch.float64)):
        expected = cuda_ext.linear_cross_entropy(**{**whole, "target": target}, **options)
        gradients = torch.autograd.grad(expected, leaves)
        of_classes = Shard(2) if target.is_floating_point() else Replicate()
        for x_place, others, target_place in (
            (Replicate(), Shard(0), Replicate()),
            (Shard(1), Replicate(), of_classes),  # sequence parallel
        ):
            places = {"input": x_place, "linear_weight": Shard(0), "linear_bias": others, "weight": others}
            parts = {
                name: distribute_tensor(whole[name].detach(), mesh, [place]).requires_grad_(name != "weight")
                for name, place in places.items()
            }
            parts["target"] = distribute_tensor(target, mesh, [target_place])
            loss = cuda_ext.linear_cross_entropy(**parts, **options)
            assert isinstance(loss, DTensor) and loss.placements == (Replicate(),)
            torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-12, atol=0)
            own = torch.autograd.grad(loss, [parts[name] for name in ("input", "linear_weight", "linear_bias")])
            assert own[1].placements == (Shard(0),)
            for gradient, wanted in zip(own, gradients, strict=True):
                torch.testing.assert_close(gradient.full_tensor(), wanted, rtol=1e-12, atol=1e-14)

    weight = distribute_tensor(whole["linear_weight"].detach(), mesh, [Shard(0)])
    x, target = whole["input"].detach(), whole["target"]
    log_probs, entropies = cuda_ext.linear_log_prob(x, weight, target, return_entropy=True)
    assert type(log_probs) is Tensor
    expected = cuda_ext.linear_log_prob(x, whole["linear_weight"], target, return_entropy=True)
    torch.testing.assert_close((log_probs, entropies), tuple(t.detach() for t in expected), rtol=1e-12, atol=1e-14)
    message = r"^cuda_ext::linear_cross_entropy: expected no vocab_group with a DTensor linear_weight"
    with pytest.raises(RuntimeError, match=message):
        cuda_ext.linear_cross_entropy(x, weight, target, vocab_group=dist.group.WORLD)
    two = distribute_tensor(weight.full_tensor(), init_device_mesh("cpu", (1, 2)), [Replicate(), Shard(0)])
    with pytest.raises(RuntimeError, match=r"device mesh of one dimension, got .*vocab_group=mesh.get_group\(dim\)"):
        cuda_ext.linear_cross_entropy(x, two, target)


# refusals


@on_ranks(2)
def test_refusals_on_all_ranks() -> None:
    """None of them leaves the other rank waiting."""
    rank = dist.get_rank()
    tensors = {n: t.detach() for n, t in part_of(operands((4,), 6, 3, bias=True), of_this_rank([2, 4])).items()}

    def call(op: str = "linear_cross_entropy", **more: Any) -> Any:
        return getattr(cuda_ext, op)(**{**tensors, "vocab_group": dist.group.WORLD, **more})

    prefix = "cuda_ext::linear_cross_entropy: expected "
    some = torch.ones(3 + rank, 3)
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (
            lambda: call(target=torch.tensor([0, 6, 1, 2])),
            IndexError,
            f"{prefix}targets in [0, 6) or ignore_index -100, got 6 at row 1",
        ),
        (
            lambda: call("linear_log_prob", target=torch.tensor([0, 1, 1, -3])),
            IndexError,
            "cuda_ext::linear_log_prob: expected targets in [0, 6) or ignore_index -100, got -3 at row 3",
        ),
        (
            lambda: call(input=some, target=torch.zeros(3 + rank, dtype=torch.int64)),
            RuntimeError,
            f"{prefix}as many rows on all ranks of vocab_group, got [3, 4]",
        ),
        (lambda: call(method="forward"), RuntimeError, f"{prefix}method 'auto' or 'recompute' for reduction 'none', "),
        (lambda: call(vocab_group="world"), RuntimeError, f"{prefix}vocab_group to be a process group that contains"),
        (
            lambda: torch.func.grad(lambda x: call(input=x))(tensors["input"]),
            RuntimeError,
            f"{prefix}no transform of torch.func and no forward mode with vocab_group, got one; use ",
        ),
    ]
    for case, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            case()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"{prefix}no transform"):
        call(linear_weight=forward_ad.make_dual(tensors["linear_weight"], tensors["linear_weight"]))

    one_has_none = part_of(operands((4,), 6, 3), of_this_rank([0, 6]))
    loss = cuda_ext.linear_cross_entropy(**one_has_none, vocab_group=dist.group.WORLD)
    message = f"^{re.escape(prefix)}classes on every rank of vocab_group for derivatives of second order, got"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(loss, one_has_none["input"], create_graph=True)
