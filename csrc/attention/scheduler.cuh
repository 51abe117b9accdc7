// Which block does what.
#pragma once

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

}  // namespace cuda_ext::sm80
