"""Tables that depend on numbers alone, such as the angles of rotary positions: computed at first use, and kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Tables = tuple[Tensor, ...]


class KeptTables:
    """The longest tables so far, for each device and dtype.

    They are no state of the module that uses them: neither moved, cast, copied nor saved with it, and unknown to other
    ranks. Tables are kept only if later calls can use them: not those that a compiler or a mode traces, nor those whose
    values are computed when a CUDA graph is replayed.

    doubles: whether tables may have more rows than were asked for, so that growing lengths need few of them.
    """

    def __init__(self, doubles: bool = True) -> None:
        self._doubles = doubles
        self._longest: dict[tuple[torch.device, torch.dtype], Tables] = {}
        self._captured: list[Tables] = []  # that CUDA graphs read

    def get(
        self, compute: Callable[[int, torch.device], Tables], length: int, like: Tensor, dtype: torch.dtype
    ) -> Tables:
        """Tables of at least ``length`` rows for the device of ``like``. ``compute`` makes tables of ``dtype``."""
        device = like.device
        if _is_traced(like):
            with like.fake_mode if isinstance(like, FakeTensor) else nullcontext():
                return compute(length, device)
        captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        known = self._longest.get((device, dtype), ())
        if known and len(known[0]) >= length:
            if captures and not any(tables is known for tables in self._captured):
                self._captured.append(known)
            return known
        # Outside of inference mode, because backward cannot save what was made inside.
        with torch.inference_mode(False), torch.no_grad():
            more = 2 * len(known[0]) if known and self._doubles and not captures else 0
            tables = compute(max(length, more), device)
        if not captures and not any(map(_is_wrapped, tables)):
            self._longest[device, dtype] = tables
        return tables

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptTables:
        return KeptTables(self._doubles)

    def __reduce__(self) -> tuple[type[KeptTables], tuple[bool]]:
        return KeptTables, (self._doubles,)


def _is_traced(like: Tensor) -> bool:
    """Whether a compiler or a mode sees the calls of a function of ``like``, instead of or besides their execution."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(like, FakeTensor):
        return True
    return torch._C._len_torch_dispatch_stack() > 0


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform of torch.func, whose end it must not outlive."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)
