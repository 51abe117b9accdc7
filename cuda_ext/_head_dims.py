"""Head dims that the CUDA kernels lack, for callers who promise to serve any."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

__all__ = ["to_multiples_of_8"]


def to_multiples_of_8(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """`(query, key, value, scale)` for the same attention; the output gets as many more columns as `value`.

    Zeros at the end of the last dimension change no product, but the default scale, `1 / sqrt(D)`, is that of the given
    head dim.
    """
    dim = query.shape[-1]
    if dim % 8 == 0 == value.shape[-1] % 8 or key.shape[-1] != dim:  # the op refuses unequal head dims
        return query, key, value, scale
    return _padded(query), _padded(key), _padded(value), dim**-0.5 if scale is None else scale


def _padded(tensor: Tensor) -> Tensor:
    return F.pad(tensor, (0, -tensor.shape[-1] % 8))
