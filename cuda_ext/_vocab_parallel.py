"""Losses of a vocabulary that is sharded over ranks by rows of its weight, in rank order.

Each rank reduces the logits of its classes to statistics of each row (`logit_statistics`). One all-gather exchanges
these, 3 floats a row for a loss without further options, and every rank combines them in rank order. An all-reduce of
maxima and then one of sums would send fewer bytes from 3 ranks on, but these are 96 kB for 8192 rows: latency counts,
and one collective has half of it. Also, all ranks get the same bits, and those of a row do not depend on its place in
the message, as they do in a ring.

Backward passes the log-sum-exp of all classes to each rank's kernel, which forms its part of softmax - target as if
there were no other ranks. The gradient of the weight is local; that of the input is a sum over ranks, an all-reduce in
the dtype of the product.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cuda_ext._checks import check
from cuda_ext._collectives import AllGather, AllReduceGradient, gather
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

if TYPE_CHECKING:
    import torch.distributed as dist

F = TypeVar("F", bound=Callable[..., Any])
Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_NOT_HERE = -100  # the target of a row whose class other ranks have


class _Options(NamedTuple):
    scale: float
    softcap: float
    ignore_index: int
    memory_limit: int
    filter_gradients: bool
    entropy: bool


class Vocabulary:
    """All classes are here."""

    own: int  # classes on this rank
    classes: int | Tensor  # of all ranks

    def __init__(self, classes: int) -> None:
        self.own = self.classes = classes

    def share(self, label_smoothing: float) -> float | Tensor:
        """Of each class."""
        return label_smoothing / self.classes if self.classes else 0.0

    def sum(self, value: Tensor) -> Tensor:
        """Over the ranks, without a gradient."""
        return value

    def pick(self, weight: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """The weights of targets; any number where these are not valid."""
        return weight.index_select(0, torch.where(valid, target, 0).clamp(0, max(0, weight.shape[0] - 1)))

    def statistics(self, *logits: Tensor | None, entropy: bool, **options: Any) -> Statistics:
        """`ops.logit_statistics` of all classes."""
        return ops.logit_statistics(*logits, entropy=entropy, **options)


class ShardedVocabulary(Vocabulary):
    """This rank of ``group`` has ``classes`` of the classes, the next rank those that follow.

    The ranks exchange how many they have in each call, because a rank cannot know whether its own number is all that
    changed since the last one; on a GPU the host does not wait for it. On the CPU, ranks that call with different
    numbers of rows all raise, as they do for targets out of range.
    """

    def __init__(self, op: str, group: dist.ProcessGroup, classes: int, target: Tensor, ignore_index: int) -> None:
        self.op, self.own, self.ignore_index = op, classes, ignore_index
        self.rank, self.ranks, self.group_name = group.rank(), group.size(), group.group_name
        rows = target.shape[0]
        own = [torch.full((1,), number, dtype=torch.int64, device=target.device) for number in (classes, rows)]
        numbers = gather(torch.cat(own), self.ranks, self.group_name)
        # Rank r has the classes from bounds[r] up to bounds[r + 1].
        self.bounds = torch.nn.functional.pad(numbers[:, 0].cumsum(0), (1, 0))
        self.classes = self.bounds[-1]
        if not torch.compiler.is_compiling() and type(numbers) is Tensor and numbers.is_cpu:
            every = numbers[:, 1].tolist()
            check(every == [rows] * self.ranks, op, f"expected as many rows on all ranks of vocab_group, got {every}")
            if not target.is_floating_point():
                self._check_targets(target)

    def _check_targets(self, target: Tensor) -> None:
        classes = int(self.classes)
        wrong = ((target < 0) | (target >= classes)) & (target != self.ignore_index)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise IndexError(
                f"{NAMESPACE}::{self.op}: expected targets in [0, {classes}) or ignore_index {self.ignore_index}, got "
                f"{int(target[row])} at row {row}"
            )

    def share(self, label_smoothing: float) -> Tensor:
        assert isinstance(self.classes, Tensor)
        return label_smoothing / self.classes.double()

    def sum(self, value: Tensor) -> Tensor:
        return _total(gather(value.detach(), self.ranks, self.group_name))

    def pick(self, weight: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        here = _local_targets(target, self.bounds, self.rank, self.ignore_index)
        last = torch.where(here == _NOT_HERE, weight.shape[0], here)
        return self.sum(torch.nn.functional.pad(weight, (0, 1)).index_select(0, last))

    def statistics(self, *logits: Tensor | None, entropy: bool, **options: Any) -> Statistics:
        input, weight, bias, target, coefficients = logits
        assert input is not None and weight is not None
        _refuse_transforms(self.op, input, weight, bias)
        input, weight, bias = _as_autocast(input, weight, bias)
        return _ShardedStatistics.apply(
            AllReduceGradient.apply(input, self.group_name),
            weight,
            bias,
            target,
            coefficients,
            self.bounds,
            (self.rank, self.ranks, self.group_name),
            _Options(**options, entropy=entropy),
        )


def vocabulary_of(
    op: str, group: dist.ProcessGroup | None, linear_weight: Tensor, target: Tensor, ignore_index: int
) -> Vocabulary:
    """`target`: (M,) or (M, V)."""
    if group is None:
        return Vocabulary(linear_weight.shape[0])
    if not torch.compiler.is_compiling():
        from torch.distributed import ProcessGroup

        wanted = "expected vocab_group to be a process group that contains this process, or None"
        check(isinstance(group, ProcessGroup), op, f"{wanted}, got {group!r}")
    return ShardedVocabulary(op, group, linear_weight.shape[0], target, ignore_index)


def _refuse_transforms(op: str, *operands: Tensor | None) -> None:
    if torch.compiler.is_compiling():
        return
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    in_forward_mode = any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in operands)
    advice = "use torch.autograd.grad, which also gives second derivatives (create_graph=True)"
    message = f"expected no transform of torch.func and no forward mode with vocab_group, got one; {advice}"
    check(not (transformed or in_forward_mode), op, message)


def _as_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The operands as the op would cast them: the function below must see the cast, to differentiate it."""
    assert tensors[0] is not None
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _local_targets(target: Tensor, bounds: Tensor, rank: int, ignore_index: int) -> Tensor:
    begin, end = bounds[rank], bounds[rank + 1]
    here = (target >= begin) & (target < end) & (target != ignore_index)
    return torch.where(here, target - begin, _NOT_HERE)


