"""flash_attention as a citizen of PyTorch: gradcheck, opcheck, compile, autocast, vmap, FLOPs, and every refusal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import cuda_ext.attention
from cuda_ext._load import ops


def qkv(dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 4)
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes)
    return query, key, value


def packed(dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> tuple[Tensor, ...]:
    query, key, value = (t.detach().flatten(0, 1).requires_grad_(requires_grad) for t in qkv(dtype))
    return (
        query,
        key,
        value,
        torch.tensor([0, 3, 3, 10], dtype=torch.int32),
        torch.tensor([0, 6, 8, 14], dtype=torch.int32),
    )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (2, 1)},
    {"softcap": 1.5, "scale": 0.9},
    {"causal": True, "softcap": 2.0, "window": (3, None)},
]


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_gradcheck(options: dict[str, Any], extras: bool, dropout_p: float) -> None:
    slopes = torch.rand(4, dtype=torch.float64) if extras else None
    inputs = qkv(torch.float64)
    if extras:
        inputs += (torch.randn(4, dtype=torch.float64, requires_grad=True),)

    def op(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        out, lse = cuda_ext.flash_attention(
            query, key, value, sinks=sinks, alibi_slopes=slopes, dropout_p=dropout_p, return_lse=True, **options
        )
        return out, lse.nan_to_num(neginf=0.0)

    assert torch.autograd.gradcheck(op, inputs)


@pytest.mark.sampled(cases=3, slow=True)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 5, 7), {"causal": True, "softcap": 2.0, "dropout_p": 0.4}),
        ((1, 4, 5, 7), {}),
        ((2, 1, 1, 7), {"causal": True}),
        ((5, 7), {"softcap": 2.0}),
        ((4, 5, 1), {"window": (2, 1)}),
        ((), {"dropout_p": 0.4}),
    ],
    ids=str,
)
def test_gradcheck_of_a_bias(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    inputs = (
        *qkv(torch.float64),
        torch.randn(4, dtype=torch.float64, requires_grad=True),
        torch.randn(shape, dtype=torch.float64, requires_grad=True),
    )

    def op(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return cuda_ext.flash_attention(query, key, value, sinks=sinks, attn_bias=bias, return_lse=True, **options)

    assert torch.autograd.gradcheck(op, inputs)


class BackwardResults(TorchDispatchMode):
    """What every backward op returned while this was active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is ops.flash_attention_backward.default:
            self.seen.append(result)
        return result


