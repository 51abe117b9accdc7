"""cuda_ext.integrations.flex: score_mods whose bias depends on the distance of query and key alone, and those that seem
to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flex_common import (
    INF,
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
from torch.nn.attention.flex_attention import flex_attention

from cuda_ext.integrations import flex, flex_distances, flex_score_mods
from cuda_ext.integrations.flex_score_mods import Modification, NotServed, Positions, recognise

LENGTHS = [(150, 150), (40, 130), (131, 67), (2, 150), (1, 70), (70, 1), (1, 1)]
KINDS = ("alibi_slopes", "attn_bias", "relative_bias")


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of each call: how its bias is passed."""
    flex_distances._known.clear()
    found = []

    def spy(*args: Any, **options: Any) -> Modification:
        modification = recognise(*args, **options)
        found.append(" ".join(name for name in KINDS if getattr(modification, name) is not None))
        return modification

    monkeypatch.setattr(flex, "recognise", spy)
    return found


@pytest.fixture
def elements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values of a score_mod were computed by each evaluation."""
    found, evaluate = [], flex_score_mods._evaluate

    def counting(*args: Any, **options: Any) -> Tensor:
        values = evaluate(*args, **options)
        found.append(values.numel())
        return values

    monkeypatch.setattr(flex_score_mods, "_evaluate", counting)
    return found


def table(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def buckets(distance: Tensor) -> Tensor:
    """As those of T5."""
    far = 8 + (distance.abs().clamp(min=1) / 8).log().mul(4).long()
    return torch.where(distance.abs() < 8, distance.abs(), far.clamp(max=15)) + 16 * (distance > 0)


ONE, HEADS, BATCH, SLOPES = table(300), table(4, 300), table(2, 4, 300), table(4)
SEVERAL: dict[str, tuple[Mod, list[Tensor]]] = {
    "table": (lambda s, b, h, q, k: s + HEADS[h, k - q + 150], [HEADS]),
    "one table for all heads": (lambda s, b, h, q, k: s + ONE[q - k + 149], [ONE]),
    "table of each batch": (lambda s, b, h, q, k: s + BATCH[b, h, q - k + 149], [BATCH]),
    "table of each batch, one head": (lambda s, b, h, q, k: s + BATCH[b, 1, q - k + 149], [BATCH]),
    "clamped": (lambda s, b, h, q, k: s + HEADS[h, (k - q).clamp(-5, 9) + 10], [HEADS]),
    "buckets": (lambda s, b, h, q, k: 2 * s + HEADS[h, buckets(k - q)], [HEADS]),
    "softcap": (lambda s, b, h, q, k: 2 * torch.tanh(s / 2) + HEADS[h, k - q + 150], [HEADS]),
    "causal": (lambda s, b, h, q, k: torch.where(q >= k, s + HEADS[h, q - k], -INF), [HEADS]),
    "window": (lambda s, b, h, q, k: torch.where((q - k).abs() < 9, s + HEADS[h, k - q + 150], -INF), [HEADS]),
    "window of each head": (lambda s, b, h, q, k: torch.where((q - k).abs() <= 7 * h, s, -INF), []),
    "nothing is seen": (lambda s, b, h, q, k: torch.where(q - k > 999, s, -INF), []),
    "alibi": (lambda s, b, h, q, k: s - 0.1 * h * (q - k).abs(), []),
    "alibi that learns": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), [SLOPES]),
    "signed alibi": (lambda s, b, h, q, k: s + (q - k), []),
    "kernel": (lambda s, b, h, q, k: s + SLOPES[h] * torch.exp(-((q - k) ** 2) * SLOPES[0] ** 2 / 99), [SLOPES]),
}


@pytest.mark.sampled(cases=20)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", SEVERAL)
def test_values_and_gradients(name: str, lengths: tuple[int, int], masked: bool, used: list[str]) -> None:
    mod, captured = SEVERAL[name]
    for _ in range(2):  # the second call looks at rows and columns only
        mask = block_mask("causal", lengths) if masked else None
        assert_same(tensors(lengths), mod, mask, captured=captured)
    assert used == ["relative_bias"] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_in_lower_precision(dtype: torch.dtype, used: list[str]) -> None:
    given, own = tensors((60, 90), dtype=dtype), torch.randn(4, 300, dtype=dtype, requires_grad=True)
    with all_served():
        out = flex_attention(*given, lambda s, b, h, q, k: s + own[h, k - q + 150], enable_gqa=True)
    exact = [each.double() for each in (*given, own)]
    wanted = dense(*exact[:3], lambda s, b, h, q, k: s + exact[3][h, k - q + 150], None)[0]
    weights, error = torch.randn_like(out), 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), wanted, rtol=error, atol=error)
    grads = [torch.autograd.grad((each * weights).sum(), [*given, own]) for each in (out, wanted)]
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).double().norm() <= error * theirs.double().norm()
    assert used == ["relative_bias"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_alibi(signed: bool, causal: bool, used: list[str], elements: list[int]) -> None:
    """Slopes where attention has them."""
    slopes = (torch.rand(4) + 0.5) / 8  # logits up to 42, whose rounding does not count

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + slopes[h] * ((k - q) if signed else -(k - q).abs())

    mask = block_mask("causal", (150, 150)) if causal else None
    for _ in range(2):
        elements.clear()
        assert_same(tensors(dtype=torch.float32), mod, mask)
        slopes *= 1.5
    assert used == ["relative_bias" if signed and not causal else "alibi_slopes"] * 2
    assert sum(elements) < 4 * 150 * 150


# How much is evaluated


@pytest.mark.parametrize("made", [False, True], ids=["parameter", "made of it"])
def test_a_table_in_training(made: bool, used: list[str], elements: list[int]) -> None:
    """It changes in place; or the function captures another tensor at each step."""
    own, lengths = nn.Parameter(torch.randn(4, 300, dtype=torch.float64)), (150, 120)
    optimizer = torch.optim.SGD([own], lr=0.5)

    def score_mod(weight: Tensor) -> Mod:
        return lambda s, b, h, q, k: s + weight[h, k - q + 150]

    for step in range(4):
        given, weight = tensors(lengths), own * 2 if made else own
        elements.clear()
        assert_same(given, score_mod(weight), None, captured=[weight])
        scores, *by_position = sorted(elements, reverse=True)
        if step > 0:  # the first: 66 scores at some positions
            assert scores < 30_000 and sum(by_position) < 7 * 4 * sum(lengths) + 30_000
        else:
            assert sum(elements) > 2 * 4 * lengths[0] * lengths[1]
        optimizer.zero_grad()
        flex.flex_attention(*given, score_mod(own * 2 if made else own), enable_gqa=True).square().sum().backward()
        optimizer.step()
    assert set(used) == {"relative_bias"}


def test_too_large_to_look_at_all(monkeypatch: pytest.MonkeyPatch, used: list[str], elements: list[int]) -> None:
    monkeypatch.setattr(flex_score_mods, "MAX_BIAS", 1000)
    mod, captured = SEVERAL["table"]
    assert_same(tensors(), mod, None, captured=captured)
    assert used == ["relative_bias"]
    with flex.enable(), pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(*tensors(), lambda s, b, h, q, k: s + HEADS[h, k - q + 150] + 1e-3 * k, enable_gqa=True)
    assert list(flex.calls()["refused"]) == ["score_mod needs a bias of more than 1000 elements"]


# What only seems to depend on the distance alone

FEW = torch.zeros(150, 150, dtype=torch.float64)
FEW[70, 90] = 1
OTHERS: dict[str, Mod] = {
    "one position": lambda s, b, h, q, k: s + HEADS[h, k - q + 150] + FEW[q, k],
    "one position is seen": lambda s, b, h, q, k: torch.where((q >= k) | (FEW[q, k] == 1), s, -INF),
    "documents": lambda s, b, h, q, k: torch.where(q // 37 == k // 37, s + HEADS[h, k - q + 150], -INF),
    "beyond some position": lambda s, b, h, q, k: s + torch.where(q > 140, k, k - q).abs(),
    "one query": lambda s, b, h, q, k: s + HEADS[h, k - q + 150] * (1 + 1e-3 * (q == 77)),
    "one head": lambda s, b, h, q, k: s + torch.where(h == 2, 0.01 * k * q, HEADS[h, k - q + 150]),
    "rounded in another way": lambda s, b, h, q, k: s + (0.1 * q - 0.1 * k),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_a_table(name: str, used: list[str]) -> None:
    for _ in range(2):
        assert_same(tensors(), OTHERS[name], None, captured=[HEADS])
    assert used == ["attn_bias"] * 2


def with_term(term: Callable[[Tensor, Tensor], Tensor]) -> Mod:
    return lambda s, b, h, q, k: s + HEADS[h, k - q + 150] + term(q, k)


def test_terms_that_are_zero_now_have_gradients(used: list[str]) -> None:
    column, gate = (torch.zeros(size, dtype=torch.float64, requires_grad=True) for size in (150, ()))
    matrix = torch.zeros(150, 150, dtype=torch.float64, requires_grad=True)
    for term, own in (
        (lambda q, k: column[k], column),
        (lambda q, k: column[q] ** 2 + column[q], column),
        (lambda q, k: gate * (q % 7), gate),
        (lambda q, k: gate * FEW[q, k], gate),
        (lambda q, k: matrix[q, k], matrix),
    ):
        assert_same(tensors(), with_term(term), None, captured=[own, HEADS])
    assert used == ["attn_bias"] * 5


def test_a_function_that_hides_its_tensors(used: list[str]) -> None:
    """What cannot be replaced by other values has a table, if it has a gradient."""

    class Doubled(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Holder:
        __slots__ = ("own",)

    holder, own = Holder(), torch.zeros(150, dtype=torch.float64, requires_grad=True)
    holder.own = own
    for term in (lambda q, k: Doubled.apply(own[k]), lambda q, k: holder.own[k]):
        assert_same(tensors(), with_term(term), None, captured=[own, HEADS])
    assert used == ["attn_bias"] * 2


@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_values_that_change(dtype: torch.dtype, compared: bool, used: list[str]) -> None:
    """At one position."""

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + fixed[k - q + 150] + ((own[q, k] > 0.5) * 2.0 if compared else own[q, k])

    own, fixed = torch.zeros(150, 150, dtype=dtype), torch.randn(300, dtype=torch.float64)
    for step in range(4):
        if step == 2:
            own[random.randrange(1, 150), random.randrange(1, 150)] = 3
        assert_same(tensors(), mod, None)
    assert used == ["relative_bias"] * 2 + ["attn_bias"] * 2


def test_values_that_are_compared(used: list[str]) -> None:
    ages = torch.zeros(150, dtype=torch.float64)
    mod = with_term(lambda q, k: (ages[k] > 9) * 1.5)
    assert_same(tensors(), mod, None)
    ages[88] = 10  # which every row sees
    assert_same(tensors(), mod, None)
    assert used == ["relative_bias", "attn_bias"]


def test_replaced_tensors(used: list[str]) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 300, dtype=torch.float64))

        def forward(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + self.table[h, k - q + 150]

    module = Module()
    for _ in range(2):
        assert_same(tensors(), module.forward, None, captured=[module.table])
        module.table = nn.Parameter(torch.randn(4, 350, dtype=torch.float64))
    where = torch.arange(150)
    for _ in range(2):
        assert_same(tensors(), lambda s, b, h, q, k: s - (where[q] - where[k]).abs(), None)  # noqa: B023
        where = where.flip(0).sort().values if where[0] > 0 else torch.randperm(150)
    assert used == ["relative_bias"] * 3 + ["attn_bias"]


# Around it


def test_compiled(used: list[str]) -> None:
    torch._dynamo.reset()
    compiled, mask_mod = torch.compile(flex_attention, backend="eager"), MASKS["causal"][0]
    mod, captured = SEVERAL["table"]
    mask = block_mask("causal", (150, 150))[1]
    for _ in range(2):
        given = tensors()
        with all_served():
            out = compiled(*given, mod, mask, enable_gqa=True)
        wanted = dense(*given, mod, mask_mod)[0]
        grads = [torch.autograd.grad(each.square().sum(), [*given, *captured]) for each in (out, wanted)]
        for ours, theirs in zip((out, *grads[0]), (wanted, *grads[1]), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert used == ["relative_bias"] * 2


def test_without_reading_from_the_device() -> None:
    """A function that captures no tensor must be known."""
    where = Positions(2, 4, 150, 150, torch.device("cpu"), torch.float32)
    mod: Mod = lambda s, b, h, q, k: s + (q - k).abs() ** 0.5  # noqa: E731
    with pytest.raises(NotServed, match="in a CUDA graph"):
        recognise(mod, where, lambda: False, may_wait=False)
    first = recognise(mod, where, lambda: False).relative_bias
    second = recognise(mod, where, lambda: False, may_wait=False).relative_bias
    assert first is not None and second is not None and torch.equal(first, second)
    with pytest.raises(NotServed, match="in a CUDA graph"):
        recognise(SEVERAL["table"][0], where, lambda: False, may_wait=False)


def test_random_numbers_of_the_user_stay() -> None:
    states = random.getstate(), torch.get_rng_state()
    recognise(SEVERAL["table"][0], Positions(2, 4, 9, 9, torch.device("cpu"), torch.float32), lambda: False)
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


def test_forward_mode() -> None:
    """A tangent is not lost, though values are those of distances."""
    column, given = torch.zeros(150, dtype=torch.float64), tensors(grad=False)

    def function(own: Tensor) -> Tensor:
        return flex.flex_attention(*given, with_term(lambda q, k: own[k]), enable_gqa=True)

    direction = torch.randn(150, dtype=torch.float64)
    with torch.no_grad():
        exact = [dense(*given, with_term(lambda q, k: step * direction[k]), None)[0] for step in (1e-6, -1e-6)]  # noqa: B023
        tangent = torch.func.jvp(function, (column,), (direction,))[1]
    torch.testing.assert_close(tangent, (exact[0] - exact[1]) / 2e-6, rtol=1e-6, atol=1e-7)
