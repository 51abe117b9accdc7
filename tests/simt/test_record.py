"""The recorder, with the emulator instead of a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import record
import test_conformance as conformance
import torch
from harness import BUILD, HERE, Library, find_toolkit


@pytest.fixture(scope="session")
def library() -> Library:
    return Library.build("conformance", conformance.SOURCES)


@pytest.mark.sampled(cases=1, slow=True)
@pytest.mark.skipif(find_toolkit() is None, reason="no CUDA toolkit")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_and_links(arch: str) -> None:
    """Works without the libraries of a driver. The library lists its cases, but cannot run them here."""
    target = record.compile_for(arch, BUILD)
    linked = ctypes.CDLL(str(target))
    linked.conformance_name.restype = ctypes.c_char_p
    names = {linked.conformance_name(i).decode() for i in range(linked.conformance_count())}
    assert {"shuffle", "cp_async", "mma_f16"} <= names
    assert Library(target).in_bytes("shuffle") == 4 * 64


def test_sources_are_chosen_by_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, header in (("one", "warp"), ("two", "wgmma"), ("three", "tma")):
        (tmp_path / f"conformance_{name}.cu").write_text(f'#include "arch/{header}.cuh"\n')
    (tmp_path / "conformance_four.cu").write_text("if constexpr (has_float8_mma()) {}\n")
    monkeypatch.setattr(record, "HERE", tmp_path)
    assert [path.stem for path in record.sources("sm_89")] == ["conformance_four", "conformance_one"]
    assert [path.stem for path in record.sources("sm_86")] == ["conformance_one"]
    assert len(record.sources("sm_90a")) == 4
    assert [record.arch_of(c) for c in ((8, 0), (8, 9), (9, 0), (12, 0))] == ["sm_80", "sm_89", "sm_90a", "sm_120"]
    with pytest.raises(RuntimeError, match=r"8\.0 or newer, got 7\.5"):
        record.arch_of((7, 5))


@pytest.mark.sampled
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(HERE / "record.py")], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("record: found no CUDA GPU to record from; run this where")


@pytest.mark.sampled
def test_works_without_pytest() -> None:
    """A machine with a GPU may have no pytest."""
    code = "import sys; sys.modules['pytest'] = None; sys.argv = ['record.py', '--help']; import record; record.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--compile-only" in done.stdout


def test_outputs_are_stored_and_replayed(library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record.record(library, tmp_path, seed=1) == 0
    stored = sorted(tmp_path.glob("*.npz"))
    assert {path.stem for path in stored} == {name for name in library.index if library.in_bytes(name) > 0}
    assert "shuffle: equal\n" in capsys.readouterr().out
    for path in stored:
        conformance.test_same_output_as_a_gpu(library, path)


@pytest.mark.parametrize("name", ["shuffle", "special_functions", "mma_f16"])
def test_a_wrong_output_is_detected(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The recorder compares with the reference, the replay with the emulator."""
    right = library.run
    only = {name: library.index[name]}

    def wrong(case: str, data: np.ndarray) -> np.ndarray:
        answer = right(case, data)
        answer[3] ^= 1 << 22
        return answer

    monkeypatch.setattr(library, "index", only)
    monkeypatch.setattr(library, "run", wrong)
    assert record.record(library, tmp_path, seed=2) == 1
    monkeypatch.setattr(library, "run", right)
    with pytest.raises(AssertionError, match="Mismatched elements: 1 "):
        conformance.test_same_output_as_a_gpu(library, tmp_path / f"{name}.npz")


@pytest.mark.sampled
def test_a_case_that_breaks_its_process_does_not_affect_others(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = library.run

    def breaking(case: str, data: np.ndarray) -> np.ndarray:
        if case == "ballot":
            raise record.Fault("illegal memory access")
        if case == "shuffle":
            time.sleep(99)
        if case == "sync_warp":
            os.abort()
        return run(case, data)

    bad = ("ballot", "shuffle", "sync_warp")
    index = {name: library.index[name] for name in (*bad, "elect_one", "shuffle_xor", "unpack")}
    monkeypatch.setattr(library, "index", index)
    monkeypatch.setattr(library, "run", breaking)
    assert record.record(library, tmp_path, seed=3, patience=3) == len(bad)
    assert {path.stem for path in tmp_path.glob("*.npz")} == index.keys() - set(bad)
    said = capfd.readouterr().out
    assert "ballot: FAULT: illegal memory access\n" in said
    assert "shuffle: FAULT: HUNG: no answer within 3 s, in breaking (test_record.py:" in said
    assert "sync_warp: FAULT: CRASHED: ended by SIGABRT, in breaking (test_record.py:" in said


@pytest.mark.sampled
def test_a_rehearsal_needs_another_folder() -> None:
    done = subprocess.run([sys.executable, str(HERE / "record.py"), "--emulated"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--emulated: expected --golden with another folder" in done.stderr


def test_rounding_within_the_tolerance_is_no_fault() -> None:
    exact = np.array([1.0, 2.0, 3.0], np.float32).view(np.uint32)
    good, remark = record.compare("mma_f16", exact + np.array([0, 1, 0], np.uint32), exact)
    assert good
    assert remark == "rounding: 1 of 3 words differ, by 1.19e-07 at most, relative"
    assert record.compare("shuffle", exact + 1, exact) == (False, "FAULT: 3 of 3 words differ, and none may")
