"""Experts by the recipe "blockwise": all products in FP8, of rows that begin at multiples of 128 for each expert."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cuda_ext
from cuda_ext import _fp8_recipes, fp8, mixture_of_experts
from cuda_ext._expert_routes import Routes, sort

blockwise = partial(mixture_of_experts, fp8="blockwise")


def tensors_of(
    tokens: int, top_k: int, k: int = 48, hidden: int = 32, dtype: torch.dtype = torch.float32, bias: bool = False
) -> list[Any]:
    """Of 5 experts, one without tokens, and ids of one that is not here. Weights are powers of two, with which rows are
    converted as without them."""
    sizes = [(5, 2 * hidden, k), (5, k, hidden)] + [(5, 2 * hidden), (5, k)] * bias
    tensors = [torch.randn(size) * size[-1] ** -0.5 for size in sizes]
    floats = [each.to(dtype).requires_grad_() for each in (torch.randn(tokens, k), *tensors)]
    ids = torch.randint(0, 5, (tokens, top_k))
    weights = (2.0 ** torch.randint(-3, 1, (tokens, top_k))).requires_grad_()
    return [floats[0], torch.where(ids == 2, 5, ids), weights, *floats[1:]]


def by_linear_layers(x: Tensor, ids: Tensor, weights: Tensor, *mlp: Tensor) -> Tensor:
    w_up, w_down, *biases = mlp
    b_up, b_down = biases if biases else ([None] * 5, [None] * 5)
    linear = partial(fp8.linear, recipe="blockwise")
    out = torch.zeros(len(x), x.shape[1])
    for expert in range(5):
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[tokens], w_up[expert], b_up[expert]).chunk(2, -1)
        results = linear(F.silu(gate) * up, w_down[expert], b_down[expert])
        out = out.index_add(0, tokens, weights[tokens, place].unsqueeze(1) * results)
    return out


@pytest.mark.every_backend
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_as_linear_layers_in_fp8(top_k: int, dtype: torch.dtype, bias: bool) -> None:
    """Whose gradients of weights are sums over blocks of 128 rows of an expert, too."""
    k, hidden = random.choice(((48, 32), (136, 128), (128, 64)))
    tensors = tensors_of(random.choice((70, 400)), top_k, k, hidden, dtype, bias)
    leaves = [tensors[0], *tensors[2:]]
    out, expected = blockwise(*tensors), by_linear_layers(*tensors)
    grad = torch.randn(out.shape).to(dtype)
    found = (out, *torch.autograd.grad(out, leaves, grad))
    wanted = (expected.to(dtype), *torch.autograd.grad(expected, leaves, grad.float()))
    # What is converted in between may differ in its last bit, and then by a rounding to 4 bits: of a few elements. The
    # gradient of the weights is a product with other operands in FP8.
    for name, mine, theirs in zip(("out", "x", "weights", *"abcd"), found, wanted, strict=False):
        error = (mine.float() - theirs.float()).abs()
        assert error.mean() < (0.1 if name == "weights" else 0.02) * theirs.float().abs().mean(), name
        assert error.max() < 0.25 * theirs.float().abs().max(), name
    assert not any(gradient[2].any() for gradient in found[3:])  # of the expert without tokens
    exact = mixture_of_experts(*tensors)
    assert not out.equal(exact) and (out - exact).abs().mean() < 0.1 * exact.abs().mean()


@pytest.mark.every_backend
@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_few_tokens(tokens: int, elsewhere: bool) -> None:
    x, ids, *rest = tensors_of(tokens, 2)
    if elsewhere:
        ids = torch.full_like(ids, 7)
    out = blockwise(x, ids, *rest)
    gradients = torch.autograd.grad(out.sum(), [x, *rest])
    assert out.shape == x.shape and all(gradient.isfinite().all() for gradient in gradients)
    if elsewhere:
        assert not out.any() and not any(gradient.any() for gradient in gradients)
    elif tokens:  # beside numbers of 4 bits in sums of both layers, scaled otherwise
        torch.testing.assert_close(out, by_linear_layers(x, ids, *rest), rtol=0.1, atol=0.05)


def test_tokens_without_experts() -> None:
    x, _, _, *mlp = tensors_of(9, 2)
    out = blockwise(x, torch.zeros(9, 0, dtype=torch.int64), torch.zeros(9, 0), *mlp)
    assert out.equal(torch.zeros(9, 48))


def test_rows_that_are_not_finite_stay_with_their_expert() -> None:
    """What is between the rows of two experts is no row of another."""
    x, ids, *rest = tensors_of(40, 1)
    ids[-1] = 4
    x.data[-1] = torch.nan
    out, grad = blockwise(x, ids, *rest), torch.ones(40, 48)
    grad[-1] = torch.nan
    for gradient in torch.autograd.grad(out, rest[1:3], grad):
        assert gradient[:4].isfinite().all() and gradient[0].any() and not gradient[4].isfinite().any()
    assert out[:-1].isfinite().all() and out[-1].isnan().all()


def check_routes(routes: Routes, ids: Tensor, experts: int, alignment: int) -> None:
    begin, pairs, top_k = 0, routes.pairs.tolist(), ids.shape[1]
    assert sorted(pairs) == list(range(len(pairs))) and len(pairs) % alignment == 0
    for expert, end in enumerate(routes.ends.tolist()):
        own = [pair for pair in pairs[begin:end] if pair < ids.numel()]
        assert own == (ids.reshape(-1) == expert).nonzero().flatten().tolist()
        assert end % alignment == 0 and end - begin == -(-len(own) // alignment) * alignment
        assert pairs[begin : begin + len(own)] == own
        begin = end
    assert routes.pairs[routes.rows.reshape(-1)].equal(torch.arange(ids.numel()))
    tokens = routes.token_of_rows()
    assert tokens.equal((routes.pairs // top_k).clamp(max=len(ids)).int())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("alignment", [2, 128])
@pytest.mark.parametrize("experts", [1, 4, 50])
def test_rows_begin_at_multiples(experts: int, alignment: int, dtype: torch.dtype) -> None:
    for tokens, top_k in ((1, 1), (7, 3), (200, 2)):
        for low, high in ((0, experts), (-1, experts + 2), (0, 1), (experts - 1, experts), (experts, experts + 1)):
            ids = torch.randint(low, high, (tokens, top_k), dtype=dtype)
            check_routes(sort(ids, experts, alignment), ids, experts, alignment)


def test_compiled() -> None:
    layer = cuda_ext.nn.MixtureOfExperts(48, 32, 4, 2, fp8="blockwise", shared_hidden_features=32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 5, 133):
        x = torch.randn(rows, 48, requires_grad=True)
        leaves = [x, *layer.parameters()]
        out, expected = compiled(x), layer(x)
        assert out.equal(expected)
        found = torch.autograd.grad(out.square().sum(), leaves)
        assert all(map(torch.equal, found, torch.autograd.grad(expected.square().sum(), leaves)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant: bool) -> None:
    tensors = tensors_of(140, 2)
    leaves = [tensors[0], *tensors[2:]]
    out = blockwise(*tensors)
    found = checkpoint(blockwise, *tensors, use_reentrant=use_reentrant)
    assert found.equal(out)
    torch.autograd.backward(found.sum())
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert leaf.grad.equal(gradient)


def test_autocast_and_unchanged_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares of matrices whose lines are whole blocks are converted as one matrix; each once."""
    layer = cuda_ext.nn.MixtureOfExperts(128, 64, 3, 2, fp8="blockwise").experts
    x, ids, weights = torch.randn(20, 128), torch.randint(0, 3, (20, 2)), torch.rand(20, 2)
    shapes, quantize = [], fp8.quantize

    def counted(matrix: Tensor, *args: Any, **options: Any) -> Any:
        shapes.append(tuple(matrix.shape))
        return quantize(matrix, *args, **options)

    monkeypatch.setattr(_fp8_recipes, "quantize", counted)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, ids, weights)
        assert shapes.count((3 * 128, 128)) == 1 and shapes.count((3 * 128, 64)) == 1
        with fp8.unchanged_weights():
            for _ in range(3):
                out = layer(x, ids, weights)
                assert out.equal(expected) and out.dtype == torch.bfloat16
        assert shapes.count((3 * 128, 128)) == 2 and shapes.count((3 * 128, 64)) == 2
        for gradient in torch.autograd.grad(out.float().square().sum(), [*layer.parameters()]):
            assert gradient.dtype == torch.float32


