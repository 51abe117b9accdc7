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
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu_report import LOG, FolderError, Report, clock, merge_logs, pack, prepare, tidy
from benchmarks.stages import Outcome, Run, Stage
from cuda_ext import _build, _toolchain

ROOT = Path(__file__).resolve().parent.parent
# Not `python -m cuda_ext.info`, whose exit status is 1 as long as the library has not been built.
DESCRIBE = ("{python}", "-c", "from cuda_ext import info; print(info.render(info.report()))")
INFO = r"MiB /|^  (torch|python|setuptools|ninja|compiler|driver|cores|free memory): |, sm_\d|: CUDA \d"
BUILD = r"^cuda_ext: |\berror\b|^FAILED"
CONFORMANCE = r"FAULT|: rounding|faults; answers|^record: |\berror\b"
PYTEST = r"^(FAILED|ERROR|lost|hung|crashed|begun)\b|\b(passed|failed|errors?)\b.* in [\d.]+s|^relay: "


def benchmark_stage(device: str, minutes: str = "{minutes}") -> Stage:
    """One command for all suites: it measures the ceilings once, and has a process for each suite itself."""
    options = ("--device", device, "--minutes", minutes, "--out", "{out}")
    return Stage(
        "benchmarks",
        (("{python}", "-m", "benchmarks", "{parts}", *options),),
        weight=40,
        least=20,
        needs=("build",),
        # Not the suite "build": how long that takes is told by the stage.
        parts=("gemm", "bucket", "attention", "train", "overhead"),
    )


