from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

from cuda_ext.distributed.float32_sums import ErrorFeedback, float32_all_reduce, float32_reduce_scatter, sum_chunks

SMALL = (torch.bfloat16, torch.float16)


def everywhere(tensor: Tensor) -> Tensor:
    """``tensor`` of every rank: (ranks, *shape), in its dtype."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)


def run(steps: Iterator[dist.Work]) -> None:
    for work in steps:
        work.wait()


def all_reduced(wire: Tensor) -> Tensor:
    run(float32_all_reduce(wire, dist.group.WORLD))
    return wire


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def own_values(chunk: int) -> Tensor:
    """float32 (ranks * chunk,), different on each rank, of magnitudes from about 1e-2 to 1e2."""
    ranks = dist.get_world_size()
    shape = (ranks, ranks * chunk)
    return (torch.randn(shape) * torch.randn(shape).exp())[dist.get_rank()].clone()


def check_sum(dtype: torch.dtype, chunk: int) -> None:
    """Half an ulp for each value that is sent, half an ulp of the result, and the error of the float32 sum."""
    ranks = dist.get_world_size()
    values = own_values(chunk)
    wire = all_reduced(values.to(dtype))
    assert wire.dtype == dtype
    for other in everywhere(wire):
        assert torch.equal(other, wire)
    sent, all_values = everywhere(values.to(dtype)).double(), everywhere(values).double()
    exact, magnitude = all_values.sum(dim=0), all_values.abs().sum(dim=0)
    float32 = ranks * unit(torch.float32) * sent.abs().sum(dim=0)
    tiny = (ranks + 1) * torch.finfo(dtype).smallest_normal * unit(dtype)  # float16 has subnormal numbers
    bound = unit(dtype) * (magnitude + sent.sum(dim=0).abs() + float32) + float32 + tiny
    assert ((wire.double() - exact).abs() <= bound).all()
    # The sum of the values sent is rounded once.
    bound = unit(dtype) * (sent.sum(dim=0).abs() + float32) + float32 + tiny
    assert ((wire.double() - sent.sum(dim=0)).abs() <= bound).all()


@on_ranks(2)
@pytest.mark.parametrize("dtype", SMALL)
def test_sum_on_two_ranks(dtype: torch.dtype) -> None:
    for chunk in (0, 1, 3, 1001):
        check_sum(dtype, chunk)


@on_ranks(3)
@pytest.mark.parametrize("dtype", SMALL)
def test_sum_on_three_ranks(dtype: torch.dtype) -> None:
    for chunk in (0, 1, 3, 1001):
        check_sum(dtype, chunk)


@on_ranks(4)
@pytest.mark.parametrize("dtype", SMALL)
def test_sum_on_four_ranks(dtype: torch.dtype) -> None:
    for chunk in (0, 1, 3, 1001):
        check_sum(dtype, chunk)


def errors(seed: int) -> tuple[float, float]:
    """Root mean square errors of our sum and of torch's, relative to the exact sum of the values sent."""
    ranks = dist.get_world_size()
    torch.manual_seed(seed)
    wire = torch.randn(ranks, ranks * 10_000)[dist.get_rank()].bfloat16()
    exact = everywhere(wire).double().sum(dim=0)
    plain = wire.clone()
    dist.all_reduce(plain)
    ours = all_reduced(wire)
    return tuple((result.double() - exact).square().mean().sqrt().item() for result in (ours, plain))


@on_ranks(2)
def test_error_on_two_ranks_is_that_of_torch() -> None:
    """Both round a sum of two once."""
    ours, plain = errors(seed=0)
    assert ours == plain > 0


@on_ranks(4)
def test_error_on_four_ranks_is_below_that_of_torch() -> None:
    """The square of a rounding's error grows with the variance of what is rounded, 4 for a sum of four normal numbers.

    Whoever rounds each partial sum adds at least that of two pairs, 2 each: sqrt((4 + 2 + 2) / 4) = 1.41 times the
    error. 1.3 leaves room for where in a binade the numbers lie; a mean over 40,000 is sure to one percent.
    """
    for seed in range(3):
        ours, plain = errors(seed)
        assert plain > 1.3 * ours > 0


