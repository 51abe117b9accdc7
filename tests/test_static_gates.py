"""The static gates (tools/static_gates.py) on the built library, and on kernels that must fail."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from cuda_ext import _stamp, _toolchain

sys.path.insert(0, str(ROOT / "tools"))
import static_gates
from static_gates import Kernel, Loop, Rule

from benchmarks.model import compiled as compiled_kernels

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
WGMMA_CONTROLS = ROOT / "tests" / "wgmma_controls.cu"
IS_FINE = "__global__ void __launch_bounds__(128) kernel(float* p) { p[threadIdx.x] = 1; }"
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


# Loads the fragments of four products: all of them before the first one, or those of each just before it, where ptxas
# keeps them only if their address depends on the product before.
LOADS_FRAGMENTS = """
__device__ void load(unsigned (&x)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
__global__ void __launch_bounds__(32) kernel(unsigned at, float* to, int turns) {
  float d[4][4] = {};
  unsigned a[4][4], b[4][4];
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, at += 4096) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      for (int other = TOGETHER ? 0 : step; other < (TOGETHER ? 4 * (step == 0) : step + 1); ++other) {
        const unsigned from = at + 1024 * other + (TOGETHER ? 0 : __float_as_uint(d[(step + 3) % 4][0]));
        load(a[other], from);
        load(b[other], from + 512);
      }
      if (TOGETHER && step == 0) __syncwarp();
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                   "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                   : "+f"(d[step][0]), "+f"(d[step][1]), "+f"(d[step][2]), "+f"(d[step][3])
                   : "r"(a[step][0]), "r"(a[step][1]), "r"(a[step][2]), "r"(a[step][3]),
                     "r"(b[step][0]), "r"(b[step][1]) : "memory");
    }
  }
  for (int i = 0; i < 16; ++i) to[threadIdx.x * 16 + i] = d[i / 4][i % 4];
}
"""


# Writing the machine code of the library takes a minute.
reads_machine_code = pytest.mark.sampled(check="machine code")


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


@reads_machine_code
def test_every_kernel_of_the_library_passes(kernels: list[Kernel]) -> None:
    stamp = _stamp.read()
    assert {kernel.arch for kernel in kernels} == {_toolchain.sm_name(arch) for arch in stamp["archs"]}
    assert static_gates.faults(kernels) == []


def test_nothing_spills_and_ptxas_has_no_complaint() -> None:
    """What needs no machine code, in every run."""
    stamp = _stamp.read()
    found = static_gates.read_kernels(_stamp.LIBRARY, machine_code=False)
    assert len(found) > 300
    assert [kernel.name for kernel in found if not kernel.threads] == []
    spilling = (k for k in found if k.stack_bytes + k.local_bytes > static_gates.known_local(k))
    assert [kernel.name for kernel in spilling] == []
    assert static_gates.compiler_complaints(static_gates.build_log(stamp)) == []
    assert static_gates.shared_kernels(static_gates.cuda_objects(stamp)) == []


def test_launch_bounds_under_either_name_of_a_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = static_gates._dump

    def dump_by_the_full_name(binary: Path, *flags: str, folder: Path | None = None) -> str:
        text = dump(binary, *flags, folder=folder)
        for cubin in folder.glob("*.sm_90.cubin") if folder else ():
            cubin.rename(cubin.with_name(cubin.name.replace(".sm_90.", ".sm_90a.")))
        return text

    monkeypatch.setattr(static_gates, "_dump", dump_by_the_full_name)
    (kernel,), _ = compiled(tmp_path, IS_FINE)
    assert (kernel.arch, kernel.threads) == ("sm_90a", 128)


@reads_machine_code
def test_records_are_current(kernels: list[Kernel]) -> None:
    cuda, written = static_gates.read_golden()
    if cuda != BUILT_FOR:
        pytest.skip(f"golden_kernels.json is of CUDA {cuda}, the library of {BUILT_FOR}")
    for arch, records in static_gates.records(kernels).items():
        assert written.get(arch) == records, "run: python tools/static_gates.py --write"


ANY = (Rule("kernel"),)


@pytest.mark.sampled
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


@pytest.mark.sampled
def test_loop_with_a_long_lead_is_a_fault(tmp_path: Path) -> None:
    kernels, _ = compiled(tmp_path, READS_BEFORE_IT_MULTIPLIES)
    assert static_gates.faults(kernels, (Rule("kernel", lead=1000),)) == []
    (fault,) = static_gates.faults(kernels, (Rule("kernel", lead=8),))
    assert fault.startswith("sm_90a kernel: expected at most 8 instructions before the first product of its loop, got")
    (fault,) = static_gates.faults(kernels, (Rule("kernel", pause=8),))
    assert fault.startswith("sm_90a kernel: expected at most 8 instructions between two products of its loop, got")


@pytest.mark.sampled
def test_kernel_that_others_launch_is_a_fault(tmp_path: Path) -> None:
    compiled(tmp_path, IS_FINE + IS_FINE.replace("kernel(", "gemm_sm90("))
    for name in ("gemm_sm90_bf16.o", "gemm_sm80_bf16.o", "scaled_gemm_sm89.o"):
        shutil.copy(tmp_path / "kernel.o", tmp_path / name)
    told = [
        f"{name}: expected only kernels for {arch}, got {kernel}; launch it from another source"
        for name, arch, kernel in (
            ("gemm_sm90_bf16.o", "sm_90a", "kernel"),
            ("scaled_gemm_sm89.o", "sm_89", "gemm_sm90"),
            ("scaled_gemm_sm89.o", "sm_89", "kernel"),
        )
    ]
    assert static_gates.shared_kernels(sorted(tmp_path.glob("*.o"))) == told


@pytest.mark.sampled
@pytest.mark.parametrize(("together", "burst"), [(False, 2), (True, 8)])
def test_loop_that_loads_all_at_once_is_a_fault(tmp_path: Path, together: bool, burst: int) -> None:
    (kernel,), _ = compiled(tmp_path, LOADS_FRAGMENTS, f"-DTOGETHER={int(together)}")
    assert (kernel.loop.burst, kernel.count("LDSM"), kernel.count("HMMA")) == (burst, 8, 4)
    found = static_gates.faults([kernel], [Rule("kernel", burst=4)])
    told = f"sm_90a kernel: expected at most 4 LDSM and LDGSTS between two products of its loop, got {burst}"
    assert [fault.partition(";")[0] for fault in found] == ([told] if together else [])


@pytest.mark.sampled
def test_kernel_without_its_instructions_is_a_fault(tmp_path: Path) -> None:
    (kernel,), _ = compiled(tmp_path, IS_FINE)
    assert (kernel.name, kernel.threads, kernel.count("STG")) == ("kernel", 128, 1)
    assert static_gates.faults([kernel], [Rule("kernel", ("STG",))]) == []
    (fault,) = static_gates.faults([kernel], [Rule("kernel", ("STG", "HMMA"))])
    assert fault.startswith("sm_90a kernel: expected an instruction HMMA, got none")
    (fault,) = static_gates.faults([kernel], [Rule("another")])
    assert "expected a rule" in fault


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Kernel], list[str]]:
    """The kernels of wgmma_controls.cu by name, and ptxas's complaints about them."""
    folder = tmp_path_factory.mktemp("controls")
    kernels, log = compiled(folder, WGMMA_CONTROLS.read_text(), f"-I{ROOT / 'csrc'}")
    return {kernel.name: kernel for kernel in kernels}, static_gates.compiler_complaints(log)


