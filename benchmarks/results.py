"""What a measurement is, and how it is kept: one JSON object a line, each with the environment it was taken in.

A case is a problem (an op, a shape, a dtype); every side that solves it, ours and each opponent, gives one measurement.
The sides of a case took turns in one process, A B C A B C, so each round gives a ratio of its own.
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
OUT_OF_TIME = "out of time"  # how the failure of a case begins that was never tried
UNFINISHED = 75  # exit status of a command that ran out of time and continues when called again
ROOT = Path(__file__).resolve().parent / "results"


class ResultsError(ValueError):
    """A results file that cannot be read; says which, where and what to do."""


@dataclass(frozen=True)
class Measurement:
    suite: str  # "gemm"
    op: str  # what is called: "gemm", "linear bias gelu", "flash_attention causal"
    phase: str  # "forward", "backward", "forward + backward", "step", ...
    group: str  # cases that belong on one plot: "squares", "skinny", "paper grid"
    case: str  # the shape, readable and unique among those of suite, op, phase and dtype: "1024 x 1024 x 1024"
    dtype: str  # "bfloat16"; "" where it means nothing
    side: str  # OURS or an opponent's name
    device: str  # "cpu" or "cuda"
    size: float = 0.0  # where the case stands on a plot's axis
    size_name: str = ""  # and what that axis is: "M = N = K"
    seconds: float | None = None  # of one call, median over the rounds; None if it did not run
    spread: float | None = None  # half the distance between the quartiles, over the median
    rounds: int = 0
    ratio: float | None = None  # median over the rounds of this side's time over ours: above 1, ours is faster
    ratio_spread: float | None = None  # half the distance between its quartiles
    flops: float = 0.0  # of a call, by the field's convention
    bytes: float = 0.0  # of a call, each input read once and each output written once
    error: float | None = None  # relative, in the 2-norm, against a reference in higher precision
    failure: str = ""  # why there is no time: not installed, refused, crashed, wrong, out of time
    timer: str = ""  # "clock", "events", "graph" or "do_bench"
    rotation: int = 1  # sets of inputs that took turns
    peak_flops: float = 0.0  # a second; the device's ceilings, measured in the same run: largest library matmul
    peak_bandwidth: float = 0.0  # bytes a second: a large copy, read and written
    extra: dict[str, Any] = field(default_factory=dict)  # what else a suite tells: {"wire MiB": 25}
    state: dict[str, Any] = field(default_factory=dict)  # clocks and temperature right after the timing
    environment: dict[str, Any] = field(default_factory=dict)  # of environment.describe()
    date: str = ""  # UTC, ISO 8601
    format: int = FORMAT

    @property
    def problem(self) -> tuple[str, str, str, str, str, str]:
        """What all sides of one case share."""
        return (self.device, self.suite, self.op, self.phase, self.case, self.dtype)

    @property
    def tflops(self) -> float | None:
        return self.flops / self.seconds / 1e12 if self.seconds and self.flops else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second."""
        return self.bytes / self.seconds if self.seconds and self.bytes else None

    @property
    def of_ceiling(self) -> float | None:
        """The shortest time the device's ceilings allow (the roofline) over the time it took."""
        if not self.seconds or not self.peak_flops or not self.peak_bandwidth or not (self.flops or self.bytes):
            return None
        return max(self.flops / self.peak_flops, self.bytes / self.peak_bandwidth) / self.seconds

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


_FIELDS = {f.name for f in dataclasses.fields(Measurement)}
_NUMBERS = {f.name for f in dataclasses.fields(Measurement) if "float" in f.type} - {"error"}


def parse(line: str, where: str) -> Measurement:
    """`where`, "results.jsonl:3", is for the message."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ResultsError(f"{where}: expected one JSON object a line, got {line[:60]!r} ({error})") from None
    if not isinstance(data, dict) or "format" not in data:
        raise ResultsError(f"{where}: expected a measurement of `python -m benchmarks`, got {line[:60]!r}")
    if data["format"] != FORMAT:
        raise ResultsError(
            f"{where}: expected format {FORMAT}, got {data['format']}; measure anew, or read it "
            "with the release that wrote it"
        )
    if missing := {"suite", "op", "phase", "group", "case", "dtype", "side", "device"} - data.keys():
        raise ResultsError(f"{where}: expected the fields {sorted(missing)}, got only {sorted(data)}")
    for name in _NUMBERS & data.keys():
        value = data[name]
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise ResultsError(f"{where}: expected {name} to be a number of at least 0, got {value!r}; measure anew")
    for name in ("seconds", "ratio"):
        if data.get(name) == 0:
            raise ResultsError(f"{where}: expected {name} above 0 or null, got 0; measure anew")
    return Measurement(**{name: value for name, value in data.items() if name in _FIELDS})


def read(path: Path) -> list[Measurement]:
    """The measurements in a .jsonl file, or in all those of a folder and the folders in it; raises ResultsError."""
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
    """problem -> side -> its newest measurement, in the order of first appearance; ours comes first."""
    cases: dict[tuple[str, ...], dict[str, Measurement]] = {}
    for m in measurements:
        sides = cases.setdefault(m.problem, {})
        if m.side not in sides or m.date >= sides[m.side].date:
            sides[m.side] = m
    return {problem: dict(sorted(sides.items(), key=lambda s: s[0] != OURS)) for problem, sides in cases.items()}


def geometric_means(measurements: Iterable[Measurement]) -> dict[tuple[str, str, str], tuple[float, int]]:
    """(suite, dtype, opponent) -> the geometric mean of its ratios to ours, and of how many."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for sides in by_case(measurements).values():
        for m in sides.values():
            if m.ratio is not None and m.side != OURS:
                ratios.setdefault((m.suite, m.dtype, m.side), []).append(m.ratio)
    return {key: (statistics.geometric_mean(values), len(values)) for key, values in ratios.items()}


def quartile_spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def slug(name: str) -> str:
    """A device's name as a folder's: "NVIDIA H200" -> "nvidia-h200"."""
    words = "".join(c.lower() if c.isalnum() or c == "." else " " for c in name).split()
    return "-".join(words)


def iter_devices(root: Path = ROOT) -> Iterator[Path]:
    """The folders of benchmarks/results, one a device."""
    if root.is_dir():
        yield from (folder for folder in sorted(root.iterdir()) if any(folder.glob("*.jsonl")))
