"""A build of the library: what is compiled, for which devices, with which flags; for `setup.py` and `cuda_ext.dev`.

The C++ compiler gets the same flags with and without CUDA, so that going from one to the other compiles little. What
differs reaches the sources through `build_config.h`, a header written into the build folder and included by the few
that care, and through the link `cuda` beside it, which leads to the toolkit.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_ext import _stamp
from cuda_ext import _toolchain as toolchain

SOURCE_ROOT = _stamp.PACKAGE.parent
CSRC = SOURCE_ROOT / "csrc"

# No -std for C++: torch's headers decide which one they need, and torch's build helpers pass it.
WARNINGS = ("-Wall", "-Wextra", "-Wundef", "-Wno-psabi", "-Wno-unused-parameter")
# -fopenmp, because without it torch's parallel_for runs on one thread and says nothing.
CXX_FLAGS = ("-O3", "-g0", "-fno-math-errno", "-fopenmp", *WARNINGS, f"-DCUDA_EXT_NAMESPACE={toolchain.NAMESPACE}")
NVCC_FLAGS = ("-O3", "-std=c++20", "-lineinfo", f"-DCUDA_EXT_NAMESPACE={toolchain.NAMESPACE}")
# Of the files beside CUDA objects in which nvcc's messages are kept: ptxas says there, and nowhere else, that it had to
# serialise matrix products, and calls it information, which no flag makes an error (tools/static_gates.py does).
LOG_SUFFIX = ".log"
LINK_FLAGS = ("-fopenmp", "-Wl,--no-undefined", "-Wl,--as-needed")


class BuildError(RuntimeError):
    """The build cannot start; the message says what to do."""


@dataclass(frozen=True)
class Plan:
    """What one build compiles and for what; `toolkit` is None for a CPU build, and `archs` is then empty."""

    torch: str
    compiler: str
    toolkit: toolchain.Toolkit | None
    archs: tuple[str, ...]
    jobs: int

    @property
    def cuda(self) -> bool:
        return self.toolkit is not None

    @property
    def sources(self) -> list[Path]:
        suffixes = {".cpp", ".cu"} if self.cuda else {".cpp"}
        emulator = {CSRC / "simt", CSRC / "emulated"}  # a library of its own
        return sorted(path for path in CSRC.rglob("*") if path.suffix in suffixes and path.parent not in emulator)

    @property
    def nvcc_flags(self) -> list[str]:
        return [*NVCC_FLAGS, f"-I{CSRC}", *toolchain.gencode_flags(self.archs)]

    @property
    def name(self) -> str:
        """Of the build folder. Neither torch's headers nor the compiler are dependencies that ninja would notice."""
        return f"torch-{self.torch}-{platform.machine()}-{self.compiler.replace('g++ ', 'gcc-').replace(' ', '-')}"

    def cxx_flags(self, folder: Path) -> list[str]:
        """For a build in `folder`; the same for every plan, so that ninja keeps the objects when the plan changes."""
        return [*CXX_FLAGS, f"-I{CSRC}", f"-I{folder / 'include'}", f"-isystem{folder / 'cuda' / 'include'}"]

    def link_flags(self, folder: Path) -> list[str]:
        return [*LINK_FLAGS, *([f"-L{folder / 'cudart'}"] if self.cuda else [])]

    @property
    def libraries(self) -> list[str]:
        return ["c10", "torch", "torch_cpu", *(["c10_cuda", "torch_cuda", "cudart"] if self.cuda else [])]

    def prepare(self, folder: Path) -> None:
        """Writes into `folder` what the flags of this plan refer to."""
        (folder / "include").mkdir(parents=True, exist_ok=True)
        # The version makes another toolkit recompile what may include its headers, which ninja does not watch.
        cuda_version = self.toolkit.version if self.toolkit else ""
        _write_if_changed(
            folder / "include" / "build_config.h",
            "// Written by the build.\n#pragma once\n\n"
            f"#define CUDA_EXT_WITH_CUDA {int(self.cuda)}\n"
            f'#define CUDA_EXT_CUDA_VERSION "{cuda_version}"\n'
            f'#define CUDA_EXT_CUDA_ARCHS "{self.arch_names}"\n',
        )
        (folder / "cuda").unlink(missing_ok=True)
        if self.toolkit:
            (folder / "cuda").symlink_to(self.toolkit.home)
            # The wheel has libcudart.so.13 alone; the linker looks for libcudart.so.
            if cudart := toolchain.find_cudart(self.toolkit.home):
                shim = folder / "cudart" / "libcudart.so"
                shim.parent.mkdir(exist_ok=True)
                shim.unlink(missing_ok=True)
                shim.symlink_to(cudart)
            nvcc = self.nvcc(folder)
            _write_if_changed(
                nvcc,
                "#!/bin/sh\n# Written by the build: nvcc, whose messages are also kept beside the object.\n"
                'for argument; do [ "$option" = -o ] && object=$argument; option=$argument; done\n'
                f'{shlex.quote(str(self.toolkit.home / "bin" / "nvcc"))} "$@" >"$object{LOG_SUFFIX}" 2>&1\n'
                f'status=$?\ncat "$object{LOG_SUFFIX}"\nexit $status\n',
            )
            nvcc.chmod(0o755)

    def nvcc(self, folder: Path) -> Path:
        """The compiler for CUDA sources, as written by `prepare`."""
        return folder / "nvcc"

    @property
    def arch_names(self) -> str:
        return ", ".join(dict.fromkeys(toolchain.sm_name(arch) for arch in self.archs))

    def stamp(self) -> dict[str, Any]:
        """What `_stamp` compares before the library is loaded, and what a bug report should say about it."""
        return {
            **_stamp.running(),
            "compiler": self.compiler,
            "cuda": self.toolkit.version if self.toolkit else None,
            "archs": list(self.archs),
            "cxx_flags": list(CXX_FLAGS),
            "nvcc_flags": self.nvcc_flags if self.cuda else [],
            "revision": git_revision(),
            "sources": sources_digest(),
        }


