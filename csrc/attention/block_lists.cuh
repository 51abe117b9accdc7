// Block masks (attention.h) in kernels: the tiles that a list names, and the bits of a tile of scores.
#pragma once

#include "arch/memory.cuh"
#include "attention/mask.cuh"
#include "attention/scheduler.cuh"
#include "tile/shared_struct.cuh"

namespace cuda_ext::attention {

DEVICE const int32_t* list_at(const BlockLists& lists, int batch, int head, int block) {
  return lists.data + batch * lists.batch_stride + head * lists.head_stride + block * lists.block_stride;
}

// The tile of `rows` rows with the n-th longest list.
DEVICE int longest_tile(const BlockLists& lists, int batch, int head, int n, int rows) {
  const int tiles = int(kMaskBlock) / rows;  // of a block
  return arch::load_global<int32_t>(list_at(lists, batch, head, n / tiles)) * tiles + n % tiles;
}

// Among how many blocks the list of the tile with the n-th longest is divided: as many as keep a part as long as the
// longest list that is never divided.
DEVICE int divided_among(const BlockLists& lists, int batch, int head, const LongLists& long_lists, int n) {
  const auto length = [&](int n) {
    return arch::load_global<int32_t>(list_at(lists, batch, head, longest_tile(lists, batch, head, n, kMaskBlock)) + 1);
  };
  const int tiles = int(kMaskBlock) / long_lists.rows;
  const int other = length(long_lists.tiles / tiles);
  const int parts = length(n / tiles) / (other > kShortestPart ? other : kShortestPart);
  return parts < 1 ? 1 : parts < long_lists.most_parts ? parts : long_lists.most_parts;
}

// Which of the parts of a tile's list a block has.
struct alignas(8) Part {
  int index = 0;
  int slot = -1;  // of LongLists; none if there is only one part
};

// The slot of a block's part; negative: its list has one part.
template <class Kernel, class Task>
DEVICE int slot_of(const Task& task) {
  if constexpr (Kernel::kWithOptions) return tile::load_struct(task.part).slot;
  return -1;
}

// Whether a block has a part of the loop of its tile.
template <class Kernel, class Plan, class Task>
DEVICE bool is_part(const Plan& plan, const Task& task) {
  return plan.splits > 1 || slot_of<Kernel>(task) >= 0;
}

// What a block has of the list of a tile.
struct ListPart {
  int tile = 0;
  int parts = 1;
  Part part;  // nothing, if its index is not below `parts`

  // Block n of a head of a sequence, in the order in which they start; `rows` of a tile.
  DEVICE static ListPart find(const BlockLists& lists, const LongLists& long_lists, int batch, int head, int heads,
                              int n, int rows) {
    ListPart found;
    const int long_blocks = long_lists.tiles * long_lists.most_parts;
    if (n >= long_blocks) {
      n -= long_blocks - long_lists.tiles;
    } else {
      found.part.index = n % long_lists.most_parts;
      n /= long_lists.most_parts;
      found.parts = divided_among(lists, batch, head, long_lists, n);
      if (found.parts > 1) found.part.slot = long_lists.slot(batch * heads + head, n);
    }
    found.tile = longest_tile(lists, batch, head, n, rows);
    return found;
  }
};

// A list as steps of a kernel with tiles of `rows` rows, several for each block.
template <int rows>
struct ListedTiles {
  static constexpr unsigned kParts = kMaskBlock / rows;
  static_assert(kParts * rows == kMaskBlock);
  const int32_t* list;

  DEVICE int steps() const { return arch::load_global<int32_t>(list + 1) * int(kParts); }
  DEVICE int tile(unsigned step) const { return int(word(step, 0) * kParts + step % kParts); }
  DEVICE int bits(unsigned step) const { return word(step, 1); }  // a tile of BlockMask::tiles, or kFullBlock
  DEVICE static int first_row(unsigned step) { return int(step % kParts) * rows; }  // within the block

  // How many of its tiles are among these.
  DEVICE int count(const Span& tiles) const {
    int count = 0;
#pragma unroll 1
    for (int step = steps() - 1; step >= 0; --step)
      if (tiles.has(tile(step))) ++count;
    return count;
  }

 private:
  DEVICE int word(unsigned step, int i) const { return arch::load_global<int32_t>(list + 2 + step / kParts * 2 + i); }
};

// A thread's bits of a tile of scores, one word for each of its rows. Tiles: the WarpTiles of the scores.
template <class Tiles>
struct RowBits {
  bool is_full;
  uint32_t of[Tiles::kRowTiles][2];

  // bits: of a tile (128, 128), or kFullBlock. The scores begin at (first_row, first_column) of it.
  DEVICE RowBits(const int32_t* tiles, int bits, int first_row, int first_column, int thread)
      : is_full(bits == kFullBlock) {
    const int column = first_column + Tiles::column(thread);
#pragma unroll
    for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = bits * kMaskBlock + first_row + Tiles::row(m, half, thread);
        of[m][half] = is_full
                          ? ~uint32_t(0)
                          : arch::load_global<uint32_t>(tiles + row * kTileRowWords + column % 8 / 2) >> column / 8 * 2;
      }
  }

  // Of the element of Accumulators at [m][n][2 half + e].
  DEVICE bool has(int m, int half, int n, int e) const {
    return (of[m][half] >> (Tiles::column_step(n) / 4 + e) & 1) != 0;
  }
};

// Sets hidden scores to `hidden`.
template <class Tiles>
DEVICE void apply_bits(typename Tiles::Accumulators& s, const RowBits<Tiles>& bits, float hidden = -INFINITY) {
  if (bits.is_full) return;
#pragma unroll
  for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < Tiles::kColumnTiles; ++n)
#pragma unroll
      for (int q = 0; q < 4; ++q)
        if (!bits.has(m, q / 2, n, q % 2)) s[m][n][q] = hidden;
}

}  // namespace cuda_ext::attention
