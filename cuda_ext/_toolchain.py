"""Finds what a build can use: CUDA toolkits, GPU architectures, cores and memory.

Shared by `setup.py`, `cuda_ext.dev` and `cuda_ext.info`. It uses only the standard library, so that it can describe
a machine on which neither torch nor the compiled library can be imported. As a script, it prints the pip requirement of
the CUDA compiler that matches the installed torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

NAMESPACE = "cuda_ext"  # of the ops in torch.ops; the C++ sources receive it as CUDA_EXT_NAMESPACE

# 7.5 is the first with the instructions that load fragments of tensor cores. 9.0a, unlike 9.0, has the warpgroup
# instructions of Hopper.
OLDEST_ARCH = (7, 5)
NAMED_ARCHS = {"turing": "7.5", "ampere": "8.0;8.6", "ada": "8.9", "hopper": "9.0a", "blackwell": "10.0;12.0"}

# The largest compiler process (an op that includes ATen and the dispatcher), plus a margin.
MEMORY_PER_JOB_GIB = 1.5

# The oldest setuptools that understands this pyproject.toml, where the license is a string (PEP 639).
OLDEST_SETUPTOOLS = 77

HOME_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
STANDARD_FOLDERS = ("/usr/local/cuda-{version}", "/usr/local/cuda", "/opt/cuda")

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# The files with the limit and the use of a cgroup's memory, in version 2 and 1.
MEMORY_OF_CGROUP = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))

# Where conda's toolkits have the folders include and lib.
TARGETS = ("targets/x86_64-linux", "targets/sbsa-linux")
# Files that a toolkit must have, by the extra of the cuda-toolkit wheel that contains them; one alternative is enough.
TOOLKIT_PARTS = {
    "nvcc": ("bin/nvcc",),
    "crt": ("include/crt/host_config.h",),
    "nvvm": ("nvvm/bin/cicc",),
    "cccl": ("include/cccl/nv/target", "include/nv/target"),
    "cudart": ("include/cuda_runtime.h",),
}
LIBRARY_FOLDERS = ("lib64", "lib")


@dataclass(frozen=True)
class Toolkit:
    """A folder that may hold a CUDA toolkit, and whether a build can use it."""

    origin: str  # how the folder was found, such as "CUDA_HOME"
    home: Path
    version: str = ""  # of its nvcc, such as "13.0"
    problem: str = ""  # why it cannot be used; empty if it can
    warning: str = ""  # of a usable toolkit

    @property
    def usable(self) -> bool:
        return not self.problem

    def describe(self) -> str:
        verdict = self.problem or f"CUDA {self.version}" + (f" (warning: {self.warning})" if self.warning else "")
        return f"{self.home} [{self.origin}]: {verdict}"


def find_toolkits(torch_cuda: str) -> list[Toolkit]:
    """Every CUDA toolkit found for a torch built with CUDA `torch_cuda` ("13.0"), in order of preference.

    Those that a variable names come first. Of the others one with another minor version comes last, so that the toolkit
    that pip installed for this torch is taken before an older one on PATH.
    """
    homes: dict[Path, str] = {}
    for origin, home in _folders(torch_cuda):
        homes.setdefault(home.resolve(), origin)
    found = [_inspect(origin, home, torch_cuda) for home, origin in homes.items()]
    return sorted(found, key=lambda toolkit: toolkit.origin not in HOME_VARIABLES and toolkit.warning != "")


def _folders(torch_cuda: str) -> list[tuple[str, Path]]:
    folders = [(name, Path(os.environ[name])) for name in HOME_VARIABLES if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        folders.append(("nvcc on PATH", _home_of_nvcc(Path(nvcc))))
    folders += [("pip", folder / f"cu{torch_cuda.split('.')[0]}") for folder in _wheel_folders()]
    folders += [("standard folder", Path(folder.format(version=torch_cuda))) for folder in STANDARD_FOLDERS]
    return folders


def _wheel_folders() -> list[Path]:
    """The folders in which pip installs NVIDIA's wheels."""
    package = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (package.submodule_search_locations or [])] if package else []


def _home_of_nvcc(nvcc: Path) -> Path:
    """The toolkit of an nvcc on PATH, as nvcc reports it: the file may be a link or a wrapper script."""
    for line in _output([str(nvcc), "--dryrun", "-E", "-x", "cu", os.devnull]).splitlines():
        if match := re.match(r"#\$ TOP=(.+)", line):
            return Path(match[1].strip())
    return nvcc.resolve().parent.parent


