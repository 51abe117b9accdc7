"""Checks and measures everything on a machine with a GPU, in one command and a few minutes.

    python -m benchmarks.gpu_check                          # or: make gpu-check
    python -m benchmarks.gpu_check                          # again: continues where the first one stopped
    python -m benchmarks.gpu_check --resume state.tar.gz    # the same on a fresh machine, with a file of the first one
    python -m benchmarks.gpu_check --only gemm,attention    # only these stages; --list names them
    python -m benchmarks.gpu_check --again tests            # repeats a finished stage
    python -m benchmarks.gpu_check --dry-run                # the same on the CPU and the emulator

It needs a CUDA GPU with its driver, nvcc, a C++ compiler, ninja and a Python with torch and setuptools; if pytest is
installed, it also runs the tests. It needs neither a network nor git. It builds the library for the GPU, records the
results of the conformance kernels, checks a few cases of each family of kernels, measures, runs the tests and the
sanitizer. It ends within --minutes and writes one folder of at most 8 files; read report.md first. Finished work is
kept in build/gpu-check, where a second call continues, and in state.tar.gz, with which one on another machine does.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.gpu_check.machine import Refusal, arch_of, build_variables, head_dims, missing, probe, sanitizer
from benchmarks.gpu_check.report import LOG, STATE, FolderError, Report, clock, empty, merge_logs, pack, prepare, tidy
from benchmarks.gpu_check.stage_table import ROOT, stages_of_dry_run, stages_on_gpu
from benchmarks.gpu_check.stages import Outcome, Run, Stage
from benchmarks.gpu_check.state import State
from benchmarks.results import slug
from cuda_ext import _build, _toolchain


def choose(stages: Sequence[Stage], only: str | None) -> list[Stage]:
    """The stages named in `only`, such as "gemm,attention", and those that always run; raises Refusal."""
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
    """The names of stages and parts in a list such as "gemm,attention"; raises Refusal."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [name for stage in stages for name in (stage.name, *stage.parts)]
    if unknown := [name for name in names if name not in known] or (not names and ["none"]):
        raise Refusal(f"{option}: expected some of {', '.join(known)}; got {', '.join(unknown)}")
    return names


def repeated(stages: Sequence[Stage], again: str | None) -> list[Stage]:
    """The stages named in `again`, or all; raises Refusal."""
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
    parser.add_argument("--minutes", type=positive, default=9.0, help="time limit (default: 9)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or "gpu-check"),
        help="output folder (default: $OUT, else gpu-check)",
    )
    parser.add_argument("--only", metavar="STAGES", help="names, separated by commas; stages that others need also run")
    parser.add_argument("--again", metavar="STAGES", help="stages to repeat even if they are finished, or all")
    parser.add_argument(
        "--state",
        type=Path,
        default=ROOT / "build" / "gpu-check",
        help="folder for work that the next call continues (default: build/gpu-check)",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="continue the work in a state.tar.gz that an earlier check has left"
    )
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU and the emulator; needs no GPU")
    parser.add_argument("--list", action="store_true", help="print the stages and exit")
    return parser.parse_args(arguments)


