"""What the short examples share: options, the training text, a progress bar, a plot of losses and a table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from text import Windows, read_text, split_text
from torch import Tensor


def arguments(description: str | None, **options: int | float | str | tuple[str, ...]) -> argparse.Namespace:
    """Parses the command line: `options` by name and default, or choices of which the first is the default; --device,
    --out and --seed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        choices = default if isinstance(default, tuple) else None
        first = default[0] if isinstance(default, tuple) else default
        parser.add_argument(f"--{name}", type=type(first), choices=choices, default=first, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for plots; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    chosen.out.mkdir(parents=True, exist_ok=True)
    return chosen


def text_batches(steps: int, batch: int, context: int, seed: int) -> Iterable[tuple[Tensor, Tensor]]:
    """`steps` batches of bytes, (batch, context) int64, each with its targets, one byte later."""
    learnt, _ = split_text(read_text(None), context)
    windows = Windows(learnt, context, seed)
    for step in range(steps):
        yield windows(range(step * batch, (step + 1) * batch))


class Runs:
    """Losses and times of several ways to train one model."""

    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet`: without a progress bar, as on all ranks but one."""
        self.quiet = quiet
        self.losses: dict[str, list[float]] = {}
        self.seconds: dict[str, float] = {}

    def train(self, title: str, batches: Iterable[tuple[Any, ...]], total: int, step: Callable[..., float]) -> None:
        """Calls `step(*batch)`, such as inputs and targets, which returns the loss. The first step is not timed."""
        losses, begin = [], 0.0
        for number, batch in enumerate(track(batches, f"{title:>10}", total, disable=self.quiet)):
            losses.append(step(*batch))
            if number == 0:
                begin = time.perf_counter()
        self.losses[title] = losses
        self.seconds[title] = (time.perf_counter() - begin) / max(total - 1, 1)

    def report(self, path: Path) -> None:
        """Prints the table and writes the plot."""
        rows = [
            (title, f"{losses[0]:.3f}", f"{losses[-1]:.3f}", f"{1e3 * self.seconds[title]:.0f} ms")
            for title, losses in self.losses.items()
        ]
        print_table(("", "first loss", "last loss", "per step"), rows)
        plot(path, self.losses)
        print(f"plot: {path}")


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def plot(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    # Equal curves hide each other, unless the first ones are wider.
    for number, (title, values) in enumerate(curves.items()):
        axes.plot(range(1, len(values) + 1), values, label=title, linewidth=1.5 + 2.5 * (len(curves) - 1 - number))
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