WAITS = "expected at least 4 products with each accumulator from one wait to the next"
SPILLED = "expected everything in registers"
SIGNALS = "expected only the last product of a group to signal gsb0"
# Kernel -> the codes of ptxas's complaints about it, and what the gates find in its machine code.
WGMMA_FAULTS: dict[str, tuple[set[str], set[str]]] = {
    "is_fine": (set(), set()),
    "has_no_fence": ({"C7519"}, set()),
    "reads_before_the_wait": ({"C7517"}, set()),
    "scales_between_products": ({"C7517", "C7519"}, {WAITS, "expected at most 16 instructions from one product"}),
    "scales_in_flight": ({"C7514"}, {WAITS}),
    "never_waits": ({"C7517"}, set()),
    "calls_a_function": ({"C7510", "C7519"}, {WAITS, SPILLED}),
    "diverges": ({"C7520"}, {WAITS}),
    "has_too_many_sums": ({"C7511"}, {WAITS, SPILLED}),
    "commits_each_product": (set(), {SIGNALS}),
    "waits_in_between": (set(), {WAITS}),
    "branches_in_between": ({"C7519"}, {SIGNALS, "expected no branch between the products of a group, got @!P0 BRA"}),
    "computes_in_between": (
        set(),
        {"expected at most 16 instructions from one product", "expected at most 64 instructions between two products"},
    ),
    "releases_with_a_fence": (
        set(),
        {"expected no MEMBAR in its loop, got MEMBAR", "expected no ERRBAR in its loop, got ERRBAR"},
    ),
    "loads_an_operand": (set(), {"expected both operands in shared memory, got HGMMA.64x64x16.F32.BF16 R"}),
}