def test_the_gradient_of_a_bias_is_computed_only_if_wanted() -> None:
    inputs = qkv()
    bias, mask = torch.randn(5, 7, requires_grad=True), torch.rand(5, 7) < 0.8
    for given, wanted, elements in (
        (bias, inputs, 0),
        (bias, (*inputs, bias), 35),
        (bias, (bias,), 35),
        (bias.detach(), inputs, 0),
        (None, inputs, 0),
    ):
        for sinks in (None, torch.randn(4), torch.randn(4, requires_grad=True)):
            out = cuda_ext.flash_attention(*inputs, sinks=sinks, attn_bias=given, attn_mask=mask)
            with BackwardResults() as results:
                torch.autograd.grad(out.sum(), wanted)
            assert [result[4].numel() for result in results.seen] == [elements]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_gradient_of_a_bias_has_its_dtype_and_shape(dtype: torch.dtype) -> None:
    inputs = tuple(t.detach().to(dtype) for t in qkv())
    for bias_dtype in (dtype, torch.float32):
        bias = torch.randn(4, 1, 7, dtype=bias_dtype, requires_grad=True)
        cuda_ext.flash_attention(*inputs, attn_bias=bias).sum().backward()
        assert bias.grad is not None and bias.grad.dtype == bias_dtype and bias.grad.shape == bias.shape


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck_varlen(causal: bool) -> None:
    *tensors, cu_q, cu_k = packed(torch.float64)

    def op(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = cuda_ext.flash_attention_varlen(query, key, value, cu_q, cu_k, causal=causal, return_lse=True)
        return out, lse.nan_to_num(neginf=0.0)

    assert torch.autograd.gradcheck(op, tensors)


def test_only_the_gradients_asked_for() -> None:
    query, key, value = qkv()
    out = cuda_ext.flash_attention(query.detach(), key, value.detach())
    (grad,) = torch.autograd.grad(out.sum(), (key,))
    assert grad.shape == key.shape and grad.is_contiguous()


def test_gradient_through_the_lse_alone() -> None:
    query, key, value = qkv(torch.float64)
    _, lse = cuda_ext.flash_attention(query, key, value, return_lse=True)
    logits = torch.einsum("bihd,bjhd->bhij", query, key.repeat_interleave(2, 2)) / 3**0.5
    expected = torch.autograd.grad(logits.logsumexp(-1).sum(), (query, key))
    for a, e in zip(torch.autograd.grad(lse.sum(), (query, key)), expected, strict=True):
        torch.testing.assert_close(a, e)


def backward_arguments(dropout_p: float = 0.0) -> tuple[Any, ...]:
    query, key, value = qkv(requires_grad=False)
    out, lse, rng_state = ops.flash_attention_forward(query, key, value, dropout_p=dropout_p)
    return torch.randn_like(out), torch.randn_like(lse), query, key, value, out, lse, rng_state


@pytest.mark.sampled
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "scalars", [{}, {"causal": True, "softcap": 2.0}, {"window_left": 2, "window_right": 1}], ids=str
)
def test_opcheck(requires_grad: bool, scalars: dict[str, Any]) -> None:
    sinks, slopes = torch.randn(4, requires_grad=requires_grad), torch.rand(4)
    torch.library.opcheck(ops.flash_attention.default, (*qkv(requires_grad=requires_grad), slopes, sinks), scalars)
    torch.library.opcheck(
        ops.flash_attention_varlen.default, (*packed(requires_grad=requires_grad), slopes, sinks), scalars
    )
    torch.library.opcheck(ops.flash_attention_forward.default, qkv(requires_grad=False), scalars)
    torch.library.opcheck(ops.flash_attention_backward.default, backward_arguments(), scalars)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (4, 1, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_opcheck_of_a_bias(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    bias = None if dtype == torch.bool else torch.randn(shape, requires_grad=True)
    mask = torch.rand(shape) < 0.8 if dtype == torch.bool else None
    torch.library.opcheck(ops.flash_attention.default, (*qkv(), None, None, bias, mask), {"causal": True})
    options = {"attn_bias": None if bias is None else bias.detach(), "attn_mask": mask, "causal": True}
    torch.library.opcheck(ops.flash_attention_forward.default, qkv(requires_grad=False), options)
    needs_grad = bias is not None
    torch.library.opcheck(ops.flash_attention_backward.default, (*backward_arguments(), needs_grad), options)


@pytest.mark.parametrize("shape", [(3, 4, 7, 6), (1, 7, 1)], ids=str)
def test_opcheck_of_a_packed_bias_and_mask(shape: tuple[int, ...]) -> None:
    bias, mask = torch.randn(shape, requires_grad=True), torch.rand(shape) < 0.8
    arguments = (*packed(), None, None, bias, mask)
    torch.library.opcheck(ops.flash_attention_varlen.default, arguments, {"causal": True})
    torch.library.opcheck(
        ops.flash_attention_varlen.default, arguments, {"max_seqlen_q": 7, "max_seqlen_k": 6, "softcap": 2.0}
    )


@pytest.mark.sampled
def test_opcheck_of_other_layouts() -> None:
    transposed = tuple(t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in qkv())
    empty = tuple(t.detach()[:, :0].requires_grad_() for t in qkv())
    for tensors in (transposed, empty):
        torch.library.opcheck(ops.flash_attention.default, tensors)
    torch.library.opcheck(
        ops.flash_attention_backward.default, (*backward_arguments()[:1], None, *backward_arguments()[2:])
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compile_fullgraph_forward_and_backward(options: dict[str, Any]) -> None:
    def f(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        out, lse = cuda_ext.flash_attention(query * 2, key, value, sinks=sinks, return_lse=True, **options)
        return out.sum() + lse.nan_to_num(neginf=0.0).sum()

    inputs = (*qkv(), torch.randn(4, requires_grad=True))
    expected = torch.autograd.grad(f(*inputs), inputs)
    actual = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (4, 1, 7), (5, 1)], ids=str)
def test_compile_with_a_bias(shape: tuple[int, ...]) -> None:
    def f(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        biased = cuda_ext.flash_attention(query, key, value, attn_bias=bias * 2)
        return (biased * cuda_ext.flash_attention(query, key, value, attn_mask=mask)).sum()

    inputs = (*qkv(), torch.randn(shape, requires_grad=True))
    mask = torch.rand(shape) < 0.8
    expected = torch.autograd.grad(f(*inputs, mask), inputs)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, e in zip(torch.autograd.grad(compiled(*inputs, mask), inputs), expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.sampled
def test_compile_with_inductor_and_dynamic_shapes_compiles_once() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def f(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cuda_ext.flash_attention(query.sin(), key, value, causal=True).cos()

    compiled = []
    for length in (5, 9, 13):
        inputs = [torch.randn(2, length, 2, 8, requires_grad=True) for _ in range(3)]
        out = f(*inputs)
        grads = torch.autograd.grad(out.sum(), inputs)
        expected = cuda_ext.flash_attention(inputs[0].sin(), *inputs[1:], causal=True).cos()
        torch.testing.assert_close(out, expected)
        for a, e in zip(grads, torch.autograd.grad(expected.sum(), inputs), strict=True):
            torch.testing.assert_close(a, e)
        compiled.append(counter.frame_count)
    assert compiled[0] == compiled[-1] > 0


def test_compile_varlen_with_dropout() -> None:
    def f(*tensors: Tensor) -> Tensor:
        return cuda_ext.flash_attention_varlen(*tensors, dropout_p=0.3, causal=True).sum()

    inputs = packed()
    torch.manual_seed(3)
    expected = torch.autograd.grad(f(*inputs), inputs[:3])
    torch.manual_seed(3)
    actual = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(*inputs), inputs[:3])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_runs_in_the_active_dtype(dtype: torch.dtype) -> None:
    query, key, value = qkv()
    sinks = torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        out, lse = cuda_ext.flash_attention(query, key, value.to(dtype), sinks=sinks, return_lse=True)
        packed_out = cuda_ext.flash_attention_varlen(*packed())
    assert out.dtype == packed_out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out, cuda_ext.flash_attention(query.to(dtype), key.to(dtype), value.to(dtype), sinks=sinks))
    out.sum().backward()
    assert query.grad is not None and query.grad.dtype == torch.float32 and sinks.grad is not None


def test_autocast_leaves_a_bias_alone() -> None:
    query, key, value = qkv()
    bias = torch.randn(5, 7, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = cuda_ext.flash_attention(query, key, value, attn_bias=bias)
    assert torch.equal(out, cuda_ext.flash_attention(*(t.bfloat16() for t in (query, key, value)), attn_bias=bias))
    out.sum().backward()
    assert bias.grad is not None and bias.grad.dtype == torch.float32


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 2), (None, 0, 0), (0, None, None)])
@pytest.mark.parametrize("slopes", [None, (4,), (2, 4)], ids=str)
def test_vmap_over_tensors(in_dims: tuple[int | None, ...], slopes: tuple[int, ...] | None) -> None:
    tensors = [
        t.detach() if d is None else torch.stack([t.detach(), t.detach() + 1, -t.detach()], d)
        for t, d in zip(qkv(), in_dims, strict=True)
    ]
    options = {"causal": True, "alibi_slopes": None if slopes is None else torch.rand(slopes)}
    actual = torch.vmap(lambda *t: cuda_ext.flash_attention(*t, **options), in_dims)(*tensors)
    for n in range(3):
        expected = cuda_ext.flash_attention(
            *(t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims, strict=True)), **options
        )
        torch.testing.assert_close(actual[n], expected)


