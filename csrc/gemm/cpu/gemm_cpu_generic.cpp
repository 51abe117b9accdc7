#include "cpu/isa_generic.h"
#include "gemm/cpu/gemm_cpu.inc"
