"""Checkpoints that survive a power cut, a full disk and a killed process.

Each checkpoint is one file, ``checkpoint-<step>.pt``, readable by `torch.load`. It is written under a temporary name,
synced to the disk and only then renamed, so a file with a checkpoint's name is complete unless something else damaged
it; `read` detects such damage. The previous checkpoint is kept, and nothing here overwrites a file that does not load.
"""

from __future__ import annotations

import itertools
import os
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from report import UserError

KEPT = 2


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(
        (p for p in folder.glob("checkpoint-*.pt") if re.fullmatch(r"checkpoint-\d+\.pt", p.name)),
        key=lambda p: int(p.stem[11:]),
    )


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Writes ``state`` as the newest checkpoint and removes all but the `KEPT` newest."""
    path = folder / f"checkpoint-{step:06d}.pt"
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch.save reports some disk errors as RuntimeError
        partial.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path} ({error}): make room there or choose another --out; older checkpoints are untouched"
        ) from error
    os.replace(partial, path)
    if os.name == "posix":  # the rename is on disk only once the directory is synced
        directory = os.open(folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink()
    return path


class Damaged(Exception):
    """A checkpoint that cannot be resumed from; the message says why."""


def read(path: Path, required: Iterable[str]) -> dict[str, Any]:
    """The state given to `save`, on the CPU. ``required`` are the keys it must contain. Raises Damaged."""
    try:
        # torch.save writes a zip archive with a checksum for each tensor, which torch.load does not verify.
        with zipfile.ZipFile(path) as archive:
            if record := archive.testzip():
                raise Damaged(f"{record} does not have the checksum it was written with")
        state = torch.load(path, map_location="cpu", weights_only=True)
        missing = [key for key in required if key not in state]
    except (Damaged, MemoryError):
        raise
    except Exception as error:  # on damaged bytes zipfile and torch.load can raise anything
        raise Damaged(str(error).strip().split("\n")[0] or type(error).__name__) from error
    if missing:
        raise Damaged(f"no {', '.join(missing)} in it")
    return state


def newest(folder: Path, required: Iterable[str]) -> Path:
    """The newest checkpoint of a folder, verified by `read`. Raises UserError if there is none or it is damaged."""
    found = checkpoints(folder)
    if not found:
        raise UserError(
            f"--resume: expected a checkpoint-*.pt in {folder}, got none: "
            "leave --resume out to start from the beginning"
        )
    path = found[-1]
    try:
        read(path, required)
    except Damaged as reason:
        others = (
            f"resume from {found[-2].name}"
            if len(found) > 1
            else "start from the beginning (no older checkpoint is there)"
        )
        raise UserError(
            f"--resume: {_described(path, reason)}: "
            f"it was left as it is; restore it from a copy, or move it away and {others}"
        ) from reason
    return path


def newest_sound(folder: Path, required: Iterable[str], say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of a folder that `read` accepts, or None. Newer, damaged ones are renamed, so that the
    resumed run does not overwrite them; ``say`` is called with a message for each."""
    for path in reversed(checkpoints(folder)):
        try:
            read(path, required)
            return path
        except Damaged as reason:
            kept = _unused(path.with_suffix(".damaged"))
            described = _described(path, reason)
            try:
                path.rename(kept)
            except OSError as error:
                raise UserError(f"--auto-resume: {described}, and cannot be renamed ({error}): move it away") from error
            say(f"{described}: skipped it, and kept it as {kept.name}")
    return None


def _described(path: Path, reason: Damaged) -> str:
    return f"{path} ({path.lstat().st_size} bytes) is truncated or damaged ({reason})"


def _unused(path: Path) -> Path:
    """``path``, or the first of path-2, path-3, ... that does not exist."""
    candidates = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], candidates) if not p.exists())


def set_aside(folder: Path) -> Path | None:
    """Moves the checkpoints of an earlier run into a new subfolder, so that a new run neither overwrites nor removes
    them. Returns the subfolder, or None if there are no checkpoints."""
    if not (found := checkpoints(folder)):
        return None
    number = 1
    while (earlier := folder / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for path in found:
        path.rename(earlier / path.name)
    return earlier
