"""The build's decisions, the stamp that guards the library, and the import of the package."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cuda_ext
from cuda_ext import _build, _load, _precompiled, _stamp, _toolchain
from cuda_ext._toolchain import Toolkit

ROOT = Path(__file__).resolve().parent.parent
RunPython = Callable[..., subprocess.CompletedProcess[str]]

PARTS = [
    "include/cuda_runtime.h",
    "include/crt/host_config.h",
    "nvvm/bin/cicc",
    "include/nv/target",
    "lib64/libcudart.so",
]
NVCC = """#!/bin/sh
case "$*" in
  *--dryrun*) echo "#\\$ TOP=$(dirname "$(readlink -f "$0")")/.." >&2 ;;
  *--version*) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  *) {compile} ;;
esac
"""


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def make_toolkit(home: Path, release: str = "13.0", compile: str = "exit 0", without: str = "") -> Path:
    """A folder like a CUDA toolkit, but for the file `without`; its nvcc runs the command `compile` to compile."""
    write_script(home / "bin/nvcc", NVCC.format(release=release, compile=compile))
    for part in PARTS:
        (home / part).parent.mkdir(parents=True, exist_ok=True)
        (home / part).touch()
    if without:
        (home / without).unlink()
    return home


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides every toolkit of this machine."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]))
    monkeypatch.setattr(_toolchain, "STANDARD_FOLDERS", ())
    monkeypatch.setattr(_toolchain, "_wheel_folders", list)
    assert _toolchain.find_toolkits("13.0") == []


@pytest.mark.usefixtures("no_toolkit")
class TestFindToolkits:
    def test_nvcc_on_path_may_be_a_wrapper_script(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        home = make_toolkit(tmp_path / "cuda-13.0")
        wrapper = write_script(tmp_path / "bin/nvcc", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
        monkeypatch.setenv("PATH", str(wrapper.parent), prepend=os.pathsep)
        assert _toolchain.find_toolkits("13.0") == [Toolkit("nvcc on PATH", home, "13.0")]

    def test_nvcc_on_path_may_be_a_link(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        home = make_toolkit(tmp_path / "cuda-13.0")
        link = tmp_path / "bin/nvcc"
        link.parent.mkdir()
        link.symlink_to(home / "bin/nvcc")
        monkeypatch.setenv("PATH", str(link.parent), prepend=os.pathsep)
        assert _toolchain.find_toolkits("13.0") == [Toolkit("nvcc on PATH", home, "13.0")]

    def test_nvcc_on_path_that_says_nothing_is_taken_by_its_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nvcc = write_script(tmp_path / "cuda/bin/nvcc", "#!/bin/sh\nexit 1\n")
        monkeypatch.setenv("PATH", str(nvcc.parent), prepend=os.pathsep)
        assert [toolkit.home for toolkit in _toolchain.find_toolkits("13.0")] == [tmp_path / "cuda"]

    def test_order_and_duplicates(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        homes = [make_toolkit(tmp_path / name) for name in ("home", "path", "standard")]
        wheel = make_toolkit(tmp_path / "nvidia/cu13")
        monkeypatch.setenv("CUDA_HOME", str(homes[0]))
        monkeypatch.setenv("CUDA_PATH", str(homes[0]))
        monkeypatch.setenv("PATH", str(homes[1] / "bin"), prepend=os.pathsep)
        monkeypatch.setattr(_toolchain, "_wheel_folders", lambda: [tmp_path / "nvidia"])
        monkeypatch.setattr(_toolchain, "STANDARD_FOLDERS", (str(homes[1]), str(homes[2])))
        found = [(toolkit.origin, toolkit.home) for toolkit in _toolchain.find_toolkits("13.0")]
        origins = ["CUDA_HOME", "nvcc on PATH", "pip", "standard folder"]
        assert found == list(zip(origins, [homes[0], homes[1], wheel, homes[2]], strict=True))

    def test_the_version_of_torch_comes_before_others_but_not_before_a_variable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = make_toolkit(tmp_path / "path", release="13.0")
        wheel = make_toolkit(tmp_path / "nvidia/cu13", release="13.2")
        monkeypatch.setenv("PATH", str(path / "bin"), prepend=os.pathsep)
        monkeypatch.setattr(_toolchain, "_wheel_folders", lambda: [tmp_path / "nvidia"])
        assert [toolkit.home for toolkit in _toolchain.find_toolkits("13.2")] == [wheel, path]
        assert [toolkit.home for toolkit in _toolchain.find_toolkits("13.1")] == [path, wheel]
        monkeypatch.setenv("CUDA_HOME", str(path))
        assert [toolkit.home for toolkit in _toolchain.find_toolkits("13.2")] == [path, wheel]

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"without": "bin/nvcc"}, "missing bin/nvcc (cuda-toolkit[nvcc] on PyPI)"),
            ({"without": "include/crt/host_config.h"}, "missing include/crt/host_config.h (cuda-toolkit[crt] on PyPI)"),
            ({"without": "nvvm/bin/cicc"}, "missing nvvm/bin/cicc (cuda-toolkit[nvvm] on PyPI)"),
            ({"without": "include/nv/target"}, "missing include/cccl/nv/target (cuda-toolkit[cccl] on PyPI)"),
            ({"without": "include/cuda_runtime.h"}, "missing include/cuda_runtime.h (cuda-toolkit[cudart] on PyPI)"),
            ({"without": "lib64/libcudart.so"}, "missing lib64/libcudart.so (cuda-toolkit[cudart] on PyPI)"),
            ({"release": "12.8"}, "is CUDA 12.8, but torch was built with CUDA 13.0"),
            ({"release": "none"}, "its nvcc does not run"),
            (
                {"compile": "echo ptxas fatal: version 9.5 >&2; exit 1"},
                "its nvcc cannot compile an empty kernel: ptxas fatal: version 9.5",
            ),
            ({"compile": "exit 3"}, "its nvcc cannot compile an empty kernel: exit status 3"),
        ],
    )
    def test_rejections(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], problem: str
    ) -> None:
        monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda", **options)))
        (toolkit,) = _toolchain.find_toolkits("13.0")
        assert toolkit.problem == problem
        assert not toolkit.usable
        assert toolkit.describe() == f"{tmp_path}/cuda [CUDA_HOME]: {problem}"

    def test_folder_that_does_not_exist(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        (toolkit,) = _toolchain.find_toolkits("13.0")
        assert toolkit.problem == "no such folder"

    def test_nvcc_that_cannot_be_executed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        home = make_toolkit(tmp_path / "cuda")
        (home / "bin/nvcc").chmod(0o644)
        monkeypatch.setenv("CUDA_HOME", str(home))
        (toolkit,) = _toolchain.find_toolkits("13.0")
        assert toolkit.problem == "its nvcc does not run"

    def test_other_minor_version_is_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda", release="13.2")))
        (toolkit,) = _toolchain.find_toolkits("13.0")
        assert toolkit.usable
        assert toolkit.describe().endswith(": CUDA 13.2 (warning: torch was built with CUDA 13.0)")

    @pytest.mark.parametrize("target", _toolchain.TARGETS)
    def test_conda_has_include_and_lib_in_a_folder_of_the_target(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
    ) -> None:
        home = make_toolkit(tmp_path / "conda")
        (home / target).mkdir(parents=True)
        (home / "lib64").rename(home / target / "lib")
        (home / "include").rename(home / target / "include")
        monkeypatch.setenv("PATH", str(home / "bin"), prepend=os.pathsep)
        (toolkit,) = _toolchain.find_toolkits("13.0")
        assert toolkit.describe() == f"{home} [nvcc on PATH]: CUDA 13.0"
        make_config(toolkit).prepare(tmp_path / "build")
        assert (tmp_path / "build/cuda/include/cuda_runtime.h").exists()
        assert (tmp_path / "build/cudart/libcudart.so").resolve() == home / target / "lib/libcudart.so"

    def test_cuda_home_needs_no_nvcc_on_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda")))
        assert shutil.which("nvcc") is None
        (toolkit,) = _toolchain.find_toolkits("13.0")
        assert toolkit.describe() == f"{tmp_path}/cuda [CUDA_HOME]: CUDA 13.0"

    def test_wheel_has_the_runtime_without_the_name_the_linker_looks_for(self, tmp_path: Path) -> None:
        home = make_toolkit(tmp_path / "cuda", without="lib64/libcudart.so")
        assert _toolchain.find_cudart(home) is None
        runtime = home / "lib/libcudart.so.13"
        runtime.parent.mkdir()
        runtime.touch()
        assert _toolchain.find_cudart(home) == runtime


def test_toolkit_requirement_takes_the_version_torch_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_requires = ["filelock", 'cuda-toolkit[cublas,cudart]==13.7.1; platform_system == "Linux"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: torch_requires)
    assert _toolchain.toolkit_requirement() == "cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.7.1"
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["filelock"])
    with pytest.raises(LookupError, match="names no CUDA toolkit in its requirements: is it a CPU-only build"):
        _toolchain.toolkit_requirement()


def test_toolkit_requirement_without_torch_is_one_line(run_python: RunPython) -> None:
    done = run_python("-S", "-m", "cuda_ext._toolchain")
    assert done.returncode == 1
    assert done.stdout == f"cuda_ext: torch is not installed for {sys.executable}; install it first\n"


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("8.0", ("8.0",)),
        ("8.0;9.0", ("8.0", "9.0a")),
        ("9.0a+PTX", ("9.0a+PTX",)),
        ("9.0, 8.6 8.0", ("8.0", "8.6", "9.0a")),
        ("8.9+PTX;8.9", ("8.9", "8.9+PTX")),
        ("10.0f;12.0", ("10.0f", "12.0")),
        ("Hopper", ("9.0a",)),
        ("ampere;HOPPER", ("8.0", "8.6", "9.0a")),
        ("Ampere+PTX", ("8.0", "8.6+PTX")),
        (";8.0;", ("8.0",)),
    ],
)
def test_arch_list(text: str, archs: tuple[str, ...]) -> None:
    assert _toolchain.arch_list(text) == archs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7.0", "expected 7.5 or newer, got '7.0'; the kernels need sm_75"),
        ("8.0;Volta", "got 'Volta'"),
        ("sm_80", "entries such as 8.0, 9.0a, 8.6+PTX, or one of Turing, Ampere, Ada, Hopper, Blackwell; got 'sm_80'"),
        ("9", "got '9'"),
        ("9.0z", "got '9.0z'"),
        ("8.0+ptx", "got '8.0+ptx'"),
    ],
)
def test_arch_list_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="TORCH_CUDA_ARCH_LIST: ") as refusal:
        _toolchain.arch_list(text)
    assert message in str(refusal.value)


def test_gencode_flags() -> None:
    assert _toolchain.gencode_flags(("8.0", "9.0a", "9.0a+PTX")) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]


def test_archs_come_from_the_variable_then_the_gpus_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.9")
    of_torch = "sm_80 sm_90"
    assert _toolchain.choose_archs([(9, 0)], of_torch) == ("8.9",)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
    assert _toolchain.choose_archs([(9, 0), (8, 6), (9, 0)], of_torch) == ("8.6", "9.0a")
    assert _toolchain.choose_archs([(7, 5), (6, 1)], of_torch) == ("7.5",)
    assert _toolchain.choose_archs([(7, 0)], of_torch) == ("8.0+PTX", "9.0a")
    assert _toolchain.choose_archs([], of_torch) == ("8.0+PTX", "9.0a")


@pytest.mark.parametrize(
    ("of_torch", "archs"),
    [
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", ("7.5", "8.0", "9.0a", "10.0", "12.0+PTX")),
        ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", ("7.5", "8.0+PTX", "9.0a")),
        ("sm_80 sm_90 sm_100 sm_110 sm_120 compute_120", ("8.0", "9.0a", "10.0", "11.0", "12.0+PTX")),
        ("sm_89 sm_86", ("8.6+PTX",)),
    ],
)
def test_without_gpus_the_library_is_for_those_of_torch(of_torch: str, archs: tuple[str, ...]) -> None:
    """The oldest of each major version, and PTX of the newest that is not for one device alone."""
    assert _toolchain.archs_like(of_torch) == archs


def test_a_torch_for_older_gpus_alone_is_refused() -> None:
    with pytest.raises(
        ValueError, match="expected a torch with CUDA for sm_75 or newer, got one for sm_50 sm_70; name"
    ):
        _toolchain.archs_like("sm_50 sm_70")


def test_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert _toolchain.choose_jobs(cores=8, memory_gib=100.0) == 8
    assert _toolchain.choose_jobs(cores=64, memory_gib=6.5) == 4
    assert _toolchain.choose_jobs(cores=2, memory_gib=0.3) == 1
    assert _toolchain.choose_jobs(cores=3, memory_gib=float("inf")) == 3
    monkeypatch.setenv("MAX_JOBS", "5")
    assert _toolchain.choose_jobs(cores=1, memory_gib=0.1) == 5
    for bad in ("0", "-1", "many"):
        monkeypatch.setenv("MAX_JOBS", bad)
        with pytest.raises(ValueError, match=f"MAX_JOBS: expected a positive integer, got '{bad}'"):
            _toolchain.choose_jobs(cores=1, memory_gib=1.0)


def write_all(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def test_memory_of_a_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000000 kB\nMemAvailable:    4194304 kB\n")
    assert _toolchain.available_memory_gib(meminfo, tmp_path) == 4.0
    write_all(tmp_path, {"memory.max": "max", "memory.current": 2**30})
    assert _toolchain.available_memory_gib(meminfo, tmp_path) == 4.0
    write_all(tmp_path, {"memory.max": 3 * 2**30})
    assert _toolchain.available_memory_gib(meminfo, tmp_path) == 2.0
    write_all(tmp_path, {"memory.stat": f"file {2**29}\ninactive_file {2**28}\nactive_file {2**28}"})
    assert _toolchain.available_memory_gib(meminfo, tmp_path) == 2.25


def test_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert _toolchain.available_cores(tmp_path) == 8
    for quota, cores in (("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1)):
        write_all(tmp_path, {"cpu.max": quota})
        assert _toolchain.available_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("membership", "limited", "version"),
    [
        ("0::/system.slice/run-1.scope", "system.slice/run-1.scope", 2),  # systemd-run, on a host
        ("0::/user.slice/job/step", "user.slice", 2),  # by a cgroup above
        ("4:memory:/job\n2:cpu,cpuacct:/job\n0::/", "{controller}/job", 1),
        ("4:memory:/docker/1234\n2:cpu,cpuacct:/docker/1234", "{controller}", 1),  # a container that sees a part
        ("", "", 2),
    ],
)
def test_limits_of_every_cgroup_that_a_process_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, limited: str, version: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    meminfo, own = tmp_path / "meminfo", tmp_path / "own"
    meminfo.write_text(f"MemAvailable: {64 * 2**20} kB\n")
    own.write_text(membership + "\n" * bool(membership))
    write_all(tmp_path / "another", {"memory.max": 1, "memory.current": 1, "cpu.max": "100000 100000"})
    assert _toolchain.available_memory_gib(meminfo, tmp_path, own) == 64.0
    assert _toolchain.available_cores(tmp_path, own) == 64
    memory, cpu = (tmp_path / limited.format(controller=controller) for controller in ("memory", "cpu"))
    if version == 2:
        write_all(memory, {"memory.max": 4 * 2**30, "memory.current": 2**30, "cpu.max": "200000 100000"})
    else:
        write_all(memory, {"memory.limit_in_bytes": 4 * 2**30, "memory.usage_in_bytes": 3 * 2**30 // 2})
        write_all(memory, {"memory.stat": f"inactive_file 0\ntotal_inactive_file {2**29}"})
        write_all(cpu, {"cpu.cfs_quota_us": 200000, "cpu.cfs_period_us": 100000})
    assert _toolchain.available_memory_gib(meminfo, tmp_path, own) == 3.0
    assert _toolchain.available_cores(tmp_path, own) == 2


class TestMakePlan:
    @pytest.fixture(autouse=True)
    def environment(self, no_toolkit: None, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("CUDA_EXT_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "CXX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    def test_without_a_toolkit_it_is_a_cpu_build(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("MAX_JOBS", "2")
        config = _build.configure()
        assert (config.cuda, config.archs) == (False, ())
        assert all(path.suffix == ".cpp" for path in config.sources)
        printed = capsys.readouterr().out
        assert "cuda_ext: no CUDA 13 toolkit was found; for the CUDA kernels set CUDA_HOME, or run\n  " in printed
        assert "cuda_ext: building the CPU kernels only (no CUDA 13 toolkit was found) with g++" in printed
        assert 2 <= config.minutes <= 6
        assert f", about {config.minutes} min from scratch\n" in printed
        assert config.stamp()["without_cuda"] == "no CUDA 13 toolkit was found"
        assert _build.local_version() == f"cpu.torch{torch.__version__.partition('+')[0]}"

    def test_with_a_toolkit_it_is_a_cuda_build(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "bad", release="12.1")))
        monkeypatch.setattr(_toolchain, "STANDARD_FOLDERS", (str(make_toolkit(tmp_path / "good")),))
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
        config = _build.configure()
        assert config.toolkit == Toolkit("standard folder", tmp_path / "good", "13.0")
        assert {path.suffix for path in config.sources} == {".cpp", ".cu"}
        assert "-gencode=arch=compute_86,code=sm_86" in config.nvcc_flags()
        printed = capsys.readouterr().out
        assert f"{tmp_path}/bad [CUDA_HOME]: is CUDA 12.1, but torch was built with CUDA 13.0\n" in printed
        assert "building the CPU and CUDA kernels (sm_86; CUDA 13.0)" in printed
        assert dataclasses.replace(config, archs=("86", "90a")).minutes > config.minutes
        assert config.stamp()["without_cuda"] == ""
        assert _build.local_version() == f"cu130.torch{torch.__version__.partition('+')[0]}"

    def test_cuda_can_be_declined(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda")))
        monkeypatch.setenv("CUDA_EXT_CUDA", "0")
        assert _build.configure().summary == "the CPU kernels only (CUDA_EXT_CUDA=0)"

    def test_cuda_can_be_required(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_EXT_CUDA", "1")
        requirement = "'cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.7.1'"
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["cuda-toolkit[cudart]==13.7.1"])
        with pytest.raises(_build.BuildError) as refusal:
            _build.configure()
        assert str(refusal.value) == (
            "cuda_ext: no CUDA 13 toolkit was found, but CUDA_EXT_CUDA=1 asks for the CUDA kernels; "
            f"set CUDA_HOME, or run\n  {sys.executable} -m pip install {requirement}"
        )
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: [])
        with pytest.raises(_build.BuildError, match=r"pip install 'cuda-toolkit\[nvcc,crt,nvvm,cccl,cudart\]'$"):
            _build.configure()

    def test_torch_without_cuda(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        assert not _build.configure().cuda
        reason = f"torch {torch.__version__} is a CPU-only build"
        assert f"cuda_ext: {reason}; for the CUDA kernels install a torch with CUDA\n" in capsys.readouterr().out
        monkeypatch.setenv("CUDA_EXT_CUDA", "1")
        with pytest.raises(
            _build.BuildError, match="but CUDA_EXT_CUDA=1 asks for the CUDA kernels; install a torch with"
        ):
            _build.configure()

    @pytest.mark.parametrize(
        ("variable", "value", "message"),
        [
            ("CUDA_EXT_CUDA", "yes", "cuda_ext: CUDA_EXT_CUDA: expected auto, 0 or 1, got 'yes'"),
            ("MAX_JOBS", "no", "cuda_ext: MAX_JOBS: expected a positive integer, got 'no'"),
            ("TORCH_CUDA_ARCH_LIST", "6.0", "cuda_ext: TORCH_CUDA_ARCH_LIST: expected 7.5 or newer, got '6.0'"),
            ("CXX", "no-such-compiler", "cuda_ext: the C++ compiler 'no-such-compiler' does not run; install g++"),
        ],
    )
    def test_refusals(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
    ) -> None:
        monkeypatch.setattr(_toolchain, "STANDARD_FOLDERS", (str(make_toolkit(tmp_path / "cuda")),))
        monkeypatch.setenv(variable, value)
        with pytest.raises(_build.BuildError) as refusal:
            _build.configure()
        assert str(refusal.value).startswith(message)

    def test_ninja_is_found_beside_this_python_and_missed_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scripts = str(Path(sys.executable).parent)
        path = os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if folder != scripts)
        monkeypatch.setenv("PATH", path)
        _build.configure()
        assert os.environ["PATH"] == f"{scripts}{os.pathsep}{path}"
        monkeypatch.setattr(shutil, "which", lambda command: None)
        with pytest.raises(
            _build.BuildError, match=f"^cuda_ext: ninja is missing; install it with\n  {sys.executable} -m"
        ):
            _build.configure()


def make_config(toolkit: Toolkit | None = None) -> _build.BuildConfig:
    return _build.BuildConfig("2.11.0", "g++ 12.2.0", toolkit, ("8.0", "9.0a", "9.0a+PTX") if toolkit else (), jobs=2)


class TestPrepare:
    def test_cpu_and_cuda_differ_in_one_header_and_not_in_the_flags(self, tmp_path: Path) -> None:
        toolkit = Toolkit("pip", make_toolkit(tmp_path / "cuda"), "13.0")
        header = tmp_path / "build/include/build_config.h"
        flags = make_config().cxx_flags(tmp_path / "build")
        assert make_config(toolkit).cxx_flags(tmp_path / "build") == flags
        assert f"-I{header.parent}" in flags

        make_config().prepare(tmp_path / "build")
        assert "#define CUDA_EXT_WITH_CUDA 0\n" in header.read_text()
        make_config(toolkit).prepare(tmp_path / "build")
        assert "#define CUDA_EXT_WITH_CUDA 1\n" in header.read_text()
        assert '#define CUDA_EXT_CUDA_ARCHS "sm_80, sm_90a"\n' in header.read_text()
        assert "#define CUDA_EXT_WITH_SM90A 1\n" in header.read_text()

    @pytest.mark.parametrize(("compiler", "old"), [("g++ 19.1.0", 0), ("clang 14.0.6", 0), ("clang 19.1.7", 1)])
    def test_clang_names_templates_as_torch_does(self, tmp_path: Path, compiler: str, old: int) -> None:
        config = dataclasses.replace(make_config(), compiler=compiler)
        assert config.cxx_flags(tmp_path).count("-fclang-abi-compat=17") == old

    def test_header_that_stays_the_same_is_not_written_again(self, tmp_path: Path) -> None:
        make_config().prepare(tmp_path)
        header = tmp_path / "include/build_config.h"
        os.utime(header, (1, 1))
        make_config().prepare(tmp_path)
        assert header.stat().st_mtime == 1

    def test_nvcc_leaves_its_messages_beside_the_object(self, tmp_path: Path) -> None:
        home = make_toolkit(tmp_path / "cuda toolkit")
        (home / "bin/nvcc").write_text('#!/bin/sh\necho "said of $*"; echo and more >&2; exit 3\n')
        config = make_config(Toolkit("pip", home, "13.0"))
        config.prepare(tmp_path / "build")
        command = [str(config.nvcc(tmp_path / "build")), "-c", "a b.cu", "-o", str(tmp_path / "a b.o"), "-O3"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 3
        assert done.stdout == (tmp_path / "a b.o.log").read_text() == f"said of {' '.join(command[1:])}\nand more\n"

    @pytest.mark.parametrize("name", ["gemm_sm90_bf16_kk.o", "gemm_sm90.cuda.o", "gemm_sm80_bf16.o", "attention.o"])
    def test_kernels_for_sm_90a_are_compiled_for_nothing_else(self, tmp_path: Path, name: str) -> None:
        home = make_toolkit(tmp_path / "cuda")
        (home / "bin/nvcc").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        config = make_config(Toolkit("pip", home, "13.0"))
        config.prepare(tmp_path / "not_sm90")
        target = tmp_path / "not_sm90" / name
        given = [*config.nvcc_flags(), "--compiler-options", "'-fPIC -O2'", "-c", "a b.cu", "-o", str(target)]
        command = [str(config.nvcc(tmp_path / "not_sm90")), *given]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        dropped = [] if "_sm90" not in name else ["-gencode=arch=compute_80,code=sm_80"]
        assert done.stdout.splitlines() == [argument for argument in given if argument not in dropped]
        assert len(set(given) - set(done.stdout.splitlines())) == len(dropped)

    def test_links_follow_the_toolkit(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            home = make_toolkit(tmp_path / name)
            make_config(Toolkit("pip", home, "13.0")).prepare(tmp_path / "build")
            assert (tmp_path / "build/cuda").resolve() == home
            assert (tmp_path / "build/cudart/libcudart.so").resolve() == home / "lib64/libcudart.so"
        make_config().prepare(tmp_path / "build")
        assert not (tmp_path / "build/cuda").is_symlink()


class TestSm90a:
    """Sources whose kernels need sm_90a."""

    def test_they_are_left_out_of_builds_without_it(self, tmp_path: Path) -> None:
        config = make_config(Toolkit("pip", tmp_path, "13.0"))
        older = dataclasses.replace(config, archs=("8.0", "8.9+PTX"))
        left_out = set(config.sources) - set(older.sources)
        assert left_out == {path for path in config.sources if path.suffix == ".cu" and "_sm90" in path.name}
        kernel, other = (
            _build.CSRC / "gemm/instantiations" / name for name in ("gemm_sm90_bf16_kk.cu", "gemm_sm80_bf16.cu")
        )
        assert kernel in left_out
        assert config.archs_of(kernel) == ("9.0a", "9.0a+PTX") and older.archs_of(kernel) == ()
        assert older.archs_of(other) == older.archs

    @pytest.mark.sampled
    def test_the_plan_then_says_so(self, tmp_path: Path) -> None:
        toolkit = Toolkit("pip", make_toolkit(tmp_path / "cuda"), "13.0")
        dataclasses.replace(make_config(toolkit), archs=("8.0",)).prepare(tmp_path / "build")
        caller = tmp_path / "caller.cpp"
        caller.write_text(
            """