def stages_on_gpu() -> list[Stage]:
    """The first ones are given more than they should take: all others depend on them, and what they leave is theirs."""
    # Other files may import what is not installed.
    marks = re.compile(r"mark\.(every_backend|cuda)\b")
    files = sorted(path for path in (ROOT / "tests").glob("test_*.py") if marks.search(path.read_text()))
    tests = [str(path.relative_to(ROOT)) for path in files]
    small_cases = ("--kernel-regex", "kns=cuda_ext", "{python}", "-m", "benchmarks.small_cases", "cuda")
    sanitizers = [
        Stage(
            tool,
            (("{sanitizer}", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", *more),),
            weight=8,
            least=15,
            needs=("build",),
            key=r"={9} .*(SUMMARY|Error|Invalid|hazard|Race|refus|support)",
            sign=r"^small cases on ",
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
            (("nvidia-smi",), DESCRIBE),
            weight=25,
            always=True,
            key=INFO,
        ),
        Stage(
            "build",
            (("{python}", "setup.py", "--quiet", "build_ext", "--inplace"),),
            weight=120,
            always=True,
            key=BUILD,
        ),
        Stage(
            "conformance",
            (("{python}", "tests/simt/record.py", "--golden", "{scratch}"),),
            weight=25,
            least=20,
            key=CONFORMANCE,
            archive="golden.tar.gz",
        ),
        Stage(
            "tests",
            (("{python}", "tests/relay.py", "-m", "cuda", *tests),),
            weight=30,
            least=20,
            needs=("build",),
            key=PYTEST,
        ),
        *sanitizers,
        benchmark_stage("cuda"),
    ]


def stages_of_dry_run() -> list[Stage]:
    """Most of their time goes into compiling for the emulator, where that has not been done yet."""
    selection = ("-m", "simt", "-k", "any_tensors or come_back or gate_comes_first")
    tests = ("tests/test_bucket.py", "tests/test_gemm.py", *selection)
    python = "{python}"
    return [
        Stage("environment", (DESCRIBE,), weight=25, always=True, key=INFO),
        Stage("build", ((python, "-m", "benchmarks.usable_build"),), weight=120, always=True, key=BUILD),
        Stage(
            "conformance",
            ((python, "tests/simt/record.py", "--emulated", "--golden", "{scratch}"),),
            weight=50,
            key=CONFORMANCE,
            archive="golden.tar.gz",
        ),
        Stage(
            "tests",
            ((python, "tests/relay.py", "--patience", "300", *tests),),
            weight=30,
            needs=("build",),
            key=PYTEST,
        ),
        *(
            Stage(tool, ((python, "-m", "benchmarks.small_cases", "simt", tool),), weight=15, needs=("build",))
            for tool in ("memcheck", "racecheck")
        ),
        benchmark_stage("cpu", minutes="0.3"),  # each suite measures something, however short its time
    ]


# The machine


class Refusal(Exception):
    """The check cannot be run; the message says why and what to do."""


PROBE = """
import json, torch
from benchmarks import environment
print(json.dumps(environment.describe("cuda" if torch.cuda.is_available() else "cpu")))
"""


def probe(patience: float) -> dict[str, Any]:
    """The environment as benchmarks.environment has it, from another process: this one shall hold no GPU memory."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        raise Refusal(
            f"torch did not find out within {patience:.0f} s whether there is a GPU; does `nvidia-smi` answer?"
        ) from None
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


def build_variables(arch: str) -> dict[str, str]:
    """CUDA required, so that a build without it is an error; and on every core, however little memory is free when it
    begins, since it has to fit its time."""
    jobs = os.environ.get("MAX_JOBS") or str(_toolchain.available_cores())
    return {"CUDA_EXT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": arch, "MAX_JOBS": jobs}


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
    name = "compute-sanitizer"
    if found := shutil.which(name):
        return found
    homes = [toolkit.home / "bin" for toolkit in _toolchain.find_toolkits(cuda)] if cuda else []
    return shutil.which(name, path=os.pathsep.join(map(str, homes))) or name


# The command


def choose(stages: Sequence[Stage], only: str | None) -> list[Stage]:
    """Those that `only` names, "gemm,attention", and those that are always run; raises Refusal."""
    if only is None:
        return list(stages)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [name for stage in stages for name in (stage.name, *stage.parts)]
    if unknown := [name for name in names if name not in known] or (not names and ["none"]):
        raise Refusal(f"--only: expected some of {', '.join(known)}; got {', '.join(unknown)}")
    chosen = []
    for stage in stages:
        parts = tuple(part for part in stage.parts if part in names)
        if stage.always or stage.name in names:
            chosen.append(stage)
        elif parts:
            chosen.append(replace(stage, parts=parts))
    return chosen


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def main(arguments: Sequence[str] | None = None, table: Sequence[Stage] | None = None) -> int:
    """`table` replaces the stages. Returns 0 if all passed, 1 if not, 2 if nothing could be run."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=positive, default=9.0, help="after which it has ended (default: 9)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or "gpu-check"),
        help="the folder to leave (default: what the variable OUT names, else gpu-check)",
    )
    parser.add_argument("--only", metavar="STAGES", help="stages by name, with commas, beside those all others need")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU and the emulator; needs no GPU")
    parser.add_argument("--list", action="store_true", help="print the stages, and stop")
    options = parser.parse_args(arguments)
    total = options.minutes * 60
    out = options.out.resolve()
    try:
        if table is None:
            table = stages_of_dry_run() if options.dry_run else stages_on_gpu()
        stages = choose(table, options.only)
        if options.list:
            for stage in stages:
                print(stage.name, f"({', '.join(stage.parts)})" if stage.parts else "")
                print(*("    " + " ".join(command) for command in stage.commands), sep="\n")
            return 0
        machine = probe(total / 2)
        words = {"python": sys.executable, "out": str(out)}
        variables = {"PYTHONUNBUFFERED": "1", "COLUMNS": "140"}
        if not options.dry_run:
            variables |= build_variables(arch_of(machine))
            words["sanitizer"] = sanitizer(machine.get("cuda"))
        prepare(out)
    except (Refusal, FolderError) as refusal:
        print(f"gpu_check: {refusal}", file=sys.stderr)
        return 2

    source = f"Source: {_build.git_revision() or 'not a git checkout'}, csrc {_build.sources_digest()}"
    facts = [f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, within {options.minutes:g} minutes", source]
    facts += [f"Missing {item}" for item in missing()]
    if not options.dry_run:
        facts.append("For the emulator: `mkdir -p tests/simt/golden; tar -xzf golden.tar.gz -C tests/simt/golden`")
    heading = f"{machine['device']}{', dry run' if options.dry_run else ''}"
    report = Report(out, heading, facts, machine, stages, began=began)
    print(heading, *facts, f"Leaves {out}", sep="\n  ", flush=True)

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:

        def before(stage: Stage, limit: float) -> None:
            report.write(stage.name)
            passed = clock(time.monotonic() - began)
            print(f"[{passed} of {clock(total)}] {stage.name}, at most {clock(limit)} ...", flush=True)

        def after(outcome: Outcome) -> None:
            if outcome.stage.archive:
                pack(Path(scratch), out / outcome.stage.archive)
            merge_logs(out)
            report.gone += tidy(out, stages)
            reason = f": {outcome.reason}" if outcome.reason else ""
            print(f"  {outcome.stage.name} {outcome.verdict}{reason} ({outcome.seconds:.1f} s)", flush=True)

        reserve = min(10, total / 10)
        run = Run(ROOT, out / LOG, began + total - reserve, {**words, "scratch": scratch}, variables)
        run.before, run.after, run.outcomes = before, after, report.outcomes
        run.all(stages)
    report.write()
    print(f"[{clock(time.monotonic() - began)} of {clock(total)}] {out / 'report.md'}")
    return 0 if all(outcome.good for outcome in report.outcomes) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("gpu_check: interrupted before the first stage")
