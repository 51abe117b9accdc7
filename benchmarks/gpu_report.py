"""The folder that a GPU check leaves: report.md first, and never more than it may hold."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.stages import PASSED, Log, Outcome, Stage

MAX_FILES, MAX_BYTES, MAX_FOLDERS = 8, 16 << 20, 2
TITLE = "# GPU check"
LOG = "logs.txt"


class FolderError(Exception):
    """The folder cannot be used; the message says why and what to do."""


def prepare(out: Path) -> None:
    """Makes `out` an empty folder that can be written; an earlier check in it is moved aside. Raises FolderError."""
    try:
        if (out / "report.md").is_file() and (out / "report.md").read_text().startswith(TITLE):
            written = datetime.fromtimestamp((out / "report.md").stat().st_mtime)
            out.rename(out.with_name(f"{out.name}-{written:%Y%m%d-%H%M%S}"))
        out.mkdir(parents=True, exist_ok=True)
        if content := sorted(path.name for path in out.iterdir()):
            raise FolderError(
                f"--out {out}: expected an empty folder or an earlier check, found {', '.join(content[:3])}"
            )
        (out / LOG).touch()
    except OSError as error:
        raise FolderError(f"--out {out}: expected a folder that can be written: {error}") from error


def pack(scratch: Path, archive: Path) -> None:
    """Moves what is in `scratch` into `archive`."""
    if any(scratch.iterdir()):
        with tarfile.open(archive, "w:gz") as tar:
            for path in sorted(scratch.iterdir()):
                tar.add(path, arcname=path.name)
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def merge_logs(out: Path) -> None:
    """Moves the logs that commands keep in `out` to the end of the one that there shall be."""
    for path in sorted(out.glob("log*.txt")):
        if path.name != LOG and path.is_file():
            if path.stat().st_size:
                with path.open("rb") as file, Log(out / LOG) as log:
                    log.say(f"\n=== {path.name}")
                    while data := file.read(1 << 20):
                        log.write(data)
            path.unlink()


def whole_lines(file: Path) -> None:
    """Cuts off what a stopped suite has left of a line, to which the next would append, and what is over the limit."""
    if file.is_file():
        data = file.read_bytes()[:MAX_BYTES]
        os.truncate(file, data.rfind(b"\n") + 1)


def tidy(out: Path, stages: Sequence[Stage]) -> list[str]:
    """Brings `out` within its limits, the report counted in: the last plots go first. Returns what went, and why."""
    ours = ["results.jsonl", LOG, *(stage.archive for stage in stages if stage.archive)]
    subjects = ["summary", *(name for stage in stages for name in (stage.name, *stage.parts))]

    def importance(path: Path) -> tuple[int, int, str]:
        name = str(path.relative_to(out))
        if name in ours:
            return (0, ours.index(name), name)
        kind = {".html": 1, ".png": 2, ".svg": 3}.get(path.suffix, 4)
        return (kind, next((i for i, subject in enumerate(subjects) if subject in name), len(subjects)), name)

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


@dataclass
class Report:
    """report.md, written anew whenever something has changed, for whoever kills the check."""

    out: Path
    heading: str
    facts: Sequence[str]
    machine: dict[str, Any]
    stages: Sequence[Stage]
    outcomes: list[Outcome] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # what was left out of the folder
    began: float = field(default_factory=time.monotonic)

    def write(self, running: str = "") -> None:
        lines = [f"{TITLE}: {self.heading}", "", *(f"- {fact}" for fact in self.facts)]
        lines += [f"- {clock(time.monotonic() - self.began)} so far" if running else f"- {self._verdict()}", ""]
        lines += [*self._table(running), "", *summary(self.out / "results.jsonl")]
        for outcome in self.outcomes:
            if outcome.limit:
                lines += ["", f"## {outcome.stage.name}: {outcome.verdict}", "", "```", *what_matters(outcome), "```"]
        if self.gone:
            lines += ["", "## Left out", "", *(f"- {item}" for item in self.gone)]
        lines += ["", "## The machine", "", "```", *(f"{key}: {value}" for key, value in self.machine.items()), "```"]
        scratch = self.out / ".report.md"
        scratch.write_text("\n".join([*lines, ""]))
        scratch.replace(self.out / "report.md")

    def _verdict(self) -> str:
        verdicts = [outcome.verdict for outcome in self.outcomes]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
        return f"Took {clock(time.monotonic() - self.began)}: {counts}"

    def _table(self, running: str) -> list[str]:
        lines = ["| stage | verdict | seconds | limit | |", "|---|---|---:|---:|---|"]
        by_name = {outcome.stage.name: outcome for outcome in self.outcomes}
        for name in (stage.name for stage in self.stages):
            if o := by_name.get(name):
                times = f"{o.seconds:.1f} | {o.limit:.0f}" if o.limit else "|"
                lines.append(f"| {name} | {o.verdict} | {times} | {o.reason} |")
            else:
                lines.append(f"| {name} | {'running' if name == running else 'to come'} | | | |")
        return lines


def what_matters(outcome: Outcome) -> list[str]:
    if outcome.verdict == PASSED:
        return outcome.key_lines if outcome.stage.key else outcome.tail[-10:]
    key_lines = [line for line in outcome.key_lines if line not in outcome.tail]
    return [*key_lines, *(["..."] if key_lines else []), *outcome.tail]


def clock(seconds: float) -> str:
    """ "1:05" """
    minutes, seconds = divmod(max(0, int(seconds)), 60)
    return f"{minutes}:{seconds:02}"


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
