"""The static gates (tools/static_gates.py) on the built library, and on kernels that must fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from cuda_ext import _stamp, _toolchain

sys.path.insert(0, str(ROOT / "tools"))
import static_gates
from static_gates import Kernel, Loop, Rule

BUILT_FOR = _stamp.read()["cuda"]
pytestmark = pytest.mark.skipif(BUILT_FOR is None, reason="the library was built without CUDA")

SPILLS = """
__global__ void __launch_bounds__(1024, 2) kernel(float* p) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = v[63 - i] * v[i];
}
"""
INDEXES_AT_RUN_TIME = """
__global__ void __launch_bounds__(128) kernel(const int* at, float* p) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = p[i * 128 + threadIdx.x];
  for (int i = 0; i < 100; ++i) v[at[i]] += v[at[i + 1]];
  p[threadIdx.x] = v[at[threadIdx.x]];
}
"""
HAS_NO_BOUNDS = "__global__ void kernel(float* p) { p[threadIdx.x] = 1; }"
IS_FINE = "__global__ void __launch_bounds__(128) kernel(float* p) { p[threadIdx.x] = 1; }"
# The sum of two products, whose accumulator is modified between them if TOUCHED.
PRODUCTS = """
__device__ void product(float (&d)[4], unsigned long long a, unsigned long long b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}
__global__ void __launch_bounds__(128) kernel(float* out, unsigned long long a, unsigned long long b) {
  float d[4] = {};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  product(d, a, b);
#ifdef TOUCHED
  d[0] += 1.0f;
#endif
  product(d, a, b);
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = d[i];
}
"""


READS_BEFORE_IT_MULTIPLIES = """
__global__ void __launch_bounds__(32) kernel(const unsigned* from, const int* where, float* to, int turns) {
  float d[4] = {};
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    unsigned x[6];
    for (int i = 0; i < 6; ++i) x[i] = from[where[turn * 6 + i]];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]));
  }
  for (int i = 0; i < 4; ++i) to[threadIdx.x * 4 + i] = d[i];
}
"""


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    return static_gates.read_kernels(_stamp.LIBRARY)


def compiled(folder: Path, source: str, *flags: str) -> tuple[list[Kernel], str]:
    """The kernels of the compiled `source`, and nvcc's messages."""
    toolkit = next((t for t in _toolchain.find_toolkits(str(torch.version.cuda)) if t.usable), None)
    if toolkit is None:
        pytest.skip("no CUDA toolkit")
    (folder / "kernel.cu").write_text(source)
    command = [str(toolkit.home / "bin/nvcc"), "-std=c++20", *_toolchain.gencode_flags(["9.0a"]), *flags, "-c"]
    done = subprocess.run([*command, "kernel.cu"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return static_gates.read_kernels(folder / "kernel.o"), done.stdout + done.stderr


def test_every_kernel_of_the_library_passes(kernels: list[Kernel]) -> None:
    stamp = _stamp.read()
    assert {kernel.arch for kernel in kernels} == {_toolchain.sm_name(arch) for arch in stamp["archs"]}
    assert static_gates.faults(kernels) == []
    assert static_gates.compiler_complaints(static_gates.build_log(stamp)) == []


def test_tables_are_current(kernels: list[Kernel]) -> None:
    cuda, written = static_gates.read_document()
    if cuda != BUILT_FOR:
        pytest.skip(f"docs/kernels.md is of CUDA {cuda}, the library of {BUILT_FOR}")
    for arch, table in static_gates.tables(kernels).items():
        assert written.get(arch) == table, "run: python tools/static_gates.py --write"


ANY = (Rule("kernel"),)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (SPILLS, "expected everything in registers, got"),
        (INDEXES_AT_RUN_TIME, "expected everything in registers, got"),
        (HAS_NO_BOUNDS, "expected launch bounds, got none"),
    ],
)
def test_bad_kernel_is_a_fault(tmp_path: Path, source: str, complaint: str) -> None:
    (fault,) = static_gates.faults(compiled(tmp_path, source)[0], ANY)
    assert fault.startswith(f"sm_90a kernel: {complaint}")


def test_loop_with_a_long_lead_is_a_fault(tmp_path: Path) -> None:
    kernels, _ = compiled(tmp_path, READS_BEFORE_IT_MULTIPLIES)
    assert static_gates.faults(kernels, (Rule("kernel", lead=1000),)) == []
    (fault,) = static_gates.faults(kernels, (Rule("kernel", lead=8),))
    assert fault.startswith("sm_90a kernel: expected at most 8 instructions before the first product of its loop, got")
    (fault,) = static_gates.faults(kernels, (Rule("kernel", pause=8),))
    assert fault.startswith("sm_90a kernel: expected at most 8 instructions between two products of its loop, got")


def test_kernel_without_its_instructions_is_a_fault(tmp_path: Path) -> None:
    (kernel,), _ = compiled(tmp_path, IS_FINE)
    assert (kernel.name, kernel.threads, kernel.count("STG")) == ("kernel", 128, 1)
    assert static_gates.faults([kernel], [Rule("kernel", ("STG",))]) == []
    (fault,) = static_gates.faults([kernel], [Rule("kernel", ("STG", "HMMA"))])
    assert fault.startswith("sm_90a kernel: expected an instruction HMMA, got none")
    (fault,) = static_gates.faults([kernel], [Rule("another")])
    assert "expected a rule" in fault


def test_serialised_products_are_a_fault(tmp_path: Path) -> None:
    fine, log = compiled(tmp_path, PRODUCTS)
    assert fine[0].count("HGMMA") == 2
    assert static_gates.compiler_complaints(log) == []
    complaints = static_gates.compiler_complaints(compiled(tmp_path, PRODUCTS, "-DTOUCHED")[1])
    assert any("serialized" in line for line in complaints)


