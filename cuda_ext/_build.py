"""Configures a build of the library: sources, devices and flags; used by `setup.py` and `cuda_ext.dev`.

The C++ compiler gets the same flags with and without CUDA, so that switching between them recompiles little. The
differences are in `build_config.h`, a header in the build folder that few sources include, and in the link `cuda` next
to it, in which `include` has the toolkit's headers.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_ext import _precompiled, _stamp
from cuda_ext import _toolchain as toolchain

SOURCE_ROOT = _stamp.PACKAGE.parent
CSRC = SOURCE_ROOT / "csrc"

# No -std for C++: torch's headers decide which one they need, and torch's build helpers pass it.
WARNINGS = ("-Wall", "-Wextra", "-Wundef", "-Wno-psabi", "-Wno-unused-parameter")
# Without -fopenmp, torch's parallel_for silently runs on one thread.
CXX_FLAGS = ("-O3", "-g0", "-fno-math-errno", "-fopenmp", *WARNINGS, f"-DCUDA_EXT_NAMESPACE={toolchain.NAMESPACE}")
# Line numbers switch nvcc's compression of device code off, unless it is asked for.
NVCC_FLAGS = (
    *("-O3", "-std=c++20", "-lineinfo", "-Xfatbin=-compress-all"),
    f"-DCUDA_EXT_NAMESPACE={toolchain.NAMESPACE}",
)
# Suffix of the files next to CUDA objects that keep nvcc's messages. Only there does ptxas report that it serialised
# matrix products; it calls that information, which no flag turns into an error (tools/static_gates.py does).
LOG_SUFFIX = ".log"
# CUDA sources whose name contains this use instructions of sm_90a alone, and are compiled for no other architecture.
SM90A_SOURCES = "_sm90"
# The same for those that multiply FP8 by mma.sync. On Hopper, where wgmma does, they would be no faster than 16 bits.
SM89_SOURCES = "_sm89"
# Average CPU seconds per file, to estimate the build time. A CUDA file also takes SECONDS_PER_ARCH per architecture.
SECONDS_PER_CXX_FILE, SECONDS_PER_CUDA_FILE, SECONDS_PER_ARCH = 7, 2, 3
# The head dims of attention's CUDA kernels, each in its own sources; other head dims use the next larger one.
HEAD_DIMS = (64, 96, 128, 192, 256)
LINK_FLAGS = ("-fopenmp", "-Wl,--no-undefined", "-Wl,--as-needed")


class BuildError(RuntimeError):
    """The build cannot start; the message says what to do."""


@dataclass(frozen=True)
class BuildConfig:
    """What a build compiles, and for which devices.

    For a CPU build `toolkit` is None, `archs` is empty, and `without_cuda` is the reason.
    """

    torch: str
    compiler: str
    toolkit: toolchain.Toolkit | None
    archs: tuple[str, ...]
    jobs: int
    without_cuda: str = ""
    head_dims: tuple[int, ...] = HEAD_DIMS  # of attention's CUDA kernels

    @property
    def cuda(self) -> bool:
        return self.toolkit is not None

    @property
    def sources(self) -> list[Path]:
        suffixes = {".cpp", ".cu"} if self.cuda else {".cpp"}
        # Built by cuda_ext._emulator and, as a module of one Python, by setup.py.
        others = {CSRC / "simt", CSRC / "emulated", CSRC / "python"}
        found = [path for path in CSRC.rglob("*") if path.suffix in suffixes and path.parent not in others]
        left_out = set(HEAD_DIMS) - set(self.head_dims)
        found = [path for path in found if head_dim_of(path) not in left_out]
        return sorted((path for path in found if path.suffix != ".cu" or self.archs_of(path)), key=_build_order)

    def archs_of(self, source: Path) -> tuple[str, ...]:
        """The architectures that a CUDA source is compiled for; none if its kernels need one that the build lacks."""
        return archs_of(source, self.archs)

    @property
    def minutes(self) -> int:
        """An estimate of the time to compile everything."""
        cuda = [len(self.archs_of(path)) for path in self.sources if path.suffix == ".cu"]
        seconds = SECONDS_PER_CXX_FILE * (len(self.sources) - len(cuda))
        seconds += sum(SECONDS_PER_CUDA_FILE + SECONDS_PER_ARCH * archs for archs in cuda)
        return max(1, round(seconds / self.jobs / 60))

    def nvcc_flags(self, folder: Path | None = None) -> list[str]:
        """The flags for a build in `folder`, or those that all folders share."""
        knows_modes = self.toolkit is not None and self.toolkit.version >= "13"
        smallest = ["--compress-mode=size"] if knows_modes else []
        include = [f"-I{folder / 'include'}"] if folder else []
        return [*NVCC_FLAGS, *smallest, *include, f"-I{CSRC}", *toolchain.gencode_flags(self.archs)]

    @property
    def name(self) -> str:
        """The name of the build folder. It has the versions of torch and of the compiler, because ninja does not notice
        when they change."""
        return f"torch-{self.torch}-{platform.machine()}-{self.compiler.replace('g++ ', 'gcc-').replace(' ', '-')}"

    def cxx_flags(self, folder: Path) -> list[str]:
        """The flags for a build in `folder`; the same for every config, so that ninja keeps the objects."""
        # torch is built by GCC, which names constrained templates as clang before 18 does.
        clang = re.match(r"clang (\d+)", self.compiler)
        abi = ["-fclang-abi-compat=17"] if clang and int(clang[1]) >= 18 else []
        return [*CXX_FLAGS, *abi, f"-I{folder / 'include'}", f"-I{CSRC}", f"-isystem{folder / 'cuda' / 'include'}"]

    def link_flags(self, folder: Path) -> list[str]:
        return [*LINK_FLAGS, *([f"-L{folder / 'cudart'}"] if self.cuda else [])]

    @property
    def libraries(self) -> list[str]:
        return ["c10", "torch", "torch_cpu", *(["c10_cuda", "torch_cuda", "cudart"] if self.cuda else [])]

    def prepare(self, folder: Path) -> None:
        """Writes the files that the flags of this config refer to into `folder`."""
        (folder / "include").mkdir(parents=True, exist_ok=True)
        # The version is in the header so that files that may include CUDA's headers, which ninja does not watch, are
        # recompiled if it changes.
        cuda_version = self.toolkit.version if self.toolkit else ""
        _write_if_changed(
            folder / "include" / "build_config.h",
            "// Written by the build.\n#pragma once\n\n"
            f"#define CUDA_EXT_WITH_CUDA {int(self.cuda)}\n"
            f'#define CUDA_EXT_CUDA_VERSION "{cuda_version}"\n'
            f'#define CUDA_EXT_CUDA_ARCHS "{self.arch_names}"\n'
            f"#define CUDA_EXT_WITH_SM90A {int(any(map(_is_sm90a, self.archs)))}\n"
            f"#define CUDA_EXT_SM89_CODE {self.sm89_code}\n"
            f"#define CUDA_EXT_HEAD_DIMS {self.head_dim_names}\n",
        )
        (folder / "cuda").unlink(missing_ok=True)
        if self.toolkit:
            (folder / "cuda").symlink_to(toolchain.folder_of_include(self.toolkit.home))
            # The wheel has only libcudart.so.13; the linker looks for libcudart.so.
            if cudart := toolchain.find_cudart(self.toolkit.home):
                shim = folder / "cudart" / "libcudart.so"
                shim.parent.mkdir(exist_ok=True)
                shim.unlink(missing_ok=True)
                shim.symlink_to(cudart)
            nvcc = self.nvcc(folder)
            _write_if_changed(
                nvcc,
                "#!/bin/sh\n# Written by the build: runs nvcc and also keeps its messages next to the object.\n"
                'for argument; do [ "$option" = -o ] && object=$argument; option=$argument; done\n'
                "case ${object##*/} in  # what is compiled for some architectures alone\n"
                f"  *{SM90A_SOURCES}*) left_out={self._codes_except(SM90A_SOURCES)} ;;\n"
                f"  *{SM89_SOURCES}*) left_out={self._codes_except(SM89_SOURCES)} ;;\n"
                "  *) left_out= ;;\nesac\n"
                "for argument; do\n  shift\n"
                '  for code in $left_out; do [ "${argument%%,*}" = "$code" ] && continue 2; done\n'
                '  set -- "$@" "$argument"\ndone\n'
                f'{shlex.quote(str(self.toolkit.home / "bin" / "nvcc"))} "$@" >"$object{LOG_SUFFIX}" 2>&1\n'
                f'status=$?\ncat "$object{LOG_SUFFIX}"\nexit $status\n',
            )
            nvcc.chmod(0o755)

    def _codes_except(self, sources: str) -> str:
        """The beginnings of the nvcc flags, quoted, that `archs_of` leaves out for sources of this name."""
        kept = toolchain.gencode_flags(self.archs_of(Path(sources)))
        flags = [flag for flag in toolchain.gencode_flags(self.archs) if flag not in kept]
        return shlex.quote(" ".join(dict.fromkeys(flag.partition(",")[0] for flag in flags)))

    @property
    def sm89_code(self) -> str:
        """The machine code of SM89_SOURCES, as the elements of kSm89Code in csrc/base/built.h."""
        archs = self.archs_of(Path(SM89_SOURCES))
        return ", ".join(f"{{{toolchain.version_of(arch)}, {str(arch.endswith('+PTX')).lower()}}}" for arch in archs)

    def nvcc(self, folder: Path) -> Path:
        """The compiler for CUDA sources, as written by `prepare`."""
        return folder / "nvcc"

    @property
    def arch_names(self) -> str:
        return ", ".join(dict.fromkeys(toolchain.sm_name(arch) for arch in self.archs))

    @property
    def head_dim_names(self) -> str:
        return ", ".join(map(str, self.head_dims))

    @property
    def summary(self) -> str:
        if self.toolkit:
            dims = "" if self.head_dims == HEAD_DIMS else f"; head dims {self.head_dim_names} only"
            return f"the CPU and CUDA kernels ({self.arch_names}; CUDA {self.toolkit.version}{dims})"
        return f"the CPU kernels only ({self.without_cuda})"

    def stamp(self) -> dict[str, Any]:
        """The entries that `_stamp` compares before it loads the library, and others that a bug report needs."""
        return {
            **_stamp.running(),
            "compiler": self.compiler,
            "cuda": self.toolkit.version if self.toolkit else None,
            "archs": list(self.archs),
            "head_dims": list(self.head_dims),
            "without_cuda": self.without_cuda,
            "cxx_flags": list(CXX_FLAGS),
            "nvcc_flags": self.nvcc_flags() if self.cuda else [],
            "revision": git_revision(),
            "sources": sources_digest(),
        }


def configure() -> BuildConfig:
    """Chooses what to build from CUDA_EXT_CUDA, CUDA_EXT_HEAD_DIMS, TORCH_CUDA_ARCH_LIST, MAX_JOBS and the machine, and
    prints it.

    Raises BuildError if the build cannot work.
    """
    import torch

    add_scripts_to_path()
    if not shutil.which("ninja"):
        raise BuildError(f"cuda_ext: ninja is missing; install it with\n  {sys.executable} -m pip install ninja")
    compiler = toolchain.compiler_version()
    if not compiler:
        command = os.environ.get("CXX", "c++")
        raise BuildError(f"cuda_ext: the C++ compiler {command!r} does not run; install g++, or set CXX to another one")
    choice = choose_toolkit()
    print(choice.report, end="", flush=True)
    toolkit = choice.toolkit
    cores, memory = toolchain.available_cores(), toolchain.available_memory_gib()
    try:
        archs = choose_archs() if toolkit else ()
        jobs = toolchain.choose_jobs(cores, memory)
        head_dims = choose_head_dims()
    except ValueError as error:
        raise BuildError(f"cuda_ext: {error}") from error
    config = BuildConfig(str(torch.__version__), compiler, toolkit, archs, jobs, choice.without_cuda, head_dims)
    amount = f"{len(config.sources)} files, {jobs} jobs ({cores} cores, {memory:.0f} GiB free)"
    minutes = f"about {config.minutes} min from scratch"
    print(f"cuda_ext: building {config.summary} with {compiler}: {amount}, {minutes}", flush=True)
    return config


def choose_head_dims() -> tuple[int, ...]:
    """The head dims in CUDA_EXT_HEAD_DIMS, such as "64,128"; default HEAD_DIMS. Raises ValueError for others."""
    listed = os.environ.get("CUDA_EXT_HEAD_DIMS", "").strip()
    words = [word for word in listed.replace(",", " ").split() if word]
    if unknown := [word for word in words if word not in map(str, HEAD_DIMS)]:
        names = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(
            f"CUDA_EXT_HEAD_DIMS: expected some of {names}, got {', '.join(unknown)}; other head dims use "
            "the kernels of the next larger one"
        )
    return tuple(dim for dim in HEAD_DIMS if str(dim) in words) or HEAD_DIMS


def head_dim_of(source: Path) -> int:
    """The head dim that a source is for, or 0."""
    match = re.search(r"_d(\d+)\.cu$", source.name)
    return int(match[1]) if match else 0


def archs_of(source: Path, archs: tuple[str, ...]) -> tuple[str, ...]:
    """Of `archs` those that a CUDA source has kernels for."""
    if SM90A_SOURCES in source.name:
        return tuple(filter(_is_sm90a, archs))
    return tuple(filter(_multiplies_fp8, archs)) if SM89_SOURCES in source.name else archs


def _is_sm90a(arch: str) -> bool:
    return toolchain.sm_name(arch) == "sm_90a"


def _multiplies_fp8(arch: str) -> bool:
    """Whether it has mma.sync of FP8, and no wgmma."""
    return toolchain.version_of(arch) >= 89 and not _is_sm90a(arch)


def _build_order(source: Path) -> tuple[bool, bool, Path]:
    """The sort key of a source; ninja starts sources in this order. The slowest come first, so that no core waits for
    them at the end. The large head dims, which a build can omit, come last: an interrupted build has the others."""
    slowest = source.stem.startswith("gemm_sm80") or source.name == "attention.cpp"
    return head_dim_of(source) > 128, not slowest, source


@dataclass(frozen=True)
class ToolkitChoice:
    """The CUDA toolkit of a build, or why it has none; the build prints `report`."""

    toolkit: toolchain.Toolkit | None
    without_cuda: str
    report: str


def choose_toolkit() -> ToolkitChoice:
    """Finds a CUDA toolkit that matches torch, unless CUDA_EXT_CUDA=0.

    Raises BuildError if there is none and CUDA_EXT_CUDA=1.
    """
    import torch

    mode = os.environ.get("CUDA_EXT_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        raise BuildError(f"cuda_ext: CUDA_EXT_CUDA: expected auto, 0 or 1, got {mode!r}")
    if mode == "0":
        return ToolkitChoice(None, "CUDA_EXT_CUDA=0", "")
    report = ""
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is a CPU-only build"
        remedy = "install a torch with CUDA"
    else:
        toolkits = toolchain.find_toolkits(torch.version.cuda)
        report = f"cuda_ext: CUDA toolkits for torch {torch.__version__}:\n"
        report += "".join(f"  {toolkit.describe()}\n" for toolkit in toolkits)
        for toolkit in toolkits:
            if toolkit.usable:
                return ToolkitChoice(toolkit, "", report)
        reason = f"no CUDA {torch.version.cuda.split('.')[0]} toolkit was found"
        remedy = f"set CUDA_HOME, or run\n  {sys.executable} -m pip install {_toolkit_requirement()}"
    if mode == "1":
        raise BuildError(f"cuda_ext: {reason}, but CUDA_EXT_CUDA=1 asks for the CUDA kernels; {remedy}")
    return ToolkitChoice(None, reason, f"{report}cuda_ext: {reason}; for the CUDA kernels {remedy}\n")


def local_version() -> str:
    """The local part of a wheel's version, such as "cpu.torch2.11.0" or "cu130.torch2.11.0".

    Raises BuildError like `choose_toolkit`.
    """
    import torch

    toolkit = choose_toolkit().toolkit
    kernels = f"cu{toolkit.version.replace('.', '')}" if toolkit else "cpu"
    return f"{kernels}.torch{str(torch.__version__).partition('+')[0]}"


def _toolkit_requirement() -> str:
    try:
        return f"'{toolchain.toolkit_requirement()}'"
    except LookupError:
        return "'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]'"


def choose_archs() -> tuple[str, ...]:
    """The architectures to compile for; raises ValueError for a wrong TORCH_CUDA_ARCH_LIST."""
    import torch

    return toolchain.choose_archs(_capabilities(), torch._C._cuda_getArchFlags() or "")


def _capabilities() -> list[tuple[int, int]]:
    import torch

    return [torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())]


def add_scripts_to_path() -> None:
    """Adds the folder of this Python's scripts, such as ninja, to PATH; the environment may not be activated."""
    scripts, path = sysconfig.get_path("scripts"), os.environ.get("PATH", "")
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = f"{scripts}{os.pathsep}{path}"


