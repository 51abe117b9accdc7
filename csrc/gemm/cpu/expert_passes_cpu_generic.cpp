#include "cpu/isa_generic.h"
#include "gemm/cpu/expert_passes_cpu.inc"
