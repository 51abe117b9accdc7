"""Block-sparse masks of attention: lists of visible blocks, and one bit for each element of those that are partial."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cuda_ext import _mask_builders as builders
from cuda_ext import _mask_lists as lists
from cuda_ext import _mask_mods as mods
from cuda_ext import _mask_plot as plots
from cuda_ext._checks import check
from cuda_ext._mask_arguments import Device, booleans, bounds_of, check_int, device_of, integers, shifts_of
from cuda_ext._mask_lists import Entries, Grid, Lists
from cuda_ext._mask_tiles import BLOCK, transpose_tiles, unpack_bits

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

__all__ = ["BLOCK", "BlockMask"]

# As attention reads them: keys_of_queries (B, H, Mq, 2 + 2W), the number of the n-th longest list, a count and so many
# pairs (block, tile); queries_of_keys the same; both_tiles (2, T, 128, 4).
_FIELDS = ("keys_of_queries", "queries_of_keys", "both_tiles")


class BlockMask:
    """Which keys each query sees, by blocks of 128 queries and 128 keys. Immutable.

    Blocks without a visible element are not listed, full blocks have no bits, and equal partial blocks share theirs: a
    causal mask of any length has one tile of 2 KiB. Attention visits the listed blocks only. Query i and key j are
    numbered from 0. FlexAttention (arXiv 2412.05496) has such lists, with a function instead of bits.

    Attributes:
        seq_lengths: ``(Sq, Sk)``. Mq and Mk are these in blocks, rounded up.
        kv_counts: ``(B, H, Mq)``: how many blocks of keys each block of queries sees. All tensors are int32, on one
            device. B and H, the heads of the queries, may be 1, which stands for any number.
        kv_indices: ``(B, H, Mq, W)``: which blocks; W is at least 1. Entries past the count mean nothing.
        kv_tiles: ``(B, H, Mq, W)``: -1 for a full block, else the number of its tile. Of a full block at the end only
            the elements up to Sq and Sk are visible.
        q_counts, q_indices, q_tiles: the same for each block of keys: ``(B, H, Mk)`` and ``(B, H, Mk, W2)``.
        tiles: ``(T, 128, 4)``: rows are queries. Bits 2n and 2n + 1 of word t are the keys 8n + 2t and 8n + 2t + 1.
            Bits past Sq or Sk are 0.
        tiles_t: ``(T, 128, 4)``: the tiles with rows of keys and bits of queries.

    Builders need memory for the listed blocks, never for ``(Sq, Sk)``. On a GPU they wait for it: how many blocks are
    listed, and which tiles are equal, depends on values. Build a mask once, and use it for many calls. Their argument
    ``device`` is by default that of a given tensor, else PyTorch's default device. Wrong arguments raise RuntimeError.

    A mask can be pickled and copied, and is a pytree of its tensors. ``==`` is identity.
    """

    seq_lengths: tuple[int, int]
    keys_of_queries: Tensor
    queries_of_keys: Tensor
    both_tiles: Tensor

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_counts: Tensor,
        kv_indices: Tensor,
        kv_tiles: Tensor,
        tiles: Tensor,
        *,
        q_counts: Tensor | None = None,
        q_indices: Tensor | None = None,
        q_tiles: Tensor | None = None,
        check: bool = True,
    ) -> None:
        """From lists that are there. The transposed lists are computed if they are None.

        ``check=False`` leaves out all checks; wrong lists then make kernels read wherever they point to, and transposed
        lists that differ can make a deterministic backward on a GPU wait forever.

        Raises:
            RuntimeError: wrong types, shapes, dtypes or devices; counts, listed blocks or tiles out of range, a block
                listed twice, bits past the end, or transposed lists that differ.
        """
        seq_lengths = (seq_lengths[0], seq_lengths[1])
        kv, q = (kv_counts, kv_indices, kv_tiles), (q_counts, q_indices, q_tiles)
        if check:
            names = [f"{side}_{name}" for side in ("kv", "q") for name in Lists._fields]
            check_int("BlockMask", 1, **dict(zip(("seq_lengths[0]", "seq_lengths[1]"), seq_lengths)))
            lists.check_structure("BlockMask", seq_lengths, dict(zip(names, (*kv, *q))), tiles)
        of_queries = Lists(*kv)
        grid = Grid(kv_counts.shape[0], kv_counts.shape[1], *seq_lengths)
        of_keys = None if q_counts is None else Lists(*cast("tuple[Tensor, Tensor, Tensor]", q))
        if check:
            lists.check_values("BlockMask", "kv", grid, of_queries, tiles)
            lists.check_tails("BlockMask", lists.entries_of(grid, of_queries, tiles))
            if of_keys is not None:
                lists.check_values("BlockMask", "q", grid.transposed(), of_keys, tiles)
                lists.check_transposed("BlockMask", lists.entries_of(grid, of_queries, tiles), of_keys)
        if of_keys is None:
            of_keys = lists.lists_of(lists.transposed(lists.entries_of(grid, of_queries, tiles)))
        self._set(seq_lengths, (of_queries.packed(), of_keys.packed(), torch.stack((tiles, transpose_tiles(tiles)))))

    def _set(self, seq_lengths: tuple[int, int], tensors: Sequence[Any]) -> None:
        self.__dict__.update(zip(_FIELDS, tensors), seq_lengths=seq_lengths)

    @classmethod
    def _of(cls, seq_lengths: tuple[int, int], tensors: Sequence[Any]) -> BlockMask:
        mask = cls.__new__(cls)
        mask._set(seq_lengths, tensors)
        return mask

    @classmethod
    def _from_entries(cls, entries: Entries) -> BlockMask:
        mirrored = lists.transposed(entries)
        both = lists.lists_of(entries).packed(), lists.lists_of(mirrored).packed()
        tiles = torch.stack((entries.tiles, mirrored.tiles))
        return cls._of((entries.grid.queries, entries.grid.keys), (*both, tiles))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"cuda_ext::BlockMask: expected no assignment to {name}, masks do not change; make another"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"cuda_ext::BlockMask: expected no deletion of {name}, masks do not change; make another")

    # Properties

    @property
    def kv_counts(self) -> Tensor:
        return self.keys_of_queries[..., 1]

    @property
    def kv_indices(self) -> Tensor:
        return self.keys_of_queries[..., 2::2]

    @property
    def kv_tiles(self) -> Tensor:
        return self.keys_of_queries[..., 3::2]

    @property
    def q_counts(self) -> Tensor:
        return self.queries_of_keys[..., 1]

    @property
    def q_indices(self) -> Tensor:
        return self.queries_of_keys[..., 2::2]

    @property
    def q_tiles(self) -> Tensor:
        return self.queries_of_keys[..., 3::2]

    @property
    def tiles(self) -> Tensor:
        return self.both_tiles[0]

    @property
    def tiles_t(self) -> Tensor:
        return self.both_tiles[1]

    @property
    def op_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """As the ops take them: block_keys, block_queries and block_tiles."""
        return self.keys_of_queries, self.queries_of_keys, self.both_tiles

    @property
    def _grid(self) -> Grid:
        return Grid(self.keys_of_queries.shape[0], self.keys_of_queries.shape[1], *self.seq_lengths)

    @property
    def _entries(self) -> Entries:
        return lists.entries_of(self._grid, Lists(self.kv_counts, self.kv_indices, self.kv_tiles), self.tiles)

    @property
    def device(self) -> torch.device:
        return self.both_tiles.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, H, Sq, Sk)``"""
        return self._grid.batch, self._grid.heads, *self.seq_lengths

    def visible_blocks(self) -> int:
        """How many blocks are listed, of all batches and heads. Reads the counts."""
        return int(self.kv_counts.sum())

    def partial_blocks(self) -> int:
        """How many of the listed blocks have a tile."""
        here = lists.listed(Lists(self.kv_counts, self.kv_indices, self.kv_tiles))
        return int(((self.kv_tiles >= 0) & here).sum())

    def sparsity(self) -> float:
        """The percentage of blocks that are not listed. That of FlexAttention's BlockMask, if 128 divides lengths."""
        grid = self._grid
        return 100.0 * (1.0 - self.visible_blocks() / (grid.lines * grid.columns))

    def to_dense(self) -> Tensor:
        """bool ``(B, H, Sq, Sk)``, True where a key is visible."""
        grid, entries = self._grid, self._entries
        dense = torch.zeros(grid.lines, BLOCK, grid.columns, BLOCK, dtype=torch.bool, device=self.device)
        words = torch.cat([self.tiles, self.tiles.new_full((1, *self.tiles.shape[1:]), -1)])  # the last: full
        for part in torch.arange(len(entries.line), device=self.device).split(builders.ELEMENT_BLOCKS):
            dense[entries.line[part], :, entries.column[part]] = unpack_bits(words[entries.tile[part]])
        whole = dense.view(grid.batch, grid.heads, grid.rows * BLOCK, grid.columns * BLOCK)
        return whole[:, :, : grid.queries, : grid.keys].contiguous()

    def to(self, device: torch.device | str | int) -> BlockMask:
        """The mask on a device."""
        return self._of(self.seq_lengths, [tensor.to(device) for tensor in self.op_tensors])

    def __repr__(self) -> str:
        if not all(isinstance(tensor, Tensor) for tensor in self.op_tensors):
            return f"BlockMask(seq_lengths={self.seq_lengths}, of other leaves than tensors)"
        grid = self._grid
        visited = f"{self.visible_blocks()} of {grid.lines * grid.columns} blocks, {self.partial_blocks()} partial"
        return f"BlockMask(shape={self.shape}, {visited}, {len(self.tiles)} tiles, device={self.device})"

    def plot(self, path: str | os.PathLike[str], *, batch: int = 0, head: int = 0) -> None:
        """Draws the full, partial and empty blocks of one head into a file: ``.svg``, or any that matplotlib writes.

        Raises: RuntimeError: no such batch or head, or no matplotlib for another suffix.
        """
        for name, number, count in (("batch", batch, self.shape[0]), ("head", head, self.shape[1])):
            check(0 <= number < count, "BlockMask.plot", f"expected {name} in [0, {count - 1}], got {number}")
        states = lists.states_of(self._entries)[batch, head].clamp(max=0).cpu()
        plots.draw("BlockMask.plot", path, states, repr(self))

    # Algebra

    def _with(self, op: str, other: BlockMask) -> BlockMask:
        name = f"BlockMask.{'__and__' if op == '&' else '__or__'}"
        what = f"expected masks of the same lengths, got {self.seq_lengths} and {other.seq_lengths}"
        check(self.seq_lengths == other.seq_lengths, name, f"{what}; build both for the same queries and keys")
        what = f"expected masks on one device, got {self.device} and {other.device}"
        check(self.device == other.device, name, f"{what}; move one of them with .to()")
        fits = all(a == b or 1 in (a, b) for a, b in zip(self.shape[:2], other.shape[:2]))
        what = f"expected B and H of both masks to be equal or 1, got {self.shape[:2]} and {other.shape[:2]}"
        check(fits, name, f"{what}; build both for the same batch and heads")
        return self._from_entries(lists.combine(op, self._entries, other._entries))

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both masks show; B and H broadcast."""
        return self._with("&", other) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: BlockMask) -> BlockMask:
        """What one of the masks shows; B and H broadcast."""
        return self._with("|", other) if isinstance(other, BlockMask) else NotImplemented

    def __invert__(self) -> BlockMask:
        """What this mask hides."""
        return self._from_entries(lists.invert(self._entries))

    # Builders

    @classmethod
    def from_dense(cls, mask: Tensor, *, device: Device = None) -> BlockMask:
        """From a bool mask ``(Sq, Sk)``, ``(B, Sq, Sk)`` or ``(B, H, Sq, Sk)``, True where a key is visible."""
        return cls._from_entries(builders.from_dense(booleans("BlockMask.from_dense", "mask", mask, device)))

    @classmethod
    def causal(cls, Sq: int, Sk: int, *, bottom_right: bool = True, device: Device = None) -> BlockMask:
        """Query i sees keys ``j <= i + Sk - Sq``, as in `flash_attention`; ``j <= i`` without ``bottom_right``."""
        check_int("BlockMask.causal", 1, Sq=Sq, Sk=Sk)
        shift = torch.full((1,), Sk - Sq if bottom_right else 0, device=device_of(device))
        return cls._from_entries(builders.window(Grid(1, 1, Sq, Sk), shift, None, 0))

    @classmethod
    def window(
        cls,
        Sq: int,
        Sk: int,
        left: int | None,
        right: int | None,
        *,
        q_lengths: Tensor | None = None,
        k_lengths: Tensor | None = None,
        device: Device = None,
    ) -> BlockMask:
        """Query i sees keys ``i + Sk - Sq - left <= j <= i + Sk - Sq + right``.

        Args:
            left, right: None or -1: no bound on that side. Bounds below -1 are on the other side of the diagonal:
                ``left=-2`` begins 2 keys after it.
            q_lengths, k_lengths: ``(B,)`` of integers, for sequences that are shorter than Sq and Sk: ``Sk - Sq`` is
                then ``k_length - q_length``, and there is one mask per sequence.
        """
        op = "BlockMask.window"
        check_int(op, 1, Sq=Sq, Sk=Sk)
        near = bounds_of(op, left=left, right=right)
        shift = shifts_of(op, Sq, Sk, q_lengths, k_lengths, device)
        return cls._from_entries(builders.window(Grid(len(shift), 1, Sq, Sk), shift, *near))

    @classmethod
    def chunks(
        cls,
        Sq: int,
        Sk: int,
        chunk_size: int,
        *,
        q_lengths: Tensor | None = None,
        k_lengths: Tensor | None = None,
        device: Device = None,
    ) -> BlockMask:
        """Query i sees the keys of its own chunk of ``chunk_size`` positions; its position is ``i + Sk - Sq`` (Llama
        4, and ``attention_chunk`` of FlashAttention-3). Usually with `causal` in addition.

        Args:
            q_lengths, k_lengths: ``(B,)`` of integers, for sequences that are shorter than Sq and Sk: positions are
                then ``i + k_length - q_length``.
        """
        op = "BlockMask.chunks"
        check_int(op, 1, Sq=Sq, Sk=Sk, chunk_size=chunk_size)
        shift = shifts_of(op, Sq, Sk, q_lengths, k_lengths, device)
        return cls._from_entries(builders.chunks(Grid(len(shift), 1, Sq, Sk), shift, chunk_size))

    @classmethod
    def documents(
        cls,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        *,
        ids: Tensor | None = None,
        S: int | None = None,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        device: Device = None,
    ) -> BlockMask:
        """Queries see the keys of their own document.

        Args:
            cu_seqlens: ``(documents + 1,)`` of integers: the cumulative lengths, from 0.
            ids: instead of it, ``(S,)`` or ``(B, S)`` of integers: the document of each position. Positions with one
                id are one document, even if others are between. If so, elements are compared, which takes longer.
            S: with ``cu_seqlens``: the length; default: the last of them. Positions past the last see nothing.
            causal: also ``j <= i``.
            window: also ``i - left <= j <= i + right``, as in `window`.
        """
        op = "BlockMask.documents"
        given = sum(each is not None for each in (cu_seqlens, ids))
        check(given == 1, op, f"expected one of cu_seqlens and ids, got {given}; give one of them")
        near = bounds_of(op, **dict(zip(("window[0]", "window[1]"), (None, None) if window is None else window)))
        if causal:
            near = near[0], 0 if near[1] is None else min(near[1], 0)
        if ids is not None:
            check(S is None, op, f"expected S=None with ids, whose length it is, got {S}; leave it out")
            ids = integers(op, "ids", ids, (1, 2), device)
            check(ids.numel() > 0, op, f"expected ids of at least one position, got shape {tuple(ids.shape)}")
            return cls._from_entries(builders.documents_of_ids(ids.view(-1, ids.shape[-1]), near))
        assert cu_seqlens is not None
        lengths = integers(op, "cu_seqlens", cu_seqlens, (1,), device)
        rising = len(lengths) > 0 and not bool((lengths.diff() < 0).any()) and int(lengths[0]) == 0
        got = f"got {lengths[:5].tolist()}{'...' if len(lengths) > 5 else ''}; give document ids as ids="
        check(rising, op, f"expected cu_seqlens to begin with 0 and never to fall, {got}")
        total = int(lengths[-1])
        check_int(op, max(total, 1), S=total if S is None else S)
        return cls._from_entries(builders.documents_of_lengths(lengths, total if S is None else S, near))

    @classmethod
    def prefix_lm(cls, prefix_lengths: int | Tensor, S: int, *, device: Device = None) -> BlockMask:
        """Keys ``j < prefix or j <= i``; ``prefix_lengths``: one, or ``(B,)`` of integers."""
        op = "BlockMask.prefix_lm"
        check_int(op, 1, S=S)
        lengths = prefix_lengths if isinstance(prefix_lengths, Tensor) else [prefix_lengths]
        prefix = integers(op, "prefix_lengths", lengths, (0, 1), device).view(-1)
        check(len(prefix) > 0, op, "expected prefix_lengths of at least one sequence, got none")
        return cls._from_entries(builders.prefix_lm(prefix, S))

    @classmethod
    def window_with_global(
        cls, S: int, window: int, global_tokens: int, *, causal: bool = False, device: Device = None
    ) -> BlockMask:
        """``|i - j| <= window``, and the first ``global_tokens`` see all keys and are seen by all queries (Beltagy et
        al., Longformer, arXiv 2004.05150); ``causal``: of these, ``j <= i``."""
        op = "BlockMask.window_with_global"
        check_int(op, 1, S=S)
        check_int(op, 0, window=window, global_tokens=global_tokens)
        entries = builders.window_with_global(S, window, min(global_tokens, S), causal, device_of(device))
        return cls._from_entries(entries)

    @classmethod
    def shared_prompt(
        cls, prompt_length: int, answer_lengths: Tensor | Sequence[int], *, device: Device = None
    ) -> BlockMask:
        """A prompt and several answers to it, one after the other, of the given lengths: causal, and answers see the
        prompt and themselves, not each other."""
        op = "BlockMask.shared_prompt"
        check_int(op, 0, prompt_length=prompt_length)
        answers = integers(op, "answer_lengths", answer_lengths, (1,), device)
        fits = not bool((answers < 0).any()) and prompt_length + int(answers.sum()) > 0
        what = "expected answer_lengths of 0 or more, and at least one position"
        check(fits, op, f"{what}, got {answers.tolist()} after a prompt of {prompt_length}")
        return cls._from_entries(builders.shared_prompt(prompt_length, answers))

    @classmethod
    def blocks(
        cls,
        block_mask: Tensor,
        block_size: int,
        Sq: int | None = None,
        Sk: int | None = None,
        *,
        device: Device = None,
    ) -> BlockMask:
        """From a bool matrix of smaller blocks.

        Args:
            block_mask: ``(rows, columns)``, ``(B, rows, columns)`` or ``(B, H, rows, columns)``.
            block_size: 16, 32, 64 or 128.
            Sq, Sk: lengths of which these are the blocks, rounded up; default: as many as the blocks have.
        """
        op = "BlockMask.blocks"
        values = booleans(op, "block_mask", block_mask, device)
        check(block_size in (16, 32, 64, 128), op, f"expected block_size 16, 32, 64 or 128, got {block_size!r}")
        whole = [count * block_size for count in values.shape[2:]]
        lengths = [of_blocks if given is None else given for of_blocks, given in zip(whole, (Sq, Sk))]
        check_int(op, 1, Sq=lengths[0], Sk=lengths[1])
        wanted = tuple(-(-length // block_size) for length in lengths)
        what = f"expected block_mask with {wanted[0]} rows and {wanted[1]} columns for {lengths[0]} queries and"
        got = f"{what} {lengths[1]} keys, got {tuple(values.shape[2:])}"
        check(tuple(values.shape[2:]) == wanted, op, got)
        return cls._from_entries(builders.from_blocks(values, block_size, *lengths))

    @classmethod
    def from_column_ranges(
        cls,
        startend_row_indices: Tensor,
        causal: bool,
        *,
        Sq: int | None = None,
        num_heads: int | None = None,
        device: Device = None,
    ) -> BlockMask:
        """From the ranges of FlashMask (arXiv 2410.01359): which queries do not see a key.

        Args:
            startend_row_indices: int32 ``(B, Hk or 1, Sk, n)``. The queries that key j is hidden from, with `causal`:
                ``[LTS, Sq)`` for n = 1, ``[LTS, LTE)`` for n = 2; without: ``[LTS, Sq)`` and ``[0, UTE)`` for n = 2,
                ``[LTS, LTE)`` and ``[UTS, UTE)`` for n = 4; in this order.
            causal: key j is also hidden from queries ``i < j - (Sk - Sq)``.
            Sq: how many queries; default: as many as keys.
            num_heads: query heads, a multiple of Hk; default: Hk.
        """
        op = "BlockMask.from_column_ranges"
        ranges = integers(op, "startend_row_indices", startend_row_indices, (4,), device)
        counts = (1, 2) if causal else (2, 4)
        fits = ranges.numel() > 0 and ranges.shape[3] in counts
        what = f"expected startend_row_indices of shape (B, Hk, Sk, {counts[0]} or {counts[1]}) for causal={causal}"
        check(fits, op, f"{what}, got {tuple(ranges.shape)}")
        heads = ranges.shape[1]
        if num_heads is not None and heads > 1:
            check_int(op, 1, num_heads=num_heads)
            check(num_heads % heads == 0, op, f"expected num_heads to be a multiple of {heads}, got {num_heads}")
            ranges = ranges.repeat_interleave(num_heads // heads, 1)
        length = ranges.shape[2] if Sq is None else Sq
        check_int(op, 1, Sq=length)
        return cls._from_entries(builders.from_column_ranges(ranges, causal, length))

    @classmethod
    def tree(cls, parents: Tensor | Sequence[int], prefix_length: int = 0, *, device: Device = None) -> BlockMask:
        """Each token sees the prefix, its ancestors and itself (SpecInfer, arXiv 2305.09781). Sq = n; Sk =
        ``prefix_length`` + n. ``parents``: ``(n,)`` or ``(B, n)`` numbers of tokens in any order, -1 for a root. The
        host reads them."""
        op = "BlockMask.tree"
        check_int(op, 0, prefix_length=prefix_length)
        rows = integers(op, "parents", parents, (1, 2), device)
        check(rows.numel() > 0, op, f"expected parents of at least one token, got shape {tuple(rows.shape)}")
        rows = rows.view(-1, rows.shape[-1])
        fits = int(rows.min()) >= -1 and int(rows.max()) < rows.shape[1]
        got = f"got [{int(rows.min())}, {int(rows.max())}]"
        check(fits, op, f"expected parents in [-1, {rows.shape[1] - 1}], {got}; they count from the tree's first token")
        walks = [builders.tours(row) for row in rows.tolist()]
        check(None not in walks, op, "expected parents to lead to a root, -1, got a cycle")
        enter, leave = (torch.tensor([walk[end] for walk in walks if walk], device=rows.device) for end in (0, 1))
        return cls._from_entries(builders.tree(enter, leave, prefix_length))

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        B: int | None,
        H: int | None,
        Sq: int,
        Sk: int,
        *,
        device: Device = None,
    ) -> BlockMask:
        """From FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)`` (arXiv 2412.05496): of int64 numbers, each a tensor
        it makes a bool one. It is called for all elements through `torch.vmap`, 64 blocks at a time, which takes
        O(Sq * Sk) time, but not memory. B, H: None is 1: the mask does not depend on it."""
        op = "BlockMask.from_mask_mod"
        sizes = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Sq": Sq, "Sk": Sk}
        check_int(op, 1, **sizes)
        check(callable(mask_mod), op, f"expected mask_mod to be a function, got {mask_mod!r}")
        return cls._from_entries(mods.from_mask_mod(op, mask_mod, Grid(*sizes.values()), device_of(device)))

    @classmethod
    def from_flex(cls, block_mask: FlexMask, *, device: Device = None) -> BlockMask:
        """From a `torch.nn.attention.flex_attention.BlockMask` of any BLOCK_SIZE. Its mask_mod is called only for
        blocks of 128 in which it lists partial ones."""
        op = "BlockMask.from_flex"
        got = f"got {type(block_mask).__name__}"
        flex = all(hasattr(block_mask, name) for name in ("kv_num_blocks", "full_kv_indices", "mask_mod", "BLOCK_SIZE"))
        check(flex, op, f"expected block_mask to be torch.nn.attention.flex_attention.BlockMask, {got}")
        mask = cls._from_entries(mods.from_flex(op, block_mask))
        return mask if device is None else mask.to(device)


def _flatten(mask: BlockMask) -> tuple[list[Any], tuple[int, int]]:
    return list(mask.op_tensors), mask.seq_lengths


def _flatten_with_keys(mask: BlockMask) -> tuple[list[tuple[Any, Any]], tuple[int, int]]:
    return [(pytree.GetAttrKey(name), tensor) for name, tensor in zip(_FIELDS, mask.op_tensors)], mask.seq_lengths


def _unflatten(tensors: Any, seq_lengths: Any) -> BlockMask:
    return BlockMask._of(seq_lengths, list(tensors))


pytree.register_pytree_node(
    BlockMask,
    _flatten,
    _unflatten,
    serialized_type_name="cuda_ext.BlockMask",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
