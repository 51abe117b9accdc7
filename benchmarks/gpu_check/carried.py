"""Packs the library for a machine with a GPU that is not the one that compiles it.

    make gpu-library                                    # here: compiles for 9.0a and writes gpu-library.tar.gz
    make gpu-library ARGS=NAME                          # gpu-library-NAME.tar.gz: a variant, with its sources
    python -m benchmarks.gpu_check.carried pack [NAME]  # the same of a library that is already compiled
    python -m benchmarks.gpu_check.carried unpack 9.0a  # there; the stage "build" does this by itself

The archive holds the compiled library, its stamp, and the conformance kernels. It is used if the stamp fits the torch
of the other machine, the sources of the checkout and the GPU's architecture.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from cuda_ext import _build, _emulator, _stamp
from cuda_ext import _toolchain as toolchain

ROOT = _build.SOURCE_ROOT
ARCHIVE = ROOT / "gpu-library.tar.gz"
STAMP = f"{_stamp.PACKAGE.name}/{_stamp.STAMP_FILE}"


def conformance(arch: str) -> list[Path]:
    """The files of the compiled conformance kernels, which tests/simt/record.py makes."""
    library = _emulator.FOLDER / f"conformance-{toolchain.sm_name(arch)}.so"
    return [library, library.with_suffix(".so.key")]


def pack(variant: str = "") -> int:
    """Packs the library; a variant with its sources, otherwise with the conformance kernels, which it compiles."""
    stamp = _stamp.read()
    problem = unfit(stamp, stamp["archs"][0]) if stamp["archs"] else "the library has no CUDA kernels"
    if problem:
        print(f"gpu-library: {problem}; run `make gpu-library`")
        return 1
    files = [_stamp.LIBRARY, _stamp.PACKAGE / _stamp.STAMP_FILE]
    archive = ROOT / f"gpu-library-{variant}.tar.gz" if variant else ARCHIVE
    if variant:
        files += [path for path in (*_stamp.PACKAGE.rglob("*.py"), *_build.CSRC.rglob("*")) if path.is_file()]
    for arch in () if variant else stamp["archs"]:
        command = [sys.executable, "tests/simt/record.py", "--compile-only", toolchain.sm_name(arch)]
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            return 1
        files += conformance(arch)
    with tarfile.open(archive, "w:gz", compresslevel=9) as tar:
        for file in dict.fromkeys(files):
            tar.add(file, arcname=str(file.relative_to(ROOT)))
    size, archs = archive.stat().st_size / 2**20, ", ".join(stamp["archs"])
    print(f"{archive.name}: {size:.1f} MiB, for {archs}, torch {stamp['torch']} and sources {stamp['sources']}")
    return 0


def unfit(stamp: dict[str, Any], arch: str = "") -> str:
    """Why a library with this stamp does not serve this checkout, on a GPU of `arch` if given; empty if it does."""
    problems = _stamp.mismatches(stamp, _stamp.running())
    if stamp.get("sources") != (digest := _build.sources_digest()):
        problems.append(f"its sources are {stamp.get('sources')}, and those of this checkout {digest}")
    if arch and arch not in stamp.get("archs", []):
        problems.append(f"it is for {', '.join(stamp.get('archs', [])) or 'no GPU'}, and this GPU is {arch}")
    return "; ".join(problems)


def unpack(arch: str = "") -> str:
    """Puts the archive's library into the checkout. Returns why not, or an empty string if a library for `arch`, or any
    if that is empty, is now there."""
    try:
        if not unfit(_stamp.read(), arch):
            return ""
    except ImportError:
        pass
    if not ARCHIVE.exists():
        return f"there is no {ARCHIVE.name}"
    with tarfile.open(ARCHIVE) as tar:
        if problem := unfit(stamp_in(tar), arch):
            return f"{ARCHIVE.name}: {problem}"
        text = read(tar, STAMP)
        (ROOT / STAMP).unlink(missing_ok=True)  # until the library is whole
        tar.extractall(ROOT, [member for member in tar.getmembers() if member.name != STAMP], filter="data")
        (ROOT / STAMP).write_text(text)
    return ""


def unfit_archive(archive: Path) -> str:
    """Why the library of a variant cannot be loaded by this process; empty if it can."""
    with tarfile.open(archive) as tar:
        return "; ".join(_stamp.mismatches(stamp_in(tar), _stamp.running()))


def stamp_in(tar: tarfile.TarFile) -> dict[str, Any]:
    stamp: dict[str, Any] = ast.literal_eval(read(tar, STAMP).partition("STAMP = ")[2])
    return stamp


def read(tar: tarfile.TarFile, name: str) -> str:
    file = tar.extractfile(name)
    assert file is not None
    return file.read().decode()


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["pack"] and len(arguments) <= 2:
        return pack(*arguments[1:])
    if len(arguments) == 2 and arguments[0] == "unpack":
        if problem := unpack(arguments[1]):
            print(f"gpu-library: not used: {problem}")
            return 1
        return 0
    sys.exit(f"{__doc__}\nexpected pack [NAME] or unpack ARCH, got {arguments}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
