// Shared by the asynchronous engines of the emulator: TMA and wgmma.
#pragma once

#include "simt/checker.h"

namespace cuda_ext::simt {

// A copy into `block` that the mbarrier at `address` counts starts, or has completed `bytes`. `operation` is the
// checker's, or null.
void start_copy(Block& block, SharedAddress address, const Operation* operation, const char* instruction, Site site);
void end_copy(Block& block, SharedAddress address, int64_t bytes, const Operation* operation);

// Swizzling permutes 16-byte units within rows of 128 bytes, by absolute address. `bytes` is 32, 64 or 128; less means
// no swizzle.
inline SharedAddress swizzled(SharedAddress address, int bytes) {
  const uint32_t units = uint32_t(bytes) / 16;
  return units < 2 ? address : address ^ (address >> 7 & (units - 1)) << 4;
}

}  // namespace cuda_ext::simt
