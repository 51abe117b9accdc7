// The random numbers of dropout as tensors, for what composes attention of other ops.
#pragma once

#include <vector>

#include "base/philox.h"
#include "ops/op.h"

namespace cuda_ext {

// Philox4x32-10 (base/philox.h) of int64 counters, with the seed and offset in rng_state, (2,) int64: its four words,
// in the shape of `counter`, as int64 from 0 to 2^32 - 1. On any device, without reading a value.
std::vector<Tensor> philox_words(const Tensor& rng_state, const Tensor& counter);

// Writes the seed and offset of a call to `rng_state`, without waiting for the device.
void store_rng(const RngSource& rng, const Tensor& rng_state);

}  // namespace cuda_ext
