// Every standard header a CPU kernel may use, included before the instruction set is raised: an inline function of the
// standard library must not be emitted with instructions that the processor of another user lacks.
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
#endif

#include "base/dtype.h"
#include "cpu/host.h"

// GCC 12 takes the undefined pass-through operand of its own intrinsics for a mistake of ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
