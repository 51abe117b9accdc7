"""The output folder of a GPU check: report.md, and the limits on number and size of files."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import comparison, results
from benchmarks.gpu_check.stages import FAILED, IN_PART, PASSED, SKIPPED, STOPPED, Log, Outcome, Stage

MAX_FILES, MAX_BYTES, MAX_FOLDERS = 8, 16 << 20, 2
TITLE = "# GPU check"
LOG = "logs.txt"
STATE = "state.tar.gz"  # for --resume
REWRITE = 10.0  # seconds between updates of the report while a stage runs


class FolderError(Exception):
    """The folder cannot be used; the message says why and what to do."""


def prepare(out: Path) -> None:
    """Makes `out` an empty, writable folder; an earlier check in it is renamed. Raises FolderError."""
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
    """Packs the contents of `scratch` into `archive`."""
    if any(scratch.iterdir()):
        with tarfile.open(archive, "w:gz") as tar:
            for path in sorted(scratch.iterdir()):
                tar.add(path, arcname=path.name)


def empty(folder: Path) -> None:
    """Removes the contents of a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def merge_logs(out: Path) -> None:
    """Appends the logs that commands wrote to `out` to LOG, and removes them."""
    for path in sorted(out.glob("log*.txt")):
        if path.name != LOG and path.is_file():
            if path.stat().st_size:
                with path.open("rb") as file, Log(out / LOG) as log:
                    log.say(f"\n=== {path.name}")
                    while data := file.read(1 << 20):
                        log.write(data)
            path.unlink()


def whole_lines(file: Path) -> None:
    """Cuts off an incomplete last line, to which the next suite would append, and everything beyond the limit."""
    if file.is_file():
        data = file.read_bytes()[:MAX_BYTES]
        os.truncate(file, data.rfind(b"\n") + 1)


def tidy(out: Path, stages: Sequence[Stage]) -> list[str]:
    """Enforces the limits on `out`, including the report: the least important plots are removed first. Returns the
    removed files, with reasons."""
    ours = ["results.jsonl", LOG, STATE, *(stage.archive for stage in stages if stage.archive)]
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
            reason = "a link, too deep, or with an unusual name"
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
    """report.md, rewritten after every change, so that it is current even if the check is killed."""

    out: Path
    heading: str
    facts: Sequence[str]
    machine: dict[str, Any]
    stages: Sequence[Stage]
    outcomes: list[Outcome] = field(default_factory=list)
    earlier: Mapping[str, Outcome] = field(default_factory=dict)  # by name, from earlier calls
    gone: list[str] = field(default_factory=list)  # files removed from the folder
    began: float = field(default_factory=time.monotonic)
    _running: str = ""
    _written: float = 0.0

    def write(self, running: str = "") -> None:
        """`running`: the stage that is about to start, if any."""
        self._running, self._written = running, time.monotonic()
        lines = [f"{TITLE}: {self.heading}", "", *(f"- {line}" for line in self.verdict())]
        lines += [*(f"- {fact}" for fact in self.facts)]
        measurements, problem = measured(self.out / "results.jsonl")
        lines += [f"- {clock(time.monotonic() - self.began)} {'so far' if running else 'in total'}", ""]
        lines += [*comparison.tables(measurements), "### Stages", "", *self._table()]
        lines += ["", "## Measurements", "", *(problem or summary(measurements))]
        for outcome in self._known().values():
            if outcome.limit:
                lines += ["", f"## {outcome.stage.name}: {outcome.verdict}", "", "```", *excerpt(outcome), "```"]
        if self.gone:
            lines += ["", "## Left out", "", *(f"- {item}" for item in self.gone)]
        lines += ["", "## The machine", "", "```", *(f"{key}: {value}" for key, value in self.machine.items()), "```"]
        scratch = self.out / ".report.md"
        try:
            scratch.write_text("\n".join([*lines, ""]))
            scratch.replace(self.out / "report.md")
        except OSError as error:
            print(f"gpu_check: the report cannot be written: {error}", file=sys.stderr)

    def write_again(self) -> None:
        """Updates the report while a stage runs, every REWRITE seconds."""
        if time.monotonic() - self._written > REWRITE:
            self.write(self._running)

    def verdict(self) -> list[str]:
        """Broken stages with the most informative line of each; then what remains for another call."""
        known = self._known()
        lines = []
        for outcome in known.values():
            if outcome.verdict == FAILED or (outcome.verdict == STOPPED and outcome.stage.name != self._running):
                said = outcome.key_lines or [line for line in outcome.tail if not line.startswith("=== ")][-1:]
                words = ": ".join(filter(None, [outcome.reason, *said[:1]]))
                lines.append(
                    f"**{'BROKEN' if outcome.verdict == FAILED else 'STOPPED'}: {outcome.stage.name}**: {words}"
                )
        left = [name for name, outcome in known.items() if outcome.verdict in (STOPPED, SKIPPED, IN_PART)]
        left += [stage.name for stage in self.stages if stage.name not in known]
        verdicts = [outcome.verdict for outcome in known.values()]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
        lines.append(f"Of {len(self.stages)} stages: {counts or 'none has finished'}")
        if left:
            lines.append(f"Not finished: {', '.join(left)}; the same command continues with them")
        return lines

    def _known(self) -> dict[str, Outcome]:
        """By name, in the order of the stages."""
        known = {**self.earlier, **{outcome.stage.name: outcome for outcome in self.outcomes}}
        return {stage.name: known[stage.name] for stage in self.stages if stage.name in known}

    def _table(self) -> list[str]:
        lines = ["| stage | verdict | estimated, s | limit, s | taken, s | |", "|---|---|---:|---:|---:|---|"]
        known = self._known()
        for stage in self.stages:
            if o := known.get(stage.name):
                times = f"{o.limit:.0f} | {o.seconds:.1f}" if o.limit else "|"
                remark = ", ".join(filter(None, [o.reason, o.when and f"by a call of {o.when}"]))
                lines.append(f"| {stage.name} | {o.verdict} | {stage.estimate:.0f} | {times} | {remark} |")
            else:
                verdict = "running" if stage.name == self._running else "to come"
                lines.append(f"| {stage.name} | {verdict} | {stage.estimate:.0f} | | | |")
        taken = sum(outcome.seconds for outcome in known.values())
        return [*lines, f"| all | | {sum(stage.estimate for stage in self.stages):.0f} | | {taken:.1f} | |"]


