"""The shape of a layer's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor


def in_shape(result: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor that nothing else uses, contiguous, in another shape.

    It is no view, as that of a `torch.nn.Linear` is none: FSDP2 loses its hook on a view that is changed in place.
    """
    return cast(Tensor, torch.ops.aten._unsafe_view.default(result, shape))