def test_missing_log_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="no compiler messages; build with"):
        static_gates.build_log({**_stamp.read(), "compiler": "g++ 0"})


def test_blocks_that_fit() -> None:
    def fit(registers: int, threads: int, shared: int, arch: str = "sm_90a") -> int | None:
        kernel = Kernel(arch, "k", registers=registers, threads=threads)
        return static_gates.blocks_per_sm(kernel, shared)

    assert fit(64, 256, 0) == 4  # registers: 64 * 256 * 4 = 65536
    assert fit(65, 256, 0) == 3  # 72 of them are allocated
    assert fit(16, 1024, 0) == 2  # threads
    assert fit(16, 32, 0) == 32  # blocks
    assert fit(16, 128, 113 * 1024) == 2  # shared memory: 228 KiB, 1 of each block for the system
    assert fit(16, 128, 113 * 1024, "sm_80") == 1
    assert fit(16, 128, 0, "sm_121") is None


def code(*texts: str) -> list[tuple[int, str]]:
    return [(16 * i, text) for i, text in enumerate(texts)]


# A loop that copies in one of three ways, or not at all, and then multiplies; an inner loop has narrow copies.
LOOP = code(
    "S2R R0, SR_TID.X",  # 0x00
    "LDSM.16.M88.4 R4, [R0]",  # 0x10, where the loop begins
    "@P0 BRA 0xb0",  # 0x20: nothing left to copy
    "@P1 BRA P2, 0x80",  # 0x30
    "LDGSTS.E.LTC128B.ZFILL [R0], [R2.64], P6",  # 0x40: narrow ones
    "@!P1 BRA 0x40",  # 0x50
    "LDGSTS.E.BYPASS.LTC128B.128.ZFILL [R0], [R2.64], P4",  # 0x60
    "BRA 0xb0",  # 0x70
    "IADD3 R2, R2, 0x10, RZ",  # 0x80: whole vectors, all inside
    "LDGSTS.E.BYPASS.LTC128B.128 [R0], [R2.64]",  # 0x90
    "LDGSTS.E.BYPASS.LTC128B.128 [R0+0x1000], [R4.64]",  # 0xa0
    "HMMA.16816.F32.BF16 R8, R4, R6, R8",  # 0xb0
    "@!P3 BRA 0x10",  # 0xc0
)


def test_the_path_with_whole_vectors_counts() -> None:
    assert static_gates.find_loop(LOOP) == Loop(3 + 3 + 2, lead=3 + 3, pause=1 + 3 + 3)
    # Another branch closes no loop, and another loop does not multiply.
    for end in range(1, 13):
        assert static_gates.find_loop(LOOP[:end]) == Loop()
    # The exit may be a call, and the branch back unconditional.
    called = [*LOOP[:-1], (0xC0, "@P0 CALL.REL.NOINC 0xe0"), (0xD0, "BRA 0x10")]
    assert static_gates.find_loop(called) == Loop(9, lead=6, pause=8)
    without_copies = [(a, t.replace("LDGSTS", "LDG")) for a, t in LOOP]
    assert static_gates.find_loop(without_copies) == Loop(4, lead=2, pause=3), "the shortest way"
    products_first = [LOOP[0], (LOOP[1][0], LOOP[11][1]), *LOOP[2:]]
    assert static_gates.find_loop(products_first) == Loop(8, lead=0, pause=5)
    between = [LOOP[0], (LOOP[1][0], LOOP[11][1]), LOOP[2], (LOOP[3][0], LOOP[11][1]), *LOOP[4:]]
    assert static_gates.find_loop(between).pause > static_gates.find_loop(between).lead == 0


def test_main_loops_are_found(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        loop = kernel.loop.instructions
        # GEMMs have two loops with products: one without branches for whole tiles, one for the rest.
        assert (loop > kernel.count("HMMA") / 2) if kernel.count("HMMA") else loop == 0


STATIC_SHARED_BYTES = {
    "bucket_kernel": 72,
    "bucket_pack_kernel": 126 * 32,
    "one_shot_kernel": 72,
    "two_shot_kernel": 72,
}


def test_tables_are_read_as_written(kernels: list[Kernel]) -> None:
    documented = static_gates.documented_kernels()
    for kernel in kernels:
        read = documented[kernel.arch][kernel.name]
        assert (read.registers, read.threads, read.loop) == (kernel.registers, kernel.threads, kernel.loop)
        family = kernel.name.partition("<")[0]
        assert read.shared_bytes == STATIC_SHARED_BYTES.get(family, 0)


def test_tables_go_into_the_document(tmp_path: Path, kernels: list[Kernel]) -> None:
    document = tmp_path / "kernels.md"
    shutil.copy(static_gates.DOCUMENT, document)
    tables = static_gates.tables(kernels)
    static_gates.write_document("99.0", tables, document)
    assert static_gates.read_document(document) == ("99.0", tables)
    assert static_gates.stale("99.0", tables, document) == []
    arch = next(iter(tables))
    changed = {arch: tables[arch].replace("| 64 |", "| 65 |")}
    assert static_gates.stale("99.0", changed, document) == [arch]
    static_gates.write_document("99.0", changed, document)  # leaves other architectures alone
    assert static_gates.read_document(document) == ("99.0", {**tables, **changed})
    assert document.read_text().startswith("# CUDA kernels")
    assert document.read_text().endswith(f"{static_gates.END}\n")
    document.write_text("nothing")
    with pytest.raises(RuntimeError, match="expected the lines"):
        static_gates.read_document(document)
