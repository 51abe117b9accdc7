"""FlexAttention's block masks as this package's, each converted once."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from cuda_ext.block_mask import BlockMask
from cuda_ext.integrations.captures import captures_of
from cuda_ext.integrations.flex_score_mods import NotServed

__all__ = ["Converted", "convert"]

_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class Converted:
    def __init__(self, mask: BlockMask, key: tuple[Hashable, ...], tensors: list[Tensor]) -> None:
        self.mask = mask
        self.key, self.tensors = key, tensors  # the tensors stay alive, so that none takes the identity of another
        self._hides_future: bool | None = None

    def hides_future(self) -> bool:
        """Whether no query sees a key to the right of the diagonal, which is aligned bottom-right."""
        if self._hides_future is None:
            causal = BlockMask.causal(*self.mask.seq_lengths, device=self.mask.device)
            self._hides_future = (self.mask & ~causal).visible_blocks() == 0
        return self._hides_future


_converted: weakref.WeakKeyDictionary[Any, Converted] = weakref.WeakKeyDictionary()


def convert(block_mask: Any, *, may_wait: bool = True) -> Converted:
    """Converts a `torch.nn.attention.flex_attention.BlockMask`, or finds it converted.

    It is converted again if its lists, or tensors and values that its mask_mod has captured, have changed; and every
    time if mask_mod refers to what cannot be compared. Without `may_wait` nothing may be read from the device.

    Raises:
        NotServed: its mask_mod cannot be mapped, or it has to be converted but `may_wait` is False.
    """
    lists = [getattr(block_mask, name) for name in _LISTS]
    captures = captures_of(*lists, block_mask.seq_lengths, block_mask.BLOCK_SIZE, block_mask.mask_mod)
    found = _converted.get(block_mask)
    if found is None or not captures.is_complete or found.key != captures.key:
        if not may_wait:
            raise NotServed("a block_mask that was not used before, in a CUDA graph")
        try:
            mask = BlockMask.from_flex(block_mask)
        except Exception as error:
            raise NotServed(f"mask_mod cannot be mapped over positions: {type(error).__name__}") from error
        found = Converted(mask, captures.key, captures.tensors)
        if captures.is_complete:
            _converted[block_mask] = found
    return found