@pytest.mark.parametrize("name", WGMMA_FAULTS)
def test_gates_of_wgmma(controls: tuple[dict[str, Kernel], list[str]], name: str) -> None:
    kernels, complaints = controls
    codes, faults = WGMMA_FAULTS[name]
    said = [line for line in complaints if re.search(rf"'_Z\d+{name}[A-Z]", line)]
    assert {match[0] for line in said if (match := re.search(r"C7\d+", line))} == codes
    assert {name for name in kernels if "roles" not in name and "gives" not in name} == WGMMA_FAULTS.keys()
    rule = dataclasses.replace(static_gates.WGMMA, name="", contains=("HGMMA",), registers_from=None)
    found = static_gates.faults([kernels[name]], [rule])
    for fault in faults:
        assert [text for text in found if text.startswith(f"sm_90a {name}: {fault}")], found
    if SPILLED not in faults:  # which lengthens all parts of the loop
        assert len(found) == len(faults), found


def test_registers_of_roles(controls: tuple[dict[str, Kernel], list[str]], tmp_path: Path) -> None:
    kernels, complaints = controls
    source = tmp_path / "kernel.cuh"

    def faults(name: str, producer: int, consumer: int) -> list[str]:
        source.write_text(f"constexpr int kProducerRegisters = {producer}, kConsumerRegisters = {consumer};")
        return static_gates.register_faults(kernels[name], str(source))

    assert faults("has_roles", 24, 240) == faults("has_other_roles", 40, 232) == []
    assert faults("has_other_roles", 24, 240) == [
        f"expected setmaxnreg to 24 and to 240, as in {source}, got USETMAXREG.TRY_ALLOC 232, USETMAXREG.DEALLOC 40"
    ]
    too_many = dataclasses.replace(kernels["has_roles"], role_registers=[("DEALLOC", 32), ("TRY_ALLOC", 240)])
    kernels["has_more_roles"] = too_many
    assert faults("has_more_roles", 32, 240) == [
        "expected at most 504 registers of 3 warpgroups, 168 each at launch, got 32 + 2 * 240 = 512 in " + str(source)
    ]
    # ptxas ignores setmaxnreg, and does not name the kernel.
    unnamed = {match[0] for line in complaints if "'_Z" not in line and (match := re.search(r"C7\d+", line))}
    assert unnamed == {"C7507", "C7508"}
    for name in ("has_roles_without_bounds", "gives_up_registers_it_uses"):
        assert f"expected setmaxnreg to 24 and to 240, as in {source}, got none" in faults(name, 24, 240)
    source.write_text("constexpr int kConsumerRegisters = 240;")
    with pytest.raises(RuntimeError, match="expected the registers of 2 consumers, got none"):
        static_gates.register_plan(str(source), 2)


