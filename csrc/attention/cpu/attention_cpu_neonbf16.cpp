#if defined(__aarch64__)
#include "cpu/isa_neonbf16.h"

#include "attention/cpu/attention_cpu.inc"

#include "cpu/isa_end.h"
#endif
