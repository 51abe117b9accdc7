"""Gradient buckets: many tensors of mixed dtype and one flat buffer, moved in one pass with scale, cast and statistics.

Data parallel training averages gradients over ranks. One collective for each tensor pays its latency hundreds of times,
so gradients travel in flat buffers; the plain way there is a copy of each tensor, a division, a cast, and later another
pass for the norm. `pack` and `unpack` do all of it while the values go by once. Neither has a gradient, nor a rule for
``torch.func.vmap``: both refuse. With `GradientSlots` the gradients of weights need not travel at all: the product that
forms one writes it into the bucket.

Statistics are a tensor (2,), float32 (float64 where noted). ``[0]`` is the sum of the squares of the values *as the
destination stores them*, after scale and cast; it is infinite, or 0, where float32 cannot hold it. ``[1]`` is 1.0 if
one of the values is infinite or NaN, else 0.0. The sum is taken in float64 over fixed blocks of the buffer, which are
added in order, so that it does not depend on the number of threads.
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
    """Where tensors of ``counts`` elements go in a bucket of ``dtype``, each at a multiple of ``alignment`` bytes.

    Returns the offsets and the size of the bucket, a multiple too, all in elements. With the default, a cache line, a
    tensor of odd size costs those behind it neither whole vectors nor a line shared between threads.

    Raises ValueError for a count that is negative or no whole number, and for an alignment below 1.
    """
    if alignment < 1:
        raise ValueError(f"aligned_offsets: expected alignment to be 1 or more bytes, got {alignment}")
    step = max(1, alignment // dtype.itemsize)
    offsets, end = [], 0
    for count in counts:
        if isinstance(count, float) or count < 0:
            raise ValueError(f"aligned_offsets: expected counts of elements, whole and 0 or more, got {count}")
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
    """Writes ``cast(scale * tensor)`` of every tensor into ``bucket`` at its offset, and zeros everywhere else.

    tensors: any number, of any shape; float32, float16, bfloat16 or float64, mixed at will. One that is not contiguous
        is copied first. One may be a view of the bucket, of its dtype and at its own offset: it is then scaled where
        it is, and only read if ``scale`` is 1.
    bucket: (N,), contiguous, of one of these dtypes.
    offsets: one for each tensor, in elements of the bucket, ascending, such that tensors do not overlap.
    scale: finite, default 1. Applied in float32 (float64 if either dtype is), before the cast to nearest even.
    kept: indices of tensors that are contiguous views of the bucket, of its dtype and at their own offset, and already
        hold what is to be there (see `GradientSlots`): they are neither read nor written nor scaled, and cost nothing.
        Not in code that `torch.compile` traces: it gives views memory of their own.
    stats: whether to take the statistics, default True. Without them a GPU packs up to 126 tensors in one launch.

    Returns the statistics of the bucket without the tensors in ``kept``, float64 if it is; without them (0,). Raises
    RuntimeError for other dtypes, layouts or devices, for offsets out of order or range, for a tensor that overlaps the
    bucket elsewhere, for a tensor in ``kept`` that is not in its place, and for a tensor that requires grad while
    gradients are enabled.
    """
    check_constants("bucket_pack", scale=scale)
    try:
        return ops.bucket_pack(tensors, bucket, offsets, scale=scale, kept=kept, stats=stats)
    except RuntimeError:
        _check_given("bucket_pack", tensors)
        raise


def unpack(bucket: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], *, scale: float = 1.0) -> Tensor:
    """Writes ``cast(scale * value)`` of the bucket's values into ``tensors``: the inverse of `pack`.

    Arguments, dtypes and errors are those of `pack`. A tensor that is not contiguous is written through a copy; one
    whose elements share memory, as an expanded one's do, is refused. Tensors may not overlap each other (not checked).

    Returns the statistics of the tensors, float64 if the bucket is.
    """
    check_constants("bucket_unpack", scale=scale)
    try:
        return ops.bucket_unpack(bucket, tensors, offsets, scale=scale)
    except RuntimeError:
        _check_given("bucket_unpack", tensors)
        raise


def stats(tensors: Sequence[Tensor]) -> Tensor:
    """The statistics of ``tensors`` as they are: the norm of many tensors in one pass.

    tensors: at least one, of any shape; float32, float16, bfloat16 or float64, mixed at will. One whose memory has gaps
        is copied first. The statistics are float64 if one of them is.

    Raises RuntimeError for none, for other dtypes, layouts or devices, and for a tensor that requires grad while
    gradients are enabled.
    """
    if tensors is not None and len(tensors) == 0:  # by the tensors the dispatcher would know the device
        raise RuntimeError(f"{NAMESPACE}::bucket_stats: expected at least one tensor, got none")
    try:
        return ops.bucket_stats(tensors)
    except RuntimeError:
        _check_given("bucket_stats", tensors)
        raise


def _check_given(op: str, tensors: Sequence[Tensor] | None) -> None:
    """The dispatcher's own error prints all values."""
    if tensors is None:
        raise RuntimeError(f"{NAMESPACE}::{op}: expected tensors to be a list of tensors, got None")
    for n, tensor in enumerate(tensors):
        if tensor is None:
            raise RuntimeError(f"{NAMESPACE}::{op}: expected tensors[{n}] to be a tensor, got None")