def test_convert_and_revert() -> None:
    net, x = cuda_ext.nn.MixtureOfExperts(48, 32, 4, 2, shared_hidden_features=32), torch.randn(40, 48)
    exact = net(x)
    report = fp8.convert(net, "blockwise", least_features=32)
    assert "experts" in report.converted and report.experts == 1
    found = net(x)
    assert 0 < (found - exact).abs().mean() < 0.1 * exact.abs().mean()
    fp8.revert(net)
    assert net(x).equal(exact)


@on_ranks(2)
def test_expert_parallelism() -> None:
    """As all experts on one rank: rows of a rank's experts are padded there."""
    torch.manual_seed(0)
    x, ids, weights, *mlp = tensors_of(60, 2)
    rank = dist.get_rank()
    share, own = slice(0, 3) if rank == 0 else slice(3, 5), slice(30 * rank, 30 * rank + 30)
    mine = [each.detach()[share].clone().requires_grad_() for each in mlp]
    out = blockwise(x[own], ids[own], weights[own], *mine, experts=5, group=dist.group.WORLD)
    expected = blockwise(x, ids, weights, *mlp)
    torch.testing.assert_close(out, expected[own], rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(out.square().sum(), mine)
    wanted = torch.autograd.grad(expected.square().sum(), mlp)
    for mine_, all_ in zip(gradients, wanted, strict=True):
        error = (mine_ - all_[share]).abs()
        assert error.mean() < 0.1 * all_[share].abs().mean()


def test_a_small_model_learns_as_in_bfloat16() -> None:
    """Tokens whose targets another mixture computes: the loss after 60 steps within a few percent."""
    torch.manual_seed(0)
    teacher = cuda_ext.nn.MixtureOfExperts(64, 48, 4, 2)
    student = cuda_ext.nn.MixtureOfExperts(64, 48, 4, 2)
    state = {name: value.clone() for name, value in student.state_dict().items()}
    losses = []
    for recipe in (None, "blockwise"):
        student.load_state_dict(state)
        student.experts.fp8 = recipe
        optimizer, generator = torch.optim.AdamW(student.parameters(), 3e-3), torch.Generator().manual_seed(1)
        last = []
        for _ in range(60):
            x = torch.randn(256, 64, generator=generator)
            with torch.no_grad():
                target = teacher(x)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(student(x).float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last.append(loss.item())
        losses.append(sum(last[-10:]))
        assert losses[-1] < 0.7 * sum(last[:10])
    assert abs(losses[1] / losses[0] - 1) < 0.05
