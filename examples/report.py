"""The output of a training run: progress bar, table of losses, plot, and errors that the user can fix."""

from __future__ import annotations

import contextlib
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console


class UserError(Exception):
    """An error that the user can fix; the message says how."""


class Progress:
    """On a terminal, a bar with loss, tokens per second and remaining time; elsewhere, a line every 10 seconds."""

    def __init__(self, console: Console, step: int, steps: int, tokens_per_step: int) -> None:
        self.console, self.first, self.step, self.steps, self.tokens_per_step = (
            console,
            step,
            step,
            steps,
            tokens_per_step,
        )
        self.bar = progress.Progress(
            progress.TextColumn("training"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TextColumn(
                "{task.fields[loss]} bits per byte, {task.fields[speed]} tokens/s, ETA {task.fields[eta]}"
            ),
            console=console,
            disable=not console.is_terminal or console.quiet,
        )
        self.task = self.bar.add_task("", completed=step, total=steps, loss="-", speed="-", eta="-")
        self.loss, self.weight = 0.0, 0.0  # running means over about the last 20 steps
        self.last_line = 0.0

    def __enter__(self) -> Progress:
        self.bar.start()
        self.start = self.last_line = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def update(self, loss: float) -> None:
        """Call after each step, with its loss in bits per byte."""
        self.step += 1
        self.loss, self.weight = 0.95 * self.loss + 0.05 * loss, 0.95 * self.weight + 0.05
        now = time.perf_counter()
        per_step = (now - self.start) / (self.step - self.first)
        minutes, seconds = divmod(round((self.steps - self.step) * per_step), 60)
        shown: dict[str, Any] = {
            "loss": f"{self.loss / self.weight:.3f}",
            "speed": f"{self.tokens_per_step / per_step:,.0f}",
            "eta": f"{minutes}:{seconds:02d}",
        }
        self.bar.update(self.task, completed=self.step, **shown)
        if self.bar.disable and now - self.last_line > 10.0:
            self.last_line = now
            self.note(
                "step {}/{}: {loss} bits per byte, {speed} tokens/s, ETA {eta}".format(self.step, self.steps, **shown)
            )

    def note(self, text: str) -> None:
        self.console.print(text)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count as training time."""
        start = time.perf_counter()
        yield
        self.start += time.perf_counter() - start


def write_losses(path: Path, losses: list[float], held_out: list[tuple[int, float]]) -> None:
    """Writes one row per step: step, training loss and, if scored, the held-out loss, in bits per byte."""
    scored = dict(held_out)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "training", "held_out"])
        writer.writerows([step, repr(loss), scored.get(step, "")] for step, loss in enumerate(losses, start=1))


def write_plot(path: Path, losses: list[float], held_out: list[tuple[int, float]]) -> None:
    """Plots the training loss of every step, its running mean and the held-out losses, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    span = max(len(losses) // 80, 1)
    smooth, mean, weight = [], 0.0, 0.0
    for loss in losses:
        mean, weight = mean + (loss - mean) / span, weight + (1.0 - weight) / span
        smooth.append(mean / weight)
    steps = range(1, len(losses) + 1)
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.6, label="training, each step")
    axes.plot(steps, smooth, color="#2171b5", linewidth=1.8, label="training, running mean")
    orange = "#d94801"
    axes.plot(*zip(*held_out, strict=True), color=orange, marker="o", clip_on=False, zorder=3, label="held-out text")
    axes.annotate(
        f"{held_out[-1][1]:.2f}", held_out[-1], xytext=(0, 8), textcoords="offset points", ha="right", color=orange
    )
    axes.set(xlabel="step", ylabel="bits per byte", xlim=(0, len(losses)), title="Byte-level GPT")
    axes.set_ylim(bottom=0.6 * min(*smooth, held_out[-1][1]), top=min(max(losses), 8.5))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
