"""The wrapper of a module: its gradients are averaged over the ranks in buckets, while backward runs."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from cuda_ext.distributed.algorithms import check_algorithm
from cuda_ext.distributed.bucket_set import BucketSet, Options
from cuda_ext.distributed.bucketing.assignment import parse_bucket_cap_mb
from cuda_ext.distributed.checks import (
    NAME,
    WrappedModule,
    check_compiler,
    check_ranks_agree,
    check_trainable,
    check_wire_dtype,
)
from cuda_ext.distributed.collectives import broadcast_coalesced, start_together
from cuda_ext.distributed.ddp_arguments import (
    IGNORED,
    Device,
    check_ddp_arguments,
    ignore,
    missing_member,
    move_inputs,
    wire_dtype_of_hook,
)
from cuda_ext.distributed.module_wrapper import ModuleWrapper
from cuda_ext.distributed.process_groups import resolve_group, resolve_mesh
from cuda_ext.distributed.reducer import Reducer
from cuda_ext.distributed.sharded import (
    ShardedBucket,
    asked_for_optimizers,
    gather_state,
    load_state,
    make_optimizer,
    refuse_other_optimizers,
)
from cuda_ext.distributed.trace import Trace


class BucketedDataParallel(ModuleWrapper, Joinable):
    """Trains a module on every rank of a process group, with its gradients averaged over the ranks.

    Each rank builds the same module and wraps it; all ranks receive the parameters and buffers of the first one. When
    ``loss.backward()`` returns, ``parameter.grad`` is the mean over the ranks. Gradients are sent in flat buckets (Li
    et al., PyTorch Distributed, VLDB 2020), whose memory is allocated once and which are filled in the order in which
    gradients arrive. The GEMM that computes the gradient of a weight of `cuda_ext.nn.Linear`, `GatedMLP` and their ops
    writes it directly to its bucket, divided by the number of ranks (see `cuda_ext.bucket.GradientSlots`);
    `cuda_ext.bucket.pack` copies other gradients when all of a bucket are ready, with division and cast. The sums over
    the ranks run during backward, from the first step. ``parameter.grad`` becomes a view of the bucket, or of a second
    buffer that `cuda_ext.bucket.unpack` fills if ``wire_dtype`` differs; it is valid until the next backward pass.

    Args:
        module: at least one parameter requires grad; float32, float16, bfloat16 and float64 may be mixed. All trained
            parameters are on one device.
        device_ids: None, the default, or a list of the one device of the trained parameters, as torch.device, name or
            number of a GPU: forward moves its inputs there.
        output_device: None, the default, or the same device; outputs are not moved.
        broadcast_buffers: whether all ranks receive the buffers of the first one before each forward pass that trains
            (in training mode, with gradients enabled, outside `no_sync`); default True.
        init_sync: whether all ranks receive the first one's parameters and buffers; default True. With False the ranks
            still compare names, shapes and options, since they share buckets.
        process_group: default the default group; any backend of torch.distributed that supports the parameters'
            device. A `torch.distributed.device_mesh.DeviceMesh` of one dimension means its group; with two dimensions,
            (nodes, ranks per node), gradients are summed inside each node first and then across nodes, so that a rank
            sends only its part over the network.
        device_mesh: such a mesh, instead of ``process_group``; default None.
        bucket_cap_mb: capacity of a bucket in MiB. ``"auto"``, the default, or None records in the third pass when
            gradients arrive, and measures the link for half a second before the fourth; a cost model then divides the
            gradients into buckets, and the first rank logs the result at level INFO (docs/buckets.md). Modules up to
            1 MiB have one bucket. With ``shard_optimizer`` the half second is part of wrapping.
        static_graph: the promise that every pass computes as many gradients of each parameter as the first one;
            default False. It only matters for parameters that several re-entrant checkpoints share: their bucket is
            sent with the last of these gradients, not at the end of backward.
        wire_dtype: the dtype in which gradients are sent; default the parameters' own. bfloat16 halves the bytes of
            float32.
        algorithm: how buckets are summed. ``"all_reduce"``: the backend's all-reduce, in ``wire_dtype``. ``"float32"``:
            an all-to-all, a sum in float32 that is rounded once, and an all-gather. ``"symmetric"``: loads and stores
            in memory that the ranks of one host share, summed in float32. ``"auto"``, the default: on CPUs
            ``"symmetric"`` if the ranks share memory, else ``"float32"``; both add in the order of the ranks, so
            results do not depend on the buckets. On GPUs ``"float32"`` for a 16-bit ``wire_dtype`` on more than two
            ranks, else ``"all_reduce"``.
        error_feedback: whether the rounding error of a gradient in ``wire_dtype`` is added to the gradient of the next
            step (Karimireddy et al., arXiv 1901.09847); default False. The rounding error of the sum is not.
        shard_optimizer: whether each rank only gets its part of the averages, for an optimizer that updates this part
            (ZeRO-1, Rajbhandari et al., arXiv 1910.02054), see `sharded_optimizer`; default False. Parameters move to
            memory of the wrapper.

    The other arguments are DistributedDataParallel's. ``dim``, ``find_unused_parameters``, ``check_reduction``,
    ``gradient_as_bucket_view``, ``delay_all_reduce_named_params``, ``param_to_hook_all_reduce``,
    ``skip_all_reduce_unused_params`` and ``batched_grad_copy`` have no effect, as what they ask for holds anyway
    (docs/distributed.md); ``mixed_precision`` and ``bucket_cap_mb_list`` are refused. Defaults are torch's, but for
    ``gradient_as_bucket_view=True``.

    Ranks that do not use a parameter contribute zeros, without any option, and even if they use no parameter, as long
    as their loss depends on an output of the module. A parameter that no rank uses keeps ``grad=None``; on a GPU its
    gradient is zero until an optimizer of torch.optim steps. If some ranks run backward on the output of a forward pass
    in training mode and others do not, all ranks get a RuntimeError (not on GPUs). Earlier gradients (from `no_sync`,
    or not zeroed) are part of the average. Parameters may be frozen and unfrozen between steps, the same ones on all
    ranks; otherwise all ranks get a RuntimeError. For uneven numbers of batches use
    `torch.distributed.algorithms.join.Join`. Attributes and the state dict are those of ``module``, which is also
    available as ``.module``. On GPUs, `close` it before the process group is destroyed.

    On CPUs, if a rank leaves a backward pass by an exception, the others get a RuntimeError from theirs when that rank
    calls forward again; the gradients of that step are dropped on all ranks (``grad=None``) and training can continue.
    If a rank dies, hangs or is disconnected, the others get a RuntimeError within the timeout of the group, with the
    status of every rank; gradients are dropped, and every later step raises it again. On GPUs NCCL ends the process at
    its timeout; at half of it a warning in the log of ``cuda_ext.distributed`` has the status of every rank.

    The positional arguments and `no_sync`, `join`, `register_comm_hook`, `will_sync_module_buffers` and
    `require_backward_grad_sync` are those of DistributedDataParallel; a member that this class lacks raises an
    AttributeError with what to use instead. `copy.deepcopy`, pickle and `torch.save` copy the module and the arguments.
    A copy makes its buckets in its first forward pass that trains, on all ranks; until then it is only the module.
    If the first pass contains functions of autograd written in Python, such as re-entrant checkpoints, nothing is sent
    before its end, and the gradients of each parameter are counted.

    Raises RuntimeError if no process group is initialised or the ranks disagree; from forward if a parameter was
    replaced, added or converted since wrapping, if a buffer was removed, and under compiled autograd; if a module or
    parameter is assigned to the wrapper; if it is pickled with another group than the default; from backward if a
    parameter gets more gradients than in the first pass; and from the step of an ordinary optimizer with
    ``shard_optimizer``. ValueError for a wrong argument and for a module with nothing to train, already wrapped, on
    several devices, or on meta; and from forward if an optimizer or a hook uses gradients before they are averaged.
    TypeError for a parameter of another dtype, and from backward for a sparse gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        bucket_cap_mb: float | str | None = "auto",
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: object = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        *,
        wire_dtype: torch.dtype | None = None,
        algorithm: str = "auto",
        error_feedback: bool = False,
        shard_optimizer: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if process_group is not None and device_mesh is not None:
            raise ValueError(f"{NAME}: expected process_group or device_mesh, got both; a mesh has its group")
        place = process_group if device_mesh is None else device_mesh
        self._given: dict[str, Any] = {  # attributes, as of torch's wrapper, unless the module has its own of the name
            "device_ids": device_ids,
            "output_device": output_device,
            "dim": dim,
            "init_sync": init_sync,
            "bucket_cap_mb": "auto" if bucket_cap_mb is None else bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "bucket_cap_mb_list": bucket_cap_mb_list,
            "batched_grad_copy": batched_grad_copy,
            "wire_dtype": wire_dtype,
            "algorithm": algorithm,
            "error_feedback": error_feedback,
            "shard_optimizer": shard_optimizer,
        }
        self._mesh = place if isinstance(place, DeviceMesh) else None
        group = resolve_group(NAME, resolve_mesh(NAME, place) if isinstance(place, DeviceMesh) else place)
        self._group = None if group is dist.group.WORLD else group
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.parameters_to_ignore = {name.removeprefix(".") for name in getattr(module, IGNORED, ())}
        self._in_join = self._is_closed = False
        self._parts: _Parts | None = None
        self._connect()

    def _connect(self) -> _Parts:
        """Builds the buckets, and gives all ranks the first one's parameters and buffers. A collective."""
        group, given = self.process_group, self._given
        agreed = "bucket_cap_mb", "wire_dtype", "algorithm", "error_feedback", "shard_optimizer", "init_sync"
        self._agreed = ", ".join(f"{name}={given[name]!r}" for name in agreed)
        self._agreed += f", broadcast_buffers={self.broadcast_buffers}"
        parameters, buffers = self._shared()
        check_ranks_agree(parameters, buffers, self._agreed, group)
        check_wire_dtype(NAME, given["wire_dtype"])
        bucket_bytes = parse_bucket_cap_mb(NAME, given["bucket_cap_mb"])
        check_algorithm(given["algorithm"])
        if given["error_feedback"] and given["wire_dtype"] is None:
            raise ValueError(f"{NAME}: expected a wire_dtype for error_feedback=True, got None; nothing is rounded")
        trained = check_trainable(parameters, buffers)
        device = next(iter(trained.values())).device
        check_ddp_arguments(given, device)

        reducer = Reducer(group, device)
        reducer.static_graph = given["static_graph"]
        rest = (given[name] for name in ("wire_dtype", "algorithm", "error_feedback", "shard_optimizer"))
        options = Options(bucket_bytes, *rest)
        bucket_set = BucketSet(reducer, group, self._mesh, device, options)
        weakref.finalize(self, reducer.watch.stop)
        # Also at exit, unlike other finalizers: after that, destructors run in any order.
        release = weakref.finalize(self, bucket_set.release)
        bucket_set.build(trained)
        if options.shard_optimizer:
            weakref.finalize(self, refuse_other_optimizers(trained).remove).atexit = False
        if given["init_sync"]:
            broadcast_coalesced([*parameters.values(), *buffers.values()], group)
        self._parts = _Parts(group, WrappedModule(self.module, self.parameters_to_ignore), reducer, bucket_set, release)
        return self._parts

    @property
    def _wrapped(self) -> WrappedModule:
        return (self._parts or self._connect()).wrapped

    @property
    def _reducer(self) -> Reducer:
        return (self._parts or self._connect()).reducer

    @property
    def _bucket_set(self) -> BucketSet:
        return (self._parts or self._connect()).bucket_set

    @property
    def process_group(self) -> dist.ProcessGroup:
        return resolve_group(NAME, self._group) if self._parts is None else self._parts.group

    def _shared(self) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """The parameters and buffers of the module that are not ignored."""
        parameters, buffers = self.module.named_parameters(), self.module.named_buffers()
        return (
            {name: parameter for name, parameter in parameters if name not in self.parameters_to_ignore},
            {name: buffer for name, buffer in buffers if name not in self.parameters_to_ignore},
        )

    # Copies: the module and the arguments. A copy connects when it first trains, as wrapping is a collective.

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None or self._mesh is not None:
            raise RuntimeError(
                f"{NAME}: expected the default process group to pickle the wrapper, got another one, which cannot be "
                "saved; save the module, torch.save(model.module, path), and wrap it again"
            )
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": None, "_in_join": False, "_is_closed": False}

    def __deepcopy__(self, memo: dict[int, Any]) -> BucketedDataParallel:
        memo.update({id(shared): shared for shared in (self._group, self._mesh) if shared is not None})
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self._state(), memo))
        return twin

    def _adapt(self) -> None:
        """Rebuilds the buckets if parameters were frozen or unfrozen."""
        changed = self._wrapped.trained_changed()
        if not changed:
            return
        if not self._reducer.announce_change():
            raise RuntimeError(
                f"{NAME}: expected the same parameters to be frozen or unfrozen on all ranks, got "
                f"{', '.join(changed[:3])} {f'and {len(changed) - 3} more ' if len(changed) > 3 else ''}on rank "
                f"{self.process_group.rank()} and not on all others"
            )
        if self._bucket_set.sharded:
            raise RuntimeError(
                f"{NAME}: expected the same parameters to require grad as when wrapped, as shard_optimizer=True "
                "has distributed them, got others; wrap the module again"
            )
        parameters, buffers = self._shared()
        check_ranks_agree(parameters, buffers, self._agreed, self.process_group)
        self._bucket_set.build(check_trainable(parameters, buffers))
        self._wrapped.accept_trained()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_closed:
            raise RuntimeError(f"{NAME}: expected a wrapper in use, got one after close(); wrap the module again")
        if self._given["device_ids"]:
            args, kwargs = move_inputs((args, kwargs), self.join_device)
        if self._parts is None and not self._trains():
            return self.module(*args, **kwargs)
        self._reducer.recover()
        self._wrapped.check_unchanged()
        self._bucket_set.before_forward()
        synchronizes = self._reducer.enabled and torch.is_grad_enabled()
        if synchronizes:
            check_compiler()
            if self._uneven and self._bucket_set.sharded:
                raise RuntimeError(
                    f"{NAME}: expected shard_optimizer=False inside Join, got True, but a rank that has run out of "
                    "inputs would no longer update its part of the parameters; give all ranks the same number of inputs"
                )
            Join.notify_join_context(self)
            self._before_pass()
            in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint recomputes the forward pass
            output_hook = self._reducer.output_hook(trains=self.training and not in_backward)
        output = self.module(*args, **kwargs)
        if synchronizes:
            outputs: list[Tensor] = []
            for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(output_hook)
                    outputs.append(leaf)
            if self._reducer.looks_for_repeats:
                self._reducer.look_for_repeats(outputs)
        return output

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._shared()[0].values())

    def _before_pass(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint recomputes the forward pass
            division = f"the division into buckets after backward pass {self._reducer.passes}"
            with self._reducer.collective(division, completes=False):  # usually nothing
                self._bucket_set.learn()
            if self.training and self.broadcast_buffers and (buffers := self._wrapped.buffers()):
                if changed := self._wrapped.resized_buffers(buffers):
                    with self._reducer.collective("the comparison of the sizes of buffers", completes=False):
                        self._wrapped.compare_sizes(changed, self._reducer.watch, self._reducer.passes + 1)
                    self._wrapped.accept_sizes(buffers)
                with self._reducer.collective(f"the broadcast of buffers before pass {self._reducer.passes + 1}"):
                    broadcast_coalesced(buffers, self.process_group)
            self._adapt()  # last, as a rank without a change proceeds to the sums of backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate the gradients of this rank, over several batches.

        The next one outside averages the accumulated gradients, also of parameters that it does not reach itself.
        """
        before, self._reducer.enabled = self._reducer.enabled, False
        try:
            yield
        finally:
            self._reducer.enabled = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scales the gradients by ``min(1, max_norm / (norm + 1e-6))`` in place; returns their 2-norm before that.

        max_norm: 0 or more; infinity to ask for the norm alone.

        As `torch.nn.utils.clip_grad_norm_`, on flat buffers. All ranks must call it. If ``wire_dtype`` is not the
        parameters' own, `unpack` has computed the norm, and in shared memory the sum has; otherwise each rank reads
        1 / world size of the averages, and two numbers are summed over the ranks. Gradients that were written since the
        backward pass are read in full (but not those written through ``.data``, which PyTorch does not count), as are
        all gradients inside `torch.distributed.algorithms.join.Join`. Ignored parameters are left out. Scaling is one
        pass over each buffer, skipped on a CPU if nothing is clipped. The norm is the same on every rank: 0-d, float32
        (float64 if a parameter is).

        Raises RuntimeError, the gradients untouched, if the norm is infinite or NaN and ``error_if_nonfinite``; default
        False; ValueError for another ``max_norm``.
        """
        total_norm = self._reducer.stats(whole=self._uneven)[0].sqrt()
        max_norm = float(max_norm)
        if not max_norm >= 0.0:  # after the collective, which the other ranks wait for
            raise ValueError(f"{NAME}.clip_grad_norm_: expected max_norm to be 0 or more, got {max_norm}")
        if error_if_nonfinite and not total_norm.isfinite():
            raise RuntimeError(
                f"{NAME}.clip_grad_norm_: expected gradients of finite norm, got {total_norm.item()}; skip this step, "
                "or pass error_if_nonfinite=False"
            )
        factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
        if factor.is_cpu and factor == 1.0:
            return total_norm
        self.scale_gradients_(factor)
        return total_norm

    @torch.no_grad()
    def scale_gradients_(self, factor: Tensor) -> None:
        """Multiplies all gradients by ``factor``, 0-d, the same on every rank: one pass over each flat buffer.

        Known norms are scaled, too, so `clip_grad_norm_` need not read the gradients afterwards.
        """
        for bucket in self._reducer.buckets:
            bucket.scale(factor)

    @torch.no_grad()
    def found_nonfinite(self) -> Tensor:
        """Whether a gradient contains an infinity or a NaN: 0-d bool, from the statistics that `clip_grad_norm_` uses.

        All ranks must call it.
        """
        return self._reducer.stats(whole=self._uneven)[1] != 0.0

    def collective(self, what: str) -> AbstractContextManager[None]:
        """For your own collectives: if one fails inside, its error has as much information as the wrapper's errors. ::

            with model.collective("the mean of the loss"):
                dist.all_reduce(loss)

        what: completes "expected 4 ranks to take part in ...". A RuntimeError inside becomes one that says this, with
        the status of every other rank; the errors of ranks that wait for this one say so, too. The group cannot be used
        afterwards, as after any failed collective, so the gradients are dropped.
        """
        return self._reducer.collective(what)

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Records when each bucket is packed, sent and ready on this rank, in the backward passes inside::

            with model.trace() as trace:
                loss_of(model(batch)).backward()
            trace.save("step.json")  # for chrome://tracing or Perfetto
            trace.plot("step.png")

        See `cuda_ext.distributed.trace.Trace`.
        """
        trace = Trace(self.process_group.rank(), self._bucket_set.device)
        before, self._reducer.trace = self._reducer.trace, trace
        try:
            yield trace
        finally:
            self._reducer.trace = before

    # Sharded optimizers.

    def named_shards(self) -> Iterator[tuple[str, nn.Parameter]]:
        """With ``shard_optimizer=True``: this rank's flat pieces of the parameters, by the parameters' names.

        They share the parameters' memory and suit any elementwise optimizer, such as SGD and Adam. After backward their
        ``grad`` is the average, and the ``grad`` of the parameters is None. After the step of the optimizer,
        `gather_parameters` distributes the updated pieces; `sharded_optimizer` does both. A rank may lack some names.
        """
        for bucket in self._reducer.buckets:
            if not isinstance(bucket, ShardedBucket):
                raise RuntimeError(
                    f"{NAME}.named_shards: expected shard_optimizer=True, got False; pass it when wrapping"
                )
            yield from bucket.shards.items()

    def gather_parameters(self) -> None:
        """Distributes the updated pieces of all ranks to every rank: one all-gather per bucket, in place.

        Over NCCL they are one launch.
        """
        buckets = [bucket for bucket in self._reducer.buckets if isinstance(bucket, ShardedBucket)]
        gathers = [bucket.gather for bucket in buckets]
        with self._reducer.collective(f"the gathering of parameters after backward pass {self._reducer.passes}"):
            for work in start_together(self.process_group, self._bucket_set.device, gathers):
                work.wait()
        for bucket in buckets:
            bucket.gathered()

    def sharded_optimizer(
        self, optimizer: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **defaults: Any
    ) -> torch.optim.Optimizer:
        """``optimizer(params, **defaults)`` for this rank's pieces; its step ends with `gather_parameters` (ZeRO-1).

        params: parameters of the module, or groups of them as for `torch.optim.Optimizer`; default all trained ones.
        optimizer: an elementwise optimizer's class, such as SGD, Adam and AdamW; LARS or Muon would see pieces. Its
        state dict has this rank's pieces; `optimizer_state_dict` returns the whole state.
        Raises ValueError for a parameter of another module.
        """
        made = make_optimizer(optimizer, self._shared()[0], dict(self.named_shards()), params, defaults)
        weak_self = weakref.ref(self)

        def gather(*_: object) -> None:
            model = weak_self()
            if model is not None:
                model.gather_parameters()

        made.register_step_post_hook(gather)
        return made

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state of an optimizer from `sharded_optimizer`, on every rank; all ranks must call it.

        The format is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` for an unsharded
        optimizer, so each can load what the other saved: ``{"state": {name: {"exp_avg": tensor of the parameter's
        shape, ...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}``. It needs memory for the whole state.
        Raises ValueError for another optimizer.
        """
        return gather_state(optimizer, dict(self.named_parameters()), dict(self.named_shards()), self.process_group)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Loads this rank's pieces of a whole state into an optimizer from `sharded_optimizer`.

        state_dict: from `optimizer_state_dict` on any number of ranks, or from `get_optimizer_state_dict` of
        torch.distributed.checkpoint for an unsharded optimizer with the same groups. Raises ValueError for others.
        """
        load_state(optimizer, state_dict, dict(self.named_parameters()), dict(self.named_shards()))

    # Members of DistributedDataParallel.

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            given = self.__dict__.get("_given", {})
            if name in given:
                return given[name]
            if name == "device" and "_parts" in self.__dict__:
                return self.join_device
            if name == "device_mesh" and self.__dict__.get("_mesh") is not None:
                return self._mesh
            raise missing_member(name) or error from None

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward averages: False inside `no_sync`. Settable, as that of torch's wrapper."""
        return self._parts is None or self._parts.reducer.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self._reducer.enabled = enabled

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass that trains broadcasts buffers."""
        return self.require_backward_grad_sync and self.broadcast_buffers and bool(self._shared()[1])

    def _set_static_graph(self) -> None:
        """``static_graph=True`` after wrapping, before the first backward pass."""
        self._given["static_graph"] = True
        if self._parts is not None:
            self._parts.reducer.static_graph = True

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Before training, for torch's hooks that choose the dtype of transfers: the same as ``wire_dtype``.

        hook: ``allreduce_hook``, ``fp16_compress_hook`` or ``bf16_compress_hook`` of
        `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`, or `cuda_ext.distributed.allreduce_hook`. It is not
        called: ``algorithm`` is what sums. state: what they need with torch's wrapper. Builds the buckets again; all
        ranks must call it. Raises ValueError for another hook or group, RuntimeError after the first backward pass.
        """
        wire_dtype = wire_dtype_of_hook(hook, state, self.process_group)
        if self._reducer.passes:
            raise RuntimeError(
                f"{NAME}.register_comm_hook: expected a call before the first backward pass, got one after "
                f"{self._reducer.passes}; pass wire_dtype={wire_dtype} when wrapping"
            )
        self._given["wire_dtype"] = wire_dtype
        self._disconnect()
        self._connect()

    def _remove_autograd_hooks(self) -> None:
        self.close()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Sequence[str]) -> None:
        """Before wrapping: excludes these parameters and buffers of ``module``, as `named_parameters` names them."""
        ignore(module, names)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """``Join([self], enable, throw_on_early_termination)``; see `join_hook`."""
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    # Uneven inputs: the interface of torch.distributed.algorithms.join.Joinable.

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``with Join([model]):``: a rank without inputs takes part in the averages of the others, with zeros.

        Averages still divide by the number of all ranks. Raises ValueError for ``divide_by_initial_world_size=False``:
        `pack` divides before it is known which ranks have run out of inputs.
        """
        if not kwargs.get("divide_by_initial_world_size", True):
            raise ValueError(f"{NAME}.join_hook: expected divide_by_initial_world_size=True, got False; scale the loss")
        if self._parts is None:  # before a rank may run out of inputs
            self._connect()
        self._in_join = True
        return _JoinHook(self)

    @property
    def _uneven(self) -> bool:
        """Whether a rank may have run out of inputs: inside an enabled Join."""
        return self._in_join and self._join_config.enable

    @property
    def join_device(self) -> torch.device:
        if self._parts is None:
            return next(self.module.parameters()).device
        return self._parts.bucket_set.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def close(self) -> None:
        """Ends the wrapper; gradients and parameters stay, and the module can be wrapped again.

        On GPUs call it on all ranks before `torch.distributed.destroy_process_group`: it waits for the device and
        removes the registration of buckets with NCCL. On CPUs it is optional. Further calls do nothing; forward raises
        RuntimeError.
        """
        self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        if self._parts is not None:
            self._parts.reducer.watch.stop()
            if self.join_device.type == "cuda":
                torch.cuda.synchronize(self.join_device)
            self._parts.release()

    def describe(self) -> str:
        """The reason for the bucket sizes, and the buckets in the order of sending, one per line."""
        return "no buckets: a copy that has not trained" if self._parts is None else self._bucket_set.describe()

    def _fqn_modifiers(self) -> dict[str, str]:
        """For `torch.distributed.checkpoint.state_dict`: ``module`` is not part of the names."""
        if self._given["shard_optimizer"] and asked_for_optimizers():
            raise RuntimeError(
                f"{NAME}: expected model.optimizer_state_dict(optimizer) or model.load_optimizer_state_dict(optimizer, "
                "state_dict) with shard_optimizer=True, got a call of torch.distributed.checkpoint.state_dict with an "
                "optimizer, which does not support shards; get_model_state_dict and set_model_state_dict work"
            )
        inner = self.module
        return dict.fromkeys([*inner._modules, *inner._parameters, *inner._buffers], "module")


class _Parts(NamedTuple):
    """What connects a module to its ranks."""

    group: dist.ProcessGroup
    wrapped: WrappedModule
    reducer: Reducer
    bucket_set: BucketSet
    release: weakref.finalize[Any, Any]


class _JoinHook(JoinHook):
    def __init__(self, model: BucketedDataParallel) -> None:
        self._model = model

    def main_hook(self) -> None:
        """Takes part in the collectives of a step of the other ranks."""
        self._model._before_pass()
        self._model._reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks receive the parameters and buffers of a rank that ran to the end."""
        model = self._model
        model._in_join = False
        group = model.process_group
        last = torch.tensor(group.rank() if is_last_joiner else -1, device=model.join_device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
        parameters, buffers = model._shared()
        check_ranks_agree(parameters, buffers, model._agreed, group)
        broadcast_coalesced([*parameters.values(), *buffers.values()], group, int(last))