def test_softmax_after_the_wait_is_a_fault(controls: tuple[dict[str, Kernel], list[str]]) -> None:
    product = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"
    softmax, wait = "MUFU.EX2 R3, R3", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    kernel = controls[0]["is_fine"]
    rule = Rule("", overlap=2)
    for body, exponentials in (
        ([product, wait, product, softmax, softmax, wait, softmax], 2),
        ([product, softmax, softmax, wait, product, softmax, wait], 2),
        ([product, wait, product, wait, softmax, softmax, softmax], 0),
        ([softmax, softmax], 0),
    ):
        loop = static_gates.measure_loop(body)
        assert static_gates.exponentials_in_flight(loop) == exponentials
        found = static_gates.faults([dataclasses.replace(kernel, loop=loop)], [rule])
        told = "expected at least 2 exponentials between a product of its loop and the wait for it"
        assert [told in fault for fault in found] == [True] * (exponentials < 2)


@pytest.mark.sampled
def test_too_many_threads_is_a_complaint(tmp_path: Path) -> None:
    log = "ptxas fatal   : (C7602) Insufficient registers (128) to compile instruction at line 26906 in function _Z4k\n"
    assert static_gates.compiler_complaints(f"ptxas info : 1 bytes gmem\n{log}") == [log.strip()]
    with pytest.raises(AssertionError, match=re.escape("(C7602) Insufficient registers")):
        compiled(tmp_path, WGMMA_CONTROLS.read_text(), f"-I{ROOT / 'csrc'}", "-DTOO_MANY_THREADS")


def test_gates_of_other_architectures() -> None:
    """sm_75 copies through registers and multiplies only float16 on tensor cores; a kernel that the launchers replace
    on an architecture is empty."""
    rule = Rule("", ("HMMA", "LDSM", "LDGSTS"), lead=8)

    def faults(arch: str, element: str, opcodes: str) -> int:
        name = f"attention_fwd_sm80<Forward<{element}, 0>>"
        kernel = Kernel(arch, name, threads=32, loop=Loop(20, 9, 9), opcodes=Counter(opcodes.split()))
        return len(static_gates.faults([kernel], [rule]))

    assert faults("sm_80", "half_t", "HMMA LDSM LDGSTS") == 1, "the lead"
    assert faults("sm_120", "half_t", "HMMA LDSM STS") == 2
    assert faults("sm_75", "half_t", "HMMA LDSM STS") == 0
    assert faults("sm_75", "half_t", "FFMA LDSM STS") == 1
    assert faults("sm_75", "bfloat16_t", "FFMA LDSM STS") == 0
    assert faults("sm_75", "bfloat16_t", "FFMA LDSM") == 1
    for arch in ("sm_75", "sm_90a"):
        assert faults(arch, "half_t", "MOV EXIT BRA NOP") == 0
        assert faults(arch, "half_t", "MOV EXIT BRA STG") > 0


def test_gates_of_groups_of_products() -> None:
    """What nvcc does not make of any source."""

    def faults(*texts: str) -> list[str]:
        kernel = Kernel("sm_90a", "k")
        for end in range(len(texts)):
            kernel.opcodes[texts[end].split()[0]] += 1
            if "DEPBAR" in texts[end]:
                kernel.groups.append(static_gates.find_group(code(*texts[: end + 1])))
        return static_gates.wgmma_faults(kernel, 2)

    ready, wait = "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    first = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR20].tnspA.tnspB, R24, UP0"
    last = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR20].tnspA.tnspB, R24, gsb0"
    assert faults(ready, first, last, wait) == []
    assert faults(ready, first.replace("R24, UP0", "RZ, !UPT"), last, wait) == [], "overwrites the sums"
    moved = first.replace("R24, UP0", "R88, UP0")
    assert faults(ready, moved, last, wait) == [f"expected products that add to their own accumulators, got {moved}"]
    assert faults(ready, first, last) == ["expected a wait for all 2 products, got one for 0"]
    # Another accumulator has its products in another group.
    others = [text.replace("R24", "R88") for text in (first, last)]
    assert faults(ready, first, others[0], last, others[1].replace(", gsb0", ""), wait)[0].startswith(SIGNALS)
    (fault,) = faults(ready, first, last, wait, ready, *others, wait)
    assert fault.startswith("expected at least 2 products with each accumulator from one wait to the next, got 0")


