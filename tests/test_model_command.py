"""`python -m benchmarks model`: its tables, errors and page, and measurements beside predictions."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import pytest

from benchmarks import comparison, results
from benchmarks.model import command, document, tables
from benchmarks.model.cache_work import CacheProblem, predict_cache
from benchmarks.model.cases import PACKS, PROBLEMS, SHAPES
from benchmarks.model.gpus import GPUS, Gpu
from benchmarks.model.prediction import predict_attention, predict_bucket, predict_gemm
from benchmarks.model.work import RESOURCES
from benchmarks.presentation.formatting import END, with_section
from benchmarks.suites import bench_attention, bench_bucket, bench_gemm, measure
from benchmarks.suites.bench_attention import Problem

Capture = pytest.CaptureFixture[str]
LARGE = (8192, 8192, 8192)


@pytest.fixture(autouse=True)
def measured_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for measurements, instead of the repository's."""
    monkeypatch.setattr(results, "ROOT", tmp_path / "results")
    return tmp_path / "results"


@pytest.mark.parametrize("gpu", list(GPUS.values()), ids=list(GPUS))
def test_predictions_are_consistent(gpu: Gpu) -> None:
    found = list(command.predictions(gpu, None, "bfloat16", "nn", False))
    attention = 2 * len(PROBLEMS) if gpu.has_cp_async else sum(problem.dim <= 128 for problem in PROBLEMS)
    assert len(found) == len(SHAPES) + attention + len(PACKS)
    for p in found:
        assert p.seconds > max(seconds for name, seconds in p.resources.items() if name != "latency")
        assert p.seconds < sum(p.resources.values()) * 1.5
        assert 0 < p.of_library < 1.05, p  # a prediction above the best library would be implausible
        assert p.binding in p.resources and p.chosen and p.measured is None
    deep = [predict_gemm(gpu, 2048, 2048, k)[0].seconds for k in (512, 1024, 4096, 16384)]
    assert deep == sorted(deep)


@pytest.mark.sampled
def test_document_is_current() -> None:
    page = document.DOCUMENT
    sections = {
        document.BEGIN: document.table(),
        document.BEGIN_SHARES: document.shares(),
        document.BEGIN_LOSSES: document.losses(),
        document.BEGIN_SCALED: document.scaled(),
        document.BEGIN_LAYERS: document.layers(),
        document.BEGIN_GROUPED: document.grouped(),
        document.BEGIN_EXPERTS: document.experts(),
        document.BEGIN_MASKS: document.masks(),
    }
    for begin, section in sections.items():
        assert with_section(page, begin, section) == page.read_text(), "run: benchmarks model --write"


def test_predicted_times_are_current() -> None:
    assert comparison.PREDICTED.read_text() == document.predicted_times(), "run: python -m benchmarks model --write"


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    page, times = tmp_path / "model.md", tmp_path / "times.json"
    monkeypatch.setattr(document, "DOCUMENT", page)
    monkeypatch.setattr(comparison, "PREDICTED", times)
    monkeypatch.setattr(document, "table", lambda: "| new |\n")
    monkeypatch.setattr(document, "shares", lambda: "| 1.00 |\n")
    monkeypatch.setattr(document, "predicted_times", lambda: "{}")
    monkeypatch.setattr(document, "losses", lambda: "| 2.00 |\n")
    monkeypatch.setattr(document, "masks", lambda: "| 3.00 |\n")
    monkeypatch.setattr(document, "scaled", lambda: "| 4.00 |\n")
    monkeypatch.setattr(document, "layers", lambda: "| 5.00 |\n")
    monkeypatch.setattr(document, "grouped", lambda: "| 6.00 |\n")
    monkeypatch.setattr(document, "experts", lambda: "| 7.00 |\n")
    begins = (document.BEGIN, document.BEGIN_SHARES, document.BEGIN_LOSSES, document.BEGIN_SCALED)
    begins = (*begins, document.BEGIN_LAYERS, document.BEGIN_GROUPED, document.BEGIN_EXPERTS, document.BEGIN_MASKS)
    tables = "before\n" + "".join(f"{begin}\n{{}}{END}\nbetween\n" for begin in begins)
    page.write_text(tables.format("| old |\n", *[""] * 7))
    assert command.main(["--write"]) == 0
    written = ("| new |\n", *(f"| {number}.00 |\n" for number in (1, 2, 4, 5, 6, 7, 3)))
    assert page.read_text() == tables.format(*written)
    assert times.read_text() == "{}"
    page.write_text("nothing")
    assert command.main(["--write"]) == 2
    assert "model.md: expected the lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "v100"], f"expected a GPU among {', '.join(GPUS)}, got 'v100'"),
        (["--shapes", "4096x4096"], "expected a shape MxNxK such as 4096x4096x4096, got '4096x4096'"),
        (["--shapes", "0x1x1"], "expected a shape MxNxK"),
        (["--shapes", "axbxc"], "expected a shape MxNxK"),
    ],
)
def test_refusals(capsys: Capture, arguments: list[str], message: str) -> None:
    assert command.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"benchmarks model: {message}")


