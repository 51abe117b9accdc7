"""The cost of installation: a clean build, a repeated build, and an import.

The reference is an extension of one file that includes PyTorch's headers and does nothing, built by PyTorch's own
loader: a lower bound for every extension.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.results import OURS
from benchmarks.suites.measure import Case, Failure

SOURCES = ("csrc", "cuda_ext", "setup.py", "pyproject.toml", "README.md", "LICENSE")

IGNORED = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py")

EMPTY_EXTENSION = """
import sys, torch
from torch.utils.cpp_extension import load_inline
load_inline("empty_extension", "int nothing() { return 0; }", functions=["nothing"], build_directory=sys.argv[1])
"""


def cases(device: str) -> Iterator[Case]:
    with_cuda = "1" if device == "cuda" else "0"
    what = "with the kernels of this GPU" if device == "cuda" else "without CUDA kernels"
    yield Case(
        op="import",
        phase="",
        group="build",
        name="in a new process",
        dtype="",
        sides={},
        samples=_imports,
        timer="clock",
    )
    peak: dict[str, float] = {}
    yield Case(
        op="clean build",
        phase="",
        group="build",
        name=f"{what}, {os.cpu_count()} cores",
        dtype="",
        sides={},
        samples=lambda seconds: _builds(with_cuda, seconds, peak),
        timer="clock",
        extra=peak,
    )


def _seconds(command: list[str], folder: Path, environment: dict[str, str], limit: float = 900) -> float:
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"{Path(command[1]).name} took longer than {limit:.0f} s") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Failure(f"{' '.join(command[1:3])} failed: {lines[-1][:200] if lines else 'no message'}")
    return time.perf_counter() - start


def _imports(seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {OURS: [], "torch alone": []}
    start = time.perf_counter()
    while len(times[OURS]) < 3 or (time.perf_counter() - start < seconds and len(times[OURS]) < 15):
        # The library is loaded at the first access to an op.
        for name, program in ((OURS, "import cuda_ext; cuda_ext.linear"), ("torch alone", "import torch")):
            times[name].append(_seconds([sys.executable, "-c", program], ROOT, {"PYTHONPATH": str(ROOT)}))
    return times


def _builds(with_cuda: str, seconds: float, peak: dict[str, float]) -> dict[str, list[float]]:
    """One sample of each, because builds take long and vary little."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        for name in SOURCES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=IGNORED)
            else:
                shutil.copy(source, tree / name)
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        options = {"CUDA_EXT_CUDA": with_cuda}
        limit = max(seconds, 240.0)
        ours = _seconds(build, tree, options, limit)
        peak["largest compiler MiB"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
        again = _seconds(build, tree, options, limit)
        empty = Path(scratch) / "empty"
        empty.mkdir()
        theirs = _seconds([sys.executable, "-c", EMPTY_EXTENSION, str(empty)], tree, {}, limit)
        library = next((tree / "cuda_ext").glob("_C*.so"))
        peak["library MiB"] = round(library.stat().st_size / 2**20, 1)
        return {OURS: [ours], "again, nothing changed": [again], "an empty extension": [theirs]}
