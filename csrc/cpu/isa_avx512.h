// First include of a kernel's avx512 variant: everything after it is compiled for that instruction set.
#pragma once

#include "cpu/isa_prelude.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"))), \
                             apply_to = function)
#define CUDA_EXT_ISA_PUSHED
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#endif

#define CUDA_EXT_ISA avx512
#define CUDA_EXT_VECTOR_BYTES 64