def test_json_has_a_prediction_per_line(capsys: Capture) -> None:
    assert (
        command.main(["--gpu", "H100", "4090", "--shapes", "512x512x512", "1x4096x4096", "--json", "--all-configs"])
        == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # Beside the choice: on the 4090 three tiles; on Hopper three without and with clusters, and for one row these three
    # without, and both transposed ones without and with clusters.
    assert len(lines) == 2 * (1 + 3) + (1 + 6) + (1 + 3 + 4)
    assert {line["gpu"] for line in lines} == {"H100 SXM", "RTX 4090"}
    assert all(line["seconds"] > 0 and line["binding"] in line["resources"] for line in lines)
    assert sum(line["chosen"] for line in lines) == 4


@pytest.mark.parametrize("with_rich", [True, False])
def test_table(capsys: Capture, monkeypatch: pytest.MonkeyPatch, with_rich: bool) -> None:
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert command.main(["--gpu", "a100"]) == 0
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if line.startswith("A100 SXM 80GB, ")]
    kinds = ["bfloat16 nn", "bfloat16 attention", "buckets", "one query per sequence over a cache"]
    assert [title.split(":")[0] for title in titles] == [f"A100 SXM 80GB, {kind}" for kind in kinds]
    (line,) = [line for line in out.splitlines() if line.startswith("8192 x 8192 x 8192 ")]
    (p,) = predict_gemm(GPUS["a100"], *LARGE)
    assert [p.kernel, p.binding, "1", f"{p.waves:.2f}", f"{p.seconds * 1e6:.0f}"] == line.split()[5:10]
    (line,) = [line for line in out.splitlines() if line.startswith("causal B=2 S=8192 H=16 D=128 backward ")]
    attention = predict_attention(GPUS["a100"], Problem(2, 8192, 16, 128, causal=True), True)
    assert [attention.kernel, attention.binding, "2"] == line.split()[6:9]
    assert line.split()[-8:] == [tables.microseconds(attention.resources[name]) for name in RESOURCES]
    (line,) = [line for line in out.splitlines() if line.startswith("1 x 131072, H=64/8 D=128 ")]
    cached = predict_cache(GPUS["a100"], CacheProblem(1, 131072, 64, 8, 128))
    assert [tables.microseconds(cached.seconds), str(cached.splits)] == [line.split()[5], line.split()[9]]
    assert "measured" not in out
    assert command.main(["--gpu", "a100", "--shapes", "999x999x999", "8x8x8"]) == 0
    out = capsys.readouterr().out
    assert "999 x 999 x 999 *" in out and "8 x 8 x 8 *" not in out and "* rows are no multiples" in out
    assert command.main(["--gpu", "a100", "--figures"]) == 0
    assert "thonking.ai" in capsys.readouterr().out


def measured(case: measure.Case, seconds: float | None, **changes: object) -> results.Measurement:
    """The measurement that a suite would report."""
    suite = "gemm" if "layout" in case.extra else "attention" if "attention" in case.op else "bucket"
    m = results.Measurement(
        suite=suite,
        op=case.op,
        phase=case.phase,
        group=case.group,
        case=case.name,
        dtype=case.dtype,
        side=results.OURS,
        device="cuda",
        seconds=seconds,
        date="2030-01-01T00:00:00",
        extra=case.extra,
    )
    return dataclasses.replace(m, **changes)  # type: ignore[arg-type]


