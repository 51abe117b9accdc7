"""What a GPU check stores in the checkout, so that a second call continues where the first one stopped.

There is a folder per machine, with a subfolder per stage: its outcome, log, measurements and files, and what the stage
itself needs to continue. An outcome is valid as long as the stage, the sources it depends on, the GPU, torch and the
head dims in the library are the same. A stage that was stopped, or killed in an earlier call, runs again in its old
folder. If nothing can be written, every call starts from the beginning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import LOG, whole_lines
from benchmarks.gpu_check.stages import FAILED, PASSED, STOPPED, UNAVAILABLE, Outcome, Stage
from benchmarks.results import OUT_OF_TIME

FINISHED = (PASSED, FAILED, UNAVAILABLE)
ALWAYS_READ = ("csrc", "cuda_ext", "setup.py")
SUFFIXES = {".py", ".cpp", ".cu", ".cuh", ".h", ".inc", ".json"}
OUTCOME, STAGE_LOG, RESULTS = "outcome.json", "log.txt", "results.jsonl"


def digest(root: Path, names: Sequence[str]) -> str:
    """A digest of the source files at these paths, files or folders, below `root`."""
    found = hashlib.sha256()
    files = {path for name in names for path in ((root / name).rglob("*") if (root / name).is_dir() else [root / name])}
    for path in sorted(path for path in files if path.suffix in SUFFIXES and path.name != "_build_info.py"):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


class State:
    """
    folder: the folder of this machine.
    root: the checkout.
    facts: what else an outcome depends on: the GPU, torch, ...
    out: the output folder; each stage appends a section to the files of logs and measurements.
    """

    def __init__(self, folder: Path, root: Path, facts: Sequence[str], out: Path) -> None:
        self.folder, self._root, self.facts, self._out = folder, root, list(facts), out
        self._running: Stage | None = None
        self._begins: dict[str, int] = {}  # file of `out` -> start of the running stage's section
        self._measured = b""  # by the running stage in earlier calls

    def of(self, stage: Stage) -> Path:
        """The folder of a stage."""
        return self.folder / stage.name

    def _key(self, stage: Stage) -> str:
        sources = digest(self._root, (*ALWAYS_READ, *stage.sources))
        about = repr([sources, stage.commands, sorted(stage.environment.items()), self.facts])
        return hashlib.sha256(about.encode()).hexdigest()

    def _read(self, stage: Stage) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = json.loads((self.of(stage) / OUTCOME).read_text())
            return entry if entry["key"] == self._key(stage) else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def earlier(self, stage: Stage) -> Outcome | None:
        """The outcome of a stage that need not run again, else None."""
        entry = self._read(stage)
        if stage.repeats or entry.get("verdict") not in FINISHED or not set(stage.parts) <= set(entry["parts"]):
            return None
        names = {field.name for field in dataclasses.fields(Outcome)} - {"stage"}
        return Outcome(stage, **{name: value for name, value in entry.items() if name in names})

    def forget(self, stage: Stage) -> None:
        shutil.rmtree(self.of(stage), ignore_errors=True)

    def restore(self, stage: Stage) -> None:
        """Copies the results of earlier calls of a stage to `out`; removes them if they are no longer valid."""
        if not self._read(stage):
            self.forget(stage)
        if stage.repeats:
            return
        folder = self.of(stage)
        with suppress(OSError):
            if (folder / STAGE_LOG).exists():
                with (self._out / LOG).open("ab") as log:
                    log.write(b"\n=== From an earlier call:\n" + (folder / STAGE_LOG).read_bytes())
            if (folder / RESULTS).exists():
                whole_lines(folder / RESULTS)
                lines = (folder / RESULTS).read_text().splitlines()
                with (self._out / RESULTS).open("a") as results:
                    results.writelines(f"{line}\n" for line in lines if not _is_out_of_time(line))
            if stage.archive and (folder / stage.archive).exists():
                shutil.copy(folder / stage.archive, self._out / stage.archive)

    def begin(self, stage: Stage) -> None:
        """Records that a stage starts, so that a later call knows it even if this process is killed."""
        whole_lines(self._out / RESULTS)
        self._begins = {name: size_of(self._out / name) for name in (LOG, RESULTS)}
        if not self._read(stage):
            self.forget(stage)
        self._measured = b""
        with suppress(OSError):
            self._measured = (self.of(stage) / RESULTS).read_bytes()
        self._running = stage
        self._write(Outcome(stage, STOPPED, "the check was killed while it ran"))

    def save(self) -> None:
        """Stores what the running stage has printed and measured so far."""
        if self._running is None:
            return
        folder = self.of(self._running)
        with suppress(OSError):
            (folder / STAGE_LOG).write_bytes(self._section(LOG))
            if measured := self._measured + self._section(RESULTS):
                (folder / RESULTS).write_bytes(measured)

    def end(self, outcome: Outcome) -> None:
        """Stores the outcome and the files of a stage."""
        self.save()
        archive = outcome.stage.archive
        with suppress(OSError):
            if archive and (self._out / archive).exists():
                shutil.copy(self._out / archive, self.of(outcome.stage) / archive)
        self._write(outcome)
        self._running = None

    def _section(self, name: str) -> bytes:
        """What the running stage has appended to a file of `out`."""
        if not (self._out / name).exists():
            return b""
        with (self._out / name).open("rb") as file:
            file.seek(self._begins[name])
            return file.read()

    def _write(self, outcome: Outcome) -> None:
        entry = {f.name: getattr(outcome, f.name) for f in dataclasses.fields(outcome) if f.name != "stage"}
        now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
        entry |= {"when": now, "parts": outcome.stage.parts, "key": self._key(outcome.stage)}
        with suppress(OSError):
            folder = self.of(outcome.stage)
            folder.mkdir(parents=True, exist_ok=True)
            scratch = folder / f".{OUTCOME}"
            scratch.write_text(json.dumps(entry, indent=1))
            scratch.replace(folder / OUTCOME)


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _is_out_of_time(line: str) -> bool:
    try:
        return str(json.loads(line)["failure"]).startswith(OUT_OF_TIME)
    except (ValueError, KeyError, TypeError):
        return False
