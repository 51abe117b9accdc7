#if defined(__x86_64__)
#include "cpu/isa_avx2.h"

#include "bucket/bucket_cpu.inc"
#endif
