"""The paper model of losses."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.model.cases import LOSSES
from benchmarks.model.evidence import NotModelledError
from benchmarks.model.gpus import GPUS
from benchmarks.model.loss_work import LossProblem, predict_loss

H200, GIB = GPUS["h200"], 2**30
LARGE = LossProblem(8192, 131072, 4096)


def test_forward_is_about_as_fast_as_a_product() -> None:
    p = predict_loss(H200, LARGE)
    assert p.product / p.forward >= 0.9


@pytest.mark.parametrize("problem", LOSSES, ids=str)
def test_both_passes_are_four_products(problem: LossProblem) -> None:
    p = predict_loss(H200, problem)
    both, four = p.forward + p.backward, 4 / 3 * p.three_products
    assert 0.95 * four <= both <= (1.1 if problem.features >= 2048 else 1.2) * four


def test_gradients_in_forward_are_three_products() -> None:
    problem = LossProblem(4096, 131072, 4096)
    p = predict_loss(H200, problem, 4 * GIB)
    assert p.three_products < p.in_forward <= 18.5e-3
    assert 3 * problem.flops / p.in_forward >= 700e12


def test_less_memory_costs_time() -> None:
    """Sums of gradients over more tiles."""
    problem = LossProblem(32768, 131072, 4096)
    by_limit = [predict_loss(H200, problem, limit) for limit in (GIB // 16, GIB // 4, GIB, 4 * GIB)]
    for name in ("backward", "in_forward"):
        seconds = [getattr(p, name) for p in by_limit]
        assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.05 * seconds[-1]
    assert len({p.forward for p in by_limit}) == 1


def test_a_faster_special_unit_shortens_forward() -> None:
    """Exponentials are not hidden: the two consumers share a tile."""
    problem = LossProblem(8192, 131072, 1024)
    faster = dataclasses.replace(H200, special=4 * H200.special)
    assert predict_loss(faster, problem).forward < predict_loss(H200, problem).forward


def test_only_wgmma_is_modelled() -> None:
    with pytest.raises(NotModelledError, match="losses are modelled on wgmma"):
        predict_loss(GPUS["a100"], LARGE)
