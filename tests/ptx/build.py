"""Builds shared libraries that run nvcc's PTX on the emulator, in build/ptx of the source checkout.

nvcc compiles each source once: to PTX, which is translated to C++ and compiled, and to a host object, which is linked
with runtime.cpp instead of the CUDA runtime. The results of each step are cached: nvcc's until an included file
changes, the translation until the PTX changes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda_ext import _build, _emulator
from cuda_ext import _toolchain as toolchain

from .emit import emit
from .parse import parse

HERE = Path(__file__).resolve().parent
NO_NVCC = "needs nvcc, which compiles the kernels to PTX; python -m cuda_ext.info says where it is looked for"
FOLDER = _build.SOURCE_ROOT / "build" / "ptx"
# The modules that translate a PTX file to C++.
TRANSLATOR = ("parse", "operands", "arithmetic", "effects", "translate", "emit")
# PTX rounds every operation, wraps integers, and its registers have no types.
CPP_FLAGS = (
    "-std=c++20",
    "-O0",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fwrapv",
)


@functools.cache
def find_toolkit() -> toolchain.Toolkit | None:
    """The CUDA toolkit that the build of the package would use, or None."""
    import torch

    toolkits = toolchain.find_toolkits(torch.version.cuda) if torch.version.cuda is not None else []
    return next((toolkit for toolkit in toolkits if toolkit.usable), None)


def build_library(
    name: str,
    kernels: Iterable[Path],
    others: Iterable[tuple[Path, Sequence[str]]] = (),
    *,
    arch: str = "sm_80",
    stubs: bool = False,
    csrc: Path = _emulator.CSRC,
    folder: Path = FOLDER,
) -> Path:
    """Builds a shared library of nvcc's code for `kernels` and the emulator.

    name: file name of the library; must be different for each combination of the other arguments.
    others: further C++ sources, each with the flags it needs in addition to the emulator's.
    arch: the architecture nvcc compiles for.
    stubs: define functions of this project that no source defines; calling one raises an error.
    csrc: include folder of the kernels.
    folder: of the library and all intermediate files.

    Raises RuntimeError without nvcc, parse.Unsupported for PTX that has no translation.
    """
    toolkit = find_toolkit()
    if toolkit is None:
        raise RuntimeError(f"cuda_ext: {NO_NVCC}")
    folder.mkdir(parents=True, exist_ok=True)
    cuda_headers = [f"-isystem{toolkit.home / 'include'}"]
    sources = [(HERE / "runtime.cpp", cuda_headers), *others]
    sources += [(source, ()) for source in sorted((_emulator.CSRC / "simt").glob("*.cpp"))]

    def kernel_objects(source: Path) -> list[Path]:
        host_object, ptx = compile_with_nvcc(toolkit, source, arch, csrc, folder)
        return [host_object, compile_translation(ptx)]

    with _build.lock(folder), ThreadPoolExecutor(toolchain.available_cores()) as pool:
        with _build.lock(_emulator.FOLDER):
            own = list(pool.map(lambda job: _emulator.compile_source(job[0], (*_emulator.FLAGS, *job[1])), sources))
        launching = [csrc / path.relative_to(_emulator.CSRC) for path in _emulator.LAUNCHING]
        objects = [*own, *(each for group in pool.map(kernel_objects, [*kernels, *launching]) for each in group)]
        if stubs:
            objects.append(compile_stubs(folder / f"{name}-stubs.cpp", objects))
        return _emulator.link(folder / f"{name}.so", objects)


def compile_with_nvcc(
    toolkit: toolchain.Toolkit, source: Path, arch: str, csrc: Path = _emulator.CSRC, folder: Path = FOLDER
) -> tuple[Path, Path]:
    """Compiles `source`; returns its host object and its PTX."""
    target = folder / f"{source.stem}-{arch}.host.o"
    ptx = folder / f"{source.stem}-{arch}.ptx"
    code = arch.removeprefix("sm_")
    command = [
        *(str(toolkit.home / "bin" / "nvcc"), *_build.NVCC_FLAGS, "-c", str(source)),  # the flags of CMake
        # PTX only; ptxas does not run.
        f"-gencode=arch=compute_{code},code=compute_{code}",
        *(f"-I{csrc}", f"-I{source.parent}", "-Xcompiler=-fPIC,-fvisibility=hidden,-O0"),
    ]
    record = target.with_suffix(".json")
    known = json.loads(record.read_text()) if record.exists() and target.exists() and ptx.exists() else {}
    if known.get("command") == [toolkit.version, *command]:
        files: dict[str, str] = known["files"]
        if all(Path(path).exists() and _digest(path) == digest for path, digest in files.items()):
            return target, ptx
    record.unlink(missing_ok=True)
    start = time.time()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        includes = Path(scratch, "includes.d")
        extra = ["--keep", "--keep-dir", scratch, "-MD", "-MF", str(includes), "-o", str(Path(scratch, target.name))]
        done = subprocess.run([*command, *extra], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"cuda_ext: cannot build {target.name}: {' '.join(command)} says\n{done.stdout}")
        shutil.move(Path(scratch, target.name), target)
        shutil.move(Path(scratch, f"{source.stem}.ptx"), ptx)
        read = includes.read_text().replace("\\\n", " ").partition(":")[2].split()
    own = {str(Path(path).resolve()) for path in read}
    files = {path: _digest(path) for path in sorted(own) if not Path(path).is_relative_to(toolkit.home.resolve())}
    if all(Path(path).stat().st_mtime < start for path in files):  # nvcc read their current text
        record.write_text(json.dumps({"command": [toolkit.version, *command], "files": files}))
    return target, ptx


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def compile_translation(ptx: Path) -> Path:
    """Translates a PTX file to C++ and compiles it; returns the object."""
    cpp = ptx.with_suffix(".cpp")
    text = ptx.read_text()
    translator = [(HERE / f"{name}.py").read_text() for name in TRANSLATOR]
    key = hashlib.sha256(repr((text, translator)).encode()).hexdigest()
    key_file = cpp.with_suffix(".cpp.key")
    if not (cpp.exists() and key_file.exists() and key_file.read_text() == key):
        cpp.write_text(emit(parse(text, ptx.name)))
        key_file.write_text(key)
    headers = [HERE / "operations.h", HERE / "runtime.h", *(_emulator.CSRC / "simt").glob("*.h")]
    command = [_emulator.compiler(), *CPP_FLAGS, f"-I{_emulator.CSRC}", f"-I{HERE}", "-c", str(cpp), "-o"]
    target = ptx.with_suffix(".o")
    _emulator.make(target, command, [cpp.read_text(), *(path.read_text() for path in sorted(headers))])
    return target


def compile_stubs(source: Path, objects: Sequence[Path]) -> Path:
    """Defines the functions of this project that `objects` call and none of them defines: each raises an error."""

    def symbols(option: str) -> set[str]:
        command = ["nm", "--format=posix", option, *map(str, objects)]
        rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return {symbol for symbol, kind, *_ in (row.split() for row in rows if " " in row) if kind != "w"}

    lines = ["#include <stdexcept>", "#include <string>"]
    for index, symbol in enumerate(sorted(symbols("-u") - symbols("--defined-only"))):
        if "8cuda_ext" in symbol:
            lines += [
                f'[[noreturn]] void stub_{index}() __asm__("{symbol}");',
                f'void stub_{index}() {{ throw std::runtime_error("{symbol} is not in this library"); }}',
            ]
    source.write_text("\n".join([*lines, ""]))
    target = source.with_suffix(".o")
    _emulator.make(target, [_emulator.compiler(), *CPP_FLAGS, "-c", str(source), "-o"], [source.read_text()])
    return target