def _inspect(origin: str, home: Path, torch_cuda: str) -> Toolkit:
    if not home.is_dir():
        return Toolkit(origin, home, problem="no such folder")
    missing = {
        part: files[0]
        for part, files in TOOLKIT_PARTS.items()
        if not any((folder / file).exists() for folder in _layouts(home) for file in files)
    }
    if not find_cudart(home):
        missing.setdefault("cudart", "lib64/libcudart.so")
    if missing:
        files = ", ".join(missing.values())
        return Toolkit(origin, home, problem=f"missing {files} (cuda-toolkit[{','.join(missing)}] on PyPI)")
    nvcc = str(home / "bin/nvcc")
    release = re.search(r"release (\d+\.\d+)", _output([nvcc, "--version"]))
    if not release:
        return Toolkit(origin, home, problem="its nvcc does not run")
    version = release[1]
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        return Toolkit(origin, home, version, problem=f"is CUDA {version}, but torch was built with CUDA {torch_cuda}")
    if failure := _compile_empty_kernel(nvcc):
        return Toolkit(origin, home, version, problem=f"its nvcc cannot compile an empty kernel: {failure}")
    warning = "" if version == torch_cuda else f"torch was built with CUDA {torch_cuda}"
    return Toolkit(origin, home, version, warning=warning)


def _compile_empty_kernel(nvcc: str) -> str:
    """Why `nvcc` fails, or "". Finds problems that a list of files does not show, such as a mix of releases or an
    unsupported host compiler."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.write_text("__global__ void empty() {}\n")
        command = [nvcc, "-cubin", "-arch=sm_80", "-o", str(source.with_suffix(".cubin")), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return errors[-1] if done.returncode else ""


def _layouts(home: Path) -> list[Path]:
    return [home, *(home / target for target in TARGETS)]


def folder_of_include(home: Path) -> Path:
    """The folder of the toolkit at `home` whose `include` has the CUDA runtime's headers."""
    found = (folder for folder in _layouts(home) if (folder / "include" / "cuda_runtime.h").exists())
    return next(found, home)


def find_cudart(home: Path) -> Path | None:
    """The CUDA runtime library of the toolkit at `home`; the wheel names it `libcudart.so.<major>` only."""
    libraries = (
        library
        for parent in _layouts(home)
        for folder in LIBRARY_FOLDERS
        for library in sorted((parent / folder).glob("libcudart.so*"))
    )
    return next(libraries, None)


def toolkit_requirement() -> str:
    """The pip requirement of the CUDA compiler in the version that the installed torch pins.

    It names all parts because the wheels do not pin each other: pip would install an unnamed one in its newest release.
    Raises LookupError if torch pins none, or is not installed.
    """
    try:
        requirements = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        raise LookupError(f"cuda_ext: torch is not installed for {sys.executable}; install it first") from None
    for requirement in requirements:
        if match := re.match(r"cuda-toolkit\[.*?\]\s*==\s*([\w.]+)", requirement):
            return f"cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]=={match[1]}"
    version = importlib.metadata.version("torch")
    raise LookupError(f"cuda_ext: torch {version} names no CUDA toolkit in its requirements: is it a CPU-only build?")


def arch_list(text: str) -> tuple[str, ...]:
    """The architectures of a TORCH_CUDA_ARCH_LIST such as "8.0;9.0a+PTX" or "Ampere Hopper", with 9.0 read as 9.0a.

    Raises ValueError for an entry that is malformed, or older than the kernels support.
    """
    for name, members in NAMED_ARCHS.items():
        text = re.sub(rf"\b{name}\b", members, text, flags=re.IGNORECASE)
    archs = set()
    for entry in re.split(r"[\s;,]+", text.strip(" ;,")):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if not match:
            names = ", ".join(name.capitalize() for name in NAMED_ARCHS)
            expected = f"entries such as 8.0, 9.0a, 8.6+PTX, or one of {names}"
            raise ValueError(f"TORCH_CUDA_ARCH_LIST: expected {expected}; got {entry!r}")
        major, minor, variant, ptx = match.groups(default="")
        if (int(major), int(minor)) < OLDEST_ARCH:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST: expected 7.5 or newer, got {entry!r}; the kernels need sm_75")
        if (major, minor) == ("9", "0"):
            variant = "a"
        archs.add((int(major), int(minor), variant, ptx))
    return tuple(f"{major}.{minor}{variant}{ptx}" for major, minor, variant, ptx in sorted(archs))


def choose_archs(capabilities: Iterable[tuple[int, int]], of_torch: str) -> tuple[str, ...]:
    """The architectures to compile for: TORCH_CUDA_ARCH_LIST, else those of `capabilities`, the GPUs of this machine,
    else `archs_like` those `of_torch`."""
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip():
        return arch_list(listed)
    present = [f"{major}.{minor}" for major, minor in capabilities if (major, minor) >= OLDEST_ARCH]
    return arch_list(";".join(present)) if present else archs_like(of_torch)


