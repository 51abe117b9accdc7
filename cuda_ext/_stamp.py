"""What the compiled library was built for, and whether that fits the process that is about to load it.

A library built against another torch may crash while it loads, or compute nonsense later. So the build leaves
`_build_info.py` beside the library, and `check` compares it with the running process before anything is loaded.
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

# The entries of a stamp that must equal the running process. The others (compiler, toolkit, architectures, flags,
# revision) say how the library was made.
COMPARED = {
    "version": "cuda_ext",
    "torch": "torch",
    "torch_cuda": "torch with CUDA",
    "machine": "processor",
}


def running() -> dict[str, str | None]:
    """The entries of COMPARED as they are in this process."""
    import torch

    from cuda_ext import __version__

    return {
        "version": __version__,
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "machine": platform.machine(),
    }


def write(folder: Path, stamp: dict[str, Any]) -> None:
    """Writes `stamp` beside a library in `folder`."""
    text = "# Written by the build, compared by cuda_ext._stamp before the library beside it is loaded.\n"
    (folder / STAMP_FILE).write_text(f"{text}STAMP = {pprint.pformat(stamp, width=120, sort_dicts=False)}\n")


def read() -> dict[str, Any]:
    """The stamp of the installed library; raises ImportError when none was built."""
    file = PACKAGE / STAMP_FILE
    if not is_built(PACKAGE):
        problem = "the compiled library has not been built;"
        if hidden := hidden_installation():
            problem = f"{PACKAGE} has not been built, and hides the installed {hidden}; start Python elsewhere, or"
        raise ImportError(f"cuda_ext: {problem} build it with\n  {build_command()}")
    # By its path: an import could find the stamp of another installation, or a stale cache of this one.
    stamp: dict[str, Any] = runpy.run_path(str(file))["STAMP"]
    return stamp


def is_built(package: Path) -> bool:
    return (package / LIBRARY.name).exists() and (package / STAMP_FILE).exists()


def hidden_installation() -> Path | None:
    """A built package further behind on sys.path: what was installed from a checkout, for Python started in it."""
    packages = [Path(entry, PACKAGE.name).resolve() for entry in sys.path]
    return next((package for package in packages if package != PACKAGE and is_built(package)), None)


def mismatches(stamp: dict[str, Any], process: dict[str, str | None]) -> list[str]:
    """One sentence per entry in which the library's `stamp` differs from `process`, both versions in it."""
    return [
        f"it was built for {name} {stamp.get(key)}, but this process runs {name} {process[key]}"
        for key, name in COMPARED.items()
        if stamp.get(key) != process[key]
    ]


def ops_are_defined() -> bool:
    """Whether a library in this process has defined our ops. A second one would end the process instead of raising."""
    import torch

    return any(name.startswith(f"{NAMESPACE}::") for name in torch._C._dispatch_get_all_op_names())


def check() -> None:
    """Raises ImportError when the installed library is missing, or was built for something else than this process."""
    if found := mismatches(read(), running()):
        remedy = f"Rebuild it with\n  {build_command()}"
        raise ImportError(f"cuda_ext: the compiled library {LIBRARY} does not fit: {'; '.join(found)}. {remedy}")


def build_command() -> str:
    """The shell command that builds the library for this interpreter, in the source checkout or from one."""
    source = PACKAGE.parent
    if (source / "setup.py").exists() and (source / "csrc").is_dir():
        return f"cd {source} && {sys.executable} setup.py build_ext --inplace"
    pip = f"{sys.executable} -m pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps"
    return f"{pip} .   (in the source folder of cuda_ext)"