@dataclass
class Check:
    """A check while it runs: keeps report, folder and state current as stages begin and end."""

    stages: Sequence[Stage]
    report: Report
    state: State
    finished: dict[str, Outcome]  # by an earlier call, by name
    scratch: Path
    seconds: float

    def before(self, stage: Stage, limit: float) -> None:
        self.report.write(stage.name)
        self.state.begin(stage)
        passed = clock(time.monotonic() - self.report.began)
        print(f"[{passed} of {clock(self.seconds)}] {stage.name}, at most {clock(limit)} ...", flush=True)

    def meanwhile(self) -> None:
        self.state.save()
        self.report.write_again()

    def after(self, outcome: Outcome) -> None:
        out = self.report.out
        try:
            if outcome.stage.archive:
                pack(self.scratch, out / outcome.stage.archive)
            empty(self.scratch)
            merge_logs(out)
            self.report.gone += tidy(out, self.stages)
        except OSError as error:  # a full disk, say
            self.report.gone.append(f"files of `{outcome.stage.name}`: {error}")
        self.state.end(outcome)
        with suppress(OSError):
            pack(self.state.folder.parent, out / STATE)
        if outcome.stage.name == "build" and head_dims() != self.state.facts[-1]:
            # Outcomes with another library are not valid for this one.
            self.state.facts[-1] = head_dims()
            for stage in self.stages:
                if "build" in stage.needs and not self.state.earlier(stage):
                    self.finished.pop(stage.name, None)
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"  {outcome.stage.name} {outcome.verdict}{reason} ({outcome.seconds:.1f} s)", flush=True)

    def run(self, words: Mapping[str, str], variables: Mapping[str, str]) -> None:
        reserve = min(10, self.seconds / 10)
        run = Run(
            ROOT,
            self.report.out / LOG,
            self.report.began + self.seconds - reserve,
            {**words, "scratch": str(self.scratch)},
            variables,
            earlier=lambda stage: self.finished.get(stage.name),
            state=self.state.of,
            before=self.before,
            after=self.after,
            meanwhile=self.meanwhile,
            outcomes=self.report.outcomes,
        )
        run.all(self.stages)


def main(arguments: Sequence[str] | None = None, table: Sequence[Stage] | None = None) -> int:
    """`table` replaces the stages. Returns 0 if all passed, 1 if not, 2 if nothing could be run."""
    began = time.monotonic()
    options = parse(arguments)
    seconds = options.minutes * 60
    out: Path = options.out.resolve()
    if table is None:
        table = stages_of_dry_run() if options.dry_run else stages_on_gpu(_toolchain.available_cores())
    try:
        stages = choose(table, options.only)
        again = repeated(stages, options.again)
        if options.list:
            list_stages(stages)
            return 0
        if options.resume:
            with tarfile.open(options.resume) as tar:
                tar.extractall(options.state, filter="data")
        prepare(out)
    except (OSError, tarfile.TarError) as error:
        print(f"gpu_check: --resume {options.resume}: expected a check's state.tar.gz: {error}", file=sys.stderr)
        return 2
    except (Refusal, FolderError) as refusal:
        print(f"gpu_check: {refusal}", file=sys.stderr)
        return 2
    facts = [f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, within {options.minutes:g} minutes"]
    report = Report(out, "querying the machine", facts, {}, stages, began=began)
    report.write("none")
    words = {"python": sys.executable, "out": str(out)}
    variables = {"PYTHONUNBUFFERED": "1", "COLUMNS": "140"}
    try:
        machine = report.machine = probe(min(90.0, seconds / 3))
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
    report.earlier = finished
    print(report.heading, *facts, f"Writes to {out}", estimates(stages, finished, seconds), sep="\n  ", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        Check(stages, report, state, finished, Path(scratch), seconds).run(words, variables)
    if few := head_dims():
        facts.append(f"The library has attention's CUDA kernels for head dims {few} only: tests of others fail")
    report.write()
    passed = clock(time.monotonic() - began)
    print(*report.verdict(), f"[{passed} of {clock(seconds)}] {out / 'report.md'}", sep="\n")
    return 0 if all(outcome.good for outcome in report.outcomes) else 1


def list_stages(stages: Sequence[Stage]) -> None:
    for stage in stages:
        print(stage.name, f"({', '.join(stage.parts)})" if stage.parts else "")
        print(*("    " + " ".join(command) for command in stage.commands), sep="\n")


def estimates(stages: Sequence[Stage], finished: Mapping[str, Outcome], total: float) -> str:
    """The stages to run, with their estimates."""
    coming = [stage for stage in stages if stage.name not in finished]
    words = ", ".join(f"{stage.name} {stage.estimate:.0f}" for stage in coming)
    text = f"Estimated seconds: {words}; {sum(stage.estimate for stage in coming):.0f} of {total:.0f}"
    if finished:
        text += f"\n  Finished by an earlier call (--again repeats them): {', '.join(finished)}"
    return text


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("gpu_check: interrupted before the first stage")
