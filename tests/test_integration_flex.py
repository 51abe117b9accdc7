"""cuda_ext.integrations.flex: flex_attention and varlen_attn give what PyTorch's give, with gradients on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
import torch.nn.attention.varlen as torch_varlen
from flex_common import (
    MASKS,
    Mod,
    all_served,
    assert_same,
    block_mask,
    counted,  # noqa: F401
    dense,
    tensors,
)
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.testing._internal.two_tensor import TwoTensor

import cuda_ext
from cuda_ext.integrations import flex
from cuda_ext.integrations.captures import captures_of
from cuda_ext.testing import emulated

MODS: dict[str, Mod] = {
    "softcap": lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5),
    "times two": lambda s, b, h, q, k: s * 2,
    "head offset": lambda s, b, h, q, k: s + 0.3 * h,
    "alibi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-2.0 * h - 2),
    "squared": lambda s, b, h, q, k: s * s,
}


@pytest.mark.sampled(cases=16)
@pytest.mark.parametrize("dims", [(16, 16), (16, 24)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256, (128, 64)], ids=str)
@pytest.mark.parametrize("lengths", [(150, 150), (40, 300), (257, 129)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, lengths: tuple[int, int], size: Any, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    given = tensors(lengths, heads=heads, dims=dims)
    assert_same(given, None, block_mask(name, lengths, size), scale=random.choice([None, 0.3]))


@pytest.mark.parametrize("lengths", [(150, 150), (1, 70), (70, 3)], ids=str)
def test_without_a_mask(lengths: tuple[int, int]) -> None:
    assert_same(tensors(lengths), None, None)
    assert_same(tensors(lengths, dtype=torch.float32), None, None)
    whole = torch_flex._create_empty_block_mask(*tensors(lengths)[:2])
    assert_same(tensors(lengths), None, (torch_flex.noop_mask, whole))


def test_one_batch_of_keys() -> None:
    query, key, value = tensors()
    given = [query, key.detach()[:1].requires_grad_(), value.detach()[:1].requires_grad_()]
    assert_same(given, None, block_mask("prefix of each batch", (150, 150)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_torch_without_gradients(dtype: torch.dtype) -> None:
    given = tensors(dtype=dtype, grad=False)
    mask = block_mask("causal", (150, 150))[1]
    arguments = (lambda s, b, h, q, k: s + 0.1 * h * (k - q), mask, 0.2, True)
    wanted, wanted_lse = flex_attention(*given, *arguments, True)
    with all_served():
        out, lse = flex_attention(*given, *arguments, True)
    assert (out.dtype, lse.dtype) == (wanted.dtype, wanted_lse.dtype)
    assert out.stride() == wanted.stride()
    rounding = 4 * torch.finfo(dtype).eps  # of weights, values and the output; elements are about 1
    torch.testing.assert_close(out, wanted, rtol=rounding, atol=rounding)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=8 * rounding)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_layout_of_the_output(order: tuple[int, ...]) -> None:
    """Of a query whose dims are in this order in memory, the largest stride first."""
    query, key, value = tensors((9, 9), heads=(3, 3), grad=False)
    query = query.permute(order).contiguous().permute(*(order.index(dim) for dim in range(4)))
    wanted = flex_attention(query, key, value)
    with all_served():
        out = flex_attention(query, key, value)
    assert out.stride() == wanted.stride()
    torch.testing.assert_close(out, wanted)


def test_layout_of_the_output_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for order in ((0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)):
        query = tensors((9, 9), grad=False)[0].permute(order)
        with all_served():
            assert compiled(query, query, query).stride() == flex.flex_attention(query, query, query).stride()


def test_autocast() -> None:
    given = tensors(dtype=torch.float32, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = flex_attention(*given, enable_gqa=True)
        with all_served():
            out = flex_attention(*given, enable_gqa=True)
    assert out.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(out, wanted, rtol=2.0**-6, atol=2.0**-6)


def test_second_derivatives() -> None:
    given = tensors((9, 9), heads=(2, 2), dims=(5, 5))
    mask = create_block_mask(MASKS["causal"][0], None, None, 9, 9, device="cpu")
    with all_served():
        assert torch.autograd.gradgradcheck(lambda *each: flex_attention(*each, block_mask=mask), given)


# Masks that change


def test_a_mask_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []
    convert = cuda_ext.BlockMask.from_flex

    def from_flex(mask: BlockMask) -> cuda_ext.BlockMask:
        conversions.append(mask)
        return convert(mask)

    monkeypatch.setattr(cuda_ext.BlockMask, "from_flex", from_flex)
    ids = torch.arange(150) // 50
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 150, 150, device="cpu")
    given = tensors(grad=False)

    def run() -> Tensor:
        with all_served():
            return flex_attention(*given, block_mask=mask, enable_gqa=True)

    first = run()
    assert torch.equal(run(), first) and len(conversions) == 1
    ids[30:] = 1
    again, wanted = run(), flex_attention(*given, block_mask=mask, enable_gqa=True)
    assert len(conversions) == 2 and not torch.equal(again, first)
    torch.testing.assert_close(again, wanted)
    mask.kv_num_blocks[0, 0, 1] = 0  # PyTorch's form without torch.compile does not look at the lists
    without = run()
    assert (
        len(conversions) == 3 and not without[:, :, 128:].any() and torch.equal(without[:, :, :128], again[:, :, :128])
    )
    mask.mask_mod = torch_flex.noop_mask
    wanted = flex_attention(*given, enable_gqa=True)
    torch.testing.assert_close(run()[:, :, :128], wanted[:, :, :128])
    run()
    assert len(conversions) == 4


def test_captures() -> None:
    table, limit = torch.zeros(3), 4

    class Holder:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __call__(self, x: Tensor) -> Tensor:
            return x + self.value

    def make(value: Any) -> Mod:
        return lambda x: torch.where(x > limit, x, value)

    def key(function: Any) -> Any:
        return captures_of(function).key

    assert key(make(1)) == key(make(1)) != key(make(2)) and captures_of(make(1)).is_complete
    assert key(make(1)) != key(make(1.0)) and key(make(0.0)) == key(make(0.0))
    assert captures_of(make(table)).tensors[0] is table
    before = key(make(table)), key(Holder([table])), key(make(make(table)))
    assert before == (key(make(table)), key(Holder([table])), key(make(make(table))))
    table[1] = 2
    assert not set(before) & {key(make(table)), key(Holder([table])), key(make(make(table)))}
    form, others = captures_of(make(table)).form, [torch.ones(3), torch.ones(4), torch.ones(3).double()]
    assert [captures_of(make(other)).form == form for other in others] == [True, False, False]
    assert captures_of(make(table.long())).form != captures_of(make(table.long() + 1)).form
    assert captures_of(Holder([table])).is_complete
    with torch.inference_mode():
        other = torch.zeros(3)
        before_write = key(make(other))
        other[1] = 3
        assert captures_of(make(other)).is_complete and key(make(other)) != before_write
        assert not captures_of(make(torch.zeros(1 << 17))).is_complete
    assert not captures_of(make(random)).is_complete and not captures_of(make(Holder)).is_complete
    assert not captures_of(make([object() for _ in range(500)])).is_complete


# What is left to PyTorch


def test_reasons() -> None:
    query, key, value = tensors((150, 150), heads=(2, 2), grad=False)
    mask = block_mask("causal", (150, 150))[1]
    cases: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "max_scores: flash attention does not keep them": ((query, key, value), {"return_aux": AuxRequest(True, True)}),
        "return_lse together with return_aux": ((query, key, value), {"return_lse": True, "return_aux": AuxRequest()}),
        "several dtypes": ((query, key.float(), value), {}),
        "dtype": ((query.to(torch.float8_e4m3fn),) * 3, {}),
        "shapes": ((query, key[:, :1], value[:, :1]), {}),
        "tensor subclass": ((TwoTensor(query, query), key, value), {}),
        "scale is no number": ((query, key, value), {"scale": torch.tensor(0.5)}),
        "block_mask of other lengths": ((query[:, :, :9], key, value), {"block_mask": mask}),
        "slice of a block_mask": ((query, key, value), {"block_mask": mask[0]}),
        "block_mask of another batch or other heads": (
            (query, key, value),
            {"block_mask": block_mask("span of each head", (150, 150))[1]},
        ),
    }
    for reason, (given, options) in cases.items():
        flex.calls(reset=True)
        with flex.enable():
            try:
                flex_attention(*given, **options)
            except Exception as error:
                assert not isinstance(error, AttributeError), (reason, error)
        assert flex.calls() == {"served": {}, "refused": {reason: 1}}, reason
        with pytest.raises(RuntimeError, match=r"expected a call that .* can serve"):
            flex.flex_attention(*given, **options)


def test_a_mask_mod_that_cannot_be_mapped() -> None:
    lists = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(*lists, mask_mod=lambda b, h, q, k: q >= k if int(q) > 3 else k > 0)
    with flex.enable(), pytest.raises(Exception, match=""):  # PyTorch's, of any type
        flex_attention(*tensors((128, 128), grad=False), block_mask=mask, enable_gqa=True)
    assert flex.calls()["refused"] == {"mask_mod cannot be mapped over positions: RuntimeError": 1}


def test_the_functions_stay_the_same_objects() -> None:
    functions = [(each, each.__code__) for each in (flex_attention, varlen_attn)]
    flex.enable()
    with flex.enable():
        assert flex.is_enabled()
    assert flex_attention.__code__ is not functions[0][1]
    first = flex_attention.__code__
    flex.disable()
    flex.disable()
    with flex.enable():
        assert flex_attention.__code__ is first
    for function, code in functions:
        assert function.__code__ is code
    assert torch_flex.flex_attention is flex_attention and torch_varlen.varlen_attn is varlen_attn


def test_a_replaced_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn", torch.compile(varlen_attn))
    code = flex_attention.__code__
    with pytest.raises(RuntimeError, match="expected varlen_attn to be a plain"):
        flex.enable()
    assert flex_attention.__code__ is code and not flex.is_enabled()


# Compilers


def test_compiled_before_and_after() -> None:
    """`torch.compile(flex_attention)`, as transformers keeps it."""
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend="eager")
    given, mask = tensors((40, 40)), create_block_mask(MASKS["causal"][0], None, None, 40, 40, device="cpu")
    with torch.no_grad():
        compiled(*[each.detach() for each in given], enable_gqa=True)
    for mod in (None, MODS["softcap"], MODS["head offset"]):
        wanted = dense(*given, mod, MASKS["causal"][0])[0]
        with all_served():
            out = compiled(*given, mod, mask, enable_gqa=True)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), given), torch.autograd.grad(wanted.sum(), given))
    with flex.enable():
        plain = [each.detach() for each in given]
        torch.testing.assert_close(
            compiled(*plain, MODS["squared"], mask, enable_gqa=True),
            dense(*plain, MODS["squared"], MASKS["causal"][0])[0],
        )
    assert len(flex.calls()["refused"]) == 1
    with pytest.raises(Exception, match="backward on CPU"):
        compiled(*given, None, mask, enable_gqa=True)


def test_compiled_refusals_are_counted() -> None:
    """Also without score_mod and block_mask, where the graph does not break."""
    torch._dynamo.reset()
    query, key, value = tensors((9, 9), heads=(2, 2), dtype=torch.float32, grad=False)
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    with flex.enable():
        compiled(query, key.bfloat16(), value.bfloat16())
    assert flex.calls() == {"served": {}, "refused": {"several dtypes": 1}}


def test_compiled_without_a_break() -> None:
    torch._dynamo.reset()
    given = tensors((40, 40))

    def layer(*each: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(*[2 * part for part in each], enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out + 1, aux.lse

    wanted = dense(*[2 * each for each in given], None, None)
    with all_served():
        out, lse = torch.compile(layer, backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close((out, lse), (wanted[0] + 1, wanted[1]))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), given), torch.autograd.grad(wanted[0].sum(), given))


@pytest.mark.sampled
def test_inductor() -> None:
    torch._dynamo.reset()
    given, mask = (
        tensors((40, 40), dtype=torch.float64),
        create_block_mask(MASKS["causal"][0], None, None, 40, 40, device="cpu"),
    )

    def layer(*each: Tensor) -> Tensor:
        return flex_attention(*[part * 2 for part in each], MODS["times two"], mask, enable_gqa=True).sin()

    wanted = dense(*[2 * each for each in given], MODS["times two"], MASKS["causal"][0])[0].sin()
    with all_served():
        out = torch.compile(layer)(*given)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), given), torch.autograd.grad(wanted.sum(), given))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_code_follows_the_switch(fullgraph: bool) -> None:
    torch._dynamo.reset()
    traced: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        traced.append(any("cuda_ext" in str(node.target) for node in graph.graph.nodes))
        return graph

    given = tensors((40, 40), grad=False)

    def layer(*each: Tensor) -> Tensor:
        return flex_attention(*each, enable_gqa=True).sin()

    compiled, wanted = torch.compile(layer, backend=backend, fullgraph=fullgraph), dense(*given, None, None)[0].sin()
    for is_on in (False, True):
        with flex.enable() if is_on else contextlib.nullcontext():
            torch.testing.assert_close(compiled(*given), wanted)
    assert traced == [False, True]
    compiled(*given)
    assert len(traced) == 2  # what was compiled before `enable()` is found again


def test_a_mask_made_in_compiled_code() -> None:
    torch._dynamo.reset()
    given = tensors((40, 40))

    def layer(*each: Tensor) -> Tensor:
        mask = create_block_mask(MASKS["causal"][0], None, None, 40, 40, device="cpu")
        return flex_attention(*each, MODS["softcap"], mask, enable_gqa=True) * 2

    with all_served():
        out = torch.compile(layer, backend="aot_eager")(*given)
    torch.testing.assert_close(out, 2 * dense(*given, MODS["softcap"], MASKS["causal"][0])[0])


def test_changing_lengths_in_compiled_code() -> None:
    torch._dynamo.reset()
    with all_served():
        compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
        for length in (40, 41, 47, 60):
            given = tensors((length, length), grad=False)
            torch.testing.assert_close(compiled(*given, enable_gqa=True), dense(*given, None, None)[0])


def test_exported() -> None:
    class Layer(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return flex_attention(query, key, value, enable_gqa=True)

    given = tensors((40, 40), grad=False)
    with all_served():
        program = torch.export.export(Layer(), tuple(given))
    torch.testing.assert_close(program.module()(*given), dense(*given, None, None)[0])


def test_fullgraph_runs_in_torch() -> None:
    torch._dynamo.reset()
    given = tensors((40, 40), grad=False)
    with flex.enable():
        compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
        out = compiled(*given, MODS["times two"], enable_gqa=True)
    torch.testing.assert_close(out, dense(*given, MODS["times two"], None)[0])
    found = flex.calls()
    assert not found["served"] and list(found["refused"]) == [
        "score_mod or block_mask in torch.compile with fullgraph=True"
    ]


def test_on_emulated_kernels() -> None:
    given = tensors((70, 70), heads=(2, 1), dtype=torch.bfloat16)
    mask = create_block_mask(MASKS["causal"][0], None, None, 70, 70, device="cpu")
    wanted = dense(*[each.double() for each in given], MODS["alibi"], MASKS["causal"][0])[0]
    with emulated("sm_80") as emulation, all_served():
        out = flex_attention(*given, MODS["alibi"], mask, enable_gqa=True)
        gradients = torch.autograd.grad(out.sum(), given)
    assert emulation.counters["blocks"] > 0
    torch.testing.assert_close(out.double(), wanted, rtol=2.0**-6, atol=2.0**-6)  # two roundings of bfloat16
    expected = torch.autograd.grad(wanted.sum(), given)
    for ours, theirs in zip(gradients, expected):
        assert (ours - theirs).norm() <= 2.0**-6 * theirs.norm()


# varlen_attn


def packed(grad: bool = True) -> tuple[list[Tensor], Tensor, Tensor]:
    starts_q, starts_k = torch.tensor([0, 7, 7, 40]), torch.tensor([0, 30, 35, 90])
    shapes = (40, 4, 16), (90, 2, 16), (90, 2, 24)
    return [torch.randn(each, dtype=torch.float64, requires_grad=grad) for each in shapes], starts_q, starts_k


def near(shift: int, left: int, right: int) -> Mod:
    """The mask of a window, or of a side of it that is not -1, to the bottom-right diagonal."""
    sides = [math.inf if side < 0 else side for side in (left, right)]
    return lambda b, h, q, k: (k - q - shift >= -sides[0]) & (k - q - shift <= sides[1])


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 0), (3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_varlen(window: tuple[int, int], dtype: torch.dtype) -> None:
    given, starts_q, starts_k = packed()
    starts = starts_q.to(dtype), starts_k.to(dtype)
    with all_served():
        out, lse = varlen_attn(
            *given, *starts, 33, 55, window_size=window, scale=0.3, return_aux=torch_varlen.AuxRequest(lse=True)
        )
    parts = []
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        one = [
            each[start:end].transpose(0, 1).unsqueeze(0) for each, start, end in zip(given, (q0, k0, k0), (q1, k1, k1))
        ]
        seen = near(int(k1 - k0 - q1 + q0), *window)
        parts.append(dense(*one, None, seen, scale=0.3))
    wanted = torch.cat([part[0][0].transpose(0, 1) for part in parts])
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, torch.cat([part[1][0] for part in parts], 1))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), given), torch.autograd.grad(wanted.sum(), given))


def test_varlen_of_newer_releases() -> None:
    """Keyword arguments that PyTorch 2.11 does not have."""
    given, starts_q, starts_k = packed(grad=False)
    plain = flex.varlen_attn(*given, starts_q, starts_k, 33, 55)
    with all_served():
        more: dict[str, Any] = {"enable_gqa": True, "num_splits": 1}
        assert torch.equal(varlen_attn(*given, starts_q, starts_k, 33, 55, **more), plain)
    pages = torch.randn(2, 6, 16, 2, 16, dtype=torch.float64)
    table, used = torch.tensor([[4, 0, 5], [1, 3, 2]]), torch.tensor([40, 17])
    query = torch.randn(6, 4, 16, dtype=torch.float64)
    starts = torch.tensor([0, 3, 6])
    with all_served():
        options = {"block_table": table, "seqused_k": used, "return_aux": torch_varlen.AuxRequest(lse=True)}
        out, lse = varlen_attn(query, *pages, starts, None, 3, 48, **options)
        other = varlen_attn(query, *pages, starts, torch.tensor([0, 40, 57]), 3, 48, block_table=table)
    rows = [torch.cat([each[row].flatten(0, 1)[:count] for row, count in zip(table, used)]) for each in pages]
    aux = torch_varlen.AuxRequest(lse=True)
    wanted, wanted_lse = flex.varlen_attn(query, *rows, starts, torch.tensor([0, 40, 57]), 3, 40, return_aux=aux)
    torch.testing.assert_close((out, lse, other), (wanted, wanted_lse, wanted))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 9), (-1, 4)])
def test_varlen_of_the_first_keys(window: tuple[int, int]) -> None:
    """Keys and values have room for more; gradients, which PyTorch does not have for this."""
    lengths, room, used = [4, 0, 9], [12, 3, 20], [7, 2, 9]
    starts_q, starts_k = (torch.tensor([0, *itertools.accumulate(each)]).int() for each in (lengths, room))
    query = torch.randn(13, 4, 16, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(35, 2, 16, dtype=torch.float64) for _ in range(2))
    rows = torch.cat([start + torch.arange(count) for start, count in zip(starts_k.tolist(), used)])
    for each in (key, value):
        each[~torch.isin(torch.arange(35), rows)] = torch.nan  # as torch.empty may be
    leaves = [query, key.requires_grad_(), value.requires_grad_()]
    options: dict[str, Any] = {"window_size": window, "return_aux": torch_varlen.AuxRequest(lse=True)}
    with all_served():
        more: dict[str, Any] = {"seqused_k": torch.tensor(used)}
        found = varlen_attn(*leaves, starts_q, starts_k, 9, 20, **options, **more)
    shorter = [query, key[rows], value[rows]]
    starts = torch.tensor([0, *itertools.accumulate(used)]).int()
    wanted = flex.varlen_attn(*shorter, starts_q, starts, 9, 9, **options)
    torch.testing.assert_close(found, wanted)
    grads = [
        torch.autograd.grad([out.square().sum(), lse[lse.isfinite()].sum()], leaves) for out, lse in (found, wanted)
    ]
    torch.testing.assert_close(*grads)


def test_varlen_into_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 does not have the function, so it gets one of the same arguments."""

    def varlen_attn_out(
        out: Tensor,
        query: Any,
        key: Any,
        value: Any,
        cu_seq_q: Any,
        cu_seq_k: Any,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: Any = None,
        window_size: Any = (-1, -1),
        num_splits: Any = None,
    ) -> Any:
        raise NotImplementedError("of PyTorch")

    monkeypatch.setattr(torch_varlen, "varlen_attn_out", varlen_attn_out, raising=False)
    given, starts_q, starts_k = packed(grad=False)
    aux = torch_varlen.AuxRequest(lse=True)
    wanted, wanted_lse = flex.varlen_attn(*given, starts_q, starts_k, 33, 55, window_size=(-1, 0), return_aux=aux)
    out = torch.full((*wanted.shape[:-1], 2 * wanted.shape[-1]), torch.nan, dtype=wanted.dtype)[..., ::2]
    with all_served():
        options: dict[str, Any] = {"window_size": (-1, 0), "return_aux": aux}
        result, lse = varlen_attn_out(out, *given, starts_q, starts_k, 33, 55, **options)
    assert result is out and torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    assert flex.varlen_attn_out(out, *given, starts_q, starts_k, 33, 55) is out
    with flex.enable(), pytest.raises(NotImplementedError, match="of PyTorch"):
        varlen_attn_out(out[:1], *given, starts_q, starts_k, 33, 55)
    with pytest.raises(NotImplementedError, match="of PyTorch"):
        varlen_attn_out(out, *given, starts_q, starts_k, 33, 55)
    query = given[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"flex\.varlen_attn_out: expected a call .*with gradients"):
        flex.varlen_attn_out(out, query, *given[1:], starts_q, starts_k, 33, 55)