def test_missing_log_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="no compiler messages; build with"):
        static_gates.build_log({**_stamp.read(), "compiler": "g++ 0"})


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
    assert static_gates.find_loop(LOOP).burst == 3  # one LDSM, two LDGSTS
    # Another branch closes no loop, and another loop does not multiply.
    for end in range(1, 13):
        assert static_gates.find_loop(LOOP[:end]) == Loop()
    # The exit may be a call, and the branch back unconditional.
    called = [*LOOP[:-1], (0xC0, "@P0 CALL.REL.NOINC 0xe0"), (0xD0, "BRA 0x10")]
    assert static_gates.find_loop(called) == Loop(9, lead=6, pause=8)
    without_copies = [(a, t.replace("LDGSTS", "LDG")) for a, t in LOOP]
    assert static_gates.find_loop(without_copies) == Loop(4, lead=2, pause=3), "the shortest way"
    products_first = [LOOP[0], (LOOP[1][0], LOOP[11][1]), *LOOP[2:]]
    assert static_gates.find_loop(products_first) == Loop(8, lead=0, pause=5, gap=5)
    between = [LOOP[0], (LOOP[1][0], LOOP[11][1]), LOOP[2], (LOOP[3][0], LOOP[11][1]), *LOOP[4:]]
    assert static_gates.find_loop(between).pause > static_gates.find_loop(between).lead == 0


@reads_machine_code
def test_main_loops_are_found(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        loop = kernel.loop.instructions
        if products := kernel.count("HGMMA") + kernel.count("QGMMA"):
            assert loop > products  # one loop has all of them
        else:
            # GEMMs have two loops with products: one without branches for whole tiles, one for the rest.
            assert (loop > kernel.count("HMMA") / 2) if kernel.count("HMMA") else loop == 0


STATIC_SHARED_BYTES = {
    "bucket_kernel": 72,
    "bucket_pack_kernel": 126 * 32,
    "one_shot_kernel": 72,
    "two_shot_kernel": 72,
}


@reads_machine_code
def test_records_are_read_as_written(tmp_path: Path, kernels: list[Kernel]) -> None:
    written = tmp_path / "golden_kernels.json"
    shutil.copy(static_gates.GOLDEN, written)
    static_gates.write_golden("99.0", static_gates.records(kernels), written)
    golden = compiled_kernels.golden_kernels(written)
    for kernel in kernels:
        read = golden[kernel.arch][kernel.name]
        assert (read.registers, read.threads, read.loop) == (kernel.registers, kernel.threads, kernel.loop)
        family = kernel.name.partition("<")[0]
        assert read.shared_bytes == STATIC_SHARED_BYTES.get(family, 0)


def test_records_go_into_the_file(tmp_path: Path) -> None:
    file = tmp_path / "golden_kernels.json"
    shutil.copy(static_gates.GOLDEN, file)
    cuda, records = static_gates.read_golden()
    static_gates.write_golden(cuda, records, file)
    assert file.read_text() == static_gates.GOLDEN.read_text()
    static_gates.write_golden("99.0", records, file)
    assert static_gates.read_golden(file) == ("99.0", records)
    assert static_gates.stale("99.0", records, file) == []
    arch = next(iter(records))
    name, kernel = next(iter(records[arch].items()))
    changed = {arch: records[arch] | {name: kernel | {"registers": kernel["registers"] + 1}}}
    assert static_gates.stale("99.0", changed, file) == [arch]
    assert static_gates.stale("98.0", changed, file) == []
    static_gates.write_golden("99.0", changed, file)  # leaves other architectures alone
    assert static_gates.read_golden(file) == ("99.0", {**records, **changed})
