"""What a GPU check keeps in the checkout, so that a second call goes on where the first one stopped.

A folder for each machine, and in it one for each stage: its outcome, its log, the measurements and files it gave, and
what the stage itself keeps there to go on. An outcome counts as long as the stage, the sources that it depends on, the
GPU, torch and the head dims in the library are the same; a stage that was cut, or that an earlier call was killed in,
finds its folder again and is run. Where nothing can be written, every call begins afresh.
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
    """Of the source files in these folders of `root`, which may be files too."""
    found = hashlib.sha256()
    files = {path for name in names for path in ((root / name).rglob("*") if (root / name).is_dir() else [root / name])}
    for path in sorted(path for path in files if path.suffix in SUFFIXES and path.name != "_build_info.py"):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


class State:
    """
    folder: of this machine.
    root: of the checkout.
    facts: what else an outcome depends on: the GPU, torch, ...
    out: the folder that a check leaves; in its logs and measurements each stage has a section of its own.
    """

    def __init__(self, folder: Path, root: Path, facts: Sequence[str], out: Path) -> None:
        self.folder, self._root, self.facts, self._out = folder, root, list(facts), out
        self._running: Stage | None = None
        self._begins: dict[str, int] = {}  # where the section of the running stage begins, in files of `out`
        self._measured = b""  # what earlier calls have, of the running stage

    def of(self, stage: Stage) -> Path:
        """The folder of a stage, empty if what is in it was made from something else."""
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
        """The outcome of a stage that need not be run again."""
        entry = self._read(stage)
        if stage.repeats or entry.get("verdict") not in FINISHED or not set(stage.parts) <= set(entry["parts"]):
            return None
        names = {field.name for field in dataclasses.fields(Outcome)} - {"stage"}
        return Outcome(stage, **{name: value for name, value in entry.items() if name in names})

    def forget(self, stage: Stage) -> None:
        shutil.rmtree(self.of(stage), ignore_errors=True)

    def restore(self, stage: Stage) -> None:
        """Brings what earlier calls have learned from a stage into `out`."""
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
        """Before a stage is run: whatever ends this process, a later call knows that it was begun."""
        whole_lines(self._out / RESULTS)
        self._begins = {name: size_of(self._out / name) for name in (LOG, RESULTS)}
        if not self._read(stage):
            self.forget(stage)
        self._measured = b""
        with suppress(OSError):
            self._measured = (self.of(stage) / RESULTS).read_bytes()
        self._running = stage
        self._write(Outcome(stage, STOPPED, "the check was ended from outside while it ran"))

    def save(self) -> None:
        """Keeps what the running stage has printed and measured by now."""
        if self._running is None:
            return
        folder = self.of(self._running)
        with suppress(OSError):
            (folder / STAGE_LOG).write_bytes(self._section(LOG))
            if measured := self._measured + self._section(RESULTS):
                (folder / RESULTS).write_bytes(measured)

    def end(self, outcome: Outcome) -> None:
        """After a stage."""
        self.save()
        archive = outcome.stage.archive
        with suppress(OSError):
            if archive and (self._out / archive).exists():
                shutil.copy(self._out / archive, self.of(outcome.stage) / archive)
        self._write(outcome)
        self._running = None

    def _section(self, name: str) -> bytes:
        """What the running stage has added to a file of `out`."""
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
