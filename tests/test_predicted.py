"""The comparison of measurements with predictions, and the conclusions it prints."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.model import predicted
from benchmarks.model.gpus import GPUS
from benchmarks.results import Measurement

H200 = GPUS["h200"]


@pytest.fixture(scope="module")
def as_predicted() -> list[Measurement]:
    return predicted.made_up(H200)


def rows_of(text: str) -> dict[tuple[str, str], list[str]]:
    lines = text.partition("| farthest")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {(row[0], row[1]): row[2:] for row in cells[2:]}


def slowed(measurements: list[Measurement], suite: str, *factors: float) -> list[Measurement]:
    """Multiplies the times of a suite by these factors, cyclically."""
    found = []
    for i, m in enumerate(measurements):
        factor = factors[i % len(factors)] if m.suite == suite else 1.0
        assert m.seconds is not None
        found.append(dataclasses.replace(m, seconds=factor * m.seconds))
    return found


@pytest.mark.sampled
def test_predicted_times_are_as_predicted(as_predicted: list[Measurement]) -> None:
    text = predicted.compare_tables(as_predicted, H200)
    rows = rows_of(text)
    assert {kind.split()[0] for kind, _ in rows} == {"gemm", "attention", "bucket"}
    assert {row[1] for row in rows.values()} == {"1.00"} and {row[-1] for row in rows.values()} == {"as predicted"}
    assert "farthest" not in text


@pytest.mark.sampled
def test_a_wrong_rate_is_named_with_its_corrected_value(as_predicted: list[Measurement]) -> None:
    text = predicted.compare_tables(slowed(as_predicted, "bucket", 1.25), H200)
    assert rows_of(text)["bucket pack", "memory"] == [
        "13",
        "0.80",
        "0.80 to 0.80",
        "the rate is lower, or something that is not modelled is the limit: `memory_bytes` in gpus.py should be 0.80 "
        "times as high (4.08e+12 -> 3.264e+12)",
    ]
    assert "| pack " in text.partition("| farthest")[2]
    text = predicted.compare_tables(slowed(as_predicted, "gemm", 1 / 1.5), H200)
    says = rows_of(text)["gemm bfloat16 wgmma", "tensor"][-1]
    assert says == "the rate is higher: `wgmma_multiply_adds` x `wgmma_clock` in gpus.py should be 1.50 times as high"
    says = rows_of(predicted.compare_tables(slowed(as_predicted, "attention", 1 / 1.5), H200))
    assert "`multiply_adds` x `clock`" in says["attention forward bfloat16", "tensor"][-1]
    assert rows_of(text)["gemm bfloat16 wgmma", "latency"][-1].endswith("in gpus.py should be 0.67 times as long")


@pytest.mark.sampled
def test_cases_that_differ_are_not_blamed_on_a_rate(as_predicted: list[Measurement]) -> None:
    rows = rows_of(predicted.compare_tables(slowed(as_predicted, "attention", 1.2, 2.0), H200))
    assert rows["attention backward bfloat16", "shared"][-1].startswith("no single rate is wrong")


@pytest.mark.sampled
def test_ceilings_are_compared_with_the_table_of_gpus(as_predicted: list[Measurement]) -> None:
    measured = [dataclasses.replace(m, peak_bandwidth=4.0e12, peak_flops=700e12) for m in as_predicted]
    rows = rows_of(predicted.compare_tables(measured, H200))
    assert rows["PyTorch's copy", ""] == ["1", "0.98", "", "as in gpus.py"]
    assert rows["PyTorch's largest product", ""][1:] == ["0.88", "", "`library_flops` in gpus.py should be 7e+14"]


def test_the_gpu_is_that_of_the_measurements(tmp_path, as_predicted: list[Measurement], capsys) -> None:
    file, text = tmp_path / "results.jsonl", tmp_path / "model.md"
    unknown = "No measurement is from a GPU of benchmarks/model/gpus.py"
    for device, says in (("NVIDIA H200", "H200 SXM: "), ("NVIDIA T4", unknown)):
        lines = [dataclasses.replace(m, environment={"device": device}).to_json() for m in as_predicted[:9]]
        file.write_text("\n".join(lines) + "\n")
        assert predicted.main([str(file), "--to", str(text)]) == 0
        assert text.read_text().startswith(says)
        assert text.read_text() in capsys.readouterr().out
    assert predicted.main([str(tmp_path / "none.jsonl")]) == 2
    assert "benchmarks.predicted: " in capsys.readouterr().err
