// All-reduce of a bucket in symmetric memory: every rank of a group on one host can address the memory of all others,
// so buckets are summed in place by loads and stores.
//
// Each rank owns a segment: a signal pad, its buckets, and staging buffers, at the same offsets in every segment. All
// ranks execute the same steps.
//
// Two-shot, for large buckets, limited by bandwidth. A bucket is divided into one chunk per rank.
//   1. Signal that the bucket of this rank is packed. Wait until those of all ranks are.
//   2. Read chunk `rank` of all buckets, add them in the order of the ranks, round once, and write the sum to this
//      chunk of all buckets, and its sum of squares to the pads of all ranks. No other rank accesses this chunk.
//   3. Signal that the chunk is written. Wait until those of all ranks are.
// One-shot, for small buckets, limited by latency: saves one of the waits, but every rank adds the whole bucket.
//   1. Write the bucket of this rank to the staging of all others, and signal. Wait until all ranks have.
//   2. Read all rows of this rank's staging, add them in the order of the ranks, round once, and write the sum to this
//      rank's bucket.
// All buckets then have the same bits, and every rank has the statistics of the whole bucket without another pass.
//
// Signals. A rank writes its own word in the pad of every rank, and waits only on its own pad. Words only grow: of
// all-reduce number `epoch` of a slot, 2 * epoch - 1 is the first signal and 2 * epoch the last. So a fast rank never
// invalidates the condition on which a slow one waits. Two-shot, a rank can be at most one signal ahead, so what it
// wrote to the pads is read before it writes there again. One-shot, it may be in the next all-reduce while another rank
// still adds, but not in the one after that, so there are two staging buffers (and two records of the call), for even
// and odd epochs. Signals are stored with release and loaded with acquire semantics.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace cuda_ext::symmetric {

constexpr int kMaxRanks = 32;
constexpr int kSlots = 8;                 // all-reduces that may run concurrently
constexpr int64_t kPadBytes = 128 << 10;  // at the start of a segment
constexpr int64_t kAlignment = 64;        // bytes, of buckets, chunks and rows: only one rank writes to a cache line

// Rank r sums the elements [r, r + 1) * chunk_elements of a bucket, as far as they exist.
constexpr int64_t chunk_elements(int64_t count, int64_t num_ranks, int64_t element_size) {
  const int64_t step = kAlignment / element_size;
  return ((count + num_ranks - 1) / num_ranks + step - 1) / step * step;
}

// The one-shot staging of a slot: two buffers of num_ranks rows of row_bytes, at the end of the segment. row_bytes is
// the size of the largest bucket that is summed one-shot, a multiple of kAlignment; 0 if none is.
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
