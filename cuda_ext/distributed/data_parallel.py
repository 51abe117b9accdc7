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
from cuda_ext.distributed.reducer import NAME, Reducer
from cuda_ext.distributed.wrapped_module import WrappedModule, check_ranks_agree, check_trainable

_hooked = WeakTensorKeyDictionary()  # parameters whose gradients some instance averages


class BucketedDataParallel(nn.Module):
    """Trains ``module`` on every rank of a process group and averages its gradients over the ranks: `DistributedDataParallel` by buckets of one pass.

    Each rank builds the same module and wraps it; parameters and buffers of the first rank are sent to all. When ``loss.backward()`` returns,
    ``parameter.grad`` is the mean over the ranks. Gradients travel in flat buckets (Li et al., PyTorch Distributed, VLDB 2020): as soon as all gradients of a
    bucket are there, `cuda_ext.bucket.pack` writes them, divided by the number of ranks and cast, into its buffer, and one asynchronous all-reduce sums it
    while backward goes on. ``parameter.grad`` is then a view of the buffer, or of a second one that `cuda_ext.bucket.unpack` fills where ``wire_dtype``
    differs; nothing is copied tensor by tensor. The view is valid until the next backward pass.

    Args:
        module: any module with a parameter that requires grad; float32, float16, bfloat16 and float64 parameters may be mixed.
        process_group: default the default group. Any backend of torch.distributed for the devices of the parameters.
        bucket_mb: capacity of a bucket in MiB; ``"auto"`` (default) takes it from a cost model of the backend, see `describe`.
        wire_dtype: dtype in which gradients travel and are summed; default that of the parameters. bfloat16 halves the bytes of float32.
        broadcast_buffers: send the buffers of the first rank to all before each forward pass in training mode (default True).

    Parameters that a rank does not use need no flag: it contributes zeros, and one that no rank used keeps ``grad=None``. Gradients that were
    there before (from `no_sync`, or because they were not zeroed) are part of the average. Sparse gradients are not supported.

    If a rank leaves a backward pass by an exception, the others raise RuntimeError from theirs as soon as that rank calls forward again; the gradients
    of that step are dropped everywhere (``grad=None``) and training can go on.

    Raises RuntimeError if no process group is initialised, if ranks disagree on the parameters, and from forward if a parameter was changed, replaced or
    added since; ValueError for a wrong ``bucket_mb`` or ``wire_dtype`` and for a module with nothing to train or wrapped already; TypeError for a
    parameter of another dtype.
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
        check_ranks_agree(module, f"bucket_mb={bucket_mb!r}, wire_dtype={wire_dtype}, broadcast_buffers={broadcast_buffers}", group)
        check_wire_dtype(NAME, wire_dtype)
        trained = check_trainable(module)
        for name, parameter in trained.items():
            if parameter in _hooked:
                raise ValueError(f"{NAME}: expected a module that is wrapped once, got parameter {name}, whose gradients another wrapper averages already")
        backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        sizes = plan.choose_sizes(bucket_mb, backends[next(iter(trained.values())).device.type])

        self.module = module
        self.process_group = group
        self.broadcast_buffers = broadcast_buffers
        self._wrapped = WrappedModule(module)
        broadcast_coalesced([*module.parameters(), *module.buffers()], group)

        names, parameters = list(trained), list(trained.values())
        indices = plan.assign(parameters, sizes, wire_dtype)
        self._sizes = sizes
        self._bucket_names = [[names[index] for index in bucket] for bucket in indices]
        self._reducer = reducer = Reducer(
            [GradientBucket([parameters[i] for i in bucket], wire_dtype or parameters[bucket[0]].dtype, group) for bucket in indices]
        )
        handles = []
        for bucket, bucket_names in zip(reducer.buckets, self._bucket_names):
            for position, (parameter, name) in enumerate(zip(bucket.parameters, bucket_names)):
                handles.append(parameter.register_post_accumulate_grad_hook(reducer.hook(bucket, position, name)))
                _hooked[parameter] = True
        weakref.finalize(self, _release, handles, parameters).atexit = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        reducer = self._reducer
        reducer.recover()
        self._wrapped.check_unchanged()
        training = reducer.enabled and torch.is_grad_enabled()
        if training and self.training and self.broadcast_buffers:
            broadcast_coalesced(self._wrapped.buffers(), self.process_group)
        output = self.module(*args, **kwargs)
        if training:
            for leaf in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(reducer.expect_backward)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes that run inside only add to the gradients of this rank, for accumulation over several batches.

        The next backward pass outside averages all that has accumulated, also in parameters which that pass itself does not reach.
        """
        before, self._reducer.enabled = self._reducer.enabled, False
        try:
            yield
        finally:
            self._reducer.enabled = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scales all gradients by ``min(1, max_norm / (norm + 1e-6))`` in place; returns their 2-norm before that, 0-d, float32 (float64 for float64).

        As `torch.nn.utils.clip_grad_norm_`, but over flat buckets: the norm is what `unpack` found on the way (with a ``wire_dtype`` of its own), or one
        read of each bucket, and scaling is one pass over each, left out on a CPU if nothing is to be clipped. Gradients are the same on every rank, and so
        is the norm. Raises RuntimeError, with the gradients untouched, if ``error_if_nonfinite`` and the norm is infinite or NaN.
        """
        total_norm = self._stats()[0].sqrt()
        if error_if_nonfinite and not total_norm.isfinite():
            raise RuntimeError(
                f"{NAME}.clip_grad_norm_: expected gradients of finite norm, got {total_norm.item()}; skip the step, or clip with error_if_nonfinite=False"
            )
        factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
        if not (factor.is_cpu and factor == 1.0):
            for bucket in self._reducer.buckets:
                torch._foreach_mul_(bucket.reduced(), factor.to(bucket.wire.device))
        return total_norm

    @torch.no_grad()
    def found_nonfinite(self) -> Tensor:
        """Whether a gradient is infinite or NaN: 0-d bool, the same on every rank, from the statistics that `clip_grad_norm_` uses."""
        return self._stats()[1] != 0.0

    def _stats(self) -> Tensor:
        """Sum of squares and number of buckets with a value that is not finite, over all buckets: (2,)."""
        stats = [bucket.stats() for bucket in self._reducer.buckets]
        dtype = torch.float64 if any(each.dtype == torch.float64 for each in stats) else torch.float32
        return torch.stack([each.to(stats[0].device, dtype) for each in stats]).sum(dim=0)

    def describe(self) -> str:
        """The buckets in the order in which they are sent, one a line, and how their size came about."""
        buckets = self._reducer.buckets
        mib = [bucket.wire.nbytes / plan.MIB for bucket in buckets]
        lines = [
            f"{sum(map(len, self._bucket_names))} parameters, {sum(mib):.2f} MiB in {len(buckets)} buckets on {self.process_group.size()} ranks",
            f"capacity {self._sizes.middle / plan.MIB:.4g} MiB, last bucket {self._sizes.last / plan.MIB:.4g} MiB ({self._sizes.reason})",
        ]
        for number, (bucket, names) in enumerate(zip(buckets, self._bucket_names)):
            dtype, wire = (str(tensor.dtype).removeprefix("torch.") for tensor in (bucket.gradients, bucket.wire))
            kind = dtype if wire == dtype else f"{dtype} as {wire}"
            lines.append(f"{number}: {len(names)} parameters, {mib[number]:.2f} MiB, {kind} on {bucket.wire.device}, {names[0]} ... {names[-1]}")
        return "\n".join(lines)

    # The wrapper shows the names of the module it wraps, so that checkpoints fit both.

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
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


def _release(handles: list[RemovableHandle], parameters: list[nn.Parameter]) -> None:
    for handle in handles:
        handle.remove()
    for parameter in parameters:
        _hooked.pop(parameter, None)
