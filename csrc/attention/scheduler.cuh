// The assignment of tiles to blocks.
#pragma once

#include "arch/thread.cuh"
#include "attention/attention.h"

namespace cuda_ext::attention {

struct TileIndex {
  int tile, head, batch;
};

// The order of tiles, for each head of each sequence (head_batch). These are processed in sections whose keys and
// values fit in L2 together. Within a section the last tiles of all come first: with a causal mask they have the most
// work, and the shortest tiles should come last.
struct Schedule {
  int tiles = 0;  // of the longest sequence
  int heads = 0;
  int head_batches = 0;  // heads x batch
  int section = 1;       // head_batches

  DEVICE TileIndex find(int block) const {
    const int section_tiles = section * tiles;
    const int first = block / section_tiles * section, index = block % section_tiles;
    const int here = head_batches - first < section ? head_batches - first : section;
    const int head_batch = first + index % here;
    return {tiles - 1 - index / here, head_batch % heads, head_batch / heads};
  }
};

constexpr int kShortestPart = 4;  // blocks of a part of a list
constexpr int kMaxSplits = 128;   // that attention_combine can add up

// Among how many blocks to divide the `steps` of one block, on a device that runs `at_once` blocks concurrently: the
// fewest that fill the device to within 15 % of the best number.
inline int choose_splits(int64_t blocks, int64_t at_once, int64_t steps) {
  constexpr int kMostSplits = 64;
  static_assert(kMostSplits <= kMaxSplits);
  if (blocks * 5 >= at_once * 4 || steps < 2) return 1;
  const auto filled = [&](int64_t splits) {
    const double waves = double(blocks * splits) / double(at_once);
    return waves / double((blocks * splits + at_once - 1) / at_once);
  };
  double best = 0.0;
  for (int splits = 1; splits <= kMostSplits && splits <= steps; ++splits)
    if (filled(splits) > best) best = filled(splits);
  int splits = 1;
  while (filled(splits) < 0.85 * best) ++splits;
  // Without empty splits.
  const int64_t split_steps = (steps + splits - 1) / splits;
  return int((steps + split_steps - 1) / split_steps);
}

// Of each head of each sequence with a block mask, the tiles with the longest lists, if several blocks are there for
// each of them: divided_among (block_lists.cuh) tells how many have a part of a list. In the workspace tile n of these
// is in slot(head_batch, n).
struct LongLists {
  int tiles = 0;       // of each head
  int most_parts = 1;  // of a list
  int rows = 0;        // of a tile
  int slots = 0;       // tiles of all heads and sequences

  HOST_DEVICE int slot(int head_batch, int n) const { return head_batch * tiles + n; }
  int extra_blocks() const { return tiles * (most_parts - 1); }  // of each head
};

// For lists of `list_blocks` rows of a mask, and tiles of `rows` rows, on a device that runs `at_once` blocks
// concurrently. With many heads the other tiles hide a long one.
inline LongLists choose_long_lists(int64_t list_blocks, int rows, int64_t head_batches, int64_t at_once) {
  constexpr int64_t kMostParts = 8;
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const int64_t parts = least(kMostParts, list_blocks / kShortestPart);
  if (parts < 2 || head_batches == 0 || at_once < 2 * head_batches) return {};
  constexpr int64_t kListsOfOne = 32;  // of a head; one of so many can be divided
  const int tiles = int((list_blocks + kListsOfOne - 1) / kListsOfOne * (kMaskBlock / rows));
  return {tiles, int(least(parts, at_once / head_batches)), rows, int(head_batches) * tiles};
}

// The number of head_batches in a section, at least 1, whose operands of `bytes` each should fit in L2 together.
inline int section_size(int64_t bytes, int64_t head_batches) {
  constexpr int64_t kSectionBytes = 32 << 20;
  const int64_t fitting = bytes > 0 ? kSectionBytes / bytes : head_batches;
  const int64_t section = fitting < head_batches ? fitting : head_batches;
  return section > 1 ? int(section) : 1;
}

}  // namespace cuda_ext::attention
