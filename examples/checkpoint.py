"""Checkpoints that survive a power cut, a full disk and a killed process.

Each is a file of its own, ``checkpoint-<step>.pt``, readable by `torch.load`. It is written under another name,
synced to the disk, and only then renamed, so that a file with a checkpoint's name is complete or damaged by something
else. The one before it is kept, and nothing here ever writes over a file that does not load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
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
    except (OSError, RuntimeError) as error:  # torch.save turns some failures of the disk into RuntimeError
        partial.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path} ({error}): make room there or choose another --out; older checkpoints are untouched"
        ) from error
    os.replace(partial, path)
    if os.name == "posix":  # the rename itself reaches the disk with its directory
        directory = os.open(folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink()
    return path


def load(folder: Path, required: Iterable[str]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint of a folder: its path and what `save` got, on the CPU. ``required`` are the keys it has
    to have."""
    found = checkpoints(folder)
    if not found:
        raise UserError(
            f"--resume: expected a checkpoint-*.pt in {folder}, got none: "
            "leave --resume out to start from the beginning"
        )
    path = found[-1]
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        missing = [key for key in required if key not in state]
    except Exception as error:  # torch.load raises whatever the damaged bytes lead it into
        reason = str(error).strip().split("\n")[0] or type(error).__name__
    else:
        if not missing:
            return path, state
        reason = f"no {', '.join(missing)} in it"
    others = (
        f"resume from {found[-2].name}" if len(found) > 1 else "start from the beginning (no older checkpoint is there)"
    )
    raise UserError(
        f"--resume: {path} ({path.stat().st_size} bytes) is truncated or damaged ({reason}): "
        f"it was left as it is; restore it from a copy, or move it away and {others}"
    )


def set_aside(folder: Path) -> Path | None:
    """Moves the checkpoints of an earlier run into a new folder beside them, so that a new run neither overwrites nor
    removes them."""
    if not (found := checkpoints(folder)):
        return None
    number = 1
    while (earlier := folder / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for path in found:
        path.rename(earlier / path.name)
    return earlier
