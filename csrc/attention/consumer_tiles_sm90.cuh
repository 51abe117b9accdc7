// What attention forward and backward on wgmma do with tiles in shared memory: load, clear, stage and store them.
#pragma once

#include "attention/maps_sm90.cuh"
#include "tile/products.cuh"
#include "tile/warpgroups_sm90.cuh"

namespace cuda_ext::attention::sm90 {

using namespace tile;

constexpr int kAllConsumersBarrier = 7;

// Waits for all consumers.
template <int consumers>
DEVICE void sync_consumers(Site site = {}) {
  arch::named_barrier_sync(kAllConsumersBarrier, consumers * kWarpgroup, site);
}

// Loads lines from `row` on of all pieces of a tile.
template <class Tile>
DEVICE void load_pieces(SharedAddress to, const HeadsMap& map, Barrier& full, int row, int group, int batch) {
#pragma unroll 1
  for (int piece = 0; piece < Tile::kPieces; ++piece) {
    const int coords[5] = {piece * Tile::kElements, 0, row, group * map.group_step, batch * map.batch_step};
    arch::tma_load(to + piece * Tile::kPieceSize, map.map, full, coords);
  }
}

// Sets lines [begin, end) of a tile to 0, by `threads` threads, which must be synchronised before a product reads them.
template <class Tile>
DEVICE void clear_lines(SharedAddress tile, int begin, int end, int thread, int threads) {
  constexpr int kChunks = Tile::kPieces * 8;
#pragma unroll 1
  for (int i = begin * kChunks + thread; i < end * kChunks; i += threads)
    arch::store_shared(Tile::chunk(tile, i / kChunks, i % kChunks), arch::Words4{});
  arch::fence_async_shared();
}

// The accumulators of a consumer as wgmma numbers them.
template <int tiles>
DEVICE float (&registers_of(float (&x)[1][tiles][4]))[4 * tiles] {
  return reinterpret_cast<float (&)[4 * tiles]>(x);
}

// A result (64, 16 steps), rounded, as the operand from registers of the next product.
template <class T, int steps>
DEVICE void round_operand(const float (&x)[1][2 * steps][4], uint32_t (&fragments)[steps][4]) {
#pragma unroll
  for (int step = 0; step < steps; ++step) operand_of<T>(x)(fragments[step], 0, step);
}

// result *= factor
template <int column_tiles>
DEVICE void scale(float (&result)[1][column_tiles][4], float factor) {
#pragma unroll
  for (int n = 0; n < column_tiles; ++n)
#pragma unroll
    for (int q = 0; q < 4; ++q) result[0][n][q] *= factor;
}

// Stores a consumer's fragment of 16 columns, from 16 `step` on, in its lines of a tile, from `first_line` on.
template <class Tile>
DEVICE void stage_fragment(SharedAddress tile, int first_line, int step, const uint32_t (&fragment)[4]) {
  // Lanes 8q to 8q + 7 have the lines of quadrant q, rows first, like the registers of a fragment.
  const int lane = arch::opaque_thread_index() % arch::kWarpSize;
  const int line = first_line + ConsumerThreads::index() / arch::kWarpSize * 16 + lane % 16;
  arch::stmatrix<4>(Tile::chunk(tile, line, 2 * step + lane / 16), fragment);
}

// The same for all columns of a result, rounded to the storage type.
template <class T, class Tile, int column_tiles>
DEVICE void stage_rows(SharedAddress tile, int first_line, const float (&result)[1][column_tiles][4]) {
#pragma unroll
  for (int step = 0; step < column_tiles / 2; ++step) {
    uint32_t fragment[4];
    operand_of<T>(result)(fragment, 0, step);
    stage_fragment<Tile>(tile, first_line, step, fragment);
  }
}

// Stores a consumer's staged lines by TMA, to `row` and following.
template <class Tile>
DEVICE void store_pieces(const HeadsMap& map, SharedAddress tile, int first_line, int row, int group, int batch) {
  if (ConsumerThreads::index() != 0) return;
#pragma unroll 1
  for (int piece = 0; piece < Tile::kPieces; ++piece) {
    const int to[5] = {piece * Tile::kElements, 0, row, group * map.group_step, batch * map.batch_step};
    arch::tma_store(map.map, tile + piece * Tile::kPieceSize + first_line * kPieceBytes, to);
  }
  arch::bulk_commit();
  arch::bulk_wait_read<0>();
}

// The same by threads, for the first `count` of the consumer's lines, `width` elements of each: row_at(line) points to
// the row of a line.
template <class T, class Tile, class RowAt>
DEVICE void store_lines(SharedAddress tile, int first_line, int count, int width, const RowAt& row_at) {
  constexpr int kChunks = Tile::kPieces * 8;
#pragma unroll 1
  for (int i = ConsumerThreads::index(); i < kWarpgroupRows * kChunks; i += kWarpgroup) {
    const int line = i / kChunks, chunk = i % kChunks;
    if (line >= count || chunk * 8 >= width) continue;
    T* const to = row_at(first_line + line);
    arch::store_global(to + chunk * 8, arch::load_shared<arch::Words4>(Tile::chunk(tile, first_line + line, chunk)));
  }
  ConsumerThreads::sync();
}

}  // namespace cuda_ext::attention::sm90
