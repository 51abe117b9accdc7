// One CPU kernel source, several instruction sets. A kernel lives in X_cpu.inc and is compiled once per instruction set
// by X_cpu_{avx512,avx2,generic}.cpp, each into its own namespace; the launcher calls the one that best_isa() selects.
// `generic` is what every CPU of the architecture has: SSE2 on x86-64, NEON on aarch64. Kernels that multiply pairs of
// bfloat16 (cpu/bfloat16_pair.h) have one more variant: avx512bf16, which is avx512 with VDPBF16PS, and AMX where the
// CPU has it (cpu/amx.h), or neonbf16, which is NEON with BFDOT.
//
// Intel's CPUs issue VDPBF16PS at half the rate of a multiply-add of float32, or less: products as pairs reach 205
// GFLOP/s where those of values converted to float32 reach 325 (Sapphire Rapids, two threads). Without AMX the latter
// are chosen there.
#pragma once

#include <cstdlib>
#include <cstring>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace cuda_ext::cpu {

// Whether processor and operating system have AMX, with bfloat16: tiles of 16 rows of 64 bytes, and products of tiles
// summed in float32. Kernels of the variant for AVX512-BF16 ask. CUDA_EXT_CPU_ISA=avx512bf16 hides it. In ops/host.cpp.
bool has_amx();

enum class Isa { kGeneric, kAvx2, kAvx512, kAvx512BFloat16, kNeonBFloat16 };

// The fastest set that this CPU supports. CUDA_EXT_CPU_ISA=generic|avx2|avx512|avx512bf16 chooses another, so that
// tests reach all variants; the last is AVX512-BF16 without AMX. On aarch64, only generic does.
inline Isa best_isa() {
#if defined(__x86_64__)
  static const Isa isa = [] {
    Isa widest = Isa::kGeneric;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
      widest = Isa::kAvx2;
    if (widest == Isa::kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      widest = Isa::kAvx512;
    if (widest == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16")) widest = Isa::kAvx512BFloat16;
    const char* wanted = std::getenv("CUDA_EXT_CPU_ISA");
    if (wanted != nullptr) {
      if (std::strcmp(wanted, "avx512bf16") == 0) return widest;
      if (std::strcmp(wanted, "generic") == 0) return Isa::kGeneric;
      if (std::strcmp(wanted, "avx2") == 0 && widest > Isa::kAvx2) return Isa::kAvx2;
      if (std::strcmp(wanted, "avx512") == 0 && widest > Isa::kAvx512) return Isa::kAvx512;
    }
    if (widest == Isa::kAvx512BFloat16 && __builtin_cpu_is("intel") && !has_amx()) return Isa::kAvx512;
    return widest;
  }();
  return isa;
#elif defined(__aarch64__) && defined(__linux__)
  static const Isa isa = [] {
    constexpr unsigned long kBFloat16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
    const char* wanted = std::getenv("CUDA_EXT_CPU_ISA");
    const bool lowered = wanted != nullptr && std::strcmp(wanted, "generic") == 0;
    return (getauxval(AT_HWCAP2) & kBFloat16) != 0 && !lowered ? Isa::kNeonBFloat16 : Isa::kGeneric;
  }();
  return isa;
#else
  return Isa::kGeneric;
#endif
}

}  // namespace cuda_ext::cpu

// Declares `void name(params)` in every instruction set's namespace, and a `name` that calls the widest one.
// WITH_BFLOAT16: for kernels with a variant for pairs of bfloat16.
#if defined(__x86_64__)
#define CUDA_EXT_CPU_LAUNCHER_OF(name, Params, avx512_bfloat16)             \
  namespace cpu::avx512 {                                                   \
  void name(const Params& params);                                          \
  }                                                                         \
  namespace cpu::avx2 {                                                     \
  void name(const Params& params);                                          \
  }                                                                         \
  namespace cpu::generic {                                                  \
  void name(const Params& params);                                          \
  }                                                                         \
  inline void name(const Params& params) {                                  \
    switch (cpu::best_isa()) {                                              \
      case cpu::Isa::kAvx512BFloat16: return avx512_bfloat16::name(params); \
      case cpu::Isa::kAvx512: return cpu::avx512::name(params);             \
      case cpu::Isa::kAvx2: return cpu::avx2::name(params);                 \
      default: return cpu::generic::name(params);                           \
    }                                                                       \
  }
#define CUDA_EXT_CPU_LAUNCHER(name, Params) CUDA_EXT_CPU_LAUNCHER_OF(name, Params, cpu::avx512)
#define CUDA_EXT_CPU_LAUNCHER_WITH_BFLOAT16(name, Params) \
  namespace cpu::avx512bf16 {                             \
  void name(const Params& params);                        \
  }                                                       \
  CUDA_EXT_CPU_LAUNCHER_OF(name, Params, cpu::avx512bf16)
#else
#define CUDA_EXT_CPU_LAUNCHER(name, Params) \
  namespace cpu::generic {                  \
  void name(const Params& params);          \
  }                                         \
  inline void name(const Params& params) { cpu::generic::name(params); }
#if defined(__aarch64__)
#define CUDA_EXT_CPU_LAUNCHER_WITH_BFLOAT16(name, Params)                               \
  namespace cpu::neonbf16 {                                                             \
  void name(const Params& params);                                                      \
  }                                                                                     \
  namespace cpu::generic {                                                              \
  void name(const Params& params);                                                      \
  }                                                                                     \
  inline void name(const Params& params) {                                              \
    if (cpu::best_isa() == cpu::Isa::kNeonBFloat16) return cpu::neonbf16::name(params); \
    cpu::generic::name(params);                                                         \
  }
#else
#define CUDA_EXT_CPU_LAUNCHER_WITH_BFLOAT16(name, Params) CUDA_EXT_CPU_LAUNCHER(name, Params)
#endif
#endif
