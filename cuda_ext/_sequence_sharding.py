"""How attention learns that ranks share a sequence, from `cuda_ext.distributed.context_parallel`.

Its `context_parallel` sets `active`, which the functions read that the models of other libraries call. It is of the
process: backward, which may compute attention again, runs in threads of its own. Importing it sets
`attention_of_dtensors`, which `flash_attention` calls for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["SequenceSharding", "active", "attention_of_dtensors"]


class SequenceSharding(Protocol):
    """Attention, tensors and positions of a sequence that ranks share; `context_parallel` makes it."""

    @property
    def op(self) -> str: ...

    @property
    def ranks(self) -> int: ...

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any: ...

    def attention_varlen(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
    ) -> Any: ...

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor: ...

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor: ...

    def length_of_rows(self, rows: int) -> int: ...

    def positions_of_rows(self, rows: int, device: torch.device) -> Tensor: ...


active: SequenceSharding | None = None
attention_of_dtensors: Callable[..., tuple[Tensor, Tensor] | None] | None = None
