// Small structs (8 or 16 bytes) in shared memory, read and written with one instruction. Loops that are short of
// registers keep values there between uses: the task of a block, or values of a thread.
#pragma once

#include <type_traits>

#include "arch/memory.cuh"

namespace cuda_ext::tile {

template <class Struct>
using WordsOf = std::conditional_t<sizeof(Struct) == sizeof(arch::Words4), arch::Words4, arch::Words2>;

template <class Struct>
DEVICE Struct load_struct(const Struct& shared, Site site = {}) {
  return __builtin_bit_cast(Struct, arch::load_shared<WordsOf<Struct>>(arch::shared_address(&shared), site));
}
template <class Struct>
DEVICE void store_struct(Struct& shared, const Struct& value, Site site = {}) {
  arch::store_shared(arch::shared_address(&shared), __builtin_bit_cast(WordsOf<Struct>, value), site);
}

}  // namespace cuda_ext::tile
