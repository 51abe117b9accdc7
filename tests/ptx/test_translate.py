"""The translation of PTX, and the refusal of unknown PTX."""

from __future__ import annotations

import ctypes
import struct
import subprocess

import pytest

from cuda_ext import _build, _emulator
from ptx import build, emit, parse

HEAD = ".version 9.0\n.target sm_80\n.address_size 64\n"
REGISTERS = """
  .reg .pred %p<4>;
  .reg .b16 %rs<4>;
  .reg .b32 %r<12>;
  .reg .f32 %f<20>;
  .reg .b64 %rd<8>;
  .reg .f64 %fd<4>;
"""


def module(body: str, parameters: str = "", directives: str = "", registers: str = REGISTERS) -> parse.Module:
    text = f"{HEAD}.visible .entry kernel(\n{parameters}\n)\n{directives}\n{{\n{registers}\n{body}\nret;\n}}\n"
    return parse.parse(text, "kernel.ptx")


def body_of(text: str) -> str:
    """The C++ of `text`, a line for each instruction."""
    code = emit.emit(module(text))
    return code.partition("double _fd0")[2].partition("\n")[2].partition("  return;")[0]


# PTX that nvcc writes for these kernels.


def test_layout_of_parameters() -> None:
    parameters = (
        ".param .u8 a,\n.param .align 8 .b8 b[12],\n.param .u16 c,\n.param .align 128 .b8 d[128],\n.param .u64 e"
    )
    entry = module("", parameters).entries[0]
    assert [(p.size, p.offset) for p in entry.parameters] == [(1, 0), (12, 8), (2, 20), (128, 128), (8, 256)]


def test_launch_bounds() -> None:
    entry = module("", directives=".maxntid 128, 1, 1\n.minnctapersm 2").entries[0]
    assert (entry.max_threads, entry.min_blocks) == (128, 2)


def test_the_place_of_an_instruction_is_its_caller() -> None:
    files = '.file 1 "/x/csrc/gemm/gemm.cuh"\n.file 2 "/x/csrc/arch/memory.cuh"\n.file 3 "/cuda/include/sm_32.hpp"\n'
    text = (
        f"{HEAD}.visible .entry kernel(\n)\n{{\n.reg .b32 %r<3>;\n.loc 1 20 3\nmov.u32 %r0, 1;\n"
        ".loc 2 50 1, function_name $L__info_string0, inlined_at 1 21 3\n"
        ".loc 3 9 1, function_name $L__info_string1, inlined_at 2 50 1\n"
        "mov.u32 %r1, 2;\n.loc 1 0 0\nmov.u32 %r2, 3;\nret;\n}\n" + files
    )
    places = [each.place for each in parse.parse(text, "x").entries[0].body if isinstance(each, parse.Instruction)]
    assert places == ["gemm.cuh:20", "gemm.cuh:21", "", ""]


def test_registers_of_an_asm_block_are_local() -> None:
    block = "{\n .reg .pred p;\n setp.ne.b32 p, %r1, 0;\n selp.u32 %r2, 1, 0, p;\n}\n"
    code = body_of(block + block)
    assert code.count("bool own_p;") == 2 and code.count("_r2 = own_p ? ") == 2


def test_labels_and_predicates() -> None:
    code = body_of("@!%p1 bra $L__BB0_2;\nadd.s32 %r1, %r2, -1;\n$L__BB0_2:\n@%p1 mov.u32 %r3, %r1;")
    assert "if (!_p1) { goto L__BB0_2; }" in code and "L__BB0_2:;" in code and "if (_p1) { _r3 = _r1; }" in code


def test_a_product_8_deep_has_two_registers_of_a_and_one_of_b() -> None:
    mma = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
    code = body_of(f"{mma} {{%f1,%f2,%f3,%f4}}, {{%r1,%r2}}, {{%r3}}, {{%f5,%f6,%f7,%f8}};")
    assert "mma_m16n8k8(_f1, _f2, _f3, _f4, _r1, _r2, _r3, _f5, _f6, _f7, _f8, " in code
    with pytest.raises(parse.Unsupported, match="expected 2 operands in braces, got 4"):
        body_of(f"{mma} {{%f1,%f2,%f3,%f4}}, {{%r1,%r2,%r3,%r4}}, {{%r5,%r6}}, {{%f5,%f6,%f7,%f8}};")


