"""vmap rules of the losses: mapped rows become more rows; for mapped weights one call each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

InDims = tuple[int | None, ...]


def _one_by_one(op: Any, info: Any, in_dims: InDims, tensors: tuple[Tensor | None, ...], options: Any) -> list[Any]:
    """The results for each element of the mapped dimension."""

    def own(n: int) -> list[Tensor | None]:
        pairs = zip(tensors, in_dims, strict=False)
        return [t if t is None or dim is None else t.select(dim, n) for t, dim in pairs]

    return [op(*own(n), **options) for n in range(info.batch_size)]


@torch.library.register_vmap(f"{NAMESPACE}::logit_statistics")
def _(info: Any, in_dims: InDims, *tensors: Tensor | None, **options: Any) -> tuple[tuple[Tensor, ...], Any]:
    input, weight, bias, target, coefficients = tensors
    batch = info.batch_size
    if all(dim is None for dim in (in_dims[1], in_dims[2], in_dims[4])) and batch > 0:
        assert input is not None

        def rows(tensor: Tensor | None, dim: int | None) -> Tensor | None:
            if tensor is None:
                return None
            front = tensor.expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return front.reshape(-1, *front.shape[2:])

        own = coefficients
        if coefficients is not None and coefficients.dim() == 2:
            own = rows(coefficients, None)
        out = ops.logit_statistics(rows(input, in_dims[0]), weight, bias, rows(target, in_dims[3]), own, **options)
        return tuple(value.view(batch, -1) if value.numel() else value.new_empty(batch, 0) for value in out), (0,) * 5
    results = _one_by_one(ops.logit_statistics, info, in_dims, tensors, options)
    return tuple(torch.stack(values) for values in zip(*results, strict=True)), (0,) * 5


@torch.library.register_vmap(f"{NAMESPACE}::linear_loss")
def _(info: Any, in_dims: InDims, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, int]:
    return torch.stack(_one_by_one(ops.linear_loss, info, in_dims, tensors, options)), 0
