// What waits in shared memory until it is asked for, since loops have no registers to keep it, in parts that are read at
// once: what a block has to do, which is the same for all its threads, and what each thread puts aside.
#pragma once

#include <type_traits>

#include "arch/memory.cuh"

namespace cuda_ext::sm80 {

template <class Part>
using WordsOfPart = std::conditional_t<sizeof(Part) == sizeof(arch::Words4), arch::Words4, arch::Words2>;

template <class Part>
DEVICE Part load_part(const Part& shared, Site site = {}) {
  return __builtin_bit_cast(Part, arch::load_shared<WordsOfPart<Part>>(arch::shared_address(&shared), site));
}
template <class Part>
DEVICE void store_part(Part& shared, const Part& part, Site site = {}) {
  arch::store_shared(arch::shared_address(&shared), __builtin_bit_cast(WordsOfPart<Part>, part), site);
}

}  // namespace cuda_ext::sm80