def excerpt(outcome: Outcome) -> list[str]:
    if outcome.verdict == PASSED:
        return outcome.key_lines if outcome.stage.key else outcome.tail[-10:]
    key_lines = [line for line in outcome.key_lines if line not in outcome.tail]
    return [*key_lines, *(["..."] if key_lines else []), *outcome.tail]


def clock(seconds: float) -> str:
    """ "1:05" """
    minutes, seconds = divmod(max(0, int(seconds)), 60)
    return f"{minutes}:{seconds:02}"


def measured(file: Path) -> tuple[list[results.Measurement], list[str]]:
    """The measurements of a file that may still grow, or why there are none."""
    if not file.is_file():
        return [], ["No measurements."]
    whole = file.read_bytes().rpartition(b"\n")[0]  # the last line may be incomplete
    try:
        return [results.parse(line, f"{file}:{i}") for i, line in enumerate(whole.decode().splitlines(), 1)], []
    except (results.ResultsError, UnicodeDecodeError) as error:
        return [], [f"The measurements cannot be read: {error}"]


def summary(measurements: Sequence[results.Measurement]) -> list[str]:
    """Geometric means over the cases of each suite, and the failures."""
    lines = ["| suite | dtype | baseline | geometric mean of its time / our time | cases |", "|---|---|---|---:|---:|"]
    for (suite, dtype, side), (ratio, count) in results.geometric_means(measurements).items():
        lines += [f"| {suite} | {dtype} | {side} | {ratio:.2f} | {count} |"]
    failures: dict[str, int] = {}
    for m in measurements:
        if m.failure:
            reason = f"{m.suite}, {m.side}: {m.failure.splitlines()[0][:160]}"
            failures[reason] = failures.get(reason, 0) + 1
    lines += ["", f"{len(measurements)} measurements, {sum(failures.values())} of them without a time:"]
    return lines + [f"- {count} × {reason}" for reason, count in list(failures.items())[:20]]
