"""The relay gets to the last test, whatever the tests do to their processes; and tests need no hypothesis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
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

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "tests" / "relay.py"), *arguments, str(tmp_path / "test_trouble.py")]
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_patience_begins_with_the_first_test(relay: Relay, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import time\ntime.sleep(5)")
    process = relay("--patience", "4", "-k", "first or last")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


@pytest.mark.slow
def test_no_tests_are_no_success(relay: Relay) -> None:
    process = relay("-k", "none_of_that_name")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert output.endswith("relay: no tests\n")


@pytest.mark.slow
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


@pytest.mark.slow
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
        [*command, "-k", "any_tensors or aligned_offsets", "tests/test_bucket.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_aligned_offsets PASSED" in done.stdout
    assert "test_any_tensors[cpu] SKIPPED" in done.stdout
    assert ": hypothesis is not installed\n" in done.stdout
