"""Compares libraries that were compiled from other sources with this checkout's, on one card in one call.

    git switch wide-tiles; make gpu-library ARGS=wide      # writes gpu-library-wide.tar.gz, with its sources
    git switch -; make gpu-library                         # and this checkout's
    python -m benchmarks.gpu_check.variants --minutes 1 --only "4096 × 4096|causal forward"

Each variant, and this checkout as the first of them, measures the same cases in turn, twice, so that the two ratios of
a case show how much the card itself varies.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.gpu_check.carried import ROOT, unfit_archive
from benchmarks.results import OURS

ROUNDS = 2
Times = Mapping[tuple[str, ...], float]  # case -> seconds


def archives(folder: Path = ROOT) -> dict[str, Path]:
    """Name of a variant -> its archive."""
    prefix, suffix = "gpu-library-", ".tar.gz"
    return {file.name[len(prefix) : -len(suffix)]: file for file in sorted(folder.glob(f"{prefix}*{suffix}"))}


def unpack(folder: Path) -> dict[str, Path]:
    """Puts each variant into a folder of its own, with this checkout's benchmarks."""
    sources = {}
    for name, archive in archives().items():
        if problem := unfit_archive(archive):
            print(f"variants: {archive.name} is left out: {problem}")
            continue
        sources[name] = folder / name
        with tarfile.open(archive) as tar:
            tar.extractall(folder / name, filter="data")
        ignored = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / "benchmarks", folder / name / "benchmarks", ignore=ignored)
    return sources


def measure(source: Path, out: Path, device: str, minutes: float, suites: Sequence[str], only: str) -> Times:
    """Our times of the cases, with the library and the sources in `source`."""
    command = [sys.executable, "-m", "benchmarks", *suites, "--device", device, "--minutes", f"{minutes:.3f}"]
    command += ["--without", ".*", "--no-plots", "--out", str(out)]
    subprocess.run([*command, *(["--only", only] if only else [])], cwd=source, stdout=subprocess.DEVNULL)
    file = out / "results.jsonl"
    found = results.by_case(results.read(file)) if file.exists() else {}
    return {case: m.seconds for case, sides in found.items() if (m := sides.get(OURS)) is not None and m.seconds}


def table(rounds: Sequence[Mapping[str, Times]], names: Sequence[str], base: str) -> list[str]:
    """Markdown: a line for each case that all have measured, the time of `base`, and time / base of each variant and
    round."""
    first = rounds[0][base]
    shared = [case for case in first if all(case in times for one in rounds for times in one.values())]
    lines = [f"| case | {base}, µs | {' | '.join(names)} |", f"|---|---:|{'---:|' * len(names)}"]
    for case in shared:
        ratios = [", ".join(f"{one[name][case] / one[base][case]:.3f}" for one in rounds) for name in names]
        time = statistics.median(one[base][case] for one in rounds) * 1e6
        lines.append(f"| {', '.join(filter(None, case[2:]))} | {time:.1f} | {' | '.join(ratios)} |")
    if shared:
        means = [
            ", ".join(
                f"{statistics.geometric_mean(one[name][case] / one[base][case] for case in shared):.3f}"
                for one in rounds
            )
            for name in names
        ]
        lines.append(f"| all {len(shared)}, geometric mean | | {' | '.join(means)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", default=["gemm", "attention"], help="default: gemm attention")
    parser.add_argument("--minutes", type=float, default=1.0, help="time limit (default: 1)")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases, as for python -m benchmarks")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="variants-") as scratch:
        sources = {"this": ROOT, **unpack(Path(scratch))}
        if len(sources) == 1:
            print("variants: expected gpu-library-NAME.tar.gz in the checkout, found none that fits")
            return 1
        minutes = options.minutes / ROUNDS / len(sources)

        def times(name: str, number: int) -> Times:
            out = Path(scratch, f"{name}-{number}")
            return measure(sources[name], out, options.device, minutes, options.suites, options.only)

        rounds = [{name: times(name, number) for name in sources} for number in range(ROUNDS)]
    print(*table(rounds, [name for name in sources if name != "this"], "this"), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
