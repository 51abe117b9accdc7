"""Everything there is to learn from a machine with a GPU, in one command and a few minutes.

    python -m benchmarks.gpu_check                          # or: make gpu-check
    python -m benchmarks.gpu_check                          # again: goes on where the first one stopped
    python -m benchmarks.gpu_check --only gemm,attention    # narrowed to stages; --list names them
    python -m benchmarks.gpu_check --again tests            # also stages that have been finished
    python -m benchmarks.gpu_check --dry-run                # the same on the CPU and the emulator

It needs a CUDA GPU with its driver, nvcc, a C++ compiler, ninja and a Python with torch and setuptools; with pytest it
runs the tests too. No network, no git. It builds the library for that GPU, records what the GPU answers to the
conformance kernels, tries a few cases of each family of kernels, measures, runs the tests and the sanitizer, and
compares what it measured with what was predicted. It ends by itself within --minutes and leaves one folder of at most 8
files, report.md first. What is finished is kept in build/gpu-check, for a second call to go on and tell all.
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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import LOG, FolderError, Report, clock, empty, merge_logs, pack, prepare, tidy
from benchmarks.gpu_check.stages import Outcome, Run, Stage
from benchmarks.gpu_check.state import State
from benchmarks.results import slug
from cuda_ext import _build, _emulator, _stamp, _toolchain

ROOT = _build.SOURCE_ROOT
# Not `python -m cuda_ext.info`, whose exit status is 1 as long as the library has not been built.
DESCRIBE = ("{python}", "-c", "from cuda_ext import info; print(info.render(info.report()))")
INFO = r"MiB /|^  (torch|python|setuptools|ninja|compiler|driver|cores|free memory): |, sm_\d|: CUDA \d"
BUILD = r"^cuda_ext: |\berror\b|^FAILED"
CONFORMANCE = r"FAULT|: rounding|faults; answers|^record: |\berror\b"
CORRECT = r": (WRONG|FAILED|NOT RUN)\b|: left out|^correct: |:$"
PYTEST = r"^(FAILED|ERROR|lost|hung|crashed|begun)\b|\b(passed|failed|errors?)\b.* in [\d.]+s|^relay: "
# The sources of `python -m benchmarks`.
MEASURING = tuple(
    f"benchmarks/{name}" for name in ("__main__.py", "environment.py", "results.py", "suites", "presentation")
)
FAMILIES = ("gemm", "attention-forward", "attention-backward", "bucket")
# One case of each family that a CPU has soon measured; the first of a suite is measured in any case.
FEW = (
    "^gemm forward .*512 × 512 × 512 float32$|^flash_attention full forward .*S=1024 H=8 D=64 float32$|"
    "^pack forward .*ResNet-50 float32$"
)
MODEL = "model.md"  # in the folder of the stage "model"


def benchmark_stage(device: str, estimate: float, suites: tuple[str, ...], *more: str) -> Stage:
    """One command for all suites: it measures the ceilings once, and has a process for each suite itself."""
    options = ("--device", device, "--minutes", "{minutes}", "--out", "{out}", "--resume")
    return Stage(
        "benchmarks",
        (("{python}", "-m", "benchmarks", "{parts}", *options, *more),),
        estimate,
        least=estimate / 15,
        fills=True,
        needs=("build",),
        parts=suites,
        sources=MEASURING,
    )


def correctness_stages(backend: str, estimate: float) -> list[Stage]:
    """One for each family of kernels, so that the report names the one that is broken."""
    return [
        Stage(
            f"correct-{family}",
            (("{python}", "-m", "benchmarks.gpu_check.correct", family, backend),),
            estimate,
            least=estimate / 2,
            needs=("build",),
            key=CORRECT,
            sources=("benchmarks/gpu_check/correct.py", "benchmarks/suites/measure.py"),
        )
        for family in FAMILIES
    ]


def build_seconds(cores: int) -> float:
    """Of the library for one architecture: no core waits long for the slowest source, which takes about a minute."""
    sources = _build.Plan("", "", _toolchain.Toolkit("", Path()), ("9.0a",), cores).sources
    seconds = {".cpp": _build.SECONDS_PER_CXX_FILE, ".cu": _build.SECONDS_PER_CUDA_FILE + _build.SECONDS_PER_ARCH}
    return 40 + max(60, sum(seconds[path.suffix] for path in sources) / cores)


def stages_on_gpu(cores: int) -> list[Stage]:
    """In the order of their worth. The estimates are for an H100 or H200, and reasoned from counts, not measured; the
    table in docs/gpu-check.md has them too."""
    # Other files may import what is not installed.
    marks = re.compile(r"mark\.(every_backend|cuda)\b")
    files = sorted(path for path in (ROOT / "tests").glob("test_*.py") if marks.search(path.read_text()))
    tests = [str(path.relative_to(ROOT)) for path in files]
    small_cases = ("--kernel-regex", "kns=cuda_ext", "{python}", "-m", "benchmarks.gpu_check.small_cases", "cuda")
    sanitizers = [
        Stage(
            tool,
            (("{sanitizer}", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", *more),),
            estimate,
            least=15,
            needs=("build",),
            key=r"={9} .*(SUMMARY|Error|Invalid|hazard|Race|refus|support)",
            sign=r"^small cases on ",
            # An allocation from the cache of PyTorch has no end that memcheck could see.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            sources=("benchmarks/gpu_check/small_cases.py",),
        )
        # Sixty small kernels, each several to a hundred times as long as without the tool, after its start.
        for tool, estimate, more in (
            ("memcheck", 45, ("--report-api-errors", "no", *small_cases)),
            ("racecheck", 60, ("--racecheck-report", "analysis", *small_cases)),
        )
    ]
    return [
        Stage("environment", (("nvidia-smi",), DESCRIBE), 10, always=True, repeats=True, key=INFO),
        Stage(
            "build",
            (("{python}", "-m", "benchmarks.gpu_check.build_in_time", "--minutes", "{minutes}"),),
            build_seconds(cores),
            always=True,
            repeats=True,  # ninja knows what is left
            key=BUILD,
        ),
        # nvcc compiles a thousand lines for one architecture; then each case takes less than a second.
        Stage(
            "conformance",
            (("{python}", "tests/simt/record.py", "--golden", "{scratch}"),),
            60,
            least=20,
            key=CONFORMANCE,
            archive="golden.tar.gz",
            sources=("tests/simt", "tests/ptx"),
        ),
        # Mostly PyTorch's start and that of CUDA.
        *correctness_stages("cuda", 15),
        # 210 cases, 1.2 s each, and the start of six processes.
        benchmark_stage(
            "cuda", 300, ("gemm", "attention", "bucket", "train", "overhead")
        ),  # the stage tells of "build"
        # 700 tests, 0.2 s each, and a few that compile.
        Stage(
            "tests",
            (("{python}", "tests/relay.py", "--record", "{state}/record", "-m", "cuda", *tests),),
            180,
            least=20,
            needs=("build",),
            key=PYTEST,
            sign=r"^relay: pytest ",
            sources=("tests",),
        ),
        *sanitizers,
        # Half of it is the emulator, which the C++ compiler makes for the model to ask.
        model_stage(("{out}/results.jsonl",), 40),
    ]


def model_stage(arguments: tuple[str, ...], estimate: float) -> Stage:
    command = ("{python}", "-m", "benchmarks.predicted", *arguments, "--to", f"{{state}}/{MODEL}")
    return Stage("model", (command,), estimate, repeats=True, key=r"^\| ")


def stages_of_dry_run() -> list[Stage]:
    """The estimates were measured on two cores of a server."""
    compiled = emulator_is_compiled()
    tests = ("tests/test_bucket.py", "tests/test_gemm.py", "-m", "simt", "-k", "come_back or gate_comes_first")
    python = "{python}"
    return [
        Stage("environment", (DESCRIBE,), 3, always=True, repeats=True, key=INFO),
        Stage(
            "build",
            ((python, "-m", "benchmarks.gpu_check.usable_build"),),
            3 if compiled else 110,
            always=True,
            repeats=True,
            key=BUILD,
        ),
        Stage(
            "conformance",
            ((python, "tests/simt/record.py", "--emulated", "--golden", "{scratch}"),),
            4 if compiled else 30,
            key=CONFORMANCE,
            archive="golden.tar.gz",
            sources=("tests/simt", "tests/ptx"),
        ),
        *correctness_stages("simt", 4),
        benchmark_stage("cpu", 16, ("gemm", "attention", "bucket"), "--minutes", "0.02", "--only", FEW),
        Stage(
            "tests",
            ((python, "tests/relay.py", "--patience", "300", "--record", "{state}/record", *tests),),
            4,
            needs=("build",),
            key=PYTEST,
            sign=r"^relay: pytest ",
            sources=("tests",),
        ),
        *(
            Stage(
                tool,
                ((python, "-m", "benchmarks.gpu_check.small_cases", "simt", tool, "bfloat16"),),
                estimate,
                needs=("build",),
                sources=("benchmarks/gpu_check/small_cases.py",),
            )
            for tool, estimate in (("memcheck", 3), ("racecheck", 5))
        ),
        model_stage(("--rehearse", "h200"), 3),
    ]


def emulator_is_compiled() -> bool:
    """From sources as they are, as far as their times tell."""
    library = _emulator.FOLDER / "_simt_hooks.so"
    sources = (path for path in _build.CSRC.rglob("*") if path.is_file())
    return library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in sources)


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
        "pytest": "the tests cannot run",
        "numpy": "no conformance, and some tests cannot run",
        "hypothesis": "tests of random arguments are skipped",
        "matplotlib": "no plots",
    }
    found = [f"{name}: {effect}" for name, effect in modules.items() if importlib.util.find_spec(name) is None]
    if problem := _toolchain.setuptools_problem():
        found.append(f"setuptools: the library cannot be built; {' '.join(problem.split())}")
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
    names = named(stages, only, "--only")
    chosen = []
    for stage in stages:
        parts = tuple(part for part in stage.parts if part in names)
        if stage.always or stage.name in names:
            chosen.append(stage)
        elif parts:
            chosen.append(replace(stage, parts=parts))
    return chosen


def named(stages: Sequence[Stage], text: str, option: str) -> list[str]:
    """The stages and parts in a list such as "gemm,attention"; raises Refusal."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [name for stage in stages for name in (stage.name, *stage.parts)]
    if unknown := [name for name in names if name not in known] or (not names and ["none"]):
        raise Refusal(f"{option}: expected some of {', '.join(known)}; got {', '.join(unknown)}")
    return names


