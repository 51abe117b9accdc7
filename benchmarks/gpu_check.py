"""Everything there is to learn from a machine with a GPU, in one command and a few minutes.

    python -m benchmarks.gpu_check                          # or: make gpu-check
    python -m benchmarks.gpu_check --only gemm,attention    # narrowed to stages; --list names them
    python -m benchmarks.gpu_check --dry-run                # the same on the CPU and the emulator

It needs a CUDA GPU with its driver, nvcc, a C++ compiler, ninja and a Python with torch and pytest; no network, no git.
It builds the library for that GPU, records what the GPU answers to the conformance kernels, runs the tests and the
sanitizer, and measures. It ends by itself within --minutes and leaves one folder of at most 8 files: report.md first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.stages import Outcome, Run, Stage
from cuda_ext import _build, _toolchain

ROOT = Path(__file__).resolve().parent.parent
MAX_FILES, MAX_BYTES, MAX_FOLDERS = 8, 16 << 20, 2
TITLE = "# GPU check"

SUITES = (("gemm", 14), ("bucket", 4), ("attention", 12), ("train", 4), ("overhead", 2), ("build", 1))
PYTEST = r"^(FAILED|ERROR|lost|hung|crashed)\b|\b(passed|failed|errors?)\b.* in [\d.]+s|^relay: "


def benchmark_stages(device: str) -> list[Stage]:
    command = ("{python}", "-m", "benchmarks")
    options = ("--device", device, "--minutes", "{minutes}", "--out", "{out}")
    # The suite "build" measures how long compilers take; the stage of that name is what all others wait for.
    return [
        Stage(
            "build-time" if suite == "build" else suite,
            ((*command, suite, *options),),
            weight,
            least=3 if device == "cpu" else 10,
            needs=("build",),
        )
        for suite, weight in SUITES
    ]


def stages_on_gpu() -> list[Stage]:
    """The first ones are given more than they should take: all others depend on them, and what they leave is theirs."""
    small_cases = ("--kernel-regex", "kns=cuda_ext", "{python}", "-m", "benchmarks.small_cases", "cuda")
    sanitizers = [
        Stage(
            tool,
            (("{sanitizer}", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", *more),),
            weight=8,
            least=15,
            needs=("build",),
            key=r"={9} .*(SUMMARY|Error|Invalid|hazard|Race|refus|support)",
            sign=r"(ERROR|RACECHECK) SUMMARY:",
            # An allocation from the cache of PyTorch has no end that memcheck could see.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        for tool, more in (
            ("memcheck", ("--report-api-errors", "no", *small_cases)),
            ("racecheck", ("--racecheck-report", "analysis", *small_cases)),
        )
    ]
    return [
        Stage(
            "environment",
            (("nvidia-smi",), ("nvcc", "--version"), ("{python}", "-m", "cuda_ext.info")),
            weight=8,
            always=True,
        ),
        Stage(
            "build",
            (("{python}", "setup.py", "--quiet", "build_ext", "--inplace"),),
            weight=60,
            always=True,
            key=r"^cuda_ext: |\berror\b|^FAILED",
        ),
        Stage(
            "conformance",
            (("{python}", "tests/simt/record.py", "--golden", "{scratch}"),),
            weight=25,
            least=20,
            key=r"FAULT|: rounding|faults; answers|^record: |\berror\b",
            archive="golden.tar.gz",
        ),
        Stage(
            "tests",
            (("{python}", "tests/relay.py", "tests", "-m", "cuda", "--ignore=tests/simt"),),
            weight=30,
            least=20,
            needs=("build",),
            key=PYTEST,
        ),
        *sanitizers,
        *benchmark_stages("cuda"),
    ]


def stages_of_dry_run() -> list[Stage]:
    tests = ("tests/test_bucket.py", "-m", "simt", "-k", "integers or views or size_of_zero or flags")
    return [
        Stage("environment", (("{python}", "-m", "cuda_ext.info"),), weight=2, always=True),
        Stage(
            "build",
            (("{python}", "-m", "benchmarks.usable_build"),),
            weight=30,
            always=True,
            key=r"^cuda_ext: |\berror\b",
        ),
        Stage(
            "conformance",
            (("{python}", "tests/simt/record.py", "--emulated", "--golden", "{scratch}"),),
            weight=30,
            needs=("build",),
            key=r"FAULT|faults; answers|^record: |\berror\b",
            archive="golden.tar.gz",
        ),
        Stage("tests", (("{python}", "tests/relay.py", *tests),), weight=15, needs=("build",), key=PYTEST),
        *(
            Stage(tool, (("{python}", "-m", "benchmarks.small_cases", "simt", tool),), weight=8, needs=("build",))
            for tool in ("memcheck", "racecheck")
        ),
        *benchmark_stages("cpu"),
    ]


# The machine


class Refusal(Exception):
    """The check cannot be run; the message says why and what to do."""


PROBE = """
import json, torch
from benchmarks import environment
print(json.dumps(environment.describe("cuda" if torch.cuda.is_available() else "cpu")))
"""


def probe() -> dict[str, Any]:
    """The environment as benchmarks.environment has it, from another process: this one shall hold no GPU memory."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise Refusal("torch did not find out within 120 s whether there is a GPU; does `nvidia-smi` answer?") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise Refusal(f"{sys.executable} cannot say what torch runs on: {last}; choose another with PYTHON=...")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def arch_of(environment: dict[str, Any]) -> str:
    """ "9.0a", for the GPU of the probe; raises Refusal where there is none, or none that the kernels run on."""
    if "capability" not in environment:
        raise Refusal(
            f"expected a CUDA GPU, found none (torch {environment['torch']}). Run this where `nvidia-smi` lists one, "
            "with a torch built for CUDA; --dry-run needs none"
        )
    try:
        (arch,) = _toolchain.arch_list(environment["capability"])
    except ValueError:
        name, capability = environment["device"], environment["capability"]
        raise Refusal(f"expected a GPU of compute capability 8.0 or newer, got {name} ({capability})") from None
    return arch


