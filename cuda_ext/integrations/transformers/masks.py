"""The mask function of `attn_implementation="cuda_ext"`: says what is visible without a mask of every pair if it can.

transformers calls it once per forward and kind of layer, and hands the result to each layer's attention, which
`attention.py` implements. The result is one of

- None: all keys are visible, or, if the layer is causal, those up to the bottom-right diagonal;
- a boolean tensor `(B, L)` for padding, as FlashAttention's in transformers: the keys that take part, of the first L
  keys (a static cache has more); with a causal or sliding-window pattern on top;
- an integer tensor `(B, L)` for packed sequences: the number of each token's sequence, likewise;
- a boolean tensor `(B, 1, Sq, Sk)`: everything. For what the op cannot express: chunks, blocks, custom functions.

Where ranks share the sequence it is always a boolean tensor of two dims, see `_of_shared_sequence`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.import_utils import is_tracing

from cuda_ext import _sequence_sharding
from cuda_ext._sequence_sharding import SequenceSharding
from cuda_ext.integrations.transformers.names import refuse

__all__ = ["Offsets", "Pattern", "Visible", "attention_mask", "visible_of"]

MaskFunction = Callable[..., Any]

# More exact than transformers' annotations: the offset may be a tensor.
_dense_mask: Callable[..., Tensor] = cast(Any, sdpa_mask)
_pad: Callable[[Tensor, int, int], Tensor] = cast(Any, prepare_padding_mask)


class Pattern(NamedTuple):
    """What a mask function hides by position, in the op's terms."""

    causal: bool
    window: tuple[int, int] | None


class Offsets(NamedTuple):
    """The sequences of a padded or packed batch whose rows are one after the other: `cu_seqlens` of the op."""

    query: Tensor
    key: Tensor


class Visible(NamedTuple):
    """An attribute of a two-dimensional mask. `hides_keys`: the mask itself hides something. `sharding`: how ranks
    share the sequence; layers that backward computes again learn it here, also after the block has ended."""

    pattern: Pattern
    hides_keys: bool
    offsets: Offsets | None
    sharding: SequenceSharding | None = None


def visible_of(mask: Tensor) -> Visible | None:
    """What `attention_mask` knew about a two-dimensional mask; None if the attribute was lost in a copy."""
    return getattr(mask, "_cuda_ext_visible", None)


def _with_visible(
    mask: Tensor,
    pattern: Pattern,
    hides_keys: bool,
    offsets: Offsets | None,
    sharding: SequenceSharding | None = None,
) -> Tensor:
    mask._cuda_ext_visible = Visible(pattern, hides_keys, offsets, sharding)  # type: ignore[attr-defined]
    return mask


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """What one kind of layer may see; called by transformers with its arguments for mask functions.

    Args:
        q_length: number of queries, the first at position `q_offset`.
        kv_length: number of keys in the tensors that attention gets, the first at position `kv_offset`.
        mask_function: `(batch, head, query position, key position) -> visible`.
        attention_mask: `(B, positions)`, False at padding.
        local_size: the sliding window or chunk in `mask_function`.
        allow_is_causal_skip: `mask_function` is a causal one that nothing was added to, and need not be materialised.
        allow_is_bidirectional_skip: the same for a bidirectional one.
        use_vmap: `mask_function` contains a function of the user.
        config: the model's.

    Returns:
        See the top of this file.
    """

    def materialised() -> Tensor:
        return _dense_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )

    # Values of tensors cannot be read in a graph.
    tracing = is_tracing(attention_mask)
    takes_short_masks = config is not None and _takes_short_masks(type(config))
    pattern = _pattern(mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip, config)
    sharding = _sequence_sharding.active
    if sharding is not None:
        if pattern is None and mask_function.__name__ == "and_mask" and not use_vmap and not _has_chunks(config):
            # Position ids that jump, as those of packed sequences and of this rank's rows.
            pattern = Pattern(True, None if local_size is None else (local_size - 1, 0))
        if q_length != kv_length or isinstance(q_offset, Tensor) or q_offset != 0 or kv_offset != 0:
            what = f"{q_length} queries for {kv_length} keys (a cache, or cross-attention)"
            refuse(what, NotImplementedError, f"{_IN_CONTEXT} keys of the queries' own rows; generate outside of it")
        known = pattern if takes_short_masks else None
        return _of_shared_sequence(sharding, batch_size, q_length, attention_mask, known, torch.device(device))
    if pattern is None:
        is_square = attention_mask is None and q_length == kv_length
        if takes_short_masks and is_square and not use_vmap and mask_function.__name__ == "and_mask":
            # No mask, no cache, and a function that transformers composed itself: packed sequences.
            return _packed(mask_function, batch_size, q_length, local_size, torch.device(device), tracing)
        return materialised()
    if isinstance(q_offset, Tensor):  # the number of tokens in a static cache
        if tracing:
            return materialised()
        q_offset = int(q_offset)

    # A causal pattern hides the keys after the last query: slots of a static cache that are not written yet.
    length = q_offset + q_length - kv_offset if pattern.causal else kv_length
    keys = None
    if attention_mask is not None:
        keys = _pad(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + length]
        if not tracing and bool(keys.all()):
            keys = None
    window_hides = pattern.window is not None and (tracing or length - 1 > pattern.window[0])
    if keys is None and not window_hides and length == kv_length:
        return None
    # generate() calls this function a second time, with its first result as `attention_mask`; the result must not
    # depend on the offset, then.
    if not takes_short_masks or kv_offset != 0:
        return materialised()
    offsets = None
    if keys is None:
        mask = torch.ones((batch_size, length), dtype=torch.bool, device=device)
    else:
        mask = keys
        if not tracing:
            offsets = _offsets(keys, q_length, pattern)
    return _with_visible(mask, pattern, keys is not None, offsets)


