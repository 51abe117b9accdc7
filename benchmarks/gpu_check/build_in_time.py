"""Builds the library for a GPU within a time limit, if necessary with attention's kernels for fewer head dims.

    TORCH_CUDA_ARCH_LIST=9.0a python -m benchmarks.gpu_check.build_in_time --minutes 3

Nothing is compiled if there is a library for this GPU and these sources, in its place or carried in gpu-library.tar.gz.
Files that were compiled in time are kept: the next call continues with the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import carried
from cuda_ext import _build

TIMES = _build.SOURCE_ROOT / "build" / "source-times.json"
FEWER = "64,128"
SHARE = 0.65  # of the time, for a build with all head dims


def keep_times(folder: Path, record: Path) -> None:
    """Restores the modification times of sources that have not changed since the last call: otherwise ninja would
    recompile a checkout that was copied again."""
    try:
        known: dict[str, list[Any]] = json.loads(record.read_text())
    except (OSError, ValueError):
        known = {}
    now: dict[str, list[Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, content = str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()
        now[name] = [content, path.stat().st_mtime_ns]
        if known.get(name, [""])[0] == content:
            now[name] = known[name]
            os.utime(path, ns=(known[name][1], known[name][1]))
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(now))


def build(command: Sequence[str], seconds: float, head_dims: str) -> int | None:
    """The exit status, or None if the time did not suffice."""
    environment = {**os.environ, "CUDA_EXT_HEAD_DIMS": head_dims}
    # A shell starts background jobs with SIGINT ignored, and children inherit that; but the build must react to SIGINT.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, cwd=_build.SOURCE_ROOT, env=environment, start_new_session=True, preexec_fn=listen
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        # On SIGINT, ninja stops the compilers and removes incomplete files.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(arguments: Sequence[str] | None = None, command: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="time limit")
    options = parser.parse_args(arguments)
    if command is None:
        if not (problem := carried.unpack(os.environ["TORCH_CUDA_ARCH_LIST"])):
            print(f"cuda_ext: the library of sources {_build.sources_digest()} is used; nothing is compiled")
            return 0
        print(f"cuda_ext: compiling, because {problem}", flush=True)
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        with suppress(OSError):
            keep_times(_build.CSRC, TIMES)
    end = time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if chosen := os.environ.get("CUDA_EXT_HEAD_DIMS", ""):
        status = build(command, 60 * options.minutes, chosen)
    else:
        status = build(command, SHARE * 60 * options.minutes, "")
        if status is None:
            print(
                f"cuda_ext: all head dims take longer than {SHARE * 60 * options.minutes:.0f} s; building {FEWER}, the "
                "next call builds the others",
                flush=True,
            )
            status = build(command, end - time.monotonic(), FEWER)
    if status is None:
        print("cuda_ext: the time did not suffice; the next call continues with the files left to compile", flush=True)
        return 1
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("cuda_ext: the build was stopped; the next call continues with the files left to compile")
