"""Products with weights in FP8, which are converted for each product, or kept while `unchanged_weights` is entered.

In a compiled graph the product with a weight that may be kept is one op, which finds what is kept as it runs. So the
graph is the same in each step, and what is kept is no tensor of the graph, whose memory a compiler would use again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import register_flop_formula

from cuda_ext._checks import is_transformed
from cuda_ext._fp8_recipes import BY_NAME, Quantized
from cuda_ext._gathered_weights import GatheredWeight
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

__all__ = ["exports", "keeps", "multiply", "unchanged_weights"]


_Place = tuple[StorageWeakRef, int, torch.Size, tuple[int, ...], torch.dtype]


class _KeptWeights:
    """Quantised weights, by the memory of the weight: backward may be given another tensor of it, as by checkpoints."""

    def __init__(self) -> None:
        self.entered = 0
        self.is_entered = False  # compilers make one graph for each value
        self._kept: dict[_Place, tuple[int | None, dict[tuple[str, bool], Quantized]]] = {}

    def enter(self, change: int) -> None:
        self.entered += change
        self.is_entered = self.entered > 0
        if not self.is_entered:
            self._kept.clear()

    def get(self, weight: Tensor, recipe: str, transposed: bool) -> Quantized:
        """`Recipe.of_weight`, converted now if it is not kept."""
        of, name = BY_NAME[recipe], (recipe, transposed)
        # A captured graph would read what is kept after it has been freed.
        if not self.is_entered or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return of.of_weight(weight, transposed=transposed)
        version = None if weight.is_inference() else weight._version
        storage = StorageWeakRef(weight.untyped_storage())
        place = storage, int(weight.storage_offset()), weight.shape, weight.stride(), weight.dtype
        found = self._kept.get(place)
        if found is None or found[0] != version:
            self._drop_expired()
            found = self._kept[place] = version, {}
        kept, weight = found[1], weight.detach()
        if name not in kept and weight.dim() == 2:
            kept[recipe, False], kept[recipe, True] = of.both_of(weight, of.weight)
        elif name not in kept:
            kept[name] = of.of_weight(weight, transposed=transposed)
        return kept[name]

    def _drop_expired(self) -> None:
        for place in list(self._kept):
            if place[0].expired():
                self._kept.pop(place, None)


_weights = _KeptWeights()


@contextlib.contextmanager
def unchanged_weights() -> Iterator[None]:
    """While this context is entered, in any thread, no weight changes: each, also of experts, is quantised once, and
    both copies, 2 bytes an element, are kept until it is left.

        for batch in batches:
            with cuda_ext.fp8.unchanged_weights():
                for part in batch:                      # gradient accumulation
                    loss_of(model(part)).backward()
            optimizer.step()

    It saves time if a weight is used more than once between two steps, and the quantisation of its transpose in
    backward. So it does in compiled graphs, of which there is one for calls inside the context and one for calls
    outside; graphs of CUDA (``mode="reduce-overhead"``) leave out the products with kept weights, and those that you
    capture quantise in place. A change of the weight that PyTorch counts is noticed; one that it does not count (by
    ``weight.data``, or in memory that FSDP2 gathers) is not.
    """
    _weights.enter(1)
    try:
        yield
    finally:
        _weights.enter(-1)


def exports() -> bool:
    """Whether `torch.export` traces. For Dynamo `is_exporting` is always true."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def keeps(weight: Tensor) -> bool:
    """Whether products with it may be by a kept copy now. torch.func gives backward tensors without memory."""
    if not _weights.is_entered or not isinstance(weight, nn.Parameter) or is_transformed():
        return False
    if torch.compiler.is_compiling():  # the op has no rules for other classes of tensors, as DTensor
        return type(weight) is nn.Parameter and not exports()
    return not isinstance(weight, GatheredWeight)


def multiply(
    rows: Quantized,
    weight: Tensor,
    recipe: str,
    bias: Tensor | None = None,
    ends: Tensor | None = None,
    *,
    transposed: bool = False,
    keeps: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``rows @ weight.mT + bias`` of a weight (N, K), or with `ends` (groups, N, K) for the groups of rows that end
    there; with `transposed` ``rows @ weight``. keeps: as the function `keeps` said of this weight in forward."""
    if keeps and torch.compiler.is_compiling():
        operands = rows.data, rows.scales, weight, bias, ends
        output: Tensor = _op(*operands, recipe=recipe, transposed=transposed, output_dtype=dtype or torch.bfloat16)
        return output
    if keeps:
        return rows.mm(_weights.get(weight, recipe, transposed), dtype, bias, ends)
    return rows.mm(BY_NAME[recipe].of_weight(weight, transposed=transposed), dtype, bias, ends)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(
    "multiply_by_kept_weight(Tensor data, Tensor scales, Tensor weight, Tensor? bias, Tensor? ends, *, str recipe, "
    "bool transposed, ScalarType output_dtype) -> Tensor",
    # What is kept changes, so graphs of CUDA cannot contain it.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
)
_op = ops.multiply_by_kept_weight.default


@torch.library.impl(_library, "multiply_by_kept_weight", "CompositeExplicitAutograd")
def _multiply_by_kept_weight(
    data: Tensor,
    scales: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    *,
    recipe: str,
    transposed: bool,
    output_dtype: torch.dtype,
) -> Tensor:
    rows = Quantized(data, scales, BY_NAME[recipe].tokens)
    return multiply(rows, weight, recipe, bias, ends, transposed=transposed, keeps=True, dtype=output_dtype)


@torch.library.register_fake(f"{NAMESPACE}::multiply_by_kept_weight", lib=_library)
def _(
    data: Tensor,
    scales: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    *,
    recipe: str,
    transposed: bool,
    output_dtype: torch.dtype,
) -> Tensor:
    return data.new_empty((data.shape[0], weight.shape[-1 if transposed else -2]), dtype=output_dtype)


@register_flop_formula(ops.multiply_by_kept_weight)
def _multiply_by_kept_weight_flops(
    data: torch.Size, scales: torch.Size, weight: torch.Size, *more: object, **options: object
) -> int:
    return 2 * data[0] * weight[-2] * weight[-1]
