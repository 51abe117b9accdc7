"""Toolkits, architectures, and the jobs that a machine can run."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from toolkits import make_config, make_toolkit, write_script

from cuda_ext import _toolchain
from cuda_ext._toolchain import Toolkit

ROOT = Path(__file__).resolve().parent.parent
RunPython = Callable[..., subprocess.CompletedProcess[str]]


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
