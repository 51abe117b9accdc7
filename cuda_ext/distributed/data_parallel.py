"""Data parallel training: the gradients of all ranks averaged in buckets while backward still runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from cuda_ext.distributed import plan
from cuda_ext.distributed.collectives import broadcast_coalesced, check_wire_dtype, resolve_group
from cuda_ext.distributed.gradient_bucket import GradientBucket
from cuda_ext.distributed.plan import NAME
from cuda_ext.distributed.reducer import Reducer
from cuda_ext.distributed.wrapped_module import WrappedModule, check_ranks_agree, check_trainable

_wrapped_parameters = WeakTensorKeyDictionary()  # as a set


class BucketedDataParallel(nn.Module):
    """Trains a module on every rank of a process group, with its gradients averaged over the ranks.

    Each rank builds the same module and wraps it; parameters and buffers of the first rank go to all. When
    ``loss.backward()`` returns, ``parameter.grad`` is the mean over the ranks. Gradients travel in flat buckets, in the
    reverse order of the parameters (Li et al., PyTorch Distributed, VLDB 2020): once all gradients of a bucket are
    there, `cuda_ext.bucket.pack` writes them into its buffer, divided by the number of ranks and cast, and one
    asynchronous all-reduce sums it while backward goes on. ``parameter.grad`` becomes a view of that buffer, or of a
    second one that `cuda_ext.bucket.unpack` fills where ``wire_dtype`` differs; nothing is copied tensor by tensor. The
    view holds until the next backward pass.

    Args:
        module: at least one parameter requires grad; float32, float16, bfloat16 and float64 may be mixed.
        process_group: default the default group; any backend of torch.distributed that serves the parameters' devices.
        bucket_mb: capacity of a bucket in MiB; ``"auto"``, the default, takes it from a cost model, see `describe`.
        wire_dtype: in which gradients travel and are summed; default that of the parameters. bfloat16 halves the bytes
            of float32, and rounds each sum to 8 bits.
        broadcast_buffers: whether the buffers of the first rank go to all before each forward pass that trains (in
            training mode, with gradients enabled, outside `no_sync`); default True.

    A parameter that some ranks do not use needs no flag: they contribute zeros. One that no rank uses keeps
    ``grad=None``. Gradients from before (from `no_sync`, or not zeroed) are part of the average. Attributes and the
    state dict are those of ``module``, which is also there as ``.module``.

    If a rank leaves a backward pass by an exception, the others get a RuntimeError from theirs as soon as that rank
    calls forward again; the gradients of that step are dropped everywhere (``grad=None``) and training can go on.

    Raises RuntimeError if no process group is initialised or the ranks disagree, and from forward if a parameter was
    changed, replaced or added since; ValueError for a wrong ``bucket_mb`` or ``wire_dtype`` and for a module with
    nothing to train or wrapped already; TypeError for a parameter of another dtype, and from backward for a sparse
    gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_mb: float | str = "auto",
        wire_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        group = resolve_group(NAME, process_group)
        check_ranks_agree(module, f"{bucket_mb=}, {wire_dtype=}, {broadcast_buffers=}", group)
        check_wire_dtype(NAME, wire_dtype)
        trained = check_trainable(module)
        names, parameters = list(trained), list(trained.values())
        for name, parameter in trained.items():
            if parameter in _wrapped_parameters:
                raise ValueError(
                    f"{NAME}: expected a module that is not wrapped yet, got parameter {name}, whose gradient another "
                    "wrapper averages already; wrap a module once"
                )
        backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        self._capacity = plan.choose_capacity(bucket_mb, backends[parameters[0].device.type])

        self.module = module
        self.process_group = group
        self.broadcast_buffers = broadcast_buffers
        self._wrapped = WrappedModule(module)
        broadcast_coalesced([*module.parameters(), *module.buffers()], group)
        buckets = [
            GradientBucket({names[n]: parameters[n] for n in bucket}, wire_dtype or parameters[bucket[0]].dtype, group)
            for bucket in plan.assign(parameters, self._capacity, wire_dtype)
        ]
        self._reducer = Reducer(buckets)
        hooks = []
        for bucket in buckets:
            for position, parameter in enumerate(bucket.parameters):
                hook = self._reducer.gradient_hook(bucket, position)
                hooks.append(parameter.register_post_accumulate_grad_hook(hook))
                _wrapped_parameters[parameter] = None
        weakref.finalize(self, _release, hooks, parameters).atexit = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._reducer.recover()
        self._wrapped.check_unchanged()
        synchronizes = self._reducer.enabled and torch.is_grad_enabled()
        if synchronizes and self.training and self.broadcast_buffers:
            broadcast_coalesced(self._wrapped.buffers(), self.process_group)
        output = self.module(*args, **kwargs)
        if synchronizes:
            for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(self._reducer.output_hook)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes that run inside only add to the gradients of this rank, to accumulate over several batches.

        The next one outside averages all that has come together, also in parameters that it does not reach itself.
        """
        before, self._reducer.enabled = self._reducer.enabled, False
        try:
            yield
        finally:
            self._reducer.enabled = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scales the gradients by ``min(1, max_norm / (norm + 1e-6))`` in place; returns their 2-norm before that.

        As `torch.nn.utils.clip_grad_norm_`, by flat buffers: the norm is what `unpack` found on the way (where
        ``wire_dtype`` is not the parameters' own), or one read of each buffer; to scale is one pass over each, left out
        on a CPU where nothing is to be clipped. Gradients are the same on every rank, and so is the norm: 0-d, float32
        (float64 if a parameter is). Raises RuntimeError, the gradients untouched, if the norm is infinite or NaN and
        ``error_if_nonfinite``; default False.
        """
        total_norm = self._stats()[0].sqrt()
        if error_if_nonfinite and not total_norm.isfinite():
            raise RuntimeError(
                f"{NAME}.clip_grad_norm_: expected gradients of finite norm, got {total_norm.item()}; skip this step, "
                "or pass error_if_nonfinite=False"
            )
        factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
        if factor.is_cpu and factor == 1.0:
            return total_norm
        for bucket in self._reducer.buckets:
            gradients = bucket.reduced()
            if gradients:
                torch._foreach_mul_(gradients, factor.to(bucket.wire.device))
        return total_norm

    @torch.no_grad()
    def found_nonfinite(self) -> Tensor:
        """Whether a gradient holds an infinity or a NaN: 0-d bool, from the statistics that `clip_grad_norm_` uses."""
        return self._stats()[1] != 0.0

    def _stats(self) -> Tensor:
        """Sum of squares, and number of buckets with a value that is not finite, over all buckets: (2,)."""
        buckets = self._reducer.buckets
        dtypes = [bucket.gradients.dtype for bucket in buckets]
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        return torch.stack([bucket.stats().to(buckets[0].wire.device, dtype) for bucket in buckets]).sum(dim=0)

    def describe(self) -> str:
        """How the size of buckets came about, and the buckets in the order in which they are sent, one a line."""
        buckets = self._reducer.buckets
        count, size = sum(len(bucket.names) for bucket in buckets), sum(bucket.wire.nbytes for bucket in buckets)
        lines = [
            f"{count} parameters, {_mib(size)} in {len(buckets)} buckets on {self.process_group.size()} ranks",
            f"capacity {_mib(self._capacity.other)}, of the last bucket {_mib(self._capacity.last)} "
            f"({self._capacity.reason})",
        ]
        for number, bucket in enumerate(buckets):
            dtype, wire = (str(tensor.dtype).removeprefix("torch.") for tensor in (bucket.gradients, bucket.wire))
            lines.append(
                f"{number}: {_mib(bucket.wire.nbytes)}, {dtype if wire == dtype else f'{dtype} as {wire}'} on "
                f"{bucket.wire.device}, {len(bucket.names)} parameters from {bucket.names[0]} to {bucket.names[-1]}"
            )
        return "\n".join(lines)

    # The names are those of the module that is wrapped, so that a checkpoint fits both.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _mib(size: float) -> str:
    return f"{size / plan.MIB:.3g} MiB"


def _release(hooks: list[RemovableHandle], parameters: list[nn.Parameter]) -> None:
    for hook in hooks:
        hook.remove()
    for parameter in parameters:
        _wrapped_parameters.pop(parameter, None)
