#if defined(__aarch64__)
#include "cpu/isa_neonbf16.h"
#include "gemm/cpu/gemm_cpu.inc"
#include "cpu/isa_end.h"
#endif
