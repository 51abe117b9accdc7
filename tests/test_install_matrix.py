"""tools/install_matrix.py: its table, its names, and how it reads the output of a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import install_matrix
from install_matrix import ENVIRONMENTS, Failure, Trial


def cells() -> list[str]:
    return [environment.cell(way) for environment in ENVIRONMENTS for way in environment.ways]


def test_every_cell_is_in_the_table_of_the_page() -> None:
    text = install_matrix.PAGE.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| 3.")]
    assert len(rows) == len(cells()) == len(set(cells()))
    for environment in ENVIRONMENTS:
        for way in environment.ways:
            start = environment.row(way)
            assert any(row.startswith(start) for row in rows), start
    results = [row.split(" | ")[3] for row in rows]
    assert all(result.startswith(("works: ", "refused: ")) for result in results)


def test_a_cell_without_a_result_keeps_its_row() -> None:
    first, second = cells()[:2]
    before = install_matrix.table({first: "works: before", second: "failed: before"}).splitlines()
    after = install_matrix.table({second: "works: a|b"}, before).splitlines()
    assert (after[2], after[4]) == (before[2], before[4])
    assert before[2].endswith("| works: before |")
    assert before[4].endswith("| not run |")
    assert after[3].endswith("| works: a\\|b |")


def test_a_compiler_that_is_missing_is_left_out(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/install_matrix.py"), "--folder", str(tmp_path), "g++-13"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": ""}, check=True)
    assert done.stdout == "3.11-torch2.13.0+cpu-g++-13: left out, as g++-13 is not on PATH\n"


def test_list() -> None:
    command = [sys.executable, str(ROOT / "tools/install_matrix.py"), "--list", "uv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["uv-3.11-torch2.11.0", "uv-isolated-3.11-torch2.11.0"]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    trial = Trial("trial", tmp_path, Path(sys.executable))
    trial.folder.mkdir()
    trial.log.write_text("what an earlier command printed, in more bytes than characters: äöü\n")
    return trial


def test_a_command_returns_its_last_line(trial: Trial) -> None:
    assert trial.run("printing", [sys.executable, "-c", "print('first'); print('last ✓'); print()"]) == "last ✓"


def test_a_compiler_is_set_for_every_command(tmp_path: Path) -> None:
    environment = next(environment for environment in ENVIRONMENTS if environment.cxx == "g++-13")
    trial = Trial("trial", tmp_path, Path(sys.executable), environment.variables)
    trial.folder.mkdir()
    script = "import os; print(os.environ['CXX'], os.environ['CUDA_EXT_CUDA'], os.environ['MORE'])"
    assert trial.run("printing", [sys.executable, "-c", script], {"MORE": "more"}) == "g++-13 0 more"


def test_a_command_that_fails(trial: Trial) -> None:
    with pytest.raises(Failure, match="failed while trying, exit status 3: the reason"):
        trial.run("trying", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])


def test_a_command_that_should_fail(trial: Trial) -> None:
    refused = [sys.executable, "-c", "print('cannot, do this'); print('more'); raise SystemExit(1)"]
    assert trial.run("trying", refused, fails="do this") == "cannot, do this"
    with pytest.raises(Failure, match="expected to fail with 'something else'"):
        trial.run("trying", refused, fails="something else")
    with pytest.raises(Failure, match="status 0"):
        trial.run("trying", [sys.executable, "-c", "print('cannot, do this')"], fails="do this")
