"""Pictures of block masks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from torch import Tensor

from cuda_ext._checks import check
from cuda_ext._mask_lists import EMPTY, FULL

_COLORS = {EMPTY: "#f2f2f2", 0: "#f2a93b", FULL: "#2f5d8a"}  # 0: partial
_SIZE = 640  # pixels of the longer side


def draw(op: str, path: str | os.PathLike[str], states: Tensor, title: str) -> None:
    """states: int64 (Mq, Mk) of EMPTY, 0 for partial, and FULL"""
    if Path(path).suffix == ".svg":
        Path(path).write_text(svg(states.tolist(), title, _COLORS.__getitem__))
        return
    what = f"expected matplotlib to be installed for {Path(path).name}, got none"
    check(importlib.util.find_spec("matplotlib") is not None, op, f"{what}; install it, or draw into a file .svg")
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(states.numpy(), ListedColormap([_COLORS[key] for key in sorted(_COLORS)]), vmin=EMPTY, vmax=0)
    axes.set(title=title, xlabel="block of keys", ylabel="block of queries")
    axes.title.set_fontsize("x-small")
    figure.savefig(path)


def svg(states: Sequence[Sequence[int]], title: str, color_of: Callable[[int], str]) -> str:
    """A rectangle for each run of equal states in a row."""
    height, width = len(states), len(states[0])
    scale = _SIZE / max(height, width)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * scale:g}" height="{height * scale:g}" '
        f'viewBox="0 0 {width} {height}" shape-rendering="crispEdges">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{_COLORS[EMPTY]}"/>',
    ]
    for row, blocks in enumerate(states):
        column = 0
        for state, run in groupby(blocks):
            count = len(list(run))
            if state != EMPTY:
                place = f'x="{column}" y="{row}" width="{count}" height="1"'
                lines.append(f'<rect {place} fill="{color_of(state)}"/>')
            column += count
    return "\n".join([*lines, "</svg>", ""])
