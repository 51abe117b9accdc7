"""Gradient buckets: copies many tensors of mixed dtype to or from one flat buffer, with scale, cast and statistics, in
one pass over memory.

Data-parallel training averages gradients over ranks. One collective per tensor would pay its latency hundreds of times,
so gradients are sent in flat buffers. Done plainly, that takes a copy of each tensor, a division, a cast, and later
another pass for the norm; `pack` and `unpack` do all of it in one pass. They have no gradient and no rule for
``torch.func.vmap``, and refuse both. With `GradientSlots` the gradients of weights need no copy at all: the GEMM that
computes one writes it into the bucket.

Statistics are a tensor (2,), float32 (float64 where noted). ``[0]`` is the sum of the squares of the values *as the
destination stores them*, after scale and cast; on float32 overflow it is infinite, on underflow 0. ``[1]`` is 1.0 if
one of the values is infinite or NaN, else 0.0. The sum is computed in float64 over fixed blocks of the buffer, added in
order, so that it does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import cuda_ext._rules  # noqa: F401
from cuda_ext._checks import check_constants
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

__all__ = ["GradientSlots", "aligned_offsets", "pack", "stats", "unpack"]


def aligned_offsets(counts: Sequence[int], dtype: torch.dtype, *, alignment: int = 64) -> tuple[list[int], int]:
    """The offsets of tensors with ``counts`` elements in a bucket of ``dtype``, each a multiple of ``alignment`` bytes.

    Returns the offsets and the size of the bucket, also a multiple, all in elements. The default is a cache line: after
    a tensor of odd size, the next ones are still aligned to vectors, and threads share no line.

    Raises ValueError for a count that is negative or not an integer, and for an alignment below 1.
    """
    if alignment < 1:
        raise ValueError(f"aligned_offsets: expected alignment of at least 1 byte, got {alignment}")
    step = max(1, alignment // dtype.itemsize)
    offsets, end = [], 0
    for count in counts:
        if isinstance(count, float) or count < 0:
            raise ValueError(f"aligned_offsets: expected counts of elements, integers >= 0, got {count}")
        offsets.append(end)
        end = -(-(end + count) // step) * step
    return offsets, end


def pack(
    tensors: Sequence[Tensor],
    bucket: Tensor,
    offsets: Sequence[int],
    *,
    scale: float = 1.0,
    kept: Sequence[int] = (),
    stats: bool = True,
) -> Tensor:
    """Writes ``cast(scale * tensor)`` of every tensor to its offset in ``bucket``, and zeros everywhere else.

    Args:
        tensors: any number, of any shape; float32, float16, bfloat16 or float64, also mixed. Non-contiguous tensors are
            copied first. A tensor may be a view of the bucket, with its dtype, at its own offset: it is then scaled in
            place, and only read if ``scale`` is 1.
        bucket: (N,), contiguous, of one of these dtypes.
        offsets: one for each tensor, in elements of the bucket, ascending, such that tensors do not overlap.
        scale: finite, default 1. Applied in float32 (float64 if either dtype is), before the cast to nearest even.
        kept: indices of tensors that are contiguous views of the bucket, with its dtype, at their own offsets, and
            already have their final values (see `GradientSlots`): they are neither read nor written nor scaled, and
            cost nothing. Not supported in code that `torch.compile` traces, which copies views to new memory.
        stats: whether to compute the statistics, default True. Without them a GPU packs up to 126 tensors per launch.

    Returns the statistics of the bucket without the tensors in ``kept``, float64 for a float64 bucket; with
    ``stats=False`` a tensor of shape (0,). Raises RuntimeError for other dtypes, layouts or devices, for offsets out of
    order or range, for a tensor that overlaps the bucket elsewhere, for a tensor in ``kept`` that is not at its offset,
    and for a tensor that requires grad while gradients are enabled.
    """
    check_constants("bucket_pack", scale=scale)
    try:
        return ops.bucket_pack(tensors, bucket, offsets, scale=scale, kept=kept, stats=stats)
    except RuntimeError:
        _check_given("bucket_pack", tensors)
        raise


def unpack(bucket: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    """Writes ``cast(scale * value)`` of the bucket's values into ``tensors``: the inverse of `pack`.

    Arguments, dtypes and errors are those of `pack`. Non-contiguous tensors are written through a copy; tensors whose
    elements share memory, such as expanded ones, are refused. Tensors must not overlap each other (not checked).

    Returns the statistics of the tensors, float64 for a float64 bucket.
    """
    check_constants("bucket_unpack", scale=scale)
    try:
        return ops.bucket_unpack(bucket, tensors, offsets, scale=scale)
    except RuntimeError:
        _check_given("bucket_unpack", tensors)
        raise


def stats(tensors: Sequence[Tensor]) -> Tensor:
    """The statistics of ``tensors``, for example for the norm of many tensors in one pass.

    Args:
        tensors: at least one, of any shape; float32, float16, bfloat16 or float64, also mixed. Tensors whose memory has
            gaps are copied first. The statistics are float64 if one of the tensors is.

    Raises RuntimeError for an empty list, for other dtypes, layouts or devices, and for a tensor that requires grad
    while gradients are enabled.
    """
    if tensors is not None and len(tensors) == 0:  # the dispatcher takes the device from the tensors
        raise RuntimeError(f"{NAMESPACE}::bucket_stats: expected at least one tensor, got none")
    try:
        return ops.bucket_stats(tensors)
    except RuntimeError:
        _check_given("bucket_stats", tensors)
        raise


def _check_given(op: str, tensors: Sequence[Tensor] | None) -> None:
    """Raises for None. The dispatcher's own error would print all values."""
    if tensors is None:
        raise RuntimeError(f"{NAMESPACE}::{op}: expected tensors to be a list of tensors, got None")
    for n, tensor in enumerate(tensors):
        if tensor is None:
            raise RuntimeError(f"{NAMESPACE}::{op}: expected tensors[{n}] to be a tensor, got None")