def test_products_of_8_bit_floats_name_both_types() -> None:
    mma = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32"
    code = body_of(f"{mma} {{%f1,%f2,%f3,%f4}}, {{%r1,%r2,%r3,%r4}}, {{%r5,%r6}}, {{%f5,%f6,%f7,%f8}};")
    types = "simt::MatrixType::kFloat8E4M3, simt::MatrixType::kFloat8E5M2"
    assert f"mma_m16n8k32<{types}>(_f1, _f2, _f3, _f4, _r1, _r2, _r3, _r4, _r5, _r6, _f5, " in code
    wgmma = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p1, 1, 1;"
    code = emit.emit(module(wgmma))
    assert f"{{{types}, 8, nullptr, _rd1, _rd2, 0 != 0, 0 != 0, _p1}}" in code


def test_arrivals_at_barriers_of_the_cluster() -> None:
    for order in ("", ".release.cluster"):
        code = body_of(f"mbarrier.arrive{order}.shared::cluster.b64 _, [%r1];")
        assert "simt::barrier_arrive_remote(_r1, " in code


def test_accumulators_of_wgmma_are_arrays() -> None:
    wgmma = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p1, 1, 1, 0, 1;"
    code = emit.emit(module(f"{wgmma}\nadd.f32 %f8, %f2, %f9;"))
    assert "float tuple_0[4];" in code and "_f8 = tuple_0[2] + _f9;" in code and "1 != 0, _p1}" in code
    overlapping = wgmma.replace("{%f0,%f1,%f2,%f3}", "{%f1,%f2,%f3,%f4}")
    with pytest.raises(parse.Unsupported, match="in another tuple of a wgmma too"):
        emit.emit(module(f"{wgmma}\n{overlapping}"))


# Refusals. Each line has one thing that the translator does not support.

