"""The paper model of products of FP8 with few rows, and of what the products of experts do beside multiplying."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.model.gpus import GPUS
from benchmarks.model.grouped_work import predict_copied_rows, predict_grouped, predict_terms
from benchmarks.model.scaled_work import predict_scaled, scaled_plan, scaled_work
from benchmarks.model.work import time_of
from cuda_ext import batch_invariant, gemm_plan

H200 = GPUS["h200"]
EXPERTS = (32768, 32, 3072, 2048)


def test_few_rows_of_fp8_take_little_longer_than_reading_the_weights() -> None:
    sizes = (64, 8192, 8192, 0.8), (16, 8192, 8192, 0.8), (64, 4096, 14336, 0.65), (64, 2112, 7168, 0.3)
    for m, n, k, share in sizes:
        p = predict_scaled(H200, m, n, k)
        assert (m * k + n * k + 2 * m * n) / H200.memory_bytes > share * p.time.seconds, (m, n, k, p)


def test_more_rows_of_fp8_are_not_faster() -> None:
    n, k = random.choice((2048, 4096, 8192)), random.choice((4096, 8192, 14336))
    times = [predict_scaled(H200, m, n, k).time.seconds for m in (1, 16, 64, 65, 128, 256, 1024, 4096)]
    assert all(later > 0.97 * earlier for earlier, later in zip(times, times[1:])), times


@pytest.mark.parametrize("shape", [(64, 1024, 8192), (128, 4096, 14336), (256, 4096, 14336)])
def test_splits_of_k_pay(shape: tuple[int, int, int]) -> None:
    """The plan's split is predicted to be faster than the best tile without one, by both models."""
    plan = scaled_plan(H200, *shape)
    assert plan["splits"] > 1
    with batch_invariant():
        whole = scaled_plan(H200, *shape)
        a, b = (torch.empty(lines, shape[2], dtype=torch.float8_e4m3fn, device="meta") for lines in shape[:2])
        assert gemm_plan(a, b.t(), device="h200").splits == 1
    assert whole["splits"] == 1
    times = [time_of(scaled_work(H200, each, *shape), H200).seconds for each in (plan, whole)]
    assert times[0] < 0.95 * times[1], times
    chosen = gemm_plan(a, b.t(), device="h200")
    assert chosen.splits == plan["splits"] and chosen.workspace > 0
    assert f"k split among {chosen.splits} blocks" in str(chosen) and "predicted, limited by" in str(chosen)


def test_gathered_rows_take_longer_than_rows_in_place_and_less_than_a_copy() -> None:
    rows, groups, n, k = EXPERTS
    placed, gathered = (predict_grouped(H200, rows, groups, 2 * n, k, gather=g).time for g in (False, True))
    assert placed.seconds < gathered.seconds < placed.seconds + predict_copied_rows(H200, rows, k)
    assert gathered.resources["latency"] > placed.resources["latency"]


def test_an_activation_of_groups_costs_instructions() -> None:
    rows, groups, n, k = EXPERTS
    plain = predict_grouped(H200, rows, groups, 2 * n, k)
    silu = predict_grouped(H200, rows, groups, 2 * n, k, activation="silu")
    gated = predict_grouped(H200, rows, groups, n, k, activation="silu", gated=True)
    assert plain.flops == silu.flops == gated.flops
    assert plain.time.resources["issue"] < gated.time.resources["issue"] < silu.time.resources["issue"]
    assert plain.time.resources["special"] == 0 < gated.time.resources["special"]
    assert gated.time.resources["memory"] < plain.time.resources["memory"]  # half of the columns are stored
    assert plain.time.seconds < silu.time.seconds


def test_gradients_of_matrices_in_fp8() -> None:
    rows, groups, n, k = EXPERTS
    p = predict_terms(H200, rows, groups, 2 * n, k)
    assert p.flops == 2.0 * rows * 2 * n * k and 0.3e15 < p.flops / p.time.seconds < 2e15
    assert predict_terms(H200, rows, 4 * groups, 2 * n, k).time.seconds > p.time.seconds  # more to store, more padding
    # With few terms the gradients are limited by storing them.
    assert predict_terms(H200, 32 * groups, groups, 2 * n, k).time.binding == "memory"