@pytest.mark.parametrize("in_dims", [(None, 0), (0, None), (1, 2)])
def test_vmap_with_a_bias(in_dims: tuple[int | None, ...]) -> None:
    query, key, value = (t.detach() for t in qkv())
    bias = torch.rand(4, 5, 7) < 0.8
    queries, biases = (
        t if d is None else torch.stack([t, t.roll(1, -1)], d) for t, d in zip((query, bias), in_dims, strict=True)
    )
    actual = torch.vmap(lambda q, b: cuda_ext.flash_attention(q, key, value, attn_mask=b), in_dims)(queries, biases)
    for n in range(2):
        q, b = (t if d is None else t.select(d, n) for t, d in zip((queries, biases), in_dims, strict=True))
        torch.testing.assert_close(actual[n], cuda_ext.flash_attention(q, key, value, attn_mask=b))


def test_vmap_over_sinks_and_packed_sequences() -> None:
    query, key, value = qkv(requires_grad=False)
    sinks = torch.randn(3, 4)
    actual = torch.vmap(lambda s: cuda_ext.flash_attention(query, key, value, sinks=s))(sinks)
    torch.testing.assert_close(
        actual, torch.stack([cuda_ext.flash_attention(query, key, value, sinks=s) for s in sinks])
    )
    *tensors, cu_q, cu_k = packed(requires_grad=False)
    queries = torch.stack([tensors[0], -tensors[0]])
    actual = torch.vmap(lambda q: cuda_ext.flash_attention_varlen(q, *tensors[1:], cu_q, cu_k))(queries)
    torch.testing.assert_close(
        actual, torch.stack([cuda_ext.flash_attention_varlen(q, *tensors[1:], cu_q, cu_k) for q in queries])
    )


