"""flash_attention and flash_attention_varlen with a BlockMask: values and gradients against the reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_attention import GRADIENT_FACTOR, atol, check, qkv
from torch import Tensor

import cuda_ext
from cuda_ext import BlockMask
from cuda_ext.testing import assert_op_matches_reference, reference_attention_varlen

pytestmark = pytest.mark.every_backend

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LENGTHS = (1, 7, 64, 100, 127, 128, 129, 200, 256, 300, 389)


def random_mask(kind: str, batch: int, heads: int, sq: int, sk: int) -> BlockMask:
    """A mask of one builder. Those of one length are cut out of a square one."""
    size = max(sq, sk)
    if kind == "blocks":
        side = random.choice((16, 32, 64, 128))
        shape = (*random.choice(((), (batch, heads))), -(-sq // side), -(-sk // side))
        return BlockMask.blocks(torch.rand(shape) < 0.4, side, sq, sk)
    if kind == "causal":
        return BlockMask.causal(sq, sk)
    if kind == "window":
        return BlockMask.window(sq, sk, random.choice((0, 5, 130)), random.choice((0, 40, None)))
    if kind == "dense":
        shape = (random.choice((1, batch)), random.choice((1, heads)), sq, sk)
        return BlockMask.from_dense(torch.rand(shape) < random.choice((0.05, 0.5, 0.95)))
    if kind == "documents":
        ids = torch.randint(0, 4, (size,)).sort().values
        dense = BlockMask.documents(ids=ids, causal=random.random() < 0.5)
    elif kind == "prefix_lm":
        dense = BlockMask.prefix_lm(torch.randint(0, size + 1, (batch,)), size)
    elif kind == "window_with_global":
        dense = BlockMask.window_with_global(size, 40, min(size, 20))
    else:
        raise AssertionError(kind)
    return BlockMask.from_dense(dense.to_dense()[..., :sq, :sk])


KINDS = ("blocks", "causal", "window", "dense", "documents", "prefix_lm", "window_with_global")


def random_features(batch: int, sq: int, sk: int, heads: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    tensors: dict[str, Tensor] = {}
    options: dict[str, Any] = {}
    if random.random() < 0.3:
        options["causal"] = True
    elif random.random() < 0.3:
        options["window"] = (random.choice((3, 150, None)), random.choice((3, 150, None)))
    if random.random() < 0.3:
        options["softcap"] = 3.0
    if random.random() < 0.3:
        tensors["alibi_slopes"] = torch.rand(heads)
    if random.random() < 0.3:
        tensors["sinks"] = torch.randn(heads, dtype=torch.float64).to(dtype).requires_grad_()
    if random.random() < 0.3:
        shape = (random.choice((1, batch)), random.choice((1, heads)), sq, sk)
        tensors["attn_bias"] = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
    if random.random() < 0.2:
        tensors["attn_mask"] = torch.rand(random.choice((1, batch)), 1, 1, sk) < 0.8
    return tensors, options


@pytest.mark.sampled(cases=14)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(100))
def test_random_cases(case: int, dtype: torch.dtype) -> None:
    batch, heads_kv, group = random.choice((1, 2)), random.choice((1, 2)), random.choice((1, 3))
    heads, sq, sk = heads_kv * group, random.choice(LENGTHS), random.choice(LENGTHS)
    mask = random_mask(random.choice(KINDS), batch, heads, sq, sk)
    tensors = qkv(batch, sq, sk, heads, heads_kv, random.choice((8, 24, 64)), random.choice((8, 40)), dtype)
    more, options = random_features(batch, sq, sk, heads, dtype)
    check({**tensors, **more}, block_mask=mask, **options)


@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(15))
def test_random_cases_of_packed_sequences(case: int, dtype: torch.dtype) -> None:
    """The last rows of the tensors belong to no sequence."""
    lengths_q = torch.tensor([random.choice((0, *LENGTHS)) for _ in range(3)])
    lengths_k = torch.tensor([random.choice((0, *LENGTHS)) for _ in range(3)])
    sq, sk = int(lengths_q.max()), int(lengths_k.max())
    mask = random_mask(random.choice(KINDS), 3, 2, max(1, sq), max(1, sk))
    tensors = qkv(1, int(lengths_q.sum()) + 5, int(lengths_k.sum()) + 3, 2, 1, 16, 24, dtype)
    tensors = {name: t.detach()[0].requires_grad_() for name, t in tensors.items()}
    more, options = random_features(3, max(1, sq), max(1, sk), 2, dtype)
    tensors |= more
    cumulative = {
        f"cu_seqlens_{n}": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        for n, lengths in (("q", lengths_q), ("k", lengths_k))
    }
    assert_op_matches_reference(
        cuda_ext.flash_attention_varlen,
        reference_attention_varlen,
        {**tensors, **cumulative},
        {"max_seqlen_q": max(1, sq), "max_seqlen_k": max(1, sk), "block_mask": mask, "return_lse": True, **options},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
    )
