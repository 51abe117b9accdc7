"""Records what a GPU answers to the conformance kernels, for the emulator to answer the same.

    python tests/simt/record.py                        # on a machine with a CUDA GPU
    python tests/simt/record.py --compile-only sm_90a  # anywhere with nvcc: compiles and links, and runs nothing
    python tests/simt/record.py --emulated --golden x  # anywhere: rehearses the recording with the emulator's answers

Every conformance_*.cu that the GPU can run is compiled by nvcc, its kernels run with fresh inputs, and inputs and
outputs go to tests/simt/golden/<device>/<case>.npz, for test_conformance.py to replay without a GPU. On the way the
answers are compared with the references there: what differs within a case's tolerance is reported as the device's
rounding, anything else is a fault, and the exit status 1. It needs torch, numpy and the CUDA toolkit; no network, no
other package, and no build of cuda_ext.
"""

from __future__ import annotations

import argparse
import multiprocessing
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
    # test_conformance, which has the references, is a file of tests; as a module it needs names, and no more than that.
    class Marks:
        def __getattr__(self, name: str) -> Callable[..., Callable[[object], object]]:
            return lambda *_, **__: lambda function: function

    stand_in = types.ModuleType("pytest")
    stand_in.fixture = Marks().fixture  # type: ignore[attr-defined]
    stand_in.param = lambda *_, **__: None  # type: ignore[attr-defined]
    stand_in.mark = Marks()  # type: ignore[attr-defined]
    sys.modules["pytest"] = stand_in

import test_conformance as conformance
import torch
from harness import BUILD, CSRC, HERE, Fault, Library, find_toolkit

from cuda_ext import _emulator, _toolchain

# What a source includes that only sm_90 runs, and the architectures after it have no more (wgmma) or in part.
SM90_ONLY = re.compile(r'#include "arch/(?:barrier|tma|cluster|wgmma)\.cuh"')

FORK = multiprocessing.get_context("fork")


def sources(arch: str) -> list[Path]:
    """The conformance kernels that a device of `arch` ("sm_90a") runs."""
    found = sorted(HERE.glob("conformance_*.cu"))
    return [path for path in found if arch == "sm_90a" or not SM90_ONLY.search(path.read_text())]


