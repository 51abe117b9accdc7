// First include of a kernel's avx2 variant: everything after it is compiled for that instruction set.
#pragma once

#include "cpu/isa_prelude.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#define CUDA_EXT_ISA_PUSHED
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif

#define CUDA_EXT_ISA avx2
#define CUDA_EXT_VECTOR_BYTES 32
