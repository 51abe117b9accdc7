"""Planted faults that only nvcc's code can have: a text to replace in a copy of csrc, and the test that detects it.

They are in code that the direct emulation never compiles: asm strings, `#if defined(__CUDACC__)` branches, the layout
of parameters and shared memory, and launches. docs/emulator.md counts them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# Patterns of the message that reports a fault.
VALUES = "Arrays are not equal|Not equal to tolerance|differ from the reference"
RACE = "race: "
DEADLOCK = "deadlock"
NVCC = r"cannot build .*\.host\.o"
TRANSLATOR = r"\.ptx(, \w+: line \d+,|:\d+: expected)"
# Not detectable: nvcc writes the same instructions.
SAME = "the same instructions"


@dataclass(frozen=True)
class Fault:
    file: str  # under csrc
    right: str
    wrong: str
    source: (
        str  # source of the kernels: in tests/simt ("conformance_mma") or csrc ("gemm/instantiations/gemm_sm80_bf16")
    )
    case: str  # that detects it: in the library of `source`, or in OPS of test_planted.py
    found: str  # pattern of the message, or SAME
    arch: str = "sm_80"


FAULTS: dict[str, Fault] = {}
ARCHS = {"75": "sm_75", "": "sm_80", "90": "sm_90a"}


def fault(name: str, file: str, right: str, wrong: str, source: str, case: str, found: str = VALUES) -> None:
    """Registers a fault; kernels of a `source` that ends in "@75" or "@90" are compiled for sm_75 or sm_90a."""
    source, _, other = source.partition("@")
    assert name not in FAULTS
    FAULTS[name] = Fault(file, right, wrong, source, case, found, ARCHS[other])


MMA, MEMORY, WARP, GRID = "conformance_mma", "conformance_memory", "conformance_warp", "conformance_grid"
SM90, CLUSTER, WGMMA = "conformance_sm90@90", "conformance_cluster@90", "conformance_wgmma@90"
SM89, CONVERSIONS_SM90 = "conformance_sm89@90", "conformance_memory@90"
LAUNCHES, GEMM = "launches@90", "gemm/instantiations/gemm_sm80_bf16"
ATTENTION = "attention/instantiations/attention_fwd_sm80_bf16_d64"

# fmt: off
# Asm strings of sm_80.
fault("ldmatrix without .trans", "arch/mma.cuh", "m8n8.x2.trans.shared.b16 {%0", "m8n8.x2.shared.b16 {%0",
      MMA, "ldmatrix_x2_trans")
fault("ldmatrix with its results swapped", "arch/mma.cuh",
      '"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"',
      '"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %2, %1, %3}, [%4];"', MMA, "ldmatrix_x4")
fault("mma with rows of A swapped", "arch/mma.cuh", '"r"(a[0]), "r"(a[1])', '"r"(a[1]), "r"(a[0])', MMA, "mma_f16")
fault("mma with halves of B swapped", "arch/mma.cuh", "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\"\n      :",
      "{%4,%5,%6,%7}, {%9,%8}, {%0,%1,%2,%3};\"\n      :", MMA, "mma_tf32")
fault("mma of bfloat16 as of float16", "arch/mma.cuh", "row.col.f32.bf16.bf16.f32", "row.col.f32.f16.f16.f32",
      MMA, "mma_bf16")
fault("halves of a register swapped", "arch/math.cuh",
      'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));',
      'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(low), "f"(high));', MEMORY, "conversions")
fault("tf32 cut off, not rounded", "arch/math.cuh", "cvt.rna.tf32.f32 %0, %1;", "and.b32 %0, %1, 0xffffe000;",
      MEMORY, "conversions")
fault("exp2 instead of log2", "arch/math.cuh", "lg2.approx.ftz.f32", "ex2.approx.ftz.f32", MEMORY, "special_functions")
fault("cp.async copies bytes that are not there", "arch/async_copy.cuh", "[%0], [%1], %2, %3;", "[%0], [%1], %2, %2;",
      MEMORY, "cp_async")
fault("cp.async of another size", "arch/async_copy.cuh", '"l"(global), "n"(bytes)', '"l"(global), "n"(4)',
      MEMORY, "cp_async", "valid bytes, got")
fault("cp.async with addresses swapped", "arch/async_copy.cuh",
      '[%0], [%1], 16, %2;" ::"r"(shared), "l"(global)', '[%0], [%1], 16, %2;" ::"r"(uint32_t(uint64_t(global))), '
      '"l"(uint64_t(shared))', MEMORY, "cp_async", "cp_async .* is an address of")
fault("cp.async.wait_group lets copies through", "arch/async_copy.cuh", '%0;" ::"n"(pending)',
      '%0;" ::"n"(pending + 3)', MEMORY, "cp_async")
fault("cp.async.commit_group left out", "arch/async_copy.cuh",
      'CUDA_EXT_CP_ASYNC("cp.async.commit_group;" :: : "memory");', "", MEMORY, "cp_async")
fault("a shared store with words swapped", "arch/memory.cuh",
      'st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]), "r"(w[1])',
      'st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[1]), "r"(w[0])', MEMORY, "shared_vectors")
fault("a shared load half as wide", "arch/memory.cuh",
      'asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"', 'asm volatile("ld.shared.u32 %0, [%2]; mov.u32 %1, 0;"',
      MEMORY, "shared_vectors")
fault("a global store half as wide", "arch/memory.cuh", 'asm volatile("st.global.v2.u32 [%0], {%1, %2};"',
      'asm volatile("st.global.u32 [%0], %1;"', MEMORY, "global_widths")
fault("an or that adds", "arch/memory.cuh", "red.global.or.b32", "red.global.add.u32", MEMORY, "atomics")
fault("a sum of floats as of words", "arch/memory.cuh", 'red.global.add.f32 [%0], %1;" ::"l"(pointer), "f"(value)',
      'red.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(__float_as_uint(value))', MEMORY, "atomics")
fault("an arrival without ordering", "arch/memory.cuh", "atom.global.acq_rel.gpu.add.u32", "atom.global.add.u32",
      GRID, "last_block", RACE)
fault("a release that is a store", "arch/memory.cuh", "st.global.release.gpu.u32 [%0], %1;",
      "st.global.u32 [%0], %1;", GRID, "blocks_in_turn", RACE)
fault("an acquire that is relaxed", "arch/memory.cuh", "ld.global.acquire.gpu.u32", "ld.global.relaxed.gpu.u32",
      GRID, "blocks_in_turn", TRANSLATOR)
fault("a wait for a smaller number", "arch/memory.cuh", "while (seen != value)", "while (seen < value)",
      GRID, "blocks_in_turn", DEADLOCK)
fault("a time-out that counts backwards", "arch/memory.cuh", "if (now - begin > nanoseconds)",
      "if (begin - now > nanoseconds)", GRID, "blocks_in_turn_system", "the kernel has given up")
fault("barrier and threads swapped", "arch/thread.cuh", '"bar.sync %0, %1;"', '"bar.sync %1, %0;"',
      WARP, "named_barriers", "barrier 128; a block has")
fault("an arrival that waits", "arch/thread.cuh", '"bar.arrive %0, %1;"', '"bar.sync %0, %1;"',
      WARP, "named_barriers", DEADLOCK)
fault("a fence left out", "arch/thread.cuh", "{ __threadfence(); }", "{}", GRID, "fences", RACE)
fault("a fence of block scope only", "arch/thread.cuh", "__threadfence()", "__threadfence_block()",
      GRID, "fences", TRANSLATOR)

# Branches for nvcc, sm_80.
fault("a shuffle of all lanes in a part of them", "arch/warp.cuh", "__shfl_sync(mask, value, lane)",
      "__shfl_sync(kFullWarp, value, lane)", WARP, "shuffle_diverged", "shuffle .* the warp has diverged")
fault("a shuffle up that goes down", "arch/warp.cuh", "__shfl_up_sync", "__shfl_down_sync", WARP, "shuffle_up_down")
fault("a shuffle within half a warp", "arch/warp.cuh", "__shfl_xor_sync(mask, value, lanes)",
      "__shfl_xor_sync(mask, value, lanes, 16)", WARP, "shuffle_xor")
fault("a sync of all lanes in a part of them", "arch/thread.cuh", "__syncwarp(mask)", "__syncwarp()",
      WARP, "sync_part_of_a_warp", "sync_warp .* the warp has diverged")
fault("one lane elected of the block", "arch/warp.cuh", "return lane_index() == 0;\n#endif",
      "return thread_index() == 0;\n#endif", WARP, "elect_one")
fault("an atomic of block scope only", "arch/memory.cuh", "return atomicAdd(pointer, value);",
      "return atomicAdd_block(pointer, value);", GRID, "fences", TRANSLATOR)
fault("a sum of 64 bits cut off", "arch/memory.cuh", "static_cast<unsigned long long>(value)",
      "static_cast<unsigned>(value)", MEMORY, "atomics")
fault("a read-only load of what the kernel writes", "arch/memory.cuh", "__ldcs(static_cast<const uint32_t*>(pointer))",
      "__ldg(static_cast<const uint32_t*>(pointer))", GRID, "last_block", "read through the read-only path")
fault("a generic address taken for a shared one", "arch/memory.cuh",
      "static_cast<SharedAddress>(__cvta_generic_to_shared(pointer))", "uint32_t(reinterpret_cast<uint64_t>(pointer))",
      MEMORY, "shared_vectors", "store_shared .* is an address of")
fault("a wrong assumption about the thread index", "arch/thread.cuh", "__builtin_assume(index >= 0 && index < 1024);",
      "__builtin_assume(index >= 0 && index < 32);", ATTENTION, "attention")
fault("bfloat16 rounded to zero", "arch/math.cuh", "cvt.rn.bf16.f32", "cvt.rz.bf16.f32",
      MEMORY, "conversions", TRANSLATOR)

# Layout of parameters and shared memory.
fault("launch bounds swapped", "arch/target.cuh", "__launch_bounds__(threads, min_blocks)",
      "__launch_bounds__(min_blocks, threads)", WARP, "shuffle", "the kernel's launch bound is 1")
fault("shared memory aligned to 16", "arch/target.cuh", "__align__(1024)", "__align__(16)", WARP, "sync_warp",
      TRANSLATOR)
fault("a tensor map copied to the stack", "arch/target.cuh", "#define GRID_CONSTANT const __grid_constant__",
      "#define GRID_CONSTANT const", SM90, "tma_load_2d_64_swizzle64_float16", TRANSLATOR)
fault("a tensor map aligned to 8", "arch/tma.cuh", "struct alignas(128) TensorMap", "struct alignas(8) TensorMap",
      SM90, "tma_load_2d_64_swizzle64_float16", NVCC)
fault("a parameter that only the device has", "gemm/tiles_sm80.h", "struct GemmPlan {",
      "struct GemmPlan {\n#if defined(__CUDA_ARCH__)\n  int64_t only_here;\n#endif\n", GEMM, "gemm",
      "there is no memory at")
fault("shared memory that only the device has", "gemm/gemm_sm80.cuh", "  struct Storage {\n",
      "  struct Storage {\n#if defined(__CUDA_ARCH__)\n    unsigned char only_here[1024];\n#endif\n", GEMM, "split_k",
      "outside of the block's")

# Launches.
fault("a grid with y and z swapped", "rt/launch.cu", "dim3(config.grid.x, config.grid.y, config.grid.z)",
      "dim3(config.grid.x, config.grid.z, config.grid.y)", GRID, "grid_indices", VALUES)
fault("a launch without its shared memory", "rt/launch.cu", "launch.dynamicSmemBytes = config.shared_bytes",
      "launch.dynamicSmemBytes = 0", WARP, "sync_warp", "outside of the block's")
fault("more than 48 KiB not requested", "rt/launch.cu", "if (bytes <= kFree) return;",
      "if (bytes <= 16 * kFree) return;",
      LAUNCHES, "shared_100_kib", "allowed for this kernel are 49152")
fault("more than 48 KiB requested only once", "rt/launch.cu", "load(std::memory_order_acquire) >= bytes) return;",
      "load(std::memory_order_acquire) > 0) return;", LAUNCHES, "shared_grows", "allowed for this kernel are 61440")
fault("a cluster not requested", "rt/launch.cu",
      "launch.numAttrs++];\n    attribute.id = cudaLaunchAttributeClusterDimension",
      "launch.numAttrs];\n    attribute.id = cudaLaunchAttributeClusterDimension",
      CLUSTER, "cluster_loads", "block 1 of a cluster")
fault("a cluster along z", "rt/launch.cu", "clusterDim = {unsigned(config.cluster.x), unsigned(config.cluster.y), "
      "unsigned(config.cluster.z)}", "clusterDim = {unsigned(config.cluster.z), unsigned(config.cluster.y), "
      "unsigned(config.cluster.x)}", CLUSTER, "cluster_loads", "does not divide the grid")
fault("more than 8 blocks of a cluster not requested", "rt/launch.cu",
      "  if (config.nonportable_cluster)", "  if (false)", LAUNCHES, "cluster_of_16", "this kernel allows at most 8")
fault("blocks that wait not launched together", "rt/launch.cu", "if (config.waits == Waits::kForAny)", "if (false)",
      GRID, "blocks_in_turn", DEADLOCK)
fault("a programmatic launch without its attribute", "rt/launch.cu", "if (config.programmatic)", "if (false)",
      LAUNCHES, "programmatic", "the launch requests")
fault("an error of a launch ignored", "rt/launch.cu", 'check(cudaLaunchKernelExC(&launch, kernel, arguments), name, '
      '"launch");', "cudaLaunchKernelExC(&launch, kernel, arguments);", LAUNCHES, "threads_33", "DID NOT RAISE")
fault("an error of a launch not cleared", "rt/launch.cu", "  cudaGetLastError();", "", LAUNCHES, "no_error_is_left",
      "an error remains")

# Tensor maps.
fault("a tensor map with another stride", "rt/tensor_map.cu", "cuuint64_t(t.strides[d - 1])",
      "cuuint64_t(t.strides[0])", SM90, "tma_load_3d_48_none_float16")
fault("a tensor map with the box as its size", "rt/tensor_map.cu", "sizes[d] = cuuint64_t(t.sizes[d]);",
      "sizes[d] = cuuint64_t(t.box[d]);", SM90, "tma_load_2d_64_swizzle64_float16")
fault("a tensor map with another swizzle", "rt/tensor_map.cu", "? CU_TENSOR_MAP_SWIZZLE_64B",
      "? CU_TENSOR_MAP_SWIZZLE_NONE", SM90, "tma_load_2d_64_swizzle64_float16")
fault("a tensor map of another type", "rt/tensor_map.cu",
      "CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_FLOAT16", "CU_TENSOR_MAP_DATA_TYPE_FLOAT16, "
      "CU_TENSOR_MAP_DATA_TYPE_FLOAT32", SM90, "tma_load_2d_64_swizzle64_float16", "refused the tensor")
fault("a tensor map of one dimension less", "rt/tensor_map.cu", "kTypes[int(t.element)], cuuint32_t(t.rank)",
      "kTypes[int(t.element)], cuuint32_t(t.rank - 1)", SM90, "tma_load_3d_48_none_float16",
      "coordinates for a tensor of")

# Asm strings and branches of sm_75.
fault("an 8-deep mma with rows of A swapped", "arch/mma.cuh", '"r"(a0), "r"(a1), "r"(b)', '"r"(a1), "r"(a0), "r"(b)',
      MMA + "@75", "mma_f16")
fault("products of sm_80 assumed before it", "arch/mma.cuh", "return kComputeCapability >= 80;",
      "return kComputeCapability >= 75;", MMA + "@75", "mma_bf16")
fault("copies of sm_80 assumed before it", "arch/async_copy.cuh", "has_cp_async() { return false; }",
      "has_cp_async() { return true; }", MEMORY + "@75", "cp_async")

# Asm strings and branches of sm_90.
fault("coordinates of a tile swapped", "arch/tma.cuh", 'CUDA_EXT_TMA_RANK(2, "{%3, %4}"',
      'CUDA_EXT_TMA_RANK(2, "{%4, %3}"', SM90, "tma_load_2d_64_swizzle64_float16")
fault("a tile of 5 dimensions with coordinates swapped", "arch/tma.cuh", '"%8", "{%2, %3, %4, %5, %6}"',
      '"%8", "{%2, %3, %4, %6, %5}"', SM90, "tma_store_5d_16_none_float16")
fault("a tile added that should be stored", "arch/tma.cuh", "    if constexpr (add) ", "    if constexpr (true)",
      SM90, "tma_store_3d_64_swizzle64_float16")
fault("a multicast to other blocks", "arch/tma.cuh", '"h"(blocks)', '"h"(uint16_t(blocks ^ 1))', CLUSTER, "multicast",
      DEADLOCK)
fault("a multicast to this block only", "arch/tma.cuh", "complete_tx::bytes.multicast::cluster [%0]",
      "complete_tx::bytes [%0]", CLUSTER, "multicast", NVCC)
fault("a bulk copy of another size", "arch/tma.cuh",
      'bytes [%0], [%1], %2, [%3];" ::"r"(to),\n               "l"(from), '
      '"r"(bytes)', 'bytes [%0], [%1], %2, [%3];" ::"r"(to),\n               "l"(from), "r"(bytes - 16)',
      SM90, "bulk_copies", DEADLOCK)
fault("a group of stores that is not closed", "arch/tma.cuh", "{ CUDA_EXT_TMA(\"cp.async.bulk.commit_group;\" :: : "
      '"memory"); }', "{}", SM90, "bulk_copies", "may still read shared memory")
fault("a wait that only reads have ended", "arch/tma.cuh", '"cp.async.bulk.wait_group %0;"',
      '"cp.async.bulk.wait_group.read %0;"', SM90, "bulk_copies", VALUES)
fault("a wait for the other parity", "arch/barrier.cuh", '"r"(parity)', '"r"(parity ^ 1)', SM90, "barrier_ring",
      VALUES)
fault("a wait of the cluster without acquire", "arch/cluster.cuh",
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta", "mbarrier.try_wait.parity.shared::cta",
      CLUSTER, "cluster_stores", RACE)
fault("bytes that are not announced", "arch/barrier.cuh",
      'asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"',
      'asm volatile("{.reg .b32 t; mov.b32 t, %1; mbarrier.arrive.shared::cta.b64 _, [%0];}"',
      SM90, "tma_load_2d_64_swizzle64_float16", "copies into its shared memory are in flight")
fault("a proxy fence compiled away", "arch/barrier.cuh",
      "fence_async_shared(Site = {}) {\n#if __CUDA_ARCH__ >= 900", "fence_async_shared(Site = {}) {\n#if __CUDA_ARCH__ "
      ">= 9000", SM90, "tma_store_2d_128_swizzle128_bfloat16", RACE)
fault("a fence of barriers compiled away", "arch/barrier.cuh",
      "fence_barrier_init(Site = {}) {\n#if __CUDA_ARCH__ >= 900", "fence_barrier_init(Site = {}) {\n#if __CUDA_ARCH__ "
      ">= 9000", SM90, "barrier_order", RACE)
fault("an arrival of the cluster without ordering", "arch/cluster.cuh", "barrier.cluster.arrive.release",
      "barrier.cluster.arrive.relaxed", CLUSTER, "cluster_loads", RACE)
fault("mapa with operands swapped", "arch/cluster.cuh", '"r"(address), "r"(rank)', '"r"(rank), "r"(address)',
      CLUSTER, "cluster_loads", "mapa .* bytes at shared address")
fault("a load of the cluster with words swapped", "arch/cluster.cuh", '"ld.shared::cluster.v2.u32 {%0, %1}, [%2];"',
      '"ld.shared::cluster.v2.u32 {%1, %0}, [%2];"', CLUSTER, "cluster_vectors")
fault("a store of the cluster with words swapped", "arch/cluster.cuh",
      '"st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};"', '"st.shared::cluster.v4.u32 [%0], {%1, %2, %4, %3};"',
      CLUSTER, "cluster_vectors")
fault("a cluster of one, compiled for all", "arch/cluster.cuh", "#if __CUDA_ARCH__ >= 900\n#define CUDA_EXT_SM90",
      "#if __CUDA_ARCH__ >= 9000\n#define CUDA_EXT_SM90", CLUSTER, "cluster_loads", VALUES)
fault("stmatrix without .trans", "arch/mma.cuh", "stmatrix.sync.aligned.m8n8.x4.trans", "stmatrix.sync.aligned.m8n8.x4",
      SM90, "stmatrix_x4_trans")
fault("a vector of sums with words swapped", "arch/memory.cuh", '"f"(values[0]), "f"(values[1])',
      '"f"(values[1]), "f"(values[0])', MEMORY + "@90", "vector_reductions")
fault("elect.sync of one lane", "arch/warp.cuh", "elect.sync _|p, 0xffffffff;", "elect.sync _|p, 1;",
      WARP + "@90", "elect_one", "the mask 0x00000001 leaves out")

# 8-bit floats.
fault("mma of 8-bit floats with types swapped", "arch/mma.cuh", "f32.%10.%11.f32", "f32.%11.%10.f32", SM89,
      "mma_e4m3_e5m2")
fault("wgmma of 8-bit floats with types swapped", "arch/wgmma.cuh",
      '"C"(Float8Name<A>::value), "C"(Float8Name<B>::value)',
      '"C"(Float8Name<B>::value), "C"(Float8Name<A>::value)', WGMMA, "wgmma_e5m2xe4m3_200_k128_k128")
fault("a pair of 8-bit floats with its halves swapped", "arch/math.cuh", '"f"(high), "f"(low), "C"',
      '"f"(low), "f"(high), "C"', CONVERSIONS_SM90, "float8_rounding")
fault("8-bit floats that become infinite", "arch/math.cuh", "cvt.rn.satfinite.%3x2", "cvt.rn.%3x2", CONVERSIONS_SM90,
      "float8_rounding", NVCC)
fault("8-bit floats of the other format", "arch/math.cuh", 'value[] = "e5m2"', 'value[] = "e4m3"', CONVERSIONS_SM90,
      "float8_elements")

# wgmma.
fault("wgmma with orders of operands swapped", "arch/wgmma.cuh", '"r"(scale_d), "n"(a_major), "n"(b_major)',
      '"r"(scale_d), "n"(b_major), "n"(a_major)', WGMMA, "wgmma_bf16_200_k128_m16")
fault("wgmma with descriptors swapped", "arch/wgmma.cuh", '                   : "l"(a), "l"(b), "r"(scale_d));',
      '                   : "l"(b), "l"(a), "r"(scale_d));', WGMMA, "wgmma_tf32_96_k32_k64",
      VALUES)
fault("wgmma that clears the sum", "arch/wgmma.cuh", 'setp.ne.b32 p, " p2 ", 0;', 'setp.eq.b32 p, " p2 ", 0;',
      WGMMA, "wgmma_f16_8_k128_k128")
fault("wgmma with rows of A swapped", "arch/wgmma.cuh", '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)',
      '"r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "l"(b)', WGMMA, "wgmma_bf16_40_reg_k128")
fault("wgmma of another type", "arch/wgmma.cuh", 'value[] = "f16"', 'value[] = "bf16"', WGMMA, "wgmma_f16_8_k128_k128")
fault("wgmma.fence left out", "arch/wgmma.cuh", 'CUDA_EXT_SM90A(asm volatile("wgmma.fence.sync.aligned;" :: : '
      '"memory");)', "", WGMMA, "wgmma_f16_8_k128_k128", "no wgmma_fence since")
fault("wgmma.wait_group lets products through", "arch/wgmma.cuh", '"wgmma.wait_group.sync.aligned %0;" ::"n"(pending)',
      '"wgmma.wait_group.sync.aligned %0;" ::"n"(pending + 1)', WGMMA, "wgmma_groups",
      "never waited for wgmma products")
fault("registers released instead of allocated", "arch/wgmma.cuh", "setmaxnreg.inc", "setmaxnreg.dec",
      WGMMA, "wgmma_groups", "decrease_registers at")
fault("registers allocated that are not a multiple of 8", "arch/wgmma.cuh",
      '"setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)', '"setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count + 4)',
      WGMMA, "wgmma_groups", NVCC)
fault("wgmma compiled away", "arch/wgmma.cuh", "#if defined(__CUDA_ARCH_FEAT_SM90_ALL)",
      "#if defined(__CUDA_ARCH_FEAT_SM90A)", WGMMA, "wgmma_f16_8_k128_k128")

# Hints that the emulator ignores.
fault("a release of device scope only", "arch/memory.cuh", "st.global.release.sys", "st.global.release.gpu",
      GRID, "hints", "has no st.global.release.sys")
fault("a store that stays in the caches", "arch/memory.cuh",
      "__stcs(static_cast<uint4*>(pointer), __builtin_bit_cast(uint4, v))",
      "*static_cast<uint4*>(pointer) = __builtin_bit_cast(uint4, v)", MEMORY, "hints", "has no st.global.cs.v4")
fault("a load that bypasses the read-only path", "arch/memory.cuh", "__ldg(static_cast<const uint4*>(pointer))",
      "*static_cast<const uint4*>(pointer)", MEMORY, "hints", "has no ld.global.nc.v4")
fault("a copy through L1", "arch/async_copy.cuh", "cp.async.cg.shared.global", "cp.async.ca.shared.global",
      MEMORY, "hints", "has no cp.async.cg")
fault("a launch bound of threads only", "arch/target.cuh", "__launch_bounds__(threads, min_blocks)",
      "__launch_bounds__(threads)", MEMORY, "hints", "bounds no blocks")
fault("a tensor map not prefetched", "arch/tma.cuh", 'CUDA_EXT_TMA("prefetch.tensormap [%0];" ::"l"(&map) : "memory");',
      "", SM90, "hints", "has no prefetch.tensormap")

# Clobbers and register constraints, which restrict what the compiler may move.
fault("ldmatrix without a memory clobber", "arch/mma.cuh", ': "r"(row)\n                 : "memory");', ': "r"(row));',
      GEMM, "gemm", SAME)
fault("a wait for copies without a memory clobber", "arch/async_copy.cuh", '::"n"(pending) : "memory");',
      '::"n"(pending));', GEMM, "gemm", SAME)
fault("a wait for a barrier without a memory clobber", "arch/barrier.cuh",
      ': "r"(address), "r"(parity)\n                 : "memory");', ': "r"(address), "r"(parity));',
      SM90, "barrier_ring", SAME)
fault("accumulators of wgmma without constraints", "arch/wgmma.cuh",
      'asm volatile("" : "+f"(registers[i])::"memory");', ";",
      WGMMA, "wgmma_groups", SAME)
fault("a named barrier without a memory clobber", "arch/thread.cuh",
      '"bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");',
      '"bar.sync %0, %1;" ::"r"(barrier), "r"(threads));', WARP, "named_barriers", SAME)
fault("a store of the cluster without a memory clobber", "arch/cluster.cuh",
      '"r"(address), "r"(w[0]) : "memory");\n}\n\n//',
      '"r"(address), "r"(w[0]));\n}\n\n//', CLUSTER, "cluster_stores", SAME)
# fmt: on


FOUND_BY = {
    VALUES: "wrong values",
    RACE: "a race",
    DEADLOCK: "a deadlock",
    NVCC: "a refusal",
    TRANSLATOR: "a refusal",
    SAME: "nothing",
}


def table() -> str:
    """How many faults of each file are found by what, for docs/emulator.md; by default, by a message of their own."""
    kinds = [*dict.fromkeys(FOUND_BY.values()), "a message"]
    counts = Counter((fault.file, FOUND_BY.get(fault.found, "a message")) for fault in FAULTS.values())
    rows = [["in", *kinds], ["---"] * (len(kinds) + 1)]
    for file in dict.fromkeys(fault.file for fault in FAULTS.values()):
        rows.append([f"`{file}`", *(str(counts[file, kind] or "") for kind in kinds)])
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)
