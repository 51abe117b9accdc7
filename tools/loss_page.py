"""Measures what docs/loss.md shows, on the CPU, and writes it there: times, peak memory and its plot, memory_limit.

    python tools/loss_page.py             # 5 to 10 minutes; nothing else should run
    python tools/loss_page.py --minutes 1 # less of the times

PyTorch's loss in chunks is shown if this PyTorch has it (2.13). Peak memory is that of a forward and backward pass in a
process of its own, above its operands and gradients. Times are those of `python -m benchmarks loss`.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import environment, results  # noqa: E402
from benchmarks.presentation.drawing import render  # noqa: E402
from benchmarks.presentation.formatting import (  # noqa: E402
    byte_count,
    duration,
    power_of_two,
    ratio,
    short,
    with_section,
)
from benchmarks.presentation.memory_plots import draw_memory  # noqa: E402
from benchmarks.results import OURS, Measurement  # noqa: E402
from benchmarks.suites import baselines, bench_loss  # noqa: E402

PAGE, PLOT = ROOT / "docs" / "loss.md", ROOT / "docs" / "loss_memory.svg"
BEGIN = "<!-- written by tools/loss_page.py -->"
CHUNKED, LARGER = "linear_cross_entropy", "linear_cross_entropy, 128 rows"  # PyTorch's loss in the benchmarks
FEATURES, ROWS, CLASSES = 256, 2048, 32768
VOCABULARIES = (8192, 16384, 32768, 65536, 131072)
TOKENS = (512, 1024, 2048, 4096)
LIMITS_MIB = (1, 8, 32, 128, 512)


def peak() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def step(side: str, rows: int, classes: int, limit: int) -> tuple[int, float]:
    """Peak memory of a step in bytes, and its seconds; with a `limit` those of the fastest of three. 0: the default."""
    function: Any = {OURS: bench_loss.ours("auto", limit or None), "PyTorch": bench_loss.plain}.get(side)
    if function is None:
        function = baselines.torch_linear_cross_entropy()
    bench_loss.trained(function, bench_loss.Inputs("cpu", 8, 8, 8, "float32"))()  # PyTorch starts threads at the first
    given = bench_loss.Inputs("cpu", rows, FEATURES, classes, "float32")
    call = bench_loss.trained(function, given)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin = peak(), time.perf_counter()
    out = call()
    seconds = [time.perf_counter() - begin]
    grown = peak() - before - sum(each.numel() * each.element_size() for each in out)
    del out
    while limit and len(seconds) < 3:
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return max(0, grown), min(seconds)


@functools.cache
def measured(side: str, rows: int, classes: int, limit: int = 0) -> tuple[int, float]:
    """`step` in a process of its own."""
    command = [sys.executable, __file__, "--step", side, str(rows), str(classes), str(limit)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    grown, seconds = done.stdout.split()
    return int(grown), float(seconds)


def memory(sides: list[str]) -> list[Measurement]:
    found = []
    over_v = (f"{power_of_two(ROWS)} tokens", "classes", [(ROWS, classes, classes) for classes in VOCABULARIES])
    over_m = (f"{power_of_two(CLASSES)} classes", "tokens", [(rows, CLASSES, rows) for rows in TOKENS])
    for group, name, points in (over_v, over_m):
        for rows, classes, size in points:
            for side in sides:
                grown, seconds = measured(side, rows, classes)
                print(f"{side:>22}  {rows:>5} × {classes:<6}  {byte_count(grown):>8}  {duration(seconds)}", flush=True)
                about = {"suite": "loss", "op": "linear_cross_entropy", "phase": "forward + backward"}
                case = {"group": group, "case": f"{rows} × {classes} × {FEATURES}", "dtype": "float32"}
                values = {"size": float(size), "size_name": name, "extra": {"peak bytes": grown}}
                found.append(Measurement(**about, **case, **values, side=side, device="cpu"))  # type: ignore[arg-type]
    return found


def times(minutes: float) -> list[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks", "loss", "--device", "cpu", "--no-plots", "--out", folder]
        subprocess.run([*command, "--minutes", str(minutes)], check=True, cwd=ROOT)
        return results.read(Path(folder))


def failure_of(m: Measurement) -> str:
    return short(m.failure, 40).partition(";")[0]


def table(*rows: tuple[str, ...]) -> str:
    assert len({len(row) for row in rows}) == 1
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|---|{'---:|' * (len(rows[0]) - 1)}", *lines[1:]]) + "\n"


def section(minutes: float) -> str:
    chunked = hasattr(torch.nn.functional, CHUNKED)
    sides = [OURS, "PyTorch", *([CHUNKED] if chunked else [])]
    speed, space = times(minutes), memory(sides)
    figure = draw_memory(space)
    assert figure is not None
    PLOT.write_bytes(render(figure, "svg"))
    timed = [*sides[1:], *([LARGER] if chunked else [])]
    names = {OURS: "ours", "PyTorch": "plain", CHUNKED: "PyTorch in chunks", LARGER: "chunks of 128 rows"}
    peaks: dict[str, dict[str, str]] = {}
    for m in space:
        peaks.setdefault(m.case, {})[m.side] = byte_count(m.extra["peak bytes"])
    shown = [(case.rpartition(" × ")[0], *(cells[side] for side in sides)) for case, cells in peaks.items()]
    ratios = [("tokens × classes × features", "dtype", "pass", "ours", *(f"{names[s]} / ours" for s in timed))]
    for of_case in results.by_case(speed).values():
        own = of_case[OURS]
        others = (ratio(of_case[side].ratio) or failure_of(of_case[side]) if side in of_case else "" for side in timed)
        ratios.append((own.case, own.dtype, own.phase, duration(own.seconds) or failure_of(own), *others))
    limits = [("`memory_limit`", "peak memory", "a step")]
    for mib in LIMITS_MIB:
        grown, seconds = measured(OURS, ROWS, CLASSES, mib << 20)
        limits.append((f"{mib} MiB", byte_count(grown), duration(seconds)))
    threads = torch.get_num_threads()
    about = f"{environment.device_name('cpu')}, {threads} threads, PyTorch {torch.__version__}"
    return f"""
{about}, float32, {FEATURES} features: the peak of a step above operands and gradients.

![Peak memory over classes and over tokens]({PLOT.name})

{table(("tokens × classes", *(names[side] for side in sides)), *shown)}
Times, the median of alternating runs. PyTorch's chunks, unless another size is given, have tokens × features / classes
rows, here a few:

{table(*ratios)}
The limit, {power_of_two(ROWS)} tokens and {power_of_two(CLASSES)} classes:

{table(*limits)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="of the times (default 4)")
    parser.add_argument("--step", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        side, *sizes = options.step
        print(*step(side, *map(int, sizes)))
        return 0
    PAGE.write_text(with_section(PAGE, BEGIN, section(options.minutes)))
    print(f"wrote {PAGE.relative_to(ROOT)} and {PLOT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
