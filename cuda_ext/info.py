"""`python -m cuda_ext.info`: the information that a bug report needs, even if the installation does not work.

The first line is the verdict; the exit status is 1 if the package cannot be imported. Probes are independent: if one
fails, its error is reported instead of its result.

In a source checkout that has not been built, it reports on the installed package that the checkout hides.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cuda_ext
from cuda_ext import _build, _stamp, _toolchain

__all__ = ["main", "report"]

PACKAGES = ("cuda-toolkit", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "triton", "numpy", "setuptools", "ninja")
VARIABLES = re.compile(
    "(CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|KMP|GOMP)_.*"
    "|CXX|CC|CFLAGS|CXXFLAGS|LDFLAGS|LD_LIBRARY_PATH|LD_PRELOAD|MAX_JOBS|PATH|PYTHONPATH|VIRTUAL_ENV"
)
LIBRARIES = re.compile(r"lib(torch|c10|cuda|nccl|mkl|blas|openblas|gomp|iomp|omp|stdc\+\+)[\w.+-]*\.so|_C\.so|cuda_ext")
INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)


# How fast the kernels are on each major version: products of 16-bit matrices against the fastest library, attention
# against the fastest kernels. Measured on an H100 alone (benchmarks/results).
EXPECTATIONS = {
    7: "float16 about 0.6 of the fastest, bfloat16 and float32 in float32 arithmetic at a tenth of that speed; "
    "predicted (docs/model.md)",
    8: "about 0.9 of the fastest, predicted (docs/model.md)",
    9: "about 0.9 of the fastest, measured on an H100",
    10: "about 0.3 of the fastest, as others measured of such kernels, without tcgen05: they work, but slowly",
    12: "about 0.94 of the fastest, as others measured of such kernels",
}
HOPPER_WITHOUT_WGMMA = "about 0.6 of the fastest, predicted; build with TORCH_CUDA_ARCH_LIST=9.0a for wgmma"


def report() -> dict[str, Any]:
    """The report as a dictionary with one entry per section: the output of `python -m cuda_ext.info --json`."""
    error = _import_error()
    sections: dict[str, Callable[[], Any]] = {
        "verdict": lambda: _verdict(error),
        "package": _package,
        "import": lambda: "".join(traceback.format_exception(error)).strip() if error else "works",
        "build": _build_stamp,
        "versions": _versions,
        "machine": _machine,
        "toolkits": _toolkits,
        "gpus": _gpus,
        "libraries": _libraries,
        "environment": _environment,
    }
    return {title: _guarded(probe) for title, probe in sections.items()}


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _package() -> dict[str, Any]:
    return {
        "version": cuda_ext.__version__,
        "folder": str(_stamp.PACKAGE),
        "revision": _build.git_revision(),
        "build command": _stamp.build_command(),
    }


def _import_error() -> Exception | None:
    """The error of loading every public name, if any."""
    try:
        for name in cuda_ext.__all__:
            getattr(cuda_ext, name)
    except Exception as error:
        return error
    return None


def _verdict(error: Exception | None) -> str:
    if error is not None:
        return f"cuda_ext {cuda_ext.__version__} does not work: {error}"
    stamp = _stamp.read()
    if stamp["cuda"]:
        archs = ", ".join(_toolchain.sm_name(arch) for arch in stamp["archs"])
        head_dims = stamp.get("head_dims", list(_build.HEAD_DIMS))
        dims = "" if head_dims == list(_build.HEAD_DIMS) else f"; head dims {', '.join(map(str, head_dims))} only"
        kernels = f"CPU and CUDA kernels ({archs}; CUDA {stamp['cuda']}{dims})"
    else:
        kernels = f"CPU kernels only ({stamp['without_cuda']})"
    return f"cuda_ext {cuda_ext.__version__} works, with {kernels}, for torch {stamp['torch']}, in {_stamp.PACKAGE}"


def _build_stamp() -> dict[str, Any]:
    stamp = _stamp.read()
    digest = _build.sources_digest()
    return {
        **stamp,
        "sources": "not here"
        if digest is None
        else "unchanged"
        if digest == stamp["sources"]
        else "changed since the build",
    }


def _versions() -> dict[str, str]:
    versions = {"python": f"{platform.python_version()} ({sys.executable})", "torch": _guarded(_torch_version)}
    for name in PACKAGES:
        versions[name] = _installed_version(name)
    versions["compiler"] = _toolchain.compiler_version() or "none"
    versions["driver"] = _guarded(driver_version)
    return versions


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch_version() -> str:
    import torch

    threads, isa = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"{torch.__version__} (CUDA {torch.version.cuda}, {isa}, {threads} threads, {Path(torch.__file__).parent})"


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0]


def _machine() -> dict[str, Any]:
    words = set(Path("/proc/cpuinfo").read_text().split())
    return {
        "system": platform.platform(),
        "cores": _toolchain.available_cores(),
        "free memory": f"{_toolchain.available_memory_gib():.1f} GiB",
        "instruction sets": " ".join(name for name in INSTRUCTION_SETS if name in words),
    }


def _toolkits() -> list[str]:
    import torch

    if torch.version.cuda is None:
        return ["torch is a CPU-only build"]
    return [toolkit.describe() for toolkit in _toolchain.find_toolkits(torch.version.cuda)]


def _gpus() -> list[str]:
    import torch

    return [_gpu(device) for device in range(torch.cuda.device_count())]


def _gpu(device: int) -> str:
    import torch

    gpu = torch.cuda.get_device_properties(device)
    name = f"{device}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    has_kernel_image = getattr(getattr(torch.ops, _toolchain.NAMESPACE), "has_kernel_image", None)
    if has_kernel_image is None:
        return f"{name}: no CUDA kernels are loaded"
    capability, archs = (gpu.major, gpu.minor), _stamp.read()["archs"]
    if capability < _toolchain.OLDEST_ARCH:
        return f"{name}: the kernels need compute capability 7.5 or newer"
    if has_kernel_image(device):
        return f"{name}: {_kernels_for(capability, archs)}"
    (arch,) = _toolchain.arch_list(f"{gpu.major}.{gpu.minor}")
    return f"{name}: the library was built for {', '.join(archs)}; rebuild it with TORCH_CUDA_ARCH_LIST={arch}"


def _kernels_for(capability: tuple[int, int], archs: Sequence[str]) -> str:
    """Which kernels of a library for `archs`, such as ("8.0", "12.0+PTX"), a GPU runs, and how fast they should be.

    >>> _kernels_for((8, 6), ("8.0", "9.0a"))
    'mma.sync kernels, compiled for sm_80: about 0.9 of the fastest, predicted (docs/model.md)'
    """
    speed = EXPECTATIONS.get(capability[0], "not measured")
    if capability == (9, 0):
        if any(_toolchain.sm_name(arch) == "sm_90a" for arch in archs):
            return f"wgmma kernels, compiled for sm_90a: {speed}"
        speed = HOPPER_WITHOUT_WGMMA
    versions = {tuple(map(int, re.findall(r"\d+", arch))): arch for arch in archs}
    # Machine code runs on the same and later versions of a major version.
    if code := [version for version in versions if version[0] == capability[0] and version <= capability]:
        return f"mma.sync kernels, compiled for {_toolchain.sm_name(versions[max(code)])}: {speed}"
    return f"mma.sync kernels, compiled by the driver when they are first used: {speed}"


def _libraries() -> list[str]:
    """The shared libraries mapped into this process that affect results, threads and devices."""
    paths = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return sorted(path for path in paths if LIBRARIES.match(Path(path).name))


def _environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)}


def render(sections: dict[str, Any]) -> str:
    """The report as text: the verdict, then one heading per section, its entries indented below."""
    lines = [sections["verdict"]]
    for title, content in sections.items():
        if title == "verdict":
            continue
        lines.append(title)
        if isinstance(content, dict):
            content = [f"{key}: {value}" for key, value in content.items()]
        entries = content if isinstance(content, list) else [str(content)]
        lines += ["  " + entry.replace("\n", "\n  ") for entry in entries or ["none"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cuda_ext.info", description="Describes this installation of cuda_ext."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args()
    # torch warns if NumPy is missing, which is not needed here.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    sections = report()
    try:
        print(json.dumps(sections, indent=2) if options.json else render(sections), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if sections["import"] == "works" else 1


def _report_on_hidden_installation(package: Path) -> None:
    """Runs this module from `package`, after removing its own package from sys.path."""
    print(f"{_stamp.PACKAGE} has not been built; this report is about the installed {package}", file=sys.stderr)
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _stamp.PACKAGE.parent]
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda_ext"]:
        del sys.modules[name]
    runpy.run_module("cuda_ext.info", run_name="__main__")


if __name__ == "__main__":
    if not _stamp.is_built(_stamp.PACKAGE) and (package := _stamp.hidden_installation()):
        _report_on_hidden_installation(package)
    else:
        sys.exit(main())
