"""Records a GPU's outputs of the conformance kernels as a reference for the emulator.

    python tests/simt/record.py                        # on a machine with a CUDA GPU
    python tests/simt/record.py --compile-only sm_90a  # anywhere with nvcc: only compiles and links
    python tests/simt/record.py --emulated --golden x  # anywhere: rehearses the recording on the emulator

nvcc compiles every conformance_*.cu that the GPU can run. Its kernels run on random inputs, and inputs and outputs are
stored in tests/simt/golden/<device>/<case>.npz, which test_conformance.py replays without a GPU. The outputs are also
compared with the references there: differences within a case's tolerance are reported as the device's rounding, all
others as faults, and the exit status is then 1. Needs torch, numpy and the CUDA toolkit; no network, no other package,
and no build of cuda_ext.
"""

from __future__ import annotations

import argparse
import re
import sys
import types
import zlib
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

try:
    import pytest  # noqa: F401
except ImportError:
    # The references are in test_conformance.py, whose import needs these names of pytest.
    class Marks:
        def __getattr__(self, name: str) -> Callable[..., Callable[[object], object]]:
            return lambda *_, **__: lambda function: function

    fake_pytest = types.ModuleType("pytest")
    fake_pytest.fixture = Marks().fixture  # type: ignore[attr-defined]
    fake_pytest.param = lambda *_, **__: None  # type: ignore[attr-defined]
    fake_pytest.mark = Marks()  # type: ignore[attr-defined]
    sys.modules["pytest"] = fake_pytest

import test_conformance as conformance
import torch
from harness import BUILD, CSRC, HERE, Fault, Library, find_toolkit

from benchmarks.gpu_check import isolated
from cuda_ext import _emulator, _toolchain

# Headers of instructions that only sm_90a has; later architectures lack wgmma and part of the others.
SM90_ONLY = re.compile(r'#include "arch/(?:barrier|tma|cluster|wgmma)\.cuh"')

NVCC_FLAGS = ("-shared", "-std=c++20", "-O2", "-Xcompiler", "-fPIC", "-Xfatbin=-compress-all")


def sources(arch: str) -> list[Path]:
    """The conformance kernels that a device of `arch` ("sm_90a") can run."""
    found = {path: path.read_text() for path in sorted(HERE.glob("conformance_*.cu"))}
    has_float8 = int(arch.removeprefix("sm_").rstrip("a")) >= 89
    return [
        path
        for path, text in found.items()
        if (arch == "sm_90a" or not SM90_ONLY.search(text)) and (has_float8 or "has_float8_mma" not in text)
    ]


def arch_of(capability: tuple[int, int]) -> str:
    """ "sm_90a" for (9, 0)."""
    major, minor = capability
    if (major, minor) < (8, 0):  # which conversions to tf32 need
        raise RuntimeError(f"expected a GPU of compute capability 8.0 or newer, got {major}.{minor}")
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def compile_for(arch: str, folder: Path) -> Path:
    """Builds the conformance library for devices of `arch` in `folder`, unless it is up to date."""
    kernels = [*sources(arch), *_emulator.LAUNCHING]
    target = folder / f"conformance-{arch}.so"
    inputs = [path.read_text() for path in (*kernels, HERE / "library.cpp")]
    # Without the compiler's path: a machine with a GPU uses what another one has compiled for it.
    key = [arch, str(torch.version.cuda), *NVCC_FLAGS, *inputs, *_emulator.headers(HERE)]
    if _emulator.is_made(target, key):
        return target
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is a CPU-only build; install one with CUDA")
    toolkit = find_toolkit()
    if toolkit is None:
        looked = "".join(f"\n  {toolkit.describe()}" for toolkit in _toolchain.find_toolkits(torch.version.cuda))
        raise RuntimeError(f"found no CUDA toolkit for torch {torch.__version__}; set CUDA_HOME. Looked at:{looked}")
    cudart = _toolchain.find_cudart(toolkit.home)
    assert cudart is not None  # a usable toolkit has it
    folder.mkdir(parents=True, exist_ok=True)
    code = arch.removeprefix("sm_")
    command = [
        *(str(toolkit.home / "bin" / "nvcc"), *NVCC_FLAGS),
        *(f"-gencode=arch=compute_{code},code={arch}", f"-I{CSRC}", f"-I{HERE}", "--threads=0"),
        # By path: a wheel has only libcudart.so.13, which the linker does not find by name.
        *("-cudart", "none", "-Xlinker", str(cudart), "-Xlinker", f"-rpath={cudart.parent}"),
        *("-x", "cu", *map(str, kernels), str(HERE / "library.cpp")),
    ]
    _emulator.run_compiler(target, [*command, "-o"], lambda: key)
    return target