class GradientSlots:
    """Places in a bucket into which backward passes write the gradients of weights, with no copy and no memory between.

    The weight of `cuda_ext.linear` or `cuda_ext.gated_linear`, and those of `cuda_ext.mlp` and `cuda_ext.gated_mlp`:
    where such a parameter has a slot, the product that forms its gradient stores ``scale * gradient`` there, or adds it
    to what is there, from its epilogue; the op then returns no gradient. Under autocast, float32 parameters included:
    the products of 16-bit numbers go to the float32 slot without a rounding on the way. (Megatron-LM's
    ``gradient_accumulation_fusion`` does this for ``main_grad``, in layers of its own.)

    A pass, one ``backward()`` call, goes like this; passes of one object may not overlap:

    1. ``open(scale)``, before the first gradient comes.
    2. ``collect(index)`` from a post hook on the AccumulateGrad node of each parameter,
       ``torch.autograd.graph.get_gradient_edge(parameter).node.register_hook(...)``: it runs for the undefined
       gradients, too, that ops return beside a slot. Hold on to the node: a parameter does not.
    3. ``lock(index)`` before the bucket is used. If it is true the slot holds the gradient of the pass, scaled, for
       ``kept`` of `pack`; else ``parameter.grad`` is what it would be without slots.
    4. ``unlock_all()``, when the bucket may be written again.

    To accumulate over several batches only 1 and 2 are needed, with ``scale=1``. A gradient that an earlier pass left
    in the slot, as ``parameter.grad`` says, is added to, and scaled with the new one; without one, and after
    ``zero_grad(set_to_none=True)``, what the slot holds is not read. Until ``collect`` (if the scale is 1) or ``lock``
    have set it to the slot, ``parameter.grad`` holds at most what other ops have contributed; an exception that ends
    the pass before leaves it so.

    Gradients take the usual way where somebody would miss them: with ``create_graph=True``; in `torch.autograd.grad`
    and in a ``backward(inputs=...)`` that leaves the parameter out; for a parameter, or a cast of it, with
    tensor hooks (``register_hook``), a ``register_post_accumulate_grad_hook`` or a node's pre-hook; for tensor
    subclasses, under `torch.func` and dispatch modes, and in code that `torch.compile` has made.
    """

    def __init__(self) -> None:
        self._slots = getattr(torch.classes, NAMESPACE).GradientSlots()
        # Looked up once: they run for each parameter.
        self._collect, self._take, self._lock = self._slots.collect, self._slots.take, self._slots.lock

    def assign(self, parameters: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        """Gives every parameter a slot, in place of all that this object has given before.

        parameters: leaves, each once. They are not kept alive.
        views: one for each, of its shape, dtype and device, contiguous; they may not overlap (not checked).

        Raises RuntimeError, with all slots as they were, for other views and for a parameter with a slot elsewhere.
        """
        self._slots.assign(list(parameters), list(views))

    def open(self, scale: float = 1.0) -> None:
        """Begins a pass: from now on slots take ``scale`` (finite) times the gradients. What was written and not yet
        locked or collected is forgotten. New objects are closed."""
        self._slots.open(float(scale))

    def close(self) -> None:
        """Ends all passes: from now on gradients take the usual way. What was written is forgotten, as by `open`."""
        self._slots.close()

    def collect(self, index: int) -> bool:
        """Adds to the slot what other ops have contributed in this pass; False if nothing was written to it.

        Sets ``parameter.grad`` to the slot if the scale is 1, else to None.
        """
        return self._collect(index)

    def take(self, index: int) -> bool:
        """`collect`, which also moves a gradient there of which nothing was written to the slot.

        That is a pass over the gradient, as `pack` would make it later, but frees its memory at once, and on a CPU
        finds it in the cache. False if there is no dense gradient, and once the slot is locked.
        """
        return self._take(index)

    def lock(self, index: int) -> bool:
        """Lets a slot take no more until `unlock_all`: gradients take the usual way then.

        If it was written in this pass, adds what `collect` has not seen and sets ``parameter.grad`` to the slot.
        Returns whether the slot holds the gradient, scaled.
        """
        return self._lock(index)

    def unlock_all(self) -> None:
        """Lets slots take gradients again, and forgets what was written."""
        self._slots.unlock_all()

    def release(self) -> None:
        """Takes all slots away, as does the end of this object. A gradient that lies in one stays there."""
        self._slots.release()
