"""What the tests of cuda_ext.integrations.flex share: inputs, block masks, and attention that forms all scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from cuda_ext.integrations import flex

Mod = Callable[..., Tensor]
INF = float("inf")


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    flex.calls(reset=True)
    yield
    assert not flex.is_enabled()


@contextmanager
def all_served(at_least: int = 1) -> Iterator[None]:
    flex.calls(reset=True)
    with flex.enable():
        yield
    found = flex.calls(reset=True)
    assert not found["refused"], found
    assert sum(found["served"].values()) >= at_least


def tensors(
    lengths: tuple[int, int] = (150, 150),
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float64,
    grad: bool = True,
) -> list[Tensor]:
    shapes = [
        (batch, heads[0], lengths[0], dims[0]),
        *((batch, heads[1], lengths[1], dim) for dim in dims),
    ]
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def dense(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None, mask_mod: Mod | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """What flex_attention's documentation says, and the log-sum-exp."""
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    key, value = (each.expand(batch, -1, -1, -1).repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    sizes = enumerate((batch, heads, queries, keys))
    places = [torch.arange(size).view([-1 if each == axis else 1 for each in range(4)]) for axis, size in sizes]
    scores = query @ key.transpose(2, 3) * (dim**-0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*places), scores, -INF)
    lse = scores.logsumexp(3)
    seen = (lse > -INF).unsqueeze(3)
    weights = torch.where(seen, scores - torch.where(seen, lse.unsqueeze(3), 0.0), -INF).exp()
    return weights @ value, lse


def assert_same(given: list[Tensor], score_mod: Mod | None, mask: tuple[Mod, BlockMask] | None, **options: Any) -> None:
    """Output, lse, and the gradients of both with respect to `given` and `options["captured"]`."""
    captured = options.pop("captured", [])
    mask_mod, block_mask = (None, None) if mask is None else mask
    wanted = dense(*given, score_mod, mask_mod, options.get("scale"))
    options |= {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    with all_served():
        out, aux = flex_attention(*given, score_mod, block_mask, **options)
    assert aux.max_scores is None
    seen = wanted[1] > -INF
    results = [(out, aux.lse), wanted]
    weights = torch.randn_like(out), torch.randn_like(aux.lse)
    sums = [(o * weights[0]).sum() + (lse[seen] * weights[1][seen]).sum() for o, lse in results]
    leaves = [*given, *captured]
    gradients = [torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True) for total in sums]
    # Sums of a few hundred numbers of size 1, in another order.
    error = 1e-11 if out.dtype == torch.float64 else 1e-4
    for ours, theirs in zip((*results[0], *gradients[0]), (*wanted, *gradients[1])):
        torch.testing.assert_close(ours, theirs, rtol=error, atol=error)


# Masks

PREFIX = torch.tensor([70, 13])
DOCUMENTS = (torch.arange(150) // 37).expand(2, -1)
SPANS = torch.tensor([5, 40, 130, 400])
MASKS: dict[str, tuple[Mod, int | None, int | None]] = {
    "causal": (lambda b, h, q, k: q >= k, None, None),
    "window": (lambda b, h, q, k: (q - k).abs() <= 20, None, None),
    "nothing seen by some": (lambda b, h, q, k: (k < 30) & (q > 100), None, None),
    "prefix of each batch": (lambda b, h, q, k: (k < PREFIX[b]) | (q >= k), 2, None),
    "documents": (lambda b, h, q, k: (DOCUMENTS[b, q % 150] == DOCUMENTS[b, k % 150]) & (q >= k), 2, None),
    "span of each head": (lambda b, h, q, k: (q - k).abs() < SPANS[h], None, 4),
    "all": (torch_flex.noop_mask, None, None),
}


def block_mask(name: str, lengths: tuple[int, int], size: Any = 128) -> tuple[Mod, BlockMask]:
    mod, batch, heads = MASKS[name]
    return mod, create_block_mask(mod, batch, heads, *lengths, device="cpu", BLOCK_SIZE=size)
