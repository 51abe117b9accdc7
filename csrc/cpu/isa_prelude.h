// All standard headers that CPU kernels use. They are included before the instruction set is raised: otherwise the
// linker could choose, for the whole library, a copy of an inline standard function that older CPUs cannot execute.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "base/dtype.h"
#include "base/float8.h"
#include "cpu/host.h"
#include "cpu/isa.h"

// GCC 12 warns about the undefined pass-through operands of its own intrinsics and, on aarch64, about parts of a tile
// that loops do not reach: it does not know that no tile has more rows and columns than its array.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#if defined(__aarch64__)
#pragma GCC diagnostic ignored "-Warray-bounds"
#endif
#endif
