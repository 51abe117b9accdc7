"""Planted faults that only nvcc's code can have: each is detected, or changes no instruction."""

from __future__ import annotations

import multiprocessing
import random
import re
import shutil
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

import cuda_ext
from cuda_ext import testing
from ptx import build, kernels, parse
from ptx import test_runtime as runtime
from ptx.faults import FAULTS, SAME, Fault, table
from ptx.test_hints import missing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "simt"))
import test_conformance as conformance
from harness import HERE as SIMT
from harness import Library

# Planted without --full, one of each kind.
QUICK = ("mma with rows of A swapped", "a read-only load of what the kernel writes", "a proxy fence compiled away",
         "a cluster not requested")  # fmt: skip
TIMEOUT = 300  # seconds; a case takes a few seconds, more on a loaded machine
FORK = multiprocessing.get_context("fork")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        marks = {name: [] if name in QUICK else pytest.mark.sampled(full=True) for name in FAULTS}
        metafunc.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def check_product(m: int, n: int, k: int) -> None:
    """Multiplies small integers, whose sums are exact."""
    a, b = (torch.randint(-2, 3, shape).bfloat16() for shape in ((m, k), (k, n)))
    out = cuda_ext.gemm(a, b, out_dtype=torch.float32)
    assert torch.equal(out, a.float() @ b.float()), "the products differ from the reference"


def check_attention() -> None:
    q, k, v = (torch.randn(1, 130, 2, 64).bfloat16() for _ in range(3))
    out = cuda_ext.flash_attention(q, k, v, causal=True)
    reference = testing.reference_attention(q.double(), k.double(), v.double(), causal=True)
    assert (out - reference).abs().max() < 0.05, "the rows differ from the reference"


# Cases for kernels of the package.
OPS: dict[str, Callable[[], None]] = {
    "attention": check_attention,
    "gemm": lambda: check_product(127, 130, 67),
    "split_k": lambda: check_product(64, 64, 2048),
}


def check_op(library: kernels.Kernels, case: str) -> None:
    for options in conformance.MODES:
        with kernels.emulated(library, threads=1, **options):  # type: ignore[arg-type]
            OPS[case]()


@pytest.mark.parametrize("case", OPS)
def test_ops_without_a_fault(case: str) -> None:
    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    check_op(kernels.load(), case)


def check(path: Path, fault: Fault) -> None:
    """Runs the fault's case in all modes of the conformance tests. Raises an error if it detects the fault."""
    if fault.case in OPS:
        check_op(kernels.Kernels(path), fault.case)
    elif fault.source == "launches":
        check_launch(Library(path), fault.case)
    else:
        library, rng = Library(path), np.random.default_rng(random.getrandbits(64))
        for options in conformance.MODES:
            data = conformance.inputs_of(fault.case, library.in_bytes(fault.case) // 4, rng)
            with library.options(**options):
                got = library.run(fault.case, data)
            conformance.assert_same(fault.case, got, conformance.references[fault.case](data))


def check_launch(library: Library, case: str) -> None:
    if case in runtime.GOOD:
        runtime.test_accepted_launches(library, case)
    elif case in runtime.REFUSED:
        runtime.test_refused_launches(library, case)
    else:
        runtime.test_refused_launches_leave_no_error(library)


def find(path: Path, fault: Fault, answer: Connection) -> None:
    """Sends the error message of `check`, or nothing if it passes."""
    try:
        check(path, fault)
    except BaseException as error:  # pytest's failures do not derive from Exception
        return answer.send(str(error) or repr(error))
    answer.send("")


def source_of(fault: Fault, csrc: Path) -> Path:
    if "/" in fault.source:
        return csrc / f"{fault.source}.cu"
    return (build.HERE if fault.source == "launches" else SIMT) / f"{fault.source}.cu"


def instructions(csrc: Path, fault: Fault, folder: Path) -> list[tuple[str, list[str]]]:
    """nvcc's instructions for the source, by entry; registers are renumbered in order of first use."""
    toolkit = build.find_toolkit()
    assert toolkit is not None
    folder.mkdir()
    _, ptx = build.compile_with_nvcc(toolkit, source_of(fault, csrc), fault.arch, csrc, folder)
    module = parse.parse(ptx.read_text(), ptx.name)

    def lines(entry: parse.Entry) -> list[str]:
        numbers: dict[str, str] = {}
        texts = [
            f"{each.predicate} {each.opcode} {', '.join(each.operands)}"
            for each in entry.body
            if isinstance(each, parse.Instruction)
        ]
        return [
            re.sub(r"%[a-z]+\d+", lambda register: numbers.setdefault(register[0], f"%{len(numbers)}"), text)
            for text in texts
        ]

    return [(entry.name, lines(entry)) for entry in module.entries]


def detect(fault: Fault, csrc: Path, folder: Path) -> str:
    """The message of the build or test that detects the fault, or nothing."""
    others = kernels.OTHERS if "/" in fault.source else kernels.OTHERS[:1]
    launchers = [csrc / f"{name}.cu" for name in kernels.LAUNCHERS.get(fault.source.partition("/")[0], ())]
    sources = [source_of(fault, csrc), *launchers]
    try:
        path = build.build_library("wrong", sources, others, arch=fault.arch, csrc=csrc, folder=folder, stubs=True)
    except (RuntimeError, parse.Unsupported) as error:
        return str(error)
    if fault.case == "hints":
        return "; ".join(missing(fault.source, folder / f"{fault.source}-{fault.arch}.ptx"))
    # In a separate process, because static TLS space of a library is never released.
    received, sent = FORK.Pipe(duplex=False)
    child = FORK.Process(target=find, args=(path, fault, sent))
    child.start()
    sent.close()
    assert received.poll(TIMEOUT), f"no answer within {TIMEOUT} s"
    try:
        found: str = received.recv()
    except EOFError:
        found = "the process has died"
    child.join()
    return found


@pytest.mark.sampled
def test_a_fault_is_detected(name: str, tmp_path: Path) -> None:
    """Without the fault the case passes, here or in test_conformance.py, test_runtime.py and test_hints.py."""
    if build.find_toolkit() is None:
        pytest.skip(build.NO_NVCC)
    fault = FAULTS[name]
    csrc = shutil.copytree(build._emulator.CSRC, tmp_path / "csrc")
    file = csrc / fault.file
    file.write_text(file.read_text().replace(fault.right, fault.wrong, 1))
    if fault.found == SAME:
        right = instructions(build._emulator.CSRC, fault, tmp_path / "right")
        assert instructions(csrc, fault, tmp_path / "wrong") == right
        return
    found = detect(fault, csrc, tmp_path / "built")
    assert found, "nothing detected the fault"
    assert re.search(fault.found, found), f"something else detected the fault: {found}"


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_changes_the_sources(fault: Fault) -> None:
    assert fault.right in (build._emulator.CSRC / fault.file).read_text(), "the text that the fault changes is gone"


def test_the_faults_are_counted_in_the_documentation() -> None:
    """`PYTHONPATH=.:tests python -c "from ptx.faults import table; print(table())"` prints the table."""
    assert table() in (build._build.SOURCE_ROOT / "docs" / "emulator.md").read_text()