@pytest.mark.parametrize("mapped", ["query", "value", "attn_bias", "packed query"])
def test_vmap_and_the_randomness_of_dropout(mapped: str) -> None:
    """Values that tell keys apart show which weights there are; of equal elements only the masks may differ."""
    packed = mapped == "packed query"
    name = "flash_attention_varlen" if packed else "flash_attention"
    tensors = {"query": torch.zeros(2, 5, 4, 3), "key": torch.zeros(2, 64, 2, 3), "value": torch.eye(64)[:, None]}
    tensors["value"] = tensors["value"].expand(2, 64, 2, 64)
    if packed:
        tensors = {name: t.flatten(0, 1) for name, t in tensors.items()}
        tensors |= {f"cu_seqlens_{x}": torch.tensor([0, n, 2 * n], dtype=torch.int32) for x, n in (("q", 5), ("k", 64))}
    else:
        tensors["attn_bias"] = torch.zeros(5, 64)
    which = mapped.split()[-1]

    def f(x: Tensor) -> Tensor:
        return getattr(cuda_ext, name)(**{**tensors, which: x}, dropout_p=0.5)

    def run(randomness: str) -> tuple[Tensor, Tensor]:
        """Also what the generator gives next."""
        torch.manual_seed(5)
        return torch.vmap(f, randomness=randomness)(tensors[which].expand(3, *tensors[which].shape)), torch.rand(())

    with pytest.raises(RuntimeError, match=f"::{name}: expected torch.vmap with randomness='same' or 'different'"):
        run("error")
    torch.manual_seed(5)
    alone, following = f(tensors[which]), torch.rand(())
    same, after = run("same")
    assert all(torch.equal(element, alone) for element in same) and after == following
    assert 0.4 < (alone == 0).float().mean() < 0.6
    other, _ = run("different")
    assert not torch.equal(other[0], other[1]) and not torch.equal(other[1], other[2])


