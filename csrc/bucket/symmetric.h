// All-reduce of a bucket in symmetric memory: every rank of a group on one host addresses the memory of all others, so
// buckets are summed in place by loads and stores, and nothing is sent.
//
// Each rank owns a segment: a pad of signals, then its buckets, then staging, and each of them lies at the same place in
// every segment. All ranks do the same.
//
// Two-shot, where bandwidth counts. The elements of a bucket are cut in as many chunks as there are ranks.
//   1. arrive: the bucket of this rank is packed. Wait until those of all ranks are.
//   2. read chunk `rank` of all buckets, add in the order of the ranks, round once, and write the sum into that chunk of
//      all buckets; the sum of its squares goes to the pads of all ranks. Nobody else touches this chunk.
//   3. arrive: the chunk is written. Wait until those of all ranks are.
// One-shot, for buckets so small that the waits are what takes time: one of them is saved, and every rank adds everything.
//   1. write the bucket of this rank into the staging of all others, and arrive. Wait until all ranks have.
//   2. read all rows of the own staging, add in the order of the ranks, round once, and write the sum into the own bucket.
// All buckets then hold the same bits, and every rank knows the statistics of the whole without a pass over it.
//
// Arrivals. A rank announces itself in the pad of every other, in a word of its own, and waits in its own pad alone. Words
// only grow: 2 * epoch - 1 is the first arrival of an all-reduce and 2 * epoch the last, where epoch counts those of a
// slot. A rank that goes ahead therefore never takes a wait back from a slower one. Two-shot it cannot get ahead by more
// than one arrival, so what it leaves in the pads is read before it writes there again. One-shot it may be in the next
// all-reduce while another still adds, but not in the one after that: of staging, and of what it says of its call, there
// are two, for even and odd epochs. Arriving releases, waiting acquires.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace cuda_ext::symmetric {

constexpr int kMaxRanks = 32;
constexpr int kSlots = 8;                 // all-reduces that may be under way at once
constexpr int64_t kPadBytes = 128 << 10;  // of a segment, before its buckets
constexpr int64_t kAlignment = 64;        // bytes, of buckets, chunks, rows: a cache line is written by one rank

// Rank r sums the elements [r, r + 1) * chunk_elements of a bucket, as far as there are any.
constexpr int64_t chunk_elements(int64_t count, int64_t num_ranks, int64_t element_size) {
  const int64_t step = kAlignment / element_size;
  return ((count + num_ranks - 1) / num_ranks + step - 1) / step * step;
}

// Where a slot keeps the values of all ranks, one-shot: two times num_ranks rows of row_bytes, at the segment's end. The
// largest bucket that is summed so has row_bytes, a multiple of kAlignment; 0 if none is.
struct Staging {
  int64_t begin;  // bytes from the beginning of the segment
  int64_t row_bytes;

  static constexpr Staging of_slot(int64_t slot, int64_t segment_bytes, int64_t num_ranks, int64_t row_bytes) {
    return {segment_bytes - (slot + 1) * 2 * num_ranks * row_bytes, row_bytes};
  }
  constexpr bool takes(int64_t bytes) const { return row_bytes > 0 && bytes <= row_bytes; }
  HOST_DEVICE constexpr int64_t row(uint32_t epoch, int64_t rank, int64_t num_ranks) const {
    return begin + ((epoch & 1) * num_ranks + rank) * row_bytes;
  }
};

}  // namespace cuda_ext::symmetric