#include <cstdio>
#include "gemm/gemm_cuda.h"
#include "rt/device.h"
using namespace cuda_ext;
// The device has wgmma; the kernel on mma.sync asks for 80 bytes.
rt::Device rt::describe_device(const char*) { return {.compute_capability = 90}; }
template <class T, Float32Product float32>
void GemmSm80<T, float32>::launch(const GemmParams&, const Restriction&, const AllocateWorkspace& allocate, void*) {
  allocate(80);
}
template struct cuda_ext::GemmSm80<half_t>;
template struct cuda_ext::GemmSm80<bfloat16_t>;
template struct cuda_ext::GemmSm80<float>;
template struct cuda_ext::GemmSm80<float, Float32Product::kTf32>;
int main() {
  GemmParams p;
  p.m = p.n = p.k = 64;
  p.a.dtype = p.b.dtype = p.out.dtype = Dtype::kBFloat16;
  p.a.row_stride = p.b.row_stride = 64;
  p.a.column_stride = p.b.column_stride = 1;
  std::puts(choose_gemm_sm90(p, Float32Product::kTf32, {}).refusal.c_str());
  const auto allocate = [](size_t bytes) {
    std::printf("%zu\\n", bytes);
    return Workspace{};
  };
  launch_gemm_cuda(p, allocate, nullptr, Float32Product::kTf32, {});
}
"""
        )
        sources = [caller, _build.CSRC / "gemm" / "gemm_cuda.cu"]
        subprocess.run([*compiler_for(tmp_path), *map(str, sources), "-o", str(tmp_path / "caller")], check=True)
        done = subprocess.run([str(tmp_path / "caller")], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [
            "the library has no kernels for sm_90a; build it with 9.0a in TORCH_CUDA_ARCH_LIST",
            "80",
        ]

    @pytest.mark.sampled
    @pytest.mark.parametrize("archs", [("8.0",), ("8.0", "9.0a")])
    def test_attention_then_needs_none_of_them(self, tmp_path: Path, archs: tuple[str, ...]) -> None:
        toolkit = Toolkit("pip", make_toolkit(tmp_path / "cuda"), "13.0")
        dataclasses.replace(make_config(toolkit), archs=archs).prepare(tmp_path / "build")
        expected = {({"8.0": "sm80", "9.0a": "sm90"}[arch], dim) for arch in archs for dim in _build.HEAD_DIMS}
        for kind in ("Forward", "Backward"):
            assert needed_launchers(tmp_path, "attention_cuda.cu", kind) == expected


def compiler_for(folder: Path) -> list[str]:
    """The command that compiles kernels as C++ with the configuration in `folder`."""
    flags = ["-std=c++20", f"-I{_build.CSRC}", f"-I{folder / 'build/include'}", "-x", "c++"]
    return [os.environ.get("CXX", "c++"), *flags]


def needed_launchers(folder: Path, source: str, kind: str) -> set[tuple[str, int]]:
    """(architecture, head dim) of the launchers that a source of attention calls."""
    target = folder / "dispatch.o"
    subprocess.run(
        [*compiler_for(folder), "-c", str(_build.CSRC / "attention" / source), "-o", str(target)], check=True
    )
    symbols = subprocess.run(["nm", "-C", "-u", str(target)], capture_output=True, text=True, check=True).stdout
    found = re.findall(rf"(sm\d+)::{kind}Launcher<.*?, (\d+)>::launch\(", symbols)
    return {(arch, int(dim)) for arch, dim in found}


class TestHeadDims:
    @pytest.mark.parametrize(
        ("listed", "dims"),
        [("", (64, 96, 128, 192, 256)), ("64,128", (64, 128)), (" 256 64 ", (64, 256)), ("128", (128,))],
    )
    def test_the_variable_lists_them(self, monkeypatch: pytest.MonkeyPatch, listed: str, dims: tuple[int, ...]) -> None:
        monkeypatch.setenv("CUDA_EXT_HEAD_DIMS", listed)
        assert _build.choose_head_dims() == dims

    def test_others_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_EXT_CUDA", "0")
        monkeypatch.setenv("CUDA_EXT_HEAD_DIMS", "64,80")
        with pytest.raises(
            _build.BuildError, match="HEAD_DIMS: expected some of 64, 96, 128, 192, 256, got 80; other head dims use"
        ):
            _build.configure()

    def test_sources_of_the_others_are_not_compiled(self, tmp_path: Path) -> None:
        config = make_config(Toolkit("pip", tmp_path, "13.0"))
        few = dataclasses.replace(config, head_dims=(64, 96, 128))
        left_out = {path.name for path in set(config.sources) - set(few.sources)}
        kinds = [(phase, dtype) for phase in ("fwd", "bwd") for dtype in ("bf16", "f16")]
        expected = {f"attention_{phase}_sm80_{dtype}_d{dim}.cu" for phase, dtype in kinds for dim in (192, 256)}
        expected |= {name.replace("sm80", "sm90") for name in expected}
        expected |= {f"attention_cache_sm80_{dtype}_d256.cu" for dtype in ("bf16", "f16", "f32")}
        expected |= {"attention_fwd_sm80_f32_d256.cu"}
        assert left_out == expected
        # Last, so that a build which is stopped has all others.
        assert {path.name for path in config.sources[-len(expected) :]} == left_out
        assert few.summary.endswith("; head dims 64, 96, 128 only)") and "head dims" not in config.summary
        assert few.stamp()["head_dims"] == [64, 96, 128]

    @pytest.mark.sampled
    def test_kernels_that_are_left_out_say_so(self, tmp_path: Path) -> None:
        toolkit = Toolkit("pip", make_toolkit(tmp_path / "cuda"), "13.0")
        config = dataclasses.replace(make_config(toolkit), head_dims=(64, 128))
        config.prepare(tmp_path / "build")
        assert needed_launchers(tmp_path, "attention_cuda.cu", "Forward") == {
            (arch, dim) for arch in ("sm80", "sm90") for dim in (64, 128)
        }
        assert needed_launchers(tmp_path, "attention_cache_cuda.cu", "Cache") == {("sm80", 64), ("sm80", 128)}
        caller = tmp_path / "caller.cpp"
        caller.write_text(
            """
