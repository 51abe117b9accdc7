"""Context parallel attention among other features: errors on every rank, derivatives, checkpoints, compilers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_common import Bytes, Case, Check
from ranks import on_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cuda_ext import _group_calls, flash_attention, flash_attention_varlen
from cuda_ext.distributed import context_parallel as cp
from cuda_ext.distributed.context_parallel import Layout

CAUSAL = Case(4, 2, (32, 32), {"causal": True})


def operands(rows: int = 8, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(2, rows, h, 8) for h in (heads, key_heads, key_heads)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def on_every_rank(raises: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(raises, match=match):
        call()
    dist.barrier()  # the group still works


@on_ranks(4)
def test_errors_on_every_rank() -> None:
    rank = dist.get_rank()
    ring = cp.ring_attention
    same = "expected the same arguments on all 4 ranks"
    query, key, value = operands()
    on_every_rank(RuntimeError, same, lambda: ring(query, key, value, causal=rank == 2))
    on_every_rank(RuntimeError, same, lambda: ring(query, key, value, scale=1.0 + rank))
    on_every_rank(RuntimeError, same, lambda: ring(*operands(rows=8 - (rank == 1)), causal=True))
    on_every_rank(RuntimeError, same, lambda: ring(*operands(heads=4 + 2 * (rank == 3))))
    on_every_rank(RuntimeError, same, lambda: ring(query, key, value, method="p2p" if rank == 0 else "all_gather"))
    uneven, longer = Layout.zigzag(33, 4), Layout.zigzag(40, 4)
    on_every_rank(RuntimeError, "8 rows where the layout has 9", lambda: ring(query, key, value, layout=uneven))
    on_every_rank(RuntimeError, "pass the Layout that divided them", lambda: ring(query, key, value, layout=longer))
    on_every_rank(
        ValueError,
        "for the 4 ranks of group, got one for 3",
        lambda: ring(query, key, value, layout=Layout.zigzag(24, 3)),
    )
    on_every_rank(
        ValueError, "expected layout 'zigzag' or 'contiguous'", lambda: ring(query, key, value, layout="ring")
    )
    on_every_rank(ValueError, "expected method 'all_gather' or 'p2p'", lambda: ring(query, key, value, method="nccl"))
    on_every_rank(TypeError, "unexpected keyword arguments: causl", lambda: ring(query, key, value, causl=True))
    few = operands(heads=3, key_heads=3)
    on_every_rank(ValueError, "at least as many heads as the 4 ranks", lambda: cp.ulysses_attention(*few))
    odd = operands(heads=5, key_heads=2)
    on_every_rank(RuntimeError, "heads that divide its heads", lambda: ring(*odd))
    bias = torch.randn(8, 31, dtype=torch.float64)
    uneven_bias = torch.randn(8 - (rank == 1), 32, dtype=torch.float64)
    on_every_rank(RuntimeError, "7 rows where the layout has 8", lambda: ring(query, key, value, attn_bias=uneven_bias))
    on_every_rank(RuntimeError, "this rank's rows and all keys", lambda: ring(query, key, value, attn_bias=bias))
    ends = torch.tensor([0, 40], dtype=torch.int32)
    packed = [tensor[0] for tensor in (query, key, value)]
    on_every_rank(RuntimeError, "cu_seqlens that end at most", lambda: cp.ring_attention_varlen(*packed, ends, ends))
    ring(query, key, value, causal=True)


@on_ranks(2)
def test_what_ranks_compare_does_not_pile_up() -> None:
    """Packed sequences are others in each step."""
    store: Any = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    query, key, value = (tensor[0] for tensor in operands())
    for step in range(_group_calls.MOST_COMPARED + 8):
        ends = torch.tensor([0, step % 15 + 1, 16], dtype=torch.int32)
        same = {"softcap": 1.0 + step // 15}
        cp.ring_attention_varlen(query.detach(), key.detach(), value.detach(), ends, ends, **same)
        if step == 4:
            few = store.num_keys()
    dist.barrier()
    assert store.num_keys() <= few + 8
    (calls,) = _group_calls._calls[dist.group.WORLD].values()
    assert len(calls.told) == _group_calls.MOST_COMPARED


@on_ranks(2)
def test_a_group_without_this_rank() -> None:
    group = dist.new_group([1])
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="expected a process group that contains this process"):
            cp.ring_attention(*operands(), group=group)
    else:
        query, key, value = operands()
        torch.testing.assert_close(
            cp.ring_attention(query, key, value, group=group, causal=True),
            flash_attention(query, key, value, causal=True),
            rtol=0,
            atol=0,
        )


@on_ranks(2)
def test_second_derivatives() -> None:
    """A ring refuses them by name; Ulysses has those of one rank."""
    tensors = operands(rows=6)
    out = cp.ring_attention(*tensors, causal=True)
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="ring_attention: expected to be differentiated once"):
        grad.square().sum().backward()

    def penalty(attend: Callable[..., Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(attend(*given, causal=True).square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), given)

    whole = [torch.randn(2, 12, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    layout = Layout.contiguous(12, 2)
    own = [cp.shard_sequence(tensor.detach(), layout=layout).requires_grad_() for tensor in whole]
    for actual, expected in zip(penalty(cp.ulysses_attention, own), penalty(flash_attention, whole)):
        wanted = cp.shard_sequence(expected, layout=layout)
        Check.compare("second derivative", actual, wanted, 1e-12)


@on_ranks(4)
@pytest.mark.parametrize("name", ["ring", "p2p", "ulysses"])
def test_checkpoints_compilers_and_repetitions(name: str) -> None:
    """The same bits again, under both kinds of checkpoint, and beside a compiled function."""
    function = cp.ulysses_attention if name == "ulysses" else cp.ring_attention
    options: Any = {"method": "p2p"} if name == "p2p" else {}
    tensors = operands()
    weights = torch.randn(2, 8, 4, 8, dtype=torch.float64)

    def attend(*given: Tensor) -> Tensor:
        return function(*given, causal=True, **options)

    def results(call: Callable[..., Tensor]) -> list[Tensor]:
        for tensor in tensors:
            tensor.grad = None
        out = call(*tensors)
        (out * weights).sum().backward()
        return [out, *(tensor.grad for tensor in tensors if tensor.grad is not None)]

    once = results(attend)
    compiled = torch.compile(lambda *given: attend(*(2.0 * tensor for tensor in given)) * 0.5, backend="aot_eager")
    plain = results(lambda *given: attend(*(2.0 * tensor for tensor in given)) * 0.5)
    for actual, expected in (
        (results(attend), once),
        (results(lambda *given: checkpoint(attend, *given, use_reentrant=False)), once),
        (results(lambda *given: checkpoint(attend, *given, use_reentrant=True)), once),
        (results(compiled), plain),
    ):
        for a, b in zip(actual, expected):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@on_ranks(1)
def test_one_rank_is_compiled_in_one_graph() -> None:
    query, key, value = operands()
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = [tensor[0] for tensor in (query, key, value)]
    for attend, given, expected in (
        (cp.ring_attention, (query, key, value), flash_attention),
        (cp.ulysses_attention, (query, key, value), flash_attention),
        (cp.ring_attention_varlen, (*packed, ends, ends), flash_attention_varlen),
        (cp.ulysses_attention_varlen, (*packed, ends, ends), flash_attention_varlen),
    ):
        call: Any = functools.partial(attend, causal=True)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given), expected(*given, causal=True), rtol=0, atol=0)
        for name in ("layout", "key_layout"):
            for wrong, message in (
                ("zig", f"expected {name} 'zigzag' or 'contiguous', or a Layout, got 'zig'"),
                (Layout.zigzag(8, 2), f"expected a {name} for the 1 ranks of group, got one for 2"),
                (Layout.zigzag(9, 1), f"expected a {name} of 8 rows, got one of 9"),
            ):
                with pytest.raises(ValueError, match=message):
                    attend(*given, **{name: wrong})
        torch.testing.assert_close(attend(*given, layout=Layout.zigzag(8, 1)), expected(*given), rtol=0, atol=0)


@on_ranks(2)
def test_a_ring_of_one_rank() -> None:
    """Inside which others exchange heads; and in inference mode, whose tensors have no versions."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    whole = [torch.randn(2, 16, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    for layout in ("zigzag", "contiguous"):
        with torch.inference_mode(), cp.context_parallel(alone, layout=layout, ulysses_group=dist.group.WORLD) as of:
            out = of.attention(*map(of.shard, whole), causal=True)
            Check.compare("out", out, of.shard(flash_attention(*whole, causal=True)), 1e-12)
            ends = torch.tensor([0, 5, 16], dtype=torch.int32)
            packed = [of.shard(tensor)[0] for tensor in whole]
            for _ in range(2):
                out = of.attention_varlen(*packed, ends, ends, causal=True)
            wanted = flash_attention_varlen(*(tensor[0] for tensor in whole), ends, ends, causal=True)
            Check.compare("out", out, of.shard(wanted, 0), 1e-12)