def test_flops() -> None:
    query, key, value = qkv()
    pairs = {"full": 2 * 4 * 5 * 7, "causal": 2 * 4 * (3 + 4 + 5 + 6 + 7), "window": 2 * 4 * (4 + 4 + 4 + 4 + 3)}
    for name, options in {"full": {}, "causal": {"causal": True}, "window": {"window": (2, 1)}}.items():
        with FlopCounterMode(display=False) as counter:
            out = cuda_ext.flash_attention(query, key, value, **options)
        assert counter.get_total_flops() == 2 * pairs[name] * (3 + 4)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == 2 * pairs[name] * (3 * 3 + 2 * 4)
    for options, pairs_of_a_head in (
        ({"max_seqlen_q": 10, "max_seqlen_k": 6}, 10 * 6),
        ({"max_seqlen_q": 2**31 - 1, "max_seqlen_k": 2**31 - 1, "window": (2**63 - 1, 2**63 - 1)}, 10 * 14),
    ):
        with FlopCounterMode(display=False) as counter:
            cuda_ext.flash_attention_varlen(*packed(), **options)
        assert counter.get_total_flops() == 2 * 4 * pairs_of_a_head * (3 + 4)


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6), (1, 9), (9, 1), (4, 0), (0, 4)], ids=str)
def test_flops_of_any_window(lengths: tuple[int, int]) -> None:
    sq, sk = lengths
    query, key, value = (torch.randn(1, n, 1, 2) for n in (sq, sk, sk))
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    far = 2**63 - 1
    for left, right in itertools.product((None, 0, 1, 3, far), repeat=2):
        pairs = ((distance >= -(far if left is None else left)) & (distance <= (far if right is None else right))).sum()
        with FlopCounterMode(display=False) as counter:
            cuda_ext.flash_attention(query, key, value, window=(left, right))
        assert counter.get_total_flops() == 2 * int(pairs) * 4, (left, right)


@pytest.mark.parametrize("window", [torch.tensor([2, 1]), (torch.tensor(2), torch.tensor([1])), [2, 1]], ids=str)
def test_a_window_of_tensors(window: Any) -> None:
    for op, inputs in ((cuda_ext.flash_attention, qkv()), (cuda_ext.flash_attention_varlen, packed())):
        assert torch.equal(op(*inputs, window=window), op(*inputs, window=(2, 1)))


def test_saves_nothing_quadratic() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        cuda_ext.flash_attention(*(torch.randn(1, 50, 1, 4, requires_grad=True) for _ in range(3)))
    assert saved and max(t.numel() for t in saved) == 200


