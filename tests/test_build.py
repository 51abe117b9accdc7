"""The build's decisions, its folder, and setup.py."""

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
from toolkits import make_config, make_toolkit

import cuda_ext
from cuda_ext import _build, _precompiled, _toolchain
from cuda_ext._toolchain import Toolkit

ROOT = Path(__file__).resolve().parent.parent
RunPython = Callable[..., subprocess.CompletedProcess[str]]


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

    def test_log_of_headers_that_was_cut_off_is_mended(self, tmp_path: Path) -> None:
        """As by a build that was killed. Without mending ninja compiles everything in every build."""
        (tmp_path / "build.ninja").write_text(
            "rule copy\n  command = cp $in $out && echo $out: $in header > $out.d\n  deps = gcc\n  depfile = $out.d\n"
            "build one.o: copy one.c\nbuild two.o: copy two.c\n"
        )
        for name in ("one.c", "two.c", "header"):
            (tmp_path / name).touch()

        def build() -> str:
            command = ["ninja", "-C", str(tmp_path)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        build()
        log = tmp_path / ".ninja_deps"
        whole = log.read_bytes()
        for cut_off in (whole[:-1], whole[:-22], whole[:-34], b"not a log"):
            log.write_bytes(cut_off)
            _build._mend_dependency_log(tmp_path)
            build()
            assert "no work" in build()


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
#include "gemm/grouped_gemm_sm80.h"
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
template <class T, Float32Product float32>
void GroupedGemmSm80<T, float32>::launch(const GemmParams&, void*) {}
template struct cuda_ext::GroupedGemmSm80<half_t>;
template struct cuda_ext::GroupedGemmSm80<bfloat16_t>;
template struct cuda_ext::GroupedGemmSm80<float>;
template struct cuda_ext::GroupedGemmSm80<float, Float32Product::kTf32>;
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


LAUNCHERS_SM89 = """
template <class A, class B>
void ScaledGemmSm89<A, B>::launch(const ScaledGemmParams&, void*) { std::puts("a kernel"); }
template <class A>
void ScaledGroupsSm89<A>::launch(const ScaledGemmParams&, void*) {}
template struct cuda_ext::ScaledGemmSm89<float8_e4m3_t, float8_e4m3_t>;
template struct cuda_ext::ScaledGemmSm89<float8_e4m3_t, float8_e5m2_t>;
template struct cuda_ext::ScaledGemmSm89<float8_e5m2_t, float8_e4m3_t>;
template struct cuda_ext::ScaledGemmSm89<float8_e5m2_t, float8_e5m2_t>;
template struct cuda_ext::ScaledGroupsSm89<float8_e4m3_t>;
template struct cuda_ext::ScaledGroupsSm89<float8_e5m2_t>;
"""


class TestSm89:
    """Sources whose kernels multiply FP8 by mma.sync."""

    KERNEL = _build.CSRC / "gemm/instantiations/scaled_gemm_sm89_e4m3_e4m3.cu"

    @pytest.mark.parametrize(
        ("archs", "kept", "code"),
        [
            (("7.5", "8.0+PTX", "9.0a"), (), ""),
            (("8.0", "8.9"), ("8.9",), "{89, false}"),
            (("8.0+PTX", "9.0a", "10.0", "12.0+PTX"), ("10.0", "12.0+PTX"), "{100, false}, {120, true}"),
        ],
    )
    def test_they_are_compiled_where_the_instruction_exists(
        self, tmp_path: Path, archs: tuple[str, ...], kept: tuple[str, ...], code: str
    ) -> None:
        home = make_toolkit(tmp_path / "cuda", compile="printf '%s\\n' \"$@\"")
        config = dataclasses.replace(make_config(Toolkit("pip", home, "13.0")), archs=archs)
        assert config.archs_of(self.KERNEL) == kept and (self.KERNEL in config.sources) == bool(kept)
        config.prepare(tmp_path / "build")
        header = (tmp_path / "build/include/build_config.h").read_text()
        assert f"#define CUDA_EXT_SM89_CODE {code}\n" in header
        target = tmp_path / "build" / f"{self.KERNEL.stem}.o"
        command = [str(config.nvcc(tmp_path / "build")), *config.nvcc_flags(), "", "-c", "a.cu", "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        dropped = set(_toolchain.gencode_flags(archs)) - set(_toolchain.gencode_flags(kept))
        assert done.stdout.splitlines() == [argument for argument in command[1:] if argument not in dropped]

    # Machine code runs on later devices of the same generation, PTX on all later ones; on Hopper wgmma multiplies FP8.
    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("archs", "served"),
        [(("8.0",), ()), (("8.0", "8.9"), (89,)), (("8.9+PTX",), (89, 100, 120, 121)), (("8.0", "12.0"), (120, 121))],
    )
    def test_other_devices_have_no_kernel(
        self, tmp_path: Path, archs: tuple[str, ...], served: tuple[int, ...]
    ) -> None:
        toolkit = Toolkit("pip", make_toolkit(tmp_path / "cuda"), "13.0")
        dataclasses.replace(make_config(toolkit), archs=archs).prepare(tmp_path / "build")
        caller = tmp_path / "caller.cpp"
        caller.write_text(
            """
#include <cstdio>
#include "gemm/scaled_gemm_cuda.h"
#include "gemm/scaled_gemm_sm89.h"
#include "rt/device.h"
using namespace cuda_ext;
int capability;
rt::Device rt::describe_device(const char*) { return {.compute_capability = capability, .num_sms = 4}; }
int main() {
  ScaledGemmParams p;
  p.m = p.n = p.k = 64;
  p.a.dtype = p.b.dtype = Dtype::kFloat8E4M3;
  for (const int device : {75, 80, 86, 89, 90, 100, 120, 121}) {
    capability = device;
    const ScaledGemmChoice choice = choose_scaled_gemm_cuda(p, {});
    if (choice.kernel == ScaledGemmChoice::Kernel::kNone)
      std::puts(choice.refusal.c_str());
    else
      launch_scaled_gemm_cuda(p, choice, [](size_t) { return Workspace{}; }, nullptr);
  }
}
"""
            + (LAUNCHERS_SM89 if served else "")
        )
        sources = [caller, _build.CSRC / "gemm" / "scaled_gemm_cuda.cu"]
        subprocess.run([*compiler_for(tmp_path), *map(str, sources), "-o", str(tmp_path / "caller")], check=True)
        done = subprocess.run([str(tmp_path / "caller")], capture_output=True, text=True, check=True)
        missing = "the library has no kernels of FP8 for this device; build it with the device's architecture in "
        expected = {device: f"the device has no mma.sync of FP8; it is sm_{device}" for device in (75, 80, 86)}
        expected |= dict.fromkeys((89, 100, 120, 121), f"{missing}TORCH_CUDA_ARCH_LIST")
        expected[90] = "the library has no kernels for sm_90a; build it with 9.0a in TORCH_CUDA_ARCH_LIST"
        expected |= dict.fromkeys(served, "a kernel")
        assert done.stdout.splitlines() == [expected[device] for device in sorted(expected)]


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
    for name in ("csrc/launchers", "csrc/python"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("csrc/ops/library.cpp", "csrc/ops/op.h", "csrc/base/dtype.h"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    (source / "csrc" / _precompiled.HEADER).write_text("#pragma once\n#include <torch/library.h>\n")
    return source
