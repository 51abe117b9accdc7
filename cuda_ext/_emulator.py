"""Builds the kernels for the emulator in csrc/simt, with only the C++ compiler, and loads them into this process.

The kernels are compiled again as C++ and linked with the emulator instead of the CUDA runtime. This happens at first
use, in build/simt of the source checkout, and takes one to three minutes on two cores. Afterwards only changed files
are compiled.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from cuda_ext import _build
from cuda_ext import _toolchain as toolchain

CSRC = _build.CSRC
# What all kernels are launched with; these sources have no kernels.
LAUNCHING = (CSRC / "rt" / "launch.cu", CSRC / "rt" / "tensor_map.cu")
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
# Kernels spend their time in the emulator, so -O2 would only make them compile longer.
KERNEL_FLAGS = ("-O1",)
# With these flags, plain loads and stores of kernels call the emulator (csrc/simt/raw_access.cpp).
HOOK_FLAGS = ("-fsanitize=thread", "-fno-threadsafe-statics")


def build_library(
    name: str, kernels: Iterable[Path], others: Iterable[tuple[Path, Sequence[str]]] = (), *, hooks: bool = False
) -> Path:
    """Builds a shared library of CUDA sources and the emulator, and returns its path.

    name: the library's name; use a different one for each combination of the other arguments.
    kernels: sources with device code, which may include headers in their own folder; LAUNCHING is linked with them.
    others: C++ sources, each with its flags in addition to the common ones.
    hooks: whether the emulator sees the plain loads and stores of the kernels; several times slower.
    """
    emulator = sorted((CSRC / "simt").glob("*.cpp"))
    if not emulator:
        raise RuntimeError(f"cuda_ext: emulation compiles the kernels, but {CSRC} is missing; use a source checkout")
    jobs = [(source, (*FLAGS, *KERNEL_FLAGS, *HOOK_FLAGS * hooks, f"-I{source.parent}")) for source in kernels]
    jobs += [(source, FLAGS) for source in (*emulator, *LAUNCHING)]
    jobs += [(source, (*FLAGS, *flags)) for source, flags in others]
    with _build.lock(FOLDER), ThreadPoolExecutor(toolchain.available_cores()) as pool:
        objects = list(pool.map(lambda job: compile_source(*job), jobs))
        return link(FOLDER / f"{name}.so", objects)


def kernel_sources() -> list[Path]:
    """The sources of the package's kernels and of what selects among them."""
    return sorted(path for path in CSRC.rglob("*.cu") if path.parent.name not in ("launchers", "rt"))


def link(target: Path, objects: Sequence[Path]) -> Path:
    """Links `objects` to the shared library `target`."""
    command = [compiler(), "-shared", "-pthread", *map(str, objects), "-o"]
    make(target, command, [str(path.stat().st_mtime_ns) for path in objects])
    return target


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def compile_source(source: Path, flags: Sequence[str]) -> Path:
    """Compiles a source as C++ to an object in FOLDER, unless it and what it includes are as they were."""
    target = FOLDER / f"{source.stem}-{_digest([str(source), *flags])[:8]}.o"
    listing = target.with_suffix(".d")
    command = [compiler(), *flags, f"-I{CSRC}", "-MMD", "-MF", str(listing), "-x", "c++", "-c", str(source), "-o"]
    before = [*command, *_included(listing, source)]
    if not is_made(target, before):
        started = time.time()
        run_compiler(target, command, lambda: [*command, *_included(listing, source, changed_after=started)])
    return target


