"""The plot of ``python -m cuda_ext.distributed plan --plot``: one backward pass, and exposed time against ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuda_ext.distributed.bucketing.units import duration

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
except ImportError as error:
    raise ImportError(f"--plot: expected matplotlib, got {error}; pip install matplotlib") from None

if TYPE_CHECKING:
    from cuda_ext.distributed.prediction.predictor import Prediction

FORMATS = (".png", ".svg", ".pdf")
INK = "#767a80"  # legible on white and on black
COLOURS = ("#e8590c", "#1c7ed6", "#0f9d8a", "#9c5fd6", "#b08900", "#d6569f")
MARKERS = "os^DvP"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cuda_ext",
    "text.parse_math": False,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.6,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def check(path: Path) -> None:
    """ValueError if `write` cannot write to ``path``."""
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot: expected a file name that ends in one of {', '.join(FORMATS)}, got {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot: expected a folder that exists, got {path.absolute().parent}")


def write(path: Path, model: str, shown: Sequence[Prediction], curves: Mapping[str, Sequence[Prediction]]) -> None:
    """Plots the timelines of ``shown``, by bucket size on one number of ranks, and ``curves``, by number of ranks."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 1.6 + 0.55 * max(3, len(shown))), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _timelines(left, model, shown)
        _exposed(right, curves)
        # Reproducible: no date. A PNG has a white background, as its surroundings are not known.
        options: Any = {"dpi": 130, "facecolor": "white"} if path.suffix == ".png" else {"metadata": _undated(path)}
        figure.savefig(path, **options)


def _undated(path: Path) -> dict[str, None]:
    return {"Date": None} if path.suffix == ".svg" else {"CreationDate": None}


def _timelines(axes: Axes, model: str, shown: Sequence[Prediction]) -> None:
    scale, unit = (1.0, "s") if shown[0].timeline.total >= 1 else (1e3, "ms")
    for row, prediction in enumerate(shown):
        timeline, colour = prediction.timeline, COLOURS[row % len(COLOURS)]
        axes.broken_barh([(0, timeline.computed * scale)], (row - 0.36, 0.3), color=INK, alpha=0.45, linewidth=0)
        # Every other transfer is paler, so that neighbours are distinct.
        for parity, alpha in enumerate((1.0, 0.6)):
            spans = [(t.sent * scale, (t.ready - t.sent) * scale) for t in timeline.transfers[parity::2]]
            axes.broken_barh(spans, (row, 0.36), color=colour, alpha=alpha, linewidth=0)
        text = f" {duration(timeline.exposed)}"
        axes.text(timeline.total * scale, row + 0.18, text, va="center", ha="left", fontsize=7, color=colour)
    axes.axvline(shown[0].timeline.alone * scale, color=INK, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(shown)), [f"{p.bucket_name}\n{len(p.sizes)} buckets" for p in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.1 * scale * max(p.timeline.total for p in shown))
    axes.set_xlabel(f"{unit} since backward began")
    axes.set_title(
        f"{model} on {shown[0].ranks} ranks: backward in grey, all-reduces coloured, exposed time in numbers"
    )


def _exposed(axes: Axes, curves: Mapping[str, Sequence[Prediction]]) -> None:
    for number, (name, points) in enumerate(curves.items()):
        style: Any = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "zorder": 9 - number,
        }
        axes.plot([p.ranks for p in points], [p.timeline.exposed for p in points], label=name, **style)
    ranks = sorted({p.ranks for points in curves.values() for p in points})
    axes.set(xscale="log", yscale="log", xlabel="ranks", title="exposed time")
    axes.set_xticks(ranks[::-2][::-1], [str(n) for n in ranks[::-2][::-1]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axes.grid(axis="y", color=INK, alpha=0.18, linewidth=0.5)
    axes.legend(title="bucket", title_fontsize=7)
