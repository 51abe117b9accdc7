"""Builds kernel sources for the emulator with the C++ compiler, and runs them from Python.

library = Library.build("conformance", ["conformance_warp.cu"])
out = library.run("shuffle", inputs)
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from ptx.build import find_toolkit  # noqa: E402

from cuda_ext import _emulator  # noqa: E402

BUILD = _emulator.FOLDER
# How kernels are built for the emulator: as C++, or by nvcc for an architecture (tests/ptx).
BUILDS = ("simt", "ptx_sm_75", "ptx_sm_80", "ptx_sm_90a")


class Fault(RuntimeError):
    """The emulator stopped a kernel; the message gives the reason."""


@dataclass(frozen=True)
class SyncSite:
    file: str
    line: int
    instruction: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} {self.instruction}"


class Library:
    """Kernels and the emulator in one shared library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.compute_capability = 80  # of the emulated device, where no option says otherwise
        self._c = ctypes.CDLL(str(path))
        self._c.conformance_name.restype = ctypes.c_char_p
        self._c.conformance_in_bytes.restype = ctypes.c_size_t
        self._c.conformance_out_bytes.restype = ctypes.c_size_t
        if hasattr(self._c, "simt_configure"):  # missing in a library for GPUs
            self._c.simt_counter_name.restype = ctypes.c_char_p
            self._c.simt_sync_sites.restype = ctypes.c_size_t
        self.index = {self._c.conformance_name(i).decode(): i for i in range(self._c.conformance_count())}

    @classmethod
    def build(cls, name: str, sources: Sequence[str | Path], hooks: bool = False) -> Library:
        """Compiles `sources` (relative to this folder, or absolute) together with the emulator. With `hooks` it also
        sees plain loads and stores of the kernels, and is several times slower."""
        files = [HERE / source for source in sources]
        return cls(_emulator.build_library(name, files, [(HERE / "library.cpp", ())], hooks=hooks))

    @classmethod
    def build_for(cls, kind: str, name: str, sources: Sequence[str | Path]) -> Library:
        """Builds `sources` as one kind of BUILDS. Skips the test if that needs nvcc and there is none."""
        if kind == "simt":
            return cls.build(name, sources)
        import pytest
        from ptx import build

        if find_toolkit() is None:
            pytest.skip(build.NO_NVCC)
        arch = kind.removeprefix("ptx_")
        files = [HERE / source for source in sources]
        library = cls(build.build_library(f"{name}-{arch}", files, [(HERE / "library.cpp", ())], arch=arch))
        if arch == "sm_75":  # the default device also has instructions of sm_80
            library.compute_capability = 75
            library.configure()
        return library

    def in_bytes(self, name: str) -> int:
        return int(self._c.conformance_in_bytes(self.index[name]))

    def run(self, name: str, data: np.ndarray, out_bytes: int | None = None) -> np.ndarray:
        """Runs case `name` on the words `data`; returns its output words. Cases of variable size need `out_bytes`.
        Raises Fault."""
        index = self.index[name]
        data = np.ascontiguousarray(data).view(np.uint32)
        assert data.nbytes == (self.in_bytes(name) or data.nbytes)
        if out_bytes is None:
            out_bytes = int(self._c.conformance_out_bytes(index))
        source, target = Buffer(data.nbytes), Buffer(out_bytes)
        source.bytes[:] = data.view(np.uint8)
        error = ctypes.create_string_buffer(8192)
        if self._c.conformance_run(index, source.pointer, target.pointer, error, 8192):
            raise Fault(error.value.decode())
        assert source.is_intact() and target.is_intact(), "the kernel wrote past the end of a buffer"
        assert np.array_equal(source.bytes, data.view(np.uint8)), "the kernel wrote to its input"
        return target.bytes.view(np.uint32)

    def call(self, function: str, *arguments: object) -> None:
        """Calls a function of the sources that returns 0 on success and otherwise 1. Its last two arguments are a
        buffer for the error message and the size of that buffer. Raises Fault."""
        error = ctypes.create_string_buffer(8192)
        if getattr(self._c, function)(*arguments, error, ctypes.c_size_t(len(error))):
            raise Fault(error.value.decode())

    def symbol(self, name: str) -> Any:
        """A function of the sources as a ctypes object."""
        return getattr(self._c, name)

    @contextmanager
    def options(
        self,
        mode: str = "eager",
        schedule: str = "fifo",
        seed: int = 0,
        check_races: bool = False,
        threads: int = 1,
        skip: SyncSite | None = None,
        compute_capability: int | None = None,
        processors: int = 4,
    ) -> Iterator[None]:
        """Sets the emulator's options within the block; see csrc/simt/options.h."""
        device = {"compute_capability": compute_capability, "processors": processors}
        self.configure(mode == "lazy", schedule == "pct", seed, check_races, threads, **device)
        self.skip(None if skip is None else (skip.file, skip.line, skip.instruction))
        try:
            yield
        finally:
            self.configure()
            self.skip(None)

    def configure(
        self,
        lazy: bool = False,
        pct: bool = False,
        seed: int = 0,
        check_races: bool = False,
        threads: int = 1,
        ordered_sums: bool = False,
        compute_capability: int | None = None,
        processors: int = 4,
    ) -> None:
        """Sets the emulator's options."""
        if compute_capability is None:
            compute_capability = self.compute_capability
        options = (check_races, threads, ordered_sums, compute_capability, processors)
        self._c.simt_configure(lazy, pct, ctypes.c_uint64(seed), *options)

    @contextmanager
    def device(self, compute_capability: int) -> Iterator[None]:
        """Emulates a device of this compute capability within the block."""
        before, self.compute_capability = self.compute_capability, compute_capability
        self.configure()
        try:
            yield
        finally:
            self.compute_capability = before
            self.configure()

    @contextmanager
    def float8_sums(self, bits: int) -> Iterator[None]:
        """Adds products of 8-bit floats with so many significant bits within the block; see csrc/simt/float8_sum.h."""
        self._c.simt_set_float8_sum_bits(bits)
        try:
            yield
        finally:
            self._c.simt_set_float8_sum_bits(0)

    def skip(self, site: tuple[str, int, str] | None) -> None:
        """Skips the synchronisation call at this file, line and instruction from now on; None skips nothing."""
        file, line, instruction = site or (None, 0, None)
        self._c.simt_skip(file and file.encode(), line, instruction and instruction.encode())

    def reset(self) -> None:
        """Resets counters and synchronisation sites."""
        self._c.simt_reset_counters()
        self.reset_sync_sites()

    def reset_sync_sites(self) -> None:
        self._c.simt_reset_sync_sites()

    def counters(self) -> dict[str, int]:
        values = (ctypes.c_uint64 * self._c.simt_num_counters())()
        self._c.simt_read_counters(values)
        return {self._c.simt_counter_name(i).decode(): int(value) for i, value in enumerate(values)}

    def sync_sites(self) -> list[SyncSite]:
        """All synchronisation calls executed since the last reset."""
        text = ctypes.create_string_buffer(1 << 20)
        self._c.simt_sync_sites(text, len(text))
        rows = [line.split("\t") for line in text.value.decode().splitlines()]
        return [SyncSite(file, int(line), instruction) for file, line, instruction in rows]


