// Block masks (attention.h) on the CPU: which blocks a panel of queries and a block of keys take part in, and the bits
// of those that take part in part.
#pragma once

#include <vector>

#include "attention/cpu/panels.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int32_t kNoBlock = -2;  // beside tiles and kFullBlock

// One list, as an array over the blocks of the other operand. Blocks past its end are ignored.
class ListedBlocks {
 public:
  void read(const BlockLists& lists, int64_t batch, int64_t head, int64_t block, int64_t others) {
    tiles_.assign(size_t(others), kNoBlock);
    const int32_t* const list = lists.at(batch, head, block);
    for (int64_t n = 0; n < list[1]; ++n)
      if (list[2 + 2 * n] < others) tiles_[size_t(list[2 + 2 * n])] = list[3 + 2 * n];
  }
  void clear(int64_t others) { tiles_.assign(size_t(others), kNoBlock); }
  bool has(int64_t block) const { return tiles_[size_t(block)] != kNoBlock; }
  // The block's tile, kFullBlock or kNoBlock.
  int32_t tile(int64_t block) const { return tiles_[size_t(block)]; }

 private:
  std::vector<int32_t> tiles_;
};

// The bits of a panel's queries, the same in each word of a row. `first`: its first query within the block.
inline uint32_t bits_of_panel(int64_t first, int64_t queries) {
  const uint64_t all = (uint64_t(1) << (first + queries + 7) / 8 * 2) - 1;
  return uint32_t(all >> first / 8 * 2 << first / 8 * 2);
}

// The keys [begin, end) between the first and the last that any query of the panel sees; bits: a tile of keys.
struct KeyRange {
  int64_t begin, end;
};
inline KeyRange keys_seen(const int32_t* bits, uint32_t panel) {
  const auto sees = [&](int64_t j) {
    const int32_t* const row = bits + j * kTileRowWords;
    return (uint32_t(row[0] | row[1] | row[2] | row[3]) & panel) != 0;
  };
  KeyRange range{0, kMaskBlock};
  while (range.begin < kMaskBlock && !sees(range.begin)) ++range.begin;
  while (range.end > range.begin && !sees(range.end - 1)) --range.end;
  return range;
}

// Hides the logits (keys, Vectors * lanes) whose bits are 0. bits: the row of the first key in a tile of keys; `first`:
// the panel's first query within the block, a multiple of the lanes.
template <int Vectors, class T>
__attribute__((noinline)) void apply_tile(const int32_t* bits, int64_t first, int64_t keys, T* logits) {
  constexpr int lanes = kLanes<T>;
  const Vec<T> hidden = splat(-std::numeric_limits<T>::infinity());
  const uint32_t panel = bits_of_panel(first, Vectors * lanes);
  // The bit of each lane's query, in the word that has it; 0 in the others.
  IntVec<T> own[Vectors][kTileRowWords] = {};
  for (int x = 0; x < Vectors; ++x)
    for (int l = 0; l < lanes; ++l) {
      const int query = int(first) + x * lanes + l;
      own[x][query % 8 / 2][l] = decltype(own[0][0][0] + 0)(1u << (query / 8 * 2 + query % 2));
    }
  for (int64_t j = 0; j < keys; ++j, bits += kTileRowWords, logits += Vectors * lanes) {
    if ((uint32_t(bits[0] & bits[1] & bits[2] & bits[3]) & panel) == panel) continue;
    for (int x = 0; x < Vectors; ++x) {
      IntVec<T> visible{};
      for (int w = 0; w < kTileRowWords; ++w) visible |= own[x][w] & (uint32_t(bits[w]) - IntVec<T>{});
      store(logits + x * lanes, visible != 0 ? load(logits + x * lanes) : hidden);
    }
  }
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
