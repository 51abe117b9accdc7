#if defined(__x86_64__)
#include "cpu/isa_avx512bf16.h"
#include "gemm/cpu/gemm_cpu.inc"
#include "cpu/isa_end.h"
#endif