def repeated(stages: Sequence[Stage], again: str | None) -> list[Stage]:
    """The stages that `again` names, or all; raises Refusal."""
    if again is None:
        return []
    names = [stage.name for stage in stages] if again == "all" else named(stages, again, "--again")
    return [stage for stage in stages if {stage.name, *stage.parts} & set(names)]


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
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
    parser.add_argument("--again", metavar="STAGES", help="stages to run though they are finished, or all")
    parser.add_argument(
        "--state",
        type=Path,
        default=ROOT / "build" / "gpu-check",
        help="where a call keeps what the next one goes on with (default: build/gpu-check)",
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU and the emulator; needs no GPU")
    parser.add_argument("--list", action="store_true", help="print the stages, and stop")
    return parser.parse_args(arguments)


def head_dims() -> str:
    """Of attention's kernels in the library, if it has not all of them."""
    try:
        built = _stamp.read().get("head_dims", list(_build.HEAD_DIMS))
    except ImportError:
        return ""
    return "" if built == list(_build.HEAD_DIMS) else ", ".join(map(str, built))


def main(arguments: Sequence[str] | None = None, table: Sequence[Stage] | None = None) -> int:
    """`table` replaces the stages. Returns 0 if all passed, 1 if not, 2 if nothing could be run."""
    began = time.monotonic()
    options = parse(arguments)
    total = options.minutes * 60
    out: Path = options.out.resolve()
    if table is None:
        table = stages_of_dry_run() if options.dry_run else stages_on_gpu(_toolchain.available_cores())
    try:
        stages = choose(table, options.only)
        again = repeated(stages, options.again)
        if options.list:
            for stage in stages:
                print(stage.name, f"({', '.join(stage.parts)})" if stage.parts else "")
                print(*("    " + " ".join(command) for command in stage.commands), sep="\n")
            return 0
        prepare(out)
    except (Refusal, FolderError) as refusal:
        print(f"gpu_check: {refusal}", file=sys.stderr)
        return 2
    facts = [f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, within {options.minutes:g} minutes"]
    report = Report(out, "asking the machine what it is", facts, {}, stages, began=began)
    report.write("none")
    words = {"python": sys.executable, "out": str(out)}
    variables = {"PYTHONUNBUFFERED": "1", "COLUMNS": "140"}
    try:
        machine = report.machine = probe(min(90.0, total / 3))
        if not options.dry_run:
            variables |= build_variables(arch_of(machine))
            words["sanitizer"] = sanitizer(machine.get("cuda"))
    except Refusal as refusal:
        report.heading = f"not run: {refusal}"
        report.write()
        print(f"gpu_check: {refusal}", file=sys.stderr)
        return 2

    report.heading = f"{machine['device']}{', dry run' if options.dry_run else ''}"
    facts.append(f"Source: {_build.git_revision() or 'not a git checkout'}, csrc {_build.sources_digest()}")
    facts += [f"Missing {item}" for item in missing()]
    if not options.dry_run:
        facts.append("For the emulator: `mkdir -p tests/simt/golden; tar -xzf golden.tar.gz -C tests/simt/golden`")
    about = (str(machine["device"]), str(machine.get("torch")), "dry run" if options.dry_run else "")
    state = State(options.state.resolve() / slug(" ".join(about)), ROOT, [*about, head_dims()], out)
    for stage in again:
        state.forget(stage)
    for stage in stages:
        state.restore(stage)
    finished = {stage.name: outcome for stage in stages if (outcome := state.earlier(stage))}
    report.earlier, report.model = finished, state.folder / "model" / MODEL
    print(report.heading, *facts, f"Leaves {out}", estimates(stages, finished, total), sep="\n  ", flush=True)

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:

        def before(stage: Stage, limit: float) -> None:
            report.write(stage.name)
            state.begin(stage)
            passed = clock(time.monotonic() - began)
            print(f"[{passed} of {clock(total)}] {stage.name}, at most {clock(limit)} ...", flush=True)

        def meanwhile() -> None:
            state.save()
            report.write_again()

        def after(outcome: Outcome) -> None:
            try:
                if outcome.stage.archive:
                    pack(Path(scratch), out / outcome.stage.archive)
                empty(Path(scratch))
                merge_logs(out)
                report.gone += tidy(out, stages)
            except OSError as error:  # a full disk, say
                report.gone.append(f"what `{outcome.stage.name}` left: {error}")
            state.end(outcome)
            if outcome.stage.name == "build" and head_dims() != state.facts[-1]:
                # What was learned with another library does not hold for this one.
                state.facts[-1] = head_dims()
                for stage in stages:
                    if "build" in stage.needs and not state.earlier(stage):
                        finished.pop(stage.name, None)
            reason = f": {outcome.reason}" if outcome.reason else ""
            print(f"  {outcome.stage.name} {outcome.verdict}{reason} ({outcome.seconds:.1f} s)", flush=True)

        reserve = min(10, total / 10)
        run = Run(ROOT, out / LOG, began + total - reserve, {**words, "scratch": scratch}, variables)
        run.before, run.after, run.meanwhile = before, after, meanwhile
        run.earlier, run.state, run.outcomes = lambda stage: finished.get(stage.name), state.of, report.outcomes
        run.all(stages)
    if few := head_dims():
        facts.append(f"The library has attention's CUDA kernels of head dims {few} only: tests of others fail")
    report.write()
    print(*report.verdict(), f"[{clock(time.monotonic() - began)} of {clock(total)}] {out / 'report.md'}", sep="\n")
    return 0 if all(outcome.good for outcome in report.outcomes) else 1


def estimates(stages: Sequence[Stage], finished: Mapping[str, Outcome], total: float) -> str:
    """What is to come, and how long it should take."""
    coming = [stage for stage in stages if stage.name not in finished]
    words = ", ".join(f"{stage.name} {stage.estimate:.0f}" for stage in coming)
    text = f"Seconds that stages should take: {words}; {sum(stage.estimate for stage in coming):.0f} of {total:.0f}"
    if finished:
        text += f"\n  Finished by an earlier call (--again repeats them): {', '.join(finished)}"
    return text


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("gpu_check: interrupted before the first stage")
