// Copies of one chunk of 16 bytes from global to shared memory, for rows of any alignment.
#pragma once

#include "arch/async_copy.cuh"
#include "arch/memory.cuh"

namespace cuda_ext::tile {

// Starts copying the first `bytes` of a chunk and fills the others with zeros. vector_bytes: the alignment of `from`.
template <int vector_bytes>
DEVICE void copy_chunk(arch::SharedAddress to, const char* from, int bytes) {
  static_assert(vector_bytes == 16 || vector_bytes == 4 || vector_bytes == 2);
  if constexpr (vector_bytes == 16) {
    arch::cp_async<16>(to, from, bytes);
  } else if constexpr (vector_bytes == 4) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int left = bytes - i;
      arch::cp_async<4>(to + i, from + i, left < 0 ? 0 : left < 4 ? left : 4);
    }
  } else {  // smaller than a cp.async: through registers
    arch::Words4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = bytes > 4 * i ? arch::load_global<uint16_t>(from + 4 * i) : 0;
      const uint32_t high = bytes > 4 * i + 2 ? arch::load_global<uint16_t>(from + 4 * i + 2) : 0;
      words.data[i] = high << 16 | low;
    }
    arch::store_shared(to, words);
  }
}

}  // namespace cuda_ext::tile
