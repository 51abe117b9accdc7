#if defined(__x86_64__)
#include "cpu/isa_avx512bf16.h"

#include "attention/cpu/attention_cpu.inc"

#include "cpu/isa_end.h"
#endif
