"""Ensures that a library can be loaded, by compiling one for the CPU if necessary, and compiles both variants of the
emulator, with and without the check for races."""

from __future__ import annotations

import os
import subprocess
import sys

from cuda_ext import _build, _emulator, _stamp


def main() -> int:
    try:
        _stamp.check()
    except ImportError as error:
        print(f"cuda_ext: no usable library ({error}); compiling one for the CPU", flush=True)
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        status = subprocess.run(command, cwd=_build.SOURCE_ROOT, env={**os.environ, "CUDA_EXT_CUDA": "0"}).returncode
        if status:
            return status
    stamp = _stamp.read()
    state = "unchanged" if stamp["sources"] == _build.sources_digest() else "changed since; `make build` compiles them"
    print(f"cuda_ext: the library is built for {', '.join(['the CPU', *stamp['archs']])}; its sources are {state}")
    for hooks in (False, True):
        module = _emulator.load(hooks)
        assert module.__file__ is not None
        os.utime(module.__file__)  # marks it as current: gpu_check's estimates depend on its time
    return 0


if __name__ == "__main__":
    sys.exit(main())