@on_ranks(3)
@pytest.mark.parametrize("wire_dtype", [*SMALL, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_reduce_scatter(wire_dtype: torch.dtype, dtype: torch.dtype) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunk = 7
    wire = own_values(chunk).to(wire_dtype)
    before = wire.clone()
    out = torch.empty(chunk, dtype=dtype)
    run(float32_reduce_scatter(wire, out, dist.group.WORLD, scale=1 / ranks))
    assert torch.equal(wire, before)
    sent = everywhere(wire).view(ranks, ranks, chunk)[:, rank].double()
    accumulator = torch.float64 if torch.float64 in (wire_dtype, dtype) else torch.float32
    # Rounded once to dtype; each of the additions and the product to the accumulator.
    tolerance = unit(dtype) * (sent.mean(dim=0).abs()) + (ranks + 1) * unit(accumulator) * sent.abs().sum(dim=0)
    assert ((out.double() - sent.mean(dim=0)).abs() <= tolerance * 1.001).all()  # the products of two errors


@on_ranks(3)
def test_sums_in_groups_and_side_by_side() -> None:
    """Two sums at the same time, the later one read first, and a group without the first rank."""
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    wires = [torch.full((6,), float(10 * n + rank), dtype=torch.bfloat16) for n in range(2)]
    steps = [float32_all_reduce(wire, dist.group.WORLD) for wire in wires]
    for _ in range(2):
        works = [next(step) for step in steps]
        for work in reversed(works):
            work.wait()
    assert [next(step, None) for step in steps] == [None, None]
    assert [wire.tolist() for wire in wires] == [[3.0] * 6, [33.0] * 6]
    if rank:
        wire = torch.full((4,), float(rank), dtype=torch.bfloat16)
        run(float32_all_reduce(wire, pair))
        assert wire.tolist() == [3.0] * 4


def test_chunks_are_added_in_order_in_float32() -> None:
    for received, expected in (
        ([2.0**24, 1.0, 1.0], 2.0**24),  # float32 loses each 1, but would keep their sum
        ([1.0, 1.0, 2.0**24], 2.0**24 + 2),
        ([2.0**24, 1.0, -(2.0**24)], 0.0),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.empty(1)
            sum_chunks(list(torch.tensor(received, dtype=dtype).view(-1, 1)), out)
            assert out.item() == expected
        for own in range(3):  # the sum replaces one of the chunks
            chunks = list(torch.tensor(received).view(-1, 1))
            sum_chunks(chunks, chunks[own])
            assert chunks[own].item() == expected
    exact = torch.empty(1, dtype=torch.float64)
    sum_chunks(list(torch.tensor([[2.0**24], [1.0], [1.0]])), exact)
    assert exact.item() == 2.0**24 + 2
    halves = torch.empty(1, dtype=torch.float16)
    sum_chunks(list(torch.full((3, 1), 61440.0, dtype=torch.float16)), halves, scale=0.25)
    assert halves.item() == 46080.0  # the sum is too large for float16


# error feedback


@on_ranks(3)
@pytest.mark.parametrize("dtype", SMALL)
def test_feedback_makes_the_mean_over_steps_exact(dtype: torch.dtype) -> None:
    """A constant gradient: after T steps the total is wrong by the residuals, and the mean by 1/T of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values = own_values(chunk := 101)
    everyone = everywhere(values).double()
    exact = everyone.sum(dim=0)

    def mean_error(steps: int, feedback: bool) -> Tensor:
        own, summed = (ErrorFeedback(n) for n in (values.numel(), chunk))
        total = torch.zeros_like(exact)
        for _ in range(steps):
            wire = values.to(dtype)
            if feedback:
                own.round(values.clone(), wire)
            run(float32_all_reduce(wire, dist.group.WORLD, feedback=summed if feedback else None))
            total += wire.double()
        if feedback:  # no error is lost: the residuals have the difference
            missing = everywhere(own.residual).double().sum(dim=0)
            missing.view(ranks, chunk)[rank] += summed.residual
            held = (exact * steps - total - missing).view(ranks, chunk)[rank].abs()
            rounding = steps * 2 * ranks * unit(torch.float32) * everyone.abs().sum(dim=0).view(ranks, chunk)[rank]
            assert (held <= rounding).all()
        return (total / steps - exact).abs()

    magnitude = everyone.abs().sum(dim=0) * (1 + 2 * unit(dtype))
    float32 = 2 * ranks * unit(torch.float32) * magnitude
    tiny = (ranks + 1) * torch.finfo(dtype).smallest_normal * unit(dtype)
    # A residual is at most half an ulp of the value sent, which includes a residual itself; likewise for the sum.
    residuals = (2 * magnitude) * unit(dtype) * (1 + 2 * unit(dtype)) + tiny
    for steps in (1, 10, 100):
        assert (mean_error(steps, feedback=True) <= residuals / steps + float32).all()
    biased = [mean_error(steps, feedback=False) for steps in (1, 100)]
    assert torch.equal(*biased)
    assert (biased[1] > residuals / 100 + float32).double().mean() > 0.5


def test_feedback_keeps_what_rounding_loses() -> None:
    feedback = ErrorFeedback(3)
    values = torch.tensor([1 + 2**-10, -3.0, 2**-20])
    wire = torch.empty(3, dtype=torch.bfloat16)
    feedback.round(values.clone(), wire)
    assert wire.tolist() == [1.0, -3.0, 2**-20]
    assert feedback.residual.tolist() == [2**-10, 0.0, 0.0]
    for _ in range(3):  # four times 2**-10 is half an ulp of 1: a tie, rounded to even; the fifth decides it
        feedback.round(values.clone(), wire)
        assert wire[0] == 1.0
    feedback.round(values.clone(), wire)
    assert wire[0] == 1 + 2**-7
    assert feedback.residual[0] == 5 * 2**-10 - 2**-7


def test_feedback_survives_infinities() -> None:
    for dtype in SMALL:
        feedback = ErrorFeedback(4)
        wire = torch.empty(4, dtype=dtype)
        largest = torch.finfo(dtype).max
        feedback.round(torch.tensor([torch.inf, -torch.inf, torch.nan, largest * 1.003]), wire)
        # From half an ulp above the largest number on, values are rounded to infinity.
        assert not wire.isfinite().any()
        assert feedback.residual.tolist() == [0.0] * 4
        feedback.round(torch.ones(4), wire)
        assert wire.tolist() == [1.0] * 4


def test_one_rank_alone(group: None) -> None:
    wire = torch.randn(5).bfloat16()
    before = wire.clone()
    assert torch.equal(all_reduced(wire), before)


@on_ranks(2)
def test_bad_sizes() -> None:
    group = dist.group.WORLD
    cases: list[tuple[Callable[[], Iterator[dist.Work]], str]] = [
        (
            lambda: float32_all_reduce(torch.ones(5), group),
            "float32_all_reduce: expected wire of a multiple of 2 elements, one chunk for each rank, got 5; pad it",
        ),
        (
            lambda: float32_reduce_scatter(torch.ones(6), torch.ones(2), group),
            "float32_reduce_scatter: expected wire to hold one chunk of the size of out for each of 2 ranks, 2 x 2 "
            "elements, got 6; pad it",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=f"^{re.escape(f'cuda_ext.distributed.{message}')}"):
            next(call())