def archs_like(of_torch: str) -> tuple[str, ...]:
    """The fewest architectures whose code runs on all devices that a torch built for `of_torch` supports.

    `of_torch` is torch's own list, such as "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120". Machine code runs on later
    versions of the same major version, so the oldest of each is enough; PTX of the newest serves devices after it.

    >>> archs_like("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120")
    ('7.5', '8.0', '9.0a', '10.0', '12.0+PTX')
    """
    oldest: dict[int, tuple[int, int]] = {}
    for digits in re.findall(r"\bsm_(\d+)", of_torch):
        arch = (int(digits[:-1]), int(digits[-1]))
        if arch >= OLDEST_ARCH:
            oldest[arch[0]] = min(arch, oldest.get(arch[0], arch))
    if not oldest:
        raise ValueError(
            f"expected a torch with CUDA for sm_75 or newer, got one for {of_torch or 'none'}; name the architectures "
            "in TORCH_CUDA_ARCH_LIST, such as 8.0"
        )
    newest = max((major for major in oldest if major != 9), default=0)  # PTX of 9.0a runs on 9.0 alone
    return arch_list(";".join(f"{x}.{y}" + "+PTX" * (x == newest) for x, y in oldest.values()))


def sm_name(arch: str) -> str:
    """ "sm_90a" for "9.0a+PTX"."""
    return "sm_" + arch.removesuffix("+PTX").replace(".", "")


def version_of(arch: str) -> int:
    """90 for "9.0a+PTX"."""
    return int(re.sub(r"\D", "", arch))


def gencode_flags(archs: Sequence[str]) -> list[str]:
    """The nvcc flags that compile for `archs`, with PTX in addition to machine code if an entry ends in +PTX."""
    flags = []
    for arch in archs:
        code = sm_name(arch).removeprefix("sm_")
        flags.append(f"-gencode=arch=compute_{code},code=sm_{code}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{code},code=compute_{code}")
    return list(dict.fromkeys(flags))


def available_cores(root: Path = CGROUPS, membership: Path = OWN_CGROUPS) -> int:
    """The number of cores this process may use, by its affinity mask and the quotas of its cgroups."""
    cores = len(os.sched_getaffinity(0))
    for cgroup in _cgroups("cpu", root, membership):
        quota, _, period = _read(cgroup / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(cgroup / "cpu.cfs_quota_us"), _read(cgroup / "cpu.cfs_period_us")
        if quota.strip().isdigit() and period.strip().isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory_gib(
    meminfo: Path = Path("/proc/meminfo"), root: Path = CGROUPS, membership: Path = OWN_CGROUPS
) -> float:
    """The memory this process can still allocate, in GiB: the minimum over the machine and the process's cgroups."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", _read(meminfo))
    free = int(available[1]) * 1024 if available else float("inf")
    for cgroup in _cgroups("memory", root, membership):
        for limit_name, used_name in MEMORY_OF_CGROUP:
            limit, used = _read(cgroup / limit_name).strip(), _read(cgroup / used_name).strip()
            if limit.isdigit() and used.isdigit():
                # Files that were read count as used until the kernel needs their memory. Version 1 has a second line,
                # for the cgroup and those below it.
                idle = re.findall(r"inactive_file (\d+)", _read(cgroup / "memory.stat"))
                free = min(free, int(limit) - int(used) + int(idle[-1] if idle else 0))
    return free / 2**30


def _cgroups(controller: str, root: Path, membership: Path) -> list[Path]:
    """The folders of the cgroups that can limit this process by `controller`: its own and all above it, of version 2
    and of version 1, which has a tree for each controller.

    `membership` may name a path of the host while a container shows its own cgroup as the root, so some do not exist.
    """
    folders = [root, root / controller]
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            own = Path(path.lstrip("/"))
            folders += [(root / controller if controllers else root) / part for part in (own, *own.parents)]
    return list(dict.fromkeys(folders))


def choose_jobs(cores: int, memory_gib: float) -> int:
    """The number of compilers to run at once: MAX_JOBS if set, else limited by the cores and the free memory."""
    if (chosen := os.environ.get("MAX_JOBS", "").strip()) != "":
        if not chosen.isdigit() or int(chosen) < 1:
            raise ValueError(f"MAX_JOBS: expected a positive integer, got {chosen!r}")
        return int(chosen)
    return max(1, int(min(cores, memory_gib / MEMORY_PER_JOB_GIB)))


def setuptools_problem() -> str:
    """Why the setuptools of this Python cannot build the package, and what to do; "" if it can."""
    remedy = f"install it with\n  {sys.executable} -m pip install 'setuptools>={OLDEST_SETUPTOOLS}'"
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return f"setuptools is missing; {remedy}"
    major = re.match(r"\d+", version)
    if major and int(major[0]) >= OLDEST_SETUPTOOLS:
        return ""
    return f"expected setuptools {OLDEST_SETUPTOOLS} or newer, got {version}; {remedy}"


def compiler_version() -> str:
    """ "g++ 12.2.0" for the C++ compiler of the build (CXX, else c++), or "" if it does not run."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    version = _output([*compiler, "-dumpfullversion", "-dumpversion"]).strip()
    family = "clang" if "clang" in _output([*compiler, "--version"]) else "g++"
    return f"{family} {version}" if version else ""


def _output(command: Sequence[str]) -> str:
    """Both output streams of `command`, or "" if it cannot be started."""
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    try:
        print(toolkit_requirement())
    except LookupError as error:
        sys.exit(str(error))
