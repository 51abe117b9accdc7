// A product's result on its way out of registers, as WarpTiles deals it to threads.
#pragma once

#include "tile/products.cuh"

namespace cuda_ext::sm80 {

// Of a tile in the workspace: element i of all threads, then the next.
template <class Tiles, class Float, class F>
DEVICE void for_elements(Float* tile, const F& f) {
  Float* at = tile + arch::thread_index();
#pragma unroll
  for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < Tiles::kColumnTiles; ++n)
#pragma unroll
      for (int q = 0; q < 4; ++q, at += Tiles::kThreads) f(at, m, n, q);
}

// Puts factor * x into a tile in shared memory, in storage precision.
template <class Tiles, class Tile>
DEVICE void stage(arch::SharedAddress tile, const typename Tiles::Accumulators& x, float factor) {
  // All addresses come from one, by numbers that the compiler knows, where they are used: kept, they would take the
  // registers that the loop has not.
  const int thread = arch::thread_index_anew();
  const arch::SharedAddress first =
      tile + Tile::offset(Tiles::row(0, 0, thread), Tiles::first_column(thread) / 8) + thread % 4 * 4;
#pragma unroll
  for (int n = 0; n < Tiles::kColumnTiles; ++n) {
    constexpr int kLineBytes = Tile::kLineBytes;
    const int chunk = Tiles::column_step(n) / 8;
    const arch::SharedAddress at = (first ^ chunk % 8 * 16) + chunk / 8 * 128;
#pragma unroll
    for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        arch::store_shared(
            at + (m * 16 + half * 8) * kLineBytes,
            arch::pack<typename Tile::Element>(factor * x[m][n][2 * half], factor * x[m][n][2 * half + 1]));
  }
}

// Writes the first `count` lines of a tile, `width` elements of each, to lines that are `stride` elements apart.
template <class Tile, int threads>
DEVICE void write_lines(arch::SharedAddress tile, typename Tile::Element* lines, int64_t stride, int count, int width) {
#pragma unroll 1
  for (int index = arch::thread_index(); index < Tile::kLines * Tile::kChunks; index += threads) {
    const int line = index / Tile::kChunks, chunk = index % Tile::kChunks;
    if (line >= count || chunk * Tile::kElements >= width) continue;
    arch::store_global(lines + line * stride + chunk * Tile::kElements,
                       arch::load_shared<arch::Words4>(tile + Tile::offset(line, chunk)));
  }
}

}  // namespace cuda_ext::sm80
