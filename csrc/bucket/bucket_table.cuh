// The table of a bucket's entries: its layout on the device, the parameters that transfer it, and the search for an
// entry.
#pragma once

#include "arch/memory.cuh"
#include "arch/warp.cuh"
#include "bucket/bucket.h"

namespace cuda_ext::bucket {

// An entry in the layout that kernels read; a search reads only the ends.
struct alignas(16) TableEntry {
  void* data;
  int64_t begin;  // elements of the bucket
  int64_t end;
  Dtype dtype;
};

// Entries as kernel parameters, of which 4 KiB fit on every GPU and driver, and 32764 bytes at most.
template <int capacity>
struct TableChunk {
  TableEntry* target;
  uint32_t* counter;
  int count;
  TableEntry entries[capacity];
};
constexpr int kSmallChunk = 126, kLargeChunk = 1022;
static_assert(sizeof(TableChunk<kSmallChunk>) <= 4096 && sizeof(TableChunk<kLargeChunk>) <= 32764);

// The parameters of a move. Table has end(i) and entry(i).
template <class Table>
struct Move {
  Table table;
  int64_t num_entries;
  void* bucket;  // (count,); not used for stats
  int64_t count;
  float scale;
};

struct GlobalTable {
  const TableEntry* entries;
  DEVICE int64_t end(int64_t i) const { return arch::load_global<int64_t>(&entries[i].end); }
  DEVICE TableEntry entry(int64_t i) const {
    struct {
      arch::Words4 low, high;
    } const words{arch::load_global<arch::Words4>(entries + i), arch::load_global<arch::Words4>(&entries[i].end)};
    return __builtin_bit_cast(TableEntry, words);
  }
};
struct SharedTable {
  const TableEntry* entries;
  DEVICE int64_t end(int64_t i) const { return entries[i].end; }
  DEVICE TableEntry entry(int64_t i) const { return entries[i]; }
};

using arch::kWarpSize;

DEVICE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// How many of the lowest bits are set, the others being clear.
DEVICE int count_low_bits(uint32_t bits) {
  int count = 0;
#pragma unroll
  for (int half = 16; half > 0; half /= 2)
    if (bits >> count >> (half - 1) & 1) count += half;
  return count + int(bits >> 31);  // five halvings count to 31
}

// The first entry from `entry` on that ends after `position`, or num_entries. Called by all lanes of a warp. Each lane
// tests one of the next 32 entries, which suffices except in the first search of a region; then the end of one 32nd of
// the rest.
template <class Table>
DEVICE int64_t find_entry(const Move<Table>& params, int64_t entry, int64_t position) {
  int64_t last = params.num_entries;  // the answer is in [entry, last]
  int64_t stride = 1;
  while (entry < last) {
    const int64_t probe = entry + (arch::lane_index() + 1) * stride - 1;
    const bool passed = probe < last && params.table.end(probe) <= position;
    const int parts = count_low_bits(arch::ballot(passed));
    entry += parts * stride;
    if (parts < kWarpSize) {
      if (stride == 1) return entry;
      last = smaller(entry + stride - 1, last);
    }
    stride = (last - entry + kWarpSize - 1) / kWarpSize;
  }
  return entry;
}

}  // namespace cuda_ext::bucket