REFUSED = {
    "popc.b32 %r1, %r2;": "unknown opcode",
    "add.sat.s32 %r1, %r2, %r3;": r"expected the modifier .* got \.sat",
    "add.cc.u32 %r1, %r2, %r3;": r"expected the modifier .* got \.cc",
    "add.ftz.f32 %f1, %f2, %f3;": r"expected the modifier .* got \.ftz",
    "mul.lo.f32 %f1, %f2, %f3;": r"got \.f32",
    "fma.rz.f32 %f1, %f2, %f3, %f4;": r"expected the modifier \.rn or \.rm, got \.rz",
    "prmt.b32.f4e %r1, %r2, %r3, %r4;": r"unknown modifier \.f4e",
    "ex2.approx.ftz.f16 %rs1, %rs2;": r"got \.f16",
    "setp.lo.s32 %p1, %r1, %r2;": "expected unsigned numbers",
    "setp.ltu.s32 %p1, %r1, %r2;": "expected floats",
    "cvt.rn.f32.bf16 %f1, %rs1;": "no such conversion",
    "cvt.rni.s32.s32 %r1, %r2;": "no such conversion",
    "ld.u32 %r1, [%rd1];": r"expected the modifier .*got \.u32",
    "ld.local.u32 %r1, [%rd1];": r"got \.local",
    "ld.volatile.global.u32 %r1, [%rd1];": r"got \.volatile",
    "ld.global.relaxed.gpu.u32 %r1, [%rd1];": r"got \.relaxed",
    "ld.global.v8.u32 {%r1}, [%rd1];": r"got \.v8",
    "ld.global.L2::256B.u32 %r1, [%rd1];": r"got \.L2::256B",
    "ld.global.v2.u32 {%r1, %r2, %r3}, [%rd1];": "expected 2 operands in braces",
    "st.global.wb.u32 [%rd1], %r1;": r"got \.wb",
    "st.global.u32 [%rd1], %r1, %r2;": "expected no more operands, got %r2",
    "st.global.u32 [%rd9], %r1;": "expected a register or a number",
    "mov.u32 %r1, %clock;": "expected a register or a number of type u32, got %clock",
    "mov.u32 %r1, %f90;": "expected a register",
    "mov.b32 %r1, 0f3F80000;": "expected a register or a number",
    "mov.u32 %rs1, %r1;": "expected a register for a value of type u32, got %rs1",
    "bra $L_nowhere;": "no such label",
    "atom.shared.add.u32 %r1, [%r2], %r3;": r"got \.shared",
    "atom.global.cas.b32 %r1, [%rd2], %r3, %r4;": r"got \.cas",
    "red.global.release.gpu.add.u32 [%rd1], %r1;": r"got \.release",
    "bar.red.popc.u32 %r1, 0, %p1;": r"got \.red",
    "membar.sys;": r"got \.sys",
    "shfl.idx.b32 %r1, %r2, %r3, %r4;": r"expected the modifier \.sync",
    "vote.sync.uni.pred %p1, %p2, -1;": r"got \.uni",
    "cp.async.ca.shared.global.L2::128B [%r1], [%rd1], 16;": r"L2::128B",
    "cp.async.cg.shared.global [%r1], [%rd1], 8;": "no copy of 8 bytes",
    "cp.async.wait_all;": r"got \.wait_all",
    "ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%r1,%r2,%r3,%r4}, [%r5];": r"got \.shared::cta",
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r5];": "expected 2 operands",
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2}, {%r3}, {%f1,%f2,%f3,%f4};": (
        r"expected the modifier \.tf32"
    ),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, "
    "{%f1,%f2,%f3,%f4};": r"expected the modifier \.f16, got \.bf16",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.f16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, "
    "{%f1,%f2,%f3,%f4};": r"expected the modifier \.e4m3 or \.e5m2, got \.f16",
    "mma.sync.aligned.m16n8k16.row.col.f32.e4m3.e4m3.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2}, {%r3}, {%f1,%f2,%f3,%f4};": (
        r"got \.e4m3"
    ),
    "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p1, 1, 1, 0, 0;": (
        "expected no more operands, got 0"
    ),
    "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.f16 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p1, 1, 1;": r"got \.f16",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.bf16 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p1, 1, 1, 0, 0;": (
        r"got \.bf16"
    ),
    "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, %rd2, %p1, 1, 1;": (
        "expected a descriptor of A"
    ),
    "cvt.rn.e4m3x2.f32 %rs1, %f1, %f2;": r"got \.e4m3x2",
    "cvt.rn.satfinite.relu.e4m3x2.f32 %rs1, %f1, %f2;": r"got \.relu",
    "cvt.rn.satfinite.e4m3x2.f16x2 %rs1, %r1;": r"got \.f16x2",
    "cvt.f16x2.e4m3x2 %r1, %rs1;": r"got \.f16x2",
    "mbarrier.try_wait.shared::cta.b64 %p1, [%r1], %rd1;": r"expected the modifier \.parity",
    "mbarrier.arrive.noComplete.shared::cta.b64 _, [%r1], %r2;": "noComplete",
    "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%r1], %r2;": r"expected the modifier \.shared::cta",
    "fence.proxy.async.global;": r"got \.global",
    "barrier.cluster.arrive.aligned;": r"got \.aligned",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p1, 1, -1, 0, 1;": (
        "expected a constant, got -1"
    ),
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p1, 1, 1, 0, 1;": (
        "expected 8 registers"
    ),
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];": (
        "2 coordinates"
    ),
    "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%r1, %r2}];": r"got \.prefetch",
    "call.uni (param0), f, (param1);": "expected a call of vprintf, got f",
    "st.param.b64 [param0+0], %rd1;": "expected a parameter of a call",
    "add.rn.s32 %r1, %r2, %r3;": r"expected the modifier \.f32 or \.f64, got \.s32",
    "add.u16 %rs1, %r1, %rs2;": "expected a register of type u16, got %r1 of type b32",
    "add.u32 %rd1, %r1, %r2;": "expected a register for a value of type u32, got %rd1",
    "mov.u64 %rd1, %tid.x;": "expected a register of type u64, got %tid.x of type u32",
    "mov.u32 %r1, %globaltimer;": "expected a register of type u32, got %globaltimer of type u64",
    "setp.lt.b32 %p1, %r1, %r2;": r"expected \.eq or \.ne for bits",
    "ld.global.v4.f64 {%fd0, %fd1, %fd2, %fd3}, [%rd1];": "expected a vector of at most 16 bytes",
    "ld.global.f16 %rs1, [%rd1];": r"got \.f16",
    "red.global.acq_rel.gpu.add.u32 [%rd1], %r1;": r"got \.acq_rel",
    "red.global.add.v2.f32 [%rd1], {%f1, %f2};": r"got \.v2",
    "red.global.add.v4.f32 [%rd1], {%f1, %f2};": "expected 4 operands in braces, got 2",
    "atom.global.add.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1], {%f1, %f2, %f3, %f4};": r"got \.v4",
    "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3,%f4,%f5}, %rd1, %rd2, %p1, 1, 1, 0, 1;": (
        "expected a multiple of 8 up to 256 for N, got 12"
    ),
    "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
    "[%r1], [%rd1, {%r2}], [%r3], %r4;": "expected a register of type u16, got %r4",
}


