#if defined(__x86_64__)
#include "cpu/isa_avx512.h"
#include "gemm/cpu/expert_passes_cpu.inc"
#include "cpu/isa_end.h"
#endif
