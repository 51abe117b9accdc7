"""Builds kernels for the emulator of csrc/simt, with the C++ compiler alone, and loads it into this process.

Kernels are compiled a second time, as C++, and linked with the emulator instead of the CUDA runtime. That happens when
it is first asked for, in build/simt of the source checkout, and takes one to three minutes of two cores. Afterwards
only what has changed is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from cuda_ext import _build
from cuda_ext import _toolchain as toolchain

CSRC = _build.CSRC
FOLDER = _build.SOURCE_ROOT / "build" / "simt"
FLAGS = (
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
)
# Plain loads and stores of kernels then call the emulator (csrc/simt/raw_access.cpp).
HOOK_FLAGS = ("-fsanitize=thread", "-fno-threadsafe-statics")


def build_library(
    name: str, kernels: Iterable[Path], others: Iterable[tuple[Path, Sequence[str]]] = (), *, hooks: bool = False
) -> Path:
    """A shared library of CUDA sources and the emulator.

    name: of the library, one for each combination of the other arguments.
    kernels: sources with device code, which may include headers that lie beside them.
    others: C++ sources that go with them, each with the flags that it needs beside the common ones.
    hooks: lets the emulator see the plain loads and stores of the kernels, which is several times slower.
    """
    emulator = sorted((CSRC / "simt").glob("*.cpp"))
    if not emulator:
        raise RuntimeError(f"cuda_ext: emulation compiles the kernels, but {CSRC} is missing; use a source checkout")
    jobs = [(source, (*FLAGS, *HOOK_FLAGS * hooks, f"-I{source.parent}")) for source in kernels]
    jobs += [(source, FLAGS) for source in emulator]
    jobs += [(source, (*FLAGS, *flags)) for source, flags in others]
    with _build.lock(FOLDER), ThreadPoolExecutor(toolchain.available_cores()) as pool:
        objects = list(pool.map(lambda job: compile_source(*job), jobs))
        return link(FOLDER / f"{name}.so", objects)


def link(target: Path, objects: Sequence[Path]) -> Path:
    """The shared library `target`, made of `objects`."""
    command = [compiler(), "-shared", "-pthread", *map(str, objects), "-o"]
    make(target, command, [str(path.stat().st_mtime_ns) for path in objects])
    return target


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def compile_source(source: Path, flags: Sequence[str]) -> Path:
    """The object of a C++ source, in FOLDER."""
    flags_digest = hashlib.sha256(repr((source, flags)).encode()).hexdigest()[:8]
    target = FOLDER / f"{source.stem}-{flags_digest}.o"
    command = [compiler(), *flags, f"-I{CSRC}", "-x", "c++", "-c", str(source), "-o"]
    make(target, command, [source.read_text(), *headers(source.parent)])
    return target


def headers(folder: Path) -> list[str]:
    """What sources in `folder` may include, with its contents."""
    files = {path for root in {CSRC, folder} for path in root.rglob("*") if path.suffix in {".h", ".cuh", ".inc"}}
    return [f"{path}\0{path.read_text()}" for path in sorted(files)]


def make(target: Path, command: Sequence[str], inputs: Sequence[str]) -> None:
    """Runs `command`, whose last argument is to be the target, unless that was made from the same inputs already."""
    key = hashlib.sha256(repr((command, inputs)).encode()).hexdigest()
    key_file = target.with_suffix(target.suffix + ".key")
    if target.exists() and key_file.exists() and key_file.read_text() == key:
        return
    key_file.unlink(missing_ok=True)
    # A file of its own, so that a process that has loaded the old library keeps it.
    scratch = target.with_suffix(".tmp" + target.suffix)
    done = subprocess.run([*command, str(scratch)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"cuda_ext: cannot build {target.name}: {' '.join(command)} says\n{done.stdout}")
    if done.stdout:
        print(done.stdout, file=sys.stderr)
    scratch.replace(target)
    key_file.write_text(key)


@functools.cache
def load(hooks: bool = False) -> ModuleType:
    """The module `_simt` (csrc/emulated) with all CUDA kernels of the package in it."""
    import torch

    kernels = sorted(path for path in CSRC.rglob("*.cu") if path.parent.name != "launchers")
    headers = (sysconfig.get_path("include"), Path(torch.__file__).parent / "include")
    flags = [f"-isystem{path}" for path in headers]
    if not (FOLDER / f"{_name(hooks)}.so").exists():
        print("cuda_ext: compiling the CUDA kernels for the emulator takes one to three minutes", file=sys.stderr)
    path = build_library(_name(hooks), kernels, [(CSRC / "emulated" / "module.cpp", flags)], hooks=hooks)
    # By a name of its own: of two modules of one name pybind11 hands out the first again, whatever the file.
    spec = importlib.util.spec_from_file_location(f"{_name(hooks)}._simt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _name(hooks: bool) -> str:
    return "_simt_hooks" if hooks else "_simt"