def find_torch() -> None:
    """Makes torch importable in pip's isolated build, which hides the environment that it installs into.

    The library must be compiled with the torch of that environment; one that pip installed just for the build could be
    another release. Other build frontends use a Python of another environment, in which this finds nothing.
    """
    if importlib.util.find_spec("torch") is None:
        installed = (Path(folder) for folder in site.getsitepackages())
        sys.path.extend(str(folder) for folder in installed if (folder / "torch").is_dir())


def torch_helpers() -> Any:
    """torch.utils.cpp_extension, imported without its warning about CUDA_HOME, which `use` sets."""
    add_scripts_to_path()
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module("torch.utils.cpp_extension")
    finally:
        logger.setLevel(level)


@contextmanager
def prepared(config: BuildConfig, folder: Path) -> Iterator[None]:
    """Prepares `folder`, and makes torch's build helpers use the compilers and the number of jobs of `config`."""
    config.prepare(folder)
    _mend_dependency_log(folder)
    os.environ["MAX_JOBS"] = str(config.jobs)
    if config.toolkit:
        os.environ["CUDA_HOME"] = torch_helpers().CUDA_HOME = str(config.toolkit.home)
        os.environ["PYTORCH_NVCC"] = shlex.quote(str(config.nvcc(folder)))
    compiler = os.environ.get("CXX")
    # Clang precompiles in another way, and ninja does not quote the compiler.
    if config.compiler.startswith("g++") and shlex.quote(str(folder)) == str(folder):
        os.environ["CXX"] = str(_precompiled.prepare(folder, CSRC))
    try:
        yield
    finally:
        if compiler is None:
            os.environ.pop("CXX", None)
        else:
            os.environ["CXX"] = compiler


