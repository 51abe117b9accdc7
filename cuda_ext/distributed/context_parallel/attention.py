"""Attention over a sequence that the ranks of a group share: by a ring, by heads (Ulysses), or both.

Each rank has the same rows of query, key and value, in the order of a `Layout`. All functions compute what
`flash_attention` computes of the whole sequence, and return this rank's rows of it.

- `ring_attention`: keys and values travel. Any numbers of heads. Communication grows with the number of ranks times
  the rows of a rank, for `Hk` heads (Ring Attention, Liu et al., arXiv 2310.01889; by all-gather as in The Llama 3 Herd
  of Models, arXiv 2407.21783, section 3.3.2).
- `ulysses_attention`: two all-to-alls give each rank some heads of the whole sequence, and back (DeepSpeed Ulysses,
  Jacobs et al., arXiv 2309.14509). At least as many heads as ranks. Communication does not grow with the ranks.
- `ring_attention(ulysses_group=)`: heads are exchanged inside of a host, keys between hosts (USP, Fang and Zhao, arXiv
  2405.07719).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from cuda_ext._attention_options import Options, VarlenOptions
from cuda_ext.attention import flash_attention, flash_attention_varlen
from cuda_ext.distributed.context_parallel.layout import NAMES, Layout, check_kind, layout_of
from cuda_ext.distributed.context_parallel.request import METHODS, Groups, Request, check_method
from cuda_ext.distributed.process_groups import resolve_group

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Each function returns early for one rank, since every further call of Python after a kernel costs microseconds. A
# layout that is not one of these names goes on to `_over_ranks`, which checks it.
KEY_NAMES = (None, *NAMES)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: str | Layout = "zigzag",
    key_layout: str | Layout | None = None,
    method: str = "all_gather",
    ulysses_group: dist.ProcessGroup | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """`flash_attention` of a sequence that the ranks of a group share: keys and values travel.

    Args:
        query: `(B, rows of this rank, H, D)`, as `shard_sequence` gives them.
        key: `(B, rows of this rank, Hk, D)`.
        value: `(B, rows of this rank, Hk, Dv)`.
        group: the ranks that share the sequence; default: all.
        layout: ``"zigzag"`` (default; balances causal masks), ``"contiguous"`` or a `Layout`. By name, all ranks have
            the same number of rows.
        key_layout: of keys and values; default: `layout`, which must then be a name if there are other numbers of keys
            than queries.
        method: ``"all_gather"`` (default): each rank gets all keys that its rows see, a quarter of the heads at a
            time, of at most 256 MiB or one head, and the next heads' meanwhile. ``"p2p"``: those of one rank after the
            other, so that those of two ranks are in memory; with dropout this is ``"all_gather"`` unless all ranges of
            rows begin at multiples of 4.
        ulysses_group: the ranks that exchange heads before, see `ulysses_attention`: those of a host, while `group` has
            the ranks of this place on all hosts. `layout` is of all ranks, of which ``r * ulysses_group.size() + u`` is
            rank r of `group` and rank u of `ulysses_group`; by name it is
            ``Layout.zigzag(length, group.size()).divided(ulysses_group.size())``.
        return_lse: also return `lse`. Default False.
        options: those of `flash_attention`, of the whole sequence, the same on all ranks. `attn_bias` and `attn_mask`
            have this rank's rows (or 1) and all keys (or 1). Dropout is that of one rank if the random states of all
            ranks are equal.
            `block_mask` is of the whole sequence; the ranges of `layout`, and for ``"p2p"`` of `key_layout`, begin and
            end at multiples of 128, as those of `Layout.balanced` do. Its blocks are read once for each layout.

    Returns:
        `(B, rows of this rank, H, Dv)`; with `return_lse` also `(B, H, rows of this rank)`. Keys that no row of a rank
        sees, because of `causal`, `window` or `block_mask`, do not travel to it. With a block mask a rank's rows are
        one call, or, with `attn_bias`, `attn_mask`, `relative_bias`, `alibi_slopes` or dropout, one for each range of
        rows, to which all keys travel from the first to the last that the range sees.

    Forward saves what `flash_attention` saves; backward transfers keys and values again, and sends each gradient once,
    in the dtype of `key`. Sums over ranks are in float32 (float64), in a fixed order, so results repeat bit for bit.
    The gradients of `sinks`, `attn_bias` and `relative_bias` are those of this rank's rows: sum them over the group,
    like those of weights; in 16 bits each rank rounds its own, so keep these tensors in float32. Differentiable once.
    All ranks call, and run backward, in the same order. For `torch.compile` the call is a graph break; a group of one
    rank is `flash_attention`, also there.

    Raises:
        RuntimeError: as `flash_attention`; arguments that differ between ranks (compared once); a rank that does not
            take part, with its name and what it does instead.
        ValueError: an unknown layout or method, a layout for other ranks or rows, or one whose ranges are not whole
            blocks of `block_mask`.
    """
    group = resolve_group("cuda_ext.distributed.context_parallel.ring_attention", group)
    if (
        group.size() == 1
        and ulysses_group is None
        and layout in NAMES
        and key_layout in KEY_NAMES
        and method in METHODS
    ):
        return flash_attention(query, key, value, return_lse=return_lse, **options)
    groups, given = Groups(group, ulysses_group), (query, key, value)
    return _over_ranks("ring_attention", groups, given, layout, key_layout, method, return_lse, options)


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: str | Layout = "contiguous",
    key_layout: str | Layout | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """`flash_attention` of a sequence that the ranks of a group share: each rank computes some heads of all rows.

    Two all-to-alls exchange heads for rows before attention, and rows for heads after it. Query heads are divided
    evenly, by groups of a key head if there are enough of these; a key head that several ranks need goes to all of
    them, and its gradients are added. If the ranks divide `H` and `Hk` and each has several heads, all results are
    bit-equal to those of one rank.

    Args:
        layout: ``"contiguous"`` (default), ``"zigzag"`` or a `Layout`: all have the same balance.

    The other arguments, the results and the errors are those of `ring_attention`, and without dropout it can be
    differentiated any number of times.

    Raises:
        ValueError: fewer heads than ranks; use `ring_attention`, or both by its `ulysses_group`.
    """
    group = resolve_group("cuda_ext.distributed.context_parallel.ulysses_attention", group)
    if group.size() == 1 and layout in NAMES and key_layout in KEY_NAMES:
        return flash_attention(query, key, value, return_lse=return_lse, **options)
    groups, given = Groups(None, group), (query, key, value)
    return _over_ranks("ulysses_attention", groups, given, layout, key_layout, "all_gather", return_lse, options)


def ring_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: str | Layout = "zigzag",
    key_layout: str | Layout | None = None,
    method: str = "all_gather",
    ulysses_group: dist.ProcessGroup | None = None,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Any:
    """`ring_attention` of packed sequences, which may be on several ranks each.

    Args:
        query: `(rows of this rank, H, D)`: of all packed rows, those that the layout gives this rank.
        key: `(rows of this rank, Hk, D)`; value: `(rows of this rank, Hk, Dv)`.
        cu_seqlens_q: `(sequences + 1,)`, int32, of the whole batch, the same on all ranks; cu_seqlens_k: of keys. The
            host reads them, which on a GPU waits for the stream, once for each tensor.
        layout: of all packed rows.
        options: those of `flash_attention_varlen`, without `block_mask`, which `ring_attention` takes with
            `BlockMask.documents`. `attn_bias` and `attn_mask` are of the whole batch:
            `(sequences or 1, H or 1, max_seqlen_q or 1, max_seqlen_k or 1)`.

    Returns:
        `(rows of this rank, H, Dv)`; with `return_lse` also `(H, rows of this rank)`.

    All else is as for `ring_attention`.
    """
    group = resolve_group("cuda_ext.distributed.context_parallel.ring_attention_varlen", group)
    if (
        group.size() == 1
        and ulysses_group is None
        and layout in NAMES
        and key_layout in KEY_NAMES
        and method in METHODS
    ):
        return flash_attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, return_lse=return_lse, **options)
    groups, given = Groups(group, ulysses_group), (query, key, value, cu_seqlens_q, cu_seqlens_k)
    return _over_ranks("ring_attention_varlen", groups, given, layout, key_layout, method, return_lse, options)


def ulysses_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: str | Layout = "contiguous",
    key_layout: str | Layout | None = None,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Any:
    """`ulysses_attention` of packed sequences; arguments and results are those of `ring_attention_varlen`."""
    group = resolve_group("cuda_ext.distributed.context_parallel.ulysses_attention_varlen", group)
    if group.size() == 1 and layout in NAMES and key_layout in KEY_NAMES:
        return flash_attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, return_lse=return_lse, **options)
    groups, given = Groups(None, group), (query, key, value, cu_seqlens_q, cu_seqlens_k)
    return _over_ranks("ulysses_attention_varlen", groups, given, layout, key_layout, "all_gather", return_lse, options)


def _over_ranks(
    op: str,
    groups: Groups,
    given: tuple[Tensor, ...],
    layout: str | Layout,
    key_layout: str | Layout | None,
    method: str,
    return_lse: bool,
    options: Mapping[str, Any],
) -> Any:
    """A call that has not returned early. given: query, key, value, and of packed sequences both cu_seqlens."""
    if groups.sizes == (1, 1):
        check_method(op, method)
        for name, each, tensor in (
            ("layout", layout, given[0]),
            ("key_layout", layout if key_layout is None else key_layout, given[1]),
        ):
            check_kind(op, each, name)
            if isinstance(each, Layout) and tensor.dim() in (3, 4):  # other dims are an error of flash_attention
                layout_of(op, each, 1, tensor.shape[-3], name=name)
        attend: Any = flash_attention if len(given) == 3 else flash_attention_varlen
        return attend(*given, return_lse=return_lse, **options)
    query, key, value, *ends = given
    out, lse = Request(op, query, key, value, layout, key_layout, method).run(groups, tuple(ends) or None, options)
    return (out, lse) if return_lse else out