#include <cstdio>
#include "attention/attention_cache.h"
#include "attention/attention_cuda.h"
#include "rt/device.h"
using namespace cuda_ext;
rt::Device rt::describe_device(const char*) { return {.compute_capability = 90}; }
template <class F> void say(F f) {
  try { f(); } catch (const std::exception& error) { std::puts(error.what()); }
}
int main() {
  AttentionBackwardParams p;
  CachedAttentionParams cached;
  p.dim = cached.dim = 160;
  p.dim_v = cached.dim_v = 128;
  p.dtype = cached.dtype = Dtype::kBFloat16;
  const auto allocate = [](size_t) { return Workspace{}; };
  say([&] { launch_attention_forward_cuda(p, allocate, nullptr); });
  say([&] { launch_attention_backward_cuda(p, allocate, nullptr); });
  say([&] { launch_attention_cache_cuda(cached, allocate, nullptr); });
}
"""
        )
        sources = [_build.CSRC / "attention" / name for name in ("attention_cuda.cu", "attention_cache_cuda.cu")]
        link = ["-static", "-Wl,--unresolved-symbols=ignore-all", "-o", str(tmp_path / "caller")]
        subprocess.run([*compiler_for(tmp_path), str(caller), *map(str, sources), *link], check=True)
        done = subprocess.run([str(tmp_path / "caller")], capture_output=True, text=True, check=True)
        told = (
            ": expected head dims whose CUDA kernels are in this library, those of 64, 128, got 160 of query and key "
            "and 128 of value; build it again without CUDA_EXT_HEAD_DIMS, which left theirs out"
        )
        ops = ["flash_attention", "flash_attention_backward", "flash_attention_with_kvcache"]
        assert done.stdout.splitlines() == [op + told for op in ops]

    def test_the_list_is_that_of_the_kernels(self) -> None:
        source = (_build.CSRC / "attention" / "head_dims.h").read_text()
        listed = re.search(r"kHeadDims\[\] = \{(.*)\};", source)
        assert listed and tuple(int(dim) for dim in re.findall(r"\{(\d+), \d+\}", listed[1])) == _build.HEAD_DIMS


def test_torch_helpers_take_the_toolkit_and_jobs_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = _build.torch_helpers()
    for name in ("MAX_JOBS", "CUDA_HOME"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setattr(helpers, "CUDA_HOME", "before")
    monkeypatch.setenv("PYTORCH_NVCC", "before")
    monkeypatch.delenv("CXX", raising=False)
    with _build.prepared(make_config(), tmp_path):
        assert os.environ["PYTORCH_NVCC"] == "before"
        assert (os.environ["MAX_JOBS"], os.environ["CUDA_HOME"], helpers.CUDA_HOME) == ("2", "before", "before")
        assert os.environ["CXX"] == str(tmp_path / "c++")
    assert "CXX" not in os.environ
    monkeypatch.setenv("CXX", "g++")
    with _build.prepared(make_config(Toolkit("pip", make_toolkit(tmp_path / "toolkit"), "13.0")), tmp_path):
        assert os.environ["PYTORCH_NVCC"] == str(tmp_path / "nvcc")
        assert os.environ["CUDA_HOME"] == helpers.CUDA_HOME == str(tmp_path / "toolkit")
    assert os.environ["CXX"] == "g++"


class TestPrecompiledHeaders:
    @pytest.fixture
    def calls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
        """Compiles a source with the script of a build, and returns the commands that it has run."""
        compiler, log = tmp_path / "compiler", tmp_path / "log"
        compiler.write_text(
            f'#!/bin/sh\necho "$@" >>{log}\n'
            'case "$*" in *c++-header*) [ -z "$BROKEN" ] || exit 1; shift $(($# - 1)); touch "$1" ;; esac\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        (tmp_path / "csrc/ops").mkdir(parents=True)
        (tmp_path / "csrc" / _precompiled.HEADER).touch()

        def run(source: str, prepare: bool = True) -> list[list[str]]:
            log.write_text("")
            script = tmp_path / "build/c++"
            if prepare:
                script.parent.mkdir(exist_ok=True)
                assert _precompiled.prepare(script.parent, tmp_path / "csrc") == script
            arguments = f"-MMD -MF x.o.d -O3 -c -c {tmp_path}/csrc/{source} -o x.o -std=c++17".split()
            subprocess.run([script, *arguments], check=True)
            return [line.split() for line in log.read_text().splitlines()]

        return run

    def test_the_first_op_makes_them_with_its_flags(
        self, calls: Callable[..., list[list[str]]], tmp_path: Path
    ) -> None:
        (made, compiled) = calls("ops/a.cpp")
        header = tmp_path / "csrc" / _precompiled.HEADER
        precompiled = tmp_path / "build/include/ops/torch_headers.h.gch"
        assert made == [*["-O3", "-std=c++17", "-w", "-x", "c++-header"], str(header), "-o", f"{precompiled}.new"]
        assert compiled[-2:] == ["x.o", "-std=c++17"]
        assert precompiled.exists()
        assert len(calls("ops/b.cpp")) == 1
        os.utime(header, (0, 2 * precompiled.stat().st_mtime))
        assert len(calls("ops/b.cpp")) == 2

    def test_other_sources_do_not(self, calls: Callable[..., list[list[str]]]) -> None:
        assert len(calls("gemm/a.cpp")) == 1

    def test_a_failure_is_not_repeated(
        self, calls: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BROKEN", "1")
        assert len(calls("ops/a.cpp")) == 2
        assert len(calls("ops/b.cpp", prepare=False)) == 1
        assert len(calls("ops/b.cpp")) == 2, "but the next build tries again"


def test_lock_is_exclusive_and_goes_with_its_holder(tmp_path: Path, run_python: RunPython) -> None:
    code = """