def _total(parts: Tensor) -> Tensor:
    """The sum over dim 0 in order; that of `Tensor.sum` may depend on the other dims."""
    return functools.reduce(operator.add, parts.unbind(0))


class _ShardedStatistics(torch.autograd.Function):
    """`logit_statistics` of all classes, from this rank's. Backward gives this rank's part of the input's gradient."""

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor | None,
        coefficients: Tensor | None,
        bounds: Tensor,
        place: tuple[int, int, str],
        options: _Options,
    ) -> Statistics:
        exchange = functools.partial(gather, ranks=place[1], group_name=place[2])
        return _global_statistics(exchange, input, weight, bias, target, coefficients, bounds, place[0], options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Statistics) -> None:
        *tensors, place, options = inputs
        ctx.place, ctx.options = place, options
        lse, _, _, entropy, lse_low = output
        ctx.mark_non_differentiable(lse_low)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, lse, lse_low, entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]
        # Under torch.compile, outputs that were not requested have gradients, too.
        exist = (True, ctx.saved_tensors[3] is not None, ctx.saved_tensors[4] is not None, ctx.options.entropy)
        grads = tuple(grad if exists else None for grad, exists in zip(grads, exist, strict=False))
        # Compiled backward passes are not differentiated again.
        composed = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        form = _composed_gradients if composed else _fused_gradients
        return *form(ctx, wanted, *grads), *(None,) * 5


def _keywords(options: _Options) -> dict[str, Any]:
    """Of the op for targets of this rank."""
    return {
        "scale": options.scale,
        "softcap": options.softcap,
        "ignore_index": _NOT_HERE,
        "memory_limit": options.memory_limit,
        "filter_gradients": options.filter_gradients,
    }


