// All-reduce of a bucket in symmetric memory: every rank of a group on one host addresses the memory of all others, so
// buckets are summed in place by loads and stores, and nothing is sent.
//
// Each rank owns a segment: a pad of signals, then its buckets, and each bucket lies at the same place in every segment.
// Its elements are cut in as many chunks as there are ranks, and all ranks do the same ("two-shot, in place, push"):
//   1. arrive: the bucket of this rank is packed. Wait until those of all ranks are.
//   2. read chunk `rank` of all buckets, add in the order of the ranks, round once, and write the sum into that chunk of
//      all buckets; the sum of its squares goes to the pads of all ranks. Nobody else touches this chunk.
//   3. arrive: the chunk is written. Wait until those of all ranks are.
// All buckets then hold the same bits, and every rank knows the statistics of the whole without a pass over it.
//
// Arrivals. A rank announces itself in the pad of every other, in a word of its own, and waits in its own pad alone. Words
// only grow: 2 * epoch - 1 is the first arrival of an all-reduce and 2 * epoch the second, where epoch counts those of a
// slot. A rank that goes ahead therefore never takes a wait back from a slower one, and it cannot get ahead by more than
// one arrival, so what it leaves in the pads is read before it writes there again. Arriving releases, waiting acquires.
#pragma once

#include <cstdint>

namespace cuda_ext::symmetric {

constexpr int kMaxRanks = 32;
constexpr int kSlots = 8;                 // all-reduces that may be under way at once
constexpr int64_t kPadBytes = 128 << 10;  // of a segment, before its buckets
constexpr int64_t kAlignment = 64;        // bytes, of buckets and chunks: a cache line is written by one rank

// Rank r sums the elements [r, r + 1) * chunk_elements of a bucket, as far as there are any.
constexpr int64_t chunk_elements(int64_t count, int64_t num_ranks, int64_t element_size) {
  const int64_t step = kAlignment / element_size;
  return ((count + num_ranks - 1) / num_ranks + step - 1) / step * step;
}

}  // namespace cuda_ext::symmetric
