"""Builds just in time."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import cuda_ext.dev
from cuda_ext import _build, _stamp
from cuda_ext._load import ops
from cuda_ext._toolchain import Toolkit

RunPython = Callable[..., subprocess.CompletedProcess[str]]

# A library of one op, so that the compiler is done in seconds.
SOURCE = """
#include <torch/library.h>
#include "build_config.h"
TORCH_LIBRARY(CUDA_EXT_NAMESPACE, m) {
  m.def("add_one(int x) -> int", [](int64_t x) { return x + 1; });
}
"""

BUILD = """
import sys
import cuda_ext

library = cuda_ext.dev.load([sys.argv[1]], build_root=sys.argv[2])
from cuda_ext._load import ops
from cuda_ext._toolchain import Toolkit
print("result", ops.add_one(41), library.is_relative_to(sys.argv[2]))
try:
    cuda_ext.dev.load([sys.argv[1]], build_root=sys.argv[2])
except RuntimeError as error:
    print(error)
"""


@pytest.fixture
def cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_EXT_CUDA", "0")


@pytest.mark.usefixtures("cpu_build")
def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").touch()  # instead of permissions, which do not bind root
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(_stamp, "ops_are_defined", lambda: False)
    with pytest.raises(_build.BuildError, match=r"pass build_root, or set TORCH_EXTENSIONS_DIR$"):
        cuda_ext.dev.load()


@pytest.mark.sampled
@pytest.mark.usefixtures("cpu_build")
def test_load_builds_and_survives_a_killed_build(tmp_path: Path, run_python: RunPython) -> None:
    """Also where another library is installed, and where a killed build has left behind the lock of torch's loader."""
    (tmp_path / "one.cpp").write_text(SOURCE)
    config = _build.configure()
    stale = tmp_path / "root/cuda_ext" / cuda_ext.dev._folder_name(config, [], []) / "lock"
    stale.parent.mkdir(parents=True)
    stale.touch()
    done = run_python("-c", BUILD, str(tmp_path / "one.cpp"), str(tmp_path / "root"))
    assert "result 42 True" in done.stdout, done.stdout
    assert "cuda_ext.dev.load: the ops of torch.ops.cuda_ext are already loaded in this process" in done.stdout
    assert done.returncode == 0
    assert not stale.exists()


@pytest.mark.sampled
@pytest.mark.usefixtures("cpu_build")
def test_compiler_errors_are_in_the_exception(tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "one.cpp").write_text("int f() { return undeclared_name; }\n")
    done = run_python("-c", BUILD, str(tmp_path / "one.cpp"), str(tmp_path / "root"))
    assert done.returncode == 1
    assert "RuntimeError: Error building extension" in done.stdout
    assert "undeclared_name" in done.stdout


def test_load_refuses_when_ops_are_loaded() -> None:
    assert ops is not None
    assert _stamp.ops_are_defined()
    with pytest.raises(RuntimeError, match=r"^cuda_ext\.dev\.load: the ops of torch\.ops\.cuda_ext are already loaded"):
        cuda_ext.dev.load()


class TestRefusals:
    @pytest.fixture(autouse=True)
    def nothing_loaded(self, cpu_build: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_stamp, "ops_are_defined", lambda: False)

    def test_missing_source(self, tmp_path: Path) -> None:
        with pytest.raises(_build.BuildError, match=f"expected sources that exist, got {tmp_path}/no.cpp$"):
            cuda_ext.dev.load([tmp_path / "no.cpp"])

    def test_sources_of_one_name(self, tmp_path: Path) -> None:
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "same.cpp").touch()
        with pytest.raises(_build.BuildError, match=r"expected sources with distinct names, got same\.cpp twice$"):
            cuda_ext.dev.load([tmp_path / "a/same.cpp", tmp_path / "b/same.cpp"])

    def test_no_sources(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_build, "CSRC", tmp_path / "csrc")
        with pytest.raises(_build.BuildError, match=f"no sources in {tmp_path}/csrc; use a source checkout"):
            cuda_ext.dev.load()

    def test_kernels_for_another_architecture(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = _build.BuildConfig("2.11.0", "g++ 12.2.0", Toolkit("pip", tmp_path, "13.0"), ("8.0", "8.9"), 2)
        monkeypatch.setattr(_build, "configure", lambda: config)
        source = _build.CSRC / "gemm/instantiations/gemm_sm90_bf16_kk.cu"
        told = "expected 9.0a in TORCH_CUDA_ARCH_LIST for gemm_sm90_bf16_kk.cu, got sm_80, sm_89"
        with pytest.raises(_build.BuildError, match=told):
            cuda_ext.dev.load([_build.CSRC / "gemm/gemm_cuda.cu", source])


def test_folders_of_different_builds_differ() -> None:
    configs = [
        _build.BuildConfig("2.11.0", "g++ 12.2.0", None, (), 2),
        _build.BuildConfig("2.12.0", "g++ 12.2.0", None, (), 2),
        _build.BuildConfig("2.11.0", "g++ 13.1.0", None, (), 2),
        _build.BuildConfig("2.11.0", "g++ 12.2.0", None, ("8.0",), 2),
    ]
    names = [cuda_ext.dev._folder_name(config, [], []) for config in configs]
    names += [cuda_ext.dev._folder_name(configs[0], ["-O0"], []), cuda_ext.dev._folder_name(configs[0], [], ["-O0"])]
    assert len(set(names)) == len(names)


def test_every_source_has_a_name_of_its_own() -> None:
    """Or `load()` without arguments would refuse them."""
    names = [path.name for path in _build.CSRC.rglob("*") if path.suffix in (".cpp", ".cu")]
    assert len(set(names)) == len(names)
