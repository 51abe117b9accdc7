"""A timeline of backward passes: when each bucket was packed, sent and ready, as a Chrome trace and as a plot."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from cuda_ext._timing import Mark, mark, seconds_between
from cuda_ext.distributed.algorithms import Pending


@dataclass(frozen=True)
class Span:
    """One step in the life of a bucket in a backward pass, in seconds since the first gradient of the pass.

    kind: "pack", "all-reduce" or, with bucket -1, "backward": the whole pass.
    """

    step: int
    bucket: int
    kind: str
    begin: float
    end: float


class Trace:
    """The timeline of the backward passes inside `BucketedDataParallel.trace`.

    spans: all spans, in order. labels: the size and the first and last parameter of each bucket.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.spans: list[Span] = []
        self.labels: dict[int, str] = {}
        self.rank = rank
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done = threading.Condition()
        self._pending = 0  # sums whose callbacks have not run
        self._step = -1
        self._open: list[tuple[int, int, str, Mark, Mark]] = []  # of passes that `finished` has not converted yet
        self._starts: list[Mark] = []

    # For the reducer.

    def backward_begins(self) -> None:
        self._step += 1
        self._starts.append(self._now())

    @contextmanager
    def packing(self, bucket: int, label: str) -> Iterator[None]:
        self.labels[bucket] = f"{bucket}: {label}"
        begin = self._now()
        yield
        self._open.append((self._step, bucket, "pack", begin, self._now()))

    def sent(self, bucket: int, pending: Pending) -> None:
        step, begin = self._step, self._now()
        if self._side is not None:
            with torch.cuda.stream(self._side):  # waits for the sum like backward does later, but immediately
                pending.wait()
                self._open.append((step, bucket, "all-reduce", begin, self._now()))
            return

        def done() -> None:
            with self._done:
                self._open.append((step, bucket, "all-reduce", begin, self._now()))
                self._pending -= 1
                self._done.notify()

        with self._done:
            self._pending += 1
        pending.when_done(done)

    def backward_ends(self) -> None:
        """Marks the end of backward; sums that are still running are exposed."""
        self._open.append((self._step, -1, "backward", self._starts[-1], self._now()))

    def finished(self) -> None:
        """Converts the marks of the passes so far to seconds; on a GPU the host waits for them."""
        if self._side is not None:
            torch.cuda.synchronize(self._device)
        with self._done:  # `Pending.wait` may return before the callback has run
            self._done.wait_for(lambda: self._pending == 0, timeout=1.0)
        for step, bucket, kind, begin, end in sorted(self._open, key=lambda span: span[:3]):
            start = self._starts[step]
            self.spans.append(Span(step, bucket, kind, seconds_between(start, begin), seconds_between(start, end)))
        self._open.clear()

    def _now(self) -> Mark:
        return mark(self._device)

    # For the user.

    def exposed(self) -> list[float]:
        """For each pass, the seconds from its last gradient to the end of its last all-reduce: the exposed time."""
        result = []
        for step in range(self._step + 1):
            mine = [span for span in self.spans if span.step == step]
            backward = max((span.end for span in mine if span.kind == "backward"), default=0.0)
            result.append(max(0.0, max((span.end for span in mine), default=0.0) - backward))
        return result

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a Chrome trace (JSON), for chrome://tracing, Perfetto and TensorBoard; times in microseconds."""
        offset, events = 0.0, []
        rows = {"backward": 0, "pack": 1, "all-reduce": 2}
        for name, row in rows.items():
            events.append(_metadata(self.rank, row, name))
        for step in range(self._step + 1):
            mine = [span for span in self.spans if span.step == step]
            for span in mine:
                name = f"step {step}" if span.bucket < 0 else f"bucket {span.bucket}"
                event: dict[str, Any] = {"name": name, "cat": span.kind, "ph": "X", "pid": self.rank}
                event |= {"tid": rows[span.kind], "ts": (offset + span.begin) * 1e6}
                event |= {"dur": (span.end - span.begin) * 1e6}
                if span.bucket >= 0:
                    event["args"] = {"bucket": self.labels[span.bucket]}
                events.append(event)
            offset += 1.1 * max((span.end for span in mine), default=0.0)
        with open(path, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def plot(self, path: str | PathLike[str], *, step: int = -1) -> None:
        """Plots one pass, default the last, with a row per bucket. ImportError without matplotlib.

        path: ends in .png, .svg or another format of matplotlib.
        """
        from matplotlib.figure import Figure

        step = step if step >= 0 else self._step + 1 + step
        mine = [span for span in self.spans if span.step == step]
        buckets = sorted({span.bucket for span in mine})
        figure = Figure(figsize=(8, 1.2 + 0.28 * len(buckets)), layout="constrained")
        axes = figure.add_subplot()
        colours = {"backward": "#868e96", "pack": "#e8590c", "all-reduce": "#1c7ed6"}
        for span in mine:
            axes.barh(
                buckets.index(span.bucket),
                (span.end - span.begin) * 1e3,
                left=span.begin * 1e3,
                color=colours[span.kind],
                height=0.7,
                label=span.kind,
            )
        axes.set_yticks(range(len(buckets)), ["backward" if n < 0 else self.labels[n] for n in buckets], fontsize=7)
        axes.invert_yaxis()
        axes.set(xlabel="ms since the first gradient", title=f"rank {self.rank}, step {step}")
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles))
        axes.legend(unique.values(), unique.keys(), frameon=False, fontsize=7)
        figure.savefig(path, dpi=150)


def _metadata(rank: int, row: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
