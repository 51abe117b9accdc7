"""score_mods in cuda_ext.integrations.flex: those of PyTorch's own tests and others, served or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flex_common import (
    INF,
    Mod,
    all_served,
    assert_same,
    block_mask,
    counted,  # noqa: F401
    tensors,
)
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from cuda_ext._mask_mods import index_or_nan
from cuda_ext.integrations import flex

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
    "alibi and a special position": lambda s, b, h, q, k: (
        s - SCALES[h] * (q - k).abs() + torch.where((q == 77) & (k == 76), 5.0, 0.0)
    ),
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
    "times position": (lambda s, b, h, q, k: s * (k + 1), NO_FUNCTION),
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
    assert_same(given, lambda s, b, h, q, k: s + 0.5 * (k - q), None)
    with flex.enable(), pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(*given, lambda s, b, h, q, k: s + torch.sin(k * q), enable_gqa=True)
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


FACTORS: dict[str, tuple[tuple[int, ...], Callable[..., Tensor]]] = {
    "one number": ((), lambda t, b, h, q: t),
    "gate of a head": ((4,), lambda t, b, h, q: torch.sigmoid(t[h])),
    "temperature of a query": ((150,), lambda t, b, h, q: t[q]),
    "of all": ((2, 4, 150), lambda t, b, h, q: t[b, h, q]),
    "of a head, the other heads 0": ((4,), lambda t, b, h, q: torch.where(h == 2, t[h], 0.0)),
}
BIASES: dict[str, Callable[..., Any]] = {
    "no bias": lambda t, b, h, q, k: 0.0,
    "distances": lambda t, b, h, q, k: (k - q) * 0.25,
    "table": lambda t, b, h, q, k: t[q] * t[k],
    "hides": lambda t, b, h, q, k: torch.where(k % 3 == 1, -torch.inf, 0.0),
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("factor", FACTORS)
def test_factors_of_rows(factor: str, bias: str) -> None:
    """With the gradient of the factor, and of the bias."""
    shape, scales = FACTORS[factor]
    captured = [torch.randn(shape, dtype=torch.float64, requires_grad=True)]
    captured.append(torch.randn(150, dtype=torch.float64, requires_grad=bias == "table"))

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return scales(captured[0], b, h, q) * s + BIASES[bias](captured[1], b, h, q, k)

    assert_same(tensors(), mod, block_mask("causal", (150, 150)), captured=[t for t in captured if t.requires_grad])


def test_factors_without_a_gradient_change() -> None:
    gate = torch.rand(4, dtype=torch.float64)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * gate[h]

    assert_same(tensors(), mod, None)
    gate[1] = -3.0
    assert_same(tensors(), mod, None)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s * (k + 1),
        lambda s, b, h, q, k: s * torch.where(q == 3, torch.inf, 1.0),
        lambda s, b, h, q, k: torch.tanh(s * (h + 1)),
        lambda s, b, h, q, k: torch.where(s > 1e15, 0.0, s * (h + 1)),
        lambda s, b, h, q, k: s * (h + 1) + s * s,
    ],
)
def test_other_factors_are_refused(mod: Any) -> None:
    with flex.enable():
        flex_attention(*tensors(grad=False), mod, enable_gqa=True)
    assert not flex.calls()["served"]


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


def test_an_index_that_is_out_of_range() -> None:
    """What a GPU evaluates, where such an index would be an error that nothing can catch."""
    table = torch.randn(5, 3, requires_grad=True)
    index = torch.tensor([-6, -5, -1, 0, 4, 5])
    found = index_or_nan(table, [index])
    assert found[[0, 5]].isnan().all()
    assert torch.equal(found[1:5], table[index[1:5]])
    assert torch.equal(torch.vmap(lambda each: index_or_nan(table, [each]))(index)[1:5], found[1:5])
    (gradient,) = torch.autograd.grad(found[1:5].sum(), table)
    assert torch.equal(gradient, torch.tensor([2.0, 0.0, 0.0, 0.0, 2.0]).unsqueeze(1).expand(5, 3))
    of_two = index_or_nan(table, [index.unsqueeze(1), torch.tensor([0, 3])])
    assert torch.equal(of_two[1:5, 0], table[index[1:5], 0]) and of_two[:, 1].isnan().all()
    assert index_or_nan(torch.arange(5), [index]).tolist() == [0, 0, 4, 0, 4, 0]
    values = torch.randn(9)
    given = tensors((9, 9), heads=(2, 2), grad=False)
    with flex.enable():
        flex_attention(*given, lambda s, b, h, q, k: s + torch.where(k > 2, index_or_nan(values, [k - 3]), 0.0))
        with pytest.raises(RuntimeError, match="gives NaN"):
            flex.flex_attention(*given, lambda s, b, h, q, k: s + index_or_nan(values, [k + 3]))
    assert flex.calls() == {"served": {"flex_attention": 1}, "refused": {}}


def test_few_visible_positions() -> None:
    """As in a cache of pages. The form is that of visible positions, wherever they are."""
    query, key, value = tensors((3, 2000), heads=(2, 2), grad=False)
    at = random.randrange(1, 1999)
    with flex.enable():
        out = flex_attention(query, key, value, lambda s, b, h, q, k: torch.where((k == at) & (q < 2), s * 2, -INF))
    assert flex.calls(reset=True) == {"served": {"flex_attention": 1}, "refused": {}}
    torch.testing.assert_close(out[:, :, :2], value[:, :, at : at + 1].expand(-1, -1, 2, -1))
    assert not out[:, :, 2].any()
    for limit in (1.0, -1.0, 20.0):  # a score of 0, and the one of the proof, may be below

        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, limit: float = limit) -> Tensor:
            return torch.where((k == at) & (s <= limit), s, -INF)

        with pytest.raises(RuntimeError, match=r"hides a position only for some scores|no function that attention has"):
            flex.flex_attention(query, key, value, mod)
