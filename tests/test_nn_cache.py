"""`cuda_ext.nn.SelfAttention` with a cache computes, step by step, what it computes on whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuda_ext.nn import KeyValueCache, SelfAttention

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"num_kv_heads": 2},
    "window": {"window": (5, 0)},
    "softcap, sinks, no rotary": {"softcap": 3.0, "sinks": True, "rotary_base": None},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_in_steps(name: str, dtype: torch.dtype) -> None:
    """Prompts of different lengths, padded on the right, then two tokens, then one at a time."""
    module = SelfAttention(64, 4, **OPTIONS[name], dtype=dtype)
    if module.sinks is not None:
        module.sinks.normal_()
    prompts, steps = torch.tensor([3, 20, 7]), (2, 1, 1, 1)
    longest = prompts + sum(steps)
    x = torch.randn(3, int(longest.max()), 64).to(dtype)
    whole = module(x)
    cache = KeyValueCache(2, longest.tolist(), module.num_kv_heads, module.head_dim, page_size=4, dtype=dtype)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    tolerance: dict[str, float] = {"atol": 1e-10, "rtol": 0} if dtype == torch.float64 else {"atol": 2e-2, "rtol": 2e-2}
    out = module(x[:, : int(prompts.max())], cache=cache[1])
    for b, length in enumerate(prompts.tolist()):
        torch.testing.assert_close(out[b, :length], whole[b, :length], **tolerance)
    cache.advance(prompts.int())
    rows = torch.arange(3).unsqueeze(1)
    for step in steps:
        at = cache.seqlens.unsqueeze(1) + torch.arange(step)
        residual = torch.randn(3, step, 64).to(dtype)
        out = module(x[rows, at], residual, cache=cache[1])
        torch.testing.assert_close(out, whole[rows, at] + residual, **tolerance)
        cache.advance(step)
    assert torch.equal(cache.seqlens, longest.int())
    assert cache.keys[0].isnan().all()  # of the other layer
    cache.reset()
    torch.testing.assert_close(module(x[:, :3], cache=cache[1]), whole[:, :3], **tolerance)


def test_pages_of_each_sequence_are_its_own() -> None:
    cache = KeyValueCache(3, [130, 1, 64], 2, 16, page_size=64)
    assert len(cache) == 3 and cache.keys.shape == (3, 1 + 3 + 1 + 1, 64, 2, 16) and cache.capacity == 130
    used = [page for row in cache.block_table.tolist() for page in row if page]
    assert sorted(used) == [1, 2, 3, 4, 5]


def test_a_full_cache_and_wrong_arguments() -> None:
    module, x = SelfAttention(64, 4), torch.randn(1, 3, 64)
    cache = KeyValueCache(1, [4], 4, 16, page_size=4)
    with torch.no_grad():
        module(x, cache=cache[0])
        cache.advance(3)
        with pytest.raises(RuntimeError, match="the cache is full: expected room for 3 new rows after 3"):
            module(x, cache=cache[0])
        with pytest.raises(
            RuntimeError,
            match="expected no attn_bias, attn_mask, relative_bias, block_mask or dropout with cache, got attn_bias; ",
        ):
            module(x, attn_bias=torch.zeros(3, 3), cache=cache[0])
        with pytest.raises(RuntimeError, match=r"dropout_p=0\.5; .* call eval"):
            SelfAttention(64, 4, dropout_p=0.5)(x, cache=cache[0])
    with pytest.raises(ValueError, match="expected page_size above 0, got 0"):
        KeyValueCache(1, [4], 4, 16, page_size=0)
    with pytest.raises(ValueError, match=r"expected max_seqlens above 0, got \[4, 0\]"):
        KeyValueCache(1, [4, 0], 4, 16)


@pytest.mark.sampled
@torch.no_grad()
def test_compiled() -> None:
    module = SelfAttention(64, 4, num_kv_heads=2)
    x = torch.randn(2, 9, 64)
    caches = [KeyValueCache(1, [9, 9], 2, 16, page_size=4) for _ in range(2)]
    for cache in caches:
        cache.keys.zero_()
    compiled = torch.compile(module, fullgraph=True)
    for n in range(9):
        outs = []
        for call, cache in zip((module, compiled), caches):
            outs.append(call(x[:, n : n + 1], cache=cache[0]))
            cache.advance(1)
        torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(caches[1].keys, caches[0].keys)
