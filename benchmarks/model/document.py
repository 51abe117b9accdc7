"""What is written of the model: the table in docs/model.md, and the predicted times for reports."""

from __future__ import annotations

import json

from benchmarks import comparison, results
from benchmarks.model.gpus import GPUS
from benchmarks.model.predicted import GROUPS, compare, groups, made_up
from benchmarks.model.tables import markdown
from benchmarks.presentation.formatting import with_section

DOCUMENT = results.ROOT.parents[1] / "docs" / "model.md"
BEGIN = "<!-- written by python -m benchmarks model --write -->"
MEASURED = GPUS["h100"]
MEASUREMENTS = results.ROOT / MEASURED.folder


def table() -> str:
    """The speed of each group of kernels measured on an H100, relative to the prediction."""
    return markdown(GROUPS, groups(compare(results.read(MEASUREMENTS), MEASURED)))


def predicted_times() -> str:
    """The content of comparison.PREDICTED: predictions of the cases that the suites measure on a GPU."""
    times = {
        gpu.folder: {comparison.name_of(m): float(f"{(m.seconds or 0) * 1e6:.4g}") for m in made_up(gpu)}
        for gpu in GPUS.values()
    }
    return json.dumps(times, indent=0, ensure_ascii=False) + "\n"


def write() -> None:
    DOCUMENT.write_text(with_section(DOCUMENT, BEGIN, table()))
    comparison.PREDICTED.write_text(predicted_times())