Q, K, V = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
P = "cuda_ext::flash_attention: expected "


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q[0], K, V), {}, P + "query of shape (batch, seq, heads, dim), got (5, 4, 8)"),
        ((Q, K[0], V), {}, P + "key of shape (batch, seq, heads, dim), got (7, 2, 8)"),
        ((Q, K, V[0, 0]), {}, P + "value of shape (batch, seq, heads, dim), got (2, 6)"),
        (
            (Q.long(), K, V),
            {},
            P + "query of dtype float32, float16, bfloat16 or float64, got int64; convert it with .to()",
        ),
        ((Q, K.half(), V), {}, P + "key of dtype float32 to match query, got float16; convert one of them with .to()"),
        (
            (Q, K, V.double()),
            {},
            P + "value of dtype float32 to match query, got float64; convert one of them with .to()",
        ),
        ((Q, K.to("meta"), V), {}, P + "key on device cpu to match query, got meta; move one of them with .to()"),
        ((Q, K[..., :4], V), {}, P + "key of head dim 8 to match query (2, 5, 4, 8), got (2, 7, 2, 4)"),
        ((Q, K, V[:, :3]), {}, P + "value of shape (2, 7, 2, dim_v) to match key (2, 7, 2, 8), got (2, 3, 2, 6)"),
        ((Q[:1], K, V), {}, P + "key of batch 1 to match query (1, 5, 4, 8), got (2, 7, 2, 8)"),
        ((Q[:, :, :3], K, V), {}, P + "the heads of query to be a multiple of the heads of key, got 3 and 2"),
        ((Q, K[:, :, :0], V[:, :, :0]), {}, P + "the heads of query to be a multiple of the heads of key, got 4 and 0"),
        (
            (Q, K, V),
            {"window": (-1, 0)},
            P + "window left to be >= 0 or None (unbounded), got -1; give None for no bound",
        ),
        (
            (Q, K, V),
            {"window": (0, -3)},
            P + "window right to be >= 0 or None (unbounded), got -3; for a band beside the diagonal "
            "give block_mask=BlockMask.window(...) to flash_attention or flash_attention_varlen",
        ),
        ((Q, K, V), {"window": 3}, P + "window to be None or (left, right), each a number of keys or None, got 3"),
        (
            (Q, K, V),
            {"window": (1, 2, 3)},
            P + "window to be None or (left, right), each a number of keys or None, got (1, 2, 3)",
        ),
        (
            (Q, K, V),
            {"window": (torch.tensor(1.5), None)},
            P + "window to be None or (left, right), each a number of keys or None, got (tensor(1.5000), None)",
        ),
        ((Q, K, V), {"scale": float("nan")}, P + "a finite scale, got nan"),
        ((Q, K, V), {"scale": float("inf")}, P + "a finite scale, got inf"),
        ((Q, K, V), {"softcap": -1.0}, P + "a finite softcap >= 0 (0 for none), got -1"),
        ((Q, K, V), {"softcap": float("nan")}, P + "a finite softcap >= 0 (0 for none), got nan"),
        ((Q, K, V), {"dropout_p": 1.0}, P + "dropout_p in [0, 1), got 1"),
        ((Q, K, V), {"dropout_p": -0.1}, P + "dropout_p in [0, 1), got -0.1"),
        ((Q, K, V), {"dropout_p": float("nan")}, P + "dropout_p in [0, 1), got nan"),
        ((Q, K, V), {"alibi_slopes": torch.rand(2)}, P + "alibi_slopes of shape (4,) or (2, 4), got (2,)"),
        (
            (Q, K, V),
            {"alibi_slopes": torch.ones(4).long()},
            P + "alibi_slopes of dtype float32, float16, bfloat16 or float64, got int64; convert it with .to()",
        ),
        (
            (Q, K, V),
            {"alibi_slopes": torch.rand(4, requires_grad=True)},
            P + "alibi_slopes that need no gradient, got requires_grad=True; detach() them",
        ),
        ((Q, K, V), {"sinks": torch.rand(1, 4)}, P + "sinks of shape (4,), got (1, 4)"),
        (
            (Q, K, V),
            {"sinks": torch.rand(4, device="meta")},
            P + "sinks on device cpu to match query, got meta; move one of them with .to()",
        ),
        *(
            (
                (Q, K, V),
                {"attn_bias": torch.rand(shape)},
                P + "attn_bias of a shape that broadcasts to (batch, heads, seqlen_q, seqlen_k) = (2, 4, 5, 7), "
                f"got {shape}; give it these sizes or 1, aligned to the right",
            )
            for shape in [(2, 4, 5, 6), (2, 2, 5, 7), (5,), (2, 5, 7), (1, 2, 4, 5, 7), (0, 1, 1, 7)]
        ),
        (
            (Q, K, V),
            {"attn_bias": torch.rand(5, 7).half()},
            P + "attn_bias of dtype float32 to match query, got float16; convert it with .to()",
        ),
        (
            (Q.half(), K.half(), V.half()),
            {"attn_bias": torch.zeros(5, 7).long()},
            P + "attn_bias of dtype float16 or float32 to match query, got int64; convert it with .to()",
        ),
        (
            (Q.double(), K.double(), V.double()),
            {"attn_bias": torch.rand(5, 7)},
            P + "attn_bias of dtype float64 to match query, got float32; convert it with .to()",
        ),
        (
            (Q, K, V),
            {"attn_mask": torch.ones(5, 6).bool()},
            P + "attn_mask of a shape that broadcasts to (batch, heads, seqlen_q, seqlen_k) = (2, 4, 5, 7), "
            "got (5, 6); give it these sizes or 1, aligned to the right",
        ),
        (
            (Q, K, V),
            {"attn_mask": torch.rand(5, 7)},
            P + "attn_mask of dtype bool, got float32; give numbers that are added to the logits as attn_bias=",
        ),
        (
            (Q, K, V),
            {"attn_bias": torch.rand(5, 7, device="meta")},
            P + "attn_bias on device cpu to match query, got meta; move one of them with .to()",
        ),
    ],
)
def test_bad_input(arguments: tuple[Tensor, ...], options: dict[str, Any], message: str) -> None:
    refused(cuda_ext.flash_attention, arguments, options, message)