def arch_of(capability: tuple[int, int]) -> str:
    """ "sm_90a" for (9, 0)."""
    major, minor = capability
    if (major, minor) < _toolchain.OLDEST_ARCH:
        raise RuntimeError(f"expected a GPU of compute capability 8.0 or newer, got {major}.{minor}")
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def compile_for(arch: str, folder: Path) -> Path:
    """The conformance library for devices of `arch`, in `folder`, where one that is current is kept."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is a CPU-only build; install one with CUDA")
    toolkit = find_toolkit()
    if toolkit is None:
        looked = "".join(f"\n  {toolkit.describe()}" for toolkit in _toolchain.find_toolkits(torch.version.cuda))
        raise RuntimeError(f"found no CUDA toolkit for torch {torch.__version__}; set CUDA_HOME. Looked at:{looked}")
    cudart = _toolchain.find_cudart(toolkit.home)
    assert cudart is not None  # a usable toolkit has it
    folder.mkdir(parents=True, exist_ok=True)
    kernels = sources(arch)
    code = arch.removeprefix("sm_")
    command = [
        *(str(toolkit.home / "bin" / "nvcc"), "-shared", "-std=c++20", "-O2", "-Xcompiler", "-fPIC"),
        *(f"-gencode=arch=compute_{code},code={arch}", f"-I{CSRC}", f"-I{HERE}", "--threads=0"),
        # By its path: a wheel has libcudart.so.13 alone, which the linker would not find by its name.
        *("-cudart", "none", "-Xlinker", str(cudart), "-Xlinker", f"-rpath={cudart.parent}"),
        *("-x", "cu", *map(str, kernels), str(HERE / "library.cpp")),
    ]
    target = folder / f"conformance-{arch}.so"
    inputs = [path.read_text() for path in (*kernels, HERE / "library.cpp")]
    _emulator.make(target, [*command, "-o"], [*inputs, *_emulator.headers(HERE)])
    return target


def compare(name: str, got: np.ndarray, expected: np.ndarray) -> tuple[bool, str]:
    """Whether an answer is as the reference says, and what there is to say about it."""
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
        # A sum that is rounded otherwise is the hardware's right where its tolerance allows it.
        if name == "special_functions" or not np.allclose(a, b, rtol=conformance.TOLERANCE[name], atol=1e-6):
            return False, f"FAULT: {rounding}; {conformance.TOLERANCE[name]:.2e} may be"
    return True, f"rounding: {rounding}"


def record(library: Library, folder: Path, seed: int, names: Sequence[str] | None = None) -> int:
    """Runs every case of fixed size, or those of `names`, and stores its answer; returns how many are faults."""
    folder.mkdir(parents=True, exist_ok=True)
    faults = 0
    for name in cases(library) if names is None else names:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        data = conformance.inputs_of(name, library.in_bytes(name) // 4, rng)
        try:
            got = library.run(name, data)
        except Fault as fault:
            print(f"{name}: FAULT: {fault}", flush=True)
            faults += 1
            continue
        np.savez_compressed(folder / f"{name}.npz", input=data, output=got)
        good, remark = compare(name, got, conformance.references[name](data))
        print(f"{name}: {remark}", flush=True)
        faults += not good
    return faults


def cases(library: Library) -> list[str]:
    """Those of fixed size."""
    return sorted(name for name in library.index if library.in_bytes(name) > 0)


def record_in_children(library: Library, folder: Path, seed: int, device: int | None, patience: float = 30) -> int:
    """`record`, each case in a process that it may spoil; on `device`, which this one has not used.

    After a bad access to its memory a GPU is lost to a process, and a kernel that waits for ever never comes back. So a
    process ends with the first fault, or after `patience` seconds in silence, and another one does the rest.
    """
    names, faults = cases(library), 0
    while names:
        progress, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_record_until_fault, args=(library, folder, seed, device, names, sender))
        process.start()
        sender.close()
        fault = 0
        while names and not fault:
            name = names.pop(0)
            if not progress.poll(patience):
                fault = 1
                print(f"{name}: FAULT: no answer within {patience:g} s", flush=True)
            else:
                try:
                    fault = progress.recv()
                except EOFError:
                    fault = 1
                    process.join()
                    print(f"{name}: FAULT: the process has ended, exit status {process.exitcode}", flush=True)
            faults += fault
        process.kill()
        process.join()
    return faults


def _record_until_fault(
    library: Library, folder: Path, seed: int, device: int | None, names: Sequence[str], sender: Connection
) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    for name in names:
        faults = record(library, folder, seed, [name])
        sender.send(faults)
        if faults:
            return


def describe_gpu(device: int) -> tuple[str, tuple[int, int]]:
    """Its name and compute capability, by a process of its own: children of one that uses a GPU cannot use it."""

    def ask(sender: Connection) -> None:
        found = torch.cuda.is_available() and device < torch.cuda.device_count()
        sender.send((torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)) if found else None)

    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=ask, args=(sender,))
    process.start()
    sender.close()
    try:
        answer: tuple[str, tuple[int, int]] | None = receiver.recv()
    except EOFError:
        answer = None
    process.join()
    if answer is None:
        raise RuntimeError(
            "found no CUDA GPU, whose answers are to be recorded; run this where `nvidia-smi` lists one, with a "
            "torch built for CUDA, or try --compile-only sm_90a or --emulated"
        )
    return answer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-only", metavar="ARCH", help="compile and link for sm_80, sm_90a, ..., and stop")
    parser.add_argument(
        "--emulated", action="store_true", help="a rehearsal: compile, where nvcc is, and let the emulator answer"
    )
    parser.add_argument("--device", type=int, default=0, help="index of the GPU (default: 0)")
    parser.add_argument("--seed", type=int, help="of the inputs (default: a fresh one, which is printed)")
    parser.add_argument(
        "--golden", type=Path, default=HERE / "golden", help="where to store (default: tests/simt/golden)"
    )
    options = parser.parse_args(arguments)
    if options.emulated and options.golden.resolve() == HERE / "golden":
        parser.error("--emulated: expected --golden with another folder than that of what GPUs answered")
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
    faults = record_in_children(library, folder, seed, None if options.emulated else options.device)
    print(f"{len(cases(library))} cases, {faults} faults; answers are in {folder}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
