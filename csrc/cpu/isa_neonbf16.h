// First include of a kernel's neonbf16 variant: everything after it is compiled for that instruction set.
#pragma once

#include "cpu/isa_prelude.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("bf16"))), apply_to = function)
#define CUDA_EXT_ISA_PUSHED
#else
#pragma GCC target("arch=armv8.2-a+bf16")
#endif

#define CUDA_EXT_ISA neonbf16
#define CUDA_EXT_VECTOR_BYTES 16
#define CUDA_EXT_BFLOAT16_PAIRS
#define CUDA_EXT_ISA_WITHOUT_PAIRS generic