def _pattern(
    mask_function: MaskFunction, local_size: int | None, causal: bool, bidirectional: bool, config: Any
) -> Pattern | None:
    """The pattern of one of transformers' basic mask functions, None for any other."""
    is_window = local_size is not None and mask_function.__name__ == "and_mask"
    if causal:
        if mask_function is causal_mask_function:
            return Pattern(True, None)
        # Chunks come with a local size, too, and the functions look alike.
        if is_window and local_size is not None and not _has_chunks(config):
            return Pattern(True, (local_size - 1, 0))
    if bidirectional:
        if mask_function is bidirectional_mask_function:
            return Pattern(False, None)
        if is_window and local_size is not None:
            return Pattern(False, (local_size, local_size))
    return None


def _has_chunks(config: Any) -> bool:
    return getattr(config, "attention_chunk_size", None) is not None


_IN_CONTEXT = "in a block of context_parallel, expected"


def _of_shared_sequence(
    sharding: SequenceSharding,
    batch_size: int,
    rows: int,
    attention_mask: Tensor | None,
    pattern: Pattern | None,
    device: torch.device,
) -> Tensor:
    """`(B, S)`, the keys of the whole sequence that take part, if there is padding; else True for each row. What is
    packed is known to attention, which gets the position ids."""
    if pattern is None:
        what = "a mask of every pair (chunks, blocks, functions of the user, or a model that asks for one)"
        refuse(what, NotImplementedError, f"{_IN_CONTEXT} models with causal and sliding-window layers alone")
    keys = None if attention_mask is None else _keys_of_all(sharding, attention_mask)
    mask = torch.ones((batch_size, rows), dtype=torch.bool, device=device) if keys is None else keys
    return _with_visible(mask, pattern, keys is not None, None, sharding)


@torch.compiler.disable
def _keys_of_all(sharding: SequenceSharding, own: Tensor) -> Tensor | None:
    """None if all take part."""
    keys = sharding.unshard(own.to(torch.uint8)).bool()
    return None if bool(keys.all()) else keys


def _packed(
    mask_function: MaskFunction,
    batch_size: int,
    length: int,
    window: int | None,
    device: torch.device,
    tracing: bool,
) -> Tensor:
    """`(B, length)` integers, the number of each token's sequence."""
    batch = torch.arange(batch_size, device=device)[:, None]
    position = torch.arange(1, length, device=device)[None]
    # A sequence starts at each token that does not see its predecessor.
    starts = ~mask_function(batch, torch.zeros_like(batch), position, position - 1)
    starts = F.pad(starts.expand(batch_size, -1), (1, 0))
    pattern = Pattern(True, None if window is None else (window - 1, 0))
    offsets = None
    if not tracing:
        starts[:, 0] = True
        ends = torch.tensor([batch_size * length], device=device)
        cumulative = torch.cat([starts.flatten().nonzero().flatten(), ends]).int()
        offsets = Offsets(cumulative, cumulative)
    return _with_visible(starts.cumsum(1), pattern, True, offsets)


def _offsets(keys: Tensor, q_length: int, pattern: Pattern) -> Offsets | None:
    """The sequences of a padded batch, with rows of padding in sequences that have no queries or no keys.

    The op then reads the padded tensors as they are, computes nothing for padding, and gives zeros in rows of padding.
    For each batch element there are a sequence of padded queries, one of padded keys, and the real one. If attention
    is not causal, all queries are in the real one: they may belong to another tensor than the keys.

    Returns None if an element has padding between its tokens, or queries and keys would lose their alignment.
    """
    batch, length = keys.shape
    causal = pattern.causal
    if q_length == 1 or (q_length != length if causal else pattern.window is not None):
        return None
    count = keys.sum(1)
    first = keys.int().argmax(1)
    end = length - keys.flip(1).int().argmax(1)
    if not bool(((end - first == count) | (count == 0)).all()):
        return None
    row = torch.arange(batch, device=keys.device)
    key_first = row * length + first
    key_end = key_first + count
    if causal:
        query_first, query_end = key_first, key_end
    else:
        query_first, query_end = row * q_length, (row + 1) * q_length
    zero, total_q, total_k = (key_end.new_tensor([n]) for n in (0, batch * q_length, batch * length))
    before = torch.cat([zero, key_end[:-1]])
    cumulative_q = torch.stack([query_first, query_first, query_end], 1).flatten()
    cumulative_k = torch.stack([before, key_first, key_end], 1).flatten()
    return Offsets(
        torch.cat([zero, cumulative_q, total_q, total_q]).int(),
        torch.cat([zero, cumulative_k, key_end[-1:], total_k]).int(),
    )


# Under torch.compile the answer is part of the graph.
@torch.compiler.assume_constant_result
def _takes_short_masks(config_class: type) -> bool:
    """Whether the models of a configuration hand two-dimensional masks to their attention as they get them.

    Those that support FlashAttention do, except for some that ask for a materialised mask to add to it.
    """
    families = len(PreTrainedModel.__subclasses__())
    key = (config_class, families)  # an import may have added a model
    if key not in _SHORT_MASKS:
        models = [model for model in _subclasses(PreTrainedModel) if model.config_class is config_class]
        _SHORT_MASKS[key] = bool(models) and all(
            model._supports_flash_attn and not _asks_for_materialised(model.__module__) for model in models
        )
    return _SHORT_MASKS[key]


_SHORT_MASKS: dict[tuple[type, int], bool] = {}


def _asks_for_materialised(module: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return True
    return "allow_is_causal_skip" in source or "allow_is_bidirectional_skip" in source


def _subclasses(cls: Any) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