import sys
from pathlib import Path
from cuda_ext import _build
with _build.lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    with open(tmp_path / ".lock") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder.kill()
    holder.wait()
    with _build.lock(tmp_path):
        pass


def test_a_build_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # instead of permissions, which do not bind root
    refusal = f"^cuda_ext: expected a build folder that can be written, got {tmp_path}/file/build "
    refusal += r"\(Not a directory\); use a copy of the sources elsewhere$"
    with pytest.raises(_build.BuildError, match=refusal), _build.lock(tmp_path / "file/build"):
        pass


def test_git_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "SOURCE_ROOT", tmp_path)
    assert _build.git_revision() is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert _build.git_revision() is None
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    revision = git("rev-parse", "HEAD")[:12]
    assert _build.git_revision() == revision
    (tmp_path / "file").write_text("two")
    assert _build.git_revision() == f"{revision}-dirty"
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert _build.git_revision() is None


def test_sources_digest_sees_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "CSRC", tmp_path / "csrc")
    assert _build.sources_digest() is None
    (tmp_path / "csrc").mkdir()
    digests = [_build.sources_digest()]
    for name, text in (("a.h", "1"), ("a.h", "2"), ("b.h", "2")):
        (tmp_path / "csrc" / name).write_text(text)
        digests.append(_build.sources_digest())
    assert len(set(digests)) == 4
    (tmp_path / "csrc/b.h").unlink()
    assert _build.sources_digest() == digests[2]


