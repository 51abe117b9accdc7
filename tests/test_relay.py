"""The relay gets to the last test, whatever the tests do to their processes; and tests need no hypothesis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import relay as relay_module
from conftest import ROOT

Relay = Callable[..., "subprocess.Popen[str]"]

TESTS = """
import os, sys, time, types
import pytest

def test_first(): pass

def test_crashes(): os.abort()

def test_fails(): assert 1 == 2

def test_hangs(): time.sleep(99)

@pytest.fixture
def broken(): raise ValueError

def test_errs(broken): pass

@pytest.mark.skip
def test_skipped(): pass

def test_loses_the_gpu(monkeypatch):
    def synchronize(): raise RuntimeError("an illegal memory access\\nand much more")
    sys.modules["torch"] = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    )

def test_last(): assert "torch" not in sys.modules
"""


@pytest.fixture
def relay(tmp_path: Path) -> Relay:
    (tmp_path / "test_trouble.py").write_text(TESTS)

    def start(*arguments: str, files: Sequence[str] = ("test_trouble.py",)) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "tests" / "relay.py"), *arguments, *(str(tmp_path / f) for f in files)]
        # The start of a process takes most of the time: without plugins and coverage it is a sixth.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.mark.sampled
def test_gets_to_the_last_test(relay: Relay) -> None:
    process = relay("--patience", "6")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    words = {
        line.partition(" ")[0]: line for line in output.splitlines() if line.startswith(("lost ", "hung ", "crashed "))
    }
    assert words["crashed"].endswith("test_trouble.py::test_crashes")
    assert words["hung"].endswith("test_trouble.py::test_hangs")
    assert words["lost"].endswith("test_trouble.py::test_loses_the_gpu")
    assert "test_loses_the_gpu has cost this process the GPU: an illegal memory access" in output
    assert "and much more" not in output
    assert "in test_hangs" in output, "where it was when it was ended"
    counts = output.rstrip().splitlines()[-1].removeprefix("relay: ").split(", ")
    assert sorted(counts) == ["1 crashed", "1 hung", "1 lost", "1 skipped", "2 failed", "2 passed"]


def test_good_tests_pass(relay: Relay) -> None:
    process = relay("-k", "first or skipped or last")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert output.endswith("\nrelay: 2 passed, 1 skipped\n")


@pytest.mark.sampled
def test_patience_begins_with_the_first_test(relay: Relay, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import time\ntime.sleep(5)")
    process = relay("--patience", "4", "-k", "first or last")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


QUICK = """
import os, time
def test_passes(): pass
def test_last(): time.sleep(1)
"""


@pytest.mark.sampled
def test_several_processes_share_the_files(relay: Relay, tmp_path: Path) -> None:
    """A test that hangs holds up only the other tests of its process."""
    files = ("test_trouble.py", "test_a.py", "test_b.py")
    for name in files[1:]:
        (tmp_path / name).write_text(QUICK)
    record = tmp_path / "record"
    process = relay("--patience", "4", "--processes", "5", "--record", str(record), "-k", "not gpu", files=files)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    counts = output.rstrip().splitlines()[-1].removeprefix("relay: ").split(", ")
    assert sorted(counts) == ["1 crashed", "1 hung", "1 skipped", "2 failed", "6 passed"]
    lines = output.splitlines()
    of_file = {name: {line[:4] for line in lines if f"{name}::" in line and line.startswith("[")} for name in files}
    assert sorted(map(len, of_file.values())) == [1, 1, 1] and len(set.union(*of_file.values())) == 3
    (trouble,) = of_file["test_trouble.py"]
    assert f"relay: {trouble}a test hung; the rest goes on in a new process" in lines
    assert any(line.startswith(trouble) and "in test_hangs" in line for line in lines), "where it was"
    hung = next(i for i, line in enumerate(lines) if "a test hung" in line)
    assert all(any(f"{name}::test_last PASSED" in line for line in lines[:hung]) for name in files[1:])

    again = relay("--processes", "2", "--record", str(record), "-k", "passes or first", files=files)
    output, _ = again.communicate(timeout=120)
    assert "::" not in output.partition("\ncrashed ")[0] and again.returncode == 1
    assert not list(tmp_path.glob("record.*"))


def test_the_longest_files_are_shared_out_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", 9), ("b", 5), ("c", 4), ("d", 3)):
        (tmp_path / name).write_text("x" * size)
    assert relay_module.shared_out(["-m", "cuda", "d", "a", "b", "c"], 2) == [
        ["-m", "cuda", "d", "a"],
        ["-m", "cuda", "b", "c"],
    ]
    assert relay_module.shared_out(["a::test", "b", "-v"], 5) == [["a::test", "-v"], ["b", "-v"]]
    assert relay_module.shared_out(["-m", "cuda"], 1) == [["-m", "cuda"]]
    assert relay_module.shared_out(["-m", "cuda"], 2) == []


def test_more_patience_with_what_is_slow(tmp_path: Path) -> None:
    record = tmp_path / "record"
    lane = relay_module.Lane([], record, record, patience=15)
    for last, patience in (("gemm_compile", 60), ("gemm", 15), ("distributed_cuda", 60)):
        record.write_text(f"passed\ttest_compile.py::test_a\nbegun\ttest_{last}.py::test_a\n")
        assert lane._patience_now() == patience


@pytest.mark.sampled
def test_no_tests_are_no_success(relay: Relay) -> None:
    process = relay("-k", "none_of_that_name")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert output.endswith("relay: no tests\n")


@pytest.mark.sampled
def test_says_what_it_knows_when_it_is_stopped(relay: Relay) -> None:
    process = relay("-k", "first or hangs")
    assert process.stdout is not None
    end = time.monotonic() + 60
    while "test_hangs" not in (line := process.stdout.readline()):
        assert line and time.monotonic() < end
        if "test_first" in line:
            break
    time.sleep(1)
    os.killpg(process.pid, signal.SIGTERM)
    output = process.stdout.read()
    assert process.wait(100) == 1
    assert "relay: stopped before the end" in output
    assert output.endswith("relay: 1 passed, 1 begun\n")


@pytest.mark.sampled
def test_another_call_goes_on_where_one_was_stopped(relay: Relay, tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.write_text(
        "begun\ttest_trouble.py::test_first\npassed\ttest_trouble.py::test_first\n"
        "begun\ttest_trouble.py::test_fails\nfailed\ttest_trouble.py::test_fails\n"
        "begun\ttest_trouble.py::test_last\n"
    )
    process = relay("--record", str(record), "-k", "first or fails or last")
    output, _ = process.communicate(timeout=100)
    assert "test_last PASSED" in output and "test_first PASSED" not in output and "test_fails FAILED" not in output
    assert process.returncode == 1
    assert output.endswith("failed test_trouble.py::test_fails\nrelay: 2 passed, 1 failed\n")
    process = relay("--record", str(record), "-k", "first or last")
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and output.endswith("relay: 2 passed, 1 failed\n")


def test_without_hypothesis_its_tests_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "hypothesis.py").write_text("raise ModuleNotFoundError")
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", "-v"]
    done = subprocess.run(
        [*command, "--full", "-k", "any_tensors or aligned_offsets", "tests/test_bucket.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_aligned_offsets PASSED" in done.stdout
    assert "test_any_tensors[cpu] SKIPPED" in done.stdout
    assert ": hypothesis is not installed\n" in done.stdout
