"""The report on an installation, whole and broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cuda_ext
from cuda_ext import _build, _stamp, info

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return info.report()


def test_report_of_a_working_installation(report: dict[str, Any]) -> None:
    assert report["import"] == "works"
    stamp = _stamp.read()
    kernels = f"CPU and CUDA kernels (sm_80, sm_90a; CUDA {stamp['cuda']})"
    if not stamp["cuda"]:
        kernels = f"CPU kernels only ({stamp['without_cuda']})"
    expected = f"cuda_ext {cuda_ext.__version__} works, with {kernels}, for torch {torch.__version__}, in "
    assert report["verdict"] == f"{expected}{_stamp.PACKAGE}"
    assert report["build"] == {**_stamp.read(), "sources": report["build"]["sources"]}
    assert report["versions"]["torch"].startswith(f"{torch.__version__} (CUDA {torch.version.cuda}, ")
    assert any(path.endswith("cuda_ext/_C.so") for path in report["libraries"])
    assert any("/libtorch_cpu.so" in path for path in report["libraries"])
    assert len(report["gpus"]) == torch.cuda.device_count()


def test_text_and_json_hold_the_same(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(info, "report", lambda: report)
    monkeypatch.setattr("sys.argv", ["info", "--json"])
    info.main()
    assert json.loads(capsys.readouterr().out) == report
    monkeypatch.setattr("sys.argv", ["info"])
    info.main()
    text = capsys.readouterr().out
    assert text.splitlines()[0] == report["verdict"]
    for title, content in report.items():
        assert title == "verdict" or f"{title}\n  " in text
        entries = content.values() if isinstance(content, dict) else content if isinstance(content, list) else [content]
        assert all(str(entry) in text for entry in entries)


@pytest.mark.sampled
def test_sources_that_changed_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = _stamp.read()["sources"]
    for here, verdict in ((digest, "unchanged"), ("0", "changed since the build"), (None, "not here")):
        monkeypatch.setattr(_build, "sources_digest", lambda here=here: here)
        assert info.report()["build"]["sources"] == verdict


def test_environment_shows_what_matters_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MAX_JOBS", "7")
    monkeypatch.setenv("SOME_PASSWORD", "secret")
    shown = info.report()["environment"]
    assert (shown["NCCL_DEBUG"], shown["MAX_JOBS"]) == ("INFO", "7")
    assert "SOME_PASSWORD" not in shown


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert info.report()["toolkits"] == ["torch is a CPU-only build"]


def test_public_name_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ext, "__all__", ["no_such_name"])
    assert info.report()["import"].endswith("ModuleNotFoundError: No module named 'cuda_ext.no_such_name'")


def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "PACKAGES", ("no-such-package", "setuptools"))
    versions = info.report()["versions"]
    assert versions["no-such-package"] == "not installed"
    assert versions["setuptools"][0].isdigit()


@pytest.mark.sampled
def test_reader_that_stops_reading_and_no_numpy(package_copy: Path) -> None:
    """`python -m cuda_ext.info | head -1`: the verdict and nothing else, and the status of a report that works."""
    (package_copy / "numpy.py").write_text("raise ModuleNotFoundError('no numpy here')\n")
    command = f"{sys.executable} -m cuda_ext.info 2>&1 | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=package_copy, capture_output=True, text=True)
    verdict, status = done.stdout.splitlines()
    assert verdict.startswith(f"cuda_ext {cuda_ext.__version__} works, with ")
    assert (status, done.stderr) == ("0", "")


ARCHS = ("7.5", "8.0", "8.6", "9.0a", "10.0", "12.0+PTX")


@pytest.mark.parametrize(
    ("capability", "has_kernel_image", "archs", "verdict"),
    [
        ((8, 6), None, ARCHS, "no CUDA kernels are loaded"),
        ((7, 0), False, ARCHS, "the kernels need compute capability 7.5 or newer"),
        (
            (8, 6),
            False,
            ("8.9", "9.0a"),
            "the library was built for 8.9, 9.0a; rebuild it with TORCH_CUDA_ARCH_LIST=8.6",
        ),
        ((9, 0), False, ("8.0",), "the library was built for 8.0; rebuild it with TORCH_CUDA_ARCH_LIST=9.0a"),
        ((7, 5), True, ARCHS, "mma.sync kernels, compiled for sm_75: float16 about 0.6 of the fastest, bfloat16 and"),
        ((8, 0), True, ARCHS, "mma.sync kernels, compiled for sm_80: about 0.9 of the fastest, predicted"),
        ((8, 9), True, ARCHS, "mma.sync kernels, compiled for sm_86: about 0.9 of the fastest, predicted"),
        ((9, 0), True, ARCHS, "wgmma kernels, compiled for sm_90a: about 0.9 of the fastest, measured"),
        ((9, 0), True, ("8.0+PTX",), "mma.sync kernels, compiled by the driver when they are first used: about 0.6"),
        ((10, 3), True, ARCHS, "mma.sync kernels, compiled for sm_100: about 0.3 of the fastest"),
        ((12, 1), True, ARCHS, "mma.sync kernels, compiled for sm_120: about 0.94 of the fastest"),
        ((13, 0), True, ARCHS, "mma.sync kernels, compiled by the driver when they are first used: not measured"),
    ],
)
def test_what_a_gpu_runs(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    has_kernel_image: bool | None,
    archs: tuple[str, ...],
    verdict: str,
) -> None:
    major, minor = capability
    gpu = types.SimpleNamespace(name="Fake GPU", major=major, minor=minor, total_memory=24 * 2**30)
    probe = staticmethod(lambda device: has_kernel_image)
    ops = type("Ops", (), {} if has_kernel_image is None else {"has_kernel_image": probe})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.ops, "cuda_ext", ops)
    monkeypatch.setattr(_stamp, "read", lambda: {"archs": list(archs), "sources": ""})
    (line,) = info.report()["gpus"]
    assert line.startswith(f"0: Fake GPU, sm_{major}{minor}, 24 GiB: {verdict}")


class TestBrokenInstallations:
    """Each must give a whole report and exit with 1."""

    @pytest.mark.sampled
    def test_no_library(self, package_copy: Path, run_python: RunPython) -> None:
        (package_copy / "cuda_ext/_C.so").unlink()
        report = read_report(run_python, package_copy)
        assert "ImportError: cuda_ext: the compiled library has not been built" in report["import"]
        problem = "cuda_ext: the compiled library has not been built"
        assert report["verdict"].startswith(f"cuda_ext {cuda_ext.__version__} does not work: {problem}")
        assert report["build"].startswith("ImportError: cuda_ext: the compiled library has not been built")

    @pytest.mark.sampled
    def test_other_torch(self, package_copy: Path, run_python: RunPython) -> None:
        _stamp.write(package_copy / "cuda_ext", {**_stamp.read(), "torch": "1.0"})
        report = read_report(run_python, package_copy)
        assert f"was built for torch 1.0, but this process runs torch {torch.__version__}" in report["import"]
        assert report["build"]["torch"] == "1.0"

    @pytest.mark.sampled
    def test_library_that_does_not_load(self, package_copy: Path, run_python: RunPython) -> None:
        (package_copy / "cuda_ext/_C.so").unlink()
        (package_copy / "cuda_ext/_C.so").write_text("not a library")
        assert "cannot load the compiled library" in read_report(run_python, package_copy)["import"]

    def test_no_torch(self, package_copy: Path, run_python: RunPython) -> None:
        (package_copy / "torch.py").write_text("raise ImportError('no torch here')\n")
        report = read_report(run_python, package_copy)
        assert "ImportError: no torch here" in report["import"]
        assert report["versions"]["torch"] == report["toolkits"] == report["gpus"] == "ImportError: no torch here"
        assert report["machine"]["cores"] >= 1


@pytest.mark.sampled
def test_checkout_without_a_library_reports_on_the_installed_package(tmp_path: Path, package_copy: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(_stamp.PACKAGE, checkout / "cuda_ext", ignore=shutil.ignore_patterns("*.so", "_build_info.py"))
    command = [sys.executable, "-m", "cuda_ext.info", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(package_copy)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    installed = f"{package_copy}/cuda_ext"
    assert done.stderr == f"{checkout}/cuda_ext has not been built; this report is about the installed {installed}\n"
    report = json.loads(done.stdout)
    assert report["package"]["folder"] == f"{package_copy}/cuda_ext"
    assert report["import"] == "works"


def read_report(run_python: RunPython, package: Path) -> dict[str, Any]:
    """Of an installation that does not work."""
    done = run_python("-W", "ignore", "-m", "cuda_ext.info", "--json", path=package)
    assert done.returncode == 1, done.stdout
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["versions"]["compiler"]
    return report
