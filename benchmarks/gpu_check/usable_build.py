"""Ensures, for a dry run, that there is a library or an emulator.

python -m benchmarks.gpu_check.usable_build library     # of an earlier build, carried, or compiled for the CPU
python -m benchmarks.gpu_check.usable_build emulator    # in both variants, with and without the check for races
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.gpu_check import carried
from cuda_ext import _build, _emulator, _stamp, _toolchain

COMPILING = "emulator: compiling what has changed"


def library() -> int:
    try:
        _stamp.check()
    except ImportError as error:
        if problem := carried.unpack():
            print(f"cuda_ext: no usable library ({error}; {problem}); compiling one for the CPU", flush=True)
            command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            environment = {**os.environ, "CUDA_EXT_CUDA": "0"}
            if status := subprocess.run(command, cwd=_build.SOURCE_ROOT, env=environment).returncode:
                return status
    stamp = _stamp.read()
    state = "unchanged" if stamp["sources"] == _build.sources_digest() else "changed since; `make build` compiles them"
    print(f"cuda_ext: the library is built for {', '.join(['the CPU', *stamp['archs']])}; its sources are {state}")
    return 0


def emulator() -> int:
    if _toolchain.compiler_version():
        print(COMPILING, flush=True)
    try:
        for hooks in (False, True):
            module = _emulator.load(hooks)
            assert module.__file__ is not None
            os.utime(module.__file__)  # marks it as current: gpu_check's estimates depend on its time
    except RuntimeError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit({"library": library, "emulator": emulator}[sys.argv[1]]())