def _global_statistics(
    exchange: Callable[[Tensor], Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    coefficients: Tensor | None,
    bounds: Tensor,
    rank: int,
    options: _Options,
) -> Statistics:
    ignore_index, with_entropy = options.ignore_index, options.entropy
    here = None if target is None else _local_targets(target, bounds, rank, ignore_index)
    lse, nll, dot, entropy, lse_low = ops.logit_statistics(
        input, weight, bias, here, coefficients, **_keywords(options), entropy=with_entropy
    )
    present = [target is not None, coefficients is not None, with_entropy]
    values = [value for value, given in zip((nll, dot, entropy), present, strict=True) if given]
    # (ranks, values, M)
    lses, lows, *rest = exchange(torch.stack([lse, lse_low.detach(), *values])).unbind(1)
    remaining = iter(rest)
    nlls, dots, entropies = (next(remaining) if given else None for given in present)

    # Differences from the largest first: it may be large; or -inf, from which there must be no difference.
    largest = lses.detach().amax(0)
    log_shares = (lses - largest.clamp(min=torch.finfo(largest.dtype).min)) + lows  # of the softmax, times the total
    shares = log_shares.exp()
    total = _total(shares)
    log_total = total.log()
    lse = largest + log_total
    lse_low = ((largest - lse) + log_total).detach().nan_to_num(0.0)
    nll, dot, entropy = (lse.new_empty(0) for _ in range(3))  # absent
    if nlls is not None:
        nll = _nll(nlls, log_shares, log_total, target, bounds, ignore_index)
    if dots is not None:
        dot = _total(dots)
    if entropies is not None:
        of_shards = shares * torch.where(shares > 0, entropies - log_shares, 0.0)
        entropy = _total(of_shards) / total + log_total
    return lse, nll, dot, entropy, lse_low


def _nll(
    nlls: Tensor, log_shares: Tensor, log_total: Tensor, target: Tensor | None, bounds: Tensor, ignore_index: int
) -> Tensor:
    assert target is not None
    valid = target != ignore_index
    has = (target >= bounds[:-1, None]) & (target < bounds[1:, None]) & valid  # (ranks, M)
    # A rank that has no finite logit does not know how it compares with those of others.
    each = torch.where(log_shares == -torch.inf, torch.inf, nlls - log_shares)
    nll = _total(torch.where(has, each, 0.0)) + log_total
    of_wrong_target = torch.where(valid, torch.nan, 0.0)
    return torch.where(has.any(0), nll, of_wrong_target)


def _fused_gradients(
    ctx: Any, wanted: list[bool], lse: Tensor | None, nll: Tensor | None, dot: Tensor | None, entropy: Tensor | None
) -> list[Tensor | None]:
    """By the kernels; the arguments are gradients."""
    input, weight, bias, target, coefficients, bounds, *of_all = ctx.saved_tensors
    ignore_index, with_entropy = ctx.options.ignore_index, ctx.options.entropy
    here = None if target is None else _local_targets(target, bounds, ctx.place[0], ignore_index)
    if nll is not None:
        # The op lets nll = lse - z of the target pass both; where other ranks have the target, only lse.
        elsewhere = torch.where((target != ignore_index) & (here == _NOT_HERE), nll, 0.0)
        lse = elsewhere if lse is None else lse + elsewhere
    gradients = ops.logit_statistics_backward(
        *(lse, nll, dot, entropy, input, weight, bias, here, coefficients),
        *(of_all[0], of_all[1], of_all[2] if with_entropy else None),
        **_keywords(ctx.options),
        output_mask=list(wanted),
    )
    return [gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)]


def _composed_gradients(ctx: Any, wanted: list[bool], *grads: Tensor | None) -> list[Tensor | None]:
    """By differentiable ops."""
    input, weight, bias, target, coefficients, bounds, *_ = ctx.saved_tensors
    counts = bounds.diff().tolist()
    wanted_counts = "expected classes on every rank of vocab_group for derivatives of second order"
    check(0 not in counts, "linear_cross_entropy", f"{wanted_counts}, got {counts}")
    with torch.autocast(input.device.type, enabled=False):
        outputs = _global_statistics(
            lambda part: AllGather.apply(part, *ctx.place),
            *(input, weight, bias, target, coefficients, bounds, ctx.place[0], ctx.options),
        )
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=False) if grad is not None]
    inputs = [t for t, want in zip((input, weight, bias), wanted, strict=True) if want]
    gradients = iter(
        torch.autograd.grad(
            [out for out, _ in pairs], inputs, [grad for _, grad in pairs], create_graph=True, allow_unused=True
        )
    )
    return [next(gradients) if want else None for want in wanted]


# DTensors


def takes_sharded_weight(function: F) -> F:
    """A decorator for losses: a DTensor `linear_weight`, Shard(0) on a mesh of one dimension, stands for its local
    tensor and `vocab_group`. Results are DTensors if `input` is one."""

    @functools.wraps(function)
    def call(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Any:
        if not any(place.is_shard(0) for place in getattr(linear_weight, "placements", ())):
            return function(input, linear_weight, target, **options)
        return _call_on_local_tensors(function, input, linear_weight, target, options)

    return call  # type: ignore[return-value]


def _call_on_local_tensors(function: F, input: Any, weight: Any, target: Any, options: dict[str, Any]) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    op, mesh = function.__name__, weight.device_mesh
    one = f"expected a linear_weight with the placement Shard(0) on a device mesh of one dimension, got {mesh}"
    advice = "pass local tensors (to_local) and the group of that dimension, vocab_group=mesh.get_group(dim)"
    check(mesh.ndim == 1, op, f"{one}; {advice}")
    group = options.get("vocab_group")
    check(group is None, op, f"expected no vocab_group with a DTensor linear_weight, which has its own, got {group!r}")

    def local(tensor: Any, place: Any) -> Any:
        return tensor.redistribute(placements=[place]).to_local() if isinstance(tensor, DTensor) else tensor

    for name in ("linear_bias", "weight"):
        options = {**options, name: local(options.get(name), Shard(0))} if name in options else options
    of_classes = isinstance(target, Tensor) and target.is_floating_point()
    out = function(
        local(input, Replicate()),
        local(weight, Shard(0)),
        local(target, Shard(target.ndim - 1) if of_classes else Replicate()),
        **{**options, "vocab_group": mesh.get_group()},
    )
    if not isinstance(input, DTensor):
        return out
    outputs = [
        DTensor.from_local(each, mesh, [Replicate()], run_check=False)
        for each in (out if isinstance(out, tuple) else (out,))
    ]
    return tuple(outputs) if isinstance(out, tuple) else outputs[0]