def _mend_dependency_log(folder: Path) -> None:
    """Rewrites ninja's log of headers, whose last record is cut off if a build was killed.

    Ninja 1.13 appends to such a log but does not read past the cut, so that every build compiles everything again
    (https://github.com/ninja-build/ninja/issues/2703).
    """
    log = folder / ".ninja_deps"
    if log.exists() and (folder / "build.ninja").exists():
        done = subprocess.run(["ninja", "-t", "recompact"], cwd=folder, capture_output=True)
        if done.returncode != 0:  # ninja's issue 2787
            log.unlink(missing_ok=True)


@contextmanager
def lock(folder: Path, instead: str = "a copy of the sources elsewhere") -> Iterator[None]:
    """Lets one process at a time build in `folder`. The operating system releases the lock if the process dies.

    Raises BuildError if the folder cannot be written; it says what to use instead.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    except OSError as error:
        raise BuildError(
            f"cuda_ext: expected a build folder that can be written, got {folder} ({error.strerror}); use {instead}"
        ) from error
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def git_revision() -> str | None:
    """The commit of the source checkout, with "-dirty" if files differ from it; None outside a git checkout."""
    if not (SOURCE_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(SOURCE_ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def sources_digest() -> str | None:
    """A digest of all files under csrc/; None if the package was installed without them."""
    if not CSRC.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in CSRC.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(CSRC)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def write_compile_commands(build_folder: Path, target: Path) -> None:
    """Writes compile_commands.json into `target`, for editors, after torch's helpers have built in `build_folder`."""
    command = ["ninja", "-t", "compdb", "compile", "cuda_compile"]
    done = subprocess.run(command, cwd=build_folder, capture_output=True, text=True, check=True)
    (target / "compile_commands.json").write_text(done.stdout)


def _write_if_changed(path: Path, text: str) -> None:
    """Does not touch an equal file, so that files that include it are not recompiled."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