@on_ranks(4)
def test_ulysses_is_bit_equal() -> None:
    check = Check(Case(8, 4, (32, 32), {"causal": True}), "contiguous")
    check.run(cp.ulysses_attention, bound=0.0)


@on_ranks(2)
def test_autocast() -> None:
    tensors = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = cp.ring_attention(*tensors, causal=True)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in tensors)


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["ring", "p2p", "ulysses"])
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    """Errors beside those of one rank in the same dtype, both against float64."""
    function = cp.ulysses_attention if name == "ulysses" else cp.ring_attention
    options: Any = {"method": "p2p"} if name == "p2p" else {}
    whole = [torch.randn(1, 512, heads, 32).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    exact = [tensor.detach().double().requires_grad_() for tensor in whole]
    own = [cp.shard_sequence(tensor.detach()).requires_grad_() for tensor in whole]
    weights = torch.randn(1, 512, 4, 32, dtype=torch.float64)

    def results(call: Callable[..., Tensor], given: list[Tensor], weights: Tensor) -> list[Tensor]:
        out = call(*given)
        return [out, *torch.autograd.grad((out.double() * weights).sum(), given)]

    reference = results(flash_attention, exact, weights)
    on_one = results(flash_attention, whole, weights)
    found = results(lambda *given: function(*given, layout="zigzag", **options), own, cp.shard_sequence(weights))
    for what, actual, one, expected in zip(("out", "dq", "dk", "dv"), found, on_one, reference):
        error = (cp.unshard_sequence(actual.detach()).double() - expected).norm()
        assert error <= 1.5 * (one.double() - expected).norm(), what


@on_ranks(4)
@pytest.mark.parametrize("method", ["all_gather", "p2p"])
def test_bytes_that_are_sent(method: str) -> None:
    """(P - 1) s 2 Hk D forward, twice that backward; of a window only what others see."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Bytes(monkeypatch)
        rows, rank, ranks = 64, dist.get_rank(), dist.get_world_size()
        tensors = operands(rows=rows, dtype=torch.float32)
        own = tensors[1].numel() * 2 * 4
        cp.ring_attention(*tensors, method=method).sum().backward()
        assert counted.sent == 3 * (ranks - 1) * own
        counted.sent = 0
        window = (9, None)
        out = cp.ring_attention(*tensors, causal=True, window=window, layout="contiguous", method=method)
        # The next rank sees the last 9 of this one's rows; their gradients come from there, to the rank before.
        forward = 0 if rank == ranks - 1 else own * 9 // rows
        assert counted.sent == forward
        out.sum().backward()
        assert counted.sent == 2 * forward + (0 if rank == 0 else own * 9 // rows)