def missing() -> list[str]:
    """What this machine lacks, and what that means."""
    modules = {
        "pytest": "no test can run",
        "numpy": "no conformance, and some tests cannot run",
        "setuptools": "the library cannot be built",
        "hypothesis": "tests of random arguments are skipped",
        "matplotlib": "no plots",
    }
    found = [f"{name}: {effect}" for name, effect in modules.items() if importlib.util.find_spec(name) is None]
    _build.add_scripts_to_path()
    if not shutil.which("ninja"):
        found.append("ninja: the library cannot be built")
    if not _toolchain.compiler_version():
        found.append("a C++ compiler (c++, or what CXX names): the library cannot be built")
    return found


def sanitizer(cuda: str | None) -> str:
    """compute-sanitizer, on PATH or in a toolkit."""
    homes = [toolkit.home / "bin" for toolkit in _toolchain.find_toolkits(cuda)] if cuda else []
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, homes)])
    return shutil.which("compute-sanitizer", path=path) or "compute-sanitizer"


# The folder


def prepare(out: Path) -> None:
    """Makes `out` an empty folder that can be written; an earlier check in it is moved aside. Raises Refusal."""
    try:
        if (out / "report.md").is_file() and (out / "report.md").read_text().startswith(TITLE):
            written = datetime.fromtimestamp((out / "report.md").stat().st_mtime)
            out.rename(out.with_name(f"{out.name}-{written:%Y%m%d-%H%M%S}"))
        out.mkdir(parents=True, exist_ok=True)
        if content := sorted(path.name for path in out.iterdir()):
            raise Refusal(f"--out {out}: expected an empty folder or an earlier check, found {', '.join(content[:3])}")
        (out / "logs.txt").touch()
    except OSError as error:
        raise Refusal(f"--out {out}: expected a folder that can be written: {error}") from error


def pack(scratch: Path, archive: Path) -> None:
    """Moves what is in `scratch` into `archive`."""
    if any(scratch.iterdir()):
        with tarfile.open(archive, "w:gz") as tar:
            for path in sorted(scratch.iterdir()):
                tar.add(path, arcname=path.name)
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def whole_lines(file: Path) -> None:
    """Cuts off what a stopped suite has left of a line, to which the next would append, and what is over the limit."""
    if file.is_file():
        data = file.read_bytes()[:MAX_BYTES]
        os.truncate(file, data.rfind(b"\n") + 1)


