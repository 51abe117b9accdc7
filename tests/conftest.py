from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from cuda_ext import _stamp

ROOT = Path(__file__).resolve().parent.parent

# Inputs are fresh in every run; the report's header says how to repeat one.
SEED = int(os.environ.get("CUDA_EXT_TEST_SEED", random.SystemRandom().randrange(2**31)))

settings.register_profile("cuda_ext", deadline=None, print_blob=True)
settings.load_profile("cuda_ext")


def pytest_report_header() -> str:
    return f"random inputs: CUDA_EXT_TEST_SEED={SEED}"


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seeds each test on its own, so that it sees the same numbers whichever tests ran before it."""
    seed = SEED ^ zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    """A folder to import `cuda_ext` from: its Python files, the stamp and a link to the library, free to be broken."""
    folder = tmp_path / "installed"
    shutil.copytree(_stamp.PACKAGE, folder / "cuda_ext", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "cuda_ext" / _stamp.LIBRARY.name).symlink_to(_stamp.LIBRARY)
    return folder


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python in a new process, away from the checkout, with `path` first among the places it imports from."""

    def run(*arguments: str, path: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )

    return run
