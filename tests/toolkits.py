"""Folders like CUDA toolkits, and machines without one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cuda_ext import _build, _toolchain
from cuda_ext._toolchain import Toolkit

PARTS = [
    "include/cuda_runtime.h",
    "include/crt/host_config.h",
    "nvvm/bin/cicc",
    "include/nv/target",
    "lib64/libcudart.so",
]
NVCC = """#!/bin/sh
case "$*" in
  *--dryrun*) echo "#\\$ TOP=$(dirname "$(readlink -f "$0")")/.." >&2 ;;
  *--version*) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  *) {compile} ;;
esac
"""


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def make_toolkit(home: Path, release: str = "13.0", compile: str = "exit 0", without: str = "") -> Path:
    """A folder like a CUDA toolkit, but for the file `without`; its nvcc runs the command `compile` to compile."""
    write_script(home / "bin/nvcc", NVCC.format(release=release, compile=compile))
    for part in PARTS:
        (home / part).parent.mkdir(parents=True, exist_ok=True)
        (home / part).touch()
    if without:
        (home / without).unlink()
    return home


def make_config(toolkit: Toolkit | None = None) -> _build.BuildConfig:
    return _build.BuildConfig("2.11.0", "g++ 12.2.0", toolkit, ("8.0", "9.0a", "9.0a+PTX") if toolkit else (), jobs=2)


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides every toolkit of this machine."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]))
    monkeypatch.setattr(_toolchain, "STANDARD_FOLDERS", ())
    monkeypatch.setattr(_toolchain, "_wheel_folders", list)
    assert _toolchain.find_toolkits("13.0") == []