def tidy(out: Path, stages: Sequence[Stage]) -> list[str]:
    """Brings `out` within its limits, the report counted in: the last plots go first. Returns what went, and why."""
    ours = ["results.jsonl", "logs.txt", *(stage.archive for stage in stages if stage.archive)]
    suites = [stage.name for stage in stages]

    def importance(path: Path) -> tuple[int, int, str]:
        name = str(path.relative_to(out))
        if name in ours:
            return (0, ours.index(name), name)
        kind = {".html": 1, ".png": 2, ".svg": 3}.get(path.suffix, 4)
        return (kind, next((i for i, suite in enumerate(suites) if suite in name), len(suites)), name)

    whole_lines(out / "results.jsonl")
    gone, kept = [], 1
    for path in sorted((path for path in out.rglob("*") if path.is_file() or path.is_symlink()), key=importance):
        name = path.relative_to(out)
        if name == Path("report.md"):
            continue
        size = path.lstat().st_size
        if kept == MAX_FILES:
            reason = f"there are {MAX_FILES} more important files"
        elif size > MAX_BYTES:
            reason = f"{size >> 20} MiB, more than {MAX_BYTES >> 20}"
        elif path.is_symlink() or len(name.parts) > MAX_FOLDERS + 1 or not re.fullmatch(r"[A-Za-z0-9._/-]+", str(name)):
            reason = "a link, too deep, or of an unusual name"
        else:
            kept += 1
            continue
        path.unlink()
        gone.append(f"`{name}`: {reason}")
    for folder in sorted((path for path in out.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    return gone


# The report


def write_report(
    out: Path,
    heading: str,
    facts: Sequence[str],
    environment: dict[str, Any],
    stages: Sequence[Stage],
    outcomes: Sequence[Outcome],
    running: str,
    gone: Sequence[str],
) -> None:
    by_name = {outcome.stage.name: outcome for outcome in outcomes}
    lines = [f"{TITLE}: {heading}", "", *(f"- {fact}" for fact in facts), "", "| stage | verdict | seconds | limit | |"]
    lines += ["|---|---|---:|---:|---|"]
    for stage in stages:
        if outcome := by_name.get(stage.name):
            numbers = f"{outcome.seconds:.1f} | {outcome.limit:.0f}" if outcome.limit else "|"
            lines += [f"| {stage.name} | {outcome.verdict} | {numbers} | {outcome.reason} |"]
        else:
            lines += [f"| {stage.name} | {'**running**' if stage.name == running else 'to come'} | | | |"]
    lines += ["", *summary(out / "results.jsonl")]
    for outcome in outcomes:
        shown = outcome.key_lines if outcome.good else [*outcome.key_lines, "...", *outcome.tail]
        if not outcome.stage.key and outcome.good:
            shown = outcome.tail[-10:]
        if outcome.limit:
            lines += ["", f"## {outcome.stage.name}: {outcome.verdict}", "", "```", *shown, "```"]
    if any(outcome.stage.archive and (out / outcome.stage.archive).exists() for outcome in outcomes):
        lines += ["", "What the GPU answered, for the emulator to answer the same: "]
        lines[-1] += "`tar -xzf golden.tar.gz -C tests/simt/golden`"
    if gone:
        lines += ["", "Left out:", "", *(f"- {item}" for item in gone)]
    lines += ["", "## The machine", "", "```", *(f"{key}: {value}" for key, value in environment.items()), "```", ""]
    scratch = out / ".report.md"
    scratch.write_text("\n".join(lines))
    scratch.replace(out / "report.md")


def summary(file: Path) -> list[str]:
    """How much faster ours is than each opponent, over all cases of a suite, and what was not measured."""
    if not file.is_file():
        return ["No measurements."]
    try:
        measurements = results.read(file)
    except results.ResultsError as error:
        return [f"The measurements cannot be read: {error}"]
    lines = ["| suite | dtype | opponent | its time over ours, geometric mean | cases |", "|---|---|---|---:|---:|"]
    for (suite, dtype, side), (ratio, count) in results.geometric_means(measurements).items():
        lines += [f"| {suite} | {dtype} | {side} | {ratio:.2f} | {count} |"]
    failures: dict[str, int] = {}
    for m in measurements:
        if m.failure:
            reason = f"{m.suite}, {m.side}: {m.failure.splitlines()[0][:160]}"
            failures[reason] = failures.get(reason, 0) + 1
    lines += ["", f"{len(measurements)} measurements, {sum(failures.values())} of them without a time."]
    return lines + [f"- {count} × {reason}" for reason, count in list(failures.items())[:20]]


# The command


def choose(stages: Sequence[Stage], only: str | None) -> list[Stage]:
    """Those that `only` names, "gemm,attention", and those that are always run; raises Refusal."""
    if only is None:
        return list(stages)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [stage.name for stage in stages]
    if unknown := [name for name in names if name not in known]:
        raise Refusal(f"--only: expected some of {', '.join(known)}; got {', '.join(map(repr, unknown))}")
    if not names:
        raise Refusal(f"--only: expected some of {', '.join(known)}; got none")
    return [stage for stage in stages if stage.always or stage.name in names]


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def clock(seconds: float) -> str:
    minutes, seconds = divmod(max(0, int(seconds)), 60)
    return f"{minutes}:{seconds:02}"


def main(arguments: Sequence[str] | None = None, table: Sequence[Stage] | None = None) -> int:
    """`table` replaces the stages. Returns 0 if all passed, 1 if not, 2 if nothing could be run."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=positive, default=9.0, help="after which it has ended (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="the folder to leave (default: gpu-check)")
    parser.add_argument("--only", metavar="STAGES", help="stages by name, with commas, beside those all others need")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU and the emulator; needs no GPU")
    parser.add_argument("--list", action="store_true", help="print the stages, and stop")
    options = parser.parse_args(arguments)
    try:
        if table is None:
            table = stages_of_dry_run() if options.dry_run else stages_on_gpu()
        stages = choose(table, options.only)
        if options.list:
            print("\n".join(f"{stage.name:12} {' && '.join(map(' '.join, stage.commands))}" for stage in stages))
            return 0
        environment = probe()
        arch = "" if options.dry_run else arch_of(environment)
        out = options.out.resolve()
        prepare(out)
    except Refusal as refusal:
        print(f"gpu_check: {refusal}", file=sys.stderr)
        return 2

    total = options.minutes * 60
    words = {"python": sys.executable, "out": str(out)}
    variables = {"PYTHONUNBUFFERED": "1", "COLUMNS": "140"}
    if not options.dry_run:
        words["sanitizer"] = sanitizer(environment.get("cuda"))
        # Required, so that a build without them is an error.
        variables |= {"CUDA_EXT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": arch}
    source = f"{_build.git_revision() or 'not a git checkout'}, csrc {_build.sources_digest()}"
    heading = f"{environment['device']}{', dry run' if options.dry_run else ''}"
    facts = [
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, within {options.minutes:g} minutes",
        f"Source: {source}",
    ]
    facts += [f"Missing {item}" for item in missing()]
    gone: list[str] = []
    print(f"{heading}\nSource: {source}\n{out}", flush=True)

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        scratch = Path(folder)
        run = Run(
            folder=ROOT,
            log=out / "logs.txt",
            end=began + total - min(10, total / 10),
            words={**words, "scratch": folder},
            environment=variables,
        )

        def report(running: str = "") -> None:
            took = f"Took {clock(time.monotonic() - began)}"
            write_report(out, heading, [*facts, took], environment, stages, run.outcomes, running, gone)

        def before(stage: Stage, limit: float) -> None:
            report(stage.name)
            passed = clock(time.monotonic() - began)
            print(f"[{passed} of {clock(total)}] {stage.name}, at most {clock(limit)} ...", flush=True)

        def after(outcome: Outcome) -> None:
            if outcome.stage.archive:
                pack(scratch, out / outcome.stage.archive)
            gone.extend(tidy(out, stages))
            reason = f": {outcome.reason}" if outcome.reason else ""
            print(f"  {outcome.stage.name} {outcome.verdict}{reason} ({outcome.seconds:.1f} s)", flush=True)

        run.before, run.after = before, after
        run.all(stages)
        report()
    print(f"[{clock(time.monotonic() - began)} of {clock(total)}] {out / 'report.md'}")
    return 0 if all(outcome.good for outcome in run.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
