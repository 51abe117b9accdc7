// Split k: the counters by which the last block of a tile to arrive recognises itself.
#pragma once

#include <cstdint>

namespace cuda_ext {

// Resets the counters, on `stream`, an rt::Stream.
void launch_clear_arrivals(uint32_t* arrivals, int count, void* stream);

}  // namespace cuda_ext