@pytest.mark.parametrize("text", REFUSED)
def test_unknown_ptx_is_refused(text: str) -> None:
    with pytest.raises(parse.Unsupported, match=REFUSED[text]) as caught:
        emit.emit(module(text))
    assert "kernel.ptx, kernel: line " in str(caught.value), "the message names the place"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (".global .align 4 .b8 table[16];", "expected an entry or dynamic shared memory"),
        (".shared .align 4 .b8 tile[16];", "expected an entry or dynamic shared memory"),
        (".visible .func f()", "expected an entry or dynamic shared memory"),
    ],
)
def test_other_declarations_are_refused(line: str, message: str) -> None:
    with pytest.raises(parse.Unsupported, match=message):
        parse.parse(f"{HEAD}{line}\n", "x.ptx")


def test_underaligned_shared_memory_is_refused() -> None:
    declaration = ".extern .shared .align {} .b8 shared[];"
    assert parse.parse(f"{HEAD}{declaration.format(1024)}\n", "x.ptx").shared == {"shared"}
    with pytest.raises(parse.Unsupported, match=r"x\.ptx:4: expected shared memory aligned to 1024, got .*\.align 16"):
        parse.parse(f"{HEAD}{declaration.format(16)}\n", "x.ptx")


def test_local_memory_and_other_bounds_are_refused() -> None:
    with pytest.raises(parse.Unsupported, match="local memory depot of 16 bytes"):
        emit.emit(module(".local .align 4 .b8 depot[16];"))
    with pytest.raises(parse.Unsupported, match=r"cannot enforce '\.reqntid 32, 1, 1'"):
        module("", directives=".reqntid 32, 1, 1")
    with pytest.raises(parse.Unsupported, match=r"cannot enforce '\.maxntid 32, 2, 1'"):
        module("", directives=".maxntid 32, 2, 1")


CALL = """
  st.local.u64 [%rd1], %rd2;
  {
  .param .b64 param0;
  st.param.b64 [param0+0], %rd3;
  .param .b64 param1;
  st.param.b64 [param1+0], %rd1;
  .param .b32 retval0;
  call.uni (retval0), vprintf, (param0, param1);
  ld.param.b32 %r1, [retval0+0];
  }
"""