class GradientSlots:
    """Slots in a bucket: backward writes the gradients of weights directly to them, without a copy or extra memory.

    Works for the weights of `cuda_ext.linear`, `gated_linear`, `mlp`, `gated_mlp`, `linear_cross_entropy` and
    `fp8.linear`, and for the matrices of `mixture_of_experts`. If such a parameter has a slot, the epilogue of the GEMM
    that computes its gradient stores ``scale * gradient`` in the slot, or adds it there, and the op returns no
    gradient. This includes float32 parameters under autocast: products of 16-bit numbers are stored in the float32 slot
    without intermediate rounding. (Megatron-LM's ``gradient_accumulation_fusion`` does this for ``main_grad``, in its
    own layers.)

    The steps of a pass, which is one ``backward()`` call; passes of one object must not overlap:

    1. ``open(scale)``, before the first gradient is computed.
    2. ``collect(index)`` in a post hook on the AccumulateGrad node of each parameter,
       ``torch.autograd.graph.get_gradient_edge(parameter).node.register_hook(...)``. The hook also runs for the
       undefined gradients that ops return if there is a slot. Keep a reference to the node: the parameter has none.
    3. ``lock(index)`` before the bucket is used. If it returns True, the slot has the scaled gradient of the pass, for
       ``kept`` of `pack`; otherwise ``parameter.grad`` is what it would be without slots.
    4. ``unlock_all()``, when the bucket may be written again.

    To accumulate over several batches, only steps 1 and 2 are needed, with ``scale=1``. A gradient from an earlier pass
    that is in the slot, as ``parameter.grad`` shows, is added to the new one before scaling; otherwise, for example
    after ``zero_grad(set_to_none=True)``, the contents of the slot are ignored. Until ``collect`` (if the scale is 1)
    or ``lock`` sets ``parameter.grad`` to the slot, it has at most the contributions of other ops; it stays so if an
    exception ends the pass.

    Gradients are returned as usual where autograd or the user needs them: with ``create_graph=True``; in
    `torch.autograd.grad`, and in a ``backward(inputs=...)`` without the parameter; for a parameter, or a cast of it,
    with tensor hooks (``register_hook``), a ``register_post_accumulate_grad_hook`` or a pre-hook on its node; for
    tensor subclasses; under `torch.func` and dispatch modes; and in compiled code (`torch.compile`). Only a post hook
    on the op's own node does not see them.
    """

    def __init__(self) -> None:
        self._slots = getattr(torch.classes, NAMESPACE).GradientSlots()
        # Looked up once, because they are called for each parameter.
        self._collect, self._take, self._lock = self._slots.collect, self._slots.take, self._slots.lock

    def assign(self, parameters: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        """Assigns a slot to every parameter, and removes all earlier slots of this object.

        parameters: leaves, without repeats. They are not kept alive.
        views: one for each, of its shape, dtype and device, contiguous; they must not overlap (not checked).

        Raises RuntimeError for other views and for a parameter with a slot in another object; slots then do not change.
        """
        self._slots.assign(list(parameters), list(views))

    def open(self, scale: float = 1.0) -> None:
        """Begins a pass: slots now receive ``scale`` (finite) times the gradients. Forgets what was written but not
        locked or collected. New objects are closed."""
        self._slots.open(float(scale))

    def close(self) -> None:
        """Ends the pass: gradients are returned as usual again. Forgets what was written, like `open`."""
        self._slots.close()

    def collect(self, index: int) -> bool:
        """Adds the contributions of other ops in this pass to the slot; False if nothing was written to it.

        Sets ``parameter.grad`` to the slot if the scale is 1, else to None.
        """
        return self._collect(index)

    def take(self, index: int) -> bool:
        """Like `collect`, but also moves a gradient of which nothing was written to the slot there.

        That is the pass over the gradient that `pack` would make later, but it frees the gradient's memory at once, and
        on a CPU the gradient is still in the cache. False if there is no dense gradient, or the slot is locked.
        """
        return self._take(index)

    def lock(self, index: int) -> bool:
        """Closes a slot until `unlock_all`: its gradients are then returned as usual.

        If the slot was written in this pass, adds what `collect` has not added yet and sets ``parameter.grad`` to the
        slot. Returns whether the slot has the scaled gradient.
        """
        return self._lock(index)

    def unlock_all(self) -> None:
        """Opens all slots again, and forgets what was written."""
        self._slots.unlock_all()

    def release(self) -> None:
        """Removes all slots; the destructor does the same. Gradients stay in the bucket's memory."""
        self._slots.release()
