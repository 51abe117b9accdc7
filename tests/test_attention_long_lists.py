"""Block masks some of whose lists are much longer than others: several blocks of a kernel share such a list."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_attention import GRADIENT_FACTOR, atol, check, gradient_atol, qkv
from test_attention_block_mask import random_features
from torch import Tensor

import cuda_ext
from cuda_ext import BlockMask, testing
from cuda_ext.testing import assert_op_matches_reference, reference_attention_varlen

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = 128


def skewed_mask(sq: int, sk: int, heads: int = 1, batch: int = 1) -> BlockMask:
    """A few blocks of queries see most keys, and a few blocks of keys are seen by most queries; others are alone."""
    rows, columns = -(-sq // BLOCK), -(-sk // BLOCK)
    visible = torch.rand(batch, heads, rows, columns) < 0.1
    for side in (visible, visible.mT):
        for head in side.flatten(0, 1):
            head[torch.randperm(len(head))[: random.choice((1, 1, 2, 3))]] |= torch.rand(head.shape[1]) < 0.9
    dense = visible.repeat_interleave(BLOCK, -2)[..., :sq, :].repeat_interleave(BLOCK, -1)[..., :sk]
    return BlockMask.from_dense(dense & (torch.rand(1, 1, sq, sk) < random.choice((0.5, 0.9, 1.0))))


def features(batch: int, sq: int, sk: int, heads: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    tensors, options = random_features(batch, sq, sk, heads, dtype)
    if "alibi_slopes" in tensors:
        tensors["alibi_slopes"] *= 0.1  # logits of -1000 have few digits after the point
    return tensors, options


def plans(tensors: dict[str, Tensor], **options: Any) -> list[cuda_ext.AttentionPlan]:
    return [cuda_ext.attention_plan(**tensors, **options, backward=backward) for backward in (False, True)]


@pytest.mark.every_backend
@pytest.mark.sampled(cases=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(25))
def test_random_cases(case: int, dtype: torch.dtype, backend: str) -> None:
    batch, heads_kv, group = random.choice(((1, 1, 1), (1, 1, 3), (1, 2, 1), (2, 1, 1)))
    heads, sq, sk = heads_kv * group, *(random.choice((1024, 1029, 1151, 1300)) for _ in range(2))
    mask = skewed_mask(sq, sk, random.choice((1, heads)), random.choice((1, batch)))
    tensors = qkv(batch, sq, sk, heads, heads_kv, random.choice((8, 64)), random.choice((8, 40)), dtype)
    if backend in ("simt", "ptx", "ptx_sm_90a") and group == 1:
        assert [plan.most_parts for plan in plans(tensors, block_mask=mask)] == [2, 2]
    more, options = features(batch, sq, sk, heads, dtype)
    check({**tensors, **more}, block_mask=mask, **options)


@pytest.mark.every_backend
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", range(10))
def test_packed_sequences(case: int, dtype: torch.dtype) -> None:
    """Short sequences have empty lists; the last rows of the tensors belong to none."""
    lengths_q, lengths_k = ([0, 0, *random.choices((1, 130, 700, 1100), k=2)] for _ in range(2))
    random.shuffle(lengths_q)
    sq, sk, count = max(1, *lengths_q), max(1025, *lengths_k), len(lengths_q)
    mask = skewed_mask(sq, sk, batch=random.choice((1, count)))
    tensors = qkv(1, sum(lengths_q) + 5, sum(lengths_k) + 3, 1, 1, 16, 24, dtype)
    tensors = {name: t.detach()[0].requires_grad_() for name, t in tensors.items()}
    more, options = features(count, sq, sk, 1, dtype)
    cumulative = {
        f"cu_seqlens_{name}": torch.tensor([0, *lengths]).cumsum(0).int()
        for name, lengths in (("q", lengths_q), ("k", lengths_k))
    }
    assert_op_matches_reference(
        cuda_ext.flash_attention_varlen,
        reference_attention_varlen,
        {**tensors, **more, **cumulative},
        {"max_seqlen_q": sq, "max_seqlen_k": sk, "block_mask": mask, "return_lse": True, **options},
        gradient_factor=GRADIENT_FACTOR,
        atol=atol(tensors["value"]),
        gradient_atol=gradient_atol({**tensors, **more}, 700),
    )


def one_long_list(length: int, of_queries: bool) -> BlockMask:
    """One block of queries (or keys) takes part with all others, and the others with themselves."""
    visible = torch.eye(-(-length // BLOCK), dtype=torch.bool)
    (visible if of_queries else visible.mT)[3] = True
    return BlockMask.blocks(visible, BLOCK, length, length)


@pytest.mark.simt
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_parts_are_stored_once(arch: str) -> None:
    """A long list has as many parts as keep four blocks each; only their rows are stored more than once."""
    blocks, dim = 17, 64
    length = blocks * BLOCK
    tensors = qkv(1, length, length, 1, 1, dim, dim, torch.bfloat16)
    mask = one_long_list(length, of_queries=True)
    stored, outs = [], []
    for processors in (1, 4):
        with torch.no_grad(), testing.emulated(arch, processors=processors) as emulation:
            outs.append(cuda_ext.flash_attention(**tensors, block_mask=mask, return_lse=True))
        counters = emulation.counters
        stored.append(counters["global_store_bytes"] + counters["tma_store_bytes"])
    parts = blocks // 4
    with testing.emulated(arch, processors=4):
        plan = cuda_ext.attention_plan(**tensors, block_mask=mask)
        assert plan.most_parts == parts and "divided among up to 4 blocks" in str(plan)
    with testing.emulated(arch, processors=1):
        # On sm_80 two blocks run on an SM.
        assert cuda_ext.attention_plan(**tensors, block_mask=mask).most_parts == (1 if arch == "sm_90a" else 2)
    of_part = BLOCK * (dim + 1) * 4
    assert stored[1] - stored[0] == (parts - (0 if arch == "sm_90a" else 2)) * of_part
    for few, many in zip(*outs):
        torch.testing.assert_close(few, many, atol=1e-2, rtol=1e-2)


@pytest.mark.simt
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_deterministic_gradients_are_not_divided(arch: str) -> None:
    length = 9 * BLOCK
    tensors = qkv(1, length, length, 1, 1, 64, 64, torch.bfloat16)
    mask = one_long_list(length, of_queries=False)
    with testing.emulated(arch):
        most = [plans(tensors, block_mask=mask, deterministic=d)[1].most_parts for d in (False, True)]
    assert most == [2, 1]
