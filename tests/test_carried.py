"""A library that was compiled for a GPU elsewhere: used if it fits, else left alone, with the reason."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import build_in_time, carried, variants
from cuda_ext import _build, _stamp

FITS: dict[str, Any] = {**_stamp.running(), "archs": ["9.0a"], "sources": _build.sources_digest()}
WRONG = {
    "another torch": ({"torch": "2.0.0"}, r"it was built for torch 2\.0\.0, but this process runs torch "),
    "other sources": ({"sources": "abc"}, r"its sources are abc, and those of this checkout "),
    "another GPU": ({"archs": ["8.0"]}, r"it is for 8\.0, and this GPU is 9\.0a"),
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, in which no library is built."""

    def read() -> dict[str, Any]:
        raise ImportError

    monkeypatch.setattr(carried, "ROOT", tmp_path)
    monkeypatch.setattr(carried, "ARCHIVE", tmp_path / "gpu-library.tar.gz")
    monkeypatch.setattr(_stamp, "read", read)
    return tmp_path


def archive(checkout: Path, stamp: dict[str, Any]) -> None:
    content = {carried.STAMP: f"# Written by the build.\nSTAMP = {stamp!r}\n", "cuda_ext/_C.so": "a library"}
    with tarfile.open(checkout / "gpu-library.tar.gz", "w:gz") as tar:
        for name, text in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))


def test_a_library_that_fits_is_unpacked(checkout: Path) -> None:
    archive(checkout, FITS)
    assert carried.unpack("9.0a") == ""
    assert (checkout / "cuda_ext" / "_C.so").read_text() == "a library"
    assert "STAMP = " in (checkout / carried.STAMP).read_text()


@pytest.mark.parametrize("name", WRONG)
def test_another_one_is_left_alone(checkout: Path, name: str) -> None:
    different, reason = WRONG[name]
    archive(checkout, {**FITS, **different})
    assert re.match(rf"gpu-library\.tar\.gz: {reason}", carried.unpack("9.0a"))
    assert not (checkout / "cuda_ext").exists()


def test_without_an_archive(checkout: Path) -> None:
    assert carried.unpack("9.0a") == "there is no gpu-library.tar.gz"


def test_a_library_in_its_place_needs_no_archive(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stamp, "read", lambda: FITS)
    assert carried.unpack("9.0a") == ""
    assert carried.unpack("8.0") == "there is no gpu-library.tar.gz"


def test_the_build_compiles_nothing_then(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive(checkout, FITS)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr(build_in_time, "build", lambda *_: pytest.fail("it compiles"))
    assert build_in_time.main(["--minutes", "1"]) == 0
    assert "nothing is compiled" in capsys.readouterr().out


def test_variants_are_compared_with_this_library() -> None:
    case = ("cuda", "gemm", "gemm", "forward", "512 × 512 × 512", "bfloat16")
    alone = ("cuda", "gemm", "gemm", "forward", "1 × 1 × 1", "bfloat16")
    rounds = [{"this": {case: 4e-6, alone: 1.0}, "wide": {case: time}} for time in (2e-6, 3e-6)]
    assert variants.table(rounds, ["wide"], "this") == [
        "| case | this, µs | wide |",
        "|---|---:|---:|",
        "| gemm, forward, 512 × 512 × 512, bfloat16 | 4.0 | 0.500, 0.750 |",
        "| all 1, geometric mean | | 0.500, 0.750 |",
    ]


def test_variants_that_do_not_fit_are_left_out(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(variants, "ROOT", checkout)
    monkeypatch.setattr(variants, "archives", lambda: {"wide": checkout / "gpu-library.tar.gz"})
    archive(checkout, {**FITS, "torch": "2.0.0"})
    assert variants.main(["--device", "cpu"]) == 1
    assert "gpu-library.tar.gz is left out: it was built for torch 2.0.0" in capsys.readouterr().out


@pytest.mark.sampled(full=True)
def test_a_variant_runs_with_its_own_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "gpu-library-other.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        files = [*_stamp.PACKAGE.rglob("*.py"), _stamp.LIBRARY, *_build.CSRC.rglob("*.h")]
        for file in files:
            tar.add(file, arcname=str(file.relative_to(_build.SOURCE_ROOT)))
    monkeypatch.setattr(variants, "archives", lambda: {"other": packed})
    arguments = [
        "gemm",
        "--device",
        "cpu",
        "--minutes",
        "0.4",
        "--only",
        "gemm forward squares 512 × 512 × 512 float32",
    ]
    assert variants.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| case | this, µs | other |" and lines[-1].startswith("| all 1, ")
    assert all(0.2 < float(ratio) < 5 for ratio in re.findall(r"[\d.]+", lines[-1].rpartition(" | ")[2]))