def test_varlen_reasons() -> None:
    given, starts_q, starts_k = packed(grad=False)
    cases: dict[str, dict[str, Any]] = {
        "argument dropout_p": {"dropout_p": 0.1},
        "shapes": {"enable_gqa": False},
    }
    for reason, options in cases.items():
        flex.calls(reset=True)
        with flex.enable(), pytest.raises(TypeError):  # of PyTorch's function
            varlen_attn(*given, starts_q, starts_k, 33, 55, **options)
        assert flex.calls() == {"served": {}, "refused": {reason: 1}}
        with pytest.raises(RuntimeError, match=f"flex.varlen_attn: expected a call .*{reason}"):
            flex.varlen_attn(*given, starts_q, starts_k, 33, 55, **options)


def test_varlen_compiled_refusals_are_counted() -> None:
    torch._dynamo.reset()
    given, starts_q, starts_k = packed(grad=False)
    compiled = torch.compile(varlen_attn, backend="eager")
    with flex.enable(), pytest.raises(Exception, match=""):  # PyTorch's, of any type
        compiled(*given[:2], given[2][:3], starts_q, starts_k, 33, 55)
    assert flex.calls() == {"served": {}, "refused": {"shapes": 1}}


def test_varlen_compiled() -> None:
    torch._dynamo.reset()
    given, starts_q, starts_k = packed()
    plain = flex.varlen_attn(*given, starts_q, starts_k, 33, 55)
    with all_served():
        compiled = torch.compile(varlen_attn, backend="aot_eager", fullgraph=True)
        out = compiled(*given, starts_q, starts_k, 33, 55)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), given), torch.autograd.grad(plain.sum(), given))


# Models


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("padded", [False, True])
def test_transformers(padded: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").double()
    tokens = torch.randint(97, (2, 50))
    seen = torch.ones_like(tokens)
    if padded:
        seen[1, 40:] = 0
    inputs = {"input_ids": tokens, "attention_mask": seen, "labels": tokens.where(seen == 1, -100)}
    results = []
    for implementation in ("sdpa", "flex_attention"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with flex.enable():
            loss = model(**inputs).loss
        loss.backward()
        results.append([loss.detach(), *(each.grad for each in model.parameters())])
    assert flex.calls() == {"served": {"flex_attention": 2}, "refused": {}}
    torch.testing.assert_close(*results)