@pytest.mark.sampled
def test_measurements_are_shown_next_to_predictions(measured_root: Path, capsys: Capture) -> None:
    gpu = GPUS["h200"]
    (p,), (odd,) = predict_gemm(gpu, *LARGE), predict_gemm(gpu, 777, 888, 999)
    pack = predict_bucket(gpu, PACKS[0])
    product = bench_gemm.product(device="cuda", dtype="bfloat16", shape=LARGE, group="")
    odd_product = bench_gemm.product(device="cuda", dtype="bfloat16", shape=(777, 888, 999), group="", note="odd")
    turned = bench_gemm.product(device="cuda", dtype="bfloat16", shape=LARGE, group="", layout="nt")
    gpt2 = bench_bucket.make_case("pack", "cuda", "GPT-2", bench_bucket.gpt2(), "bfloat16", "bfloat16")
    of_grid, odd_problem = PROBLEMS[7], Problem(3, 2000, 16, 128, kv_heads=8, causal=True, window=1023)
    decode = Problem(16, 1, 32, 128, kv_heads=8, keys=4096)
    alone = Problem(1, 512, 2, 64, causal=True)  # its keys are split
    attention = {
        (p, backward): bench_attention.attention(p, "cuda", "bfloat16", backward, group="")
        for p in (of_grid, odd_problem, decode, alone)
        for backward in (False, True)
    }
    folder = measured_root / results.slug("NVIDIA H200")
    folder.mkdir(parents=True)
    lines = [
        measured(product, 2 * p.seconds),
        measured(product, 9.0, date="2029-01-01T00:00:00"),  # older
        measured(product, 9.0, side="torch"),
        measured(product, 9.0, dtype="float32"),
        measured(product, 9.0, phase="backward"),
        measured(odd_product, odd.seconds / 2),
        measured(turned, 8.0),
        measured(gpt2, pack.seconds),
        *(measured(case, 5.0 + backward) for (_, backward), case in attention.items()),
        measured(product, 9.0, op="linear bias gelu"),
        measured(product, None, failure="crashed", date="2031-01-01T00:00:00"),
    ]
    (folder / "one.jsonl").write_text("\n".join(m.to_json() for m in lines))
    found = {(p.op, p.dtype, p.case): p for p in command.predictions(gpu, None, "bfloat16", "nn", False)}
    always = len(SHAPES) + len(PACKS) + 2 * len(PROBLEMS)
    assert len(found) == always + 1 + 2, "measured cases are added to the representative ones"
    for of_case, ratio in ((p, 0.5), (odd, 2), (pack, 1)):
        assert found[of_case.op, of_case.dtype, of_case.case].ratio == pytest.approx(ratio)
    for problem, phase in itertools.product((of_grid, odd_problem), ("forward", "backward")):
        name = (problem.op(), "bfloat16", f"{problem.name()} {phase}")
        assert found[name].measured == (6.0 if phase == "backward" else 5.0)
    assert sum(p.ratio is not None for p in found.values()) == 3 + 4
    exact = [p.measured for p in command.predictions(gpu, None, "float32", "nn", False)]
    assert [seconds for seconds in exact if seconds] == [9.0, pack.seconds]
    assert all(p.measured is None for p in command.predictions(GPUS["h100"], None, "bfloat16", "nn", False))
    assert [p.measured for p in command.predictions(gpu, [LARGE], "bfloat16", "nt", False)] == [8.0]
    assert command.main(["--gpu", "h200", "--shapes", "8192x8192x8192"]) == 0
    out = capsys.readouterr().out
    assert "measured" in out and out.rstrip().endswith(f"{2 * p.seconds * 1e6:.0f}   0.50")
    (folder / "two.jsonl").write_text("not json")
    assert command.main(["--gpu", "h200"]) == 2
    assert "two.jsonl:1: expected one JSON object per line" in capsys.readouterr().err