def compare(name: str, got: np.ndarray, expected: np.ndarray) -> tuple[bool, str]:
    """Whether an output is correct, and a remark about it."""
    got, expected = conformance.with_one_nan(name, got), conformance.with_one_nan(name, expected)
    different = int((got != expected).sum()) if got.shape == expected.shape else max(got.size, expected.size)
    if different == 0:
        return True, "equal"
    if name not in conformance.TOLERANCE:
        return False, f"FAULT: {different} of {got.size} words differ, and none may"
    with np.errstate(all="ignore"):
        a, b = got.view(np.float32).astype(np.float64), expected.view(np.float32).astype(np.float64)
        largest = np.nanmax(np.abs(a - b) / np.maximum(np.abs(b), 1e-30))
    rounding = f"{different} of {got.size} words differ, by {largest:.2e} at most, relative"
    try:
        conformance.assert_same(name, got, expected)
    except AssertionError:
        # Where there is a tolerance, the hardware may round sums differently.
        if name == "special_functions" or not np.allclose(a, b, rtol=conformance.TOLERANCE[name], atol=1e-6):
            return False, f"FAULT: {rounding}; {conformance.TOLERANCE[name]:.2e} may be"
    return True, f"rounding: {rounding}"


def record_case(library: Library, folder: Path, seed: int, name: str) -> isolated.Answer:
    """Runs a case and stores its output."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    data = conformance.inputs_of(name, library.in_bytes(name) // 4, rng)
    try:
        got = library.run(name, data)
    except Fault as fault:
        return isolated.Answer(False, f"FAULT: {fault}", spoilt=True)
    np.savez_compressed(folder / f"{name}.npz", input=data, output=got)
    return isolated.Answer(*compare(name, got, conformance.references[name](data)))


def record(
    library: Library,
    folder: Path,
    seed: int,
    device: int | None = None,
    patience: float = isolated.PATIENCE,
    start_patience: float = isolated.START_PATIENCE,
) -> int:
    """Runs every case of fixed size in child processes and stores its output; returns the number of faults. `device`:
    the GPU, which this process must not have used."""

    def prepare() -> None:
        if device is not None:
            torch.cuda.set_device(device)
            torch.cuda.synchronize()

    folder.mkdir(parents=True, exist_ok=True)
    faults = 0
    for result in isolated.run(
        {"": cases(library)},
        lambda _, name: record_case(library, folder, seed, name),
        prepare=prepare,
        patience=patience,
        start_patience=start_patience,
    ):
        prefix = "" if result.answer.good or result.answer.text.startswith("FAULT") else "FAULT: "
        print(f"{result.case}: {prefix}{result.answer.text}", flush=True)
        faults += not result.answer.good
    return faults


def cases(library: Library) -> list[str]:
    """The cases of fixed size."""
    return sorted(name for name in library.index if library.in_bytes(name) > 0)


def describe_gpu(device: int) -> tuple[str, tuple[int, int]]:
    """Name and compute capability, queried in a child: children of a process that used a GPU cannot use it."""

    def ask(sender: Connection) -> None:
        found = torch.cuda.is_available() and device < torch.cuda.device_count()
        sender.send((torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)) if found else None)

    receiver, sender = isolated.FORK.Pipe(duplex=False)
    process = isolated.FORK.Process(target=ask, args=(sender,))
    process.start()
    sender.close()
    try:
        answer: tuple[str, tuple[int, int]] | None = receiver.recv()
    except EOFError:
        answer = None
    process.join()
    if answer is None:
        raise RuntimeError(
            "found no CUDA GPU to record from; run this where `nvidia-smi` lists one, with a torch built for CUDA, or "
            "try --compile-only sm_90a or --emulated"
        )
    return answer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-only", metavar="ARCH", help="compile and link for sm_80, sm_90a, ..., and stop")
    parser.add_argument(
        "--emulated", action="store_true", help="rehearse: compile if there is nvcc, and run on the emulator"
    )
    parser.add_argument("--device", type=int, default=0, help="index of the GPU (default: 0)")
    parser.add_argument("--seed", type=int, help="seed of the inputs (default: random, printed)")
    parser.add_argument(
        "--golden", type=Path, default=HERE / "golden", help="where to store (default: tests/simt/golden)"
    )
    options = parser.parse_args(arguments)
    if options.emulated and options.golden.resolve() == HERE / "golden":
        parser.error("--emulated: expected --golden with another folder than the one with the outputs of GPUs")
    try:
        if options.compile_only:
            print(compile_for(options.compile_only, BUILD))
            return 0
        if options.emulated:
            device, arch = "emulator", "sm_90a"
            if find_toolkit() is not None:
                compile_for(arch, BUILD)
            library = Library.build("conformance", conformance.SOURCES)
        else:
            device, capability = describe_gpu(options.device)
            arch = arch_of(capability)
            library = Library(compile_for(arch, BUILD))
    except RuntimeError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    seed = options.seed if options.seed is not None else int(np.random.default_rng().integers(2**31))
    folder = options.golden / re.sub(r"[^\w.]+", "-", device)
    print(f"{device} ({arch}), --seed {seed}", flush=True)
    faults = record(library, folder, seed, None if options.emulated else options.device)
    print(f"{len(cases(library))} cases, {faults} faults; outputs are in {folder}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
