"""Builds kernel sources for the emulator, with the C++ compiler alone, and runs them from Python.

library = Library.build("conformance", ["conformance_warp.cu"])
out = library.run("shuffle", inputs)
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "simt"
FLAGS = [
    "-std=c++20",
    "-O2",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-missing-field-initializers",
    "-Wno-psabi",
]


class Fault(RuntimeError):
    """The emulator stopped a kernel; the message says why."""


@dataclass(frozen=True)
class SyncSite:
    file: str
    line: int
    instruction: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} {self.instruction}"


def _digest(paths: Sequence[Path], flags: Sequence[str]) -> str:
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _headers() -> list[Path]:
    return sorted(
        path for folder in (CSRC, HERE) for path in folder.rglob("*") if path.suffix in {".h", ".cuh", ".inc"}
    )


def _compile(source: Path, flags: Sequence[str]) -> Path:
    """An object file, built again only if the source, a header or a flag has changed."""
    target = BUILD / f"{source.stem}-{_digest([source, *_headers()], flags)}.o"
    if not target.exists():
        scratch = target.with_suffix(f".{os.getpid()}.tmp")
        command = [os.environ.get("CXX", "c++"), *flags, f"-I{CSRC}", f"-I{HERE}", "-x", "c++", "-c", str(source)]
        subprocess.run([*command, "-o", str(scratch)], check=True)
        scratch.replace(target)
    return target


class Library:
    """Kernels and the emulator in one shared library."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(str(path))
        self._c.conformance_name.restype = ctypes.c_char_p
        self._c.conformance_in_bytes.restype = ctypes.c_size_t
        self._c.conformance_out_bytes.restype = ctypes.c_size_t
        if hasattr(self._c, "simt_configure"):  # not where nvcc has built it
            self._c.simt_counter_name.restype = ctypes.c_char_p
            self._c.simt_sync_sites.restype = ctypes.c_size_t
        self.index = {self._c.conformance_name(i).decode(): i for i in range(self._c.conformance_count())}

    @classmethod
    def build(cls, name: str, sources: Sequence[str | Path], hooks: bool = False) -> Library:
        """Compiles `sources` (beside this file, or absolute) together with the emulator. With `hooks` it also sees
        plain loads and stores of the kernels, and is several times slower."""
        BUILD.mkdir(parents=True, exist_ok=True)
        kernel_flags = [*FLAGS, *(["-fsanitize=thread", "-fno-threadsafe-statics"] if hooks else [])]
        jobs = [(HERE / source, kernel_flags) for source in sources]
        jobs += [(file, FLAGS) for file in (HERE / "library.cpp", *sorted((CSRC / "simt").glob("*.cpp")))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: _compile(*job), jobs))
        target = BUILD / f"{name}-{_digest(objects, [])}.so"
        if not target.exists():
            scratch = target.with_suffix(f".{os.getpid()}.tmp")
            command = [os.environ.get("CXX", "c++"), "-shared", "-pthread", *map(str, objects), "-o", str(scratch)]
            subprocess.run(command, check=True)
            scratch.replace(target)
        return cls(target)

    def in_bytes(self, name: str) -> int:
        return int(self._c.conformance_in_bytes(self.index[name]))

    def run(self, name: str, data: np.ndarray, out_bytes: int | None = None) -> np.ndarray:
        """The output words of case `name` for input words `data`; `out_bytes` for cases of any size. Raises Fault."""
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
        assert source.is_intact() and target.is_intact(), "written past its end"
        assert np.array_equal(source.bytes, data.view(np.uint8)), "the input was written"
        return target.bytes.view(np.uint32)

    @contextmanager
    def options(
        self,
        mode: str = "eager",
        schedule: str = "fifo",
        seed: int = 0,
        check_races: bool = False,
        threads: int = 1,
        skip: SyncSite | None = None,
    ) -> Iterator[None]:
        """How kernels run within the block; see csrc/simt/options.h."""
        configure = self._c.simt_configure
        configure(mode == "lazy", schedule == "pct", ctypes.c_uint64(seed), check_races, threads)
        if skip is not None:
            self._c.simt_skip(skip.file.encode(), skip.line, skip.instruction.encode())
        try:
            yield
        finally:
            configure(0, 0, ctypes.c_uint64(0), 0, 1)
            self._c.simt_skip(None, 0, None)

    def reset(self) -> None:
        """Forgets counters and synchronisation sites."""
        self._c.simt_reset()

    def counters(self) -> dict[str, int]:
        values = (ctypes.c_uint64 * self._c.simt_num_counters())()
        self._c.simt_read_counters(values)
        return {self._c.simt_counter_name(i).decode(): int(value) for i, value in enumerate(values)}

    def sync_sites(self) -> list[SyncSite]:
        """Every synchronisation call that was reached since the last reset."""
        text = ctypes.create_string_buffer(1 << 20)
        self._c.simt_sync_sites(text, len(text))
        rows = [line.split("\t") for line in text.value.decode().splitlines()]
        return [SyncSite(file, int(line), instruction) for file, line, instruction in rows]


class Buffer:
    """Memory for a kernel, between pages that nobody can touch; aligned as on a device, where allocations begin at
    multiples of 256 bytes. What this leaves between its end and the page is watched."""

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
