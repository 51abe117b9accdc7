"""The test matrices of other libraries of masked attention: their masks, lengths and heads, by our rule of errors.

Every mask must equal its definition bit for bit, and attention with it the dense reference, in values and gradients.
The rule is that of test_attention.py. A test draws the dtype, the head dim and, if they are no parameters, the heads.

| matrix | here |
|---|---|
| FlashMask, test_flashmask.py: generators and lengths | `test_flashmask`, `test_flashmask_long` |
| the same: heads of queries, of keys, of the mask; head dims | `test_flashmask_heads` |
| the same: 2840 sequences of 32 | `test_flashmask_many_sequences` |
| FlashMask, test_flashmask_backward.py | the same tests, which have its lengths and gradients |
| FlashInfer, test_block_sparse.py: blocks of R x C | `test_flashinfer_blocks`, also lengths that are no multiple |
| the same: blocks of variable size | `test_flashinfer_variable_blocks` |
| FlashAttention-4, test_mask_mod.py: masks, lengths, boundary of queries, empty tiles | `test_fa4_masks` |
| the same: tiles, blocks larger than tiles | `test_fa4_block_sizes` |
| the same: one mask for all heads, keys and values with stride 0 | `test_fa4_*` |
| the same: deterministic backward | `test_same_bits` |
| FlashAttention-4, test_block_sparsity.py | test_block_mask.py, against the definition of the lists |
| MagiAttention, test_flex_flash_attn.py: slices, types, sinks | `test_magi_slices` |
| the same: random slices | `test_magi_random_slices`, also the lengths that it leaves out because it fails |
| the same: accumulation into earlier results | `test_magi_parts_that_are_merged` |
| the same: deterministic, compiled | `test_same_bits`, test_attention_block_mask.py |

In test_attention_block_mask.py are NaN where no block is listed, garbage past the counts, full blocks at a ragged end,
lists in any order, lists of query heads with shared key heads, rows without keys with a sink, lists that change.

What does not apply:

- Lists of our masks are of blocks of 128, whatever the tiles of a kernel are.
- FlashMask's documents with other numbers of queries than keys: the masks here are the lower right parts of square
  ones, so that queries and keys end together. Ranges of other numbers of queries are in test_block_mask.py.
- FlashMask's 16384 positions, FlashInfer's 8192: nothing but more of the same blocks. Long sequences have fewer heads
  here than there, as the reference in float64 would take gigabytes.
- FlashInfer's routes of pages: `flash_attention_with_kvcache`. Its blocks have no gradients, here they have.
- MagiAttention's sinks for each query; several sinks of a head are one, the log of the sum of their exponentials. Its
  slices must not overlap in both directions, here a mask is their union.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from test_attention import GRADIENT_FACTOR, atol, check, gradient_atol, qkv
from test_attention_block_mask import assert_same_bits, outputs
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import cuda_ext
from cuda_ext import BlockMask
from cuda_ext.testing import assert_op_matches_reference, reference_attention

pytestmark = pytest.mark.every_backend

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query and key, which broadcast
Lengths = tuple[int, int]  # of queries and keys
LONG = 800  # the reference has at most LONG * LONG pairs of a query and a key in each head


def is_emulated(backend: str) -> bool:
    return backend not in ("cpu", "cuda")


def fitting(lengths: Lengths, backend: str) -> Lengths:
    """Emulated kernels take seconds for long sequences: those have other whole blocks, but the same last one."""

    def fits(length: int) -> int:
        return 256 + length % 128 if is_emulated(backend) and length > 384 else length

    return fits(lengths[0]), fits(lengths[1])


def dense_of(visible: Visible, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """bool (batch, heads, queries, keys)"""
    shape = (batch, heads, queries, keys)
    places = [torch.arange(n).view(-1, *[1] * (3 - axis)) for axis, n in enumerate(shape)]
    return visible(*places).expand(shape)


def random_qkv(
    batch: int, lengths: Lengths, heads: Lengths, backend: str, dims: tuple[int, ...] = (64, 128)
) -> dict[str, Tensor]:
    dim = random.choice((16, 24, 32) if is_emulated(backend) else dims)
    return qkv(batch, *lengths, *heads, dim, dim, random.choice(DTYPES))


def check_masked(tensors: dict[str, Tensor], mask: BlockMask, dense: Tensor, **options: Any) -> None:
    """`dense` is the definition of the mask, (B or 1, H or 1, Sq, Sk). Of many queries, the reference computes some,
    and the gradients are those of their outputs."""
    queries, keys = mask.seq_lengths
    assert torch.equal(*torch.broadcast_tensors(mask.to_dense(), dense))
    count = LONG * LONG // max(queries, keys)
    terms = max(700, min(queries, count), keys)
    if queries <= count:
        return check(tensors, terms, block_mask=mask, **options)
    rows = torch.randperm(queries)[:count].sort().values

    def some_rows(**arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = cuda_ext.flash_attention(**arguments, block_mask=mask, return_lse=True)
        return out[:, rows], lse[..., rows]

    def reference(query: Tensor, **arguments: Any) -> Any:
        return reference_attention(query[:, rows], **arguments, attn_mask=dense[..., rows, :], return_lse=True)

    assert_op_matches_reference(
        some_rows,
        reference,
        tensors,
        options,
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"], terms),
        gradient_atol=gradient_atol(tensors, terms),
    )


# FlashMask


class Columns(NamedTuple):
    """A mask as FlashMask describes it, and its definition."""

    ranges: Tensor  # (batch, heads, length, n): the queries that keys are hidden from
    causal: bool
    visible: Visible


def plain_columns(kind: str, length: int) -> tuple[list[Tensor | int], bool, Visible]:
    key = torch.arange(length)
    window, few = max(1, length // 8), min(16, length // 8)
    masks: dict[str, tuple[list[Tensor | int], bool, Visible]] = {
        "full": ([length, 0], False, lambda b, h, q, k: (q >= 0) & (k >= 0)),
        "causal": ([length], True, lambda b, h, q, k: k <= q),
        "causal_without_end": ([length, length], True, lambda b, h, q, k: k <= q),
        "window": ([key + window], True, lambda b, h, q, k: (k <= q) & (q < k + window)),
        "window_with_global": (
            [torch.where(key < few, length, key + window + 1), length, few, torch.where(key < few, 0, key - window)],
            False,
            lambda b, h, q, k: ((q - k).abs() <= window) | (q < few) | (k < few),
        ),
        "prefix_lm": (
            [length, torch.where(key < window, 0, key)],
            False,
            lambda b, h, q, k: (k < window) | (k <= q),
        ),
    }
    return masks[kind]


def columns_of_documents(kind: str, length: int) -> tuple[list[Tensor | int], bool, Visible]:
    """Of three documents and padding, which is the fourth."""
    key = torch.arange(length)
    ends = torch.tensor([2538, 4280, 7493, 8192]) * length // 8192
    document = torch.searchsorted(ends, key, right=True)
    begin, end, padding = F.pad(ends, (1, 0))[document], ends[document], document == 3
    prefix = begin + torch.tensor([1024, 1742, 512, 0])[document] * length // 8192
    total = ends[2]

    def same(q: Tensor, k: Tensor) -> Tensor:
        return document[q] == document[k]

    masks: dict[str, tuple[list[Tensor | int], bool, Visible]] = {
        "causal_documents": ([end], True, lambda b, h, q, k: same(q, k) & (k <= q)),
        "documents": (
            [torch.where(padding, 0, end), begin],
            False,
            lambda b, h, q, k: same(q, k) & ~padding[k],
        ),
        "share_question": (
            [torch.where((document == 0) | padding, total, end)],
            True,
            lambda b, h, q, k: (k <= q) & (q < total) & (same(q, k) | (document[k] == 0)),
        ),
        "causal_blockwise": (
            [end, torch.where(document < 2, ends[1], end)],
            True,
            lambda b, h, q, k: (k <= q) & (same(q, k) | (document[q] >= 2)),
        ),
        "prefix_lm_documents": (
            [torch.where(padding, 0, end), torch.where(key < prefix, begin, key)],
            False,
            lambda b, h, q, k: same(q, k) & ~padding[k] & ((k < prefix[k]) | (k <= q)),
        ),
    }
    return masks[kind]


def columns_of_holes(length: int) -> tuple[list[Tensor | int], bool, Visible]:
    """Two intervals of positions whose queries do not see their own keys."""
    bounds = torch.tensor([1024, 1562, 2358, 4058]) * length // 8192
    key = torch.arange(length)
    place = torch.searchsorted(bounds, key, right=True)
    inside = place % 2 == 1
    end = F.pad(bounds, (0, 1), value=length)[place]
    ranges: list[Tensor | int] = [torch.where(inside, key, length), torch.where(inside, end, length)]
    return ranges, True, lambda b, h, q, k: (k <= q) & ~((place[q] == place[k]) & inside[k])


def columns_of_evictions(batch: int, heads: int, length: int) -> tuple[list[Tensor | int], bool, Visible]:
    """Half of the keys leave the cache, each at a query after the first half. Every head has its own."""
    key = torch.arange(length)
    last = torch.maximum(torch.randint(length // 2, length + 1, (batch, heads, length)), key + 1)
    last = torch.where(torch.rand(batch, heads, length) < 0.5, last, length)
    return [last], True, lambda b, h, q, k: (k <= q) & (q < last[b, h, k])


PLAIN = ("full", "causal", "causal_without_end", "window", "window_with_global", "prefix_lm")
OF_DOCUMENTS = ("causal_documents", "documents", "share_question", "causal_blockwise", "prefix_lm_documents")
FLASHMASK = (*PLAIN, *OF_DOCUMENTS, "qk_sparse", "random_eviction")


def columns(kind: str, batch: int, heads: int, length: int) -> Columns:
    if kind in PLAIN:
        bounds, causal, visible = plain_columns(kind, length)
    elif kind in OF_DOCUMENTS:
        bounds, causal, visible = columns_of_documents(kind, length)
    elif kind == "qk_sparse":
        bounds, causal, visible = columns_of_holes(length)
    else:
        bounds, causal, visible = columns_of_evictions(batch, heads, length)
    shape = (batch, heads, length)
    ranges = torch.stack([torch.as_tensor(each).expand(shape) for each in bounds], -1)
    return Columns(ranges.int(), causal, visible)


def check_columns(kind: str, batch: int, lengths: Lengths, heads: Lengths, mask_heads: int, tensors: Any) -> None:
    length = max(lengths)
    described = columns(kind, batch, mask_heads, length)
    mask = BlockMask.from_column_ranges(described.ranges, described.causal, num_heads=heads[0])
    dense = dense_of(described.visible, batch, mask_heads, length, length)
    if mask_heads > 1:
        dense = dense.repeat_interleave(heads[0] // mask_heads, 1)
    if lengths != (length, length):
        first = length - lengths[0], length - lengths[1]
        assert torch.equal(mask.to_dense(), dense)
        dense = dense[:, :, first[0] :, first[1] :]
        mask = BlockMask.from_dense(mask.to_dense()[:, :, first[0] :, first[1] :])
    check_masked(tensors, mask, dense)


FLASHMASK_LENGTHS = [
    *((31, 31), (32, 32), (61, 61), (64, 64), (96, 96), (128, 128), (132, 132), (256, 256), (300, 300), (512, 512)),
    *((128, 127), (127, 128), (128, 256), (256, 128), (132, 256), (256, 132), (128, 799), (799, 128), (1, 128)),
    *((64, 192), (113, 203), (239, 203), (113, 211), (799, 217), (108, 256), (384, 512), (640, 128), (512, 1023)),
    *((1024, 1024), (1024, 1023), (1023, 1024)),
]
FLASHMASK_HEADS = [(1, 1), (4, 1), (4, 4), (6, 1), (6, 2), (6, 6), (14, 1), (16, 4), (16, 16), (32, 4)]


@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("lengths", FLASHMASK_LENGTHS, ids=str)
@pytest.mark.parametrize("kind", FLASHMASK)
def test_flashmask(kind: str, lengths: Lengths, backend: str) -> None:
    lengths, batch, heads = fitting(lengths, backend), random.choice((1, 2)), random.choice(((1, 1), (2, 1), (4, 2)))
    tensors = random_qkv(batch, lengths, heads, backend)
    check_columns(kind, batch, lengths, heads, random.choice((1, heads[1])), tensors)


@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("mask_heads", ["one", "of_keys"])
@pytest.mark.parametrize("heads", FLASHMASK_HEADS, ids=str)
@pytest.mark.parametrize("kind", FLASHMASK)
def test_flashmask_heads(kind: str, heads: Lengths, mask_heads: str, backend: str) -> None:
    lengths = random.choice(((203, 203), (129, 129), (113, 211), (200, 131)))
    tensors = random_qkv(1, lengths, heads, backend, (64, 80, 128, 192, 256))
    check_columns(kind, 1, lengths, heads, 1 if mask_heads == "one" else heads[1], tensors)


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.parametrize("kind", ["documents", "qk_sparse", "window_with_global", "random_eviction"])
def test_flashmask_many_sequences(kind: str, backend: str) -> None:
    batch = 40 if is_emulated(backend) else 2840
    check_columns(kind, batch, (32, 32), (2, 1), 1, random_qkv(batch, (32, 32), (2, 1), backend, (16,)))


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("lengths", [(4096, 4224), (4224, 4096), (8191, 8192), (8192, 8191)], ids=str)
@pytest.mark.parametrize("kind", FLASHMASK)
def test_flashmask_long(kind: str, lengths: Lengths, backend: str) -> None:
    lengths = fitting(lengths, backend)
    check_columns(kind, 1, lengths, (1, 1), 1, random_qkv(1, lengths, (1, 1), backend, (64,)))


# FlashInfer

FLASHINFER_HEADS = [(1, 1), (4, 1), (4, 4), (16, 1), (16, 4), (16, 16)]


@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("keys", [64, 128, 203, 256])
@pytest.mark.parametrize("queries", [64, 113, 128, 256])
@pytest.mark.parametrize("columns", [1, 4, 16, 128])
@pytest.mark.parametrize("rows", [1, 4, 16, 128])
def test_flashinfer_blocks(rows: int, columns: int, queries: int, keys: int, inside: bool, backend: str) -> None:
    """A quarter of the blocks; of these, with `inside`, half of the elements."""
    blocks = torch.rand(-(-queries // rows), -(-keys // columns)) < 0.25
    elements = torch.rand(queries, keys) < (0.5 if inside else 2.0)
    dense = blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:queries, :keys] & elements
    if rows == columns and rows >= 16:
        mask = BlockMask.blocks(blocks, rows, queries, keys)
        mask = mask & BlockMask.from_dense(elements) if inside else mask
    else:
        mask = BlockMask.from_mask_mod(
            lambda b, h, q, k: blocks[q // rows, k // columns] & elements[q, k], None, None, queries, keys
        )
    heads = random.choice(FLASHINFER_HEADS)
    dims = (128, 256) if heads[0] < 16 else (128,)
    check_masked(random_qkv(1, (queries, keys), heads, backend, dims), mask, dense)


def random_parts(length: int, parts: int) -> Tensor:
    """(length,): the number of the part that each position is in; all of them have positions."""
    begins = torch.randperm(length - 1)[: parts - 1] + 1
    return torch.bucketize(torch.arange(length), begins.sort().values, right=True)


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("density", [0.2, 0.7, 0.9])
@pytest.mark.parametrize("columns", [50, 100])
@pytest.mark.parametrize("rows", [10, 20])
@pytest.mark.parametrize("length", [256, 1001, 4096])
def test_flashinfer_variable_blocks(length: int, rows: int, columns: int, density: float, backend: str) -> None:
    """Every head of keys has its own division into blocks, and its own blocks."""
    length, _ = fitting((length, length), backend)
    heads, heads_kv = random.choice(FLASHINFER_HEADS if length < 300 else FLASHINFER_HEADS[:2])
    blocks = torch.rand(heads_kv, rows, columns) > density
    row = torch.stack([random_parts(length, rows) for _ in range(heads_kv)])
    column = torch.stack([random_parts(length, columns) for _ in range(heads_kv)])
    group = heads // heads_kv

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = h // group
        return blocks[own, row[own, q], column[own, k]]

    dense = dense_of(visible, 1, heads, length, length)
    mask = BlockMask.from_dense(dense)
    if length < 300:
        mask = BlockMask.from_mask_mod(visible, None, heads, length, length)
    check_masked(random_qkv(1, (length, length), (heads, heads_kv), backend), mask, dense)


# FlashAttention-4


WINDOWS = {f"window_{reach}": reach for reach in (64, 128, 256, 512)}
FA4_MASKS = (
    *("block_diagonal", "mini_causal", "causal", "document", "prefix_lm", "dilated", "read_from_a_table"),
    *WINDOWS,
)


def fa4_mask(name: str, lengths: Lengths) -> Visible:
    queries, keys = lengths
    ahead = keys - queries
    documents = random_parts(max(lengths), random.randint(1, math.isqrt(max(1, max(lengths) // 4)) + 1))
    threshold = torch.full((keys,), keys // 4 * 3)
    masks: dict[str, Visible] = {
        "block_diagonal": lambda b, h, q, k: q // 128 == k // 128,
        "mini_causal": lambda b, h, q, k: q % 128 >= k % 128,
        "causal": lambda b, h, q, k: k <= q + ahead,
        "document": lambda b, h, q, k: documents[q] == documents[k],
        "prefix_lm": lambda b, h, q, k: ((q < 512) & (k < 512)) | (k <= q),
        "dilated": lambda b, h, q, k: (k <= q) & (q - k < 256) & ((q - k) % 2 == 0),
        "read_from_a_table": lambda b, h, q, k: (k >= threshold[k]) & (q >= 0),
    }
    return masks[name] if name in masks else lambda b, h, q, k: (q + ahead - k).abs() <= WINDOWS[name]


FA4_LENGTHS = [
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211)),
    *((108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023)),
    # Ends of queries inside a block.
    *((200, 200), (257, 257), (300, 300), (129, 129), (255, 255), (500, 512), (512, 500), (333, 444)),
    *((4096, 4096), (4224, 4224), (128, 8192), (8192, 128)),
]


@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("lengths", FA4_LENGTHS, ids=str)
@pytest.mark.parametrize("name", FA4_MASKS)
def test_fa4_masks(name: str, lengths: Lengths, backend: str) -> None:
    lengths = fitting(lengths, backend)
    heads = random.choice(((4, 4), (4, 1), (8, 2)) if max(lengths) < 600 else ((1, 1), (2, 1)))
    visible = fa4_mask(name, lengths)
    mask = BlockMask.from_mask_mod(visible, None, None, *lengths)
    check_masked(random_qkv(1, lengths, heads, backend), mask, dense_of(visible, 1, 1, *lengths))


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("size", [(128, 128), (128, 112), (64, 128), (256, 128), (512, 128), (768, 128)], ids=str)
@pytest.mark.parametrize("name", FA4_MASKS)
def test_fa4_block_sizes(name: str, size: Lengths, backend: str) -> None:
    """Masks that FlexAttention has made, of blocks of other sizes."""
    lengths = fitting(random.choice(((257, 257), (333, 444), (640, 512), (801, 301))), backend)
    visible = fa4_mask(name, lengths)
    device = torch.get_default_device()
    theirs = flex.create_block_mask(visible, None, None, *lengths, device=device, BLOCK_SIZE=size)
    dense = dense_of(visible, 1, 1, *lengths)
    check_masked(random_qkv(1, lengths, (4, 1), backend), BlockMask.from_flex(theirs), dense)


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("size", [(None, 8), (2, None), (2, 8)], ids=str)
@pytest.mark.parametrize("name", ["causal", "document"])
def test_fa4_one_mask_for_all_heads(name: str, size: tuple[int | None, int | None], backend: str) -> None:
    """The mask of one head of one sequence is that of each, so all bits are the same."""
    length = 129 if is_emulated(backend) else 257
    visible, tensors = fa4_mask(name, (length, length)), random_qkv(2, (length, length), (8, 2), backend)
    one, several = (BlockMask.from_mask_mod(visible, *each, length, length) for each in ((None, None), size))
    assert one.shape[:2] == (1, 1) and several.shape[:2] == tuple(n or 1 for n in size)
    assert_same_bits(outputs(tensors, block_mask=several), outputs(tensors, block_mask=one))


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("name", ["causal", "mini_causal"])
def test_fa4_keys_and_values_with_stride_0(name: str, backend: str) -> None:
    tensors, visible = random_qkv(1, (300, 300), (4, 1), backend), fa4_mask(name, (300, 300))
    for which in ("key", "value"):
        tensors[which] = tensors[which].detach().expand(-1, -1, 4, -1).requires_grad_()
        assert tensors[which].stride(2) == 0
    mask = BlockMask.from_mask_mod(visible, None, None, 300, 300)
    check_masked(tensors, mask, dense_of(visible, 1, 1, 300, 300))


# MagiAttention: slices of queries and keys, each full, causal (which ends in its lower right corner), inverse causal
# (which begins in its upper left corner), or both.

Slice = tuple[int, int, int, int]  # first and last query, first and last key; the last ones are outside
TYPES = {"full": 0, "causal": 1, "inverse_causal": 2, "bi_causal": 3}
EDGES = (0, 256, 512, 1024, 1280, 1536, 1792, 2048)
ODD_EDGES = (0, 371, 389, 470, 840, 985, 1003, 1015, 1019, 1022, 1023)
PIECES = {  # keys of the first edges' queries
    0: [(0, 256), (512, 768), (1011, 1123)],
    1: [(0, 512), (777, 888)],
    2: [(0, 1024)],
    3: [(1024, 1280)],
    4: [(0, 128), (555, 556), (777, 982), (1024, 1536), (1689, 1898)],
    5: [(1024, 1792)],
    6: [(1024, 2048)],
}
ROWS = [*zip(EDGES, EDGES[1:])]


def slices_with(keys: dict[int, list[Lengths]]) -> list[Slice]:
    return [(*ROWS[row], *each) for row, several in keys.items() for each in several]


SLICES: dict[str, list[Slice]] = {
    "all": [(0, 2048, 0, 2048)],
    "odd_documents": [(*each, *each) for each in zip(ODD_EDGES, ODD_EDGES[1:])],
    "documents": [(*each, *each) for each in ROWS],
    "block_causal": [(begin, end, 0, end) for begin, end in ROWS],
    "block_causal_documents": [(begin, end, begin // 1024 * 1024, end) for begin, end in ROWS],
    "sparse": slices_with(PIECES),
    # Queries that no slice has.
    "disjoint_block_causal": [(begin, end, begin // 1024 * 1024, end) for begin, end in ROWS if begin != 1536],
    "disjoint_sparse": slices_with({row: keys for row, keys in PIECES.items() if row != 2}),
    "same_keys": slices_with(PIECES | {1: [(0, 256), (777, 888)], 3: [(1024, 1536)], 5: [(1024, 1536)]}),
    "overlapping": [*slices_with(PIECES), (100, 900, 50, 1100), (130, 1300, 1000, 1200)],
    "grid": [(50 * i, 50 * i + 50, 50 * j, 50 * j + 50) for i in range(50) for j in range(50)],
}


def scaled(slices: list[Slice], backend: str) -> list[Slice]:
    if not is_emulated(backend):
        return slices
    part = max(ends_of(slices)) // 256
    return [(q0 // part, q1 // part, k0 // part, k1 // part) for q0, q1, k0, k1 in slices]


def ends_of(slices: list[Slice]) -> Lengths:
    return max(each[1] for each in slices), max(each[3] for each in slices)


def types_of(name: str, count: int) -> list[int]:
    return [random.choice([*TYPES.values()]) if name == "random" else TYPES[name] for _ in range(count)]


def union(slices: list[Slice], types: list[int], lengths: Lengths) -> Tensor:
    dense = torch.zeros(lengths, dtype=torch.bool)
    for (q0, q1, k0, k1), kind in zip(slices, types, strict=True):
        query, key = torch.arange(q1 - q0).view(-1, 1), torch.arange(k1 - k0)
        part = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if kind in (TYPES["causal"], TYPES["bi_causal"]):
            part &= key - (k1 - k0) <= query - (q1 - q0)
        if kind in (TYPES["inverse_causal"], TYPES["bi_causal"]):
            part &= key >= query
        dense[q0:q1, k0:k1] |= part
    return dense


def mask_of_slices(slices: list[Slice], types: list[int], lengths: Lengths) -> BlockMask:
    """As a function of the elements, from the tables that MagiAttention takes."""
    q0, q1, k0, k1 = torch.tensor(slices).T
    low, high = (torch.tensor([bool(kind & bit) for kind in types]) for bit in (2, 1))

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1)
        return (inside & (~low | (k - k0 >= q - q0)) & (~high | (k1 - k >= q1 - q))).any()

    return BlockMask.from_mask_mod(visible, None, None, *lengths)


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("types", [*TYPES, "random"])
@pytest.mark.parametrize("name", SLICES)
def test_magi_slices(name: str, types: str, backend: str) -> None:
    slices = scaled(SLICES[name], backend)
    kinds, lengths = types_of(types, len(slices)), ends_of(slices)
    dense = union(slices, kinds, lengths)
    by_elements = types == "random" and len(slices) < 20
    mask = mask_of_slices(slices, kinds, lengths) if by_elements else BlockMask.from_dense(dense)
    tensors = random_qkv(1, lengths, random.choice(((1, 1), (2, 2), (4, 1))), backend)
    if sinks := random.choice((0, 1, 2, 4, 6, 8)):
        heads = tensors["query"].shape[2]
        tensors["sinks"] = torch.randn(sinks, heads).logsumexp(0).to(tensors["query"].dtype).requires_grad_()
    check_masked(tensors, mask, dense)


# Lengths, and the shortest and longest ranges of queries and of keys. MagiAttention skips the last two.
RANDOM_SLICES = [
    ((1024, 1024), (16, 64), (16, 64)),
    ((2048, 2048), (32, 128), (32, 128)),
    ((2048, 4096), (16, 256), (64, 512)),
    ((4096, 2048), (64, 512), (16, 256)),
    ((513, 123), (1, 513), (1, 123)),
    ((1023, 2077), (1, 1023), (1, 2077)),
]


def random_slices(most: int, lengths: Lengths, of_queries: Lengths, of_keys: Lengths) -> list[Slice]:
    """Rectangles without a common element; fewer than `most` where these are hard to find."""
    taken, slices, failures = torch.zeros(lengths, dtype=torch.bool), list[Slice](), 0
    while len(slices) < most and failures < 200:
        sizes = [min(random.randint(*sides), length) for sides, length in zip((of_queries, of_keys), lengths)]
        q0, k0 = (random.randint(0, length - size) for length, size in zip(lengths, sizes))
        part = taken[q0 : q0 + sizes[0], k0 : k0 + sizes[1]]
        if part.any():
            failures += 1
            continue
        part.fill_(True)
        slices.append((q0, q0 + sizes[0], k0, k0 + sizes[1]))
        failures = 0
    return slices


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("types", [*TYPES, "random"])
@pytest.mark.parametrize("most", [10, 100, 1000])
@pytest.mark.parametrize("sizes", RANDOM_SLICES, ids=lambda sizes: str(sizes[0]))
def test_magi_random_slices(sizes: tuple[Lengths, Lengths, Lengths], most: int, types: str, backend: str) -> None:
    lengths = fitting(sizes[0], backend)
    slices = random_slices(most, lengths, *sizes[1:])
    dense = union(slices, types_of(types, len(slices)), lengths)
    heads = random.choice(((1, 1), (2, 1)))
    check_masked(random_qkv(1, lengths, heads, backend), BlockMask.from_dense(dense), dense)


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("types", [*TYPES, "random"])
def test_magi_parts_that_are_merged(types: str, backend: str) -> None:
    """Slices in two calls, whose results are merged, are as those in one."""
    lengths = (129, 200) if is_emulated(backend) else (513, 400)
    parts: list[Tensor] = []
    while not parts or not all(part.any() for part in parts):  # a slice that is causal at both ends may have no pairs
        slices = random_slices(40, lengths, (20, 100), (20, 100))
        kinds = types_of(types, len(slices))
        parts = [union(slices[n::2], kinds[n::2], lengths) for n in (0, 1)]
    masks = [BlockMask.from_dense(part) for part in parts]
    assert not (parts[0] & parts[1]).any()

    def in_two_calls(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (cuda_ext.flash_attention(**tensors, block_mask=mask, return_lse=True) for mask in masks)
        return cuda_ext.merge_attention(*first, *second)

    tensors = qkv(1, *lengths, 4, 2, 32, 32, torch.float32)
    assert_op_matches_reference(
        in_two_calls,
        reference_attention,
        tensors,
        reference_options={"block_mask": masks[0] | masks[1], "return_lse": True},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
    )


# Bits


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*FLASHMASK, *FA4_MASKS, "sparse", "same_keys", "overlapping"])
def test_same_bits(name: str, dtype: torch.dtype) -> None:
    """Two deterministic calls, with shared key heads."""
    length = 260
    if name in FLASHMASK:
        described = columns(name, 1, 1, length)
        mask = BlockMask.from_column_ranges(described.ranges, described.causal)
    elif name in FA4_MASKS:
        mask = BlockMask.from_mask_mod(fa4_mask(name, (length, length)), None, None, length, length)
    else:
        slices = scaled(SLICES[name], "simt")
        length = max(ends_of(slices))
        mask = BlockMask.from_dense(union(slices, types_of("random", len(slices)), (length, length)))
    tensors = qkv(1, length, length, 2, 1, 32, 32, dtype)
    assert_same_bits(outputs(tensors, block_mask=mask), outputs(tensors, block_mask=mask))