def plain_and_hooked(name: str, sources: Sequence[str | Path]) -> tuple[Any, Any]:
    """Fixtures `library` and `hooked`: `sources` without and with hooks for plain loads and stores, which the race
    checker needs."""
    import pytest

    @pytest.fixture(scope="session", name="library")
    def plain_library() -> Library:
        return Library.build(name, sources)

    @pytest.fixture(scope="session", name="hooked")
    def hooked_library() -> Library:
        return Library.build(f"{name}-hooks", sources, hooks=True)

    return plain_library, hooked_library


class Buffer:
    """Memory for a kernel between two guard pages, aligned to 256 bytes like allocations on a device. The bytes between
    its end and the guard page are a canary."""

    _CANARY = 0xA5

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        length = (size + 256 + page - 1) // page * page + 2 * page
        whole = np.frombuffer(mmap.mmap(-1, length), np.uint8)
        end = length - page
        for begin in (0, end):
            address = ctypes.c_void_p(whole.ctypes.data + begin)
            assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(page), 0) == 0
        first = (end - size) // 256 * 256
        self.bytes = whole[first : first + size]
        self.pointer = ctypes.c_void_p(self.bytes.ctypes.data)
        self._slack = whole[first + size : end]
        self.bytes[:] = 0xFF
        self._slack[:] = self._CANARY

    def is_intact(self) -> bool:
        return bool((self._slack == self._CANARY).all())