def test_vprintf_reads_its_arguments_from_local_memory() -> None:
    """Alone it may use local memory. What is printed: tests/test_loss_paths.py."""
    declared = ".local .align 8 .b8 depot[8];" + REGISTERS
    code = emit.emit(module(f"mov.u64 %rd1, depot;\n{CALL}", registers=declared))
    assert "_rd1 = uint64_t(reinterpret_cast<uint64_t>(thread.local));" in code
    assert "thread.store_local(_rd1, &_rd2, 8, " in code
    assert "own_param0 = _rd3;" in code and "= print(own_param0, own_param1, " in code
    with pytest.raises(parse.Unsupported, match="local memory depot of 80 bytes"):
        emit.emit(module(CALL, registers=declared.replace("depot[8]", "depot[80]")))


# Arithmetic, executed. Each line writes %r9, %rd5 or %f9; inputs: %r1 = a, %r2 = b, and %f1, %f2 with the same bits.


def bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


NAN, INF = 0x7FC00000, 0x7F800000
COMPUTED = {
    "add.s32 %r9, %r1, %r2;": [(0xFFFFFFFF, 3, 2)],
    "sub.s32 %r9, %r1, %r2;": [(1, 3, 0xFFFFFFFE)],
    "mul.hi.s32 %r9, %r1, %r2;": [(0xFFFFFFFF, 2, 0xFFFFFFFF), (1 << 30, 4, 1)],
    "mul.hi.u32 %r9, %r1, %r2;": [(0xFFFFFFFF, 2, 1)],
    "mul.wide.s32 %rd5, %r1, %r2;": [(0xFFFFFFFF, 5, 2**64 - 5)],
    "mul.wide.u32 %rd5, %r1, %r2;": [(0xFFFFFFFF, 5, 5 * 0xFFFFFFFF)],
    "mad.lo.s32 %r9, %r1, %r2, %r1;": [(7, 5, 42)],
    "div.s32 %r9, %r1, %r2;": [(2**32 - 7, 2, 2**32 - 3), (1 << 31, 0xFFFFFFFF, 1 << 31)],
    "rem.s32 %r9, %r1, %r2;": [(2**32 - 7, 2, 2**32 - 1), (1 << 31, 0xFFFFFFFF, 0)],
    "div.u32 %r9, %r1, %r2;": [(2**32 - 7, 2, (2**32 - 7) // 2)],
    "min.s32 %r9, %r1, %r2;": [(0xFFFFFFFF, 1, 0xFFFFFFFF)],
    "min.u32 %r9, %r1, %r2;": [(0xFFFFFFFF, 1, 1)],
    "shl.b32 %r9, %r1, %r2;": [(3, 31, 1 << 31), (3, 32, 0), (3, 100, 0)],
    "shr.u32 %r9, %r1, %r2;": [(1 << 31, 31, 1), (1 << 31, 32, 0)],
    "shr.s32 %r9, %r1, %r2;": [(1 << 31, 4, 0xF8000000), (1 << 31, 40, 0xFFFFFFFF), (5, 40, 0)],
    "bfi.b32 %r9, %r1, %r2, 4, 8;": [(0x5AB, 0xFFFFFFFF, 0xFFFFFABF)],
    "bfi.b32 %r9, %r1, %r2, 0, 32;": [(0x5AB, 0xFFFFFFFF, 0x5AB)],
    "prmt.b32 %r9, %r1, %r2, 0x7604;": [(0x03020100, 0x87060504, 0x87060004)],
    "prmt.b32 %r9, %r1, %r2, 0xF321;": [(0x03020100, 0x87060504, 0xFF030201)],
    "cvt.s64.s32 %rd5, %r1;": [(0xFFFFFFFE, 0, 2**64 - 2)],
    "cvt.u64.u32 %rd5, %r1;": [(0xFFFFFFFE, 0, 0xFFFFFFFE)],
    "cvt.s32.s8 %r9, %r1;": [(0x1FE, 0, 0xFFFFFFFE)],
    "cvt.rzi.s32.f32 %r9, %f1;": [
        (bits(-1.9), 0, 2**32 - 1),
        (bits(3e9), 0, 2**31 - 1),
        (bits(-3e9), 0, 1 << 31),
        (NAN, 0, 0),
    ],
    "cvt.rzi.u32.f32 %r9, %f1;": [(bits(-1.0), 0, 0), (bits(5e9), 0, 0xFFFFFFFF)],
    "cvt.rn.f32.s32 %f9, %r1;": [(0xFFFFFFFF, 0, bits(-1.0)), (16777217, 0, bits(16777216.0))],
    "cvt.rn.f16x2.f32 %r9, %f1, %f2;": [(bits(1.0), bits(2.0), 0x3C004000)],
    "cvt.rn.bf16x2.f32 %r9, %f1, %f2;": [(bits(1.0), bits(2.0), 0x3F804000)],
    "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2; mov.b32 %r9, {%rs1, %rs1};": [
        (bits(1.0), bits(-1000.0), 0x38FE38FE),
        (NAN, bits(2.0**-9), 0x7F017F01),
        (bits(1.0625), bits(1.1875), 0x383A383A),
    ],
    "cvt.rn.satfinite.e5m2x2.f32 %rs1, %f1, %f2; mov.b32 %r9, {%rs1, %rs1};": [(INF, bits(-1.0), 0x7BBC7BBC)],
    "mov.b32 {%rs1, %rs2}, %r1; cvt.rn.f16x2.e4m3x2 %r9, %rs1;": [(0x38FE, 0, 0x3C00DF00), (0x7F01, 0, 0x7FFF1800)],
    "mov.b32 {%rs1, %rs2}, %r1; cvt.rn.f16x2.e5m2x2 %r9, %rs1;": [(0x3CFB, 0, 0x3C00FB00), (0x7C7F, 0, 0x7C007FFF)],
    "cvt.sat.f32.f32 %f9, %f1;": [(bits(1.5), 0, bits(1.0)), (bits(-1.0), 0, 0), (NAN, 0, 0)],
    "min.f32 %f9, %f1, %f2;": [(NAN, bits(2.0), bits(2.0)), (bits(2.0), NAN, bits(2.0)), (0, 1 << 31, 1 << 31)],
    "max.f32 %f9, %f1, %f2;": [(NAN, bits(2.0), bits(2.0)), (0, 1 << 31, 0), (1 << 31, 0, 0)],
    "copysign.f32 %f9, %f1, %f2;": [(bits(-1.0), bits(3.0), bits(-3.0)), (bits(1.0), bits(-3.0), bits(3.0))],
    "fma.rm.f32 %f9, %f1, 0f3F800000, %f2;": [
        (bits(1.0), bits(2.0**-40), bits(1.0)),
        (bits(1.0), bits(-(2.0**-40)), 0x3F7FFFFF),
    ],
    "fma.rn.f32 %f9, %f1, 0f3F800000, %f2;": [(bits(1.0), bits(-(2.0**-40)), bits(1.0))],
    "neg.f32 %f9, %f1;": [(0, 0, 1 << 31)],
    "add.f32 %f9, %f1, 0fFF800000;": [(bits(1.0), 0, INF | 1 << 31)],
    "setp.ne.f32 %p1, %f1, %f2; selp.b32 %r9, 1, 0, %p1;": [(NAN, 0, 0), (0, 1 << 31, 0), (bits(1.0), 0, 1)],
    "setp.neu.f32 %p1, %f1, %f2; selp.b32 %r9, 1, 0, %p1;": [(NAN, 0, 1), (0, 1 << 31, 0)],
    "setp.ltu.f32 %p1, %f1, %f2; selp.b32 %r9, 1, 0, %p1;": [(NAN, 0, 1), (bits(1.0), bits(1.0), 0)],
    "setp.equ.f32 %p1, %f1, %f2; selp.b32 %r9, 1, 0, %p1;": [(NAN, 0, 1), (bits(1.0), bits(2.0), 0), (0, 1 << 31, 1)],
    "setp.nan.f32 %p1, %f1, %f2; selp.b32 %r9, 1, 0, %p1;": [(NAN, 0, 1), (0, 0, 0)],
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;": [(0xFFFFFFFF, 1, 1)],
    "setp.lt.u32 %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;": [(0xFFFFFFFF, 1, 0)],
    "setp.eq.s32 %p2, %r1, 1; setp.lt.and.s32 %p1, %r1, %r2, %p2; selp.b32 %r9, 1, 0, %p1;": [(1, 2, 1), (0, 2, 0)],
    "not.pred %p1, %p3; selp.b32 %r9, 1, 0, %p1;": [(0, 0, 1)],
    "mov.b64 %rd5, {%r1, %r2};": [(1, 2, 2 << 32 | 1)],
    "mov.b64 %rd1, {%r1, %r2}; mov.b64 {%r9, %r8}, %rd1;": [(1, 2, 1)],
    "mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r9, {%rs2, %rs1};": [(0x12345678, 0, 0x56781234)],
    "mov.b32 %r9, %f1;": [(bits(1.5), 0, bits(1.5))],
    "abs.s32 %r9, %r1;": [(0xFFFFFFFB, 0, 5)],
    "ex2.approx.ftz.f32 %f9, %f1;": [(bits(-126.0), 0, 0x00800000), (bits(-127.0), 0, 0), (1, 0, bits(1.0))],
    "ex2.approx.f32 %f9, %f1;": [(bits(-127.0), 0, 0x00400000)],
    "rcp.approx.ftz.f32 %f9, %f1;": [(0x80000001, 0, INF | 1 << 31), (bits(-(2.0**127)), 0, 1 << 31)],
    "lg2.approx.ftz.f32 %f9, %f1;": [(1, 0, INF | 1 << 31), (bits(8.0), 0, bits(3.0))],
}  # fmt: skip
OUTPUT = (("%rd5", "_rd5"), ("%f9", "as_bits(_f9)"), ("%r9", "_r9"))


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A function for each line of COMPUTED."""
    folder = tmp_path_factory.mktemp("arithmetic")
    lines = ['#include "operations.h"', "namespace cuda_ext::ptx {"]
    for index, text in enumerate(COMPUTED):
        code = body_of(text)
        result = next(expression for register, expression in OUTPUT if register in text)
        lines += [
            f'extern "C" uint64_t compute_{index}(uint32_t _r1, uint32_t _r2) {{',
            "bool _p1 = 0, _p2 = 0, _p3 = 0; uint16_t _rs1 = 0, _rs2 = 0; uint32_t _r8 = 0, _r9 = 0;",
            "uint64_t _rd1 = 0, _rd5 = 0; float _f9 = 0, _f1 = as_float(_r1), _f2 = as_float(_r2);",
            "constexpr Site sites_0[] = {{}}; (void)sites_0;",
            f"{code} return {result}; }}",
        ]
    source, library = folder / "arithmetic.cpp", folder / "arithmetic.so"
    source.write_text("\n".join([*lines, "}"]))
    flags = [flag for flag in build.CPP_FLAGS if not flag.startswith("-fvisibility")]
    command = [_emulator.compiler(), *flags, f"-I{_emulator.CSRC}", f"-I{build.HERE}", "-c", str(source), "-o"]
    subprocess.run([*command, str(source.with_suffix(".o"))], check=True)
    with _build.lock(_emulator.FOLDER):
        emulator = [_emulator.compile_source(path, _emulator.FLAGS) for path in (_emulator.CSRC / "simt").glob("*.cpp")]
    return ctypes.CDLL(str(_emulator.link(library, [source.with_suffix(".o"), *emulator])))


@pytest.mark.parametrize("text", COMPUTED)
def test_arithmetic(computed: ctypes.CDLL, text: str) -> None:
    function = getattr(computed, f"compute_{list(COMPUTED).index(text)}")
    function.restype = ctypes.c_uint64
    for a, b, expected in COMPUTED[text]:
        assert function(ctypes.c_uint32(a), ctypes.c_uint32(b)) == expected, hex(expected)