def _included(listing: Path, source: Path, changed_after: float = math.inf) -> list[str]:
    """The names and contents of `source` and of the headers that it included, which the compiler has listed for make;
    none if there is no list. Of a file that was changed while the compiler may have read it, not the contents."""
    if not listing.exists():
        return []
    names = [re.sub(r"\\(.)", r"\1", name) for name in re.findall(r"(?:[^\s\\]|\\[^\n])+", listing.read_text())[1:]]
    # In another checkout, to which a build is copied, they are where they were in the one that made it.
    own = str(source.relative_to(_build.SOURCE_ROOT)) if source.is_relative_to(_build.SOURCE_ROOT) else ""
    root = names[0].removesuffix(own) if own and names[0].endswith(own) else None
    if root is not None:
        names = [str(_build.SOURCE_ROOT / name.removeprefix(root)) if name.startswith(root) else name for name in names]
    paths = [Path(name) for name in names]
    known = [path.exists() and path.stat().st_mtime < changed_after for path in paths]
    return [f"{path}\0{path.read_text() if is_known else None}" for path, is_known in zip(paths, known)]


def headers(folder: Path) -> list[str]:
    """The names and contents of all headers that sources in `folder` may include."""
    files = {path for root in {CSRC, folder} for path in root.rglob("*") if path.suffix in {".h", ".cuh", ".inc"}}
    return [f"{path}\0{path.read_text()}" for path in sorted(files)]


def make(target: Path, command: Sequence[str], inputs: Sequence[str]) -> None:
    """Runs `command` with the output file as its last argument, unless `target` was made from the same inputs by the
    same command."""
    key = [*command, *inputs]
    if not is_made(target, key):
        run_compiler(target, command, lambda: key)


def _key_file(target: Path) -> Path:
    return target.with_suffix(target.suffix + ".key")


def _digest(key: Sequence[str]) -> str:
    """The same in every checkout and environment, so that what was compiled in one can be carried to another."""
    text = repr(key)
    for folder in (sys.prefix, str(_build.SOURCE_ROOT)):  # in this order: the environment may be in the checkout
        text = text.replace(folder, "")
    return hashlib.sha256(text.encode()).hexdigest()


def is_made(target: Path, key: Sequence[str]) -> bool:
    """Whether `run_compiler` has made `target` with this key."""
    key_file = _key_file(target)
    return target.exists() and key_file.exists() and key_file.read_text() == _digest(key)


def run_compiler(target: Path, command: Sequence[str], key: Callable[[], Sequence[str]]) -> None:
    """Runs `command` with the output file as its last argument, and stores what `key` then returns for `is_made`."""
    key_file = _key_file(target)
    key_file.unlink(missing_ok=True)
    # Written to a new file: a process may have loaded the old library.
    scratch = target.with_suffix(".tmp" + target.suffix)
    try:
        done = subprocess.run([*command, str(scratch)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        raise RuntimeError(
            f"cuda_ext: cannot build {target.name}: expected the compiler {command[0]}, found none; install one, or "
            "name one in the variable CXX"
        ) from None
    if done.returncode != 0:
        raise RuntimeError(f"cuda_ext: cannot build {target.name}: {' '.join(command)} says\n{done.stdout}")
    if done.stdout:
        print(done.stdout, file=sys.stderr)
    scratch.replace(target)
    key_file.write_text(_digest(key()))


@functools.cache
def load(hooks: bool = False) -> ModuleType:
    """The module `_simt` (csrc/emulated), which contains all CUDA kernels of the package."""
    import torch

    headers = (sysconfig.get_path("include"), Path(torch.__file__).parent / "include")
    flags = [f"-isystem{path}" for path in headers]
    if not (FOLDER / f"{_name(hooks)}.so").exists():
        print("cuda_ext: compiling the CUDA kernels for the emulator takes one to three minutes", file=sys.stderr)
    bindings = [(source, flags) for source in sorted((CSRC / "emulated").glob("*.cpp"))]
    path = build_library(_name(hooks), kernel_sources(), bindings, hooks=hooks)
    # Under different names: for a second module of the same name, pybind11 returns the first one.
    spec = importlib.util.spec_from_file_location(f"{_name(hooks)}._simt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _name(hooks: bool) -> str:
    return "_simt_hooks" if hooks else "_simt"
