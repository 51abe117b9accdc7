"""The tables at the head of a report: ours, the fastest opponent, and the paper model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import comparison
from benchmarks.results import OURS, Measurement

GPU = {"device": "NVIDIA H100 80GB HBM3"}


def measurement(side: str, case: str, microseconds: float | None, ratio: float | None = None) -> Measurement:
    seconds = microseconds and microseconds * 1e-6
    return Measurement(
        "gemm", "gemm", "forward", "squares", case, "bfloat16", side, "cuda",
        seconds=seconds, ratio=ratio, flops=2e9, bytes=6e6, environment=GPU,
    )  # fmt: skip


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"nvidia-h100-80gb-hbm3": {"gemm, forward, 512 × 512 × 512, bfloat16": 4.0}}))
    monkeypatch.setattr(comparison, "PREDICTED", file)
    comparison.predicted_times.cache_clear()
    yield
    comparison.predicted_times.cache_clear()


def rows(*measurements: Measurement) -> list[list[str]]:
    lines = [line for line in comparison.tables(measurements) if line.startswith("| gemm")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.usefixtures("times")
def test_ours_the_fastest_opponent_and_the_prediction() -> None:
    sides = [("512 × 512 × 512", OURS, 5.0, None), ("512 × 512 × 512", "slow", 9.0, 1.8)]
    found = [measurement(side, case, time, ratio) for case, side, time, ratio in sides]
    found += [measurement("fast", "512 × 512 × 512", 4.0, 0.8), replace(found[0], case="1 × 1 × 1")]
    assert rows(*found) == [
        ["gemm, forward, 512 × 512 × 512, bfloat16", "5.0", "400 TFLOP/s", "fast", "0.80", "4.0", "+25%"],
        ["gemm, forward, 1 × 1 × 1, bfloat16", "5.0", "400 TFLOP/s", "", "", "", ""],
    ]


@pytest.mark.usefixtures("times")
def test_the_slowest_first_and_the_mean_of_all() -> None:
    count = 2 * comparison.MOST_LINES
    found = []
    for i in range(1, count + 1):
        found += [measurement(OURS, str(i), 5.0), measurement("library", str(i), 5.0 * i, float(i))]
    lines = comparison.tables(found)
    mean = math.factorial(count) ** (1 / count)
    assert lines[0].startswith(f"### Products: {count} cases, geometric mean of the ratios {mean:.2f}; the")
    assert [row[4] for row in rows(*found)] == [f"{i}.00" for i in range(1, comparison.MOST_LINES + 1)]


@pytest.mark.usefixtures("times")
def test_cases_that_did_not_run_are_left_out() -> None:
    assert comparison.tables([measurement(OURS, "1", None), measurement("library", "1", 1.0)]) == []
    on_cpu = replace(measurement(OURS, "512 × 512 × 512", 5.0), device="cpu")
    assert rows(on_cpu)[0][5:] == ["", ""], "a CPU has no prediction"


def test_bytes_are_told_as_bandwidth() -> None:
    found = replace(measurement(OURS, "GPT-2", 6.0), suite="bucket", op="pack")
    assert comparison.tables([found])[4].split("|")[3].strip() == "1000 GB/s"


def test_every_gpu_of_the_model_has_times() -> None:
    from benchmarks.model.gpus import GPUS

    comparison.predicted_times.cache_clear()
    assert set(comparison.predicted_times()) == {gpu.folder for gpu in GPUS.values()}
    for suite in comparison.TABLES:
        op = {"gemm": "gemm", "attention": "flash_attention", "bucket": "pack"}[suite]
        assert any(name.startswith(op) for name in comparison.predicted_times()["nvidia-h100-80gb-hbm3"])
