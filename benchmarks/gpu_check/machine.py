"""Properties of the machine, and what it lacks."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from typing import Any

from cuda_ext import _build, _stamp, _toolchain


class Refusal(Exception):
    """The check cannot run; the message says why and what to do."""


PROBE = """
import json, torch
from benchmarks import environment
print(json.dumps(environment.describe("cuda" if torch.cuda.is_available() else "cpu")))
"""


def probe(patience: float) -> dict[str, Any]:
    """environment.describe() from another process, because this one should not allocate GPU memory."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, cwd=_build.SOURCE_ROOT, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        raise Refusal(
            f"torch did not report within {patience:.0f} s whether there is a GPU; does `nvidia-smi` answer?"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise Refusal(f"{sys.executable} cannot query torch: {last}; choose another Python with PYTHON=...")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def arch_of(environment: dict[str, Any]) -> str:
    """The architecture of the GPU, such as "9.0a"; raises Refusal if there is none, or an unsupported one."""
    if "capability" not in environment:
        raise Refusal(
            f"expected a CUDA GPU, found none (torch {environment['torch']}). Run this where `nvidia-smi` lists one, "
            "with a torch built for CUDA; --dry-run needs none"
        )
    try:
        (arch,) = _toolchain.arch_list(environment["capability"])
    except ValueError:
        name, capability = environment["device"], environment["capability"]
        raise Refusal(f"expected a GPU of compute capability 7.5 or newer, got {name} ({capability})") from None
    return arch


def build_variables(arch: str) -> dict[str, str]:
    """Variables for the build: CUDA is required, so that a build without it fails, and all cores are used even if
    little memory is free, because time is short."""
    jobs = os.environ.get("MAX_JOBS") or str(_toolchain.available_cores())
    return {"CUDA_EXT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": arch, "MAX_JOBS": jobs}


def missing() -> list[str]:
    """What this machine lacks, with the consequence."""
    modules = {
        "pytest": "the tests cannot run",
        "numpy": "no conformance, and some tests cannot run",
        "hypothesis": "tests of random arguments are skipped",
        "matplotlib": "no plots",
    }
    found = [f"{name}: {effect}" for name, effect in modules.items() if importlib.util.find_spec(name) is None]
    if problem := _toolchain.setuptools_problem():
        found.append(f"setuptools: the library cannot be built; {' '.join(problem.split())}")
    _build.add_scripts_to_path()
    if not shutil.which("ninja"):
        found.append("ninja: the library cannot be built")
    if not _toolchain.compiler_version():
        found.append("a C++ compiler (c++, or what CXX names): the library cannot be built")
    return found


def sanitizer(cuda: str | None) -> str:
    """The path of compute-sanitizer, on PATH or in a toolkit."""
    name = "compute-sanitizer"
    if found := shutil.which(name):
        return found
    homes = [toolkit.home / "bin" for toolkit in _toolchain.find_toolkits(cuda)] if cuda else []
    return shutil.which(name, path=os.pathsep.join(map(str, homes))) or name


def head_dims() -> str:
    """The head dims of attention's kernels in the library; empty if it has all of them."""
    try:
        built = _stamp.read().get("head_dims", list(_build.HEAD_DIMS))
    except ImportError:
        return ""
    return "" if built == list(_build.HEAD_DIMS) else ", ".join(map(str, built))
