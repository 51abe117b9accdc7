// First include of a kernel's generic variant: everything after it is compiled for that instruction set.
#pragma once

#include "cpu/isa_prelude.h"

#define CUDA_EXT_ISA generic
#define CUDA_EXT_VECTOR_BYTES 16
