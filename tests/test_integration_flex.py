"""cuda_ext.integrations.flex: flex_attention and varlen_attn give what PyTorch's give, with gradients on the CPU too."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.testing._internal.two_tensor import TwoTensor

import cuda_ext
from cuda_ext.integrations import flex
from cuda_ext.integrations.captures import captures_of
from cuda_ext.testing import emulated

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
    places = [
        torch.arange(n).view([-1 if i == j else 1 for j in range(4)])
        for i, n in enumerate((batch, heads, queries, keys))
    ]
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
    gradients = [torch.autograd.grad(total, leaves) for total in sums]
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


def test_layout_of_the_output() -> None:
    rows_first = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in tensors(grad=False)]
    wanted = flex_attention(*rows_first, enable_gqa=True)
    with all_served():
        assert flex_attention(*rows_first, enable_gqa=True).stride() == wanted.stride()


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
    mask.kv_num_blocks[0, 0, 1] = 0
    torch.testing.assert_close(run(), flex_attention(*given, block_mask=mask, enable_gqa=True))
    assert len(conversions) == 3
    mask.mask_mod = torch_flex.noop_mask
    torch.testing.assert_close(run(), flex_attention(*given, block_mask=mask, enable_gqa=True))
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
    assert captures_of(Holder([table])).is_complete
    with torch.inference_mode():
        other = torch.zeros(3)
        before_write = key(make(other))
        other[1] = 3
        assert captures_of(make(other)).is_complete and key(make(other)) != before_write
        assert not captures_of(make(torch.zeros(1 << 17))).is_complete
    assert not captures_of(make(random)).is_complete and not captures_of(make(Holder)).is_complete
    assert not captures_of(make([object() for _ in range(500)])).is_complete


# score_mod: the functions of PyTorch's own tests, and others

TABLE, SEQUENCE, SCALES = torch.randn(4, 300, dtype=torch.float64), torch.arange(150) // 40, torch.rand(4) + 0.5
FULL = torch.randn(2, 4, 150, 150, dtype=torch.float64)
SERVED: dict[str, Mod] = {
    "identity": lambda s, b, h, q, k: s,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -INF),
    "inverse causal": lambda s, b, h, q, k: torch.where(q <= k, s, -INF),
    "times two": lambda s, b, h, q, k: s * 2,
    "divided, negated": lambda s, b, h, q, k: -s / 3,
    "constant": lambda s, b, h, q, k: torch.zeros_like(s) + 0.5,
    "softcap": lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5),
    "factor, softcap, factor": lambda s, b, h, q, k: 2 * (3.0 * torch.tanh(s * 0.4 / 3.0)),
    "softcap and bias": lambda s, b, h, q, k: 2 * torch.tanh(s / 2) + TABLE[h, k],
    "softcap and causal": lambda s, b, h, q, k: torch.where(q >= k, 2 * torch.tanh(s / 2), -INF),
    "relative bias": lambda s, b, h, q, k: s + (q - k),
    "relative bias, causal": lambda s, b, h, q, k: torch.where(q <= k, s + (q - k), -INF),
    "relative table": lambda s, b, h, q, k: s + TABLE[h, k - q + 150],
    "alibi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 4)),
    "symmetric alibi": lambda s, b, h, q, k: s - SCALES[h] * (q - k).abs(),
    "alibi and factor": lambda s, b, h, q, k: 0.5 * s - SCALES[h] * (q - k).abs(),
    "bias": lambda s, b, h, q, k: s + FULL[b, h, q, k],
    "bias, one index after the other": lambda s, b, h, q, k: s + FULL[b][h][q][k] if s.dim() == 0 else s + FULL,
    "head offset": lambda s, b, h, q, k: s + TABLE[h, 0],
    "batch offset": lambda s, b, h, q, k: s + b * (k % 3),
    "sequences": lambda s, b, h, q, k: torch.where(SEQUENCE[q] == SEQUENCE[k], s, -INF),
    "position sines": lambda s, b, h, q, k: s + torch.sin(b + 0.1 * q) * torch.cos(h * k),
    "special position": lambda s, b, h, q, k: torch.where((q == 77) & (k == 76), s + 5, s),
    "large negative mask": lambda s, b, h, q, k: s + torch.where(q >= k, 0.0, -1e9),
    "nothing": lambda s, b, h, q, k: torch.full_like(s, -INF),
}
NO_FUNCTION = "score_mod is no function that attention has"
NOT_MAPPED = "score_mod cannot be mapped over positions"
REFUSED: dict[str, tuple[Mod, str]] = {
    "squared": (lambda s, b, h, q, k: s * s, NO_FUNCTION),
    "power": (lambda s, b, h, q, k: s**2, NO_FUNCTION),
    "sine": (lambda s, b, h, q, k: torch.sin(s), NO_FUNCTION),
    "trigonometric": (lambda s, b, h, q, k: torch.cos(s) + torch.sin(b) + torch.tan(q), NO_FUNCTION),
    "relu": (lambda s, b, h, q, k: s.relu(), NO_FUNCTION),
    "clamped": (lambda s, b, h, q, k: s.clamp(-100, 100), NO_FUNCTION),
    "nearly a softcap": (lambda s, b, h, q, k: 30 * torch.tanh(s / 30) + 1e-3 * s, NO_FUNCTION),
    "arctangent": (lambda s, b, h, q, k: 20 * torch.atan(s / 20), NO_FUNCTION),
    "bias below the softcap": (lambda s, b, h, q, k: 20 * torch.tanh((s + 0.1 * q) / 20), NO_FUNCTION),
    "times position": (lambda s, b, h, q, k: s * (q + 1), NO_FUNCTION),
    "factor of each head": (lambda s, b, h, q, k: s * SCALES[h], NO_FUNCTION),
    "checkerboard": (lambda s, b, h, q, k: torch.where((q - k) % 2 == 0, s, s * 0.5), NO_FUNCTION),
    "factor at one position": (lambda s, b, h, q, k: torch.where((q == 77) & (k == 76), s * 2, s), NO_FUNCTION),
    "hides by score": (lambda s, b, h, q, k: torch.where(s > 3, s, -INF), "score_mod"),
    "infinite": (lambda s, b, h, q, k: s + torch.where(k == 149, INF, 0.0), "score_mod"),
    "random": (lambda s, b, h, q, k: s * (torch.rand_like(s) > 0.1), NOT_MAPPED),
    "reads values": (lambda s, b, h, q, k: s if int(q) > 3 else s * 2, NOT_MAPPED),
    "integers": (lambda s, b, h, q, k: q - k, "score_mod returns no floating-point tensor"),
}


@pytest.mark.sampled(cases=30)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_served_score_mods(name: str, dtype: torch.dtype, masked: bool) -> None:
    mask = block_mask("causal", (150, 150)) if masked else None
    mod = SERVED[name]

    def in_dtype(s: Tensor, *places: Tensor) -> Tensor:
        return mod(s, *places).to(dtype) if s.dim() == 4 else mod(s, *places)

    assert_same(tensors(dtype=dtype), in_dtype, mask)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_score_mods(name: str) -> None:
    mod, reason = REFUSED[name]
    given = tensors(grad=False)
    with flex.enable():
        try:
            out = flex_attention(*given, mod, enable_gqa=True)
        except Exception:  # PyTorch refuses some, too
            out = None
    ((found, count),) = flex.calls()["refused"].items()
    assert found.startswith(reason) and count == 1
    if out is not None and name not in ("random", "infinite"):
        torch.testing.assert_close(out, flex_attention(*given, mod, enable_gqa=True), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(RuntimeError, match=f"flex.flex_attention: expected .*{reason}"):
        flex.flex_attention(*given, mod, enable_gqa=True)


def test_alibi_has_no_table_if_attention_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda_ext.integrations.flex_score_mods.MAX_BIAS", 100)
    given = tensors(dtype=torch.float32)
    assert_same(given, SERVED["symmetric alibi"], None)
    assert_same(given, SERVED["alibi"], block_mask("causal", (150, 150)))
    given = tensors((150, 170), dtype=torch.float32)
    assert_same(given, lambda s, b, h, q, k: s - 0.5 * (q + 20 - k).abs(), None)
    with flex.enable(), pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(*given, lambda s, b, h, q, k: s + 0.5 * (k - q), enable_gqa=True)
    assert list(flex.calls()["refused"]) == ["score_mod needs a bias of more than 100 elements"]


def test_gradients_of_what_a_score_mod_captures() -> None:
    table = torch.randn(4, 300, dtype=torch.float64, requires_grad=True)
    column = torch.randn(150, dtype=torch.float64, requires_grad=True)
    network = nn.Linear(1, 1).double()

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + table[h, k - q + 150] * column[k]

    captured = {"captured": [table, column]}
    assert_same(tensors(), mod, block_mask("documents", (150, 150)), **captured)
    slopes = network(torch.arange(4.0, dtype=torch.float64).unsqueeze(1)).squeeze(1)
    options = {"captured": [slopes]}
    assert_same(tensors(), lambda s, b, h, q, k: 2 * torch.tanh(s / 2) - slopes[h] * (q - k).abs(), None, **options)
    with torch.no_grad(), all_served():
        flex_attention(*tensors(), mod, enable_gqa=True)


def test_a_factor_with_a_gradient_is_refused() -> None:
    factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    given = tensors(grad=False)
    with flex.enable():
        flex_attention(*given, lambda s, b, h, q, k: s * factor, enable_gqa=True)
        with torch.no_grad():
            flex_attention(*given, lambda s, b, h, q, k: s * factor, enable_gqa=True)
    reason = "score_mod multiplies the score by a tensor that requires grad"
    assert flex.calls() == {"served": {"flex_attention": 1}, "refused": {reason: 1}}


def test_captured_numbers_may_change() -> None:
    """What is known of a function is not used after its constants have changed."""
    cap, table = 2.0, torch.zeros(150, dtype=torch.float64)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(s / cap) + table[k]

    assert_same(tensors(), mod, None)
    cap = 0.7
    assert_same(tensors(), mod, None)
    table[3] = 4
    assert_same(tensors(), mod, None)


def test_random_numbers_of_the_user_stay() -> None:
    given, states = tensors(grad=False), (random.getstate(), torch.get_rng_state())
    with all_served():
        flex_attention(*given, SERVED["relative table"], enable_gqa=True)
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


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
        with pytest.raises(RuntimeError, match="expected a call that cuda_ext.flash_attention can serve"):
            flex.flex_attention(*given, **options)


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
    with pytest.raises(RuntimeError, match="expected _routed_varlen|expected varlen_attn"):
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
    for mod in (None, SERVED["softcap"], SERVED["head offset"]):
        wanted = dense(*given, mod, MASKS["causal"][0])[0]
        with all_served():
            out = compiled(*given, mod, mask, enable_gqa=True)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), given), torch.autograd.grad(wanted.sum(), given))
    with flex.enable():
        plain = [each.detach() for each in given]
        torch.testing.assert_close(
            compiled(*plain, REFUSED["squared"][0], mask, enable_gqa=True),
            dense(*plain, REFUSED["squared"][0], MASKS["causal"][0])[0],
        )
    assert len(flex.calls()["refused"]) == 1
    with pytest.raises(Exception, match="backward on CPU"):
        compiled(*given, None, mask, enable_gqa=True)


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
        tensors((40, 40), dtype=torch.float32),
        create_block_mask(MASKS["causal"][0], None, None, 40, 40, device="cpu"),
    )

    def layer(*each: Tensor) -> Tensor:
        return flex_attention(*[part * 2 for part in each], SERVED["times two"], mask, enable_gqa=True).sin()

    wanted = dense(*[2 * each for each in given], SERVED["times two"], MASKS["causal"][0])[0].sin()
    with all_served():
        out = torch.compile(layer)(*given)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), given), torch.autograd.grad(wanted.sum(), given))


def test_fullgraph_runs_in_torch() -> None:
    torch._dynamo.reset()
    given = tensors((40, 40), grad=False)
    with flex.enable():
        compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
        out = compiled(*given, SERVED["times two"], enable_gqa=True)
    torch.testing.assert_close(out, dense(*given, SERVED["times two"], None)[0])
    counted = flex.calls()
    assert not counted["served"] and list(counted["refused"]) == [
        "score_mod or block_mask in torch.compile with fullgraph=True"
    ]


def test_on_emulated_kernels() -> None:
    given = tensors((70, 70), heads=(2, 1), dtype=torch.bfloat16)
    mask = create_block_mask(MASKS["causal"][0], None, None, 70, 70, device="cpu")
    wanted = dense(*[each.double() for each in given], SERVED["alibi"], MASKS["causal"][0])[0]
    with emulated("sm_80") as emulation, all_served():
        out = flex_attention(*given, SERVED["alibi"], mask, enable_gqa=True)
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
        shift = int(k1 - k0 - q1 + q0)
        left, right = (math.inf if side < 0 else side for side in window)
        parts.append(
            dense(*one, None, lambda b, h, q, k: (k - q - shift >= -left) & (k - q - shift <= right), scale=0.3)
        )
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


def test_varlen_reasons() -> None:
    given, starts_q, starts_k = packed(grad=False)
    cases: dict[str, dict[str, Any]] = {
        "argument dropout_p": {"dropout_p": 0.1},
        "shapes": {"enable_gqa": False},
        "seqused_k without block_table": {"seqused_k": torch.tensor([1, 1, 1])},
    }
    for reason, options in cases.items():
        flex.calls(reset=True)
        with flex.enable(), pytest.raises(TypeError):  # of PyTorch's function
            varlen_attn(*given, starts_q, starts_k, 33, 55, **options)
        assert flex.calls() == {"served": {}, "refused": {reason: 1}}
        with pytest.raises(RuntimeError, match=f"flex.varlen_attn: expected a call .*{reason}"):
            flex.varlen_attn(*given, starts_q, starts_k, 33, 55, **options)


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
