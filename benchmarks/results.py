"""What a measurement is, and its file format: one JSON object per line, each with its environment.

A case is a problem: an op, a shape, a dtype. Each implementation of it, ours or a baseline, is a side and gives one
measurement. The sides of a case alternate in one process, A B C A B C, so each round gives a ratio.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
OURS = "cuda_ext"
OUT_OF_TIME = "out of time"  # the failure of a case that was never started begins with this
UNFINISHED = 75  # exit status of a command that ran out of time and continues when called again
ROOT = Path(__file__).resolve().parent / "results"


class ResultsError(ValueError):
    """A results file cannot be used; the message says which, where and what to do."""


@dataclass(frozen=True)
class Measurement:
    suite: str  # "gemm"
    op: str  # what is called: "gemm", "linear bias gelu", "flash_attention causal"
    phase: str  # "forward", "backward", "forward + backward", "step", ...
    group: str  # cases that share a plot: "squares", "skinny", "paper grid"
    case: str  # the shape, unique for suite, op, phase and dtype: "1024 x 1024 x 1024"
    dtype: str  # "bfloat16"; "" if it does not apply
    side: str  # OURS or the name of a baseline
    device: str  # "cpu" or "cuda"
    size: float = 0.0  # position on the axis of a plot
    size_name: str = ""  # label of that axis: "M = N = K"
    seconds: float | None = None  # per call, median over the rounds; None if it did not run
    spread: float | None = None  # half the interquartile range, relative to the median
    rounds: int = 0
    ratio: float | None = None  # this side's time / our time, median over the rounds: above 1, ours is faster
    ratio_spread: float | None = None  # half the interquartile range of the ratio
    flops: float = 0.0  # per call, by the usual convention
    bytes: float = 0.0  # per call, each input read once and each output written once
    error: float | None = None  # relative, in the 2-norm, against a reference in higher precision
    failure: str = ""  # why there is no time: not installed, refused, crashed, wrong, out of time
    timer: str = ""  # "clock", "events", "graph" or "do_bench"
    rotation: int = 1  # number of input sets that alternate
    peak_flops: float = 0.0  # FLOP/s of the fastest library matmul in the same run: a ceiling of the device
    peak_bandwidth: float = 0.0  # bytes/s of a large copy, read and written, in the same run
    extra: dict[str, Any] = field(default_factory=dict)  # more values of a suite: {"wire MiB": 25}
    state: dict[str, Any] = field(default_factory=dict)  # clocks and temperature right after timing
    environment: dict[str, Any] = field(default_factory=dict)  # environment.describe()
    date: str = ""  # UTC, ISO 8601
    format: int = FORMAT

    @property
    def problem(self) -> tuple[str, str, str, str, str, str]:
        """Identifies the case: equal for all of its sides."""
        return (self.device, self.suite, self.op, self.phase, self.case, self.dtype)

    @property
    def tflops(self) -> float | None:
        return self.flops / self.seconds / 1e12 if self.seconds and self.flops else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second."""
        return self.bytes / self.seconds if self.seconds and self.bytes else None

    @property
    def of_ceiling(self) -> float | None:
        """The shortest time that the device's ceilings allow (the roofline) / the measured time."""
        if not self.seconds or not self.peak_flops or not self.peak_bandwidth or not (self.flops or self.bytes):
            return None
        return max(self.flops / self.peak_flops, self.bytes / self.peak_bandwidth) / self.seconds

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


_FIELDS = {f.name for f in dataclasses.fields(Measurement)}
_NUMBERS = {f.name for f in dataclasses.fields(Measurement) if "float" in f.type} - {"error"}


def parse(line: str, where: str) -> Measurement:
    """One line of a file; `where`, such as "results.jsonl:3", is used in error messages."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ResultsError(f"{where}: expected one JSON object per line, got {line[:60]!r} ({error})") from None
    if not isinstance(data, dict) or "format" not in data:
        raise ResultsError(f"{where}: expected a measurement of `python -m benchmarks`, got {line[:60]!r}")
    if data["format"] != FORMAT:
        raise ResultsError(
            f"{where}: expected format {FORMAT}, got {data['format']}; measure again, or read it "
            "with the release that wrote it"
        )
    if missing := {"suite", "op", "phase", "group", "case", "dtype", "side", "device"} - data.keys():
        raise ResultsError(f"{where}: expected the fields {sorted(missing)}, got only {sorted(data)}")
    for name in _NUMBERS & data.keys():
        value = data[name]
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise ResultsError(f"{where}: expected {name} to be a number of at least 0, got {value!r}; measure again")
    for name in ("seconds", "ratio"):
        if data.get(name) == 0:
            raise ResultsError(f"{where}: expected {name} above 0 or null, got 0; measure again")
    return Measurement(**{name: value for name, value in data.items() if name in _FIELDS})


def read(path: Path) -> list[Measurement]:
    """The measurements of a .jsonl file, or of all .jsonl files below a folder; raises ResultsError."""
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ResultsError(
            f"{path}: expected .jsonl files, found none; write some with `python -m benchmarks --out {path}`"
        )
    measurements = []
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ResultsError(f"{file}: cannot be read: {error}") from None
        measurements += [parse(line, f"{file}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    return measurements


def by_case(measurements: Iterable[Measurement]) -> dict[tuple[str, ...], dict[str, Measurement]]:
    """problem -> side -> its newest measurement, in order of first appearance, ours first."""
    cases: dict[tuple[str, ...], dict[str, Measurement]] = {}
    for m in measurements:
        sides = cases.setdefault(m.problem, {})
        if m.side not in sides or m.date >= sides[m.side].date:
            sides[m.side] = m
    return {problem: dict(sorted(sides.items(), key=lambda s: s[0] != OURS)) for problem, sides in cases.items()}


def geometric_means(measurements: Iterable[Measurement]) -> dict[tuple[str, str, str], tuple[float, int]]:
    """(suite, dtype, side) -> the geometric mean of its ratios, and their number."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for sides in by_case(measurements).values():
        for m in sides.values():
            if m.ratio is not None and m.side != OURS:
                ratios.setdefault((m.suite, m.dtype, m.side), []).append(m.ratio)
    return {key: (statistics.geometric_mean(values), len(values)) for key, values in ratios.items()}


def quartile_spread(values: Sequence[float]) -> float:
    """Half the interquartile range."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def slug(name: str) -> str:
    """The folder name of a device: "NVIDIA H200" -> "nvidia-h200"."""
    words = "".join(c.lower() if c.isalnum() or c == "." else " " for c in name).split()
    return "-".join(words)


def iter_devices(root: Path = ROOT) -> Iterator[Path]:
    """The folders of benchmarks/results, one per device."""
    if root.is_dir():
        yield from (folder for folder in sorted(root.iterdir()) if any(folder.glob("*.jsonl")))
