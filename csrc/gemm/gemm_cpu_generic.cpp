#include "cpu/isa_generic.h"
#include "gemm/gemm_cpu.inc"