class TestStamp:
    def test_the_library_under_test_fits(self) -> None:
        assert _stamp.mismatches(_stamp.read(), _stamp.running()) == []
        _stamp.check()

    @pytest.mark.parametrize("entry", list(_stamp.COMPARED))
    def test_each_entry_is_compared(self, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
        monkeypatch.setattr(_stamp, "read", lambda: {**_stamp.running(), entry: "0.1.2.3"})
        with pytest.raises(ImportError) as refusal:
            _stamp.check()
        name, here = _stamp.COMPARED[entry], _stamp.running()[entry]
        assert str(refusal.value) == (
            f"cuda_ext: the compiled library {_stamp.LIBRARY} does not fit: it was built for {name} 0.1.2.3, "
            f"but this process runs {name} {here}. Rebuild it with\n  {_stamp.build_command()}"
        )

    def test_all_that_differs_is_named(self) -> None:
        stamp = {**_stamp.running(), "torch": "1.0", "machine": "vax"}
        assert [sentence.split(",")[0] for sentence in _stamp.mismatches(stamp, _stamp.running())] == [
            "it was built for torch 1.0",
            "it was built for processor vax",
        ]

    def test_build_command_depends_on_where_the_package_lies(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert _stamp.build_command() == f"cd {ROOT} && {sys.executable} setup.py build_ext --inplace"
        monkeypatch.setattr(_stamp, "PACKAGE", tmp_path / "site-packages/cuda_ext")
        pip = f"{sys.executable} -m pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps ."
        assert _stamp.build_command().startswith(pip)

    @pytest.mark.sampled
    def test_stamp_is_compared_before_the_library_is_opened(self, package_copy: Path, run_python: RunPython) -> None:
        _stamp.write(package_copy / "cuda_ext", {**_stamp.read(), "torch": "1.0"})
        # Were it opened, the error would be that of the dynamic loader.
        (package_copy / "cuda_ext/_C.so").unlink()
        (package_copy / "cuda_ext/_C.so").write_text("not a library")
        done = run_python("-c", "from cuda_ext import gemm", path=package_copy)
        assert done.returncode == 1
        assert "ImportError: cuda_ext: the compiled library" in done.stdout
        assert f"built for torch 1.0, but this process runs torch {torch.__version__}. Rebuild it with" in done.stdout

    @pytest.mark.sampled
    @pytest.mark.parametrize("missing", ["_C.so", "_build_info.py"])
    def test_library_that_was_not_built(self, package_copy: Path, run_python: RunPython, missing: str) -> None:
        (package_copy / "cuda_ext" / missing).unlink()
        (package_copy / "setup.py").touch()
        (package_copy / "csrc").mkdir()
        done = run_python("-c", "import cuda_ext; cuda_ext.flash_attention", path=package_copy)
        command = f"cd {package_copy} && {sys.executable} setup.py build_ext --inplace"
        assert (
            f"ImportError: cuda_ext: the compiled library has not been built; build it with\n  {command}" in done.stdout
        )

    @pytest.mark.sampled
    def test_checkout_that_hides_an_installed_library(
        self, tmp_path: Path, package_copy: Path, run_python: RunPython
    ) -> None:
        checkout = tmp_path / "cuda_ext"
        shutil.copytree(ROOT / "cuda_ext", checkout, ignore=shutil.ignore_patterns("*.so", "_build_info.py"))
        done = run_python("-c", "import cuda_ext; cuda_ext.flash_attention", path=package_copy)
        expected = (
            f"ImportError: cuda_ext: {checkout} has not been built, and hides the installed {package_copy}/cuda_ext;"
        )
        assert f"{expected} start Python elsewhere, or build it with" in done.stdout

    def test_library_that_does_not_load(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library = tmp_path / "_C.so"
        library.write_text("not a library")
        monkeypatch.setattr(_stamp, "LIBRARY", library)
        with pytest.raises(ImportError, match=r"cannot load the compiled library: .*_C\.so: .* Rebuild it with\n"):
            _load._load_installed()


class TestPackage:
    def test_import_loads_nothing(self, run_python: RunPython) -> None:
        code = "import sys, cuda_ext; print(cuda_ext.__version__, {'torch', 'cuda_ext._load'} & set(sys.modules))"
        assert run_python("-c", code).stdout == f"{cuda_ext.__version__} set()\n"

    def test_every_public_name_is_there(self) -> None:
        assert set(cuda_ext.__all__) <= set(dir(cuda_ext))
        for name in cuda_ext.__all__:
            assert getattr(cuda_ext, name) is not None
        with pytest.raises(AttributeError, match="module 'cuda_ext' has no attribute 'gem'"):
            _ = cuda_ext.gem  # type: ignore[attr-defined]

    @pytest.mark.sampled(cases=2, slow=True)
    @pytest.mark.parametrize(
        "first",
        ["from cuda_ext import gemm", "from cuda_ext._gemm import linear", "import cuda_ext.nn"],
    )
    def test_gemm_is_the_function_whatever_is_imported_first(self, run_python: RunPython, first: str) -> None:
        code = f"{first}; import cuda_ext; print(type(cuda_ext.gemm).__name__, cuda_ext.gemm.__module__)"
        assert run_python("-c", code).stdout == "function cuda_ext._gemm\n"


class TestSetup:
    def test_without_torch_it_says_what_to_run(self, tmp_path: Path, run_python: RunPython) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('no torch')\n")
        done = run_python(str(ROOT / "setup.py"), "build_ext", path=tmp_path)
        assert done.returncode == 1
        assert done.stdout == (
            "cuda_ext is compiled against the torch it will run with, and this environment has none (no torch). Run: "
            "pip install 'torch>=2.11' 'setuptools>=77' ninja && pip install --no-build-isolation .\n"
        )

    @pytest.mark.sampled
    def test_pips_isolated_build_finds_the_torch_it_installs_for(self, run_python: RunPython) -> None:
        """pip hides the installed packages by removing their folder from sys.path."""
        code = """
import importlib.util, sys, sysconfig
sys.path[:] = [folder for folder in sys.path if folder != sysconfig.get_path("purelib")]
assert importlib.util.find_spec("torch") is None
from cuda_ext import _build
_build.find_torch()
before = list(sys.path)
_build.find_torch()
assert sys.path == before, "it adds the folder again"
import torch
print(torch.__version__)
"""
        assert run_python("-c", code).stdout == f"{torch.__version__}\n"

    @pytest.mark.parametrize(
        ("version", "says"),
        [("76.1.0", "expected setuptools 77 or newer, got 76.1.0; install it with"), ("", "setuptools is missing;")],
    )
    def test_a_setuptools_that_cannot_build_is_named(self, run_python: RunPython, version: str, says: str) -> None:
        code = f"""
import importlib.metadata, runpy, sys
def version(name, ask=importlib.metadata.version):
    if name != "setuptools":
        return ask(name)
    if not {version!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return {version!r}
importlib.metadata.version = version
sys.argv = ["setup.py", "build_ext", "--inplace"]
runpy.run_path({str(ROOT / "setup.py")!r}, run_name="__main__")
"""
        done = run_python("-c", code)
        assert done.returncode == 1
        assert done.stdout.startswith(f"cuda_ext: {says}")
        assert done.stdout.endswith("-m pip install 'setuptools>=77'\n")

    @pytest.mark.sampled
    def test_failure_is_one_message(self, tmp_path: Path, run_python: RunPython) -> None:
        source = copy_sources(tmp_path)
        done = run_python(str(source / "setup.py"), "--quiet", "build_ext", "--inplace", CUDA_EXT_CUDA="2")
        assert done.returncode == 1
        assert done.stdout == "cuda_ext: CUDA_EXT_CUDA: expected auto, 0 or 1, got '2'\n"

    @pytest.mark.sampled
    def test_builds_compile_what_changed_and_nothing_else(self, tmp_path: Path, run_python: RunPython) -> None:
        """On a small library: csrc/ops/library.cpp, csrc/launchers, and a source that knows nothing of CUDA, which is
        compiled first because of its name. The last build is a wheel, which must work where it is unpacked."""
        source = copy_sources(tmp_path)
        (source / "csrc/plain").mkdir()
        (source / "csrc/plain/gemm_sm80_plain.cpp").write_text("int plain() { return 0; }\n")

        def build(cuda: str, *command: str) -> set[str]:
            command = command or ("build_ext", "--inplace")
            done = run_python(str(source / "setup.py"), *command, CUDA_EXT_CUDA=cuda)
            assert done.returncode == 0, done.stdout
            names = ("library.cpp", "device_probe.cu", "gemm_sm80_plain.cpp")
            return {name for name in names if f"/{name} -o " in done.stdout}

        def load(path: Path) -> tuple[dict[str, Any], bool]:
            code = "import json; from cuda_ext import _load, _stamp;"
            code += "print(json.dumps([_stamp.read(), hasattr(_load.ops, 'has_kernel_image')]))"
            stamp, has_cuda = json.loads(run_python("-c", code, path=path).stdout)
            return stamp, has_cuda

        assert build("0") == {"library.cpp", "gemm_sm80_plain.cpp"}
        if _toolchain.compiler_version().startswith("g++"):
            commands = json.loads((source / "build/compile_commands.json").read_text())
            (command,) = (each["command"] for each in commands if each["file"].endswith("library.cpp"))
            # Lists the headers; one that was precompiled has a "!".
            listed = subprocess.run(f"{command} -H", shell=True, capture_output=True, text=True, cwd=source).stderr
            assert re.search(r"^! .*torch_headers\.h\.gch$", listed, re.MULTILINE)
        stamp, has_cuda = load(source)
        assert (stamp["cuda"], stamp["archs"], has_cuda) == (None, [], False)

        assert build("1") == {"library.cpp", "device_probe.cu"}
        stamp, has_cuda = load(source)
        assert has_cuda
        assert stamp["archs"] == list(_build.choose_archs())

        (source / "csrc/launchers/device_probe.h").touch()
        assert build("1") == {"library.cpp", "device_probe.cu"}
        commands = json.loads((source / "build/compile_commands.json").read_text())
        files = [str(Path(command["file"]).relative_to(source)) for command in commands]
        slowest = "csrc/plain/gemm_sm80_plain.cpp"
        assert files == [slowest, "csrc/launchers/device_probe.cu", "csrc/ops/library.cpp"]  # in the order of the build

        assert build("0", "bdist_wheel") == {"library.cpp"}
        (wheel,) = (source / "dist").iterdir()
        version = f"{cuda_ext.__version__}+cpu.torch{torch.__version__.partition('+')[0]}"
        assert wheel.name == f"cuda_ext-{version}-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl"
        shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
        assert load(tmp_path / "installed")[1] is False


def copy_sources(tmp_path: Path) -> Path:
    """A checkout with everything the build reads, but of csrc only what a library needs at least."""
    source = tmp_path / "checkout"
    generated = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    shutil.copytree(ROOT / "cuda_ext", source / "cuda_ext", ignore=generated)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, source / name)
    for name in ("README.md", "LICENSE"):
        (source / name).touch()
    shutil.copytree(ROOT / "csrc/launchers", source / "csrc/launchers")
    (source / "csrc/ops").mkdir()
    shutil.copy(ROOT / "csrc/ops/library.cpp", source / "csrc/ops/library.cpp")
    (source / "csrc" / _precompiled.HEADER).write_text("#pragma once\n#include <torch/library.h>\n")
    return source
