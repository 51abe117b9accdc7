// Which block does what.
#pragma once

#include <algorithm>

#include "arch/thread.cuh"

namespace cuda_ext::sm80 {

struct TileIndex {
  int tile, head, batch;
};

// Tiles of rows, for each head of each sequence ("pair"). Pairs go in sections whose keys and values fit L2 together.
// Within a section all pairs' last tiles come first: where a mask is causal they have most to do, and what comes last
// should be short.
struct Schedule {
  int tiles = 0;  // of the longest sequence
  int heads = 0;
  int pairs = 0;    // heads x batch
  int section = 1;  // pairs

  DEVICE TileIndex find(int block) const {
    const int of_section = section * tiles, first = block / of_section * section, index = block % of_section;
    const int here = pairs - first < section ? pairs - first : section;
    const int pair = first + index % here;
    return {tiles - 1 - index / here, pair % heads, pair / heads};
  }
};

// How many blocks share what one block would do in `steps`: as few as come within 15 % of what the best number fills of
// a device that runs `at_once` blocks.
inline int choose_splits(int64_t blocks, int64_t at_once, int64_t steps) {
  constexpr int kMaxSplits = 64;
  if (blocks * 5 >= at_once * 4 || steps < 2) return 1;
  const auto filled = [&](int64_t splits) {
    const double waves = double(blocks * splits) / double(at_once);
    return waves / double((blocks * splits + at_once - 1) / at_once);
  };
  const int most = int(std::min<int64_t>(kMaxSplits, steps));
  double best = 0.0;
  for (int splits = 1; splits <= most; ++splits) best = std::max(best, filled(splits));
  int splits = 1;
  while (filled(splits) < 0.85 * best) ++splits;
  // Without those that would have nothing to do.
  const int64_t of_split = (steps + splits - 1) / splits;
  return int((steps + of_split - 1) / of_split);
}

// Pairs of a section whose operands, `pair_bytes` each, L2 has room for.
inline int section_of(int64_t pair_bytes, int64_t pairs) {
  constexpr int64_t kSectionBytes = 32 << 20;
  return int(std::clamp<int64_t>(kSectionBytes / std::max<int64_t>(1, pair_bytes), 1, std::max<int64_t>(1, pairs)));
}

}  // namespace cuda_ext::sm80