def test_negative_windows_of_compiled_code_and_of_ops() -> None:
    """The ops themselves have no remedy: they do not know of block masks as objects."""
    compiled = torch.compile(cuda_ext.flash_attention, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"expected window left to be >= 0 .*, got -3; for a band .*=BlockMask\.win"):
        compiled(Q, K, V, window=(-3, 5))
    for tensors in ((Q, K, V), tuple(t.to("meta") for t in (Q, K, V))):
        with pytest.raises(RuntimeError, match=r"expected window left to be >= 0 or None \(unbounded\), got -3"):
            ops.flash_attention(*tensors, window_left=-3)


def refused(function: Callable[..., Any], arguments: tuple[Tensor, ...], options: dict[str, Any], message: str) -> None:
    """With these words, also where a gradient is wanted, and on the meta device unless they are of values or of a
    device."""
    query, *others = arguments
    with_gradient = query.clone().requires_grad_(query.is_floating_point())
    for first in (query, with_gradient):
        with pytest.raises(RuntimeError) as caught:
            function(first, *others, **options)
        assert str(caught.value).splitlines()[0] == message
    if any(word in message for word in ("meta", "to start", "to end", "non-decreasing", "the longest")):
        return
    with FakeTensorMode() as mode, pytest.raises(RuntimeError) as caught:
        fakes = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in options.items()}
        function(*map(mode.from_tensor, arguments), **fakes)
    assert str(caught.value).splitlines()[0] == message
    on_meta = {
        name: value.detach().to("meta").requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    with pytest.raises(RuntimeError) as caught:
        function(*(tensor.to("meta") for tensor in arguments), **on_meta)
    assert str(caught.value).splitlines()[0] == message


QP, KP, VP = Q[0], K[0], V[0]
CQ, CK = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32)
PV = "cuda_ext::flash_attention_varlen: expected "


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q, KP, VP, CQ, CK), {}, PV + "query of shape (total, heads, dim), got (2, 5, 4, 8)"),
        (
            (QP, KP, VP, CQ.long(), CK),
            {},
            PV + "cu_seqlens_q of shape (batch + 1,) and dtype int32, got (3,) and dtype int64",
        ),
        (
            (QP, KP, VP, CQ[None], CK),
            {},
            PV + "cu_seqlens_q of shape (batch + 1,) and dtype int32, got (1, 3) and dtype int32",
        ),
        (
            (QP, KP, VP, CQ, CK[:0]),
            {},
            PV + "cu_seqlens_k of shape (batch + 1,) and dtype int32, got (0,) and dtype int32",
        ),
        ((QP, KP, VP, CQ + 1, CK), {}, PV + "cu_seqlens_q to start at 0, got 1"),
        ((QP, KP, VP, CQ, CK[[0, 2, 1]]), {}, PV + "cu_seqlens_k to be non-decreasing, got 7 before 4 at index 2"),
        ((QP, KP, VP, CQ, CK + CK), {}, PV + "cu_seqlens_k to end at 7 at most, the rows of key, got 14"),
        ((QP, KP, VP, CQ, CK[[0, 2]]), {}, PV + "cu_seqlens_k of shape (3,) to match cu_seqlens_q, got (2,)"),
        ((QP, KP, VP, CQ, CK), {"max_seqlen_q": 2}, PV + "max_seqlen_q of at least 3, the longest sequence, got 2"),
        *(
            (
                (QP, KP, VP, CQ, CK),
                {name: 2**63 - 1},
                PV + f"{name} of at most 2147483647, all that int32 cu_seqlens can hold, got 9223372036854775807",
            )
            for name in ("max_seqlen_q", "max_seqlen_k")
        ),
        *(
            (
                (QP, KP, VP, CQ, CK),
                {name: torch.ones(shape, dtype=dtype), "max_seqlen_q": 3, "max_seqlen_k": 4},
                PV + f"{name} of a shape that broadcasts to (batch, heads, max_seqlen_q, max_seqlen_k) = (2, 4, 3, 4), "
                f"got {shape}; give it these sizes or 1, aligned to the right",
            )
            for name, dtype in (("attn_bias", torch.float32), ("attn_mask", torch.bool))
            for shape in [(2, 4, 5, 7), (3, 1, 1, 4), (3,), (1, 1, 1, 3, 4)]
        ),
        ((QP, KP, VP, CQ, CK), {"max_seqlen_k": 1}, PV + "max_seqlen_k of at least 4, the longest sequence, got 1"),
        (
            (QP, KP, VP, CQ.to("meta"), CK),
            {},
            PV + "cu_seqlens_q on device cpu to match query, got meta; move one of them with .to()",
        ),
    ],
)
def test_bad_packed_input(arguments: tuple[Tensor, ...], options: dict[str, Any], message: str) -> None:
    refused(cuda_ext.flash_attention_varlen, arguments, options, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: torch.randn(2, 5, 4, 9)}, "grad_out of shape (2, 5, 4, 4) to match out, got (2, 5, 4, 9)"),
        ({1: torch.randn(2, 5, 4)}, "grad_lse of shape (2, 4, 5) to match lse, got (2, 5, 4)"),
        (
            {1: torch.randn(2, 4, 5).double()},
            "grad_lse of dtype float32 to match lse, got float64; convert one of them with .to()",
        ),
        (
            {5: torch.randn(2, 5, 4, 4).half()},
            "out of dtype float32 to match query, got float16; convert one of them with .to()",
        ),
        (
            {7: torch.zeros(3)},
            "rng_state of shape (2,) and dtype int64, as the forward returned it, got (3,) and dtype float32",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_backward_input(changed: dict[int, Tensor], message: str) -> None:
    arguments = list(backward_arguments(dropout_p=0.5))
    for position, tensor in changed.items():
        arguments[position] = tensor
    with pytest.raises(RuntimeError) as caught:
        ops.flash_attention_backward(*arguments, dropout_p=0.5)
    assert str(caught.value).splitlines()[0] == "cuda_ext::flash_attention_backward: expected " + message


def test_one_argument_on_meta_is_refused() -> None:
    dropped = {"dropout_p": 0.5}
    *dense, cu_q, cu_k = packed(requires_grad=False)
    sinks = torch.rand(dense[0].shape[-2])
    for op, tensors, options in (
        (ops.flash_attention, (Q, K, V, torch.rand(4), torch.rand(4), torch.rand(5, 7)), {}),
        (ops.flash_attention_varlen, (*dense, cu_q, cu_k, sinks, sinks), {}),
        (ops.flash_attention_forward, (*dense, cu_q, cu_k, sinks, sinks), {}),
        (ops.flash_attention_backward, tuple(backward_arguments(dropout_p=0.5)), dropped),
    ):
        for n, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor):
                mixed = (*tensors[:n], tensor.detach().to("meta"), *tensors[n + 1 :])
                with pytest.raises(
                    RuntimeError, match=r"cuda_ext::flash_attention\w*: expected .*on device meta|got meta"
                ):
                    op(*mixed, **options)


def test_a_bias_refused_by_the_ops_beneath() -> None:
    with pytest.raises(
        RuntimeError, match="expected attn_bias of dtype float32 to match query, got bool; give a boolean mask"
    ):
        ops.flash_attention(*qkv(), attn_bias=torch.ones(5, 7).bool())
    with pytest.raises(RuntimeError, match="expected attn_bias with needs_grad_bias=True, got None; leave it False"):
        ops.flash_attention_backward(*backward_arguments(), True)


def test_none_for_a_tensor() -> None:
    query, key, value = qkv()
    for n, name in enumerate(("query", "key", "value")):
        tensors = [None if i == n else each for i, each in enumerate((query, key, value))]
        with pytest.raises(RuntimeError, match=f"^cuda_ext::flash_attention: expected {name} to be a tensor, got None"):
            cuda_ext.flash_attention(*tensors)
