"""The buckets of a module: their memory, and which gradients share one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from cuda_ext import bucket as bucket_ops
from cuda_ext._load import ops
from cuda_ext._timing import is_captured
from cuda_ext.distributed.algorithms import Algorithm, choose_algorithm
from cuda_ext.distributed.bucketing import assignment
from cuda_ext.distributed.bucketing.choice import MOST_BUCKETS, choose
from cuda_ext.distributed.bucketing.links import Link
from cuda_ext.distributed.bucketing.measuring import LARGEST, measure_link
from cuda_ext.distributed.bucketing.simulation import Gradient
from cuda_ext.distributed.bucketing.units import MIB, byte_size
from cuda_ext.distributed.checks import NAME
from cuda_ext.distributed.gradient_bucket import GradientBucket
from cuda_ext.distributed.memory import Arena, elements_needed, layout
from cuda_ext.distributed.reducer import Reducer
from cuda_ext.distributed.sharded import ShardedBucket

logger = logging.getLogger("cuda_ext.distributed")

LARGEST_UNDIVIDED = MIB  # bytes of a module up to which "auto" has one bucket, and measures nothing
MEASURING_SECONDS = 0.5
PASSES_TO_LEARN = 3  # the first passes include one-time work

Hook = Callable[[object, object], None]  # on a node of autograd

_wrapped_parameters: set[int] = set()  # by id(); their wrapper keeps them alive until it removes them


@dataclass(frozen=True)
class Options:
    """The arguments of `BucketedDataParallel` that affect buckets."""

    bucket_bytes: float | None  # None: "auto"
    wire_dtype: torch.dtype | None
    algorithm: str
    error_feedback: bool
    shard_optimizer: bool


class BucketSet:
    """Divides memory into buckets for the trained parameters, and connects them to the reducer and to autograd."""

    def __init__(
        self,
        reducer: Reducer,
        group: dist.ProcessGroup,
        mesh: DeviceMesh | None,
        device: torch.device,
        options: Options,
    ) -> None:
        self.device = device
        self.capacity = assignment.one_bucket("nothing built yet")
        self._reducer, self._group, self._mesh, self._options = reducer, group, mesh, options
        self._attachment = _Attachment()
        self._slots: dict[torch.dtype, bucket_ops.GradientSlots] = {}
        self._algorithm: Algorithm | None = None
        self._link: Link | None = None  # once measured

    def build(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Makes memory, algorithm and buckets for the ``trained`` parameters. A collective."""
        self._attachment.claim(trained)
        self._reducer.looks_for_repeats = True
        wire_dtype = self._options.wire_dtype
        self._names, self._trained = list(trained), list(trained.values())
        self._sizes = [parameter.numel() * (wire_dtype or parameter.dtype).itemsize for parameter in self._trained]
        # Gradients arrive roughly in reverse order of registration; the first passes record the actual order.
        self._order = list(reversed(range(len(self._trained))))
        self._learns_at: int | None = self._reducer.passes + 1
        self._max_buckets = self._most_buckets()
        self._allocate()
        self.capacity = self._first_capacity()
        self._cut(assignment.fill(self._gradients(), self.capacity, self._max_buckets))

    @property
    def _bytes(self) -> int:
        return sum(self._sizes)

    def _gradients(self, ready: Mapping[int, float] | None = None) -> list[Gradient]:
        """The gradients of all trained parameters, ready in ``_order`` unless times are given."""
        ready = ready or {n: float(place) for place, n in enumerate(self._order)}
        last = max(ready.values())
        return [
            Gradient(name, size, ready.get(n, last), str(parameter.dtype))
            for n, (name, size, parameter) in enumerate(zip(self._names, self._sizes, self._trained))
        ]

    def _most_buckets(self) -> int:
        """The number of buckets per dtype that the memory should allow, now and after the order is known."""
        if self._options.bucket_bytes is None:
            return max(16, min(self._bytes // (256 << 10), MOST_BUCKETS))
        capacity = assignment.fixed_capacity(self._options.bucket_bytes)
        return max(16, 2 * len(assignment.fill(self._gradients(), capacity)))

    def _allocate(self) -> None:
        if self._algorithm is not None:
            self._algorithm.close()
        counts: dict[torch.dtype, list[int]] = {}
        for parameter in self._trained:
            counts.setdefault(parameter.dtype, []).append(parameter.numel())
        wire_dtypes = {dtype: self._options.wire_dtype or dtype for dtype in counts}
        sizes = {
            dtype: elements_needed(each, wire_dtypes[dtype], self._group.size(), min(self._max_buckets, len(each)))
            for dtype, each in counts.items()
        }
        self._algorithm, wires = choose_algorithm(
            self._group,
            self._mesh,
            self.device,
            [(sizes[dtype], wire_dtypes[dtype]) for dtype in counts],
            self._options.algorithm,
            narrowed=self._options.wire_dtype is not None,
            sharded=self._options.shard_optimizer,
        )
        self._arenas = {}
        for (dtype, size), wire in zip(sizes.items(), wires):
            options: Any = {"dtype": dtype, "device": self.device}
            self._arenas[dtype] = _Arenas(
                wire=Arena(wire),
                gradients=None if wire.dtype == dtype else Arena(torch.empty(size, **options)),
                values=Arena(torch.zeros(size, **options)) if self._options.shard_optimizer else None,
            )

    def _first_capacity(self) -> assignment.Capacity:
        if self._options.bucket_bytes is not None:
            return assignment.fixed_capacity(self._options.bucket_bytes)
        if self._group.size() == 1 or self._bytes <= LARGEST_UNDIVIDED:
            self._learns_at = None
            what = "one rank" if self._group.size() == 1 else f"no more than {byte_size(LARGEST_UNDIVIDED)}"
            return assignment.one_bucket(f"auto: {what}")
        self._learns_at = self._reducer.passes + PASSES_TO_LEARN
        if self.sharded:  # buckets cannot change later
            return assignment.first_capacity(self._measured_link())
        return assignment.capacity_before_measuring() if self._link is None else assignment.first_capacity(self._link)

    def _measured_link(self) -> Link:
        """Measures the link once, with the memory of buckets. A collective, between two passes."""
        if self._link is None:
            assert self._algorithm is not None
            for bucket in self._reducer.buckets:
                bucket.release_views()
            memory = max((arenas.wire.memory for arenas in self._arenas.values()), key=lambda each: each.nbytes)
            buffer = memory[: LARGEST // memory.itemsize].zero_()  # repeated sums of other values might overflow
            together = self._algorithm.run_together if self._algorithm.groups and len(self._arenas) > 1 else None
            self._link = measure_link(
                self._group, self.device, self._algorithm.run, MEASURING_SECONDS, buffer, together
            ).link
        return self._link

    def _cut(self, division: list[list[int]], transfers: Sequence[int] = ()) -> None:
        """Divides the arenas into these buckets, and connects every parameter to its own.

        transfers: the number of buckets of each transfer, in order; default one each.
        """
        for bucket in self._reducer.buckets:
            bucket.release_views()
        self._attachment.drop_hooks()
        self._reducer.drop_slots()
        for arenas in self._arenas.values():
            arenas.clear()
        buckets = [self._bucket({self._names[n]: self._trained[n] for n in indices}) for indices in division]
        self._division = division
        self._assign_slots(buckets)
        self._reducer.use(buckets, transfers or [1] * len(buckets))
        self._attachment.add_hooks(buckets, self._reducer.gradient_hook)

    def _assign_slots(self, buckets: list[GradientBucket]) -> None:
        """Gives weights gradient slots in their buckets, for our ops to write to ([Note 3] in reducer.py)."""
        for slots in self._slots.values():
            slots.release()
        self._slots = {}
        for dtype, arenas in self._arenas.items():
            parameters: list[nn.Parameter] = []
            views: list[Tensor] = []
            slots = bucket_ops.GradientSlots()
            for bucket in buckets:
                if bucket.gradients.dtype != dtype:
                    continue
                slot_of = {}
                for position, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
                    if parameter.dim() >= 2 and parameter.is_contiguous():
                        slot_of[position] = len(parameters)
                        parameters.append(parameter)
                        views.append(view)
                bucket.use_slots(slots, slot_of)
            slots.assign(parameters, views)
            self._slots[dtype] = slots
            # If `pack` copies gradients to another buffer, it also divides them.
            self._reducer.add_slots(slots, 1.0 if arenas.gradients is not None else 1.0 / self._group.size())

    def _bucket(self, named: dict[str, nn.Parameter]) -> GradientBucket:
        arenas = self._arenas[next(iter(named.values())).dtype]
        places = layout([p.numel() for p in named.values()], arenas.wire.memory.dtype, self._group.size())
        wire = arenas.wire.allocate(places.size)
        assert self._algorithm is not None
        gradients = None if arenas.gradients is None else arenas.gradients.allocate(places.size)
        feedback = self._options.error_feedback and gradients is not None
        if arenas.values is not None:
            values = arenas.values.allocate(places.size)
            return ShardedBucket(named, places, wire, gradients, self._algorithm, feedback, values, self._group)
        return GradientBucket(named, places, wire, gradients, self._algorithm, feedback)

    @property
    def sharded(self) -> bool:
        return self._options.shard_optimizer

    def learn(self) -> None:
        """Once: divides the buckets again, by the order and times of the gradients of one rank. A collective.

        That rank is the first that had gradients, as a rank that has run out of inputs has none.
        ``bucket_cap_mb="auto"`` waits for a pass without one-time work.
        """
        if self._learns_at is None or self.sharded:  # a sharded optimizer's state depends on the division
            return
        auto = self._options.bucket_bytes is None
        self._reducer.times_arrivals = auto and self._reducer.passes == self._learns_at - 1
        if self._reducer.passes < self._learns_at:
            return
        arrivals = self._reducer.arrivals
        source = torch.tensor(self._group.rank() if arrivals.places else self._group.size(), device=self.device)
        dist.all_reduce(source, dist.ReduceOp.MIN, group=self._group)
        if int(source) == self._group.size():  # the pass reached no parameter: learn from the next
            self._learns_at = self._reducer.passes + 1
            self._reducer.times_arrivals = auto
            return
        self._learns_at = None
        places = [self._division[number][position] for number, position in arrivals.places]
        last = dict(zip(places, arrivals.seconds())) if auto else dict.fromkeys(places, 0.0)
        arrived = list(dict.fromkeys(reversed(places)))[::-1]  # in order of their last arrival
        message = [[(n, last[n]) for n in arrived]]
        dist.broadcast_object_list(message, group=self._group, group_src=int(source))
        ready = dict(message[0])
        self._order = [*ready, *(n for n in self._order if n not in ready)]
        division = assignment.fill(self._gradients(), self.capacity, self._max_buckets)
        transfers: Sequence[int] = ()
        if auto:
            choice = choose(self._gradients(ready), self._measured_link(), max(ready.values()))
            if len(choice.buckets) <= self._max_buckets:
                division, transfers = [list(bucket) for bucket in choice.buckets], choice.transfers
                self.capacity = assignment.Capacity(choice.last, choice.largest, choice.reason)
            if self._group.rank() == 0:
                logger.info("%s", self.capacity.reason)
        grouped = any(count > 1 for count in transfers)
        if grouped or [set(indices) for indices in division] != [set(indices) for indices in self._division]:
            self._cut(division, transfers)

    def before_forward(self) -> None:
        if is_captured(self.device) and torch.is_grad_enabled():
            self._attachment.leave_default_stream()
        for bucket in self._reducer.buckets:
            if isinstance(bucket, ShardedBucket):
                bucket.take_back()

    def describe(self) -> str:
        """See `BucketedDataParallel.describe`."""
        buckets, capacity = self._reducer.buckets, self.capacity
        count, size = sum(len(bucket.names) for bucket in buckets), sum(bucket.wire.nbytes for bucket in buckets)
        lines = [
            f"{count} parameters, {_mib(size)} in {len(buckets)} buckets on {self._group.size()} ranks",
            f"capacity {_mib(capacity.other)}, of the last bucket {_mib(capacity.last)} ({capacity.reason})",
        ]
        firsts = {transfer[0] for transfer in self._reducer.transfers}
        for number, bucket in enumerate(buckets):
            dtype, wire = (str(tensor.dtype).removeprefix("torch.") for tensor in (bucket.gradients, bucket.wire))
            lines.append(
                f"{number}: {_mib(bucket.wire.nbytes)}, {dtype if wire == dtype else f'{dtype} as {wire}'} on "
                f"{bucket.wire.device}, {len(bucket.names)} parameters from {bucket.names[0]} to {bucket.names[-1]}"
                + (f", sent with bucket {number - 1}" if number not in firsts else "")
            )
        return "\n".join(lines)

    def release(self) -> None:
        """Removes everything that was attached to the module."""
        self._attachment.release()
        self._reducer.release()
        for slots in self._slots.values():
            slots.release()
        if self._algorithm is not None:
            self._algorithm.close()


@dataclass
class _Arenas:
    """The memory of the gradients of one dtype."""

    wire: Arena
    gradients: Arena | None  # if the wire has another dtype
    values: Arena | None  # the parameters themselves, if the optimizer is sharded

    def clear(self) -> None:
        for arena in filter(None, (self.wire, self.gradients, self.values)):
            arena.clear()


class _JoinNodes(torch.autograd.Function):
    """A node whose inputs are the AccumulateGrad nodes of all parameters, to find these nodes: ten times as fast as
    torch.autograd.graph.get_gradient_edge for each."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return parameters[0].new_empty(0)


class _Attachment:
    """A wrapper's exclusive claim on its parameters, and its hooks on their gradients."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []
        self._nodes: list[Node] = []  # a parameter does not keep its AccumulateGrad node alive
        self._hooked: list[tuple[str, nn.Parameter, Hook]] = []

    def claim(self, named: Mapping[str, nn.Parameter]) -> None:
        self.release()
        for name, parameter in named.items():
            if id(parameter) in _wrapped_parameters:
                raise ValueError(
                    f"{NAME}: expected a module that is not wrapped yet, got parameter {name}, whose gradient another "
                    "wrapper averages; wrap a module once"
                )
        self._parameters = list(named.values())
        _wrapped_parameters.update(map(id, self._parameters))

    def add_hooks(self, buckets: Sequence[GradientBucket], make: Callable[[int, int], Hook]) -> None:
        """Registers ``make(bucket, position)`` for each parameter: it runs after every backward pass that reaches the
        parameter, even with an undefined gradient."""
        self._hooked = [
            (name, parameter, make(number, position))
            for number, bucket in enumerate(buckets)
            for position, (name, parameter) in enumerate(zip(bucket.names, bucket.parameters, strict=True))
        ]
        self._register()

    @torch.enable_grad()
    def _register(self) -> None:
        joined = _JoinNodes.apply(*(parameter for _, parameter, _ in self._hooked))  # keeps the nodes alive
        self._nodes = [node for node, _ in joined.grad_fn.next_functions]
        self._hooks = [node.register_hook(hook) for node, (*_, hook) in zip(self._nodes, self._hooked, strict=True)]

    def _unregister(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()

    def leave_default_stream(self) -> None:
        """Makes the nodes again in the current stream, which is captured, if they belong to the default stream.

        Autograd runs a node in the stream in which it was made, and a capture cannot wait for the default stream.
        Raises RuntimeError, with a parameter, if something else keeps its node alive.
        """
        parameters = [parameter for _, parameter, _ in self._hooked]
        if ops._accumulated_in_default_stream(parameters) < 0:
            return
        self._unregister()
        self._register()
        found = ops._accumulated_in_default_stream(parameters)
        if found >= 0:
            raise RuntimeError(
                f"{NAME}: expected no earlier graph of autograd to be alive when a stream is captured, got one in the "
                f"default stream, which cannot be captured, with parameter {self._hooked[found][0]}; delete the loss "
                "and outputs of earlier steps, or make these steps in the stream of the capture or another side stream"
            )

    def drop_hooks(self) -> None:
        self._unregister()
        self._hooked = []

    def release(self) -> None:
        self.drop_hooks()
        _wrapped_parameters.difference_update(map(id, self._parameters))
        self._parameters = []


def _mib(size: float) -> str:
    return f"{size / MIB:.3g} MiB"
