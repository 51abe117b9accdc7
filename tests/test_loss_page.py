"""tools/loss_page.py: what docs/loss.md says about times and memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import ROOT

from benchmarks.presentation.memory_plots import draw_memory
from benchmarks.results import OURS, Measurement

sys.path.insert(0, str(ROOT / "tools"))
import loss_page


def made_up(side: str, group: str, size: float, peak: int) -> Measurement:
    about = ("loss", "linear_cross_entropy", "forward + backward", group, f"{size:g} × 7 × 8", "float32", side, "cpu")
    return Measurement(*about, size=size, size_name=f"of {group}", extra={"peak bytes": peak})


def test_the_plot_has_a_panel_for_each_group_and_a_line_for_each_side() -> None:
    points = [
        made_up(side, group, size, int(1000 * size * factor))
        for side, factor in (("PyTorch", 8), (OURS, 1))
        for group in ("a", "b")
        for size in (1024.0, 4096.0)
    ]
    figure = draw_memory(points)
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a", "b"]
    for axes in figure.axes:
        lines = {str(line.get_label()): list(line.get_ydata()) for line in axes.get_lines()}  # type: ignore[arg-type]
        assert lines == {OURS: [1024e3, 4096e3], "PyTorch": [8192e3, 32768e3]}
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1k", "4k"]
    assert draw_memory([Measurement("loss", "", "", "", "", "", OURS, "cpu")]) is None


def test_the_page_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    about = ("loss", "linear_cross_entropy", "forward", "")
    times = [
        Measurement(*about, "4 × 5 × 6", "float32", OURS, "cpu", seconds=0.25),
        Measurement(*about, "4 × 5 × 6", "float32", "PyTorch", "cpu", ratio=1.5),
        Measurement(*about, "4 × 5 × 6", "bfloat16", OURS, "cpu", seconds=0.25),
        Measurement(*about, "4 × 5 × 6", "bfloat16", "PyTorch", "cpu", failure="too slow: 5 s; raise --minutes"),
    ]
    page = tmp_path / "loss.md"
    page.write_text(f"before\n{loss_page.BEGIN}\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(loss_page, "times", lambda minutes: times)
    monkeypatch.setattr(loss_page, "measured", lambda side, rows, classes, limit=0: (rows * classes, 0.002))
    monkeypatch.setattr(loss_page, "PAGE", page)
    monkeypatch.setattr(loss_page, "PLOT", tmp_path / "plot.svg")
    monkeypatch.setattr(loss_page, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["loss_page.py"])
    assert loss_page.main() == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "old" not in text
    assert "| 2048 × 8192 | 16.8 MB | 16.8 MB |" in text
    assert "| 4 × 5 × 6 | float32 | forward | 250 ms | 1.50× |" in text
    assert "| 4 × 5 × 6 | bfloat16 | forward | 250 ms | too slow: 5 s |" in text
    assert "| 32 MiB | 67.1 MB | 2.00 ms |" in text
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


@pytest.mark.sampled
def test_peak_memory() -> None:
    logits = 512 * 32768 * 4
    assert loss_page.measured("PyTorch", 512, 32768)[0] > 2 * logits
    assert loss_page.measured(OURS, 512, 32768, 1 << 22)[0] < logits / 4
