"""Runs the public ops on the package's kernels as nvcc compiles them."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from cuda_ext import _build, _emulator, testing

from . import build

SIMT = build.HERE.parent / "simt"
# Linked with the kernels: the C interface of the emulator, and the table of launchers for the ops.
OTHERS = [(SIMT / "library.cpp", ()), (build.HERE / "kernels.cpp", _build.NVCC_FLAGS[-1:])]


class Kernels:
    """A library of kernels with the interface that `cuda_ext.testing` expects of an emulator."""

    def __init__(self, path: Path) -> None:
        if str(SIMT) not in sys.path:
            sys.path.insert(0, str(SIMT))
        from harness import Library

        self._library = Library(path)
        self._address = self._library.symbol("ptx_kernels")
        self._address.restype = ctypes.c_void_p

    def kernels(self) -> int:
        return int(self._address())

    def configure(self, *, compute_capability: int, lazy: bool, pct: bool, seed: int, check_races: bool,
                  ordered_sums: bool, threads: int, skip: tuple[str, int, str] | None,
                  processors: int = 4) -> None:  # fmt: skip
        self._library.configure(lazy, pct, seed, check_races, threads, ordered_sums, compute_capability, processors)
        self._library.skip(skip)

    def counters(self) -> dict[str, int]:
        return self._library.counters()

    def reset(self) -> None:
        self._library.reset()

    def sync_sites(self) -> list[tuple[str, int, str]]:
        return [(site.file, site.line, site.instruction) for site in self._library.sync_sites()]

    def reset_sync_sites(self) -> None:
        self._library.reset_sync_sites()


# Sources for these alone are compiled with --full.
MORE = {"f16", "f32", "tf32"}


@functools.cache
def head_dims(everything: bool) -> tuple[int, ...]:
    """The head dims of attention's kernels; unless `everything`, 64 and one that the seed of the run draws."""
    if everything:
        return _build.HEAD_DIMS
    seed = os.environ.get("CUDA_EXT_TEST_SEED", "0")  # tests/conftest.py sets it
    return 64, random.Random(f"{seed} head dim").choice([dim for dim in _build.HEAD_DIMS if dim != 64])


def sources(everything: bool, arch: str = "sm_80") -> list[Path]:
    """The CUDA sources of the package; unless `everything`, without those for `MORE` and for other head dims than
    `head_dims`. Kernels on wgmma are only for sm_90a, those of `SM89_SOURCES` for others than these two.

    The GEMM sources compile longest and come first, so that all cores are busy to the end.
    """
    found = [path for path in _emulator.kernel_sources() if f"{_build.SM89_SOURCES}_" not in path.stem]
    if arch != "sm_90a":
        found = [path for path in found if f"{_build.SM90A_SOURCES}_" not in path.stem]
    found.sort(key=lambda path: ("gemm" not in path.parts, path))
    dims = {0, *head_dims(everything)}
    found = [path for path in found if _build.head_dim_of(path) in dims]
    return [path for path in found if everything or not MORE & set(path.stem.split("_"))]


# By the folder of the kernels: what selects and launches them.
LAUNCHERS = {
    "gemm": ("gemm/gemm_cuda", "gemm/gemm_sm90", "gemm/gemm_passes"),
    "attention": ("attention/attention_cuda", "attention/attention_combine"),
}


@functools.cache
def load(arch: str = "sm_80", everything: bool = False) -> Kernels:
    """The kernels of `sources(everything)` compiled for `arch`.

    Launching a kernel that was left out raises RuntimeError with "is not in this library".
    """
    name = f"kernels-{arch}{'' if everything else f'-bf16-d{head_dims(False)[-1]}'}"
    return Kernels(build.build_library(name, sources(everything, arch), OTHERS, arch=arch, stubs=True))


def emulated(
    kernels: Kernels,
    arch: str = "sm_80",
    mode: str = "eager",
    schedule: str = "fifo",
    seed: int = 0,
    *,
    check_races: bool = False,
    ordered_sums: bool = False,
    threads: int = 0,
) -> AbstractContextManager[testing.Emulation]:
    """`cuda_ext.testing.emulated` with these kernels.

    arch: the emulated device; not older than the architecture of the kernels.
    """
    settings = {
        "compute_capability": int(arch.removeprefix("sm_").rstrip("a")),
        "lazy": mode == "lazy",
        "pct": schedule == "pct",
        "seed": seed,
        "check_races": check_races,
        "ordered_sums": ordered_sums,
        "threads": threads,
        "skip": None,
    }
    return testing.emulation.emulated_by(kernels, settings)