def make_plan() -> Plan:
    """Decides what to build from CUDA_EXT_CUDA, TORCH_CUDA_ARCH_LIST, MAX_JOBS and the machine, and prints it.

    Raises BuildError when the build cannot work.
    """
    import torch

    add_scripts_to_path()
    if not shutil.which("ninja"):
        raise BuildError(f"cuda_ext: ninja is missing; install it with\n  {sys.executable} -m pip install ninja")
    compiler = toolchain.compiler_version()
    if not compiler:
        command = os.environ.get("CXX", "c++")
        raise BuildError(f"cuda_ext: the C++ compiler {command!r} does not run; install g++, or set CXX to another one")
    toolkit = _choose_toolkit(str(torch.__version__), torch.version.cuda)
    cores, memory = toolchain.available_cores(), toolchain.available_memory_gib()
    try:
        archs = toolchain.choose_archs(_capabilities()) if toolkit else ()
        jobs = toolchain.choose_jobs(cores, memory)
    except ValueError as error:
        raise BuildError(f"cuda_ext: {error}") from error
    plan = Plan(str(torch.__version__), compiler, toolkit, archs, jobs)
    what = f"the CPU and CUDA kernels ({plan.arch_names}; CUDA {toolkit.version})" if toolkit else "the CPU kernels"
    print(f"cuda_ext: building {what} with {compiler}, {jobs} jobs ({cores} cores, {memory:.0f} GiB free)", flush=True)
    return plan


def _choose_toolkit(torch_version: str, torch_cuda: str | None) -> toolchain.Toolkit | None:
    mode = os.environ.get("CUDA_EXT_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        raise BuildError(f"cuda_ext: CUDA_EXT_CUDA: expected auto, 0 or 1, got {mode!r}")
    if mode == "0":
        print("cuda_ext: CUDA_EXT_CUDA=0, so this is a CPU build")
        return None
    if torch_cuda is None:
        reason = f"torch {torch_version} is a CPU-only build"
        remedy = "install a torch with CUDA"
    else:
        toolkits = toolchain.find_toolkits(torch_cuda)
        print(f"cuda_ext: CUDA toolkits for torch {torch_version}:")
        for toolkit in toolkits:
            print(f"  {toolkit.describe()}")
        for toolkit in toolkits:
            if toolkit.usable:
                return toolkit
        reason = f"no CUDA {torch_cuda.split('.')[0]} toolkit was found"
        remedy = f"set CUDA_HOME, or run\n  {sys.executable} -m pip install {_toolkit_requirement()}"
    if mode == "1":
        raise BuildError(f"cuda_ext: {reason}, but CUDA_EXT_CUDA=1 asks for the CUDA kernels; {remedy}")
    print(f"cuda_ext: {reason}, so this is a CPU build")
    return None


def _toolkit_requirement() -> str:
    try:
        return f"'{toolchain.toolkit_requirement()}'"
    except LookupError:
        return "'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]'"


def _capabilities() -> list[tuple[int, int]]:
    import torch

    return [torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())]


def add_scripts_to_path() -> None:
    """Lets the ninja that is installed beside this Python be found, although its environment need not be activated."""
    scripts, path = sysconfig.get_path("scripts"), os.environ.get("PATH", "")
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = f"{scripts}{os.pathsep}{path}"


def torch_helpers() -> Any:
    """torch.utils.cpp_extension, imported without its warning about the CUDA_HOME that it guesses: `use` sets it."""
    add_scripts_to_path()
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module("torch.utils.cpp_extension")
    finally:
        logger.setLevel(level)


def use(plan: Plan, folder: Path) -> None:
    """Makes torch's build helpers take the compilers and the number of jobs of `plan`, prepared in `folder`."""
    os.environ["MAX_JOBS"] = str(plan.jobs)
    if plan.toolkit:
        os.environ["CUDA_HOME"] = torch_helpers().CUDA_HOME = str(plan.toolkit.home)
        os.environ["PYTORCH_NVCC"] = shlex.quote(str(plan.nvcc(folder)))


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time build in `folder`. The kernel drops the lock with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def git_revision() -> str | None:
    """The commit of the source checkout, with "-dirty" when files differ from it; None outside a git checkout."""
    if not (SOURCE_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(SOURCE_ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def sources_digest() -> str | None:
    """Of all files under csrc/; None where the package was installed without them."""
    if not CSRC.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in CSRC.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(CSRC)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _write_if_changed(path: Path, text: str) -> None:
    """Leaves an equal file alone, so that nothing that includes it is compiled again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
