#include "cpu/isa_generic.h"
#include "gemm/cpu/scaled_cpu.inc"
