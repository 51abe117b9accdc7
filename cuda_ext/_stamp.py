"""The build stamp: what the compiled library was built for, and whether this process can load it.

A library built against another torch may crash while it loads, or give wrong results later. So the build writes
`_build_info.py` next to the library, and `check` compares it with the running process before loading anything.
"""

from __future__ import annotations

import platform
import pprint
import runpy
import sys
from pathlib import Path
from typing import Any

from cuda_ext._toolchain import NAMESPACE

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "_C.so"
STAMP_FILE = "_build_info.py"

# The entries of a stamp that must match the running process. The others (compiler, toolkit, architectures, flags,
# revision) describe the build.
COMPARED = {
    "version": "cuda_ext",
    "torch": "torch",
    "torch_cuda": "torch with CUDA",
    "machine": "processor",
}


def running() -> dict[str, str | None]:
    """The entries of COMPARED in this process."""
    import torch

    from cuda_ext import __version__

    return {
        "version": __version__,
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "machine": platform.machine(),
    }


def write(folder: Path, stamp: dict[str, Any]) -> None:
    """Writes `stamp` next to the library in `folder`."""
    text = "# Written by the build; cuda_ext._stamp checks it before it loads the library in this folder.\n"
    (folder / STAMP_FILE).write_text(f"{text}STAMP = {pprint.pformat(stamp, width=120, sort_dicts=False)}\n")


def read() -> dict[str, Any]:
    """The stamp of the installed library; raises ImportError if none was built."""
    file = PACKAGE / STAMP_FILE
    if not is_built(PACKAGE):
        problem = "the compiled library has not been built;"
        if hidden := hidden_installation():
            problem = f"{PACKAGE} has not been built, and hides the installed {hidden}; start Python elsewhere, or"
        raise ImportError(f"cuda_ext: {problem} build it with\n  {build_command()}")
    # Not by import, which could find the stamp of another installation or a stale cache of this one.
    stamp: dict[str, Any] = runpy.run_path(str(file))["STAMP"]
    return stamp


def is_built(package: Path) -> bool:
    return (package / LIBRARY.name).exists() and (package / STAMP_FILE).exists()


def hidden_installation() -> Path | None:
    """A built package later on sys.path: the installed package, if Python was started in an unbuilt checkout."""
    packages = [Path(entry, PACKAGE.name).resolve() for entry in sys.path]
    return next((package for package in packages if package != PACKAGE and is_built(package)), None)


def mismatches(stamp: dict[str, Any], process: dict[str, str | None]) -> list[str]:
    """One clause for each entry in which the library's `stamp` differs from `process`, with both values."""
    return [
        f"it was built for {name} {stamp.get(key)}, but this process runs {name} {process[key]}"
        for key, name in COMPARED.items()
        if stamp.get(key) != process[key]
    ]


def ops_are_defined() -> bool:
    """Whether a library in this process has defined the ops. Loading a second one would abort the process."""
    import torch

    return any(name.startswith(f"{NAMESPACE}::") for name in torch._C._dispatch_get_all_op_names())


def check() -> None:
    """Raises ImportError if the installed library is missing or does not match this process."""
    if found := mismatches(read(), running()):
        remedy = f"Rebuild it with\n  {build_command()}"
        raise ImportError(f"cuda_ext: the compiled library {LIBRARY} does not fit: {'; '.join(found)}. {remedy}")


def build_command() -> str:
    """The shell command that builds the library for this interpreter, in this checkout or from a source folder."""
    source = PACKAGE.parent
    if (source / "setup.py").exists() and (source / "csrc").is_dir():
        return f"cd {source} && {sys.executable} setup.py build_ext --inplace"
    pip = f"{sys.executable} -m pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps"
    return f"{pip} .   (in the source folder of cuda_ext)"
